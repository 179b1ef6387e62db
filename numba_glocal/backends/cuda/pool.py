"""Prepared particles on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config
from numpy.typing import NDArray

from ...errors import BadParticleError, DeviceError
from ...fourier import PAD
from ..protocols import ParticleBatch
from . import kernels
from .transform import SPARE_BYTES, Transform

_READERS = 6


class Slots:
    """Slots of a pool, least recently used first out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slot_of: OrderedDict[Hashable, int] = OrderedDict()
        self._facts: dict[Hashable, Any] = {}
        self._free = list(range(capacity - 1, -1, -1))

    def get(self, key: Hashable) -> tuple[int, Any] | None:
        """Slot and facts of a particle that is there."""
        if key not in self._slot_of:
            return None
        self._slot_of.move_to_end(key)
        return self._slot_of[key], self._facts[key]

    def take(self, key: Hashable, facts: Any, busy: set[int]) -> int:
        """A slot for a new particle; those in `busy` are not taken away."""
        if not self._free:
            for old, slot in self._slot_of.items():
                if slot not in busy:
                    del self._slot_of[old], self._facts[old]
                    self._free.append(slot)
                    break
            else:
                raise DeviceError(
                    "the GPU's memory does not hold one chunk of particles; use fewer workers a GPU, --binning, or a larger --gpu-memory"
                )
        slot = self._free.pop()
        self._slot_of[key], self._facts[key] = slot, facts
        return slot


class Pool:
    """Prepared particles on the device: padded spectra and cubes, in slots.

    Parameters
    ----------
    n : int
        Worked box.
    reach : int
        Band of the padded spectra; 0: only cubes.
    cube_reach : int
        Band of the cubes.
    unmasked : bool
        Whether unmasked cubes and padded spectra are needed too (flcf).
    budget_bytes : int
    sum_reach : int
        Band of the unmasked cubes that averages need; 0: none. A search pool holds them too, so that a particle is read and uploaded once.
    """

    def __init__(self, n: int, reach: int, cube_reach: int, unmasked: bool, budget_bytes: int, sum_reach: int = 0) -> None:
        self.n, self.reach, self.cube_reach, self.unmasked = n, reach, cube_reach, unmasked
        self.pad = Transform(n, reach, True) if reach else None
        self.cube = Transform(n, cube_reach, False)
        kinds = 2 if unmasked else 1
        self.sum = Transform(n, sum_reach, False) if sum_reach else None
        self.slot_bytes = 4 * (kinds * ((self.pad.size if self.pad else 0) + self.cube.size) + (self.sum.size if self.sum else 0))
        capacity = int(max(8, min(budget_bytes // self.slot_bytes, 1 << 17)))
        self.slots = Slots(capacity)
        self.batch = int(max(1, min(64, (256 << 20) // (8 * PAD * n**3 * 4))))
        # a little room after the last slot: the four neighbours of a sample at the band's edge are read two by two
        spare = SPARE_BYTES // 4
        self.spectra = [cuda.device_array(capacity * self.pad.size + spare, np.float32) for _ in range(kinds)] if self.pad else []
        self.cubes = [cuda.device_array(capacity * self.cube.size + spare, np.float32) for _ in range(kinds)]
        self.sum_cubes = cuda.device_array(capacity * self.sum.size + spare, np.float32) if self.sum else None
        self._masked = cuda.device_array((self.batch, n**3), np.float32)
        self._pinned = [np.empty((self.batch, n**3), np.float32) if config.ENABLE_CUDASIM else cuda.pinned_array((self.batch, n**3), np.float32)]

    def prepare(self, volumes: list[NDArray[np.float32]], slots: list[int], mask: Any, outside: NDArray[np.bool_] | None) -> None:
        """Uploads volumes, masks them (when there is a mask) and transforms them into their slots."""
        for first in range(0, len(volumes), self.batch):
            part = volumes[first : first + self.batch]
            count = len(part)
            staged = self._pinned[0]
            levels = np.zeros(count, np.float32)
            for i, volume in enumerate(part):
                staged[i] = volume.reshape(-1)
                if outside is not None:
                    levels[i] = volume[outside].mean() if outside.any() else volume.mean()
            raw = cuda.to_device(staged[:count])
            kinds: list[Any] = [raw]
            if mask is not None:
                kernels.mask_particles[(-(-(self.n**3) // 256), count), 256](raw, mask, cuda.to_device(levels), self._masked[:count])
                kinds = [self._masked]
                if self.unmasked:
                    level_only = cuda.device_array((count, self.n**3), np.float32)
                    ones = cuda.to_device(np.ones(self.n**3, np.float32))
                    kernels.mask_particles[(-(-(self.n**3) // 256), count), 256](raw, ones, cuda.to_device(levels), level_only)
                    kinds.append(level_only)
            if self.sum is not None:
                self._into_slots(raw, count, slots[first : first + count], self.sum, self.sum_cubes)
            for kind, source in enumerate(kinds):
                self._into_slots(source, count, slots[first : first + count], self.cube, self.cubes[kind])
                if self.pad is not None:
                    self._into_slots(source, count, slots[first : first + count], self.pad, self.spectra[kind])

    def _into_slots(self, source: Any, count: int, slots: list[int], transform: Transform, pool: Any) -> None:
        """Runs of neighbouring slots are written in place."""
        start = 0
        while start < count:
            stop = start + 1
            while stop < count and slots[stop] == slots[stop - 1] + 1:
                stop += 1
            at = slots[start] * transform.size
            transform(source[start:stop], stop - start, pool[at : at + (stop - start) * transform.size])
            start = stop


def read_all(particles: ParticleBatch, wanted: list[int]) -> Any:
    """(index, volume, weight) or (index, BadParticleError), read ahead by a few threads."""

    def one(index: int) -> Any:
        try:
            return (index, *particles.read(index))
        except BadParticleError as problem:
            return index, problem

    if len(wanted) < 4:
        yield from map(one, wanted)
        return
    with ThreadPoolExecutor(_READERS) as readers:
        yield from readers.map(one, wanted)
