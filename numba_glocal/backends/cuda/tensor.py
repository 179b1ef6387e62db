"""The search on the tensor cores, in half precision: the lines of `numba_glocal.backends.lines`, summed by small matrix products.

For one step of the trial shifts along z, the sums along a line of the band,

    G(y, x) = sum over z of conj(F_L) Y exp(2 pi i z tz),

are a matrix product: rotations by particles, with the line's samples as the common depth. A warp forms it for 16 rotations and 8
particles with ``mma.m16n8k16`` and folds it at once, in registers, into the sums of all trial shifts (tx, ty) of a disc. So neither
shifted templates nor products ever go to memory, few particles cost no more than many, and a result does not depend on what else is in
the batch (docs/adr/0009).

Operands are stored in the order in which a warp's lanes take them ("fragments"): four pairs of samples make a chunk of depth 16; lane
``4 g + p`` holds pair p of rotations g and g + 8, and of particles' columns g of two tiles of eight columns (real and imaginary part of
four particles each). A line is padded to whole chunks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config
from numpy.typing import NDArray

from .. import lines
from . import launching, packing, scoring
from .scratch import Scratch
from .written import Text, allow_shared, written_function

_PAIRS = 4
_ROTATIONS = 16
_ITEMS = 8
_WORDS = 128  # of a fragment: 32 lanes of 4
_SUMS = 29
"""Sums over the band that a thread keeps for each of its two rotations and two particles: the disc of radius 3 has as many."""

_ROW = 32
"""Words of a unit's row: coefficients and the next unit's header."""

_NESTED = (9, _SUMS)
_CLOCKS_PER_CHUNK, _CLOCKS_PER_SUM = 20.0, 0.36  # of a warp's tile
_MULTIPROCESSORS, _CLOCKS_PER_US, _LAUNCHES_US = 132, 1755.0, 300.0


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How a block is made up.

    Attributes
    ----------
    rows, items : int
        Warps along rotations and along particles.
    blocks : int
        Blocks that a multiprocessor holds at once; the compiler rations registers by it.
    depth : int
        Chunks of a stage, at most.
    """

    rows: int
    items: int
    blocks: int
    depth: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.rows * self.items

    @property
    def stage_words(self) -> int:
        """Words of shared memory of one stage."""
        return self.depth * ((self.rows + self.items) * _WORDS + _ROW)

    def shared_bytes(self, sums: int) -> int:
        """Dynamic shared memory: the stages; at the end, every thread's sums."""
        return 4 * max(sums * self.threads, 2 * self.stage_words)


SHAPE = BlockShape(4, 3, 1, 24)


