"""What a person sees: progress bars, tables, one line where the output is no terminal. Results go to stdout, all else to stderr."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import Any

from .interrupt import raise_if_pressed


class Verbosity(IntEnum):
    """How much is said: errors only; stages and results; details too."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


_verbosity = Verbosity.NORMAL


def set_verbosity(verbosity: Verbosity) -> None:
    """Say more or less from now on."""
    global _verbosity
    _verbosity = verbosity


def verbosity() -> Verbosity:
    """How much is said at present."""
    return _verbosity


def say(text: str) -> None:
    """A result or a fact for the user (stdout); silent with --quiet."""
    if _verbosity >= Verbosity.NORMAL:
        print(text, flush=True)


def note(text: str) -> None:
    """A remark on the way (stderr); silent with --quiet."""
    if _verbosity >= Verbosity.NORMAL:
        print(text, file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """A remark that only --verbose shows (stderr)."""
    if _verbosity >= Verbosity.VERBOSE:
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A warning (stderr); shown with --quiet too."""
    print(f"numba-glocal: warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Library warnings as one line each."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        previous = warnings.showwarning
        warnings.showwarning = lambda message, *rest, **more: warn(" ".join(str(message).split()))
        try:
            yield
        finally:
            warnings.showwarning = previous


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print names and values, two columns (stdout)."""
    if _verbosity < Verbosity.NORMAL:
        return
    rows = list(facts)
    width = max((len(name) for name, _ in rows), default=0)
    print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}".rstrip())
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print a table (stdout): framed on a terminal; tabs, which other programs can read, elsewhere."""
    if _verbosity < Verbosity.NORMAL:
        return
    cells = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        if title:
            print(f"# {title}")
        for line in [list(columns), *cells]:
            print("\t".join(line))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column)
    for line in cells:
        table.add_row(*line)
    Console().print(table, markup=False)


class Stage:
    """Progress of one stage: a bar with rate and time left on a terminal; elsewhere one line at the start and one at the end.

    Parameters
    ----------
    name : str
        What is done, as "align half 1".
    total : int
        How many `unit` there are.
    unit : str
        What is counted.

    Examples
    --------
    >>> with Stage("align half 1", total=500) as stage:
    ...     for result in results:
    ...         stage.advance(len(result))
    """

    def __init__(self, name: str, total: int, unit: str = "particles") -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0
        self._remark = ""
        self._start_s = 0.0
        self._bar: Any = None
        self._bar_task: Any = None

    def __enter__(self) -> Stage:
        raise_if_pressed()
        self._start_s = time.perf_counter()
        if _verbosity >= Verbosity.NORMAL:
            if sys.stderr.isatty():
                self._open_bar()
            else:
                note(f"{self.name}: {self.total} {self.unit}")
        return self

    def advance(self, n: int = 1, remark: str | None = None) -> None:
        """Count `n` more; `remark` (rates of single GPUs, for example) stands behind the bar until the next one."""
        self.done += n
        raise_if_pressed()
        if remark is not None:
            self._remark = remark
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=self.done, rate=self._rate_text(), remark=self._remark)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if kind is None:
            note(f"{self.name}: {self.done} {self.unit} in {self.seconds:.1f} s ({self._rate_text()})")
        else:
            note(f"{self.name}: stopped after {self.done} of {self.total} {self.unit}")

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._start_s

    def _rate_text(self) -> str:
        rate = self.done / max(self.seconds, 1e-9)
        three_digits = f"{rate:.3g}"
        return f"{three_digits if rate < 999.5 else format(float(three_digits), ',.0f')} {self.unit}/s"

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}", markup=False),
            console=Console(stderr=True),
            transient=True,  # the line at the end takes its place
        )
        self._bar_task = self._bar.add_task(self.name, total=self.total, rate="", remark="")
        self._bar.start()


def gibibytes(n_bytes: int | None) -> str:
    """A number of bytes for people."""
    return "unknown" if n_bytes is None else f"{n_bytes / 2**30:.1f} GiB"
