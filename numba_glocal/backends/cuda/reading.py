"""Particles read ahead, by several threads, into pinned memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...errors import BadParticleError
from ..protocols import ParticleBatch
from .memory import out_of_memory
from .weights import WeightFacts, WeightVolumes

_BUFFERS = 3

Outcome = WeightFacts | int | BadParticleError
"""Of one particle: its weight, or why it cannot be used."""


class Reader:
    """Threads and pinned buffers; a few parts of a list are read while another is worked on.

    Parameters
    ----------
    n : int
        Worked box.
    batch : int
        Particles of a part.
    threads : int
    weights : WeightVolumes
        Looks at weights, in the reading threads.
    """

    def __init__(self, n: int, batch: int, threads: int, weights: WeightVolumes) -> None:
        self.batch, self.threads, self.weights = batch, threads, weights
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="particles")
        self._shape = (batch, n, n, n)
        self._buffers: list[NDArray[np.float32]] = []

    def buffers(self, count: int) -> list[NDArray[np.float32]]:
        """At least so many of the pinned buffers, up to all that there are."""
        while len(self._buffers) < min(count, _BUFFERS):
            try:
                self._buffers.append(cuda.pinned_array(self._shape, np.float32))
            except Exception as problem:
                if not out_of_memory(problem):
                    raise
                self._buffers.append(np.empty(self._shape, np.float32))  # copies are slower, that is all
        return self._buffers

    def start(self, particles: ParticleBatch, wanted: list[int]) -> Reading:
        """Begins to read."""
        return Reading(self, particles, [wanted[i : i + self.batch] for i in range(0, len(wanted), self.batch)])

    def submit(self, particles: ParticleBatch, part: list[int], buffer: NDArray[np.float32]) -> tuple[list[Future[None]], list[Outcome]]:
        """Reads a part into a buffer; each thread takes the next particle until there is none left."""
        outcomes: list[Any] = [None] * len(part)
        rows = itertools.count()
        raw = particles.read_raw

        def take_turns() -> None:
            while (row := next(rows)) < len(part):
                try:
                    if raw is not None:
                        weight = raw(part[row], buffer[row])
                    else:
                        volume, weight = particles.read(part[row])
                        buffer[row] = volume
                    outcomes[row] = self.weights.look(weight)
                except BadParticleError as problem:
                    outcomes[row] = problem

        return [self._pool.submit(take_turns) for _ in range(min(self.threads, len(part)))], outcomes


class Reading:
    """Parts of a list that are being read, in order. A context manager: no thread writes into a buffer once it is left."""

    def __init__(self, reader: Reader, particles: ParticleBatch, parts: list[list[int]]) -> None:
        self._reader, self._particles, self._parts = reader, particles, parts
        self._buffers = reader.buffers(len(parts))
        self._running: deque[tuple[list[Future[None]], list[Outcome]]] = deque()
        for j in range(min(len(self._buffers), len(parts))):
            self._begin(j)

    def _begin(self, j: int) -> None:
        self._running.append(self._reader.submit(self._particles, self._parts[j], self._buffers[j % len(self._buffers)]))

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        futures = [future for some, _ in self._running for future in some]
        for future in futures:
            future.cancel()
        wait(futures)

    def __iter__(self) -> Iterator[tuple[list[int], NDArray[np.float32], list[Outcome]]]:
        """(indices, buffer, outcomes) of each part; its buffer is used again as soon as the next one is asked for."""
        for j, part in enumerate(self._parts):
            futures, outcomes = self._running[0]
            for future in futures:
                future.result()
            self._running.popleft()
            yield part, self._buffers[j % len(self._buffers)], outcomes
            if j + len(self._buffers) < len(self._parts):
                self._begin(j + len(self._buffers))
