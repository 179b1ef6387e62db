"""The run folder: what is in it, how it is written, how a run is resumed and reported from it."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import __version__
from .errors import InputError, SettingsError
from .filters import filter_average
from .io import ListFormat, list_formats, read_volume, write_particles, write_volume
from .io.fsc_star import read_fsc_star, write_fsc_star
from .io.optimisation_set import write_optimisation_set
from .io.paths import VolumeFinder, whole_file
from .report import ClassSummary, IterationSummary, ReportData, WorkerSummary
from .resolution import Crossing
from .settings import AlignSettings, AverageSettings, read_job_file, settings_to_toml
from .symmetry import angle_modulo_deg
from .values import FSCCurve, ParticleSet, Poses, Volume

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FILES = {
    "particles.star": "poses, half-sets, scores and uncertainties; columns of the input kept",
    "optimisation_set.star": "names the list and the tomograms file, where particles are stacks of tilt images",
    "particles.xml": "the list in its own format, PyTom's, with the new poses",
    "particles.tbl": "the list in its own format, Dynamo's, with the new poses",
    "particles.em": "the list in its own format, TOM/AV3's, with the new poses",
    "particles_stopgap.star": "the list in its own format, STOPGAP's, with the new poses",
    "half1.mrc": "half-map 1, unfiltered",
    "half2.mrc": "half-map 2, unfiltered",
    "average.mrc": "map of all particles, unfiltered",
    "average_filtered.mrc": "average, weighted by the FSC and cut at the resolution",
    "mask.mrc": "mask of the FSC",
    "fsc.star": "FSC curves",
    "report.html": "this report",
    "job.toml": "every option of the run",
    "provenance.json": "versions, machine, command",
    "log.txt": "what happened",
    "events.jsonl": "the same for programs, a line each",
}

# what a run folder may hold while no iteration is finished
_BEFORE_RESULTS = {"job.toml", "provenance.json", "log.txt", "events.jsonl", "start.npz"}
_OF_ITERATIONS = {
    *(f"{name}{half}.{suffix}" for name, suffix in (("reference", "npy"), ("half", "mrc"), ("start_map", "mrc")) for half in (1, 2)),
    *("start_map.mrc", "average.mrc", "fsc.star", "optimisation_set.star"),
    *(name for name in FILES if name.startswith("particles")),
}
_CLASS_ARRAYS = ("rotations", "shifts_angst", "shares", "margins", "handicap")
_CLASS_PREFIX = re.compile(r"^class[0-9]+_")


@dataclass(slots=True)
class ClassState:
    """Where the particles stand in each class.

    Attributes
    ----------
    rotations : (c, n, 3, 3) float64, shifts_angst : (c, n, 3) float64
        A pose in each class: classes need not share a frame.
    shares : (c, n) float64
        How much of a particle a class holds: 1 for one class (hard), or probabilities (soft); 0 for unusable particles.
    margins : (n,) float64
        Log-likelihood of the best class above the second; NaN where unknown.
    handicap : (c, n) float64
        What noise in the present references adds to a particle's log-likelihood there (docs/scoring.md, 8): taken off before classes are
        compared.
    """

    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    shares: NDArray[np.float64]
    margins: NDArray[np.float64]
    handicap: NDArray[np.float64]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Class of each particle, from 1; 0 for none."""
        return np.where(self.shares.any(0), 1 + np.argmax(self.shares, axis=0), 0)

    @staticmethod
    def same_poses(count: int, poses: Poses) -> ClassState:
        """`count` classes in which the particles have the same poses, all in the first one."""
        shares = np.zeros((count, len(poses)))
        shares[0] = 1.0
        rotations = np.repeat(np.asarray(poses.rotations, np.float64)[None], count, 0)
        shifts = np.repeat(np.asarray(poses.shifts_angst, np.float64)[None], count, 0)
        return ClassState(rotations, shifts, shares, np.full(len(poses), np.nan), np.zeros((count, len(poses))))