@dataclass(frozen=True, slots=True)
class Weighting:
    """Factors and offsets of the trial shifts, on the device; read only where `used`."""

    used: bool
    multiplier: Any
    bias: Any


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether this process's GPU has the tensor cores' instruction: compute capability 8.0 or later."""
    return not config.ENABLE_CUDASIM and tuple(cuda.get_current_device().compute_capability) >= (8, 0)


# -- trial shifts of one step along z ----------------------------------------------------------------------------------


def quadrants(largest2: float) -> list[tuple[int, int]]:
    """(|tx|, |ty|) with ``tx^2 + ty^2 <= largest2``, nearest first."""
    top = int(np.sqrt(largest2))
    return sorted(
        ((x, y) for x in range(top + 1) for y in range(top + 1) if x * x + y * y <= largest2 + 1e-9), key=lambda e: (e[0] ** 2 + e[1] ** 2, e)
    )


def n_shifts(entry: tuple[int, int]) -> int:
    """Trial shifts, and sums, of an entry: those with either sign of tx and ty."""
    return (2 if entry[0] else 1) * (2 if entry[1] else 1)


def disc_groups(largest2: float) -> list[tuple[tuple[int, int], ...]]:
    """Entries of a disc dealt out to kernels. Few different groups occur, so that few kernels are compiled: groups may reach beyond the disc.

    Returns
    -------
    list of tuples
        The first is a small disc or the largest that a kernel holds; the others follow it outwards, whole.
    """
    wanted = quadrants(largest2)
    total = sum(map(n_shifts, wanted))
    whole = quadrants(2.0 * (lines.MAX_SHIFT_STEPS + 1) ** 2)
    size = next((size for size in _NESTED if size >= total), _SUMS)
    groups: list[tuple[tuple[int, int], ...]] = []
    taken, at = 0, 0
    while taken < total:
        room, group = (size if not groups else _SUMS), []
        while at < len(whole) and n_shifts(whole[at]) <= room:
            room -= n_shifts(whole[at])
            group.append(whole[at])
            at += 1
        groups.append(tuple(group))
        taken += sum(n_shifts(entry) for entry in group)
    return groups


def entry_table(group: tuple[tuple[int, int], ...], steps: int) -> NDArray[np.float32]:
    """Every trial shift of a group, (shifts, 8): place of its first sum, number of further ones, their three signs, row of (tx, ty), radius^2.

    Rows of the shift cube have the order 0, +1, -1, +2, -2 .. along each axis; the row is that at z step 0.
    """
    width, rows, place = 2 * steps + 1, [], 0
    for x, y in group:
        signs_x, signs_y = ((1, -1) if x else (1,)), ((1, -1) if y else (1,))
        for sx, sy in itertools.product(signs_x, signs_y):
            # num = cx cy Sr - sy cx Di - sx cy Si - sx sy Dr, of which a group keeps the four sums apart
            if x and y:
                signs = (-sy, -sx, -sx * sy)
            else:
                signs = (-(sx if x else sy), 0, 0)
            row_x, row_y = (2 * x - 1 if sx > 0 else 2 * x) if x else 0, (2 * y - 1 if sy > 0 else 2 * y) if y else 0
            outside = x > steps or y > steps
            rows.append((place, n_shifts((x, y)) - 1, *signs, (row_x * width + row_y) * width, 1e9 if outside else x * x + y * y, 0))
        place += n_shifts((x, y))
    return np.array(rows, np.float32)


def factors(group: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """(axis, step) of the phases that a group needs: axis 0 for x, 1 for y."""
    return [(axis, step) for axis in (0, 1) for step in sorted({entry[axis] for entry in group} - {0})]


def coefficients(group: tuple[tuple[int, int], ...], units: NDArray[np.int32], angle: float) -> NDArray[np.float32]:
    """cos and sin of a unit's phases (a unit is a pair of lines at +y and -y), in the order of `factors`, (units, 2 factors).

    Parameters
    ----------
    units : (u, 6) int32
        Columns 4 and 5 are x and y.
    angle : float
        ``2 pi step / box``.
    """
    table = np.zeros((len(units), 2 * len(factors(group))), np.float32)
    for number, (axis, step) in enumerate(factors(group)):
        phase = angle * step * units[:, 4 + axis].astype(np.float64)
        table[:, 2 * number], table[:, 2 * number + 1] = np.cos(phase), np.sin(phase)
    return table


def unit_rows(table: NDArray[np.float32], units: NDArray[np.int32]) -> NDArray[np.int32]:
    """Rows of 32 words, (u, 32) int32: a unit's phases, and in the last word its header: chunks of a line, times 2, plus 1 if it has two."""
    rows = np.zeros((len(units), _ROW), np.float32)
    rows[:, : table.shape[1]] = table
    words = rows.view(np.int32)
    words[:, _ROW - 1] = 2 * units[:, 1] + units[:, 2]
    return words


def stages_of(units: NDArray[np.int32], depth: int) -> NDArray[np.int32]:
    """Whole units dealt out to stages of at most `depth` chunks, (s, 4): first chunk, chunks, first unit, units.

    Raises
    ------
    ValueError
        A unit is longer than `depth`.
    """
    length = units[:, 1] * (1 + units[:, 2])
    if int(length.max()) > depth:
        raise ValueError(f"a unit of {int(length.max())} chunks does not fit a stage of {depth}")
    rows, first, held = [], 0, 0
    for unit, chunks in enumerate(length):
        if held + chunks > depth:
            rows.append((units[first, 0], held, first, unit - first))
            first, held = unit, 0
        held += int(chunks)
    rows.append((units[first, 0], held, first, len(units) - first))
    return np.array(rows, np.int32)


