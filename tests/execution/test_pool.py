"""The pool of pinned workers. No GPU is needed: what counts is the environment a worker has, and what happens when one dies."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest

from numba_glocal.errors import BadParticleError, SettingsError, WorkerError
from numba_glocal.execution.executors import SerialExecutor, gather_in_order, make_executor
from numba_glocal.execution.pinning import THREAD_VARIABLES
from numba_glocal.execution.pool import PinnedPool

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))  # the workers take over this path

import pool_tasks  # noqa: E402


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which nobody has collected yet, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


# --- all tasks, any number of workers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4, 5])
def test_eleven_tasks_on_any_number_of_workers(n_workers):
    with PinnedPool(n_workers) as pool:
        assert list(gather_in_order(pool, pool_tasks.square, range(11))) == [x * x for x in range(11)]


def test_four_tasks_on_eight_workers_and_none_at_all():
    with PinnedPool(8) as pool:
        assert list(pool.map(pool_tasks.square, range(4))) == [0, 1, 4, 9]
        assert list(gather_in_order(pool, pool_tasks.square, [])) == []


def test_a_pool_needs_a_worker():
    with pytest.raises(SettingsError, match="at least one worker"):
        PinnedPool(0)


def test_seven_tasks_on_two_gpus_see_only_their_own():
    events = []
    with PinnedPool(5, ["0", "GPU-8f1c"], events=events.append) as pool:
        assert pool.gpu_of_worker == ["0", "GPU-8f1c", "0", "GPU-8f1c", "0"]
        pool.wait_ready()
        seen = list(gather_in_order(pool, pool_tasks.whoami, range(7)))
    gpu_of_pid = {event.pid: event.gpu for event in events if event.kind == "ready"}
    assert len(gpu_of_pid) == 5
    assert len(seen) == 7
    assert all(gpu_of_pid[pid] == gpu for pid, gpu in seen)


def test_cpu_workers_see_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with PinnedPool(1) as pool:
        assert pool.submit(pool_tasks.whoami).result()[1] == ""


def test_slow_gpu_pulls_fewer_tasks_but_keeps_its_workers():
    with PinnedPool(2, ["0", "1"]) as pool:
        pool.wait_ready()
        seen = list(gather_in_order(pool, pool_tasks.slow_on_gpu_0, range(20)))
    assert [x for x, _, _ in seen] == list(range(20))
    by_gpu = {gpu: [pid for _, pid, g in seen if g == gpu] for gpu in ("0", "1")}
    assert 1 <= len(by_gpu["0"]) < len(by_gpu["1"])
    assert len(set(by_gpu["0"])) == len(set(by_gpu["1"])) == 1


# --- death ----------------------------------------------------------------------------------------------------------------------------------


def test_dead_workers_are_replaced_with_the_same_gpu_and_the_task_is_redone(tmp_path):
    events = []
    tasks = [(str(tmp_path / f"m{i}") if i in (1, 4) else None, i) for i in range(7)]
    with PinnedPool(2, ["0", "1"], events=events.append) as pool:
        pool.wait_ready()
        assert [x for x, _ in gather_in_order(pool, pool_tasks.kill_once, tasks)] == list(range(7))
        pool.wait_ready()
    died = [event for event in events if event.kind == "died"]
    replaced = [event for event in events if event.kind == "replaced"]
    assert len(died) == len(replaced) == 2
    assert all("SIGKILL" in event.text for event in died)
    for kind in ("started", "replaced", "ready", "done", "died"):
        assert all(event.gpu == str(event.worker) for event in events if event.kind == kind)
    assert sorted(event.worker for event in replaced) == sorted(event.worker for event in died)
    assert sum(event.kind == "done" for event in events) == 7


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, r"SIGKILL.*out of memory"), (signal.SIGSEGV, r"SIGSEGV \(segmentation fault\)"), (signal.SIGTERM, "SIGTERM")],
)
def test_a_task_that_kills_three_workers_fails_and_names_the_cause(number, cause):
    begin = time.monotonic()
    with PinnedPool(2) as pool:
        future = pool.submit(pool_tasks.kill_always, 0, number)
        others = [pool.submit(pool_tasks.square, x) for x in range(5)]
        with pytest.raises(WorkerError, match=f"killed 3 workers.*{cause}") as caught:
            future.result()
        assert "about to go" in caught.value.traceback_text
        assert "\n" not in str(caught.value)
        assert [other.result() for other in others] == [x * x for x in range(5)]
    assert time.monotonic() - begin < 5


def test_exit_code_is_named():
    with PinnedPool(1) as pool, pytest.raises(WorkerError, match="exit code 3"):
        pool.submit(pool_tasks.leave, 3).result()


def test_a_worker_killed_while_idle_is_replaced():
    events = []
    with PinnedPool(1, ["0"], events=events.append) as pool:
        first, _ = pool.submit(pool_tasks.whoami).result()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: sum(event.kind == "ready" for event in events) == 2)
        second, gpu = pool.submit(pool_tasks.whoami).result()
    assert second != first
    assert gpu == "0"


# --- exceptions -----------------------------------------------------------------------------------------------------------------------------


def test_an_exception_arrives_as_it_was_with_the_workers_traceback_and_others_go_on():
    with PinnedPool(2) as pool:
        bad = pool.submit(pool_tasks.bad_particle, "7.mrc")
        good = [pool.submit(pool_tasks.square, x) for x in range(4)]
        error = bad.exception()
        assert [future.result() for future in good] == [0, 1, 4, 9]
    assert type(error) is BadParticleError
    assert (error.name, error.reason, str(error)) == ("7.mrc", "constant", "7.mrc: constant")
    assert "pool_tasks.py" in "".join(error.__notes__) and "in bad_particle" in "".join(error.__notes__)


def test_an_exception_that_does_not_pickle_is_quoted():
    with PinnedPool(1) as pool:
        error = pool.submit(pool_tasks.raise_unpicklable, 0).exception()
        assert isinstance(error, WorkerError)
        assert "Unpicklable: this and that" in str(error)
        assert "in raise_unpicklable" in error.traceback_text
        assert pool.submit(pool_tasks.square, 3).result() == 9


def test_a_task_that_exits_fails_and_does_not_end_this_process():
    with PinnedPool(1) as pool:
        error = pool.submit(sys.exit, 0).exception()
        assert isinstance(error, WorkerError) and "SystemExit: 0" in str(error)


def test_what_does_not_pickle_is_an_error_of_the_task_or_the_submit():
    with PinnedPool(1) as pool:
        assert isinstance(pool.submit(pool_tasks.return_unpicklable, 0).exception(), (pickle.PicklingError, AttributeError, TypeError))
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            pool.submit(lambda: None)
        assert pool.submit(pool_tasks.square, 3).result() == 9


# --- start ----------------------------------------------------------------------------------------------------------------------------------


def test_initializer_runs_in_every_worker_and_its_answer_is_told(tmp_path):
    events = []
    log = tmp_path / "log"
    with PinnedPool(3, ["2", "5"], initializer=pool_tasks.greet, initargs=(log,), events=events.append) as pool:
        pool.wait_ready()
    assert sorted(log.read_text().splitlines()) == ["0 2 1 0 2", "1 5 1 0 5", "2 2 1 0 2"]
    ready = {event.worker: event for event in events if event.kind == "ready"}
    assert {index: event.about["name"] for index, event in ready.items()} == {i: f"device of {i}" for i in range(3)}
    assert all(event.seconds > 0 for event in ready.values())


def test_an_initializer_that_fails_breaks_the_pool_with_its_reason():
    with PinnedPool(2, initializer=pool_tasks.refuse, initargs=("no such device",)) as pool:
        with pytest.raises(WorkerError, match="cannot start: ValueError: no such device") as caught:
            pool.wait_ready()
        assert "in refuse" in caught.value.traceback_text
        with pytest.raises(WorkerError, match="no such device"):
            pool.submit(pool_tasks.square, 1)


def test_workers_that_die_at_start_break_the_pool_with_their_last_words():
    with PinnedPool(1, initializer=pool_tasks.die_at_start) as pool:
        try:
            future = pool.submit(pool_tasks.square, 1)
        except WorkerError as error:  # it had broken before
            caught = error
        else:
            caught = future.exception(timeout=10)
    assert isinstance(caught, WorkerError)
    assert "exit code 7" in str(caught) and "libcuda is not here" in str(caught)


def test_a_worker_that_is_not_ready_in_time_breaks_the_pool():
    with PinnedPool(1, initializer=pool_tasks.sleep_at_start, start_timeout_s=0.5) as pool:
        with pytest.raises(WorkerError, match="not ready after 0.5 s"):
            pool.wait_ready()


def test_one_worker_warms_up_first_then_the_others_together(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "runs").mkdir()
    with PinnedPool(4, warm_up=functools.partial(pool_tasks.warm_up, tmp_path / "runs")) as pool:
        pool.wait_ready()
    runs = sorted(tuple(float(word) for word in path.read_text().split()) for path in (tmp_path / "runs").glob("*.txt"))
    assert len(runs) == 4
    assert [found for _, _, found in runs] == [0, 1, 1, 1]
    first_end = runs[0][1]
    assert all(begin >= first_end for begin, _, _ in runs[1:])
    assert runs[3][0] < runs[1][1], "the others load one after another"


# --- what a worker may use ------------------------------------------------------------------------------------------------------------------


def test_thread_caps_hold_in_the_libraries_themselves(monkeypatch, tmp_path):
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with PinnedPool(1) as pool:
        seen = pool.submit(pool_tasks.environment, [*THREAD_VARIABLES, "OMP_PROC_BIND"]).result()
        already, numba_threads, fftw_threads, blas, cache = pool.submit(pool_tasks.threads_seen).result()
    assert seen == dict.fromkeys(THREAD_VARIABLES, "1") | {"OMP_PROC_BIND": None}
    assert already == [], "these were imported before the worker's environment could be checked"
    assert (numba_threads, fftw_threads) == (1, 1)
    assert blas == {1}
    assert cache == str(tmp_path)


def test_threads_when_told():
    with PinnedPool(1, threads=2) as pool:
        assert set(pool.submit(pool_tasks.environment, THREAD_VARIABLES).result().values()) == {"2"}


def test_all_workers_share_one_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with PinnedPool(2) as pool:
        pool.wait_ready()
        folders = {pool.submit(pool_tasks.environment, ["NUMBA_CACHE_DIR"]).result()["NUMBA_CACHE_DIR"] for _ in range(4)}
    assert len(folders) == 1
    assert Path(folders.pop()).parent == tmp_path / "numba-glocal"


# --- the end --------------------------------------------------------------------------------------------------------------------------------


def test_leaving_by_an_exception_ends_the_workers_at_once():
    begin = time.monotonic()
    events = []
    with pytest.raises(KeyboardInterrupt), PinnedPool(2, events=events.append) as pool:
        pool.wait_ready()
        futures = [pool.submit(time.sleep, 60) for _ in range(4)]
        wait_until(lambda: sum(future.running() for future in futures) == 2)
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 5
    assert all(future.done() for future in futures)
    assert sum(future.cancelled() for future in futures) == 2
    assert all(isinstance(future.exception(), WorkerError) for future in futures if not future.cancelled())
    assert not any(is_alive(event.pid) for event in events)


def test_shutdown_cancels_what_has_not_begun():
    with PinnedPool(1) as pool:
        pool.wait_ready()
        futures = [pool.submit(pool_tasks.slow_square, x, 0.2) for x in range(3)]
        wait_until(futures[0].running)
        pool.shutdown(cancel_futures=True)
        assert futures[0].result() == 0
        with pytest.raises(CancelledError):
            futures[2].result()
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(pool_tasks.square, 1)


def test_workers_are_deaf_to_ctrl_c():
    with PinnedPool(1) as pool:
        assert pool.submit(pool_tasks.interrupt_self_and_group, 5).result() == 5


PARENT = """
import sys, time
sys.path.insert(0, {root!r}); sys.path.insert(0, {here!r})
import pool_tasks
from numba_glocal.execution.pool import PinnedPool
pool = PinnedPool(3, events=lambda event: event.kind == "ready" and print(event.pid, flush=True))
pool.wait_ready()
busy = [pool.submit(time.sleep, 60) for _ in range(2)]
{end}
"""


@pytest.mark.parametrize("how", ["kill", "interrupt", "exit"])
def test_no_orphans(how):
    end = "" if how == "exit" else "print('up', flush=True)\ntime.sleep(60)"
    code = PARENT.format(root=str(ROOT), here=str(HERE), end=end)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(3)]
        if how == "exit":
            assert parent.wait(10) == 0
        else:
            assert parent.stdout.readline() == "up\n"
            assert all(is_alive(pid) for pid in pids)
            if how == "kill":
                parent.kill()
            else:
                os.killpg(parent.pid, signal.SIGINT)  # as a terminal does it
            parent.wait(10)
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
        if how == "interrupt":
            assert parent.stderr.read().count("Traceback") == 1, "a worker printed a traceback of its own"


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from numba_glocal.execution.pool import PinnedPool
{body}
"""
BODY = """
class Answer:
    def __init__(self, value): self.value = value
def twice(x): return Answer(2 * x)
if __name__ == "__main__":
    with PinnedPool(1) as pool: print(pool.submit(twice, 21).result().value)
"""