@dataclass(slots=True)
class RunState:
    """What an iteration hands to the next one; stored with it, so that a resumed run goes on as if it had never stopped.

    Attributes
    ----------
    iteration : int
        Last finished one.
    poses : Poses
    k_max : float
        Band of the next iteration, 1 / box.
    increment_deg, shift_range_angst : float
        First level of the next iteration's search.
    scores, angle_sigma_deg, shift_sigma_angst, log_likelihood : (n,) float64
        Per particle; NaN for unusable ones.
    bad : dict of row to reason
    history : list of dict
        One record per iteration, as shown.
    scale : float
        Factor of the start map.
    symmetry_agreement : (float, float) or None
        Of the start map; see `symmetry.symmetry_agreement`.
    margin : (n,) float64 or None
        Log-likelihood above the best other mode of the last search, at most `passes.NO_OTHER_MODE`; None before the first.
    included : (n,) bool or None
        Which particles the averages are made of; None: all that can be used.
    gains : dict of half to floats
        Scales of the noise groups' signals; empty: all 1.
    classes : ClassState or None
        Where there are several; `poses` and all else per particle are then those of its class.
    """

    iteration: int
    poses: Poses
    k_max: float
    increment_deg: float
    shift_range_angst: float
    scores: NDArray[np.float64]
    angle_sigma_deg: NDArray[np.float64]
    shift_sigma_angst: NDArray[np.float64]
    log_likelihood: NDArray[np.float64]
    bad: dict[int, str]
    history: list[dict[str, Any]]
    scale: float = 1.0
    symmetry_agreement: tuple[float, float] | None = None
    margin: NDArray[np.float64] | None = None
    included: NDArray[np.bool_] | None = None
    gains: dict[int, tuple[float, ...]] = field(default_factory=dict)
    classes: ClassState | None = None


