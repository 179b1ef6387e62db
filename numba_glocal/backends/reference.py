"""The slow oracle: the same sessions as the fast backends, by the formulas of docs/scoring.md as they are written.

Double precision numpy and scipy only, and no code shared with the fast paths: the reference's transform at turned positions is a direct
sum over voxels, rotations come from scipy, and everything is evaluated on the particle's own grid samples. Meant for tests and boxes up to
about 24 voxels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, optimize
from scipy.spatial.transform import Rotation

from ..errors import BadParticleError
from ..noise import WEIGHT_BIN_EDGES, GroupResiduals, NoiseModel, ResidualPower, add_residuals
from ..pose_prior import PosePrior
from .newton import MAX_STEPS
from .protocols import Candidates, Grid, ParticleBatch, PoseEstimates, SearchLevel, SearchSetup, SumSetup, WeightedSum, no_candidates

Float = NDArray[np.float64]
Complex = NDArray[np.complex128]

_CHUNK = 128
_TRIAL_LATTICE = Rotation.from_rotvec([-0.7, 0.9, 0.5]).as_matrix()
"""Axes of the lattice of trial shifts, in the reference's frame at the start pose."""

_MAX_TRIAL_STEPS = 12


@dataclass(frozen=True, slots=True)
class _Samples:
    """One particle on its grid samples: half of Fourier space, the origin left out, C not 0."""

    k: Float  # (m, 3), x y z
    shell: NDArray[np.int64]
    data: Complex  # X
    unmasked: Complex  # Xu
    weight: Float  # gain C
    inverse_variance: Float  # w

    def within(self, k_min: float, k_max: float) -> _Samples:
        """Those with k_min <= |k| <= k_max."""
        radius = np.linalg.norm(self.k, axis=1)
        keep = (radius <= k_max + 1e-6) & (radius >= k_min - 1e-6)
        return _Samples(self.k[keep], self.shell[keep], self.data[keep], self.unmasked[keep], self.weight[keep], self.inverse_variance[keep])


@dataclass(frozen=True, slots=True)
class _Particle:
    volume: Float  # mean outside the mask removed, not masked
    masked: Float
    weight: Float  # half-spectrum
    samples: _Samples
    group: int
    noise: NoiseModel


def sphere(box_size: int, radius_voxels: float, soft_edge_voxels: float, centre_voxels: Float | None = None) -> Float:
    """The particle mask, periodic, its centre `centre_voxels` (x, y, z) away from the box's."""
    axis = np.arange(box_size) - box_size // 2
    x, y, z = (np.remainder(axis - s + box_size / 2, box_size) - box_size / 2 for s in (np.zeros(3) if centre_voxels is None else centre_voxels))
    radius = np.sqrt(z[:, None, None] ** 2 + y[None, :, None] ** 2 + x[None, None, :] ** 2)
    if soft_edge_voxels <= 0:
        return (radius <= radius_voxels).astype(np.float64)
    return np.cos(0.5 * np.pi * np.clip((radius - radius_voxels) / soft_edge_voxels, 0, 1)) ** 2


def transform_at(volume: Float, points: Float) -> Complex:
    """Transform of a volume, centre ``n // 2``, at any points (m, 3) in 1 / box: a direct sum over its voxels."""
    n = volume.shape[0]
    axis = np.arange(n) - n // 2
    columns = np.ascontiguousarray(np.asarray(volume, np.float64).reshape(-1, n).T)
    out = np.empty(len(points), np.complex128)
    for first in range(0, len(points), _CHUNK):
        part = points[first : first + _CHUNK]
        x, y, z = (np.exp(-2j * np.pi / n * np.outer(axis, part[:, i])) for i in range(3))
        plane_waves = (z[:, None] * y[None]).reshape(n * n, len(part))
        over_zy = (columns @ plane_waves.view(np.float64)).view(np.complex128)
        out[first : first + _CHUNK] = (over_zy * x).sum(0)
    return out


def _half_spectrum(volume: Float) -> Complex:
    return np.fft.rfftn(np.fft.ifftshift(volume))


