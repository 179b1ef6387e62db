"""The search as one matrix product on the tensor cores (docs/scoring.md, 3; docs/adr/0008).

Rotated and shifted references are rows, turned particles columns, and cuBLAS multiplies them in half precision. That is twelve times
the arithmetic of the line kernel (`search`) on units that do it more than twenty times faster; but the templates must be written for every
shift, so it pays for many particles. `cheaper` decides. What is found is refined in single precision afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from .. import lines
from . import gemm, kernels

_TILE_BYTES = 3 << 30
_WRITE_BYTES_PER_US = 1.5e6
_HALF_FLOPS_PER_US = 6.0e8
_LINE_OPERATIONS_PER_US = 5.5e6


@dataclass(frozen=True, slots=True)
class Weighting:
    """Factors and offsets of the trial shifts, on the device; read only where `used`."""

    used: bool
    multiplier: Any
    bias: Any


def padded(size: int) -> int:
    """`size` up to a multiple of what the tensor cores like."""
    return -(-size // gemm.ALIGNMENT) * gemm.ALIGNMENT


def cheaper(band: lines.LineBand, steps: int, n_shifts: int, n_rotations: int, items: int) -> bool:
    """Whether the product should be faster than the line kernel, by rates measured on one H200 (benchmarks/cuda_steps.py)."""
    if not gemm.available():
        return False
    depth = padded(4 * band.n_pairs)
    rows = n_rotations * n_shifts
    product_us = rows * depth * 2 / _WRITE_BYTES_PER_US + 2.0 * rows * depth * padded(items) / _HALF_FLOPS_PER_US
    line_us = items * n_rotations * band.n_pairs * (18.0 + 6.0 * steps) / _LINE_OPERATIONS_PER_US
    return product_us < line_us


def root_weights(band: lines.LineBand, inverse_sigma2: NDArray[np.float32]) -> NDArray[np.float32]:
    """Square root of 1 / sigma2 at every sample: taken from the particle's side and given to the templates, it keeps both in half's range."""
    value = np.interp(band.radius, np.arange(len(inverse_sigma2)), inverse_sigma2.astype(np.float64))
    return np.sqrt(np.maximum(value, 1e-30)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class TensorSearch:
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
    ) -> TensorSearch:
        """Uploads what the kernels need of a level."""
        root = root_weights(band, inverse_sigma2)
        power = powers[0].copy_to_host()
        mean_square = float((power.astype(np.float64) * root.astype(np.float64) ** 2).mean()) / 2.0
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
            1.0 / np.sqrt(max(mean_square, 1e-30)),
        )

    def run(self, columns: Any, items: int, weighting: Weighting, best: Any, best_shift: Any) -> None:
        """Best num (times factor, plus offset) over the trial shifts of every item and rotation.

        Parameters
        ----------
        columns : (items, 4 p) float32 device array
        best : (items, n_rotations) float32, best_shift : (items, n_rotations) int32, set by this function
        """
        size = 4 * self.band.n_pairs
        depth, wide = padded(size), padded(items)
        n_shifts, n_rotations = len(self.cube.inside), self.n_rotations
        scales = cuda.device_array(items, np.float32)
        kernels.column_scales[items, kernels.REDUCE_THREADS](columns, self.root, size, scales)
        half = cuda.device_array(wide * depth, np.float16)
        kernels.clear[-(-half.size // 256), 256](half)
        kernels.half_columns[(-(-self.band.n_pairs // 128), items), 128](columns, self.root, scales, depth, half)
        tile = int(max(1, min(n_shifts, _TILE_BYTES // (2 * n_rotations * depth), _TILE_BYTES // (4 * n_rotations * wide))))
        bank = cuda.device_array(tile * n_rotations * depth, np.float16)
        kernels.clear[-(-bank.size // 256), 256](bank)  # the padding of its rows must be numbers
        products = cuda.device_array(tile * n_rotations * wide, np.float32)
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
            gemm.product(bank, half, products, count * n_rotations, wide, depth)
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
