"""Compares the CUDA backend with the CPU backend on the same particles: searches, refined poses, residuals and sums, in every precision.

    python benchmarks/gpu_against_cpu.py [--particles 50] [--boxes 48 64] [--cpu] [--quick] [-o FOLDER]

Particles are the exact phantom at planted poses (a wedge of +-60 degrees, white noise, signal-to-noise ratio 0.05), never a file; levels and tasks
are those of a run. `--cpu` rehearses it without a GPU: the CPU backend against the exact float64 reference, in a box of 16 voxels, where the
CPU's interpolation costs some per cent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, environment, need_gpus, show, write_results
from scipy.spatial.transform import Rotation

from numba_glocal.alignment import ChunkResult, SearchPlan, align_chunk, search_levels
from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.protocols import (
    Backend,
    Candidates,
    Grid,
    ParticleBatch,
    ParticleMask,
    PoseEstimates,
    SearchSetup,
    SumSetup,
    as_candidates,
)
from numba_glocal.backends.reference import ReferenceBackend
from numba_glocal.errors import DeviceError
from numba_glocal.masks import spherical_mask
from numba_glocal.noise import NoiseModel
from numba_glocal.phantom import phantom_spectrum, render_phantom
from numba_glocal.wedge import tilt_range_weights

Row = dict[str, Any]
SNR = 0.05
BOX_ANGST = 435.0
OBJECT_ANGST = 290.0
PRECISIONS = ("single", "half", "int8")
MOST_SCORES = 343
"""Candidates of one particle whose scores are compared, at most."""

NOTES = (
    "CPU backend against CUDA backend, the same particles; largest differences over particles. scores: of the first level's candidates that both"
    " kept (up to 343), over the spread of the CPU's; candidates of half and int8 have been scored again in single precision. same_best_rotation,"
    " same_best_shift: share of particles whose one kept candidate is the same. end_*: poses after all levels and the refinement, as a task gives"
    " them. refined_*: from the CPU's candidates. residuals, sums: over the largest shell's power and the largest sample."
)


@dataclass(frozen=True)
class Problem:
    """Particles with planted poses.

    Attributes
    ----------
    setup : SearchSetup
    batch : ParticleBatch
    rotations : (p, 3, 3) float64, shifts_angst : (p, 3) float64
        As planted.
    starts : Candidates
        About 4 degrees and a voxel off.
    """

    setup: SearchSetup
    batch: ParticleBatch
    rotations: np.ndarray
    shifts_angst: np.ndarray
    starts: Candidates

    @property
    def sums(self) -> SumSetup:
        """For averages of the same particles."""
        return SumSetup(self.setup.grid, self.setup.particle_mask, self.setup.noise)

    def plan(self, everywhere: bool, shells: int) -> SearchPlan:
        """Of a first iteration."""
        return SearchPlan(4.5, shells, 4.0 * self.setup.grid.binned_pixel_size_angst, self.setup.k_max, everywhere)


def make_problem(box: int, particles: int, seed: int = 0) -> Problem:
    """The phantom in a box, at random poses."""
    rng = np.random.default_rng(seed)
    pixel_angst = BOX_ANGST / box
    mask = ParticleMask(0.36 * box, 0.08 * box)
    inside = spherical_mask(box, mask.radius_voxels, mask.soft_edge_voxels).astype(np.float64)
    reference = render_phantom(box, pixel_angst, diameter_angst=OBJECT_ANGST)
    reference = (reference - reference[inside < 0.01].mean()) * inside
    rotations = Rotation.random(particles, random_state=seed + 1).as_matrix()
    shifts = rng.normal(0.0, 0.6, (particles, 3)) * pixel_angst
    weight = tilt_range_weights(box, -60.0, 60.0)
    clean = []
    for rotation, shift in zip(rotations, shifts, strict=True):
        spectrum = phantom_spectrum(box, pixel_angst, rotation, shift, OBJECT_ANGST)
        clean.append(np.fft.irfftn(spectrum * weight, s=(box,) * 3, axes=(0, 1, 2)))
    deviation = float(np.mean([one.std() for one in clean])) / SNR**0.5
    volumes = [(one + rng.normal(0.0, deviation, one.shape)).astype(np.float32) for one in clean]
    sigma2 = np.full(box // 2 + 1, deviation**2 * box**3 * float((inside**2).mean()))
    setup = SearchSetup(Grid(box, box, pixel_angst), reference.astype(np.float32), mask, NoiseModel(sigma2), k_max=float(round(0.31 * box)))
    batch = ParticleBatch(tuple(f"{box}-{seed}-{i}" for i in range(particles)), lambda i: (volumes[i], weight))
    near = Rotation.from_rotvec(rng.normal(0.0, np.deg2rad(2.3), (particles, 3))).as_matrix() @ rotations
    starts = as_candidates(near, shifts + rng.normal(0.0, 0.6, (particles, 3)) * pixel_angst)
    return Problem(setup, batch, rotations, shifts, starts)


@dataclass(frozen=True)
class Answers:
    """What one backend says of a problem, by kind of search ("local", "global").

    Attributes
    ----------
    scored : dict of str to Candidates
        Of the first level, many.
    best : dict of str to Candidates
        Of the first level, one.
    ends : dict of str to ChunkResult
        Of a whole task: all levels, refinement, residuals.
    refined : PoseEstimates
        From given candidates.
    power : (shells,) float64
        Residual power at the planted poses.
    numerator, denominator : arrays
        Sums at the planted poses.
    """

    scored: dict[str, Candidates]
    best: dict[str, Candidates]
    ends: dict[str, ChunkResult]
    refined: PoseEstimates
    power: np.ndarray
    numerator: np.ndarray
    denominator: np.ndarray


def ask(backend: Backend, problem: Problem, shells: int, searches: tuple[str, ...], refine_from: Candidates | None = None) -> Answers:
    """All that is compared; refinement begins at `refine_from`, by default at the candidates that this backend finds."""
    grid = problem.setup.grid
    count = len(problem.rotations)
    shifts = problem.starts.shifts_angst[:, 0]
    scored, best, ends = {}, {}, {}
    session = backend.open_search(problem.setup)
    for kind in searches:
        plan = problem.plan(kind == "global", shells)
        levels = search_levels(plan, grid.binned_box_size, grid.binned_pixel_size_angst, problem.setup.particle_mask.radius_voxels)
        begin = problem.starts if kind == "local" else as_candidates(np.repeat(np.eye(3)[None], count, 0), shifts)
        assert session.load(problem.batch) == []
        most = min(MOST_SCORES, len(levels[0].rotations))
        scored[kind] = session.search(begin, shifts, replace(levels[0], keep=most, separation_deg=0.0))
        best[kind] = session.search(begin, shifts, replace(levels[0], keep=1))
        session.unload()
        ends[kind] = align_chunk(session, problem.batch, problem.starts.rotations[:, 0], shifts, shifts, levels, True, plan)
        session.unload()
    assert session.load(problem.batch) == []
    refined = session.refine(best[searches[0]] if refine_from is None else refine_from, shifts)
    power = session.residuals(problem.rotations, problem.shifts_angst)[0].power.sum(0)
    session.close()
    average = backend.open_sum(problem.sums)
    assert average.add(problem.batch, problem.rotations, problem.shifts_angst) == []
    sums = average.result()
    average.close()
    return Answers(scored, best, ends, refined, power, np.asarray(sums.numerator), np.asarray(sums.denominator))


def angle_deg(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Angle between rotations (.., 3, 3), flat."""
    return np.rad2deg(Rotation.from_matrix((a @ np.swapaxes(b, -1, -2)).reshape(-1, 3, 3)).magnitude())


