"""The search kernel: one thread a particle and rotation, all shifts at once by folding the band line by line.

The same sum as `numba_glocal.backends.lines` (docs/adr/0002): along z first, then y, then x. A thread keeps the sums over y of its
shifts along z in registers; those over x, one for each trial shift in the ball, in shared memory. Where a ball is wide, its shifts
along z are dealt out to several kernels ("groups"), each of which forms the products again.

A register has no index, so the kernel of a group is written out as text with a name for every sum: `kernel_source`. The text goes to a
file in the JIT cache, from where Numba loads it, and its compiled form, like any other function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .written import Text, allow_shared, written_function

TILE_ROTATIONS = 16
"""Rotations of a block: templates are stored in blocks of this many."""

TILE_PARTICLES = 16
"""Particles of a block, at most."""

_SHARED_BYTES = 115_000
"""Shared memory of a block: two blocks of 128 threads fit a multiprocessor of 228 KiB."""

_REGISTER_SUMS = 140
"""Sums over y that a thread keeps in registers, at most."""

_COEFFICIENT_BYTES = 2_600


@dataclass(frozen=True, slots=True)
class ShiftGroup:
    """Part of the trial shifts: those whose |z| step is in ``first .. first + count - 1`` (and 0 with the first group).

    Attributes
    ----------
    steps : int
        Shift steps to either side.
    radius2 : float
        Squared radius of the ball, in steps.
    first, count : int
        Steps along z (from 1 on) of this group.
    has_zero : bool
        Whether it also holds z = 0.
    """

    steps: int
    radius2: float
    first: int
    count: int
    has_zero: bool

    @property
    def z_rows(self) -> tuple[int, ...]:
        """Rows of the shift cube along z, order 0, +1, -1, +2, -2 .."""
        rows = [row for m in range(self.first, self.first + self.count) for row in (2 * m - 1, 2 * m)]
        return tuple(([0] if self.has_zero else []) + rows)

    def columns(self) -> list[tuple[int, int]]:
        """(index of the z row, y row) of the lines of shifts along x that meet the ball."""
        found = []
        for r, z in enumerate(self.z_rows):
            for y in range(2 * self.steps + 1):
                if signed(y) ** 2 + signed(z) ** 2 <= self.radius2:
                    found.append((r, y))
        return found

    def reach(self, r: int, y: int) -> int:
        """Largest step along x inside the ball."""
        return max(m for m in range(self.steps + 1) if m * m + signed(y) ** 2 + signed(self.z_rows[r]) ** 2 <= self.radius2)

    def entries(self) -> NDArray[np.int32]:
        """(place of the first sum, 0 or 1 if it has a partner, cube row of +x, cube row of -x) of all shifts of the group."""
        width = 2 * self.steps + 1
        rows, place = [], 0
        for r, y in self.columns():
            flat = y * width + self.z_rows[r]
            for m in range(self.reach(r, y) + 1):
                if m == 0:
                    rows.append((place, 0, flat, flat))
                    place += 1
                else:
                    rows.append((place, 1, (2 * m - 1) * width * width + flat, 2 * m * width * width + flat))
                    place += 2
        return np.array(rows, np.int32)

    @property
    def n_sums(self) -> int:
        """Floats of shared memory for each thread."""
        return sum(1 + 2 * self.reach(r, y) for r, y in self.columns())

    def grid(self, n_rotations: int, n_particles: int, threads: int) -> tuple[int, int]:
        """Blocks: sixteen rotations and ``threads / 16`` particles. Neighbouring blocks share rotations."""
        return -(-n_particles // (threads // TILE_ROTATIONS)), -(-n_rotations // TILE_ROTATIONS)

    @property
    def blocks(self) -> int:
        """Blocks of 128 threads that a multiprocessor should hold at once; the compiler rations registers by it."""
        return 3 if self.n_sums * 128 * 4 < 75_000 and len(self.z_rows) * 2 * (2 * self.steps + 1) < 110 else 2

    def shared_bytes(self, threads: int, top: int) -> int:
        """Dynamic shared memory of a block: coefficients up to `top`, then the sums over x."""
        return 4 * (coefficient_stride(self.steps) * (top + 1) + self.n_sums * threads)

    def threads(self, top: int) -> int:
        """Threads of a block."""
        for threads in (128, 64, 32):
            if self.shared_bytes(threads, top) <= _SHARED_BYTES:
                return threads
        return 32


def coefficient_stride(steps: int) -> int:
    """Floats of a row of the coefficient table: cos and sin for every step, padded to whole loads of four."""
    return max(4, -(-2 * steps // 4) * 4)


def signed(row: int) -> int:
    """Step of a row in the order 0, +1, -1, +2, -2 .."""
    return (row + 1) // 2 if row % 2 else -(row // 2)


def shift_groups(steps: int, radius2: float) -> tuple[ShiftGroup, ...]:
    """Groups for a ball of squared radius `radius2` (in steps): as few as the registers and the shared memory of a thread allow."""
    groups: list[ShiftGroup] = []
    first = 1
    while first <= steps or not groups:
        count = 0 if not groups else 1
        while first + count <= steps and _fits(ShiftGroup(steps, radius2, first, count + 1, not groups)):
            count += 1
        groups.append(ShiftGroup(steps, radius2, first, count, not groups))
        first += count
    return tuple(groups)


def _fits(group: ShiftGroup) -> bool:
    """Whether blocks of 128 threads hold the group's sums."""
    in_registers = len(group.z_rows) * 2 * (2 * group.steps + 1)
    return in_registers <= _REGISTER_SUMS and group.n_sums * 128 * 4 <= _SHARED_BYTES - _COEFFICIENT_BYTES