def _volume(spectrum: NDArray[np.complexfloating[Any, Any]], n: int) -> Float:
    return np.fft.fftshift(np.fft.irfftn(spectrum, s=(n, n, n), axes=(0, 1, 2)))


def _frequencies(n: int) -> Float:
    """(n, n, n // 2 + 1, 3) frequencies (x, y, z) of the half-spectrum."""
    k = np.fft.fftfreq(n, 1 / n)
    z, y, x = np.meshgrid(k, k, np.arange(n // 2 + 1.0), indexing="ij")
    return np.stack([x, y, z], axis=-1)


def _half_space(k: Float, n: int) -> NDArray[np.bool_]:
    """One of each pair k, -k; neither the origin nor the planes that an even box folds onto themselves."""
    x, y, z = k[..., 0], k[..., 1], k[..., 2]
    return ((x > 0) | ((x == 0) & (y > 0)) | ((x == 0) & (y == 0) & (z > 0))) & (np.abs(k).max(-1) < n / 2)


def _relative_weight(weight: Float) -> Float:
    """The a that V is a function of: ``|C| / max |C|``, squared where C is a signed CTF."""
    a = np.abs(weight) / max(np.abs(weight).max(), 1e-30)
    return a * a if _is_signed(weight) else a


def _is_signed(weight: Float) -> bool:
    return bool(weight.min() < -0.05 * np.abs(weight).max())


def _inverse_variance(noise: NoiseModel, weight: Float, shell: NDArray[np.int64]) -> Float:
    sigma2 = np.maximum(noise.sigma2, max(float(noise.sigma2.max()) * 1e-9, 1e-30))
    return 1.0 / (sigma2[np.minimum(shell, len(sigma2) - 1)] * noise.variance_form(_relative_weight(weight)))


def _voxel_angst(grid: Grid) -> float:
    return grid.pixel_size_angst * grid.box_size / grid.binned_box_size


def trial_shifts(radius: float, step: float) -> Float:
    """Trial shifts (t, 3) of a ball, shortest first: a cubic lattice with `step` stretched so that it ends on the radius."""
    if radius <= 0:
        return np.zeros((1, 3))
    count = min(max(round(radius / step), 1), _MAX_TRIAL_STEPS)
    axis = np.linspace(-radius, radius, 2 * count + 1)
    lattice = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    length = np.linalg.norm(lattice, axis=1)
    lattice = lattice[np.argsort(length, kind="stable")][: int((length <= 1.01 * radius + 1e-9).sum())]
    return lattice @ _TRIAL_LATTICE.T


class ReferenceBackend:
    """Scores, refines and sums particles slowly, in double precision."""

    name = "reference"

    def open_search(self, setup: SearchSetup) -> ReferenceSearchSession:
        """A session for one reference and half-set."""
        return ReferenceSearchSession(setup)

    def open_sum(self, setup: SumSetup) -> ReferenceSumSession:
        """A session for sums."""
        return ReferenceSumSession(setup)


class ReferenceSearchSession:
    """See `protocols.SearchSession`."""

    def __init__(self, setup: SearchSetup) -> None:
        self.setup = setup
        self._n = setup.grid.binned_box_size
        self._voxel_angst = _voxel_angst(setup.grid)
        self._reference = np.asarray(setup.reference, np.float64)
        mask = setup.particle_mask
        self._mask = sphere(self._n, mask.radius_voxels, mask.soft_edge_voxels)
        self._mask_mean_square = float(np.mean(self._mask**2))
        self._local_mask = self._mask if setup.local_mask is None else np.asarray(setup.local_mask, np.float64)
        self._particles: list[_Particle | None] = []
        self._prior: PosePrior | None = None

    def load(self, particles: ParticleBatch, prior: PosePrior | None = None) -> list[tuple[int, str]]:
        """Masks and transforms particles; returns (index, reason) of unusable ones."""
        self._particles, bad = [], []
        groups = particles.groups
        self._prior = prior
        for index, name in enumerate(particles.keys):
            try:
                particle = self._prepare(*particles.read(index), 0 if groups is None else int(groups[index]))
                if not len(particle.samples.k):
                    raise BadParticleError(name, "its weight leaves nothing in the band")
            except BadParticleError as problem:
                bad.append((index, problem.reason))
                self._particles.append(None)
            else:
                self._particles.append(particle)
        return bad

    def _prepare(self, volume: NDArray[Any], weight: NDArray[Any], group: int) -> _Particle:
        n, noise = self._n, self.setup.models[group]
        volume, weight = np.asarray(volume, np.float64), np.asarray(weight, np.float64)
        outside = self._mask < 0.01
        volume = volume - (volume[outside].mean() if outside.any() else volume.mean())
        masked = volume * self._mask
        k = _frequencies(n)
        radius = np.linalg.norm(k, axis=-1)
        used = _half_space(k, n) & (radius <= n // 2 - 2 + 1e-6) & (weight != 0)
        shell = np.rint(radius).astype(np.int64)
        w = _inverse_variance(noise, weight, shell)
        ctf = noise.gain * weight[used]
        samples = _Samples(k[used], shell[used], _half_spectrum(masked)[used], _half_spectrum(volume)[used], ctf, w[used])
        return _Particle(volume, masked, weight, samples, group, noise)

    def _model(self, samples: _Samples, rotation: Float) -> Complex:
        """F(R^-1 k)."""
        return transform_at(self._reference, samples.k @ rotation)

    def _phase(self, samples: _Samples, shift_angst: Float) -> Complex:
        """exp(+2 pi i k.s), (m,) or, for shifts (t, 3), (m, t)."""
        return np.exp(2j * np.pi / self._n / self._voxel_angst * (samples.k @ shift_angst.T))

    # -- scores ------------------------------------------------------------------------------------------------------

    def _normalised(self, p: int, samples: _Samples, num: Float, den: Any, rotations: Float, places_angst: Float, k_max: float) -> Float:
        """Scores of ``num`` (a, t) at rotations (a, 3, 3) and shifts (t, 3)."""
        if self.setup.score == "ml":
            return 2.0 * num - den
        if self.setup.score == "ncc":
            return num / np.sqrt(den * (samples.inverse_variance * np.abs(samples.data) ** 2).sum())
        sigma = self._sigma(p, rotations, places_angst, k_max)
        return num / (np.sqrt(den) * sigma) * math.sqrt(2.0 / (self._n**3 * self._local_mask.sum()))

    def _moved_masks(self, rotation: Float, shifts_voxels: Float) -> Iterator[Float]:
        """The mask of the local deviation, turned, at each shift (t, 3): m(R^-1 (x - s)), periodic."""
        mask, n = self.setup.particle_mask, self._n
        turned = rotation[::-1, ::-1].T  # R^-1, acting on (z, y, x)
        centre = np.full(3, n // 2)
        for shift in shifts_voxels:
            if self.setup.local_mask is None:
                yield sphere(n, mask.radius_voxels, mask.soft_edge_voxels, shift)
            else:
                yield ndimage.affine_transform(self._local_mask, turned, centre - turned @ (centre + shift[::-1]), order=3, mode="grid-wrap")

    def _sigma(self, p: int, rotations: Float, places_angst: Float, k_max: float) -> Float:
        """Standard deviation of the filtered unmasked particle under the mask at each pose; (1, t) for a sphere, which no rotation changes."""
        particle = self._particles[p]
        assert particle is not None
        n = self._n
        k = _frequencies(n)
        radius = np.linalg.norm(k, axis=-1)
        band = (radius <= k_max + 1e-6) & (radius >= max(self.setup.k_min - 1e-6, 0.5)) & (np.abs(k).max(-1) < n / 2) & (particle.weight != 0)
        w = _inverse_variance(particle.noise, particle.weight, np.rint(radius).astype(np.int64))
        x = _volume(_half_spectrum(particle.volume) * np.sqrt(w) * band, n)
        turns = rotations[:1] if self.setup.local_mask is None else rotations
        out = np.empty((len(turns), len(places_angst)))
        for row, rotation in enumerate(turns):
            for i, moved in enumerate(self._moved_masks(rotation, places_angst / self._voxel_angst)):
                mean = (moved * x).sum() / moved.sum()
                out[row, i] = math.sqrt((moved * x * x).sum() / moved.sum() - mean**2)
        return out

    def _data(self, samples: _Samples) -> Complex:
        return samples.unmasked if self.setup.score == "flcf" else samples.data

    def search(self, starts: Candidates, anchor_angst: NDArray[np.float64], level: SearchLevel) -> Candidates:
        """Scores every rotation and shift of the level around every start; keeps the best that are apart."""
        result = no_candidates(len(self._particles), level.keep)
        for p in range(len(self._particles)):
            found = [
                self.score_start(p, starts.rotations[p, s], starts.shifts_angst[p, s], anchor_angst[p], level)
                for s in range(starts.scores.shape[1])
                if self._particles[p] is not None and starts.scores[p, s] > -np.inf
            ]
            if not found:
                continue
            rotations, shifts, scores = (np.concatenate(part) for part in zip(*found, strict=True))
            kept: list[int] = []
            for row in np.argsort(-scores, kind="stable"):
                if len(kept) == level.keep or scores[row] == -np.inf:
                    break
                angles = [np.rad2deg(Rotation.from_matrix(rotations[row] @ rotations[other].T).magnitude()) for other in kept]
                if all(angle >= level.separation_deg for angle in angles):
                    kept.append(int(row))
            result.rotations[p, : len(kept)] = rotations[kept]
            result.shifts_angst[p, : len(kept)] = shifts[kept]
            result.scores[p, : len(kept)] = scores[kept]
        return result

    def score_start(self, p: int, rotation: Float, shift_angst: Float, anchor_angst: Float, level: SearchLevel) -> tuple[Float, Float, Float]:
        """Rotations (a, 3, 3), best shifts (a, 3) and scores (a,) around one start of particle `p`."""
        particle = self._particles[p]
        assert particle is not None
        k_max = min(level.k_max, self.setup.k_max, self._n // 2 - 2)
        samples = particle.samples.within(self.setup.k_min, k_max)
        places = shift_angst + trial_shifts(level.shift_radius_angst, level.shift_step_angst) @ rotation.T
        allowed = np.linalg.norm(places - anchor_angst, axis=1) <= self.setup.max_shift_angst * (1 + 1e-6) + 1e-6
        rotations = rotation @ level.rotations
        if not allowed.any():
            return rotations, np.broadcast_to(shift_angst, (len(rotations), 3)), np.full(len(rotations), -np.inf)
        places = places[allowed]
        models = np.stack([self._model(samples, r) for r in rotations])
        wc = samples.inverse_variance * samples.weight
        num = (np.conj(models) @ ((wc * self._data(samples))[:, None] * self._phase(samples, places))).real
        den = (wc * samples.weight * np.abs(models) ** 2).sum(1)[:, None]
        scores = self._normalised(p, samples, num, den, rotations, places, k_max)
        if self._prior is not None:
            from_prior = np.stack([np.linalg.norm(self._turn_from_prior(p, r)) for r in rotations])
            widths = self._prior.widths
            log_prior = -0.5 * np.square(from_prior / math.radians(widths.angle_deg))[:, None]
            log_prior = log_prior - 0.5 * (np.linalg.norm(places - self._prior.shifts_angst[p], axis=1) / widths.shift_angst) ** 2
            log_prior[from_prior > math.radians(widths.max_angle_deg) + 1e-6] = -np.inf
            scores = scores + log_prior / self._mask_mean_square
        best = scores.argmax(1)
        return rotations, places[best], scores[np.arange(len(scores)), best]

    def _turn_from_prior(self, p: int, rotation: Float) -> Float:
        """Rotation vector, in the particle's frame, that leads to a rotation from the nearest one that the prior is about."""
        assert self._prior is not None
        turns = [Rotation.from_matrix(rotation @ about.T).as_rotvec() for about in self._prior.rotations[p]]
        return np.asarray(min(turns, key=np.linalg.norm))

    def _prior_residual(self, p: int, rotation: Float, shift_angst: Float) -> Float:
        """What the squares of make up the prior's loss, in the likelihood's units."""
        if self._prior is None:
            return np.zeros(0)
        widths = self._prior.widths
        turn = self._turn_from_prior(p, rotation) / math.radians(widths.angle_deg)
        return np.append(turn, (shift_angst - self._prior.shifts_angst[p]) / widths.shift_angst) / math.sqrt(2.0 * self._mask_mean_square)

    # -- refinement --------------------------------------------------------------------------------------------------

    def refine(self, candidates: Candidates, anchor_angst: NDArray[np.float64], most_steps: int = MAX_STEPS) -> PoseEstimates:
        """Maximises the likelihood from every candidate with a general optimiser; keeps the best of each particle."""
        count = len(self._particles)
        nothing = np.full(count, -np.inf)
        out = PoseEstimates(
            candidates.rotations[:, 0].copy(),
            candidates.shifts_angst[:, 0].copy(),
            np.full((count, 6, 6), np.nan),
            nothing,
            nothing.copy(),
            np.full(count, np.inf),
            np.zeros(count),
            np.zeros(count),
            np.zeros(count, np.int32),
        )
        k_max = min(self.setup.k_max, self._n // 2 - 2)
        for p, particle in enumerate(self._particles):
            if particle is None:
                continue
            samples = particle.samples.within(self.setup.k_min, k_max)
            ends = [
                self._maximise(p, samples, candidates.rotations[p, s], candidates.shifts_angst[p, s], anchor_angst[p])
                if most_steps
                else self._as_it_is(samples, candidates.rotations[p, s], candidates.shifts_angst[p, s])
                for s in range(candidates.scores.shape[1])
                if candidates.scores[p, s] > -np.inf
            ]
            if not ends:
                continue
            ends.sort(key=lambda end: -end[0])
            objective, rotation, shift, _ = ends[0]
            num, den = self.sums(samples, samples.data, rotation, shift)
            out.rotations[p], out.shifts_angst[p], out.numerator[p], out.denominator[p] = rotation, shift, num, den
            out.steps[p] = sum(end[3] for end in ends)
            out.log_likelihood[p] = (2.0 * num - den) * self._mask_mean_square
            precision = 2.0 * self._mask_mean_square * self.information(samples, rotation, shift)
            if self._prior is not None:
                deviations = np.repeat([math.radians(self._prior.widths.angle_deg), self._prior.widths.shift_angst], 3)
                precision += np.diag(deviations**-2.0)
            out.covariances[p] = np.linalg.inv(precision)
            wanted = num if self.setup.score != "flcf" else self.sums(samples, samples.unmasked, rotation, shift)[0]
            out.scores[p] = np.ravel(self._normalised(p, samples, np.array([[wanted]]), den, rotation[None], shift[None], k_max))[0]
            for other in ends[1:]:
                angle_deg = np.rad2deg(Rotation.from_matrix(rotation.T @ other[1]).magnitude())
                if angle_deg > 1.0 or np.linalg.norm(other[2] - shift) > self._voxel_angst:
                    out.margin[p] = (objective - other[0]) * self._mask_mean_square
                    break
        return out

    def sums(self, samples: _Samples, data: Complex, rotation: Float, shift_angst: Float) -> tuple[float, float]:
        """num and den2 at a pose."""
        model = samples.weight * self._model(samples, rotation)
        num = (samples.inverse_variance * np.conj(model) * data * self._phase(samples, shift_angst)).real.sum()
        return float(num), float((samples.inverse_variance * np.abs(model) ** 2).sum())

    def _pose(self, x: Float, rotation: Float, shift_angst: Float) -> tuple[Float, Float]:
        """The pose at unknowns x: a rotation vector applied on the left, as arc in voxels at the edge of the mask, and a shift in voxels."""
        turn = Rotation.from_rotvec(x[:3] / self.setup.particle_mask.radius_voxels).as_matrix()
        return turn @ rotation, shift_angst + x[3:] * self._voxel_angst

    def _whitened_model(self, samples: _Samples, rotation: Float, shift_angst: Float) -> Float:
        model = np.sqrt(samples.inverse_variance) * samples.weight * self._model(samples, rotation) / self._phase(samples, shift_angst)
        return np.concatenate([model.real, model.imag])

    def _as_it_is(self, samples: _Samples, rotation: Float, shift_angst: Float) -> tuple[float, Float, Float, int]:
        num, den = self.sums(samples, samples.data, rotation, shift_angst)
        return 2.0 * num - den, rotation, shift_angst, 0

    def _maximise(self, p: int, samples: _Samples, rotation: Float, shift_angst: Float, anchor_angst: Float) -> tuple[float, Float, Float, int]:
        """Likelihood (less what the prior takes), pose and number of evaluations at the end of a search from one candidate."""
        data = np.sqrt(samples.inverse_variance) * samples.data
        target = np.concatenate([data.real, data.imag])
        scale = 1.0 / math.sqrt(float(target @ target))

        def residual_at(pose: tuple[Float, Float]) -> Float:
            return scale * np.append(target - self._whitened_model(samples, *pose), self._prior_residual(p, *pose))

        def residual(x: Float) -> Float:
            return residual_at(self._pose(x, rotation, shift_angst))

        found = optimize.least_squares(residual, np.zeros(6), method="trf", xtol=1e-7, ftol=1e-11, gtol=1e-11, max_nfev=60)
        evaluations = int(found.nfev)

        pose = self._pose(found.x, rotation, shift_angst)
        away = pose[1] - anchor_angst
        distance, limit = float(np.linalg.norm(away)), self.setup.max_shift_angst
        if distance > limit:
            # the best allowed shift lies on the limit's sphere: its direction is sought in the tangent plane of where the free optimum lies
            outward = away / distance
            tangent = np.linalg.svd(outward[None])[2][1:]

            def bounded_pose(x: Float) -> tuple[Float, Float]:
                direction = outward + x[3:5] @ tangent
                return self._pose(np.append(x[:3], np.zeros(3)), pose[0], anchor_angst + limit * direction / np.linalg.norm(direction))

            bounded = optimize.least_squares(
                lambda x: residual_at(bounded_pose(x)),
                np.zeros(5),
                xtol=1e-7,
                ftol=1e-11,
                gtol=1e-11,
                max_nfev=60,
            )
            pose, evaluations = bounded_pose(bounded.x), evaluations + int(bounded.nfev)
        if self._prior is not None and np.linalg.norm(self._turn_from_prior(p, pose[0])) > math.radians(self._prior.widths.max_angle_deg):
            turn = self._turn_from_prior(p, pose[0])
            about, most = Rotation.from_rotvec(-turn).as_matrix() @ pose[0], math.radians(self._prior.widths.max_angle_deg)
            along = turn / np.linalg.norm(turn)
            aside = np.linalg.svd(along[None])[2][1:]
            free_shift = pose[1]

            def turned_pose(x: Float) -> tuple[Float, Float]:
                direction = along + x[3:5] @ aside
                turned = Rotation.from_rotvec(most * direction / np.linalg.norm(direction)).as_matrix() @ about
                return turned, free_shift + x[:3] * self._voxel_angst

            turned = optimize.least_squares(lambda x: residual_at(turned_pose(x)), np.zeros(5), xtol=1e-7, ftol=1e-11, gtol=1e-11, max_nfev=60)
            pose, evaluations = turned_pose(turned.x), evaluations + int(turned.nfev)
        num, den = self.sums(samples, samples.data, *pose)
        return 2.0 * num - den - float(np.square(self._prior_residual(p, *pose)).sum()), *pose, evaluations

    def information(self, samples: _Samples, rotation: Float, shift_angst: Float) -> Float:
        """``sum w Re J^H J`` (6, 6) of (rotation vector on the left, radians; shift, Angstrom), by central differences of the model."""
        columns: list[Float] = []
        for axis, step in [(i, 1e-4) for i in range(3)] + [(i, 1e-4 * self._voxel_angst) for i in range(3)]:
            ends = []
            for sign in (1.0, -1.0):
                vector = np.zeros(3)
                vector[axis] = sign * step
                if len(columns) < 3:
                    ends.append(self._whitened_model(samples, Rotation.from_rotvec(vector).as_matrix() @ rotation, shift_angst))
                else:
                    ends.append(self._whitened_model(samples, rotation, shift_angst + vector))
            columns.append((ends[0] - ends[1]) / (2.0 * step))
        jacobian = np.stack(columns, axis=1)
        return jacobian.T @ jacobian

    # -- residuals ---------------------------------------------------------------------------------------------------

    def residuals(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> GroupResiduals:
        """Residual power by group, weight and shell at given poses; beyond the reference's band the whole power."""
        residuals: GroupResiduals = {}
        each, _ = self.residuals_each(rotations, shifts_angst)
        for p, particle in enumerate(self._particles):
            if particle is not None:
                add_residuals(residuals, {particle.group: ResidualPower(each.power[p], each.count[p], each.weight_sum[p])})
        return residuals

    def residuals_each(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> tuple[ResidualPower, NDArray[np.bool_]]:
        """The same for every particle by itself, and whether its weight is a signed CTF."""
        n = self._n
        each = [ResidualPower.empty(n // 2 + 1) for _ in self._particles]
        k = _frequencies(n)
        radius = np.linalg.norm(k, axis=-1)
        used = _half_space(k, n) & (radius <= n // 2 - 2 + 1e-6)
        k, radius = k[used], radius[used]
        shell = np.rint(radius).astype(np.int64)
        for p, particle in enumerate(self._particles):
            if particle is None:
                continue
            weight = particle.weight[used]
            model = particle.noise.gain * transform_at(self._reference, k @ rotations[p]) * (radius <= min(self.setup.k_max, n // 2 - 2) + 1e-6)
            model *= np.exp(-2j * np.pi / n / self._voxel_angst * (k @ shifts_angst[p]))
            residual = np.abs(_half_spectrum(particle.masked)[used] - weight * model) ** 2
            a = _relative_weight(particle.weight)[used]
            row = np.clip(np.digitize(a, WEIGHT_BIN_EDGES) - 1, 0, len(WEIGHT_BIN_EDGES) - 2)
            np.add.at(each[p].power, (row, shell), residual)
            np.add.at(each[p].count, (row, shell), 1.0)
            np.add.at(each[p].weight_sum, (row, shell), a)
        signed = [particle is not None and _is_signed(particle.weight) for particle in self._particles]
        return ResidualPower.stacked(each), np.array(signed, bool)

    def unload(self) -> None:
        """Lets go of the loaded particles."""
        self._particles = []

    def close(self) -> None:
        """Drops the particles."""
        self._particles = []


class ReferenceSumSession:
    """See `protocols.SumSession`. `volume` gives the same average by another way, through rotations in real space."""

    def __init__(self, setup: SumSetup) -> None:
        self.setup = setup
        n = self._n = setup.grid.binned_box_size
        self._voxel_angst = _voxel_angst(setup.grid)
        k = _frequencies(n)
        self._used = _half_space(k, n) & (np.linalg.norm(k, axis=-1) <= n // 2 - 1 + 1e-6)
        self._k = k[self._used]
        self._c = 2 * (n // 2 - 1) + 3
        rows = 2 * self._c + 1
        self._numerator = np.zeros((rows, rows, self._c + 2), np.complex128)
        self._denominator = np.zeros((rows, rows, self._c + 2))
        self._map_sum = np.zeros((n, n, n))
        self._kernel_sum = np.zeros((n, n, n))
        self._count = 0

    def add(
        self,
        particles: ParticleBatch,
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
        shares: NDArray[np.float64] | None = None,
    ) -> list[tuple[int, str]]:
        """Adds particles at poses, by their shares; returns (index, reason) of those left out."""
        bad = []
        for index in range(len(particles.keys)):
            try:
                volume, weight = particles.read(index)
            except BadParticleError as problem:
                bad.append((index, problem.reason))
                continue
            group = 0 if particles.groups is None else int(particles.groups[index])
            share = 1.0 if shares is None else float(shares[index])
            shift = shifts_angst[index] / self._voxel_angst
            self._add(np.asarray(volume, np.float64), np.asarray(weight, np.float64), rotations[index], shift, group, share)
            self._count += 1
        return bad

    def _add(self, volume: Float, weight: Float, rotation: Float, shift: Float, group: int, share: float) -> None:
        n, noise = self._n, self.setup.models[group]
        wc = share * weight / noise.variance_form(_relative_weight(weight))
        if len(self.setup.models) > 1:  # among groups also 1 / sigma2 counts, relative to its mean
            inverse = np.array([1.0 / model.sigma2 for model in self.setup.models])
            shell = np.minimum(np.rint(np.linalg.norm(_frequencies(n), axis=-1)).astype(np.int64), inverse.shape[1] - 1)
            wc = wc * (inverse[group] / inverse.mean(0))[shell]
        wc, weight = noise.gain * wc, noise.gain * weight
        spectrum = _half_spectrum(volume)
        values = (wc * spectrum)[self._used] * np.exp(2j * np.pi / n * (self._k @ shift))
        weights = (wc * weight)[self._used]
        self._spread(2.0 * (self._k @ rotation), values, weights)
        # real space: the filtered particle, and the kernel whose transform is w C^2, turned back into the reference's frame
        for target, source, by in (
            (self._map_sum, _volume(wc * spectrum * self._used_or_mirrored(), n), shift),
            (self._kernel_sum, _volume(wc * weight * self._used_or_mirrored() + 0j, n), np.zeros(3)),
        ):
            turned = rotation[::-1, ::-1]  # acts on (z, y, x)
            centre = np.full(3, n // 2)
            target += ndimage.affine_transform(source, turned, centre - turned @ centre + by[::-1], order=5, mode="grid-wrap")

    def _used_or_mirrored(self) -> NDArray[np.bool_]:
        used = self._used.copy()
        used[:, :, 0] |= np.roll(used[::-1, ::-1, 0], (1, 1), (0, 1))
        return used

    def _spread(self, at: Float, values: Complex, weights: Float) -> None:
        """Adds samples at padded positions (m, 3) to their eight neighbours, with trilinear shares."""
        flip = at[:, 0] < 0
        at = np.where(flip[:, None], -at, at)
        values = np.where(flip, np.conj(values), values)
        low = np.floor(at).astype(np.int64)
        part = at - low
        for corner in np.ndindex(2, 2, 2):
            share = np.prod(np.where(corner, part, 1.0 - part), axis=1)
            x, y, z = (low + corner).T
            np.add.at(self._numerator, (z + self._c, y + self._c, x), share * values)
            np.add.at(self._denominator, (z + self._c, y + self._c, x), share * weights)

    def result(self) -> WeightedSum:
        """What has been added."""
        return WeightedSum(self._numerator.copy(), self._denominator.copy(), self._count)

    def volume(self, regularisation: float = 0.02) -> Float:
        """The average by real-space rotations: ``sum w C X / (sum w C^2 + a share of the shell's mean)``."""
        n = self._n
        numerator, weight = _half_spectrum(self._map_sum), _half_spectrum(self._kernel_sum).real
        radius = np.linalg.norm(_frequencies(n), axis=-1)
        shell = np.rint(radius).astype(np.int64).ravel()
        mean = np.bincount(shell, weight.ravel()) / np.maximum(np.bincount(shell), 1)
        total = weight + regularisation * mean[shell].reshape(weight.shape)
        keep = (radius > 0) & (radius < n // 2 - 1)
        return _volume(np.where(keep, numerator / np.where(keep, total, 1.0), 0.0), n)

    def close(self) -> None:
        """Gives the sums' memory back."""
        empty = np.zeros((0, 0, 0))
        self._map_sum = self._kernel_sum = self._denominator = empty
        self._numerator = empty.astype(np.complex128)
