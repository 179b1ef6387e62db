"""Lists that number their particles and do not name their files (Dynamo, STOPGAP, TOM/AV3), and lists kept as lines of text."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ListError

_FIELDS = ("particle", "tomogram", "object")
# a quote closes only where a blank follows, as in STAR
_TOKEN = re.compile(r"""(?:"[^\n"]*"(?=\s|$)|'[^\n']*'(?=\s|$)|[^ \t\r\n\f\v]+)""")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")


def names_of(template: str, particles: NDArray[np.int64], tomograms: NDArray[np.int64], objects: NDArray[np.int64]) -> list[str]:
    """File names of numbered particles.

    Parameters
    ----------
    template : str
        A Python format: ``{:06d}`` or ``{particle:06d}`` is the particle's number; ``{tomogram}`` and ``{object}`` may stand beside it.
    particles, tomograms, objects : (n,) int
        Numbers in the list.

    Returns
    -------
    list of str

    Raises
    ------
    InputError
        A template without the particle's number, or one that is not understood.
    """
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = [name for name in fields if name not in ("", "0", *_FIELDS)]
        if unknown:
            raise InputError(f"particle names '{template}': no field {{{unknown[0]}}}; expected {{particle}}, {{tomogram}}, {{object}}")
        if not {"", "0", "particle"} & set(fields):
            # a group's number is no particle's number
            raise InputError(f"particle names '{template}': no place for the particle's number; expected one such as subtomo_{{:06d}}.mrc")
        rows = zip(particles.tolist(), tomograms.tolist(), objects.tolist(), strict=True)
        return [template.format(p, particle=p, tomogram=t, object=o) for p, t, o in rows]
    except (ValueError, IndexError, KeyError) as error:
        raise InputError(f"particle names '{template}': {error}; expected a format such as subtomo_{{:06d}}.mrc") from None


def numbers_from_names(names: Sequence[str]) -> tuple[NDArray[np.int64], bool]:
    """Numbers for particles that come with names: the last number of each file's name where all differ, else 1 to n.

    Returns
    -------
    numbers : (n,) int64
    from_names : bool
    """
    found = [_LAST_NUMBER.search(Path(name).stem) for name in names]
    numbers = [int(match.group(1)) for match in found if match is not None]
    if len(numbers) == len(names) == len(set(numbers)) and max(numbers) < 10**7 and min(numbers) > 0:
        return np.array(numbers, np.int64), True
    return np.arange(1, len(names) + 1), False


def whole_numbers(values: NDArray[np.floating], what: str, where: Callable[[int], str], least: int | None = None) -> NDArray[np.int64]:
    """Numbers as whole ones; one that is not is refused with its line."""
    bad = ~np.isfinite(values) | (values != np.rint(values))
    if least is not None:
        bad |= values < least
    if bad.any():
        row = int(np.argmax(bad))
        expected = "a whole number" if least is None else f"a whole number of {least} or more"
        raise ListError(f"{where(row)}: {what} is {values[row]:g}, expected {expected}")
    return np.rint(values).astype(np.int64)


def refuse_repeated(numbers: NDArray[np.int64], what: str, where: Callable[[int], str]) -> None:
    """A particle's number stands once in a list."""
    first: dict[int, int] = {}
    for row, number in enumerate(numbers.tolist()):
        other = first.setdefault(number, row)
        if other != row:
            raise ListError(f"{where(row)}: {what} {number} stands twice, first in {where(other)}; expected a number of its own for each particle")


def tomogram_texts(numbers: NDArray[np.int64], names: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """Names of numbered tomograms: those of `names`, else the numbers; "" for 0, which stands for none."""
    names = names or {}
    return tuple(names.get(n, str(n) if n else "") for n in numbers.tolist())


def tomogram_numbers(names: Sequence[str]) -> NDArray[np.int64]:
    """Numbers for tomograms that come with names: the names themselves where they are numbers, else 1, 2 ... in order of appearance."""
    if all(name.isdigit() for name in names):
        return np.array([int(name) for name in names], np.int64)
    index: dict[str, int] = {}
    return np.array([index.setdefault(name, len(index) + 1) if name else 0 for name in names], np.int64)


# ---- lines of text


def tokens_of(line: str) -> list[str]:
    """The cells of a line."""
    return _TOKEN.findall(line)


def with_tokens(line: str, changes: Mapping[int, str]) -> str:
    """A line with some of its cells replaced; what stands between them stays."""
    pieces, done = [], 0
    for index, match in enumerate(_TOKEN.finditer(line)):
        if index in changes:
            pieces += [line[done : match.start()], changes[index]]
            done = match.end()
    return "".join([*pieces, line[done:]])


def digits(value: float) -> str:
    """A number with 6 decimals, trailing zeros left out."""
    return f"{round(float(value), 6) + 0.0:.6f}".rstrip("0").rstrip(".")
