"""The noise model: variance of a particle's transform per shell and weight, fitted from residuals (docs/scoring.md, 4).

Noise in a subtomogram is not white. After back-projection of CTF-multiplied tilts its variance follows the particle's own weight volume C;
in data without CTF it is flat inside the wedge. So the form is not assumed but chosen by likelihood:

    variance(k) = sigma2[shell] * V(a),   V(a) = (a + epsilon)^gamma,   a = |C| / max |C|   (C^2 for a signed CTF)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WEIGHT_BIN_EDGES = np.array([0.0, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 1.0001])
"""Bins of a over which residual power is collected."""

N_WEIGHT_BINS = len(WEIGHT_BIN_EDGES) - 1
TABLE_SIZE = 512
_GAMMAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_EPSILONS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """Variance of the transform of a masked particle.

    Attributes
    ----------
    sigma2 : (shells,) float64
        Variance per shell where V is 1.
    gamma, epsilon : float
        Form of V.
    """

    sigma2: NDArray[np.float64]
    gamma: float = 0.0
    epsilon: float = 0.005

    def variance_form(self, relative_weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """V at relative weights a."""
        return (np.asarray(relative_weight, np.float64) + self.epsilon) ** self.gamma

    def inverse_table(self, signed: bool) -> NDArray[np.float32]:
        """1 / V at `TABLE_SIZE` equally spaced values of ``|C| / max |C|`` from 0 to 1; the form kernels look it up in."""
        a = np.linspace(0.0, 1.0, TABLE_SIZE)
        return (1.0 / self.variance_form(a * a if signed else a)).astype(np.float32)

    def inverse_sigma2(self) -> NDArray[np.float32]:
        """1 / sigma2 per shell, with one shell more at the end so that it can be interpolated."""
        s = self.sigma2
        floor = max(float(s.max(initial=0.0)) * 1e-9, 1e-30)
        inverse = 1.0 / np.maximum(s, floor)
        return np.append(inverse, inverse[-1]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ResidualPower:
    """Sums of ``|X - C F|^2`` by bin of a and shell; `+` merges chunks.

    Attributes
    ----------
    power, count, weight_sum : (N_WEIGHT_BINS, shells) float64
        Residual power, number of samples, sum of a.
    """

    power: NDArray[np.float64]
    count: NDArray[np.float64]
    weight_sum: NDArray[np.float64]

    def __add__(self, other: ResidualPower) -> ResidualPower:
        return ResidualPower(self.power + other.power, self.count + other.count, self.weight_sum + other.weight_sum)

    @staticmethod
    def empty(n_shells: int) -> ResidualPower:
        """Nothing collected yet."""
        return ResidualPower(*(np.zeros((N_WEIGHT_BINS, n_shells)) for _ in range(3)))

    @staticmethod
    def stacked(each: list[ResidualPower]) -> ResidualPower:
        """Of several particles, (p, N_WEIGHT_BINS, shells)."""
        return ResidualPower(*(np.stack([getattr(one, name) for one in each]) for name in ("power", "count", "weight_sum")))


def held_in_average(each: ResidualPower, signed: NDArray[np.bool_], noise: NoiseModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""What each particle brings to the sums of an average, by shell.

    Parameters
    ----------
    each : ResidualPower
        (p, N_WEIGHT_BINS, shells)
    signed : (p,) bool
        Whether a is C^2 instead of \|C\|.
    noise : NoiseModel

    Returns
    -------
    weight : (p, shells) float64
        Sum of ``C^2 / V``, in units of the particle's own largest C^2.
    power : (p, shells) float64
        The same with each sample's noise power in units of its variance.
    """
    a = each.weight_sum / np.maximum(each.count, 1.0)
    form = noise.variance_form(a)
    per_sample = np.where(signed[:, None, None], a, a * a) / form
    weight = (per_sample * each.count).sum(1)
    sigma2 = np.maximum(noise.sigma2, 1e-9 * float(noise.sigma2.max(initial=0.0)))
    return weight, (per_sample * each.power / form).sum(1) / np.maximum(sigma2, 1e-30)


def fit_noise(residuals: ResidualPower, first_shell: int, last_shell: int) -> NoiseModel:
    """The noise model of greatest likelihood for complex Gaussian residuals.

    Parameters
    ----------
    residuals : ResidualPower
        Of one half-set.
    first_shell, last_shell : int
        Shells that choose gamma and epsilon; sigma2 is fitted in every shell.

    Notes
    -----
    For given V the best sigma2 of a shell is the mean of ``power / V``, and what is left of the log-likelihood is
    ``-sum n (ln sigma2 + ln V)``. The lowest bin of a is left out: there C multiplies what is compared with noise by almost nothing.
    A form other than flat must gain more than its parameters could by chance.
    """
    count, power = residuals.count[1:], residuals.power[1:]
    mean_a = residuals.weight_sum[1:] / np.maximum(count, 1.0)
    chosen = slice(first_shell, last_shell + 1)
    best = None
    for gamma in _GAMMAS:
        for epsilon in _EPSILONS if gamma else (0.005,):
            v = (mean_a + epsilon) ** gamma
            sigma2 = (power / v).sum(0) / np.maximum(count.sum(0), 1.0)
            used = (count > 0) & (sigma2 > 0)
            log_terms = np.where(used, count * (np.log(np.maximum(sigma2, 1e-300)) + np.log(v)), 0.0)
            cost = log_terms[:, chosen].sum() + (0.0 if gamma == 0 else 10.0)
            if best is None or cost < best[0]:
                best = (cost, gamma, epsilon, sigma2)
    assert best is not None
    _, gamma, epsilon, sigma2 = best
    positive = sigma2 > 0
    if not positive.any():
        raise ValueError("no residual power in any shell")
    shells = np.arange(len(sigma2))
    sigma2 = np.where(positive, sigma2, np.interp(shells, shells[positive], sigma2[positive]))
    return NoiseModel(sigma2, gamma, epsilon)
