from __future__ import annotations

import subprocess
import time

import mrcfile
import numpy as np
import pytest
from scipy import ndimage

from numba_glocal.errors import VolumeError
from numba_glocal.masks import spherical_mask
from numba_glocal.resolution import evidence, find_crossing, fourier_shell_correlation, half_map_fsc, resolution_angst
from numba_glocal.symmetry import group_rotations, symmetrised


def half_maps(box=64, seed=1, noise=0.5, blur=1.5):
    """A smooth object inside a sphere with independent noise."""
    rng = np.random.default_rng(seed)
    signal = ndimage.gaussian_filter(rng.normal(size=(box,) * 3), blur) * spherical_mask(box, 0.28 * box)
    signal /= signal.std()
    return [(signal + noise * rng.normal(size=signal.shape)).astype(np.float32) for _ in range(2)]


def fsc_by_loop(a, b):
    """Over the full spectrum in float64, sample by sample."""
    n = a.shape[0]
    fa, fb = (np.fft.fftn(np.asarray(v, np.float64)) for v in (a, b))
    freq = np.fft.fftfreq(n, 1 / n)
    cross, pa, pb = (np.zeros(2 * n) for _ in range(3))
    for i, j, k in np.ndindex(n, n, n):
        shell = int(np.floor(np.sqrt(freq[i] ** 2 + freq[j] ** 2 + freq[k] ** 2) + 0.5))
        cross[shell] += (fa[i, j, k] * np.conj(fb[i, j, k])).real
        pa[shell] += abs(fa[i, j, k]) ** 2
        pb[shell] += abs(fb[i, j, k]) ** 2
    count = n // 2 + 1
    return cross[:count] / np.sqrt(pa[:count] * pb[:count])


@pytest.mark.parametrize("box", [16, 17])
def test_fsc_against_a_direct_loop(box):
    a, b = half_maps(box, seed=box, noise=2.0, blur=0.5)
    curve = fourier_shell_correlation(a, b)
    assert curve.shape == (box // 2 + 1,) and curve[0] == 1.0
    np.testing.assert_allclose(curve[1:], fsc_by_loop(a, b)[1:], atol=2e-5)


def test_fsc_ignores_scale_and_mean_and_sees_sign():
    a, _ = half_maps(32)
    np.testing.assert_allclose(fourier_shell_correlation(a, 3 * a + 7)[1:], 1.0, atol=1e-4)
    np.testing.assert_allclose(fourier_shell_correlation(a, -a)[1:], -1.0, atol=1e-4)


def test_shells_without_power_are_zero():
    box = 32
    freq = np.fft.fftfreq(box, 1 / box)
    radius = np.sqrt(sum(np.meshgrid(freq**2, freq**2, freq**2)))
    a, b = (np.fft.ifftn(np.fft.fftn(v) * (radius < 8.5)).real for v in half_maps(box))
    curve = fourier_shell_correlation(a, b)
    assert (curve[1:9] > 0.1).all()
    assert (curve[10:] == 0).all()


def test_masked_curves_against_relion_postprocess(relion, tmp_path):
    a, b = half_maps(48, noise=1.0)
    mask = spherical_mask(48, 16, 5)
    for name, data in (("half1", a), ("half2", b), ("mask", mask)):
        with mrcfile.new(tmp_path / f"{name}.mrc") as file:
            file.set_data(data)
            file.voxel_size = 5.0
    (tmp_path / "post").mkdir()
    command = "relion_postprocess --i half1.mrc --i2 half2.mrc --mask mask.mrc --o post/post --angpix 5 --adhoc_bfac 0"
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = fsc_table(tmp_path / "post" / "post.star")
    curve = half_map_fsc(a, b, 5.0, mask, "mask.mrc")
    # RELION counts the samples of the plane kx = 0 twice as much as the others: the outer shells agree to a few percent of a sample's weight
    ours = {
        "rlnFourierShellCorrelationUnmaskedMaps": curve.unmasked,
        "rlnFourierShellCorrelationMaskedMaps": curve.masked,
        "rlnFourierShellCorrelationCorrected": curve.corrected,
    }
    for label, values in ours.items():
        # the random phases differ, and with them the corrected curve
        tolerance = 0.08 if label.endswith("Corrected") else 0.02
        np.testing.assert_allclose(values[1:24], rows[label][1:24], atol=tolerance, err_msg=label)
    theirs = relion_scalar(tmp_path / "post" / "post.star", "rlnFinalResolution")
    shell = 48 * 5.0 / theirs
    assert abs(find_crossing(curve.corrected, 48, 5.0).shell - shell) < 1.01


def fsc_table(path):
    import gemmi

    block = gemmi.cif.read(str(path)).find_block("fsc")
    loop = next(item.loop for item in block if item.loop is not None)
    return {tag.lstrip("_"): np.array([float(v) for v in block.find_values(tag)]) for tag in loop.tags}


def relion_scalar(path, label):
    import gemmi

    return float(gemmi.cif.read(str(path)).find_block("general").find_value("_" + label))


def test_randomised_phases_expose_a_tight_mask():
    """Pure noise under a tight hard mask correlates through the mask alone; the correction must take that away."""
    rng = np.random.default_rng(3)
    low = ndimage.gaussian_filter(rng.normal(size=(48,) * 3), 3.0)
    low /= low.std()
    a, b = (low + 0.5 * rng.normal(size=low.shape) for _ in range(2))
    blob = ndimage.gaussian_filter(rng.normal(size=(48,) * 3), 2.0)
    mask = ((blob > 0.03) & (spherical_mask(48, 14, 0) > 0)).astype(np.float32)
    curve = half_map_fsc(a, b, 4.0, mask, "tight")
    tail = slice(curve.randomised_from_shell + 6, None)
    assert curve.masked[tail].mean() > 0.1 + curve.unmasked[tail].mean()
    assert curve.corrected[tail].mean() < 0.5 * curve.masked[tail].mean()
    assert resolution_angst(curve.corrected, 48, 4.0) >= resolution_angst(curve.masked, 48, 4.0)


def test_half_map_fsc_follows_its_definition():
    a, b = half_maps(48)
    mask = spherical_mask(48, 16)
    curve = half_map_fsc(a, b, 4.0, mask, "ball")
    k0 = curve.randomised_from_shell
    assert k0 == np.flatnonzero(curve.unmasked < 0.8)[0] and 3 < k0 < 22
    assert curve.mask_name == "ball"
    np.testing.assert_array_equal(curve.corrected[: k0 + 2], curve.masked[: k0 + 2])
    for shell in range(k0 + 2, 25):
        m, r = curve.masked[shell], curve.randomised[shell]
        assert curve.corrected[shell] == pytest.approx(0.0 if r >= m else (m - r) / (1 - r))
    # far beyond k0 only what the mask adds is left, and the same maps always give the same curve
    assert np.abs(curve.randomised[k0 + 4 :]).max() < 0.2
    np.testing.assert_array_equal(curve.randomised, half_map_fsc(a, b, 4.0, mask, "ball").randomised)
    assert not np.array_equal(curve.randomised, half_map_fsc(a, b, 4.0, mask, "ball", seed=5).randomised)


def test_without_a_mask_all_curves_are_one():
    a, b = half_maps(32)
    curve = half_map_fsc(a, b, 4.0)
    assert curve.mask_name == "none" and curve.randomised_from_shell == 0
    for other in (curve.masked, curve.randomised, curve.corrected):
        np.testing.assert_array_equal(other, curve.unmasked)


def test_equal_halves_need_no_randomisation():
    a, _ = half_maps(32)
    curve = half_map_fsc(a, a, 4.0, spherical_mask(32, 10), "ball")
    assert curve.randomised_from_shell == 17
    np.testing.assert_allclose(curve.corrected, 1.0, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "shell", "crossed", "again"),
    [
        ([1, 0.9, 0.5, 0.1, 0.05], 2, True, False),
        ([1, 0.9, 0.1, 0.3, 0.05], 1, True, True),
        ([1, 0.4, 0.1, 0.6, 0.1], 1, True, True),
        ([1, 0.9, 0.5, 0.4, 0.3], 4, False, False),
        ([1, 0.1, 0.0, 0.0, 0.0], 0, True, False),
        ([0, 0.9, 0.5, np.nan, 0.0], 2, True, False),
        ([1, 0.143, 0.1429, 0.0, 0.0], 1, True, False),
    ],
)
def test_crossing(values, shell, crossed, again):
    found = find_crossing(values, 8, 3.0)
    assert (found.shell, found.crossed, found.rises_again) == (shell, crossed, again)
    assert found.resolution_angst == (np.inf if shell == 0 else pytest.approx(24.0 / shell))


