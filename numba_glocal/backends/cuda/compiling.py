"""The helper process of `ahead`: compiles kernels into the JIT cache for a given compute capability. It needs no GPU and no driver."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


class _Device:
    """As much of a device as Numba asks for when it compiles."""

    id = 0

    def __init__(self, capability: tuple[int, int]) -> None:
        self.compute_capability = capability
        self.device = self


def use_no_gpu(capability: tuple[int, int]) -> None:
    """Makes Numba compile kernels for a compute capability in this process; nothing can be launched any more."""
    from numba.cuda import compiler, dispatcher
    from numba.cuda.cudadrv import devices

    device = _Device(capability)
    devices.get_context = lambda *_: device
    compiler.get_current_device = dispatcher.get_current_device = lambda: device
    # what `bind` does for the cache is to bring the machine code about; loading it takes a GPU
    dispatcher._Kernel.bind = lambda kernel: kernel._codelibrary.get_cubin()


def compile_job(job: Any) -> tuple[float, bool]:
    """CPU seconds that a kernel took, and whether it lay in the JIT cache already."""
    begin = time.process_time()
    job.kernel.compile(job.types)
    return time.process_time() - begin, sum(job.kernel._cache_misses.values()) == 0


def _numbers(queue: int) -> Iterator[int]:
    while number := os.read(queue, 1):
        yield number[0]


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Takes numbers from the queue and compiles the kernels that have them; lets go of the lock when those of a warm-up have been taken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    queue, lock, major, minor = map(int, arguments[:4])
    gc.disable()  # a short life, and a tenth faster
    use_no_gpu((major, minor))
    from .signatures import Job, jobs, longest

    lists: tuple[list[Job], list[Job]] | None = None
    held = True
    for number in _numbers(queue):
        if number and lists is None:
            lists = jobs(arguments[4])
        first, later = lists or ([longest()], [])
        if held and number >= len(first):
            os.close(lock)
            held = False
            os.nice(5)
        if number >= len(first) + len(later):
            break
        with suppress(Exception):  # the worker will meet the same error, where it can be told
            compile_job([*first, *later][number])
