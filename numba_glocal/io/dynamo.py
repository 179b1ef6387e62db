"""Dynamo tables (``.tbl``). Poses and wedges enter and leave Dynamo's convention here (docs/conventions.md, 2, 3 and 5).

A table numbers particles and names no files; it is written as it was read, line by line, except for the cells that changed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, ListError, WeightsLeftOutWarning
from ..geometry import matrix_to_zxz, zxz_to_matrix
from ..values import FloatArray, IntArray, ParticleSet, Poses, TiltGeometry, TiltRange, TomogramWeight, Weight
from .located import locate, places
from .numbered import (
    digits,
    names_of,
    numbers_from_names,
    refuse_repeated,
    tokens_of,
    tomogram_numbers,
    tomogram_texts,
    whole_numbers,
    with_tokens,
)
from .paths import whole_file

KEY = "dynamo"
NAMES = "particle_{:06d}.em"
"""How Dynamo itself names the particles of a data folder."""

# columns, counted from 1 as Dynamo does
TAG, ALIGNED, AVERAGED, SHIFTS, ANGLES, CC, FTYPE, TILTS, TOMOGRAM, REGION, CLASS, PLACE, REFERENCE, APIX = (
    1,
    2,
    3,
    4,
    7,
    10,
    13,
    14,
    20,
    21,
    22,
    24,
    34,
    36,
)
_LEAST_COLUMNS = 26
_NEW_COLUMNS = 36
# below the last digit that is written
_SAME_ROTATION = 1e-9
_SAME_SHIFT_ANGST = 1e-7
_COMPLEX = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([+-](?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[ij]")


@dataclass(frozen=True, slots=True)
class DynamoSource:
    """The lines a table came from, and what was read from them, so that only changes are written.

    Attributes
    ----------
    path : str
    lines : tuple of str
        Of the particles, each with its end.
    rows : (n,) int
        Those that belong to the particle set, in the set's order.
    poses : Poses
        As read, row by row of the set.
    pixel_size_angst : float
        The one that shifts were read with.
    names : tuple of str
        As made from the numbers.
    """

    path: str
    lines: tuple[str, ...] = field(repr=False)
    rows: IntArray
    poses: Poses
    pixel_size_angst: float
    names: tuple[str, ...]
    format_key: str = KEY

    def take(self, index: IntArray | Sequence[int]) -> DynamoSource:
        """The source of the particles at `index`."""
        index = np.asarray(index, dtype=np.intp)
        return replace(self, rows=self.rows[index], poses=self.poses.take(index), names=tuple(self.names[i] for i in index))

    def extras(self) -> list[str]:
        """What only this list holds."""
        return ["Dynamo's other columns"]


def dynamo_to_matrix(angles_deg: ArrayLike) -> NDArray[np.float64]:
    """Rotation matrices ``R`` from Dynamo's ``tdrot, tilt, narot`` in degrees (..., 3): they turn the particle onto the reference."""
    angles = np.asarray(angles_deg, dtype=np.float64)
    return zxz_to_matrix(np.stack([-angles[..., 2], -angles[..., 0], -angles[..., 1]], axis=-1))


def matrix_to_dynamo(rotations: ArrayLike) -> NDArray[np.float64]:
    """Dynamo's ``tdrot, tilt, narot`` in degrees from matrices (..., 3, 3); tilt from 0 to 180, at both ends tdrot is 0."""
    z1, z2, x = np.moveaxis(matrix_to_zxz(rotations), -1, 0)
    # Rz(z2) Rx(x) Rz(z1) = Rz(z2 + 180) Rx(-x) Rz(z1 - 180): so tilt = x is not negative; at 0 and 180 Rx(x) = Rx(-x), and z2 is 0
    half_turn = np.where(np.sin(np.deg2rad(x)) > 1e-8, 180.0, 0.0)
    return np.stack([_within_half_turn(-z2 - half_turn), x, _within_half_turn(half_turn - z1)], axis=-1)


def _within_half_turn(angles_deg: NDArray[np.float64]) -> NDArray[np.float64]:
    return (angles_deg + 180.0) % 360.0 - 180.0


# ---- reading


