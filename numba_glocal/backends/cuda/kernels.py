"""Numba CUDA kernels: spectra, turned particles, templates, den2, choice of candidates, refinement, residuals, sums.

Layouts (docs/scoring.md): flat float32 arrays with re, im interleaved; a padded spectrum as in `numba_glocal.fourier` with ``n = 2 c + 1``
rows and ``c + 1`` columns; a *cube* is the grid spectrum for -K .. K, -K .. K, 0 .. K without padding. Particles live in slots of a pool;
kernels are given the slot of each. Nothing here adds up in an order that depends on timing: every run gives the same bits.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint64

from .vector import bits_float, float_bits, load2, load4, store_half2, store_half4, store_narrow4

N_SUMS = 29
REFINE_THREADS = 256
_SEGMENTS = 8
_SEGMENT = REFINE_THREADS // _SEGMENTS
_PARTIALS = N_SUMS * REFINE_THREADS
_ROW = REFINE_THREADS + 1
_SHARED_PARTIALS = N_SUMS * _ROW
_SEGMENT_SUMS = N_SUMS * _SEGMENTS
CHOOSE_THREADS = 128
REDUCE_THREADS = 256
WIDE_TILE = 64
MOST_ROWS = 65535
"""Blocks that a launch may have along y, and along z."""
MOST_ITEMS = MOST_ROWS // 64 * 64
"""Work items of a launch, which lie along y, with their padding (`gemm.ALIGNMENT`)."""
_WIDE, _WIDE_ROW = WIDE_TILE, WIDE_TILE + 1
_DEPTH, _SHALLOW = 16, 8
NUMERATOR_SCALE = float(1 << 20)
DENOMINATOR_SCALE = float(1 << 30)

_jit = cuda.jit(fastmath=True, cache=True)
_device = cuda.jit(device=True, fastmath=True, inline=True, cache=True)
_called = cuda.jit(device=True)  # the compiler inlines it; Numba doing so would take longer to compile than all the rest
_ONE, _SIXTH = float32(1.0), float32(1.0 / 6.0)


@_jit
def contract(a, a_batch, a_row, a_depth, a_complex, b, b_batch, b_depth, b_column, b_complex, c, c_batch, c_row, c_column, rows, columns, depth):
    """Batched complex matrix product ``C = A B`` with any strides: the three passes of a cropped, padded Fourier transform.

    Strides are in elements: of complex numbers (re, im interleaved) where `a_complex` (`b_complex`) is 1, of floats where it is 0.
    Blocks of 16 x 16 threads make tiles of 64 x 64, four by four a thread; the batch is the grid's third axis.
    """
    a_re = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    a_im = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    b_re = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    b_im = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    tid = ty * 16 + tx
    row0, column0, batch = cuda.blockIdx.y * _WIDE, cuda.blockIdx.x * _WIDE, cuda.blockIdx.z
    sum_re = cuda.local.array(16, float32)
    sum_im = cuda.local.array(16, float32)
    for j in range(16):
        sum_re[j] = float32(0.0)
        sum_im[j] = float32(0.0)
    for start in range(0, depth, _SHALLOW):
        for j in range(tid, _WIDE * _SHALLOW, 256):
            # A is read along its depth, B along its columns
            d, r = j % _SHALLOW, j // _SHALLOW
            vr, vi = float32(0.0), float32(0.0)
            if row0 + r < rows and start + d < depth:
                at = batch * a_batch + (row0 + r) * a_row + (start + d) * a_depth
                if a_complex:
                    vr, vi = load2(a, 2 * at)
                else:
                    vr = a[at]
            a_re[d, r], a_im[d, r] = vr, vi
            q, d = j % _WIDE, j // _WIDE
            vr, vi = float32(0.0), float32(0.0)
            if column0 + q < columns and start + d < depth:
                at = batch * b_batch + (start + d) * b_depth + (column0 + q) * b_column
                if b_complex:
                    vr, vi = load2(b, 2 * at)
                else:
                    vr = b[at]
            b_re[d, q], b_im[d, q] = vr, vi
        cuda.syncthreads()
        for d in range(_SHALLOW):
            q0r, q1r, q2r, q3r = b_re[d, tx], b_re[d, tx + 16], b_re[d, tx + 32], b_re[d, tx + 48]
            q0i, q1i, q2i, q3i = b_im[d, tx], b_im[d, tx + 16], b_im[d, tx + 32], b_im[d, tx + 48]
            for i in range(4):
                vr, vi = a_re[d, ty + 16 * i], a_im[d, ty + 16 * i]
                sum_re[4 * i] += vr * q0r - vi * q0i
                sum_im[4 * i] += vr * q0i + vi * q0r
                sum_re[4 * i + 1] += vr * q1r - vi * q1i
                sum_im[4 * i + 1] += vr * q1i + vi * q1r
                sum_re[4 * i + 2] += vr * q2r - vi * q2i
                sum_im[4 * i + 2] += vr * q2i + vi * q2r
                sum_re[4 * i + 3] += vr * q3r - vi * q3i
                sum_im[4 * i + 3] += vr * q3i + vi * q3r
        cuda.syncthreads()
    for i in range(4):
        for q in range(4):
            row, column = row0 + ty + 16 * i, column0 + tx + 16 * q
            if row < rows and column < columns:
                at = 2 * (batch * c_batch + row * c_row + column * c_column)
                c[at] = sum_re[4 * i + q]
                c[at + 1] = sum_im[4 * i + q]


@_device
def _weight_at(weights, base, n, qx, qy, qz):
    """Trilinear value of a real, even weight on its grid half-spectrum; 0 outside the grid's inner cube."""
    if qx < 0:
        qx, qy, qz = -qx, -qy, -qz
    fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
    ix, iy, iz = int32(fx), int32(fy), int32(fz)
    half = n // 2
    if ix + 1 > half or iy < -half or iy + 1 >= n - half or iz < -half or iz + 1 >= n - half:
        return float32(0.0)
    dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
    columns = half + 1
    y0 = iy if iy >= 0 else iy + n
    y1 = iy + 1 if iy + 1 >= 0 else iy + 1 + n
    z0 = iz if iz >= 0 else iz + n
    z1 = iz + 1 if iz + 1 >= 0 else iz + 1 + n
    at00, at01 = base + (z0 * n + y0) * columns + ix, base + (z0 * n + y1) * columns + ix
    at10, at11 = base + (z1 * n + y0) * columns + ix, base + (z1 * n + y1) * columns + ix
    a00 = weights[at00] + (weights[at00 + 1] - weights[at00]) * dx
    a01 = weights[at01] + (weights[at01 + 1] - weights[at01]) * dx
    a10 = weights[at10] + (weights[at10 + 1] - weights[at10]) * dx
    a11 = weights[at11] + (weights[at11 + 1] - weights[at11]) * dx
    b0 = a00 + (a01 - a00) * dy
    b1 = a10 + (a11 - a10) * dy
    return b0 + (b1 - b0) * dz


