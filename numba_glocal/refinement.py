"""The GLocal loop: average -> FSC -> filter -> sample -> align -> record. It takes an executor; nothing here knows of GPUs or Numba.

The two half-sets meet in two places only: the FSC, and the six parameters of the frame they share.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np

from .classification import Classification, class_doubts
from .common_frame import CommonFrame
from .errors import SettingsError, plural
from .execution.pinning import usable_cores
from .execution.tasks import AlignTask
from .file_writer import FileWriter
from .fourier import use_threads
from .io import read_volume, write_volume
from .job import Job, far_off
from .noise import NoiseModel, NoiseModels, noise_line
from .passes import HALVES, Aligned, Passes, Stage
from .pose_prior import PriorWidths
from .reference_maps import ReferenceMaps
from .resolution import Crossing, evidence, shell_resolution_angst
from .results import RunFolder, RunResult, RunState, finite_or_none
from .schedule import adapt, best_of_each_half, first_increment_deg, has_converged, has_settled, last_iteration, search_plan
from .settings import AlignSettings, AverageSettings
from .start import NOTHING, Start, symmetry_doubts
from .symmetry import angle_modulo_deg, group_rotations
from .values import FSCCurve, Volume

_log = logging.getLogger("numba_glocal")

_REFITS = 2
_CLEAR_ODDS = math.log(100.0)
"""A particle whose second mode is nearer than this in log-likelihood is counted as ambiguous: odds below 100 to 1."""
_MASK_SPREAD = 1.25
"""Runs on noise agree up to this many box / diameter shells beyond the start map's (measured: 1.07): the mask carries them there."""
_SURE = 3.0
"""Standard deviations above noise from which a resolution is taken to be more than chance."""


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
        self.job, self.folder = job, folder
        self.passes, self.maps = Passes(job, executor, folder, stage, chunk_limit), ReferenceMaps(job, folder)
        self.frame = CommonFrame(self.passes, self.maps)
        self.classes = Classification(self.passes, self.maps, self.frame)
        self._symmetry = job.settings.symmetry
        use_threads(usable_cores())  # maps are worked on while the workers wait

    def run(self, resume: bool = False) -> RunResult:
        """Iterates from the start, or from the last finished iteration."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        state = self.folder.last_state() if resume else None
        if state is None:
            self.folder.write_start(self.job.particles, self.job.grid.binned_box_size)
            state = Start(self.passes, self.maps).state()
        else:
            changed = self.folder.changed_since_start(self.job.particles, self.job.grid.binned_box_size)
            if changed:
                raise SettingsError(f"--resume: {changed} since {self.folder.path} was started from {settings.particles}; start a new run")
            self.passes.bad = dict(state.bad)
            _log.info("resuming after iteration %d", state.iteration)
        result = None
        while state.iteration < last_iteration(state, settings):
            if settings.classes > 1 and state.classes is None and state.iteration > 0:
                state = self.classes.begin(state)
            state, result = self._iterate(state) if state.classes is None else self.classes.iterate(state)
        if settings.until_converged:
            _log.info("%s after iteration %d", "converged" if has_converged(state.history) else "not converged", state.iteration)
        result = self._stored_result(state) if result is None else result
        at_end = far_off(self.job.particles.names, state.poses, self.job.grid, found=True)
        doubts = [*at_end, *self._doubts(result), *symmetry_doubts(settings, state.symmetry_agreement), *class_doubts(result.classes)]
        noise = state.history[-1].get("noise") if state.history else None
        return replace(result, warnings=tuple(doubts), symmetry_agreement=state.symmetry_agreement, noise=noise)

    def _iterate(self, state: RunState) -> tuple[RunState, RunResult]:
        settings = self.job.settings
        assert isinstance(settings, AlignSettings)
        number = state.iteration + 1
        begun = time.perf_counter()
        name = f"iteration {number}"
        references = self.maps.references(state.iteration)
        before = state.poses
        # noise at the poses as they are, then search, then noise at the poses found and, in the first iterations, once more
        plan = search_plan(self.job, state)
        looked_with = {half: replace(file, scale=NOTHING) for half, file in references.items()} if plan.everywhere else references
        looked = self.passes.align(f"{name}: noise", state, looked_with, self.passes.flat_noise(state.gains), state.k_max, None, False)
        noise = self.passes.fit_noise(looked.residuals, state.k_max, state.gains)
        aligned = self.passes.align(f"{name}: align", state, references, noise, state.k_max, plan, True)
        noise = self.passes.fit_noise(aligned.residuals, state.k_max, self.passes.fit_gains(aligned, noise))
        other_mode = aligned.other_mode
        if number <= _REFITS:
            aligned = self.passes.align(f"{name}: refine", aligned.state, references, noise, state.k_max, None, True)
            noise = self.passes.fit_noise(aligned.residuals, state.k_max, self.passes.fit_gains(aligned, noise))
        aligned.add_to_sigmas(other_mode)
        included = best_of_each_half(aligned.state.scores, self.job.particles.half, settings.keep_best_percent)
        poses, sums, apart = self.frame.averages(name, aligned.state.poses, noise, included=included)
        half_maps = self.maps.half_maps(sums)
        fsc = self.maps.fsc(half_maps)
        crossing = self.maps.crossing(fsc)
        good = np.isfinite(aligned.state.scores)
        margin = np.full(0, np.nan) if aligned.state.margin is None else aligned.state.margin[good]
        angle_change = angle_modulo_deg(before.rotations, poses.rotations, self._symmetry)[good]
        shift_change = np.linalg.norm(before.shifts_angst - poses.shifts_angst, axis=1)[good]
        folder = self.folder.iteration_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        half_counts = sums[1].n_particles, sums[2].n_particles
        with FileWriter() as writer:  # all are there before the state is written
            listed = replace(aligned.state, poses=poses, bad=dict(self.passes.bad), included=included)
            writer.write(self.folder.write_particles, folder, self.job.particles, listed)
            writer.write(self.folder.write_maps, folder, half_maps, fsc, settings.fsc_criterion)
            self.maps.write_references(folder, sums, fsc, writer)
            average = Volume(self.maps.average(sums), fsc.pixel_size_angst)
            writer.write(write_volume, folder / "average.mrc", average)  # of each iteration: any may become the last
        noise_now = self.passes.noise_facts(noise, state.k_max)
        record: dict[str, Any] = {
            "number": number,
            "resolution_angst": finite_or_none(crossing.resolution_angst),
            "increment_deg": first_increment_deg(self.job, plan),
            "band_angst": self.job.grid.binned_box_size * self.job.grid.binned_pixel_size_angst / state.k_max,
            "angle_change_deg": float(np.median(angle_change)),
            "shift_change_angst": float(np.median(shift_change)),
            "seconds": time.perf_counter() - begun,
            "angle_sigma_deg": float(np.median(aligned.state.angle_sigma_deg[good])),
            "shift_sigma_angst": float(np.median(aligned.state.shift_sigma_angst[good])),
            "noise": noise_now,
            "ambiguous": int(np.sum(margin < _CLEAR_ODDS)),
            "left_out": None if included is None else int(np.sum(good & ~included)),
        }
        record["settled"] = has_settled(record, state.history)
        next_state = replace(
            aligned.state,
            iteration=number,
            poses=poses,
            k_max=self.maps.next_band(state.k_max, fsc),
            history=[*state.history, record],
            bad=dict(self.passes.bad),
            scale=state.scale,
            gains={half: tuple(model.gain for model in noise[half]) for half in HALVES},
            included=included,
        )
        if settings.adaptive:
            modulo = settings.symmetry if settings.relax_symmetry is None else settings.relax_symmetry  # another copy needs no wider search
            adapt(self.job, next_state, angle_modulo_deg(before.rotations, poses.rotations, modulo)[good], shift_change)
        self.folder.write_state(next_state)
        self.folder.event(
            "iteration",
            **record,
            halves_apart=apart,
            randomised_from=fsc.randomised_from_shell,
        )
        _log.info(
            "iteration %d: resolution %.1f A, band %.1f A, median change %.2f degrees %.2f A, halves were %.2f degrees %.2f A apart,"
            " noise: %s, %.1f s",
            number,
            crossing.resolution_angst,
            record["band_angst"],
            record["angle_change_deg"],
            record["shift_change_angst"],
            *apart,
            " / ".join(noise_line(facts) for facts in noise_now.values()),
            record["seconds"],
        )
        if included is not None:
            least = " and ".join(f"{aligned.state.scores[included & (self.job.particles.half == half)].min():.4g}" for half in HALVES)
            _log.info(
                "iteration %d: %s left out of the averages (--keep-best %g): scores below %s in the half-sets",
                *(number, plural(int(np.sum(good & ~included)), "particle"), settings.keep_best_percent, least),
            )
        return next_state, RunResult(fsc, crossing, dict(self.passes.bad), half_counts)

    def _doubts(self, result: RunResult) -> list[str]:
        """A resolution within what the start map brought along: there the halves agree even on noise, for both were turned onto one map."""
        settings, crossing = self.job.settings, result.crossing
        assert isinstance(settings, AlignSettings)
        if crossing.shell < 1:
            return []
        if settings.reference is None:
            return chance_doubts(self.job, result.fsc, crossing)
        box_angst = self.job.shell_of(1.0)
        brought = self.job.shell_of(settings.initial_lowpass_angst) + _MASK_SPREAD * box_angst / self.job.diameter_angst
        if crossing.shell > brought:
            return chance_doubts(self.job, result.fsc, crossing, int(brought) + 1)
        return [
            f"the resolution of {crossing.resolution_angst:.1f} A is no finer than what the start map brought"
            f" (--initial-lowpass {settings.initial_lowpass_angst:g}, spread by the mask to {box_angst / brought:.1f} A): the halves"
            " would agree there on noise alone. A coarser --initial-lowpass shows what is in the data."
        ]

    def _stored_result(self, state: RunState) -> RunResult:
        """Of a run that was stopped between its last iteration and its end."""
        assert isinstance(self.job.settings, AlignSettings)
        self.folder.check_unfinished(state, last_iteration(state, self.job.settings))
        if state.classes is not None:
            return self.classes.stored_result(state)
        folder = self.folder.iteration_folder(state.iteration)
        fsc = self.maps.fsc((read_volume(folder / "half1.mrc").data, read_volume(folder / "half2.mrc").data))
        used = self.job.particles.half if state.included is None else np.where(state.included, self.job.particles.half, 0)
        used = np.delete(used, list(state.bad))
        return RunResult(fsc, self.maps.crossing(fsc), dict(state.bad), (int((used == 1).sum()), int((used == 2).sum())))

    def finish(self, result: RunResult) -> RunState:
        """Writes the results at the top of the folder."""
        state = self.folder.last_state()
        assert state is not None
        if state.classes is not None:
            self.classes.finish(state, result)
            return state
        folder = self.folder.iteration_folder(state.iteration)
        half_maps = read_volume(folder / "half1.mrc").data, read_volume(folder / "half2.mrc").data
        average = read_volume(folder / "average.mrc").data
        self.folder.write_final(self.job.particles, state, half_maps, average, result.fsc, self.job.mask, self.job.settings.fsc_criterion)
        return state


def chance_doubts(job: Job, fsc: FSCCurve, crossing: Crossing, first_shell: int = 1) -> list[str]:
    """A resolution that stands on so few independent samples that chance may have made it; symmetries of many elements leave few."""
    if crossing.shell < 1:
        return []
    symmetry = job.settings.symmetry
    found = evidence(fsc.corrected, first_shell, crossing.shell, fsc.box_size, job.mask, len(group_rotations(symmetry)))
    if found >= _SURE:
        return []
    of = f", and of those --symmetry {symmetry} makes copies" if symmetry != "C1" else ""
    finer = f" finer than {shell_resolution_angst(first_shell - 1, fsc.box_size, fsc.pixel_size_angst):.1f} A" if first_shell > 1 else ""
    return [
        f"the resolution of {crossing.resolution_angst:.1f} A may be chance: the shells{finer} hold few samples{of};"
        f" together they correlate {found:.1f} standard deviations above noise, expected {_SURE:g}"
    ]


def average_run(job: Job, executor: Executor, folder: RunFolder, stage: Stage, chunk_limit: int | None = None) -> RunResult:
    """`average`: half-maps from the poses as they are.

    With noise weighting the noise form is fitted from residuals against each half's own first average.
    """
    settings = job.settings
    assert isinstance(settings, AverageSettings)
    passes, maps = Passes(job, executor, folder, stage, chunk_limit), ReferenceMaps(job, folder)
    use_threads(usable_cores())
    n = job.grid.binned_box_size
    count = len(job.particles)
    noise = passes.flat_noise()
    if settings.weighting == "ctf" and job.particles.premultiplied:  # the classical sums of premultiplied data are X over C
        noise = {half: (NoiseModel(np.ones(n // 2 + 1), 1.0, 1e-4),) for half in HALVES}
    facts = None
    agreement = None if settings.symmetry == "C1" else Start(passes, maps).agreement_of_poses(noise)
    if settings.weighting == "ctf":
        sums = passes.sums("averages", job.particles.poses, noise)
    else:
        sums = passes.sums("first averages", job.particles.poses, noise)
        fsc = maps.fsc(maps.half_maps(sums))
        iteration = folder.iteration_folder(0)
        iteration.mkdir(parents=True, exist_ok=True)
        with FileWriter() as writer:
            maps.write_references(iteration, sums, fsc, writer)
        noise, k_max = _average_noise(passes, maps, fsc)
        facts = passes.noise_facts(noise, k_max)
        _log.info("noise: %s", " / ".join(noise_line(of_half) for of_half in facts.values()))
        sums = passes.sums("averages", job.particles.poses, noise)
    half_maps = maps.half_maps(sums)
    fsc = maps.fsc(half_maps)
    nothing = np.full(count, np.nan)
    state = RunState(0, job.particles.poses, 0.0, 0.0, 0.0, nothing, nothing, nothing, nothing, dict(passes.bad), [])
    folder.write_maps(folder.path, half_maps, fsc, settings.fsc_criterion)
    half_counts = sums[1].n_particles, sums[2].n_particles
    folder.write_final(job.particles, state, half_maps, maps.average(sums), fsc, job.mask, settings.fsc_criterion)
    doubts = (*chance_doubts(job, fsc, maps.crossing(fsc)), *symmetry_doubts(settings, agreement))
    return RunResult(fsc, maps.crossing(fsc), dict(passes.bad), half_counts, doubts, agreement, facts)


def _average_noise(passes: Passes, maps: ReferenceMaps, fsc: FSCCurve) -> tuple[dict[int, NoiseModels], float]:
    """Noise of each half at the poses as they are, against its own average; and the band that chose its form.

    Of several groups the gains are found first, and the noise is fitted again with them.
    """
    job = passes.job
    references = maps.references(0)
    k_max = min(job.k_limit, float(max(3, maps.crossing(fsc).shell + 1)))
    several = len(job.noise_groups.names) > 1
    nothing = np.full(len(job.particles), np.nan)
    state = RunState(0, job.particles.poses, 0.0, 0.0, 0.0, nothing, nothing, nothing, nothing, {}, [])
    noise = passes.flat_noise()
    for _ in range(2 if several else 1):
        tasks = [
            AlignTask(
                *(chunk, job.reader, references[half], job.particle_mask, noise[half], "ml", 0.0, k_max, math.inf, None),
                *(job.radius_voxels, several, PriorWidths(), None, 0),
            )
            for half in HALVES
            for chunk in passes.chunks(job.particles, job.particles.poses, half)
        ]
        aligned = Aligned(state)
        for task, result in passes.results("noise", tasks):
            aligned.take(task, result)
        noise = passes.fit_noise(aligned.residuals, k_max, passes.fit_gains(aligned, noise) if several else None)
    return noise, k_max
