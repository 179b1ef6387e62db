"""The types with which every kernel is launched, for compiling ahead of the first launch. A missing or wrong row costs time, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba.cuda.types import float16, float32, float64, int8, int16, int32, int64, uint64

from . import choosing, contraction, insertion, packing, prepare, refining, residuals, scoring, turning

_f, _i32, _i64, _d, _h = float32[::1], int32[::1], int64[::1], float64[::1], float16[::1]
_f2, _i2, _d2 = float32[:, ::1], int32[:, ::1], float64[:, ::1]
_f3 = float32[:, :, ::1]
_n = int64
_WEIGHTS = (_f, _n, _i32)

KERNELS: dict[Any, tuple[Any, ...]] = {
    contraction.contract: (_f, _n, _n, _n, _n, _f, _n, _n, _n, _n, _f, _n, _n, _n, _n, _n, _n),
    turning.turn: (_f, _n, _i32, _n, *_WEIGHTS, _n, _f2, _i32, _f, _f2, _f, _i32, _f, _f, _f, _f2, _f2, _f2, _f2),
    turning.fill_templates: (_f, _n, _f, _f2, _f, _f2),
    contraction.products: (_f2, _f2, _f2),
    scoring.finish_scores: (_f2, _f2, _f, _n, float32),
    scoring.take_off: (_f2, _f2),
    choosing.choose: (_f2, _i32, _i32, _f2, _f2, float32, _n, _f3, _i2, _f2),
    scoring.band_power: (_f, _n, _i32, _i32, *_WEIGHTS, _i32, _i32, _f2, _i32, _f, _f2, _i32, _d),
    refining.refine: (
        *(_f, _n, _n, _f, _n, _i32, _i32, int16[::1], *_WEIGHTS, _i32, _i32, _f2, _i32, _f, _f2, _f, _i32, _f),
        *(_d2, _d2, _d2, float64, _n, float64, float64, float64, _d2, _i32),
    ),
    residuals.residual_power: (
        *(_f, _n, _n, float32, _f, _n, _i32, _i32, int16[::1], *_WEIGHTS, _i32, _i32, _i32, _f, _f, _i32, _f, _f),
        *(_f2, _f2, _f3, _f3, _f3),
    ),
    packing.column_scales: (_f2, _f, _n, float32, _f),
    packing.narrow_columns: (_f2, _f, _f, _i32, _f2, _n, _n, _n, _n, _h),
    packing.narrow_templates: (_f, _n, _i32, _f, _f2, _n, _n, _n, _f, _n, _h),
    packing.column_factors: (_f2, _f, float32, float32, _f),
    packing.template_factors: (_f2, _f, float32, float32, _f),
    scoring.best_of_tile: (_f, _n, _n, _n, _n, _n, _i32, _f, _f, _n, _f2, _f2, _f2, _i2),
    choosing.score_chosen: (_f, _f2, _f2, _i32, _f2, _i32, _n, _i2, _n, _f2, _f2, _f, _n, float32, _f2, _n, _i2, _i2, _n, _f2, _f2),
    packing.pack_rotated: (_f, _n, _i32, _f, _n, float32, _h),
    packing.pack_columns: (_f, _n, _i32, _f, _f, _f, _f, _h),
    insertion.clear_sums: (int64[:, ::1],),
    insertion.float_sums: (int64[:, ::1], _f, _f),
    scoring.clear_best: (uint64[:, ::1],),
    scoring.unpack_best: (uint64[:, ::1], _f2, _i2),
    insertion.insert: (int64[:, ::1], _n, _n, _f, _n, _i32, _i32, int16[::1], *_WEIGHTS, _i32, _i32, _f2, _i32, _f, _f2, _f, _i32, _f2, _f2, _f),
}
"""Of every kernel on spectra, columns, templates, scores and sums."""

PREPARE: dict[Any, tuple[Any, ...]] = {
    prepare.particle_facts: (_f2, _f, _n, _n, _n, float32, _f2, _i32),
    prepare.place_volumes: (_f2, _f2, _i32, _f),
    prepare.volume_levels: (_f, _i32, _f, _n, _f),
    prepare.mask_volumes: (_f, _i32, _f, _f, _f2),
    prepare.gather_volumes: (_f, _i32, _f2),
}
"""Of `prepare`."""

SEARCH: tuple[Any, ...] = (_f, _f, _i64, _i64, _i64, _f, _n, _n, _n, _n, _i2, _n, _f2, _f2, _f2, _i2)
"""Of `search.search_kernel`."""

TENSOR: tuple[Any, ...] = (_i32, _i32, _n, _i32, _i32, _n, _n, _n, _f, _i32, _f, _f, float32, _n, _f2, _f2, uint64[:, ::1])
"""Of `tensor.search_kernel`."""

_LONGEST = (
    *(refining.refine, residuals.residual_power, turning.turn, prepare.particle_facts, contraction.contract, insertion.insert),
    *(choosing.choose, turning.fill_templates, contraction.products),
)
_STEPS = (3, 2, 1)
_WIDE_STEPS = (4, 5)


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile.

    Attributes
    ----------
    name : str
        For people.
    kernel : dispatcher
    types : tuple
        Of its arguments.
    """

    name: str
    kernel: Any
    types: tuple[Any, ...]


