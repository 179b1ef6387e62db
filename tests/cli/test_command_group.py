"""The group of commands and the one place where errors end."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
import time
from types import ModuleType

import click
import numpy as np
import pytest
from click.testing import CliRunner

from numba_glocal import __version__
from numba_glocal.cli import console, running
from numba_glocal.cli.main import COMMANDS, main
from numba_glocal.errors import ListError, WorkerError, plural
from numba_glocal.results import ClassResult
from numba_glocal.values import FSCCurve

CALL = "from numba_glocal.cli.main import main; main()"


@pytest.fixture(autouse=True)
def normal_verbosity():
    console.set_verbosity(console.Verbosity.NORMAL)
    yield
    console.set_verbosity(console.Verbosity.NORMAL)


@pytest.fixture
def run(monkeypatch):
    """Runs `numba-glocal probe`, whose body is given."""

    def run(body, *args):
        module = ModuleType("numba_glocal.cli.probe")
        module.probe_command = click.Command("probe", callback=body)
        monkeypatch.setitem(sys.modules, "numba_glocal.cli.probe", module)
        monkeypatch.setitem(COMMANDS, "probe", "A test.")
        return CliRunner().invoke(main, ["probe", *args])

    return run


def raising(error):
    def body():
        raise error

    return body


def test_an_error_of_the_user_is_one_line_and_exit_code_2(run):
    done = run(raising(ListError("particles.star, line 7: expected 12 columns,\n found 11")))
    assert done.exit_code == 2
    assert done.stderr == "numba-glocal: error: particles.star, line 7: expected 12 columns, found 11\n"
    assert done.stdout == ""


def test_ctrl_c_is_one_line_and_exit_code_130(run):
    done = run(raising(KeyboardInterrupt()))
    assert done.exit_code == 130
    assert done.stderr.strip() == "numba-glocal: interrupted"


def test_the_unexpected_is_one_line_that_names_the_file_with_the_traceback(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = run(raising(ZeroDivisionError("division by zero")))
    assert done.exit_code == 1
    match = re.fullmatch(r"numba-glocal: unexpected error: ZeroDivisionError: division by zero \(the traceback is in (.*)\)\n", done.stderr)
    text = open(match.group(1)).read()
    assert "in body" in text and __version__ in text


@pytest.mark.parametrize("number, code", [(errno.ENOSPC, 2), (errno.EROFS, 2), (errno.EACCES, 2), (errno.EBADF, 1)])
def test_a_disk_that_refuses_is_one_line(number, code, run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = run(raising(OSError(number, os.strerror(number), "run/half1.mrc")))
    assert done.exit_code == code and len(done.stderr.splitlines()) == 1
    assert (f"error: run/half1.mrc: {os.strerror(number)}\n" in done.stderr) == (code == 2)


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_do_not_end_a_command(redirection):
    done = subprocess.run(f"{sys.executable} -c '{CALL}' devices {redirection}", shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", CALL, "mask", "sphere", "--diameter", "80", "--box", "16", "--pixel-size", "10"]
    done = subprocess.run([*command, "-o", str(tmp_path / "mäsk.mrc")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "m\\xe4sk.mrc" in done.stdout, done.stderr
    assert (tmp_path / "mäsk.mrc").exists()


def test_tracebacks_go_to_the_log_of_the_run(run, tmp_path):
    log = logging.getLogger("numba_glocal")
    handler = logging.FileHandler(tmp_path / "log.txt")
    log.addHandler(handler)
    try:
        expected = run(raising(WorkerError("task 3 failed", "Traceback of the worker")))
        unexpected = run(raising(ZeroDivisionError("x")))
    finally:
        log.removeHandler(handler)
        handler.close()
    text = (tmp_path / "log.txt").read_text()
    assert "Traceback of the worker" in text and "stopped by an error: task 3 failed" in text and "ZeroDivisionError: x" in text
    assert "WorkerError" not in text and text.count("Traceback (most recent call last)") == 1  # of the unexpected one
    assert expected.stderr == "numba-glocal: error: task 3 failed\n"
    assert unexpected.stderr.count("\n") == 1 and str(tmp_path / "log.txt") in unexpected.stderr


def test_exit_codes_of_commands(run):
    assert run(lambda: click.get_current_context().exit(3)).exit_code == 3
    assert run(lambda: None).exit_code == 0
    assert run(lambda: True).exit_code == 0
    done = run(lambda: None, "--no-such-option")
    assert done.exit_code == 2 and "No such option" in done.stderr
    assert CliRunner().invoke(main, ["nope"]).exit_code == 2


@pytest.mark.parametrize(("typed", "meant"), [("aling", "align"), ("avarage", "average"), ("report-", "report"), ("qqq", None)])
def test_a_mistyped_command_gets_a_suggestion(typed, meant):
    done = CliRunner().invoke(main, [typed])
    line = done.stderr.splitlines()[-1]
    assert done.exit_code == 2 and f"No such command '{typed}'" in line
    assert line.endswith(f"Did you mean '{meant}'?") if meant else "Did you mean" not in line


def test_a_command_that_is_not_there_breaks_only_itself(monkeypatch):
    monkeypatch.setitem(COMMANDS, "later", "Comes later.")
    done = CliRunner().invoke(main, ["later"])
    assert (done.exit_code, done.stderr) == (2, f"numba-glocal: error: the command 'later' is not part of this version ({__version__})\n")
    assert "Comes later." in CliRunner().invoke(main, ["--help"]).stdout


def test_version_and_bare_call():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"numba-glocal, version {__version__}\n"
    bare = CliRunner().invoke(main, [])
    assert bare.exit_code == 2 and "Commands:" in bare.output


def test_help_is_fast_and_loads_nothing_heavy():
    code = """
