from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from numba_glocal.errors import SettingsError
from numba_glocal.sampling import (
    count_for_increment,
    distinct_rotations,
    local_rotations,
    rotations_for_increment,
    shift_ball,
    spacing_deg,
    uniform_rotations,
)


def angles_deg(rotations):
    return np.rad2deg(Rotation.from_matrix(rotations).magnitude())


def nearest_deg(targets, grid):
    """Distance of each target to the nearest grid rotation, by quaternions of both signs."""
    quats = Rotation.from_matrix(grid).as_quat()
    chord, _ = cKDTree(np.concatenate([quats, -quats])).query(Rotation.from_matrix(targets).as_quat())
    return np.rad2deg(4 * np.arcsin(chord / 2))


@given(st.floats(0.5, 20.0), st.integers(0, 4))
@settings(max_examples=20, deadline=None)
def test_local_rotations_are_distinct_start_with_identity_and_stay_within_reach(increment, reach):
    rotations = local_rotations(increment, reach)
    np.testing.assert_array_equal(rotations[0], np.eye(3))
    angle = angles_deg(rotations)
    assert (np.diff(angle) > -1e-6).all()
    assert angle.max() <= reach * increment + 1e-6
    if len(rotations) > 1:
        quats = Rotation.from_matrix(rotations).as_quat()
        quats *= np.sign(quats[:, 3:])
        spacing, _ = cKDTree(quats).query(quats, k=2)
        # at large angles the rotation-vector grid is a little denser than at the centre
        assert np.rad2deg(4 * np.arcsin(spacing[:, 1] / 2)).min() > 0.8 * increment


def test_local_rotations_count_is_that_of_integer_points_in_a_ball():
    assert [len(local_rotations(3.0, reach)) for reach in (0, 1, 2, 3)] == [1, 7, 33, 123]


def test_local_rotations_cover_the_ball():
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(2000, 3))
    vectors *= np.deg2rad(12.0) * rng.random((2000, 1)) ** (1 / 3) / np.linalg.norm(vectors, axis=1, keepdims=True)
    gap = nearest_deg(Rotation.from_rotvec(vectors).as_matrix(), local_rotations(3.0, 4))
    # half the diagonal of a cell inside; at most an increment at the rim
    assert np.quantile(gap, 0.95) < 3.0 * np.sqrt(3) / 2 and gap.max() < 1.05 * 3.0


@given(st.floats(0.0, 6.0), st.floats(0.5, 2.0))
@settings(max_examples=25, deadline=None)
def test_shift_ball_holds_exactly_the_grid_points_within_its_radius(radius, step):
    shifts = shift_ball(radius, step)
    found = {tuple(np.rint(s / step).astype(int)) for s in shifts}
    reach = int(radius / step) + 1
    expected = {p for p in np.ndindex(*(2 * reach + 1,) * 3)}
    expected = {tuple(np.subtract(p, reach)) for p in expected if np.linalg.norm(np.subtract(p, reach)) * step <= radius * (1 + 1e-9)}
    assert found == expected and len(found) == len(shifts)
    assert (shifts[0] == 0).all() and (np.diff(np.linalg.norm(shifts, axis=1)) > -1e-12).all()


@pytest.mark.parametrize("count", [1, 7, 500])
def test_uniform_rotations_are_rotations_as_scipy_has_them(count):
    rotations = uniform_rotations(count)
    np.testing.assert_allclose(rotations @ rotations.transpose(0, 2, 1), np.broadcast_to(np.eye(3), (count, 3, 3)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(rotations), 1.0)
    i = np.arange(count) + 0.5
    phi, psi = np.sqrt(2), np.roots([1, 0, 0, -1, -4])
    psi = psi[np.isreal(psi) & (psi.real > 0)].real[0]
    r, s = np.sqrt(i / count), np.sqrt(1 - i / count)
    a, b = 2 * np.pi * i / phi, 2 * np.pi * i / psi
    quats = np.stack([r * np.sin(a), r * np.cos(a), s * np.sin(b), s * np.cos(b)], axis=1)
    np.testing.assert_allclose(rotations, Rotation.from_quat(quats).as_matrix(), atol=1e-9)


def test_uniform_rotations_have_the_moments_of_the_uniform_distribution():
    rotations = uniform_rotations(4000)
    # of random rotations: mean 0, second moment of every element 1/3, of the trace 1, of its fourth power 3
    assert np.abs(rotations.mean(axis=0)).max() < 0.005
    np.testing.assert_allclose((rotations**2).mean(axis=0), 1 / 3, atol=0.005)
    trace = np.trace(rotations, axis1=1, axis2=2)
    assert np.mean(trace**2) == pytest.approx(1.0, abs=0.01) and np.mean(trace**4) == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("increment", [30.0, 15.0, 10.0])
def test_cover_at_an_increment(increment):
    grid = rotations_for_increment(increment)
    assert len(grid) == count_for_increment(increment)
    gap = nearest_deg(Rotation.random(3000, random_state=2).as_matrix(), grid)
    # a cubic grid of this spacing leaves gaps of up to 0.87 increments, 0.48 on average
    assert gap.max() < 1.0 * increment and gap.mean() < 0.6 * increment
    assert nearest_deg(grid, grid).max() < 1e-5


@pytest.mark.parametrize(
    "call",
    [
        lambda: local_rotations(0.0, 2),
        lambda: local_rotations(float("nan"), 2),
        lambda: local_rotations(3.0, -1),
        lambda: local_rotations(60.0, 3),
        lambda: shift_ball(-1.0, 1.0),
        lambda: shift_ball(2.0, 0.0),
        lambda: uniform_rotations(0),
        lambda: rotations_for_increment(0.0),
    ],
)
def test_senseless_samplings_are_refused(call):
    with pytest.raises(SettingsError):
        call()


def test_repeated_rotations_are_found_whatever_their_angles():
    once = Rotation.random(40, random_state=1).as_matrix()
    almost = Rotation.from_rotvec([np.deg2rad(0.005), 0, 0]).as_matrix() @ once[:3]
    apart = Rotation.from_rotvec([np.deg2rad(0.02), 0, 0]).as_matrix() @ once[3:5]
    half_turns = Rotation.from_rotvec([[0, 0, np.pi], [0, 0, -np.pi]]).as_matrix()
    found = distinct_rotations(np.concatenate([once, almost, apart, half_turns, once[::-1]]))
    assert np.allclose(found, np.concatenate([once, apart, half_turns[:1]]), atol=1e-12)


def test_spacing_is_the_median_distance_to_the_nearest():
    steps = Rotation.from_rotvec(np.deg2rad([0.0, 5.0, 12.0, 19.0, 179.0])[:, None] * [0.0, 0.0, 1.0]).as_matrix()
    assert spacing_deg(steps) == pytest.approx(7.0)  # 5, 5, 7, 7, 160
    many = Rotation.random(300, random_state=2).as_matrix()
    angles = np.rad2deg([[Rotation.from_matrix(a.T @ b).magnitude() for b in many] for a in many[:40]])
    angles[angles < 1e-6] = 999
    assert spacing_deg(many) == pytest.approx(np.median(angles.min(1)), rel=0.15)
    assert spacing_deg(many[:1]) == 180
