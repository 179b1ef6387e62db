"""STOPGAP motive lists (STAR, ``data_stopgap_motivelist``). Poses enter and leave STOPGAP's convention here (docs/conventions.md, 2 and 5).

A list numbers particles and names no files; it is written as it was read, line by line, except for the cells that changed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ListError
from ..geometry import matrix_to_zxz, zxz_to_matrix
from ..values import FloatArray, IntArray, ParticleSet, Poses, Weight
from .located import locate, places
from .numbered import names_of, numbers_from_names, refuse_repeated, tomogram_numbers, tomogram_texts, with_tokens
from .paths import whole_file
from .star import StarBlock, read_star
from .wedge_list import read_wedge_list, star_numbers, text_lines

KEY = "stopgap"
BLOCK = "stopgap_motivelist"
NAMES = "subtomograms/subtomo_{}.mrc"
ANGLES = ("phi", "psi", "the")
SHIFTS = ("x_shift", "y_shift", "z_shift")
PLACES = ("orig_x", "orig_y", "orig_z")
_NEEDED = ("subtomo_num", *SHIFTS, *ANGLES)
_HALVES = {"a": 1, "b": 2, "1": 1, "2": 2}
# below the last digit that is written
_SAME_ROTATION = 1e-9
_SAME_SHIFT_ANGST = 1e-7


@dataclass(frozen=True, slots=True)
class StopgapSource:
    """The text a motive list came from, and what was read from it, so that only changes are written.

    Attributes
    ----------
    path : str
    labels : tuple of str
    head, tail : str
        What stands before the first row and behind the last one.
    lines : tuple of str
        The rows, each with its end.
    rows : (n,) int
        Those that belong to the particle set, in the set's order.
    poses : Poses
        As read, row by row of the set; so is `half`.
    half : (n,) int8
    pixel_size_angst : float
        The one that shifts were read with.
    """

    path: str
    labels: tuple[str, ...]
    head: str = field(repr=False)
    tail: str = field(repr=False)
    lines: tuple[str, ...] = field(repr=False)
    rows: IntArray
    poses: Poses
    half: NDArray[np.int8]
    pixel_size_angst: float
    format_key: str = KEY

    def take(self, index: IntArray | Sequence[int]) -> StopgapSource:
        """The source of the particles at `index`."""
        index = np.asarray(index, dtype=np.intp)
        return replace(self, rows=self.rows[index], poses=self.poses.take(index), half=self.half[index])

    def extras(self) -> list[str]:
        """What only this list holds."""
        known = {"motl_idx", "tomo_num", "halfset", "score", "class", *_NEEDED, *PLACES}
        return [f"column _{label}" for label in self.labels if label not in known]


def is_stopgap(head: bytes) -> bool:
    """Whether a STAR file begins as one of STOPGAP's."""
    return re.search(rb"^\s*data_stopgap_", head, re.MULTILINE) is not None


# ---- reading


