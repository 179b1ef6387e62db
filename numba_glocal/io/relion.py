"""RELION and Warp particle lists. Poses enter and leave RELION's convention here (docs/conventions.md, 2 and 5).

A list is written as it was read: blocks, columns, order and digits stay, except for what changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, ListError, NoAnglesWarning
from ..geometry import matrix_to_relion, relion_to_matrix
from ..values import IntArray, ParticleSet, Poses, TiltRange, Weight, turned_back
from .paths import PlacedFiles, VolumeFinder, find_volumes, opened_name
from .pixel_size import resolve_pixel_size
from .relion_tomo import (
    CENTRED,
    COORDINATES,
    SUBTOMOGRAM_ANGLES,
    cut_by_relion,
    follow_optimisation_set,
    has_stacks,
    read_coordinates,
    read_stacks,
    refuse_partial,
    subtomogram_rotations,
    triples,
)
from .star import StarBlock, StarDocument, write_star
from .volumes import survey

ANGLES = ("rlnAngleRot", "rlnAngleTilt", "rlnAnglePsi")
ORIGINS_ANGST = ("rlnOriginXAngst", "rlnOriginYAngst", "rlnOriginZAngst")
ORIGINS_PIXEL = ("rlnOriginX", "rlnOriginY", "rlnOriginZ")
TILTS = ("ngTiltMinDeg", "ngTiltMaxDeg")
"""Our own columns: a wedge by its lowest and highest tilt about y, both 0 for none. RELION passes over them."""
_ROOT_HINT = "; names start in another folder? --root gives it"
_NAMES_30 = ("", "images", "particles")
USUAL_OPTICS = {"rlnVoltage": 300.0, "rlnSphericalAberration": 2.7, "rlnAmplitudeContrast": 0.07}
"""RELION 3.1 reads no CTF volume from a list without them; nothing is computed from them."""
# columns whose meaning a `ParticleSet` carries
_UNDERSTOOD = frozenset(
    (
        *ANGLES,
        *ORIGINS_ANGST,
        *ORIGINS_PIXEL,
        *SUBTOMOGRAM_ANGLES,
        *COORDINATES,
        *CENTRED,
        *TILTS,
        "rlnImageName",
        "rlnCtfImage",
        "rlnMicrographName",
        "rlnTomoName",
        "rlnTomoParticleName",
        "rlnOpticsGroup",
        "rlnRandomSubset",
        "rlnClassNumber",
        "rlnPixelSize",
        "rlnDetectorPixelSize",
        "rlnMagnification",
    )
)
# the first that a list has is taken for `ParticleSet.scores`
_SCORES = ("ngScore", "rlnLCCmax", "rlnAutopickFigureOfMerit", "rlnMaxValueProbDistribution")
# below the last digit that lists carry (1e-6 degrees, 1e-6 A)
_SAME_ROTATION = 1e-9
_SAME_SHIFT_ANGST = 1e-7


@dataclass(frozen=True, slots=True)
class RelionSource:
    """The document a RELION list came from, and what was read from it, so that only changes are written.

    Attributes
    ----------
    document : StarDocument
    block_name : str
        The block that holds the particles.
    rows : (n,) int
        Its rows that belong to the particle set, in the set's order.
    poses : Poses
        As read, row by row of the set.
    half : (n,) int8
        As read.
    pixel_size_angst : float or None
        What the list says.
    axes : (n, 3, 3) float64 or None
        Where the list's own angles and origins are about other axes than `poses`: the rotation from those to these (RELION 4's
        subtomogram angles).
    names_label : str
        The column that `ParticleSet.names` came from; "" where they were made up.
    """

    document: StarDocument
    block_name: str
    rows: IntArray
    poses: Poses
    half: NDArray[np.int8]
    pixel_size_angst: float | None
    axes: NDArray[np.float64] | None = None
    names_label: str = "rlnImageName"
    format_key: ClassVar[str] = "relion"

    def take(self, index: IntArray | Sequence[int]) -> RelionSource:
        """The source of the particles at `index`."""
        index = np.asarray(index, dtype=np.intp)
        axes = None if self.axes is None else self.axes[index]
        return replace(self, rows=self.rows[index], poses=self.poses.take(index), half=self.half[index], axes=axes)

    def in_volumes(self, axes: NDArray[np.floating[Any]]) -> RelionSource:
        """The source of the same particles with poses about the axes that the list itself uses."""
        return replace(self, poses=turned_back(self.poses, axes), axes=None)

    @property
    def block(self) -> StarBlock:
        """The particle table."""
        return self.document[self.block_name]

    def extras(self) -> list[str]:
        """Columns and blocks that no other program's list can hold, for a message."""
        columns = [f"_{label}" for label in self.block.labels if label not in _UNDERSTOOD]
        blocks = [f"data_{b.name}" for b in self.document.blocks if b.name not in (self.block_name, "optics", "general")]
        return [*blocks, *columns]


