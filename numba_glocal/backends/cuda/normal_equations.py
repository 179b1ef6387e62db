"""One thread's share of the normal equations of a pose, for `refining`."""

from __future__ import annotations

import math

from numba import cuda, float32, int32

from .vector import fast_cos, fast_sin, load2

N_SUMS = 29
"""Hessian (21), gradient (6), overlap and model power of a pose."""

REFINE_THREADS, REFINE_BLOCKS = 256, 3
"""Threads that share a pose's samples, and poses on a multiprocessor at once (255 registers a thread, one pose: twice as slow)."""

_ONE, _SIXTH = float32(1.0), float32(1.0 / 6.0)
_called = cuda.jit(device=True)  # the compiler inlines it; Numba doing so would take longer to compile than all the rest


@_called
def accumulate(
    reference,
    c,
    n,
    cubes,
    cube_base,
    cube_index,
    k,
    weights,
    weight_base,
    weight_index,
    shell,
    table,
    table_scale,
    inv_sigma2,
    gain,
    curvature,
    pose,
    acc,
    tid,
):
    """One thread's share of the normal equations (`interpolation.normal_equations`) at a pose of twelve float32."""
    for j in range(N_SUMS):
        acc[j] = float32(0.0)
    m00, m01, m02 = float32(2.0) * pose[0], float32(2.0) * pose[1], float32(2.0) * pose[2]
    m10, m11, m12 = float32(2.0) * pose[3], float32(2.0) * pose[4], float32(2.0) * pose[5]
    m20, m21, m22 = float32(2.0) * pose[6], float32(2.0) * pose[7], float32(2.0) * pose[8]
    columns = c + 1
    row, plane = 2 * columns, 2 * columns * (2 * c + 1)
    for i in range(tid, cube_index.shape[0], REFINE_THREADS):
        ctf = weights[weight_base + weight_index[i]]
        if ctf == 0:
            continue
        place = min(int32(abs(ctf) * table_scale + float32(0.5)), table.shape[0] - 1)
        w = inv_sigma2[shell[i]] * table[place]
        ctf *= gain
        kx, ky, kz = float32(k[3 * i]), float32(k[3 * i + 1]), float32(k[3 * i + 2])
        qx = m00 * kx + m10 * ky + m20 * kz
        qy = m01 * kx + m11 * ky + m21 * kz
        qz = m02 * kx + m12 * ky + m22 * kz
        ux, uy, uz = float32(0.5) * qx, float32(0.5) * qy, float32(0.5) * qz
        turns = kx * pose[9] + ky * pose[10] + kz * pose[11]
        turns -= math.floor(turns + float32(0.5))
        angle = float32(2.0 * math.pi) * turns
        cos, sin = fast_cos(angle), fast_sin(angle)
        xr, xi = load2(cubes, cube_base + 2 * cube_index[i])
        dr, di = xr * cos - xi * sin, xr * sin + xi * cos
        sign = float32(1.0)
        if qx < 0:
            qx, qy, qz, sign = -qx, -qy, -qz, float32(-1.0)
        fx, fy, fz = math.floor(qx), math.floor(qy), math.floor(qz)
        dx, dy, dz = qx - float32(fx), qy - float32(fy), qz - float32(fz)
        at = (int32(fz) + c) * plane + (int32(fy) + c) * row + 2 * int32(fx)
        a0r, a0i = load2(reference, at)
        a1r, a1i = load2(reference, at + 2)
        b0r, b0i = load2(reference, at + row)
        b1r, b1i = load2(reference, at + row + 2)
        c0r, c0i = load2(reference, at + plane)
        c1r, c1i = load2(reference, at + plane + 2)
        d0r, d0i = load2(reference, at + plane + row)
        d1r, d1i = load2(reference, at + plane + row + 2)
        # along x at the four corners of y and z: value and slope
        ar, ai, sar, sai = a0r + (a1r - a0r) * dx, a0i + (a1i - a0i) * dx, a1r - a0r, a1i - a0i
        br, bi, sbr, sbi = b0r + (b1r - b0r) * dx, b0i + (b1i - b0i) * dx, b1r - b0r, b1i - b0i
        cr, ci, scr, sci = c0r + (c1r - c0r) * dx, c0i + (c1i - c0i) * dx, c1r - c0r, c1i - c0i
        er, ei, ser, sei = d0r + (d1r - d0r) * dx, d0i + (d1i - d0i) * dx, d1r - d0r, d1i - d0i
        lr, li, hr, hi = ar + (br - ar) * dy, ai + (bi - ai) * dy, cr + (er - cr) * dy, ci + (ei - ci) * dy
        vr, vi = lr + (hr - lr) * dz, li + (hi - li) * dz
        gzr, gzi = hr - lr, hi - li
        gyr, gyi = (br - ar) + ((er - cr) - (br - ar)) * dz, (bi - ai) + ((ei - ci) - (bi - ai)) * dz
        slr, sli, shr, shi = sar + (sbr - sar) * dy, sai + (sbi - sai) * dy, scr + (ser - scr) * dy, sci + (sei - sci) * dy
        gxr, gxi = slr + (shr - slr) * dz, sli + (shi - sli) * dz
        # what linear interpolation loses between nodes (`interpolation.interpolation_curvature`)
        ax, ay, az = curvature[0], curvature[1], curvature[2]
        mx, my, mz = _ONE + ax * (dx * (_ONE - dx) - _SIXTH), _ONE + ay * (dy * (_ONE - dy) - _SIXTH), _ONE + az * (dz * (_ONE - dz) - _SIXTH)
        sx, sy, sz = ax * (_ONE - dx - dx) * my * mz, ay * (_ONE - dy - dy) * mx * mz, az * (_ONE - dz - dz) * mx * my
        mend = mx * my * mz
        gxr, gxi, gyr, gyi = gxr * mend + vr * sx, gxi * mend + vi * sx, gyr * mend + vr * sy, gyi * mend + vi * sy
        gzr, gzi, vr, vi = gzr * mend + vr * sz, gzi * mend + vi * sz, vr * mend, vi * mend
        # F(-q) = conj F(q): the gradient's real part changes sign
        gxr, gyr, gzr, vi = sign * gxr, sign * gyr, sign * gzr, sign * vi
        # per unit frequency: the padded grid has two samples for each
        gxr, gxi, gyr, gyi, gzr, gzi = 2 * gxr, 2 * gxi, 2 * gyr, 2 * gyi, 2 * gzr, 2 * gzi
        wc = w * ctf
        wcc = wc * ctf
        e0r, e0i = gyr * uz - gzr * uy, gyi * uz - gzi * uy
        e1r, e1i = gzr * ux - gxr * uz, gzi * ux - gxi * uz
        e2r, e2i = gxr * uy - gyr * ux, gxi * uy - gyi * ux
        rr, ri = wc * (dr - ctf * vr), wc * (di - ctf * vi)
        power = wcc * (vr * vr + vi * vi)
        acc[28] += power
        acc[27] += wc * (vr * dr + vi * di)
        acc[21] += e0r * rr + e0i * ri
        acc[22] += e1r * rr + e1i * ri
        acc[23] += e2r * rr + e2i * ri
        turned = vi * rr - vr * ri
        acc[24] += ux * turned
        acc[25] += uy * turned
        acc[26] += uz * turned
        acc[6] += power * ux * ux
        acc[7] += power * ux * uy
        acc[8] += power * ux * uz
        acc[9] += power * uy * uy
        acc[10] += power * uy * uz
        acc[11] += power * uz * uz
        acc[0] += wcc * (e0r * e0r + e0i * e0i)
        acc[1] += wcc * (e0r * e1r + e0i * e1i)
        acc[2] += wcc * (e0r * e2r + e0i * e2i)
        acc[3] += wcc * (e1r * e1r + e1i * e1i)
        acc[4] += wcc * (e1r * e2r + e1i * e2i)
        acc[5] += wcc * (e2r * e2r + e2i * e2i)
        f0, f1, f2 = wcc * (e0r * vi - e0i * vr), wcc * (e1r * vi - e1i * vr), wcc * (e2r * vi - e2i * vr)
        acc[12] += f0 * ux
        acc[13] += f0 * uy
        acc[14] += f0 * uz
        acc[15] += f1 * ux
        acc[16] += f1 * uy
        acc[17] += f1 * uz
        acc[18] += f2 * ux
        acc[19] += f2 * uy
        acc[20] += f2 * uz
