"""PyTom's angle lists and angles: matrices written out from PyTom's definition, and every orientation of real files."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from numba_glocal.errors import GlocalError
from numba_glocal.geometry import angle_between_deg, matrix_to_zxz, zxz_to_matrix
from numba_glocal.io.angle_list import read_angle_list


def rz(deg):
    c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def rx(deg):
    c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])


def em_file(path, values, kind=9, order="<", shape=None):
    values = np.asarray(values)
    nx, ny, nz = shape or (values.shape[1], values.shape[0], 1)
    header = struct.pack(f"{order}4B3i", 6 if order == "<" else 5, 0, 0, kind, nx, ny, nz).ljust(512, b"\0")
    path.write_bytes(header + values.astype(f"{order}f{8 if kind == 9 else 4}").tobytes())
    return path


def test_zxz_by_hand_with_gimbal_lock():
    """Field case 26: a grid with X 0 and 180, compared as matrices."""
    grid = [(z1, z2, x) for z1 in range(-180, 181, 45) for z2 in range(-170, 190, 40) for x in (0, 1e-7, 30, 90, 145, 180 - 1e-7, 180, -35, 250)]
    expected = np.array([rz(z2) @ rx(x) @ rz(z1) for z1, z2, x in grid])
    found = zxz_to_matrix(grid)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    back = matrix_to_zxz(expected)
    assert back[:, 2].min() >= 0 and back[:, 2].max() <= 180
    np.testing.assert_allclose([rz(z2) @ rx(x) @ rz(z1) for z1, z2, x in back], expected, atol=1e-8)


@pytest.mark.parametrize(("kind", "order"), [(9, "<"), (5, "<"), (9, ">")])
def test_angle_list(tmp_path, kind, order):
    angles = np.array([(0.3, -2.0, 1.1), (0, 0, 0), (2.5, 0.0, np.pi), (-1.0, 3.0, 0.2)])
    found = read_angle_list(em_file(tmp_path / "angles.em", angles, kind, order))
    expected = [rz(np.rad2deg(z2)) @ rx(np.rad2deg(x)) @ rz(np.rad2deg(z1)) for z1, z2, x in angles]
    np.testing.assert_allclose(found, expected, atol=1e-12 if kind == 9 else 1e-6)


@pytest.mark.parametrize(("name", "count", "spacing_deg"), [("angles_90_26.em", 26, 90), ("angles_38.53_256.em", 256, 38.53)])
def test_real_angle_lists(shared, name, count, spacing_deg):
    rotations = read_angle_list(shared / "data/lists" / name)
    assert rotations.shape == (count, 3, 3)
    np.testing.assert_allclose(np.linalg.det(rotations), 1)
    # the list covers all orientations: no orientation is farther from it than about its increment
    rng = np.random.default_rng(1)
    some = zxz_to_matrix(np.stack([rng.uniform(0, 360, 500), rng.uniform(0, 360, 500), np.rad2deg(np.arccos(rng.uniform(-1, 1, 500)))], 1))
    nearest = angle_between_deg(some[:, None], rotations[None]).min(axis=1)
    assert nearest.max() < spacing_deg


@pytest.mark.parametrize(
    ("values", "shape", "message"),
    [
        (np.zeros((4, 4)), None, "4 x 4 x 1 numbers, expected an angle list of 3 x n x 1"),
        ([(0, 0, 0), (180.0, 45, 90)], None, "orientation 2 is 180, 45, 90, expected Z1, Z2, X in radians"),
        ([(0, np.nan, 0)], None, "orientation 1 is 0, nan, 0"),
        (np.zeros((2, 3)), (3, 9, 1), "expected 728 bytes for 9 orientations, found 560"),
    ],
)
def test_refused(tmp_path, values, shape, message):
    with pytest.raises(GlocalError, match=message):
        read_angle_list(em_file(tmp_path / "a.em", values, shape=shape))


def test_missing_or_no_em(tmp_path):
    with pytest.raises(GlocalError, match="cannot be read"):
        read_angle_list(tmp_path / "none.em")
    (tmp_path / "b.em").write_text("z1 z2 x\n")
    with pytest.raises(GlocalError, match="expected an EM header"):
        read_angle_list(tmp_path / "b.em")
