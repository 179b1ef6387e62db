"""Prepared particles on the device: what searches, refinement and residuals read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...errors import DeviceError
from ...fourier import max_band, padded_offset
from ..protocols import ParticleBatch
from .slots import Slots
from .store import MAX_SLOTS, Masking, ParticleStore, Resident
from .transform import SPARE_BYTES, Transform

_SPARE = SPARE_BYTES // 4


class Pool:
    """Padded spectra and cubes of masked particles, in slots.

    Parameters
    ----------
    n : int
        Worked box.
    reach : int
        Band of the padded spectra.
    unmasked : bool
        Whether unmasked cubes and padded spectra are needed too (flcf).
    arena : flat float32 device array
        Where they go; a pool of another band is cut from the same memory.

    Attributes
    ----------
    spectra, cubes : list of flat float32 device arrays
        Of masked particles and, where they are needed, of unmasked ones.
    pad, cube : Transform
        Their transforms; a particle in slot s begins at ``s * pad.size`` and ``s * cube.size``.
    """

    SPARE_FLOATS = 4 * (_SPARE + 64)  # after the last slot of each part, see SPARE_BYTES; parts begin at multiples of 256 bytes

    def __init__(self, n: int, reach: int, unmasked: bool, arena: Any) -> None:
        self.n, self.reach, self.unmasked = n, reach, unmasked
        self.pad = Transform(n, reach, True)
        self.cube = Transform(n, max_band(n), False)
        kinds = 2 if unmasked else 1
        slot_floats = kinds * (self.pad.size + self.cube.size)
        capacity = min(MAX_SLOTS, (int(arena.size) - self.SPARE_FLOATS) // slot_floats)
        if capacity < 1:
            raise DeviceError("the GPU's memory does not hold one particle; use fewer workers a GPU, --binning, or a larger --gpu-memory")
        at = 0

        def cut(size: int) -> Any:
            nonlocal at
            part = arena[at : at + capacity * size + _SPARE]
            at = -(-(at + capacity * size + _SPARE) // 64) * 64
            return part

        self.spectra = [cut(self.pad.size) for _ in range(kinds)]
        self.cubes = [cut(self.cube.size) for _ in range(kinds)]
        self.slots = Slots(capacity)
        self._ones = cuda.to_device(np.ones(n**3, np.float32)) if unmasked else None

    @staticmethod
    def slot_bytes(n: int, reach: int, unmasked: bool) -> int:
        """Of one particle."""
        return (2 if unmasked else 1) * 4 * (Transform.size_of(padded_offset(reach)) + Transform.size_of(max_band(n)))

    def load(
        self, store: ParticleStore, particles: ParticleBatch, masking: Masking, how: Hashable
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_], list[tuple[int, str]]]:
        """Brings particles here.

        Parameters
        ----------
        store : ParticleStore
        particles : ParticleBatch
        masking : Masking
        how : hashable
            Tells one masking from another.

        Returns
        -------
        slots, kinds : (p,) int32
            Slots, and rows of weights.
        usable : (p,) bool
        bad : list of (index, reason)
            Of those that are not.
        """
        count = len(particles.keys)
        slots, kinds, usable = np.zeros(count, np.int32), np.zeros(count, np.int32), np.ones(count, bool)
        busy: set[int] = set()
        missing: list[int] = []
        for index, name in enumerate(particles.keys):
            found = self.slots.get((name, how))
            if found is None:
                missing.append(index)
            else:
                slots[index], kinds[index] = found
                busy.add(found[0])
        bad: list[tuple[int, str]] = []
        for resident in store.batches(particles, missing, bad):
            taken = self.slots.take([(particles.keys[index], how) for index in resident.index], resident.kinds.tolist(), busy)
            busy.update(taken)
            self._prepare(store, resident, taken, masking)
            slots[resident.index], kinds[resident.index] = taken, resident.kinds
        store.stream.synchronize()
        usable[[index for index, _ in bad]] = False
        for index in np.flatnonzero(usable).tolist():
            if store.weights.is_empty(int(kinds[index])):
                bad.append((index, "its weight leaves nothing in the band"))
                usable[index] = False
        return slots, kinds, usable, sorted(bad)

    def _prepare(self, store: ParticleStore, resident: Resident, slots: list[int], masking: Masking) -> None:
        store.levels(resident, masking)
        for kind, mask in enumerate((masking.mask, self._ones)[: len(self.cubes)]):
            masked = store.masked(resident, mask)
            for transform, target in ((self.cube, self.cubes[kind]), (self.pad, self.spectra[kind])):
                self._into_slots(store, masked, slots, transform, target)

    def _into_slots(self, store: ParticleStore, source: Any, slots: list[int], transform: Transform, target: Any) -> None:
        """Runs of neighbouring slots are written in place."""
        start, count = 0, len(slots)
        while start < count:
            stop = start + 1
            while stop < count and slots[stop] == slots[stop - 1] + 1:
                stop += 1
            at = slots[start] * transform.size
            part = target[at : at + (stop - start) * transform.size]
            transform(source[start:stop], stop - start, part, store.work.scratch, store.stream)
            start = stop
