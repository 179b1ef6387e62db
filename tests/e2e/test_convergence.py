"""--until-converged: ends a run that has nothing left to find, stopped and resumed or not, and says so."""

from __future__ import annotations

import json

import mrcfile
import numpy as np
import pytest

from numba_glocal.schedule import has_converged, has_settled

AT_MOST = 9


def record(angle=0.01, shift=0.01, resolution=20.0):
    return {
        "angle_change_deg": angle,
        "shift_change_angst": shift,
        "angle_sigma_deg": 0.1,
        "shift_sigma_angst": 0.1,
        "resolution_angst": resolution,
    }


def test_what_counts_as_settled():
    before = [record(resolution=25.0), record(resolution=20.0)]
    assert has_settled(record(), before)
    assert has_settled(record(resolution=22.0), before), "worse is not an improvement"
    assert has_settled(record(resolution=None), [record(resolution=None)])
    assert not has_settled(record(), []), "the first iteration has nothing to be compared with"
    assert not has_settled(record(angle=0.05), before)
    assert not has_settled(record(shift=0.05), before)
    assert not has_settled(record(resolution=19.0), before)
    assert not has_settled(record(resolution=19.0), [record(resolution=None)])


def test_two_in_succession():
    def history(*settled):
        return [record() | {"settled": value} for value in settled]

    assert has_converged(history(False, True, True))
    assert not has_converged(history(True, True, False))
    assert not has_converged(history(False, True))
    assert not has_converged([record(), record()]), "iterations of earlier versions say nothing"


@pytest.fixture(scope="module")
def converged(small, command, tmp_path_factory):
    run = tmp_path_factory.mktemp("converged") / "run"
    done = command(*arguments(small, run), "--iterations", AT_MOST, "--until-converged")
    return run, done.stdout


def arguments(small, run):
    return ["align", small.start, "-o", run, "--reference", small.reference, "--particle-diameter", 240]


def summary(run):
    return json.loads((run / "summary.json").read_text())


def test_stops_before_the_last_iteration(converged):
    run, said = converged
    facts = summary(run)
    count = len(facts["iterations"])
    assert facts["converged"] and 3 <= count < AT_MOST
    assert [entry["settled"] for entry in facts["iterations"]] == [False] * (count - 2) + [True] * 2
    for entry in facts["iterations"][-2:]:
        assert entry["angle_change_deg"] < 0.25 * entry["angle_sigma_deg"]
    assert f"Converged after {count} iterations" in said
    assert "the poses no longer moved" in (run / "report.html").read_text()


def test_resumed_it_stops_at_the_same_place(converged, small, command, tmp_path):
    run, again = converged[0], tmp_path / "run"
    command(*arguments(small, again), "--iterations", 2)
    command("align", "-o", again, "--resume", "--iterations", AT_MOST, "--until-converged")
    assert len(summary(again)["iterations"]) == len(summary(run)["iterations"])
    assert np.array_equal(mrcfile.read(run / "half1.mrc"), mrcfile.read(again / "half1.mrc"))


def test_a_converged_run_goes_on_only_when_told(converged, command):
    run, _ = converged
    count = len(summary(run)["iterations"])
    assert "--no-until-converged" in command("align", "-o", run, "--resume", code=2).stderr
    command("align", "-o", run, "--resume", "--no-until-converged", "--iterations", count + 1)
    assert len(summary(run)["iterations"]) == count + 1
