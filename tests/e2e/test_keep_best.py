"""Particles left out of averages by their score: aligned, listed, counted, and taken back when they are not to be left out any more."""

from __future__ import annotations

import json

import gemmi
import mrcfile
import numpy as np
import pytest

from numba_glocal.errors import SettingsError
from numba_glocal.schedule import best_of_each_half
from numba_glocal.settings import AlignSettings
from numba_glocal.simulation import SimulationSettings, simulate

BOX, PIXEL = 24, 14.0
JUNK = (1, 4, 8, 13, 18, 21)


@pytest.fixture(scope="module")
def with_junk(tmp_path_factory):
    """24 particles of which six are noise as strong as the others."""
    made = simulate(tmp_path_factory.mktemp("junk"), SimulationSettings(count=24, box_size=BOX, pixel_size_angst=PIXEL, snr=0.3, seed=5))
    rng = np.random.default_rng(1)
    for number, path in enumerate(sorted((made.start.parent / "subtomo").glob("particle_?????.mrc"))):
        if number in JUNK:
            with mrcfile.open(path, "r+") as file:
                noise = np.fft.fftn(rng.normal(size=file.data.shape))
                power = np.abs(np.fft.fftn(file.data))  # its own power at every frequency: only the phases say that it is junk
                file.set_data(np.fft.ifftn(power * noise / np.abs(noise)).real.astype(np.float32))
    return made


def column(path, label):
    block = gemmi.cif.read(str(path)).find_block("particles")
    return np.array([float(v) for v in block.find_values("_" + label)])


def settings(made):
    return {"reference": str(made.reference), "particle_diameter_angst": 230.0, "iterations": 2}


def test_junk_is_left_out_listed_and_taken_back(with_junk, align_here, command, tools, tmp_path):
    run = tmp_path / "run"
    options = ("--reference", with_junk.reference, "--particle-diameter", 230, "--iterations", 2, "--cpu-procs", 1)
    done = command("align", with_junk.start, "-o", run, *options, "--keep-best", 75)
    included = column(run / "particles.star", "ngIncluded")
    assert sorted(np.flatnonzero(included == 0)) == list(JUNK)
    # aligned and scored all the same
    assert np.isfinite(column(run / "particles.star", "ngScore")).all()
    assert (np.abs(column(run / "particles.star", "rlnAngleRot") - column(with_junk.start, "rlnAngleRot")) > 1e-3)[list(JUNK)].all()
    assert "Not in the averages, by --keep-best: 6 particles" in done.stdout and "9 + 9 particles" in done.stdout
    facts = json.loads((run / "summary.json").read_text())
    assert facts["used"] == 18 and facts["half_counts"] == [9, 9] and facts["iterations"][-1]["left_out"] == 6
    assert "6 particles left out of the averages (--keep-best 75)" in (run / "log.txt").read_text()
    assert "6 more were aligned and left out by score" in (run / "report.html").read_text()
    # the average is that of the others alone
    align_here(with_junk.start, tmp_path / "all", **settings(with_junk))
    truth, mask = tools.read_map(with_junk.reference), tools.soft_sphere(BOX, 8, 3)
    fsc = {name: tools.shell_correlation(tools.read_map(tmp_path / name / "average.mrc"), truth, mask)[3:9].mean() for name in ("run", "all")}
    assert fsc["run"] > fsc["all"] + 0.01
    # they come back when nothing is said any more, also in the list
    beside = with_junk.start.with_name("again.star")  # names of volumes are relative
    beside.write_bytes((run / "particles.star").read_bytes())
    align_here(beside, tmp_path / "again", **{**settings(with_junk), "iterations": 1})
    assert column(tmp_path / "again" / "particles.star", "ngIncluded").sum() == 24
    assert len(column(tmp_path / "all" / "particles.star", "ngIncluded")) == 24


def test_the_choice_is_made_anew_in_every_iteration_and_after_a_stop(with_junk, align_here, tmp_path):
    choice = {**settings(with_junk), "keep_best_percent": 75.0}
    align_here(with_junk.start, tmp_path / "straight", **choice)
    align_here(with_junk.start, tmp_path / "stopped", **{**choice, "iterations": 1})
    align_here(with_junk.start, tmp_path / "stopped", resume=True, **choice)
    for name in ("particles.star", "average.mrc", "half1.mrc"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes(), name
    for number in (1, 2):
        listed = tmp_path / "straight" / f"iter_{number:03d}" / "particles.star"
        included, scores, half = (column(listed, label) for label in ("ngIncluded", "ngScore", "rlnRandomSubset"))
        for h in (1, 2):
            mine = half == h
            assert included[mine].sum() == 9 and scores[mine & (included == 1)].min() > scores[mine & (included == 0)].max()


def test_the_best_of_each_half():
    scores = np.array([5.0, 1.0, np.nan, 4.0, 3.0, 2.0, 9.0, 8.0, 7.0])
    half = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2])
    assert best_of_each_half(scores, half, None) is None
    assert best_of_each_half(scores, half, 50.0).tolist() == [True, False, False, True, False, False, True, True, False]
    assert best_of_each_half(scores, half, 1.0).sum() == 4, "two of each half at least"
    assert best_of_each_half(scores, half, 100.0).tolist() == [True, True, False, *[True] * 6]
    # a class whose scores are all lower keeps its share
    scores, half, classes = np.array([9.0, 8.0, 7.0, 6.0, 4.0, 3.0, 2.0, 1.0]), np.ones(8, int), np.array([1, 1, 1, 1, 2, 2, 2, 2])
    assert best_of_each_half(scores, half, 50.0).tolist() == [True] * 4 + [False] * 4
    assert best_of_each_half(scores, half, 50.0, classes).tolist() == [True, True, False, False] * 2
    for percent in (0.0, 101.0, float("nan")):
        with pytest.raises(SettingsError, match="--keep-best: expected more than 0 and at most 100 percent"):
            AlignSettings("list.star", "run", keep_best_percent=percent)
