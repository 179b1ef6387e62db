"""Groups of particles with noise models and gains of their own, in every backend.

Two judges that share nothing with the code: the slow oracle, and what must be the same by itself: a particle scored beside those of other
groups is scored as if it were alone with its model; a gain is a factor on the reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from numba_glocal.backends.protocols import ParticleBatch, SumSetup
from numba_glocal.backends.reference import ReferenceBackend
from numba_glocal.noise import NoiseModel
from numba_glocal.values import SCORES

GROUPS = np.array([1, 0, 1], np.int32)
GAIN = 0.6


def with_groups(case: Any) -> tuple[Any, ParticleBatch]:
    """The case with two noise models, the second of a steeper spectrum, another form and a gain."""
    own = case.setup.noise
    other = NoiseModel(own.sigma2 * np.linspace(0.5, 4.0, len(own.sigma2)), 0.5, 0.1, GAIN)
    return case.with_setup(noise=(own, other)), replace(case.batch, groups=GROUPS)


def everything(backend: Any, setup: Any, batch: ParticleBatch, case: Any) -> dict[str, Any]:
    session = backend.open_search(setup)
    assert session.load(batch) == []
    level = case.level(8, keep=2)
    found = session.search(case.starts, case.shifts_angst, level)
    refined = session.refine(case.starts, case.shifts_angst)
    residuals = session.residuals(case.rotations, case.shifts_angst)
    session.close()
    return {
        "search": found.scores,
        "where": found.shifts_angst,
        "score": refined.scores,
        "num": refined.numerator,
        "den": refined.denominator,
        "llh": refined.log_likelihood,
        "poses": refined.rotations,
        "covariances": refined.covariances,
        "residuals": residuals,
    }


PER_PARTICLE = ("search", "where", "score", "num", "den", "llh", "poses", "covariances")


@pytest.mark.parametrize("score", SCORES)
def test_each_particle_has_the_model_of_its_group(make_backend, make_case, score):
    """Bit by bit what a session with that model alone gives; and it follows the oracle."""
    plain = make_case(16, "ctf", gamma=1.0, particles=3, noise=1.5, score=score)
    case, batch = with_groups(plain)
    together = everything(make_backend(), case.setup, batch, case)
    for group, model in enumerate(case.setup.models):
        alone = everything(make_backend(), replace(case.setup, noise=model), case.batch, case)
        rows = GROUPS == group
        for name in PER_PARTICLE:
            np.testing.assert_array_equal(together[name][rows], alone[name][rows], err_msg=name)
            assert name in ("where", "poses") or not np.array_equal(together[name][~rows], alone[name][~rows]), name
    exact = everything(ReferenceBackend(), case.setup, batch, case)
    np.testing.assert_allclose(together["search"][:, 0], exact["search"][:, 0], rtol=0.1)  # see test_contract, RATIO
    for name in ("score", "num", "den", "llh"):
        np.testing.assert_allclose(together[name], exact[name], rtol=0.02, err_msg=name)
    assert together["residuals"].keys() == exact["residuals"].keys() == {0, 1}
    for group in (0, 1):
        np.testing.assert_array_equal(together["residuals"][group].count, exact["residuals"][group].count)
        np.testing.assert_allclose(together["residuals"][group].power.sum(0), exact["residuals"][group].power.sum(0), rtol=0.05)


@pytest.mark.parametrize("score", SCORES)
def test_a_gain_is_a_factor_on_the_reference(make_backend, make_case, score):
    case = make_case(16, "ctf2", gamma=1.0, particles=2, noise=1.5, score=score)
    scaled = replace(case.setup, noise=replace(case.setup.noise, gain=GAIN))
    weaker = replace(case.setup, reference=np.float32(GAIN) * case.setup.reference)
    for backend in (make_backend(), ReferenceBackend()):
        a, b, c = (everything(backend, setup, case.batch, case) for setup in (scaled, weaker, case.setup))
        for name in ("search", "score", "num", "den", "llh"):
            np.testing.assert_allclose(a[name], b[name], rtol=2e-4, err_msg=name)
        np.testing.assert_allclose(a["covariances"], b["covariances"], rtol=1e-2, atol=1e-3 * np.abs(b["covariances"]).max())
        np.testing.assert_allclose(a["residuals"][0].power, b["residuals"][0].power, rtol=1e-4)
        np.testing.assert_allclose(a["den"], GAIN**2 * c["den"], rtol=0.05, err_msg="the optimum moves a little")
        if score != "ml":  # normalised scores do not ask how strong the signal is
            np.testing.assert_allclose(a["score"], c["score"], rtol=0.02)


@pytest.mark.parametrize(("n", "weight", "gamma"), [(16, "wedge", 0.0), (15, "ctf", 1.0)])
def test_sums_weigh_groups_by_their_noise_and_gain(make_backend, make_case, n, weight, gamma):
    case, batch = with_groups(make_case(n, weight, gamma=gamma, particles=3))
    results = []
    for backend in (make_backend(), ReferenceBackend()):
        session = backend.open_sum(SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise))
        assert session.add(batch, case.rotations, case.shifts_angst) == []
        results.append(session.result())
    fast, exact = results
    # 1 / V comes from a table of 512 values of a: see test_contract
    np.testing.assert_allclose(fast.denominator, exact.denominator, atol=0.01 * exact.denominator.max())
    np.testing.assert_allclose(fast.numerator, exact.numerator, atol=0.01 * np.abs(exact.numerator).max())


def test_equal_models_in_two_groups_are_one(make_backend, make_case):
    """Grouping by itself changes no bit, in scores, poses, residuals and sums."""
    case = make_case(16, "ctf2", gamma=1.0, particles=3)
    same = case.with_setup(noise=(case.setup.noise, case.setup.noise))
    batch = replace(case.batch, groups=GROUPS)
    one, two = everything(make_backend(), case.setup, case.batch, case), everything(make_backend(), same.setup, batch, case)
    for name in PER_PARTICLE:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    np.testing.assert_array_equal(one["residuals"][0].count, two["residuals"][0].count + two["residuals"][1].count)
    sums = []
    for setup, particles in ((case.setup, case.batch), (same.setup, batch)):
        session = make_backend().open_sum(SumSetup(setup.grid, setup.particle_mask, setup.noise))
        session.add(particles, case.rotations, case.shifts_angst)
        sums.append(session.result())
    np.testing.assert_array_equal(sums[0].numerator, sums[1].numerator)
    np.testing.assert_array_equal(sums[0].denominator, sums[1].denominator)


@pytest.mark.parametrize("groups", [np.array([0, 2, 1]), np.array([0, -1, 0]), np.array([0, 1])])
def test_a_group_without_a_model_is_refused(make_backend, make_case, groups):
    case, batch = with_groups(make_case(16, "none", particles=3))
    with pytest.raises(ValueError, match="group from 0 to 1"):
        make_backend().open_search(case.setup).load(replace(batch, groups=groups.astype(np.int32)))