def score_difference(found: Candidates, wanted: Candidates) -> tuple[float, int]:
    """Largest difference over the spread of a particle's `wanted` scores, and how many candidates were compared: rotations that both hold."""
    largest, compared = 0.0, 0
    for p in range(len(wanted)):
        used = [one.scores[p] > -np.inf for one in (found, wanted)]
        # nine rounded numbers name a rotation: both come from one list, multiplied alike
        mine, theirs = (
            {tuple(np.round(rotation, 6).ravel() + 0.0): score for rotation, score in zip(one.rotations[p, u], one.scores[p, u], strict=True)}
            for one, u in zip((found, wanted), used, strict=True)
        )
        both = mine.keys() & theirs.keys()
        spread = np.ptp(wanted.scores[p, used[1]])
        largest = max(largest, max((abs(mine[name] - theirs[name]) for name in both), default=0.0) / spread)
        compared += len(both)
    return float(largest), compared


def compare(found: Answers, wanted: Answers, about: Row, pixel_angst: float) -> list[Row]:
    """A row for each search, and one for the rest."""
    rows = []
    for kind, end in wanted.ends.items():
        difference, compared = score_difference(found.scored[kind], wanted.scored[kind])
        mine, theirs, ours = found.best[kind], wanted.best[kind], found.ends[kind]
        same_shift = np.linalg.norm(mine.shifts_angst - theirs.shifts_angst, axis=-1).ravel() < 0.01 * pixel_angst
        rows.append(
            {
                "benchmark": "search",
                **about,
                "search": kind,
                "compared_scores": compared,
                "score_difference": difference,
                "same_best_rotation": float((angle_deg(mine.rotations, theirs.rotations) < 0.01).mean()),
                "same_best_shift": float(same_shift.mean()),
                "end_deg": float(angle_deg(ours.rotations, end.rotations).max()),
                "end_angst": float(np.linalg.norm(ours.shifts_angst - end.shifts_angst, axis=1).max()),
            }
        )
    likelihoods = wanted.refined.log_likelihood
    rows.append(
        {
            "benchmark": "refinement and sums",
            **about,
            "refined_deg": float(angle_deg(found.refined.rotations, wanted.refined.rotations).max()),
            "refined_angst": float(np.linalg.norm(found.refined.shifts_angst - wanted.refined.shifts_angst, axis=1).max()),
            "log_likelihood_difference": float(np.abs(found.refined.log_likelihood / likelihoods - 1.0).max()),
            "residual_difference": float(np.abs(found.power - wanted.power).max() / wanted.power.max()),
            "numerator_difference": float(np.abs(found.numerator - wanted.numerator).max() / np.abs(wanted.numerator).max()),
            "denominator_difference": float(np.abs(found.denominator - wanted.denominator).max() / wanted.denominator.max()),
        }
    )
    return rows