def read_relion_particles(
    path: str | Path,
    *,
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    premultiplied: bool | None = None,
    require_volumes: bool = True,
    volume_axes: str | None = None,
    tomograms: str | Path | None = None,
) -> ParticleSet:
    """Read a RELION or Warp list of particles.

    Parameters
    ----------
    path : path
        One table (3.0, Warp), ``data_optics`` and ``data_particles`` (3.1 and later), or an optimisation set that names such a list.
    pixel_size_angst : float, optional
        Goes before what list and headers say.
    root : path, optional
        Folder that the volumes' names start from; it goes before the list's folder, its parents and the current folder.
    premultiplied : bool, optional
        Goes before ``rlnCtfDataAreCtfPremultiplied``.
    require_volumes : bool
        False reads a list whose volumes are elsewhere, or that names none (coordinates only); box size 0 when then nobody knows it.
    volume_axes : {"tomogram", "subtomogram"}, optional
        How volumes stand; None: along the subtomogram's axes where the list says that RELION cut them, else as the tomogram.
    tomograms : path, optional
        File of the tomograms in place of the one that an optimisation set names; of other lists it is not used.

    Returns
    -------
    ParticleSet
        Poses are about the tomogram's axes: subtomogram angles are composed with the particles' own.

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, line, what was expected and what was found.
    """
    document, tomograms_path = follow_optimisation_set(path, root, tomograms)
    path = document.path or path
    block, optics = _tables(document)
    if not block.n_rows:
        raise ListError(f"{block.where()}: the list has no particles")
    stacked = has_stacks(document, block, optics)
    tomogram_names = _tomograms(block)
    names, names_label = _names(block, tomogram_names, require_volumes)
    _refuse_slices(block, names, names_label)
    groups = _groups(block, optics)
    flag = _flag(block, optics, groups)
    sizes, list_source = _list_pixel_sizes(block, optics, groups, require_volumes)
    list_pixel_size = None if sizes is None else float(sizes[0])
    list_box_size = _list_box_size(optics, groups, require_volumes)
    finder = VolumeFinder(path, root)
    volume_paths: Sequence[Path]
    weight_paths: Sequence[Weight | None]
    if require_volumes:
        found = find_volumes(names, finder, path, "particle stack" if stacked else "particle volume", "" if root else _ROOT_HINT)
        volume_paths = tuple(found[name] for name in names)
        weight_names = _weight_names(block)
        found = find_volumes([name for name in weight_names if name], finder, path, "weight volume")
        weight_paths = tuple(found[name] if name else None for name in weight_names)
        _refuse_duplicates(block, names, [os.path.normpath(volume) for volume in volume_paths])
    else:
        finder.find(names[0])
        volume_paths = PlacedFiles(finder, names)
        weight_paths = _placed_weights(finder, block)
        joined = "\n".join(names)
        plain = not any(odd in joined for odd in (":", "./", "//"))  # most lists name each file in one way
        _refuse_duplicates(block, names, names if plain else [_as_opened(name) for name in names])

    refuse_partial(block, TILTS)
    if TILTS[0] in block.labels:
        weight_paths = tuple(tilts if path is None else path for path, tilts in zip(weight_paths, _tilt_ranges(block), strict=True))

    box_size, header_pixel_size = list_box_size or 0, float("nan")
    if stacked:
        if not box_size and require_volumes:
            raise ListError(f"{path}: a list of 2-D stacks without _rlnImageSize in data_optics")
    elif require_volumes:
        box_size, header_pixel_size = survey(volume_paths)
        if list_box_size and list_box_size != box_size:
            raise InputError(f"{path}: rlnImageSize is {list_box_size}, the volumes have box {box_size} (such as {volume_paths[0]})")
    elif volume_paths[0].is_file():
        box_size, header_pixel_size = survey((volume_paths[0],))
    if require_volumes or pixel_size_angst is not None or list_pixel_size is not None or np.isfinite(header_pixel_size):
        pixel_size, source_text = resolve_pixel_size(pixel_size_angst, list_pixel_size, list_source, header_pixel_size, path)
    else:
        pixel_size, source_text = float("nan"), "unknown"

    for labels in (ANGLES, ORIGINS_ANGST, ORIGINS_PIXEL):
        refuse_partial(block, labels)
    if ANGLES[0] not in block.labels:
        warnings.warn(f"{path}: the list has no angles: every particle starts at 0, 0, 0", NoAnglesWarning, stacklevel=2)
    rotations = relion_to_matrix(triples(block, ANGLES))
    several = sizes if sizes is not None and pixel_size_angst is None and sizes.max() > 1.0001 * sizes.min() else None
    shifts = -_origins_angst(block, np.full(block.n_rows, pixel_size) if several is None else several)
    axes = subtomogram_rotations(block)
    if axes is not None:
        rotations, shifts = axes @ rotations, np.einsum("nij,nj->ni", axes, shifts)
    if volume_axes == "subtomogram" and (axes is None or stacked):
        what = "stacks of 2-D images, which stand as the tomogram" if stacked else f"no column _{SUBTOMOGRAM_ANGLES[0]}"
        raise InputError(f"{path}: --volume-axes subtomogram: {what}; expected volumes cut along axes that the list gives")
    along = cut_by_relion(optics, groups) if volume_axes is None else volume_axes == "subtomogram"
    turned = axes is not None and not stacked and along and bool(np.abs(axes - np.eye(3)).max() > _SAME_ROTATION)
    poses = Poses(rotations, shifts)
    half = _half_sets(block)
    return ParticleSet(
        names=tuple(names),
        volume_paths=volume_paths,
        weight_paths=weight_paths,
        poses=poses,
        half=half,
        tomograms=tomogram_names,
        groups=groups,
        pixel_size_angst=pixel_size,
        pixel_size_source=source_text,
        box_size=box_size,
        premultiplied=flag if premultiplied is None else premultiplied,
        source=RelionSource(document, block.name, np.arange(block.n_rows), poses, half, list_pixel_size, axes, names_label),
        coordinates=read_coordinates(block, optics, groups, tomogram_names, tomograms_path, sizes),
        classes=_classes(block),
        scores=next((values for values in (_loose_numbers(block, label) for label in _SCORES) if values is not None), None),
        volume_axes=axes if turned else None,
        stacks=read_stacks(block, tomograms_path) if stacked else None,
        pixel_sizes_angst=several,
    )


