"""What `align`, `average` and `demo` share: workers, log, and the last words."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numba_glocal import __version__
from numba_glocal.alignment import SearchPlan, search_levels
from numba_glocal.averaging import warm_up as warm_up_maps
from numba_glocal.backends.protocols import SearchLevel
from numba_glocal.classification import class_text
from numba_glocal.devices import INSTALL_HINT, memory_bytes, resolve_gpus, why_no_gpus, workers_per_gpu
from numba_glocal.errors import DeviceError, SettingsError, plural
from numba_glocal.execution.executors import make_executor
from numba_glocal.execution.gpu_worker import start_gpu_worker, warm_up_gpu_worker
from numba_glocal.execution.pinning import usable_cores
from numba_glocal.execution.pool import WorkerEvent
from numba_glocal.execution.tasks import particles_treated, start_worker, warm_up
from numba_glocal.fourier import padded_offset
from numba_glocal.job import Job, largest_chunk, particle_bytes, start_classes
from numba_glocal.report import WorkerSummary, write_report
from numba_glocal.results import FILES, ClassResult, RunFolder, RunResult, RunState, load_report_data, total_of_legs
from numba_glocal.schedule import first_search, has_converged
from numba_glocal.settings import AlignSettings, AverageSettings
from numba_glocal.symmetry import grid_factors
from numba_glocal.values import TiltGeometry, TomogramWeight

from .console import detail, gibibytes, note, say, warn
from .interrupt import remembered

_LOG = "numba_glocal"
_LANES = 16
"""Rotations that are scored at once; templates are laid out in whole blocks of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Which workers a run gets.

    Attributes
    ----------
    workers : int
    gpu_ids : tuple of str
        Empty: CPU workers.
    per_gpu : int
        Workers on each GPU.
    reason : str
        Why `per_gpu` is what it is, where it was chosen here.
    note : str
        Why there are no GPU workers although a GPU is there; empty otherwise.
    unused : str
        Options of a job file, or of the run that goes on, that say nothing to these workers; empty otherwise.
    """

    workers: int
    gpu_ids: tuple[str, ...] = ()
    per_gpu: int = 1
    note: str = ""
    reason: str = ""
    unused: str = ""

    @property
    def backend(self) -> str:
        """Name of the workers' backend."""
        return "cuda" if self.gpu_ids else "cpu"

    @property
    def chunk_limit(self) -> int | None:
        """Particles of a search task: a GPU wants many at once."""
        return _GPU_CHUNK if self.gpu_ids else None


_GPU_CHUNK = 1024


def choose_workers(settings: AlignSettings | AverageSettings, filed: Collection[str] = ()) -> WorkerPlan:
    """Workers for the GPUs asked for (all that are visible by default), else for the cores.

    Parameters
    ----------
    settings : AlignSettings or AverageSettings
    filed : collection of str
        Names of settings that come from a job file, or from the run that goes on: those for the other kind of workers are left unused, where
        the same on the command line is refused.

    Raises
    ------
    DeviceError
        A GPU was asked for that is not there, or cannot be used from Python: never a silent fallback.
    SettingsError
        Numbers of workers that make no sense.
    """
    wanted = "none" if settings.gpus is None and settings.cpu_procs is not None else settings.gpus  # --cpu-procs alone asks for the CPU
    gpu_ids = tuple(resolve_gpus(wanted))
    note_text = ""
    if gpu_ids and importlib.util.find_spec("numba_cuda") is None:
        hint = f"numba-cuda is not installed; expected {INSTALL_HINT}"
        if settings.gpus is not None:
            raise DeviceError(f"--gpus {settings.gpus}: {hint}")
        gpu_ids, note_text = (), f"a GPU is there, but {hint}; the CPU is used"
    if gpu_ids:
        return _gpu_workers(settings, gpu_ids, filed)
    why = note_text or _why_cpu(settings)
    for_gpus = {
        "procs_per_gpu": ("--procs-per-gpu", settings.procs_per_gpu, "auto", "; expected --cpu-procs"),
        "gpu_memory_gib": ("--gpu-memory", settings.gpu_memory_gib, None, ""),
        "gpu_precision": ("--gpu-precision", getattr(settings, "gpu_precision", None), None, "; the CPU searches in single precision"),
    }
    unused = []
    for name, (option, value, default, hint) in for_gpus.items():
        if value in (default, "single"):  # single precision is what the CPU searches in
            continue
        text = f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}"
        if name not in filed:
            raise SettingsError(f"{text}: there is no GPU in this run ({why}){hint}")
        unused.append(text)
    cores = usable_cores()
    workers = settings.cpu_procs or cores
    if workers > max(16, 4 * cores):
        raise SettingsError(f"--cpu-procs {workers}: expected at most {max(16, 4 * cores)} on {cores} usable cores")
    return WorkerPlan(workers, note=note_text, unused=_unused_text(unused, f"there is no GPU in this run ({why})"))


