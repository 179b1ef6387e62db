"""Weight volumes on the device."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...fourier import grid_band, max_band
from ...noise import TABLE_SIZE


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """What is to be known of a weight volume, found by any thread.

    Attributes
    ----------
    weight : (n, n, n // 2 + 1) float32
    digest : bytes
        Of its values.
    maximum : float
        Of its magnitude.
    signed : bool
    empty : bool
        Nothing is left in the largest band.
    """

    weight: NDArray[np.float32]
    digest: bytes
    maximum: float
    signed: bool
    empty: bool


class WeightVolumes:
    """All weight volumes in use, on the device; equal ones are stored once.

    Parameters
    ----------
    n : int
        Worked box.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.size = n * n * (n // 2 + 1)
        self._by_object: dict[int, tuple[Any, int]] = {}  # a weak reference, so that an id that comes back for another array is noticed
        self._by_digest: dict[bytes, int] = {}
        self._waiting: list[NDArray[np.float32]] = []
        self._maximum: list[float] = []
        self._signed: list[bool] = []
        self._empty: list[bool] = []
        self._device: Any = None
        self._capacity = 0
        self._filled = 0
        self._facts: tuple[Any, Any, Any] | None = None

    def __len__(self) -> int:
        return len(self._maximum)

    def _known(self, weight: NDArray[np.float32]) -> int | None:
        found = self._by_object.get(id(weight))
        return found[1] if found is not None and found[0]() is weight else None

    def look(self, weight: NDArray[np.float32]) -> WeightFacts | int:
        """A weight's row if the very object is known, else what `add` needs; from any thread."""
        row = self._known(weight)
        if row is not None:
            return row
        weight = np.ascontiguousarray(weight, np.float32)
        low, high = float(weight.min()), float(weight.max())
        maximum = max(abs(low), abs(high))
        index = grid_band(self.n, float(max_band(self.n))).index
        flat = weight.reshape(-1)
        empty = not (flat[index[:: max(1, len(index) // 256)]].any() or flat[index].any())
        digest = hashlib.blake2b(flat.data.cast("B"), digest_size=16).digest()
        return WeightFacts(weight, digest, maximum, low < -0.05 * maximum, empty)

    def add(self, looked: WeightFacts | int) -> int:
        """Row of a weight, from what `look` says."""
        if isinstance(looked, int):
            return looked
        row = self._by_digest.get(looked.digest)
        if row is None:
            row = self._by_digest[looked.digest] = len(self._maximum)
            self._waiting.append(looked.weight)
            self._maximum.append(looked.maximum)
            self._signed.append(looked.signed)
            self._empty.append(looked.empty)
            self._facts = None
        self._by_object[id(looked.weight)] = weakref.ref(looked.weight), row
        return row

    def is_empty(self, row: int) -> bool:
        """Whether nothing is left in the band."""
        return self._empty[row]

    def device(self) -> Any:
        """Flat device array of all rows."""
        if len(self) > self._capacity:
            capacity = max(16, 2 * len(self))
            bigger = cuda.device_array(capacity * self.size, np.float32)
            if self._filled:
                bigger[: self._filled * self.size].copy_to_device(self._device[: self._filled * self.size])
            self._device, self._capacity = bigger, capacity
        for weight in self._waiting:
            at = self._filled * self.size
            self._device[at : at + self.size].copy_to_device(weight.reshape(-1))
            self._filled += 1
        self._waiting = []
        return self._device

    def facts(self) -> tuple[Any, Any, Any]:
        """Per row, on the device: signed (int32), table scale, 1 / maximum."""
        if self._facts is None:
            maximum = np.maximum(np.array(self._maximum, np.float64), 1e-30)
            self._facts = (
                cuda.to_device(np.array(self._signed, np.int32)),
                cuda.to_device(((TABLE_SIZE - 1) / maximum).astype(np.float32)),
                cuda.to_device((1.0 / maximum).astype(np.float32)),
            )
        return self._facts
