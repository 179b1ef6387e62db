"""The same bits whoever computes them: any number of workers, any executor, stopped and resumed, or with a worker lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import gemmi
import pytest

from numba_glocal.errors import SettingsError
from numba_glocal.results import RunFolder

RESULTS = ("half1.mrc", "half2.mrc", "average.mrc", "average_filtered.mrc", "particles.star", "fsc.star", "mask.mrc")


def options(small, iterations=2):
    return ["--reference", small.reference, "--particle-diameter", 200, "--initial-lowpass", 60, "--iterations", iterations]


def bits(run):
    """All results as bytes; a map's header holds the time it was written in its labels, which do not count."""
    found = {}
    for name in RESULTS:
        data = (Path(run) / name).read_bytes()
        found[name] = data if name.endswith("star") else data[:220] + data[1024:]
    return found


def same(one, other):
    return [name for name in RESULTS if bits(one)[name] != bits(other)[name]] == []


def events(run, kind):
    lines = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def no_workers_left(run):
    deadline = time.monotonic() + 10
    pids = [event["pid"] for kind in ("started", "replaced") for event in events(run, kind)]
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids and not any(map(is_alive, pids))


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(small, command, tmp_path_factory):
    """A run that nothing happened to: two workers."""
    run = tmp_path_factory.mktemp("whole") / "run"
    command("align", small.start, "-o", run, *options(small), "--cpu-procs", 2)
    assert no_workers_left(run)
    return run


def test_every_pass_over_a_particle_is_somebodys_work(whole):
    """The report's table of workers: all that was done was done by one of them."""
    summary = json.loads((whole / "summary.json").read_text())
    passes = sum(event["particles"] for event in events(whole, "stage")) + 3 * 22  # the first looks at noise and grey scale
    assert [worker["name"] for worker in summary["workers"]] == ["worker 0", "worker 1"]
    assert sum(worker["particles"] for worker in summary["workers"]) == passes
    assert all(0 < worker["busy_seconds"] < summary["wall_seconds"] for worker in summary["workers"])
    assert "busy seconds" in (whole / "report.html").read_text()


def settings(small, iterations=2):
    """The same options for the library."""
    return {
        "reference": str(small.reference),
        "particle_diameter_angst": 200.0,
        "initial_lowpass_angst": 60.0,
        "iterations": iterations,
    }


def test_killed_in_the_first_iteration(small, whole, command, start_command, tmp_path):
    """While it lives nobody else may work in its folder; once it is dead its lock is gone, and --resume begins again."""
    run = tmp_path / "run"
    process = start_command("align", small.start, "-o", run, *options(small), "--cpu-procs", 2)
    wait_for(lambda: (run / "events.jsonl").exists() and any("iteration 1" in line["title"] for line in events(run, "stage")), process)
    process.send_signal(signal.SIGSTOP)
    refused = command("align", "-o", run, "--resume", code=2).stderr.splitlines()
    assert len(refused) == 1 and f"process {process.pid} " in refused[0]
    process.kill()
    process.communicate()
    assert not list(run.glob("iter_*/state.npz"))
    assert "begins again" in command("align", "-o", run, "--resume").stderr
    assert same(whole, run)


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_number_of_workers(small, whole, align_here, tmp_path, workers):
    """0: no pool, everything in this process."""
    align_here(small.start, tmp_path / "run", workers, **settings(small))
    assert same(whole, tmp_path / "run")


@pytest.mark.parametrize(("particles", "workers"), [(11, 4), (4, 8)])
def test_few_particles_and_many_workers(small, align_here, tmp_path, particles, workers):
    lines = small.start.read_text().splitlines()
    rows = [i for i, line in enumerate(lines) if "subtomo/" in line]
    kept = small.start.parent / f"first_{particles}_{workers}.star"
    kept.write_text("\n".join(line for i, line in enumerate(lines) if i not in rows[particles:]) + "\n")
    job = align_here(kept, tmp_path / "run", workers, **settings(small, 1))
    assert len(job.particles) == particles
    written = gemmi.cif.read(str(tmp_path / "run" / "particles.star")).find_block("particles")
    scores = [float(v) for v in written.find_values("_ngScore")]
    assert len(scores) == particles and all(score > 0 for score in scores)


def test_resume_after_an_iteration(small, whole, align_here, tmp_path):
    run = tmp_path / "run"
    align_here(small.start, run, **settings(small, 1))
    align_here(small.start, run, resume=True, **settings(small, 2))
    assert same(whole, run)
    with pytest.raises(SettingsError, match="2 finished iterations.*--iterations"):
        align_here(small.start, run, resume=True, **settings(small, 1))


def test_ctrl_c_and_resume(small, whole, command, start_command, tmp_path):
    run = tmp_path / "run"
    process = start_command("align", small.start, "-o", run, *options(small))
    wait_for((run / "iter_001" / "state.npz").exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors and errors.splitlines()[-1].startswith("numba-glocal: interrupted")
    assert not (run / "iter_002" / "state.npz").exists() and not (run / "average.mrc").exists()
    assert no_workers_left(run)
    command("align", "-o", run, "--resume")
    assert same(whole, run)


def test_ctrl_c_while_the_workers_start(small, start_command, tmp_path):
    run = tmp_path / "run"
    # so many iterations that it is not over before the signal comes, however busy this machine is
    process = start_command("align", small.start, "-o", run, *options(small, 500))
    wait_for(lambda: (run / "events.jsonl").exists() and events(run, "started"), process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in errors
    assert [line for line in errors.splitlines() if "interrupted" in line] == errors.splitlines()[-1:]
    assert no_workers_left(run)


def test_killed_program(small, start_command, tmp_path):
    """kill -9 of the whole program: no worker stays behind, and the last finished iteration can be read."""
    run = tmp_path / "run"
    process = start_command("align", small.start, "-o", run, *options(small))
    wait_for((run / "iter_001" / "state.npz").exists, process)
    process.kill()
    process.communicate()
    assert no_workers_left(run)
    assert RunFolder(run).last_state().iteration == 1
    assert len(gemmi.cif.read(str(run / "iter_001" / "particles.star")).find_block("particles").find_values("_ngScore")) == 22


def test_killed_worker_is_replaced(small, whole, start_command, tmp_path):
    run = tmp_path / "run"
    process = start_command("align", small.start, "-o", run, *options(small), "--cpu-procs", 2)
    wait_for((run / "iter_000" / "reference2.npy").exists, process)
    os.kill(events(run, "ready")[0]["pid"], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert len(events(run, "died")) == 1 and len(events(run, "replaced")) == 1
    assert re.search(r"warning: worker \d: died .*(SIGKILL|signal 9)", errors)
    assert same(whole, run)


def test_run_stopped_between_its_last_iteration_and_its_end(small, whole, align_here, tmp_path):
    """Every iteration is there, the results at the top are not: --resume writes them."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in (*RESULTS, "summary.json", "report.html"):
        (run / name).unlink()
    align_here(small.start, run, resume=True, **settings(small))
    assert same(whole, run)


def test_job_file_of_a_run_reproduces_it(small, whole, command, tmp_path):
    command("align", "--job", whole / "job.toml", "-o", tmp_path / "run")
    assert same(whole, tmp_path / "run")


def test_other_halves_give_other_bits(small, whole, align_here, tmp_path):
    """The counterpart: `same` can tell two runs apart."""
    align_here(small.start, tmp_path / "run", **settings(small), split="particle", seed=3)
    assert not same(whole, tmp_path / "run")
