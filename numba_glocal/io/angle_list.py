"""PyTom's lists of orientations, ``angles_<increment>_<count>.em``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ListError
from ..geometry import zxz_to_matrix
from .em import HEADER_BYTES, parse_em_header

# a turn is 2 pi; sums of angles reach a little further, degrees much further
_LARGEST_RAD = 4 * np.pi


def read_angle_list(path: str | Path) -> NDArray[np.float64]:
    """Read the orientations of a PyTom angle list.

    Parameters
    ----------
    path : path
        EM file of 3 x n x 1 numbers: Z1, Z2, X in radians.

    Returns
    -------
    (n, 3, 3) float64
        ``R = Rz(Z2) Rx(X) Rz(Z1)``, in the file's order.

    Raises
    ------
    InputError, ListError, VolumeError
        Missing, not an EM file, another shape, values that are no angles in radians.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    header = parse_em_header(raw[:HEADER_BYTES], path)
    nz, ny, nx = header.shape
    if nx != 3 or nz != 1:
        raise ListError(f"{path}: an EM file of {nx} x {ny} x {nz} numbers, expected an angle list of 3 x n x 1")
    n_bytes = header.offset + 3 * ny * header.dtype.itemsize
    if len(raw) < n_bytes:
        raise ListError(f"{path}: expected {n_bytes} bytes for {ny} orientations, found {len(raw)}")
    angles = np.frombuffer(raw, header.dtype, 3 * ny, header.offset).reshape(ny, 3).astype(np.float64)
    bad = ~(np.abs(angles) <= _LARGEST_RAD).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        found = ", ".join(f"{a:g}" for a in angles[row])
        raise ListError(f"{path}: orientation {row + 1} is {found}, expected Z1, Z2, X in radians")
    return zxz_to_matrix(np.rad2deg(angles))
