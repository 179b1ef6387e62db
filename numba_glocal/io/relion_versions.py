"""Lists of one RELION version (or Warp's) from particles of any other: what each version calls a thing, and in which units it counts.

A list of the version that is asked for is written as it was read (`relion`). Of another one, columns that mean the same keep their
digits, unknown columns and blocks go along, and what changes its meaning is computed anew.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ListError
from ..values import Coordinates, ParticleSet
from .relion import ORIGINS_ANGST, ORIGINS_PIXEL, RelionSource, new_relion_source, write_relion_particles
from .relion_tomo import CENTRED, COORDINATES, STACKS, SUBTOMOGRAM_ANGLES, TILT_SERIES_PIXEL_SIZE, VISIBLE, triples
from .star import StarBlock, StarDocument

_DIGITS = 6
_SAME = 1e-9
_TOMOSTAR = ".tomostar"
_SCALE_30 = ("rlnMagnification", "rlnDetectorPixelSize")
_MAGNIFICATION = 10000.0
# microscope constants that RELION 3.0 has in every row and later versions in the optics table
_OPTICS = ("rlnVoltage", "rlnSphericalAberration", "rlnAmplitudeContrast")


@dataclass(frozen=True, slots=True)
class RelionVersion:
    """How one version writes a list.

    Attributes
    ----------
    key, name : str
        For ``convert --to``, and for messages.
    has_optics : bool
        Blocks ``data_optics`` and ``data_particles``, origins in Angstrom; else one table, origins in pixels.
    tomogram_label : str
        Column of tomogram names.
    has_tomograms : bool
        Subtomogram angles, the tilt series' pixel size and names of particles (RELION 4 and 5).
    centred : bool
        Coordinates in Angstrom from the tomogram's centre.
    tomostar : bool
        Tomogram names end with ``.tomostar``, and coordinates count voxels of the particle images (Warp, M).
    number : int
        What stands in the comment ``# version`` before each block, by which RELION knows its own files; lists of one table have none.
    """

    key: str
    name: str
    has_optics: bool = True
    tomogram_label: str = "rlnMicrographName"
    has_tomograms: bool = False
    centred: bool = False
    tomostar: bool = False
    number: int = 30001


VERSIONS = (
    RelionVersion("relion30", "RELION 3.0 STAR", has_optics=False),
    RelionVersion("relion31", "RELION 3.1 STAR"),
    RelionVersion("relion4", "RELION 4 STAR", tomogram_label="rlnTomoName", has_tomograms=True),
    RelionVersion("relion5", "RELION 5 STAR", tomogram_label="rlnTomoName", has_tomograms=True, centred=True, number=50001),
    RelionVersion("warp", "Warp/M STAR", has_optics=False, tomostar=True),
)


def version_of(source: RelionSource) -> str:
    """Key of the version that a list is of; "" for mixtures that no version reads (an optics table left out)."""
    block, blocks = source.block, source.document.blocks
    optics = next((b for b in blocks if b.name == "optics"), None)
    if optics is None:
        if any(label in block.labels for label in ORIGINS_ANGST) or "rlnTomoName" in block.labels:
            return ""
        names = block.texts("rlnMicrographName") if "rlnMicrographName" in block.labels else []
        return "warp" if names and all(name.endswith(_TOMOSTAR) for name in names) else "relion30"
    if "rlnTomoName" not in block.labels:
        return "relion31"
    is_5 = any(label in block.labels for label in (*CENTRED, VISIBLE)) or any(STACKS in b for b in blocks)
    return "relion5" if is_5 else "relion4"


def lost_in_version(particles: ParticleSet, version: RelionVersion | None) -> list[str]:
    """What a list of this version (None: of the version that it is of) cannot hold of another list, as words for a message."""
    source = particles.source
    if not isinstance(source, RelionSource):
        extras = getattr(source, "extras", None)
        return list(extras()) if extras is not None else []
    if version is None or version_of(source) == version.key:
        return []
    lost = []
    if source.axes is not None and not version.has_tomograms and np.abs(source.axes - np.eye(3)).max() > _SAME:
        lost.append("rlnTomoSubtomogramRot/Tilt/Psi (composed into the angles and origins)")
    if not version.has_optics:
        kept = {source.block_name, "optics"}
        lost += [f"data_{block.name}" for block in source.document.blocks if block.name not in kept]
    return lost


def write_version(version: RelionVersion, path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a list of one version, whole or not at all; see `write_relion_particles`.

    Raises
    ------
    ListError, InputError
        Coordinates that cannot be counted in the version's units; several pixel sizes where the version has one.
    """
    source = particles.source
    if isinstance(source, RelionSource) and version_of(source) == version.key and len(source.rows) == len(particles):
        write_relion_particles(path, particles, extra_columns)
        return
    if not isinstance(source, RelionSource):
        source = new_relion_source(particles, Path(os.path.abspath(path)).parent)
        particles = replace(particles, source=source)
    block = source.block.take(source.rows)
    optics = next((b for b in source.document.blocks if b.name == "optics"), None)
    others = [b for b in source.document.blocks if b.name not in (source.block_name, "optics")] if version.has_optics else []
    _name_tomograms(block, version, particles)
    _place(block, optics, version, particles, path)
    keeps_axes = source.axes is not None and version.has_tomograms
    poses = source.poses
    if not keeps_axes:
        _drop(block, SUBTOMOGRAM_ANGLES)
        if source.axes is not None:
            # whatever has no turned axes keeps its digits; the rest is written anew
            turned = np.abs(source.axes - np.eye(3)).max(axis=(1, 2)) > _SAME
            poses = replace(poses, rotations=_forgotten(poses.rotations, turned), shifts_angst=_forgotten(poses.shifts_angst, turned))
    pixel_sizes = np.full(len(particles), particles.pixel_size_angst) if particles.pixel_sizes_angst is None else particles.pixel_sizes_angst
    poses = _origins_of_version(block, version, poses)
    blocks = _with_optics(block, optics, version, particles, pixel_sizes) if version.has_optics else [_without_optics(block, optics, pixel_sizes)]
    if version.has_optics:
        block.name = "particles"
    for written in blocks:
        comments = [line for line in written.comments if not line.startswith("# version")]
        written.comments = [f"# version {version.number}", *comments] if version.has_optics else comments
    document = StarDocument([*others, *blocks], source.document.path)
    made = RelionSource(
        document,
        block.name,
        np.arange(block.n_rows),
        poses,
        source.half,
        None,
        source.axes if keeps_axes else None,
        source.names_label if source.names_label in block.labels else "",
    )
    write_relion_particles(path, replace(particles, source=made), extra_columns)


