"""Poses against the truth, iteration by iteration, beside what the noise allows: `numba-glocal align` with each score on made particles.

    python benchmarks/accuracy.py [FOLDER] [--set setA] [--diameter 360] [--iterations 4] [--scores ml ncc flcf] [--gpus 0] [--relion]

FOLDER holds ``truth.mrc``, ``truth.star``, ``start.star`` and the particles, as the independent simulator makes them; it is made where it
is absent (by default `benchmarks/data/<set>`). The errors are computed here from the two lists, without the package. Results go to
``accuracy_<set>.json`` and RELION's, which take minutes to an hour, to ``accuracy_<set>_relion.json``; `--scores --relion` runs RELION alone.

What is expected is the inverse of the Hessian at the true poses, with the true map as reference and noise fitted there. It is the Cramer-Rao
bound up to an approximate factor for the mask; errors with the true map may come out a little below it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import MADE_SETS, RESULTS, ROOT, TreeWatch, environment, make_set, need_shared, program, show, write_results
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

Measured = dict[str, Any]
_PARTICLES_OF_THE_LIMIT = 100


# -- errors, without the package -------------------------------------------------------------------------------------


def read_star(path: Path, block: str = "particles") -> dict[str, list[str]]:
    """Columns of one loop of a STAR file; a minimal reader for lists made here and by RELION."""
    columns: dict[str, list[str]] = {}
    inside = False
    for line in path.read_text().splitlines():
        words = line.split()
        if line.startswith("data_"):
            if inside and columns:
                break
            inside = line.strip() == f"data_{block}"
        elif inside and words and words[0].startswith("_"):
            columns[words[0][1:]] = []
        elif inside and len(words) == len(columns) > 0:
            for column, word in zip(columns.values(), words, strict=True):
                column.append(word)
    if not columns:
        raise ValueError(f"{path}: no block data_{block}")
    return columns


def read_poses(path: Path) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64], dict[str, list[str]]]:
    """Names, rotations (n, 3, 3) from reference to particle, shifts (n, 3) in Angstrom of the particle in its box, and all columns."""
    columns = read_star(path)
    angles_deg = np.array([columns[f"rlnAngle{name}"] for name in ("Rot", "Tilt", "Psi")], float).T
    shifts_angst = -np.array([columns[f"rlnOrigin{axis}Angst"] for axis in "XYZ"], float).T
    names = [os.path.basename(name) for name in columns["rlnImageName"]]
    return names, Rotation.from_euler("ZYZ", angles_deg, degrees=True).as_matrix().transpose(0, 2, 1), shifts_angst, columns


class PoseErrors:
    """Errors of a list after one common rigid motion was taken off.

    Attributes
    ----------
    rotvec_deg, shift_angst : (n, 3) float64
        Along the axes of the particle's box.
    columns : dict of str to list of str
        Of the estimated list, in the order of the errors.
    """

    def __init__(self, truth: Path, estimate: Path) -> None:
        names, true_rotations, true_shifts, _ = read_poses(truth)
        found_names, rotations, shifts, columns = read_poses(estimate)
        place = {name: row for row, name in enumerate(found_names)}
        rows = [place[name] for name in names if name in place]
        chosen = [row for row, name in enumerate(names) if name in place]
        true, found = true_rotations[chosen], rotations[rows]
        apart = Rotation.from_matrix(np.einsum("pji,pjk->pik", true, found))  # in the reference's frame
        common = apart.mean()
        for _ in range(20):  # one that misled particles do not turn
            angle = (apart * common.inv()).magnitude()
            common = apart.mean(1.0 / (1.0 + (angle / np.deg2rad(3.0)) ** 2))
        moved = np.einsum("pij,jk->pik", true, common.as_matrix())
        self.rotvec_deg = np.rad2deg(Rotation.from_matrix(np.einsum("pij,pkj->pik", found, moved)).as_rotvec())
        difference = shifts[rows] - true_shifts[chosen]
        offset = np.median(np.einsum("pji,pj->pi", true, difference), axis=0)
        self.shift_angst = difference - np.einsum("pij,j->pi", true, offset)
        self.columns = {label: [values[row] for row in rows] for label, values in columns.items()}

    @property
    def angle_deg(self) -> NDArray[np.float64]:
        """Sizes of the rotations."""
        return np.linalg.norm(self.rotvec_deg, axis=1)

    @property
    def distance_angst(self) -> NDArray[np.float64]:
        """Sizes of the shifts."""
        return np.linalg.norm(self.shift_angst, axis=1)

    def summary(self) -> Measured:
        """Median, 90th percentile, worst and rms (of one axis), share of lost particles, and errors in units of the reported uncertainty."""
        out = quantiles(self.angle_deg, "deg") | quantiles(self.distance_angst, "angst")
        out["share_over_15_deg"] = float((self.angle_deg > 15.0).mean())
        out["rms_axis_deg"] = float(np.sqrt((self.rotvec_deg**2).mean()))
        out["rms_axis_angst"] = float(np.sqrt((self.shift_angst**2).mean()))
        for label, errors, name in (("ngAngleSigmaDeg", self.rotvec_deg, "angle"), ("ngShiftSigmaAngst", self.shift_angst, "shift")):
            if label in self.columns:
                sigma = np.array(self.columns[label], float)
                out[f"{name}_error_over_sigma"] = float(np.sqrt(((errors / sigma[:, None]) ** 2).mean()))
        return out


def quantiles(sizes: NDArray[np.float64], unit: str) -> Measured:
    """Median, 90th percentile and worst."""
    return {f"median_{unit}": float(np.median(sizes)), f"p90_{unit}": float(np.percentile(sizes, 90)), f"worst_{unit}": float(sizes.max())}


# -- what the noise allows -------------------------------------------------------------------------------------------


def information_limit(data: Path, diameter_angst: float, reached_angst: float | None) -> Measured:
    """Errors expected from the covariances at the true poses with the true map as reference, and those reached from there.

    Parameters
    ----------
    data : Path
    diameter_angst : float
    reached_angst : float, optional
        Finest detail used; by default all that the box holds.
    """
    from numba_glocal.alignment import align_chunk
    from numba_glocal.backends.cpu import CPUBackend
    from numba_glocal.backends.protocols import SearchSetup, as_candidates
    from numba_glocal.job import prepare_job
    from numba_glocal.noise import NoiseModel, fit_noise
    from numba_glocal.settings import AlignSettings

    settings = AlignSettings(
        str(data / "truth.star"),
        "unused",
        reference=str(data / "truth.mrc"),
        initial_lowpass_angst=1e-3 + 2.0 * float(read_star(data / "truth.star", "optics")["rlnImagePixelSize"][0]),
        particle_diameter_angst=diameter_angst,
        lowpass_angst=reached_angst,
    )
    job = prepare_job(settings)
    assert job.start_map is not None
    particles = job.particles
    rows = np.arange(min(len(particles), _PARTICLES_OF_THE_LIMIT))
    batch = job.reader.batch(
        tuple(particles.names[row] for row in rows),
        tuple(particles.volume_paths[row] for row in rows),
        tuple(particles.weight_paths[row] for row in rows),
    )
    rotations, shifts = particles.poses.rotations[rows], particles.poses.shifts_angst[rows]
    outside = job.mask < 0.01
    reference = ((job.start_map - job.start_map[outside].mean()) * job.mask).astype(np.float32)
    noise, scale = NoiseModel(np.ones(job.grid.binned_box_size // 2 + 1)), 1e-6
    backend = CPUBackend()
    for _ in range(4):  # grey scale and noise together
        setup = SearchSetup(job.grid, reference * np.float32(scale), job.particle_mask, noise, "ml", job.k_min, job.k_limit)
        session = backend.open_search(setup)
        result = align_chunk(session, batch, rotations, shifts, shifts, (), False)
        noise = fit_noise(result.residuals[0], 3, int(job.k_limit))
        session.close()
        session = backend.open_search(SearchSetup(job.grid, reference * np.float32(scale), job.particle_mask, noise, "ml", job.k_min, job.k_limit))
        session.load(batch)
        found = session.refine(as_candidates(rotations, shifts), shifts)
        session.close()
        scale *= float(found.numerator.sum() / found.denominator.sum())
    out: Measured = {"particles": len(rows), "noise_exponent": noise.gamma}
    rng = np.random.default_rng(0)
    drawn = np.einsum("pij,tpj->tpi", np.linalg.cholesky(found.covariances), rng.normal(size=(200, len(rows), 6)))
    variance = np.diagonal(found.covariances, axis1=1, axis2=2)
    turned = np.rad2deg(Rotation.from_matrix(np.einsum("pij,pkj->pik", found.rotations, rotations)).as_rotvec())
    moved = found.shifts_angst - shifts
    for unit, part, errors in (("deg", slice(0, 3), turned), ("angst", slice(3, 6), moved)):
        factor = np.rad2deg(1.0) if unit == "deg" else 1.0
        sizes = np.linalg.norm(drawn[..., part], axis=-1).ravel() * factor
        expected = np.sqrt(variance[:, part].mean(1)) * factor
        out[f"expected_rms_axis_{unit}"] = float(np.sqrt((expected**2).mean()))
        out[f"expected_median_{unit}"], out[f"expected_p90_{unit}"] = float(np.median(sizes)), float(np.percentile(sizes, 90))
        out[f"true_map_rms_axis_{unit}"] = float(np.sqrt((errors**2).mean()))
        out |= {f"true_map_{key}": value for key, value in quantiles(np.linalg.norm(errors, axis=1), unit).items()}
        out[f"true_map_{'angle' if unit == 'deg' else 'shift'}_error_over_sigma"] = float(np.sqrt(((errors / expected[:, None]) ** 2).mean()))
    return out


# -- programs --------------------------------------------------------------------------------------------------------


def run_ours(data: Path, output: Path, score: str, diameter_angst: float, options: list[str]) -> list[Measured]:
    """One run of `numba-glocal align`: a row for the whole and one for each iteration."""
    command = [*program(), "align", str(data / "start.star"), "--reference", str(data / "truth.mrc"), "--particle-diameter", f"{diameter_angst:g}"]
    command += ["-o", str(output), "--score", score, "--quiet", *options]
    variables = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    started = time.time()
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with TreeWatch(process.pid) as watch:
        _, problem = process.communicate()
    wall = time.time() - started
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {problem}")
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    rows = []
    for event in (event for event in events if event["event"] == "iteration"):
        errors = PoseErrors(data / "truth.star", output / f"iter_{event['number']:03d}" / "particles.star")
        row = {"benchmark": "iteration", "program": "ours", "score": score, "iteration": event["number"], "seconds": event["seconds"]}
        row |= {"since_start_s": event["time"] - started, "cpu_s": watch.cpu_between(started, event["time"])}
        rows.append(row | {"resolution_angst": event["resolution_angst"], "band_angst": event["band_angst"]} | errors.summary())
    whole = {"benchmark": "run", "program": "ours", "score": score, "iterations": len(rows), "wall_s": wall, "cpu_s": watch.cpu_at[-1][1]}
    return [whole | {key: value for key, value in rows[-1].items() if key.endswith(("_deg", "_angst", "_sigma"))}, *rows]


def run_relion(shared: Path, data: Path, diameter_angst: float, limit_s: float | None = None) -> list[Measured]:
    """RELION 3.1 from the same list and map on two cores; minutes to an hour. Stopped at a limit, its last whole iteration is the result."""
    pixel_angst = read_star(data / "start.star", "optics")["rlnImagePixelSize"][0]
    started = time.time()
    process = subprocess.Popen(
        ["sh", str(shared / "tools" / "relion_baseline.sh"), str(data), pixel_angst, f"{diameter_angst:g}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stopped = False
    with TreeWatch(process.pid) as watch:
        try:
            _, problem = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            stopped = True
            os.killpg(process.pid, signal.SIGTERM)
            _, problem = process.communicate()
    if process.returncode and not stopped:
        raise RuntimeError(f"RELION failed: {problem[-2000:]}")
    return relion_rows(data, started, time.time() - started, watch.cpu_at[-1][1])


def relion_rows(data: Path, started: float, wall_s: float, cpu_s: float | None) -> list[Measured]:
    """Errors of a run of RELION: its end (or, where it was stopped, its last whole iteration), then every iteration."""
    rows: list[Measured] = []
    for path in sorted((data / "rel").glob("run_it[0-9][0-9][0-9]_data.star"))[1:]:
        errors = PoseErrors(data / "truth.star", path)
        row = {"benchmark": "iteration", "program": "RELION", "iteration": int(path.name[6:9])}
        rows.append(row | {"since_start_s": path.stat().st_mtime - started} | errors.summary())
    last = data / "rel" / "run_data.star"
    final = (
        PoseErrors(data / "truth.star", last).summary() if last.is_file() else {k: v for k, v in rows[-1].items() if k.endswith(("_deg", "_angst"))}
    )
    whole = {"benchmark": "run", "program": "RELION", "finished": last.is_file(), "iterations": len(rows), "wall_s": wall_s, "cpu_s": cpu_s}
    return [whole | final, *rows]


NOTES = (
    "Errors against the true poses after one common rigid motion. Expected: from the covariances at the true poses with the true map and fitted"
    " noise, the inverse of the information that the particles hold; aligned to the true map: what the refinement then reaches. Runs start"
    " from poses 8 degrees (rms) and up to 3 voxels an axis off and from the true map at 50 A. Wall and CPU seconds are of whole processes with"
    " all that they load, with RELION the waiting loops of its three MPI processes too; other programs ran beside them: compare CPU seconds."
)


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Measures and writes ``accuracy_<set>.json``, ``accuracy_<set>_relion.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, help="the made set; made where absent")
    parser.add_argument("--set", default="setA", choices=MADE_SETS, dest="name", help="what to make, and how to call the results")
    parser.add_argument("--diameter", type=float, default=360.0, metavar="ANGSTROM", help="of the particle")
    parser.add_argument("--scores", nargs="*", default=["ml", "ncc", "flcf"], help="none: only RELION")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--gpus", help="as in `align`; by default the CPU")
    parser.add_argument("--relion", action="store_true", help="RELION 3.1 beside it (minutes to an hour)")
    parser.add_argument("--relion-limit", type=float, metavar="SECONDS", help="RELION is stopped then")
    parser.add_argument("-o", "--output", type=Path, default=folder, help="folder of the results")
    parser.add_argument("more", nargs="*", help="after --: further options of `align`")
    options, more = parser.parse_known_args(arguments)
    data = options.data or ROOT / "benchmarks" / "data" / options.name
    about = environment()
    for path in {data, options.output}:  # names, not where they lie here
        about["command"] = about["command"].replace(str(path), path.name)
    shared = need_shared() if options.relion or not (data / "start.star").is_file() else None
    if shared is not None:
        make_set(data, shared, options.name)
    scratch = Path(tempfile.mkdtemp(prefix="glocal_bench_"))
    try:
        if options.scores:
            run_options = ["--iterations", str(options.iterations), *([] if options.gpus is None else ["--gpus", options.gpus]), *more]
            rows: list[Measured] = []
            for score in options.scores:
                rows += (part := run_ours(data, scratch / score, score, options.diameter, run_options))
                show(part)
            reached = [row for row in rows if row["benchmark"] == "iteration"][-1]["band_angst"]
            for band_angst, name in ((reached, "the run's last band"), (None, "all of the box")):
                rows.append({"benchmark": "limit", "band": name} | information_limit(data, options.diameter, band_angst))
                show(rows[-1:])
            write_results(f"accuracy_{options.name}", rows, about, NOTES, options.output)
        if options.relion and shared is not None:
            own = scratch / "relion"
            shutil.copytree(data, own)
            rows = run_relion(shared, own, options.diameter, options.relion_limit)
            show(rows)
            write_results(f"accuracy_{options.name}_relion", rows, about, NOTES, options.output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