# -- the band in chunks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunks:
    """A `lines.LineBand` whose lines are padded to whole chunks of four pairs.

    Attributes
    ----------
    pair : (4 chunks,) int32
        Pair of every place; -1 for padding.
    units : (u, 6) int32
        First chunk, chunks of a line, whether there is a line at -y too (in the chunks that follow), 0, x, y.
    """

    pair: NDArray[np.int32]
    units: NDArray[np.int32]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.pair) // _PAIRS


def chunks_of(band: lines.LineBand) -> Chunks:
    """Pads the lines of a band."""
    length = -(-band.line_length // _PAIRS)
    first = np.concatenate([[0], np.cumsum(length)])
    pair = np.full(int(first[-1]) * _PAIRS, -1, np.int32)
    for number, start in enumerate(band.line_start):
        at = int(first[number]) * _PAIRS
        pair[at : at + band.line_length[number]] = np.arange(start, start + band.line_length[number])
    units = []
    for x in range(len(band.plane_start) - 1):
        for y, number in enumerate([band.plane_start[x], *range(band.plane_start[x] + 1, band.plane_start[x + 1], 2)]):
            units.append((first[number], length[number], int(y > 0), 0, x, y))
    return Chunks(pair, np.array(units, np.int32))


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernel_source(group: tuple[tuple[int, int], ...], shape: BlockShape) -> str:
    """Python text of the kernel of a group of trial shifts.

    The function is ``search(rotated, columns, column_size, stages, unit_rows, chunks, row_tiles, item_tiles, entries, first_row, largest2,
    scales, factor, weighted, multiplier, bias, best)``: `rotated` and `columns` are fragments as int32, those of the z steps of the grid's
    third axis `column_size` words apart; `stages` and `unit_rows` as the functions of these names make them, flat int32; `first_row` (z)
    int32 and `largest2` (z) float32 are each z step's row of the shift cube and squared radius of its disc; `best` (w, a) uint64 as
    `scoring.unpack_best` reads it; the rest as in `TensorSearch.run`.

    A block's warps share what they multiply: its tiles of rotations and particles, and the rows of the units, come through shared memory
    stage by stage. The copies of the next stage are on their way while one is used. Code is kept short: it has to fit the instruction cache.
    Names are few too, and `keep_best` a function of its own: Numba takes longer over a text than in proportion to its names and statements.
    """
    sums = [f"{x}_{y}_{part}" for x, y in group for part in range(n_shifts((x, y)))]
    depth, threads, stage, tiles = shape.depth, shape.threads, shape.stage_words, shape.rows + shape.items
    text = Text()
    for line in (
        "from numba import cuda, float32, int32, int64, uint64",
        "",
        "from numba_glocal.backends.cuda.scoring import ordered_score",
        "from numba_glocal.backends.cuda.vector import add_scaled4, copy_async, jit_for_blocks, load4, load_words4, multiply_tile, wait_for_copies",
        "",
        "",
        "@cuda.jit(device=True, fastmath=True)",
        "def keep_best(shared, tid, z, item, rotation, entries, first_row, largest2, scales, factor, weighted, multiplier, bias, best):",
        "    top, where = float32(-1e38), int32(0)",
        "    back = float32(1.0) / (scales[item] * factor)",
        "    for e in range(entries.shape[0] // 8):",
        "        place, further, s1, s2 = load4(entries, 8 * e)",
        "        s3, row_xy, radius2, spare = load4(entries, 8 * e + 4)",
        "        if radius2 <= largest2[z]:",
        f"            own = tid + int32(place) * int32({threads})",
        "            value = shared[own]",
        "            if further > 0:",
        f"                value += s1 * shared[own + {threads}]",
        "            if further > 1:",
        f"                value += s2 * shared[own + {2 * threads}] + s3 * shared[own + {3 * threads}]",
        "            value *= back",
        "            cube_row = int32(row_xy) + first_row[z]",
        "            if weighted:",
        "                value = value * multiplier[item, cube_row] + bias[item, cube_row]",
        "            if value > top:",
        "                top, where = value, cube_row",
        "    cuda.atomic.max(best, (item, rotation), ordered_score(top, where))",
        "",
        "",
        f"@jit_for_blocks({threads}, {shape.blocks})",
        "def search(rotated, columns, column_size, stages, unit_rows, chunks, row_tiles, item_tiles, entries, first_row, largest2,",
        "           scales, factor, weighted, multiplier, bias, best):",
    ):
        text(line)
    text.depth = 1
    text("words, shared = cuda.shared.array(0, int32), cuda.shared.array(0, float32)")
    text("tid, z = int32(cuda.threadIdx.x), cuda.blockIdx.z")
    text("lane, warp = tid % int32(32), tid // int32(32)")
    text(f"row_tile0, item_tile0 = cuda.blockIdx.x * {shape.rows}, cuda.blockIdx.y * {shape.items}")
    text(f"row_tile, item_tile = row_tile0 + warp % {shape.rows}, item_tile0 + warp // {shape.rows}")
    for tile in range(tiles):
        if tile < shape.rows:
            text(f"s{tile} = min(row_tile0 + {tile}, row_tiles - 1) * int64(chunks) * {_WORDS}")
        else:
            text(f"s{tile} = z * int64(column_size) + min(item_tile0 + {tile - shape.rows}, item_tiles - 1) * int64(chunks) * {_WORDS}")
    # each sum is a tuple, of the four pairs of a rotation and a particle that a thread has
    text("zeros = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))")
    for name in sums:
        text(f"p_{name} = zeros")
    text(f"own_a = (warp % int32({shape.rows})) * int32({depth * _WORDS}) + lane * int32(4)")
    text(f"own_b = (int32({shape.rows}) + warp // int32({shape.rows})) * int32({depth * _WORDS}) + lane * int32(4)")
    text("n_stages = stages.shape[0] // 4")
    text("units = int32(0)")
    text("# round `number` copies the stage of this number and uses the one before it")
    text("for number in range(n_stages + 1):")
    text.depth = 2
    text(f"into = int32(number & 1) * int32({stage})")
    text(f"base = int32({stage}) - into")
    text("wait_for_copies()")
    text("cuda.syncthreads()")
    text("units_now = units")
    text("if number < n_stages:")
    text.depth = 3
    text("chunk0, count, unit0, units = load_words4(stages, 4 * number)")
    text("i = tid")
    text("while i < count * int32(32):")
    text.depth = 4
    text(f"at, to = int64(chunk0) * {_WORDS} + int64(i) * 4, into + i * int32(4)")
    for tile in range(tiles):
        array = "rotated" if tile < shape.rows else "columns"
        text(f"copy_async(words, to + int32({tile * depth * _WORDS}), {array}, s{tile} + at)")
    text(f"i += int32({threads})")
    text.depth = 3
    text("i = tid")
    text("while i < units * int32(8):")
    text(f"copy_async(words, into + int32({tiles * depth * _WORDS}) + i * int32(4), unit_rows, int64(unit0) * {_ROW} + i * 4)", 1)
    text(f"i += int32({threads})", 1)
    text.depth = 2
    text("if number == 0:")
    text("continue", 1)
    text(f"a, b, row = base + own_a, base + own_b, base + int32({tiles * depth * _WORDS})")
    text("for unit in range(units_now):")
    text.depth = 3
    text(f"header = words[row + int32({_ROW - 1})]")
    text("count, paired = header >> int32(1), header & int32(1)")
    for name in "gh":
        for tile in range(2):
            text(", ".join(f"{name}{tile}{i}" for i in range(4)) + " = " + ", ".join(["float32(0.0)"] * 4))

    def lines_sum(name: str) -> None:
        text(f"end = a + count * int32({_WORDS})")
        text("while a < end:")
        text.depth += 1
        text("a0, a1, a2, a3 = load_words4(words, a)")
        text("b0, b1, b2, b3 = load_words4(words, b)")
        for tile in range(2):
            names = ", ".join(f"{name}{tile}{i}" for i in range(4))
            text(f"{names} = multiply_tile({names}, a0, a1, a2, a3, b{2 * tile}, b{2 * tile + 1})")
        text(f"a += int32({_WORDS})")
        text(f"b += int32({_WORDS})")
        text.depth -= 1

    lines_sum("g")
    text("if paired:")
    text.depth = 4
    lines_sum("h")
    text.depth = 3
    phases = factors(group)
    for word in range(0, 2 * len(phases), 4):
        text(", ".join(f"k{word + i}" for i in range(4)) + f" = load4(shared, row + int32({word}))")
    text(f"row += int32({_ROW})")
    for corner in range(4):
        tile, part_row = corner % 2, corner // 2
        re, im = 2 * part_row, 2 * part_row + 1
        text(f"sr{corner}, si{corner} = g{tile}{re} + h{tile}{re}, g{tile}{im} + h{tile}{im}")
        text(f"dr{corner}, di{corner} = g{tile}{re} - h{tile}{re}, g{tile}{im} - h{tile}{im}")
    for name in ("sr", "si", "dr", "di"):
        text(f"{name} = ({', '.join(f'{name}{corner}' for corner in range(4))})")
    for x, y in group:
        cx, cy = 2 * phases.index((0, x)) if x else 0, 2 * phases.index((1, y)) if y else 0
        if x and y:
            parts = [(f"k{cx} * k{cy}", "sr"), (f"k{cx} * k{cy + 1}", "di"), (f"k{cx + 1} * k{cy}", "si"), (f"k{cx + 1} * k{cy + 1}", "dr")]
        elif x:
            parts = [(f"k{cx}", "sr"), (f"k{cx + 1}", "si")]
        elif y:
            parts = [(f"k{cy}", "sr"), (f"k{cy + 1}", "di")]
        else:
            parts = [("float32(1.0)", "sr")]
        for part, (factor, value) in enumerate(parts):
            text(f"p_{x}_{y}_{part} = add_scaled4(p_{x}_{y}_{part}, {factor}, {value})")
    text.depth = 1
    text("cuda.syncthreads()")
    for corner in range(4):
        tile, part_row = corner % 2, corner // 2
        text(f"rotation, item = row_tile * {_ROTATIONS} + lane // 4 + {8 * part_row}, item_tile * {_ITEMS} + lane % 4 + {4 * tile}")
        text("if rotation < best.shape[1] and item < best.shape[0]:")
        text.depth = 2
        for place, name in enumerate(sums):
            text(f"shared[tid + {place * threads}] = p_{name}[{corner}]")
        text("keep_best(shared, tid, z, item, rotation, entries, first_row, largest2, scales, factor, weighted, multiplier, bias, best)")
        text.depth = 1
    return str(text)


@lru_cache(maxsize=64)
def search_kernel(group: tuple[tuple[int, int], ...], shape: BlockShape) -> Any:
    """The kernel of a group of trial shifts."""
    return written_function(kernel_source(group, shape), f"tensor_{len(group)}", "search")


@lru_cache(maxsize=64)
def _plane_clocks(steps: int, largest2: float) -> tuple[tuple[float, int], ...]:
    """Clocks of a chunk for each distance along z of a ball's trial shifts, and how many planes lie at it."""
    return tuple(
        (sum(_CLOCKS_PER_CHUNK + _CLOCKS_PER_SUM * sum(map(n_shifts, group)) for group in disc_groups(largest2 - z * z)), 2 if z else 1)
        for z in range(steps + 1)
        if z * z <= largest2
    )


def tensor_us(band: lines.LineBand, cube: lines.ShiftCube, largest2: float, n_rotations: int, items: int) -> float:
    """What the search of a level should take, by clocks measured on one H200 (benchmarks/cuda_steps.py)."""
    chunks = int((-(-band.line_length // _PAIRS)).sum())
    rows = -(-n_rotations // (_ROTATIONS * SHAPE.rows))
    columns = -(-items // (_ITEMS * SHAPE.items))
    total = sum(clocks * planes * max(rows * columns, _MULTIPROCESSORS / planes) for clocks, planes in _plane_clocks(cube.steps, largest2))
    total *= SHAPE.rows * SHAPE.items
    return _LAUNCHES_US + total * chunks / (_MULTIPROCESSORS * _CLOCKS_PER_US)


# -- the search of a level ---------------------------------------------------------------------------------------------


def root_weights(band: lines.LineBand, inverse_sigma2: NDArray[np.float32]) -> NDArray[np.float32]:
    """Square root of 1 / sigma2 at every sample: taken from the particle's side and given to the templates, it keeps both in range.

    Next to nothing at samples that count nothing: below a high-pass a template's may be far larger than all others.
    """
    value = np.interp(band.radius, np.arange(len(inverse_sigma2)), inverse_sigma2.astype(np.float64))
    return np.sqrt(np.maximum(np.where(band.sample_weight > 0, value, 0.0), 1e-30)).astype(np.float32)


def unit_scale(powers: Any, root: NDArray[np.float32]) -> float:
    """Factor that brings rotated references, times `root`, to unit root mean square; from the power (a, m) of the first of them."""
    power = powers[0].copy_to_host().astype(np.float64)
    mean_square = float((power * root.astype(np.float64) ** 2).mean()) / 2.0
    return float(1.0 / np.sqrt(max(mean_square, 1e-30)))


@dataclass(frozen=True, slots=True)
class _Launch:
    """One kernel, for all z steps that need it.

    Attributes
    ----------
    group : tuple
    first_plane, planes : int
        Which of the shifted copies of the columns.
    entries, unit_rows, first_row, largest2 : device arrays
        See `kernel_source`.
    """

    group: tuple[tuple[int, int], ...]
    first_plane: int
    planes: int
    entries: Any
    unit_rows: Any
    first_row: Any
    largest2: Any


@dataclass(frozen=True, slots=True)
class TensorSearch:
    """What is common to all work items of a level.

    Attributes
    ----------
    band : LineBand
    cube : ShiftCube
    n_rotations : int
    chunks : Chunks
    pair, depth, root, angles : device arrays
        `angles`: phase of a step of z, ``2 pi step tz / box``, for tz = 0, +1, -1, +2 ..
    rotated : device array
        Rotated references as fragments, in half precision.
    scale : float
        Of the rotated references, to unit root mean square.
    launches : list
    planes : int
        Steps along z.
    """

    band: lines.LineBand
    cube: lines.ShiftCube
    n_rotations: int
    chunks: Chunks
    pair: Any
    depth: Any
    root: Any
    angles: Any
    rotated: Any
    scale: float
    launches: list[_Launch]
    planes: int

    @classmethod
    def make(
        cls,
        band: lines.LineBand,
        cube: lines.ShiftCube,
        largest2: float,
        box_size: int,
        templates: Any,
        powers: Any,
        n_rotations: int,
        inverse_sigma2: NDArray[np.float32],
    ) -> TensorSearch:
        """Turns the templates of `turning.fill_templates` into fragments and uploads what the kernels need of a level."""
        root = root_weights(band, inverse_sigma2)
        scale = unit_scale(powers, root)
        chunks = chunks_of(band)
        row_tiles = -(-n_rotations // _ROTATIONS)
        rotated = cuda.device_array(row_tiles * chunks.count * 2 * _WORDS, np.float16)
        pair, device_root = cuda.to_device(chunks.pair), cuda.to_device(root)
        packing.pack_rotated[launching.rotation_grid(-(-len(chunks.pair) // 128), row_tiles * _ROTATIONS), 128](
            templates, band.n_pairs, pair, device_root, n_rotations, np.float32(scale), rotated
        )
        angle = 2.0 * np.pi * cube.step_voxels / box_size
        steps = [0] + [s * z for z in range(1, cube.steps + 1) if z * z <= largest2 for s in (1, -1)]
        planes: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for plane, z in enumerate(steps):
            for group in disc_groups(largest2 - z * z):
                planes.setdefault(group, []).append(plane)
        launches = []
        for group, used in planes.items():
            assert used == list(range(used[0], used[-1] + 1)), "discs shrink with |z|, so a kernel's planes are neighbours"
            launches.append(
                _Launch(
                    group,
                    used[0],
                    len(used),
                    cuda.to_device(entry_table(group, cube.steps).ravel()),
                    cuda.to_device(unit_rows(coefficients(group, chunks.units, angle), chunks.units).ravel()),
                    cuda.to_device(np.array(used, np.int32)),
                    cuda.to_device(np.array([largest2 - steps[plane] ** 2 + 1e-6 for plane in used], np.float32)),
                )
            )
        return cls(
            band,
            cube,
            n_rotations,
            chunks,
            pair,
            cuda.to_device(np.where(chunks.pair >= 0, band.lattice[2 * chunks.pair, 2], 0).astype(np.float32)),
            device_root,
            cuda.to_device((angle * np.array(steps)).astype(np.float32)),
            rotated,
            scale,
            launches,
            len(steps),
        )

    @property
    def bytes_held(self) -> int:
        """Of the device."""
        return int(self.rotated.nbytes)

    def run(self, columns: Any, items: int, weighting: Weighting, best: Any, best_shift: Any, scratch: Scratch, shape: BlockShape = SHAPE) -> None:
        """Best num (times factor, plus offset) over the trial shifts of every item and rotation.

        Parameters
        ----------
        columns : (items, 4 p) float32 device array
        scratch : Scratch
        best : (items, n_rotations) float32, best_shift : (items, n_rotations) int32, set by this function
        """
        scales = scratch.array("column scales", items, np.float32)
        packing.column_scales[items, launching.REDUCE_THREADS](columns, self.root, 4 * self.band.n_pairs, np.float32(1.0), scales)
        tile_bytes = self.planes * self.chunks.count * 4 * _WORDS
        part = max(1, scratch.part_bytes // tile_bytes) * _ITEMS
        for first in range(0, items, part):
            last = min(items, first + part)
            own = Weighting(True, weighting.multiplier[first:last], weighting.bias[first:last]) if weighting.used else weighting
            self._run_part(columns[first:last], scales[first:last], own, best[first:last], best_shift[first:last], scratch, shape)

    def _run_part(self, columns: Any, scales: Any, weighting: Weighting, best: Any, best_shift: Any, scratch: Scratch, shape: BlockShape) -> None:
        items = columns.shape[0]
        row_tiles, item_tiles = -(-self.n_rotations // _ROTATIONS), -(-items // _ITEMS)
        plane_words = item_tiles * self.chunks.count * _WORDS
        packed = scratch.array("packed columns", self.planes * plane_words * 2, np.float16)
        packing.pack_columns[(-(-self.chunks.count // 4), item_tiles), 128](
            columns.reshape(columns.size), columns.shape[1], self.pair, self.depth, self.root, scales, self.angles, packed
        )
        found = scratch.array("scores found", (items, self.n_rotations), np.uint64)
        scoring.clear_best[(-(-self.n_rotations // 128), items), 128](found)
        rotated, shifted = self.rotated.view(np.int32), packed.view(np.int32)
        stages = cuda.to_device(stages_of(self.chunks.units, shape.depth).ravel())
        for launch in self.launches:
            kernel = search_kernel(launch.group, shape)
            arguments = (
                rotated,
                shifted[launch.first_plane * plane_words :],
                plane_words,
                stages,
                launch.unit_rows,
                self.chunks.count,
                row_tiles,
                item_tiles,
                launch.entries,
                launch.first_row,
                launch.largest2,
                scales,
                np.float32(self.scale),
                int(weighting.used),
                weighting.multiplier,
                weighting.bias,
                found,
            )
            shared = shape.shared_bytes(sum(map(n_shifts, launch.group)))
            allow_shared(kernel, arguments, shared)
            grid = -(-row_tiles // shape.rows), -(-item_tiles // shape.items), launch.planes
            kernel[grid, shape.threads, 0, shared](*arguments)
        scoring.unpack_best[(-(-self.n_rotations // 128), items), 128](found, best, best_shift)
