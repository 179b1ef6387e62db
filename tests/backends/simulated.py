"""The CUDA backend in Numba's simulator, on tiny boxes: run by `test_cuda_simulated`, in a process of its own."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mrcfile
import numpy as np
import pytest
from numba import cuda, typeof
from numba.cuda.simulator.kernel import FakeCUDAKernel
from scipy.spatial.transform import Rotation

from numba_glocal import particles
from numba_glocal.backends import lines
from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.cuda import backend as cuda_backend
from numba_glocal.backends.cuda import choosing, gemm, launching, memory, packing, prepare, product, scoring
from numba_glocal.backends.cuda import store as store_module
from numba_glocal.backends.cuda.backend import CUDABackend
from numba_glocal.backends.cuda.scratch import Scratch
from numba_glocal.backends.cuda.store import ParticleStore
from numba_glocal.backends.cuda.tensor import Weighting
from numba_glocal.backends.cuda.transform import Transform
from numba_glocal.backends.cuda.weights import WeightVolumes
from numba_glocal.backends.protocols import Candidates, Grid, ParticleBatch, ParticleMask, SumSetup
from numba_glocal.errors import BadParticleError, DeviceError
from numba_glocal.fourier import centred_rfftn, grid_band, max_band, padded_spectrum
from numba_glocal.noise import NoiseModel
from numba_glocal.particles import ParticleReader
from numba_glocal.pose_prior import PosePrior, PriorWidths

N = 6
GRID, MASK = Grid(N, N, 4.0), ParticleMask(2.0, 1.0)
FAR = ((np.indices((N,) * 3) - N // 2) ** 2).sum(0) > 2.0**2


@pytest.fixture(autouse=True, scope="session")
def _launches():
    """The types of all launches, for `test_cuda_simulated`, which compares them with those that are compiled ahead."""
    found: dict[str, set[str]] = {}
    launch = FakeCUDAKernel.__call__

    def watched(kernel, *arguments):
        types = ", ".join(str(typeof(getattr(argument, "_ary", argument))) for argument in arguments)
        found.setdefault(f"{kernel.fn.__module__}.{kernel.fn.__name__}", set()).add(types)
        return launch(kernel, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCUDAKernel, "__call__", watched)
        yield
    if to := os.environ.get("NUMBA_GLOCAL_LAUNCHES"):
        Path(to).write_text(json.dumps({name: sorted(types) for name, types in found.items()}))


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch):
    """A thread of the simulator is one of the machine; with few of them the loops over voxels have something to do as well."""
    monkeypatch.setattr(prepare, "SUM_THREADS", 16)
    for module in (launching, packing, scoring, choosing):
        monkeypatch.setattr(module, "REDUCE_THREADS", 16)
    monkeypatch.setattr(choosing, "CHOOSE_THREADS", 16)


@pytest.fixture
def quick_transform(monkeypatch):
    """Anything that depends on the volume, where spectra are only moved about: the simulator takes seconds for a true one."""

    def transform(self, volumes, count, out, scratch=None, stream=0):
        out[: count * self.size].copy_to_device(np.concatenate([np.resize(volumes.copy_to_host()[p], self.size) for p in range(count)]))

    monkeypatch.setattr(Transform, "__call__", transform)


def small_store(volumes: int = 64) -> ParticleStore:
    return ParticleStore(GRID, WeightVolumes(N), volumes * 4 * N**3, 8 << 20)


def held(store: ParticleStore, batch: ParticleBatch, wanted=None):
    """Volumes of particles as the store has them, and those it refuses."""
    bad: list[tuple[int, str]] = []
    found = {}
    for resident in store.batches(batch, range(len(batch.keys)) if wanted is None else wanted, bad):
        volumes = store.volumes.copy_to_host().reshape(-1, N, N, N)
        on_device = store.work.slots.copy_to_host()[: len(resident)]
        assert np.array_equal(on_device, resident.slots)
        found.update({index: volumes[slot].copy() for index, slot in zip(resident.index, resident.slots, strict=True)})
    return found, dict(bad)


def counted(batch: ParticleBatch):
    """A batch that notes what is read."""
    reads: list[int] = []

    def read(index):
        reads.append(index)
        return batch.read(index)

    def read_raw(index, out):
        reads.append(index)
        return batch.read_raw(index, out)

    return replace(batch, read=read, read_raw=None if batch.read_raw is None else read_raw), reads


@pytest.fixture
def files(tmp_path):
    """Particles on disk: good ones of all grey values, and every kind of bad one."""
    rng = np.random.default_rng(4)
    noise = rng.normal(size=(N,) * 3)
    data = {
        "plain": noise,
        "high": 1e5 + noise,
        "dark": 1e-4 * noise - 3e-4,
        "wide": 1e9 * noise,
        "slope": noise + 100.0 * np.arange(N)[:, None, None],
        "within": noise + 1000.0 * ~FAR,
        "zero": 0 * noise,
        "five": 0 * noise + 5,
        "huge": 0 * noise + 1e20,
        "masked": 1.0 * ~FAR,
        "almost constant": 1e5 + 0.01 * noise,
        "nan": np.where(np.arange(N) == 5, np.nan, noise),
        "infinite": np.where(np.arange(N**3).reshape((N,) * 3) == 100, np.inf, noise),
        "overflows": 0 * noise + 3e38,
    }
    paths = []
    for name, values in data.items():
        with mrcfile.new(tmp_path / f"{name}.mrc") as file, np.errstate(all="ignore"):
            file.set_data(values.astype(np.float32))
        paths.append(tmp_path / f"{name}.mrc")
    (tmp_path / "cut.mrc").write_bytes(paths[0].read_bytes()[:-4])
    with mrcfile.new(tmp_path / "box.mrc") as file:
        file.set_data(noise[:4, :4, :4].astype(np.float32))
    with mrcfile.new(tmp_path / "integers.mrc") as file:
        file.set_data((100 * noise).astype(np.int16))
    return [*paths, *(tmp_path / f"{name}.mrc" for name in ("cut", "gone", "box", "integers"))]


@pytest.mark.parametrize(("normalise", "invert"), [(True, False), (False, True)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_normalised_as_the_host_does(monkeypatch, files, normalise, invert):
    for module in (particles, store_module):
        monkeypatch.setattr(module, "sample_step", lambda size: 3)  # as in a box of 24
    reader = ParticleReader(GRID, MASK, normalise, invert)
    batch = reader.batch(tuple(str(path) for path in files), tuple(files), (None,) * len(files))
    found, bad = held(small_store(), batch)
    again, _ = held(small_store(), batch)
    for index in range(len(files)):
        try:
            expected = batch.read(index)[0]
        except BadParticleError as problem:
            assert bad[index] == problem.reason and index not in found
            continue
        assert index not in bad, bad
        np.testing.assert_allclose(found[index], expected, atol=1e-4 * expected[FAR].std(), rtol=1e-5)
        assert np.array_equal(found[index], again[index]), "the same bits every time"
    assert len(found) == 7 and len(bad) == len(files) - 7


def test_particles_that_the_host_has_prepared_are_kept_as_they_are():
    """Binned ones, or made ones: `read` alone."""
    volumes = np.random.default_rng(0).normal(size=(5, N, N, N)).astype(np.float32)
    weight = np.ones((N, N, N // 2 + 1), np.float32)

    def read(index):
        if index == 2:
            raise BadParticleError("p2", "no good")
        return volumes[index], weight

    found, bad = held(small_store(), ParticleBatch(tuple("abcde"), read))
    assert bad == {2: "no good"} and all(np.array_equal(found[i], volumes[i]) for i in (0, 1, 3, 4))


def test_other_errors_of_a_reading_thread_come_through():
    def read(index):
        raise ZeroDivisionError(index)

    store = small_store()
    with pytest.raises(ZeroDivisionError):
        held(store, ParticleBatch(tuple("abcde"), read))


def test_a_store_that_is_too_small_gives_the_same_volumes():
    volumes = np.random.default_rng(0).normal(size=(23, N, N, N)).astype(np.float32)
    weight = np.ones((N, N, N // 2 + 1), np.float32)
    batch, reads = counted(ParticleBatch(tuple(map(str, range(23))), lambda i: (volumes[i], weight)))
    store = ParticleStore(GRID, WeightVolumes(N), 16 * 4 * N**3, 4 * 10_000)
    assert store.batch < 8 and store.slots.capacity == 16
    for _ in range(3):
        reads.clear()
        found, bad = held(store, batch)
        assert not bad and all(np.array_equal(found[i], volumes[i]) for i in range(23))
    assert 7 <= len(reads) <= 7 + 2 * store.batch, "only the overflow is read again"
    reads.clear()
    found, _ = held(store, batch, [22, 3, 4])
    assert all(np.array_equal(found[i], volumes[i]) for i in (22, 3, 4))


def test_weights_are_stored_once():
    weights = WeightVolumes(N)
    a = np.random.default_rng(0).random((N, N, N // 2 + 1)).astype(np.float32)
    rows = [weights.add(weights.look(w)) for w in (a, a, a.copy(), -a, np.zeros_like(a))]
    assert rows == [0, 0, 0, 1, 2] and len(weights) == 3
    assert [weights.is_empty(row) for row in range(3)] == [False, False, True]
    on_device = weights.device().copy_to_host()[: 3 * a.size].reshape(3, *a.shape)
    assert np.array_equal(on_device, [a, -a, 0 * a])
    many = [np.full_like(a, k + 2.0) for k in range(40)]
    rows = [weights.add(weights.look(w)) for w in many]
    on_device = weights.device().copy_to_host()[: 43 * a.size].reshape(43, *a.shape)
    assert rows == list(range(3, 43)) and np.array_equal(on_device[3:], many) and np.array_equal(on_device[0], a)
    signed, scale, relative = (fact.copy_to_host() for fact in weights.facts())
    assert signed[:3].tolist() == [0, 1, 0] and relative[1] == pytest.approx(1 / a.max()) and len(scale) == 43


def two_groups(case):
    """The case with another noise model and gain for its last particle."""
    own = case.setup.noise
    other = NoiseModel(own.sigma2 * np.linspace(1.0, 3.0, len(own.sigma2)), 0.5, 0.1, 0.6)
    groups = np.zeros(len(case.volumes), np.int32)
    groups[-1] = 1
    return case.with_setup(noise=(own, other)), replace(case.batch, groups=groups)


def test_spectra_are_those_of_the_masked_volume(make_case):
    """flcf needs masked and unmasked ones: against FFTW. Its score is the CPU's."""
    case, batch = two_groups(make_case(8, "wedge", particles=1, score="flcf"))
    backend = CUDABackend()
    session = backend.open_search(case.setup)
    assert session.load(batch) == []
    pool, mask = session._loaded_pool(), session._mask
    reach = max_band(pool.n)
    band = grid_band(pool.n, reach)
    for p, volume in enumerate(case.volumes):
        level = volume[mask < 0.01].mean()
        slot = session._slots[p]
        for kind, expected in enumerate(((volume - level) * mask, volume - level)):
            cube = pool.cubes[kind].copy_to_host()[slot * pool.cube.size : (slot + 1) * pool.cube.size].view(np.complex64)
            rows = 2 * reach + 1
            x, y, z = band.k.astype(int).T
            at = cube.reshape(rows, rows, -1)[z + reach, y + reach, x]
            whole = centred_rfftn(expected).ravel()[band.index]
            assert np.abs(at - whole).max() < 1e-5 * np.abs(whole).max()
            padded = pool.spectra[kind].copy_to_host()[slot * pool.pad.size : (slot + 1) * pool.pad.size].view(np.complex64)
            expected_padded = padded_spectrum(expected, pool.reach)
            assert np.abs(padded.reshape(expected_padded.shape) - expected_padded).max() < 1e-5 * np.abs(expected_padded).max()
    on_host = CPUBackend().open_search(case.setup)
    assert on_host.load(batch) == []
    scores = [s.refine(case.starts, case.shifts_angst).scores for s in (session, on_host)]
    np.testing.assert_allclose(*scores, rtol=1e-3)


