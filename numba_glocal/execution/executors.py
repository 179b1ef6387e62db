"""Which executor runs the tasks, and results in task order whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any, TypeVar

from .pinning import WorkerInfo, usable_cores
from .pool import PinnedPool, WorkerEvent

Task = TypeVar("Task")
Result = TypeVar("Result")


class SerialExecutor(Executor):
    """Runs each task in this process when it is submitted; for tests and for looking for mistakes.

    Parameters
    ----------
    initializer : callable, optional
        ``initializer(worker_info, *initargs)``, run once, at once.
    initargs : tuple
        Further arguments of `initializer`.
    """

    n_workers = 1

    def __init__(self, *, initializer: Callable[..., Any] | None = None, initargs: tuple[Any, ...] = ()) -> None:
        self._closed = False
        if initializer is not None:
            initializer(WorkerInfo(0, None, 1), *initargs)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn(*args, **kwargs)`` and return its finished future."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks."""
        self._closed = True


def make_executor(
    n_workers: int | None = None,
    gpu_ids: Sequence[str] = (),
    *,
    initializer: Callable[..., Any] | None = None,
    initargs: tuple[Any, ...] = (),
    warm_up: Callable[[], Any] | None = None,
    threads: int = 1,
    events: Callable[[WorkerEvent], None] | None = None,
    start_timeout_s: float = 120.0,
) -> PinnedPool | SerialExecutor:
    """The executor for a run on this machine.

    Parameters
    ----------
    n_workers : int, optional
        Worker processes; by default one for each core that may be used, with GPUs one for each GPU. 0: no process, tasks run in this one.
    gpu_ids : sequence of str
        See `PinnedPool`, also for the other parameters.

    Returns
    -------
    PinnedPool or SerialExecutor
    """
    if n_workers is None:
        n_workers = len(gpu_ids) or max(1, usable_cores() // threads)
    if n_workers == 0:
        return SerialExecutor(initializer=initializer, initargs=initargs)
    return PinnedPool(
        n_workers,
        gpu_ids,
        initializer=initializer,
        initargs=initargs,
        warm_up=warm_up,
        threads=threads,
        events=events,
        start_timeout_s=start_timeout_s,
    )


def gather_in_order(
    executor: Executor,
    fn: Callable[[Task], Result],
    tasks: Iterable[Task],
    progress: Callable[[Task, Result], None] | None = None,
    in_flight: int | None = None,
) -> Iterator[Result]:
    """Run ``fn(task)`` for every task; yield the results in task order, whoever was faster.

    Parameters
    ----------
    executor : Executor
        Any.
    fn : callable
        Takes one task.
    tasks : iterable
        May be a generator: tasks are drawn as they are submitted.
    progress : callable, optional
        ``progress(task, result)``, called in the caller's thread when a task finishes, in the order in which they finish.
    in_flight : int, optional
        The most tasks that are submitted and not yet yielded; bounds the memory. By default four for each worker.

    Yields
    ------
    object
        A result for each task.

    Raises
    ------
    Exception
        What a task raised, as soon as it is known; tasks that have not begun are cancelled. Of several, that of the earliest task.
    """
    limit = in_flight if in_flight is not None else 4 * _n_workers(executor)
    source = iter(tasks)
    waiting: dict[int, tuple[Task, Future[Result]]] = {}
    told: set[int] = set()
    head = n_submitted = 0
    exhausted = False
    try:
        while True:
            while not exhausted and len(waiting) < max(1, limit):
                try:
                    task = next(source)
                except StopIteration:
                    exhausted = True
                    break
                waiting[n_submitted] = (task, _submit(executor, fn, task))
                n_submitted += 1
            if not waiting:
                return
            running = [future for number, (_, future) in waiting.items() if number not in told]
            if head not in told:
                wait(running, return_when=FIRST_COMPLETED)
            for number, (task, future) in waiting.items():
                if number not in told and future.done():
                    result = future.result()  # raises what the task raised
                    told.add(number)
                    if progress is not None:
                        progress(task, result)
            while head in told:
                result = waiting.pop(head)[1].result()
                told.discard(head)
                head += 1
                yield result
    finally:
        for _, future in waiting.values():
            future.cancel()


def _submit(executor: Executor, fn: Callable[[Task], Result], task: Task) -> Future[Result]:
    """Tasks that say which particles they are about go to a worker that has had them, where the executor knows."""
    keys = getattr(task, "affinity", None)
    near: Callable[..., Future[Result]] | None = getattr(executor, "submit_near", None)
    return executor.submit(fn, task) if keys is None or near is None else near(keys, fn, task)


def _n_workers(executor: Executor) -> int:
    # `ProcessPoolExecutor` and `ThreadPoolExecutor` keep their number to themselves.
    return int(getattr(executor, "n_workers", None) or getattr(executor, "_max_workers", None) or usable_cores())
