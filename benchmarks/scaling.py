"""Times `align` on 1, 2, 4 GPUs with 1, 2, 4 workers each, and with one GPU made slower by a competitor.

    python benchmarks/scaling.py [--particles 20000] [--box 64] [--gpus 1 2 4] [--workers 1 2 4] [--slow-gpu] [--cpu] [--quick] [-o FOLDER]

Efficiency is particles a second over GPUs times those of one GPU with as many workers. With --slow-gpu, a load of our own runs on GPU 0 for as
long as the run takes; the ideal is the time in which the GPUs, each at the rate that it reaches by itself (GPU 0 under the load), would finish.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, ROOT, Run, Watch, environment, gpu_names, make_particles, need_gpus, run_align, show, write_results

NOTES = (
    "Particles a second over whole iterations: 'first' with reading the files, 'later' (median of those after the first) with the particles"
    " where the first left them, 'align_later' the passes over particles alone. 'idle': share of the workers' time between their being ready and"
    " the end in which no task was at work, by GPU. 'own_gpu_only': no worker held memory on another GPU than its own, by the driver's account"
    " of processes (null where it cannot be asked or sees other process numbers). 'maps': digest of both half-maps; equal digests, equal bits."
)


class MemoryByProcess(Watch):
    """Which processes hold memory on which GPU, asked of the driver every half second in a `with` block.

    Attributes
    ----------
    seen : dict of GPU index to dict of pid to most bytes
    """

    EVERY_S = 0.5

    def __init__(self, module: str = "pynvml") -> None:
        self.seen: dict[int, dict[int, int]] = {}
        try:
            self._nvml: Any = importlib.import_module(module)
            self._nvml.nvmlInit()
        except Exception:
            self._nvml = None

    def look(self) -> None:
        """Reads once."""
        if self._nvml is None:
            return
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            held = self.seen.setdefault(index, {})
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                held[process.pid] = max(held.get(process.pid, 0), process.usedGpuMemory or 0)


def own_gpu_only(seen: dict[int, dict[int, int]], gpu_of_pid: dict[int, str]) -> bool | None:
    """Whether each worker was seen on its own GPU and no other; None where the driver did not see all of them."""
    found = {pid: {str(gpu) for gpu, held in seen.items() if pid in held} for pid in gpu_of_pid}
    if not found or not all(found.values()):
        return None
    return all(found[pid] == {gpu} for pid, gpu in gpu_of_pid.items())


def idle_by_gpu(output: Path, run: Run) -> dict[str, float]:
    """Share of the workers' time without a task, by GPU (or CPU)."""
    ready = run.ready_s() + run.started
    span = max(event["time"] for event in run.events if event["event"] == "iteration") - ready
    workers = json.loads((output / "summary.json").read_text())["workers"]
    shares: dict[str, list[float]] = {}
    for worker in workers:
        shares.setdefault(worker["device"], []).append(1.0 - worker["busy_seconds"] / span)
    return {device: round(sum(found) / len(found), 3) for device, found in shares.items()}


def measure(data: Path, output: Path, particles: int, options: list[str], **about: Any) -> dict[str, Any]:
    """One run."""
    with MemoryByProcess() as memory:
        run = run_align(data, output, options)
    iterations = run.iterations()
    later = iterations[1:] or iterations
    passes = [row["seconds"] - row["rest_s"] for row in later]
    gpu_of_pid = {event["pid"]: event["gpu"] for event in run.events if event["event"] in ("started", "replaced") and event.get("gpu") is not None}
    row = {
        **about,
        **run.summary(output),
        "first_particles_per_s": particles / iterations[0]["seconds"],
        "later_particles_per_s": particles / median(row["seconds"] for row in later),
        "align_later_particles_per_s": particles / median(passes),
        "idle": idle_by_gpu(output, run),
        "own_gpu_only": own_gpu_only(memory.seen, gpu_of_pid),
    }
    shutil.rmtree(output)
    return row


@contextmanager
def competitor(gpu: int, seconds: float) -> Iterator[None]:
    """A load on one GPU, for at most `seconds`; it is at work when the block begins."""
    variables = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu), PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_load.py"), str(seconds)], env=variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError("the competing load did not start")
    try:
        yield
    finally:
        process.kill()
        process.wait()


def add_efficiency(rows: list[dict[str, Any]]) -> None:
    """Over one GPU with as many workers."""
    for row in rows:
        one = next((other for other in rows if other["gpus"] == 1 and other["workers_per_gpu"] == row["workers_per_gpu"]), None)
        if one is not None:
            for kind in ("first", "later", "align_later"):
                name = f"{kind}_particles_per_s"
                row[f"{kind}_efficiency"] = row[name] / (row["gpus"] * one[name])


def main(arguments: list[str] | None = None) -> None:
    """Runs all and writes ``scaling.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=20000)
    parser.add_argument("--box", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs; GPU 0, 1, ... are used")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="workers on each GPU")
    parser.add_argument("--slow-gpu", action="store_true", help="also with a competing load on GPU 0")
    parser.add_argument("--cpu", action="store_true", help="a CPU worker for each GPU and worker: does it run?")
    parser.add_argument("--quick", action="store_true", help="24 particles of 24 voxels")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.cpu and given.slow_gpu:
        parser.error("--slow-gpu needs GPUs")
    if not given.cpu:
        need_gpus(min(given.gpus))
        given.gpus = [count for count in given.gpus if count <= len(gpu_names())]
    about = environment()
    particles, box, iterations = (24, 24, 2) if given.quick else (given.particles, given.box, given.iterations)
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))

    def options(gpus: list[int], per: int) -> list[str]:
        devices = ["--gpus", "none", "--cpu-procs", str(len(gpus) * per)]
        if not given.cpu:
            devices = ["--gpus", ",".join(map(str, gpus)), "--procs-per-gpu", str(per)]
        return ["--particle-diameter", "300", "--iterations", str(iterations), *devices]

    rows: list[dict[str, Any]] = []
    try:
        data = scratch / "data"
        data.mkdir()
        make_particles(data, particles, box, 6.8 * 64 / box)
        run_align(data, scratch / "warm", [*options([0], 1), "--iterations", "1"])  # fills the JIT cache, and the page cache
        for per in given.workers:
            for count in given.gpus:
                gpus = list(range(count))
                rows.append(measure(data, scratch / "run", particles, options(gpus, per), gpus=count, workers_per_gpu=per, load="none"))
                show(rows[-1:])
        add_efficiency(rows)
        if given.slow_gpu:
            count, per = max(given.gpus), given.workers[0]
            alone = next(row for row in rows if row["gpus"] == 1 and row["workers_per_gpu"] == per)
            limit = 30.0 + 6.0 * alone["wall_s"]
            with competitor(0, limit):
                slow = measure(data, scratch / "run", particles, options([0], per), gpus=1, workers_per_gpu=per, load="GPU 0")
                row = measure(data, scratch / "run", particles, options(list(range(count)), per), gpus=count, workers_per_gpu=per, load="GPU 0")
            rates = slow["later_particles_per_s"] + (count - 1) * alone["later_particles_per_s"]
            row["share_of_ideal"] = row["later_particles_per_s"] / rates
            rows += [slow, row]
            show(rows[-2:])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(write_results("scaling", rows, about, NOTES, given.output))


if __name__ == "__main__":
    main()
