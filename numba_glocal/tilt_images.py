"""Particles that are stacks of tilt images (RELION 5, WarpTools): their images inserted into the Fourier samples of a volume, and the weights.

What a volume and its weights hold is the convention of lists flagged premultiplied (docs/conventions.md, 4). With images ``Y = M (M F + noise)``
at samples q, M = CTF x scale x exposure filter, the volume is the adjoint of slicing, ``x(v) = sum_q Y(q) exp(2 pi i q.v / n)``, and the weight what
makes ``X = C F`` nearly true, and the variance of X's noise proportional to C: ``C(k) = sum_q M(q)^2 h(k - q)`` with h close to the squared
transform of the box, a triangle of one voxel to either side.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .backends.interpolation import insert
from .ctf import contrast_transfer, exposure_filter, wavelength_angst
from .errors import ListError, VolumeError
from .fourier import PAD, central_irfftn, sinc2_correction
from .io.tilt_series import TiltSeries, Tomograms
from .io.volumes import read_array, read_header
from .values import FloatArray, ParticleSet, TiltGeometry

_HAND_PARTICLES = 48
_LEAST_POWER = 0.01
"""Share of power that multiplied images keep at zeros of the CTF: interpolation and rounding."""


def with_tilt_images(particles: ParticleSet) -> ParticleSet:
    """Particles that are stacks of tilt images, with what makes volumes and CTF^2 weights of them as the source of their weights.

    Parameters
    ----------
    particles : ParticleSet
        With `stacks`; `premultiplied` tells whether the images are multiplied by their CTF.

    Returns
    -------
    ParticleSet
        Premultiplied. Particles with the same images at nearly the same defocus share one geometry.

    Raises
    ------
    ListError, VolumeError, InputError
        No tomograms file; an unknown tomogram; another number of images than the series has, or none at all.
    """
    stacks = particles.stacks
    assert stacks is not None
    if stacks.tomograms_path is None:
        raise ListError(
            f"{particles.volume_paths[0]}: a stack of tilt images needs the tomograms file with the tilts' projections;"
            " expected the optimisation set, which names it, in place of the particle list"
        )
    series = Tomograms(stacks.tomograms_path)
    places = _places(particles)
    hand = defocus_hand(particles, series)
    known = {series[name].hand for name in particles.tomograms}
    if hand and known != {hand}:
        warnings.warn(
            f"{series.path}: rlnTomoHand is {known.pop():g}, but the images' own CTF says that defocus grows the other way along the beam"
            f" ({hand:g} is taken): projections are probably written mirrored, and volumes have the other hand (--mirror, --check-hand)",
            stacklevel=2,
        )
    # places as near as this differ by a tenth of a radian in the CTF's phase at Nyquist
    step_angst = 0.1 / (np.pi * wavelength_angst(300.0)) * (2.0 * particles.pixel_size_angst) ** 2
    shared: dict[tuple[Any, ...], TiltGeometry] = {}
    sources: list[TiltGeometry] = []
    for row, (stack, tomogram) in enumerate(zip(particles.volume_paths, particles.tomograms, strict=True)):
        found = series[tomogram]
        flags = _flags(particles, row, found, stack)
        count = _count(stack, particles.box_size, len(found))
        place = None if places is None or not np.isfinite(places[row]).all() else np.rint(places[row] / step_angst) * step_angst
        key = (found.name, flags.tobytes(), count, None if place is None else place.tobytes())
        if key not in shared:
            shared[key] = _geometry(found, flags, count, stack, particles, place, hand or None)
        sources.append(shared[key])
    # compiled here, once, and not by every worker at its first particle
    insert_images(np.zeros((len(sources[0]), 8, 8), np.float32), sources[0])
    return replace(particles, weight_paths=tuple(sources), premultiplied=True)


def _flags(particles: ParticleSet, row: int, series: TiltSeries, stack: Path) -> NDArray[np.bool_]:
    """Which images of its series a particle's list says are there."""
    assert particles.stacks is not None
    if particles.stacks.visible_frames is None:
        return np.ones(len(series), bool)
    flags = particles.stacks.visible_frames[row]
    if len(flags) != len(series):
        raise ListError(f"{stack}: rlnTomoVisibleFrames has {len(flags)} flags, expected {len(series)}, one for each image of {series.name}")
    return flags


