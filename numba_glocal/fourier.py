"""Fourier layouts, and every transform of the CPU (pyFFTW).

Two layouts are used throughout:

* the **grid half-spectrum** of an n box: ``rfftn`` layout ``[kz, ky, kx]``, origin in the corner, kx = 0 .. n // 2;
* the **padded, band-cropped spectrum**: the volume zero-padded to twice its box, divided by the trilinear kernel's transform
  (sinc^2), transformed, and cropped to the band. It is indexed ``[z, y, x]`` with ``z = 2 kz + c``, ``y = 2 ky + c``, ``x = 2 kx``
  and ``c = 2 k_max + 3``; kx < 0 follows from Friedel's law. Interpolating it linearly gives the transform anywhere in the band.

In both, the volume's centre is voxel ``n // 2``, so a centred real even map has a real transform.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyfftw
from numpy.typing import NDArray

PAD = 2
"""Padding factor of spectra that are interpolated."""

_plans: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_plans_lock = threading.Lock()
_MAX_PLANS = 24


def _plan(kind: str, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Any:
    """A pyFFTW plan with its own buffers, kept in a bounded cache (many box sizes in one run must not pile up)."""
    key = (kind, shape, axes, dtype)
    if key in _plans:
        _plans.move_to_end(key)
        return _plans[key]
    real, cplx = ("float32", "complex64") if dtype == "single" else ("float64", "complex128")
    half = list(shape)
    half[axes[-1]] = shape[axes[-1]] // 2 + 1
    if kind == "r2c":
        a, b = pyfftw.empty_aligned(shape, real), pyfftw.empty_aligned(tuple(half), cplx)
        plan = pyfftw.FFTW(a, b, axes=axes, direction="FFTW_FORWARD", flags=("FFTW_ESTIMATE",), threads=1)
    elif kind == "c2r":
        a, b = pyfftw.empty_aligned(tuple(half), cplx), pyfftw.empty_aligned(shape, real)
        plan = pyfftw.FFTW(a, b, axes=axes, direction="FFTW_BACKWARD", flags=("FFTW_ESTIMATE", "FFTW_DESTROY_INPUT"), threads=1)
    else:
        a = pyfftw.empty_aligned(shape, cplx)
        plan = pyfftw.FFTW(a, a, axes=axes, direction="FFTW_FORWARD" if kind == "c2c" else "FFTW_BACKWARD", flags=("FFTW_ESTIMATE",), threads=1)
    _plans[key] = plan
    while len(_plans) > _MAX_PLANS:
        _plans.popitem(last=False)
    return plan


def _precision(dtype: Any) -> str:
    return "double" if np.dtype(dtype) in (np.dtype(np.float64), np.dtype(np.complex128)) else "single"


def rfftn(volume: NDArray[np.floating[Any]]) -> NDArray[np.complexfloating[Any, Any]]:
    """Transform of a real volume, corner origin in and out; float64 stays double, all else is single precision."""
    with _plans_lock:
        plan = _plan("r2c", volume.shape, tuple(range(volume.ndim)), _precision(volume.dtype))
        plan.input_array[...] = volume
        plan.execute()
        return plan.output_array.copy()


def irfftn(spectrum: NDArray[np.complexfloating[Any, Any]], box_size: int) -> NDArray[np.floating[Any]]:
    """Inverse of `rfftn` for a cubic box of `box_size`, normalised."""
    shape = (box_size,) * spectrum.ndim
    with _plans_lock:
        plan = _plan("c2r", shape, tuple(range(spectrum.ndim)), _precision(spectrum.dtype))
        plan.input_array[...] = spectrum
        plan.execute()
        return plan.output_array / plan.output_array.dtype.type(plan.output_array.size)


def centred_rfftn(volume: NDArray[np.floating[Any]]) -> NDArray[np.complexfloating[Any, Any]]:
    """Grid half-spectrum of a volume whose centre is voxel ``n // 2``."""
    return rfftn(np.fft.ifftshift(volume))


def centred_irfftn(spectrum: NDArray[np.complexfloating[Any, Any]], box_size: int) -> NDArray[np.floating[Any]]:
    """Volume, centre ``n // 2``, of a grid half-spectrum."""
    return np.fft.fftshift(irfftn(spectrum, box_size))


