"""What a backend is. CPU, CUDA and the slow oracle implement the same two sessions; numpy goes in and numpy comes out.

Everything above this seam (`numba_glocal.alignment`, `averaging`, `refinement`) is backend-free; the search schedule exists once, there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..noise import GroupResiduals, NoiseModel, NoiseModels, ResidualPower, as_models
from ..pose_prior import PosePrior
from .newton import MAX_STEPS


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that particles are worked on, after binning.

    Attributes
    ----------
    box_size : int
        As read.
    binned_box_size : int
        As worked on.
    pixel_size_angst : float
        As read.
    """

    box_size: int
    binned_box_size: int
    pixel_size_angst: float

    @property
    def binned_pixel_size_angst(self) -> float:
        """Voxel edge of the worked grid."""
        return self.pixel_size_angst * self.box_size / self.binned_box_size

    @property
    def half_box_angst(self) -> float:
        """From the centre of the box to its edge, whatever the binning."""
        return 0.5 * self.box_size * self.pixel_size_angst


@dataclass(frozen=True, slots=True)
class ParticleMask:
    """The sphere that particles are masked with before they are compared.

    Attributes
    ----------
    radius_voxels, soft_edge_voxels : float
        On the worked grid; the soft edge lies outside the radius.
    """

    radius_voxels: float
    soft_edge_voxels: float


@dataclass(frozen=True, slots=True)
class SearchSetup:
    """All that a search needs to know besides particles: one reference, one half-set.

    Attributes
    ----------
    grid : Grid
    reference : (n, n, n) float32
        Already masked, zero mean, in grey units of the particles.
    particle_mask : ParticleMask
    noise : NoiseModel or tuple of NoiseModel
        One for each group of particles (`ParticleBatch.groups`); a single one is that of all.
    score : str
        One of `values.SCORES`; decides which candidate wins and what is reported. Refinement always maximises the likelihood.
    k_min, k_max : float
        Band limits in 1 / box; levels may use less.
    max_shift_angst : float
        Hard limit of the distance from the anchor, at every level and in the refinement; inf for none.
    local_mask : (n, n, n) float32, optional
        What flcf takes the local deviation under, turned and moved with the reference; by default the particles' sphere, only moved.
    """

    grid: Grid
    reference: NDArray[np.float32]
    particle_mask: ParticleMask
    noise: NoiseModel | NoiseModels
    score: str = "ml"
    k_min: float = 0.0
    k_max: float = 0.0
    max_shift_angst: float = float("inf")
    local_mask: NDArray[np.float32] | None = None

    @property
    def models(self) -> NoiseModels:
        """Noise by group."""
        return as_models(self.noise)


@dataclass(frozen=True, slots=True)
class SumSetup:
    """All that an average needs to know besides particles.

    Attributes
    ----------
    grid : Grid
    normalise_mask : ParticleMask
        Particles have mean 0 and deviation 1 outside it.
    noise : NoiseModel or tuple of NoiseModel
        One for each group of particles. Of a single one only the form of V is used: weights are ``w = 1 / V``. Of several also how their sigma2
        compare (`noise.relative_inverse_sigma2`). C is multiplied by the gain.
    """

    grid: Grid
    normalise_mask: ParticleMask
    noise: NoiseModel | NoiseModels

    @property
    def models(self) -> NoiseModels:
        """Noise by group."""
        return as_models(self.noise)


NOT_FINITE = "it holds values that are not finite"
CONSTANT = "it is constant"
"""Why a particle that could be read is left out, in the same words by every backend."""


