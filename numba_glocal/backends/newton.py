"""Gauss-Newton for one pose, whoever sums up the normal equations; with a hard limit of shifts, and a prior."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..geometry import rotvec_to_matrix
from ..pose_prior import ParticlePrior

Array = NDArray[np.float64]

STOP_ANGLE_DEG = 0.02
STOP_SHIFT_ANGST = 0.02
MAX_STEPS = 8
MAX_ANGLE_STEP_DEG = 3.0
_ON_ANGLE, _ON_SHIFT = np.repeat([1.0, 0.0], 3), np.repeat([0.0, 1.0], 3)


@dataclass(frozen=True, slots=True)
class End:
    """Where the steps ended.

    Attributes
    ----------
    objective : float
        ``2 num - den2``, less what the prior takes.
    rotation : (3, 3) float64, shift_angst : (3,) float64
    sums : (29,) float64
        Of `interpolation.normal_equations` there.
    steps : int
    """

    objective: float
    rotation: Array
    shift_angst: Array
    sums: Array
    steps: int


def climb(
    rotation: Array,
    shift_angst: Array,
    anchor_angst: Array,
    max_shift_angst: float,
    unit_angst: float,
    prior: ParticlePrior | None = None,
    most_steps: int = MAX_STEPS,
) -> Generator[tuple[Array, Array], Array, End]:
    """Yields the poses at which it wants the normal equations, is sent their sums, and returns where it ended.

    Steps until the step is small, never until the objective is: with noise fitted at bad poses such a test stops too early.

    Parameters
    ----------
    rotation : (3, 3), shift_angst : (3,)
        The start.
    anchor_angst : (3,), max_shift_angst : float
        The hard limit of shifts.
    unit_angst : float
        Angstrom of one unit of the normal equations' shift.
    prior : ParticlePrior, optional
    most_steps : int
    """

    def objective(sums: Array, rotation: Array, shift_angst: Array) -> float:
        return float(2.0 * sums[27] - sums[28]) - (0.0 if prior is None else prior.loss(rotation, shift_angst))

    sums = yield rotation, shift_angst
    height = objective(sums, rotation, shift_angst)
    damping, taken = 0.0, 0
    for _ in range(most_steps):
        hessian, gradient = unpack_normal_equations(sums)
        if prior is not None:
            add_prior(hessian, gradient, prior, rotation, shift_angst, unit_angst)
        hessian[np.diag_indices(6)] *= 1.0 + damping
        limits = [(_ON_SHIFT, rotation.T @ (shift_angst - anchor_angst) / unit_angst, max_shift_angst / unit_angst)]
        if prior is not None and prior.max_angle_rad < math.pi:
            limits.append((_ON_ANGLE, prior.away_rad(rotation), prior.max_angle_rad))
        try:
            step = limited_step(hessian, gradient, limits)
        except np.linalg.LinAlgError:
            break
        angle_deg = math.degrees(float(np.linalg.norm(step[:3])))
        if angle_deg > MAX_ANGLE_STEP_DEG:
            step = step * (MAX_ANGLE_STEP_DEG / angle_deg)
        new_rotation = rotation @ rotvec_to_matrix(step[:3])
        if prior is not None:
            new_rotation = prior.limited(new_rotation)
        new_shift = limit_shift(shift_angst + rotation @ step[3:] * unit_angst, anchor_angst, max_shift_angst)
        new_sums = yield new_rotation, new_shift
        new_height = objective(new_sums, new_rotation, new_shift)
        taken += 1
        small = angle_deg < STOP_ANGLE_DEG and float(np.abs(new_shift - shift_angst).max()) < STOP_SHIFT_ANGST
        if new_height >= height:
            rotation, shift_angst, sums, height, damping = new_rotation, new_shift, new_sums, new_height, 0.0
            if small:
                break
        elif small:
            break
        else:
            damping = max(4.0 * damping, 0.5)
    return End(height, rotation, shift_angst, sums, taken)


def add_prior(hessian: Array, gradient: Array, prior: ParticlePrior, rotation: Array, shift_angst: Array, unit_angst: float) -> None:
    """A prior's share of the normal equations, in place: its loss at ``R exp(p)``, ``s + R u`` is ``loss - 2 g.x + x.H x``."""
    gradient[:3] -= prior.angle_weight * prior.away_rad(rotation)
    gradient[3:] -= prior.shift_weight * unit_angst * (rotation.T @ (shift_angst - prior.shift_angst))
    hessian += np.diag(prior.angle_weight * _ON_ANGLE + prior.shift_weight * unit_angst**2 * _ON_SHIFT)


def unpack_normal_equations(sums: Array) -> tuple[Array, Array]:
    """Hessians (.., 6, 6) and gradients (.., 6) from the sums (.., 29) of `interpolation.normal_equations`."""
    hessian = np.zeros((*sums.shape[:-1], 6, 6))
    row, column = np.triu_indices(3)
    for first, of in ((0, 0), (3, 6)):
        hessian[..., first + row, first + column] = hessian[..., first + column, first + row] = sums[..., of : of + 6]
    hessian[..., :3, 3:] = sums[..., 12:21].reshape(*sums.shape[:-1], 3, 3)
    hessian[..., 3:, :3] = np.swapaxes(hessian[..., :3, 3:], -1, -2)
    return hessian, sums[..., 21:27].copy()


def limited_step(hessian: Array, gradient: Array, limits: list[tuple[Array, Array, float]]) -> Array:
    """The Newton step (6,) inside balls: greatest ``g.x - x.H x / 2`` with ``|away + x[which]| <= limit`` for each of `limits`.

    Clipping the free step instead would leave a rotation that fits a shift which is not allowed.

    Parameters
    ----------
    hessian : (6, 6), gradient : (6,)
    limits : list of (on, away, limit)
        `on` (6,) is 1 for the three unknowns that the limit is about; `away` (3,) is where they stand.
    """
    if not limits:
        return np.asarray(np.linalg.solve(hessian, gradient), np.float64)
    (on, away, limit), others = limits[0], limits[1:]
    rows = on > 0
    step = limited_step(hessian, gradient, others)
    if float(np.linalg.norm(away + step[rows])) <= limit:
        return step
    pull = np.zeros(6)
    pull[rows] = away
    low, high = 0.0, float(np.trace(hessian[np.ix_(rows, rows)]))  # bounds of the multiplier of the limit
    for _ in range(60):
        middle = high if low == 0.0 else 0.5 * (low + high)
        step = limited_step(hessian + np.diag(middle * on), gradient - middle * pull, others)
        distance = float(np.linalg.norm(away + step[rows]))
        if abs(distance - limit) <= 1e-6 * limit:
            break
        if distance > limit:
            low, high = middle, high if middle < high else 4.0 * high
        else:
            low, high = max(low, 1e-9 * middle), middle
    return step


def limit_shift(shift_angst: Array, anchor_angst: Array, max_shift_angst: float) -> Array:
    """The shift, brought back to the ball of allowed ones around its anchor."""
    away = shift_angst - anchor_angst
    distance = float(np.linalg.norm(away))
    return shift_angst if distance <= max_shift_angst else anchor_angst + away * (max_shift_angst / distance)