def write_relion_particles(
    path: str | Path,
    particles: ParticleSet,
    extra_columns: Mapping[str, ArrayLike] | None = None,
    optics: Mapping[str, float] | None = None,
) -> None:
    """Write a RELION list, whole or not at all; format, columns, blocks and digits are those of the list that was read.

    Poses that changed are written with 6 decimals. Particles without a RELION source become a RELION 3.1 list.

    Parameters
    ----------
    path : path
        Output.
    particles : ParticleSet
    extra_columns : dict of label to (n,) array, optional
        Columns to add or replace: numbers or texts.
    optics : dict of label to float, optional
        Of the microscope, for a new list; in place of `USUAL_OPTICS`.

    Raises
    ------
    ListError, InputError
        Columns of another length; a file that cannot be written.
    """
    source = particles.source if isinstance(particles.source, RelionSource) else None
    if source is None:
        source = new_relion_source(particles, Path(os.path.abspath(path)).parent, optics)
    if len(source.rows) != len(particles):
        raise ListError(f"{path}: {len(particles)} particles come with {len(source.rows)} rows of {source.document.path}")
    block = source.block.take(source.rows)
    if source.names_label == "rlnImageName" and block.texts("rlnImageName") != list(particles.names):
        block.set_column("rlnImageName", particles.names)
    blocks = [block if b.name == source.block_name else b for b in source.document.blocks]
    if any(b.name == "optics" for b in blocks):
        # RELION 5 finds no particles under another name
        block.name = "particles"

    own = particles.poses if source.axes is None else turned_back(particles.poses, source.axes)
    turned = np.abs(particles.poses.rotations - source.poses.rotations).max(axis=(1, 2), initial=0) > _SAME_ROTATION
    shifted = np.abs(particles.poses.shifts_angst - source.poses.shifts_angst).max(axis=1, initial=0) > _SAME_SHIFT_ANGST
    _write_rotations(block, own.rotations, turned)
    _write_shifts(block, own.shifts_angst, _pixel_sizes(particles), shifted, has_optics=any(b.name == "optics" for b in blocks))
    _write_half_sets(block, particles.half, source.half)
    if particles.pixel_sizes_angst is None:
        blocks = _write_pixel_size(blocks, block, particles.pixel_size_angst, source.pixel_size_angst)
    for label, values in (extra_columns or {}).items():
        array = np.asarray(values)
        if array.shape != (len(particles),):
            raise ListError(f"{path}: column _{label.removeprefix('_')} has shape {array.shape}, expected ({len(particles)},)")
        block.set_column(label, _format(array))
    write_star(path, StarDocument(blocks, str(path)))


