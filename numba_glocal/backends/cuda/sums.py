"""Weighted sums of particles on the device. See `numba_glocal.backends.protocols.SumSession`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...fourier import padded_offset
from ...noise import NoiseModels, relative_inverse_sigma2
from ...shifts import angst_to_voxels
from ..protocols import ParticleBatch, SumSetup, WeightedSum
from . import insertion

if TYPE_CHECKING:
    from .backend import CUDABackend
    from .store import ParticleStore, Resident


def tables_on_device(models: NoiseModels) -> Any:
    """1 / V of each group, (2 groups, TABLE_SIZE) float32: row ``2 group + signed``."""
    return cuda.to_device(np.stack([model.inverse_table(signed) for model in models for signed in (False, True)]))


def gains_on_device(models: NoiseModels) -> Any:
    """Scale of each group's signal, (groups,) float32."""
    return cuda.to_device(np.array([model.gain for model in models], np.float32))


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
        insertion.clear_sums[-(-rows * rows * columns // 256), 256](self._sums)
        self._tables, self._gains = tables_on_device(setup.models), gains_on_device(setup.models)
        self._relative = cuda.to_device(relative_inverse_sigma2(setup.models))
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
        groups = particles.groups_of(self.setup.models)
        parts = np.ones(len(particles.keys)) if shares is None else shares
        bad: list[tuple[int, str]] = []
        for resident in store.batches(particles, range(len(particles.keys)), bad):
            index = resident.index
            self._insert(store, resident, groups[index], rotations[index].reshape(-1, 9), shifts[index], parts[index])
        store.stream.synchronize()
        self._count += len(particles.keys) - len(bad)
        return sorted(bad)

    def _insert(
        self,
        store: ParticleStore,
        resident: Resident,
        groups: NDArray[np.int32],
        rotations: NDArray[np.float64],
        shifts: NDArray[np.float64],
        parts: NDArray[np.float64],
    ) -> None:
        """Adds a batch that is on the device."""
        cubes, weights = store.cubes(resident), store.weights
        device_weights = weights.device()
        signed, table_scale, _ = weights.facts()
        stream, count = store.stream, len(resident)
        insertion.insert[(-(-self._samples.size // 128), count), 128, stream](
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
            self._samples.shell,
            self._tables,
            signed,
            table_scale,
            self._relative,
            self._gains,
            cuda.to_device(groups, stream=stream),
            cuda.to_device(rotations.astype(np.float32), stream=stream),
            cuda.to_device(shifts.astype(np.float32), stream=stream),
            cuda.to_device(parts.astype(np.float32), stream=stream),
        )

    def result(self) -> WeightedSum:
        """The sums so far."""
        voxels = self._sums.shape[1]
        numerator, denominator = cuda.device_array(2 * voxels, np.float32), cuda.device_array(voxels, np.float32)
        insertion.float_sums[-(-voxels // 256), 256](self._sums, numerator, denominator)
        return WeightedSum(
            numerator.copy_to_host().view(np.complex64).reshape(self._shape), denominator.copy_to_host().reshape(self._shape), self._count
        )

    def close(self) -> None:
        """Gives the sums' memory back."""
        self._sums = None
