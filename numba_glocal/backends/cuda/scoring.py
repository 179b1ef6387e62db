"""Kernels from sums to scores: the best trial shift of every rotation, score functions, losses, and the particles' power."""

from __future__ import annotations

import math

from numba import cuda, float32, float64, int32, int64, uint64

from .launching import REDUCE_THREADS, add_up, block_rotation
from .vector import bits_float, float_bits

_jit = cuda.jit(fastmath=True, cache=True)
_device = cuda.jit(device=True, fastmath=True, inline=True, cache=True)


TILE_ITEMS, TILE_ROTATIONS = 32, 8
"""Of a block of `best_of_tile`."""


@_device
def _larger(value, row, weighted, multiplier, bias, w, top, where):
    """The larger of a trial shift's value and the best so far, and its row."""
    if weighted:
        value = value * multiplier[w, row] + bias[w, row]
    if value > top:
        return value, row
    return top, where


@_jit
def best_of_tile(
    products, by_shift, by_rotation, first, n_shifts, n_rotations, shift_rows, scales, factors, weighted, multiplier, bias, best, best_shift
):
    """Running best over the shifts of a tile; a block `TILE_ITEMS` work items, side by side, of `TILE_ROTATIONS` rotations.

    Products have their items side by side in memory, scores their rotations: each is read and written along its own, and exchanged in between.

    Parameters
    ----------
    products : flat float32 or int32
        Of shift t, rotation a and item w at ``(t - first) * by_shift + a * by_rotation + w``.
    first, n_shifts : int
        Shifts of the tile; with `first` 0 the best starts anew.
    shift_rows : (shifts,) int32
        Row of the shift cube of each trial shift.
    scales : (w,) float32, factors : (a,) float32
        What the columns and the templates were multiplied by.
    weighted, multiplier, bias : as in the search kernels.
    best : (w, a) float32, best_shift : (w, a) int32
    """
    # rows of 36: the eight rotations of four items lie in 32 different banks
    held = cuda.shared.array((TILE_ROTATIONS, 36), float32)
    held_row = cuda.shared.array((TILE_ROTATIONS, 36), int32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    first_w, first_a = cuda.blockIdx.x * TILE_ITEMS, block_rotation() * TILE_ROTATIONS
    tid = y * TILE_ITEMS + x
    across, along = tid // TILE_ROTATIONS, tid % TILE_ROTATIONS  # as scores lie
    is_score = first_w + across < best.shape[0] and first_a + along < best.shape[1]
    w, a = first_w + x, first_a + y
    top, where = float32(-1e38), int32(-1)
    if first > 0:
        if is_score:
            held[along, across] = best[first_w + across, first_a + along]
            held_row[along, across] = best_shift[first_w + across, first_a + along]
        cuda.syncthreads()
        top, where = held[y, x], held_row[y, x]
    if w < best.shape[0] and a < best.shape[1]:
        back = float32(1.0) / (scales[w] * factors[a])
        at = a * by_rotation + w
        last = n_shifts - 1
        for t in range(0, n_shifts, 4):  # four loads on their way at once; what is past the last is the last again
            t1, t2, t3 = min(t + 1, last), min(t + 2, last), min(t + 3, last)
            v0, v1 = float32(products[at + t * by_shift]), float32(products[at + t1 * by_shift])
            v2, v3 = float32(products[at + t2 * by_shift]), float32(products[at + t3 * by_shift])
            top, where = _larger(v0 * back, shift_rows[first + t], weighted, multiplier, bias, w, top, where)
            top, where = _larger(v1 * back, shift_rows[first + t1], weighted, multiplier, bias, w, top, where)
            top, where = _larger(v2 * back, shift_rows[first + t2], weighted, multiplier, bias, w, top, where)
            top, where = _larger(v3 * back, shift_rows[first + t3], weighted, multiplier, bias, w, top, where)
    held[y, x], held_row[y, x] = top, where
    cuda.syncthreads()
    if is_score:
        best[first_w + across, first_a + along] = held[along, across]
        best_shift[first_w + across, first_a + along] = held_row[along, across]


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
    add_up(shared, tid)
    if tid == 0:
        out[p] = shared[0]
