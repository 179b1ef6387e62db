"""Made particles whose poses are known: for the demo, tutorials and tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from .errors import SettingsError, VolumeError
from .fourier import centred_irfftn, centred_rfftn, grid_frequencies, grid_multiplicity, irfftn, rfftn
from .geometry import matrix_to_relion, rotvec_to_matrix
from .io.volumes import write_volume
from .masks import spherical_mask
from .phantom import render_phantom
from .values import Poses, Volume
from .wedge import full_layout, tilt_range_weights

VOLTAGE_KV = 300.0
SPHERICAL_ABERRATION_MM = 2.7
AMPLITUDE_CONTRAST = 0.07
DEFOCUS_RANGE_ANGST = (25_000.0, 45_000.0)
TOMOGRAMS = 5

Renderer = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
"""(rotation (3, 3), shift_angst (3,)) -> the object at that pose, (n, n, n)."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What to simulate.

    Attributes
    ----------
    count : int
        Number of particles.
    box_size : int
        Edge of their volumes in voxels.
    pixel_size_angst : float
        Voxel edge.
    snr : float
        Variance of the signal over variance of the noise, both over the whole box and after wedge and CTF.
    tilt_min_deg, tilt_max_deg : float
        Tilt range, tilt axis y.
    ctf : bool
        Particles multiplied by their CTF and weight volumes that hold CTF^2; otherwise the missing wedge alone.
    perturb_deg : float
        Root mean square angle by which the start poses are off.
    shift_angst : float
        Particles lie off their box's centre by up to this much along each axis; the start poses do not know.
    seed : int
        The same settings and seed give the same files.
    invert : bool
        Particles dark on bright, as tomograms often are; the reference stays bright.
    """

    count: int = 100
    box_size: int = 32
    pixel_size_angst: float = 10.0
    snr: float = 0.1
    tilt_min_deg: float = -60.0
    tilt_max_deg: float = 60.0
    ctf: bool = False
    perturb_deg: float = 8.0
    shift_angst: float = 10.0
    seed: int = 1
    invert: bool = False

    def __post_init__(self) -> None:
        for what, value, good, expected in (
            ("--n", self.count, self.count >= 1, "1 or more"),
            ("--box", self.box_size, self.box_size >= 8, "8 voxels or more"),
            ("--pixel-size", self.pixel_size_angst, 0 < self.pixel_size_angst < math.inf, "a positive number of Angstrom"),
            ("--snr", self.snr, 0 < self.snr < math.inf, "a positive number"),
            ("--perturb", self.perturb_deg, 0 <= self.perturb_deg <= 180, "0 to 180 degrees"),
            ("--shift", self.shift_angst, 0 <= self.shift_angst < math.inf, "0 Angstrom or more"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise SettingsError(f"{what}: expected {expected}; found {value:g}")
        if not -90 <= self.tilt_min_deg < self.tilt_max_deg <= 90:
            raise SettingsError(f"tilt range: expected -90 <= minimum < maximum <= 90 degrees; found {self.tilt_min_deg:g} .. {self.tilt_max_deg:g}")


@dataclass(frozen=True, slots=True)
class SimulatedSet:
    """Where the files of a simulation are, and the planted poses.

    Attributes
    ----------
    truth, start : Path
        Particle lists with the true and with the perturbed poses (RELION 3.1).
    reference : Path
        The object itself, in the grey units of the particles.
    poses : Poses
        The true ones, particle by particle.
    """

    truth: Path
    start: Path
    reference: Path
    poses: Poses


def simulate(
    folder: Path, settings: SimulationSettings, source: Volume | None = None, progress: Callable[[int, int], None] | None = None
) -> SimulatedSet:
    """Write particles with known poses, their weight volumes, lists of true and of perturbed poses, and the reference.

    Every particle is ``W S + V noise`` in Fourier space with S the transform of the object at the particle's pose, turned
    without a Fourier-space interpolation. Without CTF W and V are both the missing wedge. With CTF both data and noise
    are as tilt images multiplied by their CTF once more: ``W = CTF^2`` and ``V = |CTF|``, inside the wedge, so that the
    noise's variance follows the weight volume W. The noise's standard deviation in the box is 1.

    Parameters
    ----------
    folder : Path
        Created where it is missing. Holds ``truth.star``, ``start.star``, ``reference.mrc`` and ``subtomo/`` afterwards.
    settings : SimulationSettings
        What to simulate.
    source : Volume, optional
        The object; the built-in phantom without it. See `map_renderer` for what is done to it.
    progress : callable, optional
        Called with (particles written, particles in all).

    Returns
    -------
    SimulatedSet
    """
    if source is None:
        render = phantom_renderer(settings.box_size, settings.pixel_size_angst)
    else:
        render = map_renderer(source, settings.box_size, settings.pixel_size_angst)
    # every random number that describes the set is drawn before the noise: the poses do not depend on the box or on the CTF
    rng = np.random.default_rng(settings.seed)
    rotations = _random_rotations(settings.count, rng)
    shifts = rng.uniform(-1.0, 1.0, (settings.count, 3)) * settings.shift_angst
    axes = rng.normal(size=(settings.count, 3)) * np.deg2rad(settings.perturb_deg) / math.sqrt(3.0)
    defocus = rng.uniform(*DEFOCUS_RANGE_ANGST, settings.count)
    truth = Poses(rotations, shifts)
    start = Poses(rotations @ rotvec_to_matrix(axes), np.zeros_like(shifts))

    particles = folder / "subtomo"
    particles.mkdir(parents=True, exist_ok=True)
    wedge = np.asarray(tilt_range_weights(settings.box_size, settings.tilt_min_deg, settings.tilt_max_deg), dtype=np.float64)
    pixel = settings.pixel_size_angst
    scale = 1.0
    for i in range(settings.count):
        if settings.ctf:
            weight = wedge * ctf_squared(settings.box_size, pixel, defocus[i])
            noise_filter = np.sqrt(weight)
        else:
            weight = noise_filter = wedge
        signal = rfftn(np.asarray(render(rotations[i], shifts[i]), dtype=np.float64)) * weight
        noise = rfftn(np.random.default_rng((settings.seed, i)).standard_normal((settings.box_size,) * 3)) * noise_filter
        if i == 0:
            scale = math.sqrt(settings.snr / _variance(signal, settings.box_size))
            noise_scale = 1.0 / math.sqrt(_variance(noise, settings.box_size))
        data = irfftn(scale * signal + noise_scale * noise, settings.box_size)
        write_volume(particles / f"particle_{i + 1:05d}.mrc", Volume((-data if settings.invert else data).astype(np.float32), pixel))
        if settings.ctf or i == 0:
            write_volume(folder / _weight_name(i, settings.ctf), Volume(full_layout(weight, settings.box_size), pixel))
        if progress is not None:
            progress(i + 1, settings.count)

    reference = np.asarray(render(np.eye(3), np.zeros(3))) * scale
    write_volume(folder / "reference.mrc", Volume(reference.astype(np.float32), pixel))
    for name, poses in (("truth.star", truth), ("start.star", start)):
        (folder / name).write_text(_star_text(settings, poses), encoding="utf-8")
    return SimulatedSet(folder / "truth.star", folder / "start.star", folder / "reference.mrc", truth)


def phantom_renderer(box_size: int, pixel_size_angst: float) -> Renderer:
    """The built-in phantom at any pose, exactly."""
    return lambda rotation, shift_angst: render_phantom(box_size, pixel_size_angst, rotation, shift_angst)


def map_renderer(source: Volume, box_size: int, pixel_size_angst: float) -> Renderer:
    """A map at any pose, on another grid.

    The map's mean near the edge of its box is taken as background and removed, what lies outside the inscribed sphere is
    faded out, and a raised cosine from 0.8 to 1 of the target's Nyquist frequency band-limits it. It is then sampled by
    splines of order 5 from a grid at least twice as fine as the target's: the error is below 0.2 percent of the map's
    standard deviation.

    Parameters
    ----------
    source : Volume
        A cubic map with a pixel size.
    box_size : int
        Of the volumes to make.
    pixel_size_angst : float
        Of the volumes to make.

    Raises
    ------
    VolumeError
        The map is constant, not finite, or has no pixel size.
    """
    data, pixel = np.asarray(source.data, dtype=np.float64), source.pixel_size_angst
    if not np.isfinite(data).all() or data.std() == 0:
        raise VolumeError("map to simulate from: expected finite values that vary; found a constant map, NaN or infinity")
    if not pixel > 0:
        raise VolumeError("map to simulate from: its header has no pixel size")
    n = source.box_size
    rim = spherical_mask(n, 0.46 * n, 0.04 * n).astype(np.float64)
    edge = (rim > 0) & (rim < 1)
    data = (data - data[edge].mean()) * rim

    fine = 2 * math.ceil(n * pixel / pixel_size_angst)  # voxels of the fine grid across the map's box
    kz, ky, kx = grid_frequencies(n)
    relative = np.sqrt(kz**2 + ky**2 + kx**2) / (n * pixel) * 2.0 * pixel_size_angst
    spectrum = centred_rfftn(data) * (0.5 + 0.5 * np.cos(np.pi * np.clip((relative - 0.8) / 0.2, 0.0, 1.0)))
    fine_map = centred_irfftn(_resize_spectrum(spectrum, n, fine), fine) * (fine / n) ** 3
    coefficients = ndimage.spline_filter(fine_map, order=5, mode="constant")
    to_fine = fine / (n * pixel)

    grid = (np.arange(box_size) - box_size // 2) * pixel_size_angst
    positions = np.stack(np.meshgrid(grid, grid, grid, indexing="ij"), axis=-1).reshape(-1, 3)[:, ::-1]  # (x, y, z) of voxel [z, y, x]

    def render(rotation: NDArray[Any], shift_angst: NDArray[Any]) -> NDArray[Any]:
        source_xyz = (positions - np.asarray(shift_angst)) @ np.asarray(rotation) * to_fine + fine // 2  # R^-1 v, as rows
        values = ndimage.map_coordinates(coefficients, source_xyz[:, ::-1].T, order=5, mode="constant", prefilter=False)
        return values.reshape((box_size,) * 3)

    return render


def ctf_squared(box_size: int, pixel_size_angst: float, defocus_angst: float) -> NDArray[np.float64]:
    """CTF^2 of an in-focus-plane particle, the same in all directions; (n, n, n // 2 + 1), origin in the corner."""
    volts = VOLTAGE_KV * 1e3
    wavelength = 12.2643 / math.sqrt(volts * (1.0 + 0.978466e-6 * volts))
    kz, ky, kx = grid_frequencies(box_size)
    k2 = (kz**2 + ky**2 + kx**2) / (box_size * pixel_size_angst) ** 2
    phase = np.pi * wavelength * defocus_angst * k2 - 0.5 * np.pi * SPHERICAL_ABERRATION_MM * 1e7 * wavelength**3 * k2**2
    return np.sin(phase + math.asin(AMPLITUDE_CONTRAST)) ** 2


def _random_rotations(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Uniform: normalised Gaussian quaternions, as rotation vectors."""
    quaternions = rng.normal(size=(count, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    sine = np.linalg.norm(quaternions[:, :3], axis=1)
    angle = 2.0 * np.arctan2(sine, quaternions[:, 3])
    return rotvec_to_matrix(quaternions[:, :3] / sine[:, None] * angle[:, None])


def _variance(spectrum: NDArray[Any], box_size: int) -> float:
    """Variance of the map that has this half-spectrum."""
    power = (spectrum.real**2 + spectrum.imag**2) * grid_multiplicity(box_size)
    return float((power.sum() - power[0, 0, 0]) / box_size**6)


def _resize_spectrum(half: NDArray[Any], box_size: int, new_size: int) -> NDArray[Any]:
    """The frequencies both grids hold, below Nyquist of either; the rest is zero."""
    reach = (min(box_size, new_size) - 1) // 2
    keep = np.r_[0 : reach + 1, -reach:0]
    resized = np.zeros((new_size, new_size, new_size // 2 + 1), dtype=half.dtype)
    resized[np.ix_(keep, keep, np.arange(reach + 1))] = half[np.ix_(keep, keep, np.arange(reach + 1))]
    return resized


def _weight_name(index: int, ctf: bool) -> str:
    return f"subtomo/ctf_{index + 1:05d}.mrc" if ctf else "subtomo/wedge.mrc"


def _star_text(settings: SimulationSettings, poses: Poses) -> str:
    """A RELION 3.1 list; every digit is written the same way on every machine."""
    optics = (
        ("rlnOpticsGroup", "1"),
        ("rlnOpticsGroupName", "simulated"),
        ("rlnImagePixelSize", f"{settings.pixel_size_angst:.6g}"),
        ("rlnImageSize", str(settings.box_size)),
        ("rlnImageDimensionality", "3"),
        ("rlnVoltage", f"{VOLTAGE_KV:g}"),
        ("rlnSphericalAberration", f"{SPHERICAL_ABERRATION_MM:g}"),
        ("rlnAmplitudeContrast", f"{AMPLITUDE_CONTRAST:g}"),
    )
    columns = (
        "rlnImageName rlnCtfImage rlnMicrographName rlnCoordinateX rlnCoordinateY rlnCoordinateZ rlnAngleRot rlnAngleTilt rlnAnglePsi "
        "rlnOriginXAngst rlnOriginYAngst rlnOriginZAngst rlnOpticsGroup rlnRandomSubset"
    ).split()
    lines = ["", "# made by numba-glocal simulate", "", "data_optics", "", "loop_"]
    lines += [f"_{label} #{i + 1}" for i, (label, _) in enumerate(optics)]
    lines += [" ".join(value for _, value in optics), "", "", "data_particles", "", "loop_"]
    lines += [f"_{label} #{i + 1}" for i, label in enumerate(columns)]
    angles = matrix_to_relion(poses.rotations)
    origins = -poses.shifts_angst
    for i in range(settings.count):
        where = (100.0 + 7 * i % 800, 100.0 + 13 * i % 800, 50.0 + 3 * i % 200)
        numbers = " ".join(f"{value:12.6f}" for value in (*where, *angles[i], *origins[i]))
        names = f"subtomo/particle_{i + 1:05d}.mrc {_weight_name(i, settings.ctf)} tomo_{i % TOMOGRAMS + 1}"
        lines.append(f"{names} {numbers} 1 {i % 2 + 1}")
    return "\n".join(lines) + "\n\n"
