"""Whole runs on 100 ribosomes with known poses: ours against the prototype's, iteration by iteration, with the error of the poses.

    python benchmarks/iteration.py [FOLDER] [--runs N]

FOLDER holds the simulated set and is made where it is absent (by default `benchmarks/data/setA`). Both programs run on the same number of cores
(two, where there are two), in turn. Runs of ours:

* `defaults, cold`: no compiled kernels in the cache, so that start-up and compilation show;
* `defaults`: kernels from the cache; the figures of "known poses";
* `same schedule`: increment 3 degrees and shifts within 3 voxels in every iteration, as in the prototype's third, which is the one compared;
* `same schedule, full band`: the same with all of the band, 29, from the start; against the prototype's mode `truthref`, that keeps to it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, TreeWatch, environment, make_set, need_shared, program, show, write_results

DIAMETER_ANGST = 360.0
PIXEL_ANGST = 6.8
BOX = 64
COMPARED_ITERATION = 3
FULL_BAND = 29
PAIRS = (("same schedule", "prototype"), ("defaults", "prototype"), ("same schedule, full band", "prototype, full band"))

# what the prototype prints at the end of an iteration
_STAGES = re.compile(r"band (\d+) levels \[\(([\d.]+).*search ([\d.]+) s GN ([\d.]+) s avg ([\d.]+) s")
_ERRORS = re.compile(r"it (\d+): median ([\d.]+) deg p90 ([\d.]+) max ([\d.]+)\s+shift ([\d.]+) A")

Measured = dict[str, Any]


def _environment(cores: int, jit_cache: Path | None = None) -> dict[str, str]:
    variables = dict(os.environ, NUMBA_NUM_THREADS=str(cores), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    variables.pop("NUMBA_CACHE_DIR", None)
    if jit_cache is not None:
        variables["NUMBA_CACHE_DIR"] = str(jit_cache)
    return variables


def pose_error(shared: Path, truth: Path, estimate: Path) -> dict[str, float]:
    """Errors after one common motion was taken off, by the independent tool."""
    import numpy as np

    sys.path.insert(0, str(shared / "tools"))
    try:
        import pose_error as tool
    finally:
        sys.path.pop(0)
    angle, shift, *_ = tool.errors(str(truth), str(estimate))
    return {
        "median_deg": float(np.median(angle)),
        "median_angst": float(np.median(shift)),
        "p90_deg": float(np.percentile(angle, 90)),
        "max_deg": float(angle.max()),
        "max_angst": float(shift.max()),
    }


def run_ours(
    shared: Path, data: Path, output: Path, variant: str, options: list[str], cores: int, jit_cache: Path | None = None, list_name: str = "start.star"
) -> list[Measured]:
    """One run of `numba-glocal align`: a row for the whole and one for each iteration."""
    command = [*program(), "align", str(data / list_name), "--reference", str(data / "truth.mrc"), "--particle-diameter", f"{DIAMETER_ANGST:g}"]
    command += ["-o", str(output), "--cpu-procs", str(cores), "--quiet", *options]
    started = time.time()
    process = subprocess.Popen(command, env=_environment(cores, jit_cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with TreeWatch(process.pid) as watch:
        _, problem = process.communicate()
    wall = time.time() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {problem}")
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    ready = [event["time"] for event in events if event["event"] == "ready"]
    iterations = [event for event in events if event["event"] == "iteration"]
    errors = [pose_error(shared, data / "truth.star", output / f"iter_{event['number']:03d}" / "particles.star") for event in iterations]
    rows: list[Measured] = [
        {
            "benchmark": "run",
            "program": "ours",
            "variant": variant,
            "cores": cores,
            "wall_s": wall,
            "cpu_s": watch.cpu_at[-1][1],
            "workers_ready_after_s": max(ready) - started if ready else None,
            "compile_or_load_s": max(event["seconds"] for event in events if event["event"] == "ready") if ready else None,
            "iterations": len(iterations),
            **errors[-1],
        }
    ]
    for event, error in zip(iterations, errors, strict=True):
        stages = _stages(events, event["number"])
        rows.append(
            {
                "benchmark": "iteration",
                "program": "ours",
                "variant": variant,
                "cores": cores,
                "iteration": event["number"],
                "seconds": event["seconds"],
                "cpu_s": watch.cpu_between(event["time"] - event["seconds"], event["time"]),
                "band": BOX * PIXEL_ANGST / event["band_angst"],
                "increment_deg": event["increment_deg"],
                **stages,
                **error,
            }
        )
    return rows


def _stages(events: list[Measured], number: int) -> Measured:
    """Seconds of the stages of one iteration: those between the end of the one before and its own."""
    ends = [i for i, event in enumerate(events) if event["event"] == "iteration"]
    first = ends[number - 2] + 1 if number > 1 else 0
    stages = [event for event in events[first : ends[number - 1]] if event["event"] == "stage" and not event["title"].startswith("start")]
    seconds: dict[str, float] = {"noise_s": 0.0, "align_s": 0.0, "averages_s": 0.0}
    for event in stages:
        kind = "noise_s" if "noise" in event["title"] else "averages_s" if "average" in event["title"] else "align_s"
        seconds[kind] += event["seconds"]
    return seconds


def run_prototype(shared: Path, data: Path, folder: Path, variant: str, mode: str, iterations: int, cores: int) -> list[Measured]:
    """The whole-loop prototype on the same data; it prints a line when an iteration ends."""
    script = shared / "design" / "prototypes" / "cpu_whole_loop.py"
    folder.mkdir(parents=True)
    for entry in data.iterdir():  # it writes into its folder
        (folder / entry.name).symlink_to(entry.resolve())
    started = time.time()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), f"{DIAMETER_ANGST:g}", str(iterations), mode],
        env=dict(_environment(cores), GAM="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    rows: list[Measured] = []
    last = started
    with TreeWatch(process.pid) as watch:
        for line in process.stdout:
            now = time.time()
            found, error = _STAGES.search(line), _ERRORS.search(line)
            if found and error:
                rows.append(
                    {
                        "benchmark": "iteration",
                        "program": "prototype",
                        "variant": variant,
                        "cores": cores,
                        "iteration": int(error[1]),
                        "seconds": now - last,
                        "between": (last, now),
                        "band": float(found[1]),
                        "increment_deg": float(found[2]),
                        "search_s": float(found[3]),
                        "refine_s": float(found[4]),
                        "averages_s": float(found[5]),
                        "median_deg": float(error[2]),
                        "median_angst": float(error[5]),
                        "p90_deg": float(error[3]),
                        "max_deg": float(error[4]),
                    }
                )
            last = now
        process.wait()
    if process.returncode or not rows:
        raise RuntimeError("the prototype failed")
    for row in rows:
        row["cpu_s"] = watch.cpu_between(*row.pop("between"))
    errors = {key: rows[-1][key] for key in ("median_deg", "median_angst", "p90_deg", "max_deg")}
    whole = {"benchmark": "run", "program": "prototype", "variant": variant, "cores": cores, "wall_s": time.time() - started}
    return [whole | {"cpu_s": watch.cpu_at[-1][1], "iterations": len(rows)} | errors, *rows]


def compared(rows: list[Measured]) -> list[Measured]:
    """The compared iteration of ours against the prototype's: minima and medians over runs."""

    def of(variant: str) -> list[Measured]:
        wanted = {"benchmark": "iteration", "variant": variant, "iteration": COMPARED_ITERATION}
        return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]

    out = []
    for ours_variant, their_variant in PAIRS:
        ours, theirs = of(ours_variant), of(their_variant)
        if not ours or not theirs:
            continue
        stages = [row["search_s"] + row["refine_s"] + row["averages_s"] for row in theirs]
        seconds, whole = [row["seconds"] for row in ours], [row["seconds"] for row in theirs]
        cpu, their_cpu = [row["cpu_s"] for row in ours], [row["cpu_s"] for row in theirs]
        out.append(
            {
                "benchmark": "comparison",
                "ours": ours_variant,
                "prototype": their_variant,
                "ours_band": ours[0]["band"],
                "prototype_band": theirs[0]["band"],
                "ours_min_s": min(seconds),
                "ours_median_s": statistics.median(seconds),
                "prototype_stages_min_s": min(stages),
                "prototype_stages_median_s": statistics.median(stages),
                "prototype_min_s": min(whole),
                "prototype_median_s": statistics.median(whole),
                "ours_cpu_min_s": min(cpu),
                "prototype_cpu_min_s": min(their_cpu),
                "ours_faster_stages": min(stages) / min(seconds),
                "ours_faster": min(whole) / min(seconds),
                "ours_less_cpu": min(their_cpu) / min(cpu),
                "runs": min(len(ours), len(theirs)),
            }
        )
    return out


