"""Vector types against numpy; and that sixteen lanes stay vectors in the compiled code."""

from __future__ import annotations

import numba as nb
import numpy as np
import pytest

from numba_glocal.backends import simd


@nb.njit
def _wide(a, b, out):
    x, y = simd.load16(a, 0), simd.load16(b, 0)
    z = simd.splat16(b, 3)
    simd.store(out, 0, simd.add(x, y))
    simd.store(out, 16, simd.sub(x, y))
    simd.store(out, 32, simd.mul(x, y))
    simd.store(out, 48, simd.muladd(x, y, z))
    simd.store(out, 64, simd.nmuladd(x, y, z))
    simd.store(out, 80, simd.zero16())
    simd.store(out, 96, simd.broadcast16(b[5]))
    return simd.total(x)


@nb.njit
def _narrow(a, at, out):
    x = simd.load4(a, at)
    out[0], out[1], out[2], out[3] = simd.lane0(x), simd.lane1(x), simd.lane2(x), simd.lane3(x)
    simd.store(out, 4, simd.pack4(a[0], a[1], a[2], a[3]))
    simd.store(out, 8, simd.muladd(x, simd.broadcast4(a[1]), simd.nmuladd(x, x, x)))


def test_sixteen_lanes():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 16)).astype(np.float32)
    out = np.full(112, np.nan, np.float32)
    total = _wide(a, b, out)
    expected = np.stack([a + b, a - b, a * b, a * b + b[3], b[3] - a * b, 0 * a, 0 * a + b[5]])
    np.testing.assert_allclose(out.reshape(7, 16), expected, rtol=1e-6, atol=1e-6)
    assert total == pytest.approx(float(a.sum(dtype=np.float64)), abs=1e-5)
    assert _wide(a, b, out) == total, "a fixed order"


@pytest.mark.parametrize("at", [0, 1, 3])
def test_four_lanes_at_any_offset(at):
    a = np.arange(1, 9, dtype=np.float32)
    out = np.zeros(12, np.float32)
    _narrow(a, at, out)
    x = a[at : at + 4]
    np.testing.assert_array_equal(out, np.concatenate([x, a[:4], 2 * x + (x - x * x)]))


def test_lanes_stay_vectors():
    _wide(*np.zeros((2, 16), np.float32), np.zeros(112, np.float32))
    code = next(iter(_wide.inspect_llvm().values()))
    assert "<16 x float>" in code and "fmuladd.v16f32" in code