# ---- reading


def _tables(document: StarDocument) -> tuple[StarBlock, StarBlock | None]:
    """The particle block and the optics block; other kinds of STAR file are refused with what they are."""
    path = document.path
    for block in document.blocks:
        if block.name != "particles" and ("rlnTomoProjX" in block or "rlnTomoTiltSeriesName" in block):
            raise ListError(f"{path}: a file of tomograms (data_{block.name}), expected a list of particles or an optimisation set")
    optics = document["optics"] if "optics" in document else None
    if optics is not None and not optics.n_rows:
        raise ListError(f"{optics.where()}: data_optics has no rows")
    tables = [block for block in document.blocks if block.has_loop and block.name in (("particles",) if optics else _NAMES_30)]
    if not tables and optics:
        tables = [block for block in document.blocks if block.has_loop and block.name in _NAMES_30]
    if len(tables) > 1:
        raise ListError(f"{path}: {' and '.join(f'data_{b.name} (line {b.line})' for b in tables)} both look like particles, expected one table")
    if not tables:
        found = ", ".join(f"data_{block.name}" for block in document.blocks)
        raise ListError(f"{path}: no particle table (data_particles, data_images or data_), found {found}")
    block = tables[0]
    return block, optics


def _names(block: StarBlock, tomograms: Sequence[str], require_volumes: bool) -> tuple[list[str], str]:
    """Names of the particles and the column they come from; a list of places alone gets names where no volume is needed."""
    if "rlnImageName" in block.labels:
        return block.texts("rlnImageName"), "rlnImageName"
    if require_volumes:
        wanted = "expected a volume for each particle (`extract` cuts them), or --tomograms and --box"
        raise ListError(f"{block.where()}: no column _rlnImageName: a list of places without volumes, {wanted}")
    if "rlnTomoParticleName" in block.labels:
        return block.texts("rlnTomoParticleName"), "rlnTomoParticleName"
    return [f"{tomogram}/{row}" if tomogram else str(row) for row, tomogram in enumerate(tomograms, 1)], ""


def _refuse_slices(block: StarBlock, names: list[str], label: str) -> None:
    if "" not in names and "@" not in "\n".join(names):
        return
    for row, name in enumerate(names):
        if "@" in name and name.split("@", 1)[0].isdigit():
            raise ListError(f"{block.where(row)}: {name} is an image of a stack, expected a volume of its own for each particle")
        if not name:
            raise ListError(f"{block.where(row)}: _{label} is empty")


def _as_opened(name: str) -> str:
    """The file that a name stands for, written in one way."""
    return os.path.normpath(opened_name(name))


def _refuse_duplicates(block: StarBlock, names: list[str], files: list[str]) -> None:
    """One volume must not stand twice: in both half-sets it would correlate with itself."""
    if len(set(files)) == len(files):
        return
    first: dict[str, int] = {}
    for row, file in enumerate(files):
        other = first.setdefault(file, row)
        if other != row:
            also = "" if names[other] == names[row] else f" (as {names[other]})"
            raise ListError(f"{block.where(row)}: particle {names[row]} stands twice, first in {_line(block, other)}{also}")


def _line(block: StarBlock, row: int) -> str:
    return f"line {block.row_lines[row]}" if len(block.row_lines) else f"row {row + 1}"


