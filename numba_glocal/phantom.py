"""A built-in object for the demo, simulations and tests: as large as a ribosome, chiral, without any symmetry, known exactly.

It is a sum of Gaussian blobs. A Gaussian's Fourier transform is a Gaussian, so the map at any pose is computed directly,
without interpolation: poses planted with it are true to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import SettingsError
from .fourier import irfftn
from .values import Volume

DIAMETER_ANGST = 300.0
"""Of the sphere that holds the object at its natural size."""

# x, y, z and sigma in Angstrom, and the peak density. Big blobs make two unequal bodies, middle ones the stalks, the beak
# and the foot, small ones short rods that give detail down to about 15 Angstrom.
# fmt: off
_BLOBS = np.array([
    (-44, -6, 29, 18.2, 0.5), (58, 6, 14, 22.1, 0.7), (23, -5, 44, 22.4, 0.8),
    (-35, -1, 21, 20.8, 0.7), (-44, -9, 7, 18.7, 0.8), (-7, -41, 34, 19.6, 0.8),
    (-17, -9, 50, 23.6, 0.6), (-3, 13, -8, 18.3, 0.8), (13, -25, 10, 18.7, 0.6),
    (30, -7, 46, 19.7, 0.6), (-18, -13, 10, 24.0, 0.5), (45, 18, 26, 23.3, 0.7),
    (-3, -30, -70, 18.7, 0.8), (-9, -38, -64, 15.4, 0.5), (-27, 21, -63, 15.9, 0.7),
    (-16, -32, -74, 16.4, 0.8), (6, 41, -57, 18.6, 0.6), (-14, 14, -75, 17.6, 0.7),
    (-21, 29, -73, 18.4, 0.6), (5, 3, -66, 18.0, 0.7), (-75, 16, 24, 9.0, 1.2),
    (-95, 28, 30, 9.0, 1.2), (-115, 40, 36, 9.0, 1.2), (71, -16, 14, 7.5, 1.1),
    (86, -22, 7, 7.5, 1.1), (102, -28, 0, 7.5, 1.1), (117, -34, -8, 7.5, 1.1),
    (-11, 58, 34, 12.0, 1.0), (-23, 94, 42, 12.0, 1.0), (1, 84, -72, 8.0, 1.2),
    (22, 97, -75, 8.0, 1.2), (43, 110, -78, 8.0, 1.2), (-27, -52, -68, 9.0, 1.1),
    (-49, -86, -76, 9.0, 1.1), (14, -51, 50, 5.0, 3.3), (27, -44, 54, 5.0, 3.3),
    (40, -37, 58, 5.0, 3.3), (-41, -26, 41, 4.7, 2.5), (-37, -38, 48, 4.7, 2.5),
    (-33, -50, 55, 4.7, 2.5), (50, 15, 37, 5.6, 2.1), (45, 28, 40, 5.6, 2.1),
    (40, 41, 43, 5.6, 2.1), (-54, 32, 64, 4.8, 3.1), (-43, 36, 56, 4.8, 3.1),
    (-32, 40, 48, 4.8, 3.1), (-5, 13, 78, 6.1, 2.9), (7, 6, 76, 6.1, 2.9),
    (19, -1, 74, 6.1, 2.9), (-28, -14, -26, 6.3, 3.0), (-23, -4, -24, 6.3, 3.0),
    (-18, 6, -22, 6.3, 3.0), (32, 4, -34, 5.1, 2.9), (29, 16, -30, 5.1, 2.9),
    (26, 28, -26, 5.1, 2.9), (-38, 50, -81, 5.2, 3.0), (-31, 58, -86, 5.2, 3.0),
    (-24, 66, -91, 5.2, 3.0), (21, -35, -87, 5.3, 2.3), (13, -24, -90, 5.3, 2.3),
    (5, -13, -93, 5.3, 2.3), (50, -49, 9, 6.3, 2.9), (57, -40, 18, 6.3, 2.9),
    (64, -31, 27, 6.3, 2.9),
])
# fmt: on


def make_phantom(box_size: int, pixel_size_angst: float, diameter_angst: float | None = None) -> Volume:
    """The phantom at the identity pose; positive density on zero background.

    Parameters
    ----------
    box_size : int
        Edge n of the box in voxels.
    pixel_size_angst : float
        Voxel edge.
    diameter_angst : float, optional
        Of the sphere that holds the object; by default 300 Angstrom, or four fifths of the box where that is less.

    Returns
    -------
    Volume
        The map a simulation takes as its reference.
    """
    return Volume(render_phantom(box_size, pixel_size_angst, diameter_angst=diameter_angst), pixel_size_angst)


def render_phantom(
    box_size: int,
    pixel_size_angst: float,
    rotation: ArrayLike | None = None,
    shift_angst: ArrayLike = (0.0, 0.0, 0.0),
    diameter_angst: float | None = None,
) -> NDArray[np.float32]:
    """The phantom at a pose: ``map(v) = phantom(R^-1 (v - s - c) + c)``, without interpolation.

    Parameters
    ----------
    box_size : int
        Edge n of the box in voxels.
    pixel_size_angst : float
        Voxel edge.
    rotation : (3, 3) array_like, optional
        ``R``; the identity by default.
    shift_angst : (3,) array_like
        ``s = (x, y, z)``.
    diameter_angst : float, optional
        As in `make_phantom`.

    Returns
    -------
    (n, n, n) float32
        Indexed ``[z, y, x]``. Band-limited: a raised cosine takes it to zero between 0.8 and 1 Nyquist.
    """
    spectrum = phantom_spectrum(box_size, pixel_size_angst, rotation, shift_angst, diameter_angst)
    return irfftn(spectrum, box_size).astype(np.float32)


def phantom_spectrum(
    box_size: int,
    pixel_size_angst: float,
    rotation: ArrayLike | None = None,
    shift_angst: ArrayLike = (0.0, 0.0, 0.0),
    diameter_angst: float | None = None,
) -> NDArray[np.complex128]:
    """`render_phantom` before its inverse transform.

    Returns
    -------
    (n, n, n // 2 + 1) complex128
        In the layout of ``numpy.fft.rfftn``.
    """
    if box_size < 8:
        raise SettingsError(f"phantom: expected a box of 8 voxels or more; found {box_size}")
    if not pixel_size_angst > 0:
        raise SettingsError(f"phantom: expected a positive pixel size; found {pixel_size_angst}")
    if diameter_angst is None:
        diameter_angst = min(DIAMETER_ANGST, 0.8 * box_size * pixel_size_angst)
    to_voxels = diameter_angst / DIAMETER_ANGST / pixel_size_angst
    turn = np.eye(3) if rotation is None else np.asarray(rotation, dtype=np.float64)
    centres = _BLOBS[:, :3] * to_voxels @ turn.T + np.asarray(shift_angst, dtype=np.float64) / pixel_size_angst + box_size // 2
    sigmas = _BLOBS[:, 3] * to_voxels
    mass = _BLOBS[:, 4] * (2.0 * np.pi * sigmas**2) ** 1.5

    full, half = np.fft.fftfreq(box_size), np.arange(box_size // 2 + 1) / box_size

    def along(axis: int, frequency: NDArray[Any]) -> NDArray[Any]:
        decay = -2.0 * np.pi**2 * np.outer(sigmas**2, frequency**2)
        return np.exp(decay - 2j * np.pi * np.outer(centres[:, axis], frequency))

    # separable: the sum over blobs is one matrix product of (blobs, nz * ny) with (blobs, nx)
    plane = (along(2, full)[:, :, None] * (mass[:, None] * along(1, full))[:, None, :]).reshape(len(_BLOBS), -1)
    spectrum = (plane.T @ along(0, half)).reshape(box_size, box_size, half.size)
    radius = np.sqrt(full[:, None, None] ** 2 + full[None, :, None] ** 2 + half[None, None, :] ** 2) * 2.0
    return spectrum * (0.5 + 0.5 * np.cos(np.pi * np.clip((radius - 0.8) / 0.2, 0.0, 1.0)))
