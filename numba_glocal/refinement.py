"""The GLocal loop: average -> FSC -> filter -> sample -> align -> record. It takes an executor; nothing here knows of GPUs or Numba.

The two half-sets meet in two places only: the FSC, and the six parameters of the frame they share.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .alignment import ChunkResult, SearchPlan, angular_resolution_deg, global_start, shift_step_angst
from .averaging import merge, move_frame, reconstruct, relative_motion, symmetrise_sums
from .backends.protocols import WeightedSum
from .errors import GlocalError, InputError, SettingsError, plural
from .execution.executors import gather_in_order
from .execution.pinning import usable_cores
from .execution.tasks import AlignTask, ReferenceFile, SumResult, SumTask, run_task, write_reference
from .filters import lowpass
from .fourier import use_threads
from .io import read_volume, write_volume
from .job import Job, largest_chunk, make_chunks
from .noise import NoiseModel, ResidualPower, fit_noise
from .resolution import Crossing, find_crossing, half_map_fsc
from .results import RunFolder, RunState, finite_or_none
from .settings import AlignSettings, AverageSettings
from .symmetry import angle_modulo_deg, free_motion, grid_factors, symmetrised, symmetry_agreement
from .values import FSCCurve, Poses, Volume

_log = logging.getLogger("numba_glocal")

HALVES = (1, 2)
_SCALE_PARTICLES = 64
_FRAME_BAND = 12.0
_REFITS = 2
_SETTLED_SHARE = 0.25
_SETTLED_RUNS = 2
"""Converged: this many iterations in succession moved the median pose by less than this share of its median uncertainty."""
_GLOBAL_ITERATIONS = 1
_GLOBAL_SCALE_PARTICLES = 24
_NOTHING = 1e-12
"""Factor on a reference whose residual is to be the whole power: a first guess of the noise that needs no poses."""
# A partial sum is as large as a padded map: few, large chunks. A GPU adds so fast that handing over the sum is what costs.
_SUM_PARTS, _SUM_CHUNK = 4, 512
_GPU_SUM_PARTS, _GPU_SUM_CHUNK, _GPU_SUM_BYTES = 1, (64, 1024), 4 << 30
_SMALL_MOTION_VOXELS = 0.02
# Of a map with its symmetrised self, without its round part. Measured on made GroEL: start maps 1.00 (wrong groups 0.06, C14 for C7 0.4 to 0.6);
# averages of 60 particles 0.66 at rough poses and 0.83 at true ones (wrong groups 0.15 to 0.23).
_LEAST_AGREEMENT_OF_MAP, _LEAST_AGREEMENT_OF_AVERAGE = 0.8, 0.5
_MASK_SPREAD = 1.25
"""Runs on noise agree up to this many box / diameter shells beyond the start map's (measured: 1.07): the mask carries them there."""


class Advance(Protocol):
    """A running stage that is told of progress."""

    def advance(self, count: int = 1) -> None:
        """`count` more particles are done."""


