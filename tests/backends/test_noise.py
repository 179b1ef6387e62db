"""The noise model: planted forms are recovered from drawn residuals."""

from __future__ import annotations

import numpy as np
import pytest

from numba_glocal.noise import (
    GAIN_LIMITS,
    N_WEIGHT_BINS,
    TABLE_SIZE,
    WEIGHT_BIN_EDGES,
    NoiseModel,
    ResidualPower,
    fit_gains,
    fit_noise,
    fit_noise_groups,
    relative_inverse_sigma2,
)


def drawn(gamma: float, epsilon: float, samples: int, seed: int = 0) -> tuple[ResidualPower, np.ndarray]:
    """Residual power of complex Gaussian noise of variance sigma2 (a + epsilon)^gamma at random weights a."""
    rng = np.random.default_rng(seed)
    shells = 20
    sigma2 = 10.0 * np.exp(-np.arange(shells) / 6.0)
    out = ResidualPower.empty(shells)
    for shell in range(shells):
        a = rng.random(samples) ** 2
        power = rng.exponential(sigma2[shell] * (a + epsilon) ** gamma)
        row = np.searchsorted(WEIGHT_BIN_EDGES, a, side="right") - 1
        np.add.at(out.power[:, shell], row, power)
        np.add.at(out.count[:, shell], row, 1.0)
        np.add.at(out.weight_sum[:, shell], row, a)
    return out, sigma2