def _count(stack: Path, box_size: int, otherwise: int) -> int:
    """How many images a stack has; one that cannot be read is for the run to skip, and counts as whole."""
    try:
        count, *edges = read_header(stack).shape
    except VolumeError:
        return otherwise
    if edges != [box_size, box_size]:
        raise VolumeError(f"{stack}: images of {edges[1]} x {edges[0]}, expected {box_size} x {box_size}")
    return count


def _geometry(
    series: TiltSeries, flags: NDArray[np.bool_], count: int, stack: Path, particles: ParticleSet, place: FloatArray | None, hand: float | None
) -> TiltGeometry:
    """How a stack of `count` images of a series makes a particle."""
    chosen = np.flatnonzero(flags)
    # RELION leaves images that are not visible out of the stack, Warp writes them as zeros
    if count == len(chosen):
        images = np.arange(count)
    elif count == len(series):
        images = chosen
    else:
        raise VolumeError(f"{stack}: {count} images, expected {len(chosen)} (the visible ones) or {len(series)} (all of {series.name})")
    kept = series.scale[chosen] != 0  # a scale of 0 marks an image that was left out
    if not kept.any():
        raise ListError(f"{stack}: none of the {len(series)} images of {series.name} is visible")
    return series.geometry(chosen[kept], images[kept], particles.pixel_size_angst, multiplied=particles.premultiplied, centred_angst=place, hand=hand)