Stage = Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run reached.

    Attributes
    ----------
    fsc : FSCCurve
    crossing : Crossing
        Of the corrected curve at the run's criterion.
    bad : dict of row to reason
    half_counts : (int, int)
        Particles in each average.
    warnings : tuple of str
        Why the result may not be what it seems, one line each.
    symmetry_agreement : (float, float) or None
        How well the start (or the average) has the symmetry before it is imposed; see `symmetry.symmetry_agreement`. None for C1.
    """

    fsc: FSCCurve
    crossing: Crossing
    bad: dict[int, str]
    half_counts: tuple[int, int]
    warnings: tuple[str, ...] = ()
    symmetry_agreement: tuple[float, float] | None = None


class Refinement:
    """One run of the loop.

    Parameters
    ----------
    job : Job
    executor : Executor
    folder : RunFolder
    stage : callable
        ``stage(title, particles)`` makes a progress display.
    chunk_limit : int, optional
        Particles of a search task, at most; by default what a CPU worker holds.
    """

    def __init__(self, job: Job, executor: Executor, folder: RunFolder, stage: Stage, chunk_limit: int | None = None) -> None:
        self.job, self.executor, self.folder, self.stage = job, executor, folder, stage
        self._largest_chunk = chunk_limit or largest_chunk(job.grid.binned_box_size)
        self._sum_parts, self._sum_chunk = (
            (_SUM_PARTS, _SUM_CHUNK) if chunk_limit is None else (_GPU_SUM_PARTS, gpu_sum_chunk(job.grid.binned_box_size))
        )
        self._written: dict[Path, ReferenceFile] = {}
        use_threads(usable_cores())  # maps are worked on while the workers wait
        self._symmetry = job.settings.symmetry
        self._anchors = job.particles.poses.shifts_angst.copy()
        self._bad: dict[int, str] = {}

    # -- running tasks -----------------------------------------------------------------------------------------------

    def _results(self, title: str, tasks: list[Any]) -> Iterable[tuple[Any, Any]]:
        """Pairs of task and result, in task order."""
        total = sum(len(task.chunk) for task in tasks)
        begun = time.perf_counter()
        with self.stage(title, total) as running:
            results = gather_in_order(self.executor, run_task, tasks, progress=lambda task, result: running.advance(len(task.chunk)))
            for task, result in zip(tasks, results, strict=True):
                self._note_bad(task, result.bad)
                yield task, result
        self.folder.event("stage", title=title, particles=total, seconds=round(time.perf_counter() - begun, 3))

    def _note_bad(self, task: Any, bad: list[tuple[int, str]]) -> None:
        self._note_rows([int(task.chunk.rows[index]) for index, _ in bad], task, bad)

    def _note_rows(self, rows: list[int], task: Any, bad: list[tuple[int, str]]) -> None:
        """`rows` of the whole set are unusable."""
        for row, (index, reason) in zip(rows, bad, strict=True):
            if row not in self._bad:
                self._bad[row] = reason
                _log.warning("particle %s is left out: %s", task.chunk.names[index], reason)
                self.folder.event("bad_particle", name=task.chunk.names[index], reason=reason)
        if len(self._bad) > self.job.max_bad:
            shown = "; ".join(f"{self.job.particles.names[row]}: {reason}" for row, reason in list(self._bad.items())[:3])
            raise GlocalError(f"{plural(len(self._bad), 'particle')} cannot be used, at most {self.job.max_bad} are tolerated (--max-bad): {shown}")

    def _align(
        self,
        title: str,
        state: RunState,
        references: dict[int, ReferenceFile],
        noise: dict[int, NoiseModel],
        k_max: float,
        plan: SearchPlan | None,
        refine: bool,
    ) -> _Aligned:
        """One pass of align tasks over both halves."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        particles = self.job.particles.with_poses(state.poses)
        tasks = [
            AlignTask(
                chunk,
                self.job.reader,
                references[half],
                self.job.particle_mask,
                noise[half],
                settings.score,
                self.job.k_min,
                k_max,
                math.inf if settings.max_shift_angst is None else settings.max_shift_angst,
                plan,
                self.job.radius_voxels,
                refine,
            )
            for half in HALVES
            for chunk in make_chunks(particles, self._anchors, half, largest=self._largest_chunk)
        ]
        aligned = _Aligned(state, self.job.grid.binned_box_size // 2 + 1)
        for task, result in self._results(title, tasks):
            aligned.take(task, result)
        return aligned

    def _sums(self, title: str, poses: Poses, noise: dict[int, NoiseModel], symmetry: str | None = None) -> dict[int, WeightedSum]:
        """Sums of both halves at given poses, each half by itself with the run's symmetry (or the one given)."""
        particles = self.job.particles.with_poses(poses)
        turns, grid_turns = grid_factors(symmetry or self._symmetry)
        tasks = [
            SumTask(chunk, self.job.reader, noise[half], turns if len(turns) > 1 else None)
            for half in HALVES
            for chunk in make_chunks(particles, self._anchors, half, self._sum_parts, self._sum_chunk)
        ]
        totals: dict[int, WeightedSum] = {}
        for task, result in self._results(title, tasks):
            assert isinstance(result, SumResult)
            half = task.chunk.half
            totals[half] = merge([totals[half], result.sums]) if half in totals else merge([result.sums])
        for half, total in totals.items():
            if total.n_particles < 2:
                raise GlocalError(f"half-set {half} has {total.n_particles} usable particles; expected at least 2")
        return {half: symmetrise_sums(total, grid_turns) for half, total in totals.items()}

    # -- the start ---------------------------------------------------------------------------------------------------

    def _flat_noise(self) -> dict[int, NoiseModel]:
        return {half: NoiseModel(np.ones(self.job.grid.binned_box_size // 2 + 1)) for half in HALVES}

    def _fit_noise(self, residuals: dict[int, ResidualPower], k_max: float) -> dict[int, NoiseModel]:
        """Noise of each half from its own residuals."""
        for half in HALVES:
            if not residuals[half].count.any():
                unusable = plural(len(self._bad), "particle")
                raise GlocalError(f"half-set {half} has no usable particles; expected at least 2 ({unusable} of the list cannot be used)")
        return {half: fit_noise(residuals[half], min(3, int(k_max)), int(k_max)) for half in HALVES}

    def _start(self) -> RunState:
        """Poses of the list, start references in ``iter_000``."""
        job, settings = self.job, self.job.settings
        assert isinstance(settings, AlignSettings)
        count = len(job.particles)
        nothing = np.full(count, np.nan)
        shift_range = settings.shift_range_angst if settings.shift_range_angst is not None else 0.15 * job.diameter_angst
        if settings.max_shift_angst is not None:
            shift_range = min(shift_range, settings.max_shift_angst)
        k_max = min(job.k_limit, max(3.0, float(int(job.shell_of(settings.initial_lowpass_angst)))))
        state = RunState(
            0,
            job.particles.poses,
            k_max,
            settings.angle_increment_deg,
            shift_range,
            nothing,
            nothing.copy(),
            nothing.copy(),
            nothing.copy(),
            {},
            [],
        )
        folder = self.folder.iteration_folder(0)
        folder.mkdir(parents=True, exist_ok=True)
        if job.start_map is not None:
            state.symmetry_agreement = self._agreement(job.start_map, "the start map")
            masked = self._masked(symmetrised(job.start_map, self._symmetry))
            if not np.any(masked):
                raise SettingsError(f"{settings.reference}: nothing is left of it under the mask and low-pass")
            files = {half: write_reference(folder / f"reference{half}.npy", masked) for half in HALVES}
            state = replace_state(state, scale=self._start_scale(state, files))
            for half in HALVES:
                write_reference(folder / f"reference{half}.npy", masked * np.float32(state.scale))
        else:
            if self._symmetry != "C1":
                state.symmetry_agreement = self._agreement_of_poses(self._flat_noise(), settings.initial_lowpass_angst)
            sums = self._sums("start averages", state.poses, self._flat_noise())
            half_maps = self._half_maps(sums)
            fsc = self._fsc(half_maps)
            with FileWriter() as writer:
                writer.write(self.folder.write_maps, folder, half_maps, fsc, settings.fsc_criterion)
                self._write_references(folder, sums, fsc, writer)
            state = replace_state(state, k_max=self._next_band(state.k_max, fsc, ceiling=k_max))
        self._show_start(folder)
        return state

    def _agreement(self, volume: NDArray[np.float32], what: str) -> tuple[float, float] | None:
        """How well a map has the run's symmetry, said in the log."""
        if self._symmetry == "C1":
            return None
        agreement = symmetry_agreement(volume, self.job.mask, self._symmetry)
        _log.info("%s correlates with its %s-symmetrised self by %.3f, without its round part by %.3f", what, self._symmetry, *agreement)
        self.folder.event("symmetry", group=self._symmetry, what=what, correlation=agreement[0], without_round_part=agreement[1])
        return agreement

    def _agreement_of_poses(self, noise: dict[int, NoiseModel], lowpass_angst: float | None = None) -> tuple[float, float] | None:
        """The same for the average of the poses as they are, no symmetry imposed; low-passed where its halves end to agree, or as given."""
        sums = self._sums("averages without symmetry", self.job.particles.poses, noise, "C1")
        if lowpass_angst is None:
            lowpass_angst = self._crossing(self._fsc(self._half_maps(sums))).resolution_angst
        average = self._average(sums)
        if math.isfinite(lowpass_angst):
            average = lowpass(average, self.job.grid.binned_pixel_size_angst, lowpass_angst)
        return self._agreement(average, "the average of the given poses")

    def _show_start(self, folder: Path) -> None:
        """The start references as maps, to be looked at: one where both halves start from the same."""
        first, second = (np.load(folder / f"reference{half}.npy") for half in HALVES)
        maps = {"start_map.mrc": first} if np.array_equal(first, second) else {"start_map1.mrc": first, "start_map2.mrc": second}
        for name, data in maps.items():
            write_volume(folder / name, Volume(data, self.job.grid.binned_pixel_size_angst))

    def _start_scale(self, state: RunState, files: dict[int, ReferenceFile]) -> float:
        """Grey units of the particles over those of the start map, from a search of some particles; refuses inverted contrast.

        The same particles are also compared with the negative of the map: where that matches clearly better, the contrast is wrong.
        """
        job, settings = self.job, self.job.settings
        assert isinstance(settings, AlignSettings)
        scored = {}
        looked_at = _GLOBAL_SCALE_PARTICLES if settings.global_search else _SCALE_PARTICLES
        rows = {half: np.flatnonzero(job.particles.half == half)[:looked_at] for half in HALVES}
        some_rows = np.sort(np.concatenate(list(rows.values())))
        some = job.particles.take(some_rows)
        chunks = [(half, chunk) for half in HALVES for chunk in make_chunks(some, some.poses.shifts_angst, half, largest=self._largest_chunk)]
        plan = self._plan(state)

        def tasks(sign: float, noise: dict[int, NoiseModel], used_plan: SearchPlan | None) -> list[AlignTask]:
            limit = math.inf if settings.max_shift_angst is None else settings.max_shift_angst
            return [
                AlignTask(
                    chunk,
                    job.reader,
                    replace(files[half], scale=sign),
                    job.particle_mask,
                    noise[half],
                    "ncc",
                    job.k_min,
                    state.k_max,
                    limit,
                    used_plan,
                    job.radius_voxels,
                    used_plan is not None,
                )
                for half, chunk in chunks
            ]

        power = {half: ResidualPower.empty(job.grid.binned_box_size // 2 + 1) for half in HALVES}
        # with a vanishing reference the residual is the whole power: a first guess of the noise
        for task, result in self._subset_results("first look at the noise", tasks(_NOTHING, self._flat_noise(), None)):
            self._note_rows([int(some_rows[task.chunk.rows[index]]) for index, _ in result.bad], task, result.bad)
            power[task.chunk.half] += result.residuals
        noise = self._fit_noise(power, state.k_max)
        numerator = denominator = 0.0
        for sign in (1.0, -1.0):
            values = []
            title = "grey scale of the start map" if sign > 0 else "contrast of the start map"
            for _, result in self._subset_results(title, tasks(sign, noise, plan)):
                assert result.estimates is not None
                good = np.isfinite(result.estimates.scores)
                values.append(result.estimates.scores[good])
                if sign > 0:
                    numerator += float(result.estimates.numerator[good].sum())
                    denominator += float(result.estimates.denominator[good].sum())
            scored[sign] = np.concatenate(values)
        difference = scored[1.0] - scored[-1.0]
        spread = float(difference.std()) / math.sqrt(max(len(difference), 1))
        if difference.mean() < -3.0 * max(spread, 1e-12):
            raise SettingsError(
                f"{settings.reference}: the particles match its negative better (mean correlation {scored[-1.0].mean():.3f} against"
                f" {scored[1.0].mean():.3f}): the contrast is inverted; {'leave out' if settings.invert_contrast else 'use'} --invert-contrast"
            )
        scale = numerator / max(denominator, 1e-30)
        if not scale > 0:
            raise SettingsError(f"{settings.reference}: no particle matches it; is it the right map, at the right pixel size?")
        _log.info("grey scale of the start map %.4g (correlation %.3f; its negative %.3f)", scale, scored[1.0].mean(), scored[-1.0].mean())
        return scale

    def _subset_results(self, title: str, tasks: list[AlignTask]) -> Iterable[tuple[AlignTask, ChunkResult]]:
        """As `_results`, for particles taken out of their set, whose rows are not those of the set."""
        with self.stage(title, sum(len(task.chunk) for task in tasks)) as running:
            results = gather_in_order(self.executor, run_task, tasks, progress=lambda task, result: running.advance(len(task.chunk)))
            yield from zip(tasks, results, strict=True)

    # -- maps --------------------------------------------------------------------------------------------------------

    def _masked(self, volume: NDArray[np.float32]) -> NDArray[np.float32]:
        """Under the mask, without the level around it: the same rule as for particles, so that both hold the mask's own transform alike."""
        mask = self.job.mask
        outside = mask < 0.01
        if not outside.any():
            outside = np.ones_like(outside)
        mean = float(volume[outside].mean(dtype=np.float64))
        return ((volume - np.float32(mean)) * mask).astype(np.float32)

    def _half_maps(self, sums: dict[int, WeightedSum]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        n = self.job.grid.binned_box_size
        return reconstruct(sums[1], n), reconstruct(sums[2], n)

    def _average(self, sums: dict[int, WeightedSum]) -> NDArray[np.float32]:
        """The map of all particles: one division of both halves' sums, which is less noisy than the mean of two divisions.

        The sums are used up: those of half 1 become those of both.
        """
        return reconstruct(merge([sums.pop(1), sums.pop(2)]), self.job.grid.binned_box_size)

    def _fsc(self, half_maps: tuple[NDArray[np.float32], NDArray[np.float32]]) -> FSCCurve:
        return half_map_fsc(*half_maps, self.job.grid.binned_pixel_size_angst, self.job.mask, self.job.mask_name)

    def _write_references(self, folder: Path, sums: dict[int, WeightedSum], fsc: FSCCurve, writer: FileWriter) -> None:
        """References of the next iteration: posterior means with the signal-to-noise ratio of the corrected FSC, each from its own half."""
        crossing = self._crossing(fsc)
        value = np.clip(fsc.corrected, 1e-3, 0.999)
        value[crossing.shell + 1 if crossing.crossed else len(value) :] = 1e-3
        value[0] = value[1]
        ratio = value / (1.0 - value)

        def write(path: Path, data: NDArray[np.float32]) -> None:
            self._written[path] = write_reference(path, data)

        self._written.clear()
        for half in HALVES:
            writer.write(write, folder / f"reference{half}.npy", self._masked(reconstruct(sums[half], self.job.grid.binned_box_size, ratio)))

    def _crossing(self, fsc: FSCCurve) -> Crossing:
        return find_crossing(fsc.corrected, fsc.box_size, fsc.pixel_size_angst, self.job.settings.fsc_criterion)

    def _next_band(self, k_max: float, fsc: FSCCurve, ceiling: float = math.inf) -> float:
        """A little beyond the resolution reached, never back: what lies beyond it is weighted down by the filter."""
        return min(self.job.k_limit, ceiling, max(k_max, float(self._crossing(fsc).shell + 3)))

    def _references(self, iteration: int) -> dict[int, ReferenceFile]:
        """Reference files that an iteration left."""
        from .execution.tasks import array_digest

        folder = self.folder.iteration_folder(iteration)
        files = {half: folder / f"reference{half}.npy" for half in HALVES}
        if all(path in self._written for path in files.values()):
            return {half: self._written[path] for half, path in files.items()}
        try:
            return {half: ReferenceFile(path, array_digest(np.load(path))) for half, path in files.items()}
        except (OSError, ValueError, EOFError):
            raise InputError(f"{folder}: expected the references of iteration {iteration}, found them missing or damaged") from None

    def _one_frame(self, name: str, poses: Poses, noise: dict[int, NoiseModel]) -> tuple[Poses, dict[int, WeightedSum], tuple[float, float]]:
        """Averages in a common frame: each half gives way by half of their relative motion, as far as their symmetry leaves it free."""
        n, pixel = self.job.grid.binned_box_size, self.job.grid.binned_pixel_size_angst
        sums = self._sums(f"{name}: averages", poses, noise)
        if not np.any(free_motion(np.ones(3), np.ones(3), self._symmetry)):
            return poses, sums, (0.0, 0.0)
        half_maps = self._half_maps(sums)
        motion = relative_motion(*half_maps, self.job.mask, min(_FRAME_BAND, self.job.k_limit))
        rotvec, shift_voxels = free_motion(*motion, self._symmetry)
        angle_deg, distance = float(np.rad2deg(np.linalg.norm(rotvec))), float(np.linalg.norm(shift_voxels))
        apart = angle_deg, distance * pixel
        if angle_deg > 15.0 or distance > 0.15 * n:
            _log.warning("the halves' relative motion (%.1f degrees, %.1f A) is not believed", *apart)
            return poses, sums, apart
        if np.linalg.norm(rotvec) * self.job.radius_voxels + distance < _SMALL_MOTION_VOXELS:
            return poses, sums, apart
        rotations, shifts = poses.rotations.copy(), poses.shifts_angst.copy()
        for half, share in ((1, -0.5), (2, 0.5)):
            rows = np.flatnonzero(self.job.particles.half == half)
            moved = move_frame(poses.take(rows), rotvec, shift_voxels * pixel, share)
            rotations[rows], shifts[rows] = moved.rotations, self._within_limit(moved.shifts_angst, rows)
        poses = Poses(rotations, shifts)
        return poses, self._sums(f"{name}: averages, one frame", poses, noise), apart

    def _within_limit(self, shifts_angst: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
        """Shifts brought back to the hard limit: --max-shift holds for what the common frame moves too."""
        limit = getattr(self.job.settings, "max_shift_angst", None)
        if limit is None:
            return shifts_angst
        away = shifts_angst - self._anchors[rows]
        distance = np.linalg.norm(away, axis=1, keepdims=True)
        return self._anchors[rows] + away * np.minimum(1.0, limit / np.maximum(distance, 1e-12))

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, resume: bool = False) -> RunResult:
        """Iterates from the start, or from the last finished iteration."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        state = self.folder.last_state() if resume else None
        if state is None:
            self.folder.write_start(self.job.particles, self.job.grid.binned_box_size)
            state = self._start()
        else:
            changed = self.folder.changed_since_start(self.job.particles, self.job.grid.binned_box_size)
            if changed:
                raise SettingsError(f"--resume: {changed} since {self.folder.path} was started from {settings.particles}; start a new run")
            self._bad = dict(state.bad)
            _log.info("resuming after iteration %d", state.iteration)
        result = None
        while state.iteration < last_iteration(state, settings):
            state, result = self._iterate(state)
        if settings.until_converged:
            _log.info("%s after iteration %d", "converged" if has_converged(state.history) else "not converged", state.iteration)
        result = self._stored_result(state) if result is None else result
        doubts = [*self._doubts(result.crossing), *symmetry_doubts(settings, state.symmetry_agreement)]
        return replace(result, warnings=tuple(doubts), symmetry_agreement=state.symmetry_agreement)

    def _doubts(self, crossing: Crossing) -> list[str]:
        """A resolution within what the start map brought along: there the halves agree even on noise, for both were turned onto one map."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        if settings.reference is None or crossing.shell < 1:
            return []
        box_angst = self.job.shell_of(1.0)
        brought = self.job.shell_of(settings.initial_lowpass_angst) + _MASK_SPREAD * box_angst / self.job.diameter_angst
        if crossing.shell > brought:
            return []
        return [
            f"the resolution of {crossing.resolution_angst:.1f} A is no finer than what the start map brought"
            f" (--initial-lowpass {settings.initial_lowpass_angst:g}, spread by the mask to {box_angst / brought:.1f} A): the halves"
            " would agree there on noise alone. A coarser --initial-lowpass shows what is in the data."
        ]

    def _stored_result(self, state: RunState) -> RunResult:
        """Of a run that was stopped between its last iteration and its end."""
        assert isinstance(self.job.settings, AlignSettings)
        self.folder.check_unfinished(state, last_iteration(state, self.job.settings))
        folder = self.folder.iteration_folder(state.iteration)
        fsc = self._fsc((read_volume(folder / "half1.mrc").data, read_volume(folder / "half2.mrc").data))
        used = np.delete(self.job.particles.half, list(state.bad))
        return RunResult(fsc, self._crossing(fsc), dict(state.bad), (int((used == 1).sum()), int((used == 2).sum())))

    def _plan(self, state: RunState) -> SearchPlan:
        """What the iteration after `state` searches."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        everywhere = settings.global_search and state.iteration < _GLOBAL_ITERATIONS
        return SearchPlan(state.increment_deg, settings.angle_shells, state.shift_range_angst, state.k_max, everywhere)

    def _increment_deg(self, plan: SearchPlan) -> float:
        """Angular step of the first level."""
        return global_start(plan.k_max, self.job.grid.binned_box_size, self.job.radius_voxels)[0] if plan.everywhere else plan.increment_deg

    def _iterate(self, state: RunState) -> tuple[RunState, RunResult]:
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        number = state.iteration + 1
        begun = time.perf_counter()
        name = f"iteration {number}"
        references = self._references(state.iteration)
        before = state.poses
        # noise at the poses as they are, then search, then noise at the poses found and, in the first iterations, once more
        plan = self._plan(state)
        looked_with = {half: replace(file, scale=_NOTHING) for half, file in references.items()} if plan.everywhere else references
        looked = self._align(f"{name}: noise", state, looked_with, self._flat_noise(), state.k_max, None, False)
        noise = self._fit_noise(looked.residuals, state.k_max)
        aligned = self._align(f"{name}: align", state, references, noise, state.k_max, plan, True)
        noise = self._fit_noise(aligned.residuals, state.k_max)
        if number <= _REFITS:
            aligned = self._align(f"{name}: refine", aligned.state, references, noise, state.k_max, None, True)
            noise = self._fit_noise(aligned.residuals, state.k_max)
        poses, sums, apart = self._one_frame(name, aligned.state.poses, noise)
        half_maps = self._half_maps(sums)
        fsc = self._fsc(half_maps)
        crossing = self._crossing(fsc)
        good = np.isfinite(aligned.state.scores)
        angle_change = angle_modulo_deg(before.rotations, poses.rotations, self._symmetry)[good]
        shift_change = np.linalg.norm(before.shifts_angst - poses.shifts_angst, axis=1)[good]
        folder = self.folder.iteration_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        half_counts = sums[1].n_particles, sums[2].n_particles
        with FileWriter() as writer:  # all are there before the state is written
            writer.write(self.folder.write_particles, folder, self.job.particles, replace_state(aligned.state, poses=poses, bad=dict(self._bad)))
            writer.write(self.folder.write_maps, folder, half_maps, fsc, settings.fsc_criterion)
            self._write_references(folder, sums, fsc, writer)
            average = Volume(self._average(sums), fsc.pixel_size_angst)
            writer.write(write_volume, folder / "average.mrc", average)  # of each iteration: any may become the last
        record = {
            "number": number,
            "resolution_angst": finite_or_none(crossing.resolution_angst),
            "increment_deg": self._increment_deg(plan),
            "band_angst": self.job.grid.binned_box_size * self.job.grid.binned_pixel_size_angst / state.k_max,
            "angle_change_deg": float(np.median(angle_change)),
            "shift_change_angst": float(np.median(shift_change)),
            "seconds": time.perf_counter() - begun,
            "angle_sigma_deg": float(np.median(aligned.state.angle_sigma_deg[good])),
            "shift_sigma_angst": float(np.median(aligned.state.shift_sigma_angst[good])),
        }
        record["settled"] = has_settled(record, state.history)
        next_state = replace_state(
            aligned.state,
            iteration=number,
            poses=poses,
            k_max=self._next_band(state.k_max, fsc),
            history=[*state.history, record],
            bad=dict(self._bad),
            scale=state.scale,
        )
        if settings.adaptive:
            self._adapt(next_state, angle_change, shift_change)
        self.folder.write_state(next_state)
        self.folder.event(
            "iteration",
            **record,
            noise={h: (noise[h].gamma, noise[h].epsilon) for h in HALVES},
            halves_apart=apart,
            randomised_from=fsc.randomised_from_shell,
        )
        _log.info(
            "iteration %d: resolution %.1f A, band %.1f A, median change %.2f degrees %.2f A, halves were %.2f degrees %.2f A apart,"
            " noise exponent %s, %.1f s",
            number,
            crossing.resolution_angst,
            record["band_angst"],
            record["angle_change_deg"],
            record["shift_change_angst"],
            *apart,
            "/".join(f"{noise[h].gamma:g}" for h in HALVES),
            record["seconds"],
        )
        return next_state, RunResult(fsc, crossing, dict(self._bad), half_counts)

    def _adapt(self, state: RunState, angle_change_deg: NDArray[np.float64], shift_change_angst: NDArray[np.float64]) -> None:
        """Smaller steps and ranges as the poses settle, by what they still moved; never finer than the band can tell."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        grid = self.job.grid
        finest = angular_resolution_deg(state.k_max, grid.binned_box_size, self.job.radius_voxels)
        moved = float(np.percentile(angle_change_deg, 90)) * 2.0 / max(settings.angle_shells, 1)
        state.increment_deg = float(min(state.increment_deg, max(finest, moved)))
        least = 2.0 * shift_step_angst(state.k_max, grid.binned_box_size, grid.binned_pixel_size_angst)
        state.shift_range_angst = float(min(state.shift_range_angst, max(least, 2.0 * float(np.percentile(shift_change_angst, 90)))))

    def finish(self, result: RunResult) -> RunState:
        """Writes the results at the top of the folder."""
        state = self.folder.last_state()
        assert state is not None
        folder = self.folder.iteration_folder(state.iteration)
        half_maps = read_volume(folder / "half1.mrc").data, read_volume(folder / "half2.mrc").data
        average = read_volume(folder / "average.mrc").data
        self.folder.write_final(self.job.particles, state, half_maps, average, result.fsc, self.job.mask, self.job.settings.fsc_criterion)
        return state


class _Aligned:
    """Results of one pass over both halves, put back in the list's order."""

    def __init__(self, state: RunState, n_shells: int) -> None:
        self.state = replace_state(
            state,
            poses=Poses(state.poses.rotations.copy(), state.poses.shifts_angst.copy()),
            scores=state.scores.copy(),
            angle_sigma_deg=state.angle_sigma_deg.copy(),
            shift_sigma_angst=state.shift_sigma_angst.copy(),
            log_likelihood=state.log_likelihood.copy(),
        )
        self.residuals = {half: ResidualPower.empty(n_shells) for half in HALVES}

    def take(self, task: AlignTask, result: ChunkResult) -> None:
        """Adds one chunk's result."""
        rows, state = task.chunk.rows, self.state
        state.poses.rotations[rows] = result.rotations
        state.poses.shifts_angst[rows] = result.shifts_angst
        self.residuals[task.chunk.half] = self.residuals[task.chunk.half] + result.residuals
        if result.estimates is not None:
            estimates = result.estimates
            unusable = ~np.isfinite(estimates.scores)
            state.scores[rows] = np.where(unusable, np.nan, estimates.scores)
            state.log_likelihood[rows] = np.where(unusable, np.nan, estimates.log_likelihood)
            # root mean square over the three axes
            variance = np.maximum(np.diagonal(estimates.covariances, axis1=1, axis2=2), 0.0)
            state.angle_sigma_deg[rows] = np.where(unusable, np.nan, np.rad2deg(np.sqrt(variance[:, :3].mean(1))))
            state.shift_sigma_angst[rows] = np.where(unusable, np.nan, np.sqrt(variance[:, 3:].mean(1)))


class FileWriter:
    """Writes files beside what computes the next ones; when its block ends well all are there, or the first error is raised."""

    def __enter__(self) -> FileWriter:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._files: list[Future[Any]] = []
        return self

    def write(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls ``function(*args)`` after those given before; what it is given must not change any more."""
        self._files.append(self._thread.submit(function, *args))

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            for file in self._files:
                file.result()


def symmetry_doubts(settings: AlignSettings | AverageSettings, agreement: tuple[float, float] | None) -> list[str]:
    """A line where what a symmetry was imposed on does not seem to have it: the FSC does not tell, for both halves are given the same."""
    given = isinstance(settings, AlignSettings) and settings.reference is not None
    if agreement is None or agreement[1] >= (_LEAST_AGREEMENT_OF_MAP if given else _LEAST_AGREEMENT_OF_AVERAGE):
        return []
    return [
        f"--symmetry {settings.symmetry}: without its round part, the {'start map' if given else 'average of the given poses'} correlates with"
        f" its symmetrised self by {agreement[1]:.2f} only (as it is: {agreement[0]:.2f}); the FSC does not tell this. Is it the right group, about"
        " the axes of docs/conventions.md, 8, through the centre of the box?"
    ]


def gpu_sum_chunk(box_size: int) -> int:
    """Particles of a GPU's sum task: their spectra fit into 4 GiB, whatever the list's length and the device."""
    return int(np.clip(_GPU_SUM_BYTES // (4 * box_size**3), *_GPU_SUM_CHUNK))


def has_settled(record: dict[str, Any], before: list[dict[str, Any]]) -> bool:
    """Whether an iteration changed nothing that matters: poses by a small share of their uncertainty, the resolution not for the better.

    Parameters
    ----------
    record : dict
        Of the iteration, as in `RunState.history`.
    before : list of dict
        Of those before it; the first iteration never settles.
    """

    def shells(entry: dict[str, Any]) -> float:
        return 1.0 / entry["resolution_angst"] if entry["resolution_angst"] else 0.0

    turned = record["angle_change_deg"] >= _SETTLED_SHARE * record["angle_sigma_deg"]
    moved = record["shift_change_angst"] >= _SETTLED_SHARE * record["shift_sigma_angst"]
    better = shells(record) > max((shells(entry) for entry in before), default=0.0) * (1 + 1e-6)
    return bool(before and not turned and not moved and not better)


def has_converged(history: list[dict[str, Any]]) -> bool:
    """Whether the last iterations have all settled."""
    return len(history) >= _SETTLED_RUNS and all(record.get("settled", False) for record in history[-_SETTLED_RUNS:])


def last_iteration(state: RunState, settings: AlignSettings) -> int:
    """The iteration that ends the run: the one reached, where it has converged and was to stop there; else --iterations."""
    return state.iteration if settings.until_converged and has_converged(state.history) else settings.iterations


def replace_state(state: RunState, **changes: Any) -> RunState:
    """A copy with some fields changed."""
    return replace(state, **changes)


def average_run(job: Job, executor: Executor, folder: RunFolder, stage: Stage, chunk_limit: int | None = None) -> RunResult:
    """`average`: half-maps from the poses as they are.

    With noise weighting the noise form is fitted from residuals against each half's own first average.
    """
    settings = job.settings
    assert isinstance(settings, AverageSettings)
    loop = Refinement(job, executor, folder, stage, chunk_limit)
    n = job.grid.binned_box_size
    count = len(job.particles)
    noise = loop._flat_noise()
    if settings.weighting == "ctf" and job.particles.premultiplied:  # the classical sums of premultiplied data are X over C
        noise = {half: NoiseModel(np.ones(n // 2 + 1), 1.0, 1e-4) for half in HALVES}
    agreement = None if settings.symmetry == "C1" else loop._agreement_of_poses(noise)
    if settings.weighting == "ctf":
        sums = loop._sums("averages", job.particles.poses, noise)
    else:
        sums = loop._sums("first averages", job.particles.poses, noise)
        fsc = loop._fsc(loop._half_maps(sums))
        iteration = folder.iteration_folder(0)
        iteration.mkdir(parents=True, exist_ok=True)
        with FileWriter() as writer:
            loop._write_references(iteration, sums, fsc, writer)
        noise = _average_noise(loop, fsc)
        sums = loop._sums("averages", job.particles.poses, noise)
    half_maps = loop._half_maps(sums)
    fsc = loop._fsc(half_maps)
    nothing = np.full(count, np.nan)
    state = RunState(0, job.particles.poses, 0.0, 0.0, 0.0, nothing, nothing, nothing, nothing, dict(loop._bad), [])
    folder.write_maps(folder.path, half_maps, fsc, settings.fsc_criterion)
    half_counts = sums[1].n_particles, sums[2].n_particles
    folder.write_final(job.particles, state, half_maps, loop._average(sums), fsc, job.mask, settings.fsc_criterion)
    doubts = tuple(symmetry_doubts(settings, agreement))
    return RunResult(fsc, loop._crossing(fsc), dict(loop._bad), half_counts, doubts, agreement)


def _average_noise(loop: Refinement, fsc: FSCCurve) -> dict[int, NoiseModel]:
    """Noise of each half at the poses as they are, against its own average."""
    job = loop.job
    references = loop._references(0)
    k_max = min(job.k_limit, float(max(3, loop._crossing(fsc).shell + 1)))
    residuals = {half: ResidualPower.empty(job.grid.binned_box_size // 2 + 1) for half in HALVES}
    flat = loop._flat_noise()
    tasks = [
        AlignTask(chunk, job.reader, references[half], job.particle_mask, flat[half], "ml", 0.0, k_max, math.inf, None, job.radius_voxels, False)
        for half in HALVES
        for chunk in make_chunks(job.particles, job.particles.poses.shifts_angst, half, largest=loop._largest_chunk)
    ]
    for task, result in loop._results("noise", tasks):
        residuals[task.chunk.half] = residuals[task.chunk.half] + result.residuals
    return loop._fit_noise(residuals, k_max)
