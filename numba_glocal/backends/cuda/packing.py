"""Kernels that write columns and templates as narrow numbers: rows of the matrix product, or fragments for the tensor cores."""

from __future__ import annotations

import math

from numba import cuda, float32, int64

from .launching import REDUCE_THREADS, add_up, block_rotation
from .vector import load4, store_half2, store_half4, store_narrow4

TOGETHER = 4
"""Rows that a thread of `narrow_columns` and `narrow_templates` writes for each trial shift."""
_VALUES = 4 * TOGETHER

_jit = cuda.jit(fastmath=True, cache=True)
_device = cuda.jit(device=True, fastmath=True, inline=True, cache=True)


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
    add_up(shared, tid)
    if tid == 0:
        out[w] = scale / math.sqrt(shared[0] / float32(size) + float32(1e-30))


@_device
def _factor(largest, total, peak, norm, shared_peak, shared_norm, tid):
    """Factor of a row by the largest power and the sum of powers that each thread of the block found."""
    shared_peak[tid], shared_norm[tid] = largest, total
    cuda.syncthreads()
    step = REDUCE_THREADS // 2
    while step > 0:
        if tid < step:
            shared_peak[tid] = max(shared_peak[tid], shared_peak[tid + step])
            shared_norm[tid] += shared_norm[tid + step]
        cuda.syncthreads()
        step //= 2
    return min(peak / math.sqrt(shared_peak[0] + float32(1e-30)), norm / math.sqrt(shared_norm[0] + float32(1e-30)))


@_jit
def column_factors(columns, root, peak, norm, out):
    """What brings each work item's column, divided by `root`, into the range of narrow numbers; a block an item, threads in a fixed order.

    Parameters
    ----------
    columns : (w, 4 p) float32
        ``[pair][re +z, im +z, re -z, im -z]``.
    root : (2 p,) float32
    peak, norm : float32
        Largest amplitude, and largest norm of a whole column, after it.
    out : (w,) float32
    """
    shared_peak = cuda.shared.array(REDUCE_THREADS, float32)
    shared_norm = cuda.shared.array(REDUCE_THREADS, float32)
    w, tid = cuda.blockIdx.x, cuda.threadIdx.x
    largest, total = float32(0.0), float32(0.0)
    for i in range(tid, root.shape[0], REDUCE_THREADS):
        re, im = columns[w, 2 * i] / root[i], columns[w, 2 * i + 1] / root[i]
        power = re * re + im * im
        largest = max(largest, power)
        total += power
    factor = _factor(largest, total, peak, norm, shared_peak, shared_norm, tid)
    if tid == 0:
        out[w] = factor


@_jit
def template_factors(powers, root, peak, norm, out):
    """As `column_factors`, of rotated references, multiplied by `root`, from their powers (a, 2 p) float32; out : (a,) float32."""
    shared_peak = cuda.shared.array(REDUCE_THREADS, float32)
    shared_norm = cuda.shared.array(REDUCE_THREADS, float32)
    a, tid = cuda.blockIdx.x, cuda.threadIdx.x
    largest, total = float32(0.0), float32(0.0)
    for i in range(tid, root.shape[0], REDUCE_THREADS):
        power = powers[a, i] * root[i] * root[i]
        largest = max(largest, power)
        total += power
    factor = _factor(largest, total, peak, norm, shared_peak, shared_norm, tid)
    if tid == 0:
        out[a] = factor


@_device
def phases(x, y, z, turns, t, sign):
    """cos and sin of ``sign 2 pi (x, y, z).turns[t]`` and of the same at -z."""
    flat = x * turns[t, 0] + y * turns[t, 1]
    along = z * turns[t, 2]
    p, q = flat + along, flat - along
    p -= math.floor(p + float32(0.5))
    q -= math.floor(q + float32(0.5))
    p, q = sign * float32(2.0 * math.pi) * p, sign * float32(2.0 * math.pi) * q
    return math.cos(p), math.sin(p), math.cos(q), math.sin(q)


