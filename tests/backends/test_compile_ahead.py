"""Kernels compiled ahead of the first launch, by helper processes that have no GPU (`numba_glocal.backends.cuda.ahead`)."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from numba_glocal.backends.cuda import ahead as ahead_module
from numba_glocal.backends.cuda.ahead import Ahead
from numba_glocal.execution import gpu_worker, tasks

H200 = (9, 0)
_REPORT = """
import sys
from numba_glocal.backends.cuda.compiling import compile_job, use_no_gpu
use_no_gpu((int(sys.argv[1]), 0))
from numba_glocal.backends.cuda.signatures import jobs
named = {job.name: job for job in jobs("half")[0]}
for name in sys.argv[2:]:
    print(name, compile_job(named[name])[1])
"""


@pytest.fixture
def jit(tmp_path, monkeypatch):
    folder = tmp_path / "jit"
    folder.mkdir()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    return folder


def helper_does(monkeypatch, code: str) -> None:
    monkeypatch.setattr(ahead_module, "_HELPER", code)


def ended(helpers: Ahead) -> list[int]:
    return [process.wait(60) for process in helpers.processes]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


# --- what lies in the cache -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    probe = "from numba import cuda; cuda.compile(lambda x: None, 'void(float32[:])', cc=(9, 0), device=False, abi='numba', output='ptx')"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode:
        pytest.skip("kernels cannot be compiled here")


def found_in_cache(names: list[str], major: int = 9) -> dict[str, str]:
    """What a fresh process finds of kernels when it asks for them."""
    done = subprocess.run([sys.executable, "-c", _REPORT, str(major), *names], capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


def test_a_second_process_compiles_nothing(jit, compiler, monkeypatch):
    from numba_glocal.backends.cuda.signatures import jobs

    small = ["clear_sums", "mask_volumes", "take_off"]
    numbers = [number for number, job in enumerate(jobs("half")[0]) if job.name in small]
    monkeypatch.setattr(ahead_module, "_QUEUE", bytes(numbers))
    helpers = Ahead("half", 2, H200)
    assert len(helpers.processes) == 2
    helpers.wait()
    assert ended(helpers) == [0, 0]
    # what nobody has compiled is missing, and so is what was compiled for another GPU
    assert found_in_cache([*small, "clear_best"]) == {"clear_sums": "True", "mask_volumes": "True", "take_off": "True", "clear_best": "False"}
    assert found_in_cache(["clear_sums"], major=8) == {"clear_sums": "False"}
    assert not [path for path in jit.rglob("*") if ".tmp." in path.name]


def test_every_kernel_is_listed_once_and_only_once(compiler):
    from numba.cuda.dispatcher import CUDADispatcher

    from numba_glocal.backends import cuda
    from numba_glocal.backends.cuda.signatures import jobs

    modules = [importlib.import_module(f"{cuda.__name__}.{found.name}") for found in pkgutil.iter_modules(cuda.__path__)]
    for precision in ("int8", "half", "single"):
        first, later = jobs(precision)
        assert len({job.kernel for job in [*first, *later]}) == len([*first, *later]) < len(ahead_module._QUEUE)
        listed = {job.kernel for job in first}
        for module in modules:
            kinds = {name: each for name, each in vars(module).items() if isinstance(each, CUDADispatcher)}
            missing = {name for name, each in kinds.items() if not each.targetoptions["device"] and each not in listed}
            assert not missing, f"{module.__name__}: give {missing} their types in signatures.py"


# --- who waits for whom ---------------------------------------------------------------------------------------------------------------------


def test_workers_wait_for_any_workers_helpers(jit, monkeypatch):
    helper_does(monkeypatch, "import time; time.sleep(1.5)")
    one = Ahead("half", 2, H200)
    assert len(one.processes) == 2
    other = Ahead("half", 2, H200)
    assert other.processes == []
    other.wait()
    assert [process.poll() for process in one.processes] == [0, 0]


def test_waiting_ends_when_helpers_let_go_of_the_lock_or_hang(jit, monkeypatch):
    lets_go = "import os, sys, time; time.sleep(0.5); os.close(int(sys.argv[3])); os.read(0, 1)"
    helper_does(monkeypatch, lets_go)
    helpers = Ahead("half", 1, H200)
    helpers.wait()
    assert helpers.processes[0].poll() is None, "it goes on with what is needed later"
    helper_does(monkeypatch, "import os; os.read(0, 1)")
    monkeypatch.setattr(ahead_module, "_PATIENCE_S", 0.3)
    hanging = Ahead("half", 1, H200)
    begin = time.monotonic()
    hanging.wait()
    assert 0.2 < time.monotonic() - begin < 10
    for one in (helpers, hanging):
        one.processes[0].stdin.close()
        assert ended(one) == [0]


def test_a_warm_cache_needs_no_helpers(jit, monkeypatch):
    helper_does(monkeypatch, "pass")
    cold = Ahead("half", 1, H200)
    ended(cold)
    assert len(Ahead("half", 1, H200).processes) == 1, "helpers alone prove nothing: one may have failed"
    cold.wait()
    cold.done()
    assert Ahead("half", 1, H200).processes == []
    assert len(Ahead("single", 1, H200).processes) == 1
    Ahead("half", 0, H200).wait()
    assert len(Ahead("half", 1, (8, 0)).processes) == 1
    monkeypatch.setattr(ahead_module.importlib.metadata, "version", lambda name: "another")
    Ahead("half", 0, H200).wait()
    assert len(Ahead("half", 1, H200).processes) == 1


# --- what goes wrong ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import os; os.abort()", "this is no Python"])
def test_a_helper_that_fails_is_nobodys_business(code, jit, monkeypatch, capfd):
    helper_does(monkeypatch, code)
    helpers = Ahead("half", 2, H200)
    helpers.wait()
    assert 0 not in ended(helpers)
    assert capfd.readouterr() == ("", "")


def test_without_a_folder_a_gpu_or_cores_nothing_is_started(jit, monkeypatch):
    helper_does(monkeypatch, "pass")
    assert Ahead("half", 0, H200).processes == []
    monkeypatch.setattr(ahead_module, "compute_capability", lambda: None)
    assert Ahead("half", 2).processes == []
    monkeypatch.setattr(ahead_module, "compute_capability", lambda: H200)
    assert len(Ahead("half", 1).processes) == 1
    (jit / "file").touch()
    for folder in (str(jit / "file" / "below"), str(jit / "absent"), None):
        if folder is None:
            monkeypatch.delenv("NUMBA_CACHE_DIR")
        else:
            monkeypatch.setenv("NUMBA_CACHE_DIR", folder)
        nobody = Ahead("half", 2)
        assert nobody.processes == []
        nobody.wait()
        nobody.done()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(jit))
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert Ahead("half", 2).processes == []


def test_a_system_that_starts_no_process_is_no_error(jit, monkeypatch):
    monkeypatch.setattr(ahead_module.sys, "executable", "/no/such/python")
    helpers = Ahead("half", 2, H200)
    assert helpers.processes == []
    begin = time.monotonic()
    helpers.wait()
    assert time.monotonic() - begin < 5, "the lock was given back"


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_helpers_end_with_their_worker_and_not_by_ctrl_c(end, jit, compiler):
    """Real helpers, which have more to do than there is time for."""
    worker = f"""
