"""Level 3: several workers on one GPU, as `--gpus 0 --procs-per-gpu 4` makes them: all on that GPU, and nothing depends on their number."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import mrcfile
import numpy as np
import pytest
from silent_stage import Silent

from numba_glocal.devices import resolve_gpus, survey_gpus
from numba_glocal.execution.executors import make_executor
from numba_glocal.execution.gpu_worker import start_gpu_worker, warm_up_gpu_worker
from numba_glocal.job import prepare_job
from numba_glocal.refinement import Refinement
from numba_glocal.results import RunFolder
from numba_glocal.settings import AlignSettings
from numba_glocal.simulation import SimulationSettings, simulate

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the workers take over this path

import gpu_tasks  # noqa: E402

pytestmark = pytest.mark.cuda
WORKERS = 4
BYTES_EACH = 2 << 30


@pytest.fixture(scope="module")
def uuid() -> str:
    """Of GPU 0, as nvidia-smi says, else the driver's library."""
    found = survey_gpus()
    if not found.gpus:
        pytest.skip(f"no GPU: {found.problem}")
    if found.gpus[0].compute_mode != "default":
        pytest.skip(f"GPU 0 is in {found.gpus[0].compute_mode} mode: one worker only")
    if found.gpus[0].mig:
        pytest.skip("GPU 0 is split into instances")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--id=0", "--query-gpu=uuid", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found.gpus[0].uuid


def executor(workers: int, gpu_ids: list[str], **more):
    """A pool as `align` makes it."""
    arguments = ("cuda", 0, BYTES_EACH, workers, "auto")
    return make_executor(workers, gpu_ids, initializer=start_gpu_worker, initargs=arguments, warm_up=warm_up_gpu_worker, **more)


@pytest.mark.parametrize("by_name", [False, True], ids=["0", "UUID"])
def test_every_worker_has_the_gpu_that_was_listed_once(uuid, by_name, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_ids = resolve_gpus(uuid if by_name else "0")
    assert gpu_ids == [uuid if by_name else "0"]
    events = []
    with executor(WORKERS, gpu_ids, events=events.append) as pool:
        pool.wait_ready()
        seen = [future.result() for future in [pool.submit(gpu_tasks.seen, 0.5) for _ in range(3 * WORKERS)]]
    ready = {event.pid: event for event in events if event.kind == "ready"}
    assert len(ready) == WORKERS and {event.worker for event in ready.values()} == set(range(WORKERS))
    assert {event.gpu for event in ready.values()} == set(gpu_ids)
    for event in ready.values():  # the backend's own word, from the initializer
        assert uuid in event.about
    assert {pid for pid, *_ in seen} == set(ready), "every worker has answered"
    assert {tuple(rest) for _, *rest in seen} == {(gpu_ids[0], 1, uuid)}


@pytest.fixture(scope="module")
def particles(tmp_path_factory) -> Path:
    """96 particles of the built-in phantom."""
    settings = SimulationSettings(count=96, box_size=24, pixel_size_angst=14.0, snr=0.3, perturb_deg=4.0, shift_angst=5.0, seed=5)
    folder = tmp_path_factory.mktemp("particles")
    simulate(folder, settings)
    return folder


def align(particles: Path, output: Path, pool) -> None:
    """Two iterations; in tasks of six particles, so that there is something to do for all workers."""
    reference = str(particles / "reference.mrc")
    settings = AlignSettings(str(particles / "start.star"), str(output), reference=reference, particle_diameter_angst=260.0, iterations=2)
    job, folder = prepare_job(settings), RunFolder(output)
    folder.create(settings, [])
    loop = Refinement(job, pool, folder, Silent, chunk_limit=6)
    loop.finish(loop.run())


def test_four_workers_on_one_gpu_find_what_one_finds(uuid, particles, tmp_path):
    """Maps and lists to the last bit, and all four have done some of it."""
    gpu_ids = resolve_gpus("0")
    for workers in (1, WORKERS):
        events = []
        with executor(workers, gpu_ids, events=events.append) as pool:
            pool.wait_ready()
            align(particles, tmp_path / str(workers), pool)
        busy = {event.worker for event in events if event.kind == "done"}
        assert busy == set(range(workers)) and {event.gpu for event in events} == set(gpu_ids)
        assert not [event for event in events if event.kind in ("died", "replaced")]
    one, four = tmp_path / "1", tmp_path / str(WORKERS)
    for name in ("half1.mrc", "half2.mrc", "average.mrc"):
        maps = []
        for folder in (one, four):
            with mrcfile.open(folder / name) as file:
                maps.append(np.array(file.data))
        np.testing.assert_array_equal(*maps, err_msg=name)
        assert np.ptp(maps[0]) > 0
    assert (one / "particles.star").read_text() == (four / "particles.star").read_text()
