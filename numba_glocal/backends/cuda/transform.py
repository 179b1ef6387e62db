"""Cropped Fourier transforms on the device, and the samples of a grid band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...fourier import PAD, GridBand, padded_offset
from . import kernels

SPARE_BYTES = 1 << 16
"""Room after the last spectrum of an array: the four neighbours of a sample at the band's edge are read two by two."""


def _transform_matrices(n: int, reach: int, padded: bool) -> tuple[NDArray[np.complex64], NDArray[np.complex64]]:
    """Transform along x (columns 0 ..) and along y or z (rows -.. to +..), sinc correction included where padded."""
    x = np.arange(n) - n // 2
    if padded:
        c = padded_offset(reach)
        scale, correction = PAD * n, np.sinc(x / (PAD * n)) ** 2
    else:
        c, scale, correction = reach, n, np.ones(n)
    along = np.exp(-2j * np.pi / scale * np.outer(np.arange(-c, c + 1), x)) / correction
    return along[c:].T.astype(np.complex64), along.astype(np.complex64)  # (n, c + 1), (2 c + 1, n)


class Transform:
    """Cropped Fourier transforms of batches of real volumes by three products with DFT matrices: no FFT library is needed."""

    def __init__(self, n: int, reach: int, padded: bool) -> None:
        self.n = n
        self.c = padded_offset(reach) if padded else reach
        to_x, to_yz = _transform_matrices(n, reach, padded)
        self._x = cuda.to_device(np.ascontiguousarray(to_x).view(np.float32).ravel())
        self._yz = cuda.to_device(np.ascontiguousarray(to_yz).view(np.float32).ravel())
        self.size = 2 * (2 * self.c + 1) ** 2 * (self.c + 1)
        self._work: tuple[Any, Any] | None = None
        self._batch = 0

    def __call__(self, volumes: Any, count: int, out: Any) -> None:
        """Transforms `count` volumes of a (p, n^3) device array into `out`, a flat device array of count * size."""
        n, c = self.n, self.c
        rows, columns = 2 * c + 1, c + 1
        if self._work is None or self._batch < count:
            self._work = None
            self._work = cuda.device_array(count * n * n * columns * 2, np.float32), cuda.device_array(count * n * rows * columns * 2, np.float32)
            self._batch = count
        first, second = self._work
        threads = (16, 16)

        def launch(grid_rows: int, grid_columns: int, batch: int, *arguments: Any) -> None:
            kernels.contract[(-(-grid_columns // kernels.WIDE_TILE), -(-grid_rows // kernels.WIDE_TILE), batch), threads](
                *arguments, grid_rows, grid_columns, n
            )

        flat = volumes.reshape(volumes.size)
        # along x: (n n, n) by (n, columns), a particle a batch
        launch(n * n, columns, count, flat, n**3, n, 1, 0, self._x, 0, columns, 1, 1, first, n * n * columns, columns, 1)
        # along y: (rows, n) by (n, columns), a z plane of a particle a batch
        launch(rows, columns, count * n, self._yz, 0, n, 1, 1, first, n * columns, columns, 1, 1, second, rows * columns, columns, 1)
        # along z: (rows, n) by (n, rows columns), a particle a batch
        plane = rows * columns
        launch(rows, plane, count, self._yz, 0, n, 1, 1, second, n * plane, plane, 1, 1, out, rows * plane, plane, 1)


@dataclass(slots=True)
class BandOnDevice:
    """Samples of a grid band: where they are in a cube and in a weight, k, shell."""

    cube_index: Any
    k: Any
    weight_index: Any
    shell: Any
    size: int


def band_on_device(band: GridBand, chosen: NDArray[np.intp], cube_reach: int) -> BandOnDevice:
    k = band.k[chosen].astype(np.int32)
    rows = 2 * cube_reach + 1
    at = ((k[:, 2] + cube_reach) * rows + k[:, 1] + cube_reach) * (cube_reach + 1) + k[:, 0]
    return BandOnDevice(
        cuda.to_device(at.astype(np.int32)),
        cuda.to_device(np.ascontiguousarray(k.astype(np.int16)).ravel()),
        cuda.to_device(band.index[chosen].astype(np.int32)),
        cuda.to_device(band.shell[chosen].astype(np.int32)),
        len(chosen),
    )
