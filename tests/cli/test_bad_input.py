"""What a person can get wrong: one line that says what was expected and what was found, exit code 2, nothing left behind."""

from __future__ import annotations

import mrcfile
import numpy as np
import pytest


def write_map(path, data, pixel=16.0):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(np.asarray(data, np.float32))
        file.voxel_size = pixel
    return path


def particle(tiny, index):
    return sorted((tiny.folder / "subtomo").glob("p*.mrc"))[index]


def weight(tiny, index=0):
    return sorted(set((tiny.folder / "subtomo").glob("*.mrc")) - set((tiny.folder / "subtomo").glob("p*.mrc")))[index]


def drop_rows(tiny, keep):
    lines = tiny.list.read_text().splitlines()
    rows = [line for line in lines if "subtomo/" in line]
    tiny.list.write_text("\n".join(line for line in lines if line not in rows[keep:]) + "\n")


def set_column(tiny, label, values):
    values = iter(values)
    place = tiny.column(label)
    tiny.edit(lambda cells: [*cells[:place], next(values), *cells[place + 1 :]])


def job_file(tiny, text):
    path = tiny.folder / "job.toml"
    path.write_text(text)
    return ["--job", path]


def other_run(tiny):
    run = tiny.folder.parent / "run"
    run.mkdir()
    (run / "job.toml").write_text("particles = 'x'\n")
    return []


def file_in_the_way(tiny):
    (tiny.folder.parent / "run").write_text("mine")
    return []


