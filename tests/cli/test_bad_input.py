"""What a person can get wrong: one line that says what was expected and what was found, exit code 2, nothing left behind."""

from __future__ import annotations

import shutil

import gemmi
import mrcfile
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the writer, when it is given NaN


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
    "resume of nothing": (lambda t: ["--resume"], "no run in "),
    # workers
    "GPUs that are not there": (lambda t: ["--gpus", "7"], "GPU 7 was asked for"),
    "GPU is a word": (lambda t: ["--gpus", "fast"], "fast"),
    # options
    "high-pass finer than low-pass": (lambda t: ["--highpass", 50, "--lowpass", 80], "--highpass 50"),
    "low-pass leaves nothing": (lambda t: ["--lowpass", 1000], "nothing"),
    "negative diameter": (lambda t: ["--particle-diameter", -5], "--particle-diameter"),
    "diameter is NaN": (lambda t: ["--particle-diameter", "nan"], "--particle-diameter"),
    "diameter of three voxels": (lambda t: ["--particle-diameter", 48], "--particle-diameter 48 A is 3 voxels (of 16 A)"),
    "diameter of few binned voxels": (
        lambda t: ["--particle-diameter", 100, "--binning", 1.25],
        "--particle-diameter 100 A is 5 voxels (of 16 A; 20 A by --binning 1.25): too few to tell orientations; expected at least 6 voxels, 120 A",
    ),
    "diameter beyond the box": (lambda t: ["--particle-diameter", 2000], "2000"),
    "binning below one": (lambda t: ["--binning", 0.5], "--binning"),
    "binning leaves nothing": (lambda t: ["--binning", 5], "--binning"),
    "binning is infinite": (lambda t: ["--binning", "inf"], "--binning"),
    "search reaches round": (lambda t: ["--angle-shells", 15, "--angle-increment", 20], "180"),
    "shifts beyond the box": (lambda t: ["--shift-range", 600], "--shift-range 600 A reaches beyond the box (+-160 A); expected at most 160"),
    "job file: shifts beyond the box": (lambda t: job_file(t, "shift_range_angst = 161\n"), "beyond the box (+-160 A)"),
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
    "job file: wrong kind": (lambda t: job_file(t, "iterations = 'two'\n"), "iterations expects a whole number"),
    "job file: flag is a number": (lambda t: job_file(t, "normalise = 1\n"), "normalise expects true or false"),
    "job file: number is a flag": (lambda t: job_file(t, "iterations = true\n"), "iterations expects a whole number"),
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
    assert len(errors[0]) < 1000
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


# --- found while working --------------------------------------------------------------------------------------------------------------------


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


SPOILED = {
    "constant": (lambda path: write_map(path, np.ones((20,) * 3)), "constant"),
    "all zero": (lambda path: write_map(path, np.zeros((20,) * 3)), "constant"),
    "NaN": (lambda path: write_map(path, np.full((20,) * 3, np.nan)), "not finite"),
    "one infinity": (lambda path: write_map(path, np.pad([[[np.inf]]], ((0, 19),) * 3)), "not finite"),
    "truncated": (truncate, "bytes"),
}


def run_it(invoke, tiny, *extra, command="align"):
    start = ["--reference", tiny.reference, "--iterations", 1] if command == "align" else []
    return invoke(command, tiny.list, "-o", tiny.folder.parent / "run", "--particle-diameter", 200, *start, *extra)


@pytest.mark.parametrize("command", ["align", "average"])
@pytest.mark.parametrize("case", SPOILED)
def test_unusable_particle_is_left_out_and_listed(case, command, tiny, invoke, request):
    with_report = command == "average" and case in ("constant", "truncated")
    if not with_report:
        request.getfixturevalue("no_report")
    spoil, reason = SPOILED[case]
    spoil(particle(tiny, 4))
    result = run_it(invoke, tiny, command=command)
    assert result.exit_code == 0, result.output
    run = tiny.folder.parent / "run"
    assert "Left out: 1 particle that cannot be used" in result.stdout
    for name in ["summary.json", *["report.html"] * with_report]:
        listed = (run / name).read_text()
        assert particle(tiny, 4).name in listed and reason in listed
    assert particle(tiny, 4).name in (run / "log.txt").read_text()
    block = gemmi.cif.read(str(run / "particles.star")).find_block("particles")
    assert len(block.find_values("_rlnImageName")) == 12  # nobody disappears from the list
    for label, last in (("_ngScore", min), ("_ngAngleSigmaDeg", max), ("_ngShiftSigmaAngst", max)) if command == "align" else ():
        values = [float(value) for value in block.find_values(label)]
        assert values[4] == last(values), label
    for name in ("half1", "half2", "average"):
        with mrcfile.open(run / f"{name}.mrc") as file:
            assert np.isfinite(file.data).all() and file.data.std() > 0


