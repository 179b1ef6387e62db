"""The kernel of the refinement: Gauss-Newton with steps whose shift stays in a ball."""

from __future__ import annotations

import math

from numba import cuda, float32, float64, int32

from .normal_equations import N_SUMS, REFINE_BLOCKS, REFINE_THREADS, accumulate
from .vector import jit_for_blocks

_SEGMENTS = 8
_SEGMENT = REFINE_THREADS // _SEGMENTS
_ROW = REFINE_THREADS + 1
_SHARED_PARTIALS = N_SUMS * _ROW
_SEGMENT_SUMS = N_SUMS * _SEGMENTS
_called = cuda.jit(device=True)  # the compiler inlines it; Numba doing so would take longer to compile than all the rest


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


@jit_for_blocks(REFINE_THREADS, REFINE_BLOCKS, fastmath=False)
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
        accumulate(
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
