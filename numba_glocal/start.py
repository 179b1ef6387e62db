"""Before the first iteration: start references, their grey scale and contrast, and whether they have the symmetry asked for."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .alignment import SearchPlan
from .errors import SettingsError
from .execution.tasks import AlignTask, ReferenceFile, write_reference
from .file_writer import FileWriter
from .filters import lowpass
from .hand import check_hand
from .io import write_volume
from .noise import GroupResiduals, NoiseModels, add_residuals
from .passes import HALVES, Passes
from .reference_maps import ReferenceMaps
from .results import ClassState, RunState
from .schedule import first_search, prior_widths, search_plan
from .settings import AlignSettings, AverageSettings
from .symmetry import symmetrised, symmetry_agreement
from .values import Volume

_log = logging.getLogger("numba_glocal")

_SCALE_PARTICLES = 64
_GLOBAL_SCALE_PARTICLES = 24
NOTHING = 1e-12
"""Factor on a reference whose residual is to be the whole power: a first guess of the noise that needs no poses."""
# Of a map with its symmetrised self, without its round part. Measured on made GroEL: start maps 1.00 (wrong groups 0.06, C14 for C7 0.4 to 0.6);
# averages of 60 particles 0.66 at rough poses and 0.83 at true ones (wrong groups 0.15 to 0.23).
_LEAST_AGREEMENT_OF_MAP, _LEAST_AGREEMENT_OF_AVERAGE = 0.8, 0.5


class Start:
    """From the list and the start map, if there is one, to the state that the first iteration takes.

    Parameters
    ----------
    passes : Passes
    maps : ReferenceMaps
    """

    def __init__(self, passes: Passes, maps: ReferenceMaps) -> None:
        self.passes, self.maps, self.job, self.folder = passes, maps, passes.job, passes.folder
        self._symmetry = self.job.settings.symmetry

    def state(self) -> RunState:
        """Poses of the list, start references in ``iter_000``."""
        job, settings = self.job, self.job.settings
        assert isinstance(settings, AlignSettings)
        count = len(job.particles)
        nothing = np.full(count, np.nan)
        plan = first_search(job)
        state = RunState(
            0,
            job.particles.poses,
            plan.k_max,
            plan.increment_deg,
            plan.shift_radius_angst,
            nothing,
            nothing.copy(),
            nothing.copy(),
            nothing.copy(),
            {},
            [],
        )
        folder = self.folder.iteration_folder(0)
        folder.mkdir(parents=True, exist_ok=True)
        if job.further_start_maps:
            return self._of_classes(state, folder)
        if job.start_map is not None:
            state.symmetry_agreement = self._agreement(job.start_map, "the start map")
            state = replace(state, scale=self._write_scaled(state, folder, job.start_map, settings.references[0]))
        else:
            if self._symmetry != "C1":
                state.symmetry_agreement = self.agreement_of_poses(self.passes.flat_noise(), settings.initial_lowpass_angst)
            sums = self.passes.sums("start averages", state.poses, self.passes.flat_noise())
            half_maps = self.maps.half_maps(sums)
            fsc = self.maps.fsc(half_maps)
            with FileWriter() as writer:
                writer.write(self.folder.write_maps, folder, half_maps, fsc, settings.fsc_criterion)
                self.maps.write_references(folder, sums, fsc, writer)
            state = replace(state, k_max=self.maps.next_band(state.k_max, fsc, ceiling=plan.k_max))
        self._show_start(folder)
        return state

    def _write_scaled(self, state: RunState, folder: Path, start_map: NDArray[np.float32], path: str, prefix: str = "") -> float:
        """A start map as the reference of both halves, in grey units of the particles; returns the factor."""
        masked = self.maps.masked(symmetrised(start_map, self._symmetry))
        if not np.any(masked):
            raise SettingsError(f"{path}: nothing is left of it under the mask and low-pass")
        if isinstance(self.job.settings, AlignSettings) and self.job.settings.check_hand:
            check_hand(self.passes, state, masked)
        files = {half: write_reference(folder / f"{prefix}reference{half}.npy", masked) for half in HALVES}
        scale = self._start_scale(state, files, path)
        for half in HALVES:
            write_reference(folder / f"{prefix}reference{half}.npy", masked * np.float32(scale))
        return scale

    def _of_classes(self, state: RunState, folder: Path) -> RunState:
        """A start map for each class; all particles have the list's poses in each, and no class yet."""
        settings = self.job.settings
        assert isinstance(settings, AlignSettings) and self.job.start_map is not None
        maps = (self.job.start_map, *self.job.further_start_maps)
        agreements = []
        for c, (start_map, path) in enumerate(zip(maps, settings.references, strict=True)):
            _log.info("class %d starts from %s", c + 1, path)
            agreements.append(self._agreement(start_map, f"the start map of class {c + 1}"))
            self._write_scaled(state, folder, start_map, path, f"class{c + 1}_")
            self._show_start(folder, f"class{c + 1}_")
        known = [agreement for agreement in agreements if agreement is not None]
        least = min(known, key=lambda agreement: agreement[1], default=None)
        return replace(state, symmetry_agreement=least, classes=ClassState.same_poses(len(maps), state.poses))

    def _agreement(self, volume: NDArray[np.float32], what: str) -> tuple[float, float] | None:
        """How well a map has the run's symmetry, said in the log."""
        if self._symmetry == "C1":
            return None
        agreement = symmetry_agreement(volume, self.job.mask, self._symmetry)
        _log.info("%s correlates with its %s-symmetrised self by %.3f, without its round part by %.3f", what, self._symmetry, *agreement)
        self.folder.event("symmetry", group=self._symmetry, what=what, correlation=agreement[0], without_round_part=agreement[1])
        return agreement

    def agreement_of_poses(self, noise: dict[int, NoiseModels], lowpass_angst: float | None = None) -> tuple[float, float] | None:
        """The same for the average of the poses as they are, no symmetry imposed; low-passed where its halves end to agree, or as given."""
        sums = self.passes.sums("averages without symmetry", self.job.particles.poses, noise, "C1")
        if lowpass_angst is None:
            lowpass_angst = self.maps.crossing(self.maps.fsc(self.maps.half_maps(sums))).resolution_angst
        average = self.maps.average(sums)
        if math.isfinite(lowpass_angst):
            average = lowpass(average, self.job.grid.binned_pixel_size_angst, lowpass_angst)
        return self._agreement(average, "the average of the given poses")

    def _show_start(self, folder: Path, prefix: str = "") -> None:
        """The start references as maps, to be looked at: one where both halves start from the same."""
        first, second = (np.load(folder / f"{prefix}reference{half}.npy") for half in HALVES)
        maps = {"start_map.mrc": first} if np.array_equal(first, second) else {"start_map1.mrc": first, "start_map2.mrc": second}
        for name, data in maps.items():
            write_volume(folder / f"{prefix}{name}", Volume(data, self.job.grid.binned_pixel_size_angst))

    def _start_scale(self, state: RunState, files: dict[int, ReferenceFile], path: str) -> float:
        """Grey units of the particles over those of the start map at `path`, from a search of some particles; refuses inverted contrast.

        The same particles are also compared with the negative of the map: where that matches clearly better, the contrast is wrong.
        """
        job, settings = self.job, self.job.settings
        assert isinstance(settings, AlignSettings)
        scored = {}
        looked_at = _GLOBAL_SCALE_PARTICLES if settings.global_search else _SCALE_PARTICLES
        rows = {half: np.flatnonzero(job.particles.half == half)[:looked_at] for half in HALVES}
        some_rows = np.sort(np.concatenate(list(rows.values())))
        some = job.particles.take(some_rows)
        chunks = [(half, chunk) for half in HALVES for chunk in self.passes.chunks(some, some.poses, half)]
        plan = search_plan(self.job, state)

        def tasks(sign: float, noise: dict[int, NoiseModels], used_plan: SearchPlan | None) -> list[AlignTask]:
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
                    replace(prior_widths(settings), angle_deg=math.inf, shift_angst=math.inf),  # ncc is no likelihood
                )
                for half, chunk in chunks
            ]

        power: dict[int, GroupResiduals] = {half: {} for half in HALVES}
        # with a vanishing reference the residual is the whole power: a first guess of the noise
        for task, result in self.passes.results_of_some("first look at the noise", tasks(NOTHING, self.passes.flat_noise(), None)):
            self.passes.note_rows([int(some_rows[task.chunk.rows[index]]) for index, _ in result.bad], task, result.bad)
            add_residuals(power[task.chunk.half], result.residuals)
        noise = self.passes.fit_noise(power, state.k_max)
        numerator = denominator = 0.0
        for sign in (1.0, -1.0):
            values = []
            title = "grey scale of the start map" if sign > 0 else "contrast of the start map"
            for _, result in self.passes.results_of_some(title, tasks(sign, noise, plan)):
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
                f"{path}: the particles match its negative better (mean correlation {scored[-1.0].mean():.3f} against"
                f" {scored[1.0].mean():.3f}): the contrast is inverted; {'leave out' if settings.invert_contrast else 'use'} --invert-contrast"
            )
        scale = numerator / max(denominator, 1e-30)
        if not scale > 0:
            raise SettingsError(f"{path}: no particle matches it; is it the right map, at the right pixel size?")
        _log.info("grey scale of the start map %.4g (correlation %.3f; its negative %.3f)", scale, scored[1.0].mean(), scored[-1.0].mean())
        return scale


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
