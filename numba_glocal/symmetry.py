"""Point groups of particles: their rotations about RELION's axes, poses modulo a group, and what a group does to a map.

A group acts on the reference's side: a particle at ``(R, s)`` lies as well at ``(R g, s)`` for every ``g`` (docs/conventions.md, 8).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from .fourier import in_parallel
from .geometry import angle_between_deg, rotvec_to_matrix
from .settings import symmetry_name

_GOLDEN = 0.5 * (1.0 + math.sqrt(5.0))
_SAME = 1e-6
_ROUND_PASSES = 4
"""The mean around an axis is taken from rings a voxel apart: what one pass leaves of it the next ones take."""

# Generators, (axis, fold), of the groups that are not a matter of z and x alone.
_GENERATORS: dict[str, tuple[tuple[tuple[float, float, float], int], ...]] = {
    "T": (((0.0, 0.0, 1.0), 3), ((0.0, math.sqrt(2.0), 1.0), 2)),
    "O": (((0.0, 0.0, 1.0), 4), ((1.0, 1.0, 1.0), 3)),
    "I1": (((1.0, 0.0, 0.0), 2), ((_GOLDEN, 0.0, -1.0), 5), ((0.0, 0.0, 1.0), 2)),
    "I2": (((0.0, 0.0, 1.0), 2), ((1.0, 0.0, _GOLDEN), 5), ((1.0, 0.0, 0.0), 2)),
    "I3": (((0.0, 0.0, 1.0), 5), ((-1.0, 0.0, _GOLDEN), 2)),
    "I4": (((0.0, 0.0, 1.0), 5), ((1.0, 0.0, _GOLDEN), 2)),
}


@lru_cache(maxsize=16)
def group_rotations(name: str) -> NDArray[np.float64]:
    """All rotations of a point group, the identity first.

    Parameters
    ----------
    name : str
        ``C1``, ``Cn`` (axis z), ``Dn`` (and a two-fold axis x), ``T`` (three-fold z), ``O`` (four-fold axes x, y, z), ``I`` or ``I2`` (two-fold
        axes x, y, z, a five-fold one in the xz plane), ``I1``, ``I3``, ``I4``: RELION's axes.

    Returns
    -------
    (g, 3, 3) float64
        Not to be written to.

    Raises
    ------
    SettingsError
        There is no such group.
    """
    name = symmetry_name(name)
    if name[0] in "CD":
        fold = int(name[1:])
        angles = np.arange(fold) * (2.0 * np.pi / fold)
        rotations = rotvec_to_matrix(angles[:, None] * np.array([0.0, 0.0, 1.0]))
        if name[0] == "D":
            rotations = np.concatenate([rotations, rotations @ np.diag([1.0, -1.0, -1.0])])
    else:
        rotations = _closure(_GENERATORS["I2" if name == "I" else name])
    # what is exactly 0 or 1 shall be so: elements that keep the grid are told by it
    whole = np.rint(rotations)
    rotations = np.where(np.abs(rotations - whole) < _SAME, whole, rotations)
    rotations.flags.writeable = False
    return rotations


def _closure(generators: tuple[tuple[tuple[float, float, float], int], ...]) -> NDArray[np.float64]:
    """Every product of rotations about axes by a full turn over their fold."""
    first = [rotvec_to_matrix(np.asarray(axis) / np.linalg.norm(axis) * (2.0 * np.pi / fold)) for axis, fold in generators]
    found = [np.eye(3)]
    for element in found:  # it grows meanwhile
        for generator in first:
            product = element @ generator
            if all(np.abs(product - known).max() > _SAME for known in found):
                found.append(product)
    return np.stack(found)


@lru_cache(maxsize=16)
def grid_factors(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """A group as products ``c h``: few turns ``c``, and those elements ``h`` that carry a cubic grid onto itself.

    Returns
    -------
    turns : (c, 3, 3) float64
        The identity first.
    grid_turns : (h, 3, 3) int64
        Permutations of the axes with signs, the identity first; ``c h`` runs through the group once.
    """
    rotations = group_rotations(name)
    on_grid = [g for g in rotations if np.array_equal(g, np.rint(g))]
    turns: list[NDArray[np.float64]] = []
    for g in rotations:
        if not any(np.abs(c @ h - g).max() < _SAME for c in turns for h in on_grid):
            turns.append(g)
    return np.stack(turns), np.stack(on_grid).astype(np.int64)


def angle_modulo_deg(a: NDArray[Any], b: NDArray[Any], name: str) -> NDArray[np.float64]:
    """Angle in degrees between rotations, each (..., 3, 3), where those that a symmetry makes equal count as equal."""
    angles = angle_between_deg(a, b)
    for g in group_rotations(name)[1:]:
        angles = np.minimum(angles, angle_between_deg(a, np.asarray(b) @ g))
    return angles


def nearest_copy(rotations: NDArray[Any], to: NDArray[Any], name: str) -> NDArray[np.float64]:
    """Of the equal rotations ``R g`` of each of (..., 3, 3) the one that is nearest to `to` (broadcast); the first of equally near ones."""
    rotations = np.asarray(rotations, np.float64)
    best, least = rotations.copy(), angle_between_deg(to, rotations)
    for g in group_rotations(name)[1:]:
        copy = rotations @ g
        angle = angle_between_deg(to, copy)
        nearer = angle < least - 1e-9
        best, least = np.where(nearer[..., None, None], copy, best), np.where(nearer, angle, least)
    return best


def in_asymmetric_unit(rotations: NDArray[Any], name: str) -> NDArray[np.bool_]:
    """Whether each of (..., 3, 3) is the one of its equal rotations ``R g`` that is nearest to the identity: one in as many as the group has."""
    rotations = np.asarray(rotations, np.float64)
    angle = angle_between_deg(np.eye(3), rotations)
    inside = np.ones(angle.shape, bool)
    for g in group_rotations(name)[1:]:
        inside &= angle <= angle_between_deg(np.eye(3), rotations @ g) + 1e-9
    return inside


def free_motion(rotvec_rad: NDArray[np.float64], shift: NDArray[np.float64], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The part of a rigid motion of a map that its symmetry leaves free: all for C1, about and along z for Cn, else nothing."""
    name = symmetry_name(name)
    free = np.ones(3) if name == "C1" else np.array([0.0, 0.0, 1.0 if name[0] == "C" else 0.0])
    return np.asarray(rotvec_rad) * free, np.asarray(shift) * free


