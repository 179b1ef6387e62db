"""The CUDA backend: sessions over the kernels of this package. See `numba_glocal.backends.protocols`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config
from numpy.typing import NDArray

from ...errors import DeviceError, SettingsError
from ...fourier import grid_band, max_band, padded_offset
from ...masks import spherical_mask
from ...noise import N_WEIGHT_BINS, WEIGHT_BIN_EDGES, GroupResiduals, ResidualPower
from ...pose_prior import PosePrior
from ...shifts import angst_to_voxels, voxels_to_angst
from .. import lines
from ..cache import ByteCache
from ..cpu import CPUSearchSession
from ..interpolation import interpolation_curvature
from ..newton import MAX_ANGLE_STEP_DEG, MAX_STEPS, STOP_ANGLE_DEG, STOP_SHIFT_ANGST, End, add_prior, climb, unpack_normal_equations
from ..protocols import Candidates, Grid, ParticleBatch, PoseEstimates, SearchLevel, SearchSetup, SumSetup, no_candidates
from . import choosing, contraction, gemm, launching, normal_equations, refining, residuals, scoring, turning
from .memory import free_bytes, halve_until_it_fits, release_unused
from .pool import Pool
from .product import ProductSearch, shift_turns, ways
from .scratch import Scratch
from .search import TILE_ROTATIONS, coefficient_table, launch, shift_groups
from .store import MAX_SLOTS, Masking, ParticleStore
from .sums import CUDASumSession, gains_on_device, tables_on_device
from .tensor import TensorSearch, Weighting, available, tensor_us
from .transform import SPARE_BYTES as _SPARE_BYTES
from .transform import BandOnDevice, Transform, band_on_device
from .weights import WeightVolumes

_CONTEXT_BYTES = 600 << 20
"""Of a process's context, loaded kernels and cuBLAS, which count where `--gpu-memory` caps what is used (benchmarks/gpu_memory.py)."""
_POOL_SHARE = 0.55
_TEMPLATES_SHARE = 0.05
_BATCH_SHARE = 0.05
_MAX_BATCH_BYTES = 1 << 30
_SLOTS_FIRST = 256
_WORK_SHARE = 0.15
_PART_BYTES = 1 << 30
"""Of a part of a search: the same on all devices that have room for it, for the way it is made and its last bits depend on how many starts it has."""
_SCRATCH_SHARE = 0.05
_CONTENDERS = 3
"""Best candidates of a search in whole numbers that are scored again before any is chosen: on made particles the best was always among two."""
_ANY_TRACE = 4.0
"""Of the turn from one candidate to another: no two are too near each other."""