def _gpu_workers(settings: AlignSettings | AverageSettings, gpu_ids: tuple[str, ...], filed: Collection[str]) -> WorkerPlan:
    if isinstance(settings, AlignSettings) and settings.score == "flcf" and settings.mask is not None:
        raise SettingsError(f"--score flcf with --mask {settings.mask}: on the CPU only; expected --gpus none, another score, or no --mask")
    reason, unused = "", []
    if settings.procs_per_gpu == "auto":
        limit = None if settings.gpu_memory_gib is None else int(settings.gpu_memory_gib * 2**30)
        per_gpu, why = workers_per_gpu(gpu_ids, usable_cores(), limit)
        reason = f"auto: {why}" if why else "auto"
    else:
        per_gpu = int(settings.procs_per_gpu)
    if settings.cpu_procs is not None:
        if "cpu_procs" not in filed or "gpus" in filed:
            raise SettingsError("--cpu-procs: the workers of this run are on GPUs; expected --procs-per-gpu, or --gpus none")
        unused = [f"--cpu-procs {settings.cpu_procs}"]
    text = _unused_text(unused, f"the workers of this run are on GPUs (--gpus {settings.gpus})")
    return WorkerPlan(per_gpu * len(gpu_ids), gpu_ids, per_gpu, reason=reason, unused=text)


def _why_cpu(settings: AlignSettings | AverageSettings) -> str:
    """Why a run has no GPU, where nothing was asked for that is missing."""
    if settings.gpus is not None:
        return f"--gpus {settings.gpus}"
    return "--cpu-procs asks for the CPU" if settings.cpu_procs is not None else why_no_gpus()


def _unused_text(options: list[str], why: str) -> str:
    return f"not used, of the job's own options: {', '.join(options)}; {why}" if options else ""


def _levels(job: Job, plan: SearchPlan) -> tuple[SearchLevel, ...]:
    return search_levels(plan, job.grid.binned_box_size, job.grid.binned_pixel_size_angst, job.radius_voxels)


def search_memory_bytes(job: Job) -> int:
    """Upper bound of what one level of a search takes beyond the sessions' caches: its templates while they are made, and a task's scores.

    The first level of a global search has most rotations; a later, local one the full band.
    """
    if not isinstance(job.settings, AlignSettings):
        return 0
    first = first_search(job)
    worst = 0
    for plan in (first, dataclasses.replace(first, everywhere=False, k_max=job.k_limit)):
        seeds = 1
        for level in _levels(job, plan):
            pairs = 1.05 * level.k_max**3 + 1.6 * level.k_max**2 + 2.0 * level.k_max + 1.0  # somewhat more than `lines.line_band` lays out
            templates = (len(level.rotations) + _LANES) * pairs * 4 * (4 + 2)  # two complex values a pair, and their powers
            scores = largest_chunk(job.grid.binned_box_size) * seeds * len(level.rotations) * (8 + 4)
            worst, seeds = max(worst, int(templates + scores)), level.keep
    return worst


