"""Rotations and shifts to try: a ball of small ones around a pose, or an even cover of all rotations."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from .errors import SettingsError
from .geometry import rotvec_to_matrix

_PHI = math.sqrt(2.0)
_PSI = 1.533751168755204288118041
"""The two incommensurate rates of the super-Fibonacci spiral; psi is the positive root of psi^4 = psi + 4."""


def local_rotations(increment_deg: float, reach_shells: int) -> NDArray[np.float64]:
    """Small rotations in a ball around the identity, all different, sorted by angle, the identity first.

    The rotation vectors (axis times angle) form a cubic grid, so that neighbours are about one increment apart in every
    direction.

    Parameters
    ----------
    increment_deg : float
        Distance between neighbours.
    reach_shells : int
        Radius of the ball in increments; 0 is the identity alone.

    Returns
    -------
    (a, 3, 3) float64

    Raises
    ------
    SettingsError
        Increment not positive, reach negative, or a ball that reaches 180 degrees, where rotations would repeat.
    """
    if not increment_deg > 0 or not math.isfinite(increment_deg):
        raise SettingsError(f"angular increment: expected more than 0 degrees; found {increment_deg}")
    if reach_shells < 0:
        raise SettingsError(f"angle shells: expected 0 or more; found {reach_shells}")
    if reach_shells * increment_deg >= 180.0:
        raise SettingsError(
            f"angular search: {reach_shells} shells of {increment_deg:g} degrees reach 180 degrees or more; expected less (use a global search)"
        )
    vectors = _ball(float(reach_shells), 1.0) * math.radians(increment_deg)
    return rotvec_to_matrix(vectors)


def shift_ball(radius_voxels: float, step_voxels: float) -> NDArray[np.float64]:
    """Shifts on a cubic grid within a ball, sorted by length, zero first.

    Parameters
    ----------
    radius_voxels : float
        No shift is longer than this.
    step_voxels : float
        Grid spacing.

    Returns
    -------
    (t, 3) float64
        ``(x, y, z)`` in voxels.

    Raises
    ------
    SettingsError
        Radius negative or step not positive.
    """
    if not radius_voxels >= 0 or not math.isfinite(radius_voxels):
        raise SettingsError(f"shift range: expected 0 or more; found {radius_voxels}")
    if not step_voxels > 0:
        raise SettingsError(f"shift step: expected more than 0; found {step_voxels}")
    return _ball(radius_voxels, step_voxels)


def uniform_rotations(count: int) -> NDArray[np.float64]:
    """Rotations that cover all orientations evenly: a super-Fibonacci spiral (Alexa, CVPR 2022).

    Parameters
    ----------
    count : int
        Any number from 1 on.

    Returns
    -------
    (count, 3, 3) float64
    """
    if count < 1:
        raise SettingsError(f"number of rotations: expected 1 or more; found {count}")
    position = np.arange(count) + 0.5
    inner, outer = np.sqrt(position / count), np.sqrt(1.0 - position / count)
    alpha, beta = 2.0 * np.pi * position / _PHI, 2.0 * np.pi * position / _PSI
    x, y, z, w = inner * np.sin(alpha), inner * np.cos(alpha), outer * np.sin(beta), outer * np.cos(beta)
    rotations = np.empty((count, 3, 3))
    rotations[:, 0] = np.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], axis=-1)
    rotations[:, 1] = np.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], axis=-1)
    rotations[:, 2] = np.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], axis=-1)
    return rotations


def count_for_increment(increment_deg: float) -> int:
    """How many rotations cover all orientations about `increment_deg` apart: the volume of SO(3), 8 pi^2, over a cell's."""
    if not 0 < increment_deg <= 180:
        raise SettingsError(f"angular increment: expected more than 0 and at most 180 degrees; found {increment_deg}")
    return max(1, math.ceil(8.0 * math.pi**2 / math.radians(increment_deg) ** 3))


def rotations_for_increment(increment_deg: float) -> NDArray[np.float64]:
    """An even cover of all rotations, neighbours about `increment_deg` apart; (a, 3, 3) float64."""
    return uniform_rotations(count_for_increment(increment_deg))


def distinct_rotations(rotations: NDArray[np.float64], tolerance_deg: float = 0.01) -> NDArray[np.float64]:
    """Rotations (a, 3, 3) without those that repeat an earlier one."""
    quaternions = Rotation.from_matrix(rotations).as_quat()
    tree = cKDTree(np.concatenate([quaternions, -quaternions]))  # q and -q are one rotation
    pairs = tree.query_pairs(2.0 * math.sin(math.radians(tolerance_deg) / 4.0), output_type="ndarray") % len(rotations)
    later = np.maximum(pairs[:, 0], pairs[:, 1])[pairs[:, 0] != pairs[:, 1]]
    return np.delete(np.asarray(rotations, np.float64), np.unique(later), axis=0)


def spacing_deg(rotations: NDArray[np.float64]) -> float:
    """Median angle in degrees from each of (a, 3, 3) distinct rotations to its nearest neighbour; 180 for one alone."""
    if len(rotations) < 2:
        return 180.0
    quaternions = Rotation.from_matrix(rotations).as_quat()
    distance, _ = cKDTree(np.concatenate([quaternions, -quaternions])).query(quaternions, k=2)
    return float(np.median(np.degrees(4.0 * np.arcsin(np.clip(distance[:, 1] / 2.0, 0.0, 1.0)))))


def _ball(radius: float, step: float) -> NDArray[np.float64]:
    """Points of a cubic grid within a ball, (n, 3), sorted by length, then x, y, z: the order never depends on rounding."""
    # a hair wider, so that a radius of three steps holds the third step whatever its last bit
    reach = int(math.floor(radius / step * (1.0 + 1e-12)))
    axis = np.arange(-reach, reach + 1)
    grid = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)
    length2 = (grid**2).sum(axis=1)
    keep = length2 <= (radius / step) ** 2 * (1.0 + 1e-9)
    grid, length2 = grid[keep], length2[keep]
    order = np.lexsort((grid[:, 2], grid[:, 1], grid[:, 0], length2))
    return grid[order] * step
