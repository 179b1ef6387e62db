"""Level 1: every CUDA kernel compiles to PTX without a GPU, without stray double precision where it is not wanted, without local arrays."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

cuda = pytest.importorskip("numba.cuda")
pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numba import float32, int8  # noqa: E402

try:
    from numba.cuda import dispatcher

    from numba_glocal.backends.cuda import packing, prepare, search, tensor
    from numba_glocal.backends.cuda.signatures import KERNELS, PREPARE, SEARCH, TENSOR

    cuda.compile(lambda x: None, (float32[::1],), cc=(9, 0), output="ptx", device=False, abi="numba")
except Exception as problem:  # no NVVM here
    pytest.skip(f"kernels cannot be compiled here: {problem}", allow_module_level=True)

IN_DOUBLE = {"refine", "band_power", "insert", "residual_power", "float_sums", "particle_facts", "volume_levels"}


def name_of(kernel) -> str:
    return kernel.__name__


def ptx_of(kernel, signature, fastmath=True) -> str:
    with pytest.MonkeyPatch.context() as patch:
        # functions that a kernel calls are compiled for the GPU that is there
        patch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
        return cuda.compile(kernel.py_func, signature, cc=(9, 0), output="ptx", device=False, abi="numba", fastmath=fastmath)[0]


def instructions(ptx: str) -> str:
    """Without the directives and comments."""
    return "\n".join(line for line in ptx.splitlines() if re.match(r"\s+[a-z]", line))


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_kernel_compiles(kernel):
    ptx = ptx_of(kernel, KERNELS[kernel])
    assert ".entry" in ptx
    if name_of(kernel) not in IN_DOUBLE:
        assert ".f64" not in instructions(ptx), "double precision in a single-precision kernel"


@pytest.mark.parametrize("kernel", PREPARE, ids=name_of)
def test_kernel_from_files_to_volumes_compiles(kernel):
    ptx = ptx_of(kernel, PREPARE[kernel], kernel.targetoptions["fastmath"])
    assert ".entry" in ptx and ".local" not in ptx
    assert (".f64" in instructions(ptx)) == (name_of(kernel) in IN_DOUBLE)


def test_two_levels_are_taken_off_one_after_the_other():
    """Joined into one number, a level of 1e5 and an offset of 0.1 would round to 1e5."""
    subtractions = [line for line in instructions(ptx_of(prepare.place_volumes, PREPARE[prepare.place_volumes], False)).splitlines() if "sub" in line]
    assert sum(".f32" in line for line in subtractions) == 2
    assert prepare.place_volumes.targetoptions["fastmath"] is False


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_search_keeps_its_sums_in_registers(steps):
    (group,) = search.shift_groups(steps, (1.01 * steps) ** 2)
    ptx = ptx_of(search.search_kernel(group), SEARCH)
    assert ".local" not in ptx
    assert "ld.v4.f32" in ptx or "ld.global.v4.f32" in ptx
    assert ".f64" not in instructions(ptx)


@pytest.mark.parametrize(("largest2", "sums"), [(2.0, [9]), (16.0, [29, 28])])
def test_tensor_search_keeps_its_sums_in_registers(largest2, sums):
    groups = tensor.disc_groups(largest2)
    assert [sum(map(tensor.n_shifts, group)) for group in groups] == sums
    code = instructions(ptx_of(tensor.search_kernel(groups[0], tensor.SHAPE), TENSOR))
    assert ".local" not in code and ".f64" not in code
    # of a thread: two rotations by two particles; all sums but the one without a shift are scaled, and three more scaled terms make a score
    assert code.count("st.shared.f32") == 4 * sums[0]
    scaled = 4 * (sums[0] - 1)
    assert scaled <= code.count("fma.rn.ftz.f32") <= scaled + 4 * 20


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


@pytest.mark.parametrize("kernel", [packing.narrow_columns, packing.narrow_templates], ids=name_of)
def test_numbers_are_stored_as_the_array_asks(kernel):
    half = ptx_of(kernel, KERNELS[kernel])
    eight = ptx_of(kernel, (*KERNELS[kernel][:-1], int8[::1]))
    assert "prmt" in eight and "prmt" not in half
    assert ".f16" in half and ".f16" not in instructions(eight)