def test_as_the_cpu_backend_and_nothing_is_read_twice(make_case):
    """Load, search, residuals, refinement, sums, each particle with the noise of its own group."""
    case, batch = two_groups(make_case(8, "wedge", particles=2))
    plain = batch
    batch, reads = counted(batch)
    gpu, cpu = CUDABackend(), CPUBackend()
    sessions = [backend.open_search(case.setup) for backend in (gpu, cpu)]
    assert sessions[0].load(batch) == sessions[1].load(plain) == []
    both = [session.residuals(case.rotations, case.shifts_angst) for session in sessions]
    for group in (0, 1):
        a, b = (residuals[group] for residuals in both)
        np.testing.assert_allclose(a.power, b.power, atol=1e-5 * b.power.max())
        np.testing.assert_array_equal(a.count, b.count)
    (each, signed), (other, _) = (session.residuals_each(case.rotations, case.shifts_angst) for session in sessions)
    np.testing.assert_allclose(each.power, other.power, atol=1e-5 * other.power.max())
    np.testing.assert_allclose(each.power.sum(0), both[0][0].power + both[0][1].power, rtol=1e-5, atol=1e-9)
    assert not signed.any()
    level = case.level(2, keep=1, shift_radius_angst=0.0)
    a, b = (session.search(case.starts, case.shifts_angst, level) for session in sessions)
    np.testing.assert_allclose(a.scores, b.scores, rtol=1e-4)
    a, b = (session.refine(case.starts, case.shifts_angst) for session in sessions)
    np.testing.assert_allclose(a.rotations, b.rotations, atol=1e-4)
    np.testing.assert_allclose(a.shifts_angst, b.shifts_angst, atol=0.02)
    np.testing.assert_allclose(a.log_likelihood, b.log_likelihood, rtol=1e-4)
    np.testing.assert_allclose(a.denominator, b.denominator, rtol=1e-4)
    of_ncc = [backend.open_search(replace(case.setup, score="ncc")) for backend in (gpu, cpu)]
    assert of_ncc[0].load(batch) == of_ncc[1].load(plain) == []
    a, b = (session.refine(case.starts, case.shifts_angst) for session in of_ncc)
    np.testing.assert_allclose(a.scores, b.scores, rtol=1e-4)
    sums = [backend.open_sum(SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise)) for backend in (gpu, cpu)]
    for total, given in zip(sums, (batch, plain), strict=True):
        assert total.add(given, case.rotations, case.shifts_angst, np.array([1.0, 0.3])) == []
    a, b = (session.result() for session in sums)
    np.testing.assert_allclose(a.numerator, b.numerator, atol=1e-5 * np.abs(b.numerator).max())
    np.testing.assert_allclose(a.denominator, b.denominator, atol=1e-5 * b.denominator.max())
    assert a.n_particles == b.n_particles == 2
    sessions[0].unload()
    assert sorted(reads) == [0, 1], "the sum found the search's particles"


