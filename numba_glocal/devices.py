"""What this machine offers: cores, memory and libraries; GPUs as the driver's management library (NVML) names them. Never through CUDA."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from .errors import DeviceError
from .execution.pinning import (
    ALL_GPUS,
    NO_GPUS,
    cgroup_folders,
    cpu_quota,
    jit_cache_dir,
    parse_gpus,
    usable_cores,
    visible_devices,
)

LIBRARIES = ("numpy", "scipy", "numba", "llvmlite", "pyfftw", "numba-cuda", "nvidia-ml-py")
NVML_MODULE = "pynvml"
INSTALL_HINT = "pip install '.[cuda12]' (or '.[cuda13]', where nvidia-smi says CUDA 13) in the folder of numba-glocal's sources"
"""For somebody who has the sources, from which every installation comes."""
_WHERE_TO_LOOK = "; `numba-glocal devices` shows what is there, `--gpus none` uses the CPU"
_NO_DRIVER = "there is no NVIDIA driver on this machine"
_MOST_AUTO_WORKERS = 2
_CORES_PER_GPU_WORKER = 2
_BYTES_PER_GPU_WORKER = 4 << 30
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True, slots=True)
class Host:
    """The CPU side of this machine, as far as this process may use it.

    Attributes
    ----------
    cpu : str
        Model.
    cores_total, cores_usable : int
        Of the machine; after CPU affinity and control group.
    cpu_quota : float or None
        Quota of the control group in cores.
    memory_total_bytes, memory_available_bytes : int or None
        The smaller of machine and control group; None where the kernel does not say.
    python : str
        Version.
    libraries : dict of str to (str or None)
        Versions; None for what is not installed.
    jit_cache : Path
        Where compiled code is kept.
    """

    cpu: str
    cores_total: int
    cores_usable: int
    cpu_quota: float | None
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    python: str
    libraries: dict[str, str | None]
    jit_cache: Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes
    ----------
    index : int
        As nvidia-smi counts.
    name, uuid : str
        As the driver says.
    memory_total_bytes, memory_free_bytes : int or None
        None where the driver does not say (integrated GPUs).
    compute_mode : str
        ``exclusive process`` allows one worker only.
    mig : bool
        Split into instances; those have names of their own.
    """

    index: int
    name: str
    uuid: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    compute_mode: str
    mig: bool = False


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """The GPUs of this machine, or why none can be named.

    Attributes
    ----------
    gpus : tuple of Gpu
        All of the machine, hidden ones too.
    driver : str
        Version; empty without one.
    problem : str
        One line when NVML cannot be asked; empty otherwise.
    known : bool
        True when `gpus` is the truth: NVML answered, or there is no driver.
    """

    gpus: tuple[Gpu, ...]
    driver: str
    problem: str
    known: bool


