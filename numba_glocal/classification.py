"""Iterations with several classes: every particle against every class of its half, then maps of each class (docs/adr/0013-classes.md).

A class is two half-maps that never mix. What the classes share is the noise, the band and the particles.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .averaging import merge, reconstruct
from .common_frame import CommonFrame
from .errors import GlocalError, plural
from .execution.tasks import ReferenceFile, array_digest
from .file_writer import FileWriter
from .filters import lowpass, shell_weights
from .fourier import grid_band, max_band
from .io import read_volume, write_volume
from .job import start_classes
from .masks import spherical_mask
from .noise import NoiseModels, noise_line
from .passes import HALVES, ClassesAligned, Passes
from .reference_maps import ReferenceMaps
from .results import ClassResult, ClassState, RunResult, RunState, finite_or_none
from .schedule import adapt, best_of_each_half, first_increment_deg, has_settled, search_plan
from .settings import AlignSettings
from .start import NOTHING
from .symmetry import angle_modulo_deg, grid_factors
from .values import FSCCurve, Poses, Volume

_log = logging.getLogger("numba_glocal")

_REFITS = 2
_LEAST_SHARE = 1e-3
"""Of a particle in a class, by probability; less is nothing."""
_LEAST_PARTICLES = 2
_ROUNDS = 25
"""At most, of the search for classes in the low band; it ends where few particles still change."""
_FEW_CHANGE = 0.01
_UNLIKE = 4.0
"""Standard deviations between a class's shares of the two halves that are not believed to be chance."""


def shares_of(log_likelihood: NDArray[np.float64], soft: bool) -> NDArray[np.float64]:
    """How much of each particle each class holds.

    Parameters
    ----------
    log_likelihood : (c, n) float64
        -inf where there is none.
    soft : bool
        Probabilities, all classes being as likely beforehand; else 1 for the best.

    Returns
    -------
    (c, n) float64
        Sums of 1; 0 for particles without any likelihood.
    """
    usable = np.isfinite(log_likelihood).any(axis=0)
    best = np.argmax(log_likelihood, axis=0)
    if not soft:
        return _one_hot(np.where(usable, best, -1), len(log_likelihood))
    behind = np.where(usable, log_likelihood, 0.0) - np.where(usable, np.max(log_likelihood, axis=0), 0.0)
    shares = np.exp(behind) * usable
    shares = shares / np.maximum(shares.sum(0), 1.0)
    shares[shares < _LEAST_SHARE] = 0.0
    return shares / np.where(usable, shares.sum(0), 1.0)


def margins_of(log_likelihood: NDArray[np.float64], best: NDArray[np.int64]) -> NDArray[np.float64]:
    """Log-likelihood of the class `best` (n,) above the highest of the others (c, n); NaN where there is none."""
    rows = np.arange(log_likelihood.shape[1])
    others = log_likelihood.copy()
    others[best, rows] = -np.inf
    own, other = log_likelihood[best, rows], others.max(0)
    known = np.isfinite(own) & np.isfinite(other)
    return np.where(known, np.where(known, own, 0.0) - np.where(known, other, 0.0), np.nan)


def prefix(c: int) -> str:
    """Of a class's files in an iteration's folder; classes count from 0 here."""
    return f"class{c + 1}_"


