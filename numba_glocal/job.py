"""From settings to a job: everything is read and checked before any work starts."""

from __future__ import annotations

import math
import warnings as python_warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .backends.protocols import Grid, ParticleMask
from .errors import InputError, NoAnglesWarning, SettingsError, VolumeError, plural
from .execution.tasks import Chunk
from .filters import lowpass, mirrored
from .fourier import grid_shells, max_band, padded_offset
from .half_sets import assign_half_sets, neighbours_across, positions_angst
from .io import read_particles, read_volume
from .io.angle_list import read_angle_list
from .io.pixel_size import SAME_PIXEL_SIZE
from .io.tilt_series import TiltFiles
from .masks import check_mask, mask_offset_voxels, spherical_mask
from .noise_groups import NoiseGroups, find_noise_groups
from .particles import ParticleReader, fourier_crop
from .sampling import distinct_rotations
from .settings import AlignSettings, AverageSettings
from .shifts import binned_box_size
from .symmetry import symmetry_agreement
from .tilt_images import with_tilt_images
from .tomogram_boxes import cut_from_tomograms
from .values import ParticleSet, Poses, TiltRange

_DEFAULT_DIAMETER_OF_BOX = 0.8
_CHUNK_BYTES = 512 << 20
_CHECKED_WEIGHTS = 8
_LEAST_DIAMETER_VOXELS = 6.0
_LIKE_ITSELF = 0.95


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to start.

    Attributes
    ----------
    settings : AlignSettings or AverageSettings
    particles : ParticleSet
        With half-sets assigned.
    reader : ParticleReader
    particle_mask : ParticleMask
        Of the particles, on the worked grid.
    mask : (n, n, n) float32
        Of the reference, on the worked grid.
    mask_name : str
    diameter_angst : float
    diameter_source : str
    k_min, k_limit : float
        Band limits, 1 / box of the worked grid.
    start_map : (n, n, n) float32 or None
        Low-passed, on the worked grid; None where the start is the average of the given poses, or an earlier iteration.
    warnings : list of str
    noise_groups : NoiseGroups
        Of `particles`, which carry them.
    further_start_maps : tuple of (n, n, n) float32
        Of the second class and those after it.
    notes : tuple of str
        What was read and assumed of tomograms.
    listed_rotations : (a, 3, 3) float64 or None
        Of --angle-list, each once.
    volumes_stand : str
        How, where the list has axes of its own for them, or --volume-axes is given; empty otherwise.
    """

    settings: AlignSettings | AverageSettings
    particles: ParticleSet
    reader: ParticleReader
    particle_mask: ParticleMask
    mask: NDArray[np.float32] = field(repr=False)
    mask_name: str
    diameter_angst: float
    diameter_source: str
    k_min: float
    k_limit: float
    start_map: NDArray[np.float32] | None = field(repr=False)
    warnings: list[str]
    noise_groups: NoiseGroups
    further_start_maps: tuple[NDArray[np.float32], ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    listed_rotations: NDArray[np.float64] | None = field(default=None, repr=False)
    volumes_stand: str = ""

    @property
    def grid(self) -> Grid:
        """The worked grid."""
        return self.reader.grid

    @property
    def radius_voxels(self) -> float:
        """Particle radius on the worked grid."""
        return 0.5 * self.diameter_angst / self.grid.binned_pixel_size_angst

    @property
    def max_bad(self) -> int:
        """How many unusable particles are tolerated."""
        given = self.settings.max_bad
        return given if given is not None else max(3, len(self.particles) // 100)

    def shell_of(self, resolution_angst: float) -> float:
        """Band, 1 / box, of a resolution."""
        return self.grid.binned_box_size * self.grid.binned_pixel_size_angst / resolution_angst


def prepare_job(settings: AlignSettings | AverageSettings, resume: bool = False) -> Job:
    """Reads list, headers, mask, start map and half-sets; refuses what cannot work.

    Parameters
    ----------
    settings : AlignSettings or AverageSettings
    resume : bool
        The start map is not needed any more.

    Raises
    ------
    GlocalError
        One line that says what is wrong.
    """
    warnings: list[str] = []
    premultiplied = settings.premultiplied if isinstance(settings, AverageSettings) else None
    with _kept_in(warnings):
        if isinstance(settings, AlignSettings) and settings.global_search:
            python_warnings.simplefilter("ignore", NoAnglesWarning)
        if settings.tomograms is not None:
            particles, notes = _from_tomograms(settings)
        else:
            particles = read_particles(
                Path(settings.particles),
                pixel_size_angst=settings.pixel_size_angst,
                root=settings.root,
                premultiplied=premultiplied,
                particle_names=settings.particle_names,
                wedge_list=settings.wedge_list,
                volume_axes=settings.volume_axes,
            )
            notes = []
        if particles.cut_from is None and particles.stacks is not None:
            particles = with_tilt_images(particles)
    if particles.volume_axes is not None and settings.volume_axes is None:
        warnings.append(
            "the volumes are taken to stand as rlnTomoSubtomogramRot/Tilt/Psi turn them, as relion_tomo_subtomo cuts them (--volume-axes tomogram"
            " where they do not)"
        )
    stand = _volumes_stand(particles, settings)
    positions = positions_angst(particles)
    particles = particles.in_volumes()
    half, remarks = assign_half_sets(particles, settings.split, settings.seed)
    warnings += remarks
    particles = particles.with_half(half)
    if settings.subset is not None:
        sizes = [int(np.count_nonzero(half == h)) for h in (1, 2)]
        if settings.subset > min(sizes):
            warnings.append(f"--subset {settings.subset}: the half-sets have {sizes[0]} and {sizes[1]} particles; smaller ones are taken whole")
        rows = np.sort(np.concatenate([np.flatnonzero(half == h)[: settings.subset] for h in (1, 2)]))
        particles, positions = particles.take(rows), positions[rows]
    classical = isinstance(settings, AverageSettings) and settings.weighting == "ctf"
    groups = find_noise_groups(particles, "none" if classical else settings.noise_groups)
    if len(groups.names) > 1:
        particles = replace(particles, noise_groups=groups.index)
    box = particles.box_size
    try:
        binned = binned_box_size(box, settings.binning)
    except ValueError as problem:
        raise SettingsError(f"--binning: {problem}") from None
    grid = Grid(box, binned, particles.pixel_size_angst)
    warnings += far_off(particles.names, particles.poses, grid)
    mask, mask_name, particle_mask, diameter, source = _masks(settings, grid)
    warnings += neighbours_across(positions, particles.tomograms, particles.half, 0.25 * diameter, particles.names)
    if settings.mask is not None:
        warnings += _off_centre(mask, grid, settings.mask)
        warnings += _lopsided(mask, settings.symmetry, settings.mask)
    elif settings.particle_diameter_angst is not None:
        warnings += _beyond_box(settings, grid)
    keep_best = getattr(settings, "keep_best_percent", None)
    if keep_best is not None and keep_best < 1:
        warnings.append(
            f"--keep-best {keep_best:g}: less than one particle in a hundred is averaged; it is a percentage, {100 * keep_best:g} was meant?"
        )
    tilt_range = None
    if any(path is None for path in particles.weight_paths):
        if settings.tilt_range_deg is not None:
            tilt_range = TiltRange(*settings.tilt_range_deg, settings.tilt_axis, settings.flip_tilt)
        else:
            what = "the list names no wedge or CTF volume and no --tilt-range" if particles.cut_from is None else "no --tilts and no --tilt-range"
            warnings.append(f"{what} is given: all of Fourier space is taken as measured")
    elif settings.tilt_range_deg is not None:
        warnings.append("--tilt-range is not used: every particle of the list has its own wedge or CTF volume")
    reader = ParticleReader(grid, particle_mask, settings.normalise, settings.invert_contrast, tilt_range, settings.flip_tilt)
    size_angst = binned * grid.binned_pixel_size_angst
    k_limit = float(max_band(binned))
    k_min = 0.0
    references: list[NDArray[np.float32]] = []
    listed = None
    if isinstance(settings, AlignSettings):
        if settings.lowpass_angst is not None:
            k_limit = min(k_limit, size_angst / settings.lowpass_angst)
        _refuse_wide_shifts(settings, grid)
        if settings.highpass_angst is not None:
            k_min = size_angst / settings.highpass_angst
        if k_limit < max(3.0, k_min + 2.0):
            given = {"--highpass": settings.highpass_angst, "--lowpass": settings.lowpass_angst, "--binning": settings.binning}
            named = ", ".join(f"{option} {value:g}" for option, value in given.items() if value not in (None, 1.0)) or "the box"
            raise SettingsError(
                f"{named}: nothing is left to align between {size_angst / max(k_min, 1.0):.3g} A and {size_angst / k_limit:.3g} A"
                f" in a box of {size_angst:.4g} A; expected a wider band"
            )
        if not resume:
            for path in settings.references:
                start_map = _start_map(grid, path, settings.initial_lowpass_angst, particles.pixel_size_source)
                references.append(mirrored(start_map) if settings.mirror else start_map)
        if settings.angle_list is not None:
            listed = distinct_rotations(read_angle_list(settings.angle_list))
        _refuse_many_classes(particles, settings)
        warnings += _classes_of_list(particles, settings)
    _check_weights(particles, reader, k_min, k_limit)
    first, further = (references[0], tuple(references[1:])) if references else (None, ())
    masks = particle_mask, mask, mask_name, diameter, source
    return Job(settings, particles, reader, *masks, k_min, k_limit, first, warnings, groups, further, tuple(notes), listed, stand)


def _volumes_stand(particles: ParticleSet, settings: AlignSettings | AverageSettings) -> str:
    """How volumes stand and who says so, of particles that have not been turned into them yet."""
    if settings.volume_axes is None and getattr(particles.source, "axes", None) is None:
        return ""
    how = "as the tomogram" if particles.volume_axes is None else "as rlnTomoSubtomogramRot/Tilt/Psi turn them"
    return f"stand {how} ({'by the list' if settings.volume_axes is None else f'--volume-axes {settings.volume_axes}'})"


def _from_tomograms(settings: AlignSettings | AverageSettings) -> tuple[ParticleSet, list[str]]:
    """Particles at the places of the list, to be cut from tomograms, and what was read and assumed."""
    assert settings.tomograms is not None and settings.box_size is not None
    particles = _read_places(settings)
    tilts = None if settings.tilts is None else TiltFiles(Path(settings.tilts), settings.tilt_axis, settings.flip_tilt)
    particles, notes, left_out = cut_from_tomograms(
        particles,
        settings.box_size,
        Path(settings.tomograms),
        edge=settings.edge,
        pixel_size_angst=settings.pixel_size_angst,
        coordinate_pixel_size_angst=settings.coordinate_pixel_size_angst,
        tilts=tilts,
        ctf=settings.ctf,
    )
    if left_out:
        name, reason = left_out[0]
        python_warnings.warn(f"{plural(len(left_out), 'particle')} left out, such as {name}: {reason}", stacklevel=2)
    if isinstance(settings, AverageSettings) and settings.premultiplied is not None:
        particles = replace(particles, premultiplied=settings.premultiplied)
    return particles, notes


def _read_places(settings: AlignSettings | AverageSettings) -> ParticleSet:
    """The list without its volumes. Shifts that it gives in voxels of unknown size count those of its coordinates."""
    voxel = settings.coordinate_pixel_size_angst or settings.pixel_size_angst

    def read(pixel_size_angst: float | None) -> ParticleSet:
        return read_particles(
            Path(settings.particles),
            pixel_size_angst=pixel_size_angst,
            root=settings.root,
            require_volumes=False,
            particle_names=settings.particle_names,
            wedge_list=settings.wedge_list,
        )

    try:
        particles = read(None)
    except InputError:
        if voxel is None:
            raise
        return read(voxel)
    if np.isfinite(particles.poses.shifts_angst).all():
        return particles
    if voxel is None:
        raise InputError(f"{settings.particles}: shifts in voxels and no pixel size; expected --coordinate-pixel-size, of the list's voxels")
    return read(voxel)


def far_off(names: Sequence[str], poses: Poses, grid: Grid, found: bool = False) -> list[str]:
    """A line where poses are so far from the centres of their boxes that they are not in them.

    Parameters
    ----------
    names : sequence of str
    poses : Poses
        Relative to the centres of the boxes.
    grid : Grid
    found : bool
        By a search, not given by the list.
    """
    far = np.linalg.norm(poses.shifts_angst, axis=1)
    outside = far > grid.half_box_angst
    if not outside.any():
        return []
    worst = int(np.argmax(far))
    where = (
        f"{np.count_nonzero(outside)} of {len(far)} particles {'were found' if found else 'lie'} farther from the centres of their boxes than"
        f" half a box ({grid.half_box_angst:.4g} A), such as {names[worst]}, {far[worst]:.4g} A"
    )
    if found:
        return [f"{where}: beyond an edge the box comes round from its other side; expected a smaller --shift-range or --max-shift"]
    return [f"{where}: are the list's shifts and the pixel size right?"]


def _refuse_wide_shifts(settings: AlignSettings, grid: Grid) -> None:
    """Beyond an edge a box comes round from its other side, and the same particle is found again there."""
    given, limit = settings.shift_range_angst, grid.half_box_angst
    if given is None or min(given, settings.max_shift_angst or given) <= limit * (1.0 + 1e-9):
        return
    raise SettingsError(f"--shift-range {given:g} A reaches beyond the box (+-{limit:.4g} A); expected at most {limit:.4g}")


def _refuse_many_classes(particles: ParticleSet, settings: AlignSettings) -> None:
    """Classes that are drawn need two particles in each half; those with start maps may be empty."""
    if settings.classes == 1 or settings.further_references:
        return
    sizes = [int(np.count_nonzero(particles.half == half)) for half in (1, 2)]
    if min(sizes) < 2 * settings.classes:
        least = sizes.index(min(sizes)) + 1
        raise SettingsError(
            f"--classes {settings.classes}: half-set {least} has {min(sizes)} particles; expected at least two a class, {2 * settings.classes}"
        )


def start_classes(particles: ParticleSet, count: int) -> NDArray[np.int64] | None:
    """Classes, from 0, that the list gives its particles, where each of `count` has two in either half-set."""
    if particles.classes is None:
        return None
    places = [particles.classes[particles.half == half] for half in (1, 2)]
    if particles.classes.max() > count or any((np.bincount(place, minlength=count + 1)[1 : count + 1] < 2).any() for place in places):
        return None
    return particles.classes.astype(np.int64) - 1 if particles.classes.min() > 0 else None


def _classes_of_list(particles: ParticleSet, settings: AlignSettings) -> list[str]:
    """A line where the list's own classes are (not) used."""
    if settings.classes == 1 or particles.classes is None or len(np.unique(particles.classes)) < 2:
        return []
    if settings.further_references:
        return ["the list's rlnClassNumber is not used: each class has a start map; it is replaced in the result"]
    if start_classes(particles, settings.classes) is None:
        found = ", ".join(f"{number} ({int((particles.classes == number).sum())})" for number in np.unique(particles.classes)[:10])
        return [
            f"the list's rlnClassNumber is not used: expected 1 to {settings.classes} with two particles of each in either half-set, found {found};"
            " classes are drawn at random"
        ]
    return ["classes start from the list's rlnClassNumber, not at random"]


