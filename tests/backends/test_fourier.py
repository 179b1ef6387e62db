"""Layouts and transforms against plain numpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from numba_glocal import fourier
from numba_glocal.backends.cache import ByteCache


@pytest.mark.parametrize("n", [12, 13, 16, 15])
def test_padded_spectrum_is_a_plain_padded_transform(n):
    rng = np.random.default_rng(n)
    volume = rng.normal(size=(n, n, n)).astype(np.float32)
    k_max = fourier.max_band(n)
    c = fourier.padded_offset(k_max)
    found = fourier.padded_spectrum(volume, k_max)
    assert found.shape == (2 * c + 1, 2 * c + 1, c + 1)
    x = (np.arange(n) - n // 2) / (2 * n)
    s = np.sinc(x) ** 2
    big = np.zeros((2 * n,) * 3)
    part = slice(n - n // 2, n - n // 2 + n)
    big[part, part, part] = volume / (s[:, None, None] * s[None, :, None] * s[None, None, :])
    whole = np.fft.fftn(np.fft.ifftshift(big))
    rows = np.arange(-c, c + 1) % (2 * n)
    exact = whole[np.ix_(rows, rows, np.arange(c + 1) % (2 * n))]
    np.testing.assert_allclose(found, exact, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("n", [12, 15])
def test_a_narrow_band_is_a_crop_of_the_wide_one(n):
    volume = np.random.default_rng(0).normal(size=(n, n, n)).astype(np.float32)
    wide, narrow = fourier.padded_spectrum(volume, fourier.max_band(n)), fourier.padded_spectrum(volume, 2)
    c, d = fourier.padded_offset(fourier.max_band(n)), fourier.padded_offset(2)
    np.testing.assert_allclose(narrow, wide[c - d : c + d + 1, c - d : c + d + 1, : d + 1], atol=1e-5 * np.abs(wide).max())
    assert fourier.padded_offset(fourier.max_band(n)) <= n
    with pytest.raises(ValueError, match="over its limit"):
        fourier.padded_spectrum(volume, n // 2)


@pytest.mark.parametrize("n", [10, 11])
@pytest.mark.parametrize("k_max", [1.0, 2.5, 4.0, 6.0])
def test_grid_band_has_each_friedel_pair_once(n, k_max):
    band = fourier.grid_band(n, k_max)
    k = band.k.astype(int)
    both = {tuple(row) for row in np.concatenate([k, -k]).tolist()}
    assert len(both) == 2 * len(k), "no sample twice, none its own partner"
    axis = range(-(n // 2), n // 2 + 1)
    expected = {
        (x, y, z) for x in axis for y in axis for z in axis if 0 < x * x + y * y + z * z <= k_max**2 + 1e-6 and max(abs(x), abs(y), abs(z)) < n / 2
    }
    assert both == expected
    spectrum = np.fft.rfftn(np.random.default_rng(1).normal(size=(n, n, n)))
    np.testing.assert_array_equal(spectrum.ravel()[band.index], spectrum[k[:, 2], k[:, 1], k[:, 0]])
    np.testing.assert_array_equal(band.shell, np.rint(np.linalg.norm(k, axis=1)))
    np.testing.assert_array_equal(band.radius2, (k * k).sum(1))


@pytest.mark.parametrize("n", [10, 11])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_centred_transforms(n, dtype):
    volume = np.random.default_rng(2).normal(size=(n, n, n)).astype(dtype)
    found = fourier.centred_rfftn(volume)
    exact = np.fft.rfftn(np.fft.ifftshift(volume.astype(np.float64)))
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(found, exact, atol=tolerance * np.abs(exact).max())
    np.testing.assert_allclose(fourier.centred_irfftn(found, n), volume, atol=10 * tolerance)
    delta = np.zeros((n, n, n), dtype)
    delta[n // 2, n // 2, n // 2] = 1
    np.testing.assert_allclose(fourier.centred_rfftn(delta), 1.0, atol=1e-6)


@pytest.mark.parametrize("n", [10, 11])
def test_multiplicity_and_shells(n):
    """Parseval: half-spectrum power times multiplicity is the whole power; shells are rounded radii."""
    volume = np.random.default_rng(3).normal(size=(n, n, n))
    power = np.abs(np.fft.rfftn(volume)) ** 2
    assert (power * fourier.grid_multiplicity(n)).sum() == pytest.approx(n**3 * (volume**2).sum())
    k = np.fft.fftfreq(n, 1 / n)
    radius = np.sqrt(k[:, None, None] ** 2 + k[None, :, None] ** 2 + np.arange(n // 2 + 1) ** 2)
    np.testing.assert_array_equal(fourier.grid_shells(n), np.rint(radius))


def test_byte_cache_keeps_to_its_budget():
    cache = ByteCache(100)
    cache.put("a", 1, 40)
    cache.put("b", 2, 40)
    assert cache.get("a") == 1
    cache.put("c", 3, 40)  # b was used longest ago
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert cache.used_bytes == 80 and len(cache) == 2
    cache.put("huge", 4, 101)
    assert cache.get("huge") is None and len(cache) == 2
    cache.put("a", 5, 60)  # replaced, not counted twice
    assert cache.get("a") == 5 and cache.used_bytes == 100
    cache.put("a", 6, 200)
    assert cache.get("a") is None and cache.used_bytes == 40
    nothing = ByteCache(0)
    nothing.put("x", 1, 1)
    assert nothing.get("x") is None


@pytest.mark.parametrize("n", [12, 13, 32])
def test_central_box_of_a_padded_spectrum(n):
    """Against NumPy's transform of the whole spectrum."""
    rng = np.random.default_rng(n)
    padded = 2 * n
    whole = np.fft.rfftn(rng.normal(size=(padded,) * 3)).astype(np.complex64)

    def fill(first, block):
        rows = whole[:, first : first + len(block)].transpose(1, 0, 2)
        block[: len(rows)] = rows

    start = n - n // 2
    expected = np.fft.fftshift(np.fft.irfftn(whole, s=(padded,) * 3, axes=(0, 1, 2)))[(slice(start, start + n),) * 3]
    np.testing.assert_allclose(fourier.central_irfftn(fill, n), expected, atol=1e-5)


def test_work_in_parallel_comes_back_in_order_and_may_nest():
    try:
        fourier.use_threads(3)
        assert fourier.in_parallel(lambda x: sum(fourier.in_parallel(lambda y: x * y, range(4))), range(50)) == [6 * x for x in range(50)]
        with pytest.raises(ZeroDivisionError):
            fourier.in_parallel(lambda x: 1 // x, [1, 0])
    finally:
        fourier.use_threads(1)


def test_a_plan_is_lent_to_one_thread_at_a_time():
    volumes = [np.random.default_rng(i).normal(size=(24,) * 3).astype(np.float32) for i in range(40)]
    alone = [fourier.rfftn(v) for v in volumes]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(fourier.rfftn, volumes))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
