"""Files: particle lists to `ParticleSet` and back, and volumes. Every Euler convention of other packages ends here.

A format is a `ListFormat` in the registry; a later one adds itself with `register_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InputError, ListError
from ..values import ParticleSet
from .dynamo import read_dynamo_particles, write_dynamo_particles
from .motive_list import read_motive_list, write_motive_list
from .pytom import read_pytom_particles, write_pytom_particles
from .relion import read_relion_particles, write_relion_particles
from .relion_tomo import with_tomograms
from .relion_versions import VERSIONS, RelionVersion, lost_in_version, write_version
from .stopgap import is_stopgap, read_stopgap_particles, write_stopgap_particles
from .volumes import read_header, read_volume, write_volume

HELD = {
    "tomograms": "tomogram names",
    "coordinates": "coordinates",
    "half": "half-sets",
    "classes": "classes",
    "scores": "scores",
    "weights": "wedge or CTF volumes",
    "tilt_ranges": "tilt ranges",
    "tilt_series": "wedges of two tilt series or of other axes than y",
    "pixel_size": "pixel size",
    "volume_axes": "that volumes are turned",
    "stacks": "that particles are stacks of 2-D images",
}
"""What a list can hold beside names and poses, and how it is called in messages."""

OPTIONS_OF_SOME = ("particle_names", "wedge_list", "volume_axes")
"""Options of `read_particles` that only some formats take; given for another one they are refused."""

_HEAD_BYTES = 65536


@dataclass(frozen=True, slots=True)
class ListFormat:
    """How one kind of particle list is read and written.

    Attributes
    ----------
    name : str
        For messages.
    suffixes : tuple of str
        With the dot, small letters. Formats may share a suffix: `recognises` then tells them apart on reading, `key` on writing.
    read : callable or None
        ``read(path, **options) -> ParticleSet``; None for a format that is known and not read yet.
    write : callable or None
        ``write(path, particles, extra_columns)``.
    key : str
        Name for ``convert --to`` and for `write_particles`; "" for a format that cannot be asked for.
    recognises : callable or None
        ``recognises(head: bytes) -> bool`` from the first bytes of a file. None: any file with the suffix.
    holds : frozenset of str
        Of `HELD`: what the writer can put into such a list.
    leaves : callable or None
        ``leaves(particles) -> list of str``: what else it cannot take over of these particles, as words. None: whatever their
        source says that only lists of its own kind hold.
    scales : bool
        Coordinates have voxels of their own size there (RELION). Else the writer gets them in the particles' voxels, in which such lists
        count shifts, so that coordinate + shift is a place.
    takes : frozenset of str
        Of `OPTIONS_OF_SOME`: what the reader takes beside the options of all.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[..., ParticleSet] | None = None
    write: Callable[..., None] | None = None
    key: str = ""
    recognises: Callable[[bytes], bool] | None = None
    holds: frozenset[str] = frozenset()
    leaves: Callable[[ParticleSet], list[str]] | None = None
    scales: bool = False
    takes: frozenset[str] = frozenset()


_FORMATS: list[ListFormat] = []


def register_format(list_format: ListFormat) -> None:
    """Add a format, or replace the one that has its key (or, without a key, its name).

    Of formats with one suffix those that recognise their files are asked before those that take any, and what was registered last is
    asked first.
    """
    same = [f for f in _FORMATS if (f.key == list_format.key if list_format.key else f.name == list_format.name)]
    for old in same:
        _FORMATS.remove(old)
    # a known kind that nobody reads yet gives way to one that does
    for old in [f for f in _FORMATS if f.read is None and f.write is None and set(f.suffixes) & set(list_format.suffixes)]:
        _FORMATS.remove(old)
    _FORMATS.append(list_format)


def list_formats() -> tuple[ListFormat, ...]:
    """All formats, in the order in which they were registered."""
    return tuple(_FORMATS)


