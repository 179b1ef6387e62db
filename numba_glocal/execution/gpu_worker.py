"""How a GPU worker starts: the helpers that compile kernels first, then all that is slow to import."""

from __future__ import annotations

from ..backends.cuda.ahead import Ahead
from .pinning import WorkerInfo, usable_cores

_ahead: Ahead | None = None


def start_gpu_worker(
    info: WorkerInfo | None, backend: str, cache_bytes: int, gpu_memory_bytes: int | None = None, share: int = 1, precision: str = "auto"
) -> str:
    """Pool initialiser: as `tasks.start_worker`, while helpers compile where no warm-up has been through before."""
    global _ahead
    cores = usable_cores()
    _ahead = Ahead(precision, cores if cores > 1 else 0)
    from .tasks import start_worker

    return start_worker(info, backend, cache_bytes, gpu_memory_bytes, share, precision)


def warm_up_gpu_worker() -> None:
    """As `tasks.warm_up_cuda`, once the helpers are done with what it needs."""
    from .tasks import warm_up_cuda

    if _ahead is not None:
        _ahead.wait()
    warm_up_cuda()
    if _ahead is not None:
        _ahead.done()