import sys, time
from numba_glocal.backends.cuda.ahead import Ahead
helpers = Ahead("half", 2, {H200})
print(*(process.pid for process in helpers.processes), flush=True)
sys.stdin.readline()
"""
    process = subprocess.Popen([sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(running, pids))
    while "numba" not in Path(f"/proc/{pids[0]}/maps").read_text():  # in the middle of it: Numba is loaded
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, 2)
    time.sleep(0.5)
    assert all(map(running, pids))
    if end == "kill":
        process.kill()
    else:
        process.stdin.write("\n")
        process.stdin.close()
    process.wait(20)
    assert gone(pids)


def test_helpers_see_no_gpu(jit, monkeypatch):
    out = jit / "seen"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    helper_does(monkeypatch, f"import os; open({str(out)!r}, 'w').write(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    ended(Ahead("half", 1, H200))
    assert out.read_text() == "''"


# --- in a worker ----------------------------------------------------------------------------------------------------------------------------


def test_a_worker_starts_helpers_first_and_waits_before_its_warm_up(monkeypatch):
    steps = []

    class Watched:
        def __init__(self, precision, helpers):
            steps.append(("helpers", precision, helpers))

        def wait(self):
            steps.append("wait")

        def done(self):
            steps.append("done")

    monkeypatch.setattr(gpu_worker, "Ahead", Watched)
    monkeypatch.setattr(gpu_worker, "_ahead", None)
    monkeypatch.setattr(gpu_worker, "usable_cores", lambda: 5)
    monkeypatch.setattr(tasks, "start_worker", lambda *arguments: steps.append(arguments) or "a device")
    monkeypatch.setattr(tasks, "warm_up_cuda", lambda: steps.append("warm-up"))
    assert gpu_worker.start_gpu_worker(None, "cuda", 1, 2, 3, "single") == "a device"
    gpu_worker.warm_up_gpu_worker()
    assert steps == [("helpers", "single", 5), (None, "cuda", 1, 2, 3, "single"), "wait", "warm-up", "done"]
    monkeypatch.setattr(gpu_worker, "usable_cores", lambda: 1)
    gpu_worker.start_gpu_worker(None, "cuda", 1)
    assert ("helpers", "auto", 0) in steps, "one core: nothing is gained"
    monkeypatch.setattr(tasks, "warm_up_cuda", lambda: 1 / 0)
    del steps[:]
    with pytest.raises(ZeroDivisionError):
        gpu_worker.warm_up_gpu_worker()
    assert steps == ["wait"]
