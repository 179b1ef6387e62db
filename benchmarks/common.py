"""What the benchmarks share: timing with warm-up apart, results as JSON, the data they need, and the prototype they are compared with."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "numba", "scipy", "pyfftw", "threadpoolctl")
GPU_PACKAGES = ("numba-cuda", "nvidia-cublas-cu12", "nvidia-cublas", "cupy-cuda12x", "cupy-cuda13x", "nvidia-ml-py")

# The program where no script of it is installed, or only the library: `cli/` beside this folder is taken.
_PROGRAM = """
import importlib.util, sys
try:
    from numba_glocal.cli import main
except ImportError:
    folder = {folder!r}
    spec = importlib.util.spec_from_file_location("numba_glocal.cli", folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules["numba_glocal.cli"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main = module.main
main()
"""
_SIMULATE = """
import sys
from pathlib import Path
from numba_glocal.simulation import SimulationSettings, simulate
folder, count, box, pixel, snr, seed = sys.argv[1:]
settings = SimulationSettings(int(count), int(box), float(pixel), float(snr), perturb_deg=4.0, shift_angst=float(pixel), seed=int(seed))
simulate(Path(folder), settings)
"""


def shared_folder() -> Path | None:
    """The folder with data, simulator and prototypes (`NUMBA_GLOCAL_SHARED`, else `../shared`); None where it is absent."""
    folder = Path(os.environ.get("NUMBA_GLOCAL_SHARED", ROOT.parent / "shared"))
    return folder if (folder / "data").is_dir() else None


def need_shared() -> Path:
    """As `shared_folder`; leaves with a message where it is absent."""
    folder = shared_folder()
    if folder is None:
        print(f"skipped: no shared folder at {ROOT.parent / 'shared'} (set NUMBA_GLOCAL_SHARED)")
        sys.exit(0)
    return folder


def pin_to_one_core() -> int | None:
    """Keeps this process on one of its cores and its libraries at one thread; returns the core."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def compare(variants: dict[str, Callable[[], Any]], repeats: int, warm_up: bool = True) -> dict[str, dict[str, Any]]:
    """Seconds of several functions that are run in turn, so that a disturbance of the machine meets all of them.

    Parameters
    ----------
    variants : dict of name to function
    repeats : int
    warm_up : bool
        One call of each first, timed apart (it compiles, plans and fills caches).

    Returns
    -------
    dict of name to {"first_s", "min_s", "median_s", "repeats"}
    """
    first: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name, function in variants.items() if warm_up else ():
        begun = time.perf_counter()
        function()
        first[name] = time.perf_counter() - begun
    for _ in range(repeats):
        for name, function in variants.items():
            begun = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begun)
    return {
        name: {"first_s": first.get(name), "min_s": min(times), "median_s": statistics.median(times), "repeats": repeats}
        for name, times in seconds.items()
    }


@dataclass
class Watched:
    """What was seen of one process.

    Attributes
    ----------
    command : str
    peak_bytes : int
        High-water mark of resident memory, by the kernel's own account.
    cpu_s : float
    """

    command: str
    peak_bytes: int = 0
    cpu_s: float = 0.0


class Watch:
    """Calls `look` every `EVERY_S` seconds from a thread, from entering a `with` block to leaving it."""

    EVERY_S: float

    def look(self) -> None:
        """Reads once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.EVERY_S):
            self.look()


@dataclass
class TreeWatch(Watch):
    """Memory and CPU seconds of a process and all its descendants, read from `/proc` every 30 ms while in its `with` block.

    Attributes
    ----------
    processes : dict of pid to Watched
    cpu_at : list of (time.time(), CPU seconds of the whole tree so far)
    """

    root: int
    processes: dict[int, Watched] = field(default_factory=dict)
    cpu_at: list[tuple[float, float]] = field(default_factory=list)
    EVERY_S = 0.03

    def cpu_between(self, begin: float, end: float) -> float:
        """CPU seconds between two times (`time.time()`), linear between the readings."""

        def at(moment: float) -> float:
            before = [entry for entry in self.cpu_at if entry[0] <= moment]
            after = [entry for entry in self.cpu_at if entry[0] > moment]
            if not before or not after:
                return (before or after)[-1 if before else 0][1] if self.cpu_at else 0.0
            (t0, c0), (t1, c1) = before[-1], after[0]
            return c0 + (c1 - c0) * (moment - t0) / (t1 - t0)

        return at(end) - at(begin)

    def look(self) -> None:
        """Reads once."""
        waiting = [self.root]
        while waiting:
            pid = waiting.pop()
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # after the name in parentheses: state is field 3, utime and stime are 14 and 15
                numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                status = Path(f"/proc/{pid}/status").read_text()
                for task in Path(f"/proc/{pid}/task").iterdir():
                    waiting += [int(child) for child in (task / "children").read_text().split()]
            except OSError:  # it has just ended
                continue
            seen = self.processes.setdefault(pid, Watched(command))
            seen.command = command or seen.command
            seen.cpu_s = max(seen.cpu_s, (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK"))
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    seen.peak_bytes = max(seen.peak_bytes, int(line.split()[1]) * 1024)
        self.cpu_at.append((time.time(), sum(seen.cpu_s for seen in self.processes.values())))


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def vector_width() -> str:
    """Widest vector instructions, as far as the system tells."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    return next((name for name, flag in (("AVX-512", " avx512f"), ("AVX2", " avx2"), ("SSE", " sse2")) if flag in flags), "unknown")


def gpu_names() -> list[str]:
    """Names of this machine's GPUs, as the driver tells them."""
    from numba_glocal.devices import survey_gpus

    return [gpu.name for gpu in survey_gpus().gpus]


def need_gpus(count: int = 1) -> None:
    """Leaves with a message where this machine has fewer GPUs."""
    found = len(gpu_names())
    if found < count:
        print(f"skipped: {count} GPU(s) needed, {found} found")
        sys.exit(0)


def git_commit() -> str:
    """Commit of the working tree, with a plus sign where the package differs from it."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "numba_glocal", "cli"], cwd=ROOT).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def environment() -> dict[str, Any]:
    """Where and with what a benchmark ran."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES + GPU_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "processor": processor(),
        "vectors": vector_width(),
        "gpus": gpu_names(),
        "cores_of_machine": os.cpu_count(),
        "cores_used": affinity,
        "load_average_at_start": round(load, 2),
        "versions": versions,
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        # names of folders, not where they lie here
        "command": " ".join(
            ["python", os.path.relpath(sys.argv[0], ROOT), *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]
        ),
    }