class Classification:
    """The loop's iteration for several classes.

    Parameters
    ----------
    passes : Passes
    maps : ReferenceMaps
    frame : CommonFrame
    """

    def __init__(self, passes: Passes, maps: ReferenceMaps, frame: CommonFrame) -> None:
        self.passes, self.maps, self.frame = passes, maps, frame
        self.job, self.folder = passes.job, passes.folder

    @property
    def _settings(self) -> AlignSettings:
        assert isinstance(self.job.settings, AlignSettings)
        return self.job.settings

    def _included(self, scores: NDArray[np.float64], classes: ClassState) -> NDArray[np.bool_] | None:
        """Which particles maps are made of, by --keep-best: the best of each class in each half."""
        return best_of_each_half(scores, self.job.particles.half, self._settings.keep_best_percent, classes.numbers)

    # -- noise in the maps -------------------------------------------------------------------------------------------

    def _noise_gain(
        self, value: NDArray[np.float64], shares: NDArray[np.float64], weight: NDArray[np.float64], power: NDArray[np.float64], k_max: float
    ) -> NDArray[np.float64]:
        """What noise in a map adds to the log-likelihood of particles (n,) against it.

        Of a shell of the map the share ``value h`` is a particle's own, h being its part of the sums there. That share of its own noise
        power it finds again in the map: twice, as it stands in ``2 num``. The noise of the others takes the same off all, once.

        Parameters
        ----------
        value : (shells,) float64
            Signal in the map's shells; see `ReferenceMaps.signal_share`.
        shares : (n,) float64
            How much of each particle is in the map.
        weight, power : (n, shells) float64
            See `noise.held_in_average`.
        k_max : float
            Band of the comparison.
        """
        n, mask = self.job.grid.binned_box_size, self.job.particle_mask
        band = grid_band(n, float(max_band(n)))
        inside = (band.radius2 <= k_max * k_max + 1e-6) & (band.radius2 >= self.job.k_min**2 - 1e-6)
        shells = len(value)
        samples = np.bincount(band.shell[inside], minlength=shells)[:shells]
        common = float((spherical_mask(n, mask.radius_voxels, mask.soft_edge_voxels).astype(np.float64) * self.job.mask).mean())
        turns, grid_turns = grid_factors(self.job.settings.symmetry)
        held = shares @ weight
        # a shell of m samples holds held / m at each of them; of a shell that the band cuts only a part counts
        factor = np.where(held > 0, common * value * samples / np.where(held > 0, held, 1.0), 0.0) / (len(turns) * len(grid_turns))
        return np.asarray(2.0 * shares * (power @ factor) - weight @ factor)

    # -- classes without start maps ----------------------------------------------------------------------------------

    def begin(self, state: RunState) -> RunState:
        """Classes for particles that have been aligned to one map: from the list's own, or from a random assignment.

        What tells the classes apart is found in the low band of `--initial-lowpass` with the poses as they are: particles of one half are
        compared with the class maps of the other, so that none is compared with itself and a class is the same in both halves. Then
        both halves' references become their own present ones plus the same low-passed difference of each class from the average.
        """
        job, settings, k = self.job, self._settings, self._settings.classes
        name = f"iteration {state.iteration + 1}"
        references = self.maps.references(state.iteration)
        looked = self.passes.align(f"{name}: noise", state, references, self.passes.flat_noise(state.gains), state.k_max, None, False)
        noise = self.passes.fit_noise(looked.residuals, state.k_max, state.gains)
        k_low = min(state.k_max, max(3.0, float(int(job.shell_of(settings.initial_lowpass_angst)))))
        usable = np.asarray(np.isfinite(state.scores))
        given = start_classes(job.particles, k)
        numbers = self._drawn(usable) if given is None else np.where(usable, given, -1)
        classes = ClassState.same_poses(k, state.poses)
        classes.shares = _one_hot(numbers, k)
        held = self.passes.classes(f"{name}: noise of each", classes, [references] * k, noise, state.k_max, None, False)
        rounds = 0 if given is not None else self._search(name, state, classes, held, noise, k_low, usable)
        counts = classes.shares.sum(1).astype(int)
        self._write_begun(f"{name}: classes", state, classes, held, noise, k_low)
        self.folder.event("classes", start="random" if given is None else "list", rounds=rounds, counts=counts)
        return replace(state, classes=classes)

    def _search(
        self,
        name: str,
        state: RunState,
        classes: ClassState,
        held: ClassesAligned,
        noise: dict[int, NoiseModels],
        k_low: float,
        usable: NDArray[np.bool_],
    ) -> int:
        """Rounds in which the halves find each other's classes in turn, until few particles change; returns how many."""
        k, half_of = len(classes.shares), self.job.particles.half
        fsc = self.maps.fsc(self._half_maps_of(state.iteration))
        changed = {1: 1.0, 2: 1.0}
        for number in range(1, _ROUNDS + 1):
            half, other = (1, 2) if number % 2 else (2, 1)
            title = f"{name}: classes, round {number}"
            references, handicap = self._maps_for_other(title, state, classes, held, noise, half, fsc, k_low)
            aligned = self.passes.classes(title, classes, references, noise, k_low, None, True, handicap, (other,))
            rows = np.flatnonzero(usable & (half_of == other))
            found = _one_hot(aligned.best[rows], k)
            if found.sum(1).min() < _LEAST_PARTICLES:
                _log.warning("classes, round %d: one would run out of particles; those of the round before are taken", number)
                break
            changed[other] = float((found != classes.shares[:, rows]).any(0).mean())
            classes.shares[:, rows] = found
            _log.info("classes, round %d: %s, %.1f %% of half %d changed", number, _counts_text(found.sum(1)), 100 * changed[other], other)
            if max(changed.values()) <= _FEW_CHANGE:
                break
        return number

    def _drawn(self, usable: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Random classes, as many particles of each half in each; -1 for unusable ones."""
        rng = np.random.default_rng([self._settings.seed, 1])
        numbers = np.full(len(usable), -1, np.int64)
        for half in HALVES:
            rows = np.flatnonzero(usable & (self.job.particles.half == half))
            numbers[rng.permutation(rows)] = np.arange(len(rows)) % self._settings.classes
        return numbers

    def _half_maps_of(self, iteration: int, start: str = "") -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Half-maps that an iteration left."""
        folder = self.folder.iteration_folder(iteration)
        return read_volume(folder / f"{start}half1.mrc").data, read_volume(folder / f"{start}half2.mrc").data

    def _maps_for_other(
        self,
        name: str,
        state: RunState,
        classes: ClassState,
        held: ClassesAligned,
        noise: dict[int, NoiseModels],
        half: int,
        fsc: FSCCurve,
        k_low: float,
    ) -> tuple[list[dict[int, ReferenceFile]], NDArray[np.float64]]:
        """Class maps of one half as references of the other, and the handicap (c, n) of particles there.

        Parameters
        ----------
        fsc : FSCCurve
            Of all particles' half-maps: a class has its share of their signal-to-noise ratio.
        """
        folder, inside = self.folder.iteration_folder(state.iteration), self.job.particles.half == half
        value = self.maps.signal_share(fsc)
        held_in = _in_maps(classes.shares, self._included(state.scores, classes))
        whole = float(held_in[:, inside].sum())
        handicap = np.zeros(classes.shares.shape)
        paths = [folder / f"{prefix(c)}reference{3 - half}.npy" for c in range(len(handicap))]
        for c, path in enumerate(paths):
            shares = held_in[c] * inside
            ratio = value / (1.0 - value) * float(shares.sum()) / whole
            sums = self.passes.sums(f"{name}: averages of class {c + 1}", state.poses, noise, shares=shares)
            volume = self.maps.masked(reconstruct(sums[half], self.job.grid.binned_box_size, ratio))
            handicap[c] = self._noise_gain(ratio / (1.0 + ratio), shares, held.held_weight, held.held_power, k_low)
            with FileWriter() as writer:
                self.maps.write_reference(path, volume, writer)
        return [{3 - half: ReferenceFile(path, array_digest(np.load(path)))} for path in paths], handicap

    def _write_begun(
        self, name: str, state: RunState, classes: ClassState, held: ClassesAligned, noise: dict[int, NoiseModels], k_low: float
    ) -> None:
        """References of the first iteration with classes, and what noise in them is worth."""
        job, grid = self.job, self.job.grid
        folder = self.folder.iteration_folder(state.iteration)
        own = {half: np.load(file.path) for half, file in self.maps.references(state.iteration).items()}
        held_in = _in_maps(classes.shares, self._included(state.scores, classes))
        volumes, weights = [], held_in.sum(1)
        value = self.maps.signal_share(self.maps.fsc(self._half_maps_of(state.iteration)))
        for c, shares in enumerate(held_in):
            sums = self.passes.sums(f"{name}: averages of class {c + 1}", state.poses, noise, shares=shares)
            of_both = 2.0 * value / (1.0 - value) * float(weights[c] / weights.sum())
            both = reconstruct(merge([sums.pop(1), sums.pop(2)]), grid.binned_box_size, of_both)
            volumes.append(lowpass(self.maps.masked(both), grid.binned_pixel_size_angst, self._settings.initial_lowpass_angst))
            classes.handicap[c] = self._noise_gain(of_both / (1.0 + of_both), shares, held.held_weight, held.held_power, k_low)
        mean = np.einsum("c,czyx->zyx", weights / weights.sum(), np.stack(volumes))
        with FileWriter() as writer:
            for c, volume in enumerate(volumes):
                writer.write(write_volume, folder / f"{prefix(c)}start_map.mrc", Volume(volume, grid.binned_pixel_size_angst))
                for half in HALVES:
                    reference = (own[half] + (volume - mean) * (job.mask > 0)).astype(np.float32)
                    self.maps.write_reference(folder / f"{prefix(c)}reference{half}.npy", reference, writer)

    # -- an iteration ------------------------------------------------------------------------------------------------

    def iterate(self, state: RunState) -> tuple[RunState, RunResult]:
        """The iteration after `state`."""
        job, settings, before = self.job, self._settings, state.classes
        assert before is not None
        number, count = state.iteration + 1, len(before.shares)
        begun = time.perf_counter()
        name = f"iteration {number}"
        references = [self.maps.references(state.iteration, prefix(c)) for c in range(count)]
        plan = search_plan(job, state)
        looked_with = [{half: replace(file, scale=NOTHING) for half, file in of_class.items()} for of_class in references]
        flat = self.passes.flat_noise(state.gains)
        looked = self.passes.classes(f"{name}: noise", before, looked_with if plan.everywhere else references, flat, state.k_max, None, False)
        noise = self.passes.fit_noise(looked.residuals, state.k_max, state.gains)
        handicap = before.handicap
        aligned = self.passes.classes(f"{name}: align", before, references, noise, state.k_max, plan, True, handicap)
        noise = self.passes.fit_noise(aligned.residuals, state.k_max, self.passes.fit_gains(aligned, noise))
        if number <= _REFITS:
            aligned = self.passes.classes(f"{name}: refine", aligned.classes, references, noise, state.k_max, None, True, handicap)
            noise = self.passes.fit_noise(aligned.residuals, state.k_max, self.passes.fit_gains(aligned, noise))
        classes = aligned.classes
        likelihood = aligned.log_likelihood - handicap
        by_likelihood = settings.score == "ml"
        classes.shares = shares_of(likelihood if by_likelihood else aligned.scores, settings.class_assignment == "soft")
        usable = np.asarray(classes.shares.any(0))
        best = np.maximum(classes.numbers - 1, 0)
        classes.margins = np.where(usable, margins_of(likelihood, best), np.nan)
        scores = np.where(usable, aligned.scores[best, np.arange(len(best))], np.nan)
        included = self._included(scores, classes)
        held_in = _in_maps(classes.shares, included)
        k_max = state.k_max
        reached: list[ClassResult] = []
        folder = self.folder.iteration_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        maps: dict[int, dict[int, NDArray[np.float32]]] = {}
        with FileWriter() as writer:
            for c in range(count):
                result, volumes = self._average(name, state, classes, c, held_in[c], noise, usable, writer)
                reached.append(result)
                if result.fsc is not None:
                    maps[c] = volumes
                    k_max = max(k_max, self.maps.next_band(state.k_max, result.fsc))
            if not maps:
                raise GlocalError(f"none of {count} classes has two particles in both half-sets; expected fewer --classes, or more particles")
            shell_values = self._signal_shares(reached, held_in)
            for c, volumes in maps.items():
                fsc = reached[c].fsc
                assert fsc is not None
                for half, volume in volumes.items():
                    reference = self.maps.masked(shell_weights(volume, shell_values[c] / _rough_share(fsc)))
                    self.maps.write_reference(folder / f"{prefix(c)}reference{half}.npy", reference, writer)
            poses = _of_class(classes.rotations, classes.shifts_angst, best)
            next_state = self._next_state(state, aligned, classes, poses, best, included, number, k_max)
            writer.write(self.folder.write_particles, folder, job.particles, next_state)
        classes.handicap = np.zeros(before.handicap.shape)
        for c, value in shell_values.items():
            for half in HALVES:
                inside = job.particles.half == half
                gain = self._noise_gain(value, held_in[c] * inside, aligned.held_weight, aligned.held_power, k_max)
                classes.handicap[c, inside] = gain[inside]
        was = _of_class(before.rotations, before.shifts_angst, best)
        angle_change = angle_modulo_deg(was.rotations, poses.rotations, settings.symmetry)[usable]
        shift_change = np.linalg.norm(was.shifts_angst - poses.shifts_angst, axis=1)[usable]
        top = best_resolved(reached)
        compared = state.iteration > 0  # before the first iteration nobody has a class
        noise_now = self.passes.noise_facts(noise, state.k_max)
        record: dict[str, Any] = {
            "number": number,
            "resolution_angst": finite_or_none(top.crossing.resolution_angst) if top.crossing is not None else None,
            "increment_deg": first_increment_deg(job, plan),
            "band_angst": job.grid.binned_box_size * job.grid.binned_pixel_size_angst / state.k_max,
            "angle_change_deg": float(np.median(angle_change)),
            "shift_change_angst": float(np.median(shift_change)),
            "seconds": time.perf_counter() - begun,
            "angle_sigma_deg": float(np.median(next_state.angle_sigma_deg[usable])),
            "shift_sigma_angst": float(np.median(next_state.shift_sigma_angst[usable])),
            "class_change": float((classes.numbers != before.numbers)[usable].mean()) if compared else None,
            "noise": noise_now,
            "classes": [class_record(result) for result in reached],
            "left_out": None if included is None else int(np.sum(usable & ~included)),
        }
        record["settled"] = has_settled(record, state.history)
        next_state.history = [*state.history, record]
        next_state.gains = {half: tuple(model.gain for model in noise[half]) for half in HALVES}
        if settings.adaptive:
            modulo = settings.symmetry if settings.relax_symmetry is None else settings.relax_symmetry  # another copy needs no wider search
            adapt(job, next_state, angle_modulo_deg(was.rotations, poses.rotations, modulo)[usable], shift_change)
        self.folder.write_state(next_state)
        self.folder.event("iteration", **record)
        _log.info(
            "iteration %d: %s; %sband %.1f A, median change %.2f degrees %.2f A, noise: %s, %.1f s",
            number,
            "; ".join(class_text(result) for result in reached),
            "" if record["class_change"] is None else f"{100 * record['class_change']:.1f} % changed class, ",
            record["band_angst"],
            record["angle_change_deg"],
            record["shift_change_angst"],
            " / ".join(noise_line(facts) for facts in noise_now.values()),
            record["seconds"],
        )
        if included is not None:
            _log.info(
                "iteration %d: %s left out of the averages (--keep-best %g, of each class and half-set)",
                *(number, plural(record["left_out"], "particle"), settings.keep_best_percent),
            )
        return next_state, self._result(reached)

    def _signal_shares(self, reached: list[ClassResult], shares: NDArray[np.float64]) -> dict[int, NDArray[np.float64]]:
        """Share of signal in the shells of each class's half-maps (by class, from 0), all with one signal-to-noise ratio per particle.

        Filtered by its own FSC alone, a smaller class would lose what it has in common with the others, then particles, and so on.
        """
        alive = {result.number - 1: result for result in reached if result.fsc is not None}
        held = {c: 0.5 * float(shares[c].sum()) for c in alive}
        ratio: NDArray[np.float64] = np.zeros(1)
        last = 0
        for result in alive.values():
            assert result.fsc is not None and result.crossing is not None
            own = np.clip(np.asarray(result.fsc.corrected, np.float64), 0.0, 0.999)
            own[0] = own[1]
            ratio = ratio + own / (1.0 - own)
            last = max(last, result.crossing.shell + 1 if result.crossing.crossed else len(own))
        ratio /= sum(held.values())
        values = {}
        for c in alive:
            value = np.clip(held[c] * ratio / (1.0 + held[c] * ratio), 1e-3, 0.999)
            value[last:] = 1e-3
            values[c] = value
        return values

    def _average(
        self,
        name: str,
        state: RunState,
        classes: ClassState,
        c: int,
        held: NDArray[np.float64],
        noise: dict[int, NoiseModels],
        usable: NDArray[np.bool_],
        writer: FileWriter,
    ) -> tuple[ClassResult, dict[int, NDArray[np.float32]]]:
        """Half-maps and FSC of one class, and maps for its references; an empty one keeps its references and gets no maps.

        `held` (n,) is how much of each particle goes into them.
        """
        job, half_of = self.job, self.job.particles.half
        folder = self.folder.iteration_folder(state.iteration + 1)
        mine = (classes.numbers == c + 1) & (held > 0)
        counts = (int(mine[half_of == 1].sum()), int(mine[half_of == 2].sum()))
        share = float(classes.shares[c].sum() / max(int(usable.sum()), 1))
        # shares that add up to a particle may be of many: what counts is how many there are
        if min(int((held[half_of == half] > 0).sum()) for half in HALVES) < _LEAST_PARTICLES or min(counts) < _LEAST_PARTICLES:
            _log.warning("class %d has %d + %d particles: it gets no maps, and its references stay", c + 1, *counts)
            for file in self.maps.references(state.iteration, prefix(c)).values():
                shutil.copyfile(file.path, folder / file.path.name)
            return ClassResult(c + 1, counts, share, None, None), {}
        poses = Poses(classes.rotations[c], classes.shifts_angst[c])
        poses, sums, apart = self.frame.averages(f"{name}: class {c + 1}", poses, noise, held)
        classes.rotations[c], classes.shifts_angst[c] = poses.rotations, poses.shifts_angst
        half_maps = self.maps.half_maps(sums)
        fsc = self.maps.fsc(half_maps)
        writer.write(self.folder.write_maps, folder, half_maps, fsc, job.settings.fsc_criterion, prefix(c))
        rough = _rough_share(fsc)
        volumes = {half: reconstruct(sums[half], job.grid.binned_box_size, rough / (1.0 - rough)) for half in HALVES}
        writer.write(write_volume, folder / f"{prefix(c)}average.mrc", Volume(self.maps.average(sums), fsc.pixel_size_angst))
        self.folder.event("class", iteration=state.iteration + 1, number=c + 1, halves_apart=apart, randomised_from=fsc.randomised_from_shell)
        return ClassResult(c + 1, counts, share, fsc, self.maps.crossing(fsc)), volumes

    def _next_state(
        self,
        state: RunState,
        aligned: ClassesAligned,
        classes: ClassState,
        poses: Poses,
        best: NDArray[np.int64],
        included: NDArray[np.bool_] | None,
        number: int,
        k_max: float,
    ) -> RunState:
        """Per particle what its class says."""
        rows = np.arange(len(best))
        finite = np.isfinite(aligned.scores[best, rows])

        def own(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.where(finite, np.where(finite, values[best, rows], 0.0), np.nan)

        return replace(
            state,
            iteration=number,
            poses=poses,
            k_max=k_max,
            scores=own(aligned.scores),
            angle_sigma_deg=own(aligned.angle_sigma_deg),
            shift_sigma_angst=own(aligned.shift_sigma_angst),
            log_likelihood=own(aligned.log_likelihood),
            margin=None,
            included=included,
            bad=dict(self.passes.bad),
            classes=classes,
        )

    # -- results -----------------------------------------------------------------------------------------------------

    def _result(self, reached: list[ClassResult]) -> RunResult:
        top = best_resolved(reached)
        assert top.fsc is not None and top.crossing is not None
        halves = sum(result.half_counts[0] for result in reached), sum(result.half_counts[1] for result in reached)
        return RunResult(top.fsc, top.crossing, dict(self.passes.bad), halves, classes=tuple(reached))

    def stored_result(self, state: RunState) -> RunResult:
        """Of a run that was stopped between its last iteration and its end."""
        assert state.classes is not None
        folder = self.folder.iteration_folder(state.iteration)
        reached = []
        for record in state.history[-1]["classes"]:
            start = prefix(record["number"] - 1)
            fsc = self.maps.fsc(self._half_maps_of(state.iteration, start)) if (folder / f"{start}average.mrc").exists() else None
            counts = tuple(record["half_counts"])
            reached.append(ClassResult(record["number"], counts, record["share"], fsc, None if fsc is None else self.maps.crossing(fsc)))
        return self._result(reached)

    def finish(self, state: RunState, result: RunResult) -> None:
        """Writes the results at the top of the folder: the list, the mask, and a folder for each class."""
        job, folder = self.job, self.folder.iteration_folder(state.iteration)
        for reached in result.classes:
            if reached.fsc is None:
                continue
            names = (f"{prefix(reached.number - 1)}{name}.mrc" for name in ("half1", "half2", "average"))
            half1, half2, average = (read_volume(folder / name).data for name in names)
            self.folder.write_averages(self.folder.class_folder(reached.number), (half1, half2), average, reached.fsc, job.settings.fsc_criterion)
        write_volume(self.folder.path / "mask.mrc", Volume(job.mask, job.grid.binned_pixel_size_angst))
        self.folder.write_particles(self.folder.path, job.particles, state)


def _rough_share(fsc: FSCCurve) -> NDArray[np.float64]:
    """Share of signal that a map is first divided with; what is left to do then is a factor for each shell."""
    value = np.clip(np.asarray(fsc.corrected, np.float64), 0.1, 0.999)
    value[0] = value[1]
    return value


def best_resolved(reached: list[ClassResult]) -> ClassResult:
    """The class whose FSC goes farthest; the first of equals."""
    return max(reached, key=lambda result: -1 if result.crossing is None else result.crossing.shell)


def class_doubts(reached: Sequence[ClassResult]) -> list[str]:
    """A line for each class that is empty, or that holds other shares of the halves than chance would give."""
    lines = []
    wholes = [max(sum(result.half_counts[half] for result in reached), 1) for half in (0, 1)]
    for result in reached:
        first, second = (count / whole for count, whole in zip(result.half_counts, wholes, strict=True))
        share = sum(result.half_counts) / sum(wholes)
        chance = math.sqrt(share * (1.0 - share) * sum(1.0 / whole for whole in wholes))
        if result.fsc is None:
            lines.append(f"class {result.number} has {result.half_counts[0]} + {result.half_counts[1]} particles in the half-sets, too few for maps")
        elif abs(first - second) > _UNLIKE * chance:
            lines.append(
                f"class {result.number} holds {100 * first:.0f} % of half-set 1 and {100 * second:.0f} % of half-set 2, farther apart than by chance:"
                " it is not the same class in both halves"
            )
    return lines


def class_record(result: ClassResult) -> dict[str, Any]:
    """For history, summary and report."""
    return {
        "number": result.number,
        "half_counts": list(result.half_counts),
        "share": result.share,
        "resolution_angst": finite_or_none(result.crossing.resolution_angst) if result.crossing is not None and result.crossing.shell > 0 else None,
    }


def class_text(result: ClassResult) -> str:
    """For people."""
    record = class_record(result)
    where = "no resolution" if record["resolution_angst"] is None else f"{record['resolution_angst']:.1f} A"
    return f"class {result.number} {100 * result.share:.0f} % ({result.half_counts[0]} + {result.half_counts[1]}) {where}"


def _counts_text(counts: NDArray[np.float64]) -> str:
    return " + ".join(str(int(count)) for count in counts) + " " + plural(int(counts.sum()), "particle").split(" ", 1)[1]


def _one_hot(numbers: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Shares (c, n) of classes (n,) from 0; -1 has none."""
    return (numbers[None] == np.arange(count)[:, None]).astype(np.float64)


def _in_maps(shares: NDArray[np.float64], included: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Shares (c, n) of the particles that averages are made of (n,); those left out by score have a class, but no part in its maps."""
    return shares if included is None else shares * included


def _of_class(rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64], best: NDArray[np.int64]) -> Poses:
    """Each particle's pose in its class."""
    rows = np.arange(len(best))
    return Poses(rotations[best, rows], shifts_angst[best, rows])