import sys
sys.argv = ["numba-glocal", "--help"]
from numba_glocal.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("numpy", "numba", "scipy", "rich", "matplotlib") if name in sys.modules], file=sys.stderr)
"""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        times.append(time.perf_counter() - begin)
    assert done.stderr == "[]\n"
    assert all(re.search(rf"^  {name}\s", done.stdout, re.M) for name in COMMANDS)
    assert min(times) < 1.0  # about 0.1 s on an idle machine


def test_devices_command():
    done = CliRunner().invoke(main, ["devices"])
    assert done.exit_code == 0
    assert re.search(r"cores +\d+ usable of \d+", done.stdout) and "numba " in done.stdout and "GPU" in done.stdout


# --- the console ----------------------------------------------------------------------------------------------------------------------------


def test_a_stage_is_two_lines_where_there_is_no_terminal(capsys):
    with console.Stage("align half 1", total=5000) as stage:
        for _ in range(5000):
            stage.advance()
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "align half 1: 5000 particles"
    assert re.fullmatch(r"align half 1: 5000 particles in [\d.]+ s \([\d,]+ particles/s\)", lines[1])


@pytest.mark.parametrize(
    ("done", "seconds", "rate"),
    [(1, 3, "0.333"), (29.24, 1, "29.2"), (999.4, 1, "999"), (999.7, 1, "1,000"), (2923, 1, "2,920"), (5, 1e-5, "500,000")],
)
def test_rates_are_for_people(done, seconds, rate, monkeypatch):
    stage = console.Stage("s", 9)
    monkeypatch.setattr(console.Stage, "seconds", seconds)
    stage.done = done
    assert stage._rate_text() == f"{rate} particles/s"


def test_a_stage_that_fails_says_how_far_it_came(capsys):
    with pytest.raises(ValueError), console.Stage("read", total=9, unit="files") as stage:
        stage.advance(4)
        raise ValueError
    assert capsys.readouterr().err.splitlines()[1] == "read: stopped after 4 of 9 files"


def test_a_stage_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.Stage("align [half 1]", total=10) as stage:
        stage.advance(5, remark="GPU 0: 3/s")
        stage._bar.refresh()
    err = capsys.readouterr().err
    assert "align [half 1]" in err and "5/10" in err and "particles/s" in err and "GPU 0: 3/s" in err


def test_quiet_and_tables(capsys):
    console.print_table(["a", "b"], [(1, "x"), (2, "y")], title="t")
    assert capsys.readouterr().out == "# t\na\tb\n1\tx\n2\ty\n"
    console.set_verbosity(console.Verbosity.QUIET)
    console.say("no")
    console.note("no")
    console.print_table(["a"], [(1,)])
    with console.Stage("s", 1) as stage:
        stage.advance()
    console.warn("yes")
    assert capsys.readouterr() == ("", "numba-glocal: warning: yes\n")


def test_only_classes_with_maps_are_announced():
    fsc = FSCCurve(8, 1.0, *(np.ones(5),) * 4)
    first, second, third = (ClassResult(number, (5, 5), 0.3, fsc, None) for number in (1, 2, 3))
    empty = ClassResult(2, (0, 1), 0.1, None, None)
    assert running._classes_with_maps((first, second, third)) == "class1 to class3 with maps and FSC"
    assert running._classes_with_maps((first, empty, third)) == "class1, class3 with maps and FSC"
    assert running._classes_with_maps((empty,)) == "no class with maps and FSC"


def test_counted_words():
    assert [plural(1, "box"), plural(24, "box"), plural(0, "particle"), plural(1, "particle")] == ["1 box", "24 boxes", "0 particles", "1 particle"]
