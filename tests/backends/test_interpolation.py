"""Kernels that read and write spectra at turned positions, against scipy, direct transforms and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.ndimage import map_coordinates
from scipy.spatial.transform import Rotation

from numba_glocal.backends import interpolation as kernels
from numba_glocal.backends.newton import limited_step, unpack_normal_equations
from numba_glocal.backends.reference import transform_at
from numba_glocal.fourier import PAD, grid_band, padded_offset, padded_spectrum
from numba_glocal.phantom import render_phantom

SCALE = np.float32(PAD)


def flat(spectrum: Any) -> Any:
    return np.ascontiguousarray(spectrum).view(np.float32).ravel()


def matrix(seed: int) -> Any:
    return np.ascontiguousarray(Rotation.random(random_state=seed).as_matrix(), np.float32)


@pytest.fixture(scope="module", params=[16, 15])
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A masked object, its padded spectrum and the grid samples of its band."""
    n = request.param
    axis = np.arange(n) - n // 2
    ball = axis[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2 < (0.42 * n) ** 2
    volume = (render_phantom(n, 400 / n, diameter_angst=260.0) * ball).astype(np.float32)
    k_max = n // 2 - 2
    return {
        "n": n,
        "volume": volume,
        "k_max": k_max,
        "c": padded_offset(k_max),
        "spectrum": padded_spectrum(volume, k_max),
        "points": np.ascontiguousarray(grid_band(n, float(k_max)).k),
    }


def gathered(made: dict[str, Any], turn: Any) -> Any:
    out = np.empty(len(made["points"]), np.complex64)
    kernels.gather(flat(made["spectrum"]), 2 * made["c"] + 1, made["c"], made["points"], turn, SCALE, out)
    return out


@pytest.mark.parametrize("seed", [0, 1])
def test_gather_is_trilinear(made, seed):
    """Against scipy on the whole, unfolded padded spectrum."""
    half, c = made["spectrum"].astype(np.complex128), made["c"]
    whole = np.concatenate([np.conj(half[::-1, ::-1, :0:-1]), half], axis=2)
    turn = matrix(seed)
    at = (PAD * made["points"].astype(np.float64) @ turn.astype(np.float64))[:, ::-1].T + c
    exact = map_coordinates(whole.real, at, order=1) + 1j * map_coordinates(whole.imag, at, order=1)
    found = gathered(made, turn)
    np.testing.assert_allclose(found, exact, atol=2e-5 * np.abs(exact).max())


def test_gather_is_the_transform_at_turned_points(made):
    """Against the direct sum over voxels: 1-2 % of the RMS amplitude, the error of linear interpolation at twofold padding."""
    turn = matrix(3)
    exact = transform_at(made["volume"], made["points"].astype(np.float64) @ turn.astype(np.float64))
    error = np.abs(gathered(made, turn) - exact)
    assert np.sqrt((error**2).mean() / (np.abs(exact) ** 2).mean()) < 0.02
    assert np.corrcoef(np.abs(gathered(made, turn)), np.abs(exact))[0, 1] > 0.999


def test_insert_is_the_adjoint_of_gather(made):
    """<insert(v), G> = <v, gather(G)> for any half-spectrum G: real inner products, both halves of complex numbers."""
    c, points, turn = made["c"], made["points"], matrix(4)
    rng = np.random.default_rng(0)
    rows = 2 * c + 1
    g = (rng.normal(size=(rows, rows, c + 1)) + 1j * rng.normal(size=(rows, rows, c + 1))).astype(np.complex64)
    values = (rng.normal(size=len(points)) + 1j * rng.normal(size=len(points))).astype(np.complex64)
    weights = rng.uniform(0.5, 1.0, len(points)).astype(np.float32)
    grid = np.zeros(rows * rows * (c + 2) * 4, np.float32)
    kernels.insert(grid, rows, c, points, turn, SCALE, values, weights)
    sums = grid.reshape(rows, rows, c + 2, 4).astype(np.float64)
    out = np.empty(len(points), np.complex64)
    kernels.gather(flat(g), rows, c, points, turn, SCALE, out)
    left = (sums[:, :, : c + 1, 0] * g.real + sums[:, :, : c + 1, 1] * g.imag).sum()
    right = (values.real.astype(np.float64) * out.real + values.imag * out.imag).sum()
    assert left == pytest.approx(right, rel=1e-4)
    assert sums[..., 2].sum() == pytest.approx(float(weights.sum()), rel=1e-5)
    assert not sums[..., 3].any()
    assert not sums[:, :, c + 1, :3].any(), "nothing lands beyond the band"


def test_insert_leaves_out_samples_without_weight(made):
    c, points = made["c"], made["points"]
    rows = 2 * c + 1
    grid = np.zeros(rows * rows * (c + 2) * 4, np.float32)
    kernels.insert(grid, rows, c, points, matrix(0), SCALE, np.ones(len(points), np.complex64), np.zeros(len(points), np.float32))
    assert not grid.any()


@pytest.mark.parametrize("shift", [(0.0, 0.0, 0.0), (1.3, -2.4, 0.7), (-5.0, 3.0, 11.0)])
def test_phase_tables(made, shift):
    n, points = made["n"], made["points"].astype(int)
    top = n // 2
    tables = np.empty((3, 2 * top + 1), np.complex64)
    kernels.phase_tables(2 * np.pi / n * np.array(shift), top, tables)
    found = tables[0, points[:, 0] + top] * tables[1, points[:, 1] + top] * tables[2, points[:, 2] + top]
    np.testing.assert_allclose(found, np.exp(2j * np.pi / n * points @ np.array(shift)), atol=1e-5)


def equations(made: dict[str, Any], count: int, rotation: Any, shift: Any, data: Any, ctf: Any, weight: Any) -> Any:
    n, top = made["n"], made["n"] // 2
    tables = np.empty((3, 2 * top + 1), np.complex64)
    kernels.phase_tables(2 * np.pi / n * np.asarray(shift, np.float64), top, tables)
    sums, scratch = np.zeros(kernels.N_SUMS), np.full(kernels.SCRATCH_SIZE, np.nan, np.float32)
    kernels.normal_equations(
        flat(made["spectrum"]), 2 * made["c"] + 1, made["c"], made["points"][:count], np.ascontiguousarray(rotation, np.float32), tables, SCALE,
        data[:count], ctf[:count], weight[:count], scratch, sums,
    )  # fmt: skip
    return sums


def exact_model(made: dict[str, Any], count: int, rotation: Any, shift: Any) -> Any:
    """C-free model in double precision: scipy's trilinear interpolation of the same spectrum, times the phase of the shift."""
    half, c = made["spectrum"].astype(np.complex128), made["c"]
    whole = np.concatenate([np.conj(half[::-1, ::-1, :0:-1]), half], axis=2)
    points = made["points"][:count].astype(np.float64)
    at = (PAD * points @ rotation)[:, ::-1].T + c
    value = map_coordinates(whole.real, at, order=1) + 1j * map_coordinates(whole.imag, at, order=1)
    return value * np.exp(-2j * np.pi / made["n"] * points @ shift)


@pytest.mark.parametrize("count", [1, 15, 16, 250, 256, 257, 301])
def test_normal_equations_against_finite_differences(made, count):
    """num, den2, gradient and Gauss-Newton matrix of the double-precision cost; sample counts around vector and block ends.

    Steps of 1e-6 cross the kinks of the trilinear interpolant at hardly any sample.
    """
    rng = np.random.default_rng(count)
    n = made["n"]
    rotation, shift = Rotation.random(random_state=7).as_matrix().astype(np.float32).astype(np.float64), np.array([0.6, -1.1, 0.4])
    size = len(made["points"])
    typical = float(np.abs(made["spectrum"]).std())
    data = (typical * (rng.normal(size=size) + 1j * rng.normal(size=size))).astype(np.complex64)
    ctf, weight = rng.uniform(-1, 1, size).astype(np.float32), rng.uniform(0.5, 2, size).astype(np.float32)
    sums = equations(made, count, rotation, shift, data, ctf, weight)
    hessian, gradient = unpack_normal_equations(sums)
    w, c, x = weight[:count].astype(np.float64), ctf[:count].astype(np.float64), data[:count].astype(np.complex128)
    model = c * exact_model(made, count, rotation, shift)
    np.testing.assert_allclose(sums[27], (w * np.conj(model) * x).real.sum(), rtol=1e-4, atol=1e-4 * (w * np.abs(model * x)).sum())
    np.testing.assert_allclose(sums[28], (w * np.abs(model) ** 2).sum(), rtol=1e-4)
    columns = []
    for axis in range(6):
        ends = []
        for step in (1e-6, -1e-6):
            v = np.zeros(6)
            v[axis] = step
            # R' = R exp(p), s' = s + R u with u in units of box / 2 pi
            pose = rotation @ Rotation.from_rotvec(v[:3]).as_matrix(), shift + rotation @ v[3:] * n / (2 * np.pi)
            ends.append(c * exact_model(made, count, *pose))
        columns.append((ends[0] - ends[1]) / 2e-6)
    jacobian = np.stack(columns, axis=1)
    expected_gradient = (w[:, None] * np.conj(jacobian) * (x - model)[:, None]).real.sum(0)
    expected_hessian = (np.conj(jacobian).T @ (w[:, None] * jacobian)).real
    scale = np.sqrt(np.diagonal(expected_hessian))
    np.testing.assert_allclose(hessian / np.outer(scale, scale), expected_hessian / np.outer(scale, scale), atol=2e-3)
    residual = np.sqrt((w * np.abs(x - model) ** 2).sum())
    np.testing.assert_allclose(gradient / (scale * residual), expected_gradient / (scale * residual), atol=2e-3)


def test_limited_step():
    """Against the free step, and by the optimality conditions: what is left of the gradient on the shift points outwards."""
    rng = np.random.default_rng(0)
    on_angle, on_shift = np.repeat([1.0, 0.0], 3), np.repeat([0.0, 1.0], 3)
    for _ in range(20):
        root = rng.normal(size=(6, 6))
        hessian, gradient = root @ root.T + np.eye(6), rng.normal(size=6) * 5
        away = rng.normal(size=3) * 0.3
        free = np.linalg.solve(hessian, gradient)
        np.testing.assert_allclose(limited_step(hessian, gradient, [(on_shift, away, 100.0)]), free)
        limit = max(0.5 * np.linalg.norm(away + free[3:]), np.linalg.norm(away))
        step = limited_step(hessian, gradient, [(on_shift, away, limit)])
        end = away + step[3:]
        left = gradient - hessian @ step
        np.testing.assert_allclose(left[:3], 0.0, atol=1e-8)
        if np.linalg.norm(away + free[3:]) > limit:
            assert np.linalg.norm(end) == pytest.approx(limit, rel=1e-5)
            np.testing.assert_allclose(left[3:] / np.linalg.norm(left[3:]), end / limit, atol=1e-4)
        # both kinds at once: what is left of the gradient is a positive multiple of each end that lies on its limit
        about = np.stack([rng.normal(size=3) * 0.3, away])
        both = np.maximum(0.5 * np.linalg.norm(about + free.reshape(2, 3), axis=1), np.linalg.norm(about, axis=1))
        step = limited_step(hessian, gradient, [(on_shift, about[1], both[1]), (on_angle, about[0], both[0])])
        ends, left = about + step.reshape(2, 3), (gradient - hessian @ step).reshape(2, 3)
        for end, rest, bound in zip(ends, left, both, strict=True):
            assert np.linalg.norm(end) <= bound * (1 + 1e-5)
            if np.linalg.norm(end) > bound * (1 - 1e-5):
                np.testing.assert_allclose(rest / np.linalg.norm(rest), end / bound, atol=1e-3)
            else:
                np.testing.assert_allclose(rest, 0.0, atol=1e-5)


def test_select_samples(made):
    n = made["n"]
    rng = np.random.default_rng(1)
    band = grid_band(n, float(made["k_max"]))
    weight = rng.uniform(-0.4, 1, n * n * (n // 2 + 1)).astype(np.float32)
    weight[rng.random(weight.size) < 0.3] = 0.0
    x = (rng.normal(size=len(band.index)) + 1j).astype(np.complex64)
    table = (1 / (0.1 + np.linspace(0, 1, 512))).astype(np.float32)
    inverse_sigma2 = np.linspace(1, 2, n // 2 + 2).astype(np.float32)
    size = len(band.index)
    k, data, ctf, w = np.empty((size, 3), np.float32), np.empty(size, np.complex64), np.empty(size, np.float32), np.empty(size, np.float32)
    used = kernels.select_samples(
        weight, band.index, band.shell, band.radius2, band.k, x, table, np.float32(511 / np.abs(weight).max()), inverse_sigma2, 4.0 - 1e-6, 16 + 1e-6,
        k, data, ctf, w,
    )  # fmt: skip
    here = weight[band.index]
    keep = (band.radius2 >= 4) & (band.radius2 <= 16) & (here != 0)
    assert used == keep.sum()
    np.testing.assert_array_equal(k[:used], band.k[keep])
    np.testing.assert_array_equal(data[:used], x[keep])
    np.testing.assert_array_equal(ctf[:used], here[keep])
    exact = inverse_sigma2[band.shell[keep]] / (0.1 + np.abs(here[keep]) / np.abs(weight).max())
    np.testing.assert_allclose(w[:used], exact, rtol=0.011)  # the table's step


def test_turn_samples_the_particle_in_the_references_frame(made):
    """Y = w C X exp and D = w C^2 at R0 q, against scipy look-ups of X and C; samples that count nothing stay zero."""
    n, c = made["n"], made["c"]
    rng = np.random.default_rng(2)
    lattice = np.array([(x, y, z) for x in range(4) for y in range(-3, 4) for z in range(-3, 4) if 0 < x * x + y * y + z * z <= 16], np.int32)
    generic = Rotation.from_rotvec([0.3, -0.5, 0.8]).as_matrix()
    points = (lattice @ generic.T).astype(np.float32)
    radius = np.linalg.norm(points, axis=1).astype(np.float32)
    counted = rng.choice(np.array([0.0, 0.5, 1.0], np.float32), len(points))
    k = np.fft.fftfreq(n, 1 / n)
    smooth = np.exp(-((k[:, None, None] - 0) ** 2 + 2 * k[None, :, None] ** 2 + np.arange(n // 2 + 1) ** 2) / 40)  # even, as weights are
    weight = np.ascontiguousarray(smooth, np.float32)
    table = (1 / (0.1 + np.linspace(0, 1, 512))).astype(np.float32)
    inverse_sigma2 = np.linspace(1, 2, n // 2 + 2).astype(np.float32)
    rotation, shift = matrix(9).astype(np.float64), np.array([0.7, -0.2, 1.1])
    top = 4
    tables = np.empty((3, 2 * top + 1), np.complex64)
    kernels.phase_tables(2 * np.pi / n * (generic.T @ rotation.T @ shift), top, tables)
    packed = np.empty(n * n * (n // 2) * 4, np.float32)
    kernels.pack_weight(weight, packed)
    column, den = np.full(2 * len(points), np.nan, np.float32), np.full(len(points), np.nan, np.float32)
    kernels.turn(
        flat(made["spectrum"]), 2 * c + 1, c, packed, n, table, np.float32(511.0), inverse_sigma2, radius, points, lattice, counted,
        np.ascontiguousarray(rotation.T, np.float32), tables, SCALE, column, den,
    )  # fmt: skip
    at = points.astype(np.float64) @ rotation.T  # R0 q
    whole_c = np.fft.fftshift(np.exp(-(k[:, None, None] ** 2 + 2 * k[None, :, None] ** 2 + k[None, None, :] ** 2) / 40))
    ctf = map_coordinates(whole_c, at[:, ::-1].T + n // 2, order=1)
    half = made["spectrum"].astype(np.complex128)
    whole = np.concatenate([np.conj(half[::-1, ::-1, :0:-1]), half], axis=2)
    x = map_coordinates(whole.real, PAD * at[:, ::-1].T + c, order=1) + 1j * map_coordinates(whole.imag, PAD * at[:, ::-1].T + c, order=1)
    w = counted * np.interp(radius, np.arange(len(inverse_sigma2)), inverse_sigma2) / (0.1 + ctf)
    y = w * ctf * x * np.exp(2j * np.pi / n * at @ shift)
    np.testing.assert_allclose(column[0::2] + 1j * column[1::2], y, atol=0.01 * np.abs(y).max())
    np.testing.assert_allclose(den, w * ctf**2, atol=0.01 * (w * ctf**2).max())
    assert not den[counted == 0].any() and not column[0::2][counted == 0].any()


def greedy(scores: Any, rotations: Any, keep: int, separation_deg: float) -> list[int]:
    chosen: list[int] = []
    for row in np.argsort(-scores, kind="stable"):
        angles = [np.rad2deg(Rotation.from_matrix(rotations[row] @ rotations[other].T).magnitude()) for other in chosen]
        if scores[row] > -np.inf and all(angle >= separation_deg for angle in angles) and len(chosen) < keep:
            chosen.append(int(row))
    return chosen


@pytest.mark.parametrize(("keep", "separation_deg"), [(1, 10.0), (5, 30.0), (50, 60.0)])
def test_choose(keep, separation_deg):
    rng = np.random.default_rng(keep)
    rotations = Rotation.random(60, random_state=keep).as_matrix()
    scores = rng.normal(size=60)
    scores[rng.random(60) < 0.2] = -np.inf
    chosen = np.full(keep, -1, np.int64)
    found = kernels.choose(scores.copy(), rotations, keep, 1 + 2 * np.cos(np.deg2rad(separation_deg)), chosen)
    assert chosen[:found].tolist() == greedy(scores, rotations, keep, separation_deg)
    assert kernels.choose(np.full(60, -np.inf), rotations, keep, 2.9, chosen) == 0
