"""Device memory for intermediate results, kept from call to call: asking for a gigabyte takes longer than most kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config
from numba.cuda.cudadrv import driver
from numpy.typing import NDArray

_SPARE = 1.1
_MOST_VIEWS = 32


class Scratch:
    """Arrays by name; what an array holds lasts until the next request of that name.

    Parameters
    ----------
    part_bytes : int
        Size that users who can work in parts should keep an array to.
    """

    def __init__(self, part_bytes: int = 2 << 30) -> None:
        self.part_bytes = part_bytes
        self._held: dict[str, Any] = {}
        self._views: dict[str, dict[tuple[tuple[int, ...], str], Any]] = {}  # making one takes as long as launching a kernel

    def array(self, name: str, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """An array with room for `shape`, its values undefined.

        Parameters
        ----------
        name : str
            Two arrays in use at the same time have different names.
        shape : int or tuple of int
        dtype : numpy dtype
        """
        if config.ENABLE_CUDASIM:  # its arrays have no views of another kind
            return cuda.device_array(shape, dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        kind = shape, np.dtype(dtype).str
        views = self._views.setdefault(name, {})
        if kind in views:
            return views[kind]
        count = math.prod(shape)
        size = max(1, count * np.dtype(dtype).itemsize)
        held = self._held.get(name)
        if held is None or held.size < size:
            self._held.pop(name, None)
            views.clear()
            held = None  # its memory first, then more
            held = self._held[name] = cuda.device_array(int(size * _SPARE) + 1024, np.uint8)
        if not count:
            return cuda.device_array(shape, dtype)
        if len(views) >= _MOST_VIEWS:
            views.clear()
        views[kind] = held[: count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
        return views[kind]

    def upload(self, name: str, values: NDArray[Any]) -> Any:
        """`values` on the device, as `array`; a few kilobytes in a fifth of the time that `cuda.to_device` takes."""
        if config.ENABLE_CUDASIM or not values.size:
            return cuda.to_device(values)
        values = np.ascontiguousarray(values)
        array = self.array(name, values.shape, values.dtype)
        driver.host_to_device(array, values, values.nbytes)  # on the default stream: kernels that still read what was there are done
        return array

    def clear(self) -> None:
        """Gives everything back."""
        self._views.clear()
        self._held.clear()