def sample_step(size: int) -> int:
    """Every so many voxels are looked at for a first, rough level of a volume of `size` voxels."""
    return max(1, size // 4096)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What is left to do with a particle as its file has it: a level off, a factor on (`particles.ParticleReader.read_volume`).

    Attributes
    ----------
    radius_voxels : float
        Mean and deviation are taken outside this sphere (`masks.outside_sphere`), on the grid as read.
    normalise : bool
        To deviation 1; else only the mean is taken off.
    invert_contrast : bool
    """

    radius_voxels: float
    normalise: bool
    invert_contrast: bool


@dataclass(frozen=True, slots=True)
class ParticleBatch:
    """Particles by key, and how to read them; a session reads only what its backend does not hold already.

    Attributes
    ----------
    keys : tuple of str
        Names; unique. A particle that is read in another way has another key.
    read : callable
        ``read(i) -> (volume (n, n, n) float32, weight (n, n, n // 2 + 1) float32)`` on the worked grid, normalised. Weights that are
        one and the same array object are stored once. Raises BadParticleError.
    read_raw : callable, optional
        ``read_raw(i, out) -> weight``: the volume as its file has it goes into ``out (n, n, n) float32``, from any thread. A backend that
        normalises particles itself may use it instead of `read`. Only for particles that are not binned. Raises BadParticleError.
    normalisation : Normalisation, optional
        What `read` does beyond `read_raw`.
    groups : (n,) int32, optional
        Which of the setup's noise models is whose; None: all have the first.
    """

    keys: tuple[str, ...]
    read: Callable[[int], tuple[NDArray[np.float32], NDArray[np.float32]]]
    read_raw: Callable[[int, NDArray[np.float32]], NDArray[np.float32]] | None = None
    normalisation: Normalisation | None = None
    groups: NDArray[np.int32] | None = None

    def groups_of(self, models: NoiseModels) -> NDArray[np.int32]:
        """Rows of `models`, one a particle."""
        if self.groups is None:
            return np.zeros(len(self.keys), np.int32)
        if len(self.groups) != len(self.keys) or np.any((self.groups < 0) | (self.groups >= len(models))):
            raise ValueError(f"expected a group from 0 to {len(models) - 1} for each of {len(self.keys)} particles, found {self.groups}")
        return np.asarray(self.groups, np.int32)

    def take(self, rows: Sequence[int]) -> ParticleBatch:
        """Those at `rows`, in that order."""
        read, read_raw = self.read, self.read_raw
        return ParticleBatch(
            tuple(self.keys[row] for row in rows),
            lambda index: read(rows[index]),
            None if read_raw is None else lambda index, out: read_raw(rows[index], out),
            self.normalisation,
            None if self.groups is None else self.groups[list(rows)],
        )


@dataclass(frozen=True, slots=True)
class SearchLevel:
    """One level of the coarse-to-fine search; rotations and shifts are common to all particles.

    Attributes
    ----------
    rotations : (a, 3, 3) float64
        Small (or, for a global search, all) rotations L: candidates are ``R0 L``.
    shift_radius_angst, shift_step_angst : float
        Ball of trial shifts around each start.
    k_max : float
    keep : int
        Candidates kept for each particle.
    separation_deg : float
        Least angle between two that are kept.
    """

    rotations: NDArray[np.float64]
    shift_radius_angst: float
    shift_step_angst: float
    k_max: float
    keep: int
    separation_deg: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """Poses under consideration: `seeds` per particle, best first.

    Attributes
    ----------
    rotations : (p, s, 3, 3) float64
    shifts_angst : (p, s, 3) float64
    scores : (p, s) float64
        -inf marks an unused place.
    """

    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    scores: NDArray[np.float64]

    def __len__(self) -> int:
        return int(self.rotations.shape[0])


@dataclass(frozen=True, slots=True)
class PoseEstimates:
    """Refined poses.

    Attributes
    ----------
    rotations : (p, 3, 3) float64
    shifts_angst : (p, 3) float64
    covariances : (p, 6, 6) float64
        Of (rotation vector in the particle's frame, radians; shift, Angstrom); the mask's correlation is accounted for.
    scores : (p,) float64
        In the setup's kind.
    log_likelihood : (p,) float64
        ``2 num - den2``, relative to no particle at all, corrected for the mask: differences are log-odds.
    margin : (p,) float64
        Log-likelihood above the best candidate that refined to another pose; inf when there was none.
    numerator, denominator : (p,) float64
        num and den2 at the pose.
    steps : (p,) int32
        Gauss-Newton steps taken.
    """

    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    covariances: NDArray[np.float64]
    scores: NDArray[np.float64]
    log_likelihood: NDArray[np.float64]
    margin: NDArray[np.float64]
    numerator: NDArray[np.float64]
    denominator: NDArray[np.float64]
    steps: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Partial sums of an average on the padded half-spectrum; `+` merges them, in task order.

    Attributes
    ----------
    numerator : (2 c + 1, 2 c + 1, c + 2) complex
        Sum of ``w g C X``, g the gain; frequency 0 at ``[c, c, 0]``, two rows a frequency.
    denominator : same shape, real
        Sum of ``w g^2 C^2``.
    n_particles : int
    """

    numerator: NDArray[np.complexfloating[Any, Any]]
    denominator: NDArray[np.floating[Any]]
    n_particles: int

    def __add__(self, other: WeightedSum) -> WeightedSum:
        return WeightedSum(
            self.numerator + other.numerator.astype(np.complex128),
            self.denominator + other.denominator.astype(np.float64),
            self.n_particles + other.n_particles,
        )


class SearchSession(Protocol):
    """One reference, one half-set. A context manager; owns memory."""

    def load(self, particles: ParticleBatch, prior: PosePrior | None = None) -> list[tuple[int, str]]:
        """Makes particles ready; returns (index, reason) of those that are unusable. They get no candidates.

        A prior is added to scores (Gaussians to likelihoods only) and to the refinement, its limit holds in both; what is reported at the end
        are score and likelihood without it, and the covariance with it.
        """

    def search(self, starts: Candidates, anchor_angst: NDArray[np.float64], level: SearchLevel) -> Candidates:
        """Best candidates around each start; `anchor_angst` (p, 3) is the centre of the hard shift limit."""

    def refine(self, candidates: Candidates, anchor_angst: NDArray[np.float64], most_steps: int = MAX_STEPS) -> PoseEstimates:
        """Exact Gauss-Newton of every candidate; the best of each particle. With `most_steps` 0 the candidates as they are."""

    def residuals(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> GroupResiduals:
        """Residual power of each group at given poses, beyond `k_max` the whole power."""

    def residuals_each(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> tuple[ResidualPower, NDArray[np.bool_]]:
        """The same for every particle by itself, (p, bins, shells), and whether its weight is a signed CTF (p,); zeros for unusable ones."""

    def unload(self) -> None:
        """Lets go of the loaded particles; what the backend's cache keeps stays."""

    def close(self) -> None:
        """Gives the session's memory back."""


class SumSession(Protocol):
    """Sums of one half-set."""

    def add(
        self,
        particles: ParticleBatch,
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
        shares: NDArray[np.float64] | None = None,
    ) -> list[tuple[int, str]]:
        """Adds particles at poses, each as much as its share (p,) says, wholly by default; returns (index, reason) of those left out."""

    def result(self) -> WeightedSum:
        """What has been added."""

    def close(self) -> None:
        """Gives the session's memory back."""


class Backend(Protocol):
    """A way to score, refine and sum particles."""

    name: str

    def open_search(self, setup: SearchSetup) -> SearchSession:
        """A session for one reference and half-set."""

    def open_sum(self, setup: SumSetup) -> SumSession:
        """A session for sums."""


def no_candidates(n_particles: int, seeds: int) -> Candidates:
    """Unused places for every particle."""
    rotations = np.broadcast_to(np.eye(3), (n_particles, seeds, 3, 3)).copy()
    return Candidates(rotations, np.zeros((n_particles, seeds, 3)), np.full((n_particles, seeds), -np.inf))


def as_candidates(rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> Candidates:
    """One start for each particle, from poses (p, 3, 3) and (p, 3)."""
    return Candidates(rotations[:, None].copy(), shifts_angst[:, None].copy(), np.zeros((len(rotations), 1)))


def unusable(reasons: Sequence[tuple[int, str]], n_particles: int) -> NDArray[np.bool_]:
    """Mask of the particles that `load` refused."""
    bad = np.zeros(n_particles, dtype=bool)
    for index, _ in reasons:
        bad[index] = True
    return bad