@dataclass(frozen=True, slots=True)
class ClassResult:
    """What one of several classes reached.

    Attributes
    ----------
    number : int
        From 1 on.
    half_counts : (int, int)
        Particles whose class it is, of each half.
    share : float
        Of all usable particles.
    fsc : FSCCurve or None
        None where a half has fewer than two particles: there are no maps then.
    crossing : Crossing or None
    """

    number: int
    half_counts: tuple[int, int]
    share: float
    fsc: FSCCurve | None
    crossing: Crossing | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run reached.

    Attributes
    ----------
    fsc : FSCCurve
    crossing : Crossing
        Of the corrected curve at the run's criterion.
    bad : dict of row to reason
    half_counts : (int, int)
        Particles in each average.
    warnings : tuple of str
        Why the result may not be what it seems, one line each.
    symmetry_agreement : (float, float) or None
        How well the start (or the average) has the symmetry before it is imposed; see `symmetry.symmetry_agreement`. None for C1.
    noise : dict of half (as text) to lists
        `noise.noise_facts` of its groups; None where none was fitted.
    classes : tuple of ClassResult
        Where there are several; `fsc` and `crossing` are then those of the best resolved one, `half_counts` of all.
    """

    fsc: FSCCurve
    crossing: Crossing
    bad: dict[int, str]
    half_counts: tuple[int, int]
    warnings: tuple[str, ...] = ()
    symmetry_agreement: tuple[float, float] | None = None
    noise: dict[str, list[list[float]]] | None = None
    classes: tuple[ClassResult, ...] = ()


class RunFolder:
    """One run's files. Each appears whole or not at all.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_new(self, inputs: list[Path]) -> None:
        """Refuses a folder that cannot be a new run's: one that is not empty, unless all it holds is a run that finished nothing.

        Raises
        ------
        SettingsError
            The folder holds another run, or is (in) the way of an input.
        """
        for given in inputs:
            if given.resolve() == self.path.resolve():
                raise SettingsError(f"--output {self.path} is an input of this run; expected another folder")
        if self.path.exists() and not self.path.is_dir():
            raise SettingsError(f"--output {self.path}: expected a folder, found a file")
        leftovers = [path.resolve() for path in self.leftovers()]
        for given in inputs:
            if any(given.resolve().is_relative_to(path) for path in leftovers):
                raise SettingsError(f"--output {self.path}: {given} in it is an input of this run; expected another folder")
        if self.path.exists() and any(path.name != ".lock" for path in self.path.iterdir()) and not leftovers:
            hint = ""
            if self._holds_align():
                hint = (
                    "; --resume goes on with the run in it"
                    if self.last_state()
                    else "; --resume begins again the run in it, which finished no iteration"
                )
            raise SettingsError(f"--output {self.path} is not empty; expected a new folder{hint}")

    def leftovers(self) -> list[Path]:
        """Files and folders of a run that ended before its first result: nothing in them is worth keeping. Empty where there is anything else."""
        if not (self.path / "provenance.json").is_file():
            return []
        found = [path for path in self.path.iterdir() if path.name != ".lock"]
        started = all(path.name in _BEFORE_RESULTS or path.name.endswith(".part") for path in found if path.is_file())
        folders = [path for path in found if not path.is_file()]
        unfinished = all(
            path.name in ("iter_000", "iter_001")
            and not path.is_symlink()
            and all(_CLASS_PREFIX.sub("", file.name) in _OF_ITERATIONS or file.name.endswith(".part") for file in path.iterdir())
            for path in folders
        )
        return found if started and unfinished else []

    def clear(self) -> None:
        """Removes `leftovers`; the caller holds the folder."""
        for path in self.leftovers():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _holds_align(self) -> bool:
        """Whether the folder is that of an `align` run: one that --resume takes."""
        try:
            read_job_file(self.path / "job.toml")
        except SettingsError:
            return False
        return True

    def make(self, inputs: list[Path]) -> None:
        """Makes the folder.

        Raises
        ------
        SettingsError
            As `check_new`.
        InputError
            The folder cannot be made.
        """
        self.check_new(inputs)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"--output {self.path}: cannot be made ({problem.strerror})") from None

    def create(self, settings: AlignSettings | AverageSettings, inputs: list[Path]) -> None:
        """`make` and `write_job`."""
        self.make(inputs)
        self.write_job(settings)

    @contextmanager
    def held(self) -> Iterator[None]:
        """This process works in the folder, and no other does.

        The lock is advisory, on ``.lock``, and ends with the process however that ends; the file may stay. Where the system or
        the disk knows no locks nothing is held.

        Raises
        ------
        SettingsError
            Another process holds it.
        """
        if fcntl is None:
            yield
            return
        with open(self.path / ".lock", "a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip()
                raise SettingsError(
                    f"{self.path}: another run is at work in this folder{f' ({holder})' if holder else ''}; expected it to end or be stopped first"
                ) from None
            except OSError:
                pass  # a disk without locks
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n")
            lock.flush()
            yield

    def write_job(self, settings: AlignSettings | AverageSettings) -> None:
        """Writes ``job.toml``."""
        self.write_text("job.toml", settings_to_toml(settings))

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file."""
        with whole_file(self.path / name) as handle:
            handle.write(text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Writes a JSON file."""
        self.write_text(name, json.dumps(value, indent=1, sort_keys=True, default=_plain) + "\n")

    def event(self, kind: str, **facts: Any) -> None:
        """Appends a line to ``events.jsonl``."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts}, default=_plain)
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as handle:
            handle.write(line + "\n")

    def hand(self) -> list[tuple[str, bool]]:
        """What --check-hand has said of each start map, and whether the particles have its hand; empty where it was not asked."""
        found = []
        with suppress(OSError):
            for line in (self.path / "events.jsonl").read_text(encoding="utf-8").splitlines():
                if '"event": "hand"' in line:
                    with suppress(ValueError, KeyError):  # an incomplete line, or one of an earlier version
                        event = json.loads(line)
                        found.append((str(event["verdict"]), bool(event["right"])))
        return found

    def iteration_folder(self, iteration: int) -> Path:
        """``iter_001`` and so on."""
        return self.path / f"iter_{iteration:03d}"

    def begin_leg(self) -> None:
        """Writes versions, machine and command; those of the run's earlier legs (before it was resumed) stay in the list ``commands``."""
        packages = {}
        for name in ("numpy", "numba", "scipy", "pyfftw", "mrcfile", "click"):
            try:
                packages[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                packages[name] = "?"
        leg: dict[str, Any] = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d %H:%M:%S"), "wall_seconds": None, "workers": []}
        self.write_json(
            "provenance.json",
            {
                "program": f"numba-glocal {__version__}",
                "command": leg["command"],
                "commands": [*self.legs(), leg],
                "folder": os.getcwd(),  # relative names of job.toml start here
                "python": platform.python_version(),
                "system": platform.platform(),
                "cores": os.cpu_count(),
                "packages": packages,
                "date": leg["date"],
            },
        )

    def end_leg(self, wall_seconds: float, workers: list[WorkerSummary]) -> None:
        """Adds to the last leg how long it took and what its workers did, however it ended."""
        provenance = self._provenance()
        provenance["commands"][-1] |= {"wall_seconds": round(wall_seconds, 2), "workers": [asdict(worker) for worker in workers]}
        self.write_json("provenance.json", provenance)

    def legs(self) -> list[dict[str, Any]]:
        """What the run was started and resumed by: ``command``, ``date``, ``wall_seconds`` (None where it was killed), ``workers``."""
        provenance = self._provenance()
        if "commands" not in provenance and "command" in provenance:  # as earlier versions wrote it
            return [{key: provenance.get(key) for key in ("command", "date", "wall_seconds")} | {"workers": []}]
        legs: list[dict[str, Any]] = provenance.get("commands", [])
        return legs

    def _provenance(self) -> dict[str, Any]:
        try:
            provenance = json.loads((self.path / "provenance.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return provenance if isinstance(provenance, dict) else {}

    def started_in(self) -> Path | None:
        """The folder that the run was started in, where that is known and still there."""
        try:
            folder = Path(self._provenance()["folder"])
        except (KeyError, TypeError):
            return None
        return folder if folder.is_dir() else None

    def is_complete(self, state: RunState) -> bool:
        """Whether the results at the top of the folder are those of `state`: the summary, written behind them, counts its iterations."""
        try:
            return len(json.loads((self.path / "summary.json").read_text(encoding="utf-8"))["iterations"]) >= state.iteration
        except (OSError, ValueError, KeyError, TypeError):
            return False

    # -- iterations --------------------------------------------------------------------------------------------------

    def check_unfinished(self, state: RunState, iterations: int) -> None:
        """Refuses to go on with a run that has all its iterations and results.

        Raises
        ------
        SettingsError
            `state` is not before the last of `iterations`, and nothing else is missing.
        """
        if state.iteration > iterations or (state.iteration == iterations and self.is_complete(state)):
            converged = bool(state.history) and bool(state.history[-1].get("settled", False))
            hint = "; a run that has converged goes on with --no-until-converged" if converged else ""
            raise SettingsError(f"{self.path} already has {state.iteration} finished iterations; expected more --iterations to go on{hint}")

    def class_folder(self, number: int) -> Path:
        """Results of one of several classes: ``class1`` and so on."""
        return self.path / f"class{number}"

    def write_maps(
        self, folder: Path, half_maps: tuple[NDArray[np.float32], NDArray[np.float32]], fsc: FSCCurve, criterion: float, prefix: str = ""
    ) -> None:
        """Half-maps and FSC of an iteration or of the run."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, half_map in enumerate(half_maps, 1):
            write_volume(folder / f"{prefix}half{number}.mrc", Volume(half_map, fsc.pixel_size_angst))
        write_fsc_star(folder / f"{prefix}fsc.star", fsc, criterion)

    def write_particles(self, folder: Path, particles: ParticleSet, state: RunState) -> None:
        """The list with new poses, scores and uncertainties: as RELION's, and in its own format too where that is another.

        An unusable particle keeps its pose and gets the worst values, so that it is last however the list is sorted: the
        lowest score and likelihood of the usable ones, a rotation known to 180 degrees and a shift to half the box.
        """

        def lowest(values: NDArray[np.float64]) -> float:
            return float(np.min(values[np.isfinite(values)], initial=np.inf))

        half_box_angst = 0.5 * particles.box_size * particles.pixel_size_angst
        columns = {
            "ngScore": (state.scores, lowest(state.scores)),
            "ngAngleSigmaDeg": (state.angle_sigma_deg, 180.0),
            "ngShiftSigmaAngst": (state.shift_sigma_angst, half_box_angst),
            "rlnLogLikeliContribution": (state.log_likelihood, lowest(state.log_likelihood)),
        }
        if state.margin is not None:
            columns["ngModeMargin"] = state.margin, 0.0
        # what a run knows nothing of (`average` scores nothing) stays as the list has it
        known = {name: np.where(np.isfinite(values), values, worst) for name, (values, worst) in columns.items() if np.isfinite(values).any()}
        included = np.ones(len(particles), np.int64) if state.included is None else state.included.astype(np.int64)
        included[list(state.bad)] = 0
        known["ngIncluded"] = included  # of every list, so that none keeps what an earlier run had left out
        cut = particles.cut_from is not None
        particles = particles.with_poses(state.poses)
        if particles.cut_from is not None:
            if not np.isfinite(particles.cut_from.listed.pixel_size_angst):  # origins in voxels would be read in nobody knows what
                known["rlnPixelSize"] = np.full(len(particles), particles.pixel_size_angst)
            particles = particles.as_listed()
        if state.classes is not None:
            margins = state.classes.margins
            known["ngClass"] = known["rlnClassNumber"] = state.classes.numbers
            known["ngClassMargin"] = np.where(np.isfinite(margins), margins, 0.0)
            particles = replace(particles, classes=state.classes.numbers.astype(np.int32))  # for formats without such columns
        own = list_format_of(particles)
        if own is None:
            write_particles(folder / "particles.star", particles, known)
            if particles.stacks is not None and particles.stacks.tomograms_path is not None:
                write_optimisation_set(folder / "optimisation_set.star", folder / "particles.star", particles.stacks.tomograms_path)
            return
        name = "particles_stopgap.star" if own.suffixes == (".star",) else f"particles{own.suffixes[0]}"
        write_particles(folder / name, particles, known, to=own.key)
        write_particles(folder / "particles.star", particles if cut else _for_relion(folder, particles), known, to="relion")

    def write_start(self, particles: ParticleSet, binned_box_size: int) -> None:
        """What the run began from, for the report and to know it again."""
        with whole_file(self.path / "start.npz") as handle:
            np.savez(
                handle,
                rotations=particles.poses.rotations,
                shifts_angst=particles.poses.shifts_angst,
                half=particles.half,
                names=np.array(particles.names),
                binned_box_size=binned_box_size,
            )

    def changed_since_start(self, particles: ParticleSet, binned_box_size: int) -> str:
        """What is not as it was when the run began, in words; empty where all is: particles, poses, half-sets, worked box."""
        with np.load(self.path / "start.npz") as start:
            if "names" not in start:
                return "the form of run folders has changed"
            poses = particles.poses
            same = np.array_equal(start["rotations"], poses.rotations) and np.array_equal(start["shifts_angst"], poses.shifts_angst)
            if not same or not np.array_equal(start["names"], np.array(particles.names)):
                return "the particle list has changed"
            if not np.array_equal(start["half"], particles.half):
                return "the half-sets have changed, and halves that were mixed are not independent any more"
            if int(start["binned_box_size"]) != binned_box_size:
                return f"the worked box was {int(start['binned_box_size'])} voxels and is {binned_box_size} (--binning)"
        return ""

    def write_state(self, state: RunState) -> None:
        """The last file of an iteration: with it the iteration is finished."""
        folder = self.iteration_folder(state.iteration)
        folder.mkdir(parents=True, exist_ok=True)
        classes = {} if state.classes is None else {f"class_{name}": getattr(state.classes, name) for name in _CLASS_ARRAYS}
        with whole_file(folder / "state.npz") as handle:
            np.savez(
                handle,
                **classes,
                rotations=state.poses.rotations,
                shifts_angst=state.poses.shifts_angst,
                scores=state.scores,
                angle_sigma_deg=state.angle_sigma_deg,
                shift_sigma_angst=state.shift_sigma_angst,
                log_likelihood=state.log_likelihood,
                margin=np.full(len(state.scores), np.nan) if state.margin is None else state.margin,
                included=np.ones(0, bool) if state.included is None else state.included,
                facts=np.array(
                    json.dumps(
                        {
                            "iteration": state.iteration,
                            "k_max": state.k_max,
                            "increment_deg": state.increment_deg,
                            "shift_range_angst": state.shift_range_angst,
                            "bad": {str(k): v for k, v in state.bad.items()},
                            "history": state.history,
                            "scale": state.scale,
                            "symmetry_agreement": state.symmetry_agreement,
                            "gains": {str(half): gains for half, gains in state.gains.items()},
                        },
                        default=_plain,
                    )
                ),
            )

    def last_state(self) -> RunState | None:
        """State after the last finished iteration; None when none is."""
        found = sorted(self.path.glob("iter_*/state.npz"), key=lambda path: (len(path.parent.name), path.parent.name))
        if not found:
            return None
        try:
            return self._read_state(found[-1])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            before = f"; without the folder {found[-1].parent} the run goes on from the iteration before" if len(found) > 1 else ""
            raise InputError(f"{found[-1]}: expected the state of an iteration, found a damaged file{before}") from None

    @staticmethod
    def _read_state(path: Path) -> RunState:
        with np.load(path) as stored:
            facts = json.loads(str(stored["facts"]))
            return RunState(
                facts["iteration"],
                Poses(stored["rotations"], stored["shifts_angst"]),
                facts["k_max"],
                facts["increment_deg"],
                facts["shift_range_angst"],
                stored["scores"],
                stored["angle_sigma_deg"],
                stored["shift_sigma_angst"],
                stored["log_likelihood"],
                {int(k): v for k, v in facts["bad"].items()},
                facts["history"],
                facts["scale"],
                tuple(facts["symmetry_agreement"]) if facts.get("symmetry_agreement") else None,
                stored["margin"],
                stored["included"] if len(stored["included"]) else None,
                {int(half): tuple(gains) for half, gains in facts.get("gains", {}).items()},
                ClassState(*(stored[f"class_{name}"] for name in _CLASS_ARRAYS)) if "class_shares" in stored else None,
            )

    def write_final(
        self,
        particles: ParticleSet,
        state: RunState,
        half_maps: tuple[NDArray[np.float32], NDArray[np.float32]],
        average: NDArray[np.float32],
        fsc: FSCCurve,
        mask: NDArray[np.float32],
        criterion: float,
    ) -> None:
        """The results at the top of the folder."""
        self.write_averages(self.path, half_maps, average, fsc, criterion)
        write_volume(self.path / "mask.mrc", Volume(mask, fsc.pixel_size_angst))
        self.write_particles(self.path, particles, state)

    def write_averages(
        self, folder: Path, half_maps: tuple[NDArray[np.float32], NDArray[np.float32]], average: NDArray[np.float32], fsc: FSCCurve, criterion: float
    ) -> None:
        """Final maps, of the run or of a class."""
        self.write_maps(folder, half_maps, fsc, criterion)
        write_volume(folder / "average.mrc", Volume(average, fsc.pixel_size_angst))
        write_volume(folder / "average_filtered.mrc", Volume(filter_average(average, fsc, criterion), fsc.pixel_size_angst))


def list_format_of(particles: ParticleSet) -> ListFormat | None:
    """The format a list came in where that is not RELION's (or a simulation, which has none)."""
    key = getattr(particles.source, "format_key", "relion")
    return None if key == "relion" else next((f for f in list_formats() if f.key == key and f.write is not None), None)


def _for_relion(folder: Path, particles: ParticleSet) -> ParticleSet:
    """The particles under names by which a list in `folder` finds them, their own or absolute ones."""
    finder = VolumeFinder(folder / "particles.star")
    found = finder.find(particles.names[0])
    if found is not None and found.resolve() == particles.volume_paths[0].resolve():
        return particles
    return replace(particles, names=tuple(str(path.absolute()) for path in particles.volume_paths))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


def total_of_legs(legs: list[dict[str, Any]]) -> tuple[float, list[WorkerSummary]]:
    """Wall seconds of all legs of a run, and what the workers of the same name and device did in all of them; where that is known."""
    workers: dict[tuple[str, str], WorkerSummary] = {}
    for leg in legs:
        for stored in leg["workers"]:
            worker = WorkerSummary(**stored)
            before = workers.get((worker.name, worker.device), WorkerSummary(worker.name, worker.device, 0, 0.0))
            workers[worker.name, worker.device] = replace(
                before, particles=before.particles + worker.particles, busy_seconds=before.busy_seconds + worker.busy_seconds
            )
    return sum(leg["wall_seconds"] or 0.0 for leg in legs), list(workers.values())


def _shown_provenance(folder: RunFolder) -> dict[str, Any]:
    """Provenance as rows of the report; of a run that was resumed a row for each command."""
    provenance, legs = folder._provenance(), folder.legs()
    rows = {key: value for key, value in provenance.items() if not isinstance(value, dict | list)}
    if len(legs) > 1:
        for key in ("command", "date", "wall_seconds"):
            rows.pop(key, None)
        for number, leg in enumerate(legs, 1):
            took = "killed" if leg["wall_seconds"] is None else f"{leg['wall_seconds']:.1f} s"
            rows[f"command {number}"] = f"{leg['command']} ({leg['date']}, {took})"
    return rows | provenance.get("packages", {})


def load_report_data(run: Path) -> ReportData:
    """What the report of a run shows, from its folder alone.

    Raises
    ------
    InputError
        The folder holds no finished iteration.
    """
    folder = RunFolder(run)
    facts_path = run / "summary.json"
    if not facts_path.exists():
        raise InputError(f"{run}: expected the folder of a finished run (summary.json), found none")
    facts = json.loads(facts_path.read_text())
    maps: dict[str, Any] = {}
    for field_name, name in (("half1", "half1"), ("half2", "half2"), ("average", "average"), ("filtered", "average_filtered")):
        if (run / f"{name}.mrc").exists():
            maps[field_name] = read_volume(run / f"{name}.mrc")
    state = folder.last_state()
    classes = [_class_summary(folder.class_folder(record["number"]), record) for record in facts.get("classes", [])]
    optional: dict[str, Any] = {}
    settings = read_job_file(run / "job.toml") if facts["command"] == "align" else facts.get("settings", {})
    symmetry = settings.get("symmetry", "C1")
    if state is not None and np.isfinite(state.scores).any():
        keep = np.isfinite(state.scores)
        optional["scores"] = state.scores[keep]
        optional["rotations"] = state.poses.rotations[keep]
        first = run / "start.npz"
        if first.exists():
            with np.load(first) as start:
                optional["angle_changes_deg"] = angle_modulo_deg(start["rotations"], state.poses.rotations, symmetry)[keep]
                optional["shift_changes_angst"] = np.linalg.norm(start["shifts_angst"] - state.poses.shifts_angst, axis=1)[keep]
    return ReportData(
        title=f"numba-glocal {facts['command']}: {Path(facts['particles']).name}",
        subtitle=str(facts["date"]),
        particle_count=facts["used"],
        half_counts=tuple(facts["half_counts"]),
        criterion=facts["criterion"],
        fsc=read_fsc_star(run / "fsc.star") if (run / "fsc.star").exists() else None,
        iterations=[IterationSummary(**record) for record in facts["iterations"]],
        score_name=facts["score"],
        workers=[WorkerSummary(**worker) for worker in facts["workers"]],
        bad_particles=[tuple(pair) for pair in facts["bad"]],
        warnings=facts["warnings"],
        wall_seconds=facts["wall_seconds"],
        files=_present_files(run, classes),
        settings=settings,
        resumed=facts.get("resumed", 0),
        symmetry=symmetry,
        symmetry_agreement=facts.get("symmetry_agreement"),
        noise=facts.get("noise"),
        noise_groups=facts.get("noise_groups", ()),
        hand=[(verdict, right) for verdict, right in facts.get("hand", ())],
        converged=facts.get("converged"),
        classes=classes,
        provenance=_shown_provenance(folder),
        **maps,
        **optional,
    )


def _class_summary(folder: Path, record: dict[str, Any]) -> ClassSummary:
    """A class as its folder has it; without maps where it has none."""
    fsc = read_fsc_star(folder / "fsc.star") if (folder / "fsc.star").exists() else None
    average = read_volume(folder / "average_filtered.mrc") if (folder / "average_filtered.mrc").exists() else None
    return ClassSummary(record["number"], tuple(record["half_counts"]), record["share"], fsc, average)


def _present_files(run: Path, classes: list[ClassSummary]) -> dict[str, str]:
    """Files of a run and what they are."""
    files = {name: what for name, what in FILES.items() if (run / name).exists() or name == "report.html"}
    of_classes = {
        f"class{reached.number}/": f"half1.mrc, half2.mrc, average.mrc, average_filtered.mrc and fsc.star of class {reached.number}"
        for reached in classes
        if reached.fsc is not None
    }
    return of_classes | files


def finite_or_none(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None