def longest() -> Job:
    """The kernel that takes longest: the first of `jobs`, without the imports of the others."""
    return Job(_LONGEST[0].__name__, _LONGEST[0], KERNELS[_LONGEST[0]])


def jobs(precision: str) -> tuple[list[Job], list[Job]]:
    """What a warm-up needs, and what some runs need after it; each the longest first, and no kernel twice.

    Two processes that compile one kernel for different types at once may take the same file name in the JIT cache: Numba has no lock there.

    Parameters
    ----------
    precision : str
        Of searches: "auto" (as "int8"), "int8", "half" or "single".
    """
    types_of = KERNELS | PREPARE
    if precision in ("auto", "int8"):
        types_of |= {kernel: (*KERNELS[kernel][:-1], int8[::1]) for kernel in (packing.narrow_columns, packing.narrow_templates)}
        types_of |= {scoring.best_of_tile: (int32[::1], *KERNELS[scoring.best_of_tile][1:])}
    fixed = [Job(kernel.__name__, kernel, types) for kernel, types in types_of.items()]
    fixed.sort(key=lambda job: _LONGEST.index(job.kernel) if job.kernel in _LONGEST else len(_LONGEST))
    searches = _search_jobs if precision == "single" else _tensor_jobs
    near = searches(_STEPS)
    held = {job.name for job in near}
    return [longest(), *near, *fixed[1:]], [job for job in searches(_WIDE_STEPS) if job.name not in held]


def _ball(steps: int) -> float:
    """Squared radius, in steps, of the ball of a cube of so many steps (`backend._ball_radius2`)."""
    return float(steps * steps) + 0.5


def _search_jobs(all_steps: tuple[int, ...]) -> list[Job]:
    from . import search

    return [
        Job(f"search {steps}.{group.first}", search.search_kernel(group), SEARCH)
        for steps in all_steps
        for group in search.shift_groups(steps, _ball(steps))
    ]


def _tensor_jobs(all_steps: tuple[int, ...]) -> list[Job]:
    from . import tensor

    found = {}
    for steps in all_steps:
        for z in range(steps + 1):
            for group in tensor.disc_groups(_ball(steps) - z * z):
                name = f"tensor {group[0][0]},{group[0][1]} {sum(map(tensor.n_shifts, group))}"
                found[name] = Job(name, tensor.search_kernel(group, tensor.SHAPE), TENSOR)
    return sorted(found.values(), key=lambda job: -int(job.name.split()[-1]))
