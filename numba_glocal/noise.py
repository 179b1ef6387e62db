"""The noise model: variance of a particle's transform per shell and weight, fitted from residuals (docs/scoring.md, 4).

Noise in a subtomogram is not white. After back-projection of CTF-multiplied tilts its variance follows the particle's own weight volume C;
in data without CTF it is flat inside the wedge. So the form is not assumed but chosen by likelihood:

    variance(k) = sigma2[shell] * V(a),   V(a) = (a + epsilon)^gamma,   a = |C| / max |C|   (C^2 for a signed CTF)

Tomograms differ in thickness, dose and defocus, and so in their noise. Each *group* of particles has a model of its own, and with it the scale
of its signal: a particle's expected transform is ``gain C F`` (docs/adr/0012).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

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
    gain : float
        Scale of the signal: the particle is expected to be ``gain C F``. The form V knows of C alone.
    """

    sigma2: NDArray[np.float64]
    gamma: float = 0.0
    epsilon: float = 0.005
    gain: float = 1.0

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


NoiseModels: TypeAlias = tuple[NoiseModel, ...]
"""One model for each group of particles."""

GroupResiduals: TypeAlias = dict[int, ResidualPower]
"""Residual power of the groups that have any."""


def as_models(noise: NoiseModel | NoiseModels) -> NoiseModels:
    """A single model is that of the one group there is."""
    return (noise,) if isinstance(noise, NoiseModel) else noise


def relative_inverse_sigma2(models: NoiseModels) -> NDArray[np.float32]:
    """How much a group's samples count in a sum, by shell: 1 / sigma2 over its mean over groups; exactly 1 for a single group.

    Parameters
    ----------
    models : tuple of NoiseModel

    Returns
    -------
    (groups, shells) float32
        The mean is the same for all particles of a sum, so it changes no average.
    """
    inverse = np.stack([model.inverse_sigma2()[:-1].astype(np.float64) for model in models])
    return np.ascontiguousarray(inverse / inverse.mean(axis=0), np.float32)


NOISE_FACTS = "exponent", "epsilon", "level", "gain"


def noise_facts(models: NoiseModels, first_shell: int, last_shell: int) -> list[list[float]]:
    """What is said of each group's noise: `NOISE_FACTS`, the level being its variance where C is half its largest, relative to all groups."""
    shells = slice(first_shell, last_shell + 1)
    logs = np.array([np.log(np.maximum(model.sigma2[shells] * model.variance_form(np.array(0.5)), 1e-300)).mean() for model in models])
    levels = np.exp(logs - logs.mean())
    return [[float(value) for value in (m.gamma, m.epsilon, level, m.gain)] for m, level in zip(models, levels, strict=True)]


