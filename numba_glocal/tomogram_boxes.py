"""Boxes in tomograms: where the particles of a list stand, how a box is cut, and the weights that go with it (docs/conventions.md, 11)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ctf import wavelength_angst
from .errors import InputError, ListError, VolumeError
from .io.pixel_size import resolve_header_pixel_size
from .io.tilt_series import TiltFiles, TiltSeries
from .io.volumes import map_array
from .tilt_images import multipliers, slice_sums
from .values import BoxesInTomograms, FloatArray, ParticleSet, Poses, TomogramBox, TomogramWeight, Weight

SUFFIXES = (".mrc", ".rec", ".map", ".em")
LISTED = (".tomostar", *SUFFIXES, ".st", ".mrcs")
"""What names of tomograms may end in."""
_OPEN = 256


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

    def height_angst(self, centre: NDArray[np.integer[Any]]) -> FloatArray:
        """A voxel's place ``(x, y, z)`` from the tomogram's centre."""
        return np.asarray((centre - (np.array(self.data.shape[::-1]) / 2 - 1)) * self.pixel_size_angst, np.float64)


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
    while Path(stem).suffix.lower() in LISTED:
        stem = stem[: -len(Path(stem).suffix)]
    tried = list(dict.fromkeys([folder / name, *(folder / f"{stem}{suffix}" for suffix in SUFFIXES)]))
    for path in tried:
        if name and path.is_file():
            return path
    alike = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name.startswith(f"{stem}_"))
    if len(alike) == 1 and stem:
        return alike[0]
    if alike and stem:
        raise InputError(f"tomogram {name}: {', '.join(p.name for p in alike[:4])} in {folder} could all be it; expected one, such as {tried[1]}")
    there = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
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
    first, low, high, inside, where = _refuse_beyond(data.shape, centre, n, edge)
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


def _refuse_beyond(
    shape: tuple[int, ...], centre: NDArray[np.integer[Any]], n: int, edge: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], bool, str]:
    """Of a box: its first voxel, the range of it that is there ``[z, y, x]``, whether that is all, and words for messages."""
    first = np.asarray(centre)[::-1] - n // 2
    low, high = np.clip(first, 0, shape), np.clip(first + n, 0, shape)
    inside = bool((low == first).all() and (high == first + n).all())
    where = f"box of {n} voxels around voxel {', '.join(str(int(c)) for c in centre)} of {' x '.join(str(s) for s in shape[::-1])}"
    if (high <= low).any():
        raise VolumeError(f"{where}: outside of the tomogram")
    if not inside and edge == "skip":
        raise VolumeError(f"{where}: reaches beyond the tomogram (--edge pad keeps it)")
    return first, low, high, inside, where


@dataclass(slots=True)
class Placed:
    """Where the boxes of a list stand.

    Attributes
    ----------
    tomograms : dict of name to Tomogram
    series : dict of name to TiltSeries
        Empty without tilts.
    rows_of : dict of name to (k,) int
        Particles of each tomogram.
    centres : (n, 3) int
        Centre voxel of each box, ``(x, y, z)``.
    shifts_angst : (n, 3) float64
        Where the particle lies from there.
    offsets_angst : (n, 3) float64
        Where that voxel lies from the list's coordinates.
    pixel_size_angst : float
        Of all tomograms.
    notes : list of str
        What was read and assumed.
    """

    tomograms: dict[str, Tomogram]
    series: dict[str, TiltSeries]
    rows_of: dict[str, NDArray[np.intp]]
    centres: NDArray[np.int64]
    shifts_angst: FloatArray
    offsets_angst: FloatArray
    pixel_size_angst: float
    notes: list[str]


def place_boxes(
    particles: ParticleSet,
    folder: Path,
    *,
    pixel_size_angst: float | None = None,
    coordinate_pixel_size_angst: float | None = None,
    tilts: TiltFiles | None = None,
    ctf: str = "none",
    recentre: bool = True,
) -> Placed:
    """Finds the tomograms of a list and the voxels that its boxes stand about.

    Parameters
    ----------
    particles : ParticleSet
        With coordinates.
    folder, pixel_size_angst, coordinate_pixel_size_angst, tilts, ctf, recentre
        As in `extraction.ExtractionSettings`.

    Raises
    ------
    InputError, ListError, VolumeError
        No coordinates; a tomogram or its tilts missing or without what is needed; different pixel sizes.
    """
    if particles.coordinates is None:
        raise ListError("the list has no coordinates; expected rlnCoordinateX, rlnCoordinateY and rlnCoordinateZ")
    if recentre and not np.isfinite(particles.poses.shifts_angst).all():
        raise InputError("the list gives shifts in pixels and no pixel size; give --list-pixel-size, or --no-recentre")
    names = list(dict.fromkeys(particles.tomograms))
    paths = {name: find_tomogram(name, folder) for name in names}
    if len(set(paths.values())) < len(names):
        twice = next(name for name in names if list(paths.values()).count(paths[name]) > 1)
        raise InputError(f"{len(names)} tomograms of the list share the file {paths[twice]}; expected one file for each (a folder)")
    tomograms = {name: open_tomogram(path, pixel_size_angst) for name, path in paths.items()}
    pixel = _one_pixel_size(tomograms)
    series = {name: tilts[name] for name in names} if tilts is not None else {}
    for name, found in series.items():
        if ctf != "none" and found.defocus_angst is None:
            raise ListError(f"--ctf {ctf}: the tilts of {name} ({found.name}) have no _rlnDefocusU; expected the defocus of each image")
    notes = [f"pixel size of the tomograms {pixel:g} A ({next(iter(tomograms.values())).source})"]
    notes += tilts.notes if tilts is not None else []
    centres = np.zeros((len(particles), 3), np.int64)
    shifts, offsets = np.zeros((2, len(particles), 3))
    rows_of = {name: np.flatnonzero([tomogram == name for tomogram in particles.tomograms]) for name in names}
    for name, rows in rows_of.items():
        coordinates = places_in_tomogram(particles, rows, tomograms[name], coordinate_pixel_size_angst)
        notes += _scale_note(particles, rows, name, tomograms[name], coordinate_pixel_size_angst)
        at = coordinates + np.nan_to_num(particles.poses.shifts_angst[rows]) / pixel
        centres[rows] = np.floor((at if recentre else coordinates) + 0.5).astype(np.int64)
        shifts[rows] = (at - centres[rows]) * pixel
        offsets[rows] = (centres[rows] - coordinates) * pixel
    return Placed(tomograms, series, rows_of, centres, shifts, offsets, pixel, notes)


def cut_from_tomograms(
    particles: ParticleSet,
    box_size: int,
    folder: Path,
    *,
    edge: str = "skip",
    pixel_size_angst: float | None = None,
    coordinate_pixel_size_angst: float | None = None,
    tilts: TiltFiles | None = None,
    ctf: str = "none",
) -> tuple[ParticleSet, list[str], list[tuple[str, str]]]:
    """Particles that are cut from tomograms whenever they are read; nothing is written.

    Boxes, shifts and weights are those that `extraction.extract` writes; what is left out is what reaches beyond its tomogram. Wedges that the
    list gives by angles stay where there are no `tilts`.

    Parameters
    ----------
    particles : ParticleSet
        With coordinates; volumes are not needed.
    box_size : int
        Edge of the boxes in voxels of the tomograms.
    folder, edge, pixel_size_angst, coordinate_pixel_size_angst, tilts, ctf
        As in `extraction.ExtractionSettings`.

    Returns
    -------
    particles : ParticleSet
    notes : list of str
    left_out : list of (str, str)
        Name and reason.

    Raises
    ------
    InputError, ListError, VolumeError
        As `place_boxes`; a compressed tomogram; no particle is left.
    """
    placed = place_boxes(
        particles, folder, pixel_size_angst=pixel_size_angst, coordinate_pixel_size_angst=coordinate_pixel_size_angst, tilts=tilts, ctf=ctf
    )
    boxes: list[TomogramBox | None] = [None] * len(particles)
    weights: list[Weight | None] = [weight if isinstance(weight, tuple) else None for weight in particles.weight_paths]
    left_out: list[tuple[int, str]] = []
    for name, rows in placed.rows_of.items():
        tomogram = placed.tomograms[name]
        if not isinstance(tomogram.data, np.memmap):
            raise VolumeError(f"{tomogram.path}: compressed; expected a plain file, from which boxes can be read")
        for row in rows.tolist():
            centre = placed.centres[row]
            try:
                _refuse_beyond(tomogram.data.shape, centre, box_size, edge)
            except VolumeError as problem:
                left_out.append((row, str(problem)))
                continue
            boxes[row] = TomogramBox(tomogram.path, (int(centre[0]), int(centre[1]), int(centre[2])), edge)
            if name in placed.series:
                weights[row] = series_weight(placed.series[name], placed.pixel_size_angst, ctf, True, tomogram.height_angst(centre))
    kept = np.flatnonzero([box is not None for box in boxes])
    reasons = [(particles.names[row], reason) for row, reason in sorted(left_out)]
    if not len(kept):
        raise InputError(f"none of {len(particles)} particles can be cut: {reasons[0][0]}: {reasons[0][1]}")
    listed = particles.take(kept)
    result = replace(
        listed,
        weight_paths=_shared(weights, kept),
        poses=Poses(listed.poses.rotations, placed.shifts_angst[kept]),
        pixel_size_angst=placed.pixel_size_angst,
        pixel_size_source=next(iter(placed.tomograms.values())).source,
        pixel_sizes_angst=None,
        box_size=box_size,
        premultiplied=ctf == "multiplied",
        coordinates=None,
        volume_axes=None,
        stacks=None,
        cut_from=BoxesInTomograms(tuple(box for box in boxes if box is not None), placed.offsets_angst[kept], listed),
    )
    return result, placed.notes, reasons


def _shared(weights: list[Weight | None], kept: NDArray[np.intp]) -> tuple[Weight | None, ...]:
    """The same object for equal weights, so that tasks carry each once."""
    known: dict[Weight | None, Weight | None] = {}
    return tuple(known.setdefault(weights[i], weights[i]) for i in kept)


def _one_pixel_size(tomograms: dict[str, Tomogram]) -> float:
    """Of all tomograms; different ones cannot stand in one list."""
    sizes = {name: tomogram.pixel_size_angst for name, tomogram in tomograms.items()}
    low, high = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[high] > 1.001 * sizes[low]:
        raise InputError(f"tomograms of different pixel sizes: {sizes[low]:g} A ({low}), {sizes[high]:g} A ({high}); expected one, or --pixel-size")
    return sizes[low]


def _scale_note(particles: ParticleSet, rows: NDArray[np.intp], name: str, tomogram: Tomogram, given: float | None) -> list[str]:
    """A line where coordinates count other voxels than the tomogram's."""
    assert particles.coordinates is not None
    size = particles.coordinates.voxel_size_angst[rows]
    if particles.coordinates.voxels is None:
        return []
    voxel = given if given is not None else float(size[0])
    if not np.isfinite(voxel):
        return [f"{name}: coordinates are taken as voxels of the tomogram; the list does not say (--coordinate-pixel-size)"]
    if abs(voxel / tomogram.pixel_size_angst - 1) < 1e-3:
        return []
    source, factor = "option" if given is not None else "list", tomogram.pixel_size_angst / voxel
    return [f"{name}: coordinates in voxels of {voxel:g} A ({source}) are divided by {factor:.4g}"]


