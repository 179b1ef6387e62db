"""Particles of two kinds: an object of blobs, and the same without one of them; classes from two maps, from one map at random, from the list."""

from __future__ import annotations

import json
import shutil

import gemmi
import mrcfile
import numpy as np
import pytest

from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Volume

BOX, PIXEL, EACH = 24, 12.0, 16
BLOBS = ((5.0, 0.0, 1.0), (-4.0, 3.0, -2.0), (0.0, -5.0, 3.0), (1.0, 4.0, 5.0), (-2.0, -2.0, -5.0))
USUAL = {"particle_diameter_angst": 220.0, "initial_lowpass_angst": 50.0, "iterations": 2, "angle_shells": 2, "angle_increment_deg": 5.0}


def blobs(places):
    z, y, x = np.indices((BOX,) * 3) - BOX // 2
    volume = sum(np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * 1.6**2)) for px, py, pz in places)
    return Volume(volume.astype(np.float32), PIXEL)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """One list of both kinds, in turn; half-sets hold as many of each."""
    folder = tmp_path_factory.mktemp("mixed")
    kinds = []
    for seed, (kind, places) in enumerate((("whole", BLOBS), ("less", BLOBS[:-1])), 3):
        made = simulate(folder / kind, SimulationSettings(count=EACH, box_size=BOX, pixel_size_angst=PIXEL, snr=0.1, seed=seed), blobs(places))
        lines = made.start.read_text().splitlines()
        kinds.append([line.replace("subtomo/", f"{kind}/subtomo/") for line in lines if "subtomo/" in line])
    head = [line for line in lines if "subtomo/" not in line and line.strip()]
    labels = [line.split()[0] for line in head[head.index("data_particles") :] if line.startswith("_rln")]
    place = labels.index("_rlnRandomSubset")
    rows = []
    for number, row in enumerate(row for pair in zip(*kinds, strict=True) for row in pair):
        cells = row.split()
        cells[place] = str(1 + (number // 2) % 2)
        rows.append(" ".join(cells))
    (folder / "start.star").write_text("\n".join([*head, *rows]) + "\n")
    with_classes = [*head, f"_rlnClassNumber #{len(labels) + 1}", *(f"{row} {1 + ('less/' in row)}" for row in rows)]
    (folder / "classes.star").write_text("\n".join(with_classes) + "\n")
    return folder


def column(run, label):
    return np.array([str(v) for v in gemmi.cif.read(str(run / "particles.star")).find_block("particles").find_values("_" + label)])


def right(run):
    """Share of the particles that are with their kind, by the better naming; the classes' names must be those of both halves."""
    kind = np.array(["less/" in name for name in column(run, "rlnImageName")])
    number = column(run, "ngClass").astype(int)
    assert set(number) == {1, 2}
    share = float(((number == 2) == kind).mean())
    return max(share, 1 - share)


def state_of(run):
    with np.load(sorted(run.glob("iter_*/state.npz"))[-1]) as stored:
        return {name: stored[name] for name in stored}


def bits(run):
    found = {"particles.star": (run / "particles.star").read_bytes()}
    for path in sorted(run.glob("class*/*")):
        data = path.read_bytes()
        found[str(path.relative_to(run))] = data if path.suffix == ".star" else data[:220] + data[1024:]  # labels hold the time
    return found


def two_maps(mixed):
    return {"reference": str(mixed / "whole" / "reference.mrc"), "further_references": (str(mixed / "less" / "reference.mrc"),)}


@pytest.fixture(scope="module")
def from_maps(mixed, command, tmp_path_factory):
    """By the command line, with two workers."""
    run = tmp_path_factory.mktemp("from_maps") / "run"
    maps = [word for kind in ("whole", "less") for word in ("--reference", mixed / kind / "reference.mrc")]
    options = "--particle-diameter 220 --iterations 2 --angle-shells 2 --angle-increment 5 --cpu-procs 2".split()
    done = command("align", mixed / "start.star", "-o", run, *maps, *options)
    (run / "words.txt").write_text(done.stdout + done.stderr)
    return run


@pytest.fixture(scope="module")
def at_random(mixed, align_here, tmp_path_factory):
    """From one map of the whole object, which tells nothing of classes."""
    run = tmp_path_factory.mktemp("at_random") / "run"
    align_here(mixed / "start.star", run, reference=two_maps(mixed)["reference"], classes=2, **USUAL)
    return run


def test_two_maps_tell_the_kinds_apart(mixed, from_maps, tools):
    assert right(from_maps) >= 0.95  # seen: 1.0
    kind = np.array(["less/" in name for name in column(from_maps, "rlnImageName")])
    assert ((column(from_maps, "ngClass").astype(int) == 2) == kind).mean() >= 0.95, "the first map is the first class"
    assert (column(from_maps, "rlnClassNumber") == column(from_maps, "ngClass")).all()
    assert (column(from_maps, "ngClassMargin").astype(float) > 0).mean() >= 0.95
    # what the averages differ in is the blob that is missing
    maps = [tools.read_map(from_maps / f"class{number}" / "average.mrc") for number in (1, 2)]
    middle = np.array(BLOBS[-1][::-1]) + BOX // 2
    at_blob = ((np.indices((BOX,) * 3) - middle[:, None, None, None]) ** 2).sum(0) < 2.0**2
    inside = tools.soft_sphere(BOX, 9, 1) > 0.5
    difference = maps[0] - maps[1]
    assert difference[at_blob].mean() > 5 * np.abs(difference[inside & ~at_blob]).mean()


def test_run_folder_summary_and_report(from_maps):
    names = {"half1.mrc", "half2.mrc", "average.mrc", "average_filtered.mrc", "fsc.star"}
    assert all({path.name for path in (from_maps / f"class{number}").iterdir()} == names for number in (1, 2))
    assert not (from_maps / "average.mrc").exists()
    state = state_of(from_maps)
    facts = json.loads(str(state["facts"]))
    record = facts["history"][-1]
    assert [entry["number"] for entry in record["classes"]] == [1, 2]
    assert sum(sum(entry["half_counts"]) for entry in record["classes"]) == 2 * EACH
    assert sum(entry["share"] for entry in record["classes"]) == pytest.approx(1.0)
    assert facts["history"][0]["class_change"] is None and 0 <= record["class_change"] < 0.2
    half = column(from_maps, "rlnRandomSubset").astype(int)
    number = column(from_maps, "ngClass").astype(int)
    assert record["classes"][0]["half_counts"] == [int(((number == 1) & (half == h)).sum()) for h in (1, 2)]
    summary = json.loads((from_maps / "summary.json").read_text())
    assert summary["classes"] == record["classes"] and summary["half_counts"] == [EACH, EACH]
    words = (from_maps / "words.txt").read_text()
    assert "2, each from its start map; hard assignment by log-likelihood" in words
    assert "Class 1 50 % (" in words and "class1 to class2 with maps and FSC, particles.star, report.html" in words
    page = (from_maps / "report.html").read_text()
    assert "sorted into 2 classes: class 1 holds 50 %" in page and "<h2>Classes</h2>" in page and "changed class" in page
    assert page.count("Fourier shell correlation of each class") == 1 and "class2/" in page


def test_same_bits_without_workers_and_resumed(mixed, from_maps, align_here, tmp_path):
    run = tmp_path / "run"
    align_here(mixed / "start.star", run, **two_maps(mixed), **{**USUAL, "iterations": 1})
    shutil.rmtree(run / "class1")
    align_here(mixed / "start.star", run, resume=True, **two_maps(mixed), **USUAL)
    assert bits(run) == bits(from_maps)


def test_random_classes_find_the_kinds(at_random):
    assert right(at_random) >= 0.9  # seen: 1.0
    events = [json.loads(line) for line in (at_random / "events.jsonl").read_text().splitlines()]
    begun = [event for event in events if event["event"] == "classes"]
    assert len(begun) == 1 and begun[0]["start"] == "random" and begun[0]["rounds"] >= 2
    first, second = (mrcfile.read(at_random / "iter_001" / f"class{number}_start_map.mrc") for number in (1, 2))
    assert np.abs(first - second).max() > 0.05 * first.max()


def test_random_classes_have_a_seed_and_survive_a_stop(mixed, at_random, align_here, tmp_path):
    """Stopped before its last iteration, as far as the folder tells; classes are drawn and searched for again, to the same bits."""
    again = tmp_path / "again"
    shutil.copytree(at_random, again)
    for path in (*again.glob("class*"), again / "iter_002", again / "particles.star"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in again.glob("iter_001/class*"):
        path.unlink()
    one_map = {"reference": two_maps(mixed)["reference"], "classes": 2}
    align_here(mixed / "start.star", again, resume=True, **one_map, **USUAL)
    assert bits(again) == bits(at_random)


def test_classes_of_the_list_are_where_it_starts(mixed, align_here, tmp_path):
    job = align_here(mixed / "classes.star", tmp_path / "run", reference=two_maps(mixed)["reference"], classes=2, **USUAL)
    assert any("start from the list's rlnClassNumber" in line for line in job.warnings)
    assert right(tmp_path / "run") >= 0.95
    assert (column(tmp_path / "run", "ngClass") == column(mixed_list(mixed), "rlnClassNumber")).mean() >= 0.95, "and keep their numbers"


def mixed_list(mixed):
    """A folder whose list is the one with classes."""
    folder = mixed / "as_run"
    folder.mkdir(exist_ok=True)
    shutil.copy(mixed / "classes.star", folder / "particles.star")
    return folder


def test_soft_classes(mixed, from_maps, align_here, tmp_path):
    """Probabilities that are next to 0 and 1 give the hard classes; their shares add up to 1."""
    run = tmp_path / "run"
    align_here(mixed / "start.star", run, class_assignment="soft", **two_maps(mixed), **USUAL)
    shares = state_of(run)["class_shares"]
    np.testing.assert_allclose(shares.sum(0), 1.0)
    assert right(run) >= 0.95
    margins = column(run, "ngClassMargin").astype(float)
    expected = 1.0 / (1.0 + np.exp(-margins))
    np.testing.assert_allclose(shares.max(0), np.where(expected > 0.999, 1.0, expected), atol=1e-3)


@pytest.mark.parametrize("start", ["maps", "random"])
def test_the_best_of_each_class_and_half(mixed, command, align_here, tmp_path, start):
    """Left out of the maps and not of the list; each class keeps its share, though the scores of the kind with less mass are lower."""
    run = tmp_path / "run"
    if start == "maps":
        maps = [word for kind in ("whole", "less") for word in ("--reference", mixed / kind / "reference.mrc")]
        options = "--particle-diameter 220 --iterations 2 --angle-shells 2 --angle-increment 5 --cpu-procs 1 --keep-best 75".split()
        done = command("align", mixed / "start.star", "-o", run, *maps, *options)
        summary = json.loads((run / "summary.json").read_text())
        assert "Not in the averages, by --keep-best: 8 particles" in done.stdout and "12 + 12 particles" in done.stdout
        assert summary["used"] == 24 and summary["iterations"][-1]["left_out"] == 8
        assert "8 particles left out of the averages (--keep-best 75, of each class and half-set)" in (run / "log.txt").read_text()
        assert "8 more were aligned and left out by score" in (run / "report.html").read_text()
    else:
        align_here(mixed / "start.star", run, reference=two_maps(mixed)["reference"], classes=2, keep_best_percent=75.0, **USUAL)
    assert right(run) >= 0.9
    included, scores = column(run, "ngIncluded").astype(int), column(run, "ngScore").astype(float)
    half, number = column(run, "rlnRandomSubset").astype(int), column(run, "ngClass").astype(int)
    record = json.loads(str(state_of(run)["facts"]))["history"][-1]
    for c in (1, 2):
        for h in (1, 2):
            mine = (number == c) & (half == h)
            assert included[mine].sum() == np.ceil(0.75 * mine.sum()) == record["classes"][c - 1]["half_counts"][h - 1]
            assert scores[mine & (included == 1)].min() > scores[mine & (included == 0)].max()
