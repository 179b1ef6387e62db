"""The search schedule, and one session driven over one chunk of particles. It exists once, above the backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .backends.newton import MAX_STEPS
from .backends.protocols import Candidates, ParticleBatch, PoseEstimates, SearchLevel, SearchSession, as_candidates, unusable
from .noise import GroupResiduals, NoiseModels, ResidualPower, add_residuals, held_in_average
from .pose_prior import PosePrior
from .sampling import local_rotations, rotations_for_increment
from .symmetry import angle_modulo_deg, group_rotations, in_asymmetric_unit

SEEDS = 4
"""Candidates kept between levels that do not reach the full band."""

GLOBAL_SEEDS = (12, 6)
"""Candidates kept after the first and the second level of a global search, which still hold several modes."""

MODES = 2
"""Candidates of the last level that are refined: the pose, and the best one that may be another mode."""

_MODES_APART = 3.0
"""Modes are this far apart, in units of what the band can tell; nearer ones are slopes of one peak."""

UNLIKELY = 25.0
"""A candidate whose log-likelihood is so much below the best one's is not followed (its weight is 1e-11)."""

_FINE_SHELLS = 2
_REFINEMENT_REACH = 1.5
"""Angular step from which the refinement finds the peak, in units of what the band can tell."""
_BAND_FACTOR = 1.2
_SHIFT_FACTOR = 0.8
_LOWEST_BAND = 6.0
_SEEDS_PER_COPY = 2
"""Candidates kept for each copy of a relaxed symmetry: its copies score alike until the band tells them apart."""
_GLOBAL_INCREMENT_DEG = 15.0
_GLOBAL_BAND_FACTOR, _GLOBAL_STEP_FACTOR = 5.5, 4.5
_WIDEST_INCREMENT_DEG = 25.0


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
    everywhere : bool
        A global search: all orientations, whatever the start's; increment and shells say nothing then.
    symmetry : str
        Point group of the reference. A global search leaves out orientations that it makes equal to others.
    rotations : (a, 3, 3) float64, optional
        First level of a global search in place of an even cover; `increment_deg` is then their spacing.
    relaxed : str
        Point group whose copies of each start are searched as well, against a reference that does not have it.
    """

    increment_deg: float
    shells: int
    shift_radius_angst: float
    k_max: float
    everywhere: bool = False
    symmetry: str = "C1"
    rotations: NDArray[np.float64] | None = field(default=None, compare=False)
    relaxed: str = "C1"


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
        The last one uses the full band and keeps `MODES` candidates, far enough apart to be modes.
    """
    levels: list[SearchLevel] = []
    step, shells, radius = plan.increment_deg, plan.shells, plan.shift_radius_angst
    lowest, finest = _LOWEST_BAND, math.inf
    listed = plan.rotations
    if plan.everywhere:
        step, lowest = global_start(plan.k_max, box_size, radius_voxels, None if listed is None else plan.increment_deg)
        # the refinement needs a start within reach, also where all levels have one band
        finest = _REFINEMENT_REACH * angular_resolution_deg(math.floor(plan.k_max), box_size, radius_voxels)
    most = max(SEEDS, _SEEDS_PER_COPY * len(group_rotations(plan.relaxed))) if plan.relaxed != "C1" else SEEDS
    while True:
        band = min(plan.k_max, max(lowest, _BAND_FACTOR * angular_resolution_deg(1.0, box_size, radius_voxels) / step))
        band = float(max(2.0, math.floor(band)))
        last = band >= math.floor(plan.k_max) and step <= finest
        seeds = GLOBAL_SEEDS[len(levels)] if plan.everywhere and len(levels) < len(GLOBAL_SEEDS) else most
        levels.append(
            SearchLevel(
                local_rotations(step, shells) if levels or not plan.everywhere else all_rotations(step, plan.symmetry) if listed is None else listed,
                radius,
                shift_step_angst(band, box_size, pixel_size_angst),
                band,
                MODES if last else seeds,
                max(1.1 * step, _MODES_APART * angular_resolution_deg(band, box_size, radius_voxels)) if last else 1.1 * step,
            )
        )
        if last:
            return tuple(levels)
        step, shells = step / 2.0, _FINE_SHELLS
        radius = max(shift_step_angst(band, box_size, pixel_size_angst), pixel_size_angst)


@lru_cache(maxsize=4)
def all_rotations(increment_deg: float, symmetry: str = "C1") -> NDArray[np.float64]:
    """An even cover of all orientations that a symmetry tells apart, (a, 3, 3): one in as many as the group has elements.

    Of the equal rotations ``L g`` the cover holds the part around the one nearest to the identity.
    """
    rotations = rotations_for_increment(increment_deg)
    rotations = rotations[in_asymmetric_unit(rotations, symmetry)]
    rotations.flags.writeable = False
    return rotations


