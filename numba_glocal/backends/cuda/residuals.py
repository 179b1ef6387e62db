"""The kernel of residuals at given poses, from which the noise is found."""

from __future__ import annotations

import math

from numba import cuda, float32

from .turning import sample
from .vector import load2

_ONE, _SIXTH = float32(1.0), float32(1.0 / 6.0)
_jit = cuda.jit(fastmath=True, cache=True)


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
            mr, mi = sample(reference, 0, c, qx, qy, qz)
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
