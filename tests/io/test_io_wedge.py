"""Weights: layouts against numpy's FFT, the sign of a tilt range against planes marked one by one and against real wedges."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from numba_glocal.errors import SettingsError, VolumeError
from numba_glocal.io import read_volume, write_volume
from numba_glocal.io.mrc import mrc_bytes
from numba_glocal.values import TiltRange, Volume
from numba_glocal.wedge import half_layout, read_weight_volume, tilt_range_weights, union_weights, wedge_to_tilt_range

RNG = np.random.default_rng(11)


def _even_weights(n):
    """Weights w(k) = w(-k) on the full grid, origin in the corner, from the spectrum of a real even object; no two alike by chance."""
    full = RNG.normal(size=(n, n, n))
    index = -np.arange(n) % n
    return (full + full[np.ix_(index, index, index)]) / 2


def _frequencies(n):
    full, half = np.fft.fftfreq(n, 1 / n), np.arange(n // 2 + 1)
    kz, ky, kx = np.meshgrid(full, full, half, indexing="ij")
    return kx, ky, kz


def _write(path, data):
    header, data = mrc_bytes(data.astype(np.float32), 5.0)
    path.write_bytes(header + data.tobytes())
    return path


@pytest.mark.parametrize("n", [8, 9])
def test_every_layout_gives_the_half_spectrum(tmp_path, n):
    full = _even_weights(n)
    h = n // 2 + 1
    expected = full[:, :, :h].astype(np.float32)
    # the weights filter as numpy's rfftn would have it
    image = RNG.normal(size=(n, n, n))
    np.testing.assert_allclose(
        np.fft.irfftn(np.fft.rfftn(image) * full[:, :, :h], s=image.shape, axes=(0, 1, 2)), np.fft.ifftn(np.fft.fftn(image) * full).real, atol=1e-12
    )
    for kind, data in {"centred": np.fft.fftshift(full), "x reduced": full[:, :, :h], "z reduced": full[:h]}.items():
        found = read_weight_volume(_write(tmp_path / "w.mrc", data), n)
        assert found.dtype == np.float32 and found.flags.c_contiguous and found.shape == (n, n, h)
        np.testing.assert_array_equal(found, expected, err_msg=kind)
    # field case 39, RELION 4: the sum of CTF^2, then how many images there were
    stacked = np.concatenate([full[:, :, :h], np.full((n, n, h), 7.0)])
    np.testing.assert_array_equal(read_weight_volume(_write(tmp_path / "w.mrc", stacked), n), expected)


# shape in z y x, part of the message
WRONG = {
    (6, 6, 6): "found a full volume of box 6 (6 x 6 x 6); expected weights for box 8",
    (12, 6, 4): "found a stack of two volumes of box 6 (4 x 6 x 12; RELION 4 pseudo-subtomogram weights)",
    (16, 8, 8): "found a stack of two volumes of box 8",
    (6, 6, 4): "found a half volume of box 6, x reduced",
    (4, 6, 6): "found a half volume of box 6, z reduced",
    (8, 5, 8): "found a volume of 8 x 5 x 8",
}


@pytest.mark.parametrize("shape", WRONG)
def test_wrong_weights_say_what_they_are(tmp_path, shape):
    with pytest.raises(VolumeError) as error:
        read_weight_volume(_write(tmp_path / "w.mrc", np.ones(shape)), 8)
    assert "w.mrc" in str(error.value) and WRONG[shape] in str(error.value)


def test_weights_without_sense(tmp_path):
    data = np.ones((8, 8, 8))
    data[1, 2, 3] = np.nan
    with pytest.raises(VolumeError, match="w.mrc: 1 weights are not finite"):
        read_weight_volume(_write(tmp_path / "w.mrc", data), 8)
    with pytest.raises(VolumeError, match="w.mrc: a wedge that leaves nothing"):
        read_weight_volume(_write(tmp_path / "w.mrc", np.zeros((8, 8, 8))), 8)


def _sampled(n, tilts_deg, axis="y"):
    """Voxels that tilted planes pass, point by point: in-plane points of each projection, turned and put on the nearest voxel."""
    seen = np.zeros((n, n, n), dtype=bool)
    radius = np.arange(-(n // 2), n // 2 + 0.01, 0.25)
    for tilt in np.deg2rad(tilts_deg):
        # a projection along the beam samples the plane z = 0; the specimen turned by t about y turns x into (cos t, -sin t)
        along, up = radius * np.cos(tilt), radius * (-np.sin(tilt) if axis == "y" else np.sin(tilt))
        a, z = np.rint(along).astype(int) % n, np.rint(up).astype(int) % n
        if axis == "y":
            seen[z, :, a] = True
        else:
            seen[z, a, :] = True
    return seen[:, :, : n // 2 + 1]


@pytest.mark.parametrize("axis", ["y", "x"])
@pytest.mark.parametrize("n", [24, 25])
@pytest.mark.parametrize("tilts", [(10, 50), (-50, -10), (-40, 60), (-60, 40), (0, 60), (-90, 90), (-75, -45)])
def test_sign_against_planes_marked_one_by_one(axis, n, tilts):
    weights = tilt_range_weights(n, *tilts, tilt_axis=axis)
    assert weights.dtype == np.float32 and weights.shape == (n, n, n // 2 + 1)
    kx, ky, kz = _frequencies(n)
    across = kx if axis == "y" else ky
    inside = np.hypot(across, kz) <= n // 2 - 1
    seen = _sampled(n, np.arange(tilts[0], tilts[1] + 1e-9, 0.25), axis)
    # all that is kept is on a plane, and all planes run at most a voxel's half diagonal outside of what is kept
    assert seen[(weights == 1) & inside].all()
    assert (tilt_range_weights(n, *tilts, tilt_axis=axis, smooth_voxels=0.75)[seen & inside] > 0).all()
    if tilts[0] != -tilts[1]:
        flipped = tilt_range_weights(n, *tilts, tilt_axis=axis, flip=True)
        assert (seen != (flipped == 1))[inside].mean() > 1.5 * (seen != (weights == 1))[inside].mean()
        np.testing.assert_array_equal(flipped, tilt_range_weights(n, -tilts[1], -tilts[0], tilt_axis=axis))


def test_negative_tilts_own_the_side_where_kx_kz_is_positive():
    kx, _, kz = _frequencies(16)
    inner = (kx > 0) & (kx < 8) & (kz != 0) & (kz != -8)
    weights = tilt_range_weights(16, -89.9, -0.1)
    assert (kx * kz > 0)[inner & (weights > 0)].all() and weights[inner].sum() > 100


def test_conventions_formula():
    # |kx| >= tan(90 - |t|) |kz|, per side, with kx kz > 0 for negative tilts
    n, low, high = 32, -55.0, 41.0
    kx, _, kz = _frequencies(n)
    a = np.deg2rad(90 - np.where(kx * kz > 0, -low, high))
    expected = np.abs(kx) >= np.tan(a) * np.abs(kz) - 1e-9
    inner = (kx < n // 2) & (kz != -n // 2)
    np.testing.assert_array_equal((tilt_range_weights(n, low, high) == 1)[inner], expected[inner])


@pytest.mark.parametrize("n", [12, 13])
@pytest.mark.parametrize("smooth", [0, 2.5])
def test_weights_are_even_and_keep_images_real(n, smooth):
    weights = tilt_range_weights(n, -30, 70, smooth_voxels=smooth)
    index = -np.arange(n) % n
    for plane in (0, n // 2) if n % 2 == 0 else (0,):
        np.testing.assert_allclose(weights[:, :, plane], weights[np.ix_(index, index, [plane])][:, :, 0], atol=1e-7)
    assert weights[0, :, 0].all()  # the tilt axis is always seen
    if smooth:
        hard = tilt_range_weights(n, -30, 70)
        assert (weights >= hard).all() and ((weights > 0) & (weights < 1)).any() and (weights[hard == 1] == 1).all()


def test_no_wedge():
    for n in (8, 9):
        assert (tilt_range_weights(n, -90, 90) == 1).all()
        assert (tilt_range_weights(n, *wedge_to_tilt_range(0, 0)) == 1).all()


@pytest.mark.parametrize("tilts", [(-100, 60), (-60, 95), (60, -60), (30, 30), (np.nan, 60), (-60, np.inf)])
def test_tilt_ranges_that_are_refused(tilts):
    with pytest.raises(SettingsError, match="tilt range"):
        tilt_range_weights(8, *tilts)


@pytest.mark.parametrize("wedge", [(-10, 30), (30, -0.1), (90, 30), (30, 95), (np.nan, 30)])
def test_wedge_angles_that_are_refused(wedge):
    with pytest.raises(SettingsError, match="missing-wedge angle"):
        wedge_to_tilt_range(*wedge)


def test_wedge_angles():
    assert wedge_to_tilt_range(30, 45) == (-60, 45)
    with pytest.raises(SettingsError, match="tilt axis"):
        tilt_range_weights(8, -60, 60, tilt_axis="z")
    with pytest.raises(SettingsError, match="smooth"):
        tilt_range_weights(8, -60, 60, smooth_voxels=-1)


def test_real_wedges_lie_in_their_tilt_range(shared):
    """Real series have gaps, missing corners and a tilt axis some degrees off y, so that a range holds what was sampled and more."""
    folder = shared / "data/real-70s"
    n = 32
    kx, ky, kz = _frequencies(n)
    radius = np.sqrt(kx**2 + ky**2 + kz**2)
    band = (radius > 2) & (radius <= 12)
    for line in (folder / "tilt_ranges.txt").read_text().splitlines():
        name, *tilts = line.split()
        tilts = np.array(tilts, dtype=float)
        sampled = read_weight_volume(folder / f"{name}_wedge.mrc", n) > 0.5
        range_of = [tilt_range_weights(n, tilts.min(), tilts.max(), flip=flip, smooth_voxels=1) > 0.5 for flip in (False, True)]
        # near ky = 0, where a turned axis matters least
        thin = band & (np.abs(ky) <= 3)
        inside, inside_flipped = ((sampled & r)[thin].sum() / sampled[thin].sum() for r in range_of)
        assert inside >= 0.95 and inside > inside_flipped + 0.02, (name, inside, inside_flipped)
        # and its planes are the ones that the sign of the conventions marks
        distance = [np.abs(kx[..., None] * np.sin(t) + kz[..., None] * np.cos(t)).min(-1) for t in (np.deg2rad(tilts), -np.deg2rad(tilts))]
        right, wrong = ((sampled == (d < 0.6))[thin].mean() for d in distance)
        assert right >= 0.88 and right > wrong + 0.02, (name, right, wrong)


def test_independent_data_set_with_an_asymmetric_range(shared, tmp_path):
    """Weights of exact tilt projections from -40 to 60 degrees, made by a tool that shares nothing with this package."""
    pytest.importorskip("finufft")
    script = shared / "tools/make_dataset.py"
    done = subprocess.run(
        [sys.executable, script, "set", "--map", shared / "data/maps/human_ribo_21A.em",
         "--n", "2", "--box", "24", "--tilt-min", "-40", "--tilt-max", "60"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    n = 24
    weights = read_weight_volume(tmp_path / "set/subtomo/c00000.mrc", n)
    kx, ky, kz = _frequencies(n)
    radius = np.sqrt(kx**2 + ky**2 + kz**2)
    band = (radius >= 3) & (radius <= 10)
    # the tool damps by dose (3 a tilt, smallest tilts first) and by cos(tilt)^0.5; undo it with the nearest tilt
    tilts = np.arange(-40, 60.1, 3)
    dose = np.empty(len(tilts))
    dose[np.argsort(np.abs(tilts))] = np.arange(len(tilts)) * 3.0
    agreement = []
    for sign in (1, -1):
        tilt = np.rad2deg(np.arctan2(-kz * sign, kx))
        nearest = np.clip(np.rint((tilt + 40) / 3).astype(int), 0, len(tilts) - 1)
        flat = weights / (np.exp(-dose[nearest] * (radius / (n * 6.8)) ** 2 * 12) * np.cos(np.deg2rad(tilts[nearest])) ** 0.5)
        model = tilt_range_weights(n, -40, 60, flip=sign < 0) == 1
        agreement.append(((flat > 0.5 * np.median(flat[band & model])) == model)[band].mean())
    assert agreement[0] >= 0.97 and agreement[1] < 0.85, agreement


def test_em_weights(tmp_path):
    full = _even_weights(8)
    write_volume(tmp_path / "w.em", Volume(np.fft.fftshift(full).astype(np.float32), 1.0))
    assert read_volume(tmp_path / "w.em").box_size == 8
    np.testing.assert_array_equal(read_weight_volume(tmp_path / "w.em", 8), full[:, :, :5].astype(np.float32))
    np.testing.assert_array_equal(half_layout(full[:5], 8), full[:, :, :5].astype(np.float32))


# ---- tilt ranges as lists give them


def _rotation(axis, deg):
    c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
    return np.array({"x": [[1, 0, 0], [0, c, -s], [0, s, c]], "z": [[c, -s, 0], [s, c, 0], [0, 0, 1]]}[axis])


@pytest.mark.parametrize("n", [16, 17])
@pytest.mark.parametrize("angles", [(90, 0, 0), (30, 0, 0), (20, -35, 10)])
def test_a_turned_series_against_its_own_planes(n, angles):
    """Every direction that a plane of a turned series holds is sampled, and those 4 degrees outside are not."""
    z1, z2, x = angles
    turn = _rotation("z", z2) @ _rotation("x", x) @ _rotation("z", z1)
    weights = union_weights(n, [TiltRange(-20, 60, turn=tuple(turn.ravel()), smooth_voxels=0)])
    kx, ky, kz = _frequencies(n)
    k = np.stack([kx, ky, kz], -1)
    # normal of the plane that tilt t samples: it holds the turned tilt axis and the turned direction (cos t, 0, -sin t)
    axis = turn @ [0, 1, 0]
    inside = (np.abs(k).max(-1) < n // 2) & (np.linalg.norm(np.cross(k, axis), axis=-1) > 3)
    for tilts, expected in ((np.arange(-19, 59.5, 0.5), 1), (np.concatenate([np.arange(-86, -24, 0.5), np.arange(64, 90, 0.5)]), 0)):
        marked = np.zeros(k.shape[:3], bool)
        for t in np.deg2rad(tilts):
            normal = np.cross(axis, turn @ [np.cos(t), 0, -np.sin(t)])
            marked |= np.abs(k @ normal) < 0.05
        marked &= inside
        assert marked.sum() > 100
        assert (weights[marked] == expected).all()


def test_union_and_cutoff_and_flip():
    n = 16
    kx, ky, kz = _frequencies(n)
    one, other = TiltRange(-60, 60, smooth_voxels=0), TiltRange(-50, 40, "x", smooth_voxels=0)
    both = union_weights(n, [one, other])
    np.testing.assert_array_equal(both, np.maximum(tilt_range_weights(n, -60, 60), tilt_range_weights(n, -50, 40, tilt_axis="x")))
    cut = union_weights(n, [TiltRange(-60, 60, smooth_voxels=0, cutoff_voxels=5)])
    np.testing.assert_array_equal(cut, np.where(kx**2 + ky**2 + kz**2 <= 25, tilt_range_weights(n, -60, 60), 0))
    # a quarter turn about the beam is the x axis, and the plain weights to the voxel
    quarter = union_weights(n, [TiltRange(-60, 40, turn=tuple(_rotation("z", -90).ravel()), smooth_voxels=0)])
    np.testing.assert_array_equal(quarter, tilt_range_weights(n, -60, 40, tilt_axis="x"))
    np.testing.assert_array_equal(union_weights(n, [TiltRange(-60, 40, flip=True, smooth_voxels=0)]), tilt_range_weights(n, -40, 60))
