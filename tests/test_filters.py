from __future__ import annotations

import numpy as np
import pytest

from numba_glocal.errors import SettingsError
from numba_glocal.filters import figure_of_merit, filter_average, highpass, lowpass, shell_weights
from numba_glocal.values import FSCCurve

PIXEL = 5.0


def wave(box, shell, axis=0):
    """A plane wave with `shell` periods across the box."""
    grid = np.arange(box).reshape([-1 if a == axis else 1 for a in range(3)])
    return np.broadcast_to(np.cos(2 * np.pi * shell * grid / box + 0.3), (box,) * 3).astype(np.float32)


def passed(filtered, shell, axis=0):
    reference = wave(filtered.shape[0], shell, axis).astype(np.float64)
    return float((filtered * reference).sum() / (reference**2).sum())


@pytest.mark.parametrize("box", [40, 41])
def test_lowpass_lets_waves_through_as_its_cosine_says(box):
    cut = box * PIXEL / 10.0  # 10 shells
    for shell in range(1, 18):
        distance = np.clip((shell - 10) / 4 + 0.5, 0, 1)
        expected = (1 + np.cos(np.pi * distance)) / 2
        for axis in range(3):
            low, high = (f(wave(box, shell, axis), PIXEL, cut) for f in (lowpass, highpass))
            assert passed(low, shell, axis) == pytest.approx(expected, abs=1e-4)
            assert passed(high, shell, axis) == pytest.approx(1 - expected, abs=1e-4)


def test_mean_stays_in_the_lowpass_and_leaves_in_the_highpass():
    volume = np.random.default_rng(1).normal(3.0, 1.0, (24,) * 3)
    assert lowpass(volume, PIXEL, 60.0).mean() == pytest.approx(volume.mean(), rel=1e-4)
    assert abs(highpass(volume, PIXEL, 60.0).mean()) < 1e-5
    assert abs(highpass(volume, PIXEL, 1e6).mean()) < 1e-5


def test_shell_weights_are_linear_between_shells():
    weights = np.linspace(1.0, 0.0, 13)
    for shell in (3, 7):
        assert passed(shell_weights(wave(24, shell), weights), shell) == pytest.approx(1 - shell / 12, abs=1e-4)
    diagonal = wave(24, 3, 0).astype(np.float64) * wave(24, 4, 1)  # radius 5
    out = shell_weights(diagonal.astype(np.float32), weights)
    assert (out * diagonal).sum() / (diagonal**2).sum() == pytest.approx(1 - 5 / 12, abs=1e-4)


def test_figure_of_merit_is_the_correlation_of_the_average_with_the_truth():
    """From made half-maps: signal with two independent noises, correlated with the signal itself."""
    rng = np.random.default_rng(2)
    signal = rng.normal(size=400_000)
    for noise in (0.5, 1.0, 3.0):
        a, b = (signal + noise * rng.normal(size=signal.size) for _ in range(2))
        fsc = np.corrcoef(a, b)[0, 1]
        assert figure_of_merit([fsc])[0] == pytest.approx(np.corrcoef(a + b, signal)[0, 1], abs=0.01)
    assert figure_of_merit([-0.2, 0.0, 1.0, np.nan]).tolist() == [0, 0, 1, 0]


def test_filtered_average_follows_the_curve_and_ends_at_the_resolution():
    curve = np.array([1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.1, 0.3, 0.3])  # crosses after shell 9, rises again
    fsc = FSCCurve(24, PIXEL, curve, curve, curve, curve)
    for shell in (2, 5, 7):
        out = filter_average(wave(24, shell), fsc)
        assert passed(out, shell) == pytest.approx(np.sqrt(2 * curve[shell] / (1 + curve[shell])), abs=1e-3)
    assert abs(passed(filter_average(wave(24, 12), fsc), 12)) < 1e-3


@pytest.mark.parametrize("value", [0.0, -3.0, float("nan"), float("inf")])
def test_senseless_resolutions_are_refused(value):
    with pytest.raises(SettingsError):
        lowpass(np.zeros((16,) * 3), PIXEL, value)
    with pytest.raises(SettingsError):
        highpass(np.zeros((16,) * 3), PIXEL, value)
