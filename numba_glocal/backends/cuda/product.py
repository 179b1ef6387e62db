"""The search of many particles as one matrix product (docs/scoring.md, 3; docs/adr/0009, 0015).

Rotated references are rows, turned particles columns, and cuBLAS multiplies them in half precision or 8-bit whole numbers. One side must be
written for every trial shift: the references where they are fewer than the particles, else the particles. `ways` says what each costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from .. import lines
from . import gemm, launching, packing, scoring
from .scratch import Scratch
from .tensor import Weighting, root_weights

_WRITE_BYTES_PER_US = {2: 2.4e6, 1: 2.0e6}
_FLOPS_PER_US = {2: 7.2e8, 1: 1.4e9}
_LAUNCHES_US = 100.0
_TILE_BYTES = 2 << 30
"""Of a tile of trial shifts, whatever the device has: cuBLAS may add up in another order where a product has another size."""
_PEAK = {2: 64.0, 1: 127.0}
"""Largest amplitude of a row. Half precision keeps eleven bits of what is a millionth of that; whole numbers are steps of one."""
_FAINTEST = 1e-3
"""Shells in which the reference has less than this of its largest amplitude are treated as if they had it."""


def padded(size: int) -> int:
    """`size` up to a multiple of what the tensor cores like."""
    return -(-size // gemm.ALIGNMENT) * gemm.ALIGNMENT


def largest_norm(number_bytes: int, depth: int) -> float:
    """Largest norm of a row of `depth` numbers before rounding.

    No sum of products of whole numbers, nor any part of it, is larger than the square of the rounded rows' norm (Cauchy and Schwarz), which must
    stay below 2^31. Rounding adds half a step to each number at most, summing powers in single precision less than a thousandth.
    """
    return 1e18 if number_bytes == 2 else 0.999 * math.sqrt(2.0**31) - 0.5 * math.sqrt(depth)


@dataclass(frozen=True, slots=True)
class Way:
    """How a product is made.

    Attributes
    ----------
    number_bytes : int
        2: half precision; 1: whole numbers of 8 bits, whose sums are exact.
    shifts_particles : bool
        Whether the trial shifts are on the particles' side.
    """

    number_bytes: int
    shifts_particles: bool

    def limits(self, depth: int) -> tuple[np.float32, np.float32]:
        """Largest amplitude and largest norm of a row of `depth` numbers."""
        return np.float32(_PEAK[self.number_bytes]), np.float32(largest_norm(self.number_bytes, depth))

    def microseconds(self, band: lines.LineBand, n_shifts: int, n_rotations: int, items: int) -> float:
        """What it should take, by rates measured on one H200 (benchmarks/cuda_steps.py)."""
        depth = padded(4 * band.n_pairs)
        written = (items if self.shifts_particles else n_rotations) * n_shifts * depth * self.number_bytes
        operations = 2.0 * n_rotations * depth * (padded(n_shifts * items) if self.shifts_particles else n_shifts * padded(items))
        return _LAUNCHES_US + written / _WRITE_BYTES_PER_US[self.number_bytes] + operations / _FLOPS_PER_US[self.number_bytes]


def ways(precision: str) -> list[Way]:
    """What a precision allows here; none without cuBLAS."""
    if precision == "single" or not gemm.available():
        return []
    return [Way(1 if precision == "int8" else 2, shifts_particles) for shifts_particles in (False, True)]


@dataclass(frozen=True, slots=True)
class ProductSearch:
    """What is common to all work items of a level.

    Attributes
    ----------
    way : Way
    band : LineBand
    n_rotations, n_shifts : int
    templates : device array
        As `turning.fill_templates` leaves them.
    lattice, root, turns, shift_rows : device arrays
        `root` as from `balanced_root`; `turns` of the trial shifts, the smallest, which is none, first.
    factors : (a,) float32 device array
        Of the templates, for the range of the numbers.
    """

    way: Way
    band: lines.LineBand
    n_rotations: int
    n_shifts: int
    templates: Any
    lattice: Any
    root: Any
    turns: Any
    shift_rows: Any
    factors: Any

    @classmethod
    def make(
        cls,
        way: Way,
        band: lines.LineBand,
        cube: lines.ShiftCube,
        box_size: int,
        templates: Any,
        powers: Any,
        n_rotations: int,
        lattice: Any,
        inverse_sigma2: NDArray[np.float32],
    ) -> ProductSearch:
        """Uploads what the kernels need of a level; `lattice` is that of the band, on the device."""
        root = cuda.to_device(balanced_root(band, inverse_sigma2, powers[0].copy_to_host()))
        factors = cuda.device_array(n_rotations, np.float32)
        packing.template_factors[n_rotations, launching.REDUCE_THREADS](powers, root, *way.limits(4 * band.n_pairs), factors)
        return cls(
            way,
            band,
            n_rotations,
            len(cube.inside),
            templates,
            lattice,
            root,
            cuda.to_device(shift_turns(cube, box_size)[cube.inside]),
            cuda.to_device(cube.inside.astype(np.int32)),
            factors,
        )

    @property
    def bytes_held(self) -> int:
        """Of the device, with the templates: they stay as long as this does."""
        return int(self.root.nbytes + self.templates.nbytes)

    def run(self, columns: Any, items: int, weighting: Weighting, best: Any, best_shift: Any, scratch: Scratch) -> None:
        """Best num (times factor, plus offset) over the trial shifts of every item and rotation.

        Parameters
        ----------
        columns : (items, 4 p) float32 device array
        scratch : Scratch
        best : (items, n_rotations) float32, best_shift : (items, n_rotations) int32, set by this function
        """
        number, shifts_columns = self.way.number_bytes, self.way.shifts_particles
        depth = padded(4 * self.band.n_pairs)
        wide = items if shifts_columns else padded(items)  # where there are many shifts of them, all together are padded
        kind, kind_out = (np.float16, np.float32) if number == 2 else (np.int8, np.int32)
        scales = scratch.array("column scales", items, np.float32)
        packing.column_factors[items, launching.REDUCE_THREADS](columns, self.root, *self.way.limits(4 * self.band.n_pairs), scales)
        rows = wide if shifts_columns else self.n_rotations  # that are written for every shift
        most = min(_TILE_BYTES, scratch.part_bytes) // max(number * rows * depth, 4 * self.n_rotations * wide)
        tile = int(max(1, min(self.n_shifts, most)))
        tile = math.ceil(self.n_shifts / math.ceil(self.n_shifts / tile))  # of one size
        most_columns = padded((tile if shifts_columns else 1) * wide)
        narrow_columns = scratch.array("narrow columns", most_columns * depth, kind)
        narrow_templates = scratch.array("narrow templates", (1 if shifts_columns else tile) * self.n_rotations * depth, kind)
        products = scratch.array("products", (1 if shifts_columns else tile) * self.n_rotations * most_columns, kind_out)
        blocks = -(-depth // 512)

        def fill_columns(first: int, count: int) -> None:
            packing.narrow_columns[(blocks, -(-wide // packing.TOGETHER)), 128](
                columns, self.root, scales, self.lattice, self.turns, first, count, wide, depth, narrow_columns
            )

        def fill_templates(first: int, count: int) -> None:
            packing.narrow_templates[launching.rotation_grid(blocks, -(-self.n_rotations // packing.TOGETHER)), 128](
                self.templates,
                self.band.n_pairs,
                self.lattice,
                self.root,
                self.turns,
                first,
                count,
                self.n_rotations,
                self.factors,
                depth,
                narrow_templates,
            )

        fill_once, fill_each = (fill_templates, fill_columns) if shifts_columns else (fill_columns, fill_templates)
        fill_once(0, 1)
        for first in range(0, self.n_shifts, tile):
            count = min(tile, self.n_shifts - first)
            fill_each(first, count)
            if shifts_columns:
                all_columns = padded(count * wide)  # those past the last hold anything, and nobody reads what they give
                gemm.product_narrow(narrow_templates, narrow_columns, products, self.n_rotations, all_columns, depth)
                strides = wide, all_columns
            else:
                gemm.product_narrow(narrow_templates, narrow_columns, products, count * self.n_rotations, wide, depth)
                strides = self.n_rotations * wide, wide
            grid = launching.rotation_grid(-(-items // scoring.TILE_ITEMS), -(-self.n_rotations // scoring.TILE_ROTATIONS))
            scoring.best_of_tile[grid, (scoring.TILE_ITEMS, scoring.TILE_ROTATIONS)](
                products,
                *strides,
                first,
                count,
                self.n_rotations,
                self.shift_rows,
                scales,
                self.factors,
                int(weighting.used),
                weighting.multiplier,
                weighting.bias,
                best,
                best_shift,
            )


def shift_turns(cube: lines.ShiftCube, box_size: int) -> NDArray[np.float32]:
    """``step m / box`` of every row of a shift cube, along the lattice's own axes: (rows, 3)."""
    return ((cube.shifts_voxels @ lines.GENERIC_ROTATION) / box_size).astype(np.float32)


def balanced_root(band: lines.LineBand, inverse_sigma2: NDArray[np.float32], power: NDArray[np.float32]) -> NDArray[np.float32]:
    """What templates are multiplied by and columns divided by: (2 p,) float32.

    With `root_weights` alone a column is as strong in every shell as its noise, and a template falls off as the signal does: in steps of one size
    its faint shells would be lost. Divided by the square root of its amplitude both sides fall off alike, and a product loses least.

    Parameters
    ----------
    power : (2 p,) float32
        Of a rotated reference.
    """
    root = root_weights(band, inverse_sigma2)
    used = band.sample_weight > 0
    shell = np.rint(band.radius[used]).astype(int)
    mean_square = np.bincount(shell, (power * root.astype(np.float64) ** 2)[used]) / np.maximum(np.bincount(shell), 1)
    amplitude = np.sqrt(mean_square)
    amplitude = np.maximum(amplitude, max(_FAINTEST * float(amplitude.max(initial=0.0)), 1e-30))
    root[used] /= np.sqrt(amplitude)[shell]
    return root
