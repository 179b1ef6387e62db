"""The one place where voxels of a (binned) grid become Angstrom, and back. Every backend uses these functions.

Fourier cropping an N box to M keeps the centre exact, and its scale is ``N / M``, not the nominal binning: 100 voxels binned by 3 are 33,
and a peak at offset p on that grid is a shift of ``p * (100 / 33) * pixel_size`` Angstrom (docs/conventions.md, 4).
The functions are plain scalar (or array) arithmetic, so that `numba.njit` and `numba.cuda.jit(device=True)` compile them as they stand.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", float, NDArray[np.float64])


def binned_pixel_size_angst(pixel_size_angst: float, box_size: int, binned_box_size: int) -> float:
    """Voxel edge in Angstrom of the grid that cropping `box_size` to `binned_box_size` leaves."""
    return pixel_size_angst * box_size / binned_box_size


def voxels_to_angst(offset_voxels: Number, pixel_size_angst: float, box_size: int, binned_box_size: int) -> Number:
    """Shift in Angstrom of an offset from the centre, found on a binned grid.

    Parameters
    ----------
    offset_voxels : float or array
        Offset in voxels of the binned grid, sub-voxel.
    pixel_size_angst : float
        Voxel edge of the particle as it was read, before binning.
    box_size, binned_box_size : int
        Boxes before and after Fourier cropping.
    """
    return offset_voxels * (pixel_size_angst * box_size / binned_box_size)


def angst_to_voxels(shift_angst: Number, pixel_size_angst: float, box_size: int, binned_box_size: int) -> Number:
    """The inverse of `voxels_to_angst`."""
    return shift_angst / (pixel_size_angst * box_size / binned_box_size)


def binned_box_size(box_size: int, binning: float) -> int:
    """Box after binning: ``round(box / binning)``.

    Parameters
    ----------
    box_size : int
    binning : float
        1 or more; whole or fractional.

    Raises
    ------
    ValueError
        For a binning below 1 or a box that would be smaller than 8 voxels.
    """
    if not binning >= 1.0:
        raise ValueError(f"binning {binning} is below 1")
    binned = int(np.floor(box_size / binning + 0.5))
    if binned < 8:
        raise ValueError(f"binning {binning} leaves a box of {binned} voxels of {box_size}; at least 8 are needed")
    return binned