def read_dynamo_particles(
    path: str | Path,
    *,
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    premultiplied: bool | None = None,
    require_volumes: bool = True,
    particle_names: str | None = None,
) -> ParticleSet:
    """Read a Dynamo table.

    Parameters
    ----------
    path : path
        Lines of 26 columns or more. Names of tomograms come from a ``.doc`` or ``.vll`` beside it (`tomogram_names`).
    pixel_size_angst : float, optional
        Goes before column 36 and the volumes' headers.
    root, require_volumes
        As in `read_relion_particles`.
    premultiplied : bool, optional
        Whether volumes are multiplied by their CTF; False if not given.
    particle_names : str, optional
        How files are named after the tag, as in `numbered.names_of`; by default as Dynamo names them, ``particle_000001.em``.

    Returns
    -------
    ParticleSet

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, line, what was expected and what was found.
    """
    lines, numbers = _lines(path)
    table = _table(path, lines, numbers)

    def where(row: int) -> str:
        return f"{path}:{numbers[row]}"

    tags = whole_numbers(table[:, TAG - 1], "the tag (column 1)", where, 0)
    refuse_repeated(tags, "tag", where)
    tomograms = whole_numbers(table[:, TOMOGRAM - 1], "the tomogram (column 20)", where, 0)
    regions = whole_numbers(table[:, REGION - 1], "the region (column 21)", where)
    names = names_of(particle_names or NAMES, tags, tomograms, regions)
    _refuse_unfinite(path, table, numbers)
    weights: tuple[Weight | None, ...] = tuple(_wedge(where(row), table[row]) for row in range(len(table)))
    place = locate(
        path,
        names,
        where,
        list_pixel_size=_list_pixel_size(table, where),
        pixel_size_angst=pixel_size_angst,
        root=root,
        require_volumes=require_volumes,
        hint="" if particle_names else f"; Dynamo's own names {NAMES} were taken, --particle-names gives others",
    )
    poses = Poses(dynamo_to_matrix(table[:, ANGLES - 1 : ANGLES + 2]), table[:, SHIFTS - 1 : SHIFTS + 2] * place.pixel_size_angst)
    scores = table[:, CC - 1]
    return ParticleSet(
        names=tuple(names),
        volume_paths=place.volume_paths,
        weight_paths=weights,
        poses=poses,
        half=np.zeros(len(names), np.int8),
        tomograms=tomogram_texts(tomograms, tomogram_names(path)),
        groups=np.zeros(len(names), np.int32),
        pixel_size_angst=place.pixel_size_angst,
        pixel_size_source=place.pixel_size_source,
        box_size=place.box_size,
        premultiplied=bool(premultiplied),
        source=DynamoSource(str(path), tuple(lines), np.arange(len(names)), poses, place.pixel_size_angst, tuple(names)),
        coordinates=places(table[:, PLACE - 1 : PLACE + 2], place.pixel_size_angst),
        classes=whole_numbers(table[:, CLASS - 1], "the class (column 22)", where).astype(np.int32),
        scores=scores.copy() if scores.any() else None,
    )


