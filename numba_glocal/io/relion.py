"""RELION 3.0 and 3.1 particle lists. Poses enter and leave RELION's convention here (docs/conventions.md, 2 and 5).

A list is written as it was read: blocks, columns, order and digits stay, except for what changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, ListError, NoAnglesWarning
from ..geometry import matrix_to_relion, relion_to_matrix
from ..values import IntArray, ParticleSet, Poses
from .paths import VolumeFinder, find_volumes
from .pixel_size import resolve_pixel_size
from .star import StarBlock, StarDocument, read_star, write_star
from .volumes import survey

ANGLES = ("rlnAngleRot", "rlnAngleTilt", "rlnAnglePsi")
ORIGINS_ANGST = ("rlnOriginXAngst", "rlnOriginYAngst", "rlnOriginZAngst")
ORIGINS_PIXEL = ("rlnOriginX", "rlnOriginY", "rlnOriginZ")
_NAMES_30 = ("", "images", "particles")
# below the last digit that lists carry (1e-6 degrees, 1e-6 A)
_SAME_ROTATION = 1e-9
_SAME_SHIFT_ANGST = 1e-7

# what only RELION 4, 5 and Warp for them write, and what it tells; the first one found names the list
_LATER = {
    "rlnTomoParticlesFile": "a RELION 4/5 optimisation set",
    "rlnTomoTomogramsFile": "a RELION 4/5 optimisation set",
    "rlnTomoSubTomosAre2DStacks": "a RELION 5 list of 2-D stacks",
    "rlnTomoVisibleFrames": "a RELION 5 list of 2-D stacks",
    "rlnTomoProjX": "a RELION 4/5 tomograms file",
    "rlnTomoTiltSeriesName": "a RELION 4/5 tomograms file",
    "rlnTomoFrameCount": "a RELION 4/5 tomograms file",
    "rlnTomoSubtomogramRot": "a RELION 4 list",
    "rlnCenteredCoordinateXAngst": "a RELION 5 list",
    "rlnTomoSubtomogramBinning": "a RELION 4/5 list of pseudo-subtomograms",
    "rlnTomoTiltSeriesPixelSize": "a RELION 4/5 list",
    "rlnTomoParticleName": "a RELION 4/5 list",
    "rlnTomoParticleId": "a RELION 4/5 list",
}


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
    """

    document: StarDocument
    block_name: str
    rows: IntArray
    poses: Poses
    half: NDArray[np.int8]
    pixel_size_angst: float | None

    def take(self, index: IntArray | Sequence[int]) -> RelionSource:
        """The source of the particles at `index`."""
        index = np.asarray(index, dtype=np.intp)
        return replace(self, rows=self.rows[index], poses=self.poses.take(index), half=self.half[index])


def read_relion_particles(
    path: str | Path,
    *,
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    premultiplied: bool | None = None,
    require_volumes: bool = True,
) -> ParticleSet:
    """Read a RELION 3.0 or 3.1 list of subtomograms.

    Parameters
    ----------
    path : path
        One table (3.0), or ``data_optics`` and ``data_particles`` (3.1).
    pixel_size_angst : float, optional
        Goes before what list and headers say.
    root : path, optional
        Folder that the volumes' names start from; it goes before the list's folder, its parents and the current folder.
    premultiplied : bool, optional
        Goes before ``rlnCtfDataAreCtfPremultiplied``.
    require_volumes : bool
        False reads a list whose volumes are elsewhere; box size 0 when then nobody knows it.

    Returns
    -------
    ParticleSet

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, line, what was expected and what was found.
    """
    document = read_star(path)
    block, optics = _tables(document)
    if not block.n_rows:
        raise ListError(f"{block.where()}: the list has no particles")
    names = block.texts("rlnImageName")
    _refuse_slices(block, names)
    groups = _groups(block, optics)
    flag = _flag(block, optics, groups)
    list_pixel_size, list_source = _list_pixel_size(block, optics, groups)
    list_box_size = _list_box_size(optics, groups)
    weight_names = _weight_names(block)

    finder = VolumeFinder(path, root)
    if require_volumes:
        found = find_volumes(names, finder, path, "particle volume")
        found_weights = find_volumes([name for name in weight_names if name], finder, path, "weight volume")
    else:
        finder.find(names[0])
        found = {name: finder.place(name) for name in dict.fromkeys(names)}
        found_weights = {name: finder.place(name) for name in dict.fromkeys(weight_names) if name}
    volume_paths = tuple(found[name] for name in names)
    _refuse_duplicates(block, names, volume_paths)

    box_size, header_pixel_size = list_box_size or 0, float("nan")
    if require_volumes:
        box_size, header_pixel_size = survey(volume_paths)
        if list_box_size and list_box_size != box_size:
            raise InputError(f"{path}: rlnImageSize is {list_box_size}, the volumes have box {box_size} (such as {volume_paths[0]})")
    elif volume_paths[0].is_file():
        box_size, header_pixel_size = survey(volume_paths[:1])
    pixel_size, source_text = resolve_pixel_size(pixel_size_angst, list_pixel_size, list_source, header_pixel_size, path)

    for labels in (ANGLES, ORIGINS_ANGST, ORIGINS_PIXEL):
        _refuse_partial(block, labels)
    if ANGLES[0] not in block.labels:
        warnings.warn(f"{path}: the list has no angles: every particle starts at 0, 0, 0", NoAnglesWarning, stacklevel=2)
    poses = Poses(relion_to_matrix(_triples(block, ANGLES)), -_origins_angst(block, pixel_size))
    half = _half_sets(block)
    return ParticleSet(
        names=tuple(names),
        volume_paths=volume_paths,
        weight_paths=tuple(found_weights[name] if name else None for name in weight_names),
        poses=poses,
        half=half,
        tomograms=_tomograms(block),
        groups=groups,
        pixel_size_angst=pixel_size,
        pixel_size_source=source_text,
        box_size=box_size,
        premultiplied=flag if premultiplied is None else premultiplied,
        classes=_classes(block),
        source=RelionSource(document, block.name, np.arange(block.n_rows), poses, half, list_pixel_size),
    )


