"""Every fast backend against the slow oracle, on made particles with planted poses.

Where the numbers come from. The fast search turns the *particle* into the reference's frame by trilinear interpolation of its padded
spectrum: errors of 2-4 % of the amplitude, more where a wedge's edge crosses the coarse grid of a small box. Refinement interpolates the
*reference*: 1-2 %. In a box of 16 there are only about 400 samples to average such errors over, so poses differ by up to a few hundredths
of a voxel at the rim of the particle (0.02-0.05 voxels; at the usual 64 voxels, with 64 times as many samples, by 0.005).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.averaging import reconstruct
from numba_glocal.backends.protocols import Candidates, ParticleBatch, ParticleMask, SumSetup, as_candidates
from numba_glocal.backends.reference import ReferenceBackend
from numba_glocal.errors import BadParticleError
from numba_glocal.noise import NoiseModel
from numba_glocal.phantom import render_phantom
from numba_glocal.pose_prior import PosePrior, PriorWidths
from numba_glocal.values import SCORES


def opened(backend: Any, case: Any, prior: PosePrior | None = None) -> Any:
    session = backend.open_search(case.setup)
    assert session.load(case.batch, prior) == []
    return session


def angle_deg(a: Any, b: Any) -> Any:
    return np.rad2deg(Rotation.from_matrix((a @ np.swapaxes(b, -1, -2)).reshape(-1, 3, 3)).magnitude())


def by_rotation(found: Candidates, start: Any, rotations: Any) -> Any:
    """Scores (a,) and shifts (a, 3) of one particle in the order of the level's rotations."""
    wanted = (start @ rotations).reshape(len(rotations), 9)
    distance = np.abs(wanted[:, None] - found.rotations[0].reshape(-1, 9)[None]).max(-1)
    assert distance.min(1).max() < 1e-9, "every rotation of the level must come back"
    row = distance.argmin(1)
    return found.scores[0, row], found.shifts_angst[0, row]


def all_scores(session: Any, case: Any, level: Any) -> list[Any]:
    found = session.search(case.starts, case.starts.shifts_angst[:, 0], level)
    out = []
    for p in range(len(case.volumes)):
        one = Candidates(found.rotations[p : p + 1], found.shifts_angst[p : p + 1], found.scores[p : p + 1])
        out.append(by_rotation(one, case.starts.rotations[p, 0], level.rotations))
    return out


# -- search ----------------------------------------------------------------------------------------------------------

CORRELATION = {"none": 0.998, "wedge": 0.998, "ctf": 0.985, "ctf2": 0.985}
"""Least correlation of fast and exact scores over candidates up to 40 degrees apart. Edges of C and few useful samples cost most."""

RATIO = {"none": (0.99, 1.01), "ctf": (0.98, 1.045), "wedge": (0.97, 1.16), "ctf2": (0.97, 1.16)}
"""Mean of fast over exact. A wedge's edge is interpolated: samples just outside it, into which the mask leaks signal, then count a little.
In a box of 16 they are a quarter of the band. With V ~ C they count more (see below)."""


@pytest.mark.parametrize(
    ("n", "score", "weight", "gamma"),
    [(16, score, weight, 0.0) for score in SCORES for weight in ("none", "wedge", "ctf2", "ctf")]
    + [(16, "ml", "ctf2", 1.0), (16, "ncc", "ctf", 1.0), (16, "flcf", "ctf2", 1.0), (15, "ml", "wedge", 0.0), (15, "flcf", "ctf", 0.0)]
    + [(20, "ml", "wedge", 0.0), (20, "ncc", "none", 0.0)],
)
def test_search_scores_follow_the_exact_ones(make_backend, make_case, n, score, weight, gamma):
    case = make_case(n, weight, gamma=gamma, score=score, particles=2)
    level = case.level(reach_deg=40.0)
    fast, exact = (all_scores(opened(backend, case), case, level) for backend in (make_backend(), ReferenceBackend()))
    low, high = RATIO[weight] if not (gamma and weight == "ctf2" and score == "ml") else (1.0, 1.4)
    for (a, shift_a), (b, shift_b) in zip(fast, exact, strict=True):
        assert np.corrcoef(a, b)[0, 1] > CORRELATION[weight]
        assert low < np.mean(a / b) < high
        assert (b > b[a.argmax()]).sum() <= 2, "the fast winner is one of the three best"
        # the trial shifts are the same; a few rotations may prefer the neighbour, at nearly the same score
        step = 0.8 * case.voxel_angst
        distance = np.linalg.norm(shift_a - shift_b, axis=1)
        assert (distance < 1e-6).mean() >= 0.85
        assert distance.max() < 1.01 * np.sqrt(3) * step


def test_scores_of_a_perfect_particle(make_backend, make_case):
    """Centred, without noise or wedge, at the planted pose: ncc is 1, flcf 1 up to what the mask cuts."""
    for backend in (make_backend(), ReferenceBackend()):
        for score, tolerance in (("ncc", 0.015), ("flcf", 0.06)):
            case = make_case(16, "none", noise=0.0, score=score, particles=2, spread_voxels=0.0)
            session = opened(backend, case)
            refined = session.refine(as_candidates(case.rotations, case.shifts_angst), case.shifts_angst)
            np.testing.assert_allclose(refined.scores, 1.0, atol=tolerance)
            assert (rim_voxels(case, refined, case) < 0.1).all()


