"""What is known of poses before they are scored: Gaussians and a hard limit about the poses of the list.

A prior adds ``-angle^2 / (2 sigma_a^2) - distance^2 / (2 sigma_s^2)`` to the log-likelihood of a pose. Angle is that of the rotation from the
list's orientation (or from the nearest of its copies that a symmetry allows), so sigma is that of one component of a rotation vector; distance
is that from the list's shift. The hard limit leaves out what is further away than an angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .geometry import matrix_to_rotvec, rotvec_to_matrix
from .symmetry import group_rotations

Array = NDArray[np.float64]
_SLACK_RAD = 1e-7
"""Poses on the limit stay allowed whatever the last bits of their matrices."""


@dataclass(frozen=True, slots=True)
class PriorWidths:
    """How far poses may be from those of the list; inf where nothing is known.

    Attributes
    ----------
    angle_deg, shift_angst : float
        Standard deviations along one axis.
    max_angle_deg : float
        Hard limit.
    symmetry : str
        Point group whose copies of the list's orientation are as good.
    """

    angle_deg: float = math.inf
    shift_angst: float = math.inf
    max_angle_deg: float = math.inf
    symmetry: str = "C1"

    @property
    def says_something(self) -> bool:
        """Whether there is any prior at all."""
        return min(self.angle_deg, self.shift_angst) < math.inf or self.max_angle_deg < 180.0


@dataclass(frozen=True, slots=True)
class PosePrior:
    """A prior for each particle of a batch.

    Attributes
    ----------
    widths : PriorWidths
    rotations : (p, c, 3, 3) float64
        Orientations that it is about: one, or `c` that are equally good. The nearest counts.
    shifts_angst : (p, 3) float64
    """

    widths: PriorWidths
    rotations: Array
    shifts_angst: Array

    @classmethod
    def about(cls, widths: PriorWidths, rotations: NDArray[Any], shifts_angst: NDArray[Any]) -> PosePrior | None:
        """The prior about poses (p, 3, 3) and (p, 3); None where the widths say nothing."""
        if not widths.says_something:
            return None
        return cls(widths, np.asarray(rotations, np.float64)[:, None] @ group_rotations(widths.symmetry), np.asarray(shifts_angst, np.float64))

    def of(self, particle: int, evidence: float = 1.0) -> ParticlePrior:
        """The prior of one particle, in units of a score of which one stands for `evidence` of log-likelihood."""
        widths = self.widths
        return ParticlePrior(
            self.rotations[particle],
            self.shifts_angst[particle],
            0.5 / math.radians(widths.angle_deg) ** 2 / evidence if math.isfinite(widths.angle_deg) else 0.0,
            0.5 / widths.shift_angst**2 / evidence if math.isfinite(widths.shift_angst) else 0.0,
            math.radians(min(widths.max_angle_deg, 360.0)),
        )


@dataclass(frozen=True, slots=True)
class ParticlePrior:
    """What a pose of one particle loses, in units of its score.

    Attributes
    ----------
    rotations : (c, 3, 3) float64
    shift_angst : (3,) float64
    angle_weight, shift_weight : float
        Loss per radian^2 and per Angstrom^2.
    max_angle_rad : float
    """

    rotations: Array
    shift_angst: Array
    angle_weight: float
    shift_weight: float
    max_angle_rad: float

    def angle_loss(self, rotations: Array) -> Array:
        """Loss (a,) of rotations (a, 3, 3); inf beyond the hard limit."""
        traces = rotations.reshape(-1, 9) @ self.rotations.reshape(-1, 9).T
        angles = np.arccos(np.clip(0.5 * (traces.max(axis=1) - 1.0), -1.0, 1.0))
        return np.where(angles > self.max_angle_rad + _SLACK_RAD + 1e-6 * self.max_angle_rad, np.inf, self.angle_weight * angles**2)

    def shift_loss(self, shifts_angst: Array) -> Array:
        """Loss (t,) of shifts (t, 3)."""
        return np.asarray(self.shift_weight * ((shifts_angst - self.shift_angst) ** 2).sum(axis=-1))

    def away_rad(self, rotation: Array) -> Array:
        """Rotation vector (3,) from the nearest orientation to `rotation`, in the frame of either: ``R = R_near exp(away)``."""
        nearest = self.rotations[int(np.argmax(self.rotations.reshape(-1, 9) @ rotation.ravel()))]
        return matrix_to_rotvec(nearest.T @ rotation)

    def limited(self, rotation: Array) -> Array:
        """The rotation, brought back to the hard limit."""
        away = self.away_rad(rotation)
        angle = float(np.linalg.norm(away))
        if angle <= self.max_angle_rad:
            return rotation
        return np.asarray(rotation @ rotvec_to_matrix(away * (self.max_angle_rad / angle - 1.0)))

    def loss(self, rotation: Array, shift_angst: Array) -> float:
        """Loss of one pose by the Gaussians."""
        away = self.away_rad(rotation)
        return self.angle_weight * float(away @ away) + float(self.shift_loss(shift_angst))
