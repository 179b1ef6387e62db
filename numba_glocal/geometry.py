"""Rotations: Euler angles of the field to matrices and back, small rotations, distances.

Every Euler convention ends here and in `numba_glocal.io`; inside the package a rotation is a 3x3 matrix that acts on
``(x, y, z)`` column vectors and carries the reference onto the particle (docs/conventions.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.transform import Rotation

_AT_ONCE = 4096


def relion_to_matrix(angles_deg: ArrayLike) -> NDArray[np.float64]:
    """Rotation matrices from RELION angles.

    Parameters
    ----------
    angles_deg : (..., 3) array_like
        ``rot, tilt, psi`` in degrees; ``R^-1 = Rz(rot) Ry(tilt) Rz(psi)`` (intrinsic ZYZ).

    Returns
    -------
    (..., 3, 3) float64
        ``R``.
    """
    angles = np.deg2rad(np.asarray(angles_deg, dtype=np.float64))
    matrix = np.empty((*angles.shape[:-1], 3, 3))
    every, rows = angles.reshape(-1, 3), matrix.reshape(-1, 9)
    for first in range(0, len(every), _AT_ONCE):  # what long lists need in between stays in the processor's cache
        (ca, cb, cc), (sa, sb, sc) = (function(every[first : first + _AT_ONCE].T) for function in (np.cos, np.sin))
        part = rows[first : first + _AT_ONCE].T
        # rows of R are columns of Rz(rot) Ry(tilt) Rz(psi)
        part[0], part[1], part[2] = ca * cb * cc - sa * sc, sa * cb * cc + ca * sc, -sb * cc
        part[3], part[4], part[5] = -ca * cb * sc - sa * cc, ca * cc - sa * cb * sc, sb * sc
        part[6], part[7], part[8] = ca * sb, sa * sb, cb
    return matrix


def matrix_to_relion(rotations: ArrayLike) -> NDArray[np.float64]:
    """RELION angles ``rot, tilt, psi`` in degrees from matrices (..., 3, 3); at tilt 0 or 180 psi is 0.

    Returns
    -------
    (..., 3) float64
    """
    matrix = np.asarray(rotations, dtype=np.float64)
    inverse = np.swapaxes(matrix.reshape(-1, 3, 3), -1, -2)
    # R^-1 = Rz(a) Ry(b) Rz(c): its last column is (cos a sin b, sin a sin b, cos b), its last row (-sin b cos c, sin b sin c, cos b)
    tilt = np.arctan2(np.hypot(inverse[:, 0, 2], inverse[:, 1, 2]), inverse[:, 2, 2])
    locked = np.hypot(inverse[:, 0, 2], inverse[:, 1, 2]) < 1e-9
    rot = np.arctan2(inverse[:, 1, 2], inverse[:, 0, 2])
    psi = np.arctan2(inverse[:, 2, 1], -inverse[:, 2, 0])
    sign = np.where(inverse[:, 2, 2] > 0, 1.0, -1.0)
    rot = np.where(locked, np.arctan2(inverse[:, 1, 0] * sign, inverse[:, 0, 0] * sign), rot)
    psi = np.where(locked, 0.0, psi)
    return np.rad2deg(np.stack([rot, tilt, psi], axis=-1)).reshape(*matrix.shape[:-2], 3)


def zxz_to_matrix(angles_deg: ArrayLike) -> NDArray[np.float64]:
    """Rotation matrices from the angles of PyTom, TOM/AV3 and STOPGAP.

    Parameters
    ----------
    angles_deg : (..., 3) array_like
        ``Z1, Z2, X`` (phi, psi, the) in degrees; ``R = Rz(Z2) Rx(X) Rz(Z1)``.

    Returns
    -------
    (..., 3, 3) float64
        ``R``.
    """
    angles = np.asarray(angles_deg, dtype=np.float64)
    flat = Rotation.from_euler("ZXZ", angles.reshape(-1, 3)[:, [1, 2, 0]], degrees=True).as_matrix()
    return flat.reshape(*angles.shape[:-1], 3, 3)


def matrix_to_zxz(rotations: ArrayLike) -> NDArray[np.float64]:
    """Angles ``Z1, Z2, X`` in degrees from matrices (..., 3, 3); at X 0 or 180 Z2 is 0.

    Returns
    -------
    (..., 3) float64
        X from 0 to 180.
    """
    matrix = np.asarray(rotations, dtype=np.float64)
    r = matrix.reshape(-1, 3, 3)
    # R = Rz(a) Rx(b) Rz(c): its last column is (sin a sin b, -cos a sin b, cos b), its last row (sin b sin c, sin b cos c, cos b)
    x = np.arctan2(np.hypot(r[:, 0, 2], r[:, 1, 2]), r[:, 2, 2])
    locked = np.hypot(r[:, 0, 2], r[:, 1, 2]) < 1e-9
    z2 = np.where(locked, 0.0, np.arctan2(r[:, 0, 2], -r[:, 1, 2]))
    z1 = np.where(locked, np.arctan2(np.where(r[:, 2, 2] > 0, 1.0, -1.0) * r[:, 1, 0], r[:, 0, 0]), np.arctan2(r[:, 2, 0], r[:, 2, 1]))
    return np.rad2deg(np.stack([z1, z2, x], axis=-1)).reshape(*matrix.shape[:-2], 3)


def rotvec_to_matrix(rotvec_rad: ArrayLike) -> NDArray[np.float64]:
    """Matrices (..., 3, 3) of rotation vectors (..., 3) in radians (axis times angle)."""
    vec = np.asarray(rotvec_rad, dtype=np.float64)
    return Rotation.from_rotvec(vec.reshape(-1, 3)).as_matrix().reshape(*vec.shape[:-1], 3, 3)


def matrix_to_rotvec(rotations: ArrayLike) -> NDArray[np.float64]:
    """Rotation vectors (..., 3) in radians of matrices (..., 3, 3)."""
    matrix = np.asarray(rotations, dtype=np.float64)
    return Rotation.from_matrix(matrix.reshape(-1, 3, 3)).as_rotvec().reshape(*matrix.shape[:-2], 3)


def angle_between_deg(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Angle in degrees of the rotation that carries `a` onto `b`; both (..., 3, 3), broadcast against each other."""
    relative = np.einsum("...ji,...jk->...ik", np.asarray(a, np.float64), np.asarray(b, np.float64))
    # atan2 of sine and cosine: accurate near 0 and near 180, where arccos of the trace is not
    skew = relative - np.swapaxes(relative, -1, -2)
    sine = 0.5 * np.sqrt(skew[..., 2, 1] ** 2 + skew[..., 0, 2] ** 2 + skew[..., 1, 0] ** 2)
    cosine = 0.5 * (np.trace(relative, axis1=-2, axis2=-1) - 1.0)
    return np.rad2deg(np.arctan2(sine, cosine))
