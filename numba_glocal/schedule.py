"""What an iteration searches, and when enough have been made: angular step, shift range and convergence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .alignment import SearchPlan, angular_resolution_deg, global_start, shift_step_angst
from .job import Job
from .pose_prior import PosePrior, PriorWidths
from .results import RunState
from .sampling import spacing_deg
from .settings import AlignSettings
from .values import Poses

_SETTLED_SHARE = 0.25
_SETTLED_RUNS = 2
"""Converged: this many iterations in succession moved the median pose by less than this share of its median uncertainty."""
_SETTLED_CLASSES = 0.01
"""... and, with several classes, no more than this share of the particles changed theirs."""
_GLOBAL_ITERATIONS = 1
_REACH_MOVES = 2.0
_REACH_SIGMAS = 3.0 * math.sqrt(3.0)
"""Reach of a search, in the last changes and in uncertainties along one axis (three deviations of all axes together): poses that stay where
they are may be badly known all the same, and a reference that has changed shows it."""


def first_search(job: Job) -> SearchPlan:
    """What the first iteration searches from a start map; an average of the given poses may have a narrower band."""
    settings = job.settings
    assert isinstance(settings, AlignSettings)
    shift_range = settings.shift_range_angst if settings.shift_range_angst is not None else 0.15 * job.diameter_angst
    if settings.max_shift_angst is not None:
        shift_range = min(shift_range, settings.max_shift_angst)
    k_max = min(job.k_limit, max(3.0, float(int(job.shell_of(settings.initial_lowpass_angst)))))
    return _plan(job, settings.angle_increment_deg, shift_range, k_max, settings.global_search)


def search_plan(job: Job, state: RunState) -> SearchPlan:
    """What the iteration after `state` searches."""
    settings = job.settings
    assert isinstance(settings, AlignSettings)
    everywhere = settings.global_search and state.iteration < _GLOBAL_ITERATIONS
    return _plan(job, state.increment_deg, state.shift_range_angst, state.k_max, everywhere)


def _plan(job: Job, increment_deg: float, shift_range_angst: float, k_max: float, everywhere: bool) -> SearchPlan:
    settings = job.settings
    assert isinstance(settings, AlignSettings)
    listed = job.listed_rotations if everywhere else None
    return SearchPlan(
        increment_deg if listed is None else spacing_deg(listed),
        settings.angle_shells,
        shift_range_angst,
        k_max,
        everywhere,
        settings.symmetry,
        listed,
        settings.relax_symmetry or "C1",
    )


def prior_widths(settings: AlignSettings) -> PriorWidths:
    """What the options say of how far poses may be from those of the list."""
    return PriorWidths(
        math.inf if settings.angle_prior_deg is None else settings.angle_prior_deg,
        math.inf if settings.shift_prior_angst is None else settings.shift_prior_angst,
        math.inf if settings.max_angle_deg is None else settings.max_angle_deg,
        settings.relax_symmetry or settings.symmetry,
    )


def best_of_each_half(
    scores: NDArray[np.float64], half: NDArray[np.integer[Any]], percent: float | None, classes: NDArray[np.integer[Any]] | None = None
) -> NDArray[np.bool_] | None:
    """Which particles averages are made of: the best `percent` of each half (and class), at least two; None for all.

    Parameters
    ----------
    scores : (n,) float64
        NaN for particles that cannot be used; they do not count.
    half : (n,) int
    percent : float or None
    classes : (n,) int, optional
        Scores of different maps do not compare: of each class its best ones.
    """
    if percent is None:
        return None
    included = np.zeros(len(scores), bool)
    sets = [half == number for number in (1, 2)]
    if classes is not None:
        sets = [of_half & (classes == c) for of_half in sets for c in np.unique(classes)]
    for mine in sets:
        rows = np.flatnonzero(mine & np.isfinite(scores))
        wanted = max(2, math.ceil(len(rows) * percent / 100.0 - 1e-9))
        included[rows[np.argsort(-scores[rows], kind="stable")[:wanted]]] = True
    return included


def within_limits(poses: Poses, anchors: Poses, settings: AlignSettings) -> Poses:
    """Poses brought back to the hard limits: they hold for what the halves' common frame moves too."""
    rotations, shifts = poses.rotations, poses.shifts_angst
    if settings.max_shift_angst is not None:
        away = shifts - anchors.shifts_angst
        distance = np.linalg.norm(away, axis=1, keepdims=True)
        shifts = anchors.shifts_angst + away * np.minimum(1.0, settings.max_shift_angst / np.maximum(distance, 1e-12))
    prior = PosePrior.about(prior_widths(settings), anchors.rotations, anchors.shifts_angst)
    if prior is not None and settings.max_angle_deg is not None:
        rotations = np.stack([prior.of(p).limited(rotation) for p, rotation in enumerate(rotations)])
    return Poses(rotations, shifts)