def kernel_source(group: ShiftGroup) -> str:
    """Python text of a group's kernel, with a name for every sum.

    The function is ``search(templates, columns, line_start, line_length, plane_start, coefficients, top, n_pairs, n_rotations,
    n_particles, entries, weighted, multiplier, bias, best, best_shift)``: arguments as in `lines.search_block`; `templates` in blocks of
    sixteen rotations ``[block][pair][rotation][4]``; `columns` ``[particle][pair][4]``, both with one pair to spare at the end;
    `coefficients` as `coefficient_table`, up to z = `top`; `entries` as `ShiftGroup.entries`; `multiplier` and `bias` (particles, cube
    rows) are read only if `weighted`.
    """
    steps, rows, stride = group.steps, group.z_rows, coefficient_stride(group.steps)
    z_steps = range(group.count)
    text = Text()
    for line in (
        "from numba import cuda, float32",
        "",
        "from numba_glocal.backends.cuda.vector import jit_for_blocks, load4",
        "",
        "",
        f"@jit_for_blocks(128, {group.blocks})",
        "def search(templates, columns, line_start, line_length, plane_start, coefficients, top, n_pairs, n_rotations, n_particles,",
        "           entries, weighted, multiplier, bias, best, best_shift):",
    ):
        text(line)
    text.depth = 1
    text("shared = cuda.shared.array(0, float32)")
    text("tid, threads = cuda.threadIdx.x, cuda.blockDim.x")
    text("lane, warp = tid % 32, tid // 32")
    text("# eight neighbouring rotations and four particles make a warp: what both load is shared within it")
    text("in_tile = lane % 8 + 8 * (warp % 2)")
    text(f"rotation = cuda.blockIdx.y * {TILE_ROTATIONS} + in_tile")
    text(f"particle = cuda.blockIdx.x * (threads // {TILE_ROTATIONS}) + lane // 8 + 4 * (warp // 2)")
    text("source = min(particle, n_particles - 1)")
    text(f"t_base = (cuda.blockIdx.y * n_pairs * {TILE_ROTATIONS} + in_tile) * 4")
    text("y_base = source * n_pairs * 4")
    text(f"held = (top + 1) * {stride}")
    text("for e in range(tid, held, threads):")
    text("shared[e] = coefficients[e]", 1)
    text("own = held + tid")
    text(f"for e in range({group.n_sums}):")
    text("shared[own + e * threads] = float32(0.0)", 1)
    text("cuda.syncthreads()")
    text("for x in range(plane_start.shape[0] - 1):")
    text.depth = 2

    def sums_of_lines(pairs_of: tuple[tuple[str, str], ...]) -> None:
        """Sums along lines of one length side by side, left in names that begin with the second word of each pair."""
        text(f"pairs = line_length[{pairs_of[0][0]}]")
        for number, to in pairs_of:
            text(f"at = line_start[{number}]")
            text(f"t{to}, y{to} = t_base + at * {TILE_ROTATIONS * 4}, y_base + at * 4")
            zero = [f"{to}0r", f"{to}0i"] if group.has_zero else []
            for name in zero + [f"{to}{kind}{g}{part}" for g in z_steps for kind in "cs" for part in "ri"]:
                text(f"{name} = float32(0.0)")
            text(f"fr{to}, fi{to}, gr{to}, gi{to} = load4(templates, t{to})")
            text(f"yr{to}, yi{to}, wr{to}, wi{to} = load4(columns, y{to})")
        text("k = 0")
        text("for j in range(pairs):")
        text.depth += 1
        for _, to in pairs_of:
            text(f"pr, pi = fr{to} * yr{to} + fi{to} * yi{to}, fr{to} * yi{to} - fi{to} * yr{to}")
            text(f"qr, qi = gr{to} * wr{to} + gi{to} * wi{to}, gr{to} * wi{to} - gi{to} * wr{to}")
            text(f"er{to}, ei{to}, dr{to}, di{to} = pr + qr, pi + qi, pr - qr, pi - qi")
            # the next pair is on its way while this one is summed; the last load is not used
            text(f"t{to} += {TILE_ROTATIONS * 4}")
            text(f"y{to} += 4")
            text(f"fr{to}, fi{to}, gr{to}, gi{to} = load4(templates, t{to})")
            text(f"yr{to}, yi{to}, wr{to}, wi{to} = load4(columns, y{to})")
            if group.has_zero:
                text(f"{to}0r += er{to}")
                text(f"{to}0i += ei{to}")
        first, last = 2 * (group.first - 1), 2 * (group.first - 1 + group.count)
        for word in range(first // 4, -(-last // 4)):
            text(f"u{4 * word}, u{4 * word + 1}, u{4 * word + 2}, u{4 * word + 3} = load4(shared, k + {4 * word})")
        for g in z_steps:
            k = first + 2 * g
            for _, to in pairs_of:
                text(f"{to}c{g}r += u{k} * er{to}")
                text(f"{to}c{g}i += u{k} * ei{to}")
                text(f"{to}s{g}r += u{k + 1} * dr{to}")
                text(f"{to}s{g}i += u{k + 1} * di{to}")
        text(f"k += {stride}")
        text.depth -= 1
        zero_rows = 1 if group.has_zero else 0
        for _, to in pairs_of:
            for g in z_steps:
                a, b = zero_rows + 2 * g, zero_rows + 2 * g + 1
                text(f"{to}{a}r, {to}{a}i = {to}c{g}r - {to}s{g}i, {to}c{g}i + {to}s{g}r")
                text(f"{to}{b}r, {to}{b}i = {to}c{g}r + {to}s{g}i, {to}c{g}i - {to}s{g}r")

    text("first = plane_start[x]")
    sums_of_lines((("first", "a"),))
    for r in range(len(rows)):
        for m in range(steps + 1):
            text(f"C{m}_{r}r, C{m}_{r}i = a{r}r, a{r}i")
            if m:
                text(f"S{m}_{r}r, S{m}_{r}i = float32(0.0), float32(0.0)")
    text("ky = 0")
    text("for number in range(first + 1, plane_start[x + 1], 2):")
    text.depth += 1
    text(f"ky += {stride}")
    sums_of_lines((("number", "a"), ("number + 1", "b")))
    for m in range(1, steps + 1):
        text(f"cos{m}, sin{m} = shared[ky + {2 * m - 2}], shared[ky + {2 * m - 1}]")
    for r in range(len(rows)):
        text(f"er, ei, dr, di = a{r}r + b{r}r, a{r}i + b{r}i, a{r}r - b{r}r, a{r}i - b{r}i")
        text(f"C0_{r}r += er")
        text(f"C0_{r}i += ei")
        for m in range(1, steps + 1):
            text(f"C{m}_{r}r += cos{m} * er")
            text(f"C{m}_{r}i += cos{m} * ei")
            text(f"S{m}_{r}r += sin{m} * dr")
            text(f"S{m}_{r}i += sin{m} * di")
    text.depth -= 1
    for m in range(1, steps + 1):
        text(f"cos{m}, sin{m} = shared[x * {stride} + {2 * m - 2}], shared[x * {stride} + {2 * m - 1}]")
    place = 0
    for r, y in group.columns():
        my = (y + 1) // 2
        if my == 0:
            text(f"br, bi = C0_{r}r, C0_{r}i")
        elif y % 2:
            text(f"br, bi = C{my}_{r}r - S{my}_{r}i, C{my}_{r}i + S{my}_{r}r")
        else:
            text(f"br, bi = C{my}_{r}r + S{my}_{r}i, C{my}_{r}i - S{my}_{r}r")
        text(f"shared[own + {place} * threads] += br")
        place += 1
        for m in range(1, group.reach(r, y) + 1):
            text(f"shared[own + {place} * threads] += cos{m} * br")
            text(f"shared[own + {place + 1} * threads] += sin{m} * bi")
            place += 2
    text.depth = 1
    text("if particle < n_particles and rotation < n_rotations:")
    text.depth = 2
    if group.has_zero:
        text("top_value, where = float32(-1e38), -1")
    else:
        text("top_value, where = best[particle, rotation], best_shift[particle, rotation]")
    text("for e in range(entries.shape[0]):")
    text.depth = 3
    text("place, up, down = entries[e, 0], entries[e, 2], entries[e, 3]")
    text("value = shared[own + place * threads]")
    text("other = value")
    text("if entries[e, 1]:")
    text("w = shared[own + (place + 1) * threads]", 1)
    text("value, other = value - w, value + w", 1)
    text("if weighted:")
    text("value = value * multiplier[particle, up] + bias[particle, up]", 1)
    text("other = other * multiplier[particle, down] + bias[particle, down]", 1)
    text("if value > top_value:")
    text("top_value, where = value, up", 1)
    text("if other > top_value:")
    text("top_value, where = other, down", 1)
    text.depth = 2
    text("best[particle, rotation] = top_value")
    text("best_shift[particle, rotation] = where")
    return str(text)


@lru_cache(maxsize=64)
def search_kernel(group: ShiftGroup) -> Any:
    """The kernel of a group."""
    return written_function(kernel_source(group), f"search_{group.steps}_{group.first}", "search")


def coefficient_table(steps: int, step_voxels: float, box_size: int, top: int) -> NDArray[np.float32]:
    """cos and sin of ``2 pi step m z / box`` for z = 0 .. top and m = 1 .. steps, flat, rows of `coefficient_stride`."""
    from ..lines import phase_coefficients

    table = np.zeros((top + 1, coefficient_stride(steps)), np.float32)
    table[:, : 2 * steps] = phase_coefficients(steps, step_voxels, box_size, top).reshape(top + 1, 2 * steps)
    return table.ravel()


def launch(group: ShiftGroup, top: int, n_rotations: int, n_particles: int, arguments: tuple[Any, ...], threads: int | None = None) -> None:
    """Runs a group's kernel, with more shared memory than a launch may have unasked.

    Parameters
    ----------
    arguments : tuple
        Of the kernel.
    threads : int, optional
        Of a block.
    """
    kernel = search_kernel(group)
    threads = threads or group.threads(top)
    shared = group.shared_bytes(threads, top)
    allow_shared(kernel, arguments, shared)
    kernel[group.grid(n_rotations, n_particles, threads), threads, 0, shared](*arguments)
