"""Files: particle lists to `ParticleSet` and back, and volumes. Every Euler convention of other packages ends here.

A format is a `ListFormat` in the registry; a later one adds itself with `register_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from ..errors import InputError, ListError
from ..values import ParticleSet
from .relion import read_relion_particles, write_relion_particles
from .volumes import read_header, read_volume, write_volume


@dataclass(frozen=True, slots=True)
class ListFormat:
    """How one kind of particle list is read and written.

    Attributes
    ----------
    name : str
        For messages.
    suffixes : tuple of str
        With the dot, small letters.
    read : callable or None
        ``read(path, **options) -> ParticleSet``; None for a format that is known and not read yet.
    write : callable or None
        ``write(path, particles, extra_columns)``.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[..., ParticleSet] | None = None
    write: Callable[..., None] | None = None


_FORMATS: dict[str, ListFormat] = {}


def register_format(list_format: ListFormat) -> None:
    """Add a format, or replace the one that has its suffixes."""
    for suffix in list_format.suffixes:
        _FORMATS[suffix] = list_format


register_format(ListFormat("RELION STAR", (".star",), read_relion_particles, write_relion_particles))
register_format(ListFormat("PyTom particle list", (".xml",)))
register_format(ListFormat("Dynamo table", (".tbl",)))
register_format(ListFormat("TOM/AV3 motive list", (".em",)))


def read_particles(path: str | Path, **options: Any) -> ParticleSet:
    """Read a particle list; its format follows from the name, or from the content when the name says nothing.

    Parameters
    ----------
    path : path
        The list.
    **options
        ``pixel_size_angst``, ``root``, ``premultiplied``, ``require_volumes`` as `read_relion_particles`.

    Returns
    -------
    ParticleSet

    Raises
    ------
    InputError, ListError, VolumeError
        One line with file, line, what was expected and what was found.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: {'is a folder, expected a particle list' if path.is_dir() else 'no such file'}")
    list_format = _FORMATS.get(path.suffix.lower())
    if list_format is None:
        # lists without a telling name are STAR files in practice; its reader says when they are not
        list_format = _FORMATS[".star"]
    if list_format.read is None:
        raise ListError(f"{path}: a {list_format.name} is not read yet; expected {_known('read')}")
    return list_format.read(path, **options)


def write_particles(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None) -> None:
    """Write a particle list, whole or not at all, in the format of its name.

    Parameters
    ----------
    path : path
        Output; its suffix names the format.
    particles : ParticleSet
    extra_columns : dict of label to (n,) array, optional
        Columns to add or replace.

    Raises
    ------
    ListError, InputError
        A format that is not written, or a file that cannot be.
    """
    path = Path(path)
    list_format = _FORMATS.get(path.suffix.lower())
    if list_format is None or list_format.write is None:
        name = f"a {list_format.name}" if list_format else f"a list named *{path.suffix}"
        raise ListError(f"{path}: {name} is not written yet; expected {_known('write')}")
    list_format.write(path, particles, extra_columns)


def _known(action: str) -> str:
    known = {f.name: f"{f.name} ({', '.join(f.suffixes)})" for f in _FORMATS.values() if getattr(f, action) is not None}
    return ", ".join(known.values())


__all__ = [
    "ListFormat",
    "read_header",
    "read_particles",
    "read_volume",
    "register_format",
    "write_particles",
    "write_volume",
]
