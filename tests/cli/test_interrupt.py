"""Ctrl-C where Python drops it: the signal comes while a finaliser runs, and nothing there can catch what it raises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from numba_glocal.cli.console import Stage
from numba_glocal.cli.interrupt import raise_if_pressed, remembered


class Lost:
    """When it is collected, Ctrl-C is pressed; Python reports "Exception ignored in" and goes on."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two of these
            pass


@pytest.mark.filterwarnings("error")
def test_a_lost_interrupt_is_raised_at_the_next_step():
    reached = []
    with pytest.raises(KeyboardInterrupt), remembered():
        Lost()  # collected at once
        reached.append("lost")
        with Stage("align", 1):
            reached.append("a step further")
    assert reached == ["lost"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raise_if_pressed()  # forgotten


@pytest.mark.filterwarnings("error")
def test_without_a_step_it_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt), remembered():
        Lost()


def test_somebody_elses_handler_stays():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with remembered():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_is_not_lost_stops_at_once():
    imports = "from numba_glocal.cli.interrupt import remembered\nimport os, signal\n"
    code = f"{imports}with remembered():\n    os.kill(os.getpid(), signal.SIGINT)\n    print('went on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr and done.stdout == ""


HALF_MADE = """
import os, signal, sys
import click.core
from numba_glocal.cli.interrupt import remembered
from numba_glocal.cli.main import main

class Half:
    def __init__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
        self.whole = True

    def __del__(self):
        self.whole

def run(*_, **__):
    with remembered():
        Half()

click.core.Command.main = run
main()
"""


def test_what_an_interrupt_leaves_half_made_says_nothing():
    done = subprocess.run([sys.executable, "-c", HALF_MADE], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "numba-glocal: interrupted\n"
