"""Particles of two kinds, classified: a ribosome and a copy that lacks one lobe, 100 each, by `numba-glocal align` with two classes.

    python benchmarks/classes.py [FOLDER] [--diameter 360] [--iterations 4] [--gpus 0] [-- further options of align]

FOLDER holds the sets; they are made where they are absent (by default `benchmarks/data/classes`): one with 10 % of the mass in the lobe and
a signal-to-noise ratio of 0.05, and a hard one with 3 % and 0.01. Each has ``whole/`` and ``less/`` as the independent simulator makes them,
and ``start.star`` of both, shuffled. Runs start from the two true maps low-passed to 40 A (hard and soft assignment), and from classes
assigned at random, whose start map is the whole particle at 50 A. The share that is right is of the better of the two ways to name the
classes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
from common import RESULTS, ROOT, environment, need_shared, program, show, write_results
from numpy.typing import NDArray

Measured = dict[str, Any]
KINDS = ("whole", "less")
SETS = ({"removed": 0.1, "snr": 0.05, "box": 64}, {"removed": 0.03, "snr": 0.01, "box": 48})
_SOFT_VOXELS = 2.0
# a direction (z, y, x) in which the map ends in a lobe of its own
_DIRECTION = (0.0, 0.8, 0.6)


def without_lobe(volume: NDArray[np.float64], share: float, direction: tuple[float, float, float]) -> NDArray[np.float64]:
    """A map without the part of it that lies farthest in a direction: what a soft sphere about the map's end holds, a given share of its mass.

    Parameters
    ----------
    volume : (n, n, n) float64
        Density positive.
    share : float
        Of the mass above a quarter of the maximum.
    direction : (float, float, float)
        z, y, x.
    """
    level = 0.25 * volume.max()
    grid = np.indices(volume.shape, dtype=np.float64) - volume.shape[0] // 2
    solid = volume > level
    towards = np.asarray(direction) / np.linalg.norm(direction)
    along = np.tensordot(towards, grid, 1)
    tip = np.percentile(along[solid], 99.5)
    near_tip = solid & (along > tip - 3.0)
    centre = np.array([axis[near_tip].mean() for axis in grid])
    distance = np.sqrt(((grid - centre[:, None, None, None]) ** 2).sum(0))
    order = np.argsort(distance[solid])
    held = np.cumsum(volume[solid][order]) / volume[solid].sum()
    radius = distance[solid][order][np.searchsorted(held, share)]
    kept = 1.0 / (1.0 + np.exp(-(distance - radius) / (0.25 * _SOFT_VOXELS)))
    outside = float(np.median(volume))
    return outside + (volume - outside) * kept


def make_set(folder: Path, shared: Path, count: int, box_size: int, pixel_angst: float, snr: float, removed: float) -> None:
    """`count` particles of each kind, and one list of all."""
    if (folder / "start.star").is_file():
        return
    import emfile

    folder.mkdir(parents=True, exist_ok=True)
    source = -np.asarray(emfile.read(str(shared / "data" / "maps" / "ribo.em"))[1], np.float64)  # density is dark there
    for seed, kind in enumerate(KINDS, 11):
        with mrcfile.new(folder / f"{kind}.mrc", overwrite=True) as file:
            file.set_data((source if kind == "whole" else without_lobe(source, removed, _DIRECTION)).astype(np.float32))
        options = f"--scale {100 / box_size} --n {count} --box {box_size} --angpix {pixel_angst} --snr {snr} --ctf --seed {seed}".split()
        command = [sys.executable, str(shared / "tools" / "make_dataset.py"), str(folder / kind), "--map", str(folder / f"{kind}.mrc"), *options]
        print(f"making {folder / kind} ..", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    head: list[str] = []
    rows: list[str] = []
    for kind in KINDS:
        for line in (folder / kind / "start.star").read_text().splitlines():
            if "subtomo/" in line:
                rows.append(line.replace("subtomo/", f"{kind}/subtomo/"))
            elif kind == KINDS[0]:
                head.append(line)
    np.random.default_rng(0).shuffle(rows)
    rows = [f"{row.rsplit(' ', 1)[0]} {1 + number % 2}" for number, row in enumerate(rows)]  # half-sets of the shuffled list
    (folder / "start.star").write_text("\n".join([*head, *rows]) + "\n")


def classes_of(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Kind (0, 1), class (from 1), half-set and margin of every particle of a list."""
    labels: list[str] = []
    found = []
    for line in path.read_text().splitlines():
        words = line.split()
        if line.startswith("data_"):
            labels = []
        elif line.startswith("_"):
            labels.append(words[0][1:])
        elif "subtomo/" in line:
            row = dict(zip(labels, words, strict=True))
            kind = [f"{kind}/" in row["rlnImageName"] for kind in KINDS].index(True)
            found.append((kind, int(row["ngClass"]), int(row["rlnRandomSubset"]), float(row["ngClassMargin"])))
    kinds, numbers, halves, margins = map(np.array, zip(*found, strict=True))
    return kinds, numbers, halves, margins


