"""Wedge lists: the tilts of each tomogram, for motive lists that only number their tomograms (STOPGAP, TOM/AV3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import InputError, ListError
from ..values import TiltRange
from .em import HEADER_BYTES, parse_em_header
from .numbered import whole_numbers
from .paths import whole_file
from .star import StarBlock, read_star

BLOCK = "stopgap_wedgelist"


@dataclass(frozen=True, slots=True)
class WedgeList:
    """Tilt angles of tomograms.

    Attributes
    ----------
    path : str
    tilts_deg : dict of int to tuple of float
        Tomogram number to its tilts, in the file's order.
    lines : tuple of str
        Of a STOPGAP list, as they stand, with their ends; none for an EM file.
    rows : dict of int to tuple of int
        Which of those lines are a tomogram's.
    """

    path: str
    tilts_deg: dict[int, tuple[float, ...]]
    lines: tuple[str, ...] = field(default=(), repr=False)
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def wedges(self, tomograms: Sequence[int]) -> tuple[tuple[TiltRange, ...], ...]:
        """The tilt range of each particle's tomogram.

        Raises
        ------
        ListError
            A tomogram that the list does not have, or whose tilts are no range.
        """
        missing = [str(t) for t in dict.fromkeys(tomograms) if t not in self.tilts_deg]
        if missing:
            found = ", ".join(str(t) for t in list(self.tilts_deg)[:5])
            raise ListError(f"{self.path}: no tilts of tomogram {', '.join(missing[:5])}; found those of {found}")
        ranges = {}
        for tomogram in dict.fromkeys(tomograms):
            low, high = min(self.tilts_deg[tomogram]), max(self.tilts_deg[tomogram])
            if not -90 <= low < high <= 90:
                raise ListError(f"{self.path}: tilts of tomogram {tomogram} from {low:g} to {high:g}: expected a range within -90 to 90 degrees")
            ranges[tomogram] = (TiltRange(low, high),)
        return tuple(ranges[tomogram] for tomogram in tomograms)


def read_wedge_list(path: str | Path) -> WedgeList:
    """Read a wedge list.

    Parameters
    ----------
    path : path
        STOPGAP's ``data_stopgap_wedgelist`` (a row for each tilt), or an EM file of 3 x n x 1 numbers: tomogram, lowest and highest tilt.

    Returns
    -------
    WedgeList

    Raises
    ------
    InputError, ListError, VolumeError
        Missing, of another kind, or without sense.
    """
    if Path(path).suffix.lower() == ".em":
        return _read_em(path)
    document = read_star(path)
    if BLOCK not in document:
        raise ListError(f"{path}: not a wedge list: expected data_{BLOCK}, found {', '.join(f'data_{b.name}' for b in document.blocks)}")
    block = document[BLOCK]
    tomograms = star_numbers(block, "tomo_num")
    tilts = block.floats("tilt_angle")
    if not len(tilts):
        raise ListError(f"{block.where()}: the list has no tilts")
    rows: dict[int, tuple[int, ...]] = {}
    for row, tomogram in enumerate(tomograms.tolist()):
        rows[tomogram] = (*rows.get(tomogram, ()), block.row_lines[row] - 1)
    by_tomogram = {tomogram: tuple(tilts[tomograms == tomogram].tolist()) for tomogram in rows}
    return WedgeList(str(path), by_tomogram, tuple(text_lines(path)), rows)


def write_wedge_list(path: str | Path, wedges: WedgeList, tomograms: Iterable[int] | None = None) -> None:
    """Write a STOPGAP wedge list, whole or not at all: the lines of the one that was read, of some tomograms or of all.

    Raises
    ------
    ListError, InputError
        A list that was an EM file; a tomogram that the list does not have; a file that cannot be written.
    """
    if not wedges.lines:
        raise ListError(f"{path}: {wedges.path} gives only the ends of tilt ranges; a STOPGAP wedge list needs every tilt")
    kept = set(wedges.rows) if tomograms is None else set(tomograms)
    if kept - set(wedges.rows):
        raise ListError(f"{path}: {wedges.path} has no tilts of tomogram {min(kept - set(wedges.rows))}")
    left_out = {line for tomogram, rows in wedges.rows.items() if tomogram not in kept for line in rows}
    text = "".join(line for number, line in enumerate(wedges.lines) if number not in left_out)
    with whole_file(path) as handle:
        handle.write(text.encode("utf-8", "surrogateescape"))


def _read_em(path: str | Path) -> WedgeList:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    header = parse_em_header(raw[:HEADER_BYTES], path)
    nz, ny, nx = header.shape
    if nx != 3 or nz != 1:
        raise ListError(f"{path}: an EM file of {nx} x {ny} x {nz} numbers, expected a wedge list of 3 x n x 1")
    if len(raw) < header.offset + 3 * ny * header.dtype.itemsize:
        raise ListError(f"{path}: expected {header.offset + 3 * ny * header.dtype.itemsize} bytes for {ny} tomograms, found {len(raw)}")
    table = np.frombuffer(raw, header.dtype, 3 * ny, header.offset).reshape(ny, 3).astype(np.float64)
    numbers = whole_numbers(table[:, 0], "the tomogram", lambda row: f"{path}, entry {row + 1}")
    # a limit is written in single precision
    limits = np.round(table[:, 1:], 4)
    return WedgeList(str(path), {number: tuple(limits[row].tolist()) for row, number in enumerate(numbers.tolist())})


def star_numbers(block: StarBlock, label: str) -> np.ndarray:
    """A column of whole numbers, which STOPGAP also writes as 24.000000."""
    return whole_numbers(block.floats(label), f"_{label}", block.where)


def text_lines(path: str | Path) -> list[str]:
    """The lines of a text file with their ends, cut as `read_star` counts them."""
    text = Path(path).read_bytes().decode("utf-8", "surrogateescape")
    end = "\n" if "\n" in text else "\r"
    *whole, last = text.split(end)
    return [line + end for line in whole] + ([last] if last else [])