def test_result_is_that_of_a_list_without_the_unusable_particle(tiny, invoke, no_report):
    write_map(particle(tiny, 4), np.zeros((20,) * 3))
    assert run_it(invoke, tiny).exit_code == 0
    with_it = mrcfile.read(tiny.folder.parent / "run" / "average.mrc")
    lines = tiny.list.read_text().splitlines()
    tiny.list.write_text("\n".join(line for line in lines if particle(tiny, 4).name not in line) + "\n")
    shutil.rmtree(tiny.folder.parent / "run")
    assert run_it(invoke, tiny).exit_code == 0
    without = mrcfile.read(tiny.folder.parent / "run" / "average.mrc")
    assert np.abs(with_it - without).max() < 1e-3 * without.std()


@pytest.mark.parametrize("command", ["align", "average"])
def test_too_many_unusable_particles(command, tiny, invoke):
    for index in range(4):
        write_map(particle(tiny, index), np.ones((20,) * 3))
    result = run_it(invoke, tiny, command=command)
    one_line(result, "4 particles", "at most 3", "--max-bad", particle(tiny, 0).name, "constant")
    run = tiny.folder.parent / "run"
    log = (run / "log.txt").read_text()
    assert "Traceback" not in log and "stopped by an error: 4 particles cannot be used" in log
    assert not list(run.glob("*.mrc")) and not (run / "particles.star").exists()


def test_max_bad_tolerates_more_and_less(tiny, invoke, no_report):
    for index in range(4):
        write_map(particle(tiny, index), np.ones((20,) * 3))
    assert run_it(invoke, tiny, "--max-bad", 4).exit_code == 0
    shutil.rmtree(tiny.folder.parent / "run")
    for index in range(1, 4):
        shutil.copy(particle(tiny, 8), particle(tiny, index))
    one_line(run_it(invoke, tiny, "--max-bad", 0), "1 particle cannot", "at most 0")


def test_half_of_which_nothing_is_left(tiny, invoke):
    for index in range(0, 12, 2):
        write_map(particle(tiny, index), np.ones((20,) * 3))
    one_line(run_it(invoke, tiny, "--max-bad", 12), "half-set", "expected at least 2")
    one_line(run_it(lambda *words: invoke(*[str(w).replace("/run", "/run2") for w in words]), tiny, "--max-bad", 12, command="average"), "half-set")


def test_all_unusable(tiny, invoke):
    for index in range(12):
        write_map(particle(tiny, index), np.ones((20,) * 3))
    one_line(run_it(invoke, tiny, "--max-bad", 12), "particle")


def test_particle_that_vanishes_during_the_run(tiny, invoke, monkeypatch, no_report):
    from numba_glocal.cli import align

    def vanish(settings, *rest):
        job = prepare(settings, *rest)
        particle(tiny, 2).unlink()
        return job

    prepare = align.prepare_job
    monkeypatch.setattr(align, "prepare_job", vanish)
    result = run_it(invoke, tiny)
    assert result.exit_code == 0 and "Left out: 1 particle " in result.stdout


@pytest.mark.parametrize("command", ["align", "average"])
@pytest.mark.parametrize(
    ("case", "make", "expected"),
    [
        ("zero", lambda: np.zeros((20,) * 3), "wedge"),
        ("nothing in the band", lambda: np.pad(np.ones((1, 1, 1)), ((0, 19),) * 3), "wedge"),
        ("NaN", lambda: np.full((20,) * 3, np.nan), "finite"),
        ("another box", lambda: np.ones((24,) * 3), "24"),
        ("a slab", lambda: np.ones((20, 20, 7)), "20"),
    ],
)
def test_weight_volume_that_cannot_be_one(case, make, expected, command, tiny, invoke):
    write_map(weight(tiny), make())
    result = run_it(invoke, tiny, command=command)
    one_line(result, weight(tiny).name, expected)


