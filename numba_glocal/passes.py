"""Passes over all particles: the tasks of a search, of residuals or of averages, given to the executor and their results put together."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .alignment import ChunkResult, ClassesResult, SearchPlan
from .averaging import merge, symmetrise_sums
from .backends.protocols import WeightedSum
from .errors import GlocalError, plural
from .execution.executors import gather_in_order
from .execution.tasks import AlignTask, Chunk, ClassesTask, ReferenceFile, SumResult, SumTask, run_task, write_reference
from .job import Job, largest_chunk, make_chunks
from .noise import GroupResiduals, NoiseModel, NoiseModels, add_residuals, fit_gains, fit_noise_groups, noise_facts
from .results import ClassState, RunFolder, RunState
from .schedule import prior_widths
from .settings import AlignSettings
from .symmetry import grid_factors
from .values import ParticleSet, Poses

_log = logging.getLogger("numba_glocal")

HALVES = (1, 2)
NO_OTHER_MODE = 1000.0
"""Margin of a particle whose search met no second mode; a number, because lists hold numbers."""
# A partial sum is as large as a padded map: few, large chunks. A GPU adds so fast that handing over the sum is what costs.
_SUM_PARTS, _SUM_CHUNK = 4, 512
_GPU_SUM_PARTS, _GPU_SUM_CHUNK, _GPU_SUM_BYTES = 1, (64, 1024), 4 << 30
_GPU_LEAST_VOXELS = 250 * 64**3  # of a task: with fewer a GPU waits for launches


Gains = dict[int, tuple[float, ...]]
"""Scales of the groups' signals, by half."""


class Advance(Protocol):
    """A running stage that is told of progress."""

    def advance(self, count: int = 1) -> None:
        """`count` more particles are done."""


Stage = Callable[[str, int], AbstractContextManager[Advance]]


