"""Matrix products by cuBLAS, where it is installed: scores of many particles in half precision or FP8 (`product`), and den2.

cuBLAS is found and loaded by cuda-pathfinder, which numba-cuda brings; a few of its functions are used, and FP8 needs those of cuBLASLt,
its other half. Where they are not installed, `available` says so and a kernel of our own does the same.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config

_HALF, _FLOAT, _EIGHT = 2, 0, 28  # CUDA_R_16F, CUDA_R_32F, CUDA_R_8F_E4M3
_COMPUTE_FLOAT, _COMPUTE_TF32 = 68, 77  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_DEFAULT_ALGORITHM = -1
_ALLOCATION_FAILED = 3  # CUBLAS_STATUS_ALLOC_FAILED
_TRANSPOSED, _AS_IS = 1, 0
_TRANSPOSE_A, _TRANSPOSE_B, _FAST_SUMS = 3, 4, 25  # attributes of a cublasLtMatmulDesc
_WORKSPACE_BYTES = 32 << 20


ALIGNMENT = 64
"""Sizes of half-precision products are padded to multiples of this: others run up to ten times slower."""


@lru_cache(maxsize=2)
def _library(name: str = "cublas") -> Any:
    """The loaded library, or None."""
    if config.ENABLE_CUDASIM:
        return None
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
    except Exception:
        return None


def available() -> bool:
    """Whether cuBLAS is installed."""
    return _library() is not None


def eight_available() -> bool:
    """Whether this process's GPU multiplies FP8 (compute capability 8.9 or later) and cuBLASLt is installed."""
    return _library("cublasLt") is not None and tuple(cuda.get_current_device().compute_capability) >= (8, 9)


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


@lru_cache(maxsize=1)
def _light() -> tuple[ctypes.c_void_p, Any]:
    """Handle of cuBLASLt, and device memory that its products may use."""
    handle = ctypes.c_void_p()
    _check(_library("cublasLt").cublasLtCreate(ctypes.byref(handle)), "cublasLtCreate")
    return handle, cuda.device_array(_WORKSPACE_BYTES, np.uint8)


@lru_cache(maxsize=64)
def _eight_plan(rows: int, items: int, depth: int) -> tuple[ctypes.c_void_p, ...]:
    """Description of `product_eight` and of its three matrices; kept for the life of the process."""
    library = _library("cublasLt")
    description = ctypes.c_void_p()
    _check(library.cublasLtMatmulDescCreate(ctypes.byref(description), _COMPUTE_FLOAT, _FLOAT), "cublasLtMatmulDescCreate")
    settings = ((_TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED)), (_TRANSPOSE_B, ctypes.c_int32(_AS_IS)), (_FAST_SUMS, ctypes.c_int8(1)))
    for attribute, value in settings:
        status = library.cublasLtMatmulDescSetAttribute(description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))
        _check(status, "cublasLtMatmulDescSetAttribute")
    layouts = []
    for kind, height, width in ((_EIGHT, depth, items), (_EIGHT, depth, rows), (_FLOAT, items, rows)):
        layout = ctypes.c_void_p()
        size = ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(height)
        _check(library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *size), "cublasLtMatrixLayoutCreate")
        layouts.append(layout)
    return description, *layouts


def product_eight(templates: Any, columns: Any, out: Any, rows: int, items: int, depth: int) -> None:
    """As `product_half`, of uint8 arrays that hold FP8 numbers (e4m3); sums with about 14 bits ("fast accumulation")."""
    handle, workspace = _light()
    description, layout_a, layout_b, layout_c = _eight_plan(rows, items, depth)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    status = _library("cublasLt").cublasLtMatmul(
        handle,
        description,
        ctypes.byref(one),
        _pointer(columns),
        layout_a,
        _pointer(templates),
        layout_b,
        ctypes.byref(zero),
        _pointer(out),
        layout_c,
        _pointer(out),
        layout_c,
        None,  # the library's own choice of algorithm
        _pointer(workspace),
        ctypes.c_size_t(_WORKSPACE_BYTES),
        None,  # the default stream
    )
    _check(status, "cublasLtMatmul")