@contextmanager
def _kept_in(lines: list[str]) -> Iterator[None]:
    """What the readers warn of joins the job's own warnings, which log and report show too."""
    with python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            lines.append(" ".join(str(warning.message).split()))
        else:
            python_warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _check_weights(particles: ParticleSet, reader: ParticleReader, k_min: float, k_limit: float) -> None:
    """The first few weight volumes are read before work starts; a bad one among the others costs its particles only."""
    shells = grid_shells(reader.grid.binned_box_size)
    band = (shells >= max(1.0, k_min)) & (shells <= k_limit)
    for weight in list(dict.fromkeys(particles.weight_paths))[:_CHECKED_WEIGHTS]:
        if not reader.read_weight(weight)[band].any():
            name = f"tilts {_tilts(weight)} of the list" if isinstance(weight, tuple) else str(weight or "--tilt-range")
            raise VolumeError(f"{name}: a wedge that leaves nothing in the band; expected weights other than 0 there")


def _tilts(weight: tuple[TiltRange, ...]) -> str:
    """Tilt ranges in words."""
    return " and ".join(f"{t.tilt_min_deg:g} to {t.tilt_max_deg:g}" for t in weight)


def _masks(settings: AlignSettings | AverageSettings, grid: Grid) -> tuple[NDArray[np.float32], str, ParticleMask, float, str]:
    """Mask of the reference, its name, the particles' sphere, the diameter and where it came from."""
    n, pixel = grid.binned_box_size, grid.binned_pixel_size_angst
    box_angst = n * pixel
    diameter, source = settings.particle_diameter_angst, "--particle-diameter"
    if diameter is not None and diameter > box_angst * math.sqrt(3.0):
        raise SettingsError(f"--particle-diameter {diameter:g} A does not fit the box of {box_angst:.3g} A ({n} voxels of {pixel:.3g} A)")
    if diameter is not None and diameter < _LEAST_DIAMETER_VOXELS * pixel:
        given = "" if settings.pixel_size_angst is None else ", as --pixel-size says"
        binned = f"; {pixel:.3g} A by --binning {settings.binning:g}" if n != grid.box_size else ""
        raise SettingsError(
            f"--particle-diameter {diameter:g} A is {diameter / pixel:.2g} voxels (of {grid.pixel_size_angst:.3g} A{given}{binned}):"
            f" too few to tell orientations; expected at least {_LEAST_DIAMETER_VOXELS:g} voxels, {_LEAST_DIAMETER_VOXELS * pixel:.3g} A"
        )
    if settings.mask is not None:
        volume = read_volume(Path(settings.mask))
        mask = check_mask(volume.data, grid.box_size, settings.mask)
        if getattr(settings, "mirror", False):
            mask = mirrored(mask)
        mask = np.clip(fourier_crop(mask, n), 0.0, 1.0)
        zyx = np.indices(mask.shape) - n // 2
        radius = float(np.sqrt((zyx**2).sum(0))[mask > 0.5].max(initial=1.0))
        if diameter is None:
            diameter, source = 2.0 * radius * pixel, "the mask"
        # the particles' own sphere must hold the mask with room for the shifts
        return mask, settings.mask, ParticleMask(max(radius + 2.0, 0.5 * diameter / pixel), settings.soft_edge_voxels), diameter, source
    if diameter is None:
        diameter, source = _DEFAULT_DIAMETER_OF_BOX * box_angst, f"{_DEFAULT_DIAMETER_OF_BOX} of the box"
    radius = 0.5 * diameter / pixel
    sphere = ParticleMask(radius, settings.soft_edge_voxels)
    return spherical_mask(n, radius, settings.soft_edge_voxels), f"sphere of {diameter:.0f} A", sphere, diameter, source


