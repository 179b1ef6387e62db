"""Volumes from stacks of tilt images against direct sums in double precision."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from numba_glocal.geometry import rotvec_to_matrix
from numba_glocal.io import read_particles
from numba_glocal.io.mrc import mrc_bytes
from numba_glocal.io.tilt_series import Tomograms
from numba_glocal.tilt_images import defocus_hand, insert_images, multipliers, plane_frequencies, stack_weights, with_tilt_images
from numba_glocal.values import TiltGeometry

RNG = np.random.default_rng(5)


def geometry_of(tilts_deg, multiplied=True, pixel=5.0):
    t = len(tilts_deg)
    # a tilt axis some degrees off y, as real ones
    turn = rotvec_to_matrix(np.array([0.05, 0.02, 0.1]))
    matrices = np.stack([rotvec_to_matrix(np.array([0, np.deg2rad(tilt), 0])) @ turn for tilt in tilts_deg])
    return TiltGeometry(
        np.arange(t),
        matrices[:, :2],
        np.column_stack([RNG.uniform(1e4, 3e4, (t, 2)), RNG.uniform(0, 180, t)]),
        np.zeros(t),
        np.cos(np.deg2rad(tilts_deg)),
        np.linspace(0, 90, t),
        pixel,
        multiplied=multiplied,
    )


def all_samples(n):
    """Every sample of an image below Nyquist but the mean, both of each pair."""
    half = plane_frequencies(n)
    return np.concatenate([half, -half])


def direct(geometry, images, n, weights=None):
    """sum_q Y(q) exp(2 pi i q.v / n) / n^3 over both halves of each image's plane."""
    v = np.arange(n) - n // 2
    k = all_samples(n)
    volume = np.zeros((n, n, n))
    for t, (image, axes) in enumerate(zip(images, geometry.axes, strict=True)):
        waves = [np.exp(-2j * np.pi * np.outer(k[:, i], v) / n) for i in (0, 1)]
        values = np.einsum("mx,yx,my->m", waves[0], image, waves[1], optimize=True)
        if weights is not None:
            values = values * np.tile(weights[t], 2)
        q = k @ axes
        ex, ey, ez = (np.exp(2j * np.pi * np.outer(q[:, i], v) / n) for i in range(3))
        volume += np.einsum("mz,my,mx->zyx", ez * values[:, None], ey, ex, optimize=True).real
    return volume / n**3


def error_within(found, exact, share):
    """Relative error within a sphere of this share of the box."""
    z, y, x = np.indices(exact.shape) - exact.shape[0] // 2
    inside = x * x + y * y + z * z <= (share * exact.shape[0]) ** 2
    return np.linalg.norm((found - exact)[inside]) / np.linalg.norm(exact[inside])


@pytest.mark.parametrize("n", [16, 17])
def test_insertion_is_the_adjoint_of_slicing(n):
    geometry = geometry_of([-50, -20, 0, 35, 60])
    images = RNG.normal(size=(5, n, n))
    found, exact = insert_images(images, geometry), direct(geometry, images, n)
    # what linear interpolation leaves grows towards the edge of the box
    assert error_within(found, exact, 0.25) < 0.02 and error_within(found, exact, 0.4) < 0.045


def test_images_that_are_not_multiplied_are(n=16):
    geometry = geometry_of([-40, 10, 45], multiplied=False)
    images = RNG.normal(size=(3, n, n))
    exact = direct(geometry, images, n, multipliers(geometry, n))
    assert error_within(insert_images(images, geometry), exact, 0.25) < 0.02


