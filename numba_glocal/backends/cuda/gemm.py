"""Matrix products by cuBLAS, where it is installed: half-precision scores of many particles (`product`), and den2.

cuBLAS is found and loaded by cuda-pathfinder, which numba-cuda brings; of its interface two functions are used. Where it is not
installed, `available` says so and a kernel of our own does the same.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from numba.core import config

_HALF, _FLOAT = 2, 0  # CUDA_R_16F, CUDA_R_32F
_COMPUTE_FLOAT, _COMPUTE_TF32 = 68, 77  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_DEFAULT_ALGORITHM = -1
_TRANSPOSED, _AS_IS = 1, 0


ALIGNMENT = 64
"""Sizes of half-precision products are padded to multiples of this: others run up to ten times slower."""


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


@lru_cache(maxsize=1)
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library().cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
    return handle


def _check(status: int, what: str) -> None:
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


def product_half(templates: Any, columns: Any, out: Any, rows: int, items: int, depth: int) -> None:
    """``out[row, item] = sum over d of templates[row, d] columns[item, d]`` on the default stream.

    Parameters
    ----------
    templates : (rows * depth,) float16 device array
    columns : (items * depth,) float16 device array
    out : (rows * items,) float32 device array
    rows, items, depth : int
        `items` and `depth` multiples of `ALIGNMENT`.
    """
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
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
            _HALF,
            ctypes.c_int(depth),
            _pointer(templates),
            _HALF,
            ctypes.c_int(depth),
            ctypes.byref(zero),
            _pointer(out),
            _FLOAT,
            ctypes.c_int(items),
            _COMPUTE_FLOAT,
            _DEFAULT_ALGORITHM,
        ),
        "cublasGemmEx",
    )