def judged(path: Path) -> Measured:
    """Shares of particles that are in the class of their kind."""
    kinds, numbers, halves, margins = classes_of(path)
    names = np.unique(numbers)
    ways = [np.array(way) for way in itertools.permutations(range(max(len(names), len(KINDS))))]
    place = np.searchsorted(names, numbers)
    best = max(ways, key=lambda way: (way[place] == kinds).mean())
    right = best[place] == kinds
    return {
        "right": float(right.mean()),
        **{f"right_half{half}": float(right[halves == half].mean()) for half in (1, 2)},
        **{f"right_{kind}": float(right[kinds == number].mean()) for number, kind in enumerate(KINDS)},
        "median_margin": float(np.median(margins)),
        "wrong_median_margin": float(np.median(margins[~right])) if (~right).any() else None,
    }


def run(folder: Path, output: Path, name: str, diameter_angst: float, options: list[str]) -> list[Measured]:
    """One run: a row for each iteration that had classes."""
    command = [*program(), "align", str(folder / "start.star"), "-o", str(output), "--particle-diameter", f"{diameter_angst:g}", "--quiet", *options]
    variables = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    begun = time.time()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    rows = []
    for path in sorted(output.glob("iter_*/particles.star")):
        if "_ngClass " in path.read_text():
            rows.append(
                {"start": name, "assignment": "soft" if "soft" in options else "hard", "iteration": int(path.parent.name[5:]), **judged(path)}
            )
    rows[-1]["wall_s"] = time.time() - begun
    return rows


NOTES = (
    "right: share of particles in the class of their kind, by the better naming of the classes. Margins: log-likelihood of the best class above"
    " the second. 'random' starts from one map of the whole particle and classes drawn at random."
)


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Measures and writes ``classes.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=ROOT / "benchmarks" / "data" / "classes", help="the made sets; made where absent")
    parser.add_argument("--diameter", type=float, default=360.0, metavar="ANGSTROM", help="of the particle")
    parser.add_argument("--count", type=int, default=100, help="particles of each kind, where a set is made")
    parser.add_argument("--sets", type=int, nargs="+", default=list(range(len(SETS))), help="which sets, from 0")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of random assignments")
    parser.add_argument("--gpus", help="as in `align`; by default the CPU")
    parser.add_argument("-o", "--output", type=Path, default=folder, help="folder of classes.json")
    parser.add_argument("more", nargs="*", help="after --: further options of `align`")
    options = parser.parse_args(arguments)
    about = environment()
    for path in {options.data, options.output}:  # names, not where they lie here
        about["command"] = about["command"].replace(str(path), path.name)
    usual = ["--iterations", str(options.iterations), *([] if options.gpus is None else ["--gpus", options.gpus]), *options.more]
    rows: list[Measured] = []
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    try:
        for number in options.sets:
            made = SETS[number]
            data = options.data / f"lobe{made['removed']:g}_snr{made['snr']:g}"
            if not (data / "start.star").is_file():
                make_set(data, need_shared(), options.count, int(made["box"]), 435.2 / made["box"], made["snr"], made["removed"])
            maps = [str(data / kind / "truth.mrc") for kind in KINDS]
            from_maps = ["--reference", maps[0], "--reference", maps[1], "--initial-lowpass", "40"]
            runs = [("maps", {}, from_maps), ("maps", {}, [*from_maps, "--class-assignment", "soft"])]
            for seed in options.seeds:
                runs.append(("random", {"seed": seed}, ["--reference", maps[0], "--classes", "2", "--seed", str(seed), "--initial-lowpass", "50"]))
            for place, (name, more, start) in enumerate(runs):
                part = run(data, scratch / f"{number}_{place}", name, options.diameter, [*start, *usual])
                rows += [{**made, **row, **more} for row in part]
                show(rows[-len(part) :])
                shutil.rmtree(scratch / f"{number}_{place}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_results("classes", rows, about, NOTES, options.output)


if __name__ == "__main__":
    main()