def _groups(block: StarBlock, optics: StarBlock | None) -> NDArray[np.int32]:
    """Optics group of each particle, counted from 0 in the order of the optics table (or of appearance without one)."""
    if "rlnOpticsGroup" not in block.labels:
        if optics is not None and optics.n_rows > 1:
            raise ListError(f"{block.where()}: no column _rlnOpticsGroup, but data_optics has {optics.n_rows} groups")
        return np.zeros(block.n_rows, dtype=np.int32)
    index: dict[str, int] = {}
    if optics is not None:
        for row, text in enumerate(optics.texts("rlnOpticsGroup")):
            if index.setdefault(_whole(text), row) != row:
                raise ListError(f"{optics.where(row)}: optics group {text} stands twice, first in {_line(optics, index[_whole(text)])}")
    numbers = _whole_numbers(block, "rlnOpticsGroup")
    if numbers is not None:
        # numbers, of which there are few: looked up once each, in the order in which they appear
        distinct, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        places = np.zeros(len(distinct), np.int32)
        for i in np.argsort(first).tolist():
            key = str(distinct[i])
            if key not in index and optics is not None:
                break
            places[i] = index.setdefault(key, len(index))
        else:
            return places[inverse]
    groups = np.empty(block.n_rows, dtype=np.int32)
    for row, text in enumerate(block.texts("rlnOpticsGroup")):
        key = _whole(text)
        if key not in index:
            if optics is not None:
                raise ListError(f"{block.where(row)}: optics group {text} is not in data_optics, found {', '.join(index)}")
            index[key] = len(index)
        groups[row] = index[key]
    return groups


def _whole_numbers(block: StarBlock, label: str) -> NDArray[np.int64] | None:
    """A column of whole numbers; None where it holds something else."""
    try:
        values = block.floats(label)
    except ListError:
        return None
    numbers = values.astype(np.int64)
    return numbers if np.array_equal(numbers, values) else None


