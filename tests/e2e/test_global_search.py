"""Poses found from no orientations at all."""

from __future__ import annotations

import os

import gemmi
import numpy as np
import pytest


@pytest.fixture
def scrambled(planted, tmp_path):
    """The list of the planted particles with orientations that have nothing to do with them."""
    document = gemmi.cif.read(str(planted / "start.star"))
    block = document.find_block("particles") or document.sole_block()
    rng = np.random.default_rng(7)
    for row in block.find(["_rlnAngleRot", "_rlnAngleTilt", "_rlnAnglePsi"]):
        row[0], row[1], row[2] = (f"{v:.4f}" for v in (rng.uniform(-180, 180), np.rad2deg(np.arccos(rng.uniform(-1, 1))), rng.uniform(-180, 180)))
    for label in ("_rlnImageName", "_rlnCtfImage"):
        for row in block.find([label]):
            row[0] = os.path.relpath(planted / row[0], tmp_path)
    path = tmp_path / "scrambled.star"
    document.write_file(str(path))
    return path


def test_orientations_are_found_from_nothing(scrambled, planted, align_here, pose_errors, tmp_path):
    settings = {"particle_diameter_angst": 360.0, "iterations": 1, "subset": 8, "reference": str(planted / "truth.mrc")}
    align_here(scrambled, tmp_path / "local", **settings)
    align_here(scrambled, tmp_path / "everywhere", global_search=True, **settings)
    missed, _ = pose_errors(planted / "truth.star", tmp_path / "local" / "particles.star")
    angles_deg, distances_angst = pose_errors(planted / "truth.star", tmp_path / "everywhere" / "particles.star")
    assert np.median(missed) > 10  # else there was nothing to find
    assert len(angles_deg) == 16 and angles_deg.max() < 5
    assert np.median(angles_deg) < 0.6 and np.median(distances_angst) < 0.7


def test_the_orientations_of_the_list_do_not_matter(scrambled, planted, align_here, tmp_path):
    settings = {"particle_diameter_angst": 360.0, "iterations": 1, "subset": 4, "reference": str(planted / "truth.mrc"), "global_search": True}
    found = []
    for name, particles in (("one", scrambled), ("other", planted / "start.star")):
        align_here(particles, tmp_path / name, **settings)
        block = gemmi.cif.read(str(tmp_path / name / "particles.star")).find_block("particles")
        found.append(np.array([[float(v) for v in row] for row in block.find(["_rlnAngleRot", "_rlnAngleTilt", "_rlnAnglePsi"])]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-3)
