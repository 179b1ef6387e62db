"""Kernels from particles as their files have them to masked volumes: normalisation, levels, masks.

Volumes lie one after the other in slots of ``n^3`` float32. Sums are taken in double precision, by one block for a particle and in a fixed
order. Fast mathematics would join two subtractions into one of a larger number, so it is off where levels are taken off.
"""

from __future__ import annotations

import math

from numba import cuda, float32, float64, int32

SUM_THREADS = 512
"""Threads of a block that sums over a particle; a power of two."""

VOXEL_THREADS = 256
"""Threads of a block where each takes a voxel."""

OK, NOT_FINITE, CONSTANT = 0, 1, 2
"""What `particle_facts` says of a particle."""

_LARGEST_FLOAT = 3.4028234e38
_exact = cuda.jit(cache=True)
_fast = cuda.jit(fastmath=True, cache=True)


@_exact
def particle_facts(raw, outside, n_outside, step, normalise, sign, facts, status):
    """Level, offset and factor that normalise a particle (`numba_glocal.particles.ParticleReader.read_volume`); a block a particle.

    Parameters
    ----------
    raw : (p, n^3) float32
    outside : (n^3,) float32
        1 where mean and deviation are taken, else 0.
    n_outside : int
    step : int
        The rough level is that of every so many voxels.
    normalise : int
        1: to deviation 1; 0: the mean only.
    sign : float32
        -1 inverts the contrast.
    facts : (p, 3) float32
        Written: the normalised volume is ``((raw - facts[0]) - facts[1]) * facts[2]``.
    status : (p,) int32
        Written: OK, NOT_FINITE or CONSTANT.
    """
    part = cuda.shared.array((3, SUM_THREADS), float64)
    high = cuda.shared.array(SUM_THREADS, float32)
    p, tid = cuda.blockIdx.x, cuda.threadIdx.x
    size = raw.shape[1]
    samples = (size + step - 1) // step
    total = float64(0.0)
    for j in range(tid, samples, SUM_THREADS):
        total += float64(raw[p, j * step])
    part[0, tid] = total
    width = SUM_THREADS // 2
    while width > 0:
        cuda.syncthreads()
        if tid < width:
            part[0, tid] += part[0, tid + width]
        width //= 2
    cuda.syncthreads()
    rough = float32(part[0, 0] / float64(samples))
    cuda.syncthreads()
    # small numbers from here on, whatever the grey values of a tomogram
    total, chosen, square = float64(0.0), float64(0.0), float64(0.0)
    i = tid
    while i + 3 * SUM_THREADS < size:  # four loads under way at once
        a, b = raw[p, i], raw[p, i + SUM_THREADS]
        c, d = raw[p, i + 2 * SUM_THREADS], raw[p, i + 3 * SUM_THREADS]
        wa, wb = float64(outside[i]), float64(outside[i + SUM_THREADS])
        wc, wd = float64(outside[i + 2 * SUM_THREADS]), float64(outside[i + 3 * SUM_THREADS])
        va, vb, vc, vd = float64(a - rough), float64(b - rough), float64(c - rough), float64(d - rough)
        total += (va + vb) + (vc + vd)
        chosen += (va * wa + vb * wb) + (vc * wc + vd * wd)
        square += (va * va * wa + vb * vb * wb) + (vc * vc * wc + vd * vd * wd)
        i += 4 * SUM_THREADS
    while i < size:
        va = float64(raw[p, i] - rough)
        wa = float64(outside[i])
        total += va
        chosen += va * wa
        square += va * va * wa
        i += SUM_THREADS
    largest = float32(0.0)
    for j in range(tid, samples, SUM_THREADS):
        largest = max(largest, abs(raw[p, j * step] - rough))
    part[0, tid], part[1, tid], part[2, tid], high[tid] = total, chosen, square, largest
    width = SUM_THREADS // 2
    while width > 0:
        cuda.syncthreads()
        if tid < width:
            part[0, tid] += part[0, tid + width]
            part[1, tid] += part[1, tid + width]
            part[2, tid] += part[2, tid + width]
            high[tid] = max(high[tid], high[tid + width])
        width //= 2
    if tid == 0:
        total = part[0, 0] + float64(rough) * float64(size)
        offset = part[1, 0] / float64(n_outside)
        deviation = math.sqrt(max(part[2, 0] / float64(n_outside) - offset * offset, 0.0))
        scale = max(max(abs(float64(rough)), abs(offset)), max(float64(high[0]), 1e-30))
        what, factor = int32(OK), float64(0.0)
        if not abs(total) <= _LARGEST_FLOAT:
            what = int32(NOT_FINITE)
        elif not deviation > 1e-6 * scale:
            what = int32(CONSTANT)
        else:
            factor = (1.0 / deviation if normalise else 1.0) * float64(sign)
        facts[p, 0], facts[p, 1], facts[p, 2] = rough, float32(offset), float32(factor)
        status[p] = what