def _off_centre(mask: NDArray[np.float32], grid: Grid, name: str) -> list[str]:
    """A line where a mask stands beside the point that particles turn about."""
    offset, diameter = mask_offset_voxels(mask)
    if offset <= min(0.25 * diameter, 0.1 * len(mask)):
        return []
    pixel = grid.binned_pixel_size_angst
    return [
        f"{name}: its centre of mass is {offset * pixel:.0f} A from the centre of the box, its own diameter (of a sphere as large)"
        f" {diameter * pixel:.0f} A, the box {len(mask) * pixel:.0f} A: particles turn about the centre of the box, where the particle should be"
    ]


def _lopsided(mask: NDArray[np.float32], symmetry: str, name: str) -> list[str]:
    """A line where the mask does not have the symmetry: what it cuts out of a symmetric map has not either."""
    if symmetry == "C1":
        return []
    correlation, _ = symmetry_agreement(mask, np.ones_like(mask), symmetry)
    if correlation >= _LIKE_ITSELF:
        return []
    return [
        f"{name}: the mask correlates with its {symmetry}-symmetrised self by {correlation:.2f} only: references are symmetric as far as their mask"
        " is; expected a mask of that symmetry about the centre of the box"
    ]


def _beyond_box(settings: AlignSettings | AverageSettings, grid: Grid) -> list[str]:
    """A line where the sphere with its edge does not fit the box, which then cuts it."""
    assert settings.particle_diameter_angst is not None
    half_box_angst = 0.5 * grid.binned_box_size * grid.binned_pixel_size_angst
    edge_angst = settings.soft_edge_voxels * grid.binned_pixel_size_angst
    reach = 0.5 * settings.particle_diameter_angst + edge_angst
    if reach <= half_box_angst * (1.0 + 1e-9):
        return []
    fits = 2.0 * (half_box_angst - edge_angst)
    smaller = f"at most {fits:.4g} A, " if fits >= _LEAST_DIAMETER_VOXELS * grid.binned_pixel_size_angst else ""
    return [
        f"--particle-diameter {settings.particle_diameter_angst:g} A and its soft edge of {settings.soft_edge_voxels:g} voxels reach {reach:.4g} A"
        f" from the centre, the box only {half_box_angst:.4g} A: the box cuts the mask off; expected {smaller}a smaller --soft-edge, or a larger box"
    ]


