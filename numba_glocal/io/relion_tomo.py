"""What only RELION 4, 5 and Warp for them write: subtomogram angles, coordinates in tomograms, optimisation sets, lists of 2-D stacks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ListError
from ..geometry import relion_to_matrix
from ..values import Coordinates, ParticleSet, TiltStacks
from .paths import VolumeFinder
from .pixel_size import SAME_PIXEL_SIZE
from .star import StarBlock, StarDocument, read_star

SUBTOMOGRAM_ANGLES = ("rlnTomoSubtomogramRot", "rlnTomoSubtomogramTilt", "rlnTomoSubtomogramPsi")
COORDINATES = ("rlnCoordinateX", "rlnCoordinateY", "rlnCoordinateZ")
CENTRED = ("rlnCenteredCoordinateXAngst", "rlnCenteredCoordinateYAngst", "rlnCenteredCoordinateZAngst")
SIZES = ("rlnTomoSizeX", "rlnTomoSizeY", "rlnTomoSizeZ")
TILT_SERIES_PIXEL_SIZE = "rlnTomoTiltSeriesPixelSize"
STACKS = "rlnTomoSubTomosAre2DStacks"
VISIBLE = "rlnTomoVisibleFrames"
PARTICLES_FILE, TOMOGRAMS_FILE = "rlnTomoParticlesFile", "rlnTomoTomogramsFile"
_TOMOSTAR = ".tomostar"


def refuse_partial(block: StarBlock, labels: Sequence[str]) -> None:
    """Columns stand together or not at all: one that was lost on the way is no 0."""
    missing = [f"_{label}" for label in labels if label not in block.labels]
    if 0 < len(missing) < len(labels):
        raise ListError(f"{block.where()}: no column {' and '.join(missing)}; expected all of {', '.join(labels)}, or none")


def triples(block: StarBlock, labels: Sequence[str]) -> NDArray[np.float64]:
    """Three columns as (n, 3); zeros where the list has none of them."""
    if labels[0] not in block.labels:
        return np.zeros((block.n_rows, 3))
    return block.floats_of(labels)


# ---- optimisation sets


def follow_optimisation_set(
    path: str | Path, root: str | Path | None = None, tomograms: str | Path | None = None
) -> tuple[StarDocument, Path | None]:
    """The document that holds the particles, and the file of the tomograms.

    Parameters
    ----------
    path : path
        A particle list, or an optimisation set that names one.
    root : path, optional
        Folder that names start from; it goes before all others.
    tomograms : path, optional
        File of the tomograms in place of the one that the set names, which need not be there then.

    Returns
    -------
    document : StarDocument
    tomograms_path : Path or None
        None for a plain list, and where the set names none.

    Raises
    ------
    ListError, InputError
        A set without particles, or a file that it names and that is nowhere.
    """
    document = read_star(path)
    for block in document.blocks:
        if PARTICLES_FILE in block or TOMOGRAMS_FILE in block:
            break
    else:
        return document, None
    name = _named(block, PARTICLES_FILE)
    if not name:
        raise ListError(f"{block.where()}: an optimisation set without particles; expected a file under _{PARTICLES_FILE}")
    finder = VolumeFinder(path, root)
    tomograms_name = _named(block, TOMOGRAMS_FILE)
    if tomograms is not None:
        tomograms_path: Path | None = Path(tomograms)
    else:
        tomograms_path = _found(finder, tomograms_name, path, TOMOGRAMS_FILE) if tomograms_name else None
    particles_path = _found(finder, name, path, PARTICLES_FILE)
    return read_star(particles_path), tomograms_path


def _named(block: StarBlock, label: str) -> str:
    if label in block.pairs:
        return block.value(label)
    texts = block.texts(label) if label in block.labels else []
    return texts[0] if texts else ""


def _found(finder: VolumeFinder, name: str, path: str | Path, label: str) -> Path:
    found = finder.find(name)
    if found is None:
        raise InputError(f"{path}: _{label} {name} not found; tried {', '.join(finder.candidates(name))}")
    return found


# ---- tomograms


@dataclass(frozen=True, slots=True)
class TomogramTable:
    """Sizes of tomograms, unbinned, and the pixel size of their tilt series; ``nan`` where a file does not say.

    Attributes
    ----------
    path : str
    sizes_voxels : dict of name to (3,) float64
    pixel_sizes_angst : dict of name to float
    """

    path: str
    sizes_voxels: dict[str, NDArray[np.float64]]
    pixel_sizes_angst: dict[str, float]


def tomogram_key(name: str) -> str:
    """A tomogram's name for a join: RELION's ``a`` and Warp's ``a.tomostar`` are the same; nothing else is guessed."""
    return name.removesuffix(_TOMOSTAR)