@lru_cache(maxsize=8)
def grid_frequencies(box_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Integer frequencies ``kz, ky, kx`` of the grid half-spectrum, shaped to broadcast."""
    k = np.fft.fftfreq(box_size) * box_size
    half = np.arange(box_size // 2 + 1, dtype=np.float64)
    return np.rint(k)[:, None, None], np.rint(k)[None, :, None], half[None, None, :]


@lru_cache(maxsize=8)
def grid_shells(box_size: int) -> NDArray[np.int32]:
    """Shell number (rounded radius) of every sample of the grid half-spectrum."""
    kz, ky, kx = grid_frequencies(box_size)
    shells = np.rint(np.sqrt(kz * kz + ky * ky + kx * kx)).astype(np.int32)
    shells.setflags(write=False)
    return shells


@lru_cache(maxsize=8)
def grid_multiplicity(box_size: int) -> NDArray[np.float64]:
    """How often a sample of the half-spectrum stands for one of the whole spectrum: 1 on kx = 0 (and Nyquist), else 2."""
    weight = np.full(box_size // 2 + 1, 2.0)
    weight[0] = 1.0
    if box_size % 2 == 0:
        weight[-1] = 1.0
    return np.broadcast_to(weight, (box_size, box_size, box_size // 2 + 1))


def max_band(box_size: int) -> int:
    """Largest k_max whose padded crop stays inside the padded spectrum."""
    return box_size // 2 - 2


@dataclass(frozen=True, slots=True)
class GridBand:
    """The half of the grid samples with 0 < |k| <= k_max, in grid order (z, y, x), each Friedel pair once.

    Attributes
    ----------
    k : (m, 3) float32
        Integer frequencies ``(x, y, z)``.
    index : (m,) int64
        Their places in the flattened grid half-spectrum.
    shell : (m,) int32
        Rounded radius.
    radius2 : (m,) float32
        Squared radius.
    """

    box_size: int
    k_max: float
    k: NDArray[np.float32]
    index: NDArray[np.int64]
    shell: NDArray[np.int32]
    radius2: NDArray[np.float32]


@lru_cache(maxsize=16)
def grid_band(box_size: int, k_max: float) -> GridBand:
    """The grid samples of a band; cached."""
    kz, ky, kx = np.broadcast_arrays(*grid_frequencies(box_size))
    radius2 = kz * kz + ky * ky + kx * kx
    once = (kx > 0) | (ky > 0) | ((ky == 0) & (kz > 0))
    inside = (radius2 <= k_max * k_max + 1e-6) & once
    if box_size % 2 == 0:  # the Nyquist planes stand for +n/2 and -n/2 at once
        nyquist = box_size // 2
        inside &= (np.abs(kz) < nyquist) & (np.abs(ky) < nyquist) & (kx < nyquist)
    index = np.flatnonzero(inside)
    k = np.stack([kx.ravel()[index], ky.ravel()[index], kz.ravel()[index]], axis=1).astype(np.float32)
    # order along z, y, x with signed frequencies, so that neighbours in memory are neighbours in the spectrum
    order = np.lexsort((k[:, 0], k[:, 1], k[:, 2]))
    index, k = index[order], np.ascontiguousarray(k[order])
    shell = grid_shells(box_size).ravel()[index]
    # kernels are compiled for writable arrays, so these are left writable; nobody writes to them
    return GridBand(box_size, float(k_max), k, index, shell, (k * k).sum(1))


@lru_cache(maxsize=8)
def _sinc2(box_size: int) -> NDArray[np.float32]:
    x = (np.arange(box_size) - box_size // 2) / (PAD * box_size)
    return (np.sinc(x) ** 2).astype(np.float32)


def sinc2_correction(box_size: int) -> NDArray[np.float32]:
    """Transform of the trilinear kernel on the unpadded box, (n, n, n): divide by it before, or after, interpolating in Fourier space."""
    s = _sinc2(box_size)
    return s[:, None, None] * s[None, :, None] * s[None, None, :]


def padded_offset(k_max: float) -> int:
    """Index ``c`` of frequency 0 along z and y of a padded, band-cropped spectrum."""
    return PAD * int(np.ceil(k_max)) + 3


def padded_spectrum(volume: NDArray[np.floating[Any]], k_max: float) -> NDArray[np.complex64]:
    """Padded, band-cropped spectrum of a volume (see the module's head).

    The three passes transform only rows that are not zero and keep only columns inside the band, about a third of the
    work of a whole padded transform.

    Parameters
    ----------
    volume : (n, n, n)
        Centre at ``n // 2``.
    k_max : float
        Band in voxels^-1 of the unpadded grid, at most `max_band`.

    Returns
    -------
    (2 c + 1, 2 c + 1, c + 1) complex64
    """
    n = volume.shape[0]
    padded, centre, c = PAD * n, n // 2, padded_offset(k_max)
    if c > n:
        raise ValueError(f"band {k_max} of a {n} box is over its limit {max_band(n)}")
    s = 1.0 / _sinc2(n)
    right = n - centre  # voxels from the centre on; they go to the front of a padded row, the others to its end

    def spread(target: NDArray[Any], source: NDArray[Any], axis: int) -> None:
        t, v = np.moveaxis(target, axis, 0), np.moveaxis(source, axis, 0)
        t[:right], t[right : padded - centre], t[padded - centre :] = v[centre:], 0, v[:centre]

    def crop(source: NDArray[Any], axis: int) -> NDArray[Any]:
        v = np.moveaxis(source, axis, 0)
        return np.moveaxis(np.concatenate([v[padded - c :], v[: c + 1]]), 0, axis)

    with _plans_lock:
        plan = _plan("r2c", (n, n, padded), (2,), "single")
        spread(plan.input_array, volume * (s[:, None, None] * s[None, :, None] * s[None, None, :]), 2)
        plan.execute()
        rows = plan.output_array[:, :, : c + 1]
        plan = _plan("c2c", (n, padded, c + 1), (1,), "single")
        spread(plan.input_array, rows, 1)
        plan.execute()
        planes = crop(plan.input_array, 1)
        plan = _plan("c2c", (padded, 2 * c + 1, c + 1), (0,), "single")
        spread(plan.input_array, planes, 0)
        plan.execute()
        return np.ascontiguousarray(crop(plan.input_array, 0))