def _whole(text: str) -> str:
    """A whole number as other programs write it (1, 01, 1.000000), or the text itself."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def _flag(block: StarBlock, optics: StarBlock | None, groups: NDArray[np.int32]) -> bool:
    """Whether volumes are multiplied by their CTF already."""
    label = "rlnCtfDataAreCtfPremultiplied"
    if optics is not None and label in optics.labels:
        table, values = optics, optics.floats(label)[np.unique(groups)]
    elif label in block.labels:
        table, values = block, block.floats(label)
    else:
        return False
    unique = np.unique(values)
    if len(unique) > 1:
        raise ListError(f"{table.where()}: _{label} is {' and '.join(f'{v:g}' for v in unique)}, expected one value for all particles")
    return bool(unique[0])


def _list_pixel_sizes(block: StarBlock, optics: StarBlock | None, groups: NDArray[np.int32], one: bool) -> tuple[NDArray[np.float64] | None, str]:
    """Pixel size of each particle as the list says it, and in which columns; more than one are refused where `one` is asked for."""
    if optics is not None and "rlnImagePixelSize" in optics.labels:
        sizes = optics.floats("rlnImagePixelSize")
        used = np.unique(groups)
        if one and sizes[used].max() > 1.0001 * sizes[used].min():
            raise ListError(f"{optics.path}: optics groups have different pixel sizes: {_by_group(optics, used, sizes, ' A')}; expected one")
        return sizes[groups], "rlnImagePixelSize"
    sizes_angst: NDArray[np.float64] | None = None
    text = ""
    if "rlnPixelSize" in block.labels:
        sizes_angst, text = _one_value(block, block.floats("rlnPixelSize"), "rlnPixelSize", one), "rlnPixelSize"
    if {"rlnDetectorPixelSize", "rlnMagnification"} <= set(block.labels):
        both = "rlnDetectorPixelSize, rlnMagnification"
        magnification = block.floats("rlnMagnification")
        if (magnification <= 0).any():
            row = int(np.argmax(magnification <= 0))
            raise ListError(f"{block.where(row)}: _rlnMagnification is {magnification[row]:g}, expected a number above 0")
        detector = _one_value(block, block.floats("rlnDetectorPixelSize") * 1e4 / magnification, both, one)
        if sizes_angst is None:
            sizes_angst, text = detector, both
        elif abs(detector[0] / sizes_angst[0] - 1) > 0.01:
            warnings.warn(
                f"{block.path}: rlnPixelSize is {sizes_angst[0]:g} A, but {both} give {detector[0]:g} A; rlnPixelSize is taken", stacklevel=4
            )
    return sizes_angst, text


def _by_group(optics: StarBlock, used: NDArray[np.integer[Any]], values: NDArray[np.float64], unit: str = "") -> str:
    """Values of optics groups for a message: ``opticsGroup1 2.4 A (line 14), ...``."""
    names = optics.texts("rlnOpticsGroupName" if "rlnOpticsGroupName" in optics.labels else "rlnOpticsGroup")
    return ", ".join(f"{names[g]} {values[g]:g}{unit} ({_line(optics, g)})" for g in used.tolist())


def _one_value(block: StarBlock, values: NDArray[np.float64], what: str, one: bool) -> NDArray[np.float64]:
    different = np.abs(values - values[0]) > 1e-4 * abs(values[0])
    if one and different.any():
        row = int(np.argmax(different))
        raise ListError(f"{block.where(row)}: pixel size {values[row]:g} A ({what}), but {values[0]:g} A in {_line(block, 0)}; expected one")
    return values


def _list_box_size(optics: StarBlock | None, groups: NDArray[np.int32], one: bool) -> int | None:
    """Box as the list says it; None where it does not, or says several and none is asked for."""
    if optics is None or "rlnImageSize" not in optics.labels:
        return None
    used = np.unique(groups)
    sizes = optics.floats("rlnImageSize")
    if sizes[used].min() != sizes[used].max():
        if one:
            raise ListError(f"{optics.path}: optics groups have different box sizes: {_by_group(optics, used, sizes)}; expected one")
        return None
    return int(sizes[used[0]])


def _classes(block: StarBlock) -> NDArray[np.int32] | None:
    values = _loose_numbers(block, "rlnClassNumber")
    return values.astype(np.int32) if values is not None and np.isfinite(values).all() else None


def _loose_numbers(block: StarBlock, label: str) -> NDArray[np.float64] | None:
    """A column that is only carried along, as numbers; None where it is not there, or holds something else."""
    if label not in block.labels:
        return None
    try:
        return block.numbers(label)
    except ValueError:
        return None


def _tilt_ranges(block: StarBlock) -> list[tuple[TiltRange, ...] | None]:
    """Wedges that the list gives by tilts, for particles without a weight volume."""
    found: list[tuple[TiltRange, ...] | None] = []
    for row, (low, high) in enumerate(zip(*(block.floats(label).tolist() for label in TILTS), strict=True)):
        if (low or high) and not -90 <= low < high <= 90:
            raise ListError(f"{block.where(row)}: _{TILTS[0]} {low:g} and _{TILTS[1]} {high:g}: expected -90 <= smallest < largest <= 90 degrees")
        found.append((TiltRange(low, high),) if low or high else None)
    return found


def _weight_names(block: StarBlock) -> list[str]:
    if "rlnCtfImage" not in block.labels:
        return [""] * block.n_rows
    return ["" if name == "None" else name for name in block.texts("rlnCtfImage")]


def _placed_weights(finder: VolumeFinder, block: StarBlock) -> Sequence[Path | None]:
    """Where weight volumes should be, without looking."""
    if "rlnCtfImage" not in block.labels:
        return (None,) * block.n_rows
    names = block.texts("rlnCtfImage")
    if "None" in names:
        return tuple(None if name == "None" else finder.place(name) for name in names)
    return PlacedFiles(finder, names)


def _origins_angst(block: StarBlock, pixel_size_angst: NDArray[np.float64]) -> NDArray[np.float64]:
    """Origins in Angstrom, whichever of the two kinds the list has; where both differ Angstrom wins."""
    has_angst = any(label in block.labels for label in ORIGINS_ANGST)
    has_pixel = any(label in block.labels for label in ORIGINS_PIXEL)
    if not has_angst:
        pixels = triples(block, ORIGINS_PIXEL)
        if pixels.any() and not np.isfinite(pixel_size_angst).all():
            raise InputError(f"{block.path}: origins in pixels, and no pixel size in the list; give it as an option")
        return np.where(pixels == 0, 0.0, pixels * pixel_size_angst[:, None])
    angst = triples(block, ORIGINS_ANGST)
    if has_pixel:
        differ = _origins_differ(angst, triples(block, ORIGINS_PIXEL), pixel_size_angst)
        if differ.any():
            row = int(np.argmax(differ))
            warnings.warn(
                f"{block.where(row)}: rlnOriginX/Y/Z and rlnOriginX/Y/ZAngst differ in {int(differ.sum())} of {block.n_rows} rows; "
                "Angstrom is taken, and both are written alike",
                stacklevel=3,
            )
    return angst


def _origins_differ(angst: NDArray[Any], pixel: NDArray[Any], pixel_size_angst: NDArray[Any]) -> NDArray[np.bool_]:
    # lists carry as few as two decimals
    return np.abs(angst - pixel * pixel_size_angst[:, None]).max(axis=1) > 0.01 * np.maximum(1.0, pixel_size_angst)


def _half_sets(block: StarBlock) -> NDArray[np.int8]:
    half = np.zeros(block.n_rows, dtype=np.int8)
    if "rlnRandomSubset" not in block.labels:
        return half
    numbers = _whole_numbers(block, "rlnRandomSubset")
    if numbers is not None and np.isin(numbers, (1, 2)).all():
        return numbers.astype(np.int8)
    for row, text in enumerate(block.texts("rlnRandomSubset")):
        whole = text if text in ("1", "2") else _whole(text)
        if whole not in ("1", "2"):
            raise ListError(f"{block.where(row)}: _rlnRandomSubset is '{text}', expected 1 or 2")
        half[row] = int(whole)
    return half


def _tomograms(block: StarBlock) -> tuple[str, ...]:
    for label in ("rlnTomoName", "rlnMicrographName"):  # where there are both, the second may be a name for each particle
        if label in block.labels:
            known: dict[str, str] = {}  # there are few names, and each needs to be there once
            names = block.texts(label)
            return tuple(map(known.setdefault, names, names))
    return ("",) * block.n_rows


# ---- writing


def _format(values: NDArray[Any]) -> list[str]:
    """Texts of a column: whole numbers as they are, others with 6 decimals or in exponent form."""
    if values.dtype.kind in "iub":
        return [str(int(v)) for v in values.tolist()]
    if values.dtype.kind == "f":
        return [f"{v:.6f}" if v != v or v == 0 or 1e-3 <= abs(v) < 1e9 else f"{v:.6e}" for v in values.tolist()]
    return [str(v) for v in values.tolist()]


def _set_rows(block: StarBlock, label: str, values: NDArray[Any], rows: NDArray[np.bool_]) -> None:
    """Write numbers with 6 decimals into some rows of a column; the others keep their digits."""
    # no "-0.000000"
    values = np.where(np.abs(values) <= 5e-7, 0.0, values)
    if rows.all():
        block.set_column(label, [f"{value:.6f}" for value in values.tolist()], plain=True)
        return
    if label not in block.labels:
        block.set_column(label, ["0.000000"] * len(values))
    tokens = block.tokens(label)
    for row in np.flatnonzero(rows).tolist():
        tokens[row] = f"{values[row]:.6f}"


def _write_rotations(block: StarBlock, rotations: NDArray[Any], changed: NDArray[np.bool_]) -> None:
    if not changed.any():
        return
    angles = matrix_to_relion(rotations)
    for axis, label in enumerate(ANGLES):
        _set_rows(block, label, angles[:, axis], changed)


def _write_shifts(block: StarBlock, shifts: NDArray[Any], pixel_size_angst: NDArray[Any], changed: NDArray[np.bool_], has_optics: bool) -> None:
    has_angst = any(label in block.labels for label in ORIGINS_ANGST)
    has_pixel = any(label in block.labels for label in ORIGINS_PIXEL)
    if not (has_angst or has_pixel):
        # a list without origins gets the kind of its version
        has_angst, has_pixel = has_optics, not has_optics
    if has_angst and changed.any():
        for axis, label in enumerate(ORIGINS_ANGST):
            _set_rows(block, label, -shifts[:, axis], changed)
    if has_pixel:
        if has_angst:
            changed = changed | _origins_differ(-shifts, triples(block, ORIGINS_PIXEL), pixel_size_angst)
        if changed.any():
            for axis, label in enumerate(ORIGINS_PIXEL):
                pixels = np.divide(-shifts[:, axis], pixel_size_angst, out=np.zeros(len(shifts)), where=shifts[:, axis] != 0)
                _set_rows(block, label, pixels, changed)


def _pixel_sizes(particles: ParticleSet) -> NDArray[Any]:
    sizes = particles.pixel_sizes_angst
    return np.full(len(particles), particles.pixel_size_angst) if sizes is None else sizes


def _write_half_sets(block: StarBlock, half: NDArray[np.int8], before: NDArray[np.int8]) -> None:
    label = "rlnRandomSubset"
    if label not in block.labels:
        if half.any():
            block.set_column(label, _format(half))
        return
    tokens = block.tokens(label)
    for row in np.flatnonzero(half != before).tolist():
        tokens[row] = str(int(half[row]))


def _write_pixel_size(blocks: list[StarBlock], particles: StarBlock, pixel_size: float, listed: float | None) -> list[StarBlock]:
    """Where another pixel size than the list's was used, write it, or the origins would be misread."""
    if listed is None or abs(pixel_size - listed) <= 1e-6 * listed:
        return blocks
    result = []
    for block in blocks:
        if block.name == "optics" and "rlnImagePixelSize" in block.labels:
            block = block.take(np.arange(block.n_rows))
            block.set_column("rlnImagePixelSize", [f"{pixel_size:.6f}"] * block.n_rows)
        result.append(block)
    if "rlnPixelSize" in particles.labels:
        particles.set_column("rlnPixelSize", [f"{pixel_size:.6f}"] * particles.n_rows)
    if {"rlnDetectorPixelSize", "rlnMagnification"} <= set(particles.labels):
        detector = pixel_size * particles.floats("rlnMagnification") / 1e4
        particles.set_column("rlnDetectorPixelSize", [f"{v:.6f}" for v in detector])
    return result