def read_tomograms(path: str | Path) -> TomogramTable:
    """The table of tomograms (``data_global``, or ``data_``) of RELION 4, 5 or Warp.

    Raises
    ------
    ListError
        No such table.
    """
    document = read_star(path)
    for block in document.blocks:
        if "rlnTomoName" in block.labels:
            break
    else:
        raise ListError(f"{path}: not a file of tomograms: no block with a column _rlnTomoName")
    names = [tomogram_key(name) for name in block.texts("rlnTomoName")]
    sizes = _sizes(block)
    pixel = block.floats(TILT_SERIES_PIXEL_SIZE) if TILT_SERIES_PIXEL_SIZE in block.labels else np.full(len(names), np.nan)
    return TomogramTable(str(path), dict(zip(names, sizes, strict=True)), dict(zip(names, pixel.tolist(), strict=True)))


def _sizes(block: StarBlock) -> NDArray[np.float64]:
    """Tomogram sizes in a table; ``nan`` where they are left out, and for what stands for unknown (-999, 0)."""
    refuse_partial(block, SIZES)
    if SIZES[0] not in block.labels:
        return np.full((block.n_rows, 3), np.nan)
    sizes = triples(block, SIZES)
    sizes[(sizes <= 0).any(axis=1)] = np.nan
    return sizes