@pytest.mark.parametrize(("gamma", "epsilon"), [(1.0, 0.02), (1.0, 0.1), (0.5, 0.02), (1.5, 0.05)])
def test_planted_form_is_recovered(gamma, epsilon):
    """gamma exactly; epsilon within its neighbours on the grid of trials; sigma2 within 10 % given the form's scale."""
    residuals, sigma2 = drawn(gamma, epsilon, 20_000)
    model = fit_noise(residuals, 2, 17)
    assert abs(model.gamma - gamma) <= 0.25 and model.epsilon in (epsilon / 2, epsilon / 2.5, epsilon, epsilon * 2, epsilon * 2.5)
    # where it matters: the variances of the model are those that were planted
    for a in (0.03, 0.2, 0.7):
        np.testing.assert_allclose(model.sigma2 * model.variance_form(a), sigma2 * (a + epsilon) ** gamma, rtol=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_flat_noise_stays_flat(seed):
    residuals, sigma2 = drawn(0.0, 0.0, 300, seed)
    model = fit_noise(residuals, 2, 17)
    assert model.gamma == 0.0
    np.testing.assert_allclose(model.sigma2, sigma2, rtol=0.35)


def test_shells_without_samples_are_interpolated():
    residuals, _ = drawn(0.0, 0.0, 500)
    residuals.power[:, 18:] = 0
    residuals.count[:, 18:] = 0
    residuals.power[:, 0] = 0
    residuals.count[:, 0] = 0
    sigma2 = fit_noise(residuals, 2, 17).sigma2
    assert sigma2[19] == sigma2[18] == sigma2[17] and sigma2[0] == sigma2[1]
    with pytest.raises(ValueError, match="no residual power"):
        fit_noise(ResidualPower.empty(5), 1, 3)


def test_merging_chunks_is_adding():
    a, _ = drawn(1.0, 0.02, 100, 1)
    b, _ = drawn(1.0, 0.02, 100, 2)
    both = a + b
    np.testing.assert_array_equal(both.power, a.power + b.power)
    np.testing.assert_array_equal(both.count, a.count + b.count)
    np.testing.assert_array_equal(both.weight_sum, a.weight_sum + b.weight_sum)
    assert ResidualPower.empty(7).power.shape == (N_WEIGHT_BINS, 7)


@pytest.mark.parametrize("signed", [False, True])
def test_tables(signed):
    model = NoiseModel(np.array([4.0, 2.0, 0.0]), 1.0, 0.05)
    table = model.inverse_table(signed)
    assert table.shape == (TABLE_SIZE,) and table.dtype == np.float32
    for row in (0, 100, 511):
        a = row / 511
        assert table[row] == pytest.approx(1 / ((a * a if signed else a) + 0.05))
    np.testing.assert_allclose(model.inverse_sigma2()[:2], [0.25, 0.5])
    assert len(model.inverse_sigma2()) == 4 and np.isfinite(model.inverse_sigma2()).all()
    assert NoiseModel(np.ones(3)).variance_form(np.array([0.0, 0.5])).tolist() == [1.0, 1.0]


# -- groups ----------------------------------------------------------------------------------------------------------


def variance(model, a):
    return model.sigma2 * model.variance_form(np.array(a))


def test_one_group_is_the_plain_fit():
    residuals, _ = drawn(1.0, 0.02, 500)
    plain = fit_noise(residuals, 2, 17)
    (model,) = fit_noise_groups({0: residuals}, (1.25,), 2, 17)
    np.testing.assert_array_equal(model.sigma2, plain.sigma2)
    assert (model.gamma, model.epsilon, model.gain) == (plain.gamma, plain.epsilon, 1.25)


def test_groups_have_their_own_level_form_and_spectrum():
    steep, sigma2 = drawn(1.0, 0.02, 20_000, 1)
    flat, _ = drawn(0.0, 0.0, 20_000, 2)
    flat.power[:] *= 3.0 * np.linspace(1.0, 2.0, 20)
    models = fit_noise_groups({0: steep, 1: flat}, (1.0, 0.8), 2, 17)
    assert abs(models[0].gamma - 1.0) <= 0.25 and models[1].gamma == 0.0
    assert [model.gain for model in models] == [1.0, 0.8]
    for a in (0.03, 0.2, 0.7):
        np.testing.assert_allclose(variance(models[0], a), sigma2 * (a + 0.02), rtol=0.1)
        np.testing.assert_allclose(variance(models[1], a), 3.0 * sigma2 * np.linspace(1.0, 2.0, 20), rtol=0.1)


def test_a_small_group_has_the_common_form_and_its_own_level():
    """60 samples a shell: too few for a form of their own, enough for a level; the spectrum leans on the common one."""
    many, sigma2 = drawn(1.0, 0.02, 20_000, 1)
    few, _ = drawn(1.0, 0.02, 60, 2)
    few.power[:] *= 4.0
    models = fit_noise_groups({0: many, 1: few}, (1.0, 1.0), 2, 17)
    assert (models[1].gamma, models[1].epsilon) == (models[0].gamma, models[0].epsilon)
    ratio = models[1].sigma2 / models[0].sigma2
    own = few.power[1:].sum(0) / few.count[1:].sum(0) / (many.power[1:].sum(0) / many.count[1:].sum(0))
    assert np.exp(np.log(ratio).mean()) == pytest.approx(4.0, rel=0.1)
    assert np.log(ratio).std() < 0.6 * np.log(own).std()


def test_a_group_without_residuals_takes_the_common_model():
    residuals, _ = drawn(1.0, 0.02, 500)
    models = fit_noise_groups({0: residuals, 2: ResidualPower.empty(20)}, (1.0, 1.0, 1.0), 2, 17)
    for model in models[1:]:
        assert (model.gamma, model.epsilon) == (models[0].gamma, models[0].epsilon) and np.isfinite(model.sigma2).all() and (model.sigma2 > 0).all()


def test_relative_weights():
    a, b = NoiseModel(np.array([1.0, 2.0])), NoiseModel(np.array([3.0, 2.0]))
    assert relative_inverse_sigma2((b,)).tolist() == [[1.0, 1.0]] and relative_inverse_sigma2((b, b, b)).tolist() == [[1.0, 1.0]] * 3
    np.testing.assert_allclose(relative_inverse_sigma2((a, b)), [[1.5, 1.0], [0.5, 1.0]], rtol=1e-6)


def sums_of(gains, per_group, seed, before=None, excess=1.0):
    """num and den2 of particles whose signal has the given scales, under a model that has those of `before`."""
    rng = np.random.default_rng(seed)
    before = np.ones(len(gains)) if before is None else np.asarray(before)
    groups = np.repeat(np.arange(len(gains)), per_group)
    power = rng.uniform(20.0, 60.0, len(groups))  # sum w C^2 |F|^2
    denominator = before[groups] ** 2 * power
    numerator = before[groups] * np.asarray(gains)[groups] * power + rng.normal(0.0, np.sqrt(excess * denominator / 2.0))
    return numerator, denominator, groups


def test_gains_are_recovered_and_relative():
    true = np.array([0.6, 1.0, 1.4, 1.0])
    found = [fit_gains(*sums_of(2.0 * true, 200, seed), (1.0,) * 4) for seed in range(4)]
    np.testing.assert_allclose(np.mean(found, axis=0), true, rtol=0.03)
    # from the gains of before, as well
    before = (0.7, 1.2, 1.3, 0.9)
    np.testing.assert_allclose(fit_gains(*sums_of(true, 200, 1, before), before), true, rtol=0.06)


def test_gains_are_one_where_errors_explain_the_scatter():
    """Five particles a group, one true scale, errors three times as large as the model says: gains stay within a third of their errors."""
    found = np.array([fit_gains(*sums_of((1.0,) * 6, 5, seed, excess=9.0), (1.0,) * 6) for seed in range(40)])
    raw = np.array(
        [[(n[g == i].sum() / d[g == i].sum()) for i in range(6)] for n, d, g in (sums_of((1.0,) * 6, 5, s, excess=9.0) for s in range(40))]
    )
    assert np.sqrt(((found - 1) ** 2).mean()) < 0.4 * raw.std()
    assert (np.abs(found - 1).max(axis=1) == 0).mean() > 0.3


def test_gains_of_one_group_of_none_and_of_bad_particles():
    assert fit_gains(*sums_of((3.0,), 10, 0), (1.0,)) == (1.0,)
    numerator, denominator, groups = sums_of((0.5, 1.5, 1.0), 50, 0)
    clean = fit_gains(numerator, denominator, groups, (1.0, 1.0, 1.0))
    worse = np.append(numerator, [np.nan, 0.0, 5.0]), np.append(denominator, [np.inf, 0.0, np.nan]), np.append(groups, [0, 1, 2])
    assert fit_gains(*worse, (1.0, 1.0, 1.0)) == clean
    keep = groups != 1
    assert fit_gains(numerator[keep], denominator[keep], groups[keep], (1.0, 1.0, 1.0))[1] == 1.0
    weak = fit_gains(*sums_of((1.0, -0.2, 1.0), 200, 0), (1.0, 1.0, 1.0))
    assert weak[1] == GAIN_LIMITS[0]
