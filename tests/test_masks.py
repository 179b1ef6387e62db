from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_glocal.errors import SettingsError, VolumeError
from numba_glocal.masks import check_mask, cylinder_mask, spherical_mask, threshold_mask


def distance(point, centre):
    return float(np.linalg.norm(np.subtract(point, centre)))


@pytest.mark.parametrize("box", [24, 25])
@pytest.mark.parametrize("centre", [None, (10.0, 13.5, 12.0)])
def test_sphere_against_a_loop(box, centre):
    mask = spherical_mask(box, 6.0, 4.0, centre)
    middle = (box // 2,) * 3 if centre is None else centre
    assert mask.dtype == np.float32
    for z in range(box):
        for y in range(0, box, 3):
            for x in range(box):
                beyond = distance((x, y, z), middle) - 6.0
                expected = 1.0 if beyond <= 0 else 0.0 if beyond >= 4.0 else (1 + np.cos(np.pi * beyond / 4.0)) / 2
                assert mask[z, y, x] == pytest.approx(expected, abs=1e-5)


def test_hard_sphere_has_the_volume_of_a_sphere():
    mask = spherical_mask(48, 20.0, 0.0)
    assert set(np.unique(mask)) == {0.0, 1.0}
    assert mask.sum() == pytest.approx(4 / 3 * np.pi * 20**3, rel=0.01)


def test_cylinder_axis_is_z():
    mask = cylinder_mask(32, 5.0, 20.0, 0.0)
    assert mask[16 - 10 : 16 + 11, 16, 16].all()
    assert mask[16 - 11, 16, 16] == 0 and mask[16 + 11, 16, 16] == 0
    assert mask[16, 16, 16 + 5] == 1 and mask[16, 16, 16 + 6] == 0 and mask[16, 16 + 6, 16] == 0
    soft = cylinder_mask(32, 5.0, 10.0, 4.0)
    assert soft[16 + 5 + 2, 16, 16] == pytest.approx(0.5, abs=1e-5)
    # off the rim the distance is diagonal: 2 across and 2 along
    assert soft[16 + 5 + 2, 16, 16 + 5 + 2] == pytest.approx((1 + np.cos(np.pi * np.sqrt(8) / 4)) / 2, abs=1e-5)


def test_threshold_grows_by_distance():
    volume = np.zeros((24, 24, 24), np.float32)
    volume[12, 12, 8:13] = 2.0
    mask = threshold_mask(volume, 1.0, extend_voxels=3.0, soft_edge_voxels=4.0)
    seeds = [(12, 12, x) for x in range(8, 13)]
    for index in np.ndindex(mask.shape):
        beyond = min(distance(index, seed) for seed in seeds) - 3.0
        expected = 1.0 if beyond <= 0 else 0.0 if beyond >= 4.0 else (1 + np.cos(np.pi * beyond / 4.0)) / 2
        assert mask[index] == pytest.approx(expected, abs=1e-5)


def test_threshold_largest_part_drops_dust():
    volume = np.zeros((24, 24, 24), np.float32)
    volume[5:10, 5:10, 5:10] = 1.0
    volume[18, 18, 18] = 1.0
    assert threshold_mask(volume, 0.5, 1, 1)[18, 18, 18] == 1
    assert threshold_mask(volume, 0.5, 1, 1, largest_part=True)[18, 18, 18] == 0


@given(st.integers(8, 20), st.floats(1, 12), st.floats(0, 8))
@settings(max_examples=25, deadline=None)
def test_values_stay_between_0_and_1_and_shrink_outwards(box, radius, edge):
    mask = spherical_mask(box, radius, edge)
    line = mask[box // 2, box // 2, box // 2 :]
    assert mask.min() >= 0 and mask.max() == 1
    assert (np.diff(line) <= 0).all()


def broken(value):
    mask = spherical_mask(16, 5)
    mask[0, 0, 0] = value
    return mask


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (np.ones((16, 16, 12), np.float32), "12 x 16 x 16"),
        (np.zeros((16, 16, 16), np.float32), "empty"),
        (broken(np.nan), "NaN"),
        (broken(1.5), "1.5"),
        (broken(-0.2), "-0.2"),
    ],
)
def test_bad_masks_are_refused_in_one_line(mask, found):
    with pytest.raises(VolumeError, match="m.mrc") as error:
        check_mask(mask, 16, "m.mrc")
    assert found in str(error.value) and "\n" not in str(error.value)


def test_small_overshoot_is_clipped():
    mask = check_mask(broken(-2e-4), 16, "m.mrc")
    assert mask.min() == 0 and mask.dtype == np.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda: spherical_mask(16, 0),
        lambda: spherical_mask(16, 4, -1),
        lambda: cylinder_mask(16, 4, 0),
        lambda: threshold_mask(np.zeros((8, 8, 8)), 1.0),
        lambda: threshold_mask(np.ones((8, 8, 8)), 0.5),
        lambda: threshold_mask(np.ones((8, 8, 8)), 0.5, -1),
    ],
)
def test_bad_settings_are_refused(call):
    with pytest.raises(SettingsError):
        call()
