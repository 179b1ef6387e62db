"""Kernels that insert particles into the sums of an average."""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32, float64, int32

from .vector import load2

NUMERATOR_SCALE = float(1 << 20)
DENOMINATOR_SCALE = float(1 << 30)
_jit = cuda.jit(fastmath=True, cache=True)


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