def _forgotten(values: NDArray[Any], rows: NDArray[np.bool_]) -> NDArray[Any]:
    """What was read, with rows that the writer must take for changed."""
    values = np.array(values, np.float64)
    values[rows] = np.inf
    return values


def _drop(block: StarBlock, labels: tuple[str, ...]) -> None:
    for label in labels:
        block.drop_column(label)


def _name_tomograms(block: StarBlock, version: RelionVersion, particles: ParticleSet) -> None:
    names = list(particles.tomograms)
    label = version.tomogram_label
    for other in ("rlnMicrographName", "rlnTomoName"):
        if other != label and other in block.labels and label not in block.labels:
            block.rename_column(other, label)
    if version.tomostar:
        names = [name if name.endswith(_TOMOSTAR) or not name else name + _TOMOSTAR for name in names]
    if any(names) and (label not in block.labels or block.texts(label) != names):
        block.set_column(label, [name or "None" for name in names])
    if version.has_tomograms and "rlnTomoParticleName" not in block.labels and any(names):
        count: dict[str, int] = {}
        numbered = []
        for name in names:
            count[name] = count.get(name, 0) + 1
            numbered.append(f"{name}/{count[name]}")
        block.set_column("rlnTomoParticleName", numbered)


def _series_pixel_sizes(block: StarBlock, optics: StarBlock | None, particles: ParticleSet) -> NDArray[np.float64]:
    """Pixel size of each particle's tilt series; that of its coordinates, else of its image, where the list does not say."""
    if optics is not None and TILT_SERIES_PIXEL_SIZE in optics.labels:
        return optics.floats(TILT_SERIES_PIXEL_SIZE)[particles.groups]
    if TILT_SERIES_PIXEL_SIZE in block.labels:
        return block.floats(TILT_SERIES_PIXEL_SIZE)
    places = particles.coordinates
    sizes = np.full(len(particles), np.nan) if places is None else places.voxel_size_angst
    return np.where(np.isfinite(sizes), sizes, particles.pixel_size_angst)