def test_inverted_contrast_is_refused_with_the_hint(tiny, invoke, no_report):
    """And the hint works as it stands: the same command with the option, into the same folder."""
    for path in sorted((tiny.folder / "subtomo").glob("p*.mrc")):
        write_map(path, -mrcfile.read(path))
    run = tiny.folder.parent / "run"
    one_line(run_it(invoke, tiny), "contrast", "--invert-contrast", tiny.reference.name)
    assert "the contrast is inverted" in (run / "log.txt").read_text()
    result = run_it(invoke, tiny, "--invert-contrast")
    assert result.exit_code == 0 and f"{run} holds a run that finished no iteration; it is replaced" in result.stderr
    assert "the contrast is inverted" not in (run / "log.txt").read_text()
    in_place = (run / "particles.star").read_bytes()
    one_line(run_it(invoke, tiny, "--invert-contrast"), "not empty", "--resume goes on")
    shutil.rmtree(run)
    assert run_it(invoke, tiny, "--invert-contrast").exit_code == 0
    assert (run / "particles.star").read_bytes() == in_place


@pytest.mark.parametrize("command", ["align", "average"])
def test_only_what_a_run_left_is_replaced(command, tiny, invoke, no_report):
    """A stranger's file, a finished iteration, results, or an input in the folder: nothing is touched."""
    for index in range(4):
        write_map(particle(tiny, index), np.ones((20,) * 3))
    run = tiny.folder.parent / "run"
    one_line(run_it(invoke, tiny, command=command), "--max-bad")
    for name in ("notes.txt", "summary.json", "average.mrc", "iter_001/state.npz", "iter_000/mine.txt", "iter_002/half1.mrc"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("")
        before = everything_in(run)
        result = run_it(invoke, tiny, "--max-bad", 4, command=command)
        assert result.exit_code == 2 and everything_in(run) == before, name
        (run / name).unlink()
        if not list((run / name).parent.iterdir()):
            (run / name).parent.rmdir()
    (run / "iter_000").mkdir(exist_ok=True)
    write_map(run / "iter_000" / "average.mrc", np.pad(np.ones((8,) * 3), 6))
    one_line(run_it(invoke, tiny, "--mask", run / "iter_000" / "average.mrc", "--max-bad", 4, command=command), "is an input")
    result = run_it(invoke, tiny, "--max-bad", 4, command=command)
    assert result.exit_code == 0 and "it is replaced" in result.stderr and not (run / "iter_000" / "average.mrc").exists()


def test_needless_inversion_is_refused_too(tiny, invoke):
    one_line(run_it(invoke, tiny, "--invert-contrast"), "leave out --invert-contrast")


ABSURD = [
    ("--shift-range", 1e6),
    ("--shift-range", 1e-6),
    ("--max-shift", 1e-6),
    ("--max-shift", 1e9),
    ("--initial-lowpass", 1e9),
    ("--initial-lowpass", 1e-3),
    ("--particle-diameter", 1e-3),
    ("--particle-diameter", 550),
    ("--soft-edge", 1e9),
    ("--soft-edge", 0),
    ("--pixel-size", 1e-9),
    ("--pixel-size", 1e9),
    ("--highpass", 1e9),
    ("--highpass", 40),
    ("--lowpass", 1e-9),
    ("--angle-increment", 1e-6),
    ("--angle-increment", 59),
    ("--angle-shells", 0),
    ("--fsc-criterion", 1e-9),
    ("--fsc-criterion", 0.999999),
    ("--binning", 2.5),
    ("--cache-gib", 1e-9),
    ("--cache-gib", 1e9),
    ("--max-bad", 10**12),
    ("--subset", 10**9),
    ("--seed", 10**30),
]


@pytest.mark.parametrize(("option", "value"), ABSURD)
def test_absurd_numbers_work_or_are_refused(option, value, tiny, invoke, no_report):
    """No traceback, no hour of work: an answer or one line."""
    diameter = [] if option == "--particle-diameter" else ["--particle-diameter", 200]
    run = tiny.folder.parent / "run"
    result = invoke("align", tiny.list, "-o", run, "--reference", tiny.reference, "--iterations", 1, *diameter, option, value)
    if result.exit_code:
        one_line(result, f"{value:g} A" if option == "--pixel-size" else option)
    else:
        assert all(np.isfinite(mrcfile.read(run / f"half{i}.mrc")).all() for i in (1, 2))
        assert "nan" not in result.output.lower()
