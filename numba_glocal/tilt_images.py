"""Particles that are stacks of tilt images (RELION 5, WarpTools): their images inserted into the Fourier samples of a volume, and the weights.

What a volume and its weights hold is the convention of lists flagged premultiplied (docs/conventions.md, 4). With images ``Y = M (M F + noise)``
at samples q, M = CTF x scale x exposure filter, the volume is the adjoint of slicing, ``x(v) = sum_q Y(q) exp(2 pi i q.v / n)``, and the weight what
makes ``X = C F`` nearly true, and the variance of X's noise proportional to C: ``C(k) = sum_q M(q)^2 h(k - q)`` with h close to the squared
transform of the box, a triangle of one voxel to either side.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .backends.interpolation import insert
from .ctf import contrast_transfer, exposure_filter
from .errors import VolumeError
from .fourier import PAD, central_irfftn, sinc2_correction
from .io.volumes import read_array
from .values import FloatArray, TiltGeometry


def volume_from_stack(path: Path, geometry: TiltGeometry, box_size: int) -> NDArray[np.float32]:
    """The volume that a particle's stack of tilt images gives.

    Parameters
    ----------
    path : Path
        The stack, (images, n, n).
    geometry : TiltGeometry
    box_size : int
        n.

    Returns
    -------
    (n, n, n) float32

    Raises
    ------
    VolumeError
        An unreadable stack, one of another box, or one with fewer images than the geometry speaks of.
    """
    stack, _ = read_array(path, quiet=True)
    if stack.shape[1:] != (box_size, box_size):
        raise VolumeError(f"{path}: images of {stack.shape[2]} x {stack.shape[1]}, expected {box_size} x {box_size}")
    if len(stack) <= int(geometry.images.max(initial=-1)):
        raise VolumeError(f"{path}: a stack of {len(stack)} images, expected {int(geometry.images.max()) + 1} or more")
    return insert_images(stack[geometry.images], geometry)


def insert_images(images: NDArray[Any], geometry: TiltGeometry) -> NDArray[np.float32]:
    """The adjoint of slicing: the volume whose transform gathers the tilt images' samples (see the module's head), over ``n^3``.

    Parameters
    ----------
    images : (t, n, n)
        Indexed ``[y, x]``, centre at ``n // 2``.
    geometry : TiltGeometry
        Of these t images.

    Returns
    -------
    (n, n, n) float32
    """
    n = images.shape[-1]
    c = n - 1
    points, index = _plane(n)
    spectra = np.fft.rfft2(np.fft.ifftshift(np.asarray(images, np.float32), axes=(1, 2))).reshape(len(images), -1)[:, index]
    if not geometry.multiplied:
        spectra = spectra * multipliers(geometry, n)
    grid = np.zeros(4 * (2 * c + 1) ** 2 * (c + 2), np.float32)
    there = np.ones(len(points), np.float32)
    for spectrum, axes in zip(spectra, geometry.axes, strict=True):
        insert(grid, 2 * c + 1, c, points, _rows(axes), np.float32(PAD), np.ascontiguousarray(spectrum, np.complex64), there)
    sums = grid.view(np.complex64).reshape(2 * c + 1, 2 * c + 1, c + 2, 2)
    volume = central_irfftn(lambda first, block: _fill_rows(sums, first, block), n)
    # an inverse transform carries 1 / (PAD n)^3, an adjoint none; both over n^3
    volume *= np.float32(PAD**3) / sinc2_correction(n)
    return volume


def stack_weights(geometry: TiltGeometry, box_size: int) -> NDArray[np.float32]:
    """CTF^2 weights of the volume that `insert_images` makes.

    Returns
    -------
    (n, n, n//2+1) float32
        Grid half-spectrum, corner origin; a slice through a sample adds 1 times its CTF^2.
    """
    sums, _ = slice_sums(geometry.axes, multipliers(geometry, box_size) ** 2, box_size)
    return sums


def slice_sums(axes: FloatArray, values: FloatArray, box_size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Values on slices through Fourier space spread over the samples of a box, and how many slices pass each.

    Parameters
    ----------
    axes : (t, 2, 3)
        As `TiltGeometry.axes`.
    values : (t, m)
        At the samples of `plane_frequencies`; even.
    box_size : int

    Returns
    -------
    sums, slices : (n, n, n//2+1) float32
    """
    n = box_size
    c = n // 2
    points, _ = _plane(n)
    grid = np.zeros(4 * (2 * c + 1) ** 2 * (c + 2), np.float32)
    there = np.ones(len(points), np.float32)
    for value, plane in zip(values, axes, strict=True):
        # a weight of 0 would be left out, with its count
        insert(grid, 2 * c + 1, c, points, _rows(plane), np.float32(1), np.ascontiguousarray(value, np.complex64), there)
    full = grid.reshape(2 * c + 1, 2 * c + 1, c + 2, 4)[:, :, : n // 2 + 1]
    both = full[..., 0::2].copy()
    both[:, :, 0] += full[::-1, ::-1, 0, 0::2]  # each pair of the plane kx = 0 was received once, on either side
    rows = np.rint(np.fft.fftfreq(n) * n).astype(int) + c
    both = both[np.ix_(rows, rows)]
    return np.ascontiguousarray(both[..., 0]), np.ascontiguousarray(both[..., 1])


def multipliers(geometry: TiltGeometry, box_size: int) -> NDArray[np.float64]:
    """CTF x scale x exposure filter of each image, (t, m), at the samples of `plane_frequencies`."""
    kx, ky = (plane_frequencies(box_size) / (box_size * geometry.pixel_size_angst)).T
    radius = np.hypot(kx, ky)
    return np.stack(
        [
            scale
            * exposure_filter(radius, exposure, geometry.voltage_kv)
            * contrast_transfer(
                kx,
                ky,
                *defocus,
                voltage_kv=geometry.voltage_kv,
                spherical_aberration_mm=geometry.spherical_aberration_mm,
                amplitude_contrast=geometry.amplitude_contrast,
                phase_shift_deg=phase_shift,
            )
            for defocus, phase_shift, scale, exposure in zip(
                geometry.defocus_angst, geometry.phase_shift_deg, geometry.scale, geometry.exposure, strict=True
            )
        ]
    )


def plane_frequencies(box_size: int) -> NDArray[np.float64]:
    """The samples of an image that are used, (m, 2) as ``(kx, ky)`` in 1/box: below Nyquist, without the mean, each Friedel pair once."""
    return np.asarray(_plane(box_size)[0][:, :2], np.float64)


@lru_cache(maxsize=8)
def _plane(n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Those samples as (kx, ky, 0), and their places in the flattened `rfft2`."""
    ky = np.rint(np.fft.fftfreq(n) * n)[:, None]
    kx = np.arange(n // 2 + 1)[None, :]
    radius2 = kx * kx + ky * ky
    used = (radius2 > 0) & (radius2 <= (n // 2 - 1) ** 2) & ((kx > 0) | (ky > 0))
    index = np.flatnonzero(used)
    kx, ky = np.broadcast_arrays(kx, ky)
    points = np.zeros((len(index), 3), np.float32)
    points[:, 0], points[:, 1] = kx.ravel()[index], ky.ravel()[index]
    return points, index


def _rows(axes: FloatArray) -> NDArray[np.float32]:
    """The matrix M of `insert`, which puts the sample k at ``M^T k``."""
    matrix = np.zeros((3, 3), np.float32)
    matrix[:2] = axes
    return matrix


@njit(cache=True, nogil=True)
def _fill_rows(sums, first, block):  # type: ignore[no-untyped-def]
    """Rows of a padded half-spectrum from sums on the plane kx >= 0, for `fourier.central_irfftn`; kx = 0 holds each pair once."""
    c = (sums.shape[0] - 1) // 2
    padded = block.shape[1]
    block[:] = 0
    for b in range(block.shape[0]):
        row = first + b
        ky = row if row <= c else row - padded
        if row >= padded or ky < -c:
            continue
        for kz in range(-c, c + 1):
            i, j, to = kz + c, ky + c, kz if kz >= 0 else kz + padded
            block[b, to, 0] = sums[i, j, 0, 0] + sums[2 * c - i, 2 * c - j, 0, 0].conjugate()
            for x in range(1, c + 1):
                block[b, to, x] = sums[i, j, x, 0]
