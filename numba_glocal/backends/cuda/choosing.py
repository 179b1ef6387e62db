"""Kernels that choose the candidates to keep, and score those again in single precision."""

from __future__ import annotations

import math

from numba import cuda, float32, int32

from .launching import REDUCE_THREADS
from .packing import phases
from .vector import jit_for_blocks, load4

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


CHOSEN_TOGETHER = 3
"""Candidates of a particle that a block of `score_chosen` can score: what it reads of the band and of the particle serves all."""
_MANY_PARTICLES = 512
"""From which there are enough blocks for a GPU's hundred and more multiprocessors, four each, when they score so many."""
_CHOSEN_SUMS = 2 * CHOSEN_TOGETHER
_device = cuda.jit(device=True, fastmath=True, inline=True, cache=True)


@_device
def _to_score(chosen, known, n_known, p, place):
    """The candidate in a place, or -1 where none is to be scored."""
    if place >= chosen.shape[1]:
        return int32(-1)
    row = chosen[p, place]
    for j in range(n_known):
        if known[p, j] == row:
            return int32(-1)
    return row


@_device
def _pair(templates, columns, den_weight, turns, x, y, z, i, w, a, shift):
    """What a pair of samples adds to num and den2 of a candidate."""
    n_pairs = columns.shape[1] // 4
    cp, sp, cq, sq = phases(x, y, z, turns, shift, float32(-1.0))
    r0, i0, r1, i1 = load4(templates, (((a // 16) * n_pairs + i) * 16 + a % 16) * 4)
    num = (r0 * cp - i0 * sp) * columns[w, 4 * i] + (r0 * sp + i0 * cp) * columns[w, 4 * i + 1]
    num += (r1 * cq - i1 * sq) * columns[w, 4 * i + 2] + (r1 * sq + i1 * cq) * columns[w, 4 * i + 3]
    return num, (r0 * r0 + i0 * i0) * den_weight[w, 2 * i] + (r1 * r1 + i1 * i1) * den_weight[w, 2 * i + 1]


def chosen_grid(chosen):
    """Blocks of a launch of `score_chosen`."""
    particles, keep = chosen.shape
    return -(-keep // CHOSEN_TOGETHER) if particles >= _MANY_PARTICLES else keep, particles


@jit_for_blocks(REDUCE_THREADS, 4)  # else 88 registers, and two blocks a multiprocessor
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
    """Scores of chosen candidates in single precision, as `finish_scores` makes them; threads in a fixed order.

    A block up to `CHOSEN_TOGETHER` candidates of a particle, as many blocks along x as `chosen_grid` says; particles along y.

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
    shared = cuda.shared.array((_CHOSEN_SUMS, REDUCE_THREADS), float32)
    p, tid = cuda.blockIdx.y, cuda.threadIdx.x
    place0 = cuda.blockIdx.x
    place1, place2 = place0 + cuda.gridDim.x, place0 + 2 * cuda.gridDim.x
    place = place0 + tid * cuda.gridDim.x
    if tid < CHOSEN_TOGETHER and place < chosen.shape[1]:
        row = chosen[p, place]
        if row >= 0 and _to_score(chosen, known, n_known, p, place) < 0:
            score[p, place] = best[first[p] + row // n_rotations, row % n_rotations]
    row0, row1 = _to_score(chosen, known, n_known, p, place0), _to_score(chosen, known, n_known, p, place1)
    row2 = _to_score(chosen, known, n_known, p, place2)
    if row0 < 0 and row1 < 0 and row2 < 0:
        return
    w0, a0 = first[p] + max(row0, 0) // n_rotations, max(row0, 0) % n_rotations
    w1, a1 = first[p] + max(row1, 0) // n_rotations, max(row1, 0) % n_rotations
    w2, a2 = first[p] + max(row2, 0) // n_rotations, max(row2, 0) % n_rotations
    shift0, shift1, shift2 = best_shift[w0, a0], best_shift[w1, a1], best_shift[w2, a2]
    num0, num1, num2 = float32(0.0), float32(0.0), float32(0.0)
    den0, den1, den2 = float32(0.0), float32(0.0), float32(0.0)
    for i in range(tid, columns.shape[1] // 4, REDUCE_THREADS):
        x, y, z = float32(lattice[6 * i]), float32(lattice[6 * i + 1]), float32(lattice[6 * i + 2])
        if row0 >= 0:
            num, den = _pair(templates, columns, den_weight, turns, x, y, z, i, w0, a0, shift0)
            num0, den0 = num0 + num, den0 + den
        if row1 >= 0:
            num, den = _pair(templates, columns, den_weight, turns, x, y, z, i, w1, a1, shift1)
            num1, den1 = num1 + num, den1 + den
        if row2 >= 0:
            num, den = _pair(templates, columns, den_weight, turns, x, y, z, i, w2, a2, shift2)
            num2, den2 = num2 + num, den2 + den
    shared[0, tid], shared[1, tid], shared[2, tid] = num0, num1, num2
    shared[3, tid], shared[4, tid], shared[5, tid] = den0, den1, den2
    cuda.syncthreads()
    step = REDUCE_THREADS // 2
    while step > 0:
        if tid < step:
            for q in range(_CHOSEN_SUMS):
                shared[q, tid] += shared[q, tid + step]
        cuda.syncthreads()
        step //= 2
    if tid < CHOSEN_TOGETHER:
        row, w, a, shift = row0, w0, a0, shift0
        if tid == 1:
            row, w, a, shift = row1, w1, a1, shift1
        elif tid == 2:
            row, w, a, shift = row2, w2, a2, shift2
        if row >= 0:
            value, d = shared[tid, 0], max(shared[CHOSEN_TOGETHER + tid, 0], float32(1e-30))
            if weighted:
                value = value * multiplier[w, shift] + bias[w, shift]
            value = float32(2.0) * value - d if kind == 0 else value / math.sqrt(d * power[w]) * factor
            if lossy:
                value -= loss[w, a]
            best[w, a] = value
            score[p, place] = value