def series_weight(
    series: TiltSeries, pixel_size_angst: float, ctf: str = "none", with_exposure: bool = True, centred_angst: FloatArray | None = None
) -> TomogramWeight:
    """What a tomogram of a tilt series holds of a structure; `tomogram_weights` makes the weights of it.

    Parameters
    ----------
    series : TiltSeries
    pixel_size_angst : float
        Of the particles.
    ctf : {"none", "plain", "flipped", "multiplied"}
        Which power of the CTF: none, itself, its absolute value, its square.
    with_exposure : bool
        Whether the signal falls with exposure; its square where tilts are multiplied.
    centred_angst : (3,), optional
        The particle's place from the tomogram's centre. Places that differ by less than a tenth of a radian in the CTF's phase at Nyquist
        give the same.
    """
    every = np.flatnonzero(series.scale != 0)
    place = None
    if ctf != "none" and centred_angst is not None:
        step_angst = 0.1 / (np.pi * wavelength_angst(300.0)) * (2.0 * pixel_size_angst) ** 2
        place = np.rint(centred_angst / step_angst) * step_angst
    geometry = series.geometry(every, every, pixel_size_angst, ctf=ctf != "none", centred_angst=place)
    if not with_exposure:
        geometry = replace(geometry, exposure=np.zeros(len(every)))
    return TomogramWeight(geometry, ctf)


def tomogram_weights(held: TomogramWeight, box_size: int) -> NDArray[np.float32]:
    """The mean of the tilts that pass each sample, less where only parts of one do.

    Returns
    -------
    (n, n, n//2+1) float32
        Grid half-spectrum, corner origin; 1 at k = 0.
    """
    values = multipliers(held.geometry, box_size, ctf=held.ctf != "none")
    if held.ctf == "flipped":
        values = np.abs(values)
    elif held.ctf == "multiplied":
        values = values**2
    sums, slices = slice_sums(held.geometry.axes, values, box_size)
    weights = sums / np.maximum(slices, np.float32(1))
    weights[0, 0, 0] = 1
    return np.ascontiguousarray(weights, np.float32)


def read_box(box: TomogramBox, box_size: int) -> NDArray[np.float32]:
    """A particle's box (n, n, n), from its tomogram, which stays mapped.

    Raises
    ------
    VolumeError
        As `cut`.
    """
    return cut(_mapped(box.path), np.array(box.centre), box_size, box.edge)[0]


@lru_cache(maxsize=_OPEN)
def _mapped(path: Path) -> NDArray[Any]:
    return map_array(path, quiet=True)[0]