def global_start(k_max: float, box_size: int, radius_voxels: float, spacing_deg: float | None = None) -> tuple[float, float]:
    """Angular step and band of a global search's first level.

    15 degrees (4,400 rotations) and the band at which that is 5.5 times what the band can tell; where the start map ends before, its own
    band and a wider step. Finer steps found no more on made and real particles, steps of 20 degrees at band 8 a few less.

    Parameters
    ----------
    k_max : float
    box_size : int
    radius_voxels : float
    spacing_deg : float, optional
        Of orientations that are given; then this is the step, and the band that which goes with it.
    """
    step = _GLOBAL_INCREMENT_DEG if spacing_deg is None else spacing_deg
    widest = _GLOBAL_BAND_FACTOR * angular_resolution_deg(1.0, box_size, radius_voxels) / step
    band = float(max(2.0, math.floor(min(k_max, max(_LOWEST_BAND, widest)))))
    if spacing_deg is not None:
        return spacing_deg, band
    return min(_WIDEST_INCREMENT_DEG, max(_GLOBAL_INCREMENT_DEG, _GLOBAL_STEP_FACTOR * angular_resolution_deg(band, box_size, radius_voxels))), band


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What aligning one chunk gives.

    Attributes
    ----------
    rotations : (p, 3, 3) float64, shifts_angst : (p, 3) float64
        Poses after the task; the starts where nothing was searched or refined, and for bad particles.
    estimates : PoseEstimates or None
        When refined.
    residuals : dict of group to ResidualPower
        At those poses.
    bad : list of (index, reason)
    other_mode : (p, 2) float64
        What the other mode adds to the variances along one axis, squared radians and squared Angstrom; 0 where there is none, or no search.
    """

    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    estimates: PoseEstimates | None
    residuals: GroupResiduals
    bad: list[tuple[int, str]]
    other_mode: NDArray[np.float64]


def align_chunk(
    session: SearchSession,
    particles: ParticleBatch,
    rotations: NDArray[np.float64],
    shifts_angst: NDArray[np.float64],
    anchor_angst: NDArray[np.float64],
    levels: tuple[SearchLevel, ...],
    refine: bool,
    plan: SearchPlan | None = None,
    evidence: float = 0.0,
    prior: PosePrior | None = None,
    most_steps: int = MAX_STEPS,
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
    plan : SearchPlan, optional
        What the levels were made from. Where it goes everywhere, the first level starts from no orientation, with the shifts of the starts,
        and candidates that the symmetry makes equal to a better one are dropped; where it relaxes a symmetry, from all copies of the starts.
    evidence : float
        Log-likelihood that one unit of score stands for; 0 where scores are no likelihoods. Else unlikely candidates are dropped: between the
        levels of a search with several modes, and before the refinement of any.
    prior : PosePrior, optional
    most_steps : int
        Of Gauss-Newton; 0 gives the sums and scores of the poses as they are.
    """
    bad = session.load(particles, prior)
    usable = ~unusable(bad, len(particles.keys))
    starts = rotations, shifts_angst, anchor_angst
    out_rotations, out_shifts, estimates, other_mode = _find_poses(session, usable, *starts, levels, refine, plan, evidence, most_steps)
    residuals = session.residuals(out_rotations, out_shifts)
    session.unload()
    return ChunkResult(out_rotations, out_shifts, estimates, residuals, bad, other_mode)


def _find_poses(
    session: SearchSession,
    usable: NDArray[np.bool_],
    rotations: NDArray[np.float64],
    shifts_angst: NDArray[np.float64],
    anchor_angst: NDArray[np.float64],
    levels: tuple[SearchLevel, ...],
    refine: bool,
    plan: SearchPlan | None,
    evidence: float,
    most_steps: int = MAX_STEPS,
) -> tuple[NDArray[np.float64], NDArray[np.float64], PoseEstimates | None, NDArray[np.float64]]:
    """Poses of the particles that a session has loaded, level by level and refined; and `ChunkResult.other_mode`."""
    everywhere = plan is not None and plan.everywhere
    candidates = as_candidates(np.broadcast_to(np.eye(3), rotations.shape) if everywhere else rotations, shifts_angst)
    relaxes = plan is not None and plan.relaxed != "C1"
    if plan is not None and levels and relaxes:
        candidates = all_copies(candidates, plan.relaxed)
    candidates.scores[~usable] = -np.inf
    for number, level in enumerate(levels):
        if plan is not None and number > 0 and (everywhere or relaxes):
            candidates = drop_copies(drop_unlikely(candidates, evidence), plan.symmetry, levels[number - 1].separation_deg)
        candidates = session.search(candidates, anchor_angst, level)
    if levels:
        candidates = drop_copies(drop_unlikely(candidates, evidence), "C1" if plan is None else plan.symmetry, levels[-1].separation_deg)
    found = candidates.scores[:, 0] > -np.inf
    estimates, other_mode = None, np.zeros((len(rotations), 2))
    if refine:
        estimates = session.refine(candidates, anchor_angst, most_steps)
        new_rotations, new_shifts = estimates.rotations, estimates.shifts_angst
        if levels and evidence > 0.0:
            group = "C1" if plan is None else plan.relaxed if relaxes else plan.symmetry
            other_mode = other_modes(candidates, estimates, group)
    else:
        new_rotations, new_shifts = candidates.rotations[:, 0], candidates.shifts_angst[:, 0]
    return np.where(found[:, None, None], new_rotations, rotations), np.where(found[:, None], new_shifts, shifts_angst), estimates, other_mode