def contenders(cpu: bool) -> dict[str, Callable[[], Backend]]:
    """Backends by the name of their precision."""
    if cpu:
        return {"float64 reference": ReferenceBackend}
    from numba_glocal.backends.cuda.backend import CUDABackend

    return {name: lambda name=name: CUDABackend(memory_bytes=8 << 30, precision=name) for name in PRECISIONS}


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Runs all and writes ``gpu_against_cpu.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--particles", type=int, default=50)
    parser.add_argument("--boxes", type=int, nargs="+", default=[48, 64])
    parser.add_argument("--cpu", action="store_true", help="the CPU backend against the slow reference: does it run?")
    parser.add_argument("--quick", action="store_true", help="2 particles of 16 voxels, a local search only")
    parser.add_argument("-o", "--output", type=Path, default=folder)
    options = parser.parse_args(arguments)
    if not options.cpu:
        need_gpus()
    about = environment()
    boxes, particles, shells, searches = options.boxes, options.particles, 3, ("local", "global")
    if options.cpu or options.quick:
        boxes, particles, shells = [16], 2, 1
    if options.quick:
        searches = ("local",)
    made = contenders(options.cpu)
    rows: list[Row] = []
    begun = time.perf_counter()
    for box in boxes:
        problem = make_problem(box, particles)
        wanted = ask(CPUBackend(), problem, shells, searches)
        for precision, make in made.items():
            try:
                backend = make()
            except DeviceError as problem_here:  # no cuBLAS, or an old GPU
                rows.append({"benchmark": "not run", "box": box, "precision": precision, "problem": str(problem_here)})
                continue
            found = ask(backend, problem, shells, searches, wanted.best[searches[0]])
            part = compare(found, wanted, {"box": box, "precision": precision, "particles": particles}, problem.setup.grid.binned_pixel_size_angst)
            show(part)
            rows += part
            del backend, found  # its device memory is the next one's
    print(f"{time.perf_counter() - begun:.1f} s")
    print(write_results("gpu_against_cpu", rows, about, NOTES, options.output))


if __name__ == "__main__":
    main()
