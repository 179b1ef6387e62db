"""Point groups: RELION's own operators, the axioms of a group, and objects whose symmetry is a formula are the judges."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.errors import SettingsError
from numba_glocal.symmetry import (
    angle_modulo_deg,
    free_motion,
    grid_factors,
    group_rotations,
    in_asymmetric_unit,
    nearest_copy,
    symmetrised,
    symmetry_agreement,
)

ORDERS = {"C1": 1, "C2": 2, "C7": 7, "D1": 2, "D2": 4, "D7": 14, "D8": 16, "T": 12, "O": 24, "I": 60, "I1": 60, "I2": 60, "I3": 60, "I4": 60}


def blobs(n, group, places=((6.0, 1.0, 2.0), (3.0, 3.5, 5.0)), width=1.6, offset=(0.0, 0.0, 0.0)):
    """Gaussians at all copies of two places, (x, y, z)."""
    z, y, x = np.indices((n,) * 3) - n // 2
    total = np.zeros((n,) * 3)
    for g in np.asarray(group):
        for place in places:
            px, py, pz = g @ np.asarray(place) + np.asarray(offset)
            total += np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * width**2))
    return total


def cyclic(fold):
    return Rotation.from_rotvec([[0, 0, 2 * np.pi * step / fold] for step in range(fold)]).as_matrix()


@pytest.mark.parametrize("name", ORDERS)
def test_it_is_a_group_of_the_right_order(name):
    group = group_rotations(name)
    assert len(group) == ORDERS[name]
    np.testing.assert_array_equal(group[0], np.eye(3))
    np.testing.assert_allclose(group @ group.transpose(0, 2, 1), np.broadcast_to(np.eye(3), group.shape), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(group), 1)
    products = np.einsum("aij,bjk->abik", group, group)
    member = np.abs(products[:, :, None] - group).max((-2, -1)) < 1e-9
    assert (member.sum(2) == 1).all(), "each product is one element"


@pytest.mark.parametrize("name", ORDERS)
def test_the_axes_are_relions(name):
    if shutil.which("relion_refine") is None:
        pytest.skip("relion_refine not found (apt-get install relion)")
    text = subprocess.run(["relion_refine", "--sym", name, "--print_symmetry_ops"], capture_output=True, text=True, timeout=60).stdout
    printed = np.array([[line.split() for line in block.strip().splitlines()[:3]] for block in re.split(r"R\(\d+\)=", text)[1:]], float)
    apart = np.abs(group_rotations(name)[:, None] - printed).max((-2, -1))
    assert len(printed) == ORDERS[name]
    # it prints five digits
    assert apart.min(0).max() < 1e-5 and apart.min(1).max() < 1e-5


@pytest.mark.parametrize("name", ["C0", "C", "D0", "C100", "X", "", "T2", "I5", "C2v", "C\u0662", "C-1"])
def test_unknown_groups_are_refused_in_a_line(name):
    with pytest.raises(SettingsError, match="--symmetry: expected C1, Cn or Dn"):
        group_rotations(name)


@pytest.mark.parametrize(("name", "turns"), [("C1", 1), ("C2", 1), ("C7", 7), ("C12", 3), ("D2", 1), ("D7", 7), ("T", 12), ("O", 1), ("I", 5)])
def test_factors_run_through_the_group_once(name, turns):
    few, on_grid = grid_factors(name)
    assert len(few) == turns
    assert (np.sort(np.abs(on_grid), axis=-1) == [0, 0, 1]).all()
    products = (few[:, None] @ on_grid[None]).reshape(-1, 3, 3)
    apart = np.abs(products[:, None] - group_rotations(name)).max((-2, -1))
    assert len(products) == len(group_rotations(name)) and ((apart < 1e-9).sum(0) == 1).all()


@pytest.mark.parametrize("name", ["C1", "C5", "D3", "T", "O", "I"])
def test_equal_poses_are_no_distance_apart_and_one_lies_in_the_unit(name):
    group, poses = group_rotations(name), Rotation.random(200, random_state=1).as_matrix()
    copies = poses[:, None] @ group
    assert angle_modulo_deg(poses[:, None], copies, name).max() < 1e-6
    small = Rotation.from_rotvec(np.deg2rad([1.0, 2.0, 2.0])).as_matrix()
    np.testing.assert_allclose(angle_modulo_deg(poses[:, None], copies @ small, name), 3.0, atol=1e-6)
    assert (in_asymmetric_unit(copies, name).sum(1) == 1).all()
    np.testing.assert_allclose(nearest_copy(copies, (poses @ small)[:, None], name), np.broadcast_to(poses[:, None], copies.shape), atol=1e-9)


def test_what_a_symmetry_leaves_free():
    motion = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    for name, expected in (("C1", motion), ("C4", ([0, 0, 3], [0, 0, 6])), ("D2", ([0] * 3, [0] * 3)), ("O", ([0] * 3, [0] * 3))):
        for found, wanted in zip(free_motion(*motion, name), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("n", [32, 33])
@pytest.mark.parametrize("name", ["C3", "D2", "T"])
def test_a_symmetrised_map_is_the_mean_of_its_copies(name, n):
    group = group_rotations(name)
    expected = blobs(n, group) / len(group)
    found = symmetrised(blobs(n, np.eye(3)[None]), name)
    assert np.abs(found - expected).max() < 0.02 * expected.max()


def test_agreement_tells_the_right_group_from_wrong_ones():
    n = 32
    mask = np.ones((n,) * 3)
    volume = blobs(n, cyclic(5))
    assert min(symmetry_agreement(volume, mask, "C5")) > 0.99
    # a map that is nearly round: as it is it seems to have any symmetry about z
    z, y, x = np.indices((n,) * 3) - n // 2
    nearly_round = 20 * np.exp(-(x**2 + y**2) / 50 - z**2 / 80) + volume
    for wrong in ("C4", "C6", "D4"):
        whole, apart = symmetry_agreement(nearly_round, mask, wrong)
        assert whole > 0.9 and apart < 0.3
    assert symmetry_agreement(nearly_round, mask, "C5")[1] > 0.95
    # right group, wrong axis and wrong centre
    assert symmetry_agreement(volume.transpose(1, 2, 0), mask, "C5")[1] < 0.5
    assert symmetry_agreement(blobs(n, cyclic(5), offset=(3.0, 0.0, 0.0)), mask, "C5")[1] < 0.8
