"""Forty real ribosomes. The published map is the judge: correlation within 13 voxels of the centre after a hard cut at 35 A."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.fixture(scope="module")
def real(shared):
    return shared / "data" / "real-70s"


@pytest.fixture(scope="module")
def average(real, command, tmp_path_factory):
    run = tmp_path_factory.mktemp("real") / "average"
    command("average", real / "particles.star", "-o", run)
    return run


@pytest.fixture(scope="module")
def likeness(real, tools):
    published = tools.read_map(real / "published_map.mrc")
    grid = np.indices(published.shape) - 16
    inside = (grid**2).sum(0) <= 13**2
    band = tools.shell_radii(32) / (32 * 12.0) <= 1 / 35

    def likeness(path):
        cut = np.fft.ifftn(np.fft.fftn(tools.read_map(path)) * band).real
        return np.corrcoef(cut[inside], published[inside])[0, 1]

    return likeness


def resolution_angst(run):
    return json.loads((run / "summary.json").read_text())["resolution_angst"]


def test_average(average, likeness):
    assert likeness(average / "average.mrc") >= 0.86  # RELION from the same list: 0.862


def test_align_from_poses_ten_degrees_off(real, average, likeness, command, tmp_path):
    run = tmp_path / "run"
    options = ["--reference", real / "published_map.mrc", "--initial-lowpass", 50, "--particle-diameter", 280]
    command("align", real / "perturbed.star", "-o", run, *options)
    assert likeness(run / "average.mrc") >= 0.855  # as they stand 0.806; RELION 0.845
    finest = round(32 * 12 / resolution_angst(average)) + 1
    assert round(32 * 12 / resolution_angst(run)) <= finest  # more would be the noise agreeing with itself


def test_premultiplied_copy_agrees(real, likeness, average_here, tmp_path):
    """The same particles as CTF-multiplied data with CTF^2 volumes; read the other way (CTF in the file) they give 0.80."""
    average_here(real / "premultiplied" / "particles.star", tmp_path / "run")
    assert likeness(tmp_path / "run" / "average.mrc") >= 0.845


@pytest.fixture(scope="module")
def distances(real, pose_errors):
    """Medians of angle (degrees) and shift (Angstrom) from the published poses, and the share of angles over 15 degrees."""

    def distances(run):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANGPIX", "12")  # RELION 3.0 lists carry no pixel size
            angles_deg, distances_angst = pose_errors(real / "particles.star", run / "particles.star")
        assert len(angles_deg) == 40
        return np.median(angles_deg), np.median(distances_angst), (angles_deg > 15).mean()

    return distances


PRIORS = {"angle_prior_deg": 6.0, "shift_prior_angst": 15.0}  # as wide as the list's errors along an axis


def test_one_pass_against_the_published_map(real, align_here, distances, tmp_path):
    settings = {"reference": str(real / "published_map.mrc"), "initial_lowpass_angst": 24.0, "particle_diameter_angst": 280.0, "iterations": 1}
    align_here(real / "premultiplied" / "perturbed.star", tmp_path / "free", **settings)
    angle_deg, shift_angst, _ = distances(tmp_path / "free")
    # seen: 4.7 and 7.9 (3.8 with one noise model for all; from five other starts 3.4 with and 3.2 without groups); the list's own: 8.7 and 21.8
    assert angle_deg < 5.5 and shift_angst < 9  # RELION from CTF-divided ones: 6.8 and 15.4
    align_here(real / "premultiplied" / "perturbed.star", tmp_path / "held", **settings, **PRIORS)
    angle_deg, shift_angst, _ = distances(tmp_path / "held")
    assert angle_deg < 3.2 and shift_angst < 7  # seen: 2.2 and 5.7


def test_priors_hold_poses_that_the_data_do_not(real, align_here, distances, tmp_path):
    """Halves of twenty in crowded cells, from 50 A: a third of the orientations run away, unless the list is given some belief."""
    settings = {"reference": str(real / "published_map.mrc"), "initial_lowpass_angst": 50.0, "particle_diameter_angst": 280.0}
    shares = {}
    for name, priors in (("free", {}), ("held", PRIORS)):
        align_here(real / "premultiplied" / "perturbed.star", tmp_path / name, **settings, **priors)
        _, _, shares[name] = distances(tmp_path / name)
    assert shares["held"] < 0.25 and shares["held"] < shares["free"] - 0.1  # seen: 0.08, and 0.30 without
