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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pyfftw
from numpy.typing import NDArray

PAD = 2
"""Padding factor of spectra that are interpolated."""

_MAX_PLANS = 24
_BLOCK_BYTES = 1 << 20
_MOST_THREADS = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Threads:
    """The threads of this process that work on one volume; none until `use_threads` says so."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self.inside = threading.local()


_threads = _Threads()


def use_threads(count: int) -> None:
    """How many threads `in_parallel` may use in this process: 1 in workers (and until this is called), the idle cores in the parent.

    No result depends on it: work is cut by the box alone, and every transform is planned for one thread.
    """
    count = min(count, _MOST_THREADS)
    if _threads.pool is not None:
        _threads.pool.shutdown(wait=True)
    _threads.pool = ThreadPoolExecutor(count, thread_name_prefix="volume") if count > 1 else None


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``[function(item) for item in items]`` on the threads of `use_threads`; within such a thread, one after the other."""
    pool = None if getattr(_threads.inside, "busy", False) else _threads.pool
    if pool is None:
        return [function(item) for item in items]

    def work(item: Item) -> Result:
        _threads.inside.busy = True
        return function(item)

    return list(pool.map(work, items))


_free_plans: dict[tuple[Any, ...], list[Any]] = {}
_plans_lock = threading.Lock()


@contextmanager
def _plan(kind: str, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Iterator[Any]:
    """A pyFFTW plan with its own buffers, lent to one thread at a time; a bounded number is kept (many box sizes in one run must not pile up)."""
    key = (kind, shape, axes, dtype)
    with _plans_lock:  # FFTW's planner serves one thread at a time
        free = _free_plans.get(key)
        plan = free.pop() if free else _make_plan(*key)
    try:
        yield plan
    finally:
        with _plans_lock:
            _free_plans.setdefault(key, []).append(plan)
            _free_plans[key] = _free_plans.pop(key)  # the last used stand at the end
            while sum(map(len, _free_plans.values())) > _MAX_PLANS + _MOST_THREADS:
                first = next(iter(_free_plans))
                _free_plans[first].pop()
                if not _free_plans[first]:
                    del _free_plans[first]


def _make_plan(kind: str, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Any:
    real, cplx = ("float32", "complex64") if dtype == "single" else ("float64", "complex128")
    half = list(shape)
    half[axes[-1]] = shape[axes[-1]] // 2 + 1
    if kind == "r2c":
        a, b = pyfftw.empty_aligned(shape, real), pyfftw.empty_aligned(tuple(half), cplx)
        return pyfftw.FFTW(a, b, axes=axes, direction="FFTW_FORWARD", flags=("FFTW_ESTIMATE",), threads=1)
    if kind == "c2r":
        a, b = pyfftw.empty_aligned(tuple(half), cplx), pyfftw.empty_aligned(shape, real)
        return pyfftw.FFTW(a, b, axes=axes, direction="FFTW_BACKWARD", flags=("FFTW_ESTIMATE", "FFTW_DESTROY_INPUT"), threads=1)
    a = pyfftw.empty_aligned(shape, cplx)
    direction = "FFTW_FORWARD" if kind == "c2c" else "FFTW_BACKWARD"
    return pyfftw.FFTW(a, a, axes=axes, direction=direction, flags=("FFTW_ESTIMATE",), threads=1)


def _precision(dtype: Any) -> str:
    return "double" if np.dtype(dtype) in (np.dtype(np.float64), np.dtype(np.complex128)) else "single"


def rfftn(volume: NDArray[np.floating[Any]]) -> NDArray[np.complexfloating[Any, Any]]:
    """Transform of a real volume, corner origin in and out; float64 stays double, all else is single precision."""
    with _plan("r2c", volume.shape, tuple(range(volume.ndim)), _precision(volume.dtype)) as plan:
        plan.input_array[...] = volume
        plan.execute()
        return plan.output_array.copy()


def irfftn(spectrum: NDArray[np.complexfloating[Any, Any]], box_size: int) -> NDArray[np.floating[Any]]:
    """Inverse of `rfftn` for a cubic box of `box_size`, normalised."""
    shape = (box_size,) * spectrum.ndim
    with _plan("c2r", shape, tuple(range(spectrum.ndim)), _precision(spectrum.dtype)) as plan:
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

    with _plan("r2c", (n, n, padded), (2,), "single") as along_x, _plan("c2c", (n, padded, c + 1), (1,), "single") as along_y:
        spread(along_x.input_array, volume * (s[:, None, None] * s[None, :, None] * s[None, None, :]), 2)
        along_x.execute()
        spread(along_y.input_array, along_x.output_array[:, :, : c + 1], 1)
        along_y.execute()
        planes = crop(along_y.input_array, 1)
    with _plan("c2c", (padded, 2 * c + 1, c + 1), (0,), "single") as along_z:
        spread(along_z.input_array, planes, 0)
        along_z.execute()
        return np.ascontiguousarray(crop(along_z.input_array, 0))


def central_irfftn(fill: Callable[[int, NDArray[np.complex64]], None], box_size: int) -> NDArray[np.float32]:
    """The central box of a padded volume, from a padded half-spectrum that is never held as a whole.

    The box is cut out after each pass, so that later passes transform fewer rows; blocks of rows, whose size depends on the box alone, go to
    the threads of `use_threads`.

    Parameters
    ----------
    fill : callable
        ``fill(first, block)`` writes rows of the half-spectrum (corner origin): ``block[j, kz, kx]``, (b, PAD n, n + 1), is ky row ``first + j``;
        rows from ``PAD n`` on are not looked at.
    box_size : int
        n.

    Returns
    -------
    (n, n, n) float32
        Normalised; centre at ``n // 2``.
    """
    n, padded, before = box_size, PAD * box_size, box_size // 2
    columns = n + 1
    rows = int(max(1, min(16, _BLOCK_BYTES // (8 * padded * columns))))
    shape = (rows, padded, columns)
    half = np.empty((n, padded, columns), np.complex64)
    volume = np.empty((n, n, n), np.float32)
    scale = np.float32(1.0 / float(padded) ** 3)

    def along_z(first: int) -> None:
        last = min(first + rows, padded)
        with _plan("c2c_inverse", shape, (1,), "single") as plan:
            block = plan.input_array
            fill(first, block)
            plan.execute()
            turned = block[: last - first].transpose(1, 0, 2)
            half[:before, first:last], half[before:, first:last] = turned[padded - before :], turned[: n - before]

    def along_y_and_x(first: int) -> None:
        last = min(first + rows, n)
        with _plan("c2c_inverse", shape, (1,), "single") as plan, _plan("c2r", (rows, n, padded), (2,), "single") as final:
            block, cut = plan.input_array, final.input_array
            block[: last - first] = half[first:last]
            plan.execute()
            cut[:, :before], cut[:, before:] = block[:, padded - before :], block[:, : n - before]
            final.execute()
            real = final.output_array[: last - first]
            np.multiply(real[..., padded - before :], scale, out=volume[first:last, :, :before])
            np.multiply(real[..., : n - before], scale, out=volume[first:last, :, before:])

    in_parallel(along_z, range(0, padded, rows))
    in_parallel(along_y_and_x, range(0, n, rows))
    return volume