def worker_memory_bytes(job: Job, cache_gib: float) -> int:
    """Upper bound of one CPU worker's memory: interpreter and kernels, cache, one task's particles, weights, templates, columns, sums."""
    n = job.grid.binned_box_size
    c = padded_offset(n // 2 - 1)
    sums = (2 * c + 1) ** 2 * (c + 2) * 16 * 2
    transforms = (2 * n) ** 3 * 8 * 3
    chunk = largest_chunk(n) * particle_bytes(n)
    weights = 64 * n * n * (n // 2 + 1) * 4
    return int(400e6 + cache_gib * 2**30 + chunk + weights + 2 * (512 << 20) + 3 * (64 << 20) + search_memory_bytes(job) + sums + transforms)


def _gpu_memory_text(job: Job) -> str:
    limit = job.settings.gpu_memory_gib
    return "its free memory" if limit is None else f"{limit:g} GiB of it"


def _gpu_share_bytes(job: Job, plan: WorkerPlan) -> int | None:
    """Device memory of one worker where --gpu-memory caps it."""
    limit = job.settings.gpu_memory_gib
    return None if limit is None else int(limit * 2**30 / plan.per_gpu)


def worker_arguments(job: Job, plan: WorkerPlan) -> tuple[str, int, int | None, int, str]:
    """What `start_worker` and `start_gpu_worker` are given."""
    precision = getattr(job.settings, "gpu_precision", None) or "auto"
    return plan.backend, int(job.settings.cache_gib * 2**30), _gpu_share_bytes(job, plan), plan.per_gpu, precision


_NS_PER_PAIR = 1.3
_NS_PER_SAMPLE = 30.0
_READ_SECONDS = 0.012


def _estimate(job: Job, plan: WorkerPlan, levels: tuple[SearchLevel, ...]) -> str:
    """A rough time from the work to do and rates measured on one core of a server processor of 2023; for GPUs none is made up."""
    if plan.gpu_ids:
        return "shown once the first task is done"
    n = job.grid.binned_box_size
    search = 0.0
    for seeds, level in zip([1, *(level.keep for level in levels)], levels, strict=False):
        pairs = 2.1 * level.k_max**3 / 2.0
        search += seeds * pairs * (len(level.rotations) * _NS_PER_PAIR + 2.0 * _NS_PER_SAMPLE)
    refine = 10.0 * 2.1 * levels[-1].k_max ** 3 * _NS_PER_SAMPLE
    each = (search + refine) * 1e-9 + 0.004 * (n / 64.0) ** 3
    if isinstance(job.settings, AlignSettings):
        each *= job.settings.classes  # all but the first of them without start maps
    count = len(job.particles)
    maps = 2.0 * (n / 64.0) ** 3
    first = maps + count * (each + 2.0 * _READ_SECONDS * (n / 64.0) ** 3) / plan.workers
    later = maps + count * each / plan.workers
    return f"about {first:.0f} s for the first iteration, {later:.0f} s for another at the same band; finer bands take longer"


def plan_facts(job: Job, plan: WorkerPlan) -> list[tuple[str, str]]:
    """The plan that is shown before work starts."""
    grid, particles, settings = job.grid, job.particles, job.settings
    halves = [int((particles.half == h).sum()) for h in (1, 2)]
    pixel = f"{grid.pixel_size_angst:g} A, from {particles.pixel_size_source}"
    box = f"{grid.box_size} voxels"
    if grid.binned_box_size != grid.box_size:
        box += f", binned to {grid.binned_box_size} ({grid.binned_pixel_size_angst:.3f} A a voxel)"
    facts = [
        ("particles", f"{len(particles)} ({halves[0]} + {halves[1]} in the half-sets)"),
        *([("cut from", _tomograms_text(job))] if particles.cut_from is not None else []),
        ("box", box),
        ("pixel size", pixel),
        ("particle diameter", f"{job.diameter_angst:.0f} A, from {job.diameter_source}"),
        ("mask", job.mask_name),
        ("symmetry", _symmetry_text(settings.symmetry)),
        ("noise", str(job.noise_groups)),
        *([("volumes", job.volumes_stand)] if job.volumes_stand else []),
        ("data", "premultiplied, weights hold CTF^2 (RELION 4 convention)" if particles.premultiplied else "weights multiply the reference"),
    ]
    facts.append(("wedge", _wedge_text(job)))
    if isinstance(settings, AlignSettings):
        first = first_search(job)
        levels = _levels(job, first)
        text = ", ".join(f"{len(level.rotations)} rotations to {job.shell_of(1.0) / level.k_max:.0f} A" for level in levels)
        facts += [
            ("start map", ", ".join(settings.references) or "average of the given poses"),
            *_class_facts(job, settings),
            ("first search", f"{_where(settings)}{text}; shifts within {first.shift_radius_angst:.0f} A"),
            ("score", settings.score),
            ("iterations", f"{'at most ' if settings.until_converged else ''}{settings.iterations}"),
            ("estimated time", _estimate(job, plan, levels)),
        ]
    _, free = memory_bytes()
    each = worker_memory_bytes(job, settings.cache_gib)
    facts += [
        (
            "workers",
            f"{plan.per_gpu} on each of {plural(len(plan.gpu_ids), 'GPU')} ({', '.join(plan.gpu_ids)}), sharing {_gpu_memory_text(job)}"
            + (f" ({plan.reason})" if plan.reason else "")
            if plan.gpu_ids
            else f"{plan.workers} on the CPU, at most {gibibytes(each)} each ({gibibytes(free)} free)",
        ),
        ("output", settings.output),
    ]
    return facts


def _class_facts(job: Job, settings: AlignSettings) -> list[tuple[str, str]]:
    """How many classes, from what, and what decides."""
    if settings.classes == 1:
        return []
    if settings.further_references:
        start = "each from its start map"
    elif start_classes(job.particles, settings.classes) is not None:
        start = "from the list's rlnClassNumber, after the first iteration"
    else:
        start = f"drawn at random after the first iteration (--seed {settings.seed})"
    by = "log-likelihood" if settings.score == "ml" else f"score {settings.score}"
    return [("classes", f"{settings.classes}, {start}; {settings.class_assignment} assignment by {by}")]


def _where(settings: AlignSettings) -> str:
    """Where the first search looks, if not around the poses of the list alone."""
    if settings.relax_symmetry is not None:
        return f"around each pose and its {settings.relax_symmetry} copies: "
    if settings.angle_list is not None:
        return f"all orientations of {Path(settings.angle_list).name}: "
    return "all orientations: " if settings.global_search else ""


def _tomograms_text(job: Job) -> str:
    """Tomograms that particles are cut from, and what was read and assumed."""
    assert job.particles.cut_from is not None
    paths = {box.path for box in job.particles.cut_from.boxes}
    return "; ".join([f"{plural(len(paths), 'tomogram')} in {job.settings.tomograms}", *job.notes])


def _wedge_text(job: Job) -> str:
    """Where weights come from; tilts as they were read, and as they are used."""
    weights = job.particles.weight_paths
    n_volumes = sum(isinstance(weight, Path) for weight in weights)
    kinds = [f"{plural(n_volumes, 'particle')} with volumes of the list"] if n_volumes else []
    given = [weight for weight in weights if isinstance(weight, tuple)]
    sets = list(dict.fromkeys(given))
    flipped = ", taken with the other sign (--flip-tilt)" if job.settings.flip_tilt else ""
    if sets:
        shown = "; ".join(" and ".join(f"{t.tilt_min_deg:g} to {t.tilt_max_deg:g} about {t.tilt_axis}" for t in tilts) for tilts in sets[:3])
        more = f" and {len(sets) - 3} others" if len(sets) > 3 else ""
        kinds.append(f"{plural(len(given), 'particle')} with tilts {shown}{more} of the list{flipped}")
    stacks = [weight for weight in weights if isinstance(weight, TiltGeometry)]
    if stacks:
        images = sorted({len(weight) for weight in stacks})
        shown = f"{images[0]}" if len(images) == 1 else f"{images[0]} to {images[-1]}"
        kinds.append(f"{plural(len(stacks), 'particle')} with the CTF^2 of their own {shown} tilt images")
    held = [weight for weight in weights if isinstance(weight, TomogramWeight)]
    if held:
        ctf = {"none": "without CTF", "plain": "with CTF", "flipped": "with CTF, phases flipped", "multiplied": "with CTF^2"}[held[0].ctf]
        kinds.append(f"{plural(len(held), 'particle')} with the tilts of {job.settings.tilts}, {ctf}")
    rest = len(weights) - n_volumes - len(given) - len(stacks) - len(held)
    if rest and job.settings.tilt_range_deg is not None:
        low, high = job.settings.tilt_range_deg
        kinds.append(f"{plural(rest, 'particle')} with tilts {low:g} to {high:g} about {job.settings.tilt_axis} (--tilt-range){flipped}")
    elif rest:
        kinds.append(f"{plural(rest, 'particle')} without")
    return ", ".join(kinds)


def _symmetry_text(name: str) -> str:
    """A group for people: what it makes of a particle, and about which axes."""
    if name == "C1":
        return "C1 (none)"
    turns, grid_turns = grid_factors(name)
    return f"{name}: each particle counts as {len(turns) * len(grid_turns)}, imposed on each half by itself, about RELION's axes"


class ShownLog(logging.Handler):
    """The log's lines on the terminal: what an iteration reached, and the first few warnings."""

    most_warnings = 10

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one record; the workers' own words and tracebacks stay in the file."""
        if record.name != _LOG or record.exc_info:
            return
        if record.levelno < logging.WARNING:
            note(record.getMessage())
            return
        self._warnings += 1
        if self._warnings <= self.most_warnings:
            warn(record.getMessage())
        elif self._warnings == self.most_warnings + 1:
            warn("further warnings are in log.txt")


def run_job(job: Job, plan: WorkerPlan, folder: RunFolder, command: str, work: Callable[[Any], RunResult]) -> RunResult:
    """Starts the workers, runs, writes summary, provenance and report, and says what came out."""
    log, workers_log = logging.getLogger(_LOG), logging.getLogger(f"{_LOG}.worker")
    handler, shown = logging.FileHandler(folder.path / "log.txt", encoding="utf-8", errors="backslashreplace"), ShownLog()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.addHandler(shown)
    log.setLevel(logging.INFO)
    tallies: dict[int, WorkerSummary] = {}
    begun = time.perf_counter()

    def happened(event: WorkerEvent) -> None:
        if event.kind == "done":
            device = "CPU" if event.gpu is None else f"GPU {event.gpu}"
            so_far = tallies.get(event.worker) or WorkerSummary(f"worker {event.worker}", device, 0, 0.0)
            particles = so_far.particles + particles_treated(event.about)
            tallies[event.worker] = dataclasses.replace(so_far, particles=particles, busy_seconds=so_far.busy_seconds + event.seconds)
            return
        folder.event(event.kind, worker=event.worker, pid=event.pid, gpu=event.gpu, seconds=round(event.seconds, 3), text=event.text)
        if event.kind in ("died", "replaced", "failed"):
            warn(f"worker {event.worker}: {event.kind} {event.text}".rstrip())
        elif event.kind == "stderr":
            workers_log.info("worker %d: %s", event.worker, event.text.rstrip())
        else:
            detail(f"worker {event.worker}: {event.kind} (pid {event.pid}) {event.about or ''}".rstrip())

    def done() -> list[WorkerSummary]:
        return [tallies[index] for index in sorted(tallies)]

    def compute() -> RunResult:
        folder.begin_leg()
        folder.event("start", command=command)
        halves = [int((job.particles.half == h).sum()) for h in (1, 2)]
        logging.getLogger(f"{_LOG}.plan").info(
            "numba-glocal %s %s: %s, %d + %d particles, %s on %s",
            *(__version__, command, job.settings.particles, *halves),
            *(plural(plan.workers, "worker"), ", ".join(f"GPU {gpu}" for gpu in plan.gpu_ids) or "the CPU"),
        )
        logging.getLogger(f"{_LOG}.plan").info("noise: %s", job.noise_groups)
        if job.volumes_stand:
            logging.getLogger(f"{_LOG}.plan").info("volumes %s", job.volumes_stand)
        for line in job.warnings:  # shown already
            logging.getLogger(f"{_LOG}.plan").warning(line)
        with make_executor(
            plan.workers,
            plan.gpu_ids,
            initializer=start_gpu_worker if plan.gpu_ids else start_worker,
            initargs=worker_arguments(job, plan),
            warm_up=warm_up_gpu_worker if plan.gpu_ids else warm_up,
            events=happened,
        ) as executor:
            wait = getattr(executor, "wait_ready", None)
            if wait is not None:
                warm_up_maps()
                wait()
            note(f"{plural(plan.workers, 'worker')} ready in {time.perf_counter() - begun:.1f} s")
            result = work(executor)
        seconds = time.perf_counter() - begun
        for line in result.warnings:  # shown with the result
            logging.getLogger(f"{_LOG}.result").warning(line)
        reached = f"resolution {result.crossing.resolution_angst:.1f} A" if result.crossing.shell > 0 else "no resolution"
        logging.getLogger(f"{_LOG}.result").info("%s at FSC %g, done in %.1f s", reached, job.settings.fsc_criterion, seconds)
        state = folder.last_state()
        folder.end_leg(seconds, done())
        _write_summary(job, folder, command, result, state)
        write_report(folder.path, load_report_data(folder.path))
        folder.event("end", seconds=round(seconds, 2))
        _say_result(folder, result, state, seconds, job)
        return result

    try:
        with remembered():
            return compute()
    except BaseException:
        with suppress(Exception):  # the disk may be what stopped the run
            folder.end_leg(time.perf_counter() - begun, done())
        raise
    finally:
        log.removeHandler(shown)
        if sys.exc_info()[0] is None:  # else the command group still writes the traceback
            log.removeHandler(handler)
            handler.close()


def _write_summary(job: Job, folder: RunFolder, command: str, result: RunResult, state: RunState | None) -> None:
    settings = job.settings
    legs = folder.legs()
    seconds, workers = total_of_legs(legs)
    folder.write_json(
        "summary.json",
        {
            "command": command,
            "particles": settings.particles,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "used": sum(result.half_counts),
            "half_counts": result.half_counts,
            "criterion": settings.fsc_criterion,
            "resolution_angst": result.crossing.resolution_angst if result.crossing.shell > 0 else None,
            "iterations": state.history if state is not None else [],
            "classes": state.history[-1].get("classes", []) if state is not None and state.history else [],
            "converged": has_converged(state.history) if state is not None and state.history else None,
            "score": getattr(settings, "score", "none"),
            "workers": [dataclasses.asdict(worker) for worker in workers],
            "bad": [(job.particles.names[row], reason) for row, reason in sorted(result.bad.items())],
            "warnings": [*job.warnings, *result.warnings],
            "wall_seconds": seconds,
            "resumed": len(legs) - 1,
            "symmetry": settings.symmetry,
            "symmetry_agreement": result.symmetry_agreement,
            "noise": result.noise,
            "noise_groups": job.noise_groups.names,
            "hand": folder.hand(),
            "settings": {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)},
        },
    )


def _say_result(folder: RunFolder, result: RunResult, state: RunState | None, seconds: float, job: Job) -> None:
    crossing = result.crossing
    if result.classes:
        for of_class in result.classes:
            say(f"C{class_text(of_class)[1:]}.")
        change = None if state is None or not state.history else state.history[-1].get("class_change")
        if change is not None:
            say(f"In the last iteration {100 * change:.1f} % of the particles changed their class.")
    elif crossing.shell < 1:
        say("The half-maps do not agree at any resolution: there is no structure to report.")
    else:
        where = "" if crossing.crossed else " (the FSC never falls below the criterion: the pixel size limits it)"
        say(f"Resolution {crossing.resolution_angst:.1f} A at FSC {job.settings.fsc_criterion:g}, corrected for the mask{where}.")
    if crossing.rises_again:
        say("The FSC rises above the criterion again at higher resolution; the first crossing is reported.")
    for line in result.warnings:
        warn(line)
    if result.symmetry_agreement is not None:
        whole, apart = result.symmetry_agreement
        what = "start" if state is not None else "average"
        say(
            f"Symmetry {job.settings.symmetry}: the {what} had it by {whole:.3f} before it was imposed, without its round part by {apart:.3f} (of 1)."
        )
    if state is not None and state.history:
        last = state.history[-1]
        say(f"Median change of the last iteration: {last['angle_change_deg']:.2f} degrees, {last['shift_change_angst']:.2f} A.")
        unclear = f"; {plural(last['ambiguous'], 'particle')} had a second mode at odds of more than 1 to 100" if last.get("ambiguous") else ""
        say(f"Median uncertainty of a pose, along one axis: {last['angle_sigma_deg']:.2f} degrees, {last['shift_sigma_angst']:.2f} A{unclear}.")
        if getattr(job.settings, "until_converged", False):
            reached = "Converged" if has_converged(state.history) else "Not converged"
            say(f"{reached} after {plural(len(state.history), 'iteration')}.")
    if state is not None and state.included is not None:
        text = plural(state.history[-1]["left_out"], "particle")
        say(f"Not in the averages, by --keep-best: {text}, aligned and listed all the same (ngIncluded 0).")
    if result.bad:
        say(f"Left out: {plural(len(result.bad), 'particle')} that cannot be used, listed in the report and in log.txt.")
    legs = folder.legs()
    in_all = f" ({total_of_legs(legs)[0]:.1f} s in all, resumed {plural(len(legs) - 1, 'time')})" if len(legs) > 1 else ""
    say(f"{result.half_counts[0]} + {result.half_counts[1]} particles, {seconds:.1f} s{in_all}.")
    maps = _classes_with_maps(result.classes) if result.classes else "average.mrc, half1.mrc, half2.mrc, fsc.star"
    say(f"Results in {folder.path}: {maps}, {_lists(folder)}, report.html")


def _classes_with_maps(classes: Sequence[ClassResult]) -> str:
    """Folders of the classes that have maps: one with fewer than two particles in a half has none."""
    numbers = [reached.number for reached in classes if reached.fsc is not None]
    if len(numbers) == len(classes):
        return f"class1 to class{len(numbers)} with maps and FSC"
    return f"{', '.join(f'class{number}' for number in numbers) or 'no class'} with maps and FSC"


def _lists(folder: RunFolder) -> str:
    """Names of the particle lists in a run folder."""
    return ", ".join(sorted(path.name for path in folder.path.glob("particles*") if path.name in FILES))


@contextmanager
def new_folder(folder: RunFolder, inputs: list[Path], settings: AlignSettings | AverageSettings) -> Iterator[None]:
    """The folder of a new run, made, held by this process and with its job file; what a run left that finished nothing is replaced."""
    folder.make(inputs)
    with folder.held():
        folder.check_new(inputs)  # again: now nobody else writes there
        if folder.leftovers():
            note(f"{folder.path} holds a run that finished no iteration; it is replaced")
            folder.clear()
        folder.write_job(settings)
        yield


def input_paths(*inputs: str | None) -> list[Path]:
    """The given ones of a run's input files."""
    return [Path(given) for given in inputs if given]
