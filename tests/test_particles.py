from __future__ import annotations

import mrcfile
import numpy as np
import pytest

from numba_glocal.backends.protocols import Grid, ParticleMask
from numba_glocal.errors import BadParticleError
from numba_glocal.particles import ParticleReader, crop_half_spectrum, fourier_crop
from numba_glocal.values import TiltRange


def blob(box, scale, centre, width):
    """A Gaussian by formula on a grid whose voxel is `scale` wide, the origin at ``box // 2``; (x, y, z)."""
    z, y, x = (np.indices((box,) * 3) - box // 2) * scale
    return np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2 + (z - centre[2]) ** 2) / (2 * width**2))


@pytest.mark.parametrize(("box", "binned"), [(40, 20), (40, 27), (41, 20), (41, 21), (40, 21), (33, 32)])
def test_fourier_crop_samples_the_same_object(box, binned):
    """Grey values and centre stay, at any ratio, odd or even: judged by the formula on the coarser grid."""
    scale = box / binned
    wide = 2.0 * scale  # next to nothing beyond the coarser grid's band
    coarse = fourier_crop(blob(box, 1.0, (3, -2, 1), wide).astype(np.float32), binned)
    assert coarse.shape == (binned,) * 3 and coarse.dtype == np.float32
    assert np.abs(coarse - blob(binned, scale, (3, -2, 1), wide)).max() < 2e-3


def test_fourier_crop_to_the_same_box_changes_nothing():
    data = np.random.default_rng(0).normal(size=(9,) * 3).astype(np.float32)
    assert np.array_equal(fourier_crop(data, 9), data)


@pytest.mark.parametrize(("box", "binned"), [(12, 8), (13, 8), (12, 7), (13, 9)])
def test_cropped_half_spectrum_keeps_frequencies(box, binned):
    """Every sample of the cropped spectrum is the one with the same frequency in the whole one."""
    k = np.rint(np.fft.fftfreq(box) * box).astype(int)
    label = k[:, None, None] * 10_000 + k[None, :, None] * 100 + np.arange(box // 2 + 1)
    m = np.rint(np.fft.fftfreq(binned) * binned).astype(int)
    assert np.array_equal(crop_half_spectrum(label, binned), m[:, None, None] * 10_000 + m[None, :, None] * 100 + np.arange(binned // 2 + 1))


@pytest.fixture
def write(tmp_path):
    def write(data, name="p.mrc"):
        with mrcfile.new(tmp_path / name, overwrite=True) as file:
            file.set_data(np.asarray(data, np.float32))
            file.voxel_size = 4.0
        return tmp_path / name

    return write


def outside(box, radius):
    return ((np.indices((box,) * 3) - box // 2) ** 2).sum(0) > radius**2


def test_normalisation_looks_outside_the_particle_only(write):
    rng = np.random.default_rng(1)
    data = 7.0 + 3.0 * rng.normal(size=(24,) * 3) + 100.0 * blob(24, 1.0, (0, 0, 0), 2.0)
    read = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0)).read_volume("p", write(data))
    far = outside(24, 8.5)
    assert read[far].mean() == pytest.approx(0, abs=0.01) and read[far].std() == pytest.approx(1, abs=0.01)
    assert read.max() > 25
    kept = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0), normalise=False).read_volume("p", write(data))
    assert kept[far].mean() == pytest.approx(0, abs=0.05) and kept[far].std() == pytest.approx(3, abs=0.1)
    inverted = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0), invert_contrast=True).read_volume("p", write(data))
    assert np.array_equal(inverted, -read)


def test_the_sphere_of_a_binned_grid_is_that_of_the_unbinned_one(write):
    data = np.random.default_rng(1).normal(size=(24,) * 3) + 1000 * ~outside(24, 8)
    read = ParticleReader(Grid(24, 12, 4.0), ParticleMask(4.0, 1.0)).read_volume("p", write(data))
    assert read.max() > 500  # were the ball taken for background, nothing would stand out


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (np.zeros((24,) * 3), "constant"),
        (np.full((24,) * 3, 5.0), "constant"),
        (np.full((24,) * 3, 1e20), "constant"),
        (np.ones((24,) * 3) * ~outside(24, 7), "constant"),  # nothing but a mask
        (np.pad([[[np.nan]]], ((0, 23),) * 3), "not finite"),
        (np.random.default_rng(0).normal(size=(20,) * 3), "its box is 20, expected 24"),
        (np.random.default_rng(0).normal(size=(24, 24, 20)), "24"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_particles_that_cannot_be_used(data, reason, write):
    reader = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0))
    with pytest.raises(BadParticleError) as caught:
        reader.read_volume("sub/p7.mrc", write(data))
    assert reason in caught.value.reason and caught.value.name == "sub/p7.mrc"


