"""Particles whose poses are known, made by an independent program, through the whole command line."""

from __future__ import annotations

import json

import gemmi
import numpy as np
import pytest
from scipy.ndimage import gaussian_filter


def test_planted_poses_are_found(planted, planted_run, pose_errors):
    before, _ = pose_errors(planted / "truth.star", planted / "start.star")
    angles_deg, distances_angst = pose_errors(planted / "truth.star", planted_run / "particles.star")
    assert len(angles_deg) == 40 and np.median(before) > 6  # else there was nothing to find
    # seen: 0.30 degrees, 0.42 A, worst 1.0 degrees
    assert np.median(angles_deg) < 0.4
    assert np.median(distances_angst) < 0.6
    assert angles_deg.max() < 5


def test_uncertainties_are_true(planted, planted_run, pose_errors):
    """A sigma is worth its column only where errors over sigmas are about one."""
    angles_deg, distances_angst = pose_errors(planted / "truth.star", planted_run / "particles.star")
    table = gemmi.cif.read(str(planted_run / "particles.star")).find_block("particles").find(["_ngAngleSigmaDeg", "_ngShiftSigmaAngst"])
    sigma = np.array([[float(v) for v in row] for row in table])
    # root mean square over three axes against a length in three dimensions
    assert 0.75 < np.sqrt((angles_deg**2).mean() / 3) / np.sqrt((sigma[:, 0] ** 2).mean()) < 1.4  # seen: 1.10
    assert 0.75 < np.sqrt((distances_angst**2).mean() / 3) / np.sqrt((sigma[:, 1] ** 2).mean()) < 1.4  # seen: 0.95


def test_average_is_the_object(planted, planted_run, tools):
    truth, mask = tools.read_map(planted / "truth.mrc"), tools.soft_sphere(48, 19)
    found = tools.shell_correlation(truth, tools.read_map(planted_run / "average.mrc"), mask)
    resolution = json.loads((planted_run / "summary.json").read_text())["resolution_angst"]
    shell = round(48 * 9.0667 / resolution)
    # at an honest FSC of 0.143 between halves a map of all particles correlates with the truth by 0.5
    assert shell >= 12 and 0.35 < found[shell] and found[1:10].min() > 0.9


@pytest.mark.parametrize("score", ["ncc", "flcf"])
def test_other_scores_find_the_poses_too(planted, align_here, pose_errors, tmp_path, score):
    settings = {"particle_diameter_angst": 360.0, "iterations": 1, "subset": 8, "score": score, "reference": str(planted / "truth.mrc")}
    align_here(planted / "start.star", tmp_path / "run", **settings)
    angles_deg, distances_angst = pose_errors(planted / "truth.star", tmp_path / "run" / "particles.star")
    assert len(angles_deg) == 16
    assert np.median(angles_deg) < 0.6 and np.median(distances_angst) < 0.7  # seen: 0.39 degrees, 0.43 A
    assert angles_deg.max() < 5


def test_flcf_under_a_mask_of_the_particle(planted, align_here, pose_errors, tmp_path):
    """A mask file made from the map, no sphere, half of what the sphere holds: the local deviation is taken under it as it turns."""
    from numba_glocal.io import read_volume, write_volume
    from numba_glocal.masks import spherical_mask, threshold_mask
    from numba_glocal.values import Volume

    truth = read_volume(planted / "truth.mrc")
    mask = threshold_mask(gaussian_filter(truth.data, 1.0), 0.8, 1.0, 4.0, largest_part=True)
    assert mask.sum() < 0.6 * spherical_mask(48, 19.9).sum()
    write_volume(tmp_path / "mask.mrc", Volume(mask, truth.pixel_size_angst))
    settings = {"iterations": 1, "subset": 6, "score": "flcf", "reference": str(planted / "truth.mrc"), "mask": str(tmp_path / "mask.mrc")}
    align_here(planted / "start.star", tmp_path / "run", **settings)
    angles_deg, distances_angst = pose_errors(planted / "truth.star", tmp_path / "run" / "particles.star")
    assert len(angles_deg) == 12 and angles_deg.max() < 5
    assert np.median(angles_deg) < 0.7 and np.median(distances_angst) < 0.8
