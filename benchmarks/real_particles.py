"""Forty real ribosomes from rough poses: distances to the published poses, with and without priors about the list.

    python benchmarks/real_particles.py [--cpu-procs 2]

They need the shared folder. The published poses were refined at higher resolution with all their particles; they are not the truth, but near it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
from common import RESULTS, environment, need_shared, program, show, write_results

_PIXEL_ANGST = 12.0
_DIAMETER_ANGST = 280.0
_CASES = {
    "one pass against the published map at 24 A": ["--iterations", "1", "--initial-lowpass", "24"],
    "gold-standard halves from 50 A": ["--initial-lowpass", "50"],
}
_PRIOR = ["--angle-prior-deg", "6", "--shift-prior-angst", "15"]
NOTES = (
    "The list's poses are 8.7 degrees and 21.8 A off (medians); the priors, 6 degrees and 15 A an axis, are about as wide as those errors are."
    " sigma: median of the reported uncertainties of one axis; error / sigma: median error over what the sigmas let expect, 1 where they are right."
)


def measure(shared: Path, output: Path, data: str, case: str, prior: list[str], procs: int) -> dict[str, Any]:
    """One run and its distances to the published poses, by the independent tool."""
    real = shared / "data" / "real-70s"
    particles = real / ("premultiplied/perturbed.star" if data == "premultiplied" else "perturbed.star")
    command = [*program(), "align", str(particles), "--reference", str(real / "published_map.mrc"), "-o", str(output), "--quiet"]
    command += ["--particle-diameter", f"{_DIAMETER_ANGST:g}", "--cpu-procs", str(procs), *_CASES[case], *prior]
    begun = time.time()
    done = run(command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"align failed: {done.stderr.strip()[-2000:]}")
    spec = importlib.util.spec_from_file_location("pose_error", shared / "tools" / "pose_error.py")
    assert spec is not None and spec.loader is not None
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    os.environ["ANGPIX"] = str(_PIXEL_ANGST)
    angles, distances, *_ = judge.errors(str(real / "particles.star"), str(output / "particles.star"))
    summary = json.loads((output / "summary.json").read_text())
    row = {"benchmark": "real", "data": data, "case": case, "prior": bool(prior), "particles": len(angles), "wall_s": time.time() - begun}
    row |= {"median_deg": float(np.median(angles)), "p90_deg": float(np.percentile(angles, 90)), "share_over_15_deg": float((angles > 15).mean())}
    row |= {"median_angst": float(np.median(distances)), "p90_angst": float(np.percentile(distances, 90))}
    last = json.loads([line for line in (output / "events.jsonl").read_text().splitlines() if '"iteration"' in line][-1])
    row |= {"resolution_angst": summary["resolution_angst"], "sigma_deg": last["angle_sigma_deg"], "sigma_angst": last["shift_sigma_angst"]}
    # the median length of a vector of three normal numbers is 1.54
    return row | {
        "error_over_sigma_deg": row["median_deg"] / 1.54 / row["sigma_deg"],
        "error_over_sigma_angst": row["median_angst"] / 1.54 / row["sigma_angst"],
    }


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Measures and writes ``real_particles.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-procs", type=int, default=2)
    options = parser.parse_args(arguments)
    about, shared = environment(), need_shared()
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    rows: list[dict[str, Any]] = []
    try:
        for case in _CASES:
            for data in ("premultiplied", "divided by their CTF"):
                for prior in ([], _PRIOR):
                    rows.append(measure(shared, scratch / f"run{len(rows)}", data, case, prior, options.cpu_procs))
                    show(rows[-1:])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_results("real_particles", rows, about, NOTES, folder)


if __name__ == "__main__":
    main()