def new_relion_source(particles: ParticleSet, folder: Path, microscope: Mapping[str, float] | None = None) -> RelionSource:
    """A RELION 3.1 list for particles that came from elsewhere; poses are left to the writer, who takes all of them for changed.

    Parameters
    ----------
    particles : ParticleSet
    folder : Path
        Of the list, from which weight volumes are named.
    microscope : dict of label to float, optional
        In place of `USUAL_OPTICS`.
    """
    n = len(particles)
    groups = [int(g) for g in np.unique(particles.groups)] or [0]
    table = {
        "rlnOpticsGroup": [str(g + 1) for g in groups],
        "rlnOpticsGroupName": [f"opticsGroup{g + 1}" for g in groups],
        "rlnImagePixelSize": [f"{particles.pixel_size_angst:.6f}"] * len(groups),
        "rlnImageSize": [str(particles.box_size)] * len(groups),
        "rlnImageDimensionality": ["3"] * len(groups),
        "rlnCtfDataAreCtfPremultiplied": [str(int(particles.premultiplied))] * len(groups),
        **{label: [f"{value:.6g}"] * len(groups) for label, value in (USUAL_OPTICS | dict(microscope or {})).items()},
    }
    if not particles.box_size:
        del table["rlnImageSize"]
    if not np.isfinite(particles.pixel_size_angst):
        del table["rlnImagePixelSize"]
    columns: dict[str, Sequence[str]] = {}
    if any(particles.tomograms):
        columns["rlnMicrographName"] = [name or "None" for name in particles.tomograms]
    if particles.coordinates is not None:
        places, labels = particles.coordinates, COORDINATES
        values = places.as_voxels()
        if not np.isfinite(values).all() and places.centred_angst is not None:
            values, labels = places.centred_angst, CENTRED
        columns |= {label: [f"{v:.6f}" for v in values[:, axis].tolist()] for axis, label in enumerate(labels)}
    columns |= {label: ["0.000000"] * n for label in ANGLES}
    columns["rlnImageName"] = particles.names
    paths = [path if isinstance(path, Path) else None for path in particles.weight_paths]
    if any(path is not None for path in paths):
        columns["rlnCtfImage"] = ["None" if path is None else _beside(path, folder) for path in paths]
    if particles.tilt_ranges_deg is not None:
        columns |= {label: _format(np.nan_to_num(particles.tilt_ranges_deg[:, i])) for i, label in enumerate(TILTS)}
    columns["rlnOpticsGroup"] = [str(int(g) + 1) for g in particles.groups]
    columns |= {label: ["0.000000"] * n for label in ORIGINS_ANGST}
    if particles.classes is not None:
        columns["rlnClassNumber"] = _format(particles.classes)
    if particles.scores is not None and np.isfinite(particles.scores).any():
        columns["rlnAutopickFigureOfMerit"] = _format(np.where(np.isfinite(particles.scores), particles.scores, 0.0))
    document = StarDocument([StarBlock.from_columns("optics", table), StarBlock.from_columns("particles", columns)])
    unknown = Poses(np.full((n, 3, 3), np.inf), np.full((n, 3), np.inf))
    return RelionSource(document, "particles", np.arange(n), unknown, np.zeros(n, np.int8), particles.pixel_size_angst)


def _beside(path: Path, folder: Path) -> str:
    """A path as a list in `folder` names it: relative when the file is inside."""
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute, folder) if Path(absolute).is_relative_to(folder) else absolute
