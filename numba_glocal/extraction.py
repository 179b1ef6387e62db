"""Particles cut out of tomograms at the places of a list, with their wedge or CTF volumes (docs/conventions.md, 11)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, SettingsError, VolumeError
from .io import write_volume
from .io.relion import USUAL_OPTICS, RelionSource, write_relion_particles
from .io.tilt_series import TiltFiles, TiltSeries
from .particles import fourier_crop
from .passes import Stage
from .tomogram_boxes import LISTED, cut, place_boxes, series_weight, tomogram_weights
from .values import CTF_KINDS, EDGES, ParticleSet, Poses, TomogramWeight, Volume
from .wedge import full_layout, tilt_range_weights

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
    placed = place_boxes(
        particles,
        settings.tomogram_folder,
        pixel_size_angst=settings.pixel_size_angst,
        coordinate_pixel_size_angst=settings.coordinate_pixel_size_angst,
        tilts=settings.tilts,
        ctf=settings.ctf,
        recentre=settings.recentre,
    )
    centres, tomograms, series = placed.centres, placed.tomograms, placed.series
    n, m = settings.cut_size, settings.box_size
    pixel_out = placed.pixel_size_angst * n / m
    count = len(particles)
    written: list[Path | None] = [None] * count
    weights: list[Path | None] = [None] * count
    left_out: list[tuple[str, str]] = []
    padded = 0
    weigher = _Weigher(settings, output, pixel_out)
    with nullcontext() if stage is None else stage("extract", count) as running:
        for name, rows in placed.rows_of.items():
            data, label = tomograms[name].data, _file_label(name, tomograms[name].path)
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
                    held = None
                    if name in series:
                        height = tomograms[name].height_angst(centres[row])
                        held = series_weight(series[name], pixel_out, settings.ctf, settings.exposure_filter, height)
                    weights[row] = weigher.path(label, held)
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
        poses=Poses(particles.poses.rotations[kept], placed.shifts_angst[kept]),
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
    return Extracted(result, list_path, left_out, padded, placed.notes)


def _listed(path: Path | None, output: Path) -> str:
    """A file as the list names it: from the current folder (the project's, as RELION has it) where it is inside, else from the list's own."""
    if path is None:
        return "None"
    inside = output.resolve().is_relative_to(Path.cwd())
    return str(path.resolve().relative_to(Path.cwd() if inside else output.resolve()))


def _file_label(name: str, path: Path) -> str:
    """A tomogram's name for files."""
    stem = Path(name or path.name).name
    while Path(stem).suffix.lower() in LISTED:
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
        self.written: dict[tuple[str, TomogramWeight | None], Path] = {}
        self.count: dict[str, int] = {}

    def path(self, label: str, held: TomogramWeight | None) -> Path | None:
        """The weights of a particle of a tomogram, by its tilts or by the range given."""
        settings = self.settings
        if held is None and settings.tilt_range_deg is None:
            return None
        key = ("" if held is None else label, held)
        if key not in self.written:
            n = settings.box_size
            if held is None:
                assert settings.tilt_range_deg is not None
                weights = tilt_range_weights(n, *settings.tilt_range_deg, tilt_axis=settings.tilt_axis, flip=settings.flip_tilt, smooth_voxels=1.0)
                target = self.output / "weights" / "wedge.mrc"
            else:
                weights = tomogram_weights(held, n)
                self.count[label] = self.count.get(label, 0) + 1
                number = "" if settings.ctf == "none" else f"_{self.count[label]:03d}"
                target = self.output / "weights" / f"{label}{number}.mrc"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_volume(target, Volume(full_layout(weights, n), self.pixel))
            self.written[key] = target
        return self.written[key]
