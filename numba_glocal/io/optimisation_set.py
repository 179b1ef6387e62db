"""Optimisation sets of RELION 4, 5 and Warp 2: a file that names a particle list and its tomograms (`relion_tomo` follows them)."""

from __future__ import annotations

import os
from pathlib import Path

from .paths import VolumeFinder
from .relion_tomo import PARTICLES_FILE, STACKS, TOMOGRAMS_FILE
from .star import StarBlock, StarDocument, quote, read_star, write_star


def read_optimisation_set(path: str | Path) -> StarDocument | None:
    """The set in a file; None where the file is something else."""
    if Path(path).suffix.lower() != ".star":
        return None
    document = read_star(path)
    return document if any(PARTICLES_FILE in block or TOMOGRAMS_FILE in block for block in document.blocks) else None


def tomograms_of(document: StarDocument) -> Path | None:
    """The tomograms file that a set names; None where it names none or it is not there."""
    for block in document.blocks:
        if TOMOGRAMS_FILE in block:
            name = block.value(TOMOGRAMS_FILE) if TOMOGRAMS_FILE in block.pairs else block.texts(TOMOGRAMS_FILE)[0]
            return VolumeFinder(document.path).find(name) if name else None
    return None


def write_optimisation_set(
    path: Path, particles_path: Path, tomograms_path: Path | None, like: StarDocument | None = None, stacks: bool = True
) -> None:
    """Write a set, whole or not at all. Names are relative to the current folder (the project's) where files are inside it.

    Parameters
    ----------
    path : Path
    particles_path : Path
    tomograms_path : Path or None
        None: as in `like`.
    like : StarDocument, optional
        A set whose other entries go along; names that do not lead to the same file from the current folder are written anew.
    stacks : bool
        The particles are stacks of 2-D images.
    """
    files = {PARTICLES_FILE: _named(particles_path)}
    if tomograms_path is not None:
        files[TOMOGRAMS_FILE] = _named(tomograms_path)
    if like is None:
        blocks = [StarBlock.from_pairs("", files)]
        if stacks:
            blocks.append(StarBlock.from_pairs("general", {STACKS: "1"}))
        write_star(path, StarDocument(blocks, str(path)))
        return
    before = VolumeFinder(like.path)
    holder = next(block for block in like.blocks if PARTICLES_FILE in block or TOMOGRAMS_FILE in block)
    for label in [*holder.pairs, *holder.labels]:
        name = holder.value(label) if label in holder.pairs else holder.texts(label)[0]
        found = before.find(name) if label.endswith("File") and name else None
        if found is not None and label not in files:
            # all names start from one folder: a program that is started there finds every file
            if Path(name).resolve() != found.resolve():
                files[label] = _named(found)
    for label, name in files.items():
        if label in holder.labels:
            holder.set_column(label, [name])
        else:
            holder.pairs[label] = quote(name)
    kept = [block for block in like.blocks if stacks or STACKS not in block]
    write_star(path, StarDocument(kept, str(path)))


def _named(file: Path) -> str:
    absolute = Path(os.path.abspath(file))
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)