@_jit
def narrow_columns(columns, root, factors, lattice, turns, first, n_shifts, wide, depth, out):
    """Particles' columns for the matrix product, shifted the other way than a reference would be: rows ``(shift - first) * wide + item``.

    A thread takes a pair of samples of `TOGETHER` items, whose phases are the same; pairs past the last, and items past the last, are zeros.

    Parameters
    ----------
    columns : (w, 4 p) float32
        ``[pair][re +z, im +z, re -z, im -z]``.
    root : (2 p,) float32
    factors : (w,) float32
        What each item is multiplied by, after division by `root`.
    lattice : (2 p * 3,) int32
        n = (x, y, z) of every sample.
    turns : (shifts, 3) float32
        ``step m / box`` of every trial shift: a sample's phase is ``2 pi n.turns``.
    first, n_shifts : int
        Shifts of this tile.
    wide : int
        Items, with padding if any.
    depth : int
        Length of a row, a multiple of 4.
    out : float16 or int8
    """
    i, w0 = cuda.grid(1), TOGETHER * cuda.blockIdx.y
    if 4 * i >= depth:
        return
    v = cuda.local.array(_VALUES, float32)
    x, y, z, s0, s1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    inside = i < root.shape[0] // 2
    if inside:
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
        s0, s1 = float32(1.0) / root[2 * i], float32(1.0) / root[2 * i + 1]
    for j in range(TOGETHER):
        r0, i0, r1, i1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        w = w0 + j
        if inside and w < columns.shape[0]:
            f0, f1 = s0 * factors[w], s1 * factors[w]
            r0, i0, r1, i1 = f0 * columns[w, 4 * i], f0 * columns[w, 4 * i + 1], f1 * columns[w, 4 * i + 2], f1 * columns[w, 4 * i + 3]
        v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3] = r0, i0, r1, i1
    for t in range(n_shifts):
        cp, sp, cq, sq = phases(x, y, z, turns, first + t, float32(1.0))
        at = (int64(t) * wide + w0) * depth + 4 * i
        for j in range(TOGETHER):
            if w0 + j < wide:
                r0, i0, r1, i1 = v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]
                store_narrow4(out, at + j * depth, r0 * cp - i0 * sp, r0 * sp + i0 * cp, r1 * cq - i1 * sq, r1 * sq + i1 * cq)


@_jit
def narrow_templates(templates, n_pairs, lattice, root, turns, first, n_shifts, n_rotations, factors, depth, out):
    """Rotated and shifted references for the matrix product: rows ``(shift - first) * n_rotations + rotation``.

    A thread takes a pair of samples of `TOGETHER` rotations; those past the last sample write zeros.

    Parameters
    ----------
    templates : as `fill_templates` leaves them.
    lattice, root, turns, first, n_shifts, depth, out : as in `narrow_columns`
        A reference is multiplied by `root`, and its phase is ``-2 pi n.turns``.
    factors : (a,) float32
    """
    i, a0 = cuda.grid(1), TOGETHER * block_rotation()
    if 4 * i >= depth or a0 >= n_rotations:
        return
    v = cuda.local.array(_VALUES, float32)
    x, y, z, s0, s1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    inside = i < n_pairs
    if inside:
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
        s0, s1 = root[2 * i], root[2 * i + 1]
    for j in range(TOGETHER):
        r0, i0, r1, i1 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        a = a0 + j
        if inside and a < n_rotations:
            r0, i0, r1, i1 = load4(templates, (((a // 16) * n_pairs + i) * 16 + a % 16) * 4)
            f0, f1 = s0 * factors[a], s1 * factors[a]
            r0, i0, r1, i1 = f0 * r0, f0 * i0, f1 * r1, f1 * i1
        v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3] = r0, i0, r1, i1
    for t in range(n_shifts):
        cp, sp, cq, sq = phases(x, y, z, turns, first + t, float32(-1.0))
        at = (int64(t) * n_rotations + a0) * depth + 4 * i
        for j in range(TOGETHER):
            if a0 + j < n_rotations:
                r0, i0, r1, i1 = v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]
                store_narrow4(out, at + j * depth, r0 * cp - i0 * sp, r0 * sp + i0 * cp, r1 * cq - i1 * sq, r1 * sq + i1 * cq)


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
    i, a = cuda.grid(1), block_rotation()
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
