"""What GPU workers are asked in `test_cuda_workers`; they import this module by name, in processes of their own."""

from __future__ import annotations

import os
import time


def seen(seconds: float) -> tuple[int, str, int, str]:
    """Process, ``CUDA_VISIBLE_DEVICES``, number of GPUs and UUID of the current one, as CUDA itself says; takes a while, so that all get one."""
    from numba import cuda

    uuid = str(cuda.get_current_device().uuid)
    time.sleep(seconds)
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], len(cuda.gpus), uuid
