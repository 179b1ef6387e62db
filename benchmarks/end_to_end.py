"""Times whole runs of `align`: start of the workers with a cold and a warm JIT cache, and every stage of every iteration.

    python benchmarks/end_to_end.py [--particles 2000] [--boxes 64 128] [--iterations 4] [--gpus 0 | --cpu] [--quick] [-o FOLDER]

The particles are simulated here (wedge of +-60 degrees, signal-to-noise ratio 0.05) and lie in the page cache when the runs begin.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, environment, make_particles, need_gpus, run_align, show, write_results

NOTES = (
    "Wall seconds. 'run' rows: the whole program, and until its workers were ready. 'iteration' rows: from the run's own event log; noise_s, align_s,"
    " refine_s and average_s are passes over the particles, rest_s what the parent does alone (reconstruction, FSC, references, files). The first"
    " iteration reads the files, later ones find particles where they were left."
)


def measure(box: int, particles: int, iterations: int, workers: list[str], repeats: int, scratch: Path) -> list[dict[str, Any]]:
    """One cold run of one iteration, then warm ones."""
    data = scratch / f"data{box}"
    data.mkdir()
    made = make_particles(data, particles, box, 6.8 * 64 / box)
    jit = scratch / "jit"
    rows: list[dict[str, Any]] = []
    cold = not jit.exists()
    jit.mkdir(exist_ok=True)
    for number in range(repeats + cold):
        kind = "cold" if cold and number == 0 else "warm"
        output = scratch / f"run{box}_{number}"
        count = 1 if kind == "cold" else iterations
        run = run_align(data, output, ["--particle-diameter", "300", "--iterations", str(count), *workers], jit)
        about = {"box": box, "particles": particles, "jit_cache": kind, "run": number}
        rows.append({"benchmark": "run", **about, "wall_s": run.wall_s, "workers_ready_s": run.ready_s(), "iterations": count, "made_in_s": made})
        rows += [{"benchmark": "iteration", **about, **row} for row in run.iterations()]
        shutil.rmtree(output)
    shutil.rmtree(data)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Runs all and writes ``end_to_end.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=2000)
    parser.add_argument("--boxes", type=int, nargs="+", default=[64])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--procs-per-gpu", default="auto")
    parser.add_argument("--cpu", action="store_true", help="CPU workers instead of GPUs")
    parser.add_argument("--quick", action="store_true", help="24 particles of 24 voxels, one iteration: does it run?")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not options.cpu:
        need_gpus()
    about = environment()
    particles, boxes, iterations, repeats = options.particles, options.boxes, options.iterations, options.repeats
    if options.quick:
        particles, boxes, iterations, repeats = 24, [24], 1, 1
    workers = ["--gpus", "none"] if options.cpu else ["--gpus", options.gpus, "--procs-per-gpu", options.procs_per_gpu]
    rows: list[dict[str, Any]] = []
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    try:
        for box in boxes:
            part = measure(box, particles, iterations, workers, repeats, scratch)
            show(part)
            rows += part
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(write_results("end_to_end", rows, about, NOTES, options.output))


if __name__ == "__main__":
    main()
