"""Particles cut out of tomograms at the places of a list, with their wedge or CTF volumes (docs/conventions.md, 11)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ctf import wavelength_angst
from .errors import InputError, ListError, SettingsError, VolumeError
from .io import write_volume
from .io.pixel_size import resolve_header_pixel_size
from .io.relion import USUAL_OPTICS, RelionSource, write_relion_particles
from .io.tilt_series import TiltFiles, TiltSeries
from .io.volumes import map_array
from .particles import fourier_crop
from .passes import Stage
from .tilt_images import multipliers, slice_sums
from .values import FloatArray, ParticleSet, Poses, Volume
from .wedge import full_layout, tilt_range_weights

EDGES = ("skip", "pad")
CTF_KINDS = ("none", "plain", "flipped", "multiplied")
_SUFFIXES = (".mrc", ".rec", ".map", ".em")
_LISTED = (".tomostar", *_SUFFIXES, ".st", ".mrcs")
# what a new list says in other columns, or what is no longer true of it
_REPLACED = frozenset(
    "rlnImageName rlnCtfImage rlnMicrographName rlnTomoName rlnOpticsGroup rlnAngleRot rlnAngleTilt rlnAnglePsi rlnOriginX rlnOriginY rlnOriginZ"
    " rlnOriginXAngst rlnOriginYAngst rlnOriginZAngst rlnCoordinateX rlnCoordinateY rlnCoordinateZ rlnCenteredCoordinateXAngst"
    " rlnCenteredCoordinateYAngst rlnCenteredCoordinateZAngst rlnTomoSubtomogramRot rlnTomoSubtomogramTilt rlnTomoSubtomogramPsi"
    " rlnTomoVisibleFrames rlnPixelSize rlnDetectorPixelSize rlnMagnification rlnRandomSubset rlnTomoSubtomogramBinning"
    " rlnTomoTiltSeriesPixelSize".split()
)


@dataclass(frozen=True, slots=True)
class ExtractionSettings:
    """What to cut.

    Attributes
    ----------
    box_size : int
        Edge of the particles that are written, in their own voxels.
    binning : float
        Particles are Fourier-cropped; ``round(box_size * binning)`` voxels are cut out of the tomogram, and the scale is the true ratio.
    recentre : bool
        Boxes stand where the list's shifts say that particles are; else at the coordinates.
    edge : str
        What becomes of a box that reaches beyond its tomogram: "skip", or "pad" with the mean of what is there.
    tomogram_folder : Path
        Where tomograms are; a file stands for all.
    pixel_size_angst : float or None
        Of the tomograms; overrides their headers.
    coordinate_pixel_size_angst : float or None
        Voxels that the list's coordinates count; None: what the list says, else the tomogram's own.
    tilts : TiltFiles or None
    tilt_range_deg : (float, float) or None
        For a plain wedge, where there are no `tilts`.
    tilt_axis : str
    flip_tilt : bool
    ctf : str
        What tomograms hold: "none" (no CTF is modelled), "plain" (not corrected), "flipped" (phases), "multiplied" (by the CTF).
    exposure_filter : bool
        Tilts' signal falls with exposure, as in `ctf.exposure_filter`.
    invert_contrast : bool
    """

    box_size: int
    tomogram_folder: Path
    binning: float = 1.0
    recentre: bool = True
    edge: str = "skip"
    pixel_size_angst: float | None = None
    coordinate_pixel_size_angst: float | None = None
    tilts: TiltFiles | None = None
    tilt_range_deg: tuple[float, float] | None = None
    tilt_axis: str = "y"
    flip_tilt: bool = False
    ctf: str = "none"
    exposure_filter: bool = True
    invert_contrast: bool = False

    def __post_init__(self) -> None:
        if self.box_size < 8:
            raise SettingsError(f"--box: expected 8 voxels or more, found {self.box_size}")
        if not (np.isfinite(self.binning) and self.binning >= 1):
            raise SettingsError(f"--binning: expected 1 or more, found {self.binning:g}")
        for option, value in (("--pixel-size", self.pixel_size_angst), ("--coordinate-pixel-size", self.coordinate_pixel_size_angst)):
            if value is not None and not (np.isfinite(value) and value > 0):
                raise SettingsError(f"{option}: expected a positive number, found {value:g}")
        for option, word, known in (("--edge", self.edge, EDGES), ("--ctf", self.ctf, CTF_KINDS)):
            if word not in known:
                raise SettingsError(f"{option}: expected one of {', '.join(known)}; found {word!r}")
        if self.tilts is None and self.ctf != "none":
            raise SettingsError(f"--ctf {self.ctf}: needs the defocus of each tilt; expected --tilts with a tomograms file")
        if self.tilts is not None and self.tilt_range_deg is not None:
            raise SettingsError("--tilts and --tilt-range: expected one of them")
        if self.tilt_range_deg is not None:
            low, high = self.tilt_range_deg
            if not -90 <= low < high <= 90:
                raise SettingsError(f"--tilt-range: expected -90 <= smallest < largest <= 90 degrees, found {low:g} {high:g}")

    @property
    def cut_size(self) -> int:
        """Edge of what is cut out of a tomogram, in its voxels."""
        return int(np.floor(self.box_size * self.binning + 0.5))


@dataclass(frozen=True, slots=True)
class Extracted:
    """What was cut.

    Attributes
    ----------
    particles : ParticleSet
        As written.
    list_path : Path
    left_out : list of (str, str)
        Name and reason.
    padded : int
        Boxes that reached beyond their tomogram.
    notes : list of str
        What was read and assumed: pixel sizes with their sources, tilts.
    """

    particles: ParticleSet
    list_path: Path
    left_out: list[tuple[str, str]]
    padded: int
    notes: list[str]


@dataclass(slots=True)
class Tomogram:
    """A tomogram, mapped and not read.

    Attributes
    ----------
    path : Path
    data : (nz, ny, nx) array
    pixel_size_angst : float
    source : str
        Where the pixel size came from.
    """

    path: Path
    data: NDArray[Any]
    pixel_size_angst: float
    source: str


def find_tomogram(name: str, folder: Path) -> Path:
    """The file of a tomogram: `folder` itself where it is a file, else ``NAME.mrc`` and so on in it, or the one ``NAME_*.mrc`` (as Warp names them).

    Raises
    ------
    InputError
        None, or several; with every path tried.
    """
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise InputError(f"{folder}: no such file or folder of tomograms")
    stem = Path(name).name
    while Path(stem).suffix.lower() in _LISTED:
        stem = stem[: -len(Path(stem).suffix)]
    tried = list(dict.fromkeys([folder / name, *(folder / f"{stem}{suffix}" for suffix in _SUFFIXES)]))
    for path in tried:
        if name and path.is_file():
            return path
    alike = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.name.startswith(f"{stem}_"))
    if len(alike) == 1 and stem:
        return alike[0]
    if alike and stem:
        raise InputError(f"tomogram {name}: {', '.join(p.name for p in alike[:4])} in {folder} could all be it; expected one, such as {tried[1]}")
    there = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    found = f"{', '.join(there[:3])}{' ...' if len(there) > 3 else ''}" if there else "no tomograms"
    raise InputError(f"tomogram {name or '(without a name)'} not found; tried {', '.join(map(str, tried))}; {folder} has {found}")


def open_tomogram(path: Path, pixel_size_angst: float | None) -> Tomogram:
    """Maps a tomogram.

    Raises
    ------
    VolumeError, InputError
        Unreadable; no pixel size in the header and none given.
    """
    data, header = map_array(path)
    pixel, source = resolve_header_pixel_size(pixel_size_angst, header.pixel_size_angst, path)
    return Tomogram(path, data, pixel, source)


def places_in_tomogram(
    particles: ParticleSet, rows: NDArray[np.intp], tomogram: Tomogram, coordinate_pixel_size_angst: float | None = None
) -> FloatArray:
    """Coordinates of some particles of one tomogram in its voxels, (n, 3) as ``(x, y, z)`` from the centre of the first voxel.

    Coordinates of another voxel size are scaled from the first voxel, as RELION does: ``x / x' = p' / p``.

    Raises
    ------
    ListError
        No coordinates, or centred ones of a tomogram whose size is not known.
    """
    if particles.coordinates is None:
        raise ListError("the list has no coordinates; expected rlnCoordinateX, rlnCoordinateY and rlnCoordinateZ")
    coordinates = particles.coordinates.take(rows)
    voxels = coordinates.as_voxels()
    size = np.where(np.isfinite(coordinates.voxel_size_angst), coordinates.voxel_size_angst, tomogram.pixel_size_angst)
    if coordinates.voxels is None and not np.isfinite(voxels).all():
        # the size of the tomogram that was centred is not known: this one's, binned or not
        assert coordinates.centred_angst is not None
        centre = np.array(tomogram.data.shape[::-1]) / 2 - size[:, None] / tomogram.pixel_size_angst
        return np.asarray(coordinates.centred_angst / tomogram.pixel_size_angst + centre, np.float64)
    if coordinate_pixel_size_angst is not None:
        size = np.full(len(rows), coordinate_pixel_size_angst)
    return np.asarray(voxels * (size / tomogram.pixel_size_angst)[:, None], np.float64)


def cut(data: NDArray[Any], centre: NDArray[np.integer[Any]], box_size: int, edge: str) -> tuple[NDArray[np.float32], bool]:
    """A box of a tomogram, its centre voxel ``n // 2`` at a voxel of the tomogram.

    Parameters
    ----------
    data : (nz, ny, nx)
    centre : (3,) int
        ``(x, y, z)``.
    box_size : int
        n.
    edge : {"skip", "pad"}

    Returns
    -------
    box : (n, n, n) float32
    beyond : bool
        Whether it reaches beyond the tomogram.

    Raises
    ------
    VolumeError
        It does, and `edge` is "skip"; or nothing of it is inside; or what is there is constant or not finite.
    """
    n = box_size
    first = np.asarray(centre)[::-1] - n // 2
    low, high = np.clip(first, 0, data.shape), np.clip(first + n, 0, data.shape)
    inside = bool((low == first).all() and (high == first + n).all())
    where = f"box of {n} voxels around voxel {', '.join(str(int(c)) for c in centre)} of {' x '.join(str(s) for s in data.shape[::-1])}"
    if (high <= low).any():
        raise VolumeError(f"{where}: outside of the tomogram")
    if not inside and edge == "skip":
        raise VolumeError(f"{where}: reaches beyond the tomogram (--edge pad keeps it)")
    part = np.asarray(data[low[0] : high[0], low[1] : high[1], low[2] : high[2]], np.float32)
    if not np.isfinite(part).all():
        raise VolumeError(f"{where}: values that are not finite")
    if np.ptp(part) == 0:
        raise VolumeError(f"{where}: every value is {part.flat[0]:g}")
    if inside:
        return np.ascontiguousarray(part), False
    box = np.full((n, n, n), part.mean(dtype=np.float64), np.float32)
    a, b = low - first, high - first
    box[a[0] : b[0], a[1] : b[1], a[2] : b[2]] = part
    return box, True


def extract(
    particles: ParticleSet,
    output: Path,
    settings: ExtractionSettings,
    stage: Stage | None = None,
) -> Extracted:
    """Cut particles, write them with their weights and a list.

    Parameters
    ----------
    particles : ParticleSet
        With coordinates; volumes are not needed.
    output : Path
        Folder: gets ``particles.star``, ``subtomo/TOMOGRAM/`` and ``weights/``.
    settings : ExtractionSettings
    stage : callable, optional
        ``stage(title, particles)`` makes a progress display, once everything is checked.

    Returns
    -------
    Extracted

    Raises
    ------
    InputError, ListError, VolumeError
        Anything missing is found before the first particle is written.
    """
    if particles.coordinates is None:
        raise ListError("the list has no coordinates; expected rlnCoordinateX, rlnCoordinateY and rlnCoordinateZ")
    if settings.recentre and not np.isfinite(particles.poses.shifts_angst).all():
        raise InputError("the list gives shifts in pixels and no pixel size; give --list-pixel-size, or --no-recentre")
    names = list(dict.fromkeys(particles.tomograms))
    paths = {name: find_tomogram(name, settings.tomogram_folder) for name in names}
    if len(set(paths.values())) < len(names):
        twice = next(name for name in names if list(paths.values()).count(paths[name]) > 1)
        raise InputError(f"{len(names)} tomograms of the list share the file {paths[twice]}; expected one file for each (a folder)")
    tomograms = {name: open_tomogram(path, settings.pixel_size_angst) for name, path in paths.items()}
    pixel = _one_pixel_size(tomograms)
    series = {name: settings.tilts[name] for name in names} if settings.tilts is not None else {}
    for name, found in series.items():
        if settings.ctf != "none" and found.defocus_angst is None:
            raise ListError(f"--ctf {settings.ctf}: the tilts of {name} ({found.name}) have no _rlnDefocusU; expected the defocus of each image")
    notes = [f"pixel size of the tomograms {pixel:g} A ({next(iter(tomograms.values())).source})"]
    notes += settings.tilts.notes if settings.tilts is not None else []

    n, m = settings.cut_size, settings.box_size
    pixel_out = pixel * n / m
    count = len(particles)
    centres = np.zeros((count, 3), np.int64)
    shifts = np.zeros((count, 3))
    written: list[Path | None] = [None] * count
    weights: list[Path | None] = [None] * count
    left_out: list[tuple[str, str]] = []
    padded = 0
    weigher = _Weigher(settings, output, pixel_out)
    rows_of = {name: np.flatnonzero([tomogram == name for tomogram in particles.tomograms]) for name in names}
    for name, rows in rows_of.items():
        coordinates = places_in_tomogram(particles, rows, tomograms[name], settings.coordinate_pixel_size_angst)
        notes += _scale_note(particles, rows, name, tomograms[name], settings)
        at = coordinates + np.nan_to_num(particles.poses.shifts_angst[rows]) / pixel
        centres[rows] = np.floor((at if settings.recentre else coordinates) + 0.5).astype(np.int64)
        shifts[rows] = (at - centres[rows]) * pixel
    with nullcontext() if stage is None else stage("extract", count) as running:
        for name, rows in rows_of.items():
            data, label = tomograms[name].data, _file_label(name, paths[name])
            folder = output / "subtomo" / label
            for number, row in enumerate(rows, 1):
                try:
                    box, beyond = cut(data, centres[row], n, settings.edge)
                except VolumeError as problem:
                    left_out.append((particles.names[row], str(problem)))
                else:
                    padded += beyond
                    folder.mkdir(parents=True, exist_ok=True)
                    target = folder / f"{label}_{number:06d}.mrc"
                    write_volume(target, Volume(fourier_crop(-box if settings.invert_contrast else box, m), pixel_out))
                    written[row] = target
                    height = (centres[row] - (np.array(data.shape[::-1]) / 2 - 1)) * pixel
                    weights[row] = weigher.path(label, series.get(name), height)
                if running is not None:
                    running.advance(1)
    kept = np.flatnonzero([path is not None for path in written])
    if not len(kept):
        raise InputError(f"none of {count} particles could be cut: {left_out[0][0]}: {left_out[0][1]}")
    result = replace(
        particles.take(kept),
        # Warp's own lists, which such names tell, count coordinates in the images' voxels
        tomograms=tuple(particles.tomograms[i].removesuffix(".tomostar") for i in kept),
        names=tuple(_listed(written[i], output) for i in kept),
        volume_paths=tuple(written[i] for i in kept),  # type: ignore[misc]
        weight_paths=tuple(weights[i] for i in kept),
        poses=Poses(particles.poses.rotations[kept], shifts[kept]),
        pixel_size_angst=pixel_out,
        pixel_size_source="extraction",
        pixel_sizes_angst=None,
        box_size=m,
        premultiplied=settings.ctf == "multiplied",
        source=None,
        coordinates=None,
        volume_axes=None,
        stacks=None,
    )
    list_path = output / "particles.star"
    columns = _columns(particles, kept, centres[kept])
    if any(path is not None for path in weights):
        columns["rlnCtfImage"] = np.array([_listed(weights[i], output) for i in kept])
    write_relion_particles(list_path, result, columns, _microscope(particles, next(iter(series.values()), None)))
    return Extracted(result, list_path, left_out, padded, notes)


def _listed(path: Path | None, output: Path) -> str:
    """A file as the list names it: from the current folder (the project's, as RELION has it) where it is inside, else from the list's own."""
    if path is None:
        return "None"
    inside = output.resolve().is_relative_to(Path.cwd())
    return str(path.resolve().relative_to(Path.cwd() if inside else output.resolve()))


def _one_pixel_size(tomograms: dict[str, Tomogram]) -> float:
    """Of all tomograms; different ones cannot stand in one list."""
    sizes = {name: tomogram.pixel_size_angst for name, tomogram in tomograms.items()}
    low, high = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[high] > 1.001 * sizes[low]:
        raise InputError(f"tomograms of different pixel sizes: {sizes[low]:g} A ({low}), {sizes[high]:g} A ({high}); expected one, or --pixel-size")
    return sizes[low]


def _scale_note(particles: ParticleSet, rows: NDArray[np.intp], name: str, tomogram: Tomogram, settings: ExtractionSettings) -> list[str]:
    """A line where coordinates count other voxels than the tomogram's."""
    assert particles.coordinates is not None
    size = particles.coordinates.voxel_size_angst[rows]
    if particles.coordinates.voxels is None:
        return []
    given = settings.coordinate_pixel_size_angst
    voxel = given if given is not None else float(size[0])
    if not np.isfinite(voxel):
        return [f"{name}: coordinates are taken as voxels of the tomogram; the list does not say (--coordinate-pixel-size)"]
    if abs(voxel / tomogram.pixel_size_angst - 1) < 1e-3:
        return []
    source, factor = "option" if given is not None else "list", tomogram.pixel_size_angst / voxel
    return [f"{name}: coordinates in voxels of {voxel:g} A ({source}) are divided by {factor:.4g}"]


def _file_label(name: str, path: Path) -> str:
    """A tomogram's name for files."""
    stem = Path(name or path.name).name
    while Path(stem).suffix.lower() in _LISTED:
        stem = stem[: -len(Path(stem).suffix)]
    return stem.replace(" ", "_") or "tomogram"


def _microscope(particles: ParticleSet, series: TiltSeries | None) -> dict[str, float]:
    """Voltage and so on, as the tilts or the list have them."""
    known = {}
    if isinstance(particles.source, RelionSource) and "optics" in particles.source.document:
        optics = particles.source.document["optics"]
        known = {label: float(optics.floats(label)[0]) for label in USUAL_OPTICS if label in optics.labels}
    if series is not None:
        given = (series.voltage_kv, series.spherical_aberration_mm, series.amplitude_contrast)
        known |= {label: value for label, value in zip(USUAL_OPTICS, given, strict=True) if np.isfinite(value)}
    return known


def _columns(particles: ParticleSet, kept: NDArray[np.intp], centres: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Coordinates of the boxes' centres, and columns of the list that stay true."""
    columns: dict[str, NDArray[Any]] = {f"rlnCoordinate{axis}": centres[:, i] for i, axis in enumerate("XYZ")}
    if isinstance(particles.source, RelionSource):
        block, rows = particles.source.block, particles.source.rows[kept]
        for label in block.labels:
            if label not in _REPLACED:
                texts = block.texts(label)
                columns[label] = np.array([texts[row] for row in rows])
    return columns


class _Weigher:
    """Weight volumes, each written once."""

    def __init__(self, settings: ExtractionSettings, output: Path, pixel_size_angst: float) -> None:
        self.settings, self.output, self.pixel = settings, output, pixel_size_angst
        # places as near as this differ by a tenth of a radian in the CTF's phase at Nyquist
        self.step_angst = 0.1 / (np.pi * wavelength_angst(300.0)) * (2.0 * pixel_size_angst) ** 2
        self.written: dict[Any, Path] = {}
        self.count: dict[str, int] = {}

    def path(self, label: str, series: TiltSeries | None, height_angst: FloatArray) -> Path | None:
        """The weights of a particle at a place from its tomogram's centre."""
        settings = self.settings
        if series is None and settings.tilt_range_deg is None:
            return None
        place = np.rint(height_angst / self.step_angst).astype(int) if settings.ctf != "none" else np.zeros(3, int)
        key = (label if series is not None else "", *place.tolist())
        if key not in self.written:
            n = settings.box_size
            if series is None:
                assert settings.tilt_range_deg is not None
                weights = tilt_range_weights(n, *settings.tilt_range_deg, tilt_axis=settings.tilt_axis, flip=settings.flip_tilt, smooth_voxels=1.0)
                target = self.output / "weights" / "wedge.mrc"
            else:
                weights = series_weights(series, n, self.pixel, settings.ctf, settings.exposure_filter, place * self.step_angst)
                self.count[label] = self.count.get(label, 0) + 1
                number = "" if settings.ctf == "none" else f"_{self.count[label]:03d}"
                target = self.output / "weights" / f"{label}{number}.mrc"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_volume(target, Volume(full_layout(weights, n), self.pixel))
            self.written[key] = target
        return self.written[key]


def series_weights(
    series: TiltSeries, box_size: int, pixel_size_angst: float, ctf: str = "none", with_exposure: bool = True, centred_angst: FloatArray | None = None
) -> NDArray[np.float32]:
    """What a tomogram of a tilt series holds of a structure: the mean of the tilts that pass each sample, less where only parts of one do.

    Parameters
    ----------
    series : TiltSeries
    box_size : int
        n.
    pixel_size_angst : float
    ctf : {"none", "plain", "flipped", "multiplied"}
        Which power of the CTF: none, itself, its absolute value, its square.
    with_exposure : bool
        Whether the signal falls with exposure; its square where tilts are multiplied.
    centred_angst : (3,), optional
        The particle's place from the tomogram's centre.

    Returns
    -------
    (n, n, n//2+1) float32
        Grid half-spectrum, corner origin; 1 at k = 0.
    """
    every = np.flatnonzero(series.scale != 0)
    geometry = series.geometry(every, every, pixel_size_angst, ctf=ctf != "none", centred_angst=centred_angst)
    if not with_exposure:
        geometry = replace(geometry, exposure=np.zeros(len(every)))
    values = multipliers(geometry, box_size, ctf=ctf != "none")
    if ctf == "flipped":
        values = np.abs(values)
    elif ctf == "multiplied":
        values = values**2
    sums, slices = slice_sums(geometry.axes, values, box_size)
    weights = sums / np.maximum(slices, np.float32(1))
    weights[0, 0, 0] = 1
    return np.ascontiguousarray(weights, np.float32)