def _start_map(grid: Grid, path: str, lowpass_angst: float, pixel_size_source: str) -> NDArray[np.float32]:
    """The start map on the worked grid, low-passed."""
    volume = read_volume(Path(path))
    if volume.box_size != grid.box_size:
        raise VolumeError(f"{path}: its box is {volume.box_size}, expected {grid.box_size} as the particles")
    unusable = int(np.count_nonzero(~np.isfinite(volume.data)))
    if unusable:
        raise VolumeError(f"{path}: expected a map, found values that are not finite (NaN or infinity) in {plural(unusable, 'voxel')}")
    if float(np.ptp(volume.data)) == 0.0:
        raise VolumeError(f"{path}: expected a map, found a constant one (every value is {float(volume.data.flat[0]):g})")
    pixel = volume.pixel_size_angst
    if np.isfinite(pixel) and abs(pixel / grid.pixel_size_angst - 1.0) > SAME_PIXEL_SIZE:
        raise VolumeError(
            f"{path}: expected the particles' pixel size of {grid.pixel_size_angst:g} A (from {pixel_size_source}), found {pixel:g} A in its header;"
            f" resample the map, or where only its header is wrong set that: python -c \"import mrcfile; f = mrcfile.open({path!r}, 'r+');"
            f' f.voxel_size = {grid.pixel_size_angst:g}; f.close()"'
        )
    return lowpass(fourier_crop(volume.data, grid.binned_box_size), grid.binned_pixel_size_angst, lowpass_angst)


