"""Soft masks: sphere, cylinder, threshold with dilation; and the check a mask file must pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from .errors import SettingsError, VolumeError

_OVERSHOOT = 1e-3
"""Masks that other programs resampled reach a little below 0 or above 1; this much is clipped, more is refused."""


def soft_edge(distance_voxels: NDArray[Any], soft_edge_voxels: float) -> NDArray[np.float32]:
    """Raised cosine that falls from 1 at distance 0 to 0 at distance `soft_edge_voxels`; 1 where the distance is negative."""
    if not soft_edge_voxels >= 0:
        raise SettingsError(f"soft edge of a mask: expected 0 voxels or more, found {soft_edge_voxels}")
    if soft_edge_voxels < 1e-3:
        return (distance_voxels <= 0).astype(np.float32)
    return (0.5 + 0.5 * np.cos(np.pi * np.clip(distance_voxels / soft_edge_voxels, 0.0, 1.0))).astype(np.float32)


def spherical_mask(box_size: int, radius_voxels: float, soft_edge_voxels: float = 5.0, centre: Sequence[float] | None = None) -> NDArray[np.float32]:
    """A sphere with a raised-cosine edge outside its radius.

    Parameters
    ----------
    box_size : int
        Edge n of the box in voxels.
    radius_voxels : float
        The mask is 1 up to here.
    soft_edge_voxels : float
        Width of the edge; the mask is 0 from ``radius + soft_edge`` on.
    centre : (x, y, z), optional
        In voxels; the box's centre ``n // 2`` by default.

    Returns
    -------
    (n, n, n) float32
        Indexed ``[z, y, x]``, values 0..1.

    Raises
    ------
    SettingsError
        Radius not positive, or box not positive.
    """
    _positive(box_size=box_size, radius_voxels=radius_voxels)
    x, y, z = _offsets(box_size, centre)
    return soft_edge(np.sqrt(x**2 + y**2 + z**2) - radius_voxels, soft_edge_voxels)


@lru_cache(maxsize=4)
@lru_cache(maxsize=4)
def sphere_mean_square(box_size: int, radius_voxels: float, soft_edge_voxels: float) -> float:
    """Mean over the box of a soft sphere's square: what a log-likelihood of data under it must be multiplied by."""
    return float((spherical_mask(box_size, radius_voxels, soft_edge_voxels).astype(np.float64) ** 2).mean())


def outside_sphere(box_size: int, radius_voxels: float) -> tuple[NDArray[np.float32], int]:
    """What lies outside a sphere, as flat weights 0 and 1, and the number of voxels; all of the box where the sphere fills it.

    Returns
    -------
    (n^3,) float32, int
    """
    outside = spherical_mask(box_size, max(radius_voxels, 1.0), 0.0) < 0.5
    if outside.mean() <= 0.05:
        outside = np.ones_like(outside)
    return outside.ravel().astype(np.float32), int(outside.sum())


def cylinder_mask(
    box_size: int,
    radius_voxels: float,
    height_voxels: float,
    soft_edge_voxels: float = 5.0,
    centre: Sequence[float] | None = None,
) -> NDArray[np.float32]:
    """A cylinder along z with a raised-cosine edge outside its surface.

    Parameters
    ----------
    box_size : int
        Edge n of the box in voxels.
    radius_voxels, height_voxels : float
        Radius across z and full height along z of the part that is 1.
    soft_edge_voxels : float
        Width of the edge, measured from the nearest point of the cylinder.
    centre : (x, y, z), optional
        In voxels; the box's centre ``n // 2`` by default.

    Returns
    -------
    (n, n, n) float32
        Indexed ``[z, y, x]``, values 0..1.

    Raises
    ------
    SettingsError
        Radius, height or box not positive.
    """
    _positive(box_size=box_size, radius_voxels=radius_voxels, height_voxels=height_voxels)
    x, y, z = _offsets(box_size, centre)
    across = np.maximum(np.sqrt(x**2 + y**2) - radius_voxels, 0.0)
    along = np.maximum(np.abs(z) - height_voxels / 2.0, 0.0)
    return soft_edge(np.sqrt(across**2 + along**2), soft_edge_voxels)


