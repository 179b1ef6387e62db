"""Compiling kernels ahead, in helper processes, while a worker starts: what the worker then needs lies in the JIT cache.

One thread needs 20 to 30 s for all kernels, most of it in Python. So the first worker of a machine that finds no trace of an earlier warm-up
starts helpers before it imports anything slow. They take kernels from a common queue, the longest first, and need no GPU (`compiling`): they
cannot see one. While a helper has a kernel that a warm-up needs, it holds a lock in the JIT cache's folder, for which every worker waits before
it warms up. So nobody compiles a kernel twice, and a function's entries in the cache are written by one process.

Nothing depends on the helpers: what they have not compiled, the worker compiles. They end with the worker that has started them.

Only the standard library is imported here.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_KEYS_KEPT = 16
_MOST_HELPERS = 6
_QUEUE = bytes(range(255))
_POLL_S = 0.02
_PATIENCE_S = 180.0
_HELPER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from numba_glocal.backends.cuda.compiling import main; main(sys.argv[2:])"


def compute_capability() -> tuple[int, int] | None:
    """Of the first GPU that this process may see, asked of the driver without a context; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), 0)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else (major.value, minor.value)


def _key(capability: tuple[int, int], precision: str) -> str:
    """Names what is to be compiled: another version of anything that goes in has another key."""
    parts: list[Any] = [sys.version, capability, precision]
    for name in ("numba", "numba-cuda", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):  # the last two: of which toolkit
        try:
            parts.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            parts.append(None)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        facts = path.stat()
        parts.append((str(path), facts.st_mtime_ns, facts.st_size))
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _lock_path() -> Path | None:
    folder = os.environ.get("NUMBA_CACHE_DIR")
    return Path(folder) / "compiling.lock" if folder else None


class Ahead:
    """The helpers of a worker.

    Parameters
    ----------
    precision : str
        Of searches: which kernels a warm-up needs.
    helpers : int
        At most so many processes.
    capability : tuple of int, optional
        To compile for; that of this process's GPU by default.

    Attributes
    ----------
    processes : list of Popen
        The helpers; empty where there is nothing to do, nobody to do it, or another worker's helpers are at it.
    """

    def __init__(self, precision: str, helpers: int, capability: tuple[int, int] | None = None) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._path = _lock_path()
        self._key = ""
        if self._path is None or os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
            return
        capability = capability or compute_capability()
        if capability is None:
            return
        try:
            self._key = _key(capability, precision)
            with self._path.open("a+") as lock:
                lock.seek(0)
                if self._key in lock.read().split():
                    return
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._start(lock.fileno(), precision, min(helpers, _MOST_HELPERS), capability)
        except OSError:  # another's helpers are at it; or no lock, no folder, no process: the worker compiles, as without this
            pass

    def _start(self, lock: int, precision: str, helpers: int, capability: tuple[int, int]) -> None:
        # the lock is that of an open file, which the helpers inherit: it ends with the last of them
        queue, fill = os.pipe()
        try:
            os.write(fill, _QUEUE)  # each reads one number at a time; those beyond the last kernel are for nobody
            os.close(fill)
            flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            command = [sys.executable, *flags, "-P", "-c", _HELPER, json.dumps(sys.path), str(queue), str(lock)]
            command += [str(capability[0]), str(capability[1]), precision]
            environment = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONHASHSEED": "0",  # Numba goes through sets of names: the same code every time
            }
            for _ in range(helpers):
                helper = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,  # its end tells the helper that this process is gone
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(queue, lock),
                )
                self.processes.append(helper)
                threading.Thread(target=helper.wait, daemon=True).start()
        finally:
            os.close(queue)

    def wait(self) -> None:
        """Waits until no helper, of whatever worker, has a kernel that a warm-up needs."""
        if self._path is None:
            return
        deadline = time.monotonic() + _PATIENCE_S
        try:
            with self._path.open("a+") as lock:
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        return
                    except BlockingIOError:
                        time.sleep(_POLL_S)
        except OSError:
            pass

    def done(self) -> None:
        """Leaves word that a warm-up has been through, so that later workers need no helpers."""
        if self._path is None or not self._key:
            return
        try:
            with self._path.open("a+") as lock:
                lock.seek(0)
                keys = lock.read().split()
                if self._key not in keys:
                    lock.truncate(0)
                    lock.write("\n".join([*keys, self._key][-_KEYS_KEPT:]) + "\n")
        except OSError:
            pass
