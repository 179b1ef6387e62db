"""The CPU backend: Numba kernels, pyFFTW transforms, BLAS for den2 (docs/scoring.md; docs/adr/0002 for the search)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadParticleError
from ..fourier import (
    PAD,
    GridBand,
    centred_irfftn,
    centred_rfftn,
    grid_band,
    grid_shells,
    max_band,
    padded_offset,
    padded_spectrum,
)
from ..masks import spherical_mask
from ..noise import TABLE_SIZE, WEIGHT_BIN_EDGES, GroupResiduals, NoiseModel, ResidualPower, relative_inverse_sigma2
from ..pose_prior import ParticlePrior, PosePrior
from ..shifts import angst_to_voxels, voxels_to_angst
from . import interpolation as kernels
from . import lines
from .cache import ByteCache
from .newton import MAX_STEPS, End, add_prior, climb, unpack_normal_equations
from .protocols import (
    Candidates,
    Grid,
    ParticleBatch,
    ParticleMask,
    PoseEstimates,
    SearchLevel,
    SearchSetup,
    SumSetup,
    WeightedSum,
    no_candidates,
)
from .turned_mask import TurnedMask

_SCALE = np.float32(PAD)
_COLUMN_GROUP_BYTES = 64 << 20
_TEMPLATE_CACHE_BYTES = 512 << 20


@dataclass(slots=True)
class _Particle:
    """One particle, ready to be scored."""

    padded: NDArray[np.float32]  # flat padded spectrum of the masked volume
    offset: int  # its row of frequency 0
    spectrum: NDArray[np.complex64]  # masked volume on the grid band
    band: GridBand
    weight: NDArray[np.float32]
    weight_max: float
    signed: bool
    padded_unmasked: NDArray[np.float32] | None = None
    grid_unmasked: NDArray[np.complex64] | None = None

    @property
    def size_bytes(self) -> int:
        total = self.padded.nbytes + self.spectrum.nbytes + self.weight.nbytes // 4  # a weight is often shared by many particles
        for extra in (self.padded_unmasked, self.grid_unmasked):
            total += 0 if extra is None else extra.nbytes
        return total


@dataclass(slots=True)
class _SumParticle:
    """One unmasked particle, ready to be added to an average."""

    spectrum: NDArray[np.complex64]
    band: GridBand
    weight: NDArray[np.float32]
    weight_max: float
    signed: bool


class _Noise:
    """A group's noise model as the kernels take it."""

    def __init__(self, model: NoiseModel) -> None:
        self.inverse_sigma2 = model.inverse_sigma2()
        self.inverse_tables = {signed: model.inverse_table(signed) for signed in (False, True)}
        self.gain = np.float32(model.gain)


def _flat(spectrum: NDArray[np.complex64]) -> NDArray[np.float32]:
    return np.ascontiguousarray(spectrum).view(np.float32).ravel()


def _tables(shift: NDArray[np.float64], box_size: int, top: int) -> NDArray[np.complex64]:
    """Phase tables of a shift in voxels."""
    out = np.empty((3, 2 * top + 1), np.complex64)
    kernels.phase_tables(np.ascontiguousarray(shift, np.float64) * (2.0 * np.pi / box_size), top, out)
    return out


