"""Whether the particles have the hand of the start map or that of its mirror image."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .execution.tasks import AlignTask, write_reference
from .filters import mirrored
from .noise import GroupResiduals, NoiseModels, add_residuals
from .passes import HALVES, Passes
from .results import RunState
from .schedule import search_plan
from .settings import AlignSettings

_log = logging.getLogger("numba_glocal")

_PARTICLES = 32
"""Of each half; every one is searched over all orientations, twice."""
_SURE = 3.0


@dataclass(frozen=True, slots=True)
class HandScores:
    """What some particles make of a map and of its mirror image, each at its best pose of all orientations.

    Attributes
    ----------
    as_given, mirrored : (p,) float64
        Correlations.
    """

    as_given: NDArray[np.float64]
    mirrored: NDArray[np.float64]

    @property
    def sure(self) -> float:
        """Mean difference over its standard error; positive where the map as given is the better one."""
        difference = self.as_given - self.mirrored
        if len(difference) < 2:
            return 0.0
        return float(difference.mean() / max(float(difference.std(ddof=1)) / math.sqrt(len(difference)), 1e-12))

    def verdict(self) -> str:
        """One line for a person."""
        better = int(np.count_nonzero(self.as_given > self.mirrored))
        facts = (
            f"mean correlation {self.as_given.mean():.4f} with the start map, {self.mirrored.mean():.4f} with its mirror image;"
            f" {better} of {len(self.as_given)} particles prefer the map as it is ({abs(self.sure):.1f} standard errors)"
        )
        if abs(self.sure) < _SURE:
            return f"hand: not told at this low-pass: {facts}; expected a finer --initial-lowpass, or better particles"
        return f"hand: the particles have {'the hand of the start map' if self.sure > 0 else 'the OTHER hand (see --mirror)'}: {facts}"


def check_hand(passes: Passes, state: RunState, masked: NDArray[np.float32]) -> HandScores:
    """Searches some particles over all orientations, with a map and with its mirror image.

    The given poses do not matter: those of one hand say nothing of the other.

    Parameters
    ----------
    passes : Passes
    state : RunState
        Its band and shift range are searched.
    masked : (n, n, n) float32
        The start map under its mask, on the worked grid.

    Returns
    -------
    HandScores
    """
    job, settings = passes.job, passes.job.settings
    assert isinstance(settings, AlignSettings)
    chosen = []
    for half in HALVES:
        rows = np.flatnonzero(job.particles.half == half)
        chosen.append(rows[:: max(1, math.ceil(len(rows) / _PARTICLES))])
    some_rows = np.sort(np.concatenate(chosen))
    some = job.particles.take(some_rows)
    chunks = [(half, chunk) for half in HALVES for chunk in passes.chunks(some, some.poses, half)]
    # an angle list, and some groups' axes, belong to one hand
    plan = replace(search_plan(job, state), everywhere=True, symmetry="C1", rotations=None, relaxed="C1")
    limit = math.inf if settings.max_shift_angst is None else settings.max_shift_angst
    folder = passes.folder.iteration_folder(0)
    files = {"as given": folder / "hand.npy", "mirrored": folder / "hand_mirrored.npy"}
    references = {
        "as given": write_reference(files["as given"], masked),
        "mirrored": write_reference(files["mirrored"], np.ascontiguousarray(mirrored(masked))),
    }

    def tasks(hand: str, noise: dict[int, NoiseModels], search: bool) -> list[AlignTask]:
        reference = references[hand] if search else replace(references[hand], scale=1e-12)
        return [
            AlignTask(
                chunk,
                job.reader,
                reference,
                job.particle_mask,
                noise[half],
                "ncc",
                job.k_min,
                state.k_max,
                limit,
                plan if search else None,
                job.radius_voxels,
                search,
            )
            for half, chunk in chunks
        ]

    power: dict[int, GroupResiduals] = {half: {} for half in HALVES}
    for task, result in passes.results_of_some("hand: noise", tasks("as given", passes.flat_noise(), False)):
        passes.note_rows([int(some_rows[task.chunk.rows[index]]) for index, _ in result.bad], task, result.bad)
        add_residuals(power[task.chunk.half], result.residuals)
    noise = passes.fit_noise(power, state.k_max)
    scores = {}
    for hand in references:
        found = []
        for _, result in passes.results_of_some(f"hand: {hand}", tasks(hand, noise, True)):
            assert result.estimates is not None
            found.append(result.estimates.scores)
        scores[hand] = np.concatenate(found)
    for path in files.values():
        path.unlink(missing_ok=True)
    good = np.isfinite(scores["as given"]) & np.isfinite(scores["mirrored"])
    result_scores = HandScores(scores["as given"][good], scores["mirrored"][good])
    (_log.warning if result_scores.sure < _SURE else _log.info)(result_scores.verdict())
    passes.folder.event(
        "hand",
        verdict=result_scores.verdict(),
        right=result_scores.sure >= _SURE,
        as_given=float(result_scores.as_given.mean()),
        mirrored=float(result_scores.mirrored.mean()),
        standard_errors=result_scores.sure,
        particles=int(good.sum()),
    )
    return result_scores