# name -> (what is done to the set, returning further arguments; what the line must say)
REFUSED = {
    # the list
    "no list": (lambda t: t.list.unlink(), "start.star"),
    "a web page": (lambda t: t.list.write_text("<html><body>x</body></html>\n"), "not a STAR file"),
    "stray token": (lambda t: t.list.write_text(t.list.read_text().rstrip("\n") + " 9\n"), ":46: expected 14 columns, found 15"),
    "missing volume": (lambda t: particle(t, 3).unlink(), "1 of 12 particle volumes not found: subtomo/particle_00004.mrc; tried"),
    "missing weight": (lambda t: weight(t).unlink(), "1 of 1 weight volumes not found: subtomo/wedge.mrc; tried"),
    "no particles": (lambda t: drop_rows(t, 0), "start.star"),
    "three particles": (lambda t: drop_rows(t, 3), "at least 4"),
    "all in one half": (lambda t: set_column(t, "RandomSubset", [1] * 12), "--split particle"),
    "one particle in a half": (lambda t: set_column(t, "RandomSubset", [1] * 11 + [2]), "at least 2"),
    "half-set 3": (lambda t: set_column(t, "RandomSubset", [1, 2, 3] * 4), "3"),
    "angle is no number": (lambda t: set_column(t, "AngleRot", ["left"] * 12), "left"),
    "angle is NaN": (lambda t: set_column(t, "AngleRot", ["nan"] * 12), "nan"),
    "boxes differ": (lambda t: write_map(particle(t, 4), np.random.default_rng(0).normal(size=(24,) * 3)), "24"),
    # maps
    "no reference": (lambda t: t.reference.unlink(), "reference.mrc"),
    "reference of another box": (lambda t: write_map(t.reference, np.random.default_rng(0).normal(size=(24,) * 3)), "24, expected 20"),
    "constant reference": (lambda t: write_map(t.reference, np.ones((20,) * 3)), "constant"),
    "reference holds NaN": (lambda t: write_map(t.reference, np.full((20,) * 3, np.nan)), "not finite"),
    "reference is not cubic": (lambda t: write_map(t.reference, np.random.default_rng(0).normal(size=(20, 20, 24))), "20"),
    "mask of another box": (lambda t: ["--mask", write_map(t.folder / "m.mrc", np.ones((24,) * 3))], "24"),
    "empty mask": (lambda t: ["--mask", write_map(t.folder / "m.mrc", np.zeros((20,) * 3))], "empty"),
    "mask is a particle": (lambda t: ["--mask", particle(t, 0)], "mask"),
    "no mask": (lambda t: ["--mask", t.folder / "nothing.mrc"], "nothing.mrc"),
    "two masks": (lambda t: ["--mask", t.reference, "--spherical-mask"], "--spherical-mask"),
    # the run folder
    "folder of another run": (other_run, "not empty; expected a new folder"),
    "a file in the way": (file_in_the_way, "found a file"),
    "output is the list": (lambda t: ["-o", t.list], "input"),
    "output is the folder of the particles": (lambda t: ["-o", t.folder], "not empty"),
    "output is the reference": (lambda t: ["-o", t.reference], "input"),
    "resume of nothing": (lambda t: ["--resume"], "job.toml"),
    # workers
    "GPUs that are not there": (lambda t: ["--gpus", "7"], "GPU 7 was asked for"),
    "GPU is a word": (lambda t: ["--gpus", "fast"], "fast"),
    # options
    "high-pass finer than low-pass": (lambda t: ["--highpass", 50, "--lowpass", 80], "--highpass 50"),
    "low-pass leaves nothing": (lambda t: ["--lowpass", 1000], "nothing"),
    "negative diameter": (lambda t: ["--particle-diameter", -5], "--particle-diameter"),
    "diameter is NaN": (lambda t: ["--particle-diameter", "nan"], "--particle-diameter"),
    "diameter beyond the box": (lambda t: ["--particle-diameter", 2000], "2000"),
    "binning below one": (lambda t: ["--binning", 0.5], "--binning"),
    "binning leaves nothing": (lambda t: ["--binning", 5], "--binning"),
    "binning is infinite": (lambda t: ["--binning", "inf"], "--binning"),
    "search reaches round": (lambda t: ["--angle-shells", 15, "--angle-increment", 20], "180"),
    "negative shells": (lambda t: ["--angle-shells", -1], "--angle-shells"),
    "increment of nothing": (lambda t: ["--angle-increment", 0], "--angle-increment"),
    "no iterations": (lambda t: ["--iterations", 0], "--iterations"),
    "criterion above one": (lambda t: ["--fsc-criterion", 1.5], "--fsc-criterion"),
    "subset of one": (lambda t: ["--subset", 1], "--subset"),
    "negative max-bad": (lambda t: ["--max-bad", -1], "--max-bad"),
    "negative seed": (lambda t: ["--split", "particle", "--seed", -1], "--seed"),
    "a million workers": (lambda t: ["--cpu-procs", 1000000], "--cpu-procs"),
    "processes on no GPU": (lambda t: ["--gpus", "none", "--procs-per-gpu", 3], "--procs-per-gpu"),
    "processes in words": (lambda t: ["--procs-per-gpu", "many"], "many"),
    "no workers": (lambda t: ["--cpu-procs", 0], "--cpu-procs"),
    "negative soft edge": (lambda t: ["--soft-edge", -2], "--soft-edge"),
    "soft edge is NaN": (lambda t: ["--soft-edge", "nan"], "--soft-edge"),
    "pixel size of nothing": (lambda t: ["--pixel-size", 0], "--pixel-size"),
    "unknown score": (lambda t: ["--score", "best"], "best"),
    "a billion shells": (lambda t: ["--angle-shells", 40, "--angle-increment", 0.01], "--angle-shells"),
    "tilt range the wrong way": (lambda t: ["--tilt-range", 60, -60], "60"),
    # a job file
    "job file: unknown option": (lambda t: job_file(t, "particle = 'x'\n"), "'particle'"),
    "job file: wrong kind": (lambda t: job_file(t, "iterations = 'two'\n"), "iterations expects int"),
    "job file: flag is a number": (lambda t: job_file(t, "normalise = 1\n"), "normalise expects bool"),
    "job file: number is a flag": (lambda t: job_file(t, "iterations = true\n"), "iterations expects int"),
    "job file: three tilts": (lambda t: job_file(t, "tilt_range_deg = [1.0, 2.0, 3.0]\n"), "tilt_range_deg"),
    "job file: words for tilts": (lambda t: job_file(t, "tilt_range_deg = ['a', 'b']\n"), "tilt_range_deg"),
    "job file: not TOML": (lambda t: job_file(t, "iterations: 2\n"), "TOML"),
    "job file: not there": (lambda t: ["--job", t.folder / "none.toml"], "none.toml"),
}


def everything_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(result, *expected):
    """Exit code 2, no traceback; after the plan and its warnings one line, with the words expected."""
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    # click's own refusals of an option come with the usage before them
    assert lines[-1].startswith(("numba-glocal: error: ", "Error: ")), result.stderr
    errors = [line for line in lines if line.startswith(("numba-glocal: error", "Error:"))]
    assert len(errors) == 1
    assert len(errors[0]) < 600
    for word in expected:
        assert word in errors[0], errors[0]


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_work(case, tiny, invoke):
    spoil, expected = REFUSED[case]
    extra = spoil(tiny)
    extra = extra if isinstance(extra, list) else []
    output = tiny.folder.parent / "run"
    before = everything_in(tiny.folder.parent)
    defaults = {"-o": output, "--reference": tiny.reference, "--particle-diameter": 200, "--iterations": 1}
    options = [word for option, value in defaults.items() if option not in extra for word in (option, value)]
    result = invoke("align", tiny.list, *options, *extra)
    one_line(result, expected)
    assert everything_in(tiny.folder.parent) == before


def test_nothing_given(invoke):
    one_line(invoke("align"), "PARTICLES")
    one_line(invoke("align", "x.star"), "-o")
