"""Voxels of a binned grid to Angstrom: the one function, as a property, by a known answer and against a moved object."""

from __future__ import annotations

import numba as nb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_glocal.phantom import render_phantom
from numba_glocal.shifts import angst_to_voxels, binned_box_size, binned_pixel_size_angst, voxels_to_angst

boxes = st.integers(8, 1024)
pixels = st.floats(0.1, 50.0)
offsets = st.floats(-500.0, 500.0)


@given(offsets, pixels, boxes, boxes)
def test_round_trip(offset, pixel, box, binned):
    shift = voxels_to_angst(offset, pixel, box, binned)
    assert angst_to_voxels(shift, pixel, box, binned) == pytest.approx(offset, abs=1e-9)


@given(pixels, boxes, st.floats(1.0, 4.0))
def test_the_box_keeps_its_size_in_angst(pixel, box, binning):
    if round(box / binning) < 9:
        return
    binned = binned_box_size(box, binning)
    assert binned <= box
    assert abs(binned - box / binning) <= 0.5
    assert binned * binned_pixel_size_angst(pixel, box, binned) == pytest.approx(box * pixel)
    assert voxels_to_angst(float(binned), pixel, box, binned) == pytest.approx(box * pixel)


def test_hundred_binned_by_three():
    """33 voxels, and a factor of 100 / 33, not 3."""
    assert binned_box_size(100, 3) == 33
    assert voxels_to_angst(10.0, 2.0, 100, 33) == pytest.approx(10.0 * 2.0 * 100 / 33)
    assert voxels_to_angst(10.0, 2.0, 100, 33) != pytest.approx(60.0)
    assert binned_box_size(101, 2) == 51 and binned_box_size(64, 1) == 64


@pytest.mark.parametrize(("box", "binning"), [(64, 0.5), (64, float("nan")), (16, 4)])
def test_binnings_that_cannot_be(box, binning):
    with pytest.raises(ValueError, match="binning"):
        binned_box_size(box, binning)


def test_compiles_as_it_stands():
    assert nb.njit(voxels_to_angst)(3.0, 2.0, 100, 33) == voxels_to_angst(3.0, 2.0, 100, 33)
    assert nb.njit(angst_to_voxels)(3.0, 2.0, 100, 33) == angst_to_voxels(3.0, 2.0, 100, 33)


def test_a_moved_object_moves_by_that_many_binned_voxels():
    """Independent of the formula: crop rendered maps 45 -> 15 and 45 -> 16 and measure the move by the phase of their transforms."""
    shift_angst = np.array([21.0, -9.0, 33.0])
    still, moved = (np.fft.fftn(np.fft.ifftshift(render_phantom(45, 9.0, shift_angst=s, diameter_angst=240.0))) for s in ((0, 0, 0), shift_angst))
    for binned in (15, 16):
        # a crop keeps the frequencies 1 / box; the phase at frequency 1 along an axis is 2 pi offset / binned box
        for axis in range(3):
            place = tuple(1 if 2 - axis == i else 0 for i in range(3))
            offset = -np.angle(moved[place] / still[place]) / (2 * np.pi) * binned
            assert voxels_to_angst(offset, 9.0, 45, binned) == pytest.approx(shift_angst[axis], abs=0.02)