def test_a_prior_is_refined_as_on_the_cpu(make_case):
    case = make_case(8, "none", particles=2)
    turn = Rotation.from_rotvec([0.06, -0.04, 0.03]).as_matrix()
    prior = PosePrior(PriorWidths(4.0, 6.0, 5.0), (case.rotations @ turn)[:, None], case.shifts_angst + 5.0)
    sessions = [backend.open_search(case.setup) for backend in (CUDABackend(), CPUBackend())]
    assert sessions[0].load(case.batch, prior) == sessions[1].load(case.batch, prior) == []
    a, b = (session.refine(case.starts, case.shifts_angst) for session in sessions)
    np.testing.assert_allclose(a.rotations, b.rotations, atol=1e-4)
    np.testing.assert_allclose(a.shifts_angst, b.shifts_angst, atol=0.02)
    for name in ("log_likelihood", "scores", "covariances"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-6, err_msg=name)
    assert sessions[0].load(case.batch) == []
    free = sessions[0].refine(case.starts, case.shifts_angst)
    assert np.abs(free.rotations - a.rotations).max() > 1e-3


def multiply_exactly(number_bytes):
    """Stands in for cuBLAS; the smallest and largest of what may come out must fit."""

    def multiply(a, b, out, rows, wide, depth):
        a, b = (array.copy_to_host()[: count * depth].reshape(count, depth) for array, count in ((a, rows), (b, wide)))
        assert a.dtype == b.dtype == (np.int8 if number_bytes == 1 else np.float16)
        assert out.dtype == (np.int32 if number_bytes == 1 else np.float32)
        with np.errstate(invalid="ignore"):  # padding may hold anything
            out[: rows * wide].copy_to_device((a.astype(np.float64) @ b.astype(np.float64).T).astype(out.dtype).ravel())

    return multiply