def _lines(path: str | Path) -> tuple[list[str], list[int]]:
    """The lines that are not blank, with their ends, and their numbers."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    if b"\0" in raw:
        raise ListError(f"{path}: not a Dynamo table of text; it is binary")
    lines = raw.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    kept = [(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not kept:
        raise ListError(f"{path}: the file is empty")
    return [line for line, _ in kept], [number for _, number in kept]


def _table(path: str | Path, lines: Sequence[str], numbers: Sequence[int]) -> NDArray[np.float64]:
    """The cells as numbers, NaN where they are; of complex ones, which MATLAB writes, the real part."""
    rows = []
    width = len(tokens_of(lines[0]))
    if width < _LEAST_COLUMNS:
        raise ListError(f"{path}:{numbers[0]}: not a Dynamo table: expected {_LEAST_COLUMNS} columns or more, found {width}")
    for line, number in zip(lines, numbers, strict=True):
        tokens = tokens_of(line)
        if len(tokens) != width:
            raise ListError(f"{path}:{number}: expected {width} columns as in line {numbers[0]}, found {len(tokens)}")
        try:
            rows.append([float(token) for token in tokens])
        except ValueError:
            rows.append([_cell(f"{path}:{number}", column, token) for column, token in enumerate(tokens, 1)])
    return np.array(rows)


def _cell(where: str, column: int, token: str) -> float:
    try:
        return float(token)
    except ValueError:
        match = _COMPLEX.fullmatch(token)
    if match is None:
        raise ListError(f"{where}: column {column} is '{token}', expected a number")
    return float(match.group(1))


def _refuse_unfinite(path: str | Path, table: NDArray[np.float64], numbers: Sequence[int]) -> None:
    for column in (*range(SHIFTS, SHIFTS + 3), *range(ANGLES, ANGLES + 3), FTYPE, *range(TILTS, TILTS + 4), *range(PLACE, PLACE + 3)):
        bad = ~np.isfinite(table[:, column - 1])
        if bad.any():
            row = int(np.argmax(bad))
            raise ListError(f"{path}:{numbers[row]}: column {column} is {table[row, column - 1]}, expected a finite number")


def _wedge(where: str, row: NDArray[np.float64]) -> tuple[TiltRange, ...] | None:
    """Tilts of a particle; None where Fourier space is whole (type 0), or the limits are all 0, not filled in."""
    kind = row[FTYPE - 1]
    if kind not in (0, 1, 2, 4):
        raise ListError(
            f"{where}: Fourier sampling of type {kind:g} (column 13) is not read; expected 0 (all), 1 (tilt about y), 2 (about x) or 4 (both)"
        )
    about_y, about_x = row[TILTS - 1 : TILTS + 1], row[TILTS + 1 : TILTS + 3]
    series = {0: (), 1: (("y", about_y),), 2: (("x", about_x),), 4: (("y", about_y), ("x", about_x))}[int(kind)]
    if not any(limits.any() for _, limits in series):
        return None
    for axis, (low, high) in series:
        if not -90 <= low < high <= 90:
            columns = "14, 15" if axis == "y" else "16, 17"
            raise ListError(f"{where}: tilt limits {low:g} and {high:g} (columns {columns}): expected -90 <= smallest < largest <= 90 degrees")
    return tuple(TiltRange(float(low), float(high), axis) for axis, (low, high) in series)


def _list_pixel_size(table: NDArray[np.float64], where: Callable[[int], str]) -> tuple[float | None, str]:
    """Column 36, where it is filled in."""
    if table.shape[1] < APIX:
        return None, ""
    sizes = table[:, APIX - 1]
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        return None, ""
    different = np.abs(sizes - sizes[0]) > 1e-4 * sizes[0]
    if different.any():
        row = int(np.argmax(different))
        raise ListError(f"{where(row)}: pixel size {sizes[row]:g} A (column 36), but {sizes[0]:g} A in {where(0)}; expected one")
    return float(sizes[0]), "column 36"


def tomogram_names(path: str | Path) -> dict[int, str]:
    """Names of the tomograms of a table, from the file beside it that Dynamo wrote.

    Tried in turn: the table's name with ``.doc``, ``indices_column20.doc`` (lines of a number and a name), the table's name with
    ``.vll`` (a name a line; those that begin with ``*`` or ``#`` say more of the one before).

    Returns
    -------
    dict of int to str
        Empty without such a file.
    """
    table = Path(path)
    for name in (table.with_suffix(".doc"), table.with_name("indices_column20.doc"), table.with_suffix(".vll")):
        try:
            lines = name.read_text("utf-8", "surrogateescape").splitlines()
        except OSError:
            continue
        entries = [line.split("#", 1)[0].strip() for line in lines]
        entries = [entry for entry in entries if entry and not entry.startswith(("*", ">"))]
        if name.suffix == ".vll":
            return dict(enumerate(entries, 1))
        pairs = [entry.split(None, 1) for entry in entries]
        for pair in pairs:
            if len(pair) != 2 or not pair[0].isdigit():
                raise ListError(f"{name}: found the line '{' '.join(pair)}', expected a tomogram's number and its name")
        return {int(number): text for number, text in pairs}
    return {}


# ---- writing


def write_dynamo_particles(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a Dynamo table, whole or not at all; cells that did not change stay as they were.

    Parameters
    ----------
    path : path
        Output.
    particles : ParticleSet
        Those from elsewhere get the last number of their files' names as tag where all differ, else 1 to n; it is said which.
    extra_columns : dict of label to (n,) array, optional
        ``ngScore`` becomes column 10; a table has no place for others.

    Raises
    ------
    ListError, InputError
        Columns of another length; a file that cannot be written.
    """
    scores = None if extra_columns is None or "ngScore" not in extra_columns else np.asarray(extra_columns["ngScore"], np.float64)
    if scores is not None and scores.shape != (len(particles),):
        raise ListError(f"{path}: column _ngScore has shape {scores.shape}, expected ({len(particles)},)")
    source = particles.source if isinstance(particles.source, DynamoSource) else None
    if source is None:
        lines = _new_lines(path, particles, particles.scores if scores is None else scores)
    elif len(source.rows) != len(particles):
        raise ListError(f"{path}: {len(particles)} particles come with {len(source.rows)} lines of {source.path}")
    else:
        lines = _changed_lines(particles, source, scores)
    with whole_file(path) as handle:
        handle.write("".join(lines).encode("utf-8", "surrogateescape"))


def _changed_lines(particles: ParticleSet, source: DynamoSource, scores: NDArray[np.float64] | None) -> list[str]:
    rescaled = abs(particles.pixel_size_angst / source.pixel_size_angst - 1) > 1e-9
    turned = np.abs(particles.poses.rotations - source.poses.rotations).max(axis=(1, 2)) > _SAME_ROTATION
    moved = (np.abs(particles.poses.shifts_angst - source.poses.shifts_angst).max(axis=1) > _SAME_SHIFT_ANGST) | rescaled
    angles = matrix_to_dynamo(particles.poses.rotations)
    shifts = particles.shifts_voxels()
    lines = []
    for i, row in enumerate(source.rows.tolist()):
        changes: dict[int, str] = {}
        if moved[i]:
            changes |= {SHIFTS - 1 + k: digits(shifts[i, k]) for k in range(3)}
        if turned[i]:
            changes |= {ANGLES - 1 + k: digits(angles[i, k]) for k in range(3)}
        if scores is not None:
            changes[CC - 1] = f"{scores[i]:.6g}"
        line = source.lines[row]
        line = line if line.endswith("\n") else line + "\n"
        if changes or _says_another_pixel_size(line, particles.pixel_size_angst):
            if _says_another_pixel_size(line, particles.pixel_size_angst):
                changes[APIX - 1] = digits(particles.pixel_size_angst)
            line = with_tokens(line, changes)
        lines.append(line)
    return lines


def _says_another_pixel_size(line: str, pixel_size_angst: float) -> bool:
    """Whether column 36 holds another size than the one used: shifts in voxels would be misread."""
    tokens = tokens_of(line)
    if len(tokens) < APIX:
        return False
    said = _cell("", APIX, tokens[APIX - 1])
    return bool(np.isfinite(said) and said > 0 and abs(said / pixel_size_angst - 1) > 1e-6)


def _new_lines(path: str | Path, particles: ParticleSet, scores: FloatArray | None) -> list[str]:
    n = len(particles)
    table = np.zeros((n, _NEW_COLUMNS))
    tags, from_names = numbers_from_names(particles.names)
    if not from_names:
        warnings.warn(f"{path}: the files' names do not number the particles; they are numbered 1 to {n} in the list's order", stacklevel=4)
    table[:, TAG - 1] = table[:, 31 - 1] = tags
    table[:, [ALIGNED - 1, AVERAGED - 1, REFERENCE - 1]] = 1
    table[:, SHIFTS - 1 : SHIFTS + 2] = particles.shifts_voxels()
    table[:, ANGLES - 1 : ANGLES + 2] = matrix_to_dynamo(particles.poses.rotations)
    if scores is not None:
        table[:, CC - 1] = np.where(np.isfinite(scores), scores, 0.0)
    table[:, TOMOGRAM - 1] = tomogram_numbers(particles.tomograms)
    if particles.classes is not None:
        table[:, CLASS - 1] = particles.classes
    if particles.coordinates is not None:
        centres = particles.coordinates.as_voxels()
        table[:, PLACE - 1 : PLACE + 2] = np.where(np.isfinite(centres), centres, 0.0)
    table[:, APIX - 1] = particles.pixel_size_angst
    volumes = other = 0
    for row, weight in enumerate(particles.weight_paths):
        limits = _limits(weight)
        if limits is not None:
            table[row, FTYPE - 1 : TILTS + 3] = limits
        elif weight is not None:
            volumes, other = volumes + isinstance(weight, Path), other + (not isinstance(weight, Path))
    for left_out, kind in ((volumes, WeightsLeftOutWarning), (other, UserWarning)):
        if left_out:
            text = f"{path}: a Dynamo table cannot hold the wedge or CTF of {left_out} of {n} particles; it is left out"
            warnings.warn(text, kind, stacklevel=4)
    return [" ".join(digits(value) for value in row) + "\n" for row in table]


def _limits(weight: Weight | None) -> list[float] | None:
    """Columns 13 to 17 of a wedge; None where they cannot say it."""
    if weight is None or isinstance(weight, Path | TiltGeometry | TomogramWeight) or any(tilts.turn is not None for tilts in weight):
        return None
    by_axis = {t.tilt_axis: (-t.tilt_max_deg, -t.tilt_min_deg) if t.flip else (t.tilt_min_deg, t.tilt_max_deg) for t in weight}
    if len(by_axis) != len(weight):
        return None
    kind = {("y",): 1, ("x",): 2, ("x", "y"): 4}[tuple(sorted(by_axis))]
    return [kind, *by_axis.get("y", (0, 0)), *by_axis.get("x", (0, 0))]
