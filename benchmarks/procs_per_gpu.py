"""Times `align` with 1, 2, 4 and 8 workers on one GPU, without and with MPS.

python benchmarks/procs_per_gpu.py [--particles 2000] [--box 64] [--workers 1 2 4 8] [--gpu 0 | --cpu] [--quick] [-o FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import RESULTS, environment, make_particles, need_gpus, run_align, show, write_results

NOTES = (
    "Wall seconds of `align` with N workers on one GPU and a warm JIT cache; 'maps' is a digest of the voxels of both half-maps: equal digests,"
    " equal bits. MPS: NVIDIA's multi-process service, where its control daemon can be started."
)


@contextmanager
def multi_process_service(gpu: str, folder: Path) -> Iterator[tuple[dict[str, str] | None, str]]:
    """The environment of clients of an MPS of our own, or None and why there is none."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield None, "nvidia-cuda-mps-control is not installed"
        return
    pipe, log = folder / "mps_pipe", folder / "mps_log"
    pipe.mkdir()
    log.mkdir()
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
    everything = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu, **variables)
    try:
        started = subprocess.run([control, "-d"], env=everything, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as problem:
        yield None, f"MPS did not start: {problem}"
        return
    if started.returncode:
        yield None, f"MPS did not start: {(started.stderr or started.stdout).strip()}"
        return
    try:
        yield variables, ""
    finally:
        try:
            subprocess.run([control], input="quit\n", env=everything, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            pass


def measure(
    data: Path, scratch: Path, particles: int, counts: list[int], options: list[str], per: str, mps: str, variables: dict[str, str]
) -> list[dict[str, Any]]:
    """A row for each number of workers."""
    rows = []
    for count in counts:
        about = {"workers": count, "mps": mps, "particles": particles}
        output = scratch / f"run_{mps}_{count}".replace(" ", "_")
        try:
            run = run_align(data, output, [*options, per, str(count)], more=variables)
        except RuntimeError as problem:
            rows.append({**about, "problem": str(problem)[-300:]})
            continue
        rows.append({**about, **run.summary(output), "last": run.iterations()[-1]})
        shutil.rmtree(output)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Runs all and writes ``procs_per_gpu.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=2000)
    parser.add_argument("--box", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--cpu", action="store_true", help="CPU workers instead: does it run?")
    parser.add_argument("--quick", action="store_true", help="24 particles of 24 voxels")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if not given.cpu:
        need_gpus()
    about = environment()
    particles, box, iterations = (24, 24, 1) if given.quick else (given.particles, given.box, given.iterations)
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    options = ["--particle-diameter", "300", "--iterations", str(iterations), *(["--gpus", "none"] if given.cpu else ["--gpus", given.gpu])]
    per = "--cpu-procs" if given.cpu else "--procs-per-gpu"
    rows: list[dict[str, Any]] = []
    try:
        data = scratch / "data"
        data.mkdir()
        make_particles(data, particles, box, 6.8 * 64 / box)
        run_align(data, scratch / "warm", [*options, "--iterations", "1", per, "1"])  # fills the JIT cache
        rows += measure(data, scratch, particles, given.workers, options, per, "off", {})
        show(rows)
        if not given.cpu:
            with multi_process_service(given.gpu, scratch) as (variables, problem):
                if variables is None:
                    rows.append({"mps": "on", "problem": problem})
                else:
                    rows += measure(data, scratch, particles, [count for count in given.workers if count > 1], options, per, "on", variables)
            show([row for row in rows if row["mps"] == "on"])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(write_results("procs_per_gpu", rows, about, NOTES, given.output))


if __name__ == "__main__":
    main()