def den_products(powers: Any, den_weight: Any, den: Any, half: bool) -> None:
    """den2 of every work item and rotation: by cuBLAS, or by a kernel of our own where it is not installed.

    Parameters
    ----------
    powers : (a, m) float32, den_weight : (w, m) float32, den : (w, a) float32 device arrays
    half : bool
        Whether cuBLAS may round its operands (`gemm.product`).
    """
    rotations, items = powers.shape[0], den_weight.shape[0]
    if gemm.available():
        gemm.product(powers, den_weight, den, rotations, items, powers.shape[1], half)
    else:
        contraction.products[(-(-rotations // contraction.WIDE_TILE), -(-items // contraction.WIDE_TILE)), (16, 16)](den_weight, powers, den)


_HINTS = {
    "driver library cannot be found": "there is no NVIDIA driver on this machine",
    "CUDA_ERROR_NO_DEVICE": "CUDA finds none of this name",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has it, and its compute mode lets in one only; expected --procs-per-gpu 1, or MPS",
}
"""What CUDA's words mean for people."""


def device_name() -> str:
    """Name, UUID and compute capability of this process's GPU.

    Raises
    ------
    DeviceError
        No driver, no visible GPU, or a GPU that another process holds exclusively.
    """
    if config.ENABLE_CUDASIM:
        return "CUDA simulator"
    try:
        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else device.name
        major, minor = device.compute_capability
        cuda.current_context().get_memory_info()
        return f"{name} ({device.uuid}, compute capability {major}.{minor})"
    except Exception as problem:
        text = " ".join(str(problem).split())[:200].rstrip(" :.")
        hint = next((hint for words, hint in _HINTS.items() if words in text), None)
        raise DeviceError(f"the GPU cannot be used: {text}" if hint is None else f"the GPU cannot be used: {hint} ({text})") from None


class CUDABackend:
    """Scores, refines and sums particles on one GPU.

    Parameters
    ----------
    memory_bytes : int, optional
        Device memory this process may use, its context included; by default its share of what is free now.
    share : int
        Processes that share the GPU.
    precision : str
        Of searches. "int8": on the tensor cores, of many particles in whole numbers of 8 bits, where that is faster; "half": there in half
        precision; "single": never on them; "auto": "int8" where this GPU has it, else "half". What comes out best is scored again in single
        precision, and refinement is single in all.
    """

    name = "cuda"

    def __init__(self, memory_bytes: int | None = None, share: int = 1, precision: str = "auto") -> None:
        self.device = device_name()
        if precision == "int8" and not gemm.eight_available():
            raise DeviceError(f"--gpu-precision int8 needs a GPU of compute capability 8.0 or later and cuBLAS, here: {self.device}; use half")
        self.precision = ("int8" if gemm.eight_available() else "half") if precision == "auto" else precision
        free = free_bytes()
        self.memory_bytes = free // share
        if memory_bytes is not None:
            self.memory_bytes = min(self.memory_bytes, max(memory_bytes - _CONTEXT_BYTES, memory_bytes // 4))
        self.scratch = Scratch(min(2 << 30, int(self.memory_bytes * _SCRATCH_SHARE)))
        self._share = share
        self._store: ParticleStore | None = None
        self._arena: Any = None
        self._pool: Pool | None = None
        self._sum_samples: dict[int, BandOnDevice] = {}

    def store(self, grid: Grid) -> ParticleStore:
        """Volumes of particles on a grid; another grid takes the place of the last."""
        if self._store is None or self._store.grid != grid:
            self._store = self._arena = self._pool = None
            release_unused()
            n = grid.binned_box_size
            budget = int(self.memory_bytes * _POOL_SHARE)
            # half for volumes, half for spectra; but a chunk's spectra must find room, volumes can be read again
            spectra = max(budget // 2, min(budget * 9 // 10, _SLOTS_FIRST * Pool.slot_bytes(n, max_band(n), False)))
            work = min(_MAX_BATCH_BYTES, int(self.memory_bytes * _BATCH_SHARE))
            self._store = ParticleStore(grid, WeightVolumes(n), budget - spectra, work, self._share)
        return self._store

    def pool(self, grid: Grid, reach: int, unmasked: bool) -> Pool:
        """Prepared particles for searches up to a band; another band takes the place of the last."""
        store, n = self.store(grid), grid.binned_box_size
        found = self._pool
        if found is not None and found.unmasked == unmasked and (found.reach == reach or (found.reach > reach and not found.slots.version)):
            return found
        if self._arena is None:
            slot = Pool.slot_bytes(n, reach, unmasked) // 4
            wanted = min(MAX_SLOTS * Pool.slot_bytes(n, max_band(n), True), int(self.memory_bytes * _POOL_SHARE) - 4 * int(store.volumes.size))
            self._arena = halve_until_it_fits(
                lambda count: cuda.device_array(count * slot + Pool.SPARE_FLOATS, np.float32), max(8, wanted // (4 * slot)), 1, "prepared particles"
            )
        self._pool = Pool(n, reach, unmasked, self._arena)
        return self._pool

    def is_current(self, pool: Pool) -> bool:
        """Whether a pool still has the memory to itself."""
        return pool is self._pool

    def weights(self, grid: Grid) -> WeightVolumes:
        """Weight volumes of a grid's particles."""
        return self.store(grid).weights

    def sum_samples(self, n: int) -> BandOnDevice:
        """All samples of a grid of n, for averages."""
        if n not in self._sum_samples:
            band = grid_band(n, float(n // 2 - 1))
            self._sum_samples = {n: band_on_device(band, np.arange(len(band.index)), n // 2 - 1)}
        return self._sum_samples[n]

    def open_search(self, setup: SearchSetup) -> CUDASearchSession:
        """A session for one reference and half-set."""
        return CUDASearchSession(self, setup)

    def open_sum(self, setup: SumSetup) -> CUDASumSession:
        """A session for sums."""
        return CUDASumSession(self, setup)


class CUDASearchSession:
    """See `protocols.SearchSession`."""

    def __init__(self, backend: CUDABackend, setup: SearchSetup) -> None:
        if setup.local_mask is not None:
            raise SettingsError("flcf under a mask that turns: the CPU backend only")
        self.setup, self.backend = setup, backend
        n = setup.grid.binned_box_size
        self._n = n
        self._reach = min(max_band(n), int(math.ceil(setup.k_max)))
        self._offset = padded_offset(self._reach)
        self._mask = spherical_mask(n, setup.particle_mask.radius_voxels, setup.particle_mask.soft_edge_voxels)
        self._mask_mean_square = float((self._mask.astype(np.float64) ** 2).mean())
        self._masking = Masking.of(self._mask)
        self._unmasked = setup.score == "flcf"
        inverse_sigma2 = np.stack([model.inverse_sigma2() for model in setup.models])
        self._inverse_sigma2 = cuda.to_device(inverse_sigma2)
        self._mean_inverse_sigma2 = inverse_sigma2.mean(axis=0, dtype=np.float32)
        self._tables, self._gains = tables_on_device(setup.models), gains_on_device(setup.models)
        self._curvature = cuda.to_device(interpolation_curvature(setup.reference, n))
        transform = Transform(n, self._reach, True)
        self._reference = cuda.device_array(transform.size + _SPARE_BYTES // 4, np.float32)
        transform(cuda.to_device(setup.reference.astype(np.float32).reshape(1, -1)), 1, self._reference[: transform.size])
        self._band = grid_band(n, float(max_band(n)))
        k_max = min(setup.k_max, float(self._reach))
        inside = (self._band.radius2 <= k_max * k_max + 1e-6) & (self._band.radius2 >= setup.k_min**2 - 1e-6)
        self._cube_reach = max_band(n)
        self._samples = band_on_device(self._band, np.flatnonzero(inside), self._cube_reach)
        self._by_shell: tuple[BandOnDevice, Any] | None = None
        self._templates: ByteCache = ByteCache(int(backend.memory_bytes * _TEMPLATES_SHARE))
        self._lines: dict[float, tuple[Any, ...]] = {}
        self._turns: dict[tuple[int, float], Any] = {}
        self._tensor: ByteCache = ByteCache(int(backend.memory_bytes * _TEMPLATES_SHARE))
        self._slots: NDArray[np.int32] = np.zeros(0, np.int32)
        self._kinds: NDArray[np.int32] = np.zeros(0, np.int32)
        self._groups: NDArray[np.int32] = np.zeros(0, np.int32)
        self._usable: NDArray[np.bool_] = np.zeros(0, bool)
        self._host: CPUSearchSession | None = None
        self._nothing = cuda.to_device(np.zeros((1, 1), np.float32))  # for arguments that a kernel will not read
        self._batch: ParticleBatch | None = None
        self._prior: PosePrior | None = None
        self._pool: Pool | None = None
        self._version = 0

    # -- particles ---------------------------------------------------------------------------------------------------

    def load(self, particles: ParticleBatch, prior: PosePrior | None = None) -> list[tuple[int, str]]:
        """Brings to the device, masks and transforms what is not there yet; returns (index, reason) of unusable particles."""
        grid, setup = self.setup.grid, self.setup
        self._groups = particles.groups_of(setup.models)
        reach = min(max_band(self._n), -(-self._reach // 6) * 6)
        pool = self.backend.pool(grid, reach, self._unmasked)
        self._slots, self._kinds, self._usable, bad = pool.load(self.backend.store(grid), particles, self._masking, setup.particle_mask)
        self._pool, self._version = pool, pool.slots.version
        self._batch, self._host, self._prior = particles, None, prior
        return bad

    def _weights(self) -> tuple[Any, int, Any, Any, Any]:
        weights = self.backend.weights(self.setup.grid)
        return (weights.device(), weights.size, *weights.facts())

    def _loaded_pool(self) -> Pool:
        """The pool that holds the loaded particles. If another session has made room for its own since, they are brought back first."""
        assert self._pool is not None and self._batch is not None, "no particles are loaded"
        if not self.backend.is_current(self._pool) or self._pool.slots.version != self._version:
            self.load(self._batch, self._prior)
        return self._pool

    # -- search ------------------------------------------------------------------------------------------------------

    def _line_band(self, k_max: float) -> tuple[lines.LineBand, Any, Any, Any, Any, Any, Any, Any]:
        band = lines.line_band(k_max, self.setup.k_min)
        if k_max not in self._lines:
            self._lines[k_max] = (
                cuda.to_device(band.points.ravel()),
                cuda.to_device(band.radius),
                cuda.to_device(band.sample_weight),
                cuda.to_device(band.line_start),
                cuda.to_device(band.line_length),
                cuda.to_device(band.plane_start),
                cuda.to_device(np.ascontiguousarray(band.lattice, np.int32).ravel()),
            )
        return (band, *self._lines[k_max])

    def _level_templates(self, level: SearchLevel, band: lines.LineBand, points: Any) -> tuple[Any, Any, Any]:
        key = (level.rotations.tobytes(), band.k_max)
        found = self._templates.get(key)
        if found is None:
            count = len(level.rotations)
            padded = -(-count // TILE_ROTATIONS) * TILE_ROTATIONS
            templates = cuda.device_array(padded * band.n_pairs * 4 + _SPARE_BYTES // 4, np.float32)
            powers = cuda.device_array((count, 2 * band.n_pairs), np.float32)
            matrices = cuda.to_device(level.rotations.reshape(-1, 9).astype(np.float32))
            grid = launching.rotation_grid(-(-2 * band.n_pairs // 128), count)
            turning.fill_templates[grid, 128](self._reference, self._offset, points, matrices, templates, powers)
            found = templates, powers, matrices
            self._templates.put(key, found, 4 * (padded * band.n_pairs * 4 + count * 2 * band.n_pairs))
        return found

    def _shift_turns(self, cube: lines.ShiftCube) -> Any:
        key = cube.steps, cube.step_voxels
        if key not in self._turns:
            self._turns[key] = cuda.to_device(shift_turns(cube, self._n))
        return self._turns[key]

    def search(self, starts: Candidates, anchor_angst: NDArray[np.float64], level: SearchLevel) -> Candidates:
        """Scores every rotation and shift of the level around every start; keeps the best that are apart."""
        self._loaded_pool()
        grid, n = self.setup.grid, self._n
        band, *layout = self._line_band(min(level.k_max, float(self._reach)))
        size = (grid.pixel_size_angst, grid.box_size, n)
        cube = lines.shift_cube(float(angst_to_voxels(level.shift_radius_angst, *size)), float(angst_to_voxels(level.shift_step_angst, *size)))
        templates, powers, matrices = self._level_templates(level, band, layout[0])
        turns = self._shift_turns(cube)
        used = starts.scores > -np.inf
        used[~self._usable] = False
        result = no_candidates(len(self._slots), level.keep)
        particles = np.flatnonzero(used.any(axis=1))
        rotations = len(level.rotations)
        per_item = 4 * (8 * band.n_pairs + 3 * rotations + 2 * len(cube.shifts_voxels))
        part_bytes = min(_PART_BYTES, int(self.backend.memory_bytes * _WORK_SHARE))
        room = min(int(used.sum()), max(1, part_bytes // per_item), launching.MOST_ITEMS)
        ends = np.cumsum(used[particles].sum(axis=1))  # work items up to and with each particle
        first = 0

        def search_next(room: int) -> int:
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + room, side="right")))
            part = particles[first:last]
            at, s_of = np.nonzero(used[part])
            self._search_part(
                part,
                part[at],
                s_of,
                starts,
                anchor_angst,
                level,
                band,
                cube,
                (*layout, turns),
                (templates, powers, matrices),
                result,
            )
            return last

        while first < len(particles):
            # a part writes its results last, so that one that had no memory can be done again in smaller parts
            first, room = halve_until_it_fits(lambda count: (search_next(count), count), room, 1, "search starts at once", self.backend.scratch.clear)
        return result

    def _search_part(
        self,
        part: NDArray[np.intp],
        p_of: NDArray[np.intp],
        s_of: NDArray[np.intp],
        starts: Candidates,
        anchor_angst: NDArray[np.float64],
        level: SearchLevel,
        band: lines.LineBand,
        cube: lines.ShiftCube,
        layout: tuple[Any, ...],
        bank: tuple[Any, ...],
        result: Candidates,
    ) -> None:
        setup, grid, n = self.setup, self.setup.grid, self._n
        points, radius, point_weight, line_start, line_length, plane_start, lattice, turns = layout
        templates, powers, matrices = bank
        size = (grid.pixel_size_angst, grid.box_size, n)
        items, rotations = len(p_of), len(level.rotations)
        start_rotations, start_angst = starts.rotations[p_of, s_of], starts.shifts_angst[p_of, s_of]
        start_voxels = angst_to_voxels(start_angst, *size)
        top = int(math.floor(band.k_max + 1e-6))
        scratch = self.backend.scratch
        columns = scratch.array("columns", items * 4 * band.n_pairs + _SPARE_BYTES // 4, np.float32)
        columns_2d = columns[: items * 4 * band.n_pairs].reshape(items, 4 * band.n_pairs)
        den_weight = scratch.array("den2 weights", (items, 2 * band.n_pairs), np.float32)
        kinds = scratch.upload("kinds", self._kinds[p_of])
        slots = scratch.upload("slots", self._slots[p_of])
        device_weights, weight_size, signed, table_scale, _ = self._weights()
        device_starts = scratch.upload("starts", start_rotations.reshape(-1, 9).astype(np.float32))
        in_reference = np.einsum("wji,wj->wi", start_rotations, start_voxels) / n
        pool = self._loaded_pool()
        assert pool.pad is not None
        turning.turn[(-(-2 * band.n_pairs // 128), items), 128](
            pool.spectra[1 if self._unmasked else 0],
            pool.pad.size,
            slots,
            pool.pad.c,
            device_weights,
            weight_size,
            kinds,
            n,
            self._tables,
            signed,
            table_scale,
            self._inverse_sigma2,
            self._gains,
            scratch.upload("groups", self._groups[p_of]),
            points,
            radius,
            point_weight,
            device_starts,
            scratch.upload("start shifts", in_reference.astype(np.float32)),
            columns_2d,
            den_weight,
        )
        den = scratch.array("den2", (items, rotations), np.float32)
        den_products(powers, den_weight, den, self.backend.precision != "single")
        priors = [] if self._prior is None else [self._prior.of(int(p), self._mask_mean_square) for p in p_of]
        weighted = bool(np.isfinite(setup.max_shift_angst)) or self._unmasked or any(prior.shift_weight > 0 for prior in priors[:1])
        if weighted:
            trial_angst = voxels_to_angst(cube.shifts_voxels, *size)
            places = start_angst[:, None] + np.einsum("wij,tj->wti", start_rotations, trial_angst)
            multiplier = np.ones((items, len(trial_angst)), np.float32)
            bias = np.zeros_like(multiplier)
            if np.isfinite(setup.max_shift_angst):
                away = np.linalg.norm(places - anchor_angst[p_of][:, None], axis=2)
                bias[away > setup.max_shift_angst * (1 + 1e-6) + 1e-6] = -1e38
            for i, prior in enumerate(priors):
                bias[i] -= 0.5 * prior.shift_loss(places[i])  # a score is 2 num - den2
            if self._unmasked:
                for i, p in enumerate(p_of):
                    multiplier[i] = 1.0 / self._on_host()._sigma_at(int(p), band.k_max, places[i])
            device_multiplier, device_bias = scratch.upload("multiplier", multiplier), scratch.upload("bias", bias)
        else:
            device_multiplier = device_bias = self._nothing
        best = scratch.array("best", (items, rotations), np.float32)
        best_shift = scratch.array("best shift", (items, rotations), np.int32)
        narrow = self._narrow_search(level, band, cube, templates, powers, lattice, items)
        if narrow is not None:
            narrow.run(columns_2d, items, Weighting(weighted, device_multiplier, device_bias), best, best_shift, scratch)
        else:
            coefficients = cuda.to_device(coefficient_table(cube.steps, cube.step_voxels, n, top))
            for group in shift_groups(cube.steps, _ball_radius2(cube)):
                launch(
                    group,
                    top,
                    rotations,
                    items,
                    (
                        templates,
                        columns,
                        line_start,
                        line_length,
                        plane_start,
                        coefficients,
                        top,
                        band.n_pairs,
                        rotations,
                        items,
                        cuda.to_device(group.entries()),
                        int(weighted),
                        device_multiplier,
                        device_bias,
                        best,
                        best_shift,
                    ),
                )
        power = self._nothing[0]
        if setup.score == "flcf":
            power = cuda.to_device(np.ones(items, np.float32))
        elif setup.score == "ncc":
            power = cuda.to_device(self._powers(band.k_max)[p_of].astype(np.float32))
        kind = 0 if setup.score == "ml" else 1
        factor = np.float32(self._flcf_factor() if self._unmasked else 1.0)
        scoring.finish_scores[(-(-rotations // 128), items), 128](best, den, power, kind, factor)
        device_losses = self._nothing
        if priors:
            losses = np.stack([prior.angle_loss(start_rotations[i] @ level.rotations) for i, prior in enumerate(priors)])
            device_losses = scratch.upload("losses", losses.astype(np.float32))
            scoring.take_off[(-(-rotations // 128), items), 128](best, device_losses)
        first = np.searchsorted(p_of, part).astype(np.int32)
        device_first = scratch.upload("first starts", first)
        count = np.diff(np.append(first, items)).astype(np.int32)
        device_count = scratch.upload("starts of each", count)

        def choose(keep: int, min_trace: float, name: str) -> tuple[Any, Any]:
            chosen = scratch.array(f"chosen {name}", (len(part), keep), np.int32)
            score = scratch.array(f"score {name}", (len(part), keep), np.float32)
            kept = scratch.array("kept rotations", (len(part), keep, 9), np.float32)
            choosing.choose[len(part), choosing.CHOOSE_THREADS](
                best, device_first, device_count, device_starts, matrices, np.float32(min_trace), keep, kept, chosen, score
            )
            return chosen, score

        def score_again(chosen: Any, score: Any, known: Any, n_known: int) -> None:
            choosing.score_chosen[choosing.chosen_grid(chosen), launching.REDUCE_THREADS](
                templates,
                columns_2d,
                den_weight,
                lattice,
                turns,
                device_first,
                rotations,
                best_shift,
                int(weighted),
                device_multiplier,
                device_bias,
                power,
                kind,
                factor,
                device_losses,
                int(bool(priors)),
                chosen,
                known,
                n_known,
                best,
                score,
            )

        known, n_known = None, 0
        if isinstance(narrow, ProductSearch) and narrow.way.number_bytes == 1:
            # of what is nearly best, single precision tells the order
            n_known = min(_CONTENDERS, int(count.max()) * rotations)
            known, known_score = choose(n_known, _ANY_TRACE, "contenders")
            score_again(known, known_score, known, 0)
        chosen, chosen_score = choose(level.keep, 1.0 + 2.0 * math.cos(math.radians(level.separation_deg)), "best")
        if narrow is not None:
            score_again(chosen, chosen_score, chosen if known is None else known, n_known)
        rows, found = chosen.copy_to_host(), chosen_score.copy_to_host()
        if narrow is not None and level.keep > 1:
            order = np.argsort(np.where(rows >= 0, -found, np.inf), axis=1, kind="stable")
            rows, found = np.take_along_axis(rows, order, 1), np.take_along_axis(found, order, 1)
        shift_rows = best_shift.copy_to_host()
        valid = rows >= 0
        where = np.nonzero(valid)
        item = first[where[0]] + rows[where] // rotations
        turned = rows[where] % rotations
        offset_angst = voxels_to_angst(cube.shifts_voxels[shift_rows[item, turned]], *size)
        at = (part[where[0]], where[1])
        result.rotations[at] = np.einsum("wij,wjk->wik", start_rotations[item], level.rotations[turned])
        result.shifts_angst[at] = start_angst[item] + np.einsum("wij,wj->wi", start_rotations[item], offset_angst)
        result.scores[at] = found[where]

    def _narrow_search(
        self, level: SearchLevel, band: lines.LineBand, cube: lines.ShiftCube, templates: Any, powers: Any, lattice: Any, items: int
    ) -> TensorSearch | ProductSearch | None:
        """The level on the tensor cores, the fastest way for so many work items; None where that is not allowed or the GPU has none."""
        if self.backend.precision == "single" or not available():
            return None
        rotations, largest2 = len(level.rotations), _ball_radius2(cube)
        way = min(ways(self.backend.precision), key=lambda way: way.microseconds(band, len(cube.inside), rotations, items), default=None)
        if way is not None and way.microseconds(band, len(cube.inside), rotations, items) > tensor_us(band, cube, largest2, rotations, items):
            way = None
        key = (level.rotations.tobytes(), band.k_max, cube.steps, cube.step_voxels, way)
        found = self._tensor.get(key)
        if found is None:
            inverse_sigma2 = self._mean_inverse_sigma2  # a balance of numbers only: every column is scaled by itself
            found = (
                TensorSearch.make(band, cube, largest2, self._n, templates, powers, rotations, inverse_sigma2)
                if way is None
                else ProductSearch.make(way, band, cube, self._n, templates, powers, rotations, lattice, inverse_sigma2)
            )
            self._tensor.put(key, found, found.bytes_held)
        return found

    # -- normalisations ----------------------------------------------------------------------------------------------

    def _flcf_factor(self) -> float:
        return math.sqrt(2.0 / (self._n**3 * float(self._mask.sum(dtype=np.float64))))

    def _on_host(self) -> CPUSearchSession:
        """flcf's local deviation comes from the CPU backend: a few transforms a particle, shared code, no kernel of its own."""
        if self._host is None:
            assert self._batch is not None
            self._host = CPUSearchSession(self.setup, ByteCache(1 << 30))
            self._host.load(self._batch)
        return self._host

    def _powers(self, k_max: float) -> NDArray[np.float64]:
        """``sum w |X|^2`` of every particle up to a band."""
        inside = (self._band.radius2 <= k_max * k_max + 1e-6) & (self._band.radius2 >= self.setup.k_min**2 - 1e-6)
        samples = band_on_device(self._band, np.flatnonzero(inside), self._cube_reach)
        count = len(self._slots)
        out = cuda.device_array(count, np.float64)
        device_weights, weight_size, signed, table_scale, _ = self._weights()
        scoring.band_power[count, launching.REDUCE_THREADS](
            self._loaded_pool().cubes[0],
            self._loaded_pool().cube.size,
            cuda.to_device(self._slots),
            samples.cube_index,
            device_weights,
            weight_size,
            cuda.to_device(self._kinds),
            samples.weight_index,
            samples.shell,
            self._tables,
            signed,
            table_scale,
            self._inverse_sigma2,
            cuda.to_device(self._groups),
            out,
        )
        return np.maximum(out.copy_to_host(), 1e-30)

    # -- refinement --------------------------------------------------------------------------------------------------

    def _run_refine(
        self,
        p_of: NDArray[np.intp],
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
        anchor_angst: NDArray[np.float64],
        steps: int,
        cubes: Any,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
        grid, n = self.setup.grid, self._n
        size = (grid.pixel_size_angst, grid.box_size, n)
        items, scratch = len(p_of), self.backend.scratch
        device_rotations = scratch.upload("refined rotations", rotations.reshape(-1, 9))
        device_shifts = scratch.upload("refined shifts", angst_to_voxels(shifts_angst, *size))
        anchors = scratch.upload("refined anchors", angst_to_voxels(anchor_angst[p_of], *size))
        sums = scratch.array("refined sums", (items, normal_equations.N_SUMS), np.float64)
        taken = scratch.array("refined steps", items, np.int32)
        device_weights, weight_size, signed, table_scale, _ = self._weights()
        samples = self._samples
        limit = float(angst_to_voxels(min(self.setup.max_shift_angst, 1e9), *size))
        refining.refine[items, normal_equations.REFINE_THREADS](
            self._reference,
            self._offset,
            n,
            cubes,
            self._loaded_pool().cube.size,
            scratch.upload("slots", self._slots[p_of]),
            samples.cube_index,
            samples.k,
            device_weights,
            weight_size,
            scratch.upload("kinds", self._kinds[p_of]),
            samples.weight_index,
            samples.shell,
            self._tables,
            signed,
            table_scale,
            self._inverse_sigma2,
            self._gains,
            scratch.upload("groups", self._groups[p_of]),
            self._curvature,
            device_rotations,
            device_shifts,
            anchors,
            limit,
            steps,
            math.radians(MAX_ANGLE_STEP_DEG),
            math.radians(STOP_ANGLE_DEG),
            float(angst_to_voxels(STOP_SHIFT_ANGST, *size)),
            sums,
            taken,
        )
        return (
            device_rotations.copy_to_host().reshape(-1, 3, 3),
            voxels_to_angst(device_shifts.copy_to_host(), *size),
            sums.copy_to_host(),
            taken.copy_to_host(),
        )

    def _climb(
        self,
        p_of: NDArray[np.intp],
        rotations: NDArray[np.float64],
        shifts_angst: NDArray[np.float64],
        anchor_angst: NDArray[np.float64],
        steps: int,
        cubes: Any,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
        """As `_run_refine`, with the prior: steps are made here, all items at once, sums on the device."""
        grid, n = self.setup.grid, self._n
        unit_angst = float(voxels_to_angst(n / (2.0 * np.pi), grid.pixel_size_angst, grid.box_size, n))
        assert self._prior is not None
        climbers = [
            climb(r, s, anchor_angst[p], self.setup.max_shift_angst, unit_angst, self._prior.of(int(p), self._mask_mean_square), steps)
            for p, r, s in zip(p_of, rotations, shifts_angst, strict=True)
        ]
        wanted = {item: next(climber) for item, climber in enumerate(climbers)}
        ends: dict[int, End] = {}
        while wanted:
            items = np.array(list(wanted))
            at_rotations, at_shifts = (np.stack([pose[part] for pose in wanted.values()]) for part in (0, 1))
            _, _, sums, _ = self._run_refine(p_of[items], at_rotations, at_shifts, anchor_angst, 0, cubes)
            for item, row in zip(items.tolist(), sums, strict=True):
                try:
                    wanted[item] = climbers[item].send(row)
                except StopIteration as done:
                    ends[item] = done.value
                    del wanted[item]
        in_order = [ends[item] for item in range(len(climbers))]
        return (
            np.stack([end.rotation for end in in_order]),
            np.stack([end.shift_angst for end in in_order]),
            np.stack([end.sums for end in in_order]),
            np.array([end.steps for end in in_order], np.int32),
        )

    def refine(self, candidates: Candidates, anchor_angst: NDArray[np.float64], most_steps: int = MAX_STEPS) -> PoseEstimates:
        """Exact Gauss-Newton of every candidate; keeps the best of each particle."""
        count = len(self._slots)
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
        self._loaded_pool()
        used = candidates.scores > -np.inf
        used[~self._usable] = False
        p_of, s_of = np.nonzero(used)
        if not len(p_of):
            return out
        starts = candidates.rotations[p_of, s_of], candidates.shifts_angst[p_of, s_of]
        run = self._run_refine if self._prior is None else self._climb
        rotations, shifts, sums, taken = run(p_of, *starts, anchor_angst, most_steps, self._loaded_pool().cubes[0])
        likelihood = 2.0 * sums[:, 27] - sums[:, 28]
        objective = likelihood
        if self._prior is not None:
            loss = [self._prior.of(int(p), self._mask_mean_square).loss(r, s) for p, r, s in zip(p_of, rotations, shifts, strict=True)]
            objective = likelihood - np.array(loss)
        order = np.lexsort((s_of, -objective, p_of))
        winners = order[np.concatenate([[True], np.diff(p_of[order]) > 0])]
        p = p_of[winners]
        out.rotations[p], out.shifts_angst[p] = rotations[winners], shifts[winners]
        out.numerator[p], out.denominator[p] = sums[winners, 27], sums[winners, 28]
        out.log_likelihood[p] = likelihood[winners] * self._mask_mean_square
        np.add.at(out.steps, p_of, taken)
        self._covariances(out, p, rotations[winners], shifts[winners], sums[winners])
        self._margins(out, winners, p_of, rotations, shifts, objective)
        den = np.maximum(sums[winners, 28], 1e-30)
        if self.setup.score == "ml":
            out.scores[p] = likelihood[winners]
        elif self.setup.score == "ncc":
            out.scores[p] = sums[winners, 27] / np.sqrt(den * self._powers(min(self.setup.k_max, float(self._reach)))[p])
        else:
            _, _, unmasked, _ = self._run_refine(p, rotations[winners], shifts[winners], anchor_angst, 0, self._loaded_pool().cubes[1])
            k_max = min(self.setup.k_max, float(self._reach))
            sigma = np.array([float(self._on_host()._sigma_at(int(i), k_max, shifts[w][None])[0]) for i, w in zip(p, winners, strict=True)])
            out.scores[p] = unmasked[:, 27] / (np.sqrt(den) * sigma) * self._flcf_factor()
        return out

    def _covariances(
        self, out: PoseEstimates, p: NDArray[np.intp], rotations: NDArray[np.float64], shifts: NDArray[np.float64], sums: NDArray[np.float64]
    ) -> None:
        grid, n = self.setup.grid, self._n
        unit_angst = float(voxels_to_angst(n / (2.0 * np.pi), grid.pixel_size_angst, grid.box_size, n))
        hessians, gradients = unpack_normal_equations(sums)
        if self._prior is not None:
            for i in range(len(p)):
                add_prior(hessians[i], gradients[i], self._prior.of(int(p[i]), self._mask_mean_square), rotations[i], shifts[i], unit_angst)
        frames = np.zeros((len(p), 6, 6))
        frames[:, :3, :3], frames[:, 3:, 3:] = rotations, rotations * unit_angst
        good = np.linalg.matrix_rank(hessians, hermitian=True) == 6
        inverse = np.full_like(hessians, np.nan)
        inverse[good] = np.linalg.inv(2.0 * self._mask_mean_square * hessians[good])
        out.covariances[p] = np.einsum("pij,pjk,plk->pil", frames, inverse, frames)

    def _margins(
        self,
        out: PoseEstimates,
        winners: NDArray[np.intp],
        p_of: NDArray[np.intp],
        rotations: NDArray[np.float64],
        shifts: NDArray[np.float64],
        likelihood: NDArray[np.float64],
    ) -> None:
        """Log-odds of the best pose over the next one that is another pose."""
        winner_of = np.full(len(self._slots), -1)
        winner_of[p_of[winners]] = winners
        best = winner_of[p_of]
        traces = np.einsum("wij,wij->w", rotations[best], rotations)
        apart = traces < 1.0 + 2.0 * math.cos(math.radians(1.0))
        apart |= np.linalg.norm(shifts - shifts[best], axis=1) > self.setup.grid.binned_pixel_size_angst
        apart[winners] = False
        behind = (likelihood[best] - likelihood) * self._mask_mean_square
        np.minimum.at(out.margin, p_of[apart], behind[apart])

    # -- residuals ---------------------------------------------------------------------------------------------------

    def residuals(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> GroupResiduals:
        """Residual power by group, weight and shell at given poses; beyond the reference's band the whole power."""
        each, p, _ = self._residuals(rotations, shifts_angst)
        groups = self._groups[p]

        def of(group: int) -> ResidualPower:
            rows = groups == group
            return ResidualPower(*(values[rows].sum(axis=0, dtype=np.float64) for values in each))

        return {int(group): of(group) for group in np.unique(groups)}

    def residuals_each(self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]) -> tuple[ResidualPower, NDArray[np.bool_]]:
        """The same for every particle by itself, and whether its weight is a signed CTF."""
        count = len(self._slots)
        each, p, signed = self._residuals(rotations, shifts_angst)
        all_signed = np.zeros(count, bool)
        all_signed[p] = signed
        parts = []
        for part in each:
            parts.append(np.zeros((count, N_WEIGHT_BINS, self._n // 2 + 1)))
            parts[-1][p] = part
        return ResidualPower(*parts), all_signed

    def _residuals(
        self, rotations: NDArray[np.float64], shifts_angst: NDArray[np.float64]
    ) -> tuple[list[NDArray[np.float32]], NDArray[np.intp], NDArray[np.bool_]]:
        """Power, count and sum of weights of the usable particles, which these are, and whose weights are signed."""
        grid, n = self.setup.grid, self._n
        shells = n // 2 + 1
        self._loaded_pool()
        p = np.flatnonzero(self._usable)
        if not len(p):
            return [np.zeros((0, N_WEIGHT_BINS, shells), np.float32)] * 3, p, np.zeros(0, bool)
        if self._by_shell is None:
            order = np.argsort(self._band.shell, kind="stable")
            start = np.searchsorted(self._band.shell[order], np.arange(shells + 1)).astype(np.int32)
            self._by_shell = band_on_device(self._band, order, self._cube_reach), cuda.to_device(start)
        samples, start = self._by_shell
        shifts = angst_to_voxels(shifts_angst[p], grid.pixel_size_angst, grid.box_size, n) / n
        results = [cuda.device_array((len(p), N_WEIGHT_BINS, shells), np.float32) for _ in range(3)]
        device_weights, weight_size, signed, _, relative_scale = self._weights()
        reach2 = np.float32(min(self.setup.k_max, float(self._reach)) ** 2 + 1e-6)
        residuals.residual_power[(shells, len(p)), 64](
            self._reference,
            self._offset,
            n,
            reach2,
            self._loaded_pool().cubes[0],
            self._loaded_pool().cube.size,
            cuda.to_device(self._slots[p]),
            samples.cube_index,
            samples.k,
            device_weights,
            weight_size,
            cuda.to_device(self._kinds[p]),
            samples.weight_index,
            start,
            signed,
            relative_scale,
            self._gains,
            cuda.to_device(self._groups[p]),
            cuda.to_device(WEIGHT_BIN_EDGES.astype(np.float32)),
            self._curvature,
            cuda.to_device(rotations[p].reshape(-1, 9).astype(np.float32)),
            cuda.to_device(shifts.astype(np.float32)),
            *results,
        )
        return [part.copy_to_host() for part in results], p, signed.copy_to_host()[self._kinds[p]].astype(bool)

    def unload(self) -> None:
        """Lets go of the loaded particles; the pool keeps what fits."""
        self._slots, self._kinds, self._groups = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._usable = np.zeros(0, bool)
        self._batch, self._host, self._pool = None, None, None

    def close(self) -> None:
        """Drops templates and reference; the pool stays with the backend."""
        self._templates = ByteCache(0)
        self._lines = {}
        self._tensor = ByteCache(0)
        self._host = None


def _ball_radius2(cube: lines.ShiftCube) -> float:
    """Squared radius, in steps, that holds exactly the trial shifts of a cube's ball."""
    if not cube.steps:
        return 0.0
    inside = np.linalg.norm(cube.shifts_voxels[cube.inside] / cube.step_voxels, axis=1) ** 2
    return float(np.rint(inside.max()) + 0.5)


__all__ = ["CUDABackend", "CUDASearchSession", "CUDASumSession", "Grid"]