def write_relion_particles(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a RELION list, whole or not at all; format, columns, blocks and digits are those of the list that was read.

    Poses that changed are written with 6 decimals. Particles without a RELION source become a RELION 3.1 list.

    Parameters
    ----------
    path : path
        Output.
    particles : ParticleSet
    extra_columns : dict of label to (n,) array, optional
        Columns to add or replace: numbers or texts.

    Raises
    ------
    ListError, InputError
        Columns of another length; a file that cannot be written.
    """
    source = particles.source if isinstance(particles.source, RelionSource) else None
    if source is None:
        document = _new_document(particles, Path(os.path.abspath(path)).parent)
        source = RelionSource(document, "particles", np.arange(len(particles)), particles.poses, particles.half, particles.pixel_size_angst)
        block = document["particles"]
        write_all = True
    elif len(source.rows) != len(particles):
        raise ListError(f"{path}: {len(particles)} particles come with {len(source.rows)} rows of {source.document.path}")
    else:
        block = source.document[source.block_name].take(source.rows)
        write_all = False
        if block.texts("rlnImageName") != list(particles.names):
            block.set_column("rlnImageName", particles.names)
    blocks = [block if b.name == source.block_name else b for b in source.document.blocks]
    if any(b.name == "optics" for b in blocks):
        # RELION 5 finds no particles under another name
        block.name = "particles"

    _write_rotations(block, particles.poses.rotations, None if write_all else source.poses.rotations)
    _write_shifts(block, particles, None if write_all else source.poses.shifts_angst, has_optics=any(b.name == "optics" for b in blocks))
    _write_half_sets(block, particles.half, source.half)
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
    for label, kind in _LATER.items():
        for block in document.blocks:
            if label in block:
                raise ListError(f"{path}: {kind} (it has _{label} in data_{block.name}) is not read yet; expected a RELION 3.0 or 3.1 list")
    for block in document.blocks:
        if block.name.startswith("stopgap_"):
            raise ListError(f"{path}: a STOPGAP list (data_{block.name}) is not read yet; expected a RELION 3.0 or 3.1 list")
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
    if "rlnImageName" not in block.labels:
        raise ListError(f"{block.where()}: no column _rlnImageName; a list without particle volumes (such as Warp's for matching) is not read yet")
    return block, optics


def _refuse_slices(block: StarBlock, names: list[str]) -> None:
    for row, name in enumerate(names):
        if "@" in name and name.split("@", 1)[0].isdigit():
            raise ListError(f"{block.where(row)}: {name} is an image of a stack, expected a volume of its own for each particle")
        if not name:
            raise ListError(f"{block.where(row)}: _rlnImageName is empty")


def _refuse_duplicates(block: StarBlock, names: list[str], paths: tuple[Path, ...]) -> None:
    """One volume must not stand twice: in both half-sets it would correlate with itself."""
    first: dict[str, int] = {}
    for row, path in enumerate(paths):
        other = first.setdefault(os.path.normpath(path), row)
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
    groups = np.empty(block.n_rows, dtype=np.int32)
    for row, text in enumerate(block.texts("rlnOpticsGroup")):
        key = _whole(text)
        if key not in index:
            if optics is not None:
                raise ListError(f"{block.where(row)}: optics group {text} is not in data_optics, found {', '.join(index)}")
            index[key] = len(index)
        groups[row] = index[key]
    return groups


def _classes(block: StarBlock) -> NDArray[np.int32] | None:
    """Class numbers; None where there is no column, or one that does not hold whole numbers (nobody asked for it)."""
    if "rlnClassNumber" not in block.labels:
        return None
    texts = [_whole(text) for text in block.texts("rlnClassNumber")]
    return np.array(texts, np.int32) if all(text.isdecimal() and len(text) < 9 for text in texts) else None


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


def _list_pixel_size(block: StarBlock, optics: StarBlock | None, groups: NDArray[np.int32]) -> tuple[float | None, str]:
    """Pixel size as the list says it, and in which columns."""
    if optics is not None and "rlnImagePixelSize" in optics.labels:
        used = np.unique(groups)
        sizes = optics.floats("rlnImagePixelSize")[used]
        if sizes.max() > 1.0001 * sizes.min():
            found = ", ".join(f"{s:g} A (line {optics.row_lines[g]})" for g, s in zip(used, sizes, strict=True))
            raise ListError(f"{optics.path}: optics groups have different pixel sizes: {found}; expected one")
        return float(sizes[0]), "rlnImagePixelSize"
    size: float | None = None
    text = ""
    if "rlnPixelSize" in block.labels:
        size, text = _one_value(block, block.floats("rlnPixelSize"), "rlnPixelSize"), "rlnPixelSize"
    if {"rlnDetectorPixelSize", "rlnMagnification"} <= set(block.labels):
        both = "rlnDetectorPixelSize, rlnMagnification"
        magnification = block.floats("rlnMagnification")
        if (magnification <= 0).any():
            row = int(np.argmax(magnification <= 0))
            raise ListError(f"{block.where(row)}: _rlnMagnification is {magnification[row]:g}, expected a number above 0")
        detector = _one_value(block, block.floats("rlnDetectorPixelSize") * 1e4 / magnification, both)
        if size is None:
            size, text = detector, both
        elif abs(detector / size - 1) > 0.01:
            warnings.warn(f"{block.path}: rlnPixelSize is {size:g} A, but {both} give {detector:g} A; rlnPixelSize is taken", stacklevel=4)
    return size, text


def _one_value(block: StarBlock, values: NDArray[np.float64], what: str) -> float:
    different = np.abs(values - values[0]) > 1e-4 * abs(values[0])
    if different.any():
        row = int(np.argmax(different))
        raise ListError(f"{block.where(row)}: pixel size {values[row]:g} A ({what}), but {values[0]:g} A in {_line(block, 0)}; expected one")
    return float(values[0])


def _list_box_size(optics: StarBlock | None, groups: NDArray[np.int32]) -> int | None:
    if optics is None or "rlnImageSize" not in optics.labels:
        return None
    used = np.unique(groups)
    sizes = optics.floats("rlnImageSize")[used]
    if sizes.min() != sizes.max():
        found = ", ".join(f"{s:g} (line {optics.row_lines[g]})" for g, s in zip(used, sizes, strict=True))
        raise ListError(f"{optics.path}: optics groups have different box sizes: {found}; expected one")
    return int(sizes[0])


def _weight_names(block: StarBlock) -> list[str]:
    if "rlnCtfImage" not in block.labels:
        return [""] * block.n_rows
    return ["" if name == "None" else name for name in block.texts("rlnCtfImage")]


def _refuse_partial(block: StarBlock, labels: Sequence[str]) -> None:
    """Three columns stand together or not at all: one that was lost on the way is no 0."""
    missing = [f"_{label}" for label in labels if label not in block.labels]
    if 0 < len(missing) < len(labels):
        raise ListError(f"{block.where()}: no column {' and '.join(missing)}; expected all three of {', '.join(labels)}, or none")


def _triples(block: StarBlock, labels: Sequence[str], scale: float = 1.0) -> NDArray[np.float64]:
    """Three columns as (n, 3); zeros where the list has none of them."""
    if labels[0] not in block.labels:
        return np.zeros((block.n_rows, 3))
    return np.stack([block.floats(label) for label in labels], axis=1) * scale


def _origins_angst(block: StarBlock, pixel_size_angst: float) -> NDArray[np.float64]:
    """Origins in Angstrom, whichever of the two kinds the list has; where both differ Angstrom wins."""
    has_angst = any(label in block.labels for label in ORIGINS_ANGST)
    has_pixel = any(label in block.labels for label in ORIGINS_PIXEL)
    if not has_angst:
        return _triples(block, ORIGINS_PIXEL, pixel_size_angst)
    angst = _triples(block, ORIGINS_ANGST)
    if has_pixel:
        differ = _origins_differ(angst, _triples(block, ORIGINS_PIXEL), pixel_size_angst)
        if differ.any():
            row = int(np.argmax(differ))
            warnings.warn(
                f"{block.where(row)}: rlnOriginX/Y/Z and rlnOriginX/Y/ZAngst differ in {int(differ.sum())} of {block.n_rows} rows; "
                "Angstrom is taken, and both are written alike",
                stacklevel=3,
            )
    return angst


def _origins_differ(angst: NDArray[Any], pixel: NDArray[Any], pixel_size_angst: float) -> NDArray[np.bool_]:
    # lists carry as few as two decimals
    return np.abs(angst - pixel * pixel_size_angst).max(axis=1) > 0.01 * max(1.0, pixel_size_angst)


def _half_sets(block: StarBlock) -> NDArray[np.int8]:
    half = np.zeros(block.n_rows, dtype=np.int8)
    if "rlnRandomSubset" not in block.labels:
        return half
    for row, text in enumerate(block.texts("rlnRandomSubset")):
        whole = text if text in ("1", "2") else _whole(text)
        if whole not in ("1", "2"):
            raise ListError(f"{block.where(row)}: _rlnRandomSubset is '{text}', expected 1 or 2")
        half[row] = int(whole)
    return half


def _tomograms(block: StarBlock) -> tuple[str, ...]:
    for label in ("rlnMicrographName", "rlnTomoName"):
        if label in block.labels:
            return tuple(block.texts(label))
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
    if label not in block.labels:
        block.set_column(label, ["0.000000"] * len(values))
    tokens = block.tokens(label)
    for row in np.flatnonzero(rows).tolist():
        # + 0.0 after rounding: no "-0.000000"
        tokens[row] = f"{round(float(values[row]), 6) + 0.0:.6f}"


def _write_rotations(block: StarBlock, rotations: NDArray[Any], before: NDArray[Any] | None) -> None:
    changed = np.ones(len(rotations), dtype=bool) if before is None else np.abs(rotations - before).max(axis=(1, 2)) > _SAME_ROTATION
    if not changed.any():
        return
    angles = matrix_to_relion(rotations)
    for axis, label in enumerate(ANGLES):
        _set_rows(block, label, angles[:, axis], changed)


def _write_shifts(block: StarBlock, particles: ParticleSet, before: NDArray[Any] | None, has_optics: bool) -> None:
    shifts, pixel_size = particles.poses.shifts_angst, particles.pixel_size_angst
    changed = np.ones(len(shifts), dtype=bool) if before is None else np.abs(shifts - before).max(axis=1) > _SAME_SHIFT_ANGST
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
            changed |= _origins_differ(-shifts, _triples(block, ORIGINS_PIXEL), pixel_size)
        if changed.any():
            for axis, label in enumerate(ORIGINS_PIXEL):
                _set_rows(block, label, -shifts[:, axis] / pixel_size, changed)


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


def _new_document(particles: ParticleSet, folder: Path) -> StarDocument:
    """A RELION 3.1 list for particles that came from elsewhere; poses and half-sets are filled in by the writer."""
    n = len(particles)
    groups = [int(g) for g in np.unique(particles.groups)] or [0]
    optics = StarBlock.from_columns(
        "optics",
        {
            "rlnOpticsGroup": [str(g + 1) for g in groups],
            "rlnOpticsGroupName": [f"opticsGroup{g + 1}" for g in groups],
            "rlnImagePixelSize": [f"{particles.pixel_size_angst:.6f}"] * len(groups),
            "rlnImageSize": [str(particles.box_size)] * len(groups),
            "rlnImageDimensionality": ["3"] * len(groups),
            "rlnCtfDataAreCtfPremultiplied": [str(int(particles.premultiplied))] * len(groups),
        },
    )
    columns: dict[str, Sequence[str]] = {"rlnImageName": particles.names}
    if any(path is not None for path in particles.weight_paths):
        columns["rlnCtfImage"] = ["None" if path is None else _beside(path, folder) for path in particles.weight_paths]
    if any(particles.tomograms):
        columns["rlnMicrographName"] = [name or "None" for name in particles.tomograms]
    columns["rlnOpticsGroup"] = [str(int(g) + 1) for g in particles.groups]
    block = StarBlock.from_columns("particles", columns)
    for label in (*ANGLES, *ORIGINS_ANGST):
        block.set_column(label, ["0.000000"] * n)
    return StarDocument([optics, block])


def _beside(path: Path, folder: Path) -> str:
    """A path as a list in `folder` names it: relative when the file is inside."""
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute, folder) if Path(absolute).is_relative_to(folder) else absolute