def defocus_hand(particles: ParticleSet, series: Tomograms) -> float:
    """In which direction along the beam defocus grows, 1 or -1, told by the images themselves; 0 where they do not tell.

    Multiplied images are noise times CTF: their power goes as CTF^2, and the likelihood of that tells a particle's defocus. Compared are the
    defocus at each particle's height with either sign (`TiltSeries.hand`).

    Parameters
    ----------
    particles : ParticleSet
        Stacks of multiplied images, with coordinates.
    series : Tomograms
    """
    places = _places(particles)
    if places is None or not particles.premultiplied:
        return 0.0
    n = particles.box_size
    points, index = _plane(n)
    radius = np.hypot(points[:, 0], points[:, 1])
    rings = [(radius >= low) & (radius < low + 2) for low in range(n // 4, n // 2 - 2, 2)]
    gains = []
    for row in np.flatnonzero(np.isfinite(places).all(1))[:: max(1, -(-len(particles) // _HAND_PARTICLES))]:
        found, stack = series[particles.tomograms[row]], particles.volume_paths[row]
        flags = _flags(particles, row, found, stack)
        try:
            either = [_geometry(found, flags, _count(stack, n, len(found)), stack, particles, places[row], hand) for hand in (1.0, -1.0)]
            images = read_array(stack, quiet=True)[0][either[0].images]
        except (VolumeError, IndexError):
            continue  # for the run to skip
        power = np.abs(np.fft.rfft2(np.asarray(images, np.float32)).reshape(len(images), -1)[:, index]) ** 2
        likelihood = []
        for geometry in either:
            expected = multipliers(geometry, n) ** 2 + _LEAST_POWER * np.mean(geometry.scale**2)
            likelihood.append(0.0)
            for ring in rings:
                ratio = power[:, ring] / expected[:, ring]
                likelihood[-1] -= float(np.log(expected[:, ring]).sum() + ratio.size * np.log(max(ratio.mean(), 1e-30)))
        gains.append(likelihood[0] - likelihood[1])
    if len(gains) < 4:
        return 0.0
    mean, error = float(np.mean(gains)), float(np.std(gains, ddof=1)) / np.sqrt(len(gains))
    return float(np.sign(mean)) if abs(mean) > 4.0 * error else 0.0


def _places(particles: ParticleSet) -> FloatArray | None:
    """Places from the tomograms' centres in Angstrom, where the list says them."""
    return None if particles.coordinates is None else particles.coordinates.as_centred_angst()


def volume_from_stack(path: Path, geometry: TiltGeometry, box_size: int) -> NDArray[np.float32]:
    """The volume that a particle's stack of tilt images gives.

    Parameters
    ----------
    path : Path
        The stack, (images, n, n).
    geometry : TiltGeometry
    box_size : int
        n.

    Returns
    -------
    (n, n, n) float32

    Raises
    ------
    VolumeError
        An unreadable stack, one of another box, or one with fewer images than the geometry speaks of.
    """
    stack, _ = read_array(path, quiet=True)
    if stack.shape[1:] != (box_size, box_size):
        raise VolumeError(f"{path}: images of {stack.shape[2]} x {stack.shape[1]}, expected {box_size} x {box_size}")
    if len(stack) <= int(geometry.images.max(initial=-1)):
        raise VolumeError(f"{path}: a stack of {len(stack)} images, expected {int(geometry.images.max()) + 1} or more")
    return insert_images(stack[geometry.images], geometry)


def insert_images(images: NDArray[Any], geometry: TiltGeometry) -> NDArray[np.float32]:
    """The adjoint of slicing: the volume whose transform gathers the tilt images' samples (see the module's head), over ``n^3``.

    Parameters
    ----------
    images : (t, n, n)
        Indexed ``[y, x]``, centre at ``n // 2``.
    geometry : TiltGeometry
        Of these t images.

    Returns
    -------
    (n, n, n) float32
    """
    n = images.shape[-1]
    c = n - 1
    points, index = _plane(n)
    spectra = np.fft.rfft2(np.fft.ifftshift(np.asarray(images, np.float32), axes=(1, 2))).reshape(len(images), -1)[:, index]
    if not geometry.multiplied:
        spectra = spectra * multipliers(geometry, n)
    grid = np.zeros(4 * (2 * c + 1) ** 2 * (c + 2), np.float32)
    there = np.ones(len(points), np.float32)
    for spectrum, axes in zip(spectra, geometry.axes, strict=True):
        insert(grid, 2 * c + 1, c, points, _rows(axes), np.float32(PAD), np.ascontiguousarray(spectrum, np.complex64), there)
    sums = grid.view(np.complex64).reshape(2 * c + 1, 2 * c + 1, c + 2, 2)
    volume = central_irfftn(lambda first, block: _fill_rows(sums, first, block), n)
    # an inverse transform carries 1 / (PAD n)^3, an adjoint none; both over n^3
    volume *= np.float32(PAD**3) / sinc2_correction(n)
    return volume


def stack_weights(geometry: TiltGeometry, box_size: int) -> NDArray[np.float32]:
    """CTF^2 weights of the volume that `insert_images` makes.

    Returns
    -------
    (n, n, n//2+1) float32
        Grid half-spectrum, corner origin; a slice through a sample adds 1 times its CTF^2.
    """
    sums, _ = slice_sums(geometry.axes, multipliers(geometry, box_size) ** 2, box_size)
    return sums


def slice_sums(axes: FloatArray, values: FloatArray, box_size: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Values on slices through Fourier space spread over the samples of a box, and how many slices pass each.

    Parameters
    ----------
    axes : (t, 2, 3)
        As `TiltGeometry.axes`.
    values : (t, m)
        At the samples of `plane_frequencies`; even.
    box_size : int

    Returns
    -------
    sums, slices : (n, n, n//2+1) float32
    """
    n = box_size
    c = n // 2
    points, _ = _plane(n)
    grid = np.zeros(4 * (2 * c + 1) ** 2 * (c + 2), np.float32)
    there = np.ones(len(points), np.float32)
    for value, plane in zip(values, axes, strict=True):
        # a weight of 0 would be left out, with its count
        insert(grid, 2 * c + 1, c, points, _rows(plane), np.float32(1), np.ascontiguousarray(value, np.complex64), there)
    full = grid.reshape(2 * c + 1, 2 * c + 1, c + 2, 4)[:, :, : n // 2 + 1]
    both = full[..., 0::2].copy()
    both[:, :, 0] += full[::-1, ::-1, 0, 0::2]  # each pair of the plane kx = 0 was received once, on either side
    rows = np.rint(np.fft.fftfreq(n) * n).astype(int) + c
    both = both[np.ix_(rows, rows)]
    return np.ascontiguousarray(both[..., 0]), np.ascontiguousarray(both[..., 1])


def multipliers(geometry: TiltGeometry, box_size: int, *, ctf: bool = True) -> NDArray[np.float64]:
    """CTF x scale x exposure filter of each image, (t, m), at the samples of `plane_frequencies`; `ctf` False leaves the CTF out."""
    kx, ky = (plane_frequencies(box_size) / (box_size * geometry.pixel_size_angst)).T
    radius = np.hypot(kx, ky)
    result = np.empty((len(geometry), len(kx)))
    for t in range(len(geometry)):
        result[t] = geometry.scale[t] * exposure_filter(radius, geometry.exposure[t], geometry.voltage_kv)
        if ctf:
            result[t] *= contrast_transfer(
                kx,
                ky,
                *geometry.defocus_angst[t],
                voltage_kv=geometry.voltage_kv,
                spherical_aberration_mm=geometry.spherical_aberration_mm,
                amplitude_contrast=geometry.amplitude_contrast,
                phase_shift_deg=geometry.phase_shift_deg[t],
            )
    return result


def plane_frequencies(box_size: int) -> NDArray[np.float64]:
    """The samples of an image that are used, (m, 2) as ``(kx, ky)`` in 1/box: below Nyquist, without the mean, each Friedel pair once."""
    return np.asarray(_plane(box_size)[0][:, :2], np.float64)


@lru_cache(maxsize=8)
def _plane(n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Those samples as (kx, ky, 0), and their places in the flattened `rfft2`."""
    ky = np.rint(np.fft.fftfreq(n) * n)[:, None]
    kx = np.arange(n // 2 + 1)[None, :]
    radius2 = kx * kx + ky * ky
    used = (radius2 > 0) & (radius2 <= (n // 2 - 1) ** 2) & ((kx > 0) | (ky > 0))
    index = np.flatnonzero(used)
    kx, ky = np.broadcast_arrays(kx, ky)
    points = np.zeros((len(index), 3), np.float32)
    points[:, 0], points[:, 1] = kx.ravel()[index], ky.ravel()[index]
    return points, index


def _rows(axes: FloatArray) -> NDArray[np.float32]:
    """The matrix M of `insert`, which puts the sample k at ``M^T k``."""
    matrix = np.zeros((3, 3), np.float32)
    matrix[:2] = axes
    return matrix


@njit(cache=True, nogil=True)
def _fill_rows(sums, first, block):  # type: ignore[no-untyped-def]
    """Rows of a padded half-spectrum from sums on the plane kx >= 0, for `fourier.central_irfftn`; kx = 0 holds each pair once."""
    c = (sums.shape[0] - 1) // 2
    padded = block.shape[1]
    block[:] = 0
    for b in range(block.shape[0]):
        row = first + b
        ky = row if row <= c else row - padded
        if row >= padded or ky < -c:
            continue
        for kz in range(-c, c + 1):
            i, j, to = kz + c, ky + c, kz if kz >= 0 else kz + padded
            block[b, to, 0] = sums[i, j, 0, 0] + sums[2 * c - i, 2 * c - j, 0, 0].conjugate()
            for x in range(1, c + 1):
                block[b, to, x] = sums[i, j, x, 0]