def read_stopgap_particles(
    path: str | Path,
    *,
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    premultiplied: bool | None = None,
    require_volumes: bool = True,
    particle_names: str | None = None,
    wedge_list: str | Path | None = None,
) -> ParticleSet:
    """Read a STOPGAP motive list.

    Parameters
    ----------
    path : path
    pixel_size_angst : float, optional
        The list has none; without it the volumes' headers must say it.
    root, require_volumes
        As in `read_relion_particles`.
    premultiplied : bool, optional
        Whether volumes are multiplied by their CTF; False if not given.
    particle_names : str, optional
        How files are named after ``subtomo_num``, as in `numbered.names_of`; by default ``subtomograms/subtomo_1.mrc``.
    wedge_list : path, optional
        As in `read_wedge_list`.

    Returns
    -------
    ParticleSet

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, line, what was expected and what was found.
    """
    document = read_star(path)
    if BLOCK not in document:
        found = ", ".join(f"data_{block.name}" for block in document.blocks)
        hint = "; a wedge list goes with its motive list as --wedge-list" if "stopgap_wedgelist" in document else ""
        raise ListError(f"{path}: expected data_{BLOCK}, found {found}{hint}")
    block = document[BLOCK]
    if not block.n_rows:
        raise ListError(f"{block.where()}: the list has no particles")
    missing = [f"_{label}" for label in _NEEDED if label not in block.labels]
    if missing:
        raise ListError(f"{block.where()}: no column {' and '.join(missing)}")
    n = block.n_rows
    particles = star_numbers(block, "subtomo_num")
    refuse_repeated(particles, "subtomo_num", block.where)
    tomograms = star_numbers(block, "tomo_num") if "tomo_num" in block.labels else np.zeros(n, np.int64)
    objects = star_numbers(block, "object") if "object" in block.labels else np.zeros(n, np.int64)
    names = names_of(particle_names or NAMES, particles, tomograms, objects)
    weights: tuple[Weight | None, ...] = (None,) * n
    if wedge_list is not None:
        weights = read_wedge_list(wedge_list).wedges(tomograms.tolist())
    place = locate(
        path,
        names,
        block.where,
        pixel_size_angst=pixel_size_angst,
        root=root,
        require_volumes=require_volumes,
        hint="" if particle_names else f"; {NAMES} was taken, --particle-names gives other names",
    )
    angles = np.stack([block.floats(label) for label in ("phi", "psi", "the")], axis=1)
    shifts = np.stack([block.floats(label) for label in SHIFTS], axis=1) * place.pixel_size_angst
    poses = Poses(zxz_to_matrix(angles), shifts)
    half = _halves(block)
    centres = np.stack([block.floats(label) for label in PLACES], axis=1) if set(PLACES) <= set(block.labels) else None
    return ParticleSet(
        names=tuple(names),
        volume_paths=place.volume_paths,
        weight_paths=weights,
        poses=poses,
        half=half,
        tomograms=tomogram_texts(tomograms),
        groups=np.zeros(n, np.int32),
        pixel_size_angst=place.pixel_size_angst,
        pixel_size_source=place.pixel_size_source,
        box_size=place.box_size,
        premultiplied=bool(premultiplied),
        source=_source(path, block, poses, half, place.pixel_size_angst),
        coordinates=places(centres, place.pixel_size_angst),
        classes=star_numbers(block, "class").astype(np.int32) if "class" in block.labels else None,
        scores=block.floats("score") if "score" in block.labels else None,
    )


def _halves(block: StarBlock) -> NDArray[np.int8]:
    """Half-sets A and B as 1 and 2; 0 where the list does not say."""
    half = np.zeros(block.n_rows, np.int8)
    if "halfset" not in block.labels:
        return half
    for row, text in enumerate(block.texts("halfset")):
        if text.lower() not in ("", "none", *_HALVES):
            raise ListError(f"{block.where(row)}: _halfset is '{text}', expected A or B")
        half[row] = _HALVES.get(text.lower(), 0)
    return half


def _source(path: str | Path, block: StarBlock, poses: Poses, half: NDArray[np.int8], pixel_size_angst: float) -> StopgapSource:
    lines = text_lines(path)
    rows = [number - 1 for number in block.row_lines]
    head, tail = "".join(lines[: rows[0]]), "".join(lines[rows[-1] + 1 :])
    # blank lines and comments between rows go: a row may be left out or move
    return StopgapSource(
        str(path), tuple(block.labels), head, tail, tuple(lines[row] for row in rows), np.arange(len(rows)), poses, half, pixel_size_angst
    )


# ---- writing


