from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from numba_glocal.alignment import (
    MODES,
    SEEDS,
    UNLIKELY,
    SearchPlan,
    align_chunk,
    angular_resolution_deg,
    drop_unlikely,
    other_modes,
    search_levels,
    shift_step_angst,
)
from numba_glocal.backends.protocols import Candidates, ParticleBatch, PoseEstimates
from numba_glocal.noise import ResidualPower
from numba_glocal.sampling import shift_ball


@given(
    increment=st.floats(0.5, 20),
    shells=st.integers(0, 4),
    reach=st.floats(1, 80),
    k_max=st.floats(3, 40),
    box=st.integers(24, 128),
    radius_share=st.floats(0.1, 0.45),
)
def test_levels_go_from_coarse_to_the_full_band(increment, shells, reach, k_max, box, radius_share):
    k_max = min(k_max, box // 2 - 1)
    levels = search_levels(SearchPlan(increment, shells, reach, k_max), box, 4.0, radius_share * box)
    bands = [level.k_max for level in levels]
    assert bands == sorted(bands) and bands[-1] == np.floor(k_max)
    assert levels[-1].keep == MODES and all(level.keep == SEEDS for level in levels[:-1])
    assert levels[0].shift_radius_angst == reach
    assert len(levels) < 12
    for level in levels:
        turned = np.rad2deg(Rotation.from_matrix(level.rotations).magnitude())
        assert turned.min() < 1e-6  # the start itself is among the candidates
        assert np.abs(np.linalg.det(level.rotations) - 1).max() < 1e-9
    for coarse, fine in zip(levels, levels[1:], strict=False):
        # the finer level reaches every place between two samples of the coarser one
        assert fine.shift_radius_angst >= coarse.shift_step_angst


def test_the_reach_of_the_first_level_is_what_was_asked_for():
    level = search_levels(SearchPlan(3.0, 3, 20.0, 20.0), 64, 4.0, 20.0)[0]
    turned = np.rad2deg(Rotation.from_matrix(level.rotations).magnitude())
    assert 8.5 < turned.max() < 10 and len(turned) > 100


def test_shift_step_keeps_the_peak():
    """The worst place between trial shifts keeps more than half of a band-limited peak: judged by the peak itself."""
    for k_max in (8, 16, 29):
        box = 64
        step_voxels = shift_step_angst(k_max, box, 1.0)
        trials = shift_ball(3 * step_voxels, step_voxels)
        places = np.random.default_rng(0).uniform(-step_voxels, step_voxels, (2000, 3))
        offset = places - trials[np.linalg.norm(places[:, None] - trials, axis=2).argmin(1)]
        offset = offset[np.linalg.norm(offset, axis=1).argmax()]
        k = np.arange(-k_max, k_max + 1)
        kz, ky, kx = np.meshgrid(k, k, k, indexing="ij")
        inside = kz**2 + ky**2 + kx**2 <= k_max**2
        value = np.cos(2 * np.pi / box * (kz[inside] * offset[0] + ky[inside] * offset[1] + kx[inside] * offset[2])).mean()
        assert value > 0.55


def test_angular_resolution_turns_the_rim_by_one_radian_of_phase():
    angle = np.deg2rad(angular_resolution_deg(20.0, 64, 24.0))
    assert 2 * np.pi * 20.0 / 64 * 24.0 * angle == pytest.approx(1.0)


class FakeSession:
    """Finds every particle 5 Angstrom along x from its start; the second one is bad."""

    def __init__(self, fail=()):
        self.fail, self.levels, self.searched_from = list(fail), [], []

    def load(self, particles, prior=None):
        self.prior = prior
        return [(index, "it is constant") for index in self.fail]

    def search(self, starts, anchor_angst, level):
        self.levels.append(level)
        self.searched_from.append(starts.shifts_angst.copy())
        return Candidates(starts.rotations, starts.shifts_angst + [5.0, 0, 0], starts.scores + 1.0)

    def refine(self, candidates, anchor_angst, most_steps):
        count = len(candidates)
        nothing = np.zeros(count)
        shifts = candidates.shifts_angst[:, 0] + [0.0, 1.0, 0]
        steps = np.zeros(count, np.int32)
        return PoseEstimates(candidates.rotations[:, 0], shifts, np.zeros((count, 6, 6)), nothing, nothing, nothing, nothing, nothing, steps)

    def residuals(self, rotations, shifts_angst):
        self.residuals_at = shifts_angst.copy()
        return ResidualPower.empty(5)

    def unload(self):
        self.unloaded = True


def test_a_chunk_is_searched_refined_and_measured_where_it_ended():
    session, starts = FakeSession(fail=[1]), np.arange(9.0).reshape(3, 3)
    levels = search_levels(SearchPlan(12.0, 1, 20.0, 20.0), 64, 4.0, 20.0)
    turns = Rotation.random(3, random_state=1).as_matrix()
    batch = ParticleBatch(("a", "b", "c"), lambda i: None)
    result = align_chunk(session, batch, turns, starts, starts, levels, True)
    assert [level.k_max for level in session.levels] == [level.k_max for level in levels]
    expected = starts + [5.0 * len(levels), 1, 0]
    expected[1] = starts[1]  # who is unusable keeps the pose of the list
    assert np.array_equal(result.shifts_angst, expected) and np.array_equal(result.rotations, turns)
    assert np.array_equal(session.residuals_at, expected)
    assert session.unloaded
    assert result.bad == [(1, "it is constant")] and result.estimates is not None


def test_a_chunk_without_levels_keeps_its_poses():
    session, starts = FakeSession(), np.arange(9.0).reshape(3, 3)
    result = align_chunk(session, ParticleBatch(("a", "b", "c"), lambda i: None), np.eye(3)[None].repeat(3, 0), starts, starts, (), False)
    assert session.levels == [] and result.estimates is None and np.array_equal(result.shifts_angst, starts)


def test_a_relaxed_symmetry_starts_from_all_copies_and_keeps_some_of_each():
    session, starts = FakeSession(), np.arange(6.0).reshape(2, 3)
    plan = SearchPlan(12.0, 1, 20.0, 20.0, relaxed="D2")
    levels = search_levels(plan, 64, 4.0, 20.0)
    assert all(level.keep == 8 for level in levels[:-1]) and levels[-1].keep == MODES
    seen = []

    def search(candidates, anchor_angst, level):
        seen.append(candidates)
        return FakeSession.search(session, candidates, anchor_angst, level)

    session.search = search
    turns = Rotation.random(2, random_state=1).as_matrix()
    align_chunk(session, ParticleBatch(("a", "b"), lambda i: None), turns, starts, starts, levels, False, plan)
    copies = turns[:, None] @ np.array([np.eye(3), np.diag([-1.0, -1, 1]), np.diag([1.0, -1, -1]), np.diag([-1.0, 1, -1])])
    found = seen[0].rotations.reshape(2, 4, 9)
    assert np.abs(found[:, :, None] - copies.reshape(2, 1, 4, 9)).max(-1).min(1).max() < 1e-12
    assert np.array_equal(seen[0].shifts_angst, np.repeat(starts[:, None], 4, axis=1)) and np.isfinite(seen[0].scores).all()


@pytest.mark.filterwarnings("error")
def test_unlikely_candidates_are_dropped_without_a_warning_where_there_are_none():
    scores = np.array([[5.0, 5.0 - 0.99 * UNLIKELY / 2, 5.0 - 1.01 * UNLIKELY / 2], [-np.inf] * 3, [1.0, -np.inf, -np.inf]])
    candidates = Candidates(np.broadcast_to(np.eye(3), (3, 3, 3, 3)), np.zeros((3, 3, 3)), scores)
    left = drop_unlikely(candidates, 2.0).scores > -np.inf
    assert left.tolist() == [[True, True, False], [False] * 3, [True, False, False]]
    assert drop_unlikely(candidates, 0.0) is candidates


def test_another_mode_counts_by_its_probability_and_distance():
    """Four particles: a mode 90 degrees and 30 A away at even odds; one at odds of 1 to e^10; none; one that a four-fold axis makes the same."""
    quarter = Rotation.from_rotvec([0, 0, np.pi / 2]).as_matrix()
    rotations = np.stack([np.stack([np.eye(3), quarter])] * 4)
    rotations[1] = rotations[1, ::-1]  # the pose found may be the second candidate
    shifts = np.zeros((4, 2, 3))
    shifts[0, 1, 0] = shifts[3, 1, 0] = 30.0
    estimates = SimpleNamespace(rotations=np.stack([np.eye(3)] * 4), shifts_angst=np.zeros((4, 3)), margin=np.array([0.0, 10.0, np.inf, 0.0]))
    found = other_modes(Candidates(rotations, shifts, np.zeros((4, 2))), estimates, "C1")
    odds = 1 / (1 + np.exp(10.0))
    np.testing.assert_allclose(found[:, 0], np.array([0.5, odds, 0.0, 0.5]) * (np.pi / 2) ** 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], [0.5 * 30**2 / 3, 0, 0, 0.5 * 30**2 / 3], atol=1e-9)
    assert np.abs(other_modes(Candidates(rotations, shifts, np.zeros((4, 2))), estimates, "C4")[:, 0]).max() < 1e-6
