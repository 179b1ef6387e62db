"""Maps of the loop: from sums to half-maps, their FSC, and the references that the next iteration compares with."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .averaging import merge, reconstruct
from .backends.protocols import WeightedSum
from .errors import InputError
from .execution.tasks import ReferenceFile, array_digest, write_reference
from .file_writer import FileWriter
from .job import Job
from .passes import HALVES
from .resolution import Crossing, find_crossing, half_map_fsc
from .results import RunFolder
from .values import FSCCurve


class ReferenceMaps:
    """Makes and keeps the maps of one job.

    Parameters
    ----------
    job : Job
        Its box, mask and pixel size.
    folder : RunFolder
        Where the references of each iteration lie.
    """

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self.job, self.folder = job, folder
        self._written: dict[Path, ReferenceFile] = {}

    def masked(self, volume: NDArray[np.float32]) -> NDArray[np.float32]:
        """Under the mask, without the level around it: the same rule as for particles, so that both hold the mask's own transform alike."""
        mask = self.job.mask
        outside = mask < 0.01
        if not outside.any():
            outside = np.ones_like(outside)
        mean = float(volume[outside].mean(dtype=np.float64))
        return ((volume - np.float32(mean)) * mask).astype(np.float32)

    def half_maps(self, sums: dict[int, WeightedSum]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Half-maps by dividing each half\'s sums; (n, n, n) float32 each."""
        n = self.job.grid.binned_box_size
        return reconstruct(sums[1], n), reconstruct(sums[2], n)

    def average(self, sums: dict[int, WeightedSum]) -> NDArray[np.float32]:
        """The map of all particles: one division of both halves' sums, which is less noisy than the mean of two divisions.

        The sums are used up: those of half 1 become those of both.
        """
        return reconstruct(merge([sums.pop(1), sums.pop(2)]), self.job.grid.binned_box_size)

    def fsc(self, half_maps: tuple[NDArray[np.float32], NDArray[np.float32]]) -> FSCCurve:
        """FSC of two half-maps under the run\'s mask, corrected by randomised phases."""
        return half_map_fsc(*half_maps, self.job.grid.binned_pixel_size_angst, self.job.mask, self.job.mask_name)

    def crossing(self, fsc: FSCCurve) -> Crossing:
        """Where the corrected curve falls below the run\'s criterion."""
        return find_crossing(fsc.corrected, fsc.box_size, fsc.pixel_size_angst, self.job.settings.fsc_criterion)

    def next_band(self, k_max: float, fsc: FSCCurve, ceiling: float = math.inf) -> float:
        """A little beyond the resolution reached, never back: what lies beyond it is weighted down by the filter."""
        return min(self.job.k_limit, ceiling, max(k_max, float(self.crossing(fsc).shell + 3)))

    def signal_share(self, fsc: FSCCurve) -> NDArray[np.float64]:
        """Share of signal in a half-map's shells, which its posterior mean keeps: the corrected FSC up to the resolution, then next to nothing."""
        crossing = self.crossing(fsc)
        value = np.clip(fsc.corrected, 1e-3, 0.999)
        value[crossing.shell + 1 if crossing.crossed else len(value) :] = 1e-3
        value[0] = value[1]
        return np.asarray(value, np.float64)

    def write_references(self, folder: Path, sums: dict[int, WeightedSum], fsc: FSCCurve, writer: FileWriter) -> None:
        """References of the next iteration: posterior means with the signal-to-noise ratio of the corrected FSC, each from its own half."""
        value = self.signal_share(fsc)
        for half in HALVES:
            volume = self.masked(reconstruct(sums[half], self.job.grid.binned_box_size, value / (1.0 - value)))
            self.write_reference(folder / f"reference{half}.npy", volume, writer)

    def write_reference(self, path: Path, volume: NDArray[np.float32], writer: FileWriter) -> None:
        """Writes one, beside the computing, and remembers it."""
        self._written.pop(path, None)

        def write() -> None:
            self._written[path] = write_reference(path, volume)

        writer.write(write)

    def references(self, iteration: int, prefix: str = "") -> dict[int, ReferenceFile]:
        """Reference files that an iteration left."""
        folder = self.folder.iteration_folder(iteration)
        files = {half: folder / f"{prefix}reference{half}.npy" for half in HALVES}
        if all(path in self._written for path in files.values()):
            return {half: self._written[path] for half, path in files.items()}
        try:
            return {half: ReferenceFile(path, array_digest(np.load(path))) for half, path in files.items()}
        except (OSError, ValueError, EOFError):
            raise InputError(f"{folder}: expected the references of iteration {iteration}, found them missing or damaged") from None
