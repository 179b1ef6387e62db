"""Averages and the common frame, judged by an object whose every pose is a formula: Gaussians at turned places."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.averaging import merge, move_frame, reconstruct, relative_motion, symmetrise_sums
from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.protocols import Grid, ParticleBatch, ParticleMask, SumSetup, WeightedSum
from numba_glocal.fourier import use_threads
from numba_glocal.masks import spherical_mask
from numba_glocal.noise import NoiseModel
from numba_glocal.resolution import half_map_fsc
from numba_glocal.symmetry import grid_factors, group_rotations
from numba_glocal.values import Poses

PIXEL = 4.0
PLACES = np.array([(7.0, 0, 0), (-5, 5, 2), (0, -6, 4), (2, 2, -7), (-3, -3, -3)])
HEIGHTS = np.array([1.0, 0.8, 1.2, 0.9, 1.1])


def blobs(n, rotation=None, shift=(0.0, 0.0, 0.0), width=2.0):
    """The object at a pose: ``x' = R x + s``, in voxels, (x, y, z)."""
    z, y, x = np.indices((n,) * 3) - n // 2
    total = np.zeros((n,) * 3)
    places = PLACES if rotation is None else PLACES @ np.asarray(rotation).T
    for (px, py, pz), height in zip(places + np.asarray(shift), HEIGHTS, strict=True):
        total += height * np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * width**2))
    return total.astype(np.float32)