def test_every_start_is_searched_and_unused_ones_are_not(make_backend, make_case):
    case = make_case(16, "wedge", particles=2)
    far = Rotation.from_rotvec([0.0, 1.5, 0.0]).as_matrix()
    rotations = np.stack([case.rotations @ far, case.starts.rotations[:, 0]], axis=1)
    shifts = np.repeat(case.starts.shifts_angst, 2, axis=1)
    level = case.level(20, keep=3, separation_deg=2.0)
    for backend in (make_backend(), ReferenceBackend()):
        session = opened(backend, case)
        both = session.search(Candidates(rotations, shifts, np.zeros((2, 2))), shifts[:, 0], level)
        assert (angle_deg(both.rotations[:, 0], case.rotations) < 15).all()
        far_only = session.search(Candidates(rotations, shifts, np.array([[0.0, -np.inf]] * 2)), shifts[:, 0], level)
        assert (angle_deg(far_only.rotations[:, 0], case.rotations) > 60).all()
        assert (both.scores[:, 0] > far_only.scores[:, 0]).all()
        nothing = session.search(Candidates(rotations, shifts, np.full((2, 2), -np.inf)), shifts[:, 0], level)
        assert (nothing.scores == -np.inf).all()


def test_unusable_particles_are_named_and_left_out(make_backend, make_case):
    case = make_case(16, "wedge", particles=4)
    only_corner = np.zeros_like(case.weights[0])
    only_corner[8, 8, 8] = 1.0

    def read(i):
        if i == 1:
            raise BadParticleError("b", "constant")
        return case.volumes[i], only_corner if i == 2 else case.weights[i]

    batch = ParticleBatch(("a", "b", "c", "d"), read)
    level = case.level(10, keep=1)
    results = []
    for backend in (make_backend(), ReferenceBackend()):
        session = backend.open_search(case.setup)
        bad = session.load(batch)
        assert [index for index, _ in bad] == [1, 2]
        assert bad[0][1] == "constant"
        found = session.search(case.starts, case.shifts_angst, level)
        assert np.isfinite(found.scores[[0, 3]]).all()
        assert (found.scores[[1, 2]] == -np.inf).all()
        refined = session.refine(found, case.shifts_angst)
        assert (refined.scores[[1, 2]] == -np.inf).all()
        assert np.isfinite(refined.scores[[0, 3]]).all()
        results.append(session.residuals(refined.rotations, refined.shifts_angst)[0].count)
        sums = backend.open_sum(SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise))
        assert sums.add(batch, case.rotations, case.shifts_angst) == [(1, "constant")]
        assert sums.result().n_particles == 3
    np.testing.assert_array_equal(*results)


# -- refinement ------------------------------------------------------------------------------------------------------


def rim_voxels(case: Any, a: Any, b: Any) -> Any:
    """Difference of two poses at the rim of the particle mask, voxels (p,)."""
    turned = np.deg2rad(angle_deg(a.rotations, b.rotations)) * case.setup.particle_mask.radius_voxels
    return np.hypot(turned, np.linalg.norm(a.shifts_angst - b.shifts_angst, axis=1) / case.voxel_angst)


@pytest.mark.parametrize(
    ("n", "weight", "gamma"),
    [
        (16, "none", 0.0),
        (16, "wedge", 0.0),
        (16, "ctf2", 0.0),
        (16, "ctf2", 1.0),
        (16, "ctf", 0.0),
        (16, "ctf", 1.0),
        (15, "wedge", 0.0),
        (20, "wedge", 0.0),
    ],
)
def test_refinement_finds_the_exact_optimum(make_backend, make_case, n, weight, gamma):
    case = make_case(n, weight, gamma=gamma, particles=2, noise=2.0)
    sessions = [opened(backend, case) for backend in (make_backend(), ReferenceBackend())]
    fast, exact = (session.refine(case.starts, case.shifts_angst) for session in sessions)
    # what the fast pose loses of the exact log-likelihood: 0.06 is a third of a standard deviation in one of six directions
    judge = sessions[1]
    for p, particle in enumerate(judge._particles):
        samples = particle.samples.within(0.0, case.setup.k_max)
        num, den = judge.sums(samples, samples.data, fast.rotations[p], fast.shifts_angst[p])
        loss = exact.log_likelihood[p] - judge._mask_mean_square * (2.0 * num - den)
        assert -1e-4 < loss < (0.3 if weight == "ctf2" else 0.06)
        np.testing.assert_allclose([fast.numerator[p], fast.denominator[p]], [num, den], rtol=0.01)
        np.testing.assert_allclose(fast.scores[p], 2.0 * num - den, rtol=0.01)
        # covariances by their axes' lengths, and what one says of the other
        relative = np.linalg.eigvals(np.linalg.solve(exact.covariances[p], fast.covariances[p])).real
        assert 0.8 < relative.min() and relative.max() < 1.2
        np.testing.assert_allclose(np.diagonal(fast.covariances[p]), np.diagonal(exact.covariances[p]), rtol=0.12)
    # CTF^2 leaves few useful samples: standard deviations are 0.3 voxels at the rim there
    assert (rim_voxels(case, fast, exact) < (0.25 if weight == "ctf2" else 0.08)).all()
    assert ((fast.steps > 0) & (fast.steps <= 8)).all()


