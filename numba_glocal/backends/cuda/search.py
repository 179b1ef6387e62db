"""The search kernel: one thread a particle and rotation, all shifts at once by folding the band line by line.

The same sum as `numba_glocal.backends.lines` (docs/adr/0002): along z first, then y, then x. A thread keeps the sums over y of its
shifts along z in registers; those over x, one for each trial shift in the ball, in shared memory. Where a ball is wide, its shifts
along z are dealt out to several kernels ("groups"), each of which forms the products again.

A register has no index, so the kernel of a group is written out as text with a name for every sum: `kernel_source`. The text goes to a
file in the JIT cache, from where Numba loads it, and its compiled form, like any other function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_ROTATIONS = 16
"""Rotations of a block: templates are stored in blocks of this many."""

_SHARED_BYTES = 48 << 10


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

    @property
    def threads(self) -> int:
        """Threads of a block: one or two warps, so that a block's sums fit 48 KiB of shared memory."""
        return 64 if self.n_sums * 64 * 4 <= _SHARED_BYTES else 32

    def grid(self, n_rotations: int, n_particles: int) -> tuple[int, int]:
        """Blocks: four particles, and eight rotations a warp. Neighbouring blocks share rotations."""
        return -(-n_particles // 4), -(-n_rotations // (self.threads // 4))


def signed(row: int) -> int:
    """Step of a row in the order 0, +1, -1, +2, -2 .."""
    return (row + 1) // 2 if row % 2 else -(row // 2)


def shift_groups(steps: int, radius2: float, largest: int | None = None) -> tuple[ShiftGroup, ...]:
    """Groups for a ball of squared radius `radius2` (in steps): few enough sums for the registers and the shared memory of a thread."""
    if largest is None:
        largest = 3 if steps <= 3 else 2
        while largest > 1 and ShiftGroup(steps, radius2, 1, min(largest, steps), True).n_sums * 32 * 4 > _SHARED_BYTES:
            largest -= 1
    groups = [ShiftGroup(steps, radius2, 1, min(largest, steps), True)]
    while groups[-1].first + groups[-1].count <= steps:
        first = groups[-1].first + groups[-1].count
        groups.append(ShiftGroup(steps, radius2, first, min(largest, steps - first + 1), False))
    return tuple(groups)


class _Text:
    """Lines of code and their depth."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str, deeper: int = 0) -> None:
        self.lines.append("    " * (self.depth + deeper) + line)


def kernel_source(group: ShiftGroup) -> str:
    """Python text of a group's kernel, with a name for every sum.

    The function is ``search(templates, columns, line_start, line_length, plane_start, coefficients, n_pairs, n_rotations, n_particles,
    entries, weighted, multiplier, bias, best, best_shift)``: arguments as in `lines.search_block`; `templates` in blocks of sixteen
    rotations ``[block][pair][rotation][4]``; `columns` ``[particle][pair][4]``; `entries` as `ShiftGroup.entries`; `multiplier` and
    `bias` (particles, cube rows) are read only if `weighted`.
    """
    steps, rows = group.steps, group.z_rows
    z_steps = range(group.count)
    text = _Text()
    for line in (
        "from numba import cuda, float32",
        "",
        "from numba_glocal.backends.cuda.vector import load4",
        "",
        "",
        "@cuda.jit(fastmath=True, cache=True)",
        "def search(templates, columns, line_start, line_length, plane_start, coefficients, n_pairs, n_rotations, n_particles,",
        "           entries, weighted, multiplier, bias, best, best_shift):",
    ):
        text(line)
    text.depth = 1
    threads = group.threads
    text(f"shared = cuda.shared.array({group.n_sums * threads}, float32)")
    text("tid = cuda.threadIdx.x")
    text("lane, warp = tid % 32, tid // 32")
    text("# eight neighbouring rotations and four particles make a warp: what both load is shared within it")
    text(f"rotation = cuda.blockIdx.y * {threads // 4} + lane % 8 + 8 * warp")
    text("particle = cuda.blockIdx.x * 4 + lane // 8")
    text("source = min(particle, n_particles - 1)")
    text(f"t_base = (rotation // {TILE_ROTATIONS} * n_pairs * {TILE_ROTATIONS} + rotation % {TILE_ROTATIONS}) * 4")
    text("y_base = source * n_pairs * 4")
    text(f"for e in range({group.n_sums}):")
    text(f"shared[e * {threads} + tid] = float32(0.0)", 1)
    text("for x in range(plane_start.shape[0] - 1):")
    text.depth = 2

    def sums_of_line(number: str, to: str) -> None:
        """Sums along the line `number`, left in names that begin with `to`."""
        text(f"at, pairs = line_start[{number}], line_length[{number}]")
        zero = [f"{to}0r", f"{to}0i"] if group.has_zero else []
        names = zero + [f"{kind}{g}{part}" for g in z_steps for kind in "cs" for part in "ri"]
        for name in names:
            text(f"{name} = float32(0.0)")
        text("t, y, k = t_base + at * 64, y_base + at * 4, 0")
        text("for j in range(pairs):")
        text.depth += 1
        text("fr, fi, gr, gi = load4(templates, t)")
        text("yr, yi, wr, wi = load4(columns, y)")
        text("pr, pi = fr * yr + fi * yi, fr * yi - fi * yr")
        text("qr, qi = gr * wr + gi * wi, gr * wi - gi * wr")
        text("er, ei, dr, di = pr + qr, pi + qi, pr - qr, pi - qi")
        if group.has_zero:
            text(f"{to}0r += er")
            text(f"{to}0i += ei")
        for g in z_steps:
            k = 2 * (group.first - 1 + g)
            text(f"cos, sin = coefficients[k + {k}], coefficients[k + {k + 1}]")
            text(f"c{g}r += cos * er")
            text(f"c{g}i += cos * ei")
            text(f"s{g}r += sin * dr")
            text(f"s{g}i += sin * di")
        text(f"t += {TILE_ROTATIONS * 4}")
        text("y += 4")
        text(f"k += {2 * steps}")
        text.depth -= 1
        first = 1 if group.has_zero else 0
        for g in z_steps:
            a, b = first + 2 * g, first + 2 * g + 1
            text(f"{to}{a}r, {to}{a}i = c{g}r - s{g}i, c{g}i + s{g}r")
            text(f"{to}{b}r, {to}{b}i = c{g}r + s{g}i, c{g}i - s{g}r")

    text("first = plane_start[x]")
    sums_of_line("first", "a")
    for r in range(len(rows)):
        for m in range(steps + 1):
            text(f"C{m}_{r}r, C{m}_{r}i = a{r}r, a{r}i")
            if m:
                text(f"S{m}_{r}r, S{m}_{r}i = float32(0.0), float32(0.0)")
    text("ky = 0")
    text("for number in range(first + 1, plane_start[x + 1], 2):")
    text.depth += 1
    text(f"ky += {2 * steps}")
    sums_of_line("number", "a")
    sums_of_line("number + 1", "b")
    for m in range(1, steps + 1):
        text(f"cos{m}, sin{m} = coefficients[ky + {2 * m - 2}], coefficients[ky + {2 * m - 1}]")
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
        text(f"cos{m}, sin{m} = coefficients[x * {2 * steps} + {2 * m - 2}], coefficients[x * {2 * steps} + {2 * m - 1}]")
    place = 0
    for r, y in group.columns():
        my = (y + 1) // 2
        if my == 0:
            text(f"br, bi = C0_{r}r, C0_{r}i")
        elif y % 2:
            text(f"br, bi = C{my}_{r}r - S{my}_{r}i, C{my}_{r}i + S{my}_{r}r")
        else:
            text(f"br, bi = C{my}_{r}r + S{my}_{r}i, C{my}_{r}i - S{my}_{r}r")
        text(f"shared[{place * threads} + tid] += br")
        place += 1
        for m in range(1, group.reach(r, y) + 1):
            text(f"shared[{place * threads} + tid] += cos{m} * br")
            text(f"shared[{(place + 1) * threads} + tid] += sin{m} * bi")
            place += 2
    text.depth = 1
    text("if particle < n_particles and rotation < n_rotations:")
    text.depth = 2
    if group.has_zero:
        text("top, where = float32(-1e38), -1")
    else:
        text("top, where = best[particle, rotation], best_shift[particle, rotation]")
    text("for e in range(entries.shape[0]):")
    text.depth = 3
    text("place, up, down = entries[e, 0], entries[e, 2], entries[e, 3]")
    text(f"value = shared[place * {threads} + tid]")
    text("other = value")
    text("if entries[e, 1]:")
    text(f"w = shared[(place + 1) * {threads} + tid]", 1)
    text("value, other = value - w, value + w", 1)
    text("if weighted:")
    text("value = value * multiplier[particle, up] + bias[particle, up]", 1)
    text("other = other * multiplier[particle, down] + bias[particle, down]", 1)
    text("if value > top:")
    text("top, where = value, up", 1)
    text("if other > top:")
    text("top, where = other, down", 1)
    text.depth = 2
    text("best[particle, rotation] = top")
    text("best_shift[particle, rotation] = where")
    return "\n".join(text.lines) + "\n"


@lru_cache(maxsize=64)
def search_kernel(group: ShiftGroup) -> Any:
    """The kernel of a group, from its text in the JIT cache."""
    source = kernel_source(group)
    digest = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or tempfile.gettempdir()) / "numba-glocal-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"search_{group.steps}_{group.first}_{digest}"
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != source:
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(source)
        os.replace(temporary, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.search


def coefficient_table(steps: int, step_voxels: float, box_size: int, top: int) -> NDArray[np.float32]:
    """cos and sin of ``2 pi step m z / box`` for z = 0 .. top and m = 1 .. steps, flat."""
    from ..lines import phase_coefficients

    return phase_coefficients(steps, step_voxels, box_size, top).ravel() if steps else np.zeros(2, np.float32)
