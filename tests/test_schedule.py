"""What the next iteration searches, from what poses moved and how well they are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from numba_glocal.alignment import angular_resolution_deg, shift_step_angst
from numba_glocal.backends.protocols import Grid
from numba_glocal.results import RunState
from numba_glocal.schedule import adapt
from numba_glocal.settings import AlignSettings
from numba_glocal.values import Poses

BOX, PIXEL, RADIUS, K_MAX = 64, 4.0, 25.0, 20.0
FINEST = angular_resolution_deg(K_MAX, BOX, RADIUS)
LEAST = 2.0 * shift_step_angst(K_MAX, BOX, PIXEL)


def adapted(moved_deg, moved_angst, angle_sigma_deg, shift_sigma_angst, shells=3, increment_deg=4.5, shift_range_angst=60.0):
    """Increment and shift range after an iteration in which every particle moved and is known by this much."""
    job = SimpleNamespace(settings=AlignSettings("a", "b", angle_shells=shells), grid=Grid(BOX, BOX, PIXEL), radius_voxels=RADIUS)
    count, nan = 50, np.full(50, np.nan)
    sigmas = [np.full(count, value) for value in (angle_sigma_deg, shift_sigma_angst)]
    for sigma in sigmas:
        sigma[::7] = np.nan  # unusable particles say nothing
    poses = Poses(np.eye(3)[None].repeat(count, 0), np.zeros((count, 3)))
    state = RunState(1, poses, K_MAX, increment_deg, shift_range_angst, nan, *sigmas, nan, {}, [])
    adapt(job, state, np.full(count, moved_deg), np.full(count, moved_angst))
    return state.increment_deg, state.shift_range_angst


def test_settled_and_well_known_poses_are_searched_as_finely_as_the_band_can_tell():
    assert adapted(0.01, 0.01, 0.02, 0.02) == pytest.approx((FINEST, LEAST))


def test_what_moved_is_searched_as_far_again():
    assert adapted(5.0, 15.0, 0.02, 0.02) == pytest.approx((2 * 5.0 / 3, 30.0))
    assert adapted(5.0, 15.0, 0.02, 0.02, shells=5)[0] == pytest.approx(2 * 5.0 / 5)


def test_what_is_badly_known_is_searched_as_far_as_it_may_be_off():
    """Poses of noisy particles may stay where they are and be wrong by their uncertainty."""
    assert adapted(0.01, 0.01, 2.0, 4.0) == pytest.approx((3 * np.sqrt(3) * 2.0 / 3, 3 * np.sqrt(3) * 4.0))


def test_never_wider_than_before():
    assert adapted(30.0, 99.0, 9.0, 30.0, increment_deg=2.5, shift_range_angst=20.0) == (2.5, 20.0)
