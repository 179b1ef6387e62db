"""The search kernel: all shifts of a rotation at once, by folding the band line by line (docs/adr/0002).

For one particle and one rotation the scores over a cube of shifts are a small Fourier sum over the band,

    num(t) = Re sum_q conj(F_L(q)) Y(q) exp(2 pi i q.t / box),

and because the sample points are a lattice, ``q = G n``, and the shifts a lattice in the same frame, ``t = step G m``, the exponential
factors: ``exp(2 pi i step n.m / box)`` splits into x, y and z. Summing along z first, then y, then x costs about forty operations a
sample whatever the number of shifts, where a matrix product over rotations and shifts costs four a sample *and shift*. Pairs of samples
at +z and -z (and lines at +y and -y) share their cosines and sines. Sixteen rotations sit in the lanes of a vector register.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from ..geometry import rotvec_to_matrix
from .simd import (
    FAST,
    LANES,
    add,
    broadcast4,
    lane0,
    lane1,
    lane2,
    lane3,
    load4,
    load16,
    mul,
    muladd,
    nmuladd,
    splat16,
    store,
    sub,
    zero16,
)

_njit = nb.njit(fastmath=FAST, nogil=True, cache=True)

GENERIC_ROTATION = rotvec_to_matrix(np.array([-0.7, 0.9, 0.5]))
"""G. On the nodes of the padded grid the sinc^2 correction overshoots (identity: 6 % too much power); a turned lattice sees its mean."""

MAX_SHIFT_STEPS = 12
"""Largest number of shift steps to either side that a level may ask for."""


@dataclass(frozen=True, slots=True)
class LineBand:
    """The lattice points of a half band, arranged in lines along z for the search kernel.

    Planes of constant x >= 0 hold lines of constant y, in the order y = 0, +1, -1, +2, -2 ..; a line holds pairs (+z, -z) for z = 0 .. z_max.
    Plane x = 0 is kept whole and counts half; the second member of a z = 0 pair and the origin count nothing.

    Attributes
    ----------
    k_max : float
    lattice : (2 p, 3) int32
        n = (x, y, z) of every sample, pair after pair.
    points : (2 p, 3) float32
        q = G n.
    radius : (2 p,) float32
    sample_weight : (2 p,) float32
    line_start, line_length : (lines,) int64
        First pair of a line and its number of pairs.
    plane_start : (planes + 1,) int64
        First line of a plane.
    """

    k_max: float
    lattice: NDArray[np.int32]
    points: NDArray[np.float32]
    radius: NDArray[np.float32]
    sample_weight: NDArray[np.float32]
    line_start: NDArray[np.int64]
    line_length: NDArray[np.int64]
    plane_start: NDArray[np.int64]

    @property
    def n_pairs(self) -> int:
        """Number of pairs p."""
        return self.lattice.shape[0] // 2


@lru_cache(maxsize=16)
def line_band(k_max: float, k_min: float = 0.0) -> LineBand:
    """Lays out the lattice points with ``max(k_min, 0+) <= |n| <= k_max``; cached.

    Points below `k_min` (a high-pass) keep their place and count nothing.
    """
    lattice, starts, lengths, planes = [], [], [], [0]
    top = int(math.floor(k_max + 1e-6))
    limit = k_max * k_max + 1e-6
    count = 0
    for x in range(top + 1):
        y_top = int(math.floor(math.sqrt(limit - x * x)))
        for y in [0] + [s * j for j in range(1, y_top + 1) for s in (1, -1)]:
            z_top = int(math.floor(math.sqrt(max(limit - x * x - y * y, 0.0))))
            z = np.arange(z_top + 1)
            pair = np.empty((z_top + 1, 2, 3), np.int32)
            pair[:, :, 0], pair[:, :, 1] = x, y
            pair[:, 0, 2], pair[:, 1, 2] = z, -z
            lattice.append(pair.reshape(-1, 3))
            starts.append(count)
            lengths.append(z_top + 1)
            count += z_top + 1
        planes.append(len(starts))
    points = np.concatenate(lattice)
    radius = np.linalg.norm(points, axis=1)
    weight = np.where(points[:, 0] == 0, 0.5, 1.0)
    weight[(np.arange(len(points)) % 2 == 1) & (points[:, 2] == 0)] = 0.0
    weight[(radius == 0) | (radius < k_min - 1e-6)] = 0.0
    band = LineBand(
        float(k_max),
        points,
        (points @ GENERIC_ROTATION.T).astype(np.float32),
        radius.astype(np.float32),
        weight.astype(np.float32),
        np.array(starts, np.int64),
        np.array(lengths, np.int64),
        np.array(planes, np.int64),
    )
    return band


@dataclass(frozen=True, slots=True)
class ShiftCube:
    """A cube of (2 m + 1)^3 trial shifts on the lattice of the sample points, and which of them lie in the ball.

    Attributes
    ----------
    steps : int
        m.
    step_voxels : float
    shifts_voxels : ((2 m + 1)^3, 3) float64
        ``t = step G (ix, iy, iz)`` with order 0, +1, -1, +2, -2 .. along each axis, x slowest.
    inside : (b,) int64
        Rows of the ball, the smallest shifts first.
    """

    steps: int
    step_voxels: float
    shifts_voxels: NDArray[np.float64]
    inside: NDArray[np.int64]


@lru_cache(maxsize=32)
def shift_cube(radius_voxels: float, step_voxels: float) -> ShiftCube:
    """Trial shifts that fill a ball of `radius_voxels`, at most 1.25 `step_voxels` apart; the zero shift is always one."""
    steps = min(MAX_SHIFT_STEPS, max(1, int(math.ceil(radius_voxels / step_voxels - 0.25)))) if radius_voxels > 0 else 0
    if steps:
        step_voxels = radius_voxels / steps
    order = np.array([0] + [s * j for j in range(1, steps + 1) for s in (1, -1)])
    n = np.stack(np.meshgrid(order, order, order, indexing="ij"), axis=-1).reshape(-1, 3)
    length = np.linalg.norm(n, axis=1) * step_voxels
    inside = np.flatnonzero(length <= radius_voxels * 1.01 + 1e-9)
    inside = inside[np.argsort(length[inside], kind="stable")]
    return ShiftCube(steps, step_voxels, (n @ GENERIC_ROTATION.T) * step_voxels, inside.astype(np.int64))


def phase_coefficients(steps: int, step_voxels: float, box_size: int, top: int) -> NDArray[np.float32]:
    """cos and sin of ``2 pi step m z / box``, (top + 1, steps, 2) float32, for m = 1 .. steps and z = 0 .. top."""
    angle = 2.0 * np.pi * step_voxels / box_size * np.arange(top + 1)[:, None] * np.arange(1, steps + 1)[None, :]
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


@_njit
def fill_templates(spectrum, n, c, points, rotations, scale, templates, powers):
    """Rotated references for blocks of sixteen rotations.

    Parameters
    ----------
    spectrum, n, c : flat padded spectrum of the reference (`interpolation.gather`).
    points : (2 p, 3) float32
    rotations : (a, 3, 3) float32
        L; the templates are F(L^-1 q).
    scale : float32
    templates : (blocks * p * 4 * 16,) float32
        Per block and pair the rows re(+z), im(+z), re(-z), im(-z), each of sixteen lanes. Lanes past `a` are left alone.
    powers : (a, 2 p) float32
        |F|^2.
    """
    from_pairs = points.shape[0] // 2
    nx = c + 1
    row, plane = 2 * nx, 2 * nx * n
    off = np.float32(c)
    for a in range(rotations.shape[0]):
        m = rotations[a]
        base = (a // LANES) * from_pairs * 4 * LANES + a % LANES
        for i in range(points.shape[0]):
            kx, ky, kz = points[i, 0] * scale, points[i, 1] * scale, points[i, 2] * scale
            qx = m[0, 0] * kx + m[1, 0] * ky + m[2, 0] * kz
            qy = m[0, 1] * kx + m[1, 1] * ky + m[2, 1] * kz
            qz = m[0, 2] * kx + m[1, 2] * ky + m[2, 2] * kz
            sign = np.float32(1.0)
            if qx < 0:
                qx, qy, qz, sign = -qx, -qy, -qz, np.float32(-1.0)
            qy += off
            qz += off
            ix, iy, iz = int(qx), int(qy), int(qz)
            dx, dy, dz = qx - np.float32(ix), broadcast4(qy - np.float32(iy)), broadcast4(qz - np.float32(iz))
            at = iz * plane + iy * row + 2 * ix
            a00, a10 = load4(spectrum, at), load4(spectrum, at + row)
            a01, a11 = load4(spectrum, at + plane), load4(spectrum, at + plane + row)
            b0 = muladd(sub(a10, a00), dy, a00)
            b1 = muladd(sub(a11, a01), dy, a01)
            v = muladd(sub(b1, b0), dz, b0)
            re = lane0(v) + (lane2(v) - lane0(v)) * dx
            im = sign * (lane1(v) + (lane3(v) - lane1(v)) * dx)
            place = base + (i // 2) * 4 * LANES + (i % 2) * 2 * LANES
            templates[place] = re
            templates[place + LANES] = im
            powers[a, i] = re * re + im * im


def _make_line(group: int) -> Any:
    """The sum along one line for `group` (1 to 3) shifts to either side, from the shift number `first` on."""

    @_njit
    def line(templates, t0, column, y0, pairs, coefficients, steps, first, out, o0):
        zero_r, zero_i = zero16(), zero16()
        c1r, c1i, s1r, s1i = zero16(), zero16(), zero16(), zero16()
        c2r, c2i, s2r, s2i = zero16(), zero16(), zero16(), zero16()
        c3r, c3i, s3r, s3i = zero16(), zero16(), zero16(), zero16()
        for j in range(pairs):
            t, y, k = t0 + j * 4 * LANES, y0 + j * 4, (j * steps + first) * 2
            fr, fi, gr, gi = load16(templates, t), load16(templates, t + LANES), load16(templates, t + 2 * LANES), load16(templates, t + 3 * LANES)
            yr, yi, zr, zi = splat16(column, y), splat16(column, y + 1), splat16(column, y + 2), splat16(column, y + 3)
            pr, pi = muladd(fi, yi, mul(fr, yr)), nmuladd(fi, yr, mul(fr, yi))
            qr, qi = muladd(gi, zi, mul(gr, zr)), nmuladd(gi, zr, mul(gr, zi))
            er, ei, dr, di = add(pr, qr), add(pi, qi), sub(pr, qr), sub(pi, qi)
            zero_r, zero_i = add(zero_r, er), add(zero_i, ei)
            cos, sin = splat16(coefficients, k), splat16(coefficients, k + 1)
            c1r, c1i, s1r, s1i = muladd(cos, er, c1r), muladd(cos, ei, c1i), muladd(sin, dr, s1r), muladd(sin, di, s1i)
            if group > 1:
                cos, sin = splat16(coefficients, k + 2), splat16(coefficients, k + 3)
                c2r, c2i, s2r, s2i = muladd(cos, er, c2r), muladd(cos, ei, c2i), muladd(sin, dr, s2r), muladd(sin, di, s2i)
            if group > 2:
                cos, sin = splat16(coefficients, k + 4), splat16(coefficients, k + 5)
                c3r, c3i, s3r, s3i = muladd(cos, er, c3r), muladd(cos, ei, c3i), muladd(sin, dr, s3r), muladd(sin, di, s3i)
        store(out, o0, zero_r)
        store(out, o0 + LANES, zero_i)
        o = o0 + 2 * LANES + first * 4 * LANES
        # C + i S for +m, C - i S for -m
        store(out, o, sub(c1r, s1i))
        store(out, o + LANES, add(c1i, s1r))
        store(out, o + 2 * LANES, add(c1r, s1i))
        store(out, o + 3 * LANES, sub(c1i, s1r))
        if group > 1:
            store(out, o + 4 * LANES, sub(c2r, s2i))
            store(out, o + 5 * LANES, add(c2i, s2r))
            store(out, o + 6 * LANES, add(c2r, s2i))
            store(out, o + 7 * LANES, sub(c2i, s2r))
        if group > 2:
            store(out, o + 8 * LANES, sub(c3r, s3i))
            store(out, o + 9 * LANES, add(c3i, s3r))
            store(out, o + 10 * LANES, add(c3r, s3i))
            store(out, o + 11 * LANES, sub(c3i, s3r))

    return line


_line1, _line2, _line3 = _make_line(1), _make_line(2), _make_line(3)


@_njit
def _line_sums(templates, t0, column, y0, pairs, coefficients, steps, out, o0):
    """A(tz) = sum over z of conj(F) Y exp(..) for all 2 m + 1 shifts of one line, two rows of lanes (re, im) each."""
    if steps == 0:
        re, im = zero16(), zero16()
        for j in range(pairs):
            t, y = t0 + j * 4 * LANES, y0 + j * 4
            fr, fi, gr, gi = load16(templates, t), load16(templates, t + LANES), load16(templates, t + 2 * LANES), load16(templates, t + 3 * LANES)
            yr, yi, zr, zi = splat16(column, y), splat16(column, y + 1), splat16(column, y + 2), splat16(column, y + 3)
            re = muladd(gi, zi, muladd(gr, zr, muladd(fi, yi, muladd(fr, yr, re))))
            im = nmuladd(gi, zr, muladd(gr, zi, nmuladd(fi, yr, muladd(fr, yi, im))))
        store(out, o0, re)
        store(out, o0 + LANES, im)
        return
    first = np.int64(0)
    while first < steps:
        left = steps - first
        if left == 1:
            _line1(templates, t0, column, y0, pairs, coefficients, steps, first, out, o0)
            first += 1
        elif left == 2 or left == 4:
            _line2(templates, t0, column, y0, pairs, coefficients, steps, first, out, o0)
            first += 2
        else:
            _line3(templates, t0, column, y0, pairs, coefficients, steps, first, out, o0)
            first += 3


@_njit
def search_block(
    templates, template_at, columns, line_start, line_length, plane_start, coefficients, steps, inside, multiplier, bias, scratch, best, best_shift
):
    """Best shift of every particle of a tile at sixteen rotations.

    Parameters
    ----------
    templates : flat templates; `template_at` is where the block starts.
    columns : (particles, 4 p) float32
        The particles' columns Y.
    line_start, line_length, plane_start : of the `LineBand`.
    coefficients : ((top + 1) * steps * 2,) float32
        `phase_coefficients`, flat.
    steps : int
        m.
    inside : (b,) int64
        Rows of the shift cube that may be chosen.
    multiplier : (particles, b) or, where it depends on the rotation too, (particles, b, 16) float32
    bias : (particles, b) float32
        The score to maximise is ``num * multiplier + bias``.
    scratch : float32
        At least `scratch_size` long.
    best : (particles, 16) float32, best_shift : (particles, 16) int32
        Score and row of the shift cube.
    """
    width = 2 * steps + 1
    particles = columns.shape[0]
    line_rows = 2 * width * LANES
    plus, minus = np.int64(0), line_rows  # a literal 0 would be another type, and compile every helper twice
    fold_c = 2 * line_rows  # C(m, tz), m = 0 .. steps
    fold_s = fold_c + (steps + 1) * line_rows
    turned = fold_s + (steps + 1) * line_rows  # B(ty, tz)
    sums = turned + width * line_rows
    cube_rows = width * width * LANES
    sum_size = 2 * (steps + 1) * cube_rows
    for p in range(particles):
        for j in range(sums + p * sum_size, sums + (p + 1) * sum_size, LANES):
            store(scratch, j, zero16())
    for x in range(plane_start.shape[0] - 1):
        first, last = plane_start[x], plane_start[x + 1]
        for p in range(particles):
            column = columns[p]
            start = line_start[first]
            # y = 0 has no partner
            _line_sums(templates, template_at + start * 4 * LANES, column, start * 4, line_length[first], coefficients, steps, scratch, plus)
            for j in range(0, line_rows, LANES):
                value = load16(scratch, plus + j)
                store(scratch, fold_c + j, value)
                for m in range(1, steps + 1):
                    store(scratch, fold_c + m * line_rows + j, value)
                    store(scratch, fold_s + m * line_rows + j, zero16())
            y = 0
            for number in range(first + 1, last, 2):
                y += 1
                start, length = line_start[number], line_length[number]
                _line_sums(templates, template_at + start * 4 * LANES, column, start * 4, length, coefficients, steps, scratch, plus)
                start = line_start[number + 1]
                _line_sums(templates, template_at + start * 4 * LANES, column, start * 4, length, coefficients, steps, scratch, minus)
                for j in range(0, line_rows, LANES):
                    a, b = load16(scratch, plus + j), load16(scratch, minus + j)
                    even, odd = add(a, b), sub(a, b)
                    store(scratch, fold_c + j, add(load16(scratch, fold_c + j), even))
                    for m in range(1, steps + 1):
                        k = (y * steps + m - 1) * 2
                        at = m * line_rows + j
                        store(scratch, fold_c + at, muladd(splat16(coefficients, k), even, load16(scratch, fold_c + at)))
                        store(scratch, fold_s + at, muladd(splat16(coefficients, k + 1), odd, load16(scratch, fold_s + at)))
            for j in range(0, line_rows, 2 * LANES):
                store(scratch, turned + j, load16(scratch, fold_c + j))
                store(scratch, turned + j + LANES, load16(scratch, fold_c + j + LANES))
                for m in range(1, steps + 1):
                    at = m * line_rows + j
                    cr, ci = load16(scratch, fold_c + at), load16(scratch, fold_c + at + LANES)
                    sr, si = load16(scratch, fold_s + at), load16(scratch, fold_s + at + LANES)
                    up, down = turned + (2 * m - 1) * line_rows + j, turned + 2 * m * line_rows + j
                    store(scratch, up, sub(cr, si))
                    store(scratch, up + LANES, add(ci, sr))
                    store(scratch, down, add(cr, si))
                    store(scratch, down + LANES, sub(ci, sr))
            base = sums + p * sum_size
            for j in range(width * width):
                re, im = load16(scratch, turned + 2 * j * LANES), load16(scratch, turned + (2 * j + 1) * LANES)
                at = base + j * LANES
                store(scratch, at, add(load16(scratch, at), re))
                for m in range(1, steps + 1):
                    k = (x * steps + m - 1) * 2
                    at = base + (2 * m * width * width + j) * LANES
                    store(scratch, at, muladd(splat16(coefficients, k), re, load16(scratch, at)))
                    at += cube_rows
                    store(scratch, at, muladd(splat16(coefficients, k + 1), im, load16(scratch, at)))
    for p in range(particles):
        base = sums + p * sum_size
        for lane in range(LANES):
            best[p, lane] = -np.inf
            best_shift[p, lane] = 0
        for b in range(inside.shape[0]):
            shift = inside[b]
            ix, rest = shift // (width * width), shift % (width * width)
            m = (ix + 1) // 2
            offset = bias[p, b]
            # exp(i phi) B, real part: cos Br - sin Bi for +m, cos Br + sin Bi for -m
            sign = np.float32(-1.0) if ix % 2 == 1 else np.float32(1.0)
            at = base + (2 * m * width * width + rest) * LANES
            for lane in range(LANES):
                value = scratch[at + lane]
                if m > 0:
                    value += sign * scratch[at + cube_rows + lane]
                if multiplier.ndim == 3:
                    value = value * multiplier[p, b, lane] + offset
                else:
                    value = value * multiplier[p, b] + offset
                if value > best[p, lane]:
                    best[p, lane] = value
                    best_shift[p, lane] = shift


def scratch_size(steps: int, particles: int) -> int:
    """Length of the scratch of `search_block`."""
    width = 2 * steps + 1
    line_rows = 2 * width * LANES
    return 2 * line_rows + 2 * (steps + 1) * line_rows + width * line_rows + particles * 2 * (steps + 1) * width * width * LANES


def tile_particles(steps: int, budget_bytes: int = 600_000) -> int:
    """How many particles share a plane of templates, so that their sums stay in the second-level cache."""
    width = 2 * steps + 1
    return max(1, min(16, budget_bytes // (2 * (steps + 1) * width * width * LANES * 4)))
