"""Poses found from no orientations at all."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import gemmi
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.alignment import search_levels
from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.lines import line_band
from numba_glocal.backends.protocols import SearchSetup
from numba_glocal.cli.running import search_memory_bytes, worker_memory_bytes
from numba_glocal.job import prepare_job
from numba_glocal.noise import NoiseModel
from numba_glocal.results import RunFolder
from numba_glocal.schedule import first_search
from numba_glocal.settings import AlignSettings


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


ANGLES = ["_rlnAngleRot", "_rlnAngleTilt", "_rlnAnglePsi"]


@pytest.fixture
def without_angles(scrambled, tmp_path):
    """The same list without columns of angles."""
    document = gemmi.cif.read(str(scrambled))
    block = document.find_block("particles") or document.sole_block()
    item = block.find(ANGLES[:1]).loop
    kept = [tag for tag in item.tags if tag not in ANGLES]
    rows = [list(row) for row in block.find(kept)]
    block.find(ANGLES[:1]).erase()
    loop = block.init_loop("", kept)
    for row in rows:
        loop.add_row(row)
    path = tmp_path / "without_angles.star"
    document.write_file(str(path))
    assert "AngleTilt" not in path.read_text()
    return path


def test_the_orientations_of_the_list_do_not_matter(scrambled, without_angles, planted, align_here, tmp_path):
    settings = {"particle_diameter_angst": 360.0, "iterations": 1, "subset": 4, "reference": str(planted / "truth.mrc"), "global_search": True}
    found = []
    for name, particles in (("one", scrambled), ("other", planted / "start.star"), ("none", without_angles)):
        job = align_here(particles, tmp_path / name, **settings)
        assert not any("angle" in line for line in job.warnings)
        block = gemmi.cif.read(str(tmp_path / name / "particles.star")).find_block("particles")
        found.append(np.array([[float(v) for v in row] for row in block.find(ANGLES)]))
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, atol=1e-3)


def test_an_angle_list_begins_the_search(scrambled, planted, align_here, pose_errors, shared, tmp_path):
    """PyTom's 256 orientations, 38.5 degrees apart, in place of 4,400: all particles are found."""
    settings = {"particle_diameter_angst": 360.0, "iterations": 1, "subset": 8, "reference": str(planted / "truth.mrc")}
    listed = shared / "data" / "lists" / "angles_38.53_256.em"
    job = align_here(scrambled, tmp_path / "listed", angle_list=str(listed), **settings)
    assert len(job.listed_rotations) == 256 and job.settings.global_search
    history = RunFolder(tmp_path / "listed").last_state().history
    assert 38 < history[0]["increment_deg"] < 40
    angles_deg, distances_angst = pose_errors(planted / "truth.star", tmp_path / "listed" / "particles.star")
    assert len(angles_deg) == 16 and angles_deg.max() < 5
    assert np.median(angles_deg) < 0.6 and np.median(distances_angst) < 0.7
    # a list that leaves out what is needed does not find it: it is the list that is searched
    some = job.listed_rotations[:12]
    few = write_angles(tmp_path / "few.em", some)
    align_here(scrambled, tmp_path / "few", angle_list=str(few), **settings)
    missed, _ = pose_errors(planted / "truth.star", tmp_path / "few" / "particles.star")
    assert np.percentile(missed, 90) > 15


def write_angles(path, rotations):
    """An angle list: Z1, Z2, X in radians."""
    z1, x, z2 = Rotation.from_matrix(rotations).as_euler("zxz").T
    header = struct.pack("<4B3i", 6, 0, 0, 9, 3, len(rotations), 1).ljust(512, b"\0")
    path.write_bytes(header + np.stack([z1, z2, x], axis=1).astype("<f8").tobytes())
    return path


def test_an_angle_list_is_said_and_checked(small, command, tmp_path):
    given = Rotation.random(30, random_state=3).as_matrix()
    path = write_angles(tmp_path / "list.em", np.concatenate([given, given[:5]]))
    run = tmp_path / "run"
    options = ("--particle-diameter", 230, "--cpu-procs", 1)
    shown = command("align", small.start, "-o", run, "--reference", small.reference, "--angle-list", path, *options, "--dry-run")
    assert "all orientations of list.em: 30 rotations to" in shown.stdout
    for arguments, text in (
        (("--reference", small.reference, "--angle-list", tmp_path / "gone.em"), "gone.em: cannot be read"),
        (("--reference", small.reference, "--angle-list", small.reference), "reference.mrc: EM type 0 is not read"),
        (("--angle-list", path), "expected a start map"),
    ):
        assert text in command("align", small.start, "-o", run, *arguments, *options, code=2).stderr
    assert not run.exists()


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_plan_counts_the_templates_of_a_search(small, everywhere):
    """What is said of a worker's memory holds the templates as the backend lays them out."""
    settings = AlignSettings(str(small.start), "nowhere", reference=str(small.reference), particle_diameter_angst=230.0, global_search=everywhere)
    job = prepare_job(settings)
    n = job.grid.binned_box_size
    setup = SearchSetup(job.grid, np.ones((n,) * 3, np.float32), job.particle_mask, NoiseModel(np.ones(n // 2 + 1)), k_max=job.k_limit)
    session = CPUBackend(0).open_search(setup)
    plan = first_search(job)
    if not everywhere:
        plan = replace(plan, k_max=job.k_limit)
    sizes = []
    for level in search_levels(plan, n, job.grid.binned_pixel_size_angst, job.radius_voxels):
        templates, powers = session._templates(level, line_band(level.k_max))
        sizes.append(templates.nbytes + powers.nbytes)
    said = search_memory_bytes(job)
    assert max(sizes) < said < worker_memory_bytes(job, 1.0) - 2**30
    if everywhere:
        symmetric = prepare_job(replace(settings, symmetry="D7"))
        assert search_memory_bytes(symmetric) < said / 3
