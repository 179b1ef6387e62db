"""What a process may use: GPUs as users name them, cores as the kernel grants them, the JIT cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from numba_glocal.errors import DeviceError, SettingsError
from numba_glocal.execution.pinning import (
    ALL_GPUS,
    NO_GPUS,
    assign_gpus,
    cpu_name,
    cpu_quota,
    jit_cache_dir,
    parse_gpus,
    usable_cores,
    visible_devices,
    worker_environment,
)

A, B = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000"
MIG = "MIG-41b36674-2d4e-5c27-9c34-0a8b5a9b2b59"


@pytest.mark.parametrize(
    ("spec", "visible", "expected"),
    [
        ("0,1", None, ["0", "1"]),
        ("0 1", None, ["0", "1"]),
        ("0:1", None, ["0", "1"]),
        (" 3 , 1 ", None, ["3", "1"]),
        (("0", "1"), None, ["0", "1"]),
        (["0,2", "1"], None, ["0", "2", "1"]),
        (2, None, ["2"]),
        ([0, 1], None, ["0", "1"]),
        ("all", None, ALL_GPUS),
        ("NONE", None, NO_GPUS),
        (("none",), "0", NO_GPUS),
        (f"{A},{B}", None, [A, B]),
        (MIG, None, [MIG]),
        # Indices count what is visible.
        ("0,1", "2,3", ["2", "3"]),
        ("1", f"{A},{B}", [B]),
        ("0", MIG, [MIG]),
        (B, f"{A},{B}", [B]),
        ("GPU-bbbb", f"{A},{B}", [B]),
        (B, f"{A},GPU-bbbb", ["GPU-bbbb"]),
        (A, "0,1", [A]),
        ("007", None, ["7"]),
    ],
)
def test_gpus_as_users_write_them(spec, visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert parse_gpus(spec, environ) == expected


@pytest.mark.parametrize(
    ("spec", "visible", "kind", "text"),
    [
        ("", None, SettingsError, "found nothing"),
        ([], None, SettingsError, "found nothing"),
        ("0,x", None, SettingsError, "found 'x'"),
        ("-1", None, SettingsError, "found '-1'"),
        ("0,0", None, SettingsError, "named twice"),
        ("0,all", None, SettingsError, "found 'all'"),
        (f"0,{A}", f"{A},{B}", SettingsError, "named twice"),
        ("2", "0,1", DeviceError, "shows 2"),
        ("0", "", DeviceError, r"shows 0 \(none\)"),
        ("0", "-1", DeviceError, "shows 0"),
        (A, B, DeviceError, "was asked for"),
        (A, "", DeviceError, "was asked for"),
    ],
)
def test_gpus_that_cannot_be(spec, visible, kind, text):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(kind, match=text) as caught:
        parse_gpus(spec, environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("", []), ("-1", []), ("0,-1,1", ["0"]), (" 0, 1 ", ["0", "1"]), (MIG, [MIG]), ("NoDevFiles", []), (f"{A},{B}", [A, B])]
)
def test_visible_devices_as_cuda_reads_them(text, expected):
    assert visible_devices({"CUDA_VISIBLE_DEVICES": text}) == expected
    assert visible_devices({}) is None


def test_assignment_goes_round():
    assert assign_gpus(5, ["0", "1"]) == ["0", "1", "0", "1", "0"]
    assert assign_gpus(2, []) == [None, None]


def test_worker_environment_leaves_this_process_alone(tmp_path):
    before = dict(os.environ)
    child = worker_environment("3", 2, {"NUMBA_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0", "KEEP": "me", "OMP_NUM_THREADS": "64"})
    assert (child["CUDA_VISIBLE_DEVICES"], child["OMP_NUM_THREADS"], child["NUMBA_NUM_THREADS"], child["KEEP"]) == ("3", "2", "2", "me")
    assert child["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert worker_environment(None, 1, {"NUMBA_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""
    assert dict(os.environ) == before


# --- cores ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset not found (apt-get install util-linux)")
def test_usable_cores_under_taskset():
    core = min(os.sched_getaffinity(0))
    code = "from numba_glocal.execution.pinning import usable_cores; print(usable_cores())"
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, check=True
    )
    assert done.stdout.strip() == "1"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def kernel(tmp_path):
    """Folders that stand for /proc and /sys/fs/cgroup, and a function that writes /proc/self/cgroup."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    cgroup.mkdir()

    def say(lines: str) -> tuple[Path, Path]:
        write(proc / "self", cgroup=lines)
        return proc, cgroup

    return say


def test_quota_of_cgroup_v2_is_the_smallest_on_the_way_up(kernel):
    proc, cgroup = kernel("0::/batch/job7/step0\n")
    write(cgroup / "batch" / "job7", cpu__max="150000 100000\n")
    write(cgroup / "batch" / "job7" / "step0", cpu__max="max 100000\n")
    write(cgroup / "batch", cpu__max="400000 100000\n")
    assert cpu_quota(proc, cgroup) == 1.5


def test_quota_inside_a_container_lies_in_the_mounted_root(kernel):
    proc, cgroup = kernel("0::/../../docker/abc\n")
    write(cgroup, cpu__max="50000 100000\n")
    assert cpu_quota(proc, cgroup) == 0.5
    assert usable_cores(proc, cgroup) == 1


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_quota_of_cgroup_v1(kernel, mount):
    proc, cgroup = kernel("4:memory:/m\n3:cpu,cpuacct:/docker/abc\n")
    write(cgroup / mount / "docker" / "abc", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    write(cgroup / mount, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(proc, cgroup) == 3.0


def test_no_quota(kernel, tmp_path):
    proc, cgroup = kernel("0::/\n")
    assert cpu_quota(proc, cgroup) is None
    assert usable_cores(proc, cgroup) == len(os.sched_getaffinity(0))
    assert cpu_quota(tmp_path / "nowhere", cgroup) is None


# --- the JIT cache --------------------------------------------------------------------------------------------------------------------------


def test_jit_cache_is_what_the_user_chose(tmp_path):
    assert jit_cache_dir({"NUMBA_CACHE_DIR": str(tmp_path / "mine"), "XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "mine"


def test_jit_cache_lies_in_the_users_cache_folder(tmp_path):
    from importlib.metadata import version

    folder = jit_cache_dir({"XDG_CACHE_HOME": str(tmp_path / "x"), "HOME": str(tmp_path / "h")})
    assert folder.parent == tmp_path / "x" / "numba-glocal"
    assert folder.is_dir() and version("numba") in folder.name and cpu_name() in folder.name
    assert jit_cache_dir({"HOME": str(tmp_path / "h")}).parent == tmp_path / "h" / ".cache" / "numba-glocal"


def test_jit_cache_falls_back_where_nothing_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").write_text("")  # a file where the folder should be: not writable even for root
    folder = jit_cache_dir({"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert folder.is_dir() and tmp_path / "tmp" in folder.parents
    assert jit_cache_dir({"XDG_CACHE_HOME": str(tmp_path / "file")}) == folder, "workers would not share it"


def test_cpu_name_tells_instruction_sets_apart(tmp_path):
    for name, flags in (("a", "fma avx2"), ("b", "avx2 fma"), ("c", "avx2 fma avx512f")):
        (tmp_path / name).write_text(f"processor : 0\nmodel name : Xeon(R) @ 2.1GHz\nflags : {flags}\n\nprocessor : 1\nmodel name : other\n")
    a, b, c = (cpu_name(tmp_path / name) for name in "abc")
    assert a == b != c
    assert a.startswith("xeon-r-2-1ghz-")
