"""Tasks for the tests of the pool; workers import this module by name. Only the standard library at the top: it must not load NumPy by itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from numba_glocal.errors import BadParticleError


def square(x):
    return x * x


def whoami(_=None):
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def slow_square(x, seconds=0.02):
    time.sleep(seconds)
    return x * x


def slow_on_gpu_0(x):
    time.sleep(0.2 if os.environ["CUDA_VISIBLE_DEVICES"] == "0" else 0.01)
    return x, os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def kill_once(task):
    """Kills its own worker if the marker file is not there yet."""
    marker, x = task
    if marker is not None:
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return x, os.environ["CUDA_VISIBLE_DEVICES"]


def kill_always(_, number=signal.SIGKILL):
    print("about to go", file=sys.stderr)
    os.kill(os.getpid(), number)


def leave(code):
    os._exit(code)


def bad_particle(name):
    raise BadParticleError(name, "constant")


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.handle = open(os.devnull)


def raise_unpicklable(_):
    raise Unpicklable("this", "that")


def return_unpicklable(_):
    return lambda: None


def fail_at(task):
    number, failing = task
    time.sleep(0.05)
    if number in failing:
        raise ValueError(f"task {number}")
    return number


def environment(names):
    return {name: os.environ.get(name) for name in names}


def threads_seen():
    """Loads the libraries here, for the first time in this process, and asks them."""
    already = [name for name in ("numpy", "numba", "pyfftw") if name in sys.modules]
    import numba
    import numpy as np
    import pyfftw
    from threadpoolctl import threadpool_info

    np.ones((4, 4)) @ np.ones((4, 4))
    blas = {info["num_threads"] for info in threadpool_info()}
    return already, numba.config.NUMBA_NUM_THREADS, pyfftw.config.NUM_THREADS, blas, numba.config.CACHE_DIR


def greet(info, log_path):
    with open(log_path, "a") as log:
        log.write(f"{info.index} {info.gpu} {info.threads} {info.generation} {os.environ['CUDA_VISIBLE_DEVICES']}\n")
    return {"name": f"device of {info.index}"}


def refuse(info, text):
    raise ValueError(text)


def die_at_start(info):
    print("libcuda is not here", file=sys.stderr)
    os._exit(7)


def sleep_at_start(info):
    time.sleep(60)


def warm_up(folder):
    """Says when it ran: begin and end, with the state of the "cache" it found."""
    compiled = Path(folder) / "compiled"
    found = compiled.exists()
    begin = time.monotonic()
    time.sleep(0.3)
    compiled.touch()
    (Path(folder) / f"{os.getpid()}.txt").write_text(f"{begin} {time.monotonic()} {int(found)}")


def interrupt_self_and_group(x):
    os.kill(os.getpid(), signal.SIGINT)
    return x


@dataclass(frozen=True)
class Keyed:
    """A task with particles."""

    number: int
    affinity: tuple[str, ...]
    seconds: float = 0.05


def where_and_when(task):
    begin = time.monotonic()
    time.sleep(task.seconds)
    return task.number, os.environ["CUDA_VISIBLE_DEVICES"], begin


def slow_keyed_on_gpu_0(task):
    time.sleep(0.3 if os.environ["CUDA_VISIBLE_DEVICES"] == "0" else 0.01)
    return task.number, os.environ["CUDA_VISIBLE_DEVICES"]


def large_arrays(task):
    import numpy as np

    number, marker = task
    if marker is not None and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    big = np.arange(3 << 18, dtype=np.float64) * number
    return {"number": number, "big": big, "complex": big[::2].astype(np.complex128), "small": np.full(3, number)}


def many_bytes(count):
    return bytes(count)


def sleep_by_gpu(task):
    """``(number, seconds by GPU, seconds of others)``: how long this worker's GPU takes; returns the GPU."""
    _, slow, otherwise = task
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    time.sleep(slow.get(gpu, otherwise))
    return gpu
