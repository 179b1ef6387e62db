"""From sums to maps: partial sums of half-sets, the reconstruction, and the frame that the two halves share."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .backends import interpolation as kernels
from .backends.newton import unpack_normal_equations
from .backends.protocols import WeightedSum
from .fourier import PAD, central_irfftn, grid_band, in_parallel, padded_offset, padded_spectrum, sinc2_correction
from .geometry import matrix_to_rotvec, rotvec_to_matrix
from .values import Poses

REGULARISATION = 0.02
"""Share of a shell's mean weight that is added where no signal-to-noise ratio is given, so that empty places stay empty."""


def reconstruct(sums: WeightedSum, box_size: int, signal_to_noise: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
    """The map of a half-set from its sums: ``sum w C X / (sum w C^2 + mean weight of the shell / ratio)``.

    Parameters
    ----------
    sums : WeightedSum
    box_size : int
        Of the worked grid.
    signal_to_noise : (shells,) float64, optional
        Ratio per shell, for a map used as reference (the posterior mean under a Gaussian prior, as in RELION); by default the map is
        nearly unregularised.

    Returns
    -------
    (n, n, n) float32
        Without its mean (k = 0 is left out), centre at ``n // 2``.
    """
    n = box_size
    c = (sums.numerator.shape[0] - 1) // 2
    numerator, denominator = np.ascontiguousarray(sums.numerator), np.ascontiguousarray(sums.denominator)
    shell, fine, count = _radial_tables(c, n)
    by_plane = np.zeros((2 * c + 1, n + 1))
    in_parallel(lambda first: _add_shells(denominator, shell, first, min(first + _PLANES, 2 * c + 1), by_plane), range(0, 2 * c + 1, _PLANES))
    profile = by_plane.sum(0) / np.maximum(count, 1)
    if signal_to_noise is None:
        extra = REGULARISATION * profile[shell]
    else:
        radii = np.arange(_FINE * (n + 1) + 1) / _FINE
        ratio = np.maximum(np.interp(radii, np.arange(len(signal_to_noise)), signal_to_noise, right=1e-6), 1e-6)
        extra = profile[shell] / ratio[fine]
    extra += max(1e-12 * float(profile.max()), 1e-30)
    # a place of endless weight is empty: the mean, and all from n / 2 on
    limit = n // 2
    extra[fine >= limit * _FINE] = np.inf
    extra[0] = np.inf
    reach = min(c, PAD * limit - 1)
    volume = central_irfftn(lambda first, block: _divide_rows(numerator, denominator, extra, reach, first, block), n)
    volume /= sinc2_correction(n)
    return volume


_FINE = 8
_PLANES = 8


@lru_cache(maxsize=4)
def _radial_tables(c: int, n: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """By squared distance from the middle of a sum: shell (in 1 / box, at most n) and radius in eighths; and the samples of each shell."""
    radius = np.sqrt(np.arange(2 * c * c + (c + 1) ** 2 + 1)) / PAD
    shell = np.minimum(np.rint(radius), n).astype(np.int32)
    fine = np.minimum(np.rint(radius * _FINE), n * _FINE).astype(np.int32)
    z, y, x = np.arange(-c, c + 1)[:, None, None], np.arange(-c, c + 1)[None, :, None], np.arange(c + 2)[None, None, :]
    return shell, fine, np.bincount(shell[z * z + y * y + x * x].ravel(), minlength=n + 1)


# On the plane kx = 0 each Friedel pair was received once, on either side: both kernels add the other side.


@njit(cache=True, nogil=True)
def _add_shells(denominator, shell, first, last, by_plane):  # type: ignore[no-untyped-def]
    """Sums of the weight by shell for planes `first` to `last`, each plane's apart."""
    rows, columns = denominator.shape[1], denominator.shape[2]
    c = (rows - 1) // 2
    for i in range(first, last):
        z2 = (i - c) ** 2
        for j in range(rows):
            r2 = z2 + (j - c) ** 2
            by_plane[i, shell[r2]] += denominator[i, j, 0] + denominator[2 * c - i, 2 * c - j, 0]
            for x in range(1, columns):
                by_plane[i, shell[r2 + x * x]] += denominator[i, j, x]


@njit(cache=True, nogil=True)
def _divide_rows(numerator, denominator, extra, reach, first, block):  # type: ignore[no-untyped-def]
    """Sums over weights into rows of a padded half-spectrum; see `fourier.central_irfftn`."""
    c = (numerator.shape[0] - 1) // 2
    padded = block.shape[1]
    block[:] = 0
    for b in range(block.shape[0]):
        row = first + b
        ky = row if row <= reach else row - padded
        if row >= padded or ky < -reach:
            continue
        for kz in range(-reach, reach + 1):
            r2 = kz * kz + ky * ky
            i, j, to = kz + c, ky + c, kz if kz >= 0 else kz + padded
            weight = 1.0 / (denominator[i, j, 0] + denominator[2 * c - i, 2 * c - j, 0] + extra[r2])
            block[b, to, 0] = (numerator[i, j, 0] + numerator[2 * c - i, 2 * c - j, 0].conjugate()) * weight
            for x in range(1, reach + 1):
                block[b, to, x] = numerator[i, j, x] * (1.0 / (denominator[i, j, x] + extra[r2 + x * x]))


def merge(sums: list[WeightedSum]) -> WeightedSum:
    """Partial sums added up in the order given, in double precision; the first one's arrays are added to where they are double already."""
    first = sums[0]
    in_place = first.numerator.dtype == np.complex128
    numerator = first.numerator if in_place else np.empty(first.numerator.shape, np.complex128)
    denominator = first.denominator if in_place else np.empty(first.denominator.shape, np.float64)

    def add(begin: int) -> None:
        planes = slice(begin, begin + _PLANES)
        if not in_place:
            numerator[planes], denominator[planes] = first.numerator[planes], first.denominator[planes]
        for part in sums[1:]:
            numerator[planes] += part.numerator[planes]
            denominator[planes] += part.denominator[planes]

    in_parallel(add, range(0, len(numerator), _PLANES))
    return WeightedSum(numerator, denominator, sum(part.n_particles for part in sums))


def symmetrise_sums(sums: WeightedSum, grid_turns: NDArray[np.int64]) -> WeightedSum:
    """Sums as if each particle had been added at every ``R h`` instead of at ``R``: exact, because the `h` carry the grid onto itself.

    Parameters
    ----------
    sums : WeightedSum
    grid_turns : (h, 3, 3) int64
        A group of permutations of the axes with signs; see `symmetry.grid_factors`.

    Returns
    -------
    WeightedSum
        In double precision; `sums` itself where there is the identity alone.
    """
    if len(grid_turns) == 1:
        return sums
    numerator, denominator = np.zeros(sums.numerator.shape, np.complex128), np.zeros(sums.denominator.shape, np.float64)
    given = np.ascontiguousarray(sums.numerator, np.complex128), np.ascontiguousarray(sums.denominator, np.float64)
    turns = np.ascontiguousarray(grid_turns, np.int64)
    rows = len(numerator)
    in_parallel(
        lambda first: _add_turned(*given, turns, first, min(first + _PLANES, rows), numerator, denominator),
        range(0, rows, _PLANES),
    )
    return WeightedSum(numerator, denominator, sums.n_particles)


@njit(cache=True, nogil=True)
def _add_turned(numerator, denominator, turns, first, last, to_numerator, to_denominator):  # type: ignore[no-untyped-def]
    """Sums at all ``h q`` into planes `first` to `last`, for the grid points q up to row c; each Friedel pair of the plane kx = 0 by halves."""
    rows = numerator.shape[0]
    c = (rows - 1) // 2
    for i in range(first, last):
        for j in range(rows):
            for column in range(c + 1):
                value, weight = 0.0j, 0.0
                z, y, x = i - c, j - c, column
                for t in range(turns.shape[0]):
                    h = turns[t]
                    qx = h[0, 0] * x + h[0, 1] * y + h[0, 2] * z
                    qy = h[1, 0] * x + h[1, 1] * y + h[1, 2] * z
                    qz = h[2, 0] * x + h[2, 1] * y + h[2, 2] * z
                    if qx > 0:
                        value += numerator[qz + c, qy + c, qx]
                        weight += denominator[qz + c, qy + c, qx]
                    elif qx < 0:
                        value += numerator[c - qz, c - qy, -qx].conjugate()
                        weight += denominator[c - qz, c - qy, -qx]
                    else:
                        value += numerator[qz + c, qy + c, 0] + numerator[c - qz, c - qy, 0].conjugate()
                        weight += denominator[qz + c, qy + c, 0] + denominator[c - qz, c - qy, 0]
                half = 0.5 if column == 0 else 1.0
                to_numerator[i, j, column] = half * value
                to_denominator[i, j, column] = half * weight


def relative_motion(
    half1: NDArray[np.float32], half2: NDArray[np.float32], mask: NDArray[np.float32], k_max: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The small rigid motion that carries one half-map onto the other, from the low band alone.

    Parameters
    ----------
    half1, half2 : (n, n, n) float32
    mask : (n, n, n) float32
    k_max : float
        Band in 1 / box; low, so that no noise of high resolution is aligned and the halves stay independent there.

    Returns
    -------
    rotvec_rad : (3,) float64
        Rotation vector of Q.
    shift_voxels : (3,) float64
        d, with ``half2(x) = half1(Q^-1 (x - d))``.
    """
    n = half1.shape[0]
    reach = int(np.ceil(k_max))
    c = padded_offset(reach)
    spectra = in_parallel(lambda half: np.ascontiguousarray(padded_spectrum(half * mask, reach)).view(np.float32).ravel(), (half1, half2))
    # a generic common turn keeps the samples off the padded grid's nodes, where the sinc^2 correction overshoots
    generic = rotvec_to_matrix(np.array([-0.7, 0.9, 0.5]))
    band = grid_band(n, float(k_max))
    points = np.ascontiguousarray(band.k @ generic.T, np.float32)
    one = np.ones(len(points), np.float32)
    target = np.empty(len(points), np.complex64)
    model = np.empty(len(points), np.complex64)
    identity = np.eye(3, dtype=np.float32)
    kernels.gather(spectra[1], 2 * c + 1, c, points, identity, np.float32(PAD), target)
    kernels.gather(spectra[0], 2 * c + 1, c, points, identity, np.float32(PAD), model)
    power = np.bincount(band.shell, np.abs(target - model) ** 2, n) / np.maximum(np.bincount(band.shell, minlength=n), 1)
    weight = (1.0 / np.maximum(power[band.shell], 1e-12 * max(float(power.max()), 1e-30))).astype(np.float32)
    if not power.max() > 0:
        return np.zeros(3), np.zeros(3)
    rotation, shift = np.eye(3), np.zeros(3)
    scratch, sums = np.zeros(kernels.SCRATCH_SIZE, np.float32), np.zeros(kernels.N_SUMS)
    for _ in range(8):
        # the points are not integers: their phases are taken here, not from tables
        phase = np.exp(2j * np.pi / n * (points.astype(np.float64) @ shift))
        data = (target * phase).astype(np.complex64)
        none = np.ones((3, 2 * n + 1), np.complex64)
        kernels.normal_equations(
            spectra[0], 2 * c + 1, c, points, np.ascontiguousarray(rotation, np.float32), none, np.float32(PAD), data, one, weight, scratch, sums
        )
        hessian, gradient = unpack_normal_equations(sums)
        try:
            step = np.linalg.solve(hessian, gradient)
        except np.linalg.LinAlgError:
            break
        step[:3] *= min(1.0, np.deg2rad(3.0) / max(float(np.linalg.norm(step[:3])), 1e-12))
        shift = shift + rotation @ step[3:] * n / (2.0 * np.pi)
        rotation = rotation @ rotvec_to_matrix(step[:3])
        if np.linalg.norm(step[:3]) < 1e-6 and np.linalg.norm(step[3:]) < 1e-6:
            break
    return matrix_to_rotvec(rotation), shift


def warm_up() -> None:
    """Compiles (or loads) what this module does in the parent, on tiny sums; for while the workers start."""
    n, c = 16, padded_offset(7)
    rng = np.random.default_rng(0)
    shape = (2 * c + 1, 2 * c + 1, c + 2)
    parts = [WeightedSum(rng.normal(size=shape).astype(np.complex64), np.ones(shape, np.float32), 1) for _ in range(2)]
    half_map = reconstruct(symmetrise_sums(merge(parts), np.stack([np.eye(3, dtype=np.int64), np.diag([-1, -1, 1])])), n)
    relative_motion(half_map, half_map + rng.normal(size=half_map.shape).astype(np.float32), np.ones_like(half_map), 6.0)


def move_frame(poses: Poses, rotvec_rad: NDArray[np.float64], shift_angst: NDArray[np.float64], share: float) -> Poses:
    """Poses after their map's frame gave way by a share of a motion: ``R' = R Q^share``, ``s' = s + R (share d)``."""
    rotations = poses.rotations @ rotvec_to_matrix(share * np.asarray(rotvec_rad))
    shifts = poses.shifts_angst + np.einsum("pij,j->pi", poses.rotations, share * np.asarray(shift_angst))
    return Poses(rotations, shifts)