def write_results(
    name: str, rows: Sequence[dict[str, Any]], about: dict[str, Any], notes: str, folder: Path = RESULTS, more: dict[str, Any] | None = None
) -> Path:
    """Stores ``{"environment", "notes", "rows"}`` as ``<name>.json``, whole or not at all.

    Parameters
    ----------
    name : str
    rows : sequence of dict
        Tidy: one measurement each.
    about : dict
        `environment`, taken when the benchmark began.
    notes : str
        How it was measured, in a sentence or two.
    folder : Path
    more : dict, optional
        What stands beside the rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".part")
    content = {"name": name, "environment": about, "notes": notes, "rows": [_rounded(row) for row in rows], **_rounded(more or {})}
    text = json.dumps(content, indent=1)
    temporary.write_text(text + "\n")
    temporary.replace(path)
    return path


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def markdown(head: list[str], rows: list[list[str]], texts: int = 1) -> str:
    """A table; the first `texts` columns to the left, numbers to the right."""
    align = [*["---"] * texts, *["---:"] * (len(head) - texts)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, align, *rows))


def duration(seconds: float) -> str:
    """Seconds with three digits and a unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1.0 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def times(ratio: float) -> str:
    """A ratio, two digits."""
    return f"{ratio:.2g} x" if ratio < 10 else f"{ratio:.0f} x"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows, one a line."""
    for row in rows:
        print("  ".join(f"{key} {_rounded(value)}" for key, value in row.items()), flush=True)


def prototype_functions(shared: Path, names: Sequence[str]) -> dict[str, Any]:
    """Functions of the whole-loop prototype, compiled as they stand there; the rest of that script is not run.

    Parameters
    ----------
    shared : Path
    names : sequence of str
        Top-level functions, callees first.
    """
    import numba
    import numpy

    path = shared / "design" / "prototypes" / "cpu_whole_loop.py"
    tree = ast.parse(path.read_text())
    wanted: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    space: dict[str, Any] = {"np": numpy, "nb": numba}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    return {name: space[name] for name in names}


MADE_SETS = {
    "setA": "--n 100 --box 64 --snr 0.05 --ctf --seed 3",
    "snr002": "--n 30 --box 64 --snr 0.02 --ctf --seed 11",
    "snr001": "--n 30 --box 64 --snr 0.01 --ctf --seed 12",
    "onesided": "--n 30 --box 64 --snr 0.05 --ctf --tilt-min -40 --tilt-max 60 --seed 13",
    "noctf": "--n 30 --box 64 --snr 0.05 --seed 14",
    "box65": "--n 30 --box 65 --snr 0.05 --ctf --seed 15",
}
"""Options of the independent simulator: ribosomes with known poses, in boxes of 6.8 A voxels, tilts to 60 degrees unless they say else."""


def make_set(folder: Path, shared: Path, name: str = "setA") -> None:
    """Simulates one of `MADE_SETS` where it is not there yet (about a minute)."""
    if (folder / "start.star").is_file() and (folder / "truth.star").is_file():
        return
    tool, source = shared / "tools" / "make_dataset.py", shared / "data" / "maps" / "ribo.em"
    options = f"--scale 1.5625 --invert --angpix 6.8 {MADE_SETS[name]}".split()
    print(f"making {folder} ..", flush=True)
    subprocess.run([sys.executable, str(tool), str(folder), "--map", str(source), *options], check=True, stdout=subprocess.DEVNULL)


def program() -> list[str]:
    """The installed `numba-glocal` of this Python, as the start of a command."""
    beside = Path(sys.executable).with_name("numba-glocal")
    found = str(beside) if beside.is_file() else shutil.which("numba-glocal")
    return [found] if found is not None else [sys.executable, "-c", _PROGRAM.format(folder=str(ROOT / "cli"))]


def make_particles(folder: Path, count: int, box_size: int, pixel_size_angst: float = 6.8, snr: float = 0.05) -> float:
    """`count` simulated particles with a wedge: ``start.star`` (poses about 4 degrees and a voxel off) and ``reference.mrc``.

    Each core simulates a part, with a seed of its own; the list names them all.

    Returns
    -------
    float
        Seconds that took.
    """
    begun = time.perf_counter()
    parts = max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 16, count // 8))
    sizes = [count // parts + (i < count % parts) for i in range(parts)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _SIMULATE, str(folder / f"part{i}"), *map(str, (size, box_size, pixel_size_angst, snr, i + 1))], env=environment
        )
        for i, size in enumerate(sizes)
    ]
    if any(process.wait() for process in started):
        raise RuntimeError("the particles could not be made")
    head, rows = [], []
    for i in range(parts):
        for line in (folder / f"part{i}" / "start.star").read_text().splitlines():
            if "subtomo/" in line:
                rows.append(line.replace("subtomo/", f"part{i}/subtomo/"))
            elif i == 0 and line.strip():
                head.append(line)
    (folder / "start.star").write_text("\n".join([*head, *rows]) + "\n\n")
    shutil.copy(folder / "part0" / "reference.mrc", folder / "reference.mrc")
    return time.perf_counter() - begun


@dataclass
class Run:
    """One run of `align`.

    Attributes
    ----------
    wall_s : float
        Of the whole program.
    started : float
        `time.time()` at its start.
    events : list of dict
        Its ``events.jsonl``.
    """

    wall_s: float
    started: float
    events: list[dict[str, Any]]

    def ready_s(self) -> float:
        """Seconds from the start of the program until the last worker was ready."""
        return max(event["time"] for event in self.events if event["event"] == "ready") - self.started

    def summary(self, output: Path) -> dict[str, Any]:
        """Its seconds, whole and of each iteration, and a digest of the maps that it left in `output`."""
        seconds = [round(row["seconds"], 3) for row in self.iterations()]
        return {"wall_s": self.wall_s, "workers_ready_s": self.ready_s(), "iteration_s": seconds, "maps": maps_digest(output)}

    def iterations(self) -> list[dict[str, Any]]:
        """Seconds of each iteration and of its stages; `rest_s` is the parent's own: maps, FSC, files."""
        rows: list[dict[str, Any]] = []
        stages: dict[str, float] = {}
        for event in self.events:
            if event["event"] == "stage":
                title = event["title"].removeprefix(f"iteration {len(rows) + 1}: ")
                kind = next((kind for kind in ("noise", "average", "refine") if kind in title), "align")
                if not title.startswith("start"):
                    stages[f"{kind}_s"] = stages.get(f"{kind}_s", 0.0) + event["seconds"]
            elif event["event"] == "iteration":
                rest = event["seconds"] - sum(stages.values())
                rows.append({"iteration": event["number"], "seconds": event["seconds"], **stages, "rest_s": rest, "band_angst": event["band_angst"]})
                stages = {}
        return rows


def run_align(data: Path, output: Path, options: Sequence[str], jit_cache: Path | None = None, more: dict[str, str] | None = None) -> Run:
    """Runs `numba-glocal align` on a set of `make_particles`; an error of the program is raised with its last words."""
    variables = dict(os.environ, **(more or {}))
    if program()[0] == sys.executable:  # no script is installed; beside one this folder would hide the installed package, which alone has the CLI
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")])
    if jit_cache is not None:
        variables["NUMBA_CACHE_DIR"] = str(jit_cache)
    command = [*program(), "align", str(data / "start.star"), "--reference", str(data / "reference.mrc"), "-o", str(output), "--quiet", *options]
    started = time.time()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    wall = time.time() - started
    if done.returncode:
        raise RuntimeError(f"align failed: {done.stderr.strip()[-2000:]}")
    return Run(wall, started, [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()])


def maps_digest(output: Path) -> str:
    """Of the voxels of both half-maps: equal for runs that gave the same bits."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("half1.mrc", "half2.mrc"):
        digest.update((output / name).read_bytes()[1024:])
    return digest.hexdigest()
