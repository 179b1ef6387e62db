"""Weighted sums of particles on the device. See `numba_glocal.backends.protocols.SumSession`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...errors import BadParticleError
from ...fourier import grid_band, padded_offset
from ...shifts import angst_to_voxels
from ..protocols import ParticleBatch, SumSetup, WeightedSum
from . import kernels
from .pool import Pool, read_all
from .transform import band_on_device

if TYPE_CHECKING:
    from .backend import CUDABackend


class CUDASumSession:
    """See `protocols.SumSession`."""

    def __init__(self, backend: CUDABackend, setup: SumSetup) -> None:
        self.setup, self.backend = setup, backend
        self._n = setup.grid.binned_box_size
        self._reach = self._n // 2 - 1
        self._offset = padded_offset(self._reach)
        band = grid_band(self._n, float(self._reach))
        self._samples = band_on_device(band, np.arange(len(band.index)), self._reach)
        rows, columns = 2 * self._offset + 1, self._offset + 2
        self._shape = (rows, rows, columns)
        self._sums = cuda.to_device(np.zeros((3, rows * rows * columns), np.int64))
        self._tables = cuda.to_device(np.stack([setup.noise.inverse_table(False), setup.noise.inverse_table(True)]))
        self._count = 0

    def add(self, particles: ParticleBatch, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> list[tuple[int, str]]:
        """Inserts particles at their poses; returns (index, reason) of those left out."""
        n = self._n
        weights = self.backend.weights(n)
        bad: list[tuple[int, str]] = []
        count = len(particles.keys)
        slots, kinds, usable = np.zeros(count, np.int32), np.zeros(count, np.int32), np.ones(count, bool)
        held = self.backend.held(n)
        in_search = np.zeros(count, bool)
        if held is not None:
            for index, name in enumerate(particles.keys):
                found = held.slots.get((name, self.setup.normalise_mask))
                if found is not None:
                    slots[index], kinds[index] = found
                    in_search[index] = True
        if not in_search.all():
            pool = self.backend.pool("sum", n, 0, self._reach, False)
            bad = self._load_rest(particles, pool, np.flatnonzero(~in_search), slots, kinds, usable)
            self._insert(np.flatnonzero(usable & ~in_search), pool.cubes[0], pool.cube.size, slots, kinds, rotations, shifts_angst)
        if held is not None and held.sum is not None:
            self._insert(np.flatnonzero(in_search), held.sum_cubes, held.sum.size, slots, kinds, rotations, shifts_angst)
        self._count += int(usable.sum())
        assert weights is self.backend.weights(n)
        return bad

    def _load_rest(
        self,
        particles: ParticleBatch,
        pool: Pool,
        rest: NDArray[np.intp],
        slots: NDArray[np.int32],
        kinds: NDArray[np.int32],
        usable: NDArray[np.bool_],
    ) -> list[tuple[int, str]]:
        """Particles that no search has brought to the device: read, uploaded and transformed for the sum alone."""
        weights = self.backend.weights(self._n)
        bad: list[tuple[int, str]] = []
        busy: set[int] = set()
        missing = []
        for index in map(int, rest):
            found = pool.slots.get(particles.keys[index])
            if found is None:
                missing.append(index)
            else:
                slots[index], kinds[index] = found
                busy.add(int(slots[index]))
        volumes: list[NDArray[np.float32]] = []
        taken: list[int] = []
        for item in read_all(particles, missing):
            index = item[0]
            if isinstance(item[1], BadParticleError):
                usable[index] = False
                bad.append((index, item[1].reason))
                continue
            _, volume, weight = item
            kinds[index] = weights.add(weight).row
            slot = pool.slots.take(particles.keys[index], int(kinds[index]), busy)
            busy.add(slot)
            slots[index] = slot
            volumes.append(volume)
            taken.append(slot)
            if len(volumes) == pool.batch:
                pool.prepare(volumes, taken, None, None)
                volumes, taken = [], []
        if volumes:
            pool.prepare(volumes, taken, None, None)
        return sorted(bad)

    def _insert(
        self,
        p: NDArray[np.intp],
        cubes: Any,
        cube_size: int,
        slots: NDArray[np.int32],
        kinds: NDArray[np.int32],
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
    ) -> None:
        """Adds particles that are on the device."""
        if not len(p):
            return
        grid, n = self.setup.grid, self._n
        weights = self.backend.weights(n)
        shifts = angst_to_voxels(shifts_angst[p], grid.pixel_size_angst, grid.box_size, n) / n
        device_weights = weights.device()
        signed, table_scale, _ = weights.facts()
        kernels.insert[(-(-self._samples.size // 128), len(p)), 128](
            self._sums,
            self._offset,
            n,
            cubes,
            cube_size,
            cuda.to_device(slots[p]),
            self._samples.cube_index,
            self._samples.k,
            device_weights,
            weights.size,
            cuda.to_device(kinds[p]),
            self._samples.weight_index,
            self._tables,
            signed,
            table_scale,
            cuda.to_device(rotations[p].reshape(-1, 9).astype(np.float32)),
            cuda.to_device(shifts.astype(np.float32)),
        )

    def result(self) -> WeightedSum:
        """The sums so far."""
        sums = self._sums.copy_to_host()
        numerator = np.empty(self._shape, np.complex64)
        numerator.real = (sums[0] / kernels.NUMERATOR_SCALE).reshape(self._shape)
        numerator.imag = (sums[1] / kernels.NUMERATOR_SCALE).reshape(self._shape)
        return WeightedSum(numerator, (sums[2] / kernels.DENOMINATOR_SCALE).astype(np.float32).reshape(self._shape), self._count)

    def close(self) -> None:
        """Gives the sums' memory back."""
        self._sums = None