def particle_bytes(box_size: int) -> int:
    """Memory of one prepared particle at the full band: its padded spectrum and its grid spectrum."""
    c = padded_offset(max_band(box_size))
    return 8 * (2 * c + 1) ** 2 * (c + 1) + 4 * box_size**3


def largest_chunk(box_size: int) -> int:
    """Particles of a task on the CPU: few enough that a worker holds them all, whatever the list's length."""
    return int(min(128, max(8, _CHUNK_BYTES // particle_bytes(box_size))))


def make_chunks(
    particles: ParticleSet,
    anchors: Poses,
    half: int,
    parts: int = 8,
    largest: int = 128,
    included: NDArray[np.bool_] | None = None,
    smallest: int = 8,
) -> list[Chunk]:
    """Chunks of one half-set (of those `included`): a function of list and box alone, so that no result depends on workers or their speed.

    There are `parts` of them; more where they would have more than `largest` particles, fewer where they would have less than `smallest`.
    """
    wanted = particles.half == half
    rows = np.flatnonzero(wanted if included is None else wanted & included).astype(np.int64)
    size = int(min(largest, max(8, math.ceil(len(rows) / parts))))
    if size < smallest:  # of one size, or the last one would be a remnant
        size = max(1, min(largest, math.ceil(len(rows) / max(1, len(rows) // smallest))))
    chunks = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        chunks.append(
            Chunk(
                half,
                part,
                tuple(particles.names[i] for i in part),
                tuple(particles.voxels_from[i] for i in part),
                tuple(particles.weight_paths[i] for i in part),
                np.asarray(particles.poses.rotations[part], np.float64),
                np.asarray(particles.poses.shifts_angst[part], np.float64),
                np.asarray(anchors.shifts_angst[part], np.float64),
                np.asarray(anchors.rotations[part], np.float64),
                None if particles.noise_groups is None else particles.noise_groups[part],
            )
        )
    return chunks
