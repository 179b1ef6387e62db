"""Weighted sums of particles on the device. See `numba_glocal.backends.protocols.SumSession`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...fourier import padded_offset
from ...shifts import angst_to_voxels
from ..protocols import ParticleBatch, SumSetup, WeightedSum
from . import kernels

if TYPE_CHECKING:
    from .backend import CUDABackend
    from .store import ParticleStore, Resident


class CUDASumSession:
    """See `protocols.SumSession`."""

    def __init__(self, backend: CUDABackend, setup: SumSetup) -> None:
        self.setup, self.backend = setup, backend
        self._n = setup.grid.binned_box_size
        self._reach = self._n // 2 - 1
        self._offset = padded_offset(self._reach)
        self._samples = backend.sum_samples(self._n)
        rows, columns = 2 * self._offset + 1, self._offset + 2
        self._shape = (rows, rows, columns)
        self._sums = cuda.device_array((3, rows * rows * columns), np.int64)
        kernels.clear_sums[-(-rows * rows * columns // 256), 256](self._sums)
        self._tables = cuda.to_device(np.stack([setup.noise.inverse_table(False), setup.noise.inverse_table(True)]))
        self._count = 0

    def add(
        self,
        particles: ParticleBatch,
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
        shares: NDArray[np.float64] | None = None,
    ) -> list[tuple[int, str]]:
        """Inserts particles at their poses, by their shares; returns (index, reason) of those left out."""
        store = self.backend.store(self.setup.grid)
        grid = self.setup.grid
        shifts = angst_to_voxels(shifts_angst, grid.pixel_size_angst, grid.box_size, self._n) / self._n
        parts = np.ones(len(particles.keys)) if shares is None else shares
        bad: list[tuple[int, str]] = []
        for resident in store.batches(particles, range(len(particles.keys)), bad):
            self._insert(store, resident, rotations[resident.index].reshape(-1, 9), shifts[resident.index], parts[resident.index])
        store.stream.synchronize()
        self._count += len(particles.keys) - len(bad)
        return sorted(bad)

    def _insert(
        self, store: ParticleStore, resident: Resident, rotations: NDArray[np.float64], shifts: NDArray[np.float64], parts: NDArray[np.float64]
    ) -> None:
        """Adds a batch that is on the device."""
        cubes, weights = store.cubes(resident), store.weights
        device_weights = weights.device()
        signed, table_scale, _ = weights.facts()
        stream, count = store.stream, len(resident)
        kernels.insert[(-(-self._samples.size // 128), count), 128, stream](
            self._sums,
            self._offset,
            self._n,
            cubes,
            store.cube.size,
            cuda.to_device(np.arange(count, dtype=np.int32), stream=stream),
            self._samples.cube_index,
            self._samples.k,
            device_weights,
            weights.size,
            cuda.to_device(resident.kinds, stream=stream),
            self._samples.weight_index,
            self._tables,
            signed,
            table_scale,
            cuda.to_device(rotations.astype(np.float32), stream=stream),
            cuda.to_device(shifts.astype(np.float32), stream=stream),
            cuda.to_device(parts.astype(np.float32), stream=stream),
        )

    def result(self) -> WeightedSum:
        """The sums so far."""
        voxels = self._sums.shape[1]
        numerator, denominator = cuda.device_array(2 * voxels, np.float32), cuda.device_array(voxels, np.float32)
        kernels.float_sums[-(-voxels // 256), 256](self._sums, numerator, denominator)
        return WeightedSum(
            numerator.copy_to_host().view(np.complex64).reshape(self._shape), denominator.copy_to_host().reshape(self._shape), self._count
        )

    def close(self) -> None:
        """Gives the sums' memory back."""
        self._sums = None
