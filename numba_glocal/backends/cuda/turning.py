"""Kernels that read spectra at turned positions: particles' columns in the reference's frame, and templates (rotated references)."""

from __future__ import annotations

import math

from numba import cuda, float32, int32

from .launching import block_rotation
from .vector import load2

_jit = cuda.jit(fastmath=True, cache=True)
_device = cuda.jit(device=True, fastmath=True, inline=True, cache=True)


@_device
def _weight_at(weights, base, n, qx, qy, qz):
    """Trilinear value of a real, even weight on its grid half-spectrum; 0 outside the grid's inner cube."""
    if qx < 0:
        qx, qy, qz = -qx, -qy, -qz
    fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
    ix, iy, iz = int32(fx), int32(fy), int32(fz)
    half = n // 2
    if ix + 1 > half or iy < -half or iy + 1 >= n - half or iz < -half or iz + 1 >= n - half:
        return float32(0.0)
    dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
    columns = half + 1
    y0 = iy if iy >= 0 else iy + n
    y1 = iy + 1 if iy + 1 >= 0 else iy + 1 + n
    z0 = iz if iz >= 0 else iz + n
    z1 = iz + 1 if iz + 1 >= 0 else iz + 1 + n
    at00, at01 = base + (z0 * n + y0) * columns + ix, base + (z0 * n + y1) * columns + ix
    at10, at11 = base + (z1 * n + y0) * columns + ix, base + (z1 * n + y1) * columns + ix
    a00 = weights[at00] + (weights[at00 + 1] - weights[at00]) * dx
    a01 = weights[at01] + (weights[at01 + 1] - weights[at01]) * dx
    a10 = weights[at10] + (weights[at10 + 1] - weights[at10]) * dx
    a11 = weights[at11] + (weights[at11 + 1] - weights[at11]) * dx
    b0 = a00 + (a01 - a00) * dy
    b1 = a10 + (a11 - a10) * dy
    return b0 + (b1 - b0) * dz


@_device
def sample(spectrum, base, c, qx, qy, qz):
    """Trilinear value (re, im) of a padded half-spectrum at q (padded samples)."""
    sign = float32(1.0)
    if qx < 0:
        qx, qy, qz, sign = -qx, -qy, -qz, float32(-1.0)
    fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
    ix, iy, iz = int32(fx), int32(fy) + c, int32(fz) + c
    dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
    columns = c + 1
    row, plane = 2 * columns, 2 * columns * (2 * c + 1)
    at = base + iz * plane + iy * row + 2 * ix
    r0, i0 = load2(spectrum, at)
    r1, i1 = load2(spectrum, at + 2)
    re, im = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    r0, i0 = load2(spectrum, at + row)
    r1, i1 = load2(spectrum, at + row + 2)
    ur, ui = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    re, im = re + (ur - re) * dy, im + (ui - im) * dy
    r0, i0 = load2(spectrum, at + plane)
    r1, i1 = load2(spectrum, at + plane + 2)
    vr, vi = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    r0, i0 = load2(spectrum, at + plane + row)
    r1, i1 = load2(spectrum, at + plane + row + 2)
    ur, ui = r0 + (r1 - r0) * dx, i0 + (i1 - i0) * dx
    vr, vi = vr + (ur - vr) * dy, vi + (ui - vi) * dy
    return re + (vr - re) * dz, sign * (im + (vi - im) * dz)


