"""Peak memory of a worker and of the parent for more and more particles, with a small cache: it must follow box, chunk and budget alone.

    python benchmarks/memory.py [FOLDER] [--counts 100 400 1600]

Longer lists are made of the simulated set's particles under other names (links). Chunks grow with the list up to 128 particles (1,024 in a half-set);
to pass that point in reasonable time, the longest lists are run at binning 2.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, TreeWatch, environment, make_set, need_shared, program, show, write_results

CACHE_GIB = 0.25
MIB = 2.0**20
FULL_BAND = ["--particle-diameter", "360", "--initial-lowpass", "15", "--angle-shells", "2"]

Measured = dict[str, Any]


def longer_list(source: Path, folder: Path, count: int) -> Path:
    """A list of `count` particles in `folder`: those of ``source/start.star`` again and again, each under a name of its own."""
    lines = (source / "start.star").read_text().splitlines()
    rows = [line for line in lines if ".mrc" in line]
    head = lines[: lines.index(rows[0])]
    columns = [line.split()[0] for line in head[max(i for i, line in enumerate(head) if line.startswith("loop_")) :] if line.startswith("_")]
    name = columns.index("_rlnImageName")
    (folder / "particles").mkdir(parents=True)
    written = []
    for i in range(count):
        words = rows[i % len(rows)].split()
        link = folder / "particles" / f"p{i:06d}.mrc"
        link.symlink_to((source / words[name]).resolve())
        words = [str((source / word).resolve()) if ".mrc" in word and place != name else word for place, word in enumerate(words)]
        words[name] = f"particles/{link.name}"
        written.append(" ".join(words))
    path = folder / "start.star"
    path.write_text("\n".join([*head, *written]) + "\n")
    return path


def chunk_size(particles: Path) -> int:
    """Particles in the largest task of an alignment."""
    from numba_glocal.job import make_chunks, prepare_job
    from numba_glocal.settings import AlignSettings

    listed = prepare_job(AlignSettings(str(particles), "unused")).particles
    return max(len(chunk) for half in (1, 2) for chunk in make_chunks(listed, listed.poses, half))


def run(data: Path, folder: Path, count: int, cores: int, options: list[str]) -> Measured:
    """Peaks of one run of one iteration."""
    particles = longer_list(data, folder, count)
    command = [*program(), "align", str(particles), "--reference", str(data / "truth.mrc"), "-o", str(folder / "run"), "--quiet"]
    command += ["--iterations", "1", "--cache-gib", f"{CACHE_GIB:g}", "--cpu-procs", str(cores), *options]
    begun = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with TreeWatch(process.pid) as watch:
        _, problem = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {problem}")
    parent = watch.processes[process.pid]
    workers = [seen for pid, seen in watch.processes.items() if pid != process.pid and "worker.py" in seen.command]
    return {
        "benchmark": "memory",
        "particles": count,
        "options": " ".join(options),
        "chunk": chunk_size(particles),
        "workers": len(workers),
        "cache_gib": CACHE_GIB,
        "worker_peak_mib": max(seen.peak_bytes for seen in workers) / MIB,
        "parent_peak_mib": parent.peak_bytes / MIB,
        "wall_s": time.time() - begun,
        "cpu_s": watch.cpu_at[-1][1],
    }


NOTES = (
    "High-water marks of resident memory (VmHWM) of the parent and of the larger worker; boxes of 64 (32 at binning 2), an iteration of the full band"
    " (search to FSC), --cache-gib 0.25. Interpreter and libraries are about 170 MiB of each."
)


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Runs the lists and writes ``memory.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=ROOT / "benchmarks" / "data" / "setA", help="the simulated set; made where absent")
    parser.add_argument("--counts", nargs="+", type=int, default=[100, 400, 1600])
    parser.add_argument("--binned-counts", nargs="*", type=int, default=[2400, 4800], help="lists that are run at binning 2")
    parser.add_argument("--quick", action="store_true", help="the set as it is, low band: does it run?")
    options = parser.parse_args(arguments)
    about = environment()
    rows = []
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    try:
        if options.quick:
            rows.append(run(options.data, scratch / "quick", 20, 1, ["--angle-shells", "1", "--initial-lowpass", "80"]))
        else:
            make_set(options.data, need_shared())
            series = [(count, FULL_BAND) for count in options.counts] + [(count, [*FULL_BAND, "--binning", "2"]) for count in options.binned_counts]
            for number, (count, more) in enumerate(series):
                rows.append(run(options.data, scratch / str(number), count, min(2, about["cores_used"]), more))
                show(rows[-1:])
                shutil.rmtree(scratch / str(number))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_results("memory", rows, about, NOTES, folder)


if __name__ == "__main__":
    main()
