"""Motive lists of TOM and AV3 (EM, 20 x n x 1). Poses enter and leave their convention here (docs/conventions.md, 2 and 5).

Rows of a particle's column, counted from 1: 1 score; 4 particle number; 5 tomogram number; 6 object number; 8-10 place in the
tomogram; 11-13 shift after rotation, in voxels; 17, 18, 19 phi, psi, theta; 20 class. The others (2, 3, 7, 14-16) mean different
things to different programs: they are kept and never used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, ListError, VolumeError, WeightsLeftOutWarning
from ..geometry import matrix_to_zxz, zxz_to_matrix
from ..values import IntArray, ParticleSet, Poses, Weight
from .em import HEADER_BYTES, em_bytes, parse_em_header
from .located import locate, places
from .numbered import names_of, numbers_from_names, refuse_repeated, tomogram_numbers, tomogram_texts, whole_numbers
from .paths import whole_file
from .wedge_list import read_wedge_list

KEY = "av3"
NAMES = "particle_{}.em"
ROWS = 20
SCORE, PARTICLE, TOMOGRAM, OBJECT, PLACE, SHIFT, ANGLES, CLASS = 1, 4, 5, 6, 8, 11, 17, 20
# below the last digit that a list in single precision carries
_SAME_ROTATION = 1e-9
_SAME_SHIFT_ANGST = 1e-7


@dataclass(frozen=True, slots=True)
class MotiveSource:
    """The numbers a motive list came from, so that only changes are written.

    Attributes
    ----------
    path : str
    header : bytes
        The 512 bytes of the file.
    table : (m, 20) array
        All particles, in the file's own number type.
    rows : (n,) int
        Those that belong to the particle set, in the set's order.
    poses : Poses
        As read, row by row of the set.
    pixel_size_angst : float
        The one that shifts were read with.
    """

    path: str
    header: bytes = field(repr=False)
    table: NDArray[np.floating] = field(repr=False)
    rows: IntArray
    poses: Poses
    pixel_size_angst: float
    format_key: str = KEY

    def take(self, index: IntArray | Sequence[int]) -> MotiveSource:
        """The source of the particles at `index`."""
        index = np.asarray(index, dtype=np.intp)
        return replace(self, rows=self.rows[index], poses=self.poses.take(index))

    def extras(self) -> list[str]:
        """What only this list holds."""
        used = self.table[self.rows]
        other = [row for row in (2, 3, OBJECT, 7, 14, 15, 16) if used[:, row - 1].any()]
        return [f"row{'s' if len(other) > 1 else ''} {', '.join(map(str, other))} of the motive list"] if other else []


# ---- reading


def read_motive_list(
    path: str | Path,
    *,
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    premultiplied: bool | None = None,
    require_volumes: bool = True,
    particle_names: str | None = None,
    wedge_list: str | Path | None = None,
) -> ParticleSet:
    """Read a TOM/AV3 motive list.

    Parameters
    ----------
    path : path
        EM file of 20 x n x 1 numbers.
    pixel_size_angst : float, optional
        The list has none; without it the volumes' headers must say it.
    root, require_volumes
        As in `read_relion_particles`.
    premultiplied : bool, optional
        Whether volumes are multiplied by their CTF; False if not given.
    particle_names : str, optional
        How files are named after the particle's number (row 4), as in `numbered.names_of`; by default ``particle_1.em``.
    wedge_list : path, optional
        As in `read_wedge_list`.

    Returns
    -------
    ParticleSet

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, particle, what was expected and what was found.
    """
    header, table = _read(path)
    values = table.astype(np.float64)

    def where(row: int) -> str:
        return f"{path}, particle {row + 1}"

    for first, last in ((PLACE, PLACE + 3), (SHIFT, SHIFT + 3), (ANGLES, ANGLES + 3)):
        bad = ~np.isfinite(values[:, first - 1 : last - 1]).all(axis=1)
        if bad.any():
            raise ListError(f"{where(int(np.argmax(bad)))}: rows {first} to {last - 1} hold values that are not finite")
    particles = whole_numbers(values[:, PARTICLE - 1], "the particle's number (row 4)", where, 0)
    refuse_repeated(particles, "the particle's number (row 4)", where)
    tomograms = whole_numbers(values[:, TOMOGRAM - 1], "the tomogram (row 5)", where)
    objects = whole_numbers(values[:, OBJECT - 1], "the object (row 6)", where)
    names = names_of(particle_names or NAMES, particles, tomograms, objects)
    weights: tuple[Weight | None, ...] = (None,) * len(names)
    if wedge_list is not None:
        weights = read_wedge_list(wedge_list).wedges(tomograms.tolist())
    place = locate(
        path,
        names,
        where,
        pixel_size_angst=pixel_size_angst,
        root=root,
        require_volumes=require_volumes,
        hint="" if particle_names else f"; {NAMES} was taken, --particle-names gives other names",
    )
    poses = Poses(zxz_to_matrix(values[:, ANGLES - 1 : ANGLES + 2]), values[:, SHIFT - 1 : SHIFT + 2] * place.pixel_size_angst)
    scores = values[:, SCORE - 1]
    return ParticleSet(
        names=tuple(names),
        volume_paths=place.volume_paths,
        weight_paths=weights,
        poses=poses,
        half=np.zeros(len(names), np.int8),
        tomograms=tomogram_texts(tomograms),
        groups=np.zeros(len(names), np.int32),
        pixel_size_angst=place.pixel_size_angst,
        pixel_size_source=place.pixel_size_source,
        box_size=place.box_size,
        premultiplied=bool(premultiplied),
        source=MotiveSource(str(path), header, table, np.arange(len(names)), poses, place.pixel_size_angst),
        coordinates=places(values[:, PLACE - 1 : PLACE + 2], place.pixel_size_angst),
        classes=whole_numbers(values[:, CLASS - 1], "the class (row 20)", where).astype(np.int32),
        scores=scores if scores.any() else None,
    )


def _read(path: str | Path) -> tuple[bytes, NDArray[np.floating]]:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        header = parse_em_header(raw[:HEADER_BYTES], path)
    except VolumeError as error:
        raise ListError(str(error)) from None
    nz, ny, nx = header.shape
    if nx != ROWS or nz != 1:
        kind = "; it looks like an angle list" if nx == 3 and nz == 1 else ""
        raise ListError(f"{path}: an EM file of {nx} x {ny} x {nz} numbers, expected a motive list of {ROWS} x n x 1{kind}")
    if header.dtype.kind != "f":
        raise ListError(f"{path}: a motive list of whole numbers (EM type {raw[3]}), expected type 5 or 9")
    n_bytes = header.offset + ROWS * ny * header.dtype.itemsize
    if len(raw) < n_bytes:
        raise ListError(f"{path}: expected {n_bytes} bytes for {ny} particles, found {len(raw)}")
    return raw[:HEADER_BYTES], np.frombuffer(raw, header.dtype, ROWS * ny, header.offset).reshape(ny, ROWS)


# ---- writing


def write_motive_list(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a TOM/AV3 motive list, whole or not at all; numbers that did not change stay as they were, bit by bit.

    Parameters
    ----------
    path : path
        Output.
    particles : ParticleSet
        Those from elsewhere get the last number of their files' names as particle number where all differ, else 1 to n; it is said which.
    extra_columns : dict of label to (n,) array, optional
        ``ngScore`` becomes row 1; the list has no place for others.

    Raises
    ------
    ListError, InputError
        Columns of another length; a file that cannot be written.
    """
    scores = None if extra_columns is None or "ngScore" not in extra_columns else np.asarray(extra_columns["ngScore"], np.float64)
    if scores is not None and scores.shape != (len(particles),):
        raise ListError(f"{path}: column _ngScore has shape {scores.shape}, expected ({len(particles)},)")
    source = particles.source if isinstance(particles.source, MotiveSource) else None
    n = len(particles)
    if source is None:
        table = _new_table(path, particles)
        header, _ = em_bytes(table[None])
        turned = moved = np.ones(n, bool)
    else:
        if len(source.rows) != n:
            raise ListError(f"{path}: {n} particles come with {len(source.rows)} of {source.path}")
        table = source.table[source.rows]
        order = "<" if source.header[4:8] == len(table[0]).to_bytes(4, "little") else ">"
        header = source.header[:8] + np.array([n], f"{order}i4").tobytes() + source.header[12:]
        rescaled = abs(particles.pixel_size_angst / source.pixel_size_angst - 1) > 1e-9
        turned = np.abs(particles.poses.rotations - source.poses.rotations).max(axis=(1, 2)) > _SAME_ROTATION
        moved = (np.abs(particles.poses.shifts_angst - source.poses.shifts_angst).max(axis=1) > _SAME_SHIFT_ANGST) | rescaled
    table[turned, ANGLES - 1 : ANGLES + 2] = matrix_to_zxz(particles.poses.rotations)[turned]
    table[moved, SHIFT - 1 : SHIFT + 2] = particles.shifts_voxels()[moved]
    if scores is not None:
        table[:, SCORE - 1] = scores
    with whole_file(path) as handle:
        handle.write(header)
        handle.write(np.ascontiguousarray(table).tobytes())


def _new_table(path: str | Path, particles: ParticleSet) -> NDArray[np.float32]:
    n = len(particles)
    numbers, from_names = numbers_from_names(particles.names)
    if not from_names:
        warnings.warn(f"{path}: the files' names do not number the particles; they are numbered 1 to {n} in the list's order", stacklevel=4)
    if any(weight is not None for weight in particles.weight_paths):
        warnings.warn(f"{path}: a motive list holds no wedges; they are left out", WeightsLeftOutWarning, stacklevel=4)
    table = np.zeros((n, ROWS), np.float32)
    table[:, PARTICLE - 1] = numbers
    table[:, TOMOGRAM - 1] = tomogram_numbers(particles.tomograms)
    if particles.scores is not None:
        table[:, SCORE - 1] = np.where(np.isfinite(particles.scores), particles.scores, 0)
    if particles.coordinates is not None:
        centres = particles.coordinates.as_voxels()
        table[:, PLACE - 1 : PLACE + 2] = np.where(np.isfinite(centres), centres, 0)
    table[:, CLASS - 1] = 1 if particles.classes is None else particles.classes
    return table
