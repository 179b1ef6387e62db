"""How work is laid out over blocks, for all kernels."""

from __future__ import annotations

from numba import cuda

MOST_ROWS = 65535
"""Blocks that a launch may have along y, and along z."""

MOST_ITEMS = MOST_ROWS // 64 * 64
"""Work items of a launch, which lie along y, with their padding (`gemm.ALIGNMENT`)."""

REDUCE_THREADS = 256
"""Threads of a block that sums over samples; a power of two."""

_device = cuda.jit(device=True, fastmath=True, inline=True, cache=True)


def rotation_grid(blocks, n_rotations):
    """Blocks of a launch of which `block_rotation` tells the rotation: along y, and, for those of a long list, along z."""
    rows = min(n_rotations, MOST_ROWS)
    return blocks, rows, -(-n_rotations // rows)


@_device
def block_rotation():
    """This block's rotation in a `rotation_grid`; the last ones may lie past the end."""
    return cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y


@_device
def add_up(shared, tid):
    """Sums what each of the block's `REDUCE_THREADS` threads left in its place, always in the same order, into the first; all must call it."""
    cuda.syncthreads()
    step = REDUCE_THREADS // 2
    while step > 0:
        if tid < step:
            shared[tid] += shared[tid + step]
        cuda.syncthreads()
        step //= 2
