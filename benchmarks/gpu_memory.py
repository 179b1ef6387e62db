"""Runs `align` under `--gpu-memory`, as on smaller cards: the same maps, what it costs, and whether the driver's count stays below the cap.

    python benchmarks/gpu_memory.py [--particles 240] [--box 128] [--caps 24 8] [--workers 2] [--gpu 0] [--quick] [-o FOLDER]

The first run is without a cap. `peak_gib` is what NVML counts as used on the whole GPU, highest of readings every 20 ms, less what it was before
the program started: all workers, their CUDA contexts and loaded kernels included, as the cap means it.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, Watch, environment, make_particles, need_gpus, run_align, show, write_results

from numba_glocal.devices import NVML_MODULE

NOTES = (
    "Wall seconds of `align`; 'maps' is a digest of the voxels of both half-maps: equal digests, equal bits. peak_gib: used on the whole GPU by"
    " NVML's count, less what was used before; contexts and loaded kernels are in it."
)


class MemoryWatch(Watch):
    """How much memory of a GPU is used, by all processes, in a `with` block.

    Parameters
    ----------
    gpu : int
        Number in NVML's order.
    """

    EVERY_S = 0.02

    def __init__(self, gpu: int) -> None:
        self._nvml = importlib.import_module(NVML_MODULE)
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
        self.before = self.peak = 0
        self.look()
        self.before = self.peak

    def look(self) -> None:
        """Reads once."""
        self.peak = max(self.peak, int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used))

    def peak_gib(self) -> float:
        """More than before, at most."""
        return (self.peak - self.before) / 2**30


def main(arguments: list[str] | None = None) -> None:
    """Runs all and writes ``gpu_memory.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=240)
    parser.add_argument("--box", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--caps", type=float, nargs="+", default=[24.0, 8.0], help="GiB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="48 particles of 64 voxels, one iteration")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    need_gpus()
    about = environment()
    particles, box, iterations = (48, 64, 1) if given.quick else (given.particles, given.box, given.iterations)
    options = ["--particle-diameter", "300", "--iterations", str(iterations), "--gpus", str(given.gpu), "--procs-per-gpu", str(given.workers)]
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    rows: list[dict[str, Any]] = []
    try:
        data = scratch / "data"
        data.mkdir()
        make_particles(data, particles, box, 6.8 * 64 / box)
        run_align(data, scratch / "warm", [*options, "--iterations", "1"])  # fills the JIT cache
        for cap in (None, *given.caps):
            row: dict[str, Any] = {"box": box, "particles": particles, "workers": given.workers, "cap_gib": cap}
            output = scratch / f"run_{cap}"
            try:
                with MemoryWatch(given.gpu) as watch:
                    run = run_align(data, output, [*options, *([] if cap is None else ["--gpu-memory", f"{cap:g}"])])
            except RuntimeError as problem:
                rows.append({**row, "problem": str(problem)[-300:]})
                continue
            rows.append({**row, "peak_gib": watch.peak_gib(), **run.summary(output)})
            shutil.rmtree(output)
        show(rows)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(write_results("gpu_memory", rows, about, NOTES, given.output))


if __name__ == "__main__":
    main()
