"""From what a user writes to what each worker sees, for life; with made-up GPUs, because only the environment counts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

from numba_glocal.cli import running
from numba_glocal.cli.main import main
from numba_glocal.devices import Gpu, GpuSurvey, resolve_gpus, survey_gpus, workers_per_gpu
from numba_glocal.errors import DeviceError, SettingsError
from numba_glocal.execution import tasks
from numba_glocal.execution.executors import SerialExecutor, gather_in_order
from numba_glocal.execution.pool import PinnedPool
from numba_glocal.settings import AlignSettings, AverageSettings
from numba_glocal.simulation import SimulationSettings, simulate

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the workers take over this path

import pool_tasks  # noqa: E402

A, B, MIG = "GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "MIG-41b36674-2d4e-5c27-9c34-0a8b5a9b2b59"
GIB = 1 << 30


def survey(free_gib=(100, 100), mode="default", mig=False):
    gpus = (Gpu(i, "H200", (A, B)[i], 140 * GIB, None if free is None else int(free * GIB), mode, mig) for i, free in enumerate(free_gib))
    return GpuSurvey(tuple(gpus), "580.1", "", True)


@pytest.mark.parametrize(
    ("spec", "visible", "mig", "expected"),
    [
        ("1", None, False, ["1", "1", "1"]),
        ("1,0", None, False, ["1", "0", "1"]),
        (f"{B},{A}", None, False, [B, A, B]),
        ("1,0", f"{A},{B}", False, [B, A, B]),
        ("all", None, False, ["0", "1", "0"]),
        (None, "1", False, ["1", "1", "1"]),
        (MIG, None, True, [MIG, MIG, MIG]),
        ("all", MIG, True, [MIG, MIG, MIG]),
    ],
)
def test_worker_i_has_its_gpu_for_life(spec, visible, mig, expected, tmp_path):
    """Every worker is killed once; its successor sees the same GPU."""
    gpu_ids = resolve_gpus(spec, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, survey(mig=mig))
    events = []
    with PinnedPool(3, gpu_ids, initializer=pool_tasks.greet, initargs=(tmp_path / "log",), events=events.append) as pool:
        pool.wait_ready()
        for event in [event for event in events if event.kind == "ready"]:
            os.kill(event.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while sum(event.kind == "ready" for event in events) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    # index, GPU, generation and what CUDA would see, as told by the workers themselves
    seen = sorted((line.split()[0], line.split()[3], line.split()[1], line.split()[4]) for line in (tmp_path / "log").read_text().splitlines())
    assert seen == sorted((str(i), generation, gpu, gpu) for i, gpu in enumerate(expected) for generation in "01")


def test_a_slow_gpu_does_not_make_workers_pile_up_on_another():
    """Four workers on two GPUs, one of them twenty times slower: it has its two workers at every moment, and all its tasks are its own."""
    events = []
    with PinnedPool(4, ["0", "1"], events=events.append) as pool:
        pool.wait_ready()
        seen = list(gather_in_order(pool, pool_tasks.slow_on_gpu_0, range(60)))
    assert [x for x, _, _ in seen] == list(range(60))
    pids = {gpu: {pid for _, pid, seen_gpu in seen if seen_gpu == gpu} for gpu in ("0", "1")}
    assert {gpu: len(found) for gpu, found in pids.items()} == {"0": 2, "1": 2} and not pids["0"] & pids["1"]
    assert {event.worker: event.gpu for event in events} == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert sum(event.kind == "started" for event in events) == 4


def test_a_slow_gpu_costs_its_own_share_only():
    """One of four GPUs four times slower: all are done within a tenth of the time in which four such GPUs would ideally share the work."""
    n_tasks, quick_s, slow_s = 260, 0.02, 0.08
    ideal_s = n_tasks / (3 / quick_s + 1 / slow_s)
    with PinnedPool(4, ["0", "1", "2", "3"]) as pool:
        pool.wait_ready()
        took_s = []
        for _ in range(3):  # a busy machine may spoil one
            begun = time.monotonic()
            gpus = list(gather_in_order(pool, pool_tasks.sleep_by_gpu, [(i, {"0": slow_s}, quick_s) for i in range(n_tasks)]))
            took_s.append(time.monotonic() - begun)
            if took_s[-1] <= 1.1 * ideal_s:
                break
    assert min(took_s) <= 1.1 * ideal_s, took_s
    assert gpus.count("0") <= 1.2 * ideal_s / slow_s
    assert set(gpus) == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("visible", "spec", "text"),
    [
        ("", "0", r"GPU 0 was asked for, but CUDA_VISIBLE_DEVICES shows 0 \(none\)"),
        ("-1", "0", r"GPU 0 was asked for, but CUDA_VISIBLE_DEVICES shows 0 \(none\)"),
        ("-1", "all", "all was asked for, but there is none: CUDA_VISIBLE_DEVICES='-1' hides them"),
        ("GPU-cccc", "all", "all was asked for, but there is none: CUDA_VISIBLE_DEVICES='GPU-cccc' hides them"),
        ("", A, f"{A} was asked for, but CUDA_VISIBLE_DEVICES shows none"),
        (B, A, f"{A} was asked for, but CUDA_VISIBLE_DEVICES shows {B}"),
        (B, "1", rf"GPU 1 was asked for, but CUDA_VISIBLE_DEVICES shows 1 \({B}\); numbers count within it: expected 0$"),
        (f"{A},{B}", "5", rf"GPU 5 was asked for, but CUDA_VISIBLE_DEVICES shows 2 \({A},{B}\); numbers count within it: expected 0 to 1$"),
        ("GPU-cccc", "0", r"GPU GPU-cccc \(of CUDA_VISIBLE_DEVICES\) was asked for, but this machine has 2"),
        ("5,6", "1", r"GPU 6 \(of CUDA_VISIBLE_DEVICES\) was asked for, but this machine has 2 \(indices from 0\)"),
        (MIG, "0", rf"GPU {MIG} \(of CUDA_VISIBLE_DEVICES\) was asked for, but no GPU of this machine is split into instances"),
    ],
)
def test_hidden_gpus_are_one_clear_line(visible, spec, text, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", survey)
    with pytest.raises(DeviceError, match=text) as caught:
        running.choose_workers(AlignSettings("p.star", "run", gpus=spec))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_not_used_by_default(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", survey)
    assert running.choose_workers(AlignSettings("p.star", "run")).gpu_ids == ()


NOWHERE = GpuSurvey((), "", "there is no NVIDIA driver on this machine", True)
WHERE = "; `numba-glocal devices` shows what is there, `--gpus none` uses the CPU"
NOT_TOLD = GpuSurvey((), "", "an NVIDIA driver is loaded, but nvidia-ml-py is not installed", False)


@pytest.fixture(scope="module")
def small_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small_set")
    simulate(folder, SimulationSettings(count=8, box_size=16, pixel_size_angst=20.0))
    return folder


def run(folder, output, *options):
    reference = str(folder / "reference.mrc")
    command = ["align", str(folder / "start.star"), "-o", str(output), "--reference", reference, "--particle-diameter", "260", *options]
    return CliRunner().invoke(main, command, prog_name="numba-glocal")


@pytest.mark.parametrize(
    ("visible", "spec", "found", "text"),
    [
        (None, "0", NOWHERE, "GPU 0 was asked for, but there is no NVIDIA driver on this machine" + WHERE),
        (None, "all", NOWHERE, "all was asked for, but there is no NVIDIA driver on this machine" + WHERE),
        (None, MIG, NOWHERE, f"GPU {MIG} was asked for, but there is no NVIDIA driver on this machine" + WHERE),
        (
            None,
            "all",
            NOT_TOLD,
            "all was asked for, but the GPUs cannot be counted: an NVIDIA driver is loaded, but nvidia-ml-py is not installed" + WHERE,
        ),
        (None, "7", survey(), "GPU 7 was asked for, but this machine has 2 (indices from 0)"),
        (None, MIG, survey(), f"GPU {MIG} was asked for, but no GPU of this machine is split into instances (MIG mode is off on all 2)"),
        (MIG, "1", survey(mig=True), f"GPU 1 was asked for, but CUDA_VISIBLE_DEVICES shows 1 ({MIG}); numbers count within it: expected 0"),
        (MIG, A, survey(mig=True), f"{A} was asked for, but CUDA_VISIBLE_DEVICES shows {MIG}"),
        (f"{A},{B}", "2", survey(), f"GPU 2 was asked for, but CUDA_VISIBLE_DEVICES shows 2 ({A},{B}); numbers count within it: expected 0 to 1"),
        ("", "all", survey(), "all was asked for, but there is none: CUDA_VISIBLE_DEVICES='' hides them"),
        ("-1", "0", survey(), "GPU 0 was asked for, but CUDA_VISIBLE_DEVICES shows 0 (none)"),
    ],
)
def test_a_gpu_that_cannot_be_had_ends_the_command(small_set, tmp_path, visible, spec, found, text, monkeypatch):
    """Exit code 2 and one line, before there is a run folder."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", lambda: found)
    done = run(small_set, tmp_path / "run", "--gpus", spec)
    lines = [line for line in done.output.splitlines() if "error" in line]
    assert done.exit_code == 2 and lines == [f"numba-glocal: error: --gpus: {text}"] and not (tmp_path / "run").exists()


