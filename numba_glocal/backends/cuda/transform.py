"""Cropped Fourier transforms on the device, and the samples of a grid band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...fourier import PAD, GridBand, padded_offset
from . import contraction

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


class Scratch:
    """What the passes of a transform leave for each other.

    Parameters
    ----------
    n : int
        Box.
    c : int
        Largest row offset of the transforms it serves (`Transform.c`).
    batch : int
        Volumes at once.
    """

    def __init__(self, n: int, c: int, batch: int) -> None:
        self.first = cuda.device_array(batch * n * n * (c + 1) * 2, np.float32)
        self.second = cuda.device_array(batch * n * (2 * c + 1) * (c + 1) * 2, np.float32)

    @staticmethod
    def floats(n: int, c: int) -> int:
        """Numbers for one volume."""
        return 2 * n * (c + 1) * (n + 2 * c + 1)


class Transform:
    """Cropped Fourier transforms of batches of real volumes by three products with DFT matrices: no FFT library is needed."""

    def __init__(self, n: int, reach: int, padded: bool) -> None:
        self.n = n
        self.c = padded_offset(reach) if padded else reach
        to_x, to_yz = _transform_matrices(n, reach, padded)
        self._x = cuda.to_device(np.ascontiguousarray(to_x).view(np.float32).ravel())
        self._yz = cuda.to_device(np.ascontiguousarray(to_yz).view(np.float32).ravel())
        self.size = self.size_of(self.c)

    @staticmethod
    def size_of(c: int) -> int:
        """Numbers of one spectrum with the row offset `c`."""
        return 2 * (2 * c + 1) ** 2 * (c + 1)

    def __call__(self, volumes: Any, count: int, out: Any, scratch: Scratch | None = None, stream: Any = 0) -> None:
        """Transforms volumes.

        Parameters
        ----------
        volumes : (p, n^3) float32 device array
        count : int
            So many of them.
        out : flat float32 device array
            ``count * size`` values are written.
        scratch : Scratch, optional
            For at least `count` volumes of at least this reach; by default the transform makes its own.
        stream : stream, optional
        """
        n, c = self.n, self.c
        rows, columns = 2 * c + 1, c + 1
        if scratch is None:
            scratch = Scratch(n, c, count)
        first, second = scratch.first, scratch.second
        threads = (16, 16)

        def launch(grid_rows: int, grid_columns: int, batch: int, *arguments: Any) -> None:
            contraction.contract[(-(-grid_columns // contraction.WIDE_TILE), -(-grid_rows // contraction.WIDE_TILE), batch), threads, stream](
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
