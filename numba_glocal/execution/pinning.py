"""What a worker may use: one GPU or none, one thread unless told, and the JIT cache that all workers share.

Everything here only reads and builds environments. It imports nothing heavy, because it is used in a worker before NumPy, Numba and FFTW are
(they read their environment once, when they are first imported).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..errors import DeviceError, SettingsError

ALL_GPUS = "all"
NO_GPUS = "none"

# Each library that keeps a thread pool of its own reads one of these.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "PYFFTW_NUM_THREADS",
)

# These pin OpenMP threads to cores. With one thread a process every worker would be pinned to the same first core.
BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is; handed to the pool's initializer.

    Attributes
    ----------
    index : int
        Slot in the pool; a replaced worker keeps the slot of the dead one.
    gpu : str or None
        Index, UUID or MIG name as in ``CUDA_VISIBLE_DEVICES``; None for a CPU worker.
    threads : int
        Threads each library may use.
    generation : int
        0 for the first process in the slot, 1 for the one that replaced it, and so on.
    """

    index: int
    gpu: str | None
    threads: int
    generation: int = 0


def worker_environment(gpu: str | None, threads: int = 1, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a worker is started with.

    Parameters
    ----------
    gpu : str or None
        The one device the worker may see; None hides every GPU from it.
    threads : int
        Cap for OpenMP, MKL, OpenBLAS, Numba and pyFFTW.
    environ : mapping of str to str, optional
        The environment to start from; that of this process by default.

    Returns
    -------
    dict of str to str
    """
    child = dict(os.environ if environ is None else environ)
    for name in THREAD_VARIABLES:
        child[name] = str(threads)
    if threads == 1:
        for name in BINDING_VARIABLES:
            child.pop(name, None)
    child["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else gpu
    # Without this CUDA numbers the fastest device 0, and nvidia-smi the one on the first bus.
    child.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    child["NUMBA_CACHE_DIR"] = str(jit_cache_dir(child))
    return child


# --- GPUs -----------------------------------------------------------------------------------------------------------------------------------


def visible_devices(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """The devices ``CUDA_VISIBLE_DEVICES`` leaves, in its order; None when the variable is not set (then every device is visible)."""
    text = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    devices: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        # CUDA reads the list up to the first entry that names no device.
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", entry):
            break
        devices.append(entry)
    return devices


def parse_gpus(spec: str | int | Iterable[str | int], environ: Mapping[str, str] | None = None) -> str | list[str]:
    """Read a list of GPUs as a user writes it.

    Parameters
    ----------
    spec : str, int or iterable of these
        ``"0,1"``, ``"0 1"``, ``"0:1"``, UUIDs, MIG names, ``"all"`` or ``"none"``. Whole numbers count the devices that are visible: with
        ``CUDA_VISIBLE_DEVICES=2,3`` GPU 1 is device 3.
    environ : mapping of str to str, optional
        Where ``CUDA_VISIBLE_DEVICES`` is looked up; the environment of this process by default.

    Returns
    -------
    str or list of str
        ``ALL_GPUS``, ``NO_GPUS``, or values for the ``CUDA_VISIBLE_DEVICES`` of single workers.

    Raises
    ------
    SettingsError
        The text is not a list of GPUs, or names one twice.
    DeviceError
        A GPU is hidden by ``CUDA_VISIBLE_DEVICES``.
    """
    parts = [spec] if isinstance(spec, str | int) else list(spec)
    words = [word for part in parts for word in re.split(r"[\s,:]+", str(part).strip()) if word]
    if not words:
        raise SettingsError("--gpus: expected indices, UUIDs, 'all' or 'none', found nothing")
    if len(words) == 1 and words[0].lower() in (ALL_GPUS, NO_GPUS):
        return words[0].lower()
    visible = visible_devices(environ)
    found: list[str] = []
    for word in words:
        device = _one_gpu(word, visible)
        if device in found:
            raise SettingsError(f"--gpus: GPU {word} is named twice; use --procs-per-gpu for several workers on one GPU")
        found.append(device)
    return found


def _one_gpu(word: str, visible: list[str] | None) -> str:
    if re.fullmatch(r"\d+", word):
        index = int(word)
        if visible is None:
            return str(index)
        if index >= len(visible):
            shown = f"CUDA_VISIBLE_DEVICES shows {len(visible)} ({','.join(visible) or 'none'})"
            within = f"; numbers count within it: expected {'0' if len(visible) == 1 else f'0 to {len(visible) - 1}'}" if visible else ""
            raise DeviceError(f"--gpus: GPU {index} was asked for, but {shown}{within}")
        return visible[index]
    if re.fullmatch(r"(GPU|MIG)-\S+", word):
        named = [device for device in visible or () if not device.isdigit()]
        # Abbreviated UUIDs are legal in the variable, so either may be the shorter. An index there may be this device: it cannot be told here.
        if visible is not None and len(named) == len(visible):
            for device in named:
                if device.startswith(word) or word.startswith(device):
                    return device
            raise DeviceError(f"--gpus: {word} was asked for, but CUDA_VISIBLE_DEVICES shows {','.join(visible) or 'none'}")
        return word
    raise SettingsError(f"--gpus: expected indices (0,1), UUIDs (GPU-..., MIG-...), 'all' or 'none', found '{word}'")


# --- cores ----------------------------------------------------------------------------------------------------------------------------------


def usable_cores(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: the CPU affinity, cut by the CPU quota of its control group (containers, batch systems).

    Parameters
    ----------
    proc, cgroup_root : Path
        Where the kernel tells; other folders in tests.

    Returns
    -------
    int
        At least 1; a quota of 1.5 cores counts as 2.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota(proc, cgroup_root)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cpu_quota(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPU quota of this process in cores (cgroup v1 or v2, the smallest on the way to the root), None without one."""
    quotas: list[float] = []
    for folder in cgroup_folders("cpu", proc, cgroup_root):
        v2 = _read_words(folder / "cpu.max")
        v1 = _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us")
        for words in (v2, v1):
            try:
                quota, period = (float(word) for word in words)
            except ValueError:  # "max 100000", or no such file
                continue
            if quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def cgroup_folders(controller: str, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Folders that may hold limits of `controller` ("cpu", "memory") for this process, its own group first, then its parents.

    Inside a container the path the kernel tells is often that of the host, and the limits lie in the root that is mounted: all are returned.
    """
    folders: list[Path] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":  # v2, alone or beside v1
            roots = [cgroup_root, cgroup_root / "unified"]
        elif controller in controllers.split(","):
            roots = [cgroup_root / controllers, cgroup_root / controller]
        else:
            continue
        for root in roots:
            folder = root / path.strip("/")
            while True:
                folders.append(folder)
                if folder == root or root not in folder.parents:
                    break
                folder = folder.parent
    return folders


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


# --- the JIT cache --------------------------------------------------------------------------------------------------------------------------


def jit_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of compiled code that all workers share, made if it is missing.

    It is ``NUMBA_CACHE_DIR`` where that is set. Otherwise it lies in the user's cache folder, one for each version of this package, of Numba
    and kind of CPU (home folders are shared between unlike machines of a cluster), or in the temporary folder where that cannot be written.

    Parameters
    ----------
    environ : mapping of str to str, optional
        The environment of this process by default.

    Returns
    -------
    Path
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    name = f"{__version__}-numba{_numba_version()}-{cpu_name()}"
    candidates: list[Path] = []
    if environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(environ["XDG_CACHE_HOME"]))
    elif environ.get("HOME"):
        candidates.append(Path(environ["HOME"]) / ".cache")
    for base in candidates:
        folder = base / "numba-glocal" / name
        if _is_writable(folder):
            return folder
    folder = Path(tempfile.gettempdir()) / f"numba-glocal-{os.getuid()}" / name
    if _is_writable(folder) and folder.parent.stat().st_uid == os.getuid():
        return folder
    return Path(tempfile.mkdtemp(prefix="numba-glocal-"))


def use_jit_cache() -> Path:
    """Point this process at the JIT cache of the workers; to be called before Numba is imported.

    Returns
    -------
    Path
        The folder, now also in ``NUMBA_CACHE_DIR``.
    """
    folder = jit_cache_dir()
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    return folder


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _numba_version() -> str:
    try:
        return importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A name for this kind of CPU that is fit for a file name; it differs where the instruction sets differ."""
    fields: dict[str, str] = {}
    try:
        with cpuinfo.open() as lines:
            for line in lines:
                if not line.strip():
                    break  # the other cores say the same
                key, _, value = line.partition(":")
                fields[key.strip()] = value.strip()
    except OSError:
        pass
    model = fields.get("model name") or platform.processor() or platform.machine() or "cpu"
    slug = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-").lower()[:40]
    features = " ".join(sorted(fields.get("flags", fields.get("Features", "")).split()))
    return f"{slug}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def assign_gpus(n_workers: int, gpu_ids: Sequence[str]) -> list[str | None]:
    """GPU of each slot: worker `i` has ``gpu_ids[i % n]``, or None without GPUs."""
    return [gpu_ids[i % len(gpu_ids)] if gpu_ids else None for i in range(n_workers)]
