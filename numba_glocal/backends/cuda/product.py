"""The search of many particles as one matrix product (docs/scoring.md, 3; docs/adr/0009).

Rotated and shifted references are rows, turned particles columns, and cuBLAS multiplies them in half precision. The templates must be
written for every shift, so it pays for many particles and few shifts; `product_us` and `tensor.tensor_us` say when.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from .. import lines
from . import gemm, kernels
from .scratch import Scratch
from .tensor import Weighting, root_weights, unit_scale

_WRITE_BYTES_PER_US = 1.2e6
_HALF_FLOPS_PER_US = 7.0e8


def padded(size: int) -> int:
    """`size` up to a multiple of what the tensor cores like."""
    return -(-size // gemm.ALIGNMENT) * gemm.ALIGNMENT


def product_us(band: lines.LineBand, n_shifts: int, n_rotations: int, items: int) -> float:
    """What it should take, by rates measured on one H200 (benchmarks/cuda_steps.py); inf without cuBLAS."""
    if not gemm.available():
        return math.inf
    depth, rows = padded(4 * band.n_pairs), n_rotations * n_shifts
    return rows * depth * 2 / _WRITE_BYTES_PER_US + 2.0 * rows * depth * padded(items) / _HALF_FLOPS_PER_US


@dataclass(frozen=True, slots=True)
class ProductSearch:
    """What is common to all work items of a level.

    Attributes
    ----------
    band : LineBand
    cube : ShiftCube
    box_size : int
    templates : device array
        As `kernels.fill_templates` leaves them.
    n_rotations : int
    lattice, root, turns, shift_rows : device arrays
    scale : float
        Of the templates, to unit root mean square.
    """

    band: lines.LineBand
    cube: lines.ShiftCube
    box_size: int
    templates: Any
    n_rotations: int
    lattice: Any
    root: Any
    turns: Any
    shift_rows: Any
    scale: float

    @classmethod
    def make(
        cls,
        band: lines.LineBand,
        cube: lines.ShiftCube,
        box_size: int,
        templates: Any,
        powers: Any,
        n_rotations: int,
        inverse_sigma2: NDArray[np.float32],
    ) -> ProductSearch:
        """Uploads what the kernels need of a level."""
        root = root_weights(band, inverse_sigma2)
        steps = cube.shifts_voxels[cube.inside] @ lines.GENERIC_ROTATION  # back to the lattice's own axes
        return cls(
            band,
            cube,
            box_size,
            templates,
            n_rotations,
            cuda.to_device(np.ascontiguousarray(band.lattice, np.int32).ravel()),
            cuda.to_device(root),
            cuda.to_device((steps / box_size).astype(np.float32)),
            cuda.to_device(cube.inside.astype(np.int32)),
            unit_scale(powers, root),
        )

    @property
    def bytes_held(self) -> int:
        """Of the device, beside the templates."""
        return int(self.lattice.nbytes + self.root.nbytes)

    def run(self, columns: Any, items: int, weighting: Weighting, best: Any, best_shift: Any, scratch: Scratch) -> None:
        """Best num (times factor, plus offset) over the trial shifts of every item and rotation.

        Parameters
        ----------
        columns : (items, 4 p) float32 device array
        scratch : Scratch
        best : (items, n_rotations) float32, best_shift : (items, n_rotations) int32, set by this function
        """
        size = 4 * self.band.n_pairs
        depth, wide = padded(size), padded(items)
        n_shifts, n_rotations = len(self.cube.inside), self.n_rotations
        scales = scratch.array("column scales", items, np.float32)
        kernels.column_scales[items, kernels.REDUCE_THREADS](columns, self.root, size, scales)
        half = scratch.array("half columns", wide * depth, np.float16)
        kernels.clear[-(-half.size // 256), 256](half)
        kernels.half_columns[(-(-self.band.n_pairs // 128), items), 128](columns, self.root, scales, depth, half)
        tile = int(max(1, min(n_shifts, scratch.part_bytes // (2 * n_rotations * depth), scratch.part_bytes // (4 * n_rotations * wide))))
        bank = scratch.array("templates", tile * n_rotations * depth, np.float16)
        kernels.clear[-(-bank.size // 256), 256](bank)  # the padding of its rows must be numbers
        products = scratch.array("products", tile * n_rotations * wide, np.float32)
        for first in range(0, n_shifts, tile):
            count = min(tile, n_shifts - first)
            kernels.half_templates[(-(-self.band.n_pairs // 128), n_rotations), 128](
                self.templates,
                self.band.n_pairs,
                self.lattice,
                self.root,
                self.turns,
                first,
                count,
                n_rotations,
                np.float32(self.scale),
                depth,
                bank,
            )
            gemm.product_half(bank, half, products, count * n_rotations, wide, depth)
            kernels.best_of_tile[(-(-items // 128), n_rotations), 128](
                products,
                wide,
                first,
                count,
                n_rotations,
                self.shift_rows,
                scales,
                np.float32(self.scale),
                int(weighting.used),
                weighting.multiplier,
                weighting.bias,
                best,
                best_shift,
            )