def threshold_mask(
    volume: NDArray[Any], threshold: float, extend_voxels: float = 3.0, soft_edge_voxels: float = 5.0, largest_part: bool = False
) -> NDArray[np.float32]:
    """Everything at or above a density, grown by a distance, with a raised-cosine edge.

    Parameters
    ----------
    volume : (n, n, n) array
        The map, indexed ``[z, y, x]``.
    threshold : float
        In the map's grey values.
    extend_voxels : float
        Euclidean distance by which the thresholded region grows.
    soft_edge_voxels : float
        Width of the edge outside the grown region.
    largest_part : bool
        Keep only the largest connected part above the threshold: drops dust and neighbours.

    Returns
    -------
    (n, n, n) float32
        Indexed ``[z, y, x]``, values 0..1.

    Raises
    ------
    SettingsError
        Nothing, or everything, reaches the threshold; negative extension.
    """
    if not extend_voxels >= 0:
        raise SettingsError(f"extension of a mask: expected 0 voxels or more, found {extend_voxels}")
    inside = np.asarray(volume) >= threshold
    if not inside.any() or inside.all():
        low, high = float(np.min(volume)), float(np.max(volume))
        what = "no voxel" if not inside.any() else "every voxel"
        raise SettingsError(f"threshold {threshold:g}: {what} of the map reaches it; expected a value within {low:g} .. {high:g}, the map's range")
    if largest_part:
        labels, _ = ndimage.label(inside)
        inside = labels == 1 + np.argmax(np.bincount(labels.ravel())[1:])
    distance = ndimage.distance_transform_edt(~inside)
    return soft_edge(distance - extend_voxels, soft_edge_voxels)


def check_mask(mask: NDArray[Any], box_size: int, name: str) -> NDArray[np.float32]:
    """The mask as float32 within 0..1, or one line that says why it cannot be used.

    Parameters
    ----------
    mask : (n, n, n) array
        As read from a file.
    box_size : int
        Edge of the maps it is meant for.
    name : str
        What to call it in the message: the file's name.

    Returns
    -------
    (n, n, n) float32
        Overshoot of up to 0.001 beyond 0..1 is clipped.

    Raises
    ------
    VolumeError
        Another size, empty, not finite, or values outside 0..1.
    """
    mask = np.asarray(mask)
    if mask.shape != (box_size,) * 3:
        found = " x ".join(str(edge) for edge in mask.shape[::-1])
        raise VolumeError(f"{name}: expected a mask of {box_size} x {box_size} x {box_size} voxels, the maps' box; found {found}")
    if not np.isfinite(mask).all():
        raise VolumeError(f"{name}: expected finite mask values; found {np.count_nonzero(~np.isfinite(mask))} voxels with NaN or infinity")
    low, high = float(mask.min()), float(mask.max())
    if low < -_OVERSHOOT or high > 1.0 + _OVERSHOOT:
        raise VolumeError(f"{name}: expected mask values within 0 .. 1; found {low:g} .. {high:g}")
    if high <= _OVERSHOOT:
        raise VolumeError(f"{name}: expected a mask with voxels above 0; found an empty one")
    return np.clip(mask, 0.0, 1.0).astype(np.float32)


def mask_offset_voxels(mask: NDArray[np.float32]) -> tuple[float, float]:
    """How far a mask's centre of mass is from the box's centre ``n // 2``, and the diameter of a sphere of its volume; both in voxels.

    Parameters
    ----------
    mask : (n, n, n) float32
        Values 0..1, not all 0.
    """
    volume = float(mask.sum(dtype=np.float64))
    centre = np.array([float(mask.sum(axis=tuple({0, 1, 2} - {axis}), dtype=np.float64) @ np.arange(len(mask))) for axis in range(3)]) / volume
    return float(np.linalg.norm(centre - len(mask) // 2)), 2.0 * (0.75 * volume / np.pi) ** (1.0 / 3.0)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SettingsError(f"mask: expected a positive {name.replace('_', ' ')}; found {value}")


def _offsets(box_size: int, centre: Sequence[float] | None) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Distances from the centre along x, y and z, shaped to broadcast to [z, y, x]."""
    cx, cy, cz = (box_size // 2,) * 3 if centre is None else centre
    grid = np.arange(box_size, dtype=np.float32)
    return (grid - np.float32(cx))[None, None, :], (grid - np.float32(cy))[None, :, None], (grid - np.float32(cz))[:, None, None]
