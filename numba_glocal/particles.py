"""From a particle's files to what a backend is given: binned, normalised volume and weight on the grid half-spectrum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backends.protocols import CONSTANT, NOT_FINITE, Grid, Normalisation, ParticleBatch, ParticleMask, sample_step
from .errors import BadParticleError, InputError
from .fourier import centred_irfftn, centred_rfftn
from .io import read_volume
from .io.mrc import read_plain_mrc
from .masks import outside_sphere
from .tilt_images import stack_weights, volume_from_stack
from .tomogram_boxes import read_box, tomogram_weights
from .values import Source, TiltGeometry, TiltRange, TomogramBox, TomogramWeight, Weight
from .wedge import read_weight_volume, union_weights


@dataclass(frozen=True, slots=True)
class ParticleReader:
    """How particles are read; small and picklable, so that it travels with every task.

    Attributes
    ----------
    grid : Grid
    normalise_mask : ParticleMask
        Mean and deviation are taken outside this sphere (of the worked grid).
    normalise : bool
        To mean 0 and deviation 1 outside the mask; else only the mean is taken off.
    invert_contrast : bool
    tilt_range : TiltRange or None
        For particles without weights of their own; None: all of Fourier space is there.
    flip_tilts : bool
        Tilts that a list gives have the other sign (those of `tilt_range` say it themselves).
    """

    grid: Grid
    normalise_mask: ParticleMask
    normalise: bool = True
    invert_contrast: bool = False
    tilt_range: TiltRange | None = None
    flip_tilts: bool = False

    @property
    def normalisation(self) -> Normalisation:
        """What is done to a particle as read."""
        return Normalisation(self.normalise_mask.radius_voxels * self.grid.box_size / self.grid.binned_box_size, self.normalise, self.invert_contrast)

    def read_raw(self, name: str, path: Source, out: NDArray[np.float32], weight: Weight | None = None) -> None:
        """One particle as its file or its tomogram has it, or as its tilt images make it, into an array (n, n, n) of the unbinned box.

        Raises
        ------
        BadParticleError
            Unreadable, or of another box.
        """
        if not isinstance(path, TomogramBox) and not isinstance(weight, TiltGeometry) and read_plain_mrc(path, out):
            return
        try:
            if isinstance(path, TomogramBox):
                data = read_box(path, out.shape[0])
            elif isinstance(weight, TiltGeometry):
                data = volume_from_stack(path, weight, out.shape[0])
            else:
                data = read_volume(path, quiet=True).data
        except (InputError, OSError) as problem:
            raise BadParticleError(name, str(problem)) from None
        if data.shape != out.shape:
            raise BadParticleError(name, f"its box is {data.shape[0]}, expected {out.shape[0]}")
        out[...] = data

    def read_volume(self, name: str, path: Source, weight: Weight | None = None) -> NDArray[np.float32]:
        """One particle on the worked grid, normalised.

        Raises
        ------
        BadParticleError
            Unreadable, of another box, constant or not finite.
        """
        n = self.grid.box_size
        data = np.empty((n, n, n), np.float32)
        self.read_raw(name, path, data, weight)
        # a rough level first: the sums that follow are then of small numbers, whatever the grey values of a tomogram
        outside, count = outside_sphere(n, self.normalisation.radius_voxels)
        flat = data.reshape(-1)
        rough = flat[:: sample_step(flat.size)].mean(dtype=np.float64)
        if not np.isfinite(rough) or not np.isfinite(flat.sum()):
            raise BadParticleError(name, NOT_FINITE)
        flat -= np.float32(rough)
        chosen = flat * outside
        offset = float(chosen.sum(dtype=np.float64)) / count
        deviation = float(np.sqrt(max(float(np.dot(chosen, flat)) / count - offset * offset, 0.0)))
        scale = max(abs(float(rough)), abs(offset), float(np.abs(flat[:: sample_step(flat.size)]).max()), 1e-30)
        if not deviation > max(1e-3 * scale, 0.1 * abs(offset)):  # too close to the rounding of these sums to be believed
            deviation = float(flat[outside > 0].std(dtype=np.float64))
        if not deviation > 1e-6 * scale:
            raise BadParticleError(name, CONSTANT)
        factor = (1.0 / deviation if self.normalise else 1.0) * (-1.0 if self.invert_contrast else 1.0)
        flat -= np.float32(offset)
        flat *= np.float32(factor)
        return fourier_crop(data, self.grid.binned_box_size)

    def read_weight(self, weight: Weight | None) -> NDArray[np.float32]:
        """Weight on the worked grid's half-spectrum; the same array object for the same volume or tilts."""
        if self.flip_tilts and isinstance(weight, tuple):
            weight = tuple(replace(tilts, flip=not tilts.flip) for tilts in weight)
        return _weight(weight, self.tilt_range, self.grid.box_size, self.grid.binned_box_size)

    def batch(self, names: tuple[str, ...], volume_paths: tuple[Source, ...], weight_paths: tuple[Weight | None, ...]) -> ParticleBatch:
        """Particles for a session; the key of a particle tells how it was read."""
        prefix = f"{self.normalise}{self.invert_contrast}{self.tilt_range}{self.flip_tilts}{self.normalise_mask}"

        def read(index: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
            volume = self.read_volume(names[index], volume_paths[index], weight_paths[index])
            try:
                return volume, self.read_weight(weight_paths[index])
            except InputError as problem:
                raise BadParticleError(names[index], str(problem)) from None

        def read_raw(index: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
            self.read_raw(names[index], volume_paths[index], out, weight_paths[index])
            try:
                return self.read_weight(weight_paths[index])
            except InputError as problem:
                self.read_volume(names[index], volume_paths[index], weight_paths[index])  # when both are bad, the volume is named
                raise BadParticleError(names[index], str(problem)) from None

        keys = tuple(f"{prefix}|{volume}|{weight}" for volume, weight in zip(volume_paths, weight_paths, strict=True))
        if self.grid.binned_box_size != self.grid.box_size:
            return ParticleBatch(keys, read)
        return ParticleBatch(keys, read, read_raw, self.normalisation)


@lru_cache(maxsize=64)
def _weight(source: Weight | None, tilt_range: TiltRange | None, box_size: int, binned_box_size: int) -> NDArray[np.float32]:
    if source is None and tilt_range is not None:
        source = (tilt_range,)
    if isinstance(source, TiltGeometry):
        weight = stack_weights(source, box_size)
    elif isinstance(source, TomogramWeight):
        weight = tomogram_weights(source, box_size)
    elif isinstance(source, Path):
        weight = read_weight_volume(source, box_size)
    elif source is not None:
        weight = union_weights(box_size, source)
    else:
        weight = np.ones((box_size, box_size, box_size // 2 + 1), np.float32)
    return np.ascontiguousarray(crop_half_spectrum(weight, binned_box_size), np.float32)


def crop_half_spectrum(spectrum: NDArray[Any], binned_box_size: int) -> NDArray[Any]:
    """Central part of a grid half-spectrum: the half-spectrum of the box `binned_box_size`.

    For an even target its Nyquist planes are kept as they are; nothing that reads them does so (`fourier.grid_band`).
    """
    n, m = spectrum.shape[0], binned_box_size
    if m == n:
        return spectrum
    k = np.rint(np.fft.fftfreq(m) * m).astype(int)
    rows = k % n
    return np.ascontiguousarray(spectrum[np.ix_(rows, rows, np.arange(m // 2 + 1))])


def fourier_crop(volume: NDArray[np.float32], binned_box_size: int) -> NDArray[np.float32]:
    """A volume on a coarser grid: its transform cropped, its centre kept exactly, its grey values too.

    Parameters
    ----------
    volume : (n, n, n) float32
    binned_box_size : int
        m <= n; the scale is ``n / m`` (docs/conventions.md, 4).

    Returns
    -------
    (m, m, m) float32
    """
    n, m = volume.shape[0], binned_box_size
    if m == n:
        return np.ascontiguousarray(volume, np.float32)
    spectrum = crop_half_spectrum(centred_rfftn(volume), m)
    spectrum = spectrum * np.float32((m / n) ** 3)
    if m % 2 == 0:  # a real map has no well-defined phase there
        spectrum[m // 2, :, :], spectrum[:, m // 2, :], spectrum[:, :, m // 2] = 0, 0, 0
    return np.ascontiguousarray(centred_irfftn(spectrum, m), np.float32)