def _place(block: StarBlock, optics: StarBlock | None, version: RelionVersion, particles: ParticleSet, path: str | Path) -> None:
    """Coordinates in the units of the version; columns that have them already keep their digits."""
    places = particles.coordinates
    if places is None:
        return
    if version.centred:
        if places.centred_angst is None and not np.isfinite(places.as_centred_angst()).all():
            warnings.warn(
                f"{path}: sizes of tomograms are not known (--tomograms), so that coordinates stay in voxels, which RELION 5 reads, too", stacklevel=5
            )
        elif places.centred_angst is None:
            block.insert_columns(COORDINATES[0], CENTRED, _texts(places.as_centred_angst()))
            _drop(block, COORDINATES)
        elif places.voxels is not None:
            _drop(block, COORDINATES)  # RELION 5 takes the centred ones
        return
    wanted = places.voxel_size_angst
    if version.tomostar or (not version.has_tomograms and any(name.endswith(_TOMOSTAR) for name in particles.tomograms)):
        # such names say so to whoever reads the list
        wanted = np.full(len(particles), particles.pixel_size_angst) if particles.pixel_sizes_angst is None else particles.pixel_sizes_angst
    elif version.has_tomograms:
        wanted = _series_pixel_sizes(block, optics, particles)
    known = np.isfinite(places.voxel_size_angst) & np.isfinite(wanted)
    scale = np.where(known, places.voxel_size_angst / wanted, 1.0)
    voxels = _known(places.as_voxels(), places, path) * scale[:, None]
    if COORDINATES[0] in block.labels and np.allclose(triples(block, COORDINATES), voxels, rtol=1e-6, atol=0.5 * 10**-_DIGITS):
        _drop(block, CENTRED)
        return
    block.insert_columns(COORDINATES[0] if COORDINATES[0] in block.labels else CENTRED[0], COORDINATES, _texts(voxels))
    _drop(block, CENTRED)


def _known(values: NDArray[Any], places: Coordinates, path: str | Path) -> NDArray[Any]:
    unknown = ~np.isfinite(values).all(axis=1)
    if unknown.any():
        missing = "the pixel size of the tilt series" if np.isnan(places.voxel_size_angst).any() else "the sizes of the tomograms"
        raise ListError(
            f"{path}: coordinates in voxels from the first one take {missing}, unknown for {int(unknown.sum())} of {len(values)} particles; "
            "expected a file of tomograms (--tomograms), or an optimisation set that names one"
        )
    return values


def _texts(values: NDArray[Any]) -> list[list[str]]:
    return [[f"{round(v, _DIGITS) + 0.0:.{_DIGITS}f}" for v in column.tolist()] for column in values.T]


def _origins_of_version(block: StarBlock, version: RelionVersion, poses: Any) -> Any:
    """Origins under the version's labels; where the unit changes, all are written anew."""
    mine, theirs = (ORIGINS_ANGST, ORIGINS_PIXEL) if version.has_optics else (ORIGINS_PIXEL, ORIGINS_ANGST)
    had = mine[0] in block.labels
    if not had:
        anchor = theirs[0] if theirs[0] in block.labels else None
        block.insert_columns(anchor, mine, [["0.000000"] * block.n_rows] * 3)
    _drop(block, theirs)
    if had:
        return poses
    return replace(poses, shifts_angst=_forgotten(poses.shifts_angst, np.ones(block.n_rows, bool)))


