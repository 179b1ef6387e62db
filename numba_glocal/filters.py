"""Filters in Fourier space: raised-cosine low- and high-pass, weights from an FSC, the average one looks at."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import SettingsError
from .fourier import grid_frequencies, irfftn, rfftn
from .resolution import find_crossing
from .values import FSCCurve

EDGE_SHELLS = 4.0
"""Width of the raised cosine; the filter is one half at the given resolution."""


def lowpass(volume: NDArray[Any], pixel_size_angst: float, resolution_angst: float, edge_shells: float = EDGE_SHELLS) -> NDArray[np.float32]:
    """Takes out detail finer than a resolution.

    Parameters
    ----------
    volume : (n, n, n) array
        A map.
    pixel_size_angst : float
        Voxel edge.
    resolution_angst : float
        Where the filter is one half.
    edge_shells : float
        Width of its raised-cosine edge, in Fourier shells.

    Returns
    -------
    (n, n, n) float32

    Raises
    ------
    SettingsError
        The resolution is not positive.
    """
    shell = _shell_of(resolution_angst, volume.shape[0], pixel_size_angst, "low-pass")
    return _apply(volume, _fall(_radius(volume.shape[0]), shell, edge_shells))


def highpass(volume: NDArray[Any], pixel_size_angst: float, resolution_angst: float, edge_shells: float = EDGE_SHELLS) -> NDArray[np.float32]:
    """Takes out everything coarser than a resolution, the mean included; parameters as in `lowpass`."""
    shell = _shell_of(resolution_angst, volume.shape[0], pixel_size_angst, "high-pass")
    passed = 1.0 - _fall(_radius(volume.shape[0]), shell, edge_shells)
    passed[0, 0, 0] = 0.0
    return _apply(volume, passed)


def shell_weights(volume: NDArray[Any], weights: ArrayLike) -> NDArray[np.float32]:
    """Multiplies every Fourier shell by a weight, linear in between; the last weight holds beyond Nyquist.

    Parameters
    ----------
    volume : (n, n, n) array
        A map.
    weights : (n_shells,) array_like
        From shell 0 on.

    Returns
    -------
    (n, n, n) float32
    """
    weights = np.asarray(weights, dtype=np.float64)
    return _apply(volume, np.interp(_radius(volume.shape[0]), np.arange(weights.size), weights))


def figure_of_merit(fsc: ArrayLike) -> NDArray[np.float64]:
    """``sqrt(2 f / (1 + f))`` per shell: the expected correlation of the full average with the truth; 0 where f is not positive."""
    positive = np.nan_to_num(np.clip(np.asarray(fsc, dtype=np.float64), 0.0, 1.0))
    return np.sqrt(2.0 * positive / (1.0 + positive))


def filter_average(average: NDArray[Any], fsc: FSCCurve, criterion: float = 0.143) -> NDArray[np.float32]:
    """The average to look at: shells weighted by their figure of merit, cut at the resolution. Not sharpened.

    Parameters
    ----------
    average : (n, n, n) array
        Unfiltered average of both half-maps.
    fsc : FSCCurve
        Of the half-maps; its corrected curve is used.
    criterion : float
        Where the resolution is read.

    Returns
    -------
    (n, n, n) float32
    """
    crossing = find_crossing(fsc.corrected, fsc.box_size, fsc.pixel_size_angst, criterion)
    radius = _radius(average.shape[0])
    merit = np.interp(radius, np.arange(fsc.corrected.size), figure_of_merit(fsc.corrected))
    edge = min(EDGE_SHELLS, float(crossing.shell))
    return _apply(average, merit * _fall(radius, crossing.shell + 0.5, edge))


def _radius(box_size: int) -> NDArray[np.float64]:
    kz, ky, kx = grid_frequencies(box_size)
    return np.sqrt(kz**2 + ky**2 + kx**2)


def _fall(radius: NDArray[np.float64], shell: float, edge_shells: float) -> NDArray[np.float64]:
    """From 1 to 0 around a shell; a step where the edge has no width."""
    if edge_shells < 1e-3:
        return (radius <= shell).astype(np.float64)
    return 0.5 + 0.5 * np.cos(np.pi * np.clip((radius - shell) / edge_shells + 0.5, 0.0, 1.0))


def _shell_of(resolution_angst: float, box_size: int, pixel_size_angst: float, what: str) -> float:
    if not (resolution_angst > 0 and math.isfinite(resolution_angst)):
        raise SettingsError(f"{what}: expected a resolution above 0 Angstrom; found {resolution_angst}")
    if not pixel_size_angst > 0:
        raise SettingsError(f"{what}: expected a positive pixel size; found {pixel_size_angst}")
    return box_size * pixel_size_angst / resolution_angst


def _apply(volume: NDArray[Any], passed: NDArray[np.float64]) -> NDArray[np.float32]:
    spectrum = rfftn(np.asarray(volume, dtype=np.float32))
    return irfftn((spectrum * passed).astype(np.complex64), volume.shape[0]).astype(np.float32)


def mirrored(volume: NDArray[Any]) -> NDArray[Any]:
    """A map with its z axis turned round about voxel ``n // 2``: the same object of the other hand."""
    turned = volume[::-1]
    return np.ascontiguousarray(turned if len(volume) % 2 else np.roll(turned, 1, axis=0))
