"""Device memory: how much is free, and less at once when it runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

from numba import cuda
from numba.core import config

from ...errors import DeviceError

_log = logging.getLogger("numba_glocal")
_SIMULATED_MEMORY = 256 << 20
_CUDA_OUT_OF_MEMORY = 2

T = TypeVar("T")


def free_bytes() -> int:
    """Free memory of this process's GPU."""
    if config.ENABLE_CUDASIM:
        return _SIMULATED_MEMORY
    return int(cuda.current_context().get_memory_info().free)


def out_of_memory(problem: BaseException) -> bool:
    """Whether an error of the driver (or of the host, for pinned memory) says that there is no memory left."""
    if isinstance(problem, MemoryError):
        return True
    code = getattr(problem, "code", None)
    return type(problem).__name__ == "CudaAPIError" and code is not None and int(code) == _CUDA_OUT_OF_MEMORY


def release_unused() -> None:
    """Gives back what nothing refers to any more; the driver would keep it until later."""
    gc.collect()
    if not config.ENABLE_CUDASIM:
        cuda.current_context().deallocations.clear()


def halve_until_it_fits(make: Callable[[int], T], count: int, least: int, what: str, give_back: Callable[[], None] | None = None) -> T:
    """What `make(count)` makes; with half as many, and half of that, when memory runs out.

    Parameters
    ----------
    make : callable
        Allocates for so many.
    count, least : int
        Wanted, and fewest that are of use.
    what : str
        For messages, in the plural: "particles at once".
    give_back : callable, optional
        Called before each further attempt: memory that can be had again.

    Raises
    ------
    DeviceError
        Not even for the fewest.
    """
    wanted = count
    while True:
        try:
            made = make(count)
        except Exception as problem:
            if not out_of_memory(problem):
                raise
        else:
            if count < wanted:
                _log.warning("the GPU's memory is short: %d %s instead of %d; slower, same results", count, what, wanted)
            return made
        if give_back is not None:
            give_back()
        release_unused()  # outside the handler: a traceback keeps arrays alive
        if count <= least:
            raise DeviceError(f"the GPU's memory is too small: not even {least} {what}; use fewer workers a GPU, --binning, or free memory")
        count = max(least, count // 2)