@_exact
def place_volumes(raw, facts, slots, volumes):
    """Normalised volumes into their slots; a thread a voxel. A slot of -1: none.

    Parameters
    ----------
    raw : (p, n^3) float32
    facts : (p, 3) float32
        As from `particle_facts`.
    slots : (p,) int32
    volumes : flat float32
    """
    i, p = cuda.grid(1), cuda.blockIdx.y
    size = raw.shape[1]
    if i < size and slots[p] >= 0:
        volumes[slots[p] * size + i] = ((raw[p, i] - facts[p, 0]) - facts[p, 1]) * facts[p, 2]


@_exact
def volume_levels(volumes, slots, outside, n_outside, levels):
    """Mean outside a mask, of particles in slots; a block a particle.

    Parameters
    ----------
    volumes : flat float32
    slots : (p,) int32
    outside : (n^3,) float32
        1 where the mean is taken, else 0.
    n_outside : int
    levels : (p,) float32
        Written.
    """
    part = cuda.shared.array(SUM_THREADS, float64)
    p, tid = cuda.blockIdx.x, cuda.threadIdx.x
    size = outside.shape[0]
    base = slots[p] * size
    total = float64(0.0)
    i = tid
    while i + 3 * SUM_THREADS < size:
        a, b = volumes[base + i] * outside[i], volumes[base + i + SUM_THREADS] * outside[i + SUM_THREADS]
        c = volumes[base + i + 2 * SUM_THREADS] * outside[i + 2 * SUM_THREADS]
        d = volumes[base + i + 3 * SUM_THREADS] * outside[i + 3 * SUM_THREADS]
        total += (float64(a) + float64(b)) + (float64(c) + float64(d))
        i += 4 * SUM_THREADS
    while i < size:
        total += float64(volumes[base + i] * outside[i])
        i += SUM_THREADS
    part[tid] = total
    width = SUM_THREADS // 2
    while width > 0:
        cuda.syncthreads()
        if tid < width:
            part[tid] += part[tid + width]
        width //= 2
    if tid == 0:
        levels[p] = float32(part[0] / float64(n_outside))


@_fast
def mask_volumes(volumes, slots, levels, mask, out):
    """out = (volume - level) * mask, of particles in slots; a thread a voxel.

    Parameters
    ----------
    volumes : flat float32
    slots : (p,) int32, levels : (p,) float32
    mask : (n^3,) float32
    out : (p, n^3) float32
    """
    i, p = cuda.grid(1), cuda.blockIdx.y
    size = mask.shape[0]
    if i < size:
        out[p, i] = (volumes[slots[p] * size + i] - levels[p]) * mask[i]


@_fast
def gather_volumes(volumes, slots, out):
    """Particles in slots, side by side; a thread a voxel."""
    i, p = cuda.grid(1), cuda.blockIdx.y
    size = out.shape[1]
    if i < size:
        out[p, i] = volumes[slots[p] * size + i]
