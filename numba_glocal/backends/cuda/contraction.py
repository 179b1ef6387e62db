"""Kernels for matrix products in single precision, in tiles of 64 x 64: the passes of a Fourier transform, and den2."""

from __future__ import annotations

from numba import cuda, float32

from .vector import load2

WIDE_TILE = 64
_WIDE, _WIDE_ROW = WIDE_TILE, WIDE_TILE + 1
_DEPTH, _SHALLOW = 16, 8
_jit = cuda.jit(fastmath=True, cache=True)


@_jit
def contract(a, a_batch, a_row, a_depth, a_complex, b, b_batch, b_depth, b_column, b_complex, c, c_batch, c_row, c_column, rows, columns, depth):
    """Batched complex matrix product ``C = A B`` with any strides: the three passes of a cropped, padded Fourier transform.

    Strides are in elements: of complex numbers (re, im interleaved) where `a_complex` (`b_complex`) is 1, of floats where it is 0.
    Blocks of 16 x 16 threads make tiles of 64 x 64, four by four a thread; the batch is the grid's third axis.
    """
    a_re = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    a_im = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    b_re = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    b_im = cuda.shared.array((_SHALLOW, _WIDE_ROW), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    tid = ty * 16 + tx
    row0, column0, batch = cuda.blockIdx.y * _WIDE, cuda.blockIdx.x * _WIDE, cuda.blockIdx.z
    sum_re = cuda.local.array(16, float32)
    sum_im = cuda.local.array(16, float32)
    for j in range(16):
        sum_re[j] = float32(0.0)
        sum_im[j] = float32(0.0)
    for start in range(0, depth, _SHALLOW):
        for j in range(tid, _WIDE * _SHALLOW, 256):
            # A is read along its depth, B along its columns
            d, r = j % _SHALLOW, j // _SHALLOW
            vr, vi = float32(0.0), float32(0.0)
            if row0 + r < rows and start + d < depth:
                at = batch * a_batch + (row0 + r) * a_row + (start + d) * a_depth
                if a_complex:
                    vr, vi = load2(a, 2 * at)
                else:
                    vr = a[at]
            a_re[d, r], a_im[d, r] = vr, vi
            q, d = j % _WIDE, j // _WIDE
            vr, vi = float32(0.0), float32(0.0)
            if column0 + q < columns and start + d < depth:
                at = batch * b_batch + (start + d) * b_depth + (column0 + q) * b_column
                if b_complex:
                    vr, vi = load2(b, 2 * at)
                else:
                    vr = b[at]
            b_re[d, q], b_im[d, q] = vr, vi
        cuda.syncthreads()
        for d in range(_SHALLOW):
            q0r, q1r, q2r, q3r = b_re[d, tx], b_re[d, tx + 16], b_re[d, tx + 32], b_re[d, tx + 48]
            q0i, q1i, q2i, q3i = b_im[d, tx], b_im[d, tx + 16], b_im[d, tx + 32], b_im[d, tx + 48]
            for i in range(4):
                vr, vi = a_re[d, ty + 16 * i], a_im[d, ty + 16 * i]
                sum_re[4 * i] += vr * q0r - vi * q0i
                sum_im[4 * i] += vr * q0i + vi * q0r
                sum_re[4 * i + 1] += vr * q1r - vi * q1i
                sum_im[4 * i + 1] += vr * q1i + vi * q1r
                sum_re[4 * i + 2] += vr * q2r - vi * q2i
                sum_im[4 * i + 2] += vr * q2i + vi * q2r
                sum_re[4 * i + 3] += vr * q3r - vi * q3i
                sum_im[4 * i + 3] += vr * q3i + vi * q3r
        cuda.syncthreads()
    for i in range(4):
        for q in range(4):
            row, column = row0 + ty + 16 * i, column0 + tx + 16 * q
            if row < rows and column < columns:
                at = 2 * (batch * c_batch + row * c_row + column * c_column)
                c[at] = sum_re[4 * i + q]
                c[at + 1] = sum_im[4 * i + q]


@_jit
def products(a, b, out):
    """out[i, j] = sum over d of a[i, d] b[j, d], in blocks of 16 x 16 threads and tiles of 64 x 64 (den2: powers against weights).

    Parameters
    ----------
    a : (rows, depth) float32, b : (columns, depth) float32, out : (rows, columns) float32
    """
    tile_a = cuda.shared.array((_DEPTH, _WIDE_ROW), float32)
    tile_b = cuda.shared.array((_DEPTH, _WIDE_ROW), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    tid = ty * 16 + tx
    row0, column0 = cuda.blockIdx.y * _WIDE, cuda.blockIdx.x * _WIDE
    depth = a.shape[1]
    total = cuda.local.array(16, float32)
    for j in range(16):
        total[j] = float32(0.0)
    for start in range(0, depth, _DEPTH):
        for j in range(tid, _WIDE * _DEPTH, 256):
            d, r = j % _DEPTH, j // _DEPTH
            va, vb = float32(0.0), float32(0.0)
            if start + d < depth:
                if row0 + r < a.shape[0]:
                    va = a[row0 + r, start + d]
                if column0 + r < b.shape[0]:
                    vb = b[column0 + r, start + d]
            tile_a[d, r] = va
            tile_b[d, r] = vb
        cuda.syncthreads()
        for d in range(_DEPTH):
            b0, b1, b2, b3 = tile_b[d, tx], tile_b[d, tx + 16], tile_b[d, tx + 32], tile_b[d, tx + 48]
            for i in range(4):
                value = tile_a[d, ty + 16 * i]
                total[4 * i] += value * b0
                total[4 * i + 1] += value * b1
                total[4 * i + 2] += value * b2
                total[4 * i + 3] += value * b3
        cuda.syncthreads()
    for i in range(4):
        for q in range(4):
            row, column = row0 + ty + 16 * i, column0 + tx + 16 * q
            if row < a.shape[0] and column < b.shape[0]:
                out[row, column] = total[4 * i + q]
