"""PyTom particle lists (XML). Poses and wedges enter and leave PyTom's convention here (docs/conventions.md, 2, 3 and 5).

A list is written as it was read, byte by byte, except for the attributes that changed: a particle is a piece of the file's text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, ListError, NoAnglesWarning, VolumeError
from ..geometry import matrix_to_zxz, zxz_to_matrix
from ..values import FloatArray, IntArray, ParticleSet, Poses, TiltGeometry, TiltRange, TomogramWeight, Weight
from .located import locate, places
from .paths import whole_file
from .volumes import read_header

KEY = "pytom"
_TAG = re.compile(rb"""<[^\s/>]+(?:\s+[^\s=/>]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*/?>""")
_ATTRIBUTE = rb"""(?<=[\s])%s\s*=\s*("[^"]*"|'[^']*')"""
_WEDGES = ("Wedge", "SingleTiltWedge", "WedgeInfo", "DoubleTiltWedge", "Wedge3dCTF", "GeneralWedge")
_KNOWN = {"Rotation", "Shift", "PickPosition", "Score", "Class", "InfoGUI", "HalfSet", *_WEDGES}
# below the last digit that is written
_SAME_ROTATION = 1e-9
_SAME_SHIFT_ANGST = 1e-7


@dataclass(slots=True)
class _Element:
    """An element of the file: name, attributes, and where its text is (start tag from `start` to `end`, the whole up to `stop`)."""

    name: str
    attributes: dict[str, str]
    line: int
    start: int
    end: int = 0
    stop: int = 0
    children: list[_Element] = field(default_factory=list)

    def child(self, *names: str) -> _Element | None:
        """The first child that has one of the names, None without one."""
        return next((c for c in self.children if c.name in names), None)


@dataclass(frozen=True, slots=True)
class PytomSource:
    """The text a PyTom list came from, and what was read from it, so that only changes are written.

    Attributes
    ----------
    path : str
    raw : bytes
        The file.
    particles : tuple of _Element
        Every particle of the file.
    rows : (n,) int
        Those that belong to the particle set, in the set's order.
    names : tuple of str
        As read, row by row of the set; so are the others.
    poses : Poses
    half : (n,) int8
    pixel_size_angst : float
        The one that shifts were read with.
    """

    path: str
    raw: bytes = field(repr=False)
    particles: tuple[_Element, ...] = field(repr=False)
    rows: IntArray
    names: tuple[str, ...]
    poses: Poses
    half: NDArray[np.int8]
    pixel_size_angst: float
    format_key: str = KEY

    def take(self, index: IntArray | Sequence[int]) -> PytomSource:
        """The source of the particles at `index`."""
        index = np.asarray(index, dtype=np.intp)
        names = tuple(self.names[i] for i in index)
        return replace(self, rows=self.rows[index], names=names, poses=self.poses.take(index), half=self.half[index])

    def extras(self) -> list[str]:
        """What only this list holds."""
        unknown = {child.name for row in self.rows.tolist() for child in self.particles[row].children} - _KNOWN
        return [f"element {name}" for name in sorted(unknown)]


# ---- reading


def read_pytom_particles(
    path: str | Path,
    *,
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    premultiplied: bool | None = None,
    require_volumes: bool = True,
) -> ParticleSet:
    """Read a PyTom particle list.

    Parameters
    ----------
    path : path
        XML with a ``ParticleList``; every child of a particle may be missing.
    pixel_size_angst : float, optional
        The list has none; without it the volumes' headers must say it.
    root, require_volumes
        As in `read_relion_particles`.
    premultiplied : bool, optional
        Whether volumes are multiplied by their CTF; False if not given.

    Returns
    -------
    ParticleSet

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, line, what was expected and what was found.
    """
    raw, elements = _parse(path)
    names = [_text(path, element, "Filename") for element in elements]

    def where(row: int) -> str:
        return f"{path}:{elements[row].line}"

    wedges = [_wedge(path, element) for element in elements]
    place = locate(
        path,
        names,
        where,
        weight_names=[wedge if isinstance(wedge, str) else "" for wedge in wedges],
        pixel_size_angst=pixel_size_angst,
        root=root,
        require_volumes=require_volumes,
    )
    weights: tuple[Weight | None, ...] = tuple(
        found if isinstance(wedge, str) else wedge for wedge, found in zip(wedges, place.weight_paths, strict=True)
    )
    if not any(element.child("Rotation") for element in elements):
        warnings.warn(f"{path}: the list has no angles: every particle starts at 0, 0, 0", NoAnglesWarning, stacklevel=2)
    shifts = _numbers(path, elements, "Shift", ("X", "Y", "Z")) * place.pixel_size_angst
    poses = Poses(zxz_to_matrix(_rotations(path, elements)), shifts)
    half = np.array([_half(path, element) for element in elements], np.int8)
    positions = [element.child("PickPosition") for element in elements]
    scores = np.array([_score(path, element) for element in elements])
    return ParticleSet(
        names=tuple(names),
        volume_paths=place.volume_paths,
        weight_paths=weights,
        poses=poses,
        half=half,
        tomograms=tuple("" if position is None else position.attributes.get("Origin", "") for position in positions),
        groups=np.zeros(len(names), np.int32),
        pixel_size_angst=place.pixel_size_angst,
        pixel_size_source=place.pixel_size_source,
        box_size=place.box_size,
        premultiplied=bool(premultiplied),
        source=PytomSource(str(path), raw, tuple(elements), np.arange(len(names)), tuple(names), poses, half, place.pixel_size_angst),
        coordinates=places(_numbers(path, elements, "PickPosition", ("X", "Y", "Z")), place.pixel_size_angst),
        classes=_classes(elements),
        scores=scores if np.isfinite(scores).any() else None,
    )


def _parse(path: str | Path) -> tuple[bytes, list[_Element]]:
    """The file and its particles."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not raw.strip():
        raise ListError(f"{path}: the file is empty")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ListError(f"{path}: UTF-16 text, expected UTF-8")
    parser = expat.ParserCreate()
    stack: list[_Element] = []
    lists: list[_Element] = []
    top: list[str] = []

    def opened(name: str, attributes: dict[str, str]) -> None:
        element = _Element(name, attributes, parser.CurrentLineNumber, parser.CurrentByteIndex)
        found = _TAG.match(raw, element.start)
        if found is None:
            raise ListError(f"{path}:{element.line}: element {name} is written in a way that is not read")
        element.end = element.stop = found.end()
        if stack:
            stack[-1].children.append(element)
        else:
            top.append(name)
        if name == "ParticleList":
            lists.append(element)
        stack.append(element)

    def closed(name: str) -> None:
        element = stack.pop()
        if raw[element.end - 2 : element.end] != b"/>":
            element.stop = raw.index(b">", parser.CurrentByteIndex) + 1

    def declared(*_: Any) -> None:
        raise ListError(f"{path}:{parser.CurrentLineNumber}: a document with entities of its own is not read")

    parser.StartElementHandler = opened
    parser.EndElementHandler = closed
    parser.EntityDeclHandler = declared
    try:
        parser.Parse(raw, True)
    except expat.ExpatError as error:
        if not lists and not top:
            shown = raw.split(b"\n", 1)[0][:60].decode("utf-8", "replace").strip()
            raise ListError(f"{path}: not a PyTom particle list: expected XML, found '{shown}'") from None
        raise ListError(f"{path}:{error.lineno}: not well-formed XML ({expat.errors.messages[error.code]})") from None
    if len(lists) != 1:
        found = f"{len(lists)} elements ParticleList" if lists else f"element {top[0]}"
        raise ListError(f"{path}: not a PyTom particle list: expected one element ParticleList, found {found}")
    particles = [child for child in lists[0].children if child.name == "Particle"]
    if not particles:
        raise ListError(f"{path}:{lists[0].line}: the list has no particles")
    return raw, particles


def _text(path: str | Path, element: _Element, attribute: str) -> str:
    text = element.attributes.get(attribute, "")
    if not text:
        raise ListError(f"{path}:{element.line}: {element.name} has no {attribute}")
    return text


def _number(path: str | Path, element: _Element, attribute: str, default: float | None = None) -> float:
    text = element.attributes.get(attribute)
    if text is None:
        if default is None:
            raise ListError(f"{path}:{element.line}: {element.name} has no {attribute}")
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise ListError(f"{path}:{element.line}: {attribute} of {element.name} is '{text}', expected a finite number")
    return value


def _numbers(path: str | Path, elements: Sequence[_Element], name: str, attributes: Sequence[str]) -> NDArray[np.float64]:
    """Attributes of one child of every particle; 0 where it has none."""
    rows = []
    for element in elements:
        child = element.child(name)
        rows.append([0.0] * len(attributes) if child is None else [_number(path, child, attribute) for attribute in attributes])
    return np.array(rows)


def _rotations(path: str | Path, elements: Sequence[_Element]) -> NDArray[np.float64]:
    for element in elements:
        child = element.child("Rotation")
        if child is not None and child.attributes.get("Paradigm", "ZXZ") != "ZXZ":
            raise ListError(f"{path}:{child.line}: Rotation has the Paradigm {child.attributes['Paradigm']}, expected ZXZ")
    return _numbers(path, elements, "Rotation", ("Z1", "Z2", "X"))


def _half(path: str | Path, element: _Element) -> int:
    child = element.child("HalfSet")
    if child is None:
        return 0
    text = child.attributes.get("Number", "")
    if text not in ("1", "2"):
        raise ListError(f"{path}:{child.line}: Number of HalfSet is '{text}', expected 1 or 2")
    return int(text)


def _score(path: str | Path, element: _Element) -> float:
    child = element.child("Score")
    text = "nan" if child is None else child.attributes.get("Value", "nan")
    try:
        return float(text)
    except ValueError:
        assert child is not None
        raise ListError(f"{path}:{child.line}: Value of Score is '{text}', expected a number or NAN") from None


def _classes(elements: Sequence[_Element]) -> NDArray[np.int32] | None:
    """Class numbers; None where a particle has none, or a name that is no number."""
    numbers = []
    for element in elements:
        child = element.child("Class")
        try:
            number = float(child.attributes.get("Name", "") if child is not None else "")
        except ValueError:
            return None
        if not number.is_integer() or abs(number) > 1e9:
            return None
        numbers.append(int(number))
    return np.array(numbers, np.int32)


def _wedge(path: str | Path, element: _Element) -> str | tuple[TiltRange, ...] | None:
    """Name of the weight volume of a particle, or its tilts; None without a wedge."""
    found = element.child(*_WEDGES)
    if found is not None and found.name == "Wedge":
        found = found.children[0] if found.children else None
    if found is None:
        return None
    if found.name in ("Wedge3dCTF", "GeneralWedge"):
        return _text(path, found, "Filename")
    if found.name in ("SingleTiltWedge", "WedgeInfo"):
        tilts = _tilts(path, found)
        return None if tilts is None else (tilts,)
    if found.name == "DoubleTiltWedge":
        singles = [child for child in found.children if child.name == "SingleTiltWedge"]
        if len(singles) != 2:
            raise ListError(f"{path}:{found.line}: DoubleTiltWedge holds {len(singles)} elements SingleTiltWedge, expected 2")
        pair = [_tilts(path, single) for single in singles]
        # one complete series makes the union complete
        return tuple(tilts for tilts in pair if tilts is not None) if all(pair) else None
    raise ListError(f"{path}:{found.line}: a wedge of the kind {found.name} is not read, expected one of {', '.join(_WEDGES[1:])}")


def _tilts(path: str | Path, element: _Element) -> TiltRange | None:
    """One tilt series; None where its wedge is 0 on both sides: nothing is missing, or nobody filled it in."""
    both = _number(path, element, "Angle", float("nan")) if "Angle1" not in element.attributes else float("nan")
    angles = [both if both == both else _number(path, element, attribute) for attribute in ("Angle1", "Angle2")]
    for angle in angles:
        if not 0 <= angle < 90:
            raise ListError(f"{path}:{element.line}: missing-wedge angle {angle:g} degrees: expected 0 (no wedge) to less than 90")
    cutoff, smooth = (_number(path, element, attribute, 0.0) for attribute in ("CutoffRadius", "Smooth"))
    if min(cutoff, smooth) < 0:
        raise ListError(f"{path}:{element.line}: CutoffRadius {cutoff:g} and Smooth {smooth:g}: expected 0 or more")
    if angles == [0, 0]:
        return None
    axis = element.child("TiltAxisRotation")
    turn = None if axis is None else _turn(*(_number(path, axis, attribute) for attribute in ("Z1", "Z2", "X")))
    return TiltRange(angles[0] - 90.0, 90.0 - angles[1], turn=turn, smooth_voxels=smooth, cutoff_voxels=cutoff)


@lru_cache(maxsize=256)
def _turn(z1_deg: float, z2_deg: float, x_deg: float) -> tuple[float, ...] | None:
    """The rotation of a tilt axis as `TiltRange` holds it; most lists have one for all particles."""
    matrix = zxz_to_matrix([z1_deg, z2_deg, x_deg])
    return None if np.allclose(matrix, np.eye(3), atol=1e-9) else tuple(matrix.ravel().tolist())


# ---- writing


def write_pytom_particles(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a PyTom particle list, whole or not at all; what did not change keeps its bytes.

    Half-sets, which PyTom does not know, are written as an element ``HalfSet`` of our own, which it passes over.

    Parameters
    ----------
    path : path
        Output.
    particles : ParticleSet
    extra_columns : dict of label to (n,) array, optional
        ``ngScore`` becomes the value of ``Score``; the list has no place for others.

    Raises
    ------
    ListError, InputError
        Columns of another length; a file that cannot be written.
    """
    scores = None if extra_columns is None or "ngScore" not in extra_columns else np.asarray(extra_columns["ngScore"], np.float64)
    if scores is not None and scores.shape != (len(particles),):
        raise ListError(f"{path}: column _ngScore has shape {scores.shape}, expected ({len(particles)},)")
    source = particles.source if isinstance(particles.source, PytomSource) else None
    if source is not None and len(source.rows) != len(particles):
        raise ListError(f"{path}: {len(particles)} particles come with {len(source.rows)} of {source.path}")
    text = _new_text(particles, scores) if source is None else _changed_text(particles, source, scores)
    with whole_file(path) as handle:
        handle.write(text)


def _changed_text(particles: ParticleSet, source: PytomSource, scores: NDArray[np.float64] | None) -> bytes:
    """The source's text with the particles of the set, in its order, and their new values."""
    raw, everyone = source.raw, source.particles
    rescaled = abs(particles.pixel_size_angst / source.pixel_size_angst - 1) > 1e-9
    turned = np.abs(particles.poses.rotations - source.poses.rotations).max(axis=(1, 2)) > _SAME_ROTATION
    moved = (np.abs(particles.poses.shifts_angst - source.poses.shifts_angst).max(axis=1) > _SAME_SHIFT_ANGST) | rescaled
    angles = matrix_to_zxz(particles.poses.rotations)
    shifts = particles.shifts_voxels()
    pieces = [raw[: everyone[0].start]]
    gap = raw[everyone[0].stop : everyone[1].start] if len(everyone) > 1 else b"\n"
    for i, row in enumerate(source.rows.tolist()):
        element = everyone[row]
        changes: dict[str, dict[str, str]] = {}
        own = {"Filename": particles.names[i]} if particles.names[i] != source.names[i] else {}
        if turned[i]:
            changes["Rotation"] = {name: _digits(v) for name, v in zip(("Z1", "Z2", "X"), angles[i], strict=True)}
        if moved[i]:
            changes["Shift"] = {name: _digits(v) for name, v in zip("XYZ", shifts[i], strict=True)}
        if scores is not None:
            changes["Score"] = {"Value": f"{scores[i]:.6g}"}
        if particles.half[i] != source.half[i]:
            changes["HalfSet"] = {"Number": str(int(particles.half[i]))}
        # what stands between two particles stays where both are still neighbours
        neighbours = i + 1 < len(source.rows) and source.rows[i + 1] == row + 1
        between = raw[element.stop : everyone[row + 1].start] if neighbours else gap
        pieces += [_changed(raw, element, own, changes), between if i + 1 < len(source.rows) else b""]
    return b"".join([*pieces, raw[everyone[-1].stop :]])


def _changed(raw: bytes, element: _Element, own: Mapping[str, str], changes: Mapping[str, Mapping[str, str]]) -> bytes:
    """A particle's text with other attributes of its own and of its children; children that it lacks are added in front."""
    if not own and not changes:
        return raw[element.start : element.stop]
    edits: list[tuple[int, int, bytes]] = []
    new = []
    for name, attributes in changes.items():
        child = element.child(name)
        if child is None:
            new.append(_NEW[name](attributes))
        else:
            edits.append((child.start, child.end, _with_attributes(raw[child.start : child.end], attributes)))
    tag = _with_attributes(raw[element.start : element.end], own)
    if new:
        indent = re.match(rb"\s*", raw[element.end : element.children[0].start]) if element.children else None
        before = indent.group() if indent else b"\n    "
        added = b"".join(before + text.encode() for text in new)
        empty = tag.endswith(b"/>")
        tag = tag[:-2].rstrip() + b">" + added + b"\n  </Particle>" if empty else tag + added
    pieces, done = [tag], element.end
    for start, end, text in sorted(edits):
        pieces += [raw[done:start], text]
        done = end
    return b"".join([*pieces, raw[done : element.stop]])


def _with_attributes(tag: bytes, attributes: Mapping[str, str]) -> bytes:
    """A start tag with some attributes replaced or added."""
    for name, value in attributes.items():
        text = quoteattr(value).encode("utf-8", "surrogateescape")
        found = re.search(_ATTRIBUTE % re.escape(name.encode()), tag)
        if found is not None:
            tag = tag[: found.start(1)] + text + tag[found.end(1) :]
        else:
            end = len(tag) - (2 if tag.endswith(b"/>") else 1)
            tag = tag[:end].rstrip() + b" " + name.encode() + b"=" + text + tag[end:]
    return tag


def _digits(value: float) -> str:
    # + 0.0 after rounding: no "-0.000000"
    return f"{round(float(value), 6) + 0.0:.6f}"


def _element(name: str, **attributes: str) -> str:
    return f"<{name}" + "".join(f" {key}={quoteattr(value)}" for key, value in attributes.items()) + "/>"


def _new_score(attributes: Mapping[str, str]) -> str:
    return f'<Score Type="FLCFScore" Value={quoteattr(attributes["Value"])}><PeakPrior Filename="" Radius="0.0" Smooth="-1.0"/></Score>'


_NEW: dict[str, Callable[[Mapping[str, str]], str]] = {
    "Rotation": lambda attributes: _element("Rotation", **attributes, Paradigm="ZXZ"),
    "Shift": lambda attributes: _element("Shift", **attributes),
    "HalfSet": lambda attributes: _element("HalfSet", **attributes),
    "Score": _new_score,
}


def _new_text(particles: ParticleSet, scores: FloatArray | None) -> bytes:
    """A list for particles that came from elsewhere."""
    if scores is None:
        scores = particles.scores
    angles, shifts = matrix_to_zxz(particles.poses.rotations), particles.shifts_voxels()
    centres = None if particles.coordinates is None else particles.coordinates.as_voxels()
    wedges = {weight: _wedge_text(weight, particles.box_size) for weight in dict.fromkeys(particles.weight_paths)}
    lines = ["<ParticleList>"]
    for i, name in enumerate(particles.names):
        lines += [
            f"  <Particle Filename={quoteattr(name)}>",
            "    " + _NEW["Rotation"]({key: _digits(v) for key, v in zip(("Z1", "Z2", "X"), angles[i], strict=True)}),
            "    " + _NEW["Shift"]({key: _digits(v) for key, v in zip("XYZ", shifts[i], strict=True)}),
        ]
        if particles.tomograms[i] or (centres is not None and np.isfinite(centres[i]).all()):
            x, y, z = (_digits(v if np.isfinite(v) else 0.0) for v in (centres[i] if centres is not None else np.zeros(3)))
            lines.append("    " + _element("PickPosition", X=x, Y=y, Z=z, Origin=particles.tomograms[i], Binning="1"))
        if wedges[particles.weight_paths[i]]:
            lines.append("    " + wedges[particles.weight_paths[i]])
        if scores is not None and np.isfinite(scores[i]):
            lines.append("    " + _new_score({"Value": f"{scores[i]:.6g}"}))
        if particles.classes is not None:
            lines.append("    " + _element("Class", Name=str(int(particles.classes[i]))))
        if particles.half[i]:
            lines.append("    " + _element("HalfSet", Number=str(int(particles.half[i]))))
        lines.append("  </Particle>")
    return ("\n".join([*lines, "</ParticleList>"]) + "\n").encode("utf-8", "surrogateescape")


def _wedge_text(weight: Weight | None, box_size: int) -> str:
    """The element of a wedge; "" without one, and with a warning for one that PyTom has no element for."""
    if weight is None:
        return ""
    if isinstance(weight, Path):
        return _wedge_volume_text(weight)
    if isinstance(weight, TiltGeometry | TomogramWeight):
        return ""  # a list of stacks, which a PyTom list cannot hold at all
    singles = [_single_text(tilts, box_size) for tilts in weight]
    if not all(singles) or len(singles) > 2:
        shown = " and ".join(f"{t.tilt_min_deg:g} to {t.tilt_max_deg:g}" for t in weight)
        warnings.warn(f"a PyTom list cannot hold the wedge of tilts {shown} (one or two series that contain 0 degrees); it is left out", stacklevel=4)
        return ""
    if len(singles) == 1:
        return f'<Wedge Type="SingleTiltWedge">{singles[0]}</Wedge>'
    return f'<Wedge Type="DoubleTiltWedge"><DoubleTiltWedge>{singles[0]}{singles[1]}</DoubleTiltWedge></Wedge>'


def _wedge_volume_text(path: Path) -> str:
    try:
        nz, ny, nx = read_header(path).shape
    except VolumeError:
        nz = ny = nx = 1  # the file is elsewhere: a full volume is what most programs write
    kind = "GeneralWedge" if nz == ny == nx else "Wedge3dCTF" if nz == nx // 2 + 1 else ""
    if not kind:
        warnings.warn(f"{path}: PyTom reads no weights of {nx} x {ny} x {nz}; they are left out", stacklevel=5)
        return ""
    return f'<Wedge Type="{kind}">{_element(kind, Filename=str(path))}</Wedge>'


def _single_text(tilts: TiltRange, box_size: int) -> str:
    """A series as the two angles it misses; "" for a one-sided one, which they cannot say."""
    low, high = (-tilts.tilt_max_deg, -tilts.tilt_min_deg) if tilts.flip else (tilts.tilt_min_deg, tilts.tilt_max_deg)
    if not low <= 0 <= high:
        return ""
    turn = np.eye(3) if tilts.turn is None else np.reshape(tilts.turn, (3, 3))
    if tilts.tilt_axis == "x":
        turn = turn @ zxz_to_matrix([-90, 0, 0])
    z1, z2, x = (_digits(angle) for angle in matrix_to_zxz(turn))
    cutoff = tilts.cutoff_voxels or box_size // 2
    return (
        f'<SingleTiltWedge Angle1="{_digits(90 + low)}" Angle2="{_digits(90 - high)}" CutoffRadius="{cutoff:g}" Smooth="{tilts.smooth_voxels:g}">'
        f"{_element('TiltAxisRotation', Z1=z1, Z2=z2, X=x)}</SingleTiltWedge>"
    )
