"""The noise model: planted forms are recovered from drawn residuals."""

from __future__ import annotations

import numpy as np
import pytest

from numba_glocal.noise import N_WEIGHT_BINS, TABLE_SIZE, WEIGHT_BIN_EDGES, NoiseModel, ResidualPower, fit_noise


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