@_device
def _sample(spectrum, base, c, qx, qy, qz):
    """Trilinear value (re, im) of a padded half-spectrum at q (padded samples)."""
    sign = float32(1.0)
    if qx < 0:
        qx, qy, qz, sign = -qx, -qy, -qz, float32(-1.0)
    fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
    ix, iy, iz = int32(fx), int32(fy) + c, int32(fz) + c
    dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
    columns = c + 1
    row, plane = 2 * columns, 2 * columns * (2 * c + 1)
    at = base + iz * plane + iy * row + 2 * ix
    r0, i0 = load2(spectrum, at)
    r1, i1 = load2(spectrum, at + 2)
    re, im = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    r0, i0 = load2(spectrum, at + row)
    r1, i1 = load2(spectrum, at + row + 2)
    ur, ui = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    re, im = re + (ur - re) * dy, im + (ui - im) * dy
    r0, i0 = load2(spectrum, at + plane)
    r1, i1 = load2(spectrum, at + plane + 2)
    vr, vi = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    r0, i0 = load2(spectrum, at + plane + row)
    r1, i1 = load2(spectrum, at + plane + row + 2)
    ur, ui = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    vr, vi = vr + (ur - vr) * dy, vi + (ui - vi) * dy
    return re + (vr - re) * dz, sign * (im + (vi - im) * dz)


@_jit
def turn(
    spectra,
    slot_size,
    slots,
    c,
    weights,
    weight_size,
    weight_of,
    n,
    tables,
    signed,
    table_scale,
    inv_sigma2,
    gains,
    group_of,
    points,
    radius,
    point_weight,
    matrices,
    shifts,
    columns,
    den_weight,
):
    """Particles in the reference's frame (`interpolation.turn`); a thread takes one sample of one particle at one start.

    Parameters
    ----------
    spectra : (slots * slot_size,) float32
        Pool of padded spectra; particle of work item w is in ``slots[w]``.
    weights : (kinds * weight_size,) float32, weight_of : (w,) int32
    tables : (2 groups, TABLE_SIZE) float32
        1 / V of each group for unsigned and signed weights.
    signed : (kinds,) int32, table_scale : (kinds,) float32
    inv_sigma2 : (groups, shells) float32, gains : (groups,) float32
    group_of : (w,) int32
        Noise model of each work item.
    points : (2 p * 3,), radius : (2 p,), point_weight : (2 p,) float32
    matrices : (w, 9) float32
        R0, row by row: samples are at R0 q.
    shifts : (w, 3) float32
        t0 / box.
    columns : (w, 4 p) float32, den_weight : (w, 2 p) float32
    """
    i, w = cuda.grid(1), cuda.blockIdx.y
    if i >= radius.shape[0]:
        return
    re, im, d = float32(0.0), float32(0.0), float32(0.0)
    pw = point_weight[i]
    if pw != 0:
        x, y, z = points[3 * i], points[3 * i + 1], points[3 * i + 2]
        qx = matrices[w, 0] * x + matrices[w, 1] * y + matrices[w, 2] * z
        qy = matrices[w, 3] * x + matrices[w, 4] * y + matrices[w, 5] * z
        qz = matrices[w, 6] * x + matrices[w, 7] * y + matrices[w, 8] * z
        kind = weight_of[w]
        ctf = _weight_at(weights, kind * weight_size, n, qx, qy, qz)
        if ctf != 0:
            place = min(int32(abs(ctf) * table_scale[kind] + float32(0.5)), tables.shape[1] - 1)
            r = radius[i]
            s0 = int32(r)
            group = group_of[w]
            low = inv_sigma2[group, s0]
            wt = (low + (inv_sigma2[group, s0 + 1] - low) * (r - float32(s0))) * tables[2 * group + signed[kind], place] * pw
            ctf *= gains[group]
            vr, vi = _sample(spectra, slots[w] * slot_size, c, float32(2.0) * qx, float32(2.0) * qy, float32(2.0) * qz)
            turns = x * shifts[w, 0] + y * shifts[w, 1] + z * shifts[w, 2]
            turns -= math.floor(turns + float32(0.5))
            angle = float32(2.0 * math.pi) * turns
            cos, sin = math.cos(angle), math.sin(angle)
            u = wt * ctf
            re, im, d = u * (vr * cos - vi * sin), u * (vr * sin + vi * cos), u * ctf
    columns[w, 2 * i] = re
    columns[w, 2 * i + 1] = im
    den_weight[w, i] = d