def noise_line(facts: Sequence[Sequence[float]]) -> str:
    """Facts of all groups of a half in a few words: a number, or the range of several; of level and gain only where there are several."""
    shown = {name: [row[place] for row in facts] for place, name in enumerate(NOISE_FACTS)}
    parts = [f"exponent {_range(shown['exponent'])}"]
    if len(facts) > 1:
        parts += [f"{name} {_range(shown[name])}" for name in ("level", "gain")]
    return ", ".join(parts)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def held_in_average(
    each: ResidualPower, signed: NDArray[np.bool_], models: NoiseModels, groups: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each particle brings to the sums of an average, by shell.

    Parameters
    ----------
    each : ResidualPower
        (p, N_WEIGHT_BINS, shells)
    signed : (p,) bool
        Whether a is C^2 instead of \\|C\\|.
    models : tuple of NoiseModel
    groups : (p,) int
        Which of them is whose.

    Returns
    -------
    weight : (p, shells) float64
        Sum of ``w C^2`` with the weights of sums, in units of the particle's own largest C^2.
    power : (p, shells) float64
        The same with each sample's noise power in units of its variance.
    """
    relative = relative_inverse_sigma2(models).astype(np.float64)
    weight, power = np.zeros(each.power.shape[::2]), np.zeros(each.power.shape[::2])
    for group, model in enumerate(models):
        rows = groups == group
        a = each.weight_sum[rows] / np.maximum(each.count[rows], 1.0)
        form = model.variance_form(a)
        per_sample = np.where(signed[rows, None, None], a, a * a) / form * model.gain**2 * relative[group]
        weight[rows] = (per_sample * each.count[rows]).sum(1)
        power[rows] = (per_sample * each.power[rows] / form).sum(1) * model.inverse_sigma2()[:-1]
    return weight, power


def add_residuals(total: GroupResiduals, part: GroupResiduals) -> None:
    """Adds the residual power of some particles to what is there."""
    for group, power in part.items():
        total[group] = total[group] + power if group in total else power


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
    best = None
    for gamma in _GAMMAS:
        for epsilon in _EPSILONS if gamma else (0.005,):
            cost, sigma2 = _cost_of_form(residuals, gamma, epsilon, slice(first_shell, last_shell + 1))
            cost += 0.0 if gamma == 0 else 10.0
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


def _cost_of_form(residuals: ResidualPower, gamma: float, epsilon: float, chosen: slice) -> tuple[float, NDArray[np.float64]]:
    """Minus the log-likelihood of a form over the chosen shells, and its best sigma2 in every shell (0 where there are no samples)."""
    count, power = residuals.count[1:], residuals.power[1:]
    mean_a = residuals.weight_sum[1:] / np.maximum(count, 1.0)
    v = (mean_a + epsilon) ** gamma
    sigma2 = (power / v).sum(0) / np.maximum(count.sum(0), 1.0)
    used = (count > 0) & (sigma2 > 0)
    log_terms = np.where(used, count * (np.log(np.maximum(sigma2, 1e-300)) + np.log(v)), 0.0)
    return float(log_terms[:, chosen].sum()), sigma2


def fit_noise_groups(residuals: GroupResiduals, gains: Sequence[float], first_shell: int, last_shell: int) -> NoiseModels:
    """The noise of each group of a half-set.

    Parameters
    ----------
    residuals : dict of group to ResidualPower
        Groups without any take the half's common model.
    gains : (groups,) floats
        As the residuals were measured with; each goes into its group's model.
    first_shell, last_shell : int
        As in `fit_noise`.

    Returns
    -------
    tuple of NoiseModel
        For a single group that of `fit_noise`.

    Notes
    -----
    A group has a form of its own only where that is clearly likelier than the half's common one: a few particles do not tell forms apart. Its
    sigma2 is drawn to the common spectrum times the group's level by a weight of 100 samples, which matters in the lowest shells only.
    """
    total = ResidualPower.empty(next(iter(residuals.values())).power.shape[1])
    for group in sorted(residuals):
        total = total + residuals[group]
    common = fit_noise(total, first_shell, last_shell)
    if len(gains) == 1:
        return (replace(common, gain=gains[0]),)
    return tuple(
        replace(_fit_group(residuals[group], total, common, first_shell, last_shell) if group in residuals else common, gain=gain)
        for group, gain in enumerate(gains)
    )


_FORM_GAIN = 50.0
"""Log-likelihood that a form of its own must bring a group; samples are neighbours under a mask, and worth less than their number."""

_COMMON_SAMPLES = 100.0


def _fit_group(own: ResidualPower, total: ResidualPower, common: NoiseModel, first_shell: int, last_shell: int) -> NoiseModel:
    chosen = slice(first_shell, last_shell + 1)
    count = own.count[1:].sum(0)
    if not (count[chosen] * own.power[1:].sum(0)[chosen] > 0).any():
        return common
    model = fit_noise(own, first_shell, last_shell)
    if _cost_of_form(own, common.gamma, common.epsilon, chosen)[0] - _cost_of_form(own, model.gamma, model.epsilon, chosen)[0] < _FORM_GAIN:
        model = common
    _, sigma2 = _cost_of_form(own, model.gamma, model.epsilon, chosen)
    _, shared = _cost_of_form(total, model.gamma, model.epsilon, chosen)
    shared = np.where(shared > 0, shared, common.sigma2)
    level = float((count * sigma2 / shared)[chosen].sum() / count[chosen].sum())
    return replace(model, sigma2=(count * sigma2 + _COMMON_SAMPLES * level * shared) / (count + _COMMON_SAMPLES))


GAIN_LIMITS = 0.2, 5.0
"""A group whose signal cannot be seen keeps a little weight, so that it may come back."""


def fit_gains(
    numerator: NDArray[np.float64], denominator: NDArray[np.float64], groups: NDArray[np.integer], before: Sequence[float]
) -> tuple[float, ...]:
    """Scales of the groups' signals relative to all, from ``num`` and ``den2`` at refined poses.

    Parameters
    ----------
    numerator, denominator : (n,) float64
        Of the particles of a half-set, 0 or not finite where a particle is unusable.
    groups : (n,) int
    before : (groups,) floats
        Gains that `numerator` and `denominator` were measured with.

    Returns
    -------
    tuple of float
        1 for a single group.

    Notes
    -----
    A group's estimate is ``g = before sum num / sum den2``. Its variance is ``phi / (2 sum den2)``: 1/2 is what the noise model says, phi the
    excess that the scatter of the particles about their groups shows (a mask's correlation, poses, neighbours), one number for all. The spread
    of the true gains v is what the estimates scatter beyond their errors (DerSimonian and Laird); gains are taken relative to their mean,
    weighted by ``1 / (v + se^2)``, and drawn to 1 by ``v / (v + se^2)``: where errors explain the scatter, all stay 1.
    """
    count = len(before)
    usable = np.isfinite(numerator) & np.isfinite(denominator) & (denominator > 0)
    numerator, denominator, groups = numerator[usable], denominator[usable], groups[usable]
    members = np.bincount(groups, minlength=count)
    num, den = np.bincount(groups, numerator, count), np.bincount(groups, denominator, count)
    ratio = num / np.where(den > 0, den, 1.0)
    measured = np.flatnonzero(den > 0)
    if count == 1 or len(measured) < 2 or members.sum() <= len(measured):
        return tuple(float(gain) for gain in before)
    excess = float((2.0 * (numerator - ratio[groups] * denominator) ** 2 / denominator).sum() / (members.sum() - len(measured)))
    gain = np.asarray(before, np.float64)[measured] * ratio[measured]
    error2 = np.asarray(before, np.float64)[measured] ** 2 * excess / (2.0 * den[measured])
    weight = 1.0 / np.maximum(error2, 1e-30)
    mean = float((weight * gain).sum() / weight.sum())
    scatter = float((weight * (gain - mean) ** 2).sum())
    spread = max(0.0, (scatter - (len(measured) - 1)) / float(weight.sum() - (weight**2).sum() / weight.sum()))
    mean = float((gain / (spread + error2)).sum() / (1.0 / (spread + error2)).sum())
    if not mean > 0:
        return (1.0,) * count
    out = np.ones(count)
    out[measured] = np.clip(1.0 + (gain / mean - 1.0) * spread / (spread + error2), *GAIN_LIMITS)
    return tuple(float(value) for value in out)