def first_increment_deg(job: Job, plan: SearchPlan) -> float:
    """Angular step of the first level."""
    if not plan.everywhere or plan.rotations is not None:
        return plan.increment_deg
    return global_start(plan.k_max, job.grid.binned_box_size, job.radius_voxels)[0]


def adapt(job: Job, state: RunState, angle_change_deg: NDArray[np.float64], shift_change_angst: NDArray[np.float64]) -> None:
    """Smaller steps and ranges as the poses settle, by what they still moved and how well they are known; never finer than the band can tell.

    Parameters
    ----------
    job : Job
    state : RunState
        With the uncertainties of this iteration; its increment and shift range are set.
    angle_change_deg, shift_change_angst : (m,) float64
        Of usable particles.
    """
    settings = job.settings
    assert isinstance(settings, AlignSettings)
    grid, shells = job.grid, max(settings.angle_shells, 1)
    finest = angular_resolution_deg(state.k_max, grid.binned_box_size, job.radius_voxels)
    angle_reach = max(_REACH_MOVES * float(np.percentile(angle_change_deg, 90)), _REACH_SIGMAS * _ninth_decile(state.angle_sigma_deg))
    shift_reach = max(_REACH_MOVES * float(np.percentile(shift_change_angst, 90)), _REACH_SIGMAS * _ninth_decile(state.shift_sigma_angst))
    state.increment_deg = float(min(state.increment_deg, max(finest, angle_reach / shells)))
    least = 2.0 * shift_step_angst(state.k_max, grid.binned_box_size, grid.binned_pixel_size_angst)
    state.shift_range_angst = float(min(state.shift_range_angst, max(least, shift_reach)))


def _ninth_decile(sigma: NDArray[np.float64]) -> float:
    """Of uncertainties along one axis, of the particles that have one."""
    known = sigma[np.isfinite(sigma)]
    return float(np.percentile(known, 90)) if len(known) else 0.0


def has_settled(record: dict[str, Any], before: list[dict[str, Any]]) -> bool:
    """Whether an iteration changed nothing that matters: poses by a small share of their uncertainty, the resolution not for the better.

    Parameters
    ----------
    record : dict
        Of the iteration, as in `RunState.history`.
    before : list of dict
        Of those before it; the first iteration never settles.
    """

    def shells(entry: dict[str, Any]) -> float:
        return 1.0 / entry["resolution_angst"] if entry["resolution_angst"] else 0.0

    turned = record["angle_change_deg"] >= _SETTLED_SHARE * record["angle_sigma_deg"]
    moved = record["shift_change_angst"] >= _SETTLED_SHARE * record["shift_sigma_angst"]
    better = shells(record) > max((shells(entry) for entry in before), default=0.0) * (1 + 1e-6)
    changed = (record.get("class_change") or 0.0) > _SETTLED_CLASSES
    return bool(before and not turned and not moved and not better and not changed)


def has_converged(history: list[dict[str, Any]]) -> bool:
    """Whether the last iterations have all settled."""
    return len(history) >= _SETTLED_RUNS and all(record.get("settled", False) for record in history[-_SETTLED_RUNS:])


def last_iteration(state: RunState, settings: AlignSettings) -> int:
    """The iteration that ends the run: the one reached, where it has converged and was to stop there; else --iterations."""
    return state.iteration if settings.until_converged and has_converged(state.history) else settings.iterations