def centre_voxels(sizes_voxels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The tomogram's centre that RELION 5's centred coordinates count from: ``size / 2 - 1`` of the unbinned tomogram, odd sizes too.

    RELION 4 takes the particle at its coordinate + 1, RELION 5 at its centred coordinate + size / 2: the same place is a RELION 4
    coordinate of size / 2 - 1.
    """
    return sizes_voxels / 2 - 1


# ---- a list's own columns


def subtomogram_rotations(block: StarBlock) -> NDArray[np.float64] | None:
    """(n, 3, 3) from the axes of the subtomogram to those of the tomogram; None where the list has no such columns."""
    refuse_partial(block, SUBTOMOGRAM_ANGLES)
    if SUBTOMOGRAM_ANGLES[0] not in block.labels:
        return None
    return relion_to_matrix(triples(block, SUBTOMOGRAM_ANGLES))


def cut_by_relion(optics: StarBlock | None, groups: NDArray[np.int32]) -> bool:
    """Whether volumes are RELION's pseudo-subtomograms, which stand along the subtomogram's axes: what its program writes of them says so."""
    labels = ("rlnTomoSubtomogramBinning", "rlnImageDimensionality", "rlnCtfDataAreCtfPremultiplied")
    if optics is None or not set(labels) <= set(optics.labels):
        return False
    used = np.unique(groups)
    return bool((optics.floats(labels[1])[used] == 3).all() and (optics.floats(labels[2])[used] == 1).all())


def has_stacks(document: StarDocument, block: StarBlock, optics: StarBlock | None) -> bool:
    """Whether particles are stacks of 2-D images."""
    for other in document.blocks:
        if STACKS in other:
            return _named(other, STACKS).lower() not in ("0", "", "false")
    flat = optics is not None and "rlnImageDimensionality" in optics.labels and bool((optics.floats("rlnImageDimensionality") == 2).all())
    return flat and VISIBLE in block.labels


def read_stacks(block: StarBlock, tomograms_path: Path | None) -> TiltStacks:
    """What the list says of its stacks: the tilts that each holds, and where the projections are."""
    if VISIBLE not in block.labels:
        return TiltStacks(None, tomograms_path)
    known: dict[str, NDArray[np.bool_]] = {}
    frames = []
    for row, text in enumerate(block.texts(VISIBLE)):
        if text not in known:
            parts = [part.strip() for part in text.strip("[]").split(",")]
            if not (text.startswith("[") and text.endswith("]")) or any(part not in ("0", "1") for part in parts):
                raise ListError(f"{block.where(row)}: _{VISIBLE} is '{text}', expected zeros and ones such as [1,0,1]")
            known[text] = np.array([part == "1" for part in parts])
        frames.append(known[text])
    return TiltStacks(tuple(frames), tomograms_path)


def counts_image_voxels(block: StarBlock, optics: StarBlock | None, names: Sequence[str]) -> bool:
    """Whether coordinates count voxels of the images, whatever the tilt series has: in the lists that Warp exports, for RELION 3 or of 2-D stacks.

    A RELION 4 list of volumes may have tomograms of Warp, and counts voxels of the tilt series nevertheless.
    """
    if not any(name.endswith(_TOMOSTAR) for name in set(names)):
        return False
    flat = optics is not None and "rlnImageDimensionality" in optics.labels and bool((optics.floats("rlnImageDimensionality") == 2).all())
    return "rlnTomoName" not in block.labels or VISIBLE in block.labels or flat


def read_coordinates(
    block: StarBlock,
    optics: StarBlock | None,
    groups: NDArray[np.int32],
    names: Sequence[str],
    tomograms_path: Path | None,
    image_pixel_sizes_angst: NDArray[np.float64] | None,
) -> Coordinates | None:
    """Places of the particles.

    Parameters
    ----------
    block, optics : StarBlock
    groups : (n,) int32
    names : sequence of str
        Tomograms of the particles.
    tomograms_path : Path or None
        File with sizes and pixel sizes of the tomograms.
    image_pixel_sizes_angst : (n,) float64 or None
        Of the particle images: the voxels that Warp counts coordinates in.

    Returns
    -------
    Coordinates or None
        None for a list without coordinates.
    """
    for labels in (COORDINATES, CENTRED):
        refuse_partial(block, labels)
    has_voxels, has_centred = COORDINATES[0] in block.labels, CENTRED[0] in block.labels
    if not (has_voxels or has_centred):
        return None
    n = block.n_rows
    series = np.full(n, np.nan)
    sizes = _sizes(block)
    if optics is not None and optics.n_rows:
        if TILT_SERIES_PIXEL_SIZE in optics.labels:
            series = optics.floats(TILT_SERIES_PIXEL_SIZE)[groups]
        if SIZES[0] in optics.labels:
            sizes = _sizes(optics)[groups]
    if TILT_SERIES_PIXEL_SIZE in block.labels:
        series = block.floats(TILT_SERIES_PIXEL_SIZE)
    if tomograms_path is not None:
        sizes, series = _joined(block.path, names, read_tomograms(tomograms_path), sizes, series)
    voxel = series
    if not has_centred and image_pixel_sizes_angst is not None and counts_image_voxels(block, optics, names):
        voxel = image_pixel_sizes_angst
    centre = centre_voxels(sizes)
    if voxel is not series:
        centre = centre * (series / voxel)[:, None]
    return Coordinates(
        triples(block, COORDINATES) if has_voxels else None,
        triples(block, CENTRED) if has_centred else None,
        voxel,
        centre,
    )


def with_tomograms(particles: ParticleSet, path: str | Path, where: str | Path = "the list") -> ParticleSet:
    """The same particles with what a file of tomograms (RELION's or Warp's) says: coordinates in voxels of the tilt series, and about the centres.

    Coordinates of unknown voxels are taken to count those of the tilt series, with a warning where the images have others.
    `where` names the list in messages.

    Raises
    ------
    ListError
        No such table, or none of the particles' tomograms in it.
    """
    places = particles.coordinates
    if places is None:
        return particles
    nothing = np.full(len(particles), np.nan)
    sizes, series = _joined(str(where), particles.tomograms, read_tomograms(path), np.full((len(particles), 3), np.nan), nothing)
    images = particles.pixel_size_angst if particles.pixel_sizes_angst is None else particles.pixel_sizes_angst
    guessed = np.isnan(places.voxel_size_angst) & np.isfinite(series)
    if places.voxels is not None and (guessed & ~(np.abs(images / series - 1) <= SAME_PIXEL_SIZE)).any():
        warnings.warn(
            f"{where} does not say which voxels its coordinates count; those of the tilt series are taken ({series[guessed][0]:g} A, {path})",
            stacklevel=2,
        )
    voxel = np.where(np.isfinite(places.voxel_size_angst), places.voxel_size_angst, series)
    series = np.where(np.isfinite(series), series, voxel)
    counted = None if places.voxels is None else places.voxels * np.where(np.isfinite(voxel), voxel / series, 1.0)[:, None]
    return replace(particles, coordinates=Coordinates(counted, places.centred_angst, series, centre_voxels(sizes)))


def _joined(
    where: str, names: Sequence[str], table: TomogramTable, sizes: NDArray[np.float64], series: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sizes and pixel sizes of each particle's tomogram, looked up by name; what the list itself says of pixel sizes stays."""
    sizes, series = sizes.copy(), series.copy()
    distinct = list(dict.fromkeys(names))
    missing = [name for name in distinct if tomogram_key(name) not in table.sizes_voxels]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        known = ", ".join(list(table.sizes_voxels)[:3]) + (" ..." if len(table.sizes_voxels) > 3 else "")
        text = f"{where}: {len(missing)} of {len(distinct)} tomograms are not in {table.path}: {shown}; it has {known or 'none'}"
        if len(missing) == len(distinct):
            raise ListError(text)
        warnings.warn(text, stacklevel=5)
    for row, name in enumerate(names):
        key = tomogram_key(name)
        if key in table.sizes_voxels:
            sizes[row] = table.sizes_voxels[key]
            if np.isnan(series[row]):
                series[row] = table.pixel_sizes_angst[key]
    return sizes, series
