"""The frame that the two halves share: six numbers of their relative motion (docs/adr/0007-halves-share-a-frame.md)."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from .averaging import move_frame, relative_motion
from .backends.protocols import WeightedSum
from .noise import NoiseModels
from .passes import Passes
from .reference_maps import ReferenceMaps
from .schedule import within_limits
from .settings import AlignSettings
from .symmetry import free_motion
from .values import Poses

_log = logging.getLogger("numba_glocal")

_FRAME_BAND = 12.0
_SMALL_MOTION_VOXELS = 0.02


class CommonFrame:
    """Averages of one job in a common frame.

    Parameters
    ----------
    passes : Passes
    maps : ReferenceMaps
    """

    def __init__(self, passes: Passes, maps: ReferenceMaps) -> None:
        self.passes, self.maps = passes, maps
        self._symmetry = passes.job.settings.symmetry

    def averages(
        self,
        name: str,
        poses: Poses,
        noise: dict[int, NoiseModels],
        shares: NDArray[np.float64] | None = None,
        included: NDArray[np.bool_] | None = None,
    ) -> tuple[Poses, dict[int, WeightedSum], tuple[float, float]]:
        """Sums of both halves in one frame: each gives way by half of their relative motion, as far as their symmetry leaves it free.

        Parameters
        ----------
        name : str
            Of the stage.
        poses : Poses
        noise : dict of half to NoiseModel
        shares : (n,) float64, optional
        included : (n,) bool, optional
            See `passes.Passes.sums`. The poses of all particles move, whatever is in the averages.

        Returns
        -------
        poses : Poses
        sums : dict of half to WeightedSum
        apart : (float, float)
            How far the halves were apart, degrees and Angstrom.
        """
        job = self.passes.job
        n, pixel = job.grid.binned_box_size, job.grid.binned_pixel_size_angst
        sums = self.passes.sums(f"{name}: averages", poses, noise, shares=shares, included=included)
        if not np.any(free_motion(np.ones(3), np.ones(3), self._symmetry)):
            return poses, sums, (0.0, 0.0)
        half_maps = self.maps.half_maps(sums)
        motion = relative_motion(*half_maps, job.mask, min(_FRAME_BAND, job.k_limit))
        rotvec, shift_voxels = free_motion(*motion, self._symmetry)
        angle_deg, distance = float(np.rad2deg(np.linalg.norm(rotvec))), float(np.linalg.norm(shift_voxels))
        apart = angle_deg, distance * pixel
        if angle_deg > 15.0 or distance > 0.15 * n:
            _log.warning("the halves' relative motion (%.1f degrees, %.1f A) is not believed", *apart)
            return poses, sums, apart
        if np.linalg.norm(rotvec) * job.radius_voxels + distance < _SMALL_MOTION_VOXELS:
            return poses, sums, apart
        rotations, shifts = poses.rotations.copy(), poses.shifts_angst.copy()
        for half, share in ((1, -0.5), (2, 0.5)):
            rows = np.flatnonzero(job.particles.half == half)
            moved = move_frame(poses.take(rows), rotvec, shift_voxels * pixel, share)
            rotations[rows], shifts[rows] = moved.rotations, moved.shifts_angst
        assert isinstance(job.settings, AlignSettings)
        poses = within_limits(Poses(rotations, shifts), self.passes.anchors, job.settings)
        return poses, self.passes.sums(f"{name}: averages, one frame", poses, noise, shares=shares, included=included), apart