def test_other_sizes_are_refused():
    cube, box = np.zeros((16, 16, 16)), np.zeros((16, 16, 12))
    with pytest.raises(VolumeError, match="cubic"):
        fourier_shell_correlation(box, box)
    with pytest.raises(VolumeError, match="one size"):
        fourier_shell_correlation(cube, np.zeros((18, 18, 18)))
    with pytest.raises(VolumeError, match="one size"):
        half_map_fsc(cube, cube, 1.0, np.ones((12, 12, 12)))


def test_fast_enough_to_stand_between_iterations():
    a, b = half_maps(64)
    mask = spherical_mask(64, 20)
    half_map_fsc(a, b, 4.0, mask)
    took = []
    for _ in range(5):
        start = time.process_time()
        half_map_fsc(a, b, 4.0, mask)
        took.append(time.process_time() - start)
    assert min(took) < 0.2  # 0.04 s on the machine it was written on


@pytest.mark.parametrize("group", ["C1", "D2", "O", "I"])
def test_evidence_of_noise_is_within_chance(group):
    """Pairs of maps of noise, each symmetrised by itself, under a sphere: standard deviations above noise scatter by about one."""
    n, rng = 24, np.random.default_rng(3)
    mask = spherical_mask(n, 8.0, 4.0)
    order = len(group_rotations(group))
    found, naive = [], []
    for _ in range(12):
        halves = [symmetrised(rng.normal(size=(n, n, n)).astype(np.float32), group) for _ in range(2)]
        curve = fourier_shell_correlation(*(half * mask for half in halves))
        found.append(evidence(curve, 3, 9, n, mask, order))
        naive.append(evidence(curve, 3, 9, n))
    assert np.abs(np.mean(found)) < 1.0 and 0.4 < np.std(found) < 1.8
    assert group == "C1" or np.std(naive) > 1.5 * np.std(found)


def test_evidence_of_a_structure_is_far_above_chance():
    n, rng = 24, np.random.default_rng(4)
    mask = spherical_mask(n, 8.0, 4.0)
    signal = symmetrised(ndimage.gaussian_filter(rng.normal(size=(n, n, n)), 1.0).astype(np.float32), "I")
    halves = [signal + symmetrised(rng.normal(scale=0.3 * signal.std(), size=(n, n, n)).astype(np.float32), "I") for _ in range(2)]
    curve = fourier_shell_correlation(*(half * mask for half in halves))
    assert evidence(curve, 1, 8, n, mask, 60) > 5
    assert evidence(curve, 9, 8, n, mask, 60) == 0