def survey_host(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> Host:
    """Look at the CPU side of this machine."""
    total, available = memory_bytes(proc, cgroup_root)
    return Host(
        cpu=_cpu_model(proc),
        cores_total=os.cpu_count() or 1,
        cores_usable=usable_cores(proc, cgroup_root),
        cpu_quota=cpu_quota(proc, cgroup_root),
        memory_total_bytes=total,
        memory_available_bytes=available,
        python=platform.python_version(),
        libraries={name: _version(name) for name in LIBRARIES},
        jit_cache=jit_cache_dir(),
    )


def memory_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """Memory this process may use.

    Returns
    -------
    total, available : int or None
        The smaller of what the machine has and what the control group (v1 or v2) grants; None where the kernel does not say.
    """
    totals: list[int] = []
    availables: list[int] = []
    info: dict[str, int] = {}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info[key] = 1024 * int(value.split()[0])
    except (OSError, ValueError, IndexError):
        pass
    if "MemTotal" in info:
        totals.append(info["MemTotal"])
    if "MemAvailable" in info:
        availables.append(info["MemAvailable"])
    for folder in cgroup_folders("memory", proc, cgroup_root):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
            if limit is None or limit >= 2**60:  # v1 says "no limit" by a huge number
                continue
            totals.append(limit)
            if used is not None:
                # File cache counts as used, but the kernel gives it back when it is needed.
                availables.append(max(0, limit - used + _read_stat(folder / "memory.stat", cache_name)))
    return min(totals, default=None), min(availables, default=None)


def survey_gpus(module_name: str = NVML_MODULE, proc: Path = Path("/proc")) -> GpuSurvey:
    """Ask the driver for the GPUs of this machine.

    Parameters
    ----------
    module_name : str
        The binding of NVML; another one in tests.
    proc : Path
        Where the kernel tells whether a driver is loaded.

    Returns
    -------
    GpuSurvey
        Never an exception: why it could not be asked stands in `problem`.
    """
    has_driver = (proc / "driver" / "nvidia" / "version").exists() or Path("/dev/dxg").exists()  # the latter: Windows' driver, seen from WSL
    try:
        nvml = importlib.import_module(module_name)
    except ImportError:
        if not has_driver:
            return GpuSurvey((), "", _NO_DRIVER, True)
        return GpuSurvey((), "", f"an NVIDIA driver is loaded, but nvidia-ml-py is not installed ({INSTALL_HINT})", False)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if has_driver:
            return GpuSurvey((), "", f"the NVIDIA driver does not answer: {error}", False)
        return GpuSurvey((), "", _NO_DRIVER, True)
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        gpus = tuple(_survey_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        return GpuSurvey((), "", f"the NVIDIA driver does not answer: {error}", False)
    finally:
        nvml.nvmlShutdown()
    return GpuSurvey(gpus, driver, "" if gpus else "the NVIDIA driver sees no GPU", True)


def resolve_gpus(
    spec: str | tuple[str, ...] | list[str] | None, environ: Mapping[str, str] | None = None, survey: GpuSurvey | None = None
) -> list[str]:
    """GPUs for the workers, checked before work starts.

    Parameters
    ----------
    spec : str or sequence of str, or None
        As `pinning.parse_gpus` reads it; None means all that are visible.
    environ : mapping of str to str, optional
        Where ``CUDA_VISIBLE_DEVICES`` is looked up.
    survey : GpuSurvey, optional
        The GPUs of the machine; asked when needed.

    Returns
    -------
    list of str
        Values for ``CUDA_VISIBLE_DEVICES``; empty: work on the CPU.

    Raises
    ------
    DeviceError
        A GPU that was asked for is not there.
    SettingsError
        `spec` is not a list of GPUs.
    """
    wanted = parse_gpus(ALL_GPUS if spec is None else spec, environ)
    if wanted == NO_GPUS:
        return []
    survey = survey_gpus() if survey is None else survey
    visible = visible_devices(environ)
    if wanted == ALL_GPUS:
        if not survey.known and spec is not None:
            raise DeviceError(f"--gpus: all was asked for, but the GPUs cannot be counted: {survey.problem}{_WHERE_TO_LOOK}")
        # CUDA reads the variable up to the first device that is not there.
        found = list(takewhile(lambda device: not survey.known or _exists(device, survey.gpus), visible or ()))
        if visible is None:
            found = [str(gpu.index) for gpu in survey.gpus]
        if not found and spec is not None:
            hidden = f"there is none: CUDA_VISIBLE_DEVICES={_text_of_visible(environ)!r} hides them"
            raise DeviceError(f"--gpus: all was asked for, but {survey.problem + _WHERE_TO_LOOK if survey.problem else hidden}")
        return found
    assert isinstance(wanted, list)
    if survey.known:
        for device in wanted:
            if not _exists(device, survey.gpus):
                reason = survey.problem + _WHERE_TO_LOOK if survey.problem else f"this machine has {len(survey.gpus)} (indices from 0)"
                if device.startswith("MIG-") and not survey.problem:
                    reason = f"no GPU of this machine is split into instances (MIG mode is off on all {len(survey.gpus)})"
                origin = " (of CUDA_VISIBLE_DEVICES)" if device in (visible or ()) else ""
                raise DeviceError(f"--gpus: GPU {device}{origin} was asked for, but {reason}")
    return wanted


def why_no_gpus(environ: Mapping[str, str] | None = None, survey: GpuSurvey | None = None) -> str:
    """Why a run that leaves the choice open finds no GPU: what the driver says, or the variable that hides them."""
    survey = survey_gpus() if survey is None else survey
    return survey.problem or f"CUDA_VISIBLE_DEVICES={_text_of_visible(environ)!r} hides them"


def workers_per_gpu(gpu_ids: Sequence[str], cores: int, limit_bytes: int | None = None, survey: GpuSurvey | None = None) -> tuple[int, str]:
    """How many workers each GPU gets where the user leaves it open.

    A second worker reads and prepares particles while the first one computes; it needs two cores of its own and 4 GiB of device memory. More
    than two were no faster.

    Parameters
    ----------
    gpu_ids : sequence of str
        Values for ``CUDA_VISIBLE_DEVICES``.
    cores : int
        That this process may use.
    limit_bytes : int, optional
        Of each GPU's memory, where the user sets one.
    survey : GpuSurvey, optional
        The GPUs of the machine; asked when needed.

    Returns
    -------
    number : int
    reason : str
        Why not more, for the plan.
    """
    survey = survey_gpus() if survey is None else survey
    chosen = [gpu for gpu in survey.gpus if any(device == str(gpu.index) or gpu.uuid.startswith(device) for device in gpu_ids)]
    if len(chosen) < len(gpu_ids):  # MIG instances, or no answer
        return 1, "free memory not known"
    if any(gpu.compute_mode == "exclusive process" for gpu in chosen):
        return 1, "exclusive process mode"
    free = [gpu.memory_free_bytes for gpu in chosen if gpu.memory_free_bytes is not None]
    if len(free) < len(chosen):
        return 1, "free memory not known"
    least = min(free) if limit_bytes is None else min(*free, limit_bytes)
    by_cores, by_memory = cores // (_CORES_PER_GPU_WORKER * len(gpu_ids)), least // _BYTES_PER_GPU_WORKER
    number = max(1, min(_MOST_AUTO_WORKERS, by_cores, by_memory))
    if by_memory < min(_MOST_AUTO_WORKERS, by_cores):
        return number, f"{least / 2**30:.1f} GiB of memory"
    return number, f"{cores} usable cores" if by_cores < _MOST_AUTO_WORKERS else ""


def _text_of_visible(environ: Mapping[str, str] | None) -> str:
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "")


def _exists(device: str, gpus: tuple[Gpu, ...]) -> bool:
    if device.isdigit():
        return int(device) < len(gpus)
    if device.startswith("MIG-"):
        return any(gpu.mig for gpu in gpus)
    return any(gpu.uuid.startswith(device) for gpu in gpus)


def _survey_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str) -> Any:
        try:
            return getattr(nvml, function)(handle)
        except nvml.NVMLError:  # not every GPU can say everything
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    mig = ask("nvmlDeviceGetMigMode")
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "unknown"),
        uuid=_text(ask("nvmlDeviceGetUUID") or ""),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        compute_mode=_COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode"), "unknown"),
        mig=bool(mig and mig[0] == 1),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model(proc: Path) -> str:
    try:
        for line in (proc / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == key), 0)
    except (OSError, ValueError, IndexError):
        return 0
