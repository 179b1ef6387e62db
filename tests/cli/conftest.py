"""A tiny set of particles, and commands run within this process."""

from __future__ import annotations

import logging
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from numba_glocal.cli import console, running
from numba_glocal.cli.main import main
from numba_glocal.execution.executors import SerialExecutor
from numba_glocal.simulation import SimulationSettings, simulate


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    simulate(folder, SimulationSettings(count=12, box_size=20, pixel_size_angst=16.0, snr=0.5, seed=2))
    return folder


@pytest.fixture
def tiny(tiny_source, tmp_path):
    """12 particles in boxes of 20 voxels, to be spoiled at will: folder, list, reference, and the lines of the list."""
    folder = tmp_path / "data"
    shutil.copytree(tiny_source, folder)

    def edit(change):
        """Rewrites the list; `change` gets the cells of each row."""
        lines = []
        for line in (folder / "start.star").read_text().splitlines():
            cells = line.split()
            lines.append(" ".join(map(str, change(cells))) if "subtomo/" in line else line)
        (folder / "start.star").write_text("\n".join(line for line in lines if line is not None) + "\n")

    labels = [line.split()[0].removeprefix("_rln") for line in (folder / "start.star").read_text().splitlines() if line.startswith("_rln")]
    labels = labels[labels.index("ImageName") :]
    return SimpleNamespace(folder=folder, list=folder / "start.star", reference=folder / "reference.mrc", edit=edit, column=labels.index)


@pytest.fixture
def invoke(monkeypatch):
    """Runs `numba-glocal ...` here, without worker processes."""
    monkeypatch.setattr(running, "make_executor", lambda *_, initializer, initargs, **__: SerialExecutor(initializer=initializer, initargs=initargs))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # these tests are about the CPU, wherever they run
    log = logging.getLogger("numba_glocal")
    console.set_verbosity(console.Verbosity.NORMAL)

    def invoke(*arguments):
        try:
            return CliRunner().invoke(main, [str(argument) for argument in arguments])
        finally:
            for handler in list(log.handlers):  # after an error the log stays open for the command group, until the process ends
                if isinstance(handler, logging.FileHandler):
                    log.removeHandler(handler)
                    handler.close()

    yield invoke
    console.set_verbosity(console.Verbosity.NORMAL)


@pytest.fixture
def no_report(monkeypatch):
    """The report takes a second, and most tests do not look at it."""
    monkeypatch.setattr(running, "write_report", lambda *_: None)
