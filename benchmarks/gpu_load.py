"""Keeps one GPU busy for a stated time: the competitor of `scaling.py --slow-gpu`.

python benchmarks/gpu_load.py SECONDS (the GPU is the first that CUDA_VISIBLE_DEVICES shows)
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numba import cuda, float32


@cuda.jit
def _work(out, rounds):
    i = cuda.grid(1)
    a, b = float32(i), float32(0.999)
    for _ in range(rounds):
        a = a * b + b
    out[i] = a


def main() -> None:
    """Launches kernels of some milliseconds one after another, and ends by the clock whatever happens."""
    end = time.monotonic() + min(600.0, float(sys.argv[1]))
    blocks = cuda.get_current_device().MULTIPROCESSOR_COUNT * 4
    out = cuda.device_array(blocks * 256, np.float32)
    while time.monotonic() < end:
        for _ in range(8):
            _work[blocks, 256](out, 1 << 20)
        cuda.synchronize()
        print("busy", flush=True)


if __name__ == "__main__":
    main()
