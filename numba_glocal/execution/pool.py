"""A pool of worker processes, each bound to one GPU (or none) for life, behind `concurrent.futures.Executor`.

Every slot of the pool has a thread in this process and a worker process of its own. The thread takes a task from the common queue, hands it over
and waits for the answer; nothing is handed out ahead, so a slow worker never hoards. Of the waiting tasks it takes one with particles that its
process has had before, if there is one. When the process dies, its thread sees it at once, puts the
task back at the head of the queue and starts another process in the same slot, with the same GPU.

Why not `ProcessPoolExecutor`: it gives up as a whole when one worker dies, and it knows no slots. Why not `multiprocessing.Process`: its children
import the user's main script before any code of ours runs, with whatever environment this process has at that moment.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import GlocalError, SettingsError, WorkerError
from .pinning import WorkerInfo, assign_gpus, jit_cache_dir, worker_environment
from .process import WorkerDied, WorkerProcess

MAX_DEATHS = 3
_IDLE_CHECK_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Something that happened to a worker; for the log and for rates per GPU.

    Attributes
    ----------
    kind : str
        ``started``, ``replaced`` (started in a dead worker's slot), ``ready``, ``done`` (a task), ``failed`` (a task), ``died``, ``stderr``.
    worker : int
        Slot.
    pid : int
        Process.
    gpu : str or None
        As in ``CUDA_VISIBLE_DEVICES``.
    seconds : float
        ``ready``: from start to ready; ``done`` and ``failed``: the task, in the worker; ``died``: how long the process lived. Otherwise 0.
    text : str
        ``died``: the cause; ``failed``: the error in one line; ``stderr``: what the worker wrote.
    about : object
        ``ready``: what the initializer returned (a backend tells the name and UUID of its device); ``done``: what the task returned.
    """

    kind: str
    worker: int
    pid: int
    gpu: str | None
    seconds: float = 0.0
    text: str = ""
    about: Any = None


@dataclass(slots=True)
class _Item:
    number: int
    payload: bytes
    future: Future[Any]
    keys: frozenset[Hashable] = frozenset()
    deaths: int = 0


class _Unwanted(Exception):
    """The pool closes and has no work for a worker that is still starting."""


