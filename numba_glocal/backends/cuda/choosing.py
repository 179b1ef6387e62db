"""Kernels that choose the candidates to keep, and score those again in single precision."""

from __future__ import annotations

import math

from numba import cuda, float32, int32

from .launching import REDUCE_THREADS
from .packing import phases
from .vector import load4

CHOOSE_THREADS = 128
_jit = cuda.jit(fastmath=True, cache=True)


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
    known,
    n_known,
    best,
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
    known : (p, n_known) int32
        Candidates, as in `chosen`, whose scores in `best` are in single precision already.
    best : (w, a) float32
        Scores of all candidates; those found here take their places.
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
    for j in range(n_known):
        if known[p, j] == row:
            if tid == 0:
                score[p, place] = best[w, a]
            return
    shift = best_shift[w, a]
    n_pairs = columns.shape[1] // 4
    total, den = float32(0.0), float32(0.0)
    for i in range(tid, n_pairs, REDUCE_THREADS):
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
        cp, sp, cq, sq = phases(x, y, z, turns, shift, float32(-1.0))
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
        best[w, a] = value
        score[p, place] = value
