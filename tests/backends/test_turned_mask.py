"""flcf under a mask that turns with the reference, against sums over voxels and the slow oracle."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage
from scipy.spatial.transform import Rotation

from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.protocols import as_candidates
from numba_glocal.backends.reference import ReferenceBackend
from numba_glocal.backends.turned_mask import TurnedMask

from .test_contract import all_scores, opened


def slab(n):
    """A soft mask that is long, flat and beside the centre, so that any wrong turn or sign shows; its turns stay in the box."""
    z, y, x = np.indices((n,) * 3) - n // 2
    distance = np.maximum.reduce([np.abs(x - 0.04 * n) - 0.13 * n, np.abs(y) - 0.09 * n, np.abs(z + 0.03 * n) - 0.02 * n])
    return (0.5 + 0.5 * np.cos(np.pi * np.clip(distance / (0.12 * n), 0, 1))).astype(np.float32)


def test_deviations_are_those_under_the_turned_mask():
    """By splines in real space; the volume's deviation is five times larger on one side, so that the place of the mask matters."""
    n, rng = 32, np.random.default_rng(3)
    mask = slab(n)
    x = ndimage.gaussian_filter(rng.normal(size=(n,) * 3), 0.8)
    x *= np.where(np.indices((n,) * 3)[2] > n // 2, 5.0, 1.0)
    rotations = Rotation.random(5, random_state=2).as_matrix()
    shifts = rng.uniform(-3, 3, (4, 3))
    turned_mask = TurnedMask(mask)
    found = turned_mask.deviations(turned_mask.spectra(x.astype(np.float32)), rotations, shifts)
    assert turned_mask.total == pytest.approx(mask.sum())
    exact = np.empty_like(found)
    for a, rotation in enumerate(rotations):
        turned, centre = rotation.T[::-1, ::-1], np.full(3, n // 2)
        for t, shift in enumerate(shifts):
            m = ndimage.affine_transform(mask.astype(float), turned, centre - turned @ (centre + shift[::-1]), order=3)
            mean = (m * x).sum() / m.sum()
            exact[a, t] = np.sqrt((m * x * x).sum() / m.sum() - mean**2)
    assert np.ptp(exact) > 0.5 * exact.mean()
    np.testing.assert_allclose(found, exact, rtol=0.01)


@pytest.mark.parametrize("weight", ["none", "wedge", "ctf2"])
def test_scores_follow_the_oracle(make_case, weight):
    case = make_case(16, weight, score="flcf", particles=2).with_setup(local_mask=slab(16))
    level = case.level(reach_deg=60.0)
    fast, exact = (all_scores(opened(backend, case), case, level) for backend in (CPUBackend(), ReferenceBackend()))
    plain = case.with_setup(local_mask=None)
    sphere = all_scores(opened(CPUBackend(), plain), plain, level)
    for (a, shift_a), (b, shift_b), (c, _) in zip(fast, exact, sphere, strict=True):
        assert np.corrcoef(a, b)[0, 1] > (0.995 if weight == "none" else 0.98)
        assert 0.96 < np.mean(a / b) < 1.17  # as test_contract has it for the sphere
        assert (np.linalg.norm(shift_a - shift_b, axis=1) < 1e-6).mean() >= 0.65  # neighbours at nearly the same score
        assert np.corrcoef(a / c, b / c)[0, 1] > 0.9 and np.std(b / c) > 0.02  # the mask's own share, which turns change
    starts = as_candidates(case.rotations, case.shifts_angst)
    refined = [opened(backend, case).refine(starts, case.shifts_angst) for backend in (CPUBackend(), ReferenceBackend())]
    np.testing.assert_allclose(refined[0].scores, refined[1].scores, rtol=0.03)


def test_a_sphere_as_mask_file_is_the_sphere(make_case):
    """Both ways to the same numbers: a table over positions, and products with turned masks."""
    case = make_case(20, "wedge", score="flcf", particles=2)
    level = case.level(20)
    session = opened(CPUBackend(), case)
    by_table = all_scores(session, case, level)
    by_products = all_scores(opened(CPUBackend(), turned := case.with_setup(local_mask=session._mask)), turned, level)
    for (a, _), (b, _) in zip(by_table, by_products, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.03)
