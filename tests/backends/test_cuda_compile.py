"""Level 1: every CUDA kernel compiles to PTX without a GPU, without stray double precision where it is not wanted, without local arrays."""

from __future__ import annotations

import re

import pytest

cuda = pytest.importorskip("numba.cuda")
pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numba import float32, float64, int16, int32, int64, uint64  # noqa: E402

try:
    from numba_glocal.backends.cuda import kernels, prepare, search

    cuda.compile(lambda x: None, (float32[::1],), cc=(9, 0), output="ptx", device=False, abi="numba")
except Exception as problem:  # no NVVM here
    pytest.skip(f"kernels cannot be compiled here: {problem}", allow_module_level=True)

from numba.types import float16  # noqa: E402

f, i32, i64, d = float32[::1], int32[::1], int64[::1], float64[::1]
f2, i2, d2 = float32[:, ::1], int32[:, ::1], float64[:, ::1]
f3 = float32[:, :, ::1]
n = int64
WEIGHTS = (f, n, i32)
SIGNATURES = {
    "contract": (f, n, n, n, n, f, n, n, n, n, f, n, n, n, n, n, n),
    "turn": (f, n, i32, n, *WEIGHTS, n, f2, i32, f, f2, f, i32, f, f, f, f2, f2, f2, f2),
    "fill_templates": (f, n, f, f2, f, f2),
    "products": (f2, f2, f2),
    "finish_scores": (f2, f2, f, n, float32),
    "take_off": (f2, f2),
    "choose": (f2, i32, i32, f2, f2, float32, n, f3, i2, f2),
    "band_power": (f, n, i32, i32, *WEIGHTS, i32, i32, f2, i32, f, f2, i32, d),
    "refine": (
        f,
        n,
        n,
        f,
        n,
        i32,
        i32,
        int16[::1],
        *WEIGHTS,
        i32,
        i32,
        f2,
        i32,
        f,
        f2,
        f,
        i32,
        f,
        d2,
        d2,
        d2,
        float64,
        n,
        float64,
        float64,
        float64,
        d2,
        i32,
    ),
    "residual_power": (f, n, n, float32, f, n, i32, i32, int16[::1], *WEIGHTS, i32, i32, i32, f, f, i32, f, f, f2, f2, f3, f3, f3),
    "column_scales": (f2, f, n, f),
    "half_columns": (f2, f, f, n, float16[::1]),
    "half_templates": (f, n, i32, f, f2, n, n, n, float32, n, float16[::1]),
    "best_of_tile": (f, n, n, n, n, i32, f, float32, n, f2, f2, f2, i2),
    "pack_rotated": (f, n, i32, f, n, float32, float16[::1]),
    "pack_columns": (f, n, i32, f, f, f, f, float16[::1]),
    "clear_sums": (int64[:, ::1],),
    "float_sums": (int64[:, ::1], f, f),
    "clear_best": (uint64[:, ::1],),
    "unpack_best": (uint64[:, ::1], f2, i2),
    "insert": (int64[:, ::1], n, n, f, n, i32, i32, int16[::1], *WEIGHTS, i32, i32, f2, i32, f, f2, f, i32, f2, f2, f),
}
PREPARE = {
    "particle_facts": (f2, f, n, n, n, float32, f2, i32),
    "place_volumes": (f2, f2, i32, f),
    "volume_levels": (f, i32, f, n, f),
    "mask_volumes": (f, i32, f, f, f2),
    "gather_volumes": (f, i32, f2),
}
SEARCH = (f, f, i64, i64, i64, f, n, n, n, n, i2, n, f2, f2, f2, i2)
IN_DOUBLE = {"refine", "band_power", "insert", "residual_power", "float_sums", "particle_facts", "volume_levels"}


def ptx_of(kernel, signature, fastmath=True) -> str:
    return cuda.compile(kernel.py_func, signature, cc=(9, 0), output="ptx", device=False, abi="numba", fastmath=fastmath)[0]


def instructions(ptx: str) -> str:
    """Without the directives and comments."""
    return "\n".join(line for line in ptx.splitlines() if re.match(r"\s+[a-z]", line))


@pytest.mark.parametrize("name", SIGNATURES)
def test_kernel_compiles(name):
    ptx = ptx_of(getattr(kernels, name), SIGNATURES[name])
    assert ".entry" in ptx
    if name not in IN_DOUBLE:
        assert ".f64" not in instructions(ptx), "double precision in a single-precision kernel"


@pytest.mark.parametrize("name", PREPARE)
def test_kernel_from_files_to_volumes_compiles(name):
    kernel = getattr(prepare, name)
    ptx = ptx_of(kernel, PREPARE[name], kernel.targetoptions["fastmath"])
    assert ".entry" in ptx and ".local" not in ptx
    assert (".f64" in instructions(ptx)) == (name in IN_DOUBLE)


def test_two_levels_are_taken_off_one_after_the_other():
    """Joined into one number, a level of 1e5 and an offset of 0.1 would round to 1e5."""
    subtractions = [line for line in instructions(ptx_of(prepare.place_volumes, PREPARE["place_volumes"], False)).splitlines() if "sub" in line]
    assert sum(".f32" in line for line in subtractions) == 2
    assert prepare.place_volumes.targetoptions["fastmath"] is False


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_search_keeps_its_sums_in_registers(steps):
    (group,) = search.shift_groups(steps, (1.01 * steps) ** 2)
    ptx = ptx_of(search.search_kernel(group), SEARCH)
    assert ".local" not in ptx
    assert "ld.v4.f32" in ptx or "ld.global.v4.f32" in ptx
    assert ".f64" not in instructions(ptx)


def test_every_shift_of_the_ball_belongs_to_one_group():
    for steps in range(7):
        radius2 = (1.01 * steps) ** 2
        rows = []
        for group in search.shift_groups(steps, radius2):
            entries = group.entries()
            assert group.shared_bytes(group.threads(40), 40) <= 115_000
            rows += [up for _, _, up, _ in entries] + [down for _, paired, _, down in entries if paired]
        inside = sum(
            x * x + y * y + z * z <= radius2 for x in range(-steps, steps + 1) for y in range(-steps, steps + 1) for z in range(-steps, steps + 1)
        )
        assert len(rows) == len(set(rows)) == inside
