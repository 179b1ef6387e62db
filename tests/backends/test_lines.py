"""The search kernel against direct complex sums, and the layouts it works on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_glocal.backends import lines
from numba_glocal.fourier import PAD, padded_offset, padded_spectrum


def lattice_ball(k_max: float) -> set[tuple[int, int, int]]:
    top = int(k_max) + 1
    axis = range(-top, top + 1)
    return {(x, y, z) for x in axis for y in axis for z in axis if 0 < x * x + y * y + z * z <= k_max * k_max + 1e-6}


@pytest.mark.parametrize("k_max", [1.0, 2.0, 3.7, 5.0, 8.0])
def test_band_counts_every_friedel_pair_once(k_max):
    """Summing weights over n and -n gives 1 for every lattice point of the ball but the origin."""
    band = lines.line_band(k_max)
    total: dict[Any, float] = {}
    for n, weight in zip(band.lattice, band.sample_weight, strict=True):
        for point in (tuple(n.tolist()), tuple((-n).tolist())):
            total[point] = total.get(point, 0.0) + float(weight)
    counted = {point for point, weight in total.items() if weight > 0}
    assert counted == lattice_ball(k_max)
    assert all(total[point] == 1.0 for point in counted)
    np.testing.assert_allclose(band.points, band.lattice @ lines.GENERIC_ROTATION.T, atol=1e-5)
    np.testing.assert_allclose(lines.GENERIC_ROTATION @ lines.GENERIC_ROTATION.T, np.eye(3), atol=1e-12)


def test_high_pass_keeps_places_and_counts_nothing():
    whole, high = lines.line_band(5.0), lines.line_band(5.0, 2.5)
    np.testing.assert_array_equal(whole.lattice, high.lattice)
    np.testing.assert_array_equal(high.sample_weight, np.where(whole.radius < 2.5, 0.0, whole.sample_weight))


@pytest.mark.parametrize(("radius", "step"), [(0.0, 1.0), (1.0, 1.0), (2.5, 0.8), (6.0, 1.0), (40.0, 1.0)])
def test_shift_cube(radius, step):
    cube = lines.shift_cube(radius, step)
    assert cube.shifts_voxels.shape == ((2 * cube.steps + 1) ** 3, 3)
    ball = cube.shifts_voxels[cube.inside]
    assert np.abs(ball[0]).max() == 0.0
    lengths = np.linalg.norm(ball, axis=1)
    assert (np.diff(lengths) > -1e-9).all() and lengths.max() <= 1.01 * radius + 1e-9
    assert len({tuple(row) for row in np.round(ball, 9).tolist()}) == len(ball)
    # every lattice point of the ball is there
    n = np.arange(-cube.steps, cube.steps + 1)
    points = np.stack(np.meshgrid(n, n, n), -1).reshape(-1, 3)
    assert len(ball) == (np.linalg.norm(points, axis=1) * cube.step_voxels <= 1.01 * radius + 1e-9).sum()
    assert cube.steps <= lines.MAX_SHIFT_STEPS
    if 0 < radius < lines.MAX_SHIFT_STEPS * step:
        assert cube.step_voxels == pytest.approx(step, rel=0.35)
        assert lengths.max() == pytest.approx(radius)


def block(band: lines.LineBand, lanes: int, particles: int, seed: int) -> tuple[Any, Any, Any, Any]:
    """Random templates (lanes, 2 p) and columns (particles, 2 p), and the flat arrays of the kernel."""
    rng = np.random.default_rng(seed)
    size = 2 * band.n_pairs
    f = rng.normal(size=(lanes, size)) + 1j * rng.normal(size=(lanes, size))
    y = rng.normal(size=(particles, size)) + 1j * rng.normal(size=(particles, size))
    y *= band.sample_weight
    flat = np.zeros((band.n_pairs, 4, lines.LANES), np.float32)
    flat[:, 0, :lanes], flat[:, 1, :lanes] = f[:, 0::2].real.T, f[:, 0::2].imag.T
    flat[:, 2, :lanes], flat[:, 3, :lanes] = f[:, 1::2].real.T, f[:, 1::2].imag.T
    columns = np.empty((particles, 2 * size), np.float32)
    columns[:, 0::2], columns[:, 1::2] = y.real, y.imag
    return f, y, flat.ravel(), columns


def run_block(band: Any, cube: Any, flat: Any, columns: Any, box: int, multiplier: Any = None, bias: Any = None, at: int = 0) -> tuple[Any, Any]:
    particles = len(columns)
    top = int(band.k_max + 1e-6)
    coefficients = lines.phase_coefficients(cube.steps, cube.step_voxels, box, top).ravel() if cube.steps else np.zeros(2, np.float32)
    shape = (particles, len(cube.inside))
    multiplier = np.ones(shape, np.float32) if multiplier is None else multiplier.astype(np.float32)
    bias = np.zeros(shape, np.float32) if bias is None else bias.astype(np.float32)
    scratch = np.full(lines.scratch_size(cube.steps, particles), np.nan, np.float32)  # what is not written must not be read
    best, row = np.empty((particles, lines.LANES), np.float32), np.empty((particles, lines.LANES), np.int32)
    lines.search_block(
        flat,
        at,
        columns,
        band.line_start,
        band.line_length,
        band.plane_start,
        coefficients,
        cube.steps,
        cube.inside,
        multiplier,
        bias,
        scratch,
        best,
        row,
    )
    return best, row


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize(("k_max", "lanes", "particles"), [(2.0, 16, 1), (4.5, 5, 3), (7.0, 16, 2)])
def test_search_block_is_the_direct_sum(steps, k_max, lanes, particles):
    """Best value and best shift over the ball of ``Re sum conj(F) Y exp(2 pi i q.t / box)``, with per-shift factor and offset."""
    box = 24
    band, cube = lines.line_band(k_max), lines.shift_cube(0.7 * steps, 0.7)
    assert cube.steps == steps
    f, y, flat, columns = block(band, lanes, particles, 7 * steps + lanes)
    points = band.lattice @ lines.GENERIC_ROTATION.T
    phase = np.exp(2j * np.pi / box * points @ cube.shifts_voxels[cube.inside].T)
    rng = np.random.default_rng(steps)
    multiplier, bias = rng.uniform(0.5, 2.0, (2, particles, len(cube.inside)))
    bias[:, ::3] = -np.inf  # shifts that the limit forbids
    if len(cube.inside) == 1:
        bias[:] = 0.0
    best, row = run_block(band, cube, flat, columns, box, multiplier, bias)
    for p in range(particles):
        exact = ((np.conj(f) * y[p]) @ phase).real * multiplier[p] + bias[p]
        np.testing.assert_allclose(best[p, :lanes], exact.max(1), rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(row[p, :lanes], cube.inside[exact.argmax(1)])


def test_search_block_without_any_allowed_shift():
    band, cube = lines.line_band(3.0), lines.shift_cube(1.0, 1.0)
    _, _, flat, columns = block(band, 16, 2, 0)
    bias = np.zeros((2, len(cube.inside)))
    bias[0] = -np.inf
    best, _ = run_block(band, cube, flat, columns, 16, bias=bias)
    assert (best[0] == -np.inf).all() and np.isfinite(best[1]).all()


def test_blocks_are_found_at_their_place_and_tiles_do_not_matter():
    band, cube = lines.line_band(4.0), lines.shift_cube(1.4, 0.7)
    _, _, first, columns = block(band, 16, 5, 1)
    _, _, second, _ = block(band, 16, 5, 2)
    both = np.concatenate([first, second])
    alone = run_block(band, cube, second, columns, 16)
    placed = run_block(band, cube, both, columns, 16, at=len(first))
    np.testing.assert_array_equal(alone[0], placed[0])
    one_by_one = [run_block(band, cube, second, columns[p : p + 1], 16)[0][0] for p in range(5)]
    np.testing.assert_array_equal(alone[0], one_by_one)
    assert 1 <= lines.tile_particles(12) <= lines.tile_particles(2) <= 16


def test_templates_are_the_turned_reference():
    """Lanes, pairs and planes in the kernel's order, against a plain trilinear look-up; 19 rotations: a block and three lanes."""
    n, k_max = 12, 3.0
    rng = np.random.default_rng(3)
    volume = rng.normal(size=(n, n, n)).astype(np.float32)
    spectrum = padded_spectrum(volume, k_max)
    c = padded_offset(k_max)
    band = lines.line_band(k_max)
    q, _ = np.linalg.qr(rng.normal(size=(19, 3, 3)))
    rotations = (q * np.sign(np.linalg.det(q))[:, None, None]).astype(np.float32)
    templates = np.zeros(2 * band.n_pairs * 4 * lines.LANES, np.float32)
    powers = np.zeros((19, 2 * band.n_pairs), np.float32)
    flat = np.ascontiguousarray(spectrum).view(np.float32).ravel()
    lines.fill_templates(flat, 2 * c + 1, c, band.points, rotations, np.float32(PAD), templates, powers)
    shaped = templates.reshape(2, band.n_pairs, 2, 2, lines.LANES)  # block, pair, member, re/im, lane
    for a in (0, 7, 15, 16, 18):
        found = shaped[a // 16, :, :, 0, a % 16] + 1j * shaped[a // 16, :, :, 1, a % 16]
        exact = trilinear(spectrum, c, PAD * band.points.astype(np.float64) @ rotations[a].astype(np.float64))
        np.testing.assert_allclose(found.reshape(-1), exact, atol=2e-4 * np.abs(exact).max())
        np.testing.assert_allclose(powers[a], np.abs(exact) ** 2, atol=5e-4 * (np.abs(exact) ** 2).max())
    assert not shaped[1, :, :, :, 3:].any()


def trilinear(spectrum: Any, c: int, at: Any) -> Any:
    """Plain trilinear values of a half-spectrum with Friedel's law, at padded positions (m, 3), x y z."""
    flip = at[:, 0] < 0
    at = np.where(flip[:, None], -at, at)
    low = np.floor(at).astype(int)
    part = at - low
    value = np.zeros(len(at), np.complex128)
    for corner in np.ndindex(2, 2, 2):
        x, y, z = (low + corner).T
        value += np.prod(np.where(corner, part, 1 - part), axis=1) * spectrum[z + c, y + c, np.minimum(x, c)]
    return np.where(flip, np.conj(value), value)
