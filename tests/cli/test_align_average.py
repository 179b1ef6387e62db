"""What `align`, `average` and `report` print and leave behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import gemmi
import mrcfile
import numpy as np
import pytest
from scipy import ndimage

from numba_glocal.results import RunFolder

FINAL = {"particles.star", "half1.mrc", "half2.mrc", "average.mrc", "average_filtered.mrc", "mask.mrc", "fsc.star", "report.html"}
RECORD = {"job.toml", "provenance.json", "log.txt", "events.jsonl", "summary.json"}


@pytest.fixture
def align(tiny, invoke):
    def align(*extra, iterations=2):
        start = ["--reference", tiny.reference, "--particle-diameter", 200, "--iterations", iterations]
        return invoke("align", tiny.list, "-o", tiny.folder.parent / "run", *start, *extra)

    return align


def rows(text):
    """Names and values of the plan."""
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in text.splitlines() if re.match(r"  \S.*\s{2,}\S", line))


@pytest.mark.parametrize("command", ["align", "average"])
def test_dry_run_prints_the_plan_and_writes_nothing(command, tiny, invoke):
    before = sorted(tiny.folder.parent.rglob("*"))
    reference = ["--reference", tiny.reference] if command == "align" else []
    result = invoke(command, tiny.list, "-o", tiny.folder.parent / "run", "--dry-run", "--binning", 1.5, *reference)
    assert result.exit_code == 0 and result.stderr == ""
    plan = rows(result.stdout)
    assert plan["particles"] == "12 (6 + 6 in the half-sets)"
    assert plan["pixel size"] == "16 A, from list (rlnImagePixelSize)"
    assert plan["box"].startswith("20 voxels, binned to 13 (24.615 A")
    assert plan["particle diameter"].startswith("256 A, from 0.8 of the box")
    assert "GiB each" in plan["workers"] and plan["output"].endswith("run")
    if command == "align":
        assert plan["start map"] == str(tiny.reference) and "rotations" in plan["first search"] and plan["score"] == "ml"
    assert "nothing was written" in result.stdout
    assert sorted(tiny.folder.parent.rglob("*")) == before


def test_run_folder(tiny, align):
    result = align()
    run = tiny.folder.parent / "run"
    assert result.exit_code == 0, result.output
    names = {path.name for path in run.iterdir()}
    assert names >= FINAL | RECORD | {"iter_001", "iter_002"}
    assert {path.name for path in (run / "iter_001").iterdir()} >= {"particles.star", "half1.mrc", "half2.mrc", "fsc.star"}
    assert not list(run.rglob("*.part")) and not list(run.rglob("*.tmp"))
    # what it started from can be looked at: the reference without what is finer than 50 A, masked
    with mrcfile.open(run / "iter_000" / "start_map.mrc") as file:
        start, voxel = np.array(file.data), float(file.voxel_size.x)
    blurred = ndimage.gaussian_filter(mrcfile.read(tiny.reference), 1.0)
    inside = mrcfile.read(run / "mask.mrc") == 1
    assert voxel == pytest.approx(16.0) and start.max() > 0 and np.corrcoef(start[inside], blurred[inside])[0, 1] > 0.95
    assert not start[mrcfile.read(run / "mask.mrc") == 0].any()
    # every iteration says what it reached, and the log keeps it
    reached = [line for line in result.stderr.splitlines() if re.match(r"iteration \d: resolution [\d.]+ A", line)]
    assert len(reached) == 2 and all(line in (run / "log.txt").read_text() for line in reached)
    # what was printed is what was stored
    summary = json.loads((run / "summary.json").read_text())
    assert f"Resolution {summary['resolution_angst']:.1f} A" in result.stdout and "6 + 6 particles" in result.stdout
    assert len(summary["iterations"]) == 2 and summary["used"] == 12
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["packages"]["numpy"] == np.__version__ and provenance["commands"][0]["wall_seconds"] > 0
    assert tomllib.loads((run / "job.toml").read_text())["particle_diameter_angst"] == 200.0
    for line in (run / "events.jsonl").read_text().splitlines():
        json.loads(line)
    # maps: same grid, the pixel size of the list, the mean of the halves near the average
    maps = {}
    for name in ("half1", "half2", "average", "average_filtered", "mask"):
        with mrcfile.open(run / f"{name}.mrc") as file:
            assert float(file.voxel_size.x) == pytest.approx(16.0) and file.data.dtype == np.float32
            maps[name] = np.array(file.data)
    assert np.corrcoef((maps["half1"] + maps["half2"]).ravel(), maps["average"].ravel())[0, 1] > 0.95
    # the list: columns and their order as in the input, ours behind them, half-sets kept
    given, written = (gemmi.cif.read(str(path)).find_block("particles") for path in (tiny.list, run / "particles.star"))
    tags = [next(item.loop for item in block if item.loop is not None).tags for block in (given, written)]
    assert tags[1][: len(tags[0])] == tags[0]
    for label in ("_rlnImageName", "_rlnRandomSubset", "_rlnMicrographName", "_rlnCtfImage"):
        assert list(given.find_values(label)) == list(written.find_values(label))
    assert all(float(v) > 0 for label in ("_ngScore", "_ngAngleSigmaDeg", "_ngShiftSigmaAngst") for v in written.find_values(label))


def test_quiet_says_nothing(tiny, align):
    result = align("--quiet", "--initial-lowpass", 100, "--soft-edge", 3, iterations=1)
    assert result.exit_code == 0 and result.output == ""


def test_many_unusable_particles_are_no_flood(tiny, align, no_report):
    for index in range(1, 13):
        with mrcfile.open(tiny.folder / "subtomo" / f"particle_{index:05d}.mrc", "r+") as file:
            file.data[:] = 0
    result = align("--max-bad", 12, "--soft-edge", 3)
    warned = [line for line in result.stderr.splitlines() if "warning" in line]
    assert result.exit_code == 2 and len(warned) == 11 and "log.txt" in warned[-1]
    assert (tiny.folder.parent / "run" / "log.txt").read_text().count("is left out") == 12


def test_subset_takes_particles_of_each_half(tiny, align, no_report):
    tiny.edit(lambda cells: [*cells[:-1], "1" if cells[0] < "subtomo/particle_00009" else "2"])
    assert align("--subset", 3, iterations=1).exit_code == 0
    written = gemmi.cif.read(str(tiny.folder.parent / "run" / "particles.star")).find_block("particles")
    assert list(written.find_values("_rlnRandomSubset")) == ["1"] * 3 + ["2"] * 3
    assert list(written.find_values("_rlnImageName"))[0].endswith("particle_00001.mrc")


def test_command_line_wins_over_the_job_file(tiny, invoke, no_report):
    job = tiny.folder / "job.toml"
    job.write_text(f'particles = "{tiny.list}"\nreference = "{tiny.reference}"\niterations = 1\nscore = "ncc"\nparticle_diameter_angst = 200\n')
    run = tiny.folder.parent / "run"
    assert invoke("align", "--job", job, "-o", run, "--score", "flcf").exit_code == 0
    stored = tomllib.loads((run / "job.toml").read_text())
    assert (stored["score"], stored["iterations"], stored["particle_diameter_angst"]) == ("flcf", 1, 200.0)


def test_resume_refuses_another_science(tiny, align, invoke, no_report):
    assert align(iterations=1).exit_code == 0
    run = tiny.folder.parent / "run"
    result = invoke("align", "-o", run, "--resume", "--iterations", 2, "--score", "ncc")
    assert result.exit_code == 2 and "--resume: --score was ml in this run and cannot become ncc" in result.stderr
    for option, value, said in (("--mask", tiny.reference, "--mask was not given"), ("--gpu-precision", "half", "--gpu-precision was not given")):
        result = invoke("align", "-o", run, "--resume", "--iterations", 2, option, value)
        assert result.exit_code == 2 and f"{said} in this run and cannot become {value}" in result.stderr
    assert invoke("align", "-o", run, "--resume", "--iterations", 2, "--gpu-precision", "AUTO", "--dry-run").exit_code == 0  # what it was
    result = invoke("align", tiny.folder / "truth.star", "-o", run, "--resume", "--iterations", 2)
    assert result.exit_code == 2 and "truth.star" in result.stderr
    tiny.list.write_text((tiny.folder / "truth.star").read_text())
    result = invoke("align", "-o", run, "--resume", "--iterations", 2)
    assert result.exit_code == 2 and "list has changed" in result.stderr and "start.star" in result.stderr


def test_resume_refuses_halves_that_would_mix(tiny, align, invoke, no_report):
    """An edited job file or list must not move particles from one half to the other in the middle of a run."""
    assert align(iterations=1).exit_code == 0
    run, job = tiny.folder.parent / "run", tiny.folder.parent / "run" / "job.toml"
    before = job.read_text()
    for old, new, word in (('split = "file"', 'split = "particle"', "half-sets"), ("binning = 1.0", "binning = 1.5", "--binning")):
        assert old in before
        job.write_text(before.replace(old, new))
        result = invoke("align", "-o", run, "--resume", "--iterations", 2)
        assert result.exit_code == 2 and word in result.stderr and not (run / "iter_002").exists()


def test_resume_may_ask_for_fewer_iterations_than_before(tiny, align, invoke, no_report):
    """A run of 3 that was stopped after 2, and is to end there."""
    assert align(iterations=3).exit_code == 0
    run, whole = tiny.folder.parent / "run", tiny.folder.parent / "whole"
    shutil.rmtree(run / "iter_003")
    for name in (*FINAL, "summary.json"):
        (run / name).unlink(missing_ok=True)
    assert invoke("align", "-o", run, "--resume", "--iterations", 2).exit_code == 0
    start = ["--reference", tiny.reference, "--particle-diameter", 200]
    assert invoke("align", tiny.list, "-o", whole, *start, "--iterations", 2).exit_code == 0
    for name in ("average.mrc", "half1.mrc"):
        assert np.array_equal(*(mrcfile.read(folder / name) for folder in (run, whole)))
    assert (run / "particles.star").read_bytes() == (whole / "particles.star").read_bytes()


def test_an_extended_run_stopped_at_its_end_is_finished_by_resume(tiny, align, invoke, no_report):
    """More iterations for a finished run, stopped between the last of them and the results: those are not left as they were."""
    assert align(iterations=1).exit_code == 0
    run = tiny.folder.parent / "run"
    old = {name: (run / name).read_bytes() for name in ("particles.star", "summary.json")}
    assert invoke("align", "-o", run, "--resume", "--iterations", 2).exit_code == 0
    new = (run / "particles.star").read_bytes()
    for name, data in old.items():
        (run / name).write_bytes(data)
    assert invoke("align", "-o", run, "--resume").exit_code == 0
    assert (run / "particles.star").read_bytes() == new != old["particles.star"]
    for more in ([], ["--iterations", 1], ["--dry-run"]):  # before anything is planned or started
        result = invoke("align", "-o", run, "--resume", *more)
        assert result.exit_code == 2 and "already has 2" in result.stderr and result.stdout == "" and len(result.stderr.splitlines()) == 1


def test_resume_from_another_folder(tiny, invoke, no_report, monkeypatch):
    """Names in job.toml are meant from where the run was started."""
    monkeypatch.chdir(tiny.folder)
    start = ["--reference", "reference.mrc", "--particle-diameter", 200, "--iterations", 1]
    assert invoke("align", "start.star", "-o", "../run", *start).exit_code == 0
    monkeypatch.chdir(tiny.folder.parent)
    for iterations in (2, 3):  # the second time the run has been in both folders
        result = invoke("align", "-o", "run", "--resume", "--iterations", iterations)
        assert result.exit_code == 0, result.output


def test_a_resumed_run_is_reported_whole(tiny, align, invoke, monkeypatch):
    """Time, workers and commands of all its legs, of one that was interrupted too; what a killed one took is not known."""
    run = tiny.folder.parent / "run"

    def provenance():
        return json.loads((run / "provenance.json").read_text())

    monkeypatch.setattr(sys, "argv", ["numba-glocal", "first"])
    assert align(iterations=1).exit_code == 0
    monkeypatch.setattr(sys, "argv", ["numba-glocal", "second"])
    with monkeypatch.context() as stopping:
        stopping.setattr(RunFolder, "write_particles", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert invoke("align", "-o", run, "--resume", "--iterations", 3).exit_code == 130
    log = (run / "log.txt").read_text()
    assert "interrupted" in log.splitlines()[-1] and "Traceback" not in log
    stored = provenance()
    assert [leg["command"] for leg in stored["commands"]] == ["numba-glocal first", "numba-glocal second"]
    assert all(leg["wall_seconds"] > 0 for leg in stored["commands"])
    for number, leg in enumerate(stored["commands"]):  # made up, to add in the head; workers as a pool would have told
        leg |= {"wall_seconds": (1000.0, 200.0)[number], "workers": [{"name": "worker 0", "device": "CPU", "particles": 7, "busy_seconds": 5.0}]}
    stored["commands"].append({"command": "numba-glocal killed", "date": "then", "wall_seconds": None, "workers": []})
    (run / "provenance.json").write_text(json.dumps(stored))
    result = invoke("align", "-o", run, "--resume", "--iterations", 2)
    assert result.exit_code == 0, result.output
    last = provenance()["commands"][-1]["wall_seconds"]
    summary = json.loads((run / "summary.json").read_text())
    assert 0 < last < 200 and summary["wall_seconds"] == pytest.approx(1200 + last) and summary["resumed"] == 3
    assert summary["workers"] == [{"name": "worker 0", "device": "CPU", "particles": 14, "busy_seconds": 10.0}]
    assert f"({1200 + last:.1f} s in all, resumed 3 times)" in result.stdout
    page = (run / "report.html").read_text()
    for words in ("20 min", "resumed 3 times", "numba-glocal first", "1000.0 s)", "killed (then, killed)"):
        assert words in page, words


@pytest.fixture
def holding():
    """Holds a lock on a file, in a process of its own and without our code."""
    lines = ("import fcntl, sys", "f = open(sys.argv[1], 'w')", "fcntl.flock(f, fcntl.LOCK_EX)", "f.write(sys.argv[2])", "f.flush()")
    script = "\n".join((*lines, "print('held', flush=True)", "sys.stdin.read()"))
    processes = []

    def holding(path, says):
        process = subprocess.Popen([sys.executable, "-c", script, path, says], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield holding
    for process in processes:
        process.kill()
        process.wait()


def test_a_live_run_is_not_resumed(tiny, align, invoke, holding, no_report):
    assert align(iterations=1).exit_code == 0
    run = tiny.folder.parent / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    other = holding(run / ".lock", "process 4711 on node7")
    result = invoke("align", "-o", run, "--resume", "--iterations", 2)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert "another run is at work" in result.stderr and "process 4711 on node7" in result.stderr
    assert {path: path.read_bytes() for path in before} == before and not (run / "iter_002").exists()
    other.kill()
    other.wait()
    assert invoke("align", "-o", run, "--resume", "--iterations", 2).exit_code == 0  # what it wrote into the lock file does not matter


@pytest.mark.parametrize("command", ["align", "average"])
def test_a_folder_is_held_for_the_life_of_a_run(command, tiny, invoke, no_report, monkeypatch):
    run, seen = tiny.folder.parent / "run", []
    write = RunFolder.write_final

    def look(folder, *arguments):
        with open(run / ".lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append((run / ".lock").read_text())
        return write(folder, *arguments)

    monkeypatch.setattr(RunFolder, "write_final", look)
    extra = ["--reference", tiny.reference, "--iterations", 1] if command == "align" else []
    assert invoke(command, tiny.list, "-o", run, "--particle-diameter", 200, *extra).exit_code == 0
    assert len(seen) == 1 and str(os.getpid()) in seen[0]
    with open(run / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_resume_of_a_run_without_a_finished_iteration_begins_again(tiny, align, invoke, no_report):
    assert align(iterations=1).exit_code == 0
    run = tiny.folder.parent / "run"
    whole = (run / "particles.star").read_bytes()
    (run / "iter_001" / "state.npz").unlink()
    for name in (*FINAL, "summary.json"):
        (run / name).unlink(missing_ok=True)
    (run / "iter_000" / "reference1.npy").write_bytes(b"half of it")
    before = sorted(run.rglob("*"))
    result = invoke("align", "-o", run, "--resume", "--dry-run")
    assert result.exit_code == 0 and "begins again" in result.stderr and sorted(run.rglob("*")) == before
    result = invoke("align", "-o", run, "--resume", "--score", "ncc")
    assert result.exit_code == 2 and "cannot become ncc" in result.stderr
    result = invoke("align", "-o", run, "--resume")
    assert result.exit_code == 0 and "begins again" in result.stderr and "begins again" in (run / "log.txt").read_text()
    assert (run / "particles.star").read_bytes() == whole


def test_every_shift_at_its_limit(tiny, align):
    """All alike but for rounding: still a run with a report."""
    result = align("--max-shift", 1e-3, iterations=1)
    assert result.exit_code == 0 and (tiny.folder.parent / "run" / "report.html").exists(), result.output


def test_a_position_found_outside_its_box_is_said(tiny, align, no_report):
    """A particle cut by an edge of its box: 155 A of 160 A is within, so nothing is said before the search, which finds it at 176 A."""
    place, volume = tiny.column("OriginXAngst"), tiny.folder / "subtomo" / "particle_00003.mrc"
    tiny.edit(lambda cells: [*cells[:place], "155", *cells[place + 1 :]] if volume.name in " ".join(cells) else cells)
    with mrcfile.open(volume, "r+") as file:
        file.set_data(np.roll(file.data, -11, 2))
    result = align("--shift-range", 100, iterations=1)
    assert result.exit_code == 0, result.output
    run = tiny.folder.parent / "run"
    block = gemmi.cif.read(str(run / "particles.star")).find_block("particles")
    shifts = np.stack([[float(v) for v in block.find_values(f"_rlnOrigin{axis}Angst")] for axis in "XYZ"], 1)
    outside = int((np.linalg.norm(shifts, axis=1) > 160).sum())
    said = [line for line in json.loads((run / "summary.json").read_text())["warnings"] if "half a box" in line]
    assert outside and [line.split(" farther")[0] for line in said] == [f"{outside} of 12 particles were found"]


def test_average_does_not_call_itself_align(tiny, invoke, no_report):
    assert invoke("average", tiny.list, "-o", tiny.folder.parent / "run").exit_code == 0
    run = tiny.folder.parent / "run"
    assert "align" not in (run / "job.toml").read_text().splitlines()[0]
    log = (run / "log.txt").read_text()
    assert "average: " in log and "6 + 6 particles" in log and re.search(r"resolution [\d.]+ A at FSC 0.143, done in", log)


def test_the_job_file_runs_again_as_its_comment_says(tiny, align, invoke, no_report):
    assert align(iterations=1).exit_code == 0
    run, other = tiny.folder.parent / "run", tiny.folder.parent / "other"
    command = re.search(r"`numba-glocal (.*)`", (run / "job.toml").read_text().splitlines()[0]).group(1)
    words = [{"THIS_FILE": run / "job.toml", "NEW_FOLDER": other}.get(word, word) for word in command.split()]
    assert invoke(*words).exit_code == 0
    assert (other / "particles.star").read_bytes() == (run / "particles.star").read_bytes()


def test_start_from_the_given_poses(tiny, invoke, no_report):
    """Without --reference the halves start from their own averages."""
    result = invoke("align", tiny.folder / "truth.star", "-o", tiny.folder.parent / "run", "--iterations", 1, "--particle-diameter", 200)
    assert result.exit_code == 0, result.output
    references = [np.load(tiny.folder.parent / "run" / "iter_000" / f"reference{half}.npy") for half in (1, 2)]
    assert not np.allclose(*references)
    assert sorted(path.name for path in (tiny.folder.parent / "run" / "iter_000").glob("start_map*")) == ["start_map1.mrc", "start_map2.mrc"]
    assert rows(result.stdout)["start map"] == "average of the given poses"


# --- the report -----------------------------------------------------------------------------------------------------------------------------


def test_report_is_one_file_with_the_facts(tiny, align, invoke):
    result = align()
    run = tiny.folder.parent / "run"
    page = (run / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page) and not re.search(r"url\(\s*['\"]?https?:", page) and "@import" not in page
    resolution = json.loads((run / "summary.json").read_text())["resolution_angst"]
    assert f"{resolution:g}\u00a0\u00c5" in page or f"{resolution:g} \u00c5" in page
    for word in ("particle_diameter_angst", "200", "start.star", "average_filtered.mrc", "reference.mrc", "ml"):
        assert word in page
    before = page
    (run / "report.html").unlink()
    result = invoke("report", run)
    assert result.exit_code == 0 and str(run / "report.html") in result.stdout
    assert (run / "report.html").read_text() == before


def test_report_of_no_run(tiny, invoke):
    result = invoke("report", tiny.folder)
    assert result.exit_code == 2 and "finished run" in result.stderr and len(result.stderr.splitlines()) == 1


# --- help -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["align", "average"])
def test_help_names_units_and_defaults(command, invoke):
    text = invoke(command, "--help").stdout
    for option in ("--mask", "--particle-diameter", "--pixel-size", "--binning", "--tilt-range", "--split", "--max-bad", "--dry-run", "--subset"):
        assert option in text
    words = " ".join(text.split())
    assert "[default: 0.143]" in words and "[default: 1" in words and "ANGSTROM" in words
