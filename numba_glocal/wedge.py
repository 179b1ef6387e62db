"""The missing wedge and the CTF as weights on the half spectrum: from a volume that a list names, or from a tilt range.

Layout everywhere: ``[kz, ky, kx]`` of `numpy.fft.rfftn`, origin in the corner, ``kx = 0 .. n//2``. Weights are real and even,
``w(-k) = w(k)``, and may be negative (a CTF).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import SettingsError, VolumeError
from .io.volumes import read_array
from .values import TiltRange


def read_weight_volume(path: str | Path, box_size: int, *, quiet: bool = True) -> NDArray[np.float32]:
    """Read the wedge, CTF or CTF^2 volume of a particle.

    Parameters
    ----------
    path : path
        MRC or EM. Full with the origin in the centre (n, n, n); or half with the origin in the corner, the reduced axis being
        x (n, n, n//2+1) or z (n//2+1, n, n). Of RELION 4's stack of two half volumes (2n, n, n//2+1) the first is taken, the sum
        of CTF^2; the second counts images, and nothing is divided by it here.
    box_size : int
        Edge n of the particles.
    quiet : bool
        Leave out warnings about odd headers.

    Returns
    -------
    (n, n, n//2+1) float32
        See the module's layout.

    Raises
    ------
    VolumeError
        Another shape, values that are not finite, or all zero.
    """
    data, _ = read_array(path, quiet=quiet)
    return half_layout(data, box_size, path)


def half_layout(data: NDArray[Any], box_size: int, name: object = "weights") -> NDArray[np.float32]:
    """Weights of any of the kinds of `read_weight_volume` as (n, n, n//2+1) float32; `name` is for messages."""
    n, h = box_size, box_size // 2 + 1
    if data.shape == (n, n, n):
        centre = n // 2
        # kx = 0 .. n//2; for even n the last one, Nyquist, stands at index 0 of a centred axis
        columns = (np.arange(h) + centre) % n
        half = np.fft.ifftshift(data[:, :, columns], axes=(0, 1))
    elif data.shape == (n, n, h):
        half = data
    elif data.shape == (h, n, n):
        half = _from_half_z(data, n)
    elif data.shape == (2 * n, n, h):
        half = data[:n]
    else:
        known = f"{n} x {n} x {n}, {h} x {n} x {n}, {n} x {n} x {h} or {h} x {n} x {2 * n}"
        raise VolumeError(f"{name}: found {_kind(data.shape)}; expected weights for box {n}: {known}")
    if not np.isfinite(data).all():
        raise VolumeError(f"{name}: {int((~np.isfinite(data)).sum())} weights are not finite")
    half = np.ascontiguousarray(half, dtype=np.float32)
    if not half.any():
        raise VolumeError(f"{name}: a wedge that leaves nothing (all weights are 0)")
    # reading may hand out a view of a read-only buffer
    return half if half.flags.writeable else half.copy()


def full_layout(half: NDArray[Any], box_size: int) -> NDArray[np.float32]:
    """Weights (n, n, n//2+1) as the volume that RELION reads: the whole spectrum (n, n, n), its origin at the centre voxel."""
    opposite = -np.arange(box_size) % box_size
    negative = half[opposite][:, opposite][:, :, 1 : (box_size + 1) // 2][:, :, ::-1]
    return np.fft.fftshift(np.concatenate([half, negative], axis=2)).astype(np.float32)


def _from_half_z(data: NDArray[Any], n: int) -> NDArray[Any]:
    """From ``[kz >= 0, ky, kx]`` to ``[kz, ky, kx >= 0]`` by w(-k) = w(k)."""
    h = n // 2 + 1
    half = np.empty((n, n, h), dtype=data.dtype)
    half[:h] = data[:, :, :h]
    negative = -np.arange(n) % n
    kz = np.arange(h, n)
    half[kz] = data[n - kz][:, negative][:, :, negative[:h]]
    return half


def _kind(shape: tuple[int, ...]) -> str:
    """What a weight volume of this shape is, with its sizes, x first."""
    nz, ny, nx = shape
    text = f"{nx} x {ny} x {nz}"
    if nz == ny == nx:
        return f"a full volume of box {nz} ({text})"
    if nz == ny and nx == nz // 2 + 1:
        return f"a half volume of box {nz}, x reduced ({text})"
    if ny == nx and nz == nx // 2 + 1:
        return f"a half volume of box {nx}, z reduced ({text})"
    if nz == 2 * ny and nx in (ny, ny // 2 + 1):
        return f"a stack of two volumes of box {ny} ({text}; RELION 4 pseudo-subtomogram weights)"
    return f"a volume of {text}"


def wedge_to_tilt_range(wedge_negative_deg: float, wedge_positive_deg: float) -> tuple[float, float]:
    """Tilt range of two missing-wedge half angles (90 minus the largest tilt of each side), as PyTom lists give them.

    Returns
    -------
    (float, float)
        ``(-(90 - wedge_negative), 90 - wedge_positive)`` in degrees.

    Raises
    ------
    SettingsError
        A negative angle, or one of 90 degrees and more.
    """
    for angle in (wedge_negative_deg, wedge_positive_deg):
        if not 0 <= angle < 90:
            raise SettingsError(f"missing-wedge angle {angle:g} degrees: expected 0 (no wedge) to less than 90")
    return wedge_negative_deg - 90.0, 90.0 - wedge_positive_deg


def tilt_range_weights(
    box_size: int,
    tilt_min_deg: float,
    tilt_max_deg: float,
    *,
    tilt_axis: str = "y",
    flip: bool = False,
    smooth_voxels: float = 0.0,
    turn: Sequence[float] | None = None,
) -> NDArray[np.float32]:
    """Weights of the region that a tilt range samples.

    A tilt t about y samples the directions ``(x, z) = (cos t, -sin t)`` (docs/conventions.md, 3), so the side kx kz > 0 belongs to
    negative tilts. About x it samples ``(y, z) = (cos t, sin t)``: a right-handed turn about the named axis in both cases.

    Parameters
    ----------
    box_size : int
        Edge n in voxels.
    tilt_min_deg, tilt_max_deg : float
        Within -90 .. 90, the first below the second; both may lie on one side of 0. -90 .. 90 is no wedge.
    tilt_axis : {"y", "x"}
    flip : bool
        Take tilts with the other sign (Warp against AreTomo).
    smooth_voxels : float
        Width of a cosine edge outside of the sampled region, in voxels of the spectrum.
    turn : (9,) sequence of float, optional
        Rotation matrix, row by row, that turns tilt axis and beam.

    Returns
    -------
    (n, n, n//2+1) float32
        0 to 1; see the module's layout.

    Raises
    ------
    SettingsError
        Angles beyond 90 degrees or in the wrong order, an unknown axis, a negative edge.
    """
    if not (np.isfinite(tilt_min_deg) and np.isfinite(tilt_max_deg)):
        raise SettingsError(f"tilt range {tilt_min_deg} to {tilt_max_deg}: expected two numbers")
    if min(tilt_min_deg, tilt_max_deg) < -90 or max(tilt_min_deg, tilt_max_deg) > 90:
        raise SettingsError(f"tilt range {tilt_min_deg:g} to {tilt_max_deg:g}: expected -90 to 90 degrees (a wedge of 0 degrees is -90 to 90)")
    if tilt_min_deg >= tilt_max_deg:
        raise SettingsError(f"tilt range {tilt_min_deg:g} to {tilt_max_deg:g}: expected the smaller angle first, and a range that is not empty")
    if tilt_axis not in ("x", "y"):
        raise SettingsError(f"tilt axis '{tilt_axis}': expected x or y")
    if not np.isfinite(smooth_voxels) or smooth_voxels < 0:
        raise SettingsError(f"smooth edge of {smooth_voxels} voxels: expected 0 or more")
    low, high = (-tilt_max_deg, -tilt_min_deg) if flip else (tilt_min_deg, tilt_max_deg)
    if tilt_axis == "x":
        low, high = -high, -low
    if turn is not None and not np.allclose(np.reshape(turn, (3, 3)), np.eye(3), atol=1e-9):
        return _turned_weights(box_size, low, high, tilt_axis, turn, smooth_voxels)

    n, h = box_size, box_size // 2 + 1
    k_all, k_half = np.fft.fftfreq(n, 1 / n), np.arange(h, dtype=np.float64)
    kz = k_all[:, None]
    across = (k_half if tilt_axis == "y" else k_all)[None, :]
    # a Nyquist voxel stands for both signs: it is kept when either is
    plane = _plane_weights(across, kz, low, high, smooth_voxels)
    if n % 2 == 0:
        plane[n // 2] = np.maximum(plane[n // 2], _plane_weights(across, -kz[n // 2 :][:1], low, high, smooth_voxels)[0])
        plane[:, n // 2] = np.maximum(plane[:, n // 2], _plane_weights(-across[:, n // 2 :][:, :1], kz, low, high, smooth_voxels)[:, 0])
    full = plane[:, None, :] if tilt_axis == "y" else plane[:, :, None]
    return np.ascontiguousarray(np.broadcast_to(full, (n, n, h)), dtype=np.float32)


def union_weights(box_size: int, tilt_ranges: Sequence[TiltRange]) -> NDArray[np.float32]:
    """Weights of all that some tilt ranges sample.

    Parameters
    ----------
    box_size : int
        Edge n in voxels.
    tilt_ranges : sequence of TiltRange
        One, or those of a dual-axis series.

    Returns
    -------
    (n, n, n//2+1) float32
        0 to 1; see the module's layout.

    Raises
    ------
    SettingsError
        As `tilt_range_weights`.
    """
    weights = np.zeros((box_size, box_size, box_size // 2 + 1), np.float32)
    for tilts in tilt_ranges:
        part = tilt_range_weights(
            box_size,
            tilts.tilt_min_deg,
            tilts.tilt_max_deg,
            tilt_axis=tilts.tilt_axis,
            flip=tilts.flip,
            smooth_voxels=tilts.smooth_voxels,
            turn=tilts.turn,
        )
        if tilts.cutoff_voxels:
            kx, ky, kz = _frequencies(box_size)
            part = np.where(kx * kx + ky * ky + kz * kz <= tilts.cutoff_voxels**2, part, np.float32(0))
        np.maximum(weights, part, out=weights)
    return weights


def _frequencies(n: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """kx, ky, kz of the module's layout, ready to be broadcast."""
    k_all, k_half = np.fft.fftfreq(n, 1 / n), np.arange(n // 2 + 1, dtype=np.float64)
    return k_half[None, None, :], k_all[None, :, None], k_all[:, None, None]


def _turned_weights(n: int, low_deg: float, high_deg: float, tilt_axis: str, turn: Sequence[float], smooth_voxels: float) -> NDArray[np.float32]:
    """Weights of a series whose axis and beam are turned: those of the plain series at R^-1 k."""
    inverse = np.reshape(turn, (3, 3)).T
    across = inverse[0 if tilt_axis == "y" else 1]

    def at(kx: NDArray[Any], ky: NDArray[Any], kz: NDArray[Any]) -> NDArray[Any]:
        across_beam, along_beam = (row[0] * kx + row[1] * ky + row[2] * kz for row in (across, inverse[2]))
        # a turn by a right angle must give the plain weights, whatever the last digits of its cosine
        return _plane_weights(np.round(across_beam, 9) + 0.0, np.round(along_beam, 9) + 0.0, low_deg, high_deg, smooth_voxels)

    kx, ky, kz = _frequencies(n)
    weights = at(kx, ky, kz)
    if n % 2 == 0:  # a Nyquist voxel stands for both signs: it is kept when either is
        m = n // 2
        weights[m] = np.maximum(weights[m], at(kx, ky, -kz[m:][:1])[0])
        weights[:, m] = np.maximum(weights[:, m], at(kx, -ky[:, m:][:, :1], kz)[:, 0])
        weights[:, :, m] = np.maximum(weights[:, :, m], at(-kx[:, :, m:], ky, kz)[:, :, 0])
    return np.ascontiguousarray(weights, dtype=np.float32)


def _plane_weights(across: NDArray[Any], kz: NDArray[Any], low_deg: float, high_deg: float, smooth_voxels: float) -> NDArray[Any]:
    """Weights in the plane across the tilt axis, for tilts that sample ``(across, z) = (cos t, -sin t)``."""
    across, kz = np.broadcast_arrays(across, kz)
    # k and -k are one: the tilt that samples k, in (-90, 90]
    sign = np.where((across < 0) | ((across == 0) & (kz > 0)), -1.0, 1.0)
    tilt_deg = np.rad2deg(np.arctan2(-kz * sign, across * sign))
    slack = 1e-9
    kept = ((tilt_deg >= low_deg - slack) & (tilt_deg <= high_deg + slack)) | ((across == 0) & (kz == 0))
    # +90 and -90 are one direction
    kept |= (across == 0) & ((low_deg <= -90 + slack) | (high_deg >= 90 - slack))
    weights = kept.astype(np.float64)
    if smooth_voxels > 0:
        apart_deg = np.minimum((low_deg - tilt_deg) % 180, (tilt_deg - high_deg) % 180)
        distance = np.hypot(across, kz) * np.sin(np.deg2rad(np.minimum(apart_deg, 90)))
        edge = 0.5 * (1 + np.cos(np.pi * np.minimum(distance / smooth_voxels, 1)))
        weights = np.where(kept, 1.0, edge)
    return weights
