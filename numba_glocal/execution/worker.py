"""The worker process: started as a script by the pool, it runs one task after another until the pool says stop or is gone.

Nothing but the standard library may be imported at the top of this file. The pool has put thread caps and the GPU into the environment of
this process before it began, and whatever a task imports reads them there.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

STOP = b""
_TOKENS_KEPT = 16
_LARGE_BYTES = 1 << 20


class _TaskUnpickler(pickle.Unpickler):
    """Finds what was defined in the user's script, which is run again only when a task really names something of it."""

    main: tuple[str, str] | None = None
    main_is_loaded = False

    def find_class(self, module: str, name: str) -> Any:
        if module != "__main__":
            return super().find_class(module, name)
        if not self.main_is_loaded:
            if self.main is None:
                raise AttributeError(f"'{name}' was defined interactively; tasks must be functions of a module or of a script file")
            # The name by which `multiprocessing` knows the main module of a parent; it lets results find their classes there.
            main = sys.modules["__mp_main__"] = ModuleType("__mp_main__")
            kind, place = self.main
            run = runpy.run_path if kind == "path" else runpy.run_module
            main.__dict__.update(run(place, run_name="__mp_main__"))
            _TaskUnpickler.main_is_loaded = True
        return super().find_class("__mp_main__", name)


def _loads(payload: bytes) -> Any:
    return _TaskUnpickler(io.BytesIO(payload)).load()


def _watch_parent(life_line: int) -> None:
    """Leave when the pool's process is gone, however it went: the kernel then closes the other end of this pipe."""
    while True:
        try:
            if os.read(life_line, 1) == b"":
                break
        except InterruptedError:
            continue
        except OSError:
            break
    os._exit(1)


@contextmanager
def _one_compiles_first(lock_path: Path, token: str) -> Iterator[None]:
    """Let one worker of a pool through alone; once it has been, the others go together.

    `token` names the pool. The file lists the pools whose first worker has been through, so several runs on one machine also take turns.
    """
    try:
        lock = lock_path.open("a+")
    except OSError:  # without a lock all compile: slower, never wrong
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            tokens = lock.read().split()
            if token in tokens:
                fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError:  # some network file systems have no locks
            yield
            return
        yield
        if token not in tokens:
            lock.truncate(0)
            lock.write("\n".join([*tokens, token][-_TOKENS_KEPT:]) + "\n")
            lock.flush()


def _portable(error: BaseException) -> BaseException | None:
    """The exception itself if it survives pickling, else None."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return again if type(again) is type(error) else None


def _failure(error: BaseException) -> tuple[BaseException | None, str, str]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = None
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return _portable(error), summary, text


def _send(connection: Connection, message: tuple[Any, ...]) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _answer(value: Any, seconds: float, outbox: int) -> bytes:
    """A task's result as the message to send; its large arrays go into the outbox, a file that the pool reads, and not through the pipe."""
    large: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _LARGE_BYTES:
            return True
        large.append(view)
        return False

    payload = pickle.dumps(("value", value, seconds), protocol=5, buffer_callback=stays_inside)
    if not large:
        return payload
    try:
        position = 0
        for view in large:
            done = 0
            while done < view.nbytes:
                done += os.pwrite(outbox, view[done : done + (1 << 30)], position + done)
            position += view.nbytes
    except OSError:  # no space: the pipe is slower, never wrong
        os.ftruncate(outbox, 0)
        return pickle.dumps(("value", value, seconds), protocol=pickle.HIGHEST_PROTOCOL)
    return pickle.dumps(("outbox", payload, [view.nbytes for view in large]), protocol=pickle.HIGHEST_PROTOCOL)


def _start(connection: Connection, setup: dict[str, Any]) -> bool:
    """Run initializer and warm-up, reporting each; False when one failed."""
    try:
        initializer, initargs = _loads(setup["initializer"])
        warm_up: Callable[[], Any] | None = _loads(setup["warm_up"])
        about: Any = initializer(setup["info"], *initargs) if initializer is not None else None
        _send(connection, ("initialised", None))
        if warm_up is not None:
            with _one_compiles_first(Path(setup["lock"]), setup["token"]):
                warm_up()
        _send(connection, ("ready", about))
    except BaseException as error:
        _send(connection, ("failed", *_failure(error)))
        return False
    return True


def main(connection_fd: int, life_line_fd: int, outbox_fd: int) -> int:
    """Serve the pool at the other end of `connection_fd`."""
    # Ctrl-C reaches every process of a terminal; the pool alone decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.set_inheritable(connection_fd, False)
    os.set_inheritable(life_line_fd, False)
    os.set_inheritable(outbox_fd, False)
    threading.Thread(target=_watch_parent, args=(life_line_fd,), daemon=True).start()
    connection = Connection(connection_fd)
    setup = pickle.loads(connection.recv_bytes())
    sys.path[:] = setup["sys_path"]
    _TaskUnpickler.main = setup["main"]
    setup["info"] = pickle.loads(setup["info"])
    faulthandler.enable()  # a segmentation fault leaves its place in the last words
    if not _start(connection, setup):
        return 1
    while (payload := connection.recv_bytes()) != STOP:
        begin = time.perf_counter()
        try:
            function, args, kwargs = _loads(payload)
            del payload
            value = function(*args, **kwargs)
            seconds = time.perf_counter() - begin
            reply = _answer(value, seconds, outbox_fd)
            del function, args, kwargs, value
        except BaseException as error:
            reply = pickle.dumps(("error", *_failure(error), time.perf_counter() - begin), protocol=pickle.HIGHEST_PROTOCOL)
        connection.send_bytes(reply)
        del reply
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    except (EOFError, ConnectionError):  # the pool is gone
        sys.exit(1)
