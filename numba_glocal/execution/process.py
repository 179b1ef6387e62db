"""One worker process, seen from the parent: start it, talk to it over its pipe, see it die, say why, end it."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from . import worker as worker_module

_TAIL_BYTES = 8192
_POLL_S = 0.5
_FAREWELL_S = 5.0
_OUTBOX_BYTES_KEPT = 64 << 20


class WorkerDied(Exception):
    """The process at the other end of the pipe is gone."""


def _nameless_file() -> int:
    """Descriptor of a file in memory, or on disk where the system has none."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("numba-glocal")
        except OSError:
            pass
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class WorkerProcess:
    """A fresh interpreter (nothing is forked) that runs `worker.py`.

    Parameters
    ----------
    environment : mapping of str to str
        Complete; it holds from the first instruction of the process.

    Notes
    -----
    Four things join the process to this one: a pipe for tasks and answers; an outbox, a file in memory for the large arrays of an answer; a life
    line, whose end tells the worker that this process is gone, even by ``kill -9``; and a file that collects what it writes to stderr, so that
    its last words can be quoted. Neither file has a name: both are gone with the processes, however these end.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = Pipe(duplex=True)
        life_read, life_write = os.pipe()
        stderr = tempfile.TemporaryFile(buffering=0)
        outbox = _nameless_file()
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # -P: the folder of the script must not become a place to import from.
        command = [sys.executable, *flags, "-P", worker_module.__file__, str(theirs.fileno()), str(life_read), str(outbox)]
        try:
            self.popen = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=(theirs.fileno(), life_read, outbox)
            )
        except BaseException:
            ours.close()
            os.close(life_write)
            os.close(outbox)
            stderr.close()
            raise
        finally:
            theirs.close()
            os.close(life_read)
        self.connection = ours
        self.pid = self.popen.pid
        self.ready = False
        self._started_at = time.monotonic()
        self._life_write = life_write
        self._outbox = outbox
        self._stderr = stderr
        self._stderr_told = 0
        self._sentinel = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @property
    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started_at

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.popen.poll() is None

    def send(self, payload: bytes) -> None:
        """Send one message; `WorkerDied` when nobody is there."""
        try:
            self.connection.send_bytes(payload)
        except OSError as error:
            raise WorkerDied from error

    def receive(self, timeout_s: float | None = None) -> tuple[Any, ...] | None:
        """The next message, None after `timeout_s`, `WorkerDied` when there will be none."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        things: list[Any] = [self.connection] if self._sentinel is None else [self.connection, self._sentinel]
        while True:
            step = _POLL_S if deadline is None else min(_POLL_S, max(0.0, deadline - time.monotonic()))
            happened = wait_for_any(things, None if deadline is None and self._sentinel is not None else step)
            # The pipe comes first: an answer that was complete before the end still counts.
            if self.connection in happened or (happened and self.connection.poll(0)):
                try:
                    data = self.connection.recv_bytes()
                except (EOFError, OSError) as error:
                    raise WorkerDied from error
                message: tuple[Any, ...] = pickle.loads(data)
                return self._with_arrays(*message[1:]) if message[0] == "outbox" else message
            if happened or not self.is_alive():
                raise WorkerDied
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _with_arrays(self, payload: bytes, sizes: list[int]) -> tuple[Any, ...]:
        """An answer whose large arrays lie in the outbox, which is emptied when it has become large."""
        buffers, position = [], 0
        for size in sizes:
            pages = mmap.mmap(-1, size)  # writable, returned to the system with the array
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):
                    pages.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(pages)
            done = 0
            while done < size:
                count = os.preadv(self._outbox, [buffer[done : done + (1 << 30)]], position + done)
                if not count:
                    raise WorkerDied
                done += count
            buffers.append(buffer)
            position += size
        if position > _OUTBOX_BYTES_KEPT:
            os.ftruncate(self._outbox, 0)
        message: tuple[Any, ...] = pickle.loads(payload, buffers=buffers)
        return message

    def cause_of_death(self) -> str:
        """How the process ended, as the rest of a sentence; waits for the end."""
        try:
            code = self.popen.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return "closed its pipe and did not leave"
        if code >= 0:
            return f"left with exit code {code}"
        hints = {signal.SIGKILL: " (out of memory?)", signal.SIGSEGV: " (segmentation fault)"}
        try:
            return f"was killed by {signal.Signals(-code).name}{hints.get(signal.Signals(-code), '')}"
        except ValueError:
            return f"was killed by signal {-code}"

    def new_stderr(self) -> str:
        """What was written to stderr since the last call (the end of it)."""
        text = self._stderr_from(self._stderr_told)
        self._stderr_told = os.fstat(self._stderr.fileno()).st_size
        return text

    def last_words(self) -> str:
        """The end of what was written to stderr."""
        return self._stderr_from(0).strip()

    def _stderr_from(self, start: int) -> str:
        # pread: the process shares the offset of this file, which must stay where it writes.
        size = os.fstat(self._stderr.fileno()).st_size
        start = max(start, size - _TAIL_BYTES)
        return os.pread(self._stderr.fileno(), size - start, start).decode(errors="replace") if size > start else ""

    def kill(self) -> None:
        """End the process at once."""
        self.popen.kill()

    def close(self) -> None:
        """End the process, gently when it is idle, and free what belongs to it."""
        if self.ready and self.is_alive():
            try:
                self.connection.send_bytes(worker_module.STOP)
                self.popen.wait(_FAREWELL_S)
            except (OSError, subprocess.TimeoutExpired):
                pass
        if self.is_alive():
            self.popen.kill()
        self.popen.wait()
        self.connection.close()
        os.close(self._life_write)
        os.close(self._outbox)
        if self._sentinel is not None:
            os.close(self._sentinel)
        self._stderr.close()
