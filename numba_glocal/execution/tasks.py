"""Picklable tasks, and what a worker keeps between them: its backend with its cache, and the last two sessions."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..alignment import ChunkResult, ClassesResult, SearchPlan, align_chunk, align_classes, search_levels
from ..backends.newton import MAX_STEPS
from ..backends.protocols import Backend, Grid, ParticleBatch, ParticleMask, SearchLevel, SearchSession, SearchSetup, SumSetup, WeightedSum
from ..errors import WorkerError
from ..io.paths import whole_file
from ..masks import sphere_mean_square
from ..noise import NoiseModel, NoiseModels
from ..particles import ParticleReader
from ..pose_prior import PosePrior, PriorWidths
from ..values import Source, Weight
from .pinning import WorkerInfo

_SESSIONS = 2
_TURNED_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some particles of one half-set: who they are and where they stand.

    Attributes
    ----------
    half : int
    rows : (p,) int64
        Their rows in the particle set.
    names, volume_paths, weight_paths : tuples
    rotations : (p, 3, 3) float64, shifts_angst : (p, 3) float64
        Poses to start from.
    anchors_angst : (p, 3) float64
        Centres of the hard shift limit.
    anchor_rotations : (p, 3, 3) float64
        Orientations that a prior is about.
    groups : (p,) int32 or None
        Which of a task's noise models is whose; None: all have the first.
    """

    half: int
    rows: NDArray[np.int64]
    names: tuple[str, ...]
    volume_paths: tuple[Source, ...]
    weight_paths: tuple[Weight | None, ...]
    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    anchors_angst: NDArray[np.float64]
    anchor_rotations: NDArray[np.float64]
    groups: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class ReferenceFile:
    """A reference that workers read themselves: a ``.npy`` file of (n, n, n) float32, its digest, and a factor on its grey values."""

    path: Path
    digest: str
    scale: float = 1.0

    def read(self) -> NDArray[np.float32]:
        """The map; the digest guards against a file that changed under the run."""
        data = np.load(self.path)
        if array_digest(data) != self.digest:
            raise WorkerError(f"{self.path}: the reference changed while the run was using it")
        return (data * np.float32(self.scale)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AlignTask:
    """Search, refine (`most_steps` 0: only look) and measure residuals for one chunk; `local_mask` is a mask file's, for flcf."""

    chunk: Chunk
    reader: ParticleReader
    reference: ReferenceFile
    particle_mask: ParticleMask
    noise: NoiseModels
    score: str
    k_min: float
    k_max: float
    max_shift_angst: float
    plan: SearchPlan | None
    radius_voxels: float
    refine: bool
    prior: PriorWidths = PriorWidths()
    local_mask: ReferenceFile | None = None
    most_steps: int = MAX_STEPS

    @property
    def affinity(self) -> tuple[str, ...]:
        """What a worker may hold already."""
        return self.chunk.names


@dataclass(frozen=True, slots=True)
class ClassesTask:
    """Compare one chunk with every class of its half.

    Attributes
    ----------
    common : AlignTask
        All but the references, which stand below; its poses do not count.
    references : tuple of ReferenceFile
        Of the classes.
    rotations : (c, p, 3, 3) float64, shifts_angst : (c, p, 3) float64
        Starts in each class.
    given : (p,) int64
        Classes, where the task does not compare (``common.refine`` is False).
    handicap : (c, p) float64
        See `alignment.align_classes`.
    """

    common: AlignTask
    references: tuple[ReferenceFile, ...]
    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    given: NDArray[np.int64]
    handicap: NDArray[np.float64]

    @property
    def chunk(self) -> Chunk:
        """The particles."""
        return self.common.chunk

    @property
    def affinity(self) -> tuple[str, ...]:
        """What a worker may hold already."""
        return self.chunk.names


@dataclass(frozen=True, slots=True)
class SumTask:
    """Add one chunk to its half's average, each particle at ``R c`` for every turn ``c`` of (m, 3, 3); None: as it is.

    Each counts as much as its share (p,) says; None: wholly.
    """

    chunk: Chunk
    reader: ParticleReader
    noise: NoiseModels
    turns: NDArray[np.float64] | None = None
    shares: NDArray[np.float64] | None = None

    @property
    def affinity(self) -> tuple[str, ...]:
        """What a worker may hold already."""
        return self.chunk.names


@dataclass(frozen=True, slots=True)
class SumResult:
    """Partial sums of one chunk, and who was left out."""

    sums: WeightedSum
    bad: list[tuple[int, str]]


def array_digest(data: NDArray[Any]) -> str:
    """Digest of an array's bytes."""
    return hashlib.blake2b(np.ascontiguousarray(data).tobytes(), digest_size=16).hexdigest()


def write_reference(path: Path, data: NDArray[np.float32]) -> ReferenceFile:
    """Stores a reference for workers."""
    data = np.ascontiguousarray(data, np.float32)
    with whole_file(path) as handle:
        np.save(handle, data)
    return ReferenceFile(path, array_digest(data))


class WorkerState:
    """What lives as long as a worker does."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.sessions: OrderedDict[bytes, SearchSession] = OrderedDict()

    def search_session(self, task: AlignTask) -> SearchSession:
        """The session of a task's setup, opened on first sight; the last two are kept."""
        text = repr((task.reader.grid, task.reference.digest, task.reference.scale, task.particle_mask, task.score, task.k_min, task.k_max))
        text += repr((task.max_shift_angst, task.local_mask and task.local_mask.digest))
        text += repr([(noise.gamma, noise.epsilon, noise.gain) for noise in task.noise])
        key = hashlib.blake2b(text.encode() + b"".join(noise.sigma2.tobytes() for noise in task.noise), digest_size=16).digest()
        session = self.sessions.get(key)
        if session is None:
            while len(self.sessions) >= _SESSIONS:
                self.sessions.popitem(last=False)[1].close()
            session = self.backend.open_search(
                SearchSetup(
                    task.reader.grid,
                    task.reference.read(),
                    task.particle_mask,
                    task.noise,
                    task.score,
                    task.k_min,
                    task.k_max,
                    task.max_shift_angst,
                    None if task.local_mask is None else task.local_mask.read(),
                )
            )
            self.sessions[key] = session
        self.sessions.move_to_end(key)
        return session


_state: WorkerState | None = None


def start_worker(
    info: WorkerInfo | None = None,
    backend: str = "cpu",
    cache_bytes: int = 2 << 30,
    gpu_memory_bytes: int | None = None,
    share: int = 1,
    precision: str = "auto",
) -> str:
    """Pool initialiser: makes this process's backend.

    Parameters
    ----------
    info : WorkerInfo
        Who this worker is.
    backend : str
        "cpu" or "cuda".
    cache_bytes : int
        Budget of the cache of prepared particles (cpu).
    gpu_memory_bytes : int, optional
        Device memory this worker may use (cuda).
    share : int
        Workers on the same GPU (cuda).
    precision : str
        Of searches, "auto", "int8", "half" or "single" (cuda).

    Returns
    -------
    str
        What the backend runs on, for the log.
    """
    global _state
    if backend == "cuda":
        from ..backends.cuda.backend import CUDABackend

        on_gpu = CUDABackend(gpu_memory_bytes, share, precision)
        _state = WorkerState(on_gpu)
        return on_gpu.device
    from ..backends.cpu import CPUBackend

    if backend != "cpu":
        raise WorkerError(f"backend {backend!r} is not known; expected cpu or cuda")
    _state = WorkerState(CPUBackend(cache_bytes))
    return "CPU"


def _worker() -> WorkerState:
    if _state is None:
        start_worker()
    assert _state is not None
    return _state


def run_align(task: AlignTask) -> ChunkResult:
    """Runs an `AlignTask` in this process."""
    chunk = task.chunk
    session = _worker().search_session(task)
    batch, levels, evidence, prior = _prepared(task)
    poses = chunk.rotations, chunk.shifts_angst, chunk.anchors_angst
    return align_chunk(session, batch, *poses, levels, task.refine, task.plan, evidence, prior, task.most_steps)


def _prepared(task: AlignTask) -> tuple[ParticleBatch, tuple[SearchLevel, ...], float, PosePrior | None]:
    """Particles, levels, the log-likelihood that a unit of score stands for (0: none), and the prior."""
    chunk, grid = task.chunk, task.reader.grid
    levels = () if task.plan is None else search_levels(task.plan, grid.binned_box_size, grid.binned_pixel_size_angst, task.radius_voxels)
    batch = replace(task.reader.batch(chunk.names, chunk.volume_paths, chunk.weight_paths), groups=chunk.groups)
    evidence = 0.0
    if levels and task.score == "ml":
        evidence = sphere_mean_square(grid.binned_box_size, task.particle_mask.radius_voxels, task.particle_mask.soft_edge_voxels)
    return batch, levels, evidence, PosePrior.about(task.prior, chunk.anchor_rotations, chunk.anchors_angst)


def run_classes(task: ClassesTask) -> ClassesResult:
    """Runs a `ClassesTask` in this process."""
    common = task.common
    batch, levels, evidence, prior = _prepared(common)
    return align_classes(
        lambda c: _worker().search_session(replace(common, reference=task.references[c])),
        batch,
        task.rotations,
        task.shifts_angst,
        task.chunk.anchors_angst,
        levels,
        common.refine,
        task.given,
        task.handicap,
        common.noise,
        common.score == "ml",
        common.plan,
        evidence,
        prior,
    )


def run_sum(task: SumTask) -> SumResult:
    """Runs a `SumTask` in this process."""
    chunk, grid = task.chunk, task.reader.grid
    setup = SumSetup(grid, task.reader.normalise_mask, task.noise)
    session = _worker().backend.open_sum(setup)
    turns = np.eye(3)[None] if task.turns is None else task.turns
    # few enough at a time that all are still at hand for the next turn
    step = len(chunk) if len(turns) == 1 else int(np.clip(_TURNED_BYTES // (8 * grid.binned_box_size**3), 1, len(chunk)))
    bad: list[tuple[int, str]] = []
    try:
        for first in range(0, len(chunk), step):
            rows = list(range(first, min(first + step, len(chunk))))
            for number, turn in enumerate(turns):
                batch = task.reader.batch(
                    tuple(chunk.names[i] for i in rows), tuple(chunk.volume_paths[i] for i in rows), tuple(chunk.weight_paths[i] for i in rows)
                )
                if chunk.groups is not None:
                    batch = replace(batch, groups=chunk.groups[rows])
                shares = None if task.shares is None else task.shares[rows]
                left_out = session.add(batch, chunk.rotations[rows] @ turn, chunk.shifts_angst[rows], shares)
                if number == 0:
                    bad += [(rows[index], reason) for index, reason in left_out]
                    unusable = {index for index, _ in left_out}
                    rows = [row for index, row in enumerate(rows) if index not in unusable]
                if not rows:
                    break
        return SumResult(replace(session.result(), n_particles=len(chunk) - len(bad)), bad)
    finally:
        session.close()


def run_task(task: AlignTask | ClassesTask | SumTask) -> ChunkResult | ClassesResult | SumResult:
    """Runs any task; the one function that executors are given."""
    if isinstance(task, AlignTask):
        return run_align(task)
    return run_classes(task) if isinstance(task, ClassesTask) else run_sum(task)


def particles_treated(result: ChunkResult | ClassesResult | SumResult) -> int:
    """How many particles a task's result is about, unusable ones included."""
    if isinstance(result, ClassesResult):
        return len(result.best)
    return len(result.rotations) if isinstance(result, ChunkResult) else result.sums.n_particles + len(result.bad)


def warm_up() -> None:
    """Compiles (or loads) the CPU kernels on a tiny problem; the pool lets one worker do it while the others wait."""
    from ..backends.cpu import CPUBackend

    _exercise(CPUBackend(0), (0.0, 1.0, 2.0, 3.0))


def warm_up_cuda() -> None:
    """Compiles (or loads) the CUDA kernels on a tiny problem."""
    _exercise(_worker().backend, (1.0, 2.0, 3.0))


def _exercise(backend: Backend, shift_steps: tuple[float, ...]) -> None:
    """Searches, refines and sums two tiny particles, with shift windows of the given numbers of steps."""
    from ..backends.protocols import Normalisation, ParticleBatch

    n = 16
    rng = np.random.default_rng(0)
    volume = rng.normal(size=(n, n, n)).astype(np.float32)
    weight = np.ones((n, n, n // 2 + 1), np.float32)
    grid, mask = Grid(n, n, 1.0), ParticleMask(5.0, 2.0)
    noise = NoiseModel(np.ones(n // 2 + 1))

    def read_raw(_: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        out[...] = volume
        return weight

    batch = ParticleBatch(("a", "b"), lambda _: (volume, weight), read_raw, Normalisation(5.0, True, False))
    starts, shifts = np.repeat(np.eye(3)[None], 2, 0), np.zeros((2, 3))
    session = backend.open_search(SearchSetup(grid, volume, mask, noise, "ml", 0.0, 6.0))
    level = search_levels(SearchPlan(30.0, 1, 4.0, 6.0), n, 1.0, 5.0)[-1]
    levels = tuple(replace(level, shift_radius_angst=level.shift_step_angst * steps) for steps in shift_steps)
    align_chunk(session, batch, starts, shifts, shifts, levels, True)
    session.close()
    total = backend.open_sum(SumSetup(grid, mask, noise))
    total.add(batch, starts, shifts)
    total.close()