def _with_optics(
    block: StarBlock, optics: StarBlock | None, version: RelionVersion, particles: ParticleSet, pixel_sizes_angst: NDArray[Any]
) -> list[StarBlock]:
    if optics is None:
        optics = _new_optics(block, particles, pixel_sizes_angst)
    else:
        optics = optics.take(np.arange(optics.n_rows))
    if version.has_tomograms and TILT_SERIES_PIXEL_SIZE not in optics.labels:
        series = _series_pixel_sizes(block, None, particles)
        values = []
        for group in range(optics.n_rows):
            rows = particles.groups == group
            values.append(float(series[rows][0]) if rows.any() else particles.pixel_size_angst)
        optics.set_column(TILT_SERIES_PIXEL_SIZE, [f"{v:.6f}" for v in values])
    _drop(block, (TILT_SERIES_PIXEL_SIZE, *_SCALE_30, "rlnPixelSize"))
    return [optics, block]


def _new_optics(block: StarBlock, particles: ParticleSet, pixel_sizes_angst: NDArray[Any]) -> StarBlock:
    """An optics table for a list without one: a group for each that the rows name, split where rows differ in what a group has in common."""
    n = len(particles)
    names = block.texts("rlnOpticsGroup") if "rlnOpticsGroup" in block.labels else ["1"] * n
    shared = {label: block.texts(label) for label in _OPTICS if label in block.labels}
    kinds: dict[tuple[Any, ...], int] = {}
    rows = list(zip(names, np.round(pixel_sizes_angst, 5).tolist(), *shared.values(), strict=True))
    group = [kinds.setdefault(row, len(kinds)) for row in rows]
    first = [group.index(g) for g in range(len(kinds))]
    columns = {
        "rlnOpticsGroup": [str(g + 1) for g in range(len(kinds))],
        "rlnOpticsGroupName": [f"opticsGroup{g + 1}" for g in range(len(kinds))],
        **{label: [texts[i] for i in first] for label, texts in shared.items()},
        "rlnImagePixelSize": [f"{pixel_sizes_angst[i]:.6f}" for i in first],
        "rlnImageDimensionality": ["3"] * len(kinds),
        "rlnCtfDataAreCtfPremultiplied": [str(int(particles.premultiplied))] * len(kinds),
    }
    if particles.box_size:
        columns["rlnImageSize"] = [str(particles.box_size)] * len(kinds)
    if not np.isfinite(pixel_sizes_angst).all():
        del columns["rlnImagePixelSize"]
    _drop(block, (*_OPTICS, "rlnCtfDataAreCtfPremultiplied"))
    numbers = [str(g + 1) for g in group]
    if "rlnOpticsGroup" not in block.labels or names != numbers:
        block.set_column("rlnOpticsGroup", numbers)
    return StarBlock.from_columns("optics", columns)


def _without_optics(block: StarBlock, optics: StarBlock | None, pixel_sizes_angst: NDArray[Any]) -> StarBlock:
    """One table: what the optics table has goes into every row."""
    block.name = ""
    if optics is not None:
        index = {text: row for row, text in enumerate(optics.texts("rlnOpticsGroup"))} if "rlnOpticsGroup" in optics.labels else {}
        groups = [index.get(text, 0) for text in block.texts("rlnOpticsGroup")] if "rlnOpticsGroup" in block.labels else [0] * block.n_rows
        for label in optics.labels:
            if label not in ("rlnOpticsGroup", "rlnImagePixelSize") and label not in block.labels:
                texts = optics.texts(label)
                block.set_column(label, [texts[g] for g in groups])
    if np.isfinite(pixel_sizes_angst).all():
        block.set_column("rlnMagnification", [f"{_MAGNIFICATION:.6f}"] * block.n_rows)
        block.set_column("rlnDetectorPixelSize", [f"{v * _MAGNIFICATION / 1e4:.6f}" for v in pixel_sizes_angst.tolist()])
        _drop(block, ("rlnPixelSize",))
    return block