def symmetrised(volume: NDArray[Any], name: str) -> NDArray[np.float32]:
    """The mean of a map over its group, by cubic splines; meant for maps without detail near Nyquist.

    Parameters
    ----------
    volume : (n, n, n) array
        About its centre ``n // 2``. What turns in from beyond the box is the mean outside the largest sphere in it.
    name : str

    Returns
    -------
    (n, n, n) float32
    """
    rotations = group_rotations(name)
    data = np.asarray(volume, np.float64)
    if len(rotations) == 1:
        return data.astype(np.float32)
    n = data.shape[0]
    centre = np.full(3, n // 2)
    outside = _squared_radius(n) > (n // 2 - 1) ** 2
    level = float(data[outside].mean())
    coefficients = ndimage.spline_filter(data - level, order=3, mode="constant")
    total = data - level

    def turned(g: NDArray[np.float64]) -> NDArray[np.float64]:
        # vectors are (x, y, z), indices (z, y, x); the group holds g with its inverse
        matrix = g[::-1, ::-1]
        return ndimage.affine_transform(coefficients, matrix, centre - matrix @ centre, order=3, mode="constant", prefilter=False)

    for first in range(1, len(rotations), 4):  # few at a time: a map each
        for part in in_parallel(turned, rotations[first : first + 4]):
            total = total + part
    return (total / len(rotations) + level).astype(np.float32)


def symmetry_agreement(volume: NDArray[Any], mask: NDArray[Any], name: str) -> tuple[float, float]:
    """How well a map has a symmetry: its correlation with its symmetrised self under a mask.

    Parameters
    ----------
    volume, mask : (n, n, n) array
    name : str

    Returns
    -------
    correlation : float
        Of the maps as they are. What is round correlates whatever the symmetry.
    off_axis : float
        Of what is left of both without their mean around the axis z (Cn, Dn) or their mean over spheres (T, O, I): near 1 where the symmetry
        is there, near 0 for another number of subunits or other axes.
    """
    volume, mask = np.asarray(volume, np.float64), np.asarray(mask, np.float64)
    other = symmetrised(volume, name).astype(np.float64)
    about_axis = symmetry_name(name)[0] in "CD"
    whole = _correlation(volume, other, mask)
    for _ in range(_ROUND_PASSES):
        volume, other = volume - _round_part(volume, about_axis), other - _round_part(other, about_axis)
    return whole, _correlation(volume, other, mask)


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64], mask: NDArray[np.float64]) -> float:
    """Pearson's, each voxel weighted by the mask."""
    total = float(mask.sum())
    a, b = a - float((a * mask).sum()) / total, b - float((b * mask).sum()) / total
    power = float((a * a * mask).sum()) * float((b * b * mask).sum())
    return float((a * b * mask).sum()) / math.sqrt(power) if power > 0 else 0.0


def _squared_radius(n: int) -> NDArray[np.int64]:
    squared = (np.arange(n) - n // 2) ** 2
    return squared[:, None, None] + squared[:, None] + squared


def _round_part(volume: NDArray[np.float64], about_axis: bool) -> NDArray[np.float64]:
    """The mean of a map around the axis z, or over spheres: by linear interpolation between rings a voxel apart."""
    n = volume.shape[0]
    z, y, x = np.indices(volume.shape) - n // 2
    radius = np.sqrt(x * x + y * y if about_axis else x * x + y * y + z * z)
    inner = radius.astype(np.int64)
    part = radius - inner
    size = 2 * n
    ring = inner + size * (z + n // 2 if about_axis else 0)
    count = size * (n if about_axis else 1)
    flat, near = ring.ravel(), (1.0 - part).ravel()
    weight = np.bincount(flat, near, count) + np.bincount(flat + 1, 1.0 - near, count)
    total = np.bincount(flat, near * volume.ravel(), count) + np.bincount(flat + 1, (1.0 - near) * volume.ravel(), count)
    profile = total / np.maximum(weight, 1e-12)
    return profile[ring] * (1.0 - part) + profile[ring + 1] * part
