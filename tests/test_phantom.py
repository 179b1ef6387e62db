from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage
from scipy.spatial.transform import Rotation

from numba_glocal.errors import SettingsError
from numba_glocal.masks import spherical_mask
from numba_glocal.phantom import make_phantom, phantom_spectrum, render_phantom


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def turned(volume, rotation, shift_voxels):
    """volume(R^-1 (v - s - c) + c) by splines in real space; index order z, y, x."""
    centre = np.array([volume.shape[0] // 2] * 3)
    grid = np.stack(np.meshgrid(*[np.arange(n) for n in volume.shape], indexing="ij"), -1)[..., ::-1]  # x, y, z
    source = (grid - shift_voxels - centre) @ rotation + centre  # R^-1 v as a row: v^T R
    return ndimage.map_coordinates(volume, np.moveaxis(source[..., ::-1], -1, 0), order=5)


@pytest.mark.parametrize("box", [47, 48])
def test_pose_is_rotation_about_the_centre_then_shift(box):
    reference = make_phantom(box, 8.0).data
    rotation = Rotation.from_euler("ZYZ", [30, 70, -50], degrees=True).as_matrix()
    shift = np.array([11.0, -6.0, 17.0])
    exact = render_phantom(box, 8.0, rotation, shift)
    assert correlation(exact, turned(reference, rotation, shift / 8.0)) > 0.999
    assert correlation(exact, turned(reference, rotation.T, shift / 8.0)) < 0.9
    assert correlation(exact, turned(reference, rotation, -shift / 8.0)) < 0.9


def test_spectrum_is_the_transform_of_the_map_and_holds_nothing_at_nyquist():
    box, pixel = 32, 10.0
    spectrum = phantom_spectrum(box, pixel)
    np.testing.assert_allclose(np.fft.rfftn(render_phantom(box, pixel)), spectrum, atol=1e-4 * np.abs(spectrum).max())
    assert np.abs(spectrum[:, :, 16]).max() < 1e-9 and np.abs(spectrum[16]).max() < 1e-9


def test_whole_turns_of_the_grid_are_exact():
    """A quarter turn about z maps voxels onto voxels of an odd box: no tolerance for interpolation is needed."""
    reference = render_phantom(33, 10.0)
    quarter = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])  # x -> y
    expected = np.empty_like(reference)
    for y, x in np.ndindex(33, 33):
        expected[:, x, 32 - y] = reference[:, y, x]  # (x, y) -> (-y, x) about the centre
    np.testing.assert_allclose(render_phantom(33, 10.0, quarter), expected, atol=1e-4)


def test_no_symmetry_and_chiral():
    """No rotation more than 25 degrees away, of the object or its mirror image, looks like it where it has detail."""
    box, pixel = 24, 14.0

    def detail(volume):
        return (volume - ndimage.gaussian_filter(volume, 3.0)) * spherical_mask(box, 9, 2)

    reference = detail(render_phantom(box, pixel))
    rotations = Rotation.random(600, random_state=4)
    far = [r for r in rotations if r.magnitude() > np.deg2rad(25)]
    same = [correlation(detail(render_phantom(box, pixel, r.as_matrix())), reference) for r in far]
    mirror = np.diag([1.0, 1.0, -1.0])
    mirrored = [correlation(detail(render_phantom(box, pixel, r.as_matrix() @ mirror)), reference) for r in rotations]
    assert max(same) < 0.8 and max(mirrored) < 0.8
    near = correlation(detail(render_phantom(box, pixel, Rotation.from_rotvec([0, 0.1, 0]).as_matrix())), reference)
    assert near > 0.9


def test_it_is_positive_fits_its_diameter_and_scales_with_it():
    data = make_phantom(64, 6.0).data
    assert data.min() > -0.02 * data.max()
    outside = data[spherical_mask(64, 27, 0) == 0]
    assert np.abs(outside).max() < 0.02 * data.max()
    small = render_phantom(32, 5.0)  # the box is 160 Angstrom: the object shrinks to 128
    np.testing.assert_allclose(small, render_phantom(32, 5.0, diameter_angst=128.0))
    assert np.abs(small[0]).max() < 0.02 * small.max()


def test_there_is_detail_up_to_the_pixels_limit():
    """Power falls, as a molecule's does, but by less than a million from 60 to 12 Angstrom."""
    box, pixel = 64, 5.0
    power = np.abs(phantom_spectrum(box, pixel)) ** 2
    freq = np.fft.fftfreq(box, 1 / box)
    radius = np.rint(np.sqrt(freq[:, None, None] ** 2 + freq[None, :, None] ** 2 + np.arange(33.0) ** 2)).astype(int)
    mean = np.bincount(radius.ravel(), power.ravel()) / np.bincount(radius.ravel())
    assert mean[5] > mean[12] > mean[20] > mean[26] > mean[5] * 1e-6


def test_senseless_boxes_are_refused():
    with pytest.raises(SettingsError):
        make_phantom(4, 10.0)
    with pytest.raises(SettingsError):
        make_phantom(32, float("nan"))
