"""Numba kernels that read and write spectra at turned positions: gather, turn, refine (normal equations), insert.

A padded spectrum is passed as its flat float32 view (re, im interleaved), so that one four-lane load brings two neighbours
along x. All positions are ``(x, y, z)``; a matrix M passed to a kernel is applied as ``q = M^T k``, i.e. pass R for R^-1 k.
Samples should come in grid order: neighbours then share cache lines and the sign of kx rarely changes.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

from .simd import (
    FAST,
    LANES,
    add,
    broadcast4,
    lane0,
    lane1,
    lane2,
    lane3,
    load4,
    load16,
    mul,
    muladd,
    nmuladd,
    pack4,
    store,
    sub,
    total,
    zero16,
)

BLOCK = 256
"""Samples that the refinement kernel interpolates before it sums them; its scratch stays in the first-level cache."""

_ONE, _SIXTH = np.float32(1.0), np.float32(1.0 / 6.0)

N_SUMS = 32
"""Rows of sums of the refinement kernel (see `normal_equations`)."""

_njit = nb.njit(fastmath=FAST, nogil=True, cache=True)
_inline = nb.njit(fastmath=FAST, nogil=True, cache=True, inline="always")


def interpolation_curvature(volume, box_size):
    """How much linear interpolation of a map's padded spectrum loses between nodes, along x, y and z.

    A part of the map at offset x has the phase ``2 pi x q / (2 box)`` in its padded spectrum. Between two nodes, at fraction f, linear
    interpolation shrinks it by ``1 - f (1 - f) theta^2 / 2`` with ``theta = pi x / box``; the division by sinc^2 makes up for the mean of that
    over f, ``f (1 - f) = 1/6``. What is left cancels over positions in general, but not for a pose that keeps a grid axis, whose samples all fall
    on nodes. So values are multiplied by ``1 + a (f (1 - f) - 1/6)``, a from the mean square offset of the map's power.

    Parameters
    ----------
    volume : (n, n, n) array
    box_size : int

    Returns
    -------
    (3,) float32
        a along x, y, z.
    """
    power = np.asarray(volume, np.float64) ** 2
    total = max(float(power.sum()), 1e-300)
    theta2 = (np.pi * (np.arange(box_size) - box_size // 2) / box_size) ** 2
    return np.array([0.5 * (power.sum(axis=axes) * theta2).sum() / total for axes in ((0, 1), (0, 2), (1, 2))], np.float32)


@_njit
def gather(spectrum, n, c, points, matrix, scale, out, curvature=None):
    """out[i] = F(scale * M^T k_i).

    Parameters
    ----------
    spectrum : (2 * n * n * nx,) float32
        Flat padded spectrum, `n` = 2 c + 1 rows along z and y, ``nx = c + 1`` columns.
    n, c : int
        Rows, and the row of frequency 0.
    points : (m, 3) float32
        Frequencies ``(x, y, z)``.
    matrix : (3, 3) float32
    scale : float32
        Padding factor.
    out : (m,) complex64
    curvature : (3,) float32, optional
        `interpolation_curvature` of the map, along x, y, z: mends what linear interpolation loses between nodes.
    """
    nx = c + 1
    row, plane = 2 * nx, 2 * nx * n
    off = np.float32(c)
    m00, m01, m02 = matrix[0, 0] * scale, matrix[0, 1] * scale, matrix[0, 2] * scale
    m10, m11, m12 = matrix[1, 0] * scale, matrix[1, 1] * scale, matrix[1, 2] * scale
    m20, m21, m22 = matrix[2, 0] * scale, matrix[2, 1] * scale, matrix[2, 2] * scale
    for i in range(points.shape[0]):
        kx, ky, kz = points[i, 0], points[i, 1], points[i, 2]
        qx = m00 * kx + m10 * ky + m20 * kz
        qy = m01 * kx + m11 * ky + m21 * kz
        qz = m02 * kx + m12 * ky + m22 * kz
        sign = np.float32(1.0)
        if qx < 0:
            qx, qy, qz, sign = -qx, -qy, -qz, np.float32(-1.0)
        qy += off
        qz += off
        ix, iy, iz = int(qx), int(qy), int(qz)
        dx, dy, dz = qx - np.float32(ix), broadcast4(qy - np.float32(iy)), broadcast4(qz - np.float32(iz))
        at = iz * plane + iy * row + 2 * ix
        a00, a10 = load4(spectrum, at), load4(spectrum, at + row)
        a01, a11 = load4(spectrum, at + plane), load4(spectrum, at + plane + row)
        b0 = muladd(sub(a10, a00), dy, a00)
        b1 = muladd(sub(a11, a01), dy, a01)
        v = muladd(sub(b1, b0), dz, b0)
        re = lane0(v) + (lane2(v) - lane0(v)) * dx
        im = lane1(v) + (lane3(v) - lane1(v)) * dx
        if curvature is not None:
            fy, fz = qy - np.float32(iy), qz - np.float32(iz)
            mend = (
                (_ONE + curvature[0] * (dx * (_ONE - dx) - _SIXTH))
                * (_ONE + curvature[1] * (fy * (_ONE - fy) - _SIXTH))
                * (_ONE + curvature[2] * (fz * (_ONE - fz) - _SIXTH))
            )
            re *= mend
            im *= mend
        out[i] = complex(re, sign * im)


@_njit
def pack_weight(weight, packed):
    """A weight with the neighbours that a trilinear value needs side by side: two loads of four instead of eight of one.

    Parameters
    ----------
    weight : (n, n, n // 2 + 1) float32
        C on the grid half-spectrum.
    packed : (n * n * (n // 2) * 4,) float32, set by this function
        ``[z, y, x, 4]``, z and y from -(n // 2) on; the four are C at (y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1). Rows past the grid's
        end repeat its first; no value that is used comes from them.
    """
    n = weight.shape[0]
    half = n // 2
    for z in range(n):
        from_z = (z - half) % n
        for y in range(n):
            y0, y1 = (y - half) % n, (y + 1 - half) % n
            at = (z * n + y) * half * 4
            for x in range(half):
                packed[at + 4 * x] = weight[from_z, y0, x]
                packed[at + 4 * x + 1] = weight[from_z, y0, x + 1]
                packed[at + 4 * x + 2] = weight[from_z, y1, x]
                packed[at + 4 * x + 3] = weight[from_z, y1, x + 1]


@_inline
def _weight_at(packed, n, qx, qy, qz):
    """Trilinear value of a packed, real, even weight; 0 outside the grid's inner cube."""
    if qx < 0:
        qx, qy, qz = -qx, -qy, -qz
    half = n // 2
    qy += np.float32(half)
    qz += np.float32(half)
    if qy < 0 or qz < 0:
        return np.float32(0.0)
    ix, iy, iz = int(qx), int(qy), int(qz)
    if ix + 1 > half or iy + 1 >= n or iz + 1 >= n:
        return np.float32(0.0)
    dx, dy, dz = qx - np.float32(ix), qy - np.float32(iy), broadcast4(qz - np.float32(iz))
    at = ((iz * n + iy) * half + ix) * 4
    low = load4(packed, at)
    plane = muladd(sub(load4(packed, at + n * half * 4), low), dz, low)
    near = lane0(plane) + (lane1(plane) - lane0(plane)) * dx
    far = lane2(plane) + (lane3(plane) - lane2(plane)) * dx
    return near + (far - near) * dy


@_njit
def phase_tables(shift, top, tables):
    """exp(i k shift[axis]) for k = -top .. top along x, y and z, as (3, 2 top + 1) complex64: three products replace a sine per sample.

    Parameters
    ----------
    shift : (3,) float64
        ``2 pi s / box``, s in voxels.
    top : int
    tables : (3, 2 top + 1) complex64, set by this function
    """
    for axis in range(3):
        for k in range(-top, top + 1):
            angle = k * shift[axis]
            tables[axis, k + top] = complex(np.float32(math.cos(angle)), np.float32(math.sin(angle)))


@_njit
def turn(
    spectrum, n, c, packed, box, table, table_scale, inv_sigma2, radius, points, lattice, point_weight, matrix, tables, scale, column, den_weight
):
    """One particle in the reference's frame: the column ``Y = w C X`` and the weights ``D = w C^2`` (docs/scoring.md, 3).

    Parameters
    ----------
    spectrum, n, c : the particle's flat padded spectrum, as in `gather`.
    packed : float32
        C as `pack_weight` leaves it.
    box : int
    table : (m,) float32
        ``1 / V`` as a function of ``|C| * table_scale``, clipped at its ends.
    inv_sigma2 : (shells,) float32
        ``1 / sigma2`` per shell, interpolated linearly over `radius`.
    radius : (p,) float32
        |q| of the points.
    points : (p, 3) float32, lattice : (p, 3) int32, point_weight : (p,) float32
        Sample points ``q = G n``, n, and how much each counts (0 leaves it out).
    matrix : (3, 3) float32
        ``R0^T``, so that M^T q = R0 q.
    tables : (3, 2 top + 1) complex64
        `phase_tables` of ``G^T t0``, t0 the shift in the reference's frame: ``exp(2 pi i q.t0 / box)`` is their product at n.
    scale : float32
        Padding factor.
    column : (2 p,) float32
        re, im of Y.
    den_weight : (p,) float32
        D.
    """
    nx = c + 1
    row, plane = 2 * nx, 2 * nx * n
    off = np.float32(c)
    last = table.shape[0] - 1
    top = tables.shape[1] // 2
    for i in range(points.shape[0]):
        if point_weight[i] == 0:
            column[2 * i] = np.float32(0)
            column[2 * i + 1] = np.float32(0)
            den_weight[i] = np.float32(0)
            continue
        kx, ky, kz = points[i, 0], points[i, 1], points[i, 2]
        gx = matrix[0, 0] * kx + matrix[1, 0] * ky + matrix[2, 0] * kz
        gy = matrix[0, 1] * kx + matrix[1, 1] * ky + matrix[2, 1] * kz
        gz = matrix[0, 2] * kx + matrix[1, 2] * ky + matrix[2, 2] * kz
        ctf = _weight_at(packed, box, gx, gy, gz)
        if ctf == 0:
            column[2 * i] = np.float32(0)
            column[2 * i + 1] = np.float32(0)
            den_weight[i] = np.float32(0)
            continue
        place = min(np.int64(abs(ctf) * table_scale + np.float32(0.5)), last)
        r = radius[i]
        s0 = int(r)
        w = (inv_sigma2[s0] + (inv_sigma2[s0 + 1] - inv_sigma2[s0]) * (r - np.float32(s0))) * table[place] * point_weight[i]
        qx, qy, qz, sign = gx * scale, gy * scale, gz * scale, np.float32(1.0)
        if qx < 0:
            qx, qy, qz, sign = -qx, -qy, -qz, np.float32(-1.0)
        qy += off
        qz += off
        ix, iy, iz = int(qx), int(qy), int(qz)
        dx, dy, dz = qx - np.float32(ix), broadcast4(qy - np.float32(iy)), broadcast4(qz - np.float32(iz))
        at = iz * plane + iy * row + 2 * ix
        a00, a10 = load4(spectrum, at), load4(spectrum, at + row)
        a01, a11 = load4(spectrum, at + plane), load4(spectrum, at + plane + row)
        b0 = muladd(sub(a10, a00), dy, a00)
        b1 = muladd(sub(a11, a01), dy, a01)
        v = muladd(sub(b1, b0), dz, b0)
        re = lane0(v) + (lane2(v) - lane0(v)) * dx
        im = sign * (lane1(v) + (lane3(v) - lane1(v)) * dx)
        phase = tables[0, lattice[i, 0] + top] * tables[1, lattice[i, 1] + top] * tables[2, lattice[i, 2] + top]
        u = w * ctf
        column[2 * i] = u * (re * phase.real - im * phase.imag)
        column[2 * i + 1] = u * (re * phase.imag + im * phase.real)
        den_weight[i] = u * ctf


@_njit
def normal_equations(spectrum, n, c, points, matrix, tables, scale, data, ctf, weight, scratch, sums, curvature=None):
    """One pass of Gauss-Newton: sums over samples of ``w |X - C F(R^-1 k) exp(-i k.s)|^2`` and of its derivatives.

    The unknowns are a rotation vector p and a shift u in the *reference's* frame: ``R' = R exp(p)``, ``s' = s + R u``. There
    ``q = R^-1 k`` gives ``dF = -(q x grad F) . p`` and ``-i q . u F``, so that neither needs the rotation, and in the particle's
    phase only the residual turns.

    Parameters
    ----------
    spectrum, n, c : flat padded spectrum of the reference, as in `gather`.
    points : (m, 3) float32
        Grid frequencies of the samples that count.
    matrix : (3, 3) float32
        R.
    tables : (3, 2 top + 1) complex64
        `phase_tables` of s in the particle's frame.
    scale : float32
        Padding factor.
    data : (m,) complex64, ctf : (m,) float32, weight : (m,) float32
        X, C and w.
    scratch : (13 * BLOCK,) float32
    sums : (N_SUMS,) float64, set by this function
        0-5 rotation block (xx, xy, xz, yy, yz, zz), 6-11 shift block, 12-20 rotation x shift block (row by row),
        21-23 gradient of the rotation, 24-26 of the shift, 27 ``sum w C Re(conj(F) X)`` (num), 28 ``sum w C^2 |F|^2`` (den2).
        Shifts in units where ``2 pi / box`` is 1.
    """
    nx = c + 1
    row, plane = 2 * nx, 2 * nx * n
    off = np.float32(c)
    one = np.float32(1.0)
    m00, m01, m02 = matrix[0, 0] * scale, matrix[0, 1] * scale, matrix[0, 2] * scale
    m10, m11, m12 = matrix[1, 0] * scale, matrix[1, 1] * scale, matrix[1, 2] * scale
    m20, m21, m22 = matrix[2, 0] * scale, matrix[2, 1] * scale, matrix[2, 2] * scale
    inverse_scale = one / scale
    for j in range(N_SUMS):
        sums[j] = 0.0
    count = points.shape[0]
    top = tables.shape[1] // 2
    for start in range(0, count, BLOCK):
        filled = min(BLOCK, count - start)
        for j in range(filled):
            i = start + j
            kx, ky, kz = points[i, 0], points[i, 1], points[i, 2]
            qx = m00 * kx + m10 * ky + m20 * kz
            qy = m01 * kx + m11 * ky + m21 * kz
            qz = m02 * kx + m12 * ky + m22 * kz
            # the pose's phase is taken off the data
            x = data[i] * (tables[0, int(kx) + top] * tables[1, int(ky) + top] * tables[2, int(kz) + top])
            scratch[j] = x.real
            scratch[BLOCK + j] = x.imag
            scratch[2 * BLOCK + j] = qx * inverse_scale
            scratch[3 * BLOCK + j] = qy * inverse_scale
            scratch[4 * BLOCK + j] = qz * inverse_scale
            sign = one
            if qx < 0:
                qx, qy, qz, sign = -qx, -qy, -qz, -one
            qy += off
            qz += off
            ix, iy, iz = int(qx), int(qy), int(qz)
            dx, dy, dz = qx - np.float32(ix), broadcast4(qy - np.float32(iy)), broadcast4(qz - np.float32(iz))
            at = iz * plane + iy * row + 2 * ix
            a00, a10 = load4(spectrum, at), load4(spectrum, at + row)
            a01, a11 = load4(spectrum, at + plane), load4(spectrum, at + plane + row)
            d0, d1 = sub(a10, a00), sub(a11, a01)
            b0, b1 = muladd(d0, dy, a00), muladd(d1, dy, a01)
            along_z = sub(b1, b0)
            along_y = muladd(sub(d1, d0), dz, d0)
            v = muladd(along_z, dz, b0)
            xr, xi = lane2(v) - lane0(v), lane3(v) - lane1(v)
            vr, vi = lane0(v) + xr * dx, lane1(v) + xi * dx
            yr, yi = lane0(along_y) + (lane2(along_y) - lane0(along_y)) * dx, lane1(along_y) + (lane3(along_y) - lane1(along_y)) * dx
            zr, zi = lane0(along_z) + (lane2(along_z) - lane0(along_z)) * dx, lane1(along_z) + (lane3(along_z) - lane1(along_z)) * dx
            if curvature is not None:
                fy, fz = qy - np.float32(iy), qz - np.float32(iz)
                ax, ay, az = curvature[0], curvature[1], curvature[2]
                mx, my, mz = _ONE + ax * (dx * (_ONE - dx) - _SIXTH), _ONE + ay * (fy * (_ONE - fy) - _SIXTH), _ONE + az * (fz * (_ONE - fz) - _SIXTH)
                # the product rule: the mending factor has a slope of its own
                sx, sy, sz = ax * (_ONE - dx - dx) * my * mz, ay * (_ONE - fy - fy) * mx * mz, az * (_ONE - fz - fz) * mx * my
                mend = mx * my * mz
                xr, xi = xr * mend + vr * sx, xi * mend + vi * sx
                yr, yi = yr * mend + vr * sy, yi * mend + vi * sy
                zr, zi = zr * mend + vr * sz, zi * mend + vi * sz
                vr, vi = vr * mend, vi * mend
            scratch[5 * BLOCK + j] = vr
            scratch[6 * BLOCK + j] = sign * vi
            # F(-q) = conj F(q): the gradient's real part changes sign
            scratch[7 * BLOCK + j] = sign * xr
            scratch[8 * BLOCK + j] = xi
            scratch[9 * BLOCK + j] = sign * yr
            scratch[10 * BLOCK + j] = yi
            scratch[11 * BLOCK + j] = sign * zr
            scratch[12 * BLOCK + j] = zi
        rounded = (filled + LANES - 1) // LANES * LANES
        for plane_no in range(13):  # the last vector of the last block reads past the samples; zeros add nothing
            for j in range(filled, rounded):
                scratch[plane_no * BLOCK + j] = np.float32(0.0)
        _sum_block(scratch, ctf, weight, start, filled, scale, sums)


@_njit
def _sum_block(scratch, ctf, weight, start, filled, scale, sums):
    h00, h01, h02, h11, h12, h22 = zero16(), zero16(), zero16(), zero16(), zero16(), zero16()
    t00, t01, t02, t11, t12, t22 = zero16(), zero16(), zero16(), zero16(), zero16(), zero16()
    x00, x01, x02, x10, x11, x12, x20, x21, x22 = zero16(), zero16(), zero16(), zero16(), zero16(), zero16(), zero16(), zero16(), zero16()
    g0, g1, g2, u0, u1, u2, num, den = zero16(), zero16(), zero16(), zero16(), zero16(), zero16(), zero16(), zero16()
    for j in range(0, filled, LANES):
        at = start + j
        if j + LANES <= filled:
            cc, w = load16(ctf, at), load16(weight, at)
        else:  # the arrays end here: copy the rest through the scratch's own free rows
            for q in range(LANES):
                inside = j + q < filled
                scratch[13 * BLOCK + q] = ctf[at + q] if inside else np.float32(0.0)
                scratch[13 * BLOCK + LANES + q] = weight[at + q] if inside else np.float32(0.0)
            cc, w = load16(scratch, 13 * BLOCK), load16(scratch, 13 * BLOCK + LANES)
        dr, di = load16(scratch, j), load16(scratch, BLOCK + j)
        qx, qy, qz = load16(scratch, 2 * BLOCK + j), load16(scratch, 3 * BLOCK + j), load16(scratch, 4 * BLOCK + j)
        vr, vi = load16(scratch, 5 * BLOCK + j), load16(scratch, 6 * BLOCK + j)
        xr, xi = load16(scratch, 7 * BLOCK + j), load16(scratch, 8 * BLOCK + j)
        yr, yi = load16(scratch, 9 * BLOCK + j), load16(scratch, 10 * BLOCK + j)
        zr, zi = load16(scratch, 11 * BLOCK + j), load16(scratch, 12 * BLOCK + j)
        wc = mul(w, cc)
        wcc = mul(wc, cc)
        # e = grad F x q = -(q x grad F): dF/dp
        e0r, e0i = nmuladd(zr, qy, mul(yr, qz)), nmuladd(zi, qy, mul(yi, qz))
        e1r, e1i = nmuladd(xr, qz, mul(zr, qx)), nmuladd(xi, qz, mul(zi, qx))
        e2r, e2i = nmuladd(yr, qx, mul(xr, qy)), nmuladd(yi, qx, mul(xi, qy))
        rr, ri = nmuladd(cc, vr, dr), nmuladd(cc, vi, di)
        rr, ri = mul(rr, wc), mul(ri, wc)
        power = mul(wcc, muladd(vi, vi, mul(vr, vr)))
        den = add(den, power)
        num = muladd(wc, muladd(vi, di, mul(vr, dr)), num)
        g0 = muladd(e0i, ri, muladd(e0r, rr, g0))
        g1 = muladd(e1i, ri, muladd(e1r, rr, g1))
        g2 = muladd(e2i, ri, muladd(e2r, rr, g2))
        # dF/du = -i q F; Re(conj(-i q F) r) = q Re(i conj(F) r) = q (Fi rr - Fr ri)
        turned = nmuladd(vr, ri, mul(vi, rr))
        u0, u1, u2 = muladd(qx, turned, u0), muladd(qy, turned, u1), muladd(qz, turned, u2)
        px, py, pz = mul(power, qx), mul(power, qy), mul(power, qz)
        t00, t01, t02 = muladd(px, qx, t00), muladd(px, qy, t01), muladd(px, qz, t02)
        t11, t12, t22 = muladd(py, qy, t11), muladd(py, qz, t12), muladd(pz, qz, t22)
        w0r, w0i, w1r, w1i, w2r, w2i = mul(wcc, e0r), mul(wcc, e0i), mul(wcc, e1r), mul(wcc, e1i), mul(wcc, e2r), mul(wcc, e2i)
        h00 = muladd(w0i, e0i, muladd(w0r, e0r, h00))
        h01 = muladd(w0i, e1i, muladd(w0r, e1r, h01))
        h02 = muladd(w0i, e2i, muladd(w0r, e2r, h02))
        h11 = muladd(w1i, e1i, muladd(w1r, e1r, h11))
        h12 = muladd(w1i, e2i, muladd(w1r, e2r, h12))
        h22 = muladd(w2i, e2i, muladd(w2r, e2r, h22))
        # Re(conj(e) (-i q F)) = q (er Fi - ei Fr)
        f0 = nmuladd(w0i, vr, mul(w0r, vi))
        f1 = nmuladd(w1i, vr, mul(w1r, vi))
        f2 = nmuladd(w2i, vr, mul(w2r, vi))
        x00, x01, x02 = muladd(f0, qx, x00), muladd(f0, qy, x01), muladd(f0, qz, x02)
        x10, x11, x12 = muladd(f1, qx, x10), muladd(f1, qy, x11), muladd(f1, qz, x12)
        x20, x21, x22 = muladd(f2, qx, x20), muladd(f2, qy, x21), muladd(f2, qz, x22)
    s = float(scale)  # gradients were taken per padded sample
    sums[0] += total(h00) * s * s
    sums[1] += total(h01) * s * s
    sums[2] += total(h02) * s * s
    sums[3] += total(h11) * s * s
    sums[4] += total(h12) * s * s
    sums[5] += total(h22) * s * s
    sums[6] += total(t00)
    sums[7] += total(t01)
    sums[8] += total(t02)
    sums[9] += total(t11)
    sums[10] += total(t12)
    sums[11] += total(t22)
    sums[12] += total(x00) * s
    sums[13] += total(x01) * s
    sums[14] += total(x02) * s
    sums[15] += total(x10) * s
    sums[16] += total(x11) * s
    sums[17] += total(x12) * s
    sums[18] += total(x20) * s
    sums[19] += total(x21) * s
    sums[20] += total(x22) * s
    sums[21] += total(g0) * s
    sums[22] += total(g1) * s
    sums[23] += total(g2) * s
    sums[24] += total(u0)
    sums[25] += total(u1)
    sums[26] += total(u2)
    sums[27] += total(num)
    sums[28] += total(den)


SCRATCH_SIZE = 13 * BLOCK + 2 * LANES
"""Length of the scratch of `normal_equations`."""


@_njit
def select_samples(weight, index, shell, radius2, points, spectrum, table, table_scale, inv_sigma2, k_min2, k_max2, k, data, ctf, sample_weight):
    """The samples of one particle that count: in the band, and with C other than 0. Returns their number.

    Parameters
    ----------
    weight : (grid,) float32
        C, flat grid half-spectrum.
    index, shell, radius2, points, spectrum : of the particle's grid band (`fourier.GridBand`) and X there.
    table, table_scale, inv_sigma2 : as in `turn`.
    k_min2, k_max2 : float
        Squares of the band's limits.
    k, data, ctf, sample_weight : (m, 3) float32, (m,) complex64, (m,) float32, (m,) float32, set by this function
    """
    last = table.shape[0] - 1
    count = 0
    for i in range(index.shape[0]):
        if radius2[i] > k_max2 or radius2[i] < k_min2:
            continue
        c = weight[index[i]]
        if c == 0:
            continue
        place = min(np.int64(abs(c) * table_scale + np.float32(0.5)), last)
        k[count, 0], k[count, 1], k[count, 2] = points[i, 0], points[i, 1], points[i, 2]
        data[count] = spectrum[i]
        ctf[count] = c
        sample_weight[count] = inv_sigma2[shell[i]] * table[place]
        count += 1
    return count


@_njit
def residual_power(model, index, shell, points, tables, spectrum, weight, relative_scale, signed, edges, power, count, weight_sum):
    """Adds ``|X - C F e|^2`` of one particle to bins of relative weight and shell.

    Parameters
    ----------
    model : (m,) complex64
        F(R^-1 k), zero where the reference does not reach.
    index, shell, points, spectrum : of the particle's grid band.
    tables : (3, 2 top + 1) complex64
        `phase_tables` of the pose's shift.
    weight : (grid,) float32
    relative_scale : float32
        1 / max |C|.
    signed : bool
        Whether C can be negative: a is then C^2.
    edges : (bins + 1,) float64
    power, count, weight_sum : (bins, shells) float64
    """
    top = tables.shape[1] // 2
    bins = power.shape[0]
    for i in range(index.shape[0]):
        c = weight[index[i]]
        x = spectrum[i] * (tables[0, int(points[i, 0]) + top] * tables[1, int(points[i, 1]) + top] * tables[2, int(points[i, 2]) + top])
        r = x - c * model[i]
        a = abs(c) * relative_scale
        if signed:
            a = a * a
        b = 0
        while b < bins - 1 and a >= edges[b + 1]:
            b += 1
        s = shell[i]
        power[b, s] += r.real * r.real + r.imag * r.imag
        count[b, s] += 1.0
        weight_sum[b, s] += a


@_njit
def sum_samples(weight, index, points, spectrum, tables, table, table_scale, numerator, denominator):
    """``w C X exp(+i k.s)`` and ``w C^2`` of one particle, ready for `insert`; ``w = 1 / V``."""
    last = table.shape[0] - 1
    top = tables.shape[1] // 2
    for i in range(index.shape[0]):
        c = weight[index[i]]
        place = min(np.int64(abs(c) * table_scale + np.float32(0.5)), last)
        w = table[place] * c
        phase = tables[0, int(points[i, 0]) + top] * tables[1, int(points[i, 1]) + top] * tables[2, int(points[i, 2]) + top]
        numerator[i] = w * (spectrum[i] * phase)
        denominator[i] = w * c


@_njit
def choose(scores, rotations, keep, min_trace, chosen):
    """Greedy choice of the best candidates that are apart: `chosen` gets their rows; returns how many.

    Parameters
    ----------
    scores : (m,) float64, changed
    rotations : (m, 3, 3) float64
    keep : int
    min_trace : float
        Candidates whose relative rotation has a larger trace than this are the same.
    chosen : (keep,) int64, set by this function
    """
    found = 0
    while found < keep:
        top = -np.inf
        at = -1
        for i in range(scores.shape[0]):
            if scores[i] > top:
                top = scores[i]
                at = i
        if at < 0:
            break
        chosen[found] = at
        found += 1
        for i in range(scores.shape[0]):
            if scores[i] > -np.inf:
                trace = 0.0
                for a in range(3):
                    for b in range(3):
                        trace += rotations[i, a, b] * rotations[at, a, b]
                if trace > min_trace:
                    scores[i] = -np.inf
        scores[at] = -np.inf
    return found


@_njit
def insert(grid, n, c, points, matrix, scale, numerator, denominator):
    """The adjoint of `gather`: adds samples of one particle, at ``M^T k``, to a padded half-spectrum.

    Parameters
    ----------
    grid : (4 * n * n * nx,) float32
        Flat; per voxel ``(re, im, weight, unused)``; `n` rows along z and y, ``nx = c + 2`` columns.
    n, c : int
        Rows, and the row of frequency 0.
    points : (m, 3) float32, matrix : (3, 3) float32, scale : float32
        As in `gather`.
    numerator : (m,) complex64
        Already turned back by the pose's shift.
    denominator : (m,) float32
    """
    nx = c + 2
    row, plane = 4 * nx, 4 * nx * n
    off = np.float32(c)
    one = np.float32(1.0)
    for i in range(points.shape[0]):
        if denominator[i] == 0:
            continue
        kx, ky, kz = points[i, 0] * scale, points[i, 1] * scale, points[i, 2] * scale
        qx = matrix[0, 0] * kx + matrix[1, 0] * ky + matrix[2, 0] * kz
        qy = matrix[0, 1] * kx + matrix[1, 1] * ky + matrix[2, 1] * kz
        qz = matrix[0, 2] * kx + matrix[1, 2] * ky + matrix[2, 2] * kz
        sign = one
        if qx < 0:
            qx, qy, qz, sign = -qx, -qy, -qz, -one
        qy += off
        qz += off
        ix, iy, iz = int(qx), int(qy), int(qz)
        dx, dy, dz = qx - np.float32(ix), qy - np.float32(iy), qz - np.float32(iz)
        value = pack4(numerator[i].real, sign * numerator[i].imag, denominator[i], np.float32(0.0))
        at = iz * plane + iy * row + 4 * ix
        near_z, far_z = one - dz, dz
        near_y, far_y = one - dy, dy
        near_x, far_x = one - dx, dx
        for corner in range(4):
            wz = far_z if corner >= 2 else near_z
            wy = far_y if corner % 2 else near_y
            place = at + (plane if corner >= 2 else 0) + (row if corner % 2 else 0)
            w = wz * wy
            store(grid, place, muladd(broadcast4(w * near_x), value, load4(grid, place)))
            store(grid, place + 4, muladd(broadcast4(w * far_x), value, load4(grid, place + 4)))