def rotation_grid(blocks, n_rotations):
    """Blocks of a launch of which `_rotation` tells the rotation: along y, and, for those of a long list, along z."""
    rows = min(n_rotations, MOST_ROWS)
    return blocks, rows, -(-n_rotations // rows)


@_device
def _rotation():
    """This block's rotation in a `rotation_grid`; the last ones may lie past the end."""
    return cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y


@_jit
def fill_templates(spectrum, c, points, matrices, templates, powers):
    """Rotated references: a thread takes one sample of one rotation.

    Parameters
    ----------
    spectrum : flat padded spectrum of the reference.
    points : (2 p * 3,) float32
    matrices : (a, 9) float32
        L, row by row: values are at L^T q.
    templates : (blocks * p * 16 * 4,) float32
        ``[block][pair][rotation][4]``.
    powers : (a, 2 p) float32
    """
    i, a = cuda.grid(1), _rotation()
    samples = powers.shape[1]
    if i >= samples or a >= powers.shape[0]:
        return
    x, y, z = float32(2.0) * points[3 * i], float32(2.0) * points[3 * i + 1], float32(2.0) * points[3 * i + 2]
    qx = matrices[a, 0] * x + matrices[a, 3] * y + matrices[a, 6] * z
    qy = matrices[a, 1] * x + matrices[a, 4] * y + matrices[a, 7] * z
    qz = matrices[a, 2] * x + matrices[a, 5] * y + matrices[a, 8] * z
    re, im = _sample(spectrum, 0, c, qx, qy, qz)
    at = (((a // 16) * (samples // 2) + i // 2) * 16 + a % 16) * 4 + 2 * (i % 2)
    templates[at] = re
    templates[at + 1] = im
    powers[a, i] = re * re + im * im


@_jit
def products(a, b, out):
    """out[i, j] = sum over d of a[i, d] b[j, d], in blocks of 16 x 16 threads and tiles of 64 x 64 (den2: powers against weights).

    Parameters
    ----------
    a : (rows, depth) float32, b : (columns, depth) float32, out : (rows, columns) float32
    """
    tile_a = cuda.shared.array((_DEPTH, _WIDE_ROW), float32)
    tile_b = cuda.shared.array((_DEPTH, _WIDE_ROW), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    tid = ty * 16 + tx
    row0, column0 = cuda.blockIdx.y * _WIDE, cuda.blockIdx.x * _WIDE
    depth = a.shape[1]
    total = cuda.local.array(16, float32)
    for j in range(16):
        total[j] = float32(0.0)
    for start in range(0, depth, _DEPTH):
        for j in range(tid, _WIDE * _DEPTH, 256):
            d, r = j % _DEPTH, j // _DEPTH
            va, vb = float32(0.0), float32(0.0)
            if start + d < depth:
                if row0 + r < a.shape[0]:
                    va = a[row0 + r, start + d]
                if column0 + r < b.shape[0]:
                    vb = b[column0 + r, start + d]
            tile_a[d, r] = va
            tile_b[d, r] = vb
        cuda.syncthreads()
        for d in range(_DEPTH):
            b0, b1, b2, b3 = tile_b[d, tx], tile_b[d, tx + 16], tile_b[d, tx + 32], tile_b[d, tx + 48]
            for i in range(4):
                value = tile_a[d, ty + 16 * i]
                total[4 * i] += value * b0
                total[4 * i + 1] += value * b1
                total[4 * i + 2] += value * b2
                total[4 * i + 3] += value * b3
        cuda.syncthreads()
    for i in range(4):
        for q in range(4):
            row, column = row0 + ty + 16 * i, column0 + tx + 16 * q
            if row < a.shape[0] and column < b.shape[0]:
                out[row, column] = total[4 * i + q]


@_jit
def finish_scores(best, den, power, kind, factor):
    """Scores from sums, in place. kind 0: ``2 num - den2``; 1: ``num / sqrt(den2 power) * factor``. One thread an entry.

    Parameters
    ----------
    best, den : (w, a) float32
    power : (w,) float32
    """
    a, w = cuda.grid(1), cuda.blockIdx.y
    if a < best.shape[1]:
        value = best[w, a]
        if value > float32(-1e37):
            d = max(den[w, a], float32(1e-30))
            if kind == 0:
                best[w, a] = float32(2.0) * value - d
            else:
                best[w, a] = value / math.sqrt(d * power[w]) * factor


@_jit
def take_off(best, loss):
    """Scores less a loss (w, a) float32, in place; one that is infinite leaves nothing to choose. One thread an entry."""
    a, w = cuda.grid(1), cuda.blockIdx.y
    if a < best.shape[1] and best[w, a] > float32(-1e37):
        if loss[w, a] < float32(1e37):
            best[w, a] -= loss[w, a]
        else:
            best[w, a] = float32(-1e38)


@_jit
def choose(scores, first, count, starts, rotations, min_trace, keep, kept, chosen, chosen_score):
    """Best candidates of each particle that are apart; a block a particle (`interpolation.choose`). Ties go to the lower row.

    Parameters
    ----------
    scores : (w, a) float32
        Work items of a particle are ``first[p] .. first[p] + count[p] - 1``.
    starts : (w, 9) float32, rotations : (a, 9) float32
        R0 and L, row by row.
    kept : (p, keep, 9) float32
        Scratch: the rotations chosen so far.
    chosen : (p, keep) int32
        ``(w - first) * a + rotation``; -1 where nothing is left.
    chosen_score : (p, keep) float32
    """
    top = cuda.shared.array(CHOOSE_THREADS, float32)
    row = cuda.shared.array(CHOOSE_THREADS, int32)
    p, tid = cuda.blockIdx.x, cuda.threadIdx.x
    n_rotations = scores.shape[1]
    total = count[p] * n_rotations
    for place in range(keep):
        best, where = float32(-1e37), int32(-1)
        for j in range(tid, total, CHOOSE_THREADS):
            w, a = first[p] + j // n_rotations, j % n_rotations
            value = scores[w, a]
            if value > best:
                apart = True
                for q in range(place):
                    trace = float32(0.0)
                    for r in range(3):
                        for c in range(3):
                            value_rc = float32(0.0)
                            for k in range(3):
                                value_rc += starts[w, 3 * r + k] * rotations[a, 3 * k + c]
                            trace += value_rc * kept[p, q, 3 * r + c]
                    if trace > min_trace or chosen[p, q] == j:
                        apart = False
                if apart:
                    best, where = value, int32(j)
        top[tid] = best
        row[tid] = where
        cuda.syncthreads()
        step = CHOOSE_THREADS // 2
        while step > 0:
            if tid < step:
                other = row[tid + step]
                if other >= 0 and (row[tid] < 0 or top[tid + step] > top[tid] or (top[tid + step] == top[tid] and other < row[tid])):
                    top[tid] = top[tid + step]
                    row[tid] = other
            cuda.syncthreads()
            step //= 2
        winner = row[0]  # before the threads meet again: the first of them to go on writes its own there
        if tid == 0:
            chosen[p, place] = winner
            chosen_score[p, place] = top[0]
        if tid < 9 and winner >= 0:
            w, a = first[p] + winner // n_rotations, winner % n_rotations
            r, c = tid // 3, tid % 3
            value_rc = float32(0.0)
            for k in range(3):
                value_rc += starts[w, 3 * r + k] * rotations[a, 3 * k + c]
            kept[p, place, tid] = value_rc
        cuda.syncthreads()
        if winner < 0:
            for rest in range(place + 1 + tid, keep, CHOOSE_THREADS):
                chosen[p, rest] = -1
                chosen_score[p, rest] = float32(-1e37)
            return


@_jit
def band_power(
    cubes, cube_size, slots, cube_index, weights, weight_size, weight_of, weight_index, shell, tables, signed, table_scale, inv_sigma2, group_of, out
):
    """``sum w |X|^2`` over the band where C is not 0; a block a particle, threads in a fixed order."""
    shared = cuda.shared.array(REDUCE_THREADS, float64)
    p, tid = cuda.blockIdx.x, cuda.threadIdx.x
    kind, group = weight_of[p], group_of[p]
    total = float64(0.0)
    for i in range(tid, cube_index.shape[0], REDUCE_THREADS):
        ctf = weights[kind * weight_size + weight_index[i]]
        if ctf != 0:
            place = min(int32(abs(ctf) * table_scale[kind] + float32(0.5)), tables.shape[1] - 1)
            at = slots[p] * cube_size + 2 * cube_index[i]
            total += inv_sigma2[group, shell[i]] * tables[2 * group + signed[kind], place] * (cubes[at] * cubes[at] + cubes[at + 1] * cubes[at + 1])
    shared[tid] = total
    cuda.syncthreads()
    step = REDUCE_THREADS // 2
    while step > 0:
        if tid < step:
            shared[tid] += shared[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid == 0:
        out[p] = shared[0]


@_called
def _accumulate(
    reference,
    c,
    n,
    cubes,
    cube_base,
    cube_index,
    k,
    weights,
    weight_base,
    weight_index,
    shell,
    table,
    table_scale,
    inv_sigma2,
    gain,
    curvature,
    pose,
    acc,
    tid,
):
    """One thread's share of the normal equations (`interpolation.normal_equations`) at a pose of twelve float32."""
    for j in range(N_SUMS):
        acc[j] = float32(0.0)
    m00, m01, m02 = float32(2.0) * pose[0], float32(2.0) * pose[1], float32(2.0) * pose[2]
    m10, m11, m12 = float32(2.0) * pose[3], float32(2.0) * pose[4], float32(2.0) * pose[5]
    m20, m21, m22 = float32(2.0) * pose[6], float32(2.0) * pose[7], float32(2.0) * pose[8]
    columns = c + 1
    row, plane = 2 * columns, 2 * columns * (2 * c + 1)
    for i in range(tid, cube_index.shape[0], REFINE_THREADS):
        ctf = weights[weight_base + weight_index[i]]
        if ctf == 0:
            continue
        place = min(int32(abs(ctf) * table_scale + float32(0.5)), table.shape[0] - 1)
        w = inv_sigma2[shell[i]] * table[place]
        ctf *= gain
        kx, ky, kz = float32(k[3 * i]), float32(k[3 * i + 1]), float32(k[3 * i + 2])
        qx = m00 * kx + m10 * ky + m20 * kz
        qy = m01 * kx + m11 * ky + m21 * kz
        qz = m02 * kx + m12 * ky + m22 * kz
        ux, uy, uz = float32(0.5) * qx, float32(0.5) * qy, float32(0.5) * qz
        turns = kx * pose[9] + ky * pose[10] + kz * pose[11]
        turns -= math.floor(turns + float32(0.5))
        angle = float32(2.0 * math.pi) * turns
        cos, sin = math.cos(angle), math.sin(angle)
        xr, xi = load2(cubes, cube_base + 2 * cube_index[i])
        dr, di = xr * cos - xi * sin, xr * sin + xi * cos
        sign = float32(1.0)
        if qx < 0:
            qx, qy, qz, sign = -qx, -qy, -qz, float32(-1.0)
        fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
        dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
        at = (int32(fz) + c) * plane + (int32(fy) + c) * row + 2 * int32(fx)
        a0r, a0i = load2(reference, at)
        a1r, a1i = load2(reference, at + 2)
        b0r, b0i = load2(reference, at + row)
        b1r, b1i = load2(reference, at + row + 2)
        c0r, c0i = load2(reference, at + plane)
        c1r, c1i = load2(reference, at + plane + 2)
        d0r, d0i = load2(reference, at + plane + row)
        d1r, d1i = load2(reference, at + plane + row + 2)
        # along x at the four corners of y and z: value and slope
        ar, ai, sar, sai = a0r + (a1r - a0r) * dx, a0i + (a1i - a0i) * dx, a1r - a0r, a1i - a0i
        br, bi, sbr, sbi = b0r + (b1r - b0r) * dx, b0i + (b1i - b0i) * dx, b1r - b0r, b1i - b0i
        cr, ci, scr, sci = c0r + (c1r - c0r) * dx, c0i + (c1i - c0i) * dx, c1r - c0r, c1i - c0i
        er, ei, ser, sei = d0r + (d1r - d0r) * dx, d0i + (d1i - d0i) * dx, d1r - d0r, d1i - d0i
        lr, li, hr, hi = ar + (br - ar) * dy, ai + (bi - ai) * dy, cr + (er - cr) * dy, ci + (ei - ci) * dy
        vr, vi = lr + (hr - lr) * dz, li + (hi - li) * dz
        gzr, gzi = hr - lr, hi - li
        gyr, gyi = (br - ar) + ((er - cr) - (br - ar)) * dz, (bi - ai) + ((ei - ci) - (bi - ai)) * dz
        slr, sli, shr, shi = sar + (sbr - sar) * dy, sai + (sbi - sai) * dy, scr + (ser - scr) * dy, sci + (sei - sci) * dy
        gxr, gxi = slr + (shr - slr) * dz, sli + (shi - sli) * dz
        # what linear interpolation loses between nodes (`interpolation.interpolation_curvature`)
        ax, ay, az = curvature[0], curvature[1], curvature[2]
        mx, my, mz = _ONE + ax * (dx * (_ONE - dx) - _SIXTH), _ONE + ay * (dy * (_ONE - dy) - _SIXTH), _ONE + az * (dz * (_ONE - dz) - _SIXTH)
        sx, sy, sz = ax * (_ONE - dx - dx) * my * mz, ay * (_ONE - dy - dy) * mx * mz, az * (_ONE - dz - dz) * mx * my
        mend = mx * my * mz
        gxr, gxi, gyr, gyi = gxr * mend + vr * sx, gxi * mend + vi * sx, gyr * mend + vr * sy, gyi * mend + vi * sy
        gzr, gzi, vr, vi = gzr * mend + vr * sz, gzi * mend + vi * sz, vr * mend, vi * mend
        # F(-q) = conj F(q): the gradient's real part changes sign
        gxr, gyr, gzr, vi = sign * gxr, sign * gyr, sign * gzr, sign * vi
        # per unit frequency: the padded grid has two samples for each
        gxr, gxi, gyr, gyi, gzr, gzi = 2 * gxr, 2 * gxi, 2 * gyr, 2 * gyi, 2 * gzr, 2 * gzi
        wc = w * ctf
        wcc = wc * ctf
        e0r, e0i = gyr * uz - gzr * uy, gyi * uz - gzi * uy
        e1r, e1i = gzr * ux - gxr * uz, gzi * ux - gxi * uz
        e2r, e2i = gxr * uy - gyr * ux, gxi * uy - gyi * ux
        rr, ri = wc * (dr - ctf * vr), wc * (di - ctf * vi)
        power = wcc * (vr * vr + vi * vi)
        acc[28] += power
        acc[27] += wc * (vr * dr + vi * di)
        acc[21] += e0r * rr + e0i * ri
        acc[22] += e1r * rr + e1i * ri
        acc[23] += e2r * rr + e2i * ri
        turned = vi * rr - vr * ri
        acc[24] += ux * turned
        acc[25] += uy * turned
        acc[26] += uz * turned
        acc[6] += power * ux * ux
        acc[7] += power * ux * uy
        acc[8] += power * ux * uz
        acc[9] += power * uy * uy
        acc[10] += power * uy * uz
        acc[11] += power * uz * uz
        acc[0] += wcc * (e0r * e0r + e0i * e0i)
        acc[1] += wcc * (e0r * e1r + e0i * e1i)
        acc[2] += wcc * (e0r * e2r + e0i * e2i)
        acc[3] += wcc * (e1r * e1r + e1i * e1i)
        acc[4] += wcc * (e1r * e2r + e1i * e2i)
        acc[5] += wcc * (e2r * e2r + e2i * e2i)
        f0, f1, f2 = wcc * (e0r * vi - e0i * vr), wcc * (e1r * vi - e1i * vr), wcc * (e2r * vi - e2i * vr)
        acc[12] += f0 * ux
        acc[13] += f0 * uy
        acc[14] += f0 * uz
        acc[15] += f1 * ux
        acc[16] += f1 * uy
        acc[17] += f1 * uz
        acc[18] += f2 * ux
        acc[19] += f2 * uy
        acc[20] += f2 * uz


@_called
def _solve6(h, g, x):
    """x = H^-1 g by Gaussian elimination with pivoting on a 6 x 7 system in float64; False if singular."""
    for i in range(6):
        pivot, largest = i, abs(h[i * 6 + i])
        for r in range(i + 1, 6):
            if abs(h[r * 6 + i]) > largest:
                pivot, largest = r, abs(h[r * 6 + i])
        if not largest > 0.0:
            return False
        if pivot != i:
            for j in range(6):
                h[i * 6 + j], h[pivot * 6 + j] = h[pivot * 6 + j], h[i * 6 + j]
            g[i], g[pivot] = g[pivot], g[i]
        for r in range(i + 1, 6):
            f = h[r * 6 + i] / h[i * 6 + i]
            for j in range(i, 6):
                h[r * 6 + j] -= f * h[i * 6 + j]
            g[r] -= f * g[i]
    for i in range(5, -1, -1):
        total = g[i]
        for j in range(i + 1, 6):
            total -= h[i * 6 + j] * x[j]
        x[i] = total / h[i * 6 + i]
    return True


@_called
def _unpack(sums, damping, h, g):
    """Hessian (damped on its diagonal) and gradient from the sums."""
    k = 0
    for i in range(3):
        for j in range(i, 3):
            h[i * 6 + j] = sums[k]
            h[j * 6 + i] = sums[k]
            h[(i + 3) * 6 + j + 3] = sums[6 + k]
            h[(j + 3) * 6 + i + 3] = sums[6 + k]
            k += 1
    for i in range(3):
        for j in range(3):
            h[i * 6 + 3 + j] = sums[12 + 3 * i + j]
            h[(3 + j) * 6 + i] = sums[12 + 3 * i + j]
    for i in range(6):
        h[i * 6 + i] *= 1.0 + damping
        g[i] = sums[21 + i]


@_called
def _limited(sums, damping, away, limit, h, g, x):
    """The Newton step whose shift stays in a ball (`cpu.limited_step`); False if the system is singular."""
    _unpack(sums, damping, h, g)
    trace = h[21] + h[28] + h[35]
    if not _solve6(h, g, x):
        return False
    distance = math.sqrt((away[0] + x[3]) ** 2 + (away[1] + x[4]) ** 2 + (away[2] + x[5]) ** 2)
    if distance <= limit:
        return True
    low, high = 0.0, trace
    for _ in range(60):
        middle = high if low == 0.0 else 0.5 * (low + high)
        _unpack(sums, damping, h, g)
        for i in range(3):
            h[(3 + i) * 7] += middle
            g[3 + i] -= middle * away[i]
        if not _solve6(h, g, x):
            return False
        distance = math.sqrt((away[0] + x[3]) ** 2 + (away[1] + x[4]) ** 2 + (away[2] + x[5]) ** 2)
        if abs(distance - limit) <= 1e-6 * limit:
            break
        if distance > limit:
            low = middle
            if not middle < high:
                high *= 4.0
        else:
            low, high = max(low, 1e-9 * middle), middle
    return True


@_called
def _exp(v0, v1, v2, out):
    """Rotation matrix (9,) of a rotation vector, by Rodrigues' formula."""
    angle = math.sqrt(v0 * v0 + v1 * v1 + v2 * v2)
    if angle < 1e-12:
        a, b = 1.0, 0.5
    else:
        a, b = math.sin(angle) / angle, (1.0 - math.cos(angle)) / (angle * angle)
    out[0], out[1], out[2] = 1.0 - b * (v1 * v1 + v2 * v2), -a * v2 + b * v0 * v1, a * v1 + b * v0 * v2
    out[3], out[4], out[5] = a * v2 + b * v0 * v1, 1.0 - b * (v0 * v0 + v2 * v2), -a * v0 + b * v1 * v2
    out[6], out[7], out[8] = -a * v1 + b * v0 * v2, a * v0 + b * v1 * v2, 1.0 - b * (v0 * v0 + v1 * v1)


@cuda.jit(cache=True)
def refine(
    reference,
    c,
    n,
    cubes,
    cube_size,
    slots,
    cube_index,
    k,
    weights,
    weight_size,
    weight_of,
    weight_index,
    shell,
    tables,
    signed,
    table_scale,
    inv_sigma2,
    gains,
    group_of,
    curvature,
    rotations,
    shifts,
    anchors,
    max_shift,
    max_steps,
    max_angle,
    stop_angle,
    stop_shift,
    sums_out,
    steps_out,
):
    """Gauss-Newton of one candidate a block, all steps in one launch; stops on step size, never on the change of cost.

    Parameters
    ----------
    rotations : (w, 9) float64, shifts : (w, 3) float64
        Poses, changed; shifts in voxels.
    anchors : (w, 3) float64, max_shift : float64
        Voxels.
    max_steps : int
        0 only evaluates the sums at the pose.
    max_angle, stop_angle : float64
        Radians; stop_shift in voxels.
    sums_out : (w, 29) float64, steps_out : (w,) int32
    """
    partial = cuda.shared.array(_SHARED_PARTIALS, float32)
    segment = cuda.shared.array(_SEGMENT_SUMS, float64)
    sums = cuda.shared.array(N_SUMS, float64)
    held = cuda.shared.array(N_SUMS, float64)
    pose = cuda.shared.array(12, float32)
    now = cuda.shared.array(12, float64)
    trial = cuda.shared.array(12, float64)
    flag = cuda.shared.array(2, int32)
    acc = cuda.local.array(N_SUMS, float32)
    h = cuda.local.array(36, float64)
    g = cuda.local.array(6, float64)
    x = cuda.local.array(6, float64)
    turn_by = cuda.local.array(9, float64)
    away = cuda.local.array(3, float64)
    w, tid = cuda.blockIdx.x, cuda.threadIdx.x
    kind, group = weight_of[w], group_of[w]
    if tid < 9:
        now[tid] = rotations[w, tid]
        trial[tid] = now[tid]
    if tid < 3:
        now[9 + tid] = shifts[w, tid]
        trial[9 + tid] = now[9 + tid]
    if tid < 2:
        flag[tid] = 0
    damping, likelihood, taken = 0.0, 0.0, 0
    unit = n / (2.0 * math.pi)
    for step in range(max_steps + 1):
        cuda.syncthreads()
        if tid < 9:
            pose[tid] = float32(trial[tid])
        if tid < 3:
            turns = trial[9 + tid] / n
            pose[9 + tid] = float32(turns)
        cuda.syncthreads()
        _accumulate(
            reference,
            c,
            n,
            cubes,
            slots[w] * cube_size,
            cube_index,
            k,
            weights,
            kind * weight_size,
            weight_index,
            shell,
            tables[2 * group + signed[kind]],
            table_scale[kind],
            inv_sigma2[group],
            gains[group],
            curvature,
            pose,
            acc,
            tid,
        )
        for j in range(N_SUMS):
            partial[j * _ROW + tid] = acc[j]
        cuda.syncthreads()
        if tid < N_SUMS * _SEGMENTS:
            j, s = tid // _SEGMENTS, tid % _SEGMENTS
            total = 0.0
            for q in range(_SEGMENT):
                total += partial[j * _ROW + s * _SEGMENT + q]
            segment[tid] = total
        cuda.syncthreads()
        if tid < N_SUMS:
            total = 0.0
            for s in range(_SEGMENTS):
                total += segment[tid * _SEGMENTS + s]
            sums[tid] = total
        cuda.syncthreads()
        if tid == 0:
            value = 2.0 * sums[27] - sums[28]
            if step == 0 or value >= likelihood:
                for j in range(12):
                    now[j] = trial[j]
                for j in range(N_SUMS):
                    held[j] = sums[j]
                likelihood, damping = value, 0.0
            else:
                damping = max(4.0 * damping, 0.5)
            if flag[1] == 1 or step == max_steps:
                flag[0] = 1
            else:
                # how far from the anchor, in the reference's frame and the unknowns' unit
                for r in range(3):
                    total = 0.0
                    for m in range(3):
                        total += now[3 * m + r] * (now[9 + m] - anchors[w, m]) / unit
                    away[r] = total
                if _limited(held, damping, away, max_shift / unit, h, g, x):
                    angle = math.sqrt(x[0] * x[0] + x[1] * x[1] + x[2] * x[2])
                    if angle > max_angle:
                        for j in range(6):
                            x[j] *= max_angle / angle
                    _exp(x[0], x[1], x[2], turn_by)
                    for r in range(3):
                        for q in range(3):
                            total = 0.0
                            for m in range(3):
                                total += now[3 * r + m] * turn_by[3 * m + q]
                            trial[3 * r + q] = total
                    distance2, moved = 0.0, 0.0
                    for r in range(3):
                        total = now[9 + r]
                        for m in range(3):
                            total += now[3 * r + m] * x[3 + m] * unit
                        trial[9 + r] = total
                        distance2 += (total - anchors[w, r]) * (total - anchors[w, r])
                    if distance2 > max_shift * max_shift:
                        back = max_shift / math.sqrt(distance2)
                        for r in range(3):
                            trial[9 + r] = anchors[w, r] + (trial[9 + r] - anchors[w, r]) * back
                    for r in range(3):
                        moved = max(moved, abs(trial[9 + r] - now[9 + r]))
                    taken += 1
                    if angle < stop_angle and moved < stop_shift:
                        flag[1] = 1
                else:
                    flag[0] = 1
        cuda.syncthreads()
        if flag[0] == 1:
            break
    if tid < 9:
        rotations[w, tid] = now[tid]
    if tid < 3:
        shifts[w, tid] = now[9 + tid]
    if tid < N_SUMS:
        sums_out[w, tid] = held[tid]
    if tid == 0:
        steps_out[w] = taken


@_jit
def residual_power(
    reference,
    c,
    n,
    reach2,
    cubes,
    cube_size,
    slots,
    cube_index,
    k,
    weights,
    weight_size,
    weight_of,
    weight_index,
    shell_start,
    signed,
    relative_scale,
    gains,
    group_of,
    edges,
    curvature,
    rotations,
    shifts,
    power,
    count,
    weight_sum,
):
    """Residual power of one particle and shell a block, by bins of weight; samples sorted by shell.

    Parameters
    ----------
    shell_start : (shells + 1,) int32
        First sample of each shell.
    edges : (bins + 1,) float32
    rotations : (p, 9) float32, shifts : (p, 3) float32
        R, and s / box.
    power, count, weight_sum : (p, bins, shells) float32
    """
    shared = cuda.shared.array((3, 9, 64), float32)
    s, p, tid = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    kind, gain = weight_of[p], gains[group_of[p]]
    for b in range(9):
        for q in range(3):
            shared[q, b, tid] = float32(0.0)
    for i in range(shell_start[s] + tid, shell_start[s + 1], 64):
        kx, ky, kz = float32(k[3 * i]), float32(k[3 * i + 1]), float32(k[3 * i + 2])
        ctf = weights[kind * weight_size + weight_index[i]]
        mr, mi = float32(0.0), float32(0.0)
        if kx * kx + ky * ky + kz * kz <= reach2:
            qx = rotations[p, 0] * kx + rotations[p, 3] * ky + rotations[p, 6] * kz
            qy = rotations[p, 1] * kx + rotations[p, 4] * ky + rotations[p, 7] * kz
            qz = rotations[p, 2] * kx + rotations[p, 5] * ky + rotations[p, 8] * kz
            qx, qy, qz = float32(2.0) * qx, float32(2.0) * qy, float32(2.0) * qz
            mr, mi = _sample(reference, 0, c, qx, qy, qz)
            dx, dy, dz = qx - math.floor(qx), qy - math.floor(qy), qz - math.floor(qz)
            mend = (
                (_ONE + curvature[0] * (dx * (_ONE - dx) - _SIXTH))
                * (_ONE + curvature[1] * (dy * (_ONE - dy) - _SIXTH))
                * (_ONE + curvature[2] * (dz * (_ONE - dz) - _SIXTH))
            )
            mr, mi = mr * mend * gain, mi * mend * gain
        turns = kx * shifts[p, 0] + ky * shifts[p, 1] + kz * shifts[p, 2]
        turns -= math.floor(turns + float32(0.5))
        angle = float32(2.0 * math.pi) * turns
        cos, sin = math.cos(angle), math.sin(angle)
        xr, xi = load2(cubes, slots[p] * cube_size + 2 * cube_index[i])
        rr, ri = xr * cos - xi * sin - ctf * mr, xr * sin + xi * cos - ctf * mi
        a = abs(ctf) * relative_scale[kind]
        if signed[kind]:
            a = a * a
        b = 0
        while b < 8 and a >= edges[b + 1]:
            b += 1
        shared[0, b, tid] += rr * rr + ri * ri
        shared[1, b, tid] += float32(1.0)
        shared[2, b, tid] += a
    cuda.syncthreads()
    if tid < 27:
        q, b = tid // 9, tid % 9
        total = float32(0.0)
        for j in range(64):
            total += shared[q, b, j]
        if q == 0:
            power[p, b, s] = total
        elif q == 1:
            count[p, b, s] = total
        else:
            weight_sum[p, b, s] = total


@_jit
def insert(
    sums,
    c,
    n,
    cubes,
    cube_size,
    slots,
    cube_index,
    k,
    weights,
    weight_size,
    weight_of,
    weight_index,
    shell,
    tables,
    signed,
    table_scale,
    relative,
    gains,
    group_of,
    rotations,
    shifts,
    shares,
):
    """Adds particles to an average; a thread a sample. Sums are integers, so that their order does not matter.

    Parameters
    ----------
    sums : (3, voxels) int64
        re, im in units of 1 / NUMERATOR_SCALE, weight in units of 1 / DENOMINATOR_SCALE; ``c + 2`` columns.
    relative : (groups, shells) float32
        How much a group's samples count (`noise.relative_inverse_sigma2`).
    rotations : (p, 9) float32, shifts : (p, 3) float32
        R, and s / box.
    shares : (p,) float32
        How much of each particle is added; 1 changes no bit.
    """
    i, p = cuda.grid(1), cuda.blockIdx.y
    if i >= cube_index.shape[0]:
        return
    kind = weight_of[p]
    ctf = weights[kind * weight_size + weight_index[i]]
    if ctf == 0:
        return
    place = min(int32(abs(ctf) * table_scale[kind] + float32(0.5)), tables.shape[1] - 1)
    group = group_of[p]
    ctf *= gains[group]
    w = tables[2 * group + signed[kind], place] * relative[group, shell[i]] * ctf * shares[p]
    kx, ky, kz = float32(k[3 * i]), float32(k[3 * i + 1]), float32(k[3 * i + 2])
    turns = kx * shifts[p, 0] + ky * shifts[p, 1] + kz * shifts[p, 2]
    turns -= math.floor(turns + float32(0.5))
    angle = float32(2.0 * math.pi) * turns
    cos, sin = math.cos(angle), math.sin(angle)
    xr, xi = load2(cubes, slots[p] * cube_size + 2 * cube_index[i])
    re, im, d = w * (xr * cos - xi * sin), w * (xr * sin + xi * cos), w * ctf
    qx = float32(2.0) * (rotations[p, 0] * kx + rotations[p, 3] * ky + rotations[p, 6] * kz)
    qy = float32(2.0) * (rotations[p, 1] * kx + rotations[p, 4] * ky + rotations[p, 7] * kz)
    qz = float32(2.0) * (rotations[p, 2] * kx + rotations[p, 5] * ky + rotations[p, 8] * kz)
    if qx < 0:
        qx, qy, qz, im = -qx, -qy, -qz, -im
    fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
    dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
    columns = c + 2
    rows = 2 * c + 1
    base = ((int32(fz) + c) * rows + int32(fy) + c) * columns + int32(fx)
    for corner in range(8):
        wz = dz if corner & 4 else float32(1.0) - dz
        wy = dy if corner & 2 else float32(1.0) - dy
        wx = dx if corner & 1 else float32(1.0) - dx
        f = float64(wz * wy * wx)
        at = base + (rows * columns if corner & 4 else 0) + (columns if corner & 2 else 0) + (corner & 1)
        cuda.atomic.add(sums, (0, at), np.int64(math.floor(f * re * NUMERATOR_SCALE + 0.5)))
        cuda.atomic.add(sums, (1, at), np.int64(math.floor(f * im * NUMERATOR_SCALE + 0.5)))
        cuda.atomic.add(sums, (2, at), np.int64(math.floor(f * d * DENOMINATOR_SCALE + 0.5)))


@_jit
def clear_sums(sums):
    """Zeroes the sums of `insert`; a thread a voxel."""
    i = cuda.grid(1)
    if i < sums.shape[1]:
        sums[0, i] = 0
        sums[1, i] = 0
        sums[2, i] = 0


@_jit
def float_sums(sums, numerator, denominator):
    """The sums of `insert` as numbers: numerator (re, im interleaved) and denominator, float32; a thread a voxel."""
    i = cuda.grid(1)
    if i < sums.shape[1]:
        numerator[2 * i] = float32(float64(sums[0, i]) * (1.0 / NUMERATOR_SCALE))
        numerator[2 * i + 1] = float32(float64(sums[1, i]) * (1.0 / NUMERATOR_SCALE))
        denominator[i] = float32(float64(sums[2, i]) * (1.0 / DENOMINATOR_SCALE))


@_jit
def column_scales(columns, root, size, scale, out):
    """`scale` / root mean square of each work item's column after division by `root`; a block an item, threads in a fixed order.

    Parameters
    ----------
    columns : (w, size) float32
        ``[pair][re +z, im +z, re -z, im -z]``.
    root : (size // 2,) float32
        Square root of 1 / sigma2 at each sample.
    scale : float32
    out : (w,) float32
    """
    shared = cuda.shared.array(REDUCE_THREADS, float32)
    w, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0.0)
    for i in range(tid, size, REDUCE_THREADS):
        value = columns[w, i] / root[i // 2]
        total += value * value
    shared[tid] = total
    cuda.syncthreads()
    step = REDUCE_THREADS // 2
    while step > 0:
        if tid < step:
            shared[tid] += shared[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid == 0:
        out[w] = scale / math.sqrt(shared[0] / float32(size) + float32(1e-30))


@_device
def _phases(x, y, z, turns, t, sign):
    """cos and sin of ``sign 2 pi (x, y, z).turns[t]`` and of the same at -z."""
    flat = x * turns[t, 0] + y * turns[t, 1]
    along = z * turns[t, 2]
    p, q = flat + along, flat - along
    p -= math.floor(p + float32(0.5))
    q -= math.floor(q + float32(0.5))
    p, q = sign * float32(2.0 * math.pi) * p, sign * float32(2.0 * math.pi) * q
    return math.cos(p), math.sin(p), math.cos(q), math.sin(q)


@_jit
def narrow_columns(columns, root, scales, lattice, turns, first, n_shifts, wide, depth, out):
    """Particles' columns for the matrix product, shifted the other way than a reference would be: rows ``(shift - first) * wide + item``.

    A thread takes a pair of samples of one item; those past the last sample and past the last item write zeros.

    Parameters
    ----------
    columns : (w, 4 p) float32
        ``[pair][re +z, im +z, re -z, im -z]``.
    root : (2 p,) float32
        Square root of 1 / sigma2 at every sample.
    scales : (w,) float32
        What each item is multiplied by, after division by `root`.
    lattice : (2 p * 3,) int32
        n = (x, y, z) of every sample.
    turns : (shifts, 3) float32
        ``step m / box`` of every trial shift: a sample's phase is ``2 pi n.turns``.
    first, n_shifts : int
        Shifts of this tile.
    wide, depth : int
        Items and samples with padding, multiples of 4.
    out : (rows * depth,) float16, or uint8 for FP8
    """
    i, w = cuda.grid(1), cuda.blockIdx.y
    if 4 * i >= depth:
        return
    r0, i0, r1, i1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    x, y, z = float32(0.0), float32(0.0), float32(0.0)
    if w < columns.shape[0] and i < root.shape[0] // 2:
        u, v = scales[w] / root[2 * i], scales[w] / root[2 * i + 1]
        r0, i0, r1, i1 = u * columns[w, 4 * i], u * columns[w, 4 * i + 1], v * columns[w, 4 * i + 2], v * columns[w, 4 * i + 3]
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
    for t in range(n_shifts):
        cp, sp, cq, sq = _phases(x, y, z, turns, first + t, float32(1.0))
        store_narrow4(out, (t * wide + w) * depth + 4 * i, r0 * cp - i0 * sp, r0 * sp + i0 * cp, r1 * cq - i1 * sq, r1 * sq + i1 * cq)


@_jit
def narrow_templates(templates, n_pairs, lattice, root, turns, first, n_shifts, n_rotations, scale, depth, out):
    """Rotated and shifted references for the matrix product: rows ``(shift - first) * n_rotations + rotation``.

    A thread takes a pair of samples of one rotation; those past the last sample write zeros.

    Parameters
    ----------
    templates : as `fill_templates` leaves them.
    lattice, root, turns, first, n_shifts : as in `narrow_columns`
        A reference's phase is ``-2 pi n.turns``.
    scale : float32
    depth : int
        Length of a row, a multiple of 4.
    out : (rows * depth,) float16, or uint8 for FP8
    """
    i, a = cuda.grid(1), _rotation()
    if 4 * i >= depth or a >= n_rotations:
        return
    r0, i0, r1, i1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    x, y, z = float32(0.0), float32(0.0), float32(0.0)
    if i < n_pairs:
        r0, i0, r1, i1 = load4(templates, (((a // 16) * n_pairs + i) * 16 + a % 16) * 4)
        u, v = scale * root[2 * i], scale * root[2 * i + 1]
        r0, i0, r1, i1 = u * r0, u * i0, v * r1, v * i1
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
    for t in range(n_shifts):
        cp, sp, cq, sq = _phases(x, y, z, turns, first + t, float32(-1.0))
        store_narrow4(out, (t * n_rotations + a) * depth + 4 * i, r0 * cp - i0 * sp, r0 * sp + i0 * cp, r1 * cq - i1 * sq, r1 * sq + i1 * cq)


@_jit
def best_of_tile(
    products, by_shift, by_rotation, first, n_shifts, n_rotations, shift_rows, scales, factor, weighted, multiplier, bias, best, best_shift
):
    """Running best over the shifts of a tile; a thread a work item and rotation, items side by side.

    Parameters
    ----------
    products : flat float32
        Of shift t, rotation a and item w at ``(t - first) * by_shift + a * by_rotation + w``.
    first, n_shifts : int
        Shifts of the tile; with `first` 0 the best starts anew.
    shift_rows : (shifts,) int32
        Row of the shift cube of each trial shift.
    scales : (w,) float32, factor : float32
        What the columns and the templates were multiplied by.
    weighted, multiplier, bias : as in the search kernels.
    best : (w, a) float32, best_shift : (w, a) int32
    """
    w, a = cuda.grid(1), _rotation()
    if w >= best.shape[0] or a >= best.shape[1]:
        return
    top, where = float32(-1e38), int32(-1)
    if first > 0:
        top, where = best[w, a], best_shift[w, a]
    back = float32(1.0) / (scales[w] * factor)
    at = a * by_rotation + w
    for t in range(n_shifts):
        value = products[at + t * by_shift] * back
        row = shift_rows[first + t]
        if weighted:
            value = value * multiplier[w, row] + bias[w, row]
        if value > top:
            top, where = value, row
    best[w, a] = top
    best_shift[w, a] = where


@_jit
def score_chosen(
    templates,
    columns,
    den_weight,
    lattice,
    turns,
    first,
    n_rotations,
    best_shift,
    weighted,
    multiplier,
    bias,
    power,
    kind,
    factor,
    loss,
    lossy,
    chosen,
    score,
):
    """Scores of chosen candidates in single precision, as `finish_scores` makes them; a block a candidate, threads in a fixed order.

    Parameters
    ----------
    templates : as `fill_templates` leaves them.
    columns : (w, 4 p) float32, den_weight : (w, 2 p) float32
        As from `turn`.
    lattice : (2 p * 3,) int32
    turns : (cube rows, 3) float32
        ``step m / box`` of every row of the shift cube.
    first : (p,) int32
        First work item of each particle.
    best_shift : (w, a) int32
        Rows of the shift cube.
    weighted, multiplier, bias : as in the search kernels.
    power : (w,) float32, kind, factor : as in `finish_scores`.
    loss : (w, a) float32, lossy : int
        Taken off where `lossy`.
    chosen : (p, keep) int32
        As from `choose`.
    score : (p, keep) float32
        Written where something was chosen.
    """
    shared = cuda.shared.array(REDUCE_THREADS, float32)
    shared_den = cuda.shared.array(REDUCE_THREADS, float32)
    p, place, tid = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    row = chosen[p, place]
    if row < 0:
        return
    w, a = first[p] + row // n_rotations, row % n_rotations
    shift = best_shift[w, a]
    n_pairs = columns.shape[1] // 4
    total, den = float32(0.0), float32(0.0)
    for i in range(tid, n_pairs, REDUCE_THREADS):
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
        cp, sp, cq, sq = _phases(x, y, z, turns, shift, float32(-1.0))
        r0, i0, r1, i1 = load4(templates, (((a // 16) * n_pairs + i) * 16 + a % 16) * 4)
        total += (r0 * cp - i0 * sp) * columns[w, 4 * i] + (r0 * sp + i0 * cp) * columns[w, 4 * i + 1]
        total += (r1 * cq - i1 * sq) * columns[w, 4 * i + 2] + (r1 * sq + i1 * cq) * columns[w, 4 * i + 3]
        den += (r0 * r0 + i0 * i0) * den_weight[w, 2 * i] + (r1 * r1 + i1 * i1) * den_weight[w, 2 * i + 1]
    shared[tid], shared_den[tid] = total, den
    cuda.syncthreads()
    step = REDUCE_THREADS // 2
    while step > 0:
        if tid < step:
            shared[tid] += shared[tid + step]
            shared_den[tid] += shared_den[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid == 0:
        value = shared[0]
        if weighted:
            value = value * multiplier[w, shift] + bias[w, shift]
        d = max(shared_den[0], float32(1e-30))
        value = float32(2.0) * value - d if kind == 0 else value / math.sqrt(d * power[w]) * factor
        if lossy:
            value -= loss[w, a]
        score[p, place] = value


@_jit
def pack_rotated(templates, n_pairs, pair, root, n_rotations, scale, out):
    """Rotated references as fragments for the tensor cores, in half precision (`tensor`); a thread a place and rotation.

    Parameters
    ----------
    templates : as `fill_templates` leaves them.
    n_pairs : int
    pair : (places,) int32
        Pair of every place, -1 for padding.
    root : (2 p,) float32
        Square root of 1 / sigma2 at every sample.
    n_rotations : int
        Those beyond, up to a whole tile of sixteen, are set to 0.
    scale : float32
    out : float16
        ``[rotations / 16][chunk][lane][+z: rotations g, g + 8; -z: rotations g, g + 8]``.
    """
    i, a = cuda.grid(1), _rotation()
    if i >= pair.shape[0] or a // 16 > (n_rotations - 1) // 16:
        return
    r0, i0, r1, i1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    j = pair[i]
    if j >= 0 and a < n_rotations:
        r0, i0, r1, i1 = load4(templates, (((a // 16) * n_pairs + j) * 16 + a % 16) * 4)
        u, v = scale * root[2 * j], scale * root[2 * j + 1]
        r0, i0, r1, i1 = u * r0, u * i0, v * r1, v * i1
    chunks = pair.shape[0] // 4
    lane = (a % 8) * 4 + i % 4
    at = ((((a // 16) * chunks + i // 4) * 32 + lane) * 4 + (a % 16) // 8) * 2
    store_half2(out, at, r0, i0)
    store_half2(out, at + 4, r1, i1)


@_jit
def pack_columns(columns, row, pair, depth, root, scales, angles, out):
    """Particles' columns, whitened, scaled and shifted along z, as fragments in half precision; a warp a chunk of eight particles.

    Parameters
    ----------
    columns : (w * row,) float32
    row : int
        4 p.
    pair : (places,) int32
        Pair of every place, -1 for padding.
    depth : (places,) float32
        z of a pair.
    root : (2 p,) float32, scales : (w,) float32
    angles : (planes,) float32
        ``2 pi step tz / box``.
    out : float16
        ``[plane][particles / 8][chunk][lane][tile of four particles][+z, -z]``, lanes ``4 (2 particle + part) + pair``; part 1 gives the
        imaginary part of conj(F) Y.
    """
    tile, chunk, lane = cuda.blockIdx.y, cuda.blockIdx.x * 4 + cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
    chunks = pair.shape[0] // 4
    if chunk >= chunks:
        return
    half, p, within = lane % 2, (lane // 2) % 4, lane // 8
    w = tile * 8 + half * 4 + within
    j = pair[chunk * 4 + p]
    r0, i0, r1, i1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    if w < scales.shape[0] and j >= 0:
        r0, i0, r1, i1 = load4(columns, w * row + 4 * j)
        u, v = scales[w] / root[2 * j], scales[w] / root[2 * j + 1]
        r0, i0, r1, i1 = u * r0, u * i0, v * r1, v * i1
    # half precision elements: a lane holds 8, its tile 4 of them
    at = ((tile * chunks + chunk) * 32 + 8 * within + p) * 8 + half * 4
    for plane in range(angles.shape[0]):
        turns = angles[plane] * depth[chunk * 4 + p] * float32(0.5 / math.pi)
        turns -= math.floor(turns + float32(0.5))
        phase = float32(2.0 * math.pi) * turns
        cos, sin = math.cos(phase), math.sin(phase)
        # +z turns by the phase, -z back by it
        ar, ai, br, bi = r0 * cos - i0 * sin, i0 * cos + r0 * sin, r1 * cos + i1 * sin, i1 * cos - r1 * sin
        store_half4(out, at, ar, ai, br, bi)
        store_half4(out, at + 32, ai, -ar, bi, -br)
        at += cuda.gridDim.y * chunks * 256


@_device
def ordered_score(value, row):
    """A score and its row as one number that grows with the score; of equal scores the lower row is the larger number."""
    bits = int64(float_bits(value))
    ordered = bits ^ 0xFFFFFFFF if bits < 0 else bits | 0x80000000
    return uint64(((ordered & 0xFFFFFFFF) << 32) | (0x7FFFFFFF - row))


@_jit
def clear_best(found):
    """Nothing found yet; one thread an entry of (w, a)."""
    a, w = cuda.grid(1), cuda.blockIdx.y
    if a < found.shape[1]:
        found[w, a] = 0


@_jit
def unpack_best(found, best, best_shift):
    """Scores (w, a) float32 and rows of the shift cube (w, a) int32 from `ordered_score`."""
    a, w = cuda.grid(1), cuda.blockIdx.y
    if a < found.shape[1]:
        number = int64(found[w, a])
        ordered = (number >> 32) & 0xFFFFFFFF
        bits = ordered ^ 0x80000000 if ordered >= 0x80000000 else ordered ^ 0xFFFFFFFF
        best[w, a] = bits_float(int32(bits))
        best_shift[w, a] = int32(0x7FFFFFFF - (number & 0xFFFFFFFF))
