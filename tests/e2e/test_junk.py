"""Particles that are none, among some that are: what tells them, and what they cost."""

from __future__ import annotations

import subprocess
import sys

import gemmi
import numpy as np
import pytest

from .conftest import environment

JUNK = 12


@pytest.fixture(scope="module")
def mixed(planted, shared, tmp_path_factory):
    """A list of 28 planted particles with 12 of noise alone among them, from the same independent simulator; and one of the 28."""
    folder = tmp_path_factory.mktemp("mixed")
    tool, source = shared / "tools" / "make_dataset.py", shared / "data" / "maps" / "ribo.em"
    options = f"--scale 2.0833333 --invert --n {JUNK} --box 48 --angpix 9.0667 --snr 1e-8 --ctf --seed 9".split()
    subprocess.run([sys.executable, tool, folder / "noise", "--map", source, *options], check=True, env=environment())

    def rows(start):
        return [line.replace("subtomo/", f"{start.parent}/subtomo/") for line in start.read_text().splitlines() if "subtomo/" in line]

    head = [line for line in (planted / "start.star").read_text().splitlines() if "subtomo/" not in line]
    good, bad = rows(planted / "start.star")[: 40 - JUNK], rows(folder / "noise" / "start.star")
    (folder / "mixed.star").write_text("\n".join([*head, *good[:10], *bad, *good[10:]]) + "\n")
    (folder / "clean.star").write_text("\n".join([*head, *good]) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(mixed, planted, align_here, tmp_path_factory):
    """Both lists aligned."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("mixed", "clean"):
        align_here(mixed / f"{name}.star", folder / name, reference=str(planted / "truth.mrc"), particle_diameter_angst=360.0, iterations=2)
    return folder


def column(run, label):
    return np.array([float(v) for v in gemmi.cif.read(str(run / "particles.star")).find_block("particles").find_values(label)])


def is_junk():
    return np.isin(np.arange(40), np.arange(10, 10 + JUNK))


def area_under_curve(scores, junk):
    """Chance that a particle scores above one that is none."""
    return float(np.mean(scores[~junk][:, None] > scores[junk][None]))


def test_junk_is_ranked_last(runs):
    junk = is_junk()
    for label in ("_ngScore", "_rlnLogLikeliContribution"):
        assert area_under_curve(column(runs / "mixed", label), junk) >= 0.98
    # the score is a likelihood against no particle at all: nothing speaks for those of noise, everything for the others
    score = column(runs / "mixed", "_ngScore")
    assert (score[junk] < 0).mean() > 0.9 and (score[~junk] > 0).all()


def test_uncertainties_do_not_tell_junk(runs):
    """They say how well a pose would be known if the particle were there: not what to exclude by."""
    assert 0.2 < area_under_curve(-column(runs / "mixed", "_ngAngleSigmaDeg"), is_junk()) < 0.9


def test_junk_costs_a_shell_and_no_pose(runs, mixed, planted, pose_errors):
    """Thirty per cent of noise dilutes the reference; those that are particles are found all the same."""
    shells, errors = {}, {}
    for name in ("mixed", "clean"):
        corrected = gemmi.cif.read(str(runs / name / "fsc.star")).find_block("fsc").find_values("_rlnFourierShellCorrelationCorrected")
        shells[name] = int(np.argmax(np.array([float(v) for v in corrected]) < 0.143)) - 1
        errors[name] = pose_errors(planted / "truth.star", listed_without_noise(runs / name, mixed))
    assert shells["clean"] - 1 <= shells["mixed"]
    angles_deg, distances_angst = errors["mixed"]
    assert len(angles_deg) == 40 - JUNK and angles_deg.max() < 5
    assert np.median(angles_deg) < 2 * np.median(errors["clean"][0]) and np.median(distances_angst) < 2 * np.median(errors["clean"][1])


def listed_without_noise(run, folder):
    """The list of a run without the particles of noise, which have the names of planted ones."""
    lines = (run / "particles.star").read_text().splitlines()
    path = folder / f"{run.name}_planted.star"
    path.write_text("\n".join(line for line in lines if "/noise/" not in line) + "\n")
    return path
