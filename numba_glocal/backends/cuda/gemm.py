"""Matrix products by cuBLAS, where it is installed: scores of many particles in half precision or 8-bit whole numbers, and den2.

cuBLAS is found and loaded by cuda-pathfinder, which numba-cuda brings; a few of its functions are used. Where it is
not installed, `available` says so and other kernels do the same.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config

_HALF, _FLOAT, _INT8, _INT32 = 2, 0, 3, 10  # CUDA_R_16F, CUDA_R_32F, CUDA_R_8I, CUDA_R_32I
_COMPUTE_FLOAT, _COMPUTE_TF32, _COMPUTE_INT32 = 68, 77, 72  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32I
_DEFAULT_ALGORITHM = -1
_ALLOCATION_FAILED = 3  # CUBLAS_STATUS_ALLOC_FAILED
_TRANSPOSED, _AS_IS = 1, 0


ALIGNMENT = 64
"""Sizes of narrow products are padded to multiples of this: others run up to ten times slower."""


@lru_cache(maxsize=1)
def _library() -> Any:
    """The loaded library, or None."""
    if config.ENABLE_CUDASIM:
        return None
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except Exception:
        return None


def available() -> bool:
    """Whether cuBLAS is installed."""
    return _library() is not None


def eight_available() -> bool:
    """Whether cuBLAS is installed and searches use the tensor cores of this process's GPU: from compute capability 8.0 on they have int8."""
    return available() and tuple(cuda.get_current_device().compute_capability) >= (8, 0)


@lru_cache(maxsize=1)
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library().cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
    return handle


def _check(status: int, what: str) -> None:
    if status == _ALLOCATION_FAILED:
        raise MemoryError(f"{what}: the GPU has no memory left")
    if status != 0:
        raise RuntimeError(f"{what} failed with cuBLAS status {status}")


def _pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(array.__cuda_array_interface__["data"][0]))


def product(powers: Any, weights: Any, out: Any, rows: int, items: int, depth: int, half: bool) -> None:
    """``out[item, row] = sum over d of powers[row, d] weights[item, d]`` on the default stream; den2 of every item and rotation.

    Parameters
    ----------
    powers : (rows, depth) float32, weights : (items, depth) float32, out : (items, rows) float32 device arrays
    half : bool
        Operands rounded to ten bits (tf32), sums in single precision: for sums of thousands of positive terms errors of 1e-5.
    """
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    status = _library().cublasGemmEx(
        _handle(),
        _TRANSPOSED,
        _AS_IS,
        ctypes.c_int(rows),
        ctypes.c_int(items),
        ctypes.c_int(depth),
        ctypes.byref(one),
        _pointer(powers),
        _FLOAT,
        ctypes.c_int(depth),
        _pointer(weights),
        _FLOAT,
        ctypes.c_int(depth),
        ctypes.byref(zero),
        _pointer(out),
        _FLOAT,
        ctypes.c_int(rows),
        _COMPUTE_TF32 if half else _COMPUTE_FLOAT,
        _DEFAULT_ALGORITHM,
    )
    _check(status, "cublasGemmEx")


def product_narrow(templates: Any, columns: Any, out: Any, rows: int, items: int, depth: int) -> None:
    """``out[row, item] = sum over d of templates[row, d] columns[item, d]`` on the default stream.

    Parameters
    ----------
    templates : (rows * depth,) float16 or int8 device array
    columns : (items * depth,) device array of the same kind
    out : (rows * items,) device array
        float32, or of int8 exact sums in int32: no partial sum may leave its range.
    rows, items, depth : int
        `items` and `depth` multiples of `ALIGNMENT`.
    """
    number: Any
    if templates.dtype == np.int8:
        kind, kind_out, compute, number = _INT8, _INT32, _COMPUTE_INT32, ctypes.c_int32
    else:
        kind, kind_out, compute, number = _HALF, _FLOAT, _COMPUTE_FLOAT, ctypes.c_float
    one, zero = number(1), number(0)
    # row-major arrays are column-major transposes: out^T (items, rows) = columns (items, depth) templates^T
    _check(
        _library().cublasGemmEx(
            _handle(),
            _TRANSPOSED,
            _AS_IS,
            ctypes.c_int(items),
            ctypes.c_int(rows),
            ctypes.c_int(depth),
            ctypes.byref(one),
            _pointer(columns),
            kind,
            ctypes.c_int(depth),
            _pointer(templates),
            kind,
            ctypes.c_int(depth),
            ctypes.byref(zero),
            _pointer(out),
            kind_out,
            ctypes.c_int(items),
            compute,
            _DEFAULT_ALGORITHM,
        ),
        "cublasGemmEx",
    )
