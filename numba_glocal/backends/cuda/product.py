"""The search of many particles as one matrix product (docs/scoring.md, 3; docs/adr/0009, 0015).

Rotated references are rows, turned particles columns, and cuBLAS multiplies them in half precision or FP8. One side must be written for every
trial shift: the references where they are fewer than the particles, else the particles. `ways` says what each costs.
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

_WRITE_BYTES_PER_US = {2: 1.2e6, 1: 0.9e6}
_FLOPS_PER_US = {2: 7.0e8, 1: 1.3e9}
_LAUNCHES_US = 150.0
_TILE_BYTES = 2 << 30
"""Of a tile of trial shifts, whatever the device has: cuBLAS may add up in another order where a product has another size."""
_LARGEST = {2: 64.0, 1: 200.0}
"""Largest number of the first rotation's templates, which others may exceed: half precision has room to 65,504 and keeps 11 bits down to 6e-5,
FP8 (e4m3) has room to 448 and keeps 4 bits down to 0.016."""
_COLUMN_SCALE = {2: 1.0, 1: 8.0}


def padded(size: int) -> int:
    """`size` up to a multiple of what the tensor cores like."""
    return -(-size // gemm.ALIGNMENT) * gemm.ALIGNMENT


@dataclass(frozen=True, slots=True)
class Way:
    """How a product is made.

    Attributes
    ----------
    number_bytes : int
        2: half precision; 1: FP8.
    shifts_particles : bool
        Whether the trial shifts are on the particles' side.
    """

    number_bytes: int
    shifts_particles: bool

    def microseconds(self, band: lines.LineBand, n_shifts: int, n_rotations: int, items: int) -> float:
        """What it should take, by rates measured on one H200 (benchmarks/cuda_steps.py)."""
        depth, wide = padded(4 * band.n_pairs), padded(items)
        written = (wide if self.shifts_particles else n_rotations) * n_shifts * depth * self.number_bytes
        operations = 2.0 * n_rotations * n_shifts * depth * wide
        return _LAUNCHES_US + written / _WRITE_BYTES_PER_US[self.number_bytes] + operations / _FLOPS_PER_US[self.number_bytes]


def ways(precision: str) -> list[Way]:
    """What a precision allows here; none without cuBLAS."""
    if precision == "single" or not gemm.available():
        return []
    return [Way(1 if precision == "fp8" else 2, shifts_particles) for shifts_particles in (False, True)]


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
        `turns` of the trial shifts, the smallest, which is none, first.
    scale : float
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
    scale: float

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
        root = root_weights(band, inverse_sigma2)
        return cls(
            way,
            band,
            n_rotations,
            len(cube.inside),
            templates,
            lattice,
            cuda.to_device(root),
            cuda.to_device(shift_turns(cube, box_size)[cube.inside]),
            cuda.to_device(cube.inside.astype(np.int32)),
            _LARGEST[way.number_bytes] / largest_template(powers, root),
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
        size, number = 4 * self.band.n_pairs, self.way.number_bytes
        depth, wide = padded(size), padded(items)
        kind: Any = np.float16 if number == 2 else np.uint8
        multiply = gemm.product_half if number == 2 else gemm.product_eight
        scales = scratch.array("column scales", items, np.float32)
        packing.column_scales[items, launching.REDUCE_THREADS](columns, self.root, size, np.float32(_COLUMN_SCALE[number]), scales)
        shifts_columns = self.way.shifts_particles
        rows = wide if shifts_columns else self.n_rotations  # that are written for every shift
        most = min(_TILE_BYTES, scratch.part_bytes) // max(number * rows * depth, 4 * self.n_rotations * wide)
        tile = int(max(1, min(self.n_shifts, most)))
        tile = math.ceil(self.n_shifts / math.ceil(self.n_shifts / tile))  # of one size
        narrow_columns = scratch.array("narrow columns", (tile if shifts_columns else 1) * wide * depth, kind)
        narrow_templates = scratch.array("narrow templates", (1 if shifts_columns else tile) * self.n_rotations * depth, kind)
        products = scratch.array("products", tile * self.n_rotations * wide, np.float32)
        blocks = -(-depth // 512)

        def fill_columns(first: int, count: int) -> None:
            packing.narrow_columns[(blocks, wide), 128](
                columns, self.root, scales, self.lattice, self.turns, first, count, wide, depth, narrow_columns
            )

        def fill_templates(first: int, count: int) -> None:
            packing.narrow_templates[launching.rotation_grid(blocks, self.n_rotations), 128](
                self.templates,
                self.band.n_pairs,
                self.lattice,
                self.root,
                self.turns,
                first,
                count,
                self.n_rotations,
                np.float32(self.scale),
                depth,
                narrow_templates,
            )

        fill_once, fill_each = (fill_templates, fill_columns) if shifts_columns else (fill_columns, fill_templates)
        fill_once(0, 1)
        for first in range(0, self.n_shifts, tile):
            count = min(tile, self.n_shifts - first)
            fill_each(first, count)
            if shifts_columns:
                multiply(narrow_templates, narrow_columns, products, self.n_rotations, count * wide, depth)
                strides = wide, count * wide
            else:
                multiply(narrow_templates, narrow_columns, products, count * self.n_rotations, wide, depth)
                strides = self.n_rotations * wide, wide
            scoring.best_of_tile[launching.rotation_grid(-(-items // 128), self.n_rotations), 128](
                products,
                *strides,
                first,
                count,
                self.n_rotations,
                self.shift_rows,
                scales,
                np.float32(self.scale),
                int(weighting.used),
                weighting.multiplier,
                weighting.bias,
                best,
                best_shift,
            )


def shift_turns(cube: lines.ShiftCube, box_size: int) -> NDArray[np.float32]:
    """``step m / box`` of every row of a shift cube, along the lattice's own axes: (rows, 3)."""
    return ((cube.shifts_voxels @ lines.GENERIC_ROTATION) / box_size).astype(np.float32)


def largest_template(powers: Any, root: NDArray[np.float32]) -> float:
    """Largest amplitude of the first rotated reference, times `root`; other rotations sample other points, and what is larger is cut off."""
    power = powers[0].copy_to_host().astype(np.float64)
    return float(np.sqrt(max(1e-30, (power * root.astype(np.float64) ** 2).max())))
