"""Weight volumes on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ...fourier import GridBand
from ...noise import TABLE_SIZE


@dataclass(frozen=True, slots=True)
class WeightRow:
    """What kernels need to know of one weight volume."""

    row: int
    maximum: float
    signed: bool


class WeightVolumes:
    """All weight volumes in use, on the device; the same array object is stored once."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.size = n * n * (n // 2 + 1)
        self._known: dict[int, WeightRow] = {}
        self._kept: list[NDArray[np.float32]] = []
        self._host_rows: list[NDArray[np.float32]] = []
        self._device: Any = None
        self._capacity = 0
        self._filled = 0
        self._facts: tuple[Any, Any, Any] | None = None

    def add(self, weight: NDArray[np.float32]) -> WeightRow:
        """Row of a weight, uploaded on first sight."""
        found = self._known.get(id(weight))
        if found is not None:
            return found
        maximum = float(np.abs(weight).max())
        row = WeightRow(len(self._kept), maximum, bool(weight.min() < -0.05 * maximum))
        self._known[id(weight)] = row
        self._kept.append(weight)  # keeps the object, and with it its id, alive
        self._facts = None
        return row

    def device(self) -> Any:
        """Flat device array of all rows."""
        if len(self._kept) > self._capacity:
            capacity = max(16, 2 * len(self._kept))
            bigger = cuda.device_array(capacity * self.size, np.float32)
            if self._device is not None:
                bigger[: self._filled * self.size].copy_to_device(self._device[: self._filled * self.size])
            self._device, self._capacity = bigger, capacity
        while self._filled < len(self._kept):
            at = self._filled * self.size
            self._device[at : at + self.size].copy_to_device(np.ascontiguousarray(self._kept[self._filled], np.float32).ravel())
            self._filled += 1
        return self._device

    def facts(self) -> tuple[Any, Any, Any]:
        """Per row, on the device: signed (int32), table scale, 1 / maximum."""
        if self._facts is None:
            rows = sorted(self._known.values(), key=lambda w: w.row)
            signed = np.array([w.signed for w in rows], np.int32)
            maximum = np.maximum(np.array([w.maximum for w in rows], np.float64), 1e-30)
            self._facts = (
                cuda.to_device(signed),
                cuda.to_device(((TABLE_SIZE - 1) / maximum).astype(np.float32)),
                cuda.to_device((1.0 / maximum).astype(np.float32)),
            )
        return self._facts

    def any_in_band(self, weight: NDArray[np.float32], band: GridBand) -> bool:
        """Whether anything is left in the band."""
        return bool(np.any(weight.ravel()[band.index]))