class Passes:
    """What runs over the particles of one job.

    Parameters
    ----------
    job : Job
    executor : Executor
    folder : RunFolder
    stage : callable
        ``stage(title, particles)`` makes a progress display.
    chunk_limit : int, optional
        Particles of a search task, at most; by default what a CPU worker holds.

    Attributes
    ----------
    bad : dict of row to reason
        Particles that cannot be used.
    anchors : Poses
        Those of the list, which limits and priors are about.
    """

    def __init__(self, job: Job, executor: Executor, folder: RunFolder, stage: Stage, chunk_limit: int | None = None) -> None:
        self.job, self.executor, self.folder, self.stage = job, executor, folder, stage
        self._largest, self._smallest = largest_chunk(job.grid.binned_box_size), 8
        if chunk_limit is not None:
            self._largest, self._smallest = chunk_limit, min(chunk_limit, max(8, _GPU_LEAST_VOXELS // job.grid.binned_box_size**3))
        self._sum_parts, self._sum_chunk = (
            (_SUM_PARTS, _SUM_CHUNK) if chunk_limit is None else (_GPU_SUM_PARTS, gpu_sum_chunk(job.grid.binned_box_size))
        )
        self.anchors = job.particles.poses
        self.bad: dict[int, str] = {}
        self._mask_file: ReferenceFile | None = None

    def chunks(self, particles: ParticleSet, anchors: Poses, half: int) -> list[Chunk]:
        """Chunks of a half-set for search tasks."""
        return make_chunks(particles, anchors, half, largest=self._largest, smallest=self._smallest)

    def results(self, title: str, tasks: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Pairs of task and result, in task order."""
        total = sum(len(task.chunk) for task in tasks)
        begun = time.perf_counter()
        with self.stage(title, total) as running:
            results = gather_in_order(self.executor, run_task, tasks, progress=lambda task, result: running.advance(len(task.chunk)))
            for task, result in zip(tasks, results, strict=True):
                self._note_bad(task, result.bad)
                yield task, result
        self.folder.event("stage", title=title, particles=total, seconds=round(time.perf_counter() - begun, 3))

    def results_of_some(self, title: str, tasks: list[AlignTask]) -> Iterable[tuple[AlignTask, ChunkResult]]:
        """As `_results`, for particles taken out of their set, whose rows are not those of the set."""
        with self.stage(title, sum(len(task.chunk) for task in tasks)) as running:
            results = gather_in_order(self.executor, run_task, tasks, progress=lambda task, result: running.advance(len(task.chunk)))
            yield from zip(tasks, results, strict=True)

    def _note_bad(self, task: Any, bad: list[tuple[int, str]]) -> None:
        self.note_rows([int(task.chunk.rows[index]) for index, _ in bad], task, bad)

    def note_rows(self, rows: list[int], task: Any, bad: list[tuple[int, str]]) -> None:
        """`rows` of the whole set are unusable."""
        for row, (index, reason) in zip(rows, bad, strict=True):
            if row not in self.bad:
                self.bad[row] = reason
                _log.warning("particle %s is left out: %s", task.chunk.names[index], reason)
                self.folder.event("bad_particle", name=task.chunk.names[index], reason=reason)
        if len(self.bad) > self.job.max_bad:
            shown = "; ".join(f"{self.job.particles.names[row]}: {reason}" for row, reason in list(self.bad.items())[:3])
            raise GlocalError(f"{plural(len(self.bad), 'particle')} cannot be used, at most {self.job.max_bad} are tolerated (--max-bad): {shown}")

    def align(
        self,
        title: str,
        state: RunState,
        references: dict[int, ReferenceFile],
        noise: dict[int, NoiseModels],
        k_max: float,
        plan: SearchPlan | None,
        refine: bool,
    ) -> Aligned:
        """One pass of align tasks over both halves."""
        particles = self.job.particles.with_poses(state.poses)
        tasks = [
            self._align_task(chunk, references[half], noise[half], k_max, plan, refine)
            for half in HALVES
            for chunk in self.chunks(particles, self.anchors, half)
        ]
        aligned = Aligned(state)
        for task, result in self.results(title, tasks):
            aligned.take(task, result)
        return aligned

    def classes(
        self,
        title: str,
        classes: ClassState,
        references: list[dict[int, ReferenceFile]],
        noise: dict[int, NoiseModels],
        k_max: float,
        plan: SearchPlan | None,
        refine: bool,
        handicap: NDArray[np.float64] | None = None,
        halves: tuple[int, ...] = HALVES,
    ) -> ClassesAligned:
        """One pass of every particle (of the halves given) over the classes of its half; without `refine` over its own class only, for residuals.

        `handicap` (c, n) is taken off the log-likelihoods before they are compared, 0 by default.
        """
        given = np.maximum(classes.numbers - 1, 0)
        handicap = np.zeros(classes.shares.shape) if handicap is None else handicap
        tasks = []
        for half in halves:
            files = tuple(of_class[half] for of_class in references)
            for chunk in self.chunks(self.job.particles, self.anchors, half):
                common, rows = self._align_task(chunk, files[0], noise[half], k_max, plan, refine), chunk.rows
                tasks.append(ClassesTask(common, files, classes.rotations[:, rows], classes.shifts_angst[:, rows], given[rows], handicap[:, rows]))
        aligned = ClassesAligned(classes, self.job.grid.binned_box_size // 2 + 1)
        for task, result in self.results(title, tasks):
            aligned.take(task, result)
        return aligned

    def _align_task(
        self, chunk: Chunk, reference: ReferenceFile, noise: NoiseModels, k_max: float, plan: SearchPlan | None, refine: bool
    ) -> AlignTask:
        """What a chunk is compared with, and how, by the run's settings."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        return AlignTask(
            chunk,
            self.job.reader,
            reference,
            self.job.particle_mask,
            noise,
            settings.score,
            self.job.k_min,
            k_max,
            math.inf if settings.max_shift_angst is None else settings.max_shift_angst,
            plan,
            self.job.radius_voxels,
            refine,
            prior_widths(settings),
            self._local_mask(),
        )

    def _local_mask(self) -> ReferenceFile | None:
        """A mask file's mask, where workers need it: flcf's local deviation is taken under it."""
        settings = self.job.settings
        if not isinstance(settings, AlignSettings) or settings.score != "flcf" or settings.mask is None:
            return None
        if self._mask_file is None:
            self._mask_file = write_reference(self.folder.iteration_folder(0) / "mask.npy", self.job.mask)
        return self._mask_file

    def sums(
        self,
        title: str,
        poses: Poses,
        noise: dict[int, NoiseModels],
        symmetry: str | None = None,
        shares: NDArray[np.float64] | None = None,
        included: NDArray[np.bool_] | None = None,
    ) -> dict[int, WeightedSum]:
        """Sums of both halves at given poses, each half by itself with the run's symmetry (or the one given); of all or those `included`.

        With shares (n,) a particle counts as much as that; those with nothing are not looked at.
        """
        particles = self.job.particles.with_poses(poses)
        turns, grid_turns = grid_factors(symmetry or self.job.settings.symmetry)
        if shares is not None:
            included = shares > 0 if included is None else included & (shares > 0)
        partial = shares if shares is not None and np.any(shares[shares > 0] != 1.0) else None
        tasks = [
            SumTask(chunk, self.job.reader, noise[half], turns if len(turns) > 1 else None, None if partial is None else partial[chunk.rows])
            for half in HALVES
            for chunk in make_chunks(particles, self.anchors, half, self._sum_parts, self._sum_chunk, included)
        ]
        totals: dict[int, WeightedSum] = {}
        for task, result in self.results(title, tasks):
            assert isinstance(result, SumResult)
            half = task.chunk.half
            totals[half] = merge([totals[half], result.sums]) if half in totals else merge([result.sums])
        for half, total in totals.items():
            if total.n_particles < 2:
                raise GlocalError(f"half-set {half} has {total.n_particles} usable particles; expected at least 2")
        return {half: symmetrise_sums(total, grid_turns) for half, total in totals.items()}

    def flat_noise(self, gains: Gains | None = None) -> dict[int, NoiseModels]:
        """White noise of power 1, where nothing is known yet."""
        flat = np.ones(self.job.grid.binned_box_size // 2 + 1)
        return {half: tuple(NoiseModel(flat, gain=gain) for gain in self._gains(gains)[half]) for half in HALVES}

    def fit_noise(self, residuals: dict[int, GroupResiduals], k_max: float, gains: Gains | None = None) -> dict[int, NoiseModels]:
        """Noise of each half and group from its own residuals; `gains` of the groups go into it, 1 by default."""
        for half in HALVES:
            if not any(power.count.any() for power in residuals[half].values()):
                unusable = plural(len(self.bad), "particle")
                raise GlocalError(f"half-set {half} has no usable particles; expected at least 2 ({unusable} of the list cannot be used)")
        known = self._gains(gains)
        return {half: fit_noise_groups(residuals[half], known[half], min(3, int(k_max)), int(k_max)) for half in HALVES}

    def noise_facts(self, noise: dict[int, NoiseModels], k_max: float) -> dict[str, list[list[float]]]:
        """`noise.noise_facts` of each half, by its number as text: as JSON keeps it."""
        return {str(half): noise_facts(noise[half], min(3, int(k_max)), int(k_max)) for half in HALVES}

    def fit_gains(self, aligned: Aligned | ClassesAligned, noise: dict[int, NoiseModels]) -> Gains:
        """Scales of the groups' signals in each half, from the sums at refined poses under `noise`."""
        groups = self.job.particles.noise_groups
        if groups is None:
            return self._gains(None)
        gains = {}
        for half in HALVES:
            rows = np.flatnonzero(self.job.particles.half == half)
            gains[half] = fit_gains(aligned.numerator[rows], aligned.denominator[rows], groups[rows], [model.gain for model in noise[half]])
        return gains

    def _gains(self, gains: Gains | None) -> Gains:
        count = len(self.job.noise_groups.names)
        if gains and all(len(gains[half]) == count for half in HALVES):
            return gains
        return {half: (1.0,) * count for half in HALVES}


class ClassesAligned:
    """Results of one pass over the classes, put back in the list's order.

    Attributes
    ----------
    classes : ClassState
        With the new poses; shares and margins as before.
    scores, log_likelihood : (c, n) float64
        -inf where there is none.
    angle_sigma_deg, shift_sigma_angst : (c, n) float64
    best : (n,) int64
        Class of each particle, from 0.
    residuals : dict of half to GroupResiduals
    numerator, denominator : (n,) float64
        num and den2 against its class.
    held_weight, held_power : (n, shells) float64
        See `noise.held_in_average`.
    """

    def __init__(self, classes: ClassState, n_shells: int) -> None:
        shape = classes.shares.shape
        self.classes = replace(classes, rotations=classes.rotations.copy(), shifts_angst=classes.shifts_angst.copy())
        self.scores, self.log_likelihood = np.full(shape, -np.inf), np.full(shape, -np.inf)
        self.angle_sigma_deg, self.shift_sigma_angst = np.full(shape, np.nan), np.full(shape, np.nan)
        self.best = np.zeros(shape[1], np.int64)
        self.held_weight, self.held_power = np.zeros((shape[1], n_shells)), np.zeros((shape[1], n_shells))
        self.residuals: dict[int, GroupResiduals] = {half: {} for half in HALVES}
        self.numerator, self.denominator = np.zeros(shape[1]), np.zeros(shape[1])

    def take(self, task: ClassesTask, result: ClassesResult) -> None:
        """Adds one chunk's result."""
        rows = task.chunk.rows
        self.classes.rotations[:, rows], self.classes.shifts_angst[:, rows] = result.rotations, result.shifts_angst
        self.scores[:, rows], self.log_likelihood[:, rows] = result.scores, result.log_likelihood
        variance = np.maximum(result.variances, 0.0)
        self.angle_sigma_deg[:, rows] = np.rad2deg(np.sqrt(variance[..., :3].mean(2)))
        self.shift_sigma_angst[:, rows] = np.sqrt(variance[..., 3:].mean(2))
        self.best[rows] = result.best
        self.held_weight[rows], self.held_power[rows] = result.held_weight, result.held_power
        self.numerator[rows], self.denominator[rows] = result.numerator, result.denominator
        add_residuals(self.residuals[task.chunk.half], result.residuals)


class Aligned:
    """Results of one pass over both halves, put back in the list's order.

    Attributes
    ----------
    state : RunState
        With the new poses and what is known of them; uncertainties are those of the mode found.
    residuals : dict of half to GroupResiduals
    numerator, denominator : (n,) float64
    other_mode : (n, 2) float64
        `alignment.ChunkResult.other_mode`.
    """

    def __init__(self, state: RunState) -> None:
        self.state = replace(
            state,
            poses=Poses(state.poses.rotations.copy(), state.poses.shifts_angst.copy()),
            scores=state.scores.copy(),
            angle_sigma_deg=state.angle_sigma_deg.copy(),
            shift_sigma_angst=state.shift_sigma_angst.copy(),
            log_likelihood=state.log_likelihood.copy(),
            margin=np.full(len(state.scores), np.nan) if state.margin is None else state.margin.copy(),
        )
        self.residuals: dict[int, GroupResiduals] = {half: {} for half in HALVES}
        self.numerator, self.denominator = np.zeros(len(state.scores)), np.zeros(len(state.scores))
        self.other_mode = np.zeros((len(state.scores), 2))

    def take(self, task: AlignTask, result: ChunkResult) -> None:
        """Adds one chunk's result."""
        rows, state = task.chunk.rows, self.state
        state.poses.rotations[rows] = result.rotations
        state.poses.shifts_angst[rows] = result.shifts_angst
        add_residuals(self.residuals[task.chunk.half], result.residuals)
        self.other_mode[rows] = result.other_mode
        if result.estimates is not None:
            estimates = result.estimates
            self.numerator[rows], self.denominator[rows] = estimates.numerator, estimates.denominator
            unusable = ~np.isfinite(estimates.scores)
            state.scores[rows] = np.where(unusable, np.nan, estimates.scores)
            state.log_likelihood[rows] = np.where(unusable, np.nan, estimates.log_likelihood)
            if task.plan is not None and state.margin is not None:  # without a search there is no other mode to see
                state.margin[rows] = np.where(unusable, np.nan, np.minimum(estimates.margin, NO_OTHER_MODE))
            # root mean square over the three axes
            variance = np.maximum(np.diagonal(estimates.covariances, axis1=1, axis2=2), 0.0)
            state.angle_sigma_deg[rows] = np.where(unusable, np.nan, np.rad2deg(np.sqrt(variance[:, :3].mean(1))))
            state.shift_sigma_angst[rows] = np.where(unusable, np.nan, np.sqrt(variance[:, 3:].mean(1)))

    def add_to_sigmas(self, other_mode: NDArray[np.float64]) -> None:
        """Uncertainties become those of the whole posterior: `other_mode` (n, 2) is what a search has seen beside the mode found."""
        state = self.state
        state.angle_sigma_deg = np.hypot(state.angle_sigma_deg, np.rad2deg(np.sqrt(other_mode[:, 0])))
        state.shift_sigma_angst = np.hypot(state.shift_sigma_angst, np.sqrt(other_mode[:, 1]))


def gpu_sum_chunk(box_size: int) -> int:
    """Particles of a GPU's sum task: their spectra fit into 4 GiB, whatever the list's length and the device."""
    return int(np.clip(_GPU_SUM_BYTES // (4 * box_size**3), *_GPU_SUM_CHUNK))