@pytest.mark.parametrize("score", SCORES)
def test_refined_scores_are_of_the_asked_kind(make_backend, make_case, score):
    case = make_case(16, "ctf2", score=score, particles=2)
    fast, exact = (opened(backend, case).refine(case.starts, case.shifts_angst) for backend in (make_backend(), ReferenceBackend()))
    np.testing.assert_allclose(fast.scores, exact.scores, rtol=0.015)
    np.testing.assert_allclose(fast.log_likelihood, exact.log_likelihood, rtol=0.01)


def test_covariance_is_the_scatter_of_refined_poses(make_backend, make_case):
    """Many particles that differ in noise alone: errors over predicted deviations have RMS near 1 in each of the six unknowns.

    White noise under the mask, the reference known: the prediction is 0.7-0.85 of the error at 64 voxels, and here too it is a little small.
    """
    one = make_case(16, "wedge", noise=1.5, particles=1, seed=3)
    many = make_case(16, "wedge", noise=1.5, seed=3, spread_voxels=0.3, rotations=np.repeat(one.rotations, 80, axis=0))
    session = opened(make_backend(), many)
    found = session.refine(as_candidates(many.rotations, many.shifts_angst), many.shifts_angst)
    turn = Rotation.from_matrix(found.rotations @ np.swapaxes(many.rotations, 1, 2)).as_rotvec()
    error = np.concatenate([turn, found.shifts_angst - many.shifts_angst], axis=1)
    error -= error.mean(0)  # the model's misfit is the same for all
    whitened = np.stack([np.linalg.solve(np.linalg.cholesky(c), e) for c, e in zip(found.covariances, error, strict=True)])
    rms = np.sqrt((whitened**2).mean(0))
    assert ((rms > 0.7) & (rms < 1.6)).all()


def test_no_steps_leave_the_poses_and_give_their_sums(make_backend, make_case):
    case = make_case(16, "ctf2", gamma=1.0, particles=2, noise=1.5)
    away = as_candidates(case.rotations, case.shifts_angst + 0.5 * case.voxel_angst)
    fast, exact = (opened(backend, case).refine(away, case.shifts_angst, 0) for backend in (make_backend(), ReferenceBackend()))
    for found in (fast, exact):
        np.testing.assert_array_equal(found.rotations, case.rotations)
        np.testing.assert_allclose(found.shifts_angst, away.shifts_angst[:, 0], rtol=1e-12)
        assert (found.steps == 0).all()
    np.testing.assert_allclose(fast.numerator, exact.numerator, rtol=0.02)
    np.testing.assert_allclose(fast.denominator, exact.denominator, rtol=0.02)


def test_margin_is_the_gain_over_another_pose(make_backend, make_case):
    """Two starts that refine to different optima: the margin is the difference of their likelihoods; to the same: infinite."""
    case = make_case(16, "none", particles=1, noise=2.0)
    turned = case.rotations @ Rotation.from_rotvec([0.0, 0.0, np.pi]).as_matrix()
    for backend in (make_backend(), ReferenceBackend()):
        session = opened(backend, case)
        alone = [session.refine(as_candidates(r, case.shifts_angst), case.shifts_angst) for r in (case.rotations, turned)]
        rotations = np.stack([turned, case.rotations], axis=1)
        shifts = np.repeat(case.shifts_angst[:, None], 2, axis=1)
        both = session.refine(Candidates(rotations, shifts, np.zeros((1, 2))), case.shifts_angst)
        np.testing.assert_allclose(both.log_likelihood, alone[0].log_likelihood, rtol=1e-6)
        np.testing.assert_allclose(both.margin, alone[0].log_likelihood - alone[1].log_likelihood, rtol=1e-4)
        same = session.refine(Candidates(rotations[:, [1, 1]], shifts, np.zeros((1, 2))), case.shifts_angst)
        assert np.isinf(same.margin).all()


# -- planted poses ---------------------------------------------------------------------------------------------------


def relion(rot: float, tilt: float, psi: float) -> Any:
    return Rotation.from_euler("ZYZ", [rot, tilt, psi], degrees=True).inv().as_matrix()


