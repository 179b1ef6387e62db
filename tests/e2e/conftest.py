"""Sets of particles and finished runs that several tests look at; each is made once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import mrcfile
import numpy as np
import pytest
from silent_stage import Silent

from numba_glocal.execution.executors import make_executor
from numba_glocal.execution.tasks import start_worker
from numba_glocal.job import prepare_job
from numba_glocal.refinement import Refinement, average_run
from numba_glocal.results import RunFolder
from numba_glocal.settings import AlignSettings, AverageSettings
from numba_glocal.simulation import SimulationSettings, simulate

START = (sys.executable, "-c", "from numba_glocal.cli import main; main()")


def environment():
    """One thread, and no GPU: these tests are about the CPU, wherever they run."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def command():
    """Runs `numba-glocal` as a person does, in a process of its own; by default it must succeed."""

    def command(*arguments, code=0):
        done = subprocess.run([*START, *map(str, arguments)], capture_output=True, text=True, env=environment(), timeout=300)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return command


@pytest.fixture(scope="session")
def start_command():
    """Starts `numba-glocal` and returns the process."""

    def start_command(*arguments):
        return subprocess.Popen([*START, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())

    return start_command


@pytest.fixture(scope="session")
def pose_errors(shared):
    """The independent judge of poses: angles in degrees and distances in Angstrom after removing one common motion."""
    spec = importlib.util.spec_from_file_location("pose_error", shared / "tools" / "pose_error.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def pose_errors(truth, found):
        angles_deg, distances_angst, *_ = module.errors(str(truth), str(found))
        return angles_deg, distances_angst

    return pose_errors


@pytest.fixture(scope="session")
def planted(shared, tmp_path_factory):
    """40 particles of a ribosome made without any of our code: exact slices, CTF, noise 20 times stronger than the signal."""
    pytest.importorskip("finufft")
    folder = tmp_path_factory.mktemp("planted") / "set"
    tool, source = shared / "tools" / "make_dataset.py", shared / "data" / "maps" / "ribo.em"
    options = "--scale 2.0833333 --invert --n 40 --box 48 --angpix 9.0667 --snr 0.05 --ctf --seed 3".split()
    subprocess.run([sys.executable, tool, folder, "--map", source, *options], check=True, env=environment())
    return folder


@pytest.fixture(scope="session")
def planted_run(planted, command, tmp_path_factory):
    """That set aligned by the command line, from its own map low-passed to 50 A."""
    run = tmp_path_factory.mktemp("planted_run") / "run"
    reference = planted / "truth.mrc"
    done = command("align", planted / "start.star", "-o", run, "--reference", reference, "--particle-diameter", 360, "--iterations", 3)
    (run / "stdout.txt").write_text(done.stdout)
    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """22 particles of the built-in phantom in small boxes: for what does not depend on the data."""
    return simulate(tmp_path_factory.mktemp("small"), SimulationSettings(count=22, box_size=24, pixel_size_angst=14.0, snr=0.3, seed=5))


@pytest.fixture(scope="session")
def align_here():
    """Aligns without the command line: the whole loop, within this process or with a pool of workers."""

    def align_here(particles, output, workers=0, resume=False, **settings):
        settings = AlignSettings(str(particles), str(output), **settings)
        job, folder = prepare_job(settings, resume), RunFolder(Path(output))
        if not resume:
            folder.create(settings, [])
        with make_executor(workers, initializer=start_worker) as executor:
            loop = Refinement(job, executor, folder, Silent)
            loop.finish(loop.run(resume))
        return job

    return align_here


@pytest.fixture(scope="session")
def average_here():
    """Averages within this process."""

    def average_here(particles, output, **settings):
        settings = AverageSettings(str(particles), str(output), **settings)
        job, folder = prepare_job(settings), RunFolder(Path(output))
        folder.create(settings, [])
        with make_executor(0, initializer=start_worker) as executor:
            average_run(job, executor, folder, Silent)

    return average_here


def read_map(path):
    with mrcfile.open(path, permissive=True) as file:
        return np.array(file.data, np.float64)


def shell_radii(n):
    k = np.fft.fftfreq(n) * n
    return np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)


def soft_sphere(n, radius, edge=5.0):
    grid = np.indices((n,) * 3) - n // 2
    return 0.5 * (1 + np.cos(np.pi * np.clip((np.sqrt((grid**2).sum(0)) - radius) / edge, 0, 1)))


def shell_correlation(a, b, mask):
    """FSC by the book, in double precision; a value per shell up to Nyquist."""
    n = a.shape[0]
    fa, fb = np.fft.fftn(a * mask), np.fft.fftn(b * mask)
    shell = np.rint(shell_radii(n)).astype(int).ravel()

    def per_shell(values):
        return np.bincount(shell, values.real.ravel())[: n // 2 + 1]

    return per_shell(fa * fb.conj()) / np.sqrt(per_shell(abs(fa) ** 2) * per_shell(abs(fb) ** 2))


@pytest.fixture(scope="session")
def tools():
    """Judges of maps that share no code with the package."""
    from types import SimpleNamespace

    return SimpleNamespace(read_map=read_map, soft_sphere=soft_sphere, shell_correlation=shell_correlation, shell_radii=shell_radii)
