"""Times the start of the GPU workers with a cold and a warm JIT cache, and of every kernel: seconds, and whether the JIT cache had it.

    python benchmarks/cold_start.py [--workers N] [--alone] [-o FOLDER]
    python benchmarks/cold_start.py --offline [--capability 9.0] [--helpers N]

The first starts a pool on GPU 0, as `align` does, three times: cold, with the helpers that compile ahead; warm; and cold without helpers
(`--alone`: the last only). `reached_s` are seconds from the start of worker 0's process: its initializer begins, the backend stands, the helpers
are done with what a warm-up needs, the warm-up is over. Kernels that worker 0 had to compile in spite of the helpers are listed: there should
be none.

`--offline` needs no GPU: the same helpers compile for a compute capability into an empty folder; then a second process asks for every kernel
again, and all should lie in the cache. Before that one process compiles all by itself, which gives the seconds of each kernel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, environment, need_gpus, show, write_results

Row = dict[str, Any]
NOTES = "Seconds. reached_s: from the start of worker 0's process; kernels: [seconds, in the JIT cache] of each that worker 0 compiled or loaded."
_reached: dict[str, float] = {}
_kernels: dict[str, tuple[float, bool]] = {}


def _age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def start(info: Any, helpers: bool, precision: str) -> str:
    """The pool's initializer: as that of `align`, and watches what is compiled."""
    from numba_glocal.backends.cuda import ahead
    from numba_glocal.execution import gpu_worker

    _reached["initializer"] = _age()
    if not helpers:
        ahead._MOST_HELPERS = 0
    device = gpu_worker.start_gpu_worker(info, "cuda", 0, share=2, precision=precision)
    _reached["backend"] = _age()
    from numba.cuda.dispatcher import CUDADispatcher

    compile_kernel = CUDADispatcher.compile

    def watched(kernel: Any, types: Any) -> Any:
        known, begin, missed = len(kernel.overloads), time.perf_counter(), sum(kernel._cache_misses.values())
        compiled = compile_kernel(kernel, types)
        if len(kernel.overloads) > known:
            name = f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.py_func.__name__}"
            _kernels[name] = (round(time.perf_counter() - begin, 3), sum(kernel._cache_misses.values()) == missed)
        return compiled

    CUDADispatcher.compile = watched
    return device


def warm_up() -> None:
    """The pool's warm-up: as that of `align`, in two steps."""
    from numba_glocal.execution import gpu_worker

    assert gpu_worker._ahead is not None
    gpu_worker._ahead.wait()
    _reached["helpers"] = _age()
    gpu_worker.warm_up_gpu_worker()
    _reached["warm"] = _age()


def report() -> tuple[dict[str, float], dict[str, tuple[float, bool]]]:
    """What worker 0 has seen."""
    return {name: round(seconds, 2) for name, seconds in _reached.items()}, _kernels


def pool_start(jit: Path, workers: int, helpers: bool, precision: str, kind: str) -> Row:
    """One start of a pool."""
    from numba_glocal.execution.executors import make_executor

    os.environ["NUMBA_CACHE_DIR"] = str(jit)
    begin = time.perf_counter()
    with make_executor(workers, ["0"], initializer=start, initargs=(helpers, precision), warm_up=warm_up) as executor:
        executor.wait_ready()  # type: ignore[union-attr]
        ready = time.perf_counter() - begin
        seen = [executor.submit(report).result() for _ in range(workers)]
    reached, kernels = max(seen, key=lambda one: sum(seconds for seconds, _ in one[1].values()))
    missed = {name: seconds for name, (seconds, cached) in kernels.items() if not cached}
    return {"start": kind, "workers": workers, "ready_s": round(ready, 2), "reached_s": reached, "compiled": missed, "kernels": kernels}


_ALONE = """
import sys, time, gc
gc.disable()
from numba_glocal.backends.cuda.compiling import compile_job, use_no_gpu
use_no_gpu((int(sys.argv[1]), int(sys.argv[2])))
from numba_glocal.backends.cuda.signatures import jobs
first, later = jobs(sys.argv[3])
for number, job in enumerate([*first, *later]):
    print(job.name, *compile_job(job), "warm-up" if number < len(first) else "later", sep="\\t", flush=True)
"""


def one_process(jit: Path, capability: tuple[int, int], precision: str) -> list[Row]:
    """Every kernel, compiled or found by a process of its own."""
    command = [sys.executable, "-c", _ALONE, *map(str, capability), precision]
    text = subprocess.run(command, env={**os.environ, "NUMBA_CACHE_DIR": str(jit)}, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split("\t") for line in text.splitlines()]
    return [{"kernel": name, "cpu_s": round(float(s), 3), "in_cache": cached == "True", "needed": when} for name, s, cached, when in rows]


def offline(folder: Path, capability: tuple[int, int], helpers: int, precision: str) -> list[Row]:
    """Without a GPU: each kernel alone, then all by the helpers, then who finds them."""
    from numba_glocal.backends.cuda.ahead import Ahead

    rows = one_process(folder / "alone", capability, precision)
    jit = folder / "ahead"
    jit.mkdir()
    os.environ["NUMBA_CACHE_DIR"] = str(jit)
    begin = time.perf_counter()
    ahead = Ahead(precision, helpers, capability)
    ahead.wait()
    first = time.perf_counter() - begin
    codes = [helper.wait() for helper in ahead.processes]
    whole = time.perf_counter() - begin
    found = one_process(jit, capability, precision)
    missed = [row["kernel"] for row in found if not row["in_cache"]]
    summary = {"helpers": len(codes), "exit_codes": codes, "warm_up_s": round(first, 2), "all_s": round(whole, 2), "not_found_by_the_next": missed}
    summary["one_process_warm_up_cpu_s"] = round(sum(row["cpu_s"] for row in rows if row["needed"] == "warm-up"), 2)
    summary["one_process_all_cpu_s"] = round(sum(row["cpu_s"] for row in rows), 2)
    return [*rows, summary]


def main(arguments: list[str] | None = None) -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--helpers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--precision", choices=("int8", "half", "single"), default="int8")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    about = environment()
    with tempfile.TemporaryDirectory(prefix="cold-start-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if options.offline:
            major, minor = map(int, options.capability.split("."))
            rows = offline(folder, (major, minor), options.helpers, options.precision)
        else:
            need_gpus()
            jobs = [("alone", False, "cold, no helpers")]
            if not options.alone:
                jobs = [("ahead", True, "cold"), ("ahead", True, "warm"), *jobs]
            rows = []
            for folder_name, helpers, kind in jobs:
                (folder / folder_name).mkdir(exist_ok=True)
                rows.append(pool_start(folder / folder_name, options.workers, helpers, options.precision, kind))
                show(rows[-1:])
    if options.offline:
        show(rows)
    print(write_results("cold_start_offline" if options.offline else "cold_start", rows, about, NOTES, options.output))


if __name__ == "__main__":
    main()
