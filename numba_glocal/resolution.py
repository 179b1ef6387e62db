"""Fourier shell correlation between half-maps, its correction for the mask, and the resolution read from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import VolumeError
from .fourier import grid_multiplicity, grid_shells, in_parallel, irfftn, rfftn
from .values import FSCCurve

RANDOMISE_BELOW = 0.8
"""Phases are randomised from the first shell on whose unmasked FSC is below this."""

PHASE_SEED = 143
"""Fixed, so that the same maps give the same curve."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where an FSC curve falls below a criterion.

    Attributes
    ----------
    shell : int
        Last shell above the first crossing; 0 when already shell 1 is below.
    resolution_angst : float
        Of that shell; infinite at shell 0, Nyquist when the curve never crosses.
    crossed : bool
        False when the curve stays above the criterion up to Nyquist: the resolution is then limited by the voxel size.
    rises_again : bool
        True when a later shell is above the criterion again: the number is then to be trusted less.
    """

    shell: int
    resolution_angst: float
    crossed: bool
    rises_again: bool


def fourier_shell_correlation(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Fourier shell correlation of two maps.

    Parameters
    ----------
    a, b : (n, n, n) array
        Maps on the same grid.

    Returns
    -------
    (n // 2 + 1,) float64
        One value per shell of width 1 around whole radii. Shell 0 is 1 by definition: a map's mean says nothing about
        resolution. A shell without power in one of the maps is 0.

    Raises
    ------
    VolumeError
        The maps differ in size or are not cubic.
    """
    _same_cube(a, b)
    return _correlate(_rfftn(a), _rfftn(b), a.shape[0])


def half_map_fsc(
    half1: NDArray[Any],
    half2: NDArray[Any],
    pixel_size_angst: float,
    mask: NDArray[Any] | None = None,
    mask_name: str = "none",
    seed: int = PHASE_SEED,
) -> FSCCurve:
    """FSC of two half-maps: unmasked, masked, with randomised phases, and corrected for what the mask alone adds.

    Beyond the first shell k0 whose unmasked FSC is below 0.8 each half's phases are replaced by independent random ones
    (amplitudes kept) before the mask is applied: any correlation then left at those shells comes from the mask. From
    k0 + 2 on it is taken out, ``(masked - randomised) / (1 - randomised)``, and 0 where nothing is left
    (docs: Chen et al. 2013, as in RELION). Without a mask all four curves are the unmasked one.

    Parameters
    ----------
    half1, half2 : (n, n, n) array
        Unfiltered half-maps.
    pixel_size_angst : float
        Voxel edge.
    mask : (n, n, n) array, optional
        Values 0..1.
    mask_name : str
        Kept with the curve: a masked FSC without its mask's name cannot be judged.
    seed : int
        Of the random phases.

    Returns
    -------
    FSCCurve
        `randomised_from_shell` is n // 2 + 1 when no shell fell below 0.8, so that nothing was randomised.

    Raises
    ------
    VolumeError
        The maps or the mask differ in size.
    """
    _same_cube(half1, half2)
    box_size = half1.shape[0]
    spectra = in_parallel(_rfftn, (half1, half2))
    unmasked = _correlate(spectra[0], spectra[1], box_size)
    if mask is None:
        return FSCCurve(box_size, pixel_size_angst, unmasked, unmasked, unmasked, unmasked)
    _same_cube(half1, mask)
    mask = np.asarray(mask, dtype=np.float32)
    under_mask = in_parallel(lambda half: _rfftn(half * mask), (half1, half2))
    masked = _correlate(under_mask[0], under_mask[1], box_size)

    below = np.flatnonzero(unmasked < RANDOMISE_BELOW)
    if below.size == 0:
        return FSCCurve(box_size, pixel_size_angst, unmasked, masked, masked, masked, mask_name, unmasked.size)
    first = int(below[0])

    def scramble(half: int) -> NDArray[Any]:
        return _rfftn(_randomise_phases(spectra[half], box_size, first, (seed, half)) * mask)

    scrambled = in_parallel(scramble, (0, 1))
    randomised = _correlate(scrambled[0], scrambled[1], box_size)
    corrected = masked.copy()
    tail = slice(first + 2, None)
    above = masked[tail] > randomised[tail]
    room = np.where(above, 1.0 - randomised[tail], 1.0)
    corrected[tail] = np.where(above, (masked[tail] - randomised[tail]) / room, 0.0)
    return FSCCurve(box_size, pixel_size_angst, unmasked, masked, randomised, corrected, mask_name, first)


def find_crossing(curve: ArrayLike, box_size: int, pixel_size_angst: float, criterion: float = 0.143) -> Crossing:
    """Where a curve first falls below a criterion, and whether it rises above it again.

    Parameters
    ----------
    curve : (n_shells,) array_like
        FSC per shell, shell 0 first (its value is not looked at). A NaN counts as below.
    box_size : int
        Edge of the maps in voxels.
    pixel_size_angst : float
        Voxel edge.
    criterion : float
        0.143 for half-maps; 0.5 against a known map.

    Returns
    -------
    Crossing
    """
    above = np.asarray(curve, dtype=np.float64) >= criterion
    below = np.flatnonzero(~above[1:])
    crossed = below.size > 0
    shell = int(below[0]) if crossed else above.size - 1
    rises_again = bool(above[shell + 1 :].any())
    return Crossing(shell, shell_resolution_angst(shell, box_size, pixel_size_angst), crossed, rises_again)