def test_planted_poses_are_found_from_nothing(make_backend, make_case):
    """Sign and handedness: a global search from the identity, then a local one, then refinement, ends at the pose that was rendered."""
    planted = np.concatenate(
        [
            np.stack([np.eye(3), relion(30, 0, 0), relion(0, 180, 0), relion(75, 180, -20), relion(-110, 90, 40)]),
            Rotation.random(5, random_state=5).as_matrix(),
        ]
    )
    case = make_case(20, "wedge", noise=0.5, seed=2, spread_voxels=0.7, rotations=planted)
    n = len(planted)
    session = opened(make_backend(), case)
    nowhere = as_candidates(np.repeat(np.eye(3)[None], n, axis=0), np.zeros((n, 3)))
    origin = np.zeros((n, 3))
    everywhere = replace(
        case.level(keep=4, separation_deg=15.0, k_max=6.0, shift_radius_angst=2.4 * case.voxel_angst, shift_step_angst=1.2 * case.voxel_angst),
        rotations=Rotation.random(1500, random_state=9).as_matrix(),
    )
    near = case.level(200, reach_deg=15.0, keep=1, shift_radius_angst=1.6 * case.voxel_angst)
    found = session.refine(session.search(session.search(nowhere, origin, everywhere), origin, near), origin)
    # where R carries an axis of the grid onto one, every sample meets a node of the padded grid and linear interpolation is at its worst
    assert (rim_voxels(case, found, case) < 0.25).all()
    assert (rim_voxels(case, found, case)[4:] < 0.15).all()


def test_shifts_come_back_in_angstrom_of_the_unbinned_grid(make_backend, make_case):
    """Box 30 worked on at 20: what comes back is the planted shift, not 2/3 of it; search and oracle try the same places."""
    case = make_case(20, "wedge", box=30, noise=0.5, particles=2, spread_voxels=1.5)
    assert case.setup.grid.pixel_size_angst == pytest.approx(400 / 30) and case.voxel_angst == pytest.approx(20.0)
    start = as_candidates(case.rotations, np.zeros((2, 3)))
    level = case.level(8, reach_deg=6.0, shift_radius_angst=3.0 * case.voxel_angst, shift_step_angst=case.voxel_angst, keep=1)
    ends = []
    for backend in (make_backend(), ReferenceBackend()):
        session = opened(backend, case)
        found = session.search(start, np.zeros((2, 3)), level)
        assert np.linalg.norm(found.shifts_angst[:, 0] - case.shifts_angst, axis=1).max() < 0.9 * case.voxel_angst
        ends.append((found.shifts_angst[:, 0], session.refine(found, np.zeros((2, 3)))))
        assert np.linalg.norm(ends[-1][1].shifts_angst - case.shifts_angst, axis=1).max() < 0.15 * case.voxel_angst
    np.testing.assert_allclose(ends[0][0], ends[1][0], atol=1e-6)
    assert np.linalg.norm(case.shifts_angst, axis=1).min() > 0.9 * case.voxel_angst, "a shift in wrong units must stand out"


# -- every setting changes both --------------------------------------------------------------------------------------


def observed(backend: Any, case: Any, level: Any) -> dict[str, Any]:
    session = opened(backend, case)
    found = session.search(case.starts, case.shifts_angst, level)
    refined = session.refine(case.starts, case.shifts_angst)
    return {
        "search": found.scores[:, 0],
        "score": refined.scores,
        "den": refined.denominator,
        "num": refined.numerator,
        "llh": refined.log_likelihood,
        "sd": np.sqrt(refined.covariances[:, 3, 3]),
    }


def noise_like(case: Any, **changes: Any) -> NoiseModel:
    return replace(case.setup.noise, **changes)


def _sigma2(case: Any) -> Any:
    sigma2 = case.setup.noise.sigma2.copy()
    sigma2[4:] *= 3.0
    return case.with_setup(noise=noise_like(case, sigma2=sigma2))


