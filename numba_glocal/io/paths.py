"""Where files are: volumes that a list names, and outputs that appear whole or not at all."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, overload

from ..errors import InputError

_FORMAT_SUFFIX = re.compile(r":(mrc|mrcs|map|em|st|rec)$", re.IGNORECASE)


def opened_name(name: str) -> str:
    """The file a list's name stands for: the format suffix of ``a.ctf:mrc`` is cut off, and only here."""
    return _FORMAT_SUFFIX.sub("", name)


class VolumeFinder:
    """Finds the files that a list names.

    A relative name is looked for in the given root, the list's folder, its parents (one of them is the project folder) and
    the current folder. The folder that held the first file found is tried first from then on.

    Parameters
    ----------
    list_path : path
        The particle list.
    root : path, optional
        A folder named by the user; it goes before all others.
    """

    def __init__(self, list_path: str | Path, root: str | Path | None = None) -> None:
        folder = Path(os.path.abspath(list_path)).parent
        folders = [folder, *folder.parents, Path.cwd()]
        if root is not None:
            if not Path(root).is_dir():
                raise InputError(f"{root}: the folder for volumes does not exist")
            folders.insert(0, Path(os.path.abspath(root)))
        self.folders = list(dict.fromkeys(map(str, folders)))
        self._first = ""

    def candidates(self, name: str) -> list[str]:
        """Every path tried for a name, in order."""
        name = opened_name(name)
        if os.path.isabs(name):
            return [name]
        first = [self._first] if self._first else []
        return [os.path.join(folder, name) for folder in dict.fromkeys(first + self.folders)]

    def place(self, name: str) -> Path:
        """Where the file of a name should be, without looking: the folder of the first file found, or the first folder."""
        return Path(os.path.join(self._first or self.folders[0], opened_name(name)))

    def find(self, name: str) -> Path | None:
        """Where the file of a name is, None when it is nowhere."""
        opened = opened_name(name)
        if os.path.isabs(opened):
            return Path(opened) if os.path.isfile(opened) else None
        if self._first:
            path = os.path.join(self._first, opened)
            if os.path.isfile(path):
                return Path(path)
        for folder in self.folders:
            path = os.path.join(folder, opened)
            if os.path.isfile(path):
                self._first = self._first or folder
                return Path(path)
        return None


class PlacedFiles(Sequence[Path]):
    """Where the files of many names should be, each a `Path` when it is asked for: a million of them at once take minutes and a GiB.

    Parameters
    ----------
    finder : VolumeFinder
    names : sequence of str
    """

    def __init__(self, finder: VolumeFinder, names: Sequence[str]) -> None:
        self._finder = finder
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, row: int) -> Path: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Path, ...]: ...
    def __getitem__(self, row: int | slice) -> Path | tuple[Path, ...]:
        if isinstance(row, slice):
            return tuple(self._finder.place(name) for name in self._names[row])
        return self._finder.place(self._names[row])


def find_volumes(names: Sequence[str], finder: VolumeFinder, list_path: str | Path, what: str = "volume", hint: str = "") -> dict[str, Path]:
    """Paths of all distinct `names`; one error for all that are missing, with the count, the first three, every path tried and `hint`."""
    found: dict[str, Path] = {}
    missing: list[str] = []
    for name in dict.fromkeys(names):
        path = finder.find(name)
        if path is None:
            missing.append(name)
        else:
            found[name] = path
    if missing:
        n_all = len(missing) + len(found)
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        tried = ", ".join(finder.candidates(missing[0]))
        raise InputError(f"{list_path}: {len(missing)} of {n_all} {what}s not found: {shown}; tried for the first: {tried}{hint}")
    return found


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file for writing that replaces `path` when the block ends well, and leaves no trace when it does not.

    Raises
    ------
    InputError
        When it cannot be written (no such folder, no permission, disk full).
    """
    target = Path(path)
    # beside the target, so that the last step is a rename within one file system
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(beside, "xb") as handle:
            yield handle
        os.replace(beside, target)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):  # a file system that can only be read refuses this too, and would hide the error
            beside.unlink(missing_ok=True)