def evidence(curve: ArrayLike, first_shell: int, last_shell: int, box_size: int, mask: NDArray[Any] | None = None, order: int = 1) -> float:
    """How far the correlation of some shells, taken together, lies above what chance gives, in standard deviations.

    Of maps of noise alone ``atanh(FSC)`` scatters by ``1 / sqrt(samples)``. A mask makes neighbours alike, and each element of a symmetry
    that is imposed repeats the same sample: of an icosahedral map's shells few are left, and chance correlates them well above 0.143
    (van Heel and Schatz 2005).

    Parameters
    ----------
    curve : (n_shells,) array_like
        FSC, corrected for the mask.
    first_shell, last_shell : int
        Both are counted.
    box_size : int
    mask : (n, n, n) array, optional
        That the curve was measured with, of any box.
    order : int
        Elements of the symmetry group.

    Returns
    -------
    float
        0 where there is no shell.
    """
    shells = np.arange(max(first_shell, 1), last_shell + 1)
    if not shells.size:
        return 0.0
    part = 1.0
    if mask is not None:
        square = np.asarray(mask, np.float64) ** 2
        part = float(square.sum() ** 2 / max(square.size * (square**2).sum(), 1e-30))
    _, begins, times = _sorted_shells(box_size)
    samples = np.add.reduceat(times, begins)[shells] * part / order
    z = np.arctanh(np.clip(np.asarray(curve, np.float64)[shells], -0.999, 0.999))
    return float((z * samples).sum() / np.sqrt(samples.sum()))


def resolution_angst(curve: ArrayLike, box_size: int, pixel_size_angst: float, criterion: float = 0.143) -> float:
    """Resolution in Angstrom at the last shell above the first crossing, as RELION reports it; Nyquist without a crossing."""
    return find_crossing(curve, box_size, pixel_size_angst, criterion).resolution_angst


def shell_resolution_angst(shell: int, box_size: int, pixel_size_angst: float) -> float:
    """Resolution of a shell in Angstrom; infinite for shell 0."""
    return box_size * pixel_size_angst / shell if shell > 0 else math.inf


@lru_cache(maxsize=4)
def _sorted_shells(box_size: int) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.float64]]:
    """Half-spectrum samples up to Nyquist, shell by shell: their places, where each shell begins, how often each stands in the whole spectrum."""
    shell = grid_shells(box_size).ravel()
    order = np.argsort(shell, kind="stable")
    begins = np.searchsorted(shell[order], np.arange(box_size // 2 + 2))
    order = order[: begins[-1]]
    return order, begins[:-1], grid_multiplicity(box_size).ravel()[order]


def _rfftn(volume: NDArray[Any]) -> NDArray[Any]:
    return rfftn(np.asarray(volume, dtype=np.float32))


def _correlate(a: NDArray[Any], b: NDArray[Any], box_size: int) -> NDArray[np.float64]:
    order, begins, times = _sorted_shells(box_size)
    a, b = a.ravel()[order], b.ravel()[order]

    def per_shell(value: NDArray[Any]) -> NDArray[np.float64]:
        return np.add.reduceat(value * times, begins)

    cross = per_shell(a.real * b.real + a.imag * b.imag)
    power = per_shell(a.real**2 + a.imag**2) * per_shell(b.real**2 + b.imag**2)
    # power that is only float32 rounding of a filtered map is no power
    curve = np.divide(cross, np.sqrt(power), out=np.zeros(len(begins)), where=power > 1e-26 * power.max(initial=0.0))
    curve[0] = 1.0
    return curve


@lru_cache(maxsize=2)
def _random_phases(box_size: int, seed: tuple[int, int]) -> NDArray[np.complex64]:
    """Of white noise: Hermitian and uniform. A run asks for the same two at every iteration."""
    noise = _rfftn(np.random.default_rng(seed).standard_normal((box_size,) * 3, dtype=np.float32))
    return (noise / np.maximum(np.abs(noise), np.finfo(np.float32).tiny)).astype(np.complex64)


def _randomise_phases(spectrum: NDArray[Any], box_size: int, from_shell: int, seed: tuple[int, int]) -> NDArray[Any]:
    """The map with random phases at and beyond a shell."""
    scrambled = np.abs(spectrum) * _random_phases(box_size, seed)
    np.copyto(scrambled, spectrum, where=grid_shells(box_size) < from_shell)
    return irfftn(scrambled, box_size)


def _same_cube(a: NDArray[Any], b: NDArray[Any]) -> None:
    if np.ndim(a) != 3 or len(set(np.shape(a))) != 1:
        raise VolumeError(f"FSC: expected cubic maps; found one of shape {np.shape(a)}")
    if np.shape(a) != np.shape(b):
        raise VolumeError(f"FSC: expected maps and mask of one size; found {np.shape(a)} and {np.shape(b)}")
