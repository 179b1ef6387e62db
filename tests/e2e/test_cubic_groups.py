"""Particles with the symmetry of a tetrahedron, a cube and an icosahedron: planted poses are found again modulo the group, and a wrong group shows.

The groups are SciPy's, turned onto RELION's axes by where two of their axes lie; nothing of ours takes part in making the objects or in judging.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.io import read_particles, write_particles
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Poses, Volume

BOX, PIXEL, COUNT = 32, 10.0, 12
GOLDEN = 0.5 * (1 + 5**0.5)


def turned_onto(group, axes, onto):
    """A group whose `axes` are turned onto those given."""
    turn, residual = Rotation.align_vectors(*(np.array(a) / np.linalg.norm(a, axis=1, keepdims=True) for a in (onto, axes)))
    assert residual < 1e-6, "those axes are not as far apart in the group"
    return (turn * group * turn.inv()).as_matrix()


def has_axis(group, axis, fold):
    """Whether a turn by a full one over `fold` about an axis is in the group."""
    element = Rotation.from_rotvec(np.array(axis) / np.linalg.norm(axis) * 2 * np.pi / fold).as_matrix()
    return np.abs(group - element).max((1, 2)).min() < 1e-6


# T: three-fold z, a two-fold axis at (0, sqrt 2, 1); O: four-fold x, y, z; I (RELION's I2): two-fold x, y, z, five-fold in the xz plane
GROUPS = {
    "T": turned_onto(Rotation.create_group("T"), [(1, 1, 1), (0, 0, 1)], [(0, 0, 1), (0, 2**0.5, 1)]),
    "O": Rotation.create_group("O").as_matrix(),
    "I": turned_onto(Rotation.create_group("I"), [(0, 0, 1), (0, 1, GOLDEN)], [(0, 0, 1), (1, 0, GOLDEN)]),
}
# one place each, and all its copies: general ones, so that the object has no other symmetry and no mirror
PLACES = {"T": ((9.5, 1.5, 4.0), (3.0, 6.0, 2.0)), "O": ((10.0, 4.5, 2.0), (3.5, 3.0, 6.0)), "I": ((2.0, 11.0, 3.0),)}
WRONG = {"T": "O", "O": "I", "I": "O"}
"""Groups of the same kind that these objects do not have, about the same centre."""


def test_the_groups_have_relions_axes():
    assert has_axis(GROUPS["T"], (0, 0, 1), 3) and has_axis(GROUPS["T"], (0, 2**0.5, 1), 2) and len(GROUPS["T"]) == 12
    assert all(has_axis(GROUPS["O"], axis, 4) for axis in np.eye(3)) and len(GROUPS["O"]) == 24
    assert all(has_axis(GROUPS["I"], axis, 2) for axis in np.eye(3)) and len(GROUPS["I"]) == 60
    assert has_axis(GROUPS["I"], (1, 0, GOLDEN), 5)


@pytest.fixture(scope="module", params=list(GROUPS))
def particles(request, tmp_path_factory):
    """12 particles 8 degrees (rms) and up to a voxel an axis off; each start pose is a random one of its equal ones."""
    name = request.param
    z, y, x = np.indices((BOX,) * 3) - BOX // 2
    volume = np.zeros((BOX,) * 3)
    for g in GROUPS[name]:
        for place in PLACES[name]:
            px, py, pz = g @ place
            volume += np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * 1.4**2))
    folder = tmp_path_factory.mktemp(name)
    settings = SimulationSettings(count=COUNT, box_size=BOX, pixel_size_angst=PIXEL, snr=0.1, perturb_deg=8.0, seed=6)
    made = simulate(folder, settings, Volume(volume.astype(np.float32), PIXEL))
    start = read_particles(made.start)
    copies = GROUPS[name][np.random.default_rng(7).integers(len(GROUPS[name]), size=COUNT)]
    mixed = folder / "mixed.star"
    write_particles(mixed, start.with_poses(Poses(start.poses.rotations @ copies, start.poses.shifts_angst)))
    return name, made, mixed


def errors(name, truth, found):
    """Degrees to the nearest equal pose, and Angstrom; these groups leave no common motion to take out."""
    true, poses = (read_particles(path, require_volumes=False).poses for path in (truth, found))
    apart = [Rotation.from_matrix(np.swapaxes(true.rotations, 1, 2) @ poses.rotations @ g).magnitude() for g in GROUPS[name]]
    return np.rad2deg(np.min(apart, 0)), np.linalg.norm(true.shifts_angst - poses.shifts_angst, axis=1)


def aligned(particles, command, run, symmetry, iterations):
    _, made, mixed = particles
    options = ("--particle-diameter", 240, "--soft-edge", 3, "--iterations", iterations, "--symmetry", symmetry, "--cpu-procs", 1)
    command("align", mixed, "-o", run, "--reference", made.reference, *options)
    return json.loads((run / "summary.json").read_text())


def test_planted_poses_are_found_and_a_wrong_group_is_said(particles, command, tools, tmp_path):
    name, made, mixed = particles
    right = aligned(particles, command, tmp_path / "right", name, 2)
    start_deg, start_angst = errors(name, made.truth, mixed)
    found_deg, found_angst = errors(name, made.truth, tmp_path / "right" / "particles.star")
    assert np.median(start_deg) > 5 and np.median(start_angst) > 5
    # seen: medians 0.46 to 0.65 degrees and 0.57 to 1.45 A, largest 1.3 degrees and 2.7 A
    assert np.median(found_deg) < 1 and found_deg.max() < 3 and np.median(found_angst) < 2.5 and found_angst.max() < 5
    assert right["symmetry"] == name and min(right["symmetry_agreement"]) > 0.99
    assert not [line for line in right["warnings"] if "--symmetry" in line]

    wrong = aligned(particles, command, tmp_path / "wrong", WRONG[name], 1)
    # seen: 0.12, 0.20, 0.63
    assert wrong["symmetry"] == WRONG[name] and wrong["symmetry_agreement"][1] < 0.7
    assert [line for line in wrong["warnings"] if line.startswith(f"--symmetry {WRONG[name]}: ")]
    truth, mask = tools.read_map(made.reference), tools.soft_sphere(BOX, 13, 2)
    like = {run: tools.shell_correlation(tools.read_map(tmp_path / run / "average.mrc"), truth, mask)[3:9].mean() for run in ("right", "wrong")}
    assert like["right"] > 0.95 and like["wrong"] < like["right"] - 0.1