@pytest.mark.parametrize("how", ["script", "module", "stdin"])
def test_wherever_the_main_module_is(how, tmp_path):
    # From stdin there is no script to find functions in: there, tasks come from modules.
    body = "import operator\nwith PinnedPool(1) as pool: print(pool.submit(operator.mul, 21, 2).result())" if how == "stdin" else BODY
    code = textwrap.dedent(SCRIPT.format(root=str(ROOT), body=body))
    (tmp_path / "user_script.py").write_text(code)
    command = {"script": ["user_script.py"], "module": ["-m", "user_script"], "stdin": ["-"]}[how]
    done = subprocess.run([sys.executable, *command], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("42\n", "")


# --- the other executors, and results in order ----------------------------------------------------------------------------------------------


def test_make_executor_chooses():
    with make_executor(0) as executor:
        assert isinstance(executor, SerialExecutor)
        assert executor.submit(pool_tasks.square, 4).result() == 16
        with pytest.raises(BadParticleError):
            executor.submit(pool_tasks.bad_particle, "a").result()
    with make_executor(gpu_ids=["0", "1", "2"]) as executor:
        assert executor.gpu_of_worker == ["0", "1", "2"]
    with make_executor(3, ["0", "1"]) as executor:
        assert executor.gpu_of_worker == ["0", "1", "0"]


def test_serial_executor_runs_the_initializer(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    SerialExecutor(initializer=pool_tasks.greet, initargs=(tmp_path / "log",))
    assert (tmp_path / "log").read_text() == "0 None 1 0 \n"


def test_gather_bounds_what_is_in_flight_and_reports_each_task_once():
    drawn, yielded, reported = 0, 0, []

    def tasks():
        nonlocal drawn
        for x in range(30):
            drawn += 1
            assert drawn - yielded <= 5
            yield x

    with PinnedPool(2) as pool:
        for result in gather_in_order(pool, pool_tasks.slow_square, tasks(), progress=lambda t, r: reported.append((t, r)), in_flight=5):
            assert result == yielded**2
            yielded += 1
    assert yielded == 30
    assert sorted(reported) == [(x, x * x) for x in range(30)]


def test_gather_stops_at_the_first_failure():
    done = []
    with PinnedPool(2) as pool:
        pool.wait_ready()
        with pytest.raises(ValueError, match="task 3"):
            for result in gather_in_order(pool, pool_tasks.fail_at, [(i, (3,)) for i in range(40)], progress=lambda t, r: done.append(t)):
                assert result < 3
    assert len(done) < 12


def test_gather_works_with_any_executor():
    with SerialExecutor() as executor:
        assert list(gather_in_order(executor, abs, [-1, 2, -3])) == [1, 2, 3]
    with ThreadPoolExecutor(2) as executor:
        assert list(gather_in_order(executor, abs, [-1, 2, -3])) == [1, 2, 3]
