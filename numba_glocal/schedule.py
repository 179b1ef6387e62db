"""What an iteration searches, and when enough have been made: angular step, shift range and convergence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .alignment import SearchPlan, angular_resolution_deg, global_start, shift_step_angst
from .job import Job
from .results import RunState
from .settings import AlignSettings

_SETTLED_SHARE = 0.25
_SETTLED_RUNS = 2
"""Converged: this many iterations in succession moved the median pose by less than this share of its median uncertainty."""
_SETTLED_CLASSES = 0.01
"""... and, with several classes, no more than this share of the particles changed theirs."""
_GLOBAL_ITERATIONS = 1


def search_plan(job: Job, state: RunState) -> SearchPlan:
    """What the iteration after `state` searches."""
    settings = job.settings
    assert isinstance(settings, AlignSettings)
    everywhere = settings.global_search and state.iteration < _GLOBAL_ITERATIONS
    return SearchPlan(state.increment_deg, settings.angle_shells, state.shift_range_angst, state.k_max, everywhere)


def first_increment_deg(job: Job, plan: SearchPlan) -> float:
    """Angular step of the first level."""
    return global_start(plan.k_max, job.grid.binned_box_size, job.radius_voxels)[0] if plan.everywhere else plan.increment_deg


def adapt(job: Job, state: RunState, angle_change_deg: NDArray[np.float64], shift_change_angst: NDArray[np.float64]) -> None:
    """Smaller steps and ranges as the poses settle, by what they still moved; never finer than the band can tell."""
    settings = job.settings
    assert isinstance(settings, AlignSettings)
    grid = job.grid
    finest = angular_resolution_deg(state.k_max, grid.binned_box_size, job.radius_voxels)
    moved = float(np.percentile(angle_change_deg, 90)) * 2.0 / max(settings.angle_shells, 1)
    state.increment_deg = float(min(state.increment_deg, max(finest, moved)))
    least = 2.0 * shift_step_angst(state.k_max, grid.binned_box_size, grid.binned_pixel_size_angst)
    state.shift_range_angst = float(min(state.shift_range_angst, max(least, 2.0 * float(np.percentile(shift_change_angst, 90)))))


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