def test_missing_and_truncated_files(write, tmp_path):
    reader = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0))
    with pytest.raises(BadParticleError, match=r"gone\.mrc"):
        reader.read_volume("p", tmp_path / "gone.mrc")
    path = write(np.random.default_rng(0).normal(size=(24,) * 3))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadParticleError, match="bytes"):
        reader.read_volume("p", path)


def test_weights(write):
    reader = ParticleReader(Grid(24, 16, 4.0), ParticleMask(8.0, 3.0), tilt_range=TiltRange(-40.0, 60.0))
    path = write(np.random.default_rng(0).uniform(size=(24,) * 3), "w.mrc")
    assert reader.read_weight(path).shape == (16, 16, 9)
    assert reader.read_weight(path) is reader.read_weight(path)  # stored once, however many particles share it
    # centred on disk; corner origin in memory: zero frequency first
    assert reader.read_weight(path)[0, 0, 0] == mrcfile.read(path)[12, 12, 12]
    wedge = reader.read_weight(None)
    assert wedge[0, 0, 5] == 1 and wedge[6, 0, 0] < 0.01  # along x measured, along the beam not
    assert wedge[5, 0, 3] != wedge[-5, 0, 3]  # -40 to 60 is lopsided
    everything = ParticleReader(Grid(24, 16, 4.0), ParticleMask(8.0, 3.0)).read_weight(None)
    assert (everything == 1).all()


def test_keys_tell_apart_what_is_read_differently(tmp_path):
    """A worker's cache must not hand out a particle that was prepared another way."""
    grid, mask = Grid(24, 24, 4.0), ParticleMask(8.0, 3.0)
    readers = [
        ParticleReader(grid, mask),
        ParticleReader(grid, mask, normalise=False),
        ParticleReader(grid, mask, invert_contrast=True),
        ParticleReader(grid, mask, tilt_range=TiltRange(-60.0, 60.0)),
        ParticleReader(grid, mask, tilt_range=TiltRange(-60.0, 60.0, flip=True)),
        ParticleReader(grid, ParticleMask(9.0, 3.0)),
    ]
    keys = {reader.batch(("p",), (tmp_path / "p.mrc",), (None,)).keys[0] for reader in readers}
    assert len(keys) == len(readers)
    two = ParticleReader(grid, mask).batch(("a", "b"), (tmp_path / "p.mrc",) * 2, (tmp_path / "v.mrc", tmp_path / "w.mrc")).keys
    assert two[0] != two[1]


def test_a_bad_weight_is_the_particles_fault(write):
    reader = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0))
    volume, weight = write(np.random.default_rng(0).normal(size=(24,) * 3)), write(np.ones((20,) * 3), "w.mrc")
    with pytest.raises(BadParticleError, match=r"w\.mrc"):
        reader.batch(("p",), (volume,), (weight,)).read(0)


def test_a_raw_read_and_its_normalisation_are_the_whole_read(write):
    """What a backend needs to normalise by itself: judged by doing it here in double precision."""
    data = 1e5 + 3.0 * np.random.default_rng(2).normal(size=(24,) * 3) + 50.0 * blob(24, 1.0, (0, 0, 0), 2.0)
    path = write(data)
    for normalise, invert in ((True, False), (False, True)):
        batch = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0), normalise, invert).batch(("p",), (path,), (None,))
        raw = np.empty((24,) * 3, np.float32)
        assert (batch.read_raw(0, raw) == batch.read(0)[1]).all()
        assert np.array_equal(raw, data.astype(np.float32))
        assert (batch.normalisation.normalise, batch.normalisation.invert_contrast) == (normalise, invert)
        far = outside(24, batch.normalisation.radius_voxels)
        level, deviation = raw[far].mean(dtype=float), raw[far].std(dtype=float)
        expected = (raw - level) / (deviation if normalise else 1.0) * (-1 if invert else 1)
        np.testing.assert_allclose(batch.read(0)[0], expected, atol=1e-4 * expected.std())
    assert ParticleReader(Grid(24, 12, 4.0), ParticleMask(4.0, 1.0)).batch(("p",), (path,), (None,)).read_raw is None


def test_a_bad_volume_is_named_before_a_bad_weight(write):
    reader = ParticleReader(Grid(24, 24, 4.0), ParticleMask(8.0, 3.0))
    volume, weight = write(np.zeros((24,) * 3)), write(np.ones((20,) * 3), "w.mrc")
    batch = reader.batch(("p",), (volume,), (weight,))
    reasons = []
    for read in (lambda: batch.read(0), lambda: batch.read_raw(0, np.empty((24,) * 3, np.float32))):
        with pytest.raises(BadParticleError) as caught:
            read()
        reasons.append(caught.value.reason)
    assert reasons == ["it is constant"] * 2