def test_a_gpu_that_its_worker_cannot_use_ends_the_command(small_set, tmp_path, monkeypatch):
    """NVML has named one, and CUDA finds none: one line with the worker, its GPU and the reason; the log has the traceback."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    if survey_gpus().gpus:
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", lambda: survey(mode="exclusive process"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", B)
    done = run(small_set, tmp_path / "run", "--gpus", "0")
    (line,) = [line for line in done.output.splitlines() if "error" in line]
    assert done.exit_code == 2 and line.startswith(f"numba-glocal: error: worker 0 cannot start on GPU {B}: the GPU cannot be used: ")
    assert "Traceback" not in done.output and "Traceback" in (tmp_path / "run" / "log.txt").read_text()
    assert "1 on each of 1 GPU" in done.output and "(auto: exclusive process mode)" in " ".join(done.output.split())


# --- workers on each GPU --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_ids", "cores", "limit_gib", "found", "expected", "reason"),
    [
        (["0"], 16, None, survey(), 2, ""),
        (["0", "1"], 16, None, survey(), 2, ""),
        (["0", "1"], 7, None, survey(), 1, "7 usable cores"),
        (["0"], 1, None, survey(), 1, "1 usable cores"),
        (["1"], 16, None, survey((100, 7.9)), 1, "7.9 GiB of memory"),
        (["0"], 16, None, survey((100, 7.9)), 2, ""),
        (["0"], 16, None, survey((1, 1)), 1, "1.0 GiB of memory"),
        (["0"], 16, 6, survey(), 1, "6.0 GiB of memory"),
        ([B], 16, None, survey(mode="exclusive process"), 1, "exclusive process mode"),
        ([MIG], 16, None, survey(mig=True), 1, "free memory not known"),
        (["0"], 16, None, survey((None, 100)), 1, "free memory not known"),
        (["0"], 16, None, GpuSurvey((), "", "nvidia-ml-py is not installed", False), 1, "free memory not known"),
    ],
)
def test_auto_workers(gpu_ids, cores, limit_gib, found, expected, reason):
    limit = None if limit_gib is None else limit_gib * GIB
    assert workers_per_gpu(gpu_ids, cores, limit, found) == (expected, reason)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, eight cores and numba-cuda."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", survey)
    monkeypatch.setattr(running, "usable_cores", lambda: 8)
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: object())


def test_the_plan_says_how_many_and_why(two_gpus):
    plan = running.choose_workers(AlignSettings("p.star", "run"))
    assert (plan.workers, plan.gpu_ids, plan.per_gpu, plan.reason) == (4, ("0", "1"), 2, "auto")
    plan = running.choose_workers(AlignSettings("p.star", "run", gpus="1", gpu_memory_gib=5.0))
    assert (plan.workers, plan.gpu_ids, plan.per_gpu, plan.reason) == (1, ("1",), 1, "auto: 5.0 GiB of memory")
    plan = running.choose_workers(AverageSettings("p.star", "run", gpus="1,0", procs_per_gpu="3"))
    assert (plan.workers, plan.gpu_ids, plan.per_gpu, plan.reason) == (6, ("1", "0"), 3, "")


def test_flcf_under_a_mask_file_is_for_the_cpu(two_gpus):
    asked = {"score": "flcf", "mask": "mask.mrc"}
    with pytest.raises(SettingsError, match=r"--score flcf with --mask mask\.mrc: on the CPU only; expected --gpus none"):
        running.choose_workers(AlignSettings("p.star", "run", **asked))
    assert running.choose_workers(AlignSettings("p.star", "run", gpus="none", **asked)).backend == "cpu"


# --- precision ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [(None, "auto"), ("half", "half"), ("single", "single")])
def test_precision_reaches_the_backend(given, expected, monkeypatch, two_gpus):
    made = []
    module = ModuleType("numba_glocal.backends.cuda.backend")
    module.CUDABackend = lambda *args: made.append(args) or SimpleNamespace(device="a device")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tasks, "_state", None)
    job = SimpleNamespace(settings=AlignSettings("p.star", "run", gpus="0", gpu_memory_gib=8.0, gpu_precision=given))
    assert tasks.start_worker(None, *running.worker_arguments(job, running.choose_workers(job.settings))) == "a device"
    assert made == [(4 * GIB, 2, expected)]


@pytest.mark.parametrize("given", ["half", "INT8"])
def test_precision_of_gpus_is_refused_without_gpus(given):
    said = f"--gpu-precision {given.lower()}: there is no GPU in this run \\(--gpus none\\); the CPU searches in single precision"
    with pytest.raises(SettingsError, match=said):
        running.choose_workers(AlignSettings("p.star", "run", gpus="none", gpu_precision=given))
    with pytest.raises(SettingsError, match="--gpu-precision: expected one of auto, int8, half, single; found 'double'"):
        AlignSettings("p.star", "run", gpu_precision="double")


@pytest.mark.parametrize("given", [None, "auto", "Auto", "single"])
def test_precision_of_the_cpu_may_be_named(given):
    assert running.choose_workers(AlignSettings("p.star", "run", gpus="none", gpu_precision=given)).backend == "cpu"
    assert AlignSettings("p.star", "run", gpu_precision=given).gpu_precision in (None, "single")


# --- no GPU ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "visible", "found", "numba_cuda", "reason"),
    [
        ({"gpus": "none"}, None, survey(), True, "--gpus none"),
        ({"cpu_procs": 2}, None, survey(), True, "--cpu-procs asks for the CPU"),
        ({}, None, NOWHERE, True, "there is no NVIDIA driver on this machine"),
        ({}, None, NOT_TOLD, True, "an NVIDIA driver is loaded, but nvidia-ml-py is not installed"),
        ({}, "", survey(), True, "CUDA_VISIBLE_DEVICES='' hides them"),
        ({}, None, survey(), False, "a GPU is there, but numba-cuda is not installed; expected pip install '.[cuda12]'"),
    ],
)
@pytest.mark.parametrize("option", [{"gpu_memory_gib": 20.0}, {"gpu_precision": "half"}, {"procs_per_gpu": "2"}])
def test_why_there_is_no_gpu_is_said(asked, visible, found, numba_cuda, reason, option, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", lambda: found)
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: object() if numba_cuda else None)
    typed = {"gpu_memory_gib": "--gpu-memory 20", "gpu_precision": "--gpu-precision half", "procs_per_gpu": "--procs-per-gpu 2"}[next(iter(option))]
    with pytest.raises(SettingsError) as caught:
        running.choose_workers(AlignSettings("p.star", "run", **asked, **option))
    assert str(caught.value).startswith(f"{typed}: there is no GPU in this run ({reason}")
    plan = running.choose_workers(AlignSettings("p.star", "run", **asked, **option), filed=set(option))  # of a job file: said, not refused
    assert plan.backend == "cpu" and typed in plan.unused and reason in plan.unused


def test_cores_of_a_job_file_are_no_matter_for_gpus(two_gpus):
    asked = AlignSettings("p.star", "run", gpus="0", cpu_procs=3)
    plan = running.choose_workers(asked, filed={"cpu_procs"})
    assert plan.gpu_ids == ("0",) and "--cpu-procs 3" in plan.unused
    for filed in ((), {"cpu_procs", "gpus"}):
        with pytest.raises(SettingsError, match="--cpu-procs: the workers of this run are on GPUs"):
            running.choose_workers(asked, filed)


def test_a_run_of_gpus_goes_on_without_one(small_set, tmp_path, monkeypatch):
    """What its job says of GPUs is a remark then; the same typed beside --gpus none stays refused."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # workers in this process hide the GPUs
    monkeypatch.setattr("numba_glocal.devices.survey_gpus", lambda: NOWHERE)
    monkeypatch.setattr(running, "write_report", lambda *_: None)
    monkeypatch.setattr(running, "make_executor", lambda *_, initializer, initargs, **__: SerialExecutor(initializer=initializer, initargs=initargs))
    job, folder = tmp_path / "gpu.toml", tmp_path / "run"
    job.write_text('gpus = "0"\ngpu_memory_gib = 20\ngpu_precision = "half"\nprocs_per_gpu = "2"\niterations = 1\n')
    assert "there is no NVIDIA driver" in run(small_set, folder, "--job", str(job)).output
    done = run(small_set, folder, "--job", str(job), "--gpus", "none")
    assert done.exit_code == 0, done.output
    remark = "not used, of the job's own options: --procs-per-gpu 2, --gpu-memory 20, --gpu-precision half; there is no GPU in this run (--gpus none)"
    assert remark in done.output.splitlines()
    done = run(small_set, tmp_path / "other", "--job", str(job), "--gpus", "none", "--gpu-memory", "4")
    assert done.exit_code == 2 and "--gpu-memory 4: there is no GPU in this run (--gpus none)" in done.output

    def resume(*options):
        return CliRunner().invoke(main, ["align", "-o", str(folder), "--resume", "--iterations", "2", *options], prog_name="numba-glocal")

    stored = (folder / "job.toml").read_text()
    (folder / "job.toml").write_text(stored.replace('gpus = "none"', 'gpus = "0"'))  # as a run on a GPU leaves it
    done = resume("--gpus", "none", "--gpu-precision", "auto")
    assert done.exit_code == 2 and "--resume: --gpu-precision was half in this run and cannot become auto" in done.output
    done = resume("--gpus", "none")
    assert done.exit_code == 0 and remark in done.output.splitlines(), done.output
    assert 'gpu_precision = "half"' in (folder / "job.toml").read_text()  # for a GPU that takes over again
