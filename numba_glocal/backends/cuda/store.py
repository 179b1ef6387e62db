"""Particles on the device as normalised volumes, from which spectra of any band are made.

A particle is read, uploaded and normalised once, however often the band changes, and searches and averages share it. For its size this is
the best thing to keep: reading one of 64^3 again costs 100 to 300 us and takes 1 MiB, its padded spectrum costs 15 to 50 us and takes 2 to
8 MiB. Unmasked cubes of an average cost 10 us, take as much as a volume, and are therefore made on the fly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...errors import BadParticleError
from ...fourier import max_band, padded_offset
from ...masks import outside_sphere
from ..protocols import CONSTANT, NOT_FINITE, Grid, Normalisation, ParticleBatch, sample_step
from . import prepare
from .memory import halve_until_it_fits
from .reading import Outcome, Reader
from .slots import Slots
from .transform import Scratch, Transform
from .weights import WeightVolumes

MAX_SLOTS = 1 << 17
_MAX_BATCH, _MAX_READ = 256, 64
_BUFFER_BYTES = 32 << 20
_MAX_READERS = 16
_REASONS = {prepare.NOT_FINITE: NOT_FINITE, prepare.CONSTANT: CONSTANT}


class _Work:
    """Device arrays of one batch."""

    def __init__(self, n: int, batch: int) -> None:
        size = n**3
        self.raw = cuda.device_array((batch, size), np.float32)
        self.volumes = cuda.device_array((batch, size), np.float32)
        self.scratch = Scratch(n, padded_offset(max_band(n)), batch)
        self.cubes = cuda.device_array(batch * Transform.size_of(n // 2 - 1), np.float32)
        self.places = cuda.device_array(batch, np.int32)
        self.slots = cuda.device_array(batch, np.int32)
        self.facts = cuda.device_array((batch, 3), np.float32)
        self.status = cuda.device_array(batch, np.int32)
        self.levels = cuda.device_array(batch, np.float32)
        self.as_is = cuda.to_device(np.repeat(np.array([[0.0, 0.0, 1.0]], np.float32), batch, axis=0))

    @staticmethod
    def bytes_of(n: int) -> int:
        """For one particle."""
        return 4 * (2 * n**3 + Scratch.floats(n, padded_offset(max_band(n))) + Transform.size_of(n // 2 - 1))


@dataclass(frozen=True, slots=True)
class Resident:
    """A few particles whose volumes are on the device, until the next few are asked for.

    Attributes
    ----------
    index : list of int
        In the batch that was asked for.
    slots, kinds : (p,) int32
        Slots of their volumes (on the device: `ParticleStore.work.slots`), rows of their weights.
    """

    index: list[int]
    slots: NDArray[np.int32]
    kinds: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class Masking:
    """A particle mask on the device, and where the level is taken that is subtracted before.

    Attributes
    ----------
    mask : (n^3,) float32
    outside : (n^3,) float32
        1 where the mask is 0, else 0; 1 everywhere where it is 0 nowhere.
    n_outside : int
    """

    mask: Any
    outside: Any
    n_outside: int

    @classmethod
    def of(cls, mask: NDArray[np.float32]) -> Masking:
        """From a mask (n, n, n)."""
        outside = mask.ravel() < 0.01
        if not outside.any():
            outside[:] = True
        return cls(cuda.to_device(mask.ravel()), cuda.to_device(outside.astype(np.float32)), int(outside.sum()))


class ParticleStore:
    """Volumes of particles in slots, by key; reads what it does not hold.

    Parameters
    ----------
    grid : Grid
    weights : WeightVolumes
        Where weights go.
    volume_bytes, work_bytes : int
        Budgets of the slots and of the arrays of one batch.
    share : int
        Processes that read at the same time.

    Attributes
    ----------
    batch : int
        Most particles at once: few launches for those that are here. Reading goes on in smaller parts.
    work
        Arrays of the present batch.
    stream
        Everything here runs on it, in order.
    """

    def __init__(self, grid: Grid, weights: WeightVolumes, volume_bytes: int, work_bytes: int, share: int = 1) -> None:
        self.grid, self.n, self.weights = grid, grid.binned_box_size, weights
        size = self.n**3
        batch = min(_MAX_BATCH, work_bytes // _Work.bytes_of(self.n))
        self.work = halve_until_it_fits(lambda b: _Work(self.n, b), max(1, batch), 1, "particles at once")
        self.batch = int(self.work.raw.shape[0])
        capacity = max(self.batch, min(volume_bytes // (4 * size), MAX_SLOTS))
        self.volumes = halve_until_it_fits(lambda c: cuda.device_array(c * size, np.float32), capacity, self.batch, "particle volumes")
        self.slots = Slots(int(self.volumes.size) // size)
        self.stream = cuda.stream()
        self.cube = Transform(self.n, self.n // 2 - 1, False)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        read = max(1, min(self.batch, _MAX_READ, _BUFFER_BYTES // (4 * size)))
        self.reader = Reader(self.n, read, max(2, min(_MAX_READERS, cores // share)), weights)
        self._outside: dict[float, tuple[Any, int]] = {}

    def batches(self, particles: ParticleBatch, wanted: Sequence[int], bad: list[tuple[int, str]]) -> Iterator[Resident]:
        """Volumes of particles, a batch at a time: first those that are here, then the others as they come in.

        While a batch is on the device for the caller to work on, the next ones are being read. What the caller does must be on `stream`.

        Parameters
        ----------
        particles : ParticleBatch
        wanted : sequence of int
        bad : list of (index, reason)
            Particles that cannot be used are added to it and never come.
        """
        here: list[tuple[int, int, int]] = []
        missing: list[int] = []
        for index in wanted:
            found = self.slots.get(particles.keys[index])
            if found is None:
                missing.append(index)
            else:
                here.append((index, *found))
        with self.reader.start(particles, missing) as reading:
            for first in range(0, len(here), self.batch):
                part = here[first : first + self.batch]
                yield self._present([index for index, _, _ in part], [slot for _, slot, _ in part], [kind for _, _, kind in part])
            for indices, buffer, outcomes in reading:
                resident = self._receive(particles, indices, buffer, outcomes, bad)
                if resident is not None:
                    yield resident

    def _present(self, index: list[int], slots: Sequence[int], kinds: Sequence[int]) -> Resident:
        host = np.zeros(self.batch, np.int32)
        host[: len(slots)] = slots
        self.work.slots.copy_to_device(host, stream=self.stream)
        return Resident(index, np.array(slots, np.int32), np.array(kinds, np.int32))

    def _receive(
        self, particles: ParticleBatch, part: list[int], buffer: NDArray[np.float32], outcomes: list[Outcome], bad: list[tuple[int, str]]
    ) -> Resident | None:
        """From a pinned buffer into slots, normalised; the buffer is free again on return."""
        rows: list[int] = []
        kinds: list[int] = []
        for row, outcome in enumerate(outcomes):
            if isinstance(outcome, BadParticleError):
                bad.append((part[row], outcome.reason))
            else:
                rows.append(row)
                kinds.append(self.weights.add(outcome))
        if not rows:
            return None
        work, stream, count = self.work, self.stream, len(part)
        slots = self.slots.take([particles.keys[part[row]] for row in rows], kinds)
        places = np.full(self.batch, -1, np.int32)
        places[rows] = slots
        work.places.copy_to_device(places, stream=stream)
        work.raw[:count].copy_to_device(buffer[:count].reshape(count, -1), stream=stream)
        facts = work.as_is
        status = np.zeros(self.batch, np.int32)
        how = particles.normalisation if particles.read_raw is not None else None
        if how is not None:
            facts = work.facts
            outside, n_outside = self._outside_of(how)
            prepare.particle_facts[count, prepare.SUM_THREADS, stream](
                work.raw,
                outside,
                n_outside,
                sample_step(self.n**3),
                int(how.normalise),
                np.float32(-1.0 if how.invert_contrast else 1.0),
                facts,
                work.status,
            )
            work.status.copy_to_host(status, stream=stream)
        prepare.place_volumes[self._voxels(count)](work.raw, facts, work.places, self.volumes)
        stream.synchronize()
        good = [at for at, row in enumerate(rows) if status[row] == prepare.OK]
        for at in sorted(set(range(len(rows))) - set(good)):
            index = part[rows[at]]
            self.slots.drop(particles.keys[index])
            bad.append((index, _REASONS[int(status[rows[at]])]))
        if not good:
            return None
        return self._present([part[rows[at]] for at in good], [slots[at] for at in good], [kinds[at] for at in good])

    def _outside_of(self, how: Normalisation) -> tuple[Any, int]:
        if how.radius_voxels not in self._outside:
            outside, count = outside_sphere(self.n, how.radius_voxels)
            self._outside = {how.radius_voxels: (cuda.to_device(outside), count)}
        return self._outside[how.radius_voxels]

    def _voxels(self, count: int) -> tuple[Any, ...]:
        """How a kernel is launched that takes a voxel a thread."""
        return (-(-(self.n**3) // prepare.VOXEL_THREADS), count), prepare.VOXEL_THREADS, self.stream

    def levels(self, resident: Resident, masking: Masking) -> None:
        """Levels of the present batch, for `masked`."""
        prepare.volume_levels[len(resident), prepare.SUM_THREADS, self.stream](
            self.volumes, self.work.slots, masking.outside, masking.n_outside, self.work.levels
        )

    def masked(self, resident: Resident, mask: Any) -> Any:
        """Volumes of the present batch less their levels, masked; (p, n^3) on the device, until the next call."""
        prepare.mask_volumes[self._voxels(len(resident))](self.volumes, self.work.slots, self.work.levels, mask, self.work.volumes)
        return self.work.volumes

    def cubes(self, resident: Resident) -> Any:
        """Unmasked spectra of the present batch on the whole grid, one after the other, until the next call."""
        prepare.gather_volumes[self._voxels(len(resident))](self.volumes, self.work.slots, self.work.volumes)
        self.cube(self.work.volumes, len(resident), self.work.cubes, self.work.scratch, self.stream)
        return self.work.cubes