def other_modes(candidates: Candidates, estimates: PoseEstimates, symmetry: str) -> NDArray[np.float64]:
    """Mean square distance along one axis (squared radians, squared Angstrom) of a particle's true pose from the one found, by its other mode.

    Parameters
    ----------
    candidates : Candidates
        Those that were refined; of the two the one farther from the pose found stands for the other mode, as it was before the refinement.
    estimates : PoseEstimates
        `margin` gives the other mode the probability ``1 / (1 + exp(margin))``.
    symmetry : str
        Of the reference, or the one that is relaxed: modes that it makes equal are no distance apart.

    Returns
    -------
    (p, 2) float64
    """
    out = np.zeros((len(estimates.rotations), 2))
    known = np.isfinite(estimates.margin)
    if candidates.scores.shape[1] < 2 or not known.any():
        return out
    found = estimates.rotations[known, None]
    angle = np.deg2rad(angle_modulo_deg(found, candidates.rotations[known, :2], symmetry))
    distance = np.linalg.norm(candidates.shifts_angst[known, :2] - estimates.shifts_angst[known, None], axis=-1)
    square = np.stack([angle**2, distance**2], axis=-1)
    farther = np.argmax(angle, axis=1)
    probability = 1.0 / (1.0 + np.exp(np.clip(estimates.margin[known], 0.0, 700.0)))
    out[known] = probability[:, None] * np.take_along_axis(square, farther[:, None, None], axis=1)[:, 0] / 3.0
    return out


@dataclass(frozen=True, slots=True)
class ClassesResult:
    """What comparing one chunk with every class gives.

    Attributes
    ----------
    rotations : (c, p, 3, 3) float64, shifts_angst : (c, p, 3) float64
        Poses in each class.
    scores, log_likelihood : (c, p) float64
        -inf where nothing was refined, and for bad particles.
    variances : (c, p, 6) float64
        Of rotation vector (radians) and shift (Angstrom).
    best : (p,) int64
        Class of each particle: the one given, or the one that won.
    residuals : GroupResiduals
        Each particle against its own class.
    numerator, denominator : (p,) float64
        num and den2 there; 0 where nothing was refined.
    held_weight, held_power : (p, shells) float64
        What each particle brings to an average; see `noise.held_in_average`.
    bad : list of (index, reason)
    """

    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    scores: NDArray[np.float64]
    log_likelihood: NDArray[np.float64]
    variances: NDArray[np.float64]
    best: NDArray[np.int64]
    residuals: GroupResiduals
    numerator: NDArray[np.float64]
    denominator: NDArray[np.float64]
    held_weight: NDArray[np.float64]
    held_power: NDArray[np.float64]
    bad: list[tuple[int, str]]


