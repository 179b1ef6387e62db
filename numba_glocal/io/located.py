"""What every reader of a list does with the volumes that it names: find them, refuse doubles, take box and pixel size from headers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ListError
from ..values import Coordinates, FloatArray
from .paths import VolumeFinder, find_volumes
from .pixel_size import resolve_pixel_size
from .volumes import survey


@dataclass(frozen=True, slots=True)
class Located:
    """Where the volumes of a list are, and what their headers say.

    Attributes
    ----------
    volume_paths : tuple of Path
    weight_paths : tuple of (Path or None)
    box_size : int
        0 where nobody knows it.
    pixel_size_angst : float
    pixel_size_source : str
    """

    volume_paths: tuple[Path, ...]
    weight_paths: tuple[Path | None, ...]
    box_size: int
    pixel_size_angst: float
    pixel_size_source: str


def locate(
    list_path: str | Path,
    names: Sequence[str],
    where: Callable[[int], str],
    *,
    weight_names: Sequence[str] = (),
    list_pixel_size: tuple[float | None, str] = (None, ""),
    pixel_size_angst: float | None = None,
    root: str | Path | None = None,
    require_volumes: bool = True,
    hint: str = "",
) -> Located:
    """Find the volumes of a list.

    Parameters
    ----------
    list_path : path
    names : sequence of str
        Of the particle volumes.
    where : callable
        File and line of a row, for messages.
    weight_names : sequence of str, optional
        Of the weight volumes, "" for none.
    list_pixel_size : (float or None, str)
        Pixel size in Angstrom that the list says, and where.
    pixel_size_angst, root, require_volumes
        As in `read_particles`.
    hint : str
        Added to the message when volumes are missing.

    Returns
    -------
    Located

    Raises
    ------
    InputError, ListError, VolumeError
        Volumes that are missing, named twice or of different sizes; no pixel size.
    """
    weight_names = weight_names or [""] * len(names)
    distinct_weights = [name for name in dict.fromkeys(weight_names) if name]
    finder = VolumeFinder(list_path, root)
    if require_volumes:
        found = find_volumes(names, finder, list_path, "particle volume", hint)
        found_weights = find_volumes(distinct_weights, finder, list_path, "weight volume")
    else:
        finder.find(names[0])
        found = {name: finder.place(name) for name in dict.fromkeys(names)}
        found_weights = {name: finder.place(name) for name in distinct_weights}
    paths = tuple(found[name] for name in names)
    _refuse_doubles(names, paths, where)
    box_size, header_pixel_size = 0, float("nan")
    if require_volumes:
        box_size, header_pixel_size = survey(paths)
    elif paths[0].is_file():
        box_size, header_pixel_size = survey(paths[:1])
    pixel_size, source = resolve_pixel_size(pixel_size_angst, *list_pixel_size, header_pixel_size, list_path)
    return Located(paths, tuple(found_weights.get(name) for name in weight_names), box_size, pixel_size, source)


def places(voxels: FloatArray | None, voxel_size_angst: float = float("nan")) -> Coordinates | None:
    """Coordinates of a list; None where it has none, or nobody filled them in (all are 0)."""
    return None if voxels is None or not voxels.any() else Coordinates.in_voxels(voxels, voxel_size_angst)


def _refuse_doubles(names: Sequence[str], paths: Sequence[Path], where: Callable[[int], str]) -> None:
    """One volume must not stand twice: in both half-sets it would correlate with itself."""
    first: dict[str, int] = {}
    for row, path in enumerate(paths):
        other = first.setdefault(os.path.normpath(path), row)
        if other != row:
            also = "" if names[other] == names[row] else f" as {names[other]}"
            raise ListError(f"{where(row)}: particle {names[row]} stands twice, first in {where(other)}{also}")
