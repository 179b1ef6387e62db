"""What the machine offers, against made-up kernels and a made-up driver."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from numba_glocal.devices import Gpu, GpuSurvey, memory_bytes, resolve_gpus, survey_gpus, survey_host
from numba_glocal.errors import DeviceError

A, B = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000"
TWO = GpuSurvey(
    tuple(Gpu(i, "H200", uuid, 2**37, 2**36, "default") for i, uuid in enumerate((A, B))),
    driver="580.1",
    problem="",
    known=True,
)
NO_DRIVER = GpuSurvey((), "", "there is no NVIDIA driver on this machine", True)
WHERE = "; `numba-glocal devices` shows what is there, `--gpus none` uses the CPU$"
UNKNOWN = GpuSurvey((), "", "an NVIDIA driver is loaded, but nvidia-ml-py is not installed", False)


@pytest.mark.parametrize(
    ("spec", "visible", "survey", "expected"),
    [
        (None, None, TWO, ["0", "1"]),
        ("all", None, TWO, ["0", "1"]),
        ("none", None, TWO, []),
        ("1", None, TWO, ["1"]),
        ("1", f"{B},{A}", TWO, [A]),
        ("GPU-bb", None, TWO, ["GPU-bb"]),
        (None, "1", TWO, ["1"]),
        (None, "", TWO, []),
        (None, "-1", TWO, []),
        (None, f"{B},{A}", TWO, [B, A]),
        ("all", f"{B},GPU-cc,{A}", TWO, [B]),
        (None, "1,7,0", TWO, ["1"]),
        (None, None, NO_DRIVER, []),
        ("none", None, UNKNOWN, []),
        (None, None, UNKNOWN, []),
        ("0,1", None, UNKNOWN, ["0", "1"]),
        ("all", "4,5", UNKNOWN, ["4", "5"]),
    ],
)
def test_gpus_for_the_workers(spec, visible, survey, expected):
    if spec == "all" and survey is UNKNOWN:
        with pytest.raises(DeviceError, match="cannot be counted"):
            resolve_gpus(spec, {"CUDA_VISIBLE_DEVICES": visible}, survey)
        return
    assert resolve_gpus(spec, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, survey) == expected


@pytest.mark.parametrize(
    ("spec", "visible", "survey", "text"),
    [
        ("7", None, TWO, "this machine has 2"),
        (
            "0",
            None,
            NO_DRIVER,
            "--gpus: GPU 0 was asked for, but there is no NVIDIA driver on this machine" + WHERE,
        ),
        (
            "all",
            None,
            NO_DRIVER,
            "--gpus: all was asked for, but there is no NVIDIA driver on this machine" + WHERE,
        ),
        ("all", "", TWO, "CUDA_VISIBLE_DEVICES='' hides them"),
        ("GPU-cc", None, TWO, "this machine has 2"),
        ("MIG-1234", None, TWO, "no GPU of this machine is split into instances"),
        ("all", None, UNKNOWN, "nvidia-ml-py is not installed"),
    ],
)
def test_a_gpu_that_is_missing_is_an_error_never_a_silent_fallback(spec, visible, survey, text):
    with pytest.raises(DeviceError, match=text):
        resolve_gpus(spec, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, survey)


@pytest.fixture
def driver(monkeypatch):
    """A module that answers like nvidia-ml-py, bytes and refusals included."""
    nvml = ModuleType("fake_nvml")
    nvml.calls = []

    class NVMLError(Exception):
        pass

    def refuse(handle):
        raise NVMLError("Not Supported")

    nvml.NVMLError = NVMLError
    nvml.nvmlInit = lambda: nvml.calls.append("init")
    nvml.nvmlShutdown = lambda: nvml.calls.append("shutdown")
    nvml.nvmlSystemGetDriverVersion = lambda: b"580.65"
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda handle: b"NVIDIA H200"
    nvml.nvmlDeviceGetUUID = lambda handle: (A, B)[handle]
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=150, free=100)
    nvml.nvmlDeviceGetComputeMode = lambda handle: 3
    nvml.nvmlDeviceGetMigMode = refuse
    monkeypatch.setitem(sys.modules, "fake_nvml", nvml)
    return nvml


def test_survey_through_the_driver(driver):
    survey = survey_gpus("fake_nvml")
    assert [(gpu.index, gpu.name, gpu.uuid) for gpu in survey.gpus] == [(0, "NVIDIA H200", A), (1, "NVIDIA H200", B)]
    assert survey.gpus[0] == Gpu(0, "NVIDIA H200", A, 150, 100, "exclusive process", False)
    assert (survey.driver, survey.problem, survey.known) == ("580.65", "", True)
    assert driver.calls == ["init", "shutdown"]


def test_survey_says_why_there_is_nothing(driver, tmp_path):
    def no_library():
        raise driver.NVMLError("NVML Shared Library Not Found")

    loaded = tmp_path / "loaded"
    (loaded / "driver" / "nvidia").mkdir(parents=True)
    (loaded / "driver" / "nvidia" / "version").write_text("NVRM version: ...")
    assert survey_gpus("no_such_module", tmp_path) == NO_DRIVER
    assert "nvidia-ml-py is not installed" in survey_gpus("no_such_module", loaded).problem
    driver.nvmlInit = no_library
    assert survey_gpus("fake_nvml", tmp_path) == NO_DRIVER
    survey = survey_gpus("fake_nvml", loaded)
    assert "does not answer: NVML Shared Library" in survey.problem and not survey.known


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path, version):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       64000 kB\nMemFree: 1 kB\nMemAvailable:   32000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job\n" if version == 2 else "5:memory:/job\n")
    folder = cgroup / "job" if version == 2 else cgroup / "memory" / "job"
    folder.mkdir(parents=True)
    assert memory_bytes(proc, cgroup) == (64000 * 1024, 32000 * 1024)
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (folder / names[0]).write_text("10000000\n")
    (folder / names[1]).write_text("7000000\n")
    (folder / "memory.stat").write_text(f"anon 12\n{names[2]} 1000000\n")
    assert memory_bytes(proc, cgroup) == (10_000_000, 4_000_000)
    (folder / names[0]).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert memory_bytes(proc, cgroup) == (64000 * 1024, 32000 * 1024)


def test_this_host_has_what_the_tests_need():
    host = survey_host()
    assert 1 <= host.cores_usable <= host.cores_total
    import numba

    assert host.libraries["numba"] == numba.__version__