def summed(n, rotations, shifts_voxels, weights=None, weighting=None, added_at=None):
    """Sums of particles of the object at poses; `weights` (p, n, n, n // 2 + 1); `added_at` other rotations than the true ones."""
    ones = np.ones((n, n, n // 2 + 1), np.float32)

    def read(index):
        volume = blobs(n, rotations[index], shifts_voxels[index])
        if weights is None:
            return volume, ones
        spectrum = np.fft.rfftn(np.fft.ifftshift(volume)) * weights[index]
        return np.fft.fftshift(np.fft.irfftn(spectrum, s=(n,) * 3, axes=(0, 1, 2))).astype(np.float32), weights[index].astype(np.float32)

    session = CPUBackend(0).open_sum(SumSetup(Grid(n, n, PIXEL), ParticleMask(0.4 * n, 3.0), weighting or NoiseModel(np.ones(n // 2 + 1))))
    batch = ParticleBatch(tuple(map(str, range(len(rotations)))), read)
    inserted = np.asarray(rotations if added_at is None else added_at, np.float64)
    assert session.add(batch, inserted, np.asarray(shifts_voxels, np.float64) * PIXEL) == []
    return session.result()


@pytest.mark.parametrize(("n", "name"), [(20, "D2"), (21, "O"), (20, "D3"), (21, "C4")])
def test_sums_turned_on_the_grid_are_sums_of_all_copies(n, name):
    """With a wedge, so that every copy brings weights of its own."""
    rotations, shifts = Rotation.random(3, random_state=2).as_matrix(), np.random.default_rng(2).uniform(-1, 1, (3, 3))
    kz, kx = np.fft.fftfreq(n) * n, np.arange(n // 2 + 1)
    wedge = np.broadcast_to((np.abs(kx)[None, None] >= 0.6 * np.abs(kz)[:, None, None]), (n, n, n // 2 + 1)).astype(np.float32)

    def of(turns):
        poses, copies = np.repeat(rotations, len(turns), 0), (rotations[:, None] @ turns).reshape(-1, 3, 3)
        weights = np.broadcast_to(wedge, (len(poses), *wedge.shape))
        return summed(n, poses, np.repeat(shifts, len(turns), 0), weights, added_at=copies)

    few, on_grid = grid_factors(name)
    all_copies, found = merge([of(group_rotations(name))]), symmetrise_sums(merge([of(few)]), on_grid)
    expected_map, found_map = reconstruct(all_copies, n), reconstruct(found, n)
    assert np.abs(found_map - expected_map).max() < 1e-4 * np.abs(expected_map).max()
    assert np.abs(found_map - reconstruct(merge([of(np.eye(3)[None])]), n)).max() > 0.05 * np.abs(expected_map).max()


@pytest.mark.parametrize("n", [32, 33])
def test_an_average_of_turned_objects_is_the_object(n):
    turns = Rotation.random(12, random_state=1).as_matrix()
    shifts = np.random.default_rng(2).uniform(-3, 3, (12, 3))
    found, truth = reconstruct(summed(n, turns, shifts), n), blobs(n)
    inside = spherical_mask(n, 12, 0) > 0.5
    assert np.corrcoef(found[inside], truth[inside])[0, 1] > 0.999
    # grey values too, but for the mean, which is left out
    difference = (found - found[inside].mean()) - (truth - truth[inside].mean())
    assert np.abs(difference[inside]).max() < 0.03


def test_weights_are_undone():
    """Every particle lacks another half of Fourier space; together they lack nothing."""
    n = 32
    k = np.fft.fftfreq(n) * n
    kz, ky, kx = k[:, None, None], k[None, :, None], np.arange(n // 2 + 1)
    patterns = [0.2 + (np.abs(kx) > np.abs(kz)) * 1.0, 0.2 + (np.abs(ky) > np.abs(kx)) * 1.0, 0.2 + (np.abs(kz) > np.abs(ky)) * 1.0]
    weights = np.stack([np.broadcast_to(p, (n, n, n // 2 + 1)) for p in patterns] * 4)
    turns = Rotation.random(12, random_state=1).as_matrix()
    found, truth = reconstruct(summed(n, turns, np.zeros((12, 3)), weights), n), blobs(n)
    inside = spherical_mask(n, 12, 0) > 0.5
    slope = np.polyfit(truth[inside], found[inside], 1)[0]
    assert np.corrcoef(found[inside], truth[inside])[0, 1] > 0.998 and slope == pytest.approx(1, abs=0.05)


def test_the_prior_shrinks_towards_nothing():
    n = 24
    sums = summed(n, Rotation.random(60, random_state=1).as_matrix(), np.zeros((60, 3)))  # enough to fill Fourier space evenly
    plain = reconstruct(sums, n)
    half = reconstruct(sums, n, np.ones(n // 2 + 1))
    none = reconstruct(sums, n, np.full(n // 2 + 1, 1e-6))
    assert np.polyfit(plain.ravel(), half.ravel(), 1)[0] == pytest.approx(0.5, abs=0.04)  # ratio 1: half of what the data say
    assert np.abs(none).max() < 1e-4 * np.abs(plain).max()


def test_nothing_gives_nothing():
    n = 16
    shape = np.zeros((2 * 16 + 1, 2 * 16 + 1, 18))
    assert not reconstruct(WeightedSum(shape.astype(np.complex64), shape.astype(np.float32), 0), n).any()


def test_merge_adds_in_double_precision():
    """Single precision would lose the small parts: 1e8 + 1 is 1e8."""
    parts = [WeightedSum(np.full((1, 1, 1), v, np.complex64), np.full((1, 1, 1), v, np.float32), 2) for v in (1e8, 1.0, 1.0, 1.0)]
    total = merge(parts)
    assert total.numerator[0, 0, 0] == 1e8 + 3 and total.denominator[0, 0, 0] == 1e8 + 3 and total.n_particles == 8
    assert parts[0].numerator[0, 0, 0] == np.float32(1e8)


MOTIONS = [(np.deg2rad([2.0, -1.0, 3.0]), (0.4, -0.7, 0.2)), (np.deg2rad([0.0, 0.0, -5.0]), (0.0, 1.5, 0.0)), (np.full(3, 1e-4), (0.001, 0.0, 0.0))]


@pytest.mark.parametrize(("rotvec", "shift"), MOTIONS)
@pytest.mark.parametrize("n", [40, 41])
def test_relative_motion_of_two_maps(n, rotvec, shift):
    turn = Rotation.from_rotvec(rotvec).as_matrix()
    found_rotvec, found_shift = relative_motion(blobs(n), blobs(n, turn, shift), spherical_mask(n, 15, 4), 10.0)
    assert np.rad2deg(np.abs(found_rotvec - rotvec)).max() < 0.1
    assert np.abs(found_shift - shift).max() < 0.03


def test_relative_motion_through_noise():
    n, rng = 40, np.random.default_rng(3)
    rotvec, shift = MOTIONS[0]
    maps = [blobs(n), blobs(n, Rotation.from_rotvec(rotvec).as_matrix(), shift)]
    noisy = [(m + 0.05 * rng.normal(size=m.shape)).astype(np.float32) for m in maps]
    found_rotvec, found_shift = relative_motion(*noisy, spherical_mask(n, 15, 4), 10.0)
    assert np.rad2deg(np.abs(found_rotvec - rotvec)).max() < 0.6 and np.abs(found_shift - shift).max() < 0.08


def test_moved_poses_describe_the_same_particles():
    """A map in another frame with poses to match gives the very particles: the pose (R, s) of ``map2(x) = map1(Q^-1 (x - d))``."""
    rng = np.random.default_rng(0)
    rotvec, d = np.array([0.3, -0.2, 0.1]), np.array([1.5, -1.0, 0.5])
    turn = Rotation.from_rotvec(rotvec).as_matrix()
    poses = Poses(Rotation.random(3, random_state=5).as_matrix(), rng.uniform(-2, 2, (3, 3)))
    # poses of the second map, which the particles were aligned to; moved by the whole motion they belong to the first
    moved = move_frame(poses, rotvec, d, 1.0)
    for i in range(3):
        # the second map at its pose: places (turn p + d), then R and s
        places = PLACES @ turn.T + d
        seen = places @ poses.rotations[i].T + poses.shifts_angst[i]
        described = PLACES @ moved.rotations[i].T + moved.shifts_angst[i]
        assert np.abs(seen - described).max() < 1e-10
    half = move_frame(move_frame(poses, rotvec, d, 0.0), rotvec, d, 0.5)
    assert np.abs(half.shifts_angst - 0.5 * (poses.shifts_angst + moved.shifts_angst)).max() < 1e-10


@pytest.mark.parametrize("n", [24, 25])
def test_no_bit_of_a_map_depends_on_the_threads(n):
    sums = [summed(n, Rotation.random(4, random_state=i).as_matrix(), np.zeros((4, 3))) for i in range(3)]
    mask, found = spherical_mask(n, 9, 2), []
    try:
        for threads in (1, 2, 5):
            use_threads(threads)
            total = merge([WeightedSum(part.numerator.copy(), part.denominator.copy(), 4) for part in sums])
            half1, half2 = reconstruct(total, n), reconstruct(sums[0], n, np.linspace(3, 0.1, n // 2 + 1))
            fsc = half_map_fsc(half1, half2, PIXEL, mask)
            found.append((total.numerator, total.denominator, half1, half2, *relative_motion(half1, half2, mask, 6.0), fsc.corrected))
    finally:
        use_threads(1)
    assert all(np.array_equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