def format_of_file(path: str | Path) -> ListFormat:
    """The format of a list that exists: by its suffix, then by its content; STAR when the name says nothing."""
    path = Path(path)
    suffix = path.suffix.lower()
    if not any(suffix in f.suffixes for f in _FORMATS):
        # lists without a telling name are STAR files in practice; its reader says when they are not
        suffix = ".star"
    found = [f for f in reversed(_FORMATS) if suffix in f.suffixes and (f.read is not None or f.write is None)]
    choosy = [f for f in found if f.recognises is not None]
    if choosy:
        try:
            with open(path, "rb") as handle:
                head = handle.read(_HEAD_BYTES)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
        for list_format in choosy:
            if list_format.recognises is not None and list_format.recognises(head):
                return list_format
    return next((f for f in reversed(found) if f.recognises is None), found[-1])


def format_to_write(path: str | Path, particles: ParticleSet, to: str | None = None) -> ListFormat:
    """The format that `write_particles` takes: the one asked for, else the particles' own, else the first of the suffix.

    Raises
    ------
    ListError
        When there is none, or none that is written.
    """
    suffix = Path(path).suffix.lower()
    if to is not None:
        for list_format in _FORMATS:
            if list_format.key == to and list_format.write is not None:
                return list_format
        keys = ", ".join(f.key for f in _FORMATS if f.key and f.write is not None)
        raise ListError(f"{path}: no format '{to}' to write; expected one of {keys}")
    named = [f for f in _FORMATS if suffix in f.suffixes]
    written = [f for f in named if f.write is not None]
    own = getattr(particles.source, "format_key", "")
    for list_format in written:
        if own and list_format.key == own:
            return list_format
    if not written:
        name = f"a {named[0].name}" if named else f"a list named *{suffix}"
        raise ListError(f"{path}: {name} is not written yet; expected {_known('write')}")
    return written[0]


def read_particles(path: str | Path, **options: Any) -> ParticleSet:
    """Read a particle list; its format follows from the name, or from the content when the name says nothing.

    Parameters
    ----------
    path : path
        The list.
    **options
        ``pixel_size_angst``, ``root``, ``premultiplied``, ``require_volumes`` as `read_relion_particles`; ``particle_names``, a template
        for the files of lists that only number particles, and ``wedge_list``, the tilts of their tomograms; ``volume_axes`` and (of
        optimisation sets) ``tomograms`` as `read_relion_particles`.

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
    list_format = format_of_file(path)
    if list_format.read is None:
        raise ListError(f"{path}: a {list_format.name} is not read yet; expected {_known('read')}")
    for option in OPTIONS_OF_SOME:
        if options.get(option) is None or option not in list_format.takes:
            if options.pop(option, None) is not None:
                takers = ", ".join(f.name for f in _FORMATS if option in f.takes)
                raise InputError(f"{path}: a {list_format.name} takes no --{option.replace('_', '-')}; that is for: {takers}")
    return list_format.read(path, **options)


def write_particles(path: str | Path, particles: ParticleSet, extra_columns: Mapping[str, ArrayLike] | None = None, to: str | None = None) -> None:
    """Write a particle list, whole or not at all, in the format of its name.

    Parameters
    ----------
    path : path
        Output; its suffix names the format, or the family of formats of which the particles' own is taken.
    particles : ParticleSet
    extra_columns : dict of label to (n,) array, optional
        Columns to add or replace.
    to : str, optional
        Key of the format, whatever the name.

    Raises
    ------
    ListError, InputError
        A format that is not written, or a file that cannot be.
    """
    list_format = format_to_write(path, particles, to)
    assert list_format.write is not None
    places, pixel_size = particles.coordinates, particles.pixel_size_angst
    is_own = getattr(particles.source, "format_key", None) == list_format.key
    if places is not None and not (list_format.scales or is_own) and np.isfinite(pixel_size):
        particles = replace(particles, coordinates=places.counted_in(pixel_size))
    list_format.write(Path(path), particles, extra_columns)


def left_behind(particles: ParticleSet, target: ListFormat) -> list[str]:
    """What `particles` carry and a list of the format `target` cannot hold, as words for a message."""
    if getattr(particles.source, "format_key", None) == target.key:
        return []
    there = {
        "tomograms": any(particles.tomograms),
        "coordinates": particles.coordinates is not None,
        "half": bool(particles.half.any()),
        "classes": particles.classes is not None,
        "scores": particles.scores is not None and bool(np.isfinite(particles.scores).any()),
        "weights": any(isinstance(weight, Path) for weight in particles.weight_paths),
        "tilt_ranges": particles.tilt_ranges_deg is not None,
        "tilt_series": any(len(wedge) > 1 or wedge[0].tilt_axis != "y" or wedge[0].turn is not None for wedge in particles.wedges),
        "pixel_size": bool(np.isfinite(particles.pixel_size_angst)),
        "volume_axes": particles.volume_axes is not None,
        "stacks": particles.stacks is not None,
    }
    lost = [words for part, words in HELD.items() if there[part] and part not in target.holds]
    if target.leaves is not None:
        return lost + target.leaves(particles)
    extras = getattr(particles.source, "extras", None)
    return lost + (list(extras()) if extras is not None else [])


def _known(action: str) -> str:
    known = {f.name: f"{f.name} ({', '.join(f.suffixes)})" for f in _FORMATS if getattr(f, action) is not None}
    return ", ".join(known.values())


_RELION_HOLDS = frozenset({"tomograms", "coordinates", "half", "classes", "scores", "weights", "tilt_ranges", "pixel_size"})


def _of_version(version: RelionVersion) -> ListFormat:
    """A version of RELION's lists as a format to be asked for; all of them are read by one reader."""
    holds = _RELION_HOLDS | (frozenset({"volume_axes"}) if version.has_tomograms else frozenset())
    holds |= frozenset({"stacks"}) if version.centred else frozenset()
    return ListFormat(
        version.name,
        (".star",),
        None,
        lambda path, particles, extra_columns=None: write_version(version, path, particles, extra_columns),
        key=version.key,
        holds=holds,
        leaves=lambda particles: lost_in_version(particles, version),
        scales=True,
    )


