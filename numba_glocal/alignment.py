"""The search schedule, and one session driven over one chunk of particles. It exists once, above the backends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .backends.protocols import ParticleBatch, PoseEstimates, SearchLevel, SearchSession, as_candidates, unusable
from .noise import ResidualPower
from .sampling import local_rotations

SEEDS = 4
"""Candidates kept between levels that do not reach the full band."""

_FINE_SHELLS = 2
_BAND_FACTOR = 1.2
_SHIFT_FACTOR = 0.8
_LOWEST_BAND = 6.0


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What one iteration searches.

    Attributes
    ----------
    increment_deg : float
        Angular step of the first level.
    shells : int
        Steps to either side at the first level.
    shift_radius_angst : float
        Ball of shifts tried at the first level.
    k_max : float
        Full band, 1 / box.
    """

    increment_deg: float
    shells: int
    shift_radius_angst: float
    k_max: float


def shift_step_angst(k_max: float, box_size: int, pixel_size_angst: float) -> float:
    """Trial shifts this far apart keep at least 0.58 to 0.84 of the peak (bands 8 to 29) at the worst place between them."""
    return _SHIFT_FACTOR * box_size / (2.0 * k_max) * pixel_size_angst


def angular_resolution_deg(k_max: float, box_size: int, radius_voxels: float) -> float:
    """Rotation that turns the phase of the band's edge at the particle's rim by one radian."""
    return math.degrees(box_size / (2.0 * math.pi * k_max * radius_voxels))


def search_levels(plan: SearchPlan, box_size: int, pixel_size_angst: float, radius_voxels: float) -> tuple[SearchLevel, ...]:
    """Coarse to fine: the band of a level is what its angular step can resolve; each next level halves the step around the seeds kept.

    Parameters
    ----------
    plan : SearchPlan
    box_size : int
        Of the worked grid.
    pixel_size_angst : float
        Of the worked grid.
    radius_voxels : float
        Of the particle.

    Returns
    -------
    tuple of SearchLevel
        The last one uses the full band and keeps one candidate.
    """
    levels: list[SearchLevel] = []
    step, shells, radius = plan.increment_deg, plan.shells, plan.shift_radius_angst
    while True:
        band = min(plan.k_max, max(_LOWEST_BAND, _BAND_FACTOR * box_size / (2.0 * math.pi * radius_voxels * math.radians(step))))
        band = float(max(2.0, math.floor(band)))
        last = band >= math.floor(plan.k_max)
        levels.append(
            SearchLevel(
                local_rotations(step, shells),
                radius,
                shift_step_angst(band, box_size, pixel_size_angst),
                band,
                1 if last else SEEDS,
                1.1 * step,
            )
        )
        if last:
            return tuple(levels)
        step, shells = step / 2.0, _FINE_SHELLS
        radius = max(shift_step_angst(band, box_size, pixel_size_angst), pixel_size_angst)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What aligning one chunk gives.

    Attributes
    ----------
    rotations : (p, 3, 3) float64, shifts_angst : (p, 3) float64
        Poses after the task; the starts where nothing was searched or refined, and for bad particles.
    estimates : PoseEstimates or None
        When refined.
    residuals : ResidualPower
        At those poses.
    bad : list of (index, reason)
    """

    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    estimates: PoseEstimates | None
    residuals: ResidualPower
    bad: list[tuple[int, str]]


def align_chunk(
    session: SearchSession,
    particles: ParticleBatch,
    rotations: NDArray[np.float64],
    shifts_angst: NDArray[np.float64],
    anchor_angst: NDArray[np.float64],
    levels: tuple[SearchLevel, ...],
    refine: bool,
) -> ChunkResult:
    """Searches level by level, refines, and collects residuals at the poses found.

    Parameters
    ----------
    session : SearchSession
    particles : ParticleBatch
    rotations : (p, 3, 3), shifts_angst : (p, 3)
        Starts.
    anchor_angst : (p, 3)
        Centres of the hard shift limit.
    levels : tuple of SearchLevel
        Empty: no search.
    refine : bool
        Whether to end with Gauss-Newton.
    """
    bad = session.load(particles)
    candidates = as_candidates(rotations, shifts_angst)
    candidates.scores[unusable(bad, len(particles.keys))] = -np.inf
    for level in levels:
        candidates = session.search(candidates, anchor_angst, level)
    found = candidates.scores[:, 0] > -np.inf
    estimates = None
    if refine:
        estimates = session.refine(candidates, anchor_angst)
        new_rotations, new_shifts = estimates.rotations, estimates.shifts_angst
    else:
        new_rotations, new_shifts = candidates.rotations[:, 0], candidates.shifts_angst[:, 0]
    out_rotations = np.where(found[:, None, None], new_rotations, rotations)
    out_shifts = np.where(found[:, None], new_shifts, shifts_angst)
    residuals = session.residuals(out_rotations, out_shifts)
    session.unload()
    return ChunkResult(out_rotations, out_shifts, estimates, residuals, bad)