SETTINGS = {
    "k_min": (lambda c: c.with_setup(k_min=2.0), "search den num score sd"),
    "k_max": (lambda c: c.with_setup(k_max=4.0), "search den num score sd"),
    "gamma": (lambda c: c.with_setup(noise=noise_like(c, gamma=0.5)), "search den num score sd"),
    "epsilon": (lambda c: c.with_setup(noise=noise_like(c, epsilon=0.3)), "search den num score sd"),
    "sigma2": (_sigma2, "search den num score sd"),
    "ncc": (lambda c: c.with_setup(score="ncc"), "search score"),
    "flcf": (lambda c: c.with_setup(score="flcf"), "search score"),
    "mask radius": (lambda c: c.with_setup(particle_mask=ParticleMask(0.2 * 16, c.setup.particle_mask.soft_edge_voxels)), "search num llh sd"),
    "soft edge": (lambda c: c.with_setup(particle_mask=ParticleMask(c.setup.particle_mask.radius_voxels, 0.4)), "llh sd"),
    "reference": (lambda c: c.with_setup(reference=0.5 * c.setup.reference), "search den num score sd"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_changes_both(make_backend, make_case, setting):
    """What a setting changes, it changes by the same factor in both (8 %: the interpolation errors of the module's head)."""
    case = make_case(16, "ctf", gamma=1.0, particles=2, noise=1.5)
    change, names = SETTINGS[setting]
    changed = change(case)
    before, after = ([observed(b, c, c.level(12, keep=1)) for b in (make_backend(), ReferenceBackend())] for c in (case, changed))
    for name in names.split():
        fast, exact = after[0][name] / before[0][name], after[1][name] / before[1][name]
        assert np.abs(np.log(np.abs(exact))).min() > 0.01, f"{setting} should change {name}: {exact}"
        np.testing.assert_allclose(fast, exact, rtol=0.08, err_msg=name)


def test_level_band_changes_both(make_backend, make_case):
    case = make_case(16, "ctf", particles=2)
    results = []
    for k_max in (6.0, 4.0, 9.0):
        level = case.level(12, keep=1, k_max=k_max)
        results.append([opened(b, case).search(case.starts, case.shifts_angst, level).scores[:, 0] for b in (make_backend(), ReferenceBackend())])
    for fast, exact in results:
        np.testing.assert_allclose(fast, exact, rtol=0.05)
    assert (results[1][1] < 0.97 * results[0][1]).all()
    np.testing.assert_allclose(results[2][0], results[0][0], err_msg="a level cannot exceed the session's band")


@pytest.mark.parametrize(("keep", "separation_deg"), [(1, 5.0), (4, 5.0), (4, 25.0), (30, 30.0)])
def test_keep_and_separation(make_backend, make_case, keep, separation_deg):
    case = make_case(16, "none", particles=2)
    level = case.level(40, reach_deg=60.0, keep=keep, separation_deg=separation_deg)
    fast, exact = (opened(b, case).search(case.starts, case.shifts_angst, level) for b in (make_backend(), ReferenceBackend()))
    for found in (fast, exact):
        assert found.scores.shape == (2, keep)
        for p in range(2):
            used = found.rotations[p][found.scores[p] > -np.inf]
            apart = [angle_deg(a, b)[0] for i, a in enumerate(used) for b in used[:i]]
            assert all(angle >= separation_deg - 1e-4 for angle in apart)
            assert (np.diff(found.scores[p][: len(used)]) <= 0).all()
    assert ((fast.scores > -np.inf).sum(1) >= 1).all()
    if keep == 30:
        assert ((fast.scores > -np.inf).sum(1) < 20).all(), "the separation, not the number, is the limit here"
        assert np.abs((fast.scores > -np.inf).sum(1) - (exact.scores > -np.inf).sum(1)).max() <= 2
    else:
        assert (fast.scores > -np.inf).all() and (exact.scores > -np.inf).all()
        np.testing.assert_allclose(fast.scores, exact.scores, rtol=0.05)


@pytest.mark.parametrize(("radius", "step"), [(0.0, 1.0), (1.0, 1.0), (2.0, 0.7), (3.0, 1.0), (2.2, 0.4)])
def test_shift_range_changes_both(make_backend, make_case, radius, step):
    """Far-off starts: what the range allows is found, and it is the oracle's place."""
    case = make_case(16, "none", particles=2, spread_voxels=0.0)
    away = 2.0 * case.voxel_angst * np.array([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
    start = as_candidates(case.starts.rotations[:, 0], away)
    level = case.level(6, reach_deg=4.0, keep=1, shift_radius_angst=radius * case.voxel_angst, shift_step_angst=step * case.voxel_angst)
    fast, exact = (opened(b, case).search(start, away, level) for b in (make_backend(), ReferenceBackend()))
    np.testing.assert_allclose(fast.shifts_angst, exact.shifts_angst, atol=1e-6)
    moved = np.linalg.norm(fast.shifts_angst[:, 0] - away, axis=1) / case.voxel_angst
    assert (moved <= 1.01 * radius + 1e-9).all()
    assert (np.linalg.norm(fast.shifts_angst[:, 0], axis=1) / case.voxel_angst < max(2.0 - radius, 0.0) + 0.87 * step + 0.3).all()


def test_max_shift_limits_search_and_refinement(make_backend, make_case):
    case = make_case(16, "wedge", particles=2, noise=0.5, spread_voxels=0.0)
    anchor = 1.5 * case.voxel_angst * np.array([[0.8, 0.0, 0.6], [0.0, -0.6, 0.8]])
    limit = 0.8 * case.voxel_angst
    free, bound = case, case.with_setup(max_shift_angst=limit)
    # the ball of trial shifts is not centred on the limit's: which places are allowed depends on their directions
    start = as_candidates(case.starts.rotations[:, 0], anchor + 0.6 * case.voxel_angst * np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    level = case.level(10, reach_deg=6.0, keep=1, shift_radius_angst=2.0 * case.voxel_angst, shift_step_angst=0.5 * case.voxel_angst)
    ends = []
    for backend in (make_backend(), ReferenceBackend()):
        loose, tight = opened(backend, free), opened(backend, bound)
        everywhere, within = loose.search(start, anchor, level), tight.search(start, anchor, level)
        distance = np.linalg.norm(within.shifts_angst - anchor[:, None], axis=-1)
        assert distance.max() <= limit * (1 + 1e-5)
        assert np.linalg.norm(everywhere.shifts_angst - anchor[:, None], axis=-1).min() > limit
        assert (within.scores[:, 0] < everywhere.scores[:, 0]).all() and np.isfinite(within.scores).all()
        refined = tight.refine(within, anchor)
        np.testing.assert_allclose(np.linalg.norm(refined.shifts_angst - anchor, axis=1), limit, rtol=1e-4)
        unlimited = loose.refine(everywhere, anchor)
        assert np.linalg.norm(unlimited.shifts_angst, axis=1).max() < 0.2 * case.voxel_angst
        ends.append((within, refined))
    np.testing.assert_allclose(ends[0][0].shifts_angst[:, 0], ends[1][0].shifts_angst[:, 0], atol=1e-6)
    assert (rim_voxels(case, ends[0][1], ends[1][1]) < 0.15).all()
    np.testing.assert_allclose(ends[0][1].log_likelihood, ends[1][1].log_likelihood, rtol=0.01)


def test_a_limit_that_leaves_no_place_leaves_no_candidate(make_backend, make_case):
    case = make_case(16, "none", particles=2, max_shift_angst=1.0)
    anchor = case.starts.shifts_angst[:, 0] + 10 * case.voxel_angst
    anchor[1] = case.starts.shifts_angst[1, 0]
    for backend in (make_backend(), ReferenceBackend()):
        found = opened(backend, case).search(case.starts, anchor, case.level(5))
        assert (found.scores[0] == -np.inf).all()
        assert np.isfinite(found.scores[1]).all()


# -- residuals and sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "weight"), [(16, "wedge"), (16, "ctf"), (15, "ctf2")])
def test_residual_power(make_backend, make_case, n, weight):
    """The same samples in the same bins; power within 4 % where there is noise (1-2 % interpolation error of a weak model)."""
    case = make_case(n, weight, particles=6, k_max=4.0)
    fast, exact = (opened(b, case).residuals(case.rotations, case.shifts_angst)[0] for b in (make_backend(), ReferenceBackend()))
    np.testing.assert_array_equal(fast.count, exact.count)
    np.testing.assert_allclose(fast.weight_sum, exact.weight_sum, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(fast.power.sum(0), exact.power.sum(0), rtol=0.04)
    assert exact.count[:, 7 if n == 16 else 6 :].sum() == 0
    moved = opened(make_backend(), case).residuals(case.rotations, case.shifts_angst + case.voxel_angst)[0]
    assert (moved.power.sum(0)[1:5] > 1.02 * fast.power.sum(0)[1:5]).all()
    np.testing.assert_allclose(moved.power.sum(0)[5:], fast.power.sum(0)[5:], err_msg="nothing is subtracted beyond the band")


@pytest.mark.parametrize(("weight", "signed"), [("ctf2", False), ("ctf", True)])
def test_residuals_of_each_particle_add_up(make_backend, make_case, weight, signed):
    """They are those of all, particle by particle; one that cannot be used has none."""
    case = make_case(16, weight, particles=3)
    session = opened(make_backend(), case)
    each, found = session.residuals_each(case.rotations, case.shifts_angst)
    total = session.residuals(case.rotations, case.shifts_angst)[0]
    assert found.tolist() == [signed] * 3
    exact, _ = opened(ReferenceBackend(), case).residuals_each(case.rotations, case.shifts_angst)
    for name in ("power", "count", "weight_sum"):
        assert getattr(each, name).shape == (3, *getattr(total, name).shape)
        np.testing.assert_allclose(getattr(each, name).sum(0), getattr(total, name), rtol=1e-5)
        np.testing.assert_allclose(getattr(each, name).sum(1), getattr(exact, name).sum(1), rtol=0.1, err_msg=name)
    assert np.ptp(each.power.sum((1, 2))) > 0.001 * each.power.sum((1, 2)).mean(), "particles differ"


def test_residuals_at_the_truth_give_back_the_noise(make_backend, make_case):
    """Planted noise: sigma2 of the setup is the variance that the residuals show, in every shell of the band.

    The mask correlates neighbours, so a shell of 24 particles has fewer independent samples than it seems; and the mean outside the mask is
    taken off, which takes a little noise out of the first shells.
    """
    case = make_case(16, "none", particles=24, noise=2.0)
    power = opened(make_backend(), case).residuals(case.rotations, case.shifts_angst)[0]
    shells = slice(3, 7)
    measured = power.power.sum(0)[shells] / power.count.sum(0)[shells]
    np.testing.assert_allclose(measured, case.setup.noise.sigma2[shells], rtol=0.1)


@pytest.mark.parametrize(("n", "weight", "gamma"), [(16, "wedge", 0.0), (16, "ctf2", 1.0), (15, "ctf", 1.0)])
def test_sums_are_the_oracles(make_backend, make_case, n, weight, gamma):
    """The same adjoint, written twice: float32 rounding apart they agree."""
    case = make_case(n, weight, gamma=gamma, particles=3)
    setup = SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise)
    results = []
    for backend in (make_backend(), ReferenceBackend()):
        session = backend.open_sum(setup)
        assert session.add(case.batch, case.rotations, case.shifts_angst) == []
        results.append(session.result())
    fast, exact = results
    assert fast.n_particles == exact.n_particles == 3
    # 1 / V comes from a table of 512 values of a: up to 5 % for a few weights near 0, hence relative to the largest sum
    np.testing.assert_allclose(fast.denominator, exact.denominator, atol=(0.01 if gamma else 1e-5) * exact.denominator.max())
    np.testing.assert_allclose(fast.numerator, exact.numerator, atol=(0.01 if gamma else 1e-5) * np.abs(exact.numerator).max())


def test_a_share_is_that_part_of_a_particle(make_backend, make_case):
    """Sums are linear in the shares: a half and a quarter of two particles are a half and a quarter of each one's own sums."""
    case = make_case(16, "ctf2", gamma=1.0, particles=2)
    setup = SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise)
    for backend, tolerance in ((make_backend(), 1e-5), (ReferenceBackend(), 1e-12)):
        sums = []
        for shares in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.25]):
            session = backend.open_sum(setup)
            assert session.add(case.batch, case.rotations, case.shifts_angst, np.array(shares)) == []
            sums.append(session.result())
        for part in ("numerator", "denominator"):
            first, second, both = (getattr(one, part) for one in sums)
            np.testing.assert_allclose(both, 0.5 * first + 0.25 * second, atol=tolerance * np.abs(both).max())
            assert np.abs(second).max() > 0.1 * np.abs(first).max()


@pytest.mark.parametrize("n", [16, 15])
def test_average_is_the_object(make_backend, make_case, n):
    """Noise-free particles with a wedge, in many directions: the map is the phantom, and what real-space rotation gives."""
    case = make_case(n, "wedge", noise=0.0, particles=25, spread_voxels=0.4)
    setup = SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise)
    sessions = [make_backend().open_sum(setup), ReferenceBackend().open_sum(setup)]
    for session in sessions:
        session.add(case.batch, case.rotations, case.shifts_angst)
    fast, rotated = reconstruct(sessions[0].result(), n).astype(np.float64), sessions[1].volume()
    truth = render_phantom(n, 400.0 / n, diameter_angst=270.0).astype(np.float64)
    k = np.fft.fftfreq(n, 1 / n)
    band = np.sqrt(k[:, None, None] ** 2 + k[None, :, None] ** 2 + np.arange(n // 2 + 1) ** 2) <= n // 2 - 2
    band[0, 0, 0] = False
    low = [np.fft.irfftn(np.fft.rfftn(v) * band, s=v.shape, axes=(0, 1, 2)) for v in (fast, rotated, truth)]
    assert np.corrcoef(low[0].ravel(), low[2].ravel())[0, 1] > 0.99
    assert np.corrcoef(low[0].ravel(), low[1].ravel())[0, 1] > 0.99
    assert (low[0] * low[2]).sum() / (low[2] ** 2).sum() == pytest.approx(1.0, abs=0.05)


# -- priors ----------------------------------------------------------------------------------------------------------


def prior_beside(case: Any, widths: PriorWidths, angle_deg: float = 4.0, shift_voxels: float = 0.7, copies: int = 1) -> PosePrior:
    """About places beside the planted poses; further copies are half turns away from them."""
    beside = Rotation.from_rotvec(np.deg2rad(angle_deg) * np.array([0.6, -0.64, 0.48])).as_matrix()
    about = case.rotations @ beside
    turns = [Rotation.from_rotvec([0.0, 0.0, 2.0 * np.pi / copies * i]).as_matrix() for i in range(copies)]
    shifts = case.shifts_angst + shift_voxels * case.voxel_angst * np.array([0.48, 0.6, -0.64])
    return PosePrior(widths, np.stack([about @ turn for turn in turns], axis=1), shifts)


@pytest.mark.parametrize(
    "widths", [PriorWidths(angle_deg=3.0), PriorWidths(shift_angst=8.0), PriorWidths(max_angle_deg=9.0), PriorWidths(4.0, 10.0, 14.0)]
)
def test_search_scores_with_a_prior_follow_the_exact_ones(make_backend, make_case, widths):
    case = make_case(16, "wedge", particles=2, noise=3.0)
    level = case.level(60, reach_deg=20.0)
    prior = prior_beside(case, widths, copies=2)
    for p in range(2):
        found = []
        for backend in (make_backend(), ReferenceBackend()):
            scored = opened(backend, case, prior).search(case.starts, case.starts.shifts_angst[:, 0], level)
            kept = scored.scores[p] > -np.inf
            wanted = (case.starts.rotations[p, 0] @ level.rotations).reshape(len(level.rotations), 9)
            row = np.abs(scored.rotations[p, kept].reshape(-1, 9)[:, None] - wanted).max(-1).argmin(1)
            scores = np.full(len(wanted), -np.inf)
            scores[row] = scored.scores[p, kept]
            found.append(scores)
        fast, exact = found
        assert ((fast > -np.inf) == (exact > -np.inf)).all(), "the same rotations are within the limit"
        inside = exact > -np.inf
        assert inside.sum() > 2 and (inside.all() or widths.max_angle_deg < 15)
        assert np.corrcoef(fast[inside], exact[inside])[0, 1] > CORRELATION["wedge"] - 0.003
        assert (exact > exact[fast.argmax()]).sum() <= 2


@pytest.mark.parametrize(
    "widths",
    [PriorWidths(angle_deg=1.5), PriorWidths(shift_angst=4.0), PriorWidths(2.0, 6.0), PriorWidths(max_angle_deg=2.0), PriorWidths(3.0, 9.0, 2.5)],
)
def test_refinement_with_a_prior_finds_the_exact_optimum(make_backend, make_case, widths):
    case = make_case(16, "none", particles=2, noise=4.0)
    prior = prior_beside(case, widths, copies=2)
    starts = as_candidates(prior.rotations[:, 0], case.starts.shifts_angst[:, 0])
    fast, exact = (opened(b, case, prior).refine(starts, case.shifts_angst) for b in (make_backend(), ReferenceBackend()))
    free = opened(ReferenceBackend(), case).refine(starts, case.shifts_angst)
    assert rim_voxels(case, exact, free).max() > 0.1, "the prior must matter"
    assert (rim_voxels(case, fast, exact) < 0.08).all()
    np.testing.assert_allclose(fast.log_likelihood, exact.log_likelihood, rtol=0.01)
    np.testing.assert_allclose(fast.scores, exact.scores, rtol=0.01)
    assert (fast.log_likelihood < free.log_likelihood).all()
    np.testing.assert_allclose(np.diagonal(fast.covariances, axis1=1, axis2=2), np.diagonal(exact.covariances, axis1=1, axis2=2), rtol=0.12)
    assert angle_deg(fast.rotations, prior.rotations[:, 0]).max() <= widths.max_angle_deg + 1e-3
    if widths.max_angle_deg == 2.0:
        assert angle_deg(fast.rotations, prior.rotations[:, 0]).min() > 1.99, "the limit must matter"


def test_a_narrow_prior_is_the_result_and_a_wide_one_says_nothing(make_backend, make_case):
    case = make_case(16, "wedge", particles=2, noise=4.0)
    session = opened(make_backend(), case)
    free = session.refine(case.starts, case.shifts_angst)
    for widths, narrow in ((PriorWidths(0.01, 0.05), True), (PriorWidths(1e4, 1e5, 179.0), False)):
        prior = prior_beside(case, widths)
        found = opened(make_backend(), case, prior).refine(case.starts, case.shifts_angst)
        expected = Candidates(prior.rotations, prior.shifts_angst[:, None], np.zeros((2, 1))) if narrow else free
        rotations, shifts = (expected.rotations[:, 0], expected.shifts_angst[:, 0]) if narrow else (free.rotations, free.shifts_angst)
        assert angle_deg(found.rotations, rotations).max() < 0.05 and np.abs(found.shifts_angst - shifts).max() < 0.05
        deviation = np.sqrt(np.diagonal(found.covariances, axis1=1, axis2=2))
        if narrow:
            np.testing.assert_allclose(deviation, np.repeat([[np.deg2rad(0.01), 0.05]], 3, axis=1).repeat(2, 0).reshape(2, 6), rtol=0.02)
        else:
            np.testing.assert_allclose(found.covariances, free.covariances, rtol=1e-3)


def test_a_shift_limit_and_a_turn_limit_hold_together(make_backend, make_case):
    case = make_case(16, "none", particles=2, noise=1.0).with_setup(max_shift_angst=6.0)
    prior = prior_beside(case, PriorWidths(max_angle_deg=2.0), shift_voxels=0.0)
    anchors = case.shifts_angst + np.array([0.0, 12.0, 0.0])
    found = opened(make_backend(), case, prior).refine(as_candidates(prior.rotations[:, 0], anchors), anchors)
    np.testing.assert_allclose(np.linalg.norm(found.shifts_angst - anchors, axis=1), 6.0, rtol=1e-3)
    turned = angle_deg(found.rotations, prior.rotations[:, 0])
    assert turned.max() < 2.001 and (turned > 1.99).any()
    # nothing that is allowed is better, by the oracle
    judge, rng = opened(ReferenceBackend(), case), np.random.default_rng(0)
    for p, particle in enumerate(judge._particles):
        samples = particle.samples.within(0.0, case.setup.k_max)

        def likelihood(rotation: Any, shift: Any, samples: Any = samples) -> float:
            num, den = judge.sums(samples, samples.data, rotation, shift)
            return judge._mask_mean_square * (2.0 * num - den)

        reached, others = likelihood(found.rotations[p], found.shifts_angst[p]), []
        for _ in range(150):
            rotation = Rotation.from_rotvec(rng.normal(0, 0.01, 3)).as_matrix() @ found.rotations[p]
            shift = found.shifts_angst[p] + rng.normal(0, 0.5, 3)
            if angle_deg(rotation, prior.rotations[p, 0])[0] <= 2.0 and np.linalg.norm(shift - anchors[p]) <= 6.0:
                others.append(likelihood(rotation, shift))
        assert len(others) > 10 and max(others) < reached + 0.02