NOTES = (
    "Wall seconds of whole processes, CPU seconds of all of theirs; the programs run in turn on the same cores."
    " 'seconds' of an iteration of ours is everything from reading references to writing maps and list (noise, search, refinement, averages, FSC)."
    " 'comparison' takes the third iteration: ours_faster_stages against the sum of the three stages that the prototype prints (search, refinement,"
    " averages with FSC; its noise fit, report and file writing are left out, in its favour), ours_faster against its whole iteration."
    " Band in 1 / box; errors by the independent pose_error.py."
)


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Runs both programs in turn and writes ``iteration.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=ROOT / "benchmarks" / "data" / "setA", help="the simulated set; made where absent")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few particles, one iteration, ours only: does it run?")
    options = parser.parse_args(arguments)
    about = environment()
    shared = need_shared()
    cores = min(2, about["cores_used"])
    rows: list[Measured] = []
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    try:
        if options.quick:
            rows += run_ours(
                shared, options.data, scratch / "quick", "quick", ["--iterations", "1", "--initial-lowpass", "80", "--angle-shells", "1"], 1
            )
        else:
            make_set(options.data, shared)
            schedule = ["--fixed", "--angle-increment", "3", "--angle-shells", "3", "--shift-range", f"{3 * PIXEL_ANGST:g}"]
            schedule += ["--iterations", str(COMPARED_ITERATION)]
            full = [*schedule, "--initial-lowpass", f"{BOX * PIXEL_ANGST / (FULL_BAND + 0.01):g}"]
            jit = scratch / "jit"
            jit.mkdir()
            rows += run_ours(shared, options.data, scratch / "cold", "defaults, cold", [], cores, jit)
            show(rows)
            for number in range(options.runs):
                part: list[Measured] = []
                for name, more in (("defaults", []), ("same schedule", schedule), ("same schedule, full band", full)):
                    part += run_ours(shared, options.data, scratch / f"{name}{number}", name, more, cores, jit)
                for name, mode in (("prototype", "normal"), ("prototype, full band", "truthref")):
                    part += run_prototype(shared, options.data, scratch / f"{name}{number}", name, mode, COMPARED_ITERATION, cores)
                show(part)
                rows += [row | {"run": number} for row in part]
            rows += (ratios := compared(rows))
            show(ratios)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_results("iteration", rows, about, NOTES, folder)


if __name__ == "__main__":
    main()
