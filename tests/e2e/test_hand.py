"""The hand of a chiral object: particles of the built-in phantom against its map and against the mirror image of it (field case 31)."""

from __future__ import annotations

import json
import re

import mrcfile
import numpy as np
import pytest

from numba_glocal.errors import SettingsError
from numba_glocal.filters import mirrored
from numba_glocal.settings import AlignSettings
from numba_glocal.simulation import SimulationSettings, simulate


@pytest.fixture(scope="module")
def chiral(tmp_path_factory):
    made = simulate(tmp_path_factory.mktemp("chiral"), SimulationSettings(count=16, box_size=24, pixel_size_angst=12.0, snr=0.4, seed=3))
    other = made.reference.with_name("other_hand.mrc")
    data = mrcfile.read(made.reference)
    with mrcfile.new(other) as file:
        # x turned round: another plane than the one that --mirror takes
        file.set_data(np.roll(data[:, :, ::-1], 1, axis=2).copy())
        file.voxel_size = 12.0
    return made, other


def verdict(run):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (event,) = [e for e in events if e["event"] == "hand"]
    return event, re.search(r"hand: .*", (run / "log.txt").read_text())[0]


def test_the_better_hand_is_said(chiral, command, tmp_path):
    made, other = chiral
    options = ["--particle-diameter", 220, "--initial-lowpass", 40, "--iterations", 1, "--check-hand", "--cpu-procs", 2, "--shift-range", 20]
    done = command("align", made.start, "-o", tmp_path / "right", "--reference", made.reference, *options)
    event, line = verdict(tmp_path / "right")
    assert event["standard_errors"] > 3 and event["particles"] == 16 and "the hand of the start map" in line
    assert "hand of the start map" in done.stdout + done.stderr
    done = command("align", made.start, "-o", tmp_path / "wrong", "--reference", other, *options)
    event, line = verdict(tmp_path / "wrong")
    assert event["standard_errors"] < -3 and "OTHER hand" in line and "OTHER hand" in done.stdout + done.stderr
    # the report says both, the wrong one as a warning
    for run, words, warned in (("right", "the hand of the start map", False), ("wrong", "the OTHER hand", True)):
        page = (tmp_path / run / "report.html").read_text()
        (said,) = re.findall(rf"[^>]*particles have {words}[^<]*", page)
        assert "16 particles prefer" in said and (f'<p class="warn">{said}' in page) == warned
    # scores do not depend on which of the two is the given one
    command("align", made.start, "-o", tmp_path / "again", "--reference", other, "--mirror", *options)
    again, line = verdict(tmp_path / "again")
    assert again["standard_errors"] > 3 and again["as_given"] == pytest.approx(event["mirrored"], abs=1e-6)


def test_mirror_is_about_the_centre():
    for n in (6, 7):
        volume = np.zeros((n, n, n), np.float32)
        volume[n // 2 + 2, 1, 2] = 1
        assert np.argwhere(mirrored(volume)).tolist() == [[n // 2 - 2, 1, 2]]
        np.testing.assert_array_equal(mirrored(mirrored(volume)), volume)


def test_options_without_a_map_are_refused():
    with pytest.raises(SettingsError, match="--check-hand: .*--reference"):
        AlignSettings("a", "b", check_hand=True)
    with pytest.raises(SettingsError, match="--mirror: .*--reference, --mask"):
        AlignSettings("a", "b", mirror=True)