@pytest.mark.parametrize(
    ("number_bytes", "shifts_particles", "part_bytes"), [(2, False, 1 << 11), (2, True, 1 << 11), (1, False, 1 << 20), (1, True, 1 << 11)]
)
def test_products_score_every_shift(monkeypatch, number_bytes, shifts_particles, part_bytes):
    """By sums over the band as they are written down; and what is kept is scored again to single precision."""
    items, n_rotations, box = 5, 3, 16
    band, cube = lines.line_band(3.0, 1.5), lines.shift_cube(1.6, 1.6)
    rng = np.random.default_rng(8)
    samples, pairs = 2 * band.n_pairs, band.n_pairs
    f = (rng.normal(size=(n_rotations, samples)) + 1j * rng.normal(size=(n_rotations, samples))) * np.exp(-0.5 * band.radius)
    f[:, band.radius < 1.5] *= 1e5  # below the high-pass: must not take the numbers' range
    y = (rng.normal(size=(items, samples)) + 1j * rng.normal(size=(items, samples))) * band.sample_weight * np.exp(0.3 * band.radius)
    turns = product.shift_turns(cube, box)
    phases = np.exp(2j * np.pi * band.lattice @ turns.T.astype(np.float64))  # of the particle, shifted back
    num = np.einsum("as,ws,st->wat", f.conj(), y, phases).real
    multiplier, bias = rng.uniform(0.5, 1.5, (items, len(turns))), rng.normal(size=(items, len(turns)))
    weighted = num * multiplier[:, None] + bias[:, None]
    templates = np.zeros((pairs, 16, 4), np.float32)
    templates[:, :n_rotations] = np.moveaxis(np.stack([f.real, f.imag], -1).reshape(n_rotations, pairs, 4), 0, 1)
    columns = cuda.to_device(np.stack([y.real, y.imag], -1).reshape(items, -1).astype(np.float32))
    powers = cuda.to_device((np.abs(f) ** 2).astype(np.float32))

    monkeypatch.setattr(launching, "MOST_ROWS", 2)  # a launch's rotations do not all fit along y
    if shifts_particles:
        monkeypatch.setattr(scoring, "TILE_ROTATIONS", 1)  # nor do blocks of them
    monkeypatch.setattr(gemm, "ALIGNMENT", 8)
    monkeypatch.setattr(gemm, "product_narrow", multiply_exactly(number_bytes))
    lattice = cuda.to_device(band.lattice.astype(np.int32).ravel())
    on_device = cuda.to_device(templates.ravel())
    way = product.Way(number_bytes, shifts_particles)
    inverse_sigma2 = np.exp(0.6 * np.arange(box // 2 + 1)).astype(np.float32)
    search = product.ProductSearch.make(way, band, cube, box, on_device, powers, n_rotations, lattice, inverse_sigma2)
    assert search.bytes_held >= templates.nbytes
    weights = [cuda.to_device(each.astype(np.float32)) for each in (multiplier, bias)]
    best, best_shift = cuda.device_array((items, n_rotations), np.float32), cuda.device_array((items, n_rotations), np.int32)
    search.run(columns, items, Weighting(True, *weights), best, best_shift, Scratch(part_bytes))
    shift = best_shift.copy_to_host()
    inside = weighted[:, :, cube.inside]
    noise = np.sqrt(np.einsum("as,ws->wa", np.abs(f) ** 2, np.abs(y) ** 2)).max()
    allowed = (5e-3 if number_bytes == 2 else 0.03) * noise
    np.testing.assert_allclose(best.copy_to_host(), inside.max(2), atol=allowed)
    assert np.isin(shift, cube.inside).all()
    taken = np.take_along_axis(weighted, shift[:, :, None].astype(int), 2)[:, :, 0]
    assert (taken >= inside.max(2) - 2 * allowed).all()
    if number_bytes == 2:
        assert (shift == cube.inside[inside.argmax(2)]).all()

    den_weight, power = rng.uniform(1, 2, (items, samples)), rng.uniform(1, 2, items)
    den = den_weight @ (np.abs(f) ** 2).T
    monkeypatch.setattr(choosing, "_MANY_PARTICLES", items if shifts_particles else items + 1)  # two blocks each, or one a candidate
    chosen = np.array([[2, 0, -1, 1, -1], [-1] * 5, [1, 2, 0, -1, -1], [0, -1, 1, 2, -1], [0, -1, -1, -1, 2]], np.int32)
    loss = rng.normal(size=(items, n_rotations))
    told = np.array([[2, 1], [-1, -1], [0, 2], [2, -1], [1, 2]], np.int32)  # known already
    known = cuda.to_device(told)
    for kind, knows in ((0, False), (1, False), (1, True)):
        score = cuda.to_device(np.full(chosen.shape, 7.0, np.float32))
        scores = cuda.to_device(np.full((items, n_rotations), 9.0, np.float32))
        choosing.score_chosen[choosing.chosen_grid(chosen), launching.REDUCE_THREADS](
            *(on_device, columns, cuda.to_device(den_weight.astype(np.float32)), lattice, cuda.to_device(turns)),
            *(cuda.to_device(np.arange(items, dtype=np.int32)), n_rotations, best_shift),
            *(1, *weights, cuda.to_device(power.astype(np.float32)), kind, np.float32(1.5)),
            *(cuda.to_device(loss.astype(np.float32)), 1, cuda.to_device(chosen), known, 2 * int(knows), scores, score),
        )
        whole = (2 * taken - den if kind == 0 else taken / np.sqrt(den * power[:, None]) * 1.5) - loss
        after, wanted = np.full((items, n_rotations), 9.0), np.full(chosen.shape, 7.0)
        for p, place in zip(*np.nonzero(chosen >= 0), strict=True):
            row = chosen[p, place]
            if not (knows and row in told[p]):
                after[p, row] = whole[p, row]
            wanted[p, place] = after[p, row]
        np.testing.assert_allclose(score.copy_to_host(), wanted, rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(scores.copy_to_host(), after, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("shifts_particles", [False, True])
def test_products_of_odd_particles_whatever_the_tile(monkeypatch, shifts_particles):
    """One without any signal, one with an enormous sample, a reference that is zero beyond a low-pass."""
    box, n_rotations = 16, 2
    band, cube = lines.line_band(3.0), lines.shift_cube(1.0, 1.0)
    rng = np.random.default_rng(5)
    samples, pairs = 2 * band.n_pairs, band.n_pairs
    f = (rng.normal(size=(n_rotations, samples)) + 1j * rng.normal(size=(n_rotations, samples))) * (band.radius < 2.2)
    y = (rng.normal(size=(4, samples)) + 1j * rng.normal(size=(4, samples))) * band.sample_weight
    y[1] = 0.0
    y[2, np.flatnonzero((band.sample_weight > 0) & (band.radius < 2.2))[7]] = 1e3 - 2e3j
    y[3] *= 1e-9
    turns = product.shift_turns(cube, box)
    num = np.einsum("as,ws,st->wat", f.conj(), y, np.exp(2j * np.pi * band.lattice @ turns.T.astype(np.float64))).real[:, :, cube.inside]
    templates = np.zeros((pairs, 16, 4), np.float32)
    templates[:, :n_rotations] = np.moveaxis(np.stack([f.real, f.imag], -1).reshape(n_rotations, pairs, 4), 0, 1)
    numbers = []

    def multiply(a, b, out, rows, wide, depth):
        numbers.extend(int(np.abs(array.copy_to_host()[: count * depth].astype(int)).max()) for array, count in ((a, rows), (b, wide)))
        multiply_exactly(1)(a, b, out, rows, wide, depth)

    monkeypatch.setattr(gemm, "ALIGNMENT", 4)  # no padding, which may hold anything
    monkeypatch.setattr(gemm, "product_narrow", multiply)
    columns = cuda.to_device(np.stack([y.real, y.imag], -1).reshape(4, -1).astype(np.float32))
    search = product.ProductSearch.make(
        *(product.Way(1, shifts_particles), band, cube, box, cuda.to_device(templates.ravel()), cuda.to_device((np.abs(f) ** 2).astype(np.float32))),
        *(n_rotations, cuda.to_device(band.lattice.astype(np.int32).ravel()), np.ones(box // 2 + 1, np.float32)),
    )
    nothing = cuda.to_device(np.zeros((1, 1), np.float32))
    found = []
    for part_bytes in (1 << 20, 1 << 11):
        best, best_shift = cuda.device_array((4, n_rotations), np.float32), cuda.device_array((4, n_rotations), np.int32)
        search.run(columns, 4, Weighting(False, nothing, nothing), best, best_shift, Scratch(part_bytes))
        found.append((best.copy_to_host(), best_shift.copy_to_host()))
    assert len(numbers) > 4 and 120 < max(numbers) <= 127
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    best, best_shift = found[0]
    noise = np.sqrt(np.einsum("as,ws->wa", np.abs(f) ** 2, np.abs(y) ** 2))
    assert (np.abs(best - num.max(2)) <= 0.03 * noise).all() and (best[1] == 0.0).all()
    assert (best_shift[1] == cube.inside[0]).all() and np.isin(best_shift, cube.inside).all()


def test_no_sum_of_whole_numbers_leaves_its_range():
    """Rows as large as they may be, each number rounded away from zero; and neither limit of a row is passed."""
    for radius in (3, 30, 62, 126, 198):  # half a ball of complex samples, in two parts
        numbers = int(4 * np.pi / 3 * (radius + 1) ** 3)
        norm = float(product.largest_norm(1, numbers))
        assert 40000.0 < norm and (1.0005 * norm + 0.5 * np.sqrt(numbers)) ** 2 < 2**31
    powers = np.array([[1.0, 4.0, 0.0, 9.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    factors = cuda.device_array(3, np.float32)
    packing.template_factors[3, launching.REDUCE_THREADS](
        *map(cuda.to_device, (powers, np.full(4, 2.0, np.float32))), np.float32(12.0), np.float32(8.0), factors
    )
    np.testing.assert_allclose(factors.copy_to_host()[:2], [8.0 / np.sqrt(56.0), 2.0], rtol=1e-6)
    assert np.isfinite(factors.copy_to_host()).all()


def test_whole_numbers_only_where_searches_use_the_tensor_cores(monkeypatch):
    monkeypatch.setattr(gemm, "available", lambda: True)
    for capability, expected in (((7, 5), "half"), ((8, 0), "int8")):
        monkeypatch.setattr(gemm.cuda, "get_current_device", lambda found=capability: SimpleNamespace(compute_capability=found))
        assert CUDABackend().precision == expected
    monkeypatch.setattr(gemm, "available", lambda: False)
    assert CUDABackend().precision == "half"
    with pytest.raises(DeviceError, match="int8 needs a GPU of compute capability 8.0 or later and cuBLAS, here: CUDA simulator; use half"):
        CUDABackend(precision="int8")


def several_starts(starts):
    """A second start for each particle but the second, and a third for the first."""
    turn = Rotation.from_rotvec([[0.0, 0.0, 0.0], [0.3, 0.1, -0.2], [-0.1, 0.4, 0.2]]).as_matrix()
    scores = np.array([[0.0, 0.0, 0.0], [0.0, -np.inf, -np.inf], [0.0, 0.0, -np.inf]])
    return Candidates(starts.rotations @ turn, starts.shifts_angst + np.array([0.0, 7.0, -9.0])[:, None], scores)


@pytest.mark.parametrize(
    ("number_bytes", "shifts_particles", "score", "limited"), [(2, False, "ncc", False), (1, True, "ml", True), (1, False, "ml", False)]
)
def test_a_search_by_products_is_the_cpus(make_case, monkeypatch, number_bytes, shifts_particles, score, limited):
    """From start to candidates, each particle with the noise of its own group; with what is not allowed; with several starts."""
    case, batch = two_groups(make_case(8, "wedge", particles=3, noise=0.3, score=score))
    starts = several_starts(case.starts) if number_bytes == 1 and not limited else case.starts
    candidates = 6 * np.isfinite(starts.scores).sum(1)
    prior, setup = None, case.setup
    if limited:  # one particle may go nowhere: there is nothing to keep
        setup = replace(setup, max_shift_angst=1.2 * case.voxel_angst)
        prior = PosePrior.about(PriorWidths(20.0, 40.0, 9.0), case.starts.rotations[:, 0], case.starts.shifts_angst[:, 0])
    anchors = case.starts.shifts_angst[:, 0].copy()
    anchors[2] += 100.0 * case.voxel_angst if limited else 0.0
    level = case.level(6, keep=20)
    on_host = CPUBackend().open_search(setup)
    assert on_host.load(batch, prior) == []
    wanted = on_host.search(starts, anchors, level)

    monkeypatch.setattr(gemm, "ALIGNMENT", 8)
    monkeypatch.setattr(gemm, "product_narrow", multiply_exactly(number_bytes))
    monkeypatch.setattr(cuda_backend, "available", lambda: True)
    monkeypatch.setattr(cuda_backend, "ways", lambda precision: [product.Way(number_bytes, shifts_particles)])
    monkeypatch.setattr(cuda_backend, "tensor_us", lambda *rest: np.inf)
    session = CUDABackend().open_search(setup)
    assert session.load(batch, prior) == []
    found = session.search(starts, anchors, level)
    kept = found.scores > -np.inf
    np.testing.assert_array_equal(kept, wanted.scores > -np.inf)
    assert kept[:2, 0].all() and kept[2].any() != limited and (kept.sum(1) <= candidates).all()
    assert (np.diff(np.where(kept, found.scores, -1e30), axis=1) <= 0).all()
    scale = np.abs(wanted.scores[kept]).max()
    same = np.abs(found.rotations - wanted.rotations)[:2, 0].max((1, 2)) < 1e-5
    assert same.all(), "the best"
    for p in range(3):  # all are kept, so each has its counterpart
        mine, theirs = (each.rotations[p, : candidates[p]].reshape(-1, 9) for each in (found, wanted))
        place = np.abs(mine[:, None] - theirs).max(2).argmin(1)
        assert (np.sort(place) == np.arange(candidates[p])).all() or kept[p].sum() < candidates[p]
        k = np.flatnonzero(kept[p])
        apart = np.abs(found.scores[p, k] - wanted.scores[p, place[k]])
        same = np.abs(found.shifts_angst[p, k] - wanted.shifts_angst[p, place[k]]).max(1, initial=0.0) < 1e-3
        # scored again: what differs is which of two trial shifts that are alike was taken
        assert apart.max(initial=0.0) < (2e-4 if number_bytes == 2 else 0.02) * scale
        assert same.sum() >= (0.9 if number_bytes == 2 else 0.8) * len(k)
        assert apart[same].max(initial=0.0) < 2e-4 * scale


def test_no_candidate_is_chosen_twice():
    """Threads that go on to the next place must not disturb those that still look whether there was one left."""
    rng = np.random.default_rng(5)
    particles, n_rotations, keep = 6, 20, 24
    scores = rng.normal(size=(particles, n_rotations)).astype(np.float32)
    scores[:, 17:] = -1e38
    turned = Rotation.random(n_rotations, random_state=3).as_matrix().reshape(-1, 9).astype(np.float32)
    chosen, found = cuda.device_array((particles, keep), np.int32), cuda.device_array((particles, keep), np.float32)
    each = np.arange(particles, dtype=np.int32)
    choosing.choose[particles, choosing.CHOOSE_THREADS](
        *map(cuda.to_device, (scores, each, np.ones_like(each), np.tile(np.eye(3, dtype=np.float32).ravel(), (particles, 1)), turned)),
        *(np.float32(2.99), keep, cuda.device_array((particles, keep, 9), np.float32), chosen, found),
    )
    order = np.argsort(-scores, axis=1)[:, :17]
    np.testing.assert_array_equal(chosen.copy_to_host(), np.pad(order, ((0, 0), (0, keep - 17)), constant_values=-1))
    np.testing.assert_array_equal(found.copy_to_host()[:, :17], np.take_along_axis(scores, order, 1))


def test_losses_are_taken_off_scores():
    best = np.array([[3.0, 2.0, -1e38], [1.0, 5.0, 4.0]], np.float32)
    loss = np.array([[1.0, np.inf, 1.0], [0.0, 2.5, np.inf]], np.float32)
    device = cuda.to_device(best)
    scoring.take_off[(1, 2), 8](device, cuda.to_device(loss))
    np.testing.assert_array_equal(device.copy_to_host(), np.array([[2.0, -1e38, -1e38], [1.0, 2.5, -1e38]], np.float32))


def test_another_band_makes_spectra_anew_but_reads_nothing(make_case, quick_transform):
    case = make_case(8, "none", particles=1)
    batch, reads = counted(case.batch)
    gpu = CUDABackend()
    narrow, wide = (gpu.open_search(replace(case.setup, k_max=k_max)) for k_max in (1.0, 2.0))
    gpu._pool = gpu.pool(case.setup.grid, 1, False)  # bands of this box are rounded up to the same; a run's differ
    narrow_pool = gpu._pool
    assert wide.load(batch) == [] and gpu._pool is not narrow_pool
    pool = gpu._pool
    assert narrow.load(batch) == [] and gpu._pool is pool, "the wider one serves both"
    assert reads == [0]
    # another session takes the memory: what is loaded comes back by itself
    expected = wide._loaded_pool().spectra[0].copy_to_host()[: pool.pad.size]
    gpu.pool(case.setup.grid, 1, True)
    assert not gpu.is_current(pool)
    again = wide._loaded_pool()
    assert again is not pool and np.array_equal(again.spectra[0].copy_to_host()[: pool.pad.size], expected)
    assert reads == [0]


def test_bad_particles_are_left_out_of_searches_and_sums(make_case, quick_transform):
    case = make_case(8, "none", particles=3)
    only_corner = np.zeros_like(case.weights[0])
    only_corner[4, 4, 4] = 1.0

    def read(index):
        if index == 0:
            raise BadParticleError("p", "no good")
        return case.volumes[index], only_corner if index == 2 else case.weights[index]

    batch = ParticleBatch(case.batch.keys, read)
    gpu = CUDABackend()
    session = gpu.open_search(case.setup)
    expected = [(0, "no good"), (2, "its weight leaves nothing in the band")]
    assert session.load(batch) == expected and session._usable.tolist() == [False, True, False]
    assert session.load(batch) == expected, "also when it is found in the pool"
    total = gpu.open_sum(SumSetup(case.setup.grid, case.setup.particle_mask, case.setup.noise))
    assert total.add(batch, case.rotations, case.shifts_angst) == [(0, "no good")]
    assert total.result().n_particles == 2


class CudaAPIError(Exception):
    """As the driver's."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code


def short_of_memory(monkeypatch, largest_bytes, code=2):
    """Refuses arrays above a size."""
    real = cuda.device_array

    def device_array(shape, dtype=np.float64, **options):
        if np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize > largest_bytes:
            raise CudaAPIError(code)
        return real(shape, dtype, **options)

    monkeypatch.setattr(cuda, "device_array", device_array)


def test_less_at_once_when_memory_runs_out(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "numba_glocal")
    gpu = CUDABackend(share=8)
    with monkeypatch.context() as short:
        short_of_memory(short, 100 << 10)
        store = gpu.store(GRID)
    with monkeypatch.context() as short:
        short_of_memory(short, 400 << 10)
        pool = gpu.pool(GRID, max_band(N), False)
    assert store.volumes.nbytes <= 100 << 10 and store.slots.capacity * 4 * N**3 == store.volumes.nbytes
    assert 1 <= store.batch < 64 and 1 <= pool.slots.capacity <= (400 << 10) // pool.slot_bytes(N, max_band(N), False)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and all("memory is short" in text for text in texts)
    volumes = np.random.default_rng(0).normal(size=(3, N, N, N)).astype(np.float32)
    found, _ = held(store, ParticleBatch(tuple("abc"), lambda i: (volumes[i], np.ones((N, N, N // 2 + 1), np.float32))))
    assert all(np.array_equal(found[i], volumes[i]) for i in range(3))


def test_a_search_goes_on_in_smaller_parts(make_case, monkeypatch, caplog, quick_transform):
    """Memory for two starts at once only: every particle is searched once, and what was kept for reuse is given back first."""
    caplog.set_level(logging.WARNING, "numba_glocal")
    case = make_case(8, "none", particles=7)
    gpu = CUDABackend()
    session = gpu.open_search(case.setup)
    assert session.load(case.batch) == []
    parts, given_back = [], []

    def search_part(part, p_of, s_of, *rest):
        result = rest[-1]
        if len(p_of) > 2:
            raise MemoryError
        parts.append(part.tolist())
        result.scores[part] = part[:, None]

    monkeypatch.setattr(session, "_search_part", search_part)
    monkeypatch.setattr(gpu.scratch, "clear", lambda: given_back.append(len(parts)))
    found = session.search(case.starts, case.shifts_angst, case.level(2, keep=1))
    assert sum(parts, []) == list(range(7)) and max(map(len, parts)) <= 2
    assert found.scores[:, 0].tolist() == list(range(7))
    assert given_back == [0, 0] and "starts at once instead of 7" in caplog.text


def test_parts_of_a_search_depend_on_no_memory(make_case, monkeypatch, quick_transform):
    """Nor may they have more starts than a launch has blocks."""
    case = make_case(8, "none", particles=7)
    gpu = CUDABackend()
    session = gpu.open_search(case.setup)
    assert session.load(case.batch) == []
    parts = []
    monkeypatch.setattr(session, "_search_part", lambda part, *rest: parts.append(len(part)))
    monkeypatch.setattr(session, "_level_templates", lambda *rest: (None, None, None))
    monkeypatch.setattr(cuda_backend, "_PART_BYTES", 4 << 10)
    level = case.level(2, keep=1)

    def sizes(memory_bytes):
        gpu.memory_bytes = memory_bytes
        parts.clear()
        session.search(case.starts, case.shifts_angst, level)
        return parts.copy()

    usual = sizes(1 << 30)
    assert 1 < len(usual) < 7 and sum(usual) == 7
    assert sizes(1 << 40) == usual and len(sizes(4 << 10)) == 7
    monkeypatch.setattr(cuda_backend, "_PART_BYTES", 1 << 40)
    assert sizes(1 << 50) == [7]
    monkeypatch.setattr(launching, "MOST_ITEMS", 3)
    assert sizes(1 << 50) == [3, 3, 1]


def test_a_library_without_memory_is_said_to_have_none():
    with pytest.raises(MemoryError):
        gemm._check(3, "cublasCreate")
    with pytest.raises(RuntimeError, match="status 13"):
        gemm._check(13, "cublasCreate")


def test_no_memory_at_all_is_said_in_one_line(monkeypatch):
    gpu = CUDABackend()
    short_of_memory(monkeypatch, 1 << 10)
    with pytest.raises(DeviceError, match="not even 1 particles at once"):
        gpu.store(GRID)


def test_other_errors_of_the_driver_are_not_taken_for_it(monkeypatch):
    gpu = CUDABackend()
    short_of_memory(monkeypatch, 1 << 10, code=700)
    with pytest.raises(CudaAPIError):
        gpu.store(GRID)
    assert memory.out_of_memory(MemoryError()) and not memory.out_of_memory(ValueError())


def test_a_cap_holds_the_context_too(monkeypatch):
    monkeypatch.setattr(cuda_backend, "free_bytes", lambda: 20 << 30)
    assert [CUDABackend(cap, 2).memory_bytes >> 20 for cap in (None, 4 << 30, 400 << 20, 40 << 30)] == [10 << 10, (4 << 10) - 600, 100, 10 << 10]


def test_a_small_device_keeps_room_for_a_chunk_of_spectra():
    """Volumes can be read again, a chunk that finds no room cannot be searched at all."""
    n, grid = 16, Grid(16, 16, 4.0)
    gpu = CUDABackend()
    gpu.memory_bytes = 80 << 20
    store, pool = gpu.store(grid), gpu.pool(grid, max_band(n), False)
    assert pool.slots.capacity >= cuda_backend._SLOTS_FIRST
    assert 4 * (store.volumes.size + sum(part.size for part in (*pool.spectra, *pool.cubes))) < 0.65 * (80 << 20)