def align_classes(
    open_session: Callable[[int], SearchSession],
    particles: ParticleBatch,
    rotations: NDArray[np.float64],
    shifts_angst: NDArray[np.float64],
    anchor_angst: NDArray[np.float64],
    levels: tuple[SearchLevel, ...],
    refine: bool,
    given: NDArray[np.int64],
    handicap: NDArray[np.float64],
    noise: NoiseModels,
    by_likelihood: bool,
    plan: SearchPlan | None = None,
    evidence: float = 0.0,
    prior: PosePrior | None = None,
) -> ClassesResult:
    """Every particle against every class, one class after the other; what was prepared of a particle serves all of them.

    Parameters
    ----------
    open_session : callable
        ``open_session(c)``: the session of class c. It need not outlive the next call.
    particles : ParticleBatch
    rotations : (c, p, 3, 3), shifts_angst : (c, p, 3)
        Starts in each class.
    anchor_angst, levels, plan, evidence, prior
        As `align_chunk`.
    refine : bool
        Without it nothing is compared: residuals are taken at the starts, against the classes `given`.
    given : (p,) int64
    handicap : (c, p) float64
        What noise in a class's map adds to a particle's log-likelihood there; taken off before classes are compared.
    noise : tuple of NoiseModel
        Of the sessions' groups.
    by_likelihood : bool
        Whether the log-likelihood decides, else the score.
    """
    count, size = len(rotations), len(particles.keys)
    out_rotations, out_shifts = rotations.copy(), shifts_angst.copy()
    scores, likelihood, variances = np.full((count, size), -np.inf), np.full((count, size), -np.inf), np.full((count, size, 6), np.nan)
    numerator, denominator = np.zeros((count, size)), np.zeros((count, size))
    bad: list[tuple[int, str]] = []
    best = given.copy()
    if refine:
        for c in range(count):
            session = open_session(c)
            bad = session.load(particles, prior)
            usable = ~unusable(bad, size)
            out_rotations[c], out_shifts[c], estimates, _ = _find_poses(
                session, usable, rotations[c], shifts_angst[c], anchor_angst, levels, True, plan, evidence
            )
            session.unload()
            assert estimates is not None
            ended = usable & np.isfinite(estimates.scores) & np.isfinite(estimates.log_likelihood)
            scores[c, ended], likelihood[c, ended] = estimates.scores[ended], estimates.log_likelihood[ended]
            variances[c] = np.diagonal(estimates.covariances, axis1=1, axis2=2)
            numerator[c], denominator[c] = estimates.numerator, estimates.denominator
        best = np.argmax(likelihood - handicap if by_likelihood else scores, axis=0).astype(np.int64)
    groups = particles.groups_of(noise)
    shells = len(noise[0].sigma2)
    residuals: GroupResiduals = {}
    held_weight, held_power = np.zeros((size, shells)), np.zeros((size, shells))
    for c in range(count):
        rows = np.flatnonzero(best == c)
        if not len(rows):
            continue
        session = open_session(c)
        left_out = session.load(particles.take(rows.tolist()))
        each, signed = session.residuals_each(out_rotations[c, rows], out_shifts[c, rows])
        session.unload()
        for group in np.unique(groups[rows]):
            own = groups[rows] == group
            add_residuals(residuals, {int(group): ResidualPower(each.power[own].sum(0), each.count[own].sum(0), each.weight_sum[own].sum(0))})
        held_weight[rows], held_power[rows] = held_in_average(each, signed, noise, groups[rows])
        if not refine:
            bad += [(int(rows[index]), reason) for index, reason in left_out]
    every = np.arange(size)
    sums = numerator[best, every], denominator[best, every]
    return ClassesResult(out_rotations, out_shifts, scores, likelihood, variances, best, residuals, *sums, held_weight, held_power, sorted(bad))


def all_copies(candidates: Candidates, group: str) -> Candidates:
    """Every candidate ``(R, s)`` as ``(R g, s)`` for all g of a group."""
    elements = group_rotations(group)
    rotations = (candidates.rotations[:, :, None] @ elements).reshape(len(candidates), -1, 3, 3)
    return Candidates(rotations, np.repeat(candidates.shifts_angst, len(elements), axis=1), np.repeat(candidates.scores, len(elements), axis=1))


def drop_unlikely(candidates: Candidates, evidence: float) -> Candidates:
    """Without those whose weight, by the log-likelihood ``evidence * score``, is nothing beside the best one's."""
    if evidence <= 0.0 or candidates.scores.shape[1] == 1:
        return candidates
    # of the best one's: where a particle has no candidate at all, none is left either
    least = candidates.scores.max(axis=1, keepdims=True) - UNLIKELY / evidence
    return replace(candidates, scores=np.where(candidates.scores < least, -np.inf, candidates.scores))


def drop_copies(candidates: Candidates, symmetry: str, separation_deg: float) -> Candidates:
    """Without those that the symmetry makes (nearly) equal to a better one: seeds are modes, not copies of one.

    Parameters
    ----------
    candidates : Candidates
        Best first.
    symmetry : str
    separation_deg : float
        Candidates nearer than this, modulo the group, are the same.
    """
    group = group_rotations(symmetry)
    seeds = candidates.scores.shape[1]
    if len(group) == 1 or seeds == 1:
        return candidates
    scores = candidates.scores.copy()
    same = 1.0 + 2.0 * math.cos(math.radians(separation_deg))  # the trace of a rotation by that angle
    elements = group.reshape(len(group), 9).T
    for better in range(seeds - 1):
        # trace((R_better g)^T R_other) for every element g
        relative = np.einsum("pji,psjk->psik", candidates.rotations[:, better], candidates.rotations[:, better + 1 :])
        traces = relative.reshape(len(scores), -1, 9) @ elements
        copies = (traces.max(axis=-1) > same) & (scores[:, better] > -np.inf)[:, None]
        scores[:, better + 1 :][copies] = -np.inf
    return replace(candidates, scores=scores)
