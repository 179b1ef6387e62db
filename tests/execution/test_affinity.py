"""Workers prefer particles they have had, and nothing else changes; large results come beside the pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from numba_glocal.execution.executors import SerialExecutor, gather_in_order
from numba_glocal.execution.pool import PinnedPool

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the workers take over this path

import pool_tasks  # noqa: E402
from pool_tasks import Keyed  # noqa: E402


def test_a_free_worker_takes_its_own_then_nobodys_then_anothers():
    with PinnedPool(2, ["0", "1"]) as pool:
        pool.wait_ready()
        first = list(gather_in_order(pool, pool_tasks.where_and_when, [Keyed(0, ("a",), 0.2), Keyed(1, ("b",), 0.2)]))
        gpu_of = {"a": first[0][1], "b": first[1][1]}
        assert sorted(gpu_of.values()) == ["0", "1"]
        # one worker is held for long, the other a little, while tasks gather
        held = [pool.submit_near(task.affinity, pool_tasks.where_and_when, task) for task in (Keyed(2, ("a",), 1.5), Keyed(3, ("b",), 0.3))]
        time.sleep(0.1)
        waiting = [Keyed(4, ("a",)), Keyed(5, ("new",)), Keyed(6, ("b", "c")), Keyed(7, ("b",))]
        futures = [pool.submit_near(task.affinity, pool_tasks.where_and_when, task) for task in waiting]
        done = [future.result() for future in futures]
        assert [future.result()[1] for future in held] == [gpu_of["a"], gpu_of["b"]]
    assert {gpu for _, gpu, _ in done} == {gpu_of["b"]}, "a task waited although a worker was free"
    assert [number for number, _, _ in sorted(done, key=lambda result: result[2])] == [6, 7, 5, 4]


def test_passes_over_the_same_chunks_stay_where_they_were():
    tasks = [Keyed(i, (f"p{i}", f"q{i}")) for i in range(8)]
    with PinnedPool(2, ["0", "1"]) as pool:
        pool.wait_ready()
        rounds = [list(gather_in_order(pool, pool_tasks.where_and_when, order)) for order in (tasks, tasks[::-1], tasks[3:] + tasks[:3])]
    assert [number for number, _, _ in rounds[1]] == list(range(8))[::-1], "results come in task order"
    gpu = [{number: gpu for number, gpu, _ in results} for results in rounds]
    for later in gpu[1:]:
        assert sum(gpu[0][i] == later[i] for i in range(8)) >= 6


def test_a_slow_workers_tasks_are_stolen():
    tasks = [Keyed(i, ("all",)) for i in range(12)]
    with PinnedPool(2, ["0", "1"]) as pool:
        pool.wait_ready()
        # the slow one has had all, the fast one other particles
        while pool.submit_near(["all"], pool_tasks.whoami).result()[1] != "0":
            pass
        begin = time.monotonic()
        seen = list(gather_in_order(pool, pool_tasks.slow_keyed_on_gpu_0, tasks))
    assert [number for number, _ in seen] == list(range(12))
    assert sum(gpu == "1" for _, gpu in seen) >= 9
    assert time.monotonic() - begin < 1.5, "somebody waited"


def test_a_replaced_worker_has_had_nothing_and_the_task_is_redone_first(tmp_path):
    with PinnedPool(1, ["0"]) as pool:
        pool.wait_ready()
        assert list(gather_in_order(pool, pool_tasks.large_arrays, [(1, None)]))[0]["number"] == 1
        died = pool.submit_near(["x"], pool_tasks.kill_once, (str(tmp_path / "marker"), 5))
        others = [pool.submit_near(["x"], pool_tasks.square, i) for i in range(3)]
        assert died.result() == (5, "0")
        assert [other.result() for other in others] == [0, 1, 4]


def test_other_executors_take_tasks_with_affinity():
    with SerialExecutor() as executor:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        assert [number for number, _, _ in gather_in_order(executor, pool_tasks.where_and_when, [Keyed(i, ("a",), 0.0) for i in range(3)])] == [
            0,
            1,
            2,
        ]


# --- large results --------------------------------------------------------------------------------------------------------------------------


def shared_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def test_large_results_arrive_whole_and_can_be_written_to(tmp_path):
    before = shared_memory_files()
    with PinnedPool(2) as pool:
        results = list(gather_in_order(pool, pool_tasks.large_arrays, [(i, str(tmp_path / "m") if i == 3 else None) for i in range(7)]))
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result["big"], np.arange(3 << 18) * float(number))
        np.testing.assert_array_equal(result["complex"], result["big"][::2])
        assert result["number"] == number and result["small"].tolist() == [number] * 3
        result["big"] += 1  # partial sums are added to
    assert shared_memory_files() == before


def test_nothing_of_a_large_result_goes_through_the_pipe(monkeypatch):
    """What is unpickled from the pipe is small."""
    from numba_glocal.execution import process

    seen = []
    loads = process.pickle.loads
    monkeypatch.setattr(process.pickle, "loads", lambda data, **more: seen.append(len(data)) or loads(data, **more))
    with PinnedPool(1) as pool:
        pool.submit(pool_tasks.large_arrays, (2, None)).result()
    assert max(seen) < 10_000
    with PinnedPool(1) as pool:
        assert len(pool.submit(pool_tasks.many_bytes, 3_000_000).result()) == 3_000_000  # no array: as before


def test_an_outbox_that_is_full_falls_back_to_the_pipe(monkeypatch):
    from numba_glocal.execution import worker

    monkeypatch.setattr(worker.os, "pwrite", lambda *a: (_ for _ in ()).throw(OSError("No space left on device")))
    outbox = os.memfd_create("test")
    try:
        import pickle

        kind, value, _ = pickle.loads(worker._answer(np.ones(1 << 20), 0.5, outbox))
        assert kind == "value" and value.sum() == 1 << 20
    finally:
        os.close(outbox)


@pytest.mark.parametrize("who", ["worker", "pool"])
def test_no_memory_is_left_when_somebody_is_killed(who):
    """Outboxes have no name: what is not open any more is gone."""
    code = f"""
import sys, time; sys.path[:0] = [{str(HERE.parents[1])!r}, {str(HERE)!r}]
import pool_tasks
from numba_glocal.execution.pool import PinnedPool
pool = PinnedPool(1, events=lambda event: event.kind == "ready" and print(event.pid, flush=True))
pool.submit(pool_tasks.large_arrays, (1, None)).result()
print("done", flush=True)
time.sleep(60)
"""
    before = shared_memory_files()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "done\n"
        os.kill(pid if who == "worker" else parent.pid, signal.SIGKILL)
        if who == "worker":
            assert int(parent.stdout.readline()) != pid
        parent.kill()
    assert shared_memory_files() == before