@_jit
def turn(
    spectra,
    slot_size,
    slots,
    c,
    weights,
    weight_size,
    weight_of,
    n,
    tables,
    signed,
    table_scale,
    inv_sigma2,
    gains,
    group_of,
    points,
    radius,
    point_weight,
    matrices,
    shifts,
    columns,
    den_weight,
):
    """Particles in the reference's frame (`interpolation.turn`); a thread takes one sample of one particle at one start.

    Parameters
    ----------
    spectra : (slots * slot_size,) float32
        Pool of padded spectra; particle of work item w is in ``slots[w]``.
    weights : (kinds * weight_size,) float32, weight_of : (w,) int32
    tables : (2 groups, TABLE_SIZE) float32
        1 / V of each group for unsigned and signed weights.
    signed : (kinds,) int32, table_scale : (kinds,) float32
    inv_sigma2 : (groups, shells) float32, gains : (groups,) float32
    group_of : (w,) int32
        Noise model of each work item.
    points : (2 p * 3,), radius : (2 p,), point_weight : (2 p,) float32
    matrices : (w, 9) float32
        R0, row by row: samples are at R0 q.
    shifts : (w, 3) float32
        t0 / box.
    columns : (w, 4 p) float32, den_weight : (w, 2 p) float32
    """
    i, w = cuda.grid(1), cuda.blockIdx.y
    if i >= radius.shape[0]:
        return
    re, im, d = float32(0.0), float32(0.0), float32(0.0)
    pw = point_weight[i]
    if pw != 0:
        x, y, z = points[3 * i], points[3 * i + 1], points[3 * i + 2]
        qx = matrices[w, 0] * x + matrices[w, 1] * y + matrices[w, 2] * z
        qy = matrices[w, 3] * x + matrices[w, 4] * y + matrices[w, 5] * z
        qz = matrices[w, 6] * x + matrices[w, 7] * y + matrices[w, 8] * z
        kind = weight_of[w]
        ctf = _weight_at(weights, kind * weight_size, n, qx, qy, qz)
        if ctf != 0:
            place = min(int32(abs(ctf) * table_scale[kind] + float32(0.5)), tables.shape[1] - 1)
            r = radius[i]
            s0 = int32(r)
            group = group_of[w]
            low = inv_sigma2[group, s0]
            wt = (low + (inv_sigma2[group, s0 + 1] - low) * (r - float32(s0))) * tables[2 * group + signed[kind], place] * pw
            ctf *= gains[group]
            vr, vi = sample(spectra, slots[w] * slot_size, c, float32(2.0) * qx, float32(2.0) * qy, float32(2.0) * qz)
            turns = x * shifts[w, 0] + y * shifts[w, 1] + z * shifts[w, 2]
            turns -= math.floor(turns + float32(0.5))
            angle = float32(2.0 * math.pi) * turns
            cos, sin = math.cos(angle), math.sin(angle)
            u = wt * ctf
            re, im, d = u * (vr * cos - vi * sin), u * (vr * sin + vi * cos), u * ctf
    columns[w, 2 * i] = re
    columns[w, 2 * i + 1] = im
    den_weight[w, i] = d


@_jit
def fill_templates(spectrum, c, points, matrices, templates, powers):
    """Rotated references: a thread takes one sample of one rotation.

    Parameters
    ----------
    spectrum : flat padded spectrum of the reference.
    points : (2 p * 3,) float32
    matrices : (a, 9) float32
        L, row by row: values are at L^T q.
    templates : (blocks * p * 16 * 4,) float32
        ``[block][pair][rotation][4]``.
    powers : (a, 2 p) float32
    """
    i, a = cuda.grid(1), block_rotation()
    samples = powers.shape[1]
    if i >= samples or a >= powers.shape[0]:
        return
    x, y, z = float32(2.0) * points[3 * i], float32(2.0) * points[3 * i + 1], float32(2.0) * points[3 * i + 2]
    qx = matrices[a, 0] * x + matrices[a, 3] * y + matrices[a, 6] * z
    qy = matrices[a, 1] * x + matrices[a, 4] * y + matrices[a, 7] * z
    qz = matrices[a, 2] * x + matrices[a, 5] * y + matrices[a, 8] * z
    re, im = sample(spectrum, 0, c, qx, qy, qz)
    at = (((a // 16) * (samples // 2) + i // 2) * 16 + a % 16) * 4 + 2 * (i % 2)
    templates[at] = re
    templates[at + 1] = im
    powers[a, i] = re * re + im * im