def _matrix(rotation: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.ascontiguousarray(rotation, np.float32)


class CPUBackend:
    """Scores, refines and sums particles on one core.

    Parameters
    ----------
    cache_bytes : int
        Budget of prepared particles that are kept between tasks and iterations.
    """

    name = "cpu"

    def __init__(self, cache_bytes: int = 2 << 30) -> None:
        self.cache = ByteCache(cache_bytes)

    def open_search(self, setup: SearchSetup) -> CPUSearchSession:
        """A session for one reference and half-set."""
        return CPUSearchSession(setup, self.cache)

    def open_sum(self, setup: SumSetup) -> CPUSumSession:
        """A session for sums."""
        return CPUSumSession(setup, self.cache)


class CPUSearchSession:
    """See `protocols.SearchSession`."""

    def __init__(self, setup: SearchSetup, cache: ByteCache) -> None:
        self.setup = setup
        self._cache = cache
        grid = setup.grid
        self._n = grid.binned_box_size
        self._reach = min(max_band(self._n), int(math.ceil(setup.k_max)))
        self._offset = padded_offset(self._reach)
        self._reference = _flat(padded_spectrum(setup.reference, self._reach))
        self._curvature = kernels.interpolation_curvature(setup.reference, self._n)
        self._noise = [_Noise(model) for model in setup.models]
        self._groups: NDArray[np.int32] = np.zeros(0, np.int32)
        self._mask = spherical_mask(self._n, setup.particle_mask.radius_voxels, setup.particle_mask.soft_edge_voxels)
        self._mask_mean_square = float((self._mask.astype(np.float64) ** 2).mean())
        self._local_mask = TurnedMask(setup.local_mask) if setup.score == "flcf" and setup.local_mask is not None else None
        self._templates_cache = ByteCache(_TEMPLATE_CACHE_BYTES)
        self._local_spectra: dict[tuple[int, float], NDArray[np.complex64]] = {}
        self._sigma_maps: dict[tuple[int, float], NDArray[np.float32]] = {}
        self._powers: dict[tuple[int, float], float] = {}
        self._particles: list[_Particle | None] = []
        self._prior: PosePrior | None = None
        self._scratch = np.zeros(kernels.SCRATCH_SIZE, np.float32)

    # -- particles ---------------------------------------------------------------------------------------------------

    def load(self, particles: ParticleBatch, prior: PosePrior | None = None) -> list[tuple[int, str]]:
        """Masks, pads and transforms what the cache does not hold; returns (index, reason) of unusable particles."""
        self.unload()
        self._groups = particles.groups_of(self.setup.models)
        self._prior = prior
        bad: list[tuple[int, str]] = []
        unmasked = self.setup.score == "flcf"
        mask, grid = self.setup.particle_mask, self.setup.grid
        reach = min(max_band(self._n), -(-self._reach // 6) * 6)  # a band that grows a little does not void the cache
        for index, name in enumerate(particles.keys):
            key = ("search", name, grid, mask, reach, unmasked)
            particle = self._cache.get(key)
            if particle is None:
                try:
                    volume, weight = particles.read(index)
                    particle = self._prepare(volume, weight, reach, unmasked)
                    if not np.any(weight.ravel()[particle.band.index]):
                        raise BadParticleError(name, "its weight leaves nothing in the band")
                except BadParticleError as problem:
                    bad.append((index, problem.reason))
                    self._particles.append(None)
                    continue
                self._cache.put(key, particle, particle.size_bytes)
            self._particles.append(particle)
        return bad

    def _prepare(self, volume: NDArray[np.float32], weight: NDArray[np.float32], reach: int, unmasked: bool) -> _Particle:
        outside = self._mask < 0.01
        level = float(volume[outside].mean()) if outside.any() else float(volume.mean())
        masked = (volume - np.float32(level)) * self._mask
        band = grid_band(self._n, float(max_band(self._n)))
        weight_max = float(np.abs(weight).max())
        return _Particle(
            padded=_flat(padded_spectrum(masked, reach)),
            offset=padded_offset(reach),
            spectrum=centred_rfftn(masked).ravel()[band.index],
            band=band,
            weight=np.ascontiguousarray(weight, np.float32),
            weight_max=weight_max,
            signed=bool(weight.min() < -0.05 * weight_max),
            padded_unmasked=_flat(padded_spectrum(volume - np.float32(level), reach)) if unmasked else None,
            grid_unmasked=centred_rfftn(volume - np.float32(level)).astype(np.complex64) if unmasked else None,
        )

    def _packed(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """A weight as `interpolation.turn` reads it. Many particles of a tilt series share one; it is packed once."""
        key = ("packed", id(weight))
        found = self._cache.get(key)
        if found is None or found[0] is not weight:  # an id may come back for another array
            packed = np.empty(self._n * self._n * (self._n // 2) * 4, np.float32)
            kernels.pack_weight(weight, packed)
            found = weight, packed
            self._cache.put(key, found, packed.nbytes)
        return found[1]

    def _table_scale(self, particle: _Particle) -> np.float32:
        return np.float32((TABLE_SIZE - 1) / max(particle.weight_max, 1e-30))

    # -- search ------------------------------------------------------------------------------------------------------

    def _templates(self, level: SearchLevel, band: lines.LineBand) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        key = (level.rotations.tobytes(), band.k_max)
        found = self._templates_cache.get(key)
        if found is None:
            count = len(level.rotations)
            blocks = -(-count // lines.LANES)
            templates = np.zeros(blocks * band.n_pairs * 4 * lines.LANES, np.float32)
            powers = np.zeros((count, 2 * band.n_pairs), np.float32)
            lines.fill_templates(
                self._reference, 2 * self._offset + 1, self._offset, band.points, _matrix(level.rotations), _SCALE, templates, powers
            )
            found = templates, powers
            self._templates_cache.put(key, found, templates.nbytes + powers.nbytes)
        return found

    def search(self, starts: Candidates, anchor_angst: NDArray[np.float64], level: SearchLevel) -> Candidates:
        """Scores every rotation and shift of the level around every start; keeps the best that are apart."""
        grid = self.setup.grid
        k_max = min(level.k_max, self.setup.k_max, float(self._reach))
        band = lines.line_band(k_max, self.setup.k_min)
        radius = float(angst_to_voxels(level.shift_radius_angst, grid.pixel_size_angst, grid.box_size, self._n))
        step = float(angst_to_voxels(level.shift_step_angst, grid.pixel_size_angst, grid.box_size, self._n))
        cube = lines.shift_cube(radius, step)
        templates, powers = self._templates(level, band)
        work = [
            (p, s)
            for p, particle in enumerate(self._particles)
            if particle is not None
            for s in range(starts.scores.shape[1])
            if starts.scores[p, s] > -np.inf
        ]
        scores = np.full((len(work), len(level.rotations)), -np.inf)
        shift_rows = np.zeros((len(work), len(level.rotations)), np.int32)
        group = max(16, min(512, _COLUMN_GROUP_BYTES // (band.n_pairs * 24)))
        if self._local_mask is not None:  # a deviation for each rotation and shift
            group = max(1, min(group, _COLUMN_GROUP_BYTES // (4 * len(cube.inside) * (len(level.rotations) + lines.LANES))))
        for first in range(0, len(work), group):
            part = slice(first, min(first + group, len(work)))
            self._score(work[part], starts, anchor_angst, band, cube, templates, powers, level.rotations, scores[part], shift_rows[part])
        return self._keep(work, starts, level, cube, scores, shift_rows)

    def _score(
        self,
        work: list[tuple[int, int]],
        starts: Candidates,
        anchor_angst: NDArray[np.float64],
        band: lines.LineBand,
        cube: lines.ShiftCube,
        templates: NDArray[np.float32],
        powers: NDArray[np.float32],
        level_rotations: NDArray[np.float64],
        scores: NDArray[np.float64],
        shift_rows: NDArray[np.int32],
    ) -> None:
        setup, grid, n = self.setup, self.setup.grid, self._n
        count = len(work)
        columns = np.empty((count, 4 * band.n_pairs), np.float32)
        den_weight = np.empty((count, 2 * band.n_pairs), np.float32)
        blocks = -(-len(level_rotations) // lines.LANES)
        if self._local_mask is None:
            multiplier = np.ones((count, len(cube.inside)), np.float32)
        else:
            multiplier = np.zeros((blocks, count, len(cube.inside), lines.LANES), np.float32)
        bias = np.zeros((count, len(cube.inside)), np.float32)
        trial_angst = voxels_to_angst(cube.shifts_voxels[cube.inside], grid.pixel_size_angst, grid.box_size, n)
        top = int(math.floor(band.k_max + 1e-6))
        for i, (p, s) in enumerate(work):
            particle, noise = self._particles[p], self._noise[self._groups[p]]
            assert particle is not None
            rotation, shift_angst = starts.rotations[p, s], starts.shifts_angst[p, s]
            shift = angst_to_voxels(shift_angst, grid.pixel_size_angst, grid.box_size, n)
            spectrum = particle.padded if setup.score != "flcf" else particle.padded_unmasked
            kernels.turn(
                spectrum,
                2 * particle.offset + 1,
                particle.offset,
                self._packed(particle.weight),
                n,
                noise.inverse_tables[particle.signed],
                self._table_scale(particle),
                noise.inverse_sigma2,
                band.radius,
                band.points,
                band.lattice,
                band.sample_weight,
                _matrix(rotation.T),
                _tables(lines.GENERIC_ROTATION.T @ rotation.T @ shift, n, top),
                _SCALE,
                columns[i],
                den_weight[i],
            )
            if noise.gain != 1:
                columns[i] *= noise.gain
                den_weight[i] *= noise.gain * noise.gain
            places_angst = shift_angst + trial_angst @ rotation.T
            if np.isfinite(setup.max_shift_angst):
                outside = np.linalg.norm(places_angst - anchor_angst[p], axis=1) > setup.max_shift_angst * (1 + 1e-6) + 1e-6
                bias[i, outside] = -np.inf
            if self._local_mask is not None:
                inverse = 1.0 / self._sigma_turned(p, band.k_max, rotation @ level_rotations, places_angst)
                for block in range(blocks):
                    lanes = inverse[block * lines.LANES : (block + 1) * lines.LANES]
                    multiplier[block, i, :, : len(lanes)] = lanes.T
            elif setup.score == "flcf":
                multiplier[i] = 1.0 / self._sigma_at(p, band.k_max, places_angst)
            if self._prior is not None:
                bias[i] -= 0.5 * self._prior_of(p).shift_loss(places_angst)  # a score is 2 num - den2
        den = powers @ den_weight.T  # (rotations, particles), by BLAS
        steps = cube.steps
        coefficients = lines.phase_coefficients(steps, cube.step_voxels, n, top).ravel() if steps else np.zeros(2, np.float32)
        tile = lines.tile_particles(steps)
        scratch = np.zeros(lines.scratch_size(steps, tile), np.float32)
        best = np.empty((tile, lines.LANES), np.float32)
        best_row = np.empty((tile, lines.LANES), np.int32)
        rotations = len(powers)
        for block in range(blocks):
            factors = multiplier if self._local_mask is None else multiplier[block]
            a0 = block * lines.LANES
            a1 = min(rotations, a0 + lines.LANES)
            for p0 in range(0, count, tile):
                p1 = min(count, p0 + tile)
                lines.search_block(
                    templates,
                    block * band.n_pairs * 4 * lines.LANES,
                    columns[p0:p1],
                    band.line_start,
                    band.line_length,
                    band.plane_start,
                    coefficients,
                    steps,
                    cube.inside,
                    factors[p0:p1],
                    bias[p0:p1],
                    scratch,
                    best[: p1 - p0],
                    best_row[: p1 - p0],
                )
                scores[p0:p1, a0:a1] = best[: p1 - p0, : a1 - a0]
                shift_rows[p0:p1, a0:a1] = best_row[: p1 - p0, : a1 - a0]
        den = np.maximum(den.T.astype(np.float64), 1e-30)
        if setup.score == "ml":
            scores *= 2.0
            scores -= den
        else:
            scores /= np.sqrt(den)
            if setup.score == "ncc":
                scores /= np.sqrt([self._power(p, band.k_max) for p, _ in work])[:, None]
            else:
                scores *= self._flcf_factor()
        if self._prior is not None:
            for i, (p, s) in enumerate(work):
                scores[i] -= self._prior_of(p).angle_loss(starts.rotations[p, s] @ level_rotations)

    def _prior_of(self, p: int) -> ParticlePrior:
        assert self._prior is not None
        return self._prior.of(p, self._mask_mean_square)

    def _keep(
        self,
        work: list[tuple[int, int]],
        starts: Candidates,
        level: SearchLevel,
        cube: lines.ShiftCube,
        scores: NDArray[np.float64],
        shift_rows: NDArray[np.int32],
    ) -> Candidates:
        grid = self.setup.grid
        result = no_candidates(len(self._particles), level.keep)
        min_trace = 1.0 + 2.0 * math.cos(math.radians(level.separation_deg))
        chosen = np.empty(level.keep, np.int64)
        first = 0
        while first < len(work):
            p = work[first][0]
            last = first
            while last < len(work) and work[last][0] == p:
                last += 1
            seeds = [s for _, s in work[first:last]]
            rotations = np.einsum("sij,ajk->saik", starts.rotations[p, seeds], level.rotations).reshape(-1, 3, 3)
            flat_scores = scores[first:last].ravel().copy()
            found = kernels.choose(flat_scores.copy(), rotations, level.keep, min_trace, chosen)
            for place in range(found):
                row = chosen[place]
                seed = seeds[row // len(level.rotations)]
                offset = cube.shifts_voxels[shift_rows[first:last].ravel()[row]]
                offset_angst = voxels_to_angst(offset, grid.pixel_size_angst, grid.box_size, self._n)
                result.rotations[p, place] = rotations[row]
                # the trial shift was given in the reference's frame at the start pose
                result.shifts_angst[p, place] = starts.shifts_angst[p, seed] + starts.rotations[p, seed] @ offset_angst
                result.scores[p, place] = flat_scores[row]
            first = last
        return result

    # -- normalisations ----------------------------------------------------------------------------------------------

    def _weights_on_grid(self, p: int, k_max: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Mask of the band, C and w on a particle's own grid band."""
        particle, noise = self._particles[p], self._noise[self._groups[p]]
        assert particle is not None
        band = particle.band
        inside = (band.radius2 <= k_max * k_max + 1e-6) & (band.radius2 >= self.setup.k_min**2 - 1e-6)
        ctf = particle.weight.ravel()[band.index]
        place = np.minimum((np.abs(ctf) * self._table_scale(particle) + 0.5).astype(np.int64), TABLE_SIZE - 1)
        w = noise.inverse_sigma2[band.shell] * noise.inverse_tables[particle.signed][place]
        return inside, ctf, w

    def _power(self, p: int, k_max: float) -> float:
        """``sum w |X|^2`` over the samples where C is not 0."""
        found = self._powers.get((p, k_max))
        if found is None:
            particle = self._particles[p]
            assert particle is not None
            inside, ctf, w = self._weights_on_grid(p, k_max)
            used = inside & (ctf != 0)
            found = max(float((w[used] * np.abs(particle.spectrum[used]) ** 2).sum(dtype=np.float64)), 1e-30)
            self._powers[(p, k_max)] = found
        return found

    def _flcf_factor(self) -> float:
        total = self._local_mask.total if self._local_mask is not None else float(self._mask.sum(dtype=np.float64))
        return math.sqrt(2.0 / (self._n**3 * total))

    def _filtered(self, p: int, k_max: float) -> NDArray[np.float32]:
        """The unmasked particle, filtered to the band and by the square root of w."""
        particle, noise = self._particles[p], self._noise[self._groups[p]]
        assert particle is not None and particle.grid_unmasked is not None
        n = self._n
        shells = grid_shells(n)
        place = np.minimum((np.abs(particle.weight) * self._table_scale(particle) + 0.5).astype(np.int64), TABLE_SIZE - 1)
        inverse = noise.inverse_sigma2[np.minimum(shells, len(noise.inverse_sigma2) - 1)]
        amplitude = np.sqrt(inverse * noise.inverse_tables[particle.signed][place])
        band = np.zeros(shells.size, bool)
        inside = (particle.band.radius2 <= k_max * k_max + 1e-6) & (particle.band.radius2 >= self.setup.k_min**2 - 1e-6)
        band[particle.band.index[inside]] = True
        whole = band.reshape(shells.shape)
        mirrored = np.roll(whole[::-1, ::-1, 0], (1, 1), (0, 1))  # the other halves of Friedel pairs on kx = 0
        whole[:, :, 0] |= mirrored
        whole &= particle.weight != 0
        return centred_irfftn((particle.grid_unmasked * amplitude * whole).astype(np.complex64), n)

    def _sigma_turned(self, p: int, k_max: float, rotations: NDArray[np.float64], places_angst: NDArray[np.float64]) -> NDArray[np.float32]:
        """sigma under the reference's mask at every rotation (a, 3, 3) and shift (t, 3): (a, t)."""
        assert self._local_mask is not None
        spectra = self._local_spectra.get((p, k_max))
        if spectra is None:
            spectra = self._local_spectra[(p, k_max)] = self._local_mask.spectra(self._filtered(p, k_max))
        grid = self.setup.grid
        return self._local_mask.deviations(spectra, rotations, angst_to_voxels(places_angst, grid.pixel_size_angst, grid.box_size, self._n))

    def _sigma_map(self, p: int, k_max: float) -> NDArray[np.float32]:
        """Standard deviation of the w-filtered, unmasked particle under the sphere moved by every whole-voxel shift."""
        found = self._sigma_maps.get((p, k_max))
        if found is not None:
            return found
        n = self._n
        x = self._filtered(p, k_max)
        mask = centred_rfftn(self._mask)
        count = float(self._mask.sum(dtype=np.float64))

        def under_mask(v: NDArray[Any]) -> NDArray[Any]:
            # correlation with the mask; both are centred, so the result's zero shift is its centre
            return centred_irfftn(centred_rfftn(v) * np.conj(mask), n) / count

        variance = under_mask(x * x) - under_mask(x) ** 2
        sigma = np.sqrt(np.maximum(variance, 1e-12 * max(float(variance.max()), 1e-30))).astype(np.float32)
        self._sigma_maps[(p, k_max)] = sigma
        return sigma

    def _sigma_at(self, p: int, k_max: float, places_angst: NDArray[np.float64]) -> NDArray[np.float32]:
        """sigma under the mask moved to shifts (m, 3), linear between whole voxels, periodic."""
        from scipy.ndimage import map_coordinates

        grid = self.setup.grid
        voxels = angst_to_voxels(places_angst, grid.pixel_size_angst, grid.box_size, self._n)
        at = voxels[:, ::-1].T + self._n // 2
        return map_coordinates(self._sigma_map(p, k_max), at, order=1, mode="grid-wrap")

    # -- refinement --------------------------------------------------------------------------------------------------

    def refine(self, candidates: Candidates, anchor_angst: NDArray[np.float64], most_steps: int = MAX_STEPS) -> PoseEstimates:
        """Exact Gauss-Newton of every candidate on the particle's own grid samples; keeps the best of each particle."""
        count = len(self._particles)
        out = PoseEstimates(
            candidates.rotations[:, 0].copy(),
            candidates.shifts_angst[:, 0].copy(),
            np.full((count, 6, 6), np.nan),
            np.full(count, -np.inf),
            np.full(count, -np.inf),
            np.full(count, np.inf),
            np.zeros(count),
            np.zeros(count),
            np.zeros(count, np.int32),
        )
        band = grid_band(self._n, float(max_band(self._n)))
        size = len(band.index)
        k, data = np.empty((size, 3), np.float32), np.empty(size, np.complex64)
        ctf, weight = np.empty(size, np.float32), np.empty(size, np.float32)
        k_max = min(self.setup.k_max, float(self._reach))
        for p, particle in enumerate(self._particles):
            if particle is None:
                continue
            noise = self._noise[self._groups[p]]
            used = kernels.select_samples(
                particle.weight.ravel(),
                band.index,
                band.shell,
                band.radius2,
                band.k,
                particle.spectrum,
                noise.inverse_tables[particle.signed],
                self._table_scale(particle),
                noise.inverse_sigma2,
                self.setup.k_min**2 - 1e-6,
                k_max * k_max + 1e-6,
                k,
                data,
                ctf,
                weight,
            )
            if noise.gain != 1:
                ctf[:used] *= noise.gain
            samples = k[:used], data[:used], ctf[:used], weight[:used]
            power = float((weight[:used] * (data[:used].real ** 2 + data[:used].imag ** 2)).sum(dtype=np.float64))
            ends = [
                self._climb(samples, p, candidates.rotations[p, s], candidates.shifts_angst[p, s], anchor_angst[p], most_steps)
                for s in range(candidates.scores.shape[1])
                if candidates.scores[p, s] > -np.inf
            ]
            if ends:
                self._record(out, p, particle, ends, power, samples)
        return out

    def _sums(self, samples: tuple[NDArray[Any], ...], rotation: NDArray[np.float64], shift_angst: NDArray[np.float64]) -> NDArray[np.float64]:
        k, data, ctf, weight = samples
        grid, n = self.setup.grid, self._n
        shift = angst_to_voxels(shift_angst, grid.pixel_size_angst, grid.box_size, n)
        sums = np.zeros(kernels.N_SUMS)
        kernels.normal_equations(
            self._reference,
            2 * self._offset + 1,
            self._offset,
            k,
            _matrix(rotation),
            _tables(shift, n, n // 2),
            _SCALE,
            data,
            ctf,
            weight,
            self._scratch,
            sums,
            self._curvature,
        )
        return sums

    def _unit_angst(self) -> float:
        """Angstrom of one unit of the normal equations' shift."""
        return float(voxels_to_angst(self._n / (2.0 * np.pi), self.setup.grid.pixel_size_angst, self.setup.grid.box_size, self._n))

    def _climb(
        self,
        samples: tuple[NDArray[Any], ...],
        p: int,
        rotation: NDArray[np.float64],
        shift_angst: NDArray[np.float64],
        anchor_angst: NDArray[np.float64],
        most_steps: int,
    ) -> End:
        prior = None if self._prior is None else self._prior_of(p)
        steps = climb(rotation, shift_angst, anchor_angst, self.setup.max_shift_angst, self._unit_angst(), prior, most_steps)
        pose = next(steps)
        while True:
            try:
                pose = steps.send(self._sums(samples, *pose))
            except StopIteration as done:
                end: End = done.value
                return end

    def _record(
        self,
        out: PoseEstimates,
        p: int,
        particle: _Particle,
        ends: list[End],
        power: float,
        samples: tuple[NDArray[Any], ...],
    ) -> None:
        ends.sort(key=lambda end: -end.objective)
        best = ends[0]
        rotation, shift_angst, sums, unit_angst = best.rotation, best.shift_angst, best.sums, self._unit_angst()
        likelihood = float(2.0 * sums[27] - sums[28])
        out.rotations[p], out.shifts_angst[p] = rotation, shift_angst
        out.steps[p] = sum(end.steps for end in ends)
        out.numerator[p], out.denominator[p] = sums[27], sums[28]
        out.log_likelihood[p] = likelihood * self._mask_mean_square
        hessian, gradient = unpack_normal_equations(sums)
        if self._prior is not None:
            add_prior(hessian, gradient, self._prior_of(p), rotation, shift_angst, unit_angst)
        frame = np.zeros((6, 6))
        frame[:3, :3], frame[3:, 3:] = rotation, rotation * unit_angst
        try:
            out.covariances[p] = frame @ np.linalg.inv(2.0 * self._mask_mean_square * hessian) @ frame.T
        except np.linalg.LinAlgError:
            pass
        for other in ends[1:]:
            trace = float(np.trace(rotation.T @ other.rotation))
            pixel = self.setup.grid.binned_pixel_size_angst
            if trace < 1.0 + 2.0 * math.cos(math.radians(1.0)) or float(np.linalg.norm(other.shift_angst - shift_angst)) > pixel:
                out.margin[p] = (best.objective - other.objective) * self._mask_mean_square
                break
        den = max(sums[28], 1e-30)
        if self.setup.score == "ml":
            out.scores[p] = likelihood
        elif self.setup.score == "ncc":
            out.scores[p] = sums[27] / math.sqrt(den * max(power, 1e-30))
        else:
            assert particle.grid_unmasked is not None
            k_max = min(self.setup.k_max, float(self._reach))
            inside, _, _ = self._weights_on_grid(p, k_max)
            inside &= particle.weight.ravel()[particle.band.index] != 0
            unmasked = particle.grid_unmasked.ravel()[particle.band.index[inside]]
            num = self._sums((samples[0], np.ascontiguousarray(unmasked), *samples[2:]), rotation, shift_angst)[27]
            if self._local_mask is None:
                sigma = float(self._sigma_at(p, k_max, shift_angst[None])[0])
            else:
                sigma = float(self._sigma_turned(p, k_max, rotation[None], shift_angst[None])[0, 0])
            out.scores[p] = num / (math.sqrt(den) * sigma) * self._flcf_factor()

    # -- residuals ---------------------------------------------------------------------------------------------------

    def residuals(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> GroupResiduals:
        """Residual power by group, weight and shell at given poses; beyond the reference's band the whole power."""
        residuals: GroupResiduals = {}
        groups = [int(group) for group in self._groups]
        self._add_residuals(rotations, shifts_angst, lambda p: residuals.setdefault(groups[p], ResidualPower.empty(self._n // 2 + 1)))
        return residuals

    def residuals_each(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> tuple[ResidualPower, NDArray[np.bool_]]:
        """The same for every particle by itself, and whether its weight is a signed CTF."""
        each = [ResidualPower.empty(self._n // 2 + 1) for _ in self._particles]
        self._add_residuals(rotations, shifts_angst, each.__getitem__)
        signed = np.array([particle is not None and particle.signed for particle in self._particles], bool)
        return ResidualPower.stacked(each), signed

    def _add_residuals(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64], target: Callable[[int], ResidualPower]) -> None:
        """Adds each usable particle's residual power to its target."""
        grid, n = self.setup.grid, self._n
        band = grid_band(n, float(max_band(n)))
        reached = np.flatnonzero(band.radius2 <= min(self.setup.k_max, float(self._reach)) ** 2 + 1e-6)
        points = np.ascontiguousarray(band.k[reached])
        values = np.empty(len(reached), np.complex64)
        model = np.zeros(len(band.index), np.complex64)
        for p, particle in enumerate(self._particles):
            if particle is None:
                continue
            kernels.gather(self._reference, 2 * self._offset + 1, self._offset, points, _matrix(rotations[p]), _SCALE, values, self._curvature)
            power = target(p)
            gain = self._noise[int(self._groups[p])].gain
            model[reached] = values if gain == 1 else values * gain
            shift = angst_to_voxels(shifts_angst[p], grid.pixel_size_angst, grid.box_size, n)
            kernels.residual_power(
                model,
                band.index,
                band.shell,
                band.k,
                _tables(shift, n, n // 2),
                particle.spectrum,
                particle.weight.ravel(),
                np.float32(1.0 / max(particle.weight_max, 1e-30)),
                particle.signed,
                WEIGHT_BIN_EDGES,
                power.power,
                power.count,
                power.weight_sum,
            )

    def unload(self) -> None:
        """Lets go of the loaded particles; the cache keeps what its budget allows."""
        self._particles = []
        self._sigma_maps, self._local_spectra = {}, {}
        self._powers = {}

    def close(self) -> None:
        """Drops templates and particles."""
        self.unload()
        self._templates_cache = ByteCache(0)
        self._sigma_maps = {}


class CPUSumSession:
    """See `protocols.SumSession`."""

    def __init__(self, setup: SumSetup, cache: ByteCache) -> None:
        self.setup = setup
        self._cache = cache
        self._n = setup.grid.binned_box_size
        self._band = grid_band(self._n, float(self._n // 2 - 1))
        self._offset = padded_offset(self._n // 2 - 1)
        rows, columns = 2 * self._offset + 1, self._offset + 2
        self._sums = np.zeros(rows * rows * columns * 4, np.float32)
        self._noise = [_Noise(model) for model in setup.models]
        self._relative = relative_inverse_sigma2(setup.models)
        self._count = 0

    def add(
        self,
        particles: ParticleBatch,
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
        shares: NDArray[np.float64] | None = None,
    ) -> list[tuple[int, str]]:
        """Inserts particles at their poses, by their shares; returns (index, reason) of those left out."""
        grid, n, band = self.setup.grid, self._n, self._band
        bad = []
        groups = particles.groups_of(self.setup.models)
        numerator, denominator = np.empty(len(band.index), np.complex64), np.empty(len(band.index), np.float32)
        for index, name in enumerate(particles.keys):
            key = ("sum", name, grid, self.setup.normalise_mask)
            particle = self._cache.get(key)
            if particle is None:
                try:
                    volume, weight = particles.read(index)
                except BadParticleError as problem:
                    bad.append((index, problem.reason))
                    continue
                weight_max = float(np.abs(weight).max())
                particle = _SumParticle(
                    centred_rfftn(volume).ravel()[band.index].astype(np.complex64),
                    band,
                    np.ascontiguousarray(weight, np.float32),
                    weight_max,
                    bool(weight.min() < -0.05 * weight_max),
                )
                self._cache.put(key, particle, particle.spectrum.nbytes)
            group = groups[index]
            noise = self._noise[group]
            shift = angst_to_voxels(shifts_angst[index], grid.pixel_size_angst, grid.box_size, n)
            kernels.sum_samples(
                particle.weight.ravel(),
                band.index,
                band.k,
                particle.spectrum,
                _tables(shift, n, n // 2),
                noise.inverse_tables[particle.signed],
                np.float32((TABLE_SIZE - 1) / max(particle.weight_max, 1e-30)),
                numerator,
                denominator,
            )
            if len(self._noise) > 1 or noise.gain != 1:
                weight_by_sample = self._relative[group][band.shell]
                numerator *= weight_by_sample * noise.gain
                denominator *= weight_by_sample * (noise.gain * noise.gain)
            if shares is not None:
                numerator *= np.float32(shares[index])
                denominator *= np.float32(shares[index])
            kernels.insert(self._sums, 2 * self._offset + 1, self._offset, band.k, _matrix(rotations[index]), _SCALE, numerator, denominator)
            self._count += 1
        return bad

    def result(self) -> WeightedSum:
        """The sums so far."""
        rows, columns = 2 * self._offset + 1, self._offset + 2
        sums = self._sums.reshape(rows, rows, columns, 4)
        numerator = np.ascontiguousarray(sums[..., :2]).view(np.complex64)[..., 0]
        return WeightedSum(numerator, np.ascontiguousarray(sums[..., 2]), self._count)

    def close(self) -> None:
        """Gives the sums' memory back."""
        self._sums = np.zeros(0, np.float32)


__all__ = ["CPUBackend", "CPUSearchSession", "CPUSumSession", "Grid", "ParticleMask"]
