"""Ctrl-C that cannot get lost.

Python drops a KeyboardInterrupt that arises where nobody can catch it: in a callback from a C library (LLVM's while Numba compiles), in a
finaliser, in a weak reference's callback. The run would go on as if the key had never been pressed. Here the signal is also remembered,
and the next step of the run raises it again.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_pressed = threading.Event()


@contextmanager
def remembered() -> Iterator[None]:
    """Ctrl-C within this block is remembered until it is over; elsewhere than in the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else's program, which treats the signal its own way
        return
    _pressed.clear()
    report = sys.unraisablehook

    def report_others(lost: Any) -> None:
        # a KeyboardInterrupt is not lost, and what it left half made complains when it is collected
        if lost.exc_type is not KeyboardInterrupt and not _pressed.is_set():
            report(lost)

    sys.unraisablehook = report_others
    signal.signal(signal.SIGINT, _remember)
    try:
        yield
        raise_if_pressed()
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _pressed.clear()


def raise_if_pressed() -> None:
    """Stops a run whose Ctrl-C was lost.

    Raises
    ------
    KeyboardInterrupt
        When Ctrl-C was pressed since `remembered` began.
    """
    if _pressed.is_set():
        raise KeyboardInterrupt


def _remember(number: int, frame: FrameType | None) -> None:
    _pressed.set()
    raise KeyboardInterrupt