def write_stopgap_particles(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a STOPGAP motive list, whole or not at all; cells that did not change stay as they were.

    Parameters
    ----------
    path : path
        Output.
    particles : ParticleSet
        Those from elsewhere get the last number of their files' names as ``subtomo_num`` where all differ, else 1 to n; it is said which.
    extra_columns : dict of label to (n,) array, optional
        ``ngScore`` becomes ``score``; the list has no place for others.

    Raises
    ------
    ListError, InputError
        Columns of another length; a file that cannot be written.
    """
    scores = None if extra_columns is None or "ngScore" not in extra_columns else np.asarray(extra_columns["ngScore"], np.float64)
    if scores is not None and scores.shape != (len(particles),):
        raise ListError(f"{path}: column _ngScore has shape {scores.shape}, expected ({len(particles)},)")
    source = particles.source if isinstance(particles.source, StopgapSource) else None
    if source is None:
        text = _new_text(path, particles, particles.scores if scores is None else scores)
    elif len(source.rows) != len(particles):
        raise ListError(f"{path}: {len(particles)} particles come with {len(source.rows)} rows of {source.path}")
    else:
        text = _changed_text(particles, source, scores)
    with whole_file(path) as handle:
        handle.write(text.encode("utf-8", "surrogateescape"))


def _changed_text(particles: ParticleSet, source: StopgapSource, scores: NDArray[np.float64] | None) -> str:
    rescaled = abs(particles.pixel_size_angst / source.pixel_size_angst - 1) > 1e-9
    turned = np.abs(particles.poses.rotations - source.poses.rotations).max(axis=(1, 2)) > _SAME_ROTATION
    moved = (np.abs(particles.poses.shifts_angst - source.poses.shifts_angst).max(axis=1) > _SAME_SHIFT_ANGST) | rescaled
    angles = matrix_to_zxz(particles.poses.rotations)
    shifts = particles.shifts_voxels()
    column = {label: index for index, label in enumerate(source.labels)}
    head = source.head
    rehalved = particles.half != source.half
    for label, needed in (("score", scores is not None), ("halfset", bool(rehalved.any()))):
        if needed and label not in column:
            column[label] = len(column)
            head = _with_label(head, label)
    added = len(column) - len(source.labels)
    rows = []
    for i, row in enumerate(source.rows.tolist()):
        changes: dict[int, str] = {}
        if moved[i]:
            changes |= {column[label]: f"{shifts[i, k] + 0.0:.6f}" for k, label in enumerate(SHIFTS)}
        if turned[i]:
            changes |= {column[label]: f"{angles[i, k] + 0.0:.6f}" for k, label in enumerate(ANGLES)}
        if scores is not None:
            changes[column["score"]] = f"{scores[i]:.6f}"
        if "halfset" in column and (rehalved[i] or column["halfset"] >= len(source.labels)):
            changes[column["halfset"]] = _half_text(particles.half[i])
        line = source.lines[row]
        line = line if line.endswith(("\n", "\r")) else line + "\n"
        if added:
            body = line.rstrip()
            line = body + "\t-" * added + line[len(body) :]
        rows.append(with_tokens(line, changes))
    return "".join([head, *rows, source.tail])


def _with_label(head: str, label: str) -> str:
    """The lines before the rows with one more label behind the last."""
    lines = head.splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.lstrip().startswith("_"))
    numbered = re.search(r"#\s*(\d+)\s*$", lines[last])
    end = lines[last][len(lines[last].rstrip("\r\n")) :] or "\n"
    lines.insert(last + 1, f"_{label}" + (f" #{int(numbered.group(1)) + 1}" if numbered else "") + end)
    return "".join(lines)


def _half_text(half: int) -> str:
    return {1: "A", 2: "B"}.get(int(half), "none")


def _new_text(path: str | Path, particles: ParticleSet, scores: FloatArray | None) -> str:
    """A list for particles that came from elsewhere, laid out as STOPGAP writes it."""
    n = len(particles)
    numbers, from_names = numbers_from_names(particles.names)
    if not from_names:
        warnings.warn(f"{path}: the files' names do not number the particles; they are numbered 1 to {n} in the list's order", stacklevel=4)
    if any(weight is not None for weight in particles.weight_paths):
        warnings.warn(f"{path}: a motive list holds no wedges; STOPGAP takes them from its wedge list", stacklevel=4)
    if not particles.half.any():
        warnings.warn(f"{path}: the particles have no half-sets; _halfset is 'none', STOPGAP expects A and B", stacklevel=4)
    angles, shifts = matrix_to_zxz(particles.poses.rotations), particles.shifts_voxels()
    centres = np.zeros((n, 3)) if particles.coordinates is None else particles.coordinates.as_voxels()
    centres = np.where(np.isfinite(centres), centres, 0.0)
    tomograms = tomogram_numbers(particles.tomograms)
    classes = np.ones(n, np.int32) if particles.classes is None else particles.classes
    values = np.zeros(n) if scores is None else np.where(np.isfinite(scores), scores, 0.0)
    labels = ("motl_idx", "tomo_num", "object", "subtomo_num", "halfset", *PLACES, "score", *SHIFTS, *ANGLES, "class")
    head = "\n".join(["", f"data_{BLOCK}", "", "loop_", *(f"_{label}" for label in labels), "", ""])
    rows = []
    for i, number in enumerate(numbers.tolist()):
        cells = [str(i + 1), str(int(tomograms[i])), "1", str(number), _half_text(particles.half[i])]
        cells += [f"{v + 0.0:.6f}" for v in (*centres[i], values[i], *shifts[i], *angles[i])]
        rows.append("\t".join([*cells, str(int(classes[i]))]) + "\n")
    return head + "".join(rows)