def fejer(geometry, n):
    """The exact variance of the volume's transform for independent noise of variance M^2 at each sample: squares of the box's transform."""
    k = all_samples(n)
    m2 = np.tile(multipliers(geometry, n) ** 2, 2)
    grid = np.rint(np.fft.fftfreq(n) * n)
    v = np.arange(n) - n // 2

    def kernel(q):
        return np.abs(np.exp(2j * np.pi * (grid[None, :, None] - q[:, None, None]) * v / n).sum(-1)) ** 2 / n**2

    total = np.zeros((n, n, n))
    for values, axes in zip(m2, geometry.axes, strict=True):
        q = k @ axes
        total += np.einsum("mz,my,mx->zyx", kernel(q[:, 2]) * values[:, None], kernel(q[:, 1]), kernel(q[:, 0]), optimize=True)
    return total[:, :, : n // 2 + 1]


@pytest.mark.parametrize("n", [16, 17])
def test_weights_are_the_variance_of_noise(n):
    geometry = geometry_of(np.arange(-60, 61, 6))
    found, exact = stack_weights(geometry, n), fejer(geometry, n)
    kz, ky, kx = np.indices(found.shape)
    kz, ky = (kz + n // 2) % n - n // 2, (ky + n // 2) % n - n // 2
    radius = np.sqrt(kx**2 + ky**2 + kz**2)
    band = (radius >= 1) & (radius <= n // 2 - 2)
    assert (found >= 0).all()
    assert np.corrcoef(found[band], exact[band])[0, 1] > 0.98
    assert found[band].sum() == pytest.approx(exact[band].sum(), rel=0.06)  # the exact kernel has tails beyond a voxel


def test_a_volume_is_its_weights_times_the_structure(n=24):
    """Projections of a blob off the centre, multiplied by CTF^2, give C F; other weights do not."""
    geometry = geometry_of(np.arange(-60, 61, 3), pixel=8.0)
    centres = [(2.0, -3.0, 1.0), (-3.0, 1.0, 4.0), (0.5, 3.5, -3.0)]
    k = all_samples(n)

    def structure(q):
        return sum(np.exp(-2j * np.pi * (q @ np.array(c)) / n) for c in centres) * np.exp(-0.5 * (q**2).sum(-1) * (2 * np.pi * 1.0 / n) ** 2)

    m2 = np.tile(multipliers(geometry, n) ** 2, 2)
    v = np.arange(n) - n // 2
    images = []
    for weight, axes in zip(m2, geometry.axes, strict=True):
        ex, ey = (np.exp(2j * np.pi * np.outer(k[:, i], v) / n) for i in (0, 1))
        images.append(np.einsum("my,mx->yx", ey * (weight * structure(k @ axes))[:, None], ex, optimize=True).real / n**2)
    found = np.fft.rfftn(np.fft.ifftshift(insert_images(np.array(images), geometry).astype(float)))
    kz, ky, kx = np.indices(found.shape)
    kz, ky = (kz + n // 2) % n - n // 2, (ky + n // 2) % n - n // 2
    q = np.stack([kx, ky, kz], -1).astype(float)
    radius = np.linalg.norm(q, axis=-1)
    band = (radius >= 1) & (radius <= n // 2 - 2)
    weights = stack_weights(geometry, n)

    def likeness(model):
        a, b = found[band], model[band]
        return (a * b.conj()).sum().real / np.sqrt((np.abs(a) ** 2).sum() * (np.abs(b) ** 2).sum())

    expected = weights * structure(q)
    assert likeness(expected) > 0.97
    assert (found[band] * expected[band].conj()).sum().real / (np.abs(expected[band]) ** 2).sum() == pytest.approx(1, abs=0.1)
    assert likeness(weights[::-1] * structure(q)) < likeness(expected) - 0.05


def noise_stacks(folder, hand, told=1):
    """Stacks of noise times the CTF at each particle's height, in particles.star, tomograms.star and set.star."""
    n, pixel, tilts = 32, 6.0, np.arange(-45, 46, 15)
    rows = "".join(f"0 {tilt} 0 20000 20000 0 0\n" for tilt in tilts)
    (folder / "tomograms.star").write_text(
        "data_global\nloop_\n_rlnTomoName\n_rlnTomoTiltSeriesPixelSize\n_rlnTomoSizeX\n_rlnTomoSizeY\n_rlnTomoSizeZ\n_rlnTomoHand\n"
        f"a 3 1000 1000 500 {told}\n\ndata_a\nloop_\n_rlnTomoXTilt\n_rlnTomoYTilt\n_rlnTomoZRot\n_rlnDefocusU\n_rlnDefocusV\n_rlnDefocusAngle\n"
        f"_rlnMicrographPreExposure\n{rows}"
    )
    k = np.fft.fftfreq(n, pixel)
    k2 = k[:, None] ** 2 + k[None, :] ** 2
    wave = 0.019687
    lines = []
    for i in range(12):
        place = RNG.uniform(-1, 1, 3) * [1400, 1400, 700]
        images = []
        for tilt in np.deg2rad(tilts):
            # the beam's direction for a specimen turned by the tilt about y
            height = -np.sin(tilt) * place[0] + np.cos(tilt) * place[2]
            phase = np.pi * wave * (20000 + hand * height) * k2 - 0.5 * np.pi * 2.7e7 * wave**3 * k2**2 + np.arcsin(0.07)
            images.append(np.fft.ifft2(np.fft.fft2(RNG.normal(size=(n, n))) * np.sin(phase)).real)
        header, data = mrc_bytes(np.array(images, np.float32), pixel)
        (folder / f"{i}.mrcs").write_bytes(header + data.tobytes())
        lines.append(f"a {i}.mrcs 1 0 0 0 {' '.join(f'{v:.2f}' for v in place)} [{','.join('1' * len(tilts))}]")
    (folder / "particles.star").write_text(
        "data_optics\nloop_\n_rlnOpticsGroup\n_rlnImagePixelSize\n_rlnImageSize\n_rlnImageDimensionality\n_rlnCtfDataAreCtfPremultiplied\n"
        f"1 {pixel} {n} 2 1\n\ndata_particles\nloop_\n_rlnTomoName\n_rlnImageName\n_rlnOpticsGroup\n_rlnAngleRot\n_rlnAngleTilt\n_rlnAnglePsi\n"
        "_rlnCenteredCoordinateXAngst\n_rlnCenteredCoordinateYAngst\n_rlnCenteredCoordinateZAngst\n_rlnTomoVisibleFrames\n" + "\n".join(lines) + "\n"
    )
    (folder / "set.star").write_text("data_\n_rlnTomoParticlesFile particles.star\n_rlnTomoTomogramsFile tomograms.star\n")
    return read_particles(folder / "set.star")


@pytest.mark.parametrize("hand", [1, -1])
def test_the_images_tell_in_which_direction_defocus_grows(tmp_path, hand):
    particles = noise_stacks(tmp_path, hand)
    assert defocus_hand(particles, Tomograms(tmp_path / "tomograms.star")) == hand
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = with_tilt_images(particles)
    said = [str(w.message) for w in caught if "rlnTomoHand is 1, but the images' own CTF" in str(w.message)]
    assert len(said) == (hand != 1)
    place = particles.coordinates.as_centred_angst()
    for geometry, (x, _, z) in zip(found.weight_paths, place, strict=True):
        height = -np.sin(np.deg2rad(np.arange(-45, 46, 15))) * x + np.cos(np.deg2rad(np.arange(-45, 46, 15))) * z
        # places are rounded to a tenth of a radian of phase at Nyquist
        np.testing.assert_allclose(geometry.defocus_angst[:, 0], 20000 + hand * height, atol=0.1 * 144 / (np.pi * 0.0197))


def test_what_does_not_tell_the_hand(tmp_path):
    particles = noise_stacks(tmp_path, 1)
    series = Tomograms(tmp_path / "tomograms.star")
    assert defocus_hand(replace(particles, coordinates=None), series) == 0
    assert defocus_hand(replace(particles, premultiplied=False), series) == 0
    assert defocus_hand(particles.take([0, 1, 2]), series) == 0
    for i in range(12):  # white noise
        header, data = mrc_bytes(RNG.normal(size=(7, 32, 32)).astype(np.float32), 6.0)
        (tmp_path / f"{i}.mrcs").write_bytes(header + data.tobytes())
    assert defocus_hand(particles, series) == 0