class PinnedPool(Executor):
    """Worker processes that keep their GPU for life and are replaced when they die.

    Parameters
    ----------
    n_workers : int
        Processes; all start at once.
    gpu_ids : sequence of str
        Values for ``CUDA_VISIBLE_DEVICES``; worker `i` gets ``gpu_ids[i % n]``. Empty: CPU workers, which see no GPU.
    initializer : callable, optional
        ``initializer(worker_info, *initargs)``, run in each worker before its first task. What it returns is told in the ``ready`` event.
    initargs : tuple
        Further arguments of `initializer`.
    warm_up : callable, optional
        Compiles what the tasks will need. One worker does it while the others wait, then they load what it left in the JIT cache.
    threads : int
        Threads each library may use in a worker.
    start_timeout_s, warm_up_timeout_s : float
        How long a worker may take to start and run the initializer, and to warm up (waiting for the first one included).
    events : callable, optional
        ``events(WorkerEvent)``, called from the pool's threads, one call at a time. Without it, what workers write to stderr goes to stderr.

    Attributes
    ----------
    n_workers : int
        Slots.
    gpu_of_worker : list of (str or None)
        GPU of each slot.

    Raises
    ------
    SettingsError
        Fewer than one worker.

    Notes
    -----
    A task whose worker dies is done again; the third death gives its future a `WorkerError`. A worker that cannot start breaks the pool: every
    waiting future, and every later `submit`, gets the `WorkerError` that says why. Leaving a ``with`` block by an exception, and the end of this
    process, end the workers at once.
    """

    def __init__(
        self,
        n_workers: int,
        gpu_ids: Sequence[str] = (),
        *,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        warm_up: Callable[[], Any] | None = None,
        threads: int = 1,
        start_timeout_s: float = 120.0,
        warm_up_timeout_s: float = 1800.0,
        events: Callable[[WorkerEvent], None] | None = None,
    ) -> None:
        if n_workers < 1:
            raise SettingsError(f"a pool needs at least one worker, found {n_workers}")
        self.n_workers = n_workers
        self.gpu_of_worker = assign_gpus(n_workers, gpu_ids)
        self._n_threads = threads
        self._start_timeout_s = start_timeout_s
        self._warm_up_timeout_s = warm_up_timeout_s
        self._events = events
        self._events_lock = threading.Lock()
        self._setup = {
            "initializer": pickle.dumps((initializer, initargs)),
            "warm_up": pickle.dumps(warm_up),
            "lock": str(Path(jit_cache_dir()) / "warm-up.lock"),
            "token": secrets.token_hex(8),
            "main": _where_main_is(),
        }
        self._state = threading.Condition()
        # Guarded by `_state`:
        self._queue: deque[_Item] = deque()
        self._had: list[set[Hashable]] = [set() for _ in range(n_workers)]  # keys of the tasks that the process of each slot was given
        self._n_submitted = 0
        self._closing = False
        self._aborting = False
        self._broken: WorkerError | None = None
        self._ready: set[int] = set()
        self._processes: dict[int, WorkerProcess] = {}
        _pools.add(self)
        self._slots = [threading.Thread(target=self._serve_slot, args=(i,), name=f"pool-slot-{i}", daemon=True) for i in range(n_workers)]
        for thread in self._slots:
            thread.start()

    # --- for the caller ---------------------------------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue ``fn(*args, **kwargs)``; it must pickle, and `fn` must be importable in a worker.

        Raises
        ------
        WorkerError
            The workers could not start.
        """
        return self._queue_up(pickle.dumps((fn, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL), frozenset())

    def submit_near(self, keys: Iterable[Hashable], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `submit`; a worker that is free prefers tasks with keys (names of particles) it has had before, because it may still hold them.

        A preference only: no worker waits while any task does, and no result depends on it.
        """
        return self._queue_up(pickle.dumps((fn, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL), frozenset(keys))

    def _queue_up(self, payload: bytes, keys: frozenset[Hashable]) -> Future[Any]:
        with self._state:
            if self._broken is not None:
                raise _copy(self._broken)
            if self._closing:
                raise RuntimeError("cannot schedule new futures after shutdown")
            item = _Item(self._n_submitted, payload, Future(), keys)
            self._n_submitted += 1
            self._queue.append(item)
            self._state.notify()
        return item.future

    def wait_ready(self) -> None:
        """Wait until every worker is ready.

        Raises
        ------
        WorkerError
            One could not start.
        """
        with self._state:
            self._state.wait_for(lambda: self._broken is not None or self._closing or len(self._ready) == self.n_workers)
            if self._broken is not None:
                raise _copy(self._broken)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Finish what was submitted (cancel what has not begun, if asked), then end the workers."""
        with self._state:
            self._closing = True
            if cancel_futures:
                self._cancel_queue()
            self._state.notify_all()
        if wait:
            for thread in self._slots:
                thread.join()

    def terminate_workers(self) -> None:
        """End the workers now: what waits is cancelled, what runs fails with a `WorkerError`."""
        with self._state:
            self._aborting = self._closing = True
            self._cancel_queue()
            for process in self._processes.values():
                process.kill()
            self._state.notify_all()
        self.shutdown(wait=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.shutdown(wait=True)
        else:
            self.terminate_workers()

    # --- a slot: one thread here, one process at a time -------------------------------------------------------------------------------------

    def _serve_slot(self, index: int) -> None:
        # Ctrl-C is for the main thread. A child takes this mask along, and so is deaf to Ctrl-C from its first instruction.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            generation = deaths_without_task = 0
            while self._is_wanted():
                item: _Item | None = None
                process = self._start_process(index, generation)
                try:
                    self._await_ready(process, index, generation)
                    while True:
                        item = None
                        item = self._next_item(process, index)
                        if item is None:
                            return
                        self._run_item(process, index, item)
                        deaths_without_task = 0
                except WorkerDied:
                    cause, words = process.cause_of_death(), process.last_words()
                    if not self._aborting:
                        self._tell("died", index, process, process.age_s, text=cause)
                    if item is not None:
                        self._redo(item, cause, words)
                    else:
                        deaths_without_task += 1
                        if deaths_without_task == MAX_DEATHS and not self._aborting:
                            raise WorkerError(f"worker {index} does not stay alive: the last one {cause}{_last_line(words)}", words) from None
                finally:
                    with self._state:
                        self._processes.pop(index, None)
                        self._ready.discard(index)
                    process.close()
                generation += 1
        except _Unwanted:
            pass
        except WorkerError as error:
            self._break(error)
        except BaseException as error:
            # A mistake in here must not leave the futures waiting for ever.
            self._break(WorkerError(f"the pool failed: {type(error).__name__}: {error}"))
            raise

    def _is_wanted(self) -> bool:
        with self._state:
            return not self._aborting and self._broken is None and not (self._closing and not self._queue)

    def _start_process(self, index: int, generation: int) -> WorkerProcess:
        try:
            process = WorkerProcess(worker_environment(self.gpu_of_worker[index], self._n_threads))
        except OSError as error:
            raise WorkerError(f"worker {index} cannot be started: {error}") from error
        with self._state:
            self._had[index] = set()
            self._processes[index] = process
            if self._aborting:
                process.kill()
        self._tell("replaced" if generation else "started", index, process)
        return process

    def _await_ready(self, process: WorkerProcess, index: int, generation: int) -> None:
        info = WorkerInfo(index, self.gpu_of_worker[index], self._n_threads, generation)
        process.send(pickle.dumps({**self._setup, "info": pickle.dumps(info), "sys_path": sys.path}))
        self._await(process, index, "initialised", self._start_timeout_s)
        about = self._await(process, index, "ready", self._warm_up_timeout_s)
        process.ready = True
        self._tell("ready", index, process, process.age_s, about=about)
        with self._state:
            self._ready.add(index)
            self._state.notify_all()

    def _await(self, process: WorkerProcess, index: int, expected: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = process.receive(min(left, _IDLE_CHECK_S))
            if message is None:
                if not self._is_wanted():
                    raise _Unwanted
            elif message[0] == expected:
                return message[1]
            else:
                _, error, summary, text = message
                gpu = self.gpu_of_worker[index]
                where = "" if gpu is None else f" on GPU {gpu}"
                raise WorkerError(f"worker {index} cannot start{where}: {error if isinstance(error, GlocalError) else summary}", text) from error
        words = process.last_words()
        raise WorkerError(f"worker {index} was not ready after {timeout_s:g} s{_last_line(words)}", words)

    def _next_item(self, process: WorkerProcess, index: int) -> _Item | None:
        """The next task for an idle worker; None when there will be none."""
        while True:
            with self._state:
                while self._queue:
                    if not process.is_alive():
                        raise WorkerDied
                    item = self._take_nearest(index)
                    # An item that has been given out before is running already.
                    if item.deaths or item.future.set_running_or_notify_cancel():
                        return item
                if self._closing or self._broken is not None:
                    return None
                self._state.wait(_IDLE_CHECK_S)
            if not process.is_alive():
                raise WorkerDied

    def _take_nearest(self, index: int) -> _Item:
        """Out of the queue: a task to be done again; else the one of which this worker had most; else one that nobody had; else the first."""
        queue, mine = self._queue, self._had[index]
        place = 0
        if not queue[0].deaths:
            shared = [len(item.keys & mine) for item in queue]
            if any(shared):
                place = shared.index(max(shared))
            else:
                place = next((i for i, item in enumerate(queue) if all(item.keys.isdisjoint(had) for had in self._had)), 0)
        item = queue[place]
        del queue[place]
        mine |= item.keys
        return item

    def _run_item(self, process: WorkerProcess, index: int, item: _Item) -> None:
        process.send(item.payload)
        try:
            message = process.receive()
        except WorkerDied:
            raise
        except Exception as error:
            text = f"the result of task {item.number} cannot be unpickled: {type(error).__name__}: {error}"
            item.future.set_exception(WorkerError(text))
            return
        assert message is not None
        if words := process.new_stderr():
            self._tell("stderr", index, process, text=words)
        if message[0] == "value":
            _, value, seconds = message
            self._tell("done", index, process, seconds, about=value)
            item.future.set_result(value)
        else:
            _, raised, summary, text, seconds = message
            self._tell("failed", index, process, seconds, text=summary)
            item.future.set_exception(_with_traceback(raised, summary, text))

    def _redo(self, item: _Item, cause: str, words: str) -> None:
        item.deaths += 1
        failure: WorkerError | None = None
        with self._state:
            if self._aborting:
                failure = WorkerError(f"task {item.number} was stopped")
            elif self._broken is not None:
                failure = _copy(self._broken)
            elif item.deaths >= MAX_DEATHS:
                failure = WorkerError(f"task {item.number} has killed {item.deaths} workers: the last one {cause}{_last_line(words)}", words)
            else:
                self._queue.appendleft(item)
                self._state.notify()
        if failure is not None:
            item.future.set_exception(failure)

    def _break(self, error: WorkerError) -> None:
        with self._state:
            if self._broken is None:
                self._broken = error
            items = list(self._queue)
            self._queue.clear()
            self._state.notify_all()
        for item in items:
            if item.deaths or item.future.set_running_or_notify_cancel():
                item.future.set_exception(_copy(error))

    def _cancel_queue(self) -> None:
        items = list(self._queue)
        self._queue.clear()
        for item in items:
            if item.deaths:
                item.future.set_exception(WorkerError(f"task {item.number} was stopped"))
            elif item.future.cancel():
                item.future.set_running_or_notify_cancel()  # wakes those who wait for it

    def _tell(self, kind: str, index: int, process: WorkerProcess, seconds: float = 0.0, text: str = "", about: Any = None) -> None:
        with self._events_lock:
            if self._events is None:
                if kind == "stderr":
                    sys.stderr.write(text)
                return
            try:
                self._events(WorkerEvent(kind, index, process.pid, self.gpu_of_worker[index], seconds, text, about))
            except Exception:
                _log.exception("the pool's events callback failed")


def _copy(error: WorkerError) -> WorkerError:
    """Every future gets an exception of its own; raising one in two places would mix their tracebacks."""
    return WorkerError(str(error), error.traceback_text)


def _last_line(words: str) -> str:
    lines = words.strip().splitlines()
    return f"; its last words: {lines[-1].strip()}" if lines else ""


def _with_traceback(error: BaseException | None, summary: str, text: str) -> BaseException:
    """The worker's exception as it was, or a `WorkerError` that quotes it, with the worker's traceback."""
    if not isinstance(error, Exception):  # it does not pickle; or it is a SystemExit, which would end this process without a word
        return WorkerError(summary, text)
    if isinstance(error, WorkerError) and not error.traceback_text:
        error.traceback_text = text
    error.add_note(f"In the worker:\n{text}")
    return error


def _where_main_is() -> tuple[str, str] | None:
    """How a worker can find what was defined in the user's script: a module's name, a file's path, or not at all."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path is not None and os.path.isfile(path) else None


# Workers would notice the end of this process by themselves; this lets them leave before it, in order.
_pools: weakref.WeakSet[PinnedPool] = weakref.WeakSet()


@atexit.register
def _end_pools() -> None:
    for pool in list(_pools):
        pool.terminate_workers()
