"""From no orientations to converged half-maps: `align --global --until-converged` of many simulated particles.

    python benchmarks/no_poses.py [--particles 10000] [--box 64] [--gpus 0 | --cpu] [--quick] [-o FOLDER]

The particles (wedge of +-60 degrees, signal-to-noise ratio 0.05) are simulated here and lie in the page cache; the list's shifts, about a voxel
off, are the starts, its angles are not used. A short run before fills the JIT cache.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, environment, make_particles, need_gpus, run_align, show, write_results

NOTES = (
    "Wall seconds. after_start_s: from the workers' being ready to the program's end, reading of all particles included. Errors are medians against"
    " the planted poses after one common motion is taken off (the map may settle turned)."
)


def pose_errors(data: Path, output: Path) -> dict[str, float]:
    """Median and 90 % quantile of the angle, and share beyond 10 degrees, against the planted poses."""
    from scipy.spatial.transform import Rotation

    from numba_glocal.io import read_particles

    truth: dict[str, Any] = {}
    for folder in sorted(data.glob("part*")):
        part = read_particles(folder / "truth.star")
        truth |= {f"{folder.name}/{Path(name).name}": rotation for name, rotation in zip(part.names, part.poses.rotations, strict=True)}
    found = read_particles(output / "particles.star", require_volumes=False)
    keys = ["/".join((Path(name).parts[-3], Path(name).name)) for name in found.names]
    planted = Rotation.from_matrix(np.stack([truth[key] for key in keys]))
    apart = planted.inv() * Rotation.from_matrix(found.poses.rotations)
    common = apart.mean()
    for _ in range(20):  # what is far off does not count
        weight = 1.0 / (1.0 + ((apart * common.inv()).magnitude() / np.deg2rad(3.0)) ** 2)
        common = apart.mean(weight)
    angle = np.rad2deg((apart * common.inv()).magnitude())
    return {"angle_median_deg": float(np.median(angle)), "angle_p90_deg": float(np.quantile(angle, 0.9)), "beyond_10_deg": float((angle > 10).mean())}


def main(arguments: list[str] | None = None) -> None:
    """Runs it and writes ``no_poses.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=10000)
    parser.add_argument("--box", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--procs-per-gpu", default="auto")
    parser.add_argument("--cpu", action="store_true", help="CPU workers instead of GPUs")
    parser.add_argument("--quick", action="store_true", help="24 particles of 24 voxels, two iterations: does it run?")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not options.cpu:
        need_gpus()
    about = environment()
    particles, box, iterations = (24, 24, 2) if options.quick else (options.particles, options.box, options.iterations)
    workers = ["--gpus", "none"] if options.cpu else ["--gpus", options.gpus, "--procs-per-gpu", options.procs_per_gpu]
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    try:
        few, many = scratch / "few", scratch / "many"
        few.mkdir()
        many.mkdir()
        make_particles(few, 64 if not options.quick else 24, box, 6.8 * 64 / box)
        made = make_particles(many, particles, box, 6.8 * 64 / box)
        how = ["--particle-diameter", "300", "--global", *workers]
        run_align(few, scratch / "warm", [*how, "--iterations", "2"])
        run = run_align(many, scratch / "run", [*how, "--iterations", str(iterations), "--until-converged"])
        row = {"benchmark": "no_poses", "box": box, "particles": particles, "wall_s": run.wall_s, "workers_ready_s": run.ready_s(), "made_in_s": made}
        row |= {"after_start_s": run.wall_s - run.ready_s(), "iterations": len(run.iterations()), **pose_errors(many, scratch / "run")}
        rows = [row, *({"benchmark": "iteration", **each} for each in run.iterations())]
        show(rows)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(write_results("no_poses", rows, about, NOTES, options.output))


if __name__ == "__main__":
    main()