register_format(
    ListFormat(
        "RELION STAR",
        (".star",),
        read_relion_particles,
        write_relion_particles,
        key="relion",
        holds=_RELION_HOLDS | {"volume_axes", "stacks"},
        leaves=lambda particles: lost_in_version(particles, None),
        scales=True,
        takes=frozenset({"volume_axes"}),
    )
)
for _version in VERSIONS:
    register_format(_of_version(_version))
register_format(
    ListFormat(
        "PyTom particle list",
        (".xml",),
        read_pytom_particles,
        write_pytom_particles,
        key="pytom",
        holds=frozenset({"tomograms", "coordinates", "half", "classes", "scores", "weights", "tilt_ranges", "tilt_series"}),
    )
)
register_format(
    ListFormat(
        "Dynamo table",
        (".tbl",),
        read_dynamo_particles,
        write_dynamo_particles,
        key="dynamo",
        holds=frozenset({"tomograms", "coordinates", "classes", "scores", "tilt_ranges", "tilt_series", "pixel_size"}),
        takes=frozenset({"particle_names"}),
    )
)
register_format(
    ListFormat(
        "STOPGAP motive list",
        (".star",),
        read_stopgap_particles,
        write_stopgap_particles,
        key="stopgap",
        recognises=is_stopgap,
        holds=frozenset({"tomograms", "coordinates", "half", "classes", "scores"}),
        takes=frozenset({"particle_names", "wedge_list"}),
    )
)
register_format(
    ListFormat(
        "TOM/AV3 motive list",
        (".em",),
        read_motive_list,
        write_motive_list,
        key="av3",
        holds=frozenset({"tomograms", "coordinates", "classes", "scores"}),
        takes=frozenset({"particle_names", "wedge_list"}),
    )
)

__all__ = [
    "HELD",
    "ListFormat",
    "format_of_file",
    "format_to_write",
    "left_behind",
    "list_formats",
    "read_header",
    "read_particles",
    "read_volume",
    "register_format",
    "with_tomograms",
    "write_particles",
    "write_volume",
]
