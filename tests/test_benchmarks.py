"""The benchmarks run on tiny problems, compare things that agree, and fill the README's tables."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from numba_glocal.simulation import SimulationSettings, simulate

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    """A benchmark as a module, without leaving its folder on the path."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen small particles with known poses, in files named as the large set's; their boxes are as wide as its."""
    folder = tmp_path_factory.mktemp("tiny")
    simulate(folder, SimulationSettings(count=16, box_size=24, pixel_size_angst=64 * 6.8 / 24, snr=0.5, perturb_deg=4.0, shift_angst=5.0))
    (folder / "truth.mrc").symlink_to(folder / "reference.mrc")
    return folder


def test_kernels(tmp_path: Path) -> None:
    load("kernels").main(["--quick"], tmp_path)
    results = json.loads((tmp_path / "kernels.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {row["benchmark"] for row in results["rows"]} >= {"search", "alternatives"}
    assert all(row["min_s"] > 0 for row in results["rows"])
    environment = results["environment"]
    assert environment["processor"] and environment["versions"]["numba"] and environment["commit"] and environment["date"]


def test_matrix_products_find_what_the_search_finds() -> None:
    """Both score the same rotations and shifts: the comparison of their speed is one of equals."""
    kernels = load("kernels")
    problem = kernels.SearchProblem(24, 8, 4)
    rotations = kernels.small_rotations(6.0, 1)
    level = problem.level(rotations, 2.0, keep=len(rotations))
    _, _, best = kernels.matrix_product(problem, level, 4, 10**6)
    session = problem.session()
    problem.load(session, 0, 4)
    starts = kernels.as_candidates(np.repeat(np.eye(3)[None], 4, 0), np.zeros((4, 3)))
    found = session.search(starts, np.zeros((4, 3)), problem.level(rotations, 2.0, keep=1))
    # ml is 2 num - den2, and den2 is nearly the same for all rotations: the winner's num is the best but for that
    for p in range(4):
        row = int(np.argmin(np.linalg.norm(rotations - found.rotations[p, 0], axis=(1, 2))))
        assert best[row, p] >= best[:, p].max() * 0.97


def test_prototype_agrees(shared: Path) -> None:
    """`prototype_kernels` raises where the two compute different things."""
    rows = load("kernels").prototype_kernels(shared, 24, 8, 1)
    assert [row["variant"] for row in rows if row["benchmark"] == "gather"][:2] == ["ours", "prototype"]


@pytest.mark.slow
def test_iteration(tiny_set: Path, shared: Path, tmp_path: Path) -> None:
    """A run's rows hold what the tables show, and the poses are found: its own errors, judged by the independent tool."""
    load("iteration").main([str(tiny_set), "--quick"], tmp_path)
    whole, first = json.loads((tmp_path / "iteration.json").read_text())["rows"]
    assert whole["benchmark"] == "run" and whole["iterations"] == 1 and 0 < whole["workers_ready_after_s"] < whole["wall_s"]
    assert 0 < first["cpu_s"] < whole["cpu_s"] and first["averages_s"] > 0
    assert first["seconds"] >= first["noise_s"] + first["align_s"] + first["averages_s"] - 0.01
    assert whole["median_deg"] < 2.5
    assert "ours: quick" in load("table").table("iteration", tmp_path)


def test_memory(tiny_set: Path, tmp_path: Path) -> None:
    load("memory").main([str(tiny_set), "--quick"], tmp_path)
    (row,) = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert row["particles"] == 20 and row["workers"] == 1 and row["chunk"] == 8
    assert 50 < row["worker_peak_mib"] < 2000 and 50 < row["parent_peak_mib"] < 2000


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    """A cold run and a warm one; the stages and the parent's own part make up an iteration."""
    load("end_to_end").main(["--quick", "--cpu", "-o", str(tmp_path)])
    results = json.loads((tmp_path / "end_to_end.json").read_text())
    assert results["environment"]["gpus"] is not None and results["environment"]["versions"]["numba"]
    runs = [row for row in results["rows"] if row["benchmark"] == "run"]
    assert [row["jit_cache"] for row in runs] == ["cold", "warm"] and runs[0]["workers_ready_s"] > runs[1]["workers_ready_s"] > 0
    for row in (row for row in results["rows"] if row["benchmark"] == "iteration"):
        stages = [row[name] for name in ("noise_s", "align_s", "refine_s", "average_s", "rest_s")]
        assert all(seconds > 0 for seconds in stages) and sum(stages) == pytest.approx(row["seconds"], abs=0.01)
    text = load("table").table("end_to_end", tmp_path)
    assert (
        f"24 particles of 24^3. Workers ready after {runs[0]['workers_ready_s']:.1f} s with a cold" in text
        and f"| 1 | {row['band_angst']:.1f} A |" in text
    )


@pytest.mark.slow
def test_procs_per_gpu(tmp_path: Path) -> None:
    load("procs_per_gpu").main(["--quick", "--cpu", "--workers", "1", "2", "-o", str(tmp_path)])
    one, two = json.loads((tmp_path / "procs_per_gpu.json").read_text())["rows"]
    assert (one["workers"], two["workers"]) == (1, 2) and one["maps"] == two["maps"] and len(one["iteration_s"]) == 1
    assert f"| 2 | off | {two['workers_ready_s']:.1f} s |" in load("table").table("procs_per_gpu", tmp_path)


def test_throughput_loop_and_shares(tmp_path: Path) -> None:
    """The loop finds what it was given; a share is work over time over rate."""
    throughput = load("throughput")
    throughput.main(["--cpu", "-o", str(tmp_path)])
    (row,) = json.loads((tmp_path / "throughput.json").read_text())["rows"]
    assert row["affine_transform_finds_it"] and row["affine_transform_us_per_particle_and_rotation"] > 0
    rotations = throughput.local_list(343)
    assert len({tuple(np.round(rotation, 6).ravel()) for rotation in rotations}) == 343
    row = {"rotations": 10, "shifts": 7, "k_max": 5, "batch": 20, "per_particle_us": {"turn": 2.0, "scores": 1.0, "choice": 0.5, "den2": 3.0}}
    row |= {"search_way": {"half": "product", "int8": "int8, particles shifted"}, "search_fp32_tinstructions_s": 6.0}
    half = {"factors": 1.0, "columns": 1.0, "templates": 1.0, "product": 3.0, "best_of_tile": 5.0}
    pairs = throughput.lines.line_band(5.0).n_pairs
    rates = {"copy_tb_s": 2.0, "fp32_tflop_s": 60.0, "gemm_half_tflop_s": 500.0, "gemm_int8_top_s": 1000.0, "gemm_tf32_tflop_s": 250.0}
    found = throughput.shares(row | {"parts_us": {"half": half, "int8": half | {"columns": 4.0, "product": 2.0}}}, rates)
    assert found["fp32"]["line"] == pytest.approx(0.2)
    operations = 10 * 7 * 2 * 4 * pairs
    assert found["half"]["product"] == pytest.approx(operations / 3e-6 / 500e12)
    assert found["int8"]["product"] == pytest.approx(operations / 2e-6 / 1000e12)
    assert found["half"]["templates"] == pytest.approx(2 * 7 * 4 * pairs * 10 / 20 / 1e-6 / 2e12) and "columns" not in found["half"]
    assert found["int8"]["columns"] == pytest.approx(7 * 4 * pairs / 4e-6 / 2e12) and "templates" not in found["int8"]
    for one in (found["half"], found["int8"]):
        assert one["turn"] == pytest.approx((2 * 27 * 27 * 14 * 4 * np.pi / 6 + 24 * pairs) / 2e-6 / 2e12)
        assert one["best_of_tile"] == pytest.approx(4 * 70 / 5e-6 / 2e12)
        assert one["scores"] == pytest.approx(120 / 1e-6 / 2e12) and one["choice"] == pytest.approx(40 / 0.5e-6 / 2e12)
        assert one["den2"] == pytest.approx(2 * 10 * 2 * pairs / 3e-6 / 250e12)


def test_gpu_memory_is_the_most_that_the_driver_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what was used before; readings go on until the block is left."""
    counted = iter([5 << 30, 6 << 30, 9 << 30, 7 << 30])
    enough = threading.Event()

    def used(handle: str) -> SimpleNamespace:
        value = next(counted, None)
        if value is None:
            enough.set()
        return SimpleNamespace(used=value if value is not None else 1 << 30)

    driver = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda gpu: f"GPU {gpu}", nvmlDeviceGetMemoryInfo=used)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with load("gpu_memory").MemoryWatch(0) as watch:
        assert enough.wait(10.0)
    assert watch.peak_gib() == 4.0


def test_tree_watch_sees_children() -> None:
    """Memory and CPU time of a grandchild count."""
    common = load("common")
    busy = "import time; x = bytearray(80 << 20); t = time.process_time()\nwhile time.process_time() - t < 0.3: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    begun = time.time()
    process = subprocess.Popen([sys.executable, "-c", parent])
    with common.TreeWatch(process.pid) as watch:
        process.wait()
    assert len(watch.processes) == 2
    grandchild = next(seen for pid, seen in watch.processes.items() if pid != process.pid)
    assert grandchild.peak_bytes > 80 << 20
    assert 0.2 < watch.cpu_between(begun, time.time()) < 2.0


def test_table_fills_markers(tmp_path: Path) -> None:
    table = load("table")
    environment = {"processor": "P", "vectors": "V", "cores_used": 2, "load_average_at_start": 4.05, "commit": "abc", "date": "today", "command": "c"}
    rows = [{"benchmark": "memory", "particles": 100, "options": "", "chunk": 8, "worker_peak_mib": 512.4, "parent_peak_mib": 300.0, "wall_s": 0.5}]
    (tmp_path / "memory.json").write_text(json.dumps({"environment": environment, "notes": "How it was done.", "rows": rows}))
    text = "a\n<!-- benchmark:memory -->\nold\n<!-- /benchmark -->\nb\n<!-- benchmark:other -->kept<!-- /benchmark -->\n"
    filled = table.fill(text, tmp_path)
    assert "| 100 | 8 | 512 MiB | 300 MiB | 500 ms |" in filled and "old" not in filled
    assert "How it was done." in filled and "load 4.05" in filled  # a busy machine is no secret
    assert filled.startswith("a\n<!-- benchmark:memory -->\n") and filled.endswith("b\n<!-- benchmark:other -->kept<!-- /benchmark -->\n")
    assert table.fill(filled, tmp_path) == filled


TEXTS = ("README.md", "docs/benchmarks.md", "docs/gpu.md")


@pytest.mark.parametrize("name", TEXTS)
def test_tables_are_those_of_the_results(name: str) -> None:
    """Who runs a benchmark anew renews the tables too (`python benchmarks/table.py`); where nothing was measured, nothing is claimed."""
    table = load("table")
    assert table.TEXTS == TEXTS
    text = (BENCHMARKS.parent / name).read_text()
    blocks = re.findall(r"<!-- benchmark:([\w-]+) -->\n(.*?)<!-- /benchmark -->", text, flags=re.DOTALL)
    assert blocks and len(blocks) == text.count("<!-- /benchmark -->")
    for benchmark, content in blocks:
        assert benchmark in {*table.TABLES, "overview"}
        assert content.strip() == (table.table(benchmark) or "Not measured yet."), f"{benchmark}: run python benchmarks/table.py"


def test_every_result_has_its_table() -> None:
    tables = load("table").TABLES
    shown = "".join((BENCHMARKS.parent / name).read_text() for name in TEXTS)
    for path in (BENCHMARKS / "results").glob("*.json"):
        name = path.stem.split("_")[0] if path.stem.startswith("accuracy_") else path.stem
        assert name in tables and f"<!-- benchmark:{name} -->" in shown


def store(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Results as a benchmark on a GPU would store them."""
    environment = {"gpus": ["G"], "processor": "P", "vectors": "V", "cores_used": 2, "load_average_at_start": 1, "commit": "abc", "date": "today"}
    (folder / f"{name}.json").write_text(json.dumps({"environment": environment, "notes": "How.", "rows": rows, **more}))


def test_a_ratio_to_pytom_is_never_without_what_is_covered(tmp_path: Path) -> None:
    """In gpu.md and in the README; both from the same file: 2,944 us over 0.02 and 0.01."""
    row = {
        "box": 64,
        "k_max": 20,
        "rotations": 343,
        "shifts": 123,
        "shift_radius_voxels": 4.0,
        "particles": 10000,
        "search_way": {"half": "line", "int8": "int8"},
    }
    figures = {"us_per_particle_and_rotation": {"half": 0.02, "int8": 0.01}, "agreement": {"int8": {"same_best_rotation": 0.9}}}
    wide = {**row, "rotations": 4608, "particles": 9000, "us_per_particle_and_rotation": {"half": 0.002}, "search_way": {}, "agreement": {}}
    store(tmp_path, "cuda_steps", [{**row, **figures}, wide])
    table = load("table")
    newer = {
        "decided": {"half": {"same_best_rotation": 1.0}, "int8": {"same_best_rotation": 0.995}},
        "wall_us_per_particle": {"half": 34.3, "int8": 10.29},
    }
    store(tmp_path, "cuda_steps", [{**row, **figures, **newer}])
    assert "| 0.02 | 0.01 | 0.015 | 100.0 % / 99.5 % | 0.1 / 0.03 |" in table.table("cuda_steps", tmp_path)
    store(tmp_path, "cuda_steps", [{**row, **figures}, wide])
    whole, brief = table.table("cuda_steps", tmp_path), table.table("overview", tmp_path)
    assert "| 0.02 | 0.01 | 0.015 |  / 90.0 % |" in whole and "us per particle | 9.22 |  |  |" in whole and "1 G, P (V), 2 cores" in whole
    for text in (whole, brief):
        for line in (line for line in text.splitlines() if "PyTom" in line):
            assert "every shift of the box" in line and "+-4 voxels" in line
    assert "147,000 times (half) and 294,000 times (8-bit)" in whole
    assert "| one G, half | 0.02 us per" in brief and "147,000 x" in brief and "294,000 x" in brief


def test_throughput_table(tmp_path: Path) -> None:
    case = {"benchmark": "local", "box": 64, "k_max": 20, "rotations": 343, "shifts": 123, "window_voxels": 4.0, "particles": 2000}
    case |= {"us_per_particle_and_rotation": {"half": 0.02, "int8": 0.0123}, "per_particle_us": {"turn": 1.5}}
    case |= {"parts_us": {"int8": {"product": 2.25}}, "shares": {"int8": {"turn": 0.5, "product": 0.75}, "fp32": {"line": 0.25}}}
    loop = {"benchmark": "one rotation", "box": 64, "on": "GPU, CuPy", "affine_transform_us_per_particle_and_rotation": 900.0}
    loop |= {"texture_us_per_particle_and_rotation": 400.0}
    left = {"benchmark": "left out", "cases": [[64, 8], [128, 8]]}
    store(tmp_path, "throughput", [loop, {"benchmark": "ceilings", "copy_tb_s": 1.0, "gemm_int8_top_s": 1500.0}, case, left])
    text = load("table").table("throughput", tmp_path)
    assert "(+-4 voxels) | 2,000 | 0.02 | 0.0123 | 25% |" in text
    assert "(+-4 voxels) | 8-bit | 1.5 us, 50% |  |  | 2.25 us, 75% |  |  |  |  |" in text
    assert "1.00 TB/s copied, 1500 TOP/s in whole numbers" in text
    assert "| 64^3, GPU, CuPy | 400 |" in text and "2 cases were left out" in text


def test_accuracy_table_joins_the_files_of_each_set(tmp_path: Path) -> None:
    """Ours and RELION's stand in files of their own; RELION's best iteration is shown beside its last one."""
    table = load("table")
    about = {"processor": "P", "vectors": "V", "cores_used": 2, "load_average_at_start": 1, "commit": "abc", "date": "today"}

    def row(program: str, deg: float, **more: object) -> dict[str, object]:
        errors = {"median_deg": deg, "p90_deg": 2 * deg, "median_angst": 1.0, "p90_angst": 2.0, "share_over_15_deg": 0.1}
        return {"program": program, "iterations": 3, "wall_s": 60.0, "cpu_s": 90.0, **errors, **more}

    for name, rows in {
        "accuracy_snr002": [row("ours", 0.25, benchmark="run", score="ml")],
        "accuracy_snr002_relion": [
            row("RELION", 0.75, benchmark="run"),
            row("RELION", 0.5, benchmark="iteration", iteration=2),
            row("RELION", 0.75, benchmark="iteration", iteration=3),
        ],
    }.items():
        content = {"name": name, "environment": {**about, "command": name}, "notes": "How.", "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    text = table.table("accuracy", tmp_path)
    assert "| ours, ml | 0.25 / 0.50 | 1.00 / 2.00 | 10% | 3 | 60 s / 90 s |" in text
    assert "| RELION | 0.75 / 1.50 |" in text and "| its best iteration, 2 | 0.50 / 1.00 |" in text
    assert text.count("`accuracy_snr002") == 2 and text.count("How.") == 1


def test_accuracy_errors_are_those_of_a_known_disturbance(tiny_set: Path, tmp_path: Path) -> None:
    """Poses turned and moved by known amounts, all in one frame that was turned as a whole: only the amounts are left."""
    from scipy.spatial.transform import Rotation

    accuracy = load("accuracy")
    text = (tiny_set / "truth.star").read_text()
    columns = accuracy.read_star(tiny_set / "truth.star")
    rng = np.random.default_rng(1)
    count = len(columns["rlnAngleRot"])
    labels = list(columns)
    angles = np.array([columns[f"rlnAngle{name}"] for name in ("Rot", "Tilt", "Psi")], float).T
    origins = np.array([columns[f"rlnOrigin{axis}Angst"] for axis in "XYZ"], float).T
    true = Rotation.from_euler("ZYZ", angles, degrees=True).inv()
    errors = rng.normal(size=(count, 3)) * 0.5
    errors -= errors.mean(0)
    moves = rng.normal(size=(count, 3))
    frame = Rotation.from_rotvec([0.02, -0.03, 0.01])
    changed = (Rotation.from_rotvec(np.deg2rad(errors)) * true * frame).inv().as_euler("ZYZ", degrees=True)
    lines, row = [], 0
    for line in text.splitlines():
        cells = line.split()
        if len(cells) == len(labels) and "subtomo/" in line:
            for name, value in zip(("Rot", "Tilt", "Psi"), changed[row], strict=True):
                cells[labels.index(f"rlnAngle{name}")] = f"{value:.8f}"
            for axis, value in zip("XYZ", origins[row] - moves[row], strict=True):
                cells[labels.index(f"rlnOrigin{axis}Angst")] = f"{value:.8f}"
            line, row = " ".join(cells), row + 1
        lines.append(line)
    assert row == count
    (tmp_path / "changed.star").write_text("\n".join(lines) + "\n")
    found = accuracy.PoseErrors(tiny_set / "truth.star", tmp_path / "changed.star")
    assert np.abs(found.rotvec_deg - errors).max() < 0.35 and np.abs(found.angle_deg - np.linalg.norm(errors, axis=1)).mean() < 0.15
    # one offset in the reference's frame is taken off too: what is left of the moves differs by that alone
    turned = np.einsum("pji,pj->pi", true.as_matrix(), moves - found.shift_angst)
    assert np.ptp(turned, axis=0).max() < 1e-5 and np.abs(turned).max() < 1.5


@pytest.mark.slow
def test_accuracy(tiny_set: Path, tmp_path: Path) -> None:
    """Every iteration has its errors, the limit is below them, and no path is written."""
    load("accuracy").main([str(tiny_set), "--scores", "ml", "--iterations", "2", "--diameter", "300", "-o", str(tmp_path)])
    text = (tmp_path / "accuracy_setA.json").read_text()
    assert str(tiny_set) not in text
    rows = json.loads(text)["rows"]
    iterations = [row for row in rows if row["benchmark"] == "iteration"]
    limit = next(row for row in rows if row["benchmark"] == "limit")
    assert [row["iteration"] for row in iterations] == [1, 2]
    assert 0 < limit["expected_median_deg"] < iterations[-1]["median_deg"] * 1.5
    assert 0 < limit["true_map_median_deg"] <= limit["true_map_p90_deg"] <= limit["true_map_worst_deg"]


def test_star_rows(tmp_path: Path) -> None:
    """Every step is timed, and what is written holds what was read."""
    load("star_rows").main(["--quick"], tmp_path)
    rows = json.loads((tmp_path / "star_rows.json").read_text())["rows"]
    assert [row["step"] for row in rows] == ["read_star", "write_star", "read_particles", "write_particles"]
    assert all(row["rows"] == 2000 and row["seconds"] > 0 and row["peak_gib"] > 0 for row in rows)
    assert rows[1]["same_tokens"] is True


@pytest.mark.slow
def test_scaling(tmp_path: Path) -> None:
    """Rates follow from the iterations' seconds, efficiency from the rates; one worker and two give the same bits."""
    load("scaling").main(["--quick", "--cpu", "--gpus", "1", "2", "--workers", "1", "-o", str(tmp_path)])
    one, two = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert one["maps"] == two["maps"] and one["later_efficiency"] == 1.0 and len(one["iteration_s"]) == 2
    assert two["later_particles_per_s"] == pytest.approx(24 / two["iteration_s"][1], rel=0.01)
    assert two["later_efficiency"] == pytest.approx(two["later_particles_per_s"] / one["later_particles_per_s"] / 2, rel=0.01)
    assert set(two["idle"]) == {"CPU"} and 0.0 < two["idle"]["CPU"] < 1.0 and two["own_gpu_only"] is None
    assert f"| 2 | 1 | none | {two['later_particles_per_s']:,.0f} | {two['later_efficiency']:.0%} | not known | yes |" in load("table").table(
        "scaling", tmp_path
    )


def test_memory_on_another_gpu_is_seen() -> None:
    scaling = load("scaling")
    assert scaling.own_gpu_only({0: {11: 5}, 1: {12: 5}}, {11: "0", 12: "1"}) is True
    assert scaling.own_gpu_only({0: {11: 5, 12: 1}, 1: {12: 5}}, {11: "0", 12: "1"}) is False
    assert scaling.own_gpu_only({0: {11: 5}, 1: {}}, {11: "0", 12: "1"}) is None  # a process that the driver does not see
    assert scaling.own_gpu_only({}, {}) is None


# --- GPU and CPU ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gpu_against_cpu(tmp_path: Path) -> None:
    """Rehearsed with the CPU backend against the reference: poses and sums are the same, scores nearly."""
    load("gpu_against_cpu").main(["--quick", "--cpu", "-o", str(tmp_path)])
    search, rest = json.loads((tmp_path / "gpu_against_cpu.json").read_text())["rows"]
    assert search["search"] == "local" and search["compared_scores"] == 2 * 7
    assert 0 < search["score_difference"] and search["same_best_rotation"] == 1.0
    assert 0 < search["end_deg"] < 2.0 and 0 < search["end_angst"] < 1.0
    assert 0 < rest["refined_deg"] < 2.0 and 0 < rest["residual_difference"] < 0.01
    assert 0 < rest["numerator_difference"] < 1e-5 and 0 < rest["denominator_difference"] < 1e-5
    assert f"| 16^3, float64 reference, local | {search['score_difference']:.1e} | 100% / 100% |" in load("table").table("gpu_against_cpu", tmp_path)


def test_gpu_against_cpu_sees_what_differs() -> None:
    """Answers that were changed by known amounts."""
    from scipy.spatial.transform import Rotation

    compared = load("gpu_against_cpu")
    problem = compared.make_problem(16, 4)
    wanted = compared.ask(compared.CPUBackend(), problem, 2, ("local",))
    search, rest = compared.compare(wanted, wanted, {}, 1.0)
    assert search["score_difference"] == 0 and search["same_best_rotation"] == search["same_best_shift"] == 1.0
    assert max(value for name, value in (search | rest).items() if name.endswith(("_difference", "_deg", "_angst"))) < 1e-5
    turn = Rotation.from_rotvec([0.0, 0.0, np.deg2rad(2.0)]).as_matrix()
    scored, best, end = wanted.scored["local"], wanted.best["local"], wanted.ends["local"]
    scores = scored.scores.copy()
    scores[2, 5] += 0.25 * np.ptp(scores[2])
    rotations, shifts = best.rotations.copy(), best.shifts_angst.copy()
    rotations[1] = rotations[1] @ turn
    shifts[:2] += 5.0
    other = replace(
        wanted,
        scored={"local": replace(scored, scores=scores)},
        best={"local": replace(best, rotations=rotations, shifts_angst=shifts)},
        ends={"local": replace(end, rotations=end.rotations @ turn, shifts_angst=end.shifts_angst + [3.0, 0.0, 4.0])},
        power=wanted.power * 1.5,
        numerator=wanted.numerator + 0.125 * np.abs(wanted.numerator).max(),
    )
    search, rest = compared.compare(other, wanted, {}, 1.0)
    assert search["score_difference"] == pytest.approx(0.25) and search["compared_scores"] == 4 * len(scores[0])
    assert (search["same_best_rotation"], search["same_best_shift"]) == (0.75, 0.5)
    assert search["end_deg"] == pytest.approx(2.0) and search["end_angst"] == pytest.approx(5.0)
    assert rest["residual_difference"] == pytest.approx(0.5) and rest["numerator_difference"] == pytest.approx(0.125)
    assert rest["denominator_difference"] == 0 and rest["refined_deg"] < 1e-5


@pytest.mark.slow
def test_no_poses(tmp_path: Path) -> None:
    """A whole run, its stages, and errors against the planted poses."""
    load("no_poses").main(["--quick", "--cpu", "-o", str(tmp_path)])
    whole, *iterations = json.loads((tmp_path / "no_poses.json").read_text())["rows"]
    assert whole["particles"] == 24 and whole["iterations"] == len(iterations) == 2
    assert whole["after_start_s"] == pytest.approx(whole["wall_s"] - whole["workers_ready_s"], rel=0.01)
    assert sum(row["seconds"] for row in iterations) < whole["after_start_s"]
    assert 0 < whole["angle_median_deg"] <= whole["angle_p90_deg"] <= 180
    assert f"| 24 of 24^3 | {whole['workers_ready_s']:.1f} s | {whole['after_start_s']:.1f} s" in load("table").table("no_poses", tmp_path)


@pytest.mark.parametrize(
    "name", ["cold_start", "cuda_steps", "end_to_end", "gpu_against_cpu", "gpu_memory", "no_poses", "procs_per_gpu", "scaling", "throughput"]
)
def test_gpu_benchmarks_say_that_there_is_no_gpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "cuda_steps":
        pytest.importorskip("numba_cuda")
    module = load(name)
    if sys.modules["common"].gpu_names():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as left:
        module.main(["-o", str(tmp_path / "out")])
    assert not left.value.code and capsys.readouterr().out.startswith("skipped: ") and not list(tmp_path.iterdir())


def test_cold_start_reads_what_a_process_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seconds of each kernel from another process, and the age of this one."""
    cold_start = load("cold_start")
    monkeypatch.setattr(cold_start, "_ALONE", "import os, sys\nprint(os.environ['NUMBA_CACHE_DIR'][-3:], 1.25, True, 'later', sep='\\t')")
    (row,) = cold_start.one_process(tmp_path / "jit", (9, 0), "half")
    assert row == {"kernel": "jit", "cpu_s": 1.25, "in_cache": True, "needed": "later"}
    begun = time.monotonic()
    first = cold_start._age()
    time.sleep(0.2)
    assert 0.1 < cold_start._age() - first < time.monotonic() - begun + 0.1 and first > 0


@pytest.mark.cuda
def test_cuda_steps_add_up() -> None:
    """A tiny case on a real GPU: all ways to search agree with the line kernel, and the whole takes about what its steps take."""
    pytest.importorskip("numba_cuda")
    steps = load("cuda_steps")
    if not sys.modules["common"].gpu_names():
        pytest.skip("no GPU")
    row = steps.case(32, 8, steps.local_rotations(6.0, 2), 2.0, 40)
    assert row["agreement"] and all(found["against_line_max"] < 0.1 for found in row["agreement"].values())
    each = row["per_particle_us"]
    for precision, way in row["search_way"].items():
        taken = {name: value for name, value in each.items() if name != "contenders" or precision == "int8"}
        total = sum(taken.values()) + row["search_us"][way] + row["templates_us"] / 40
        assert 0.4 * total < row["us_per_particle"][precision] < 1.6 * total
        assert row["us_per_particle"][precision] < 1.6 * row["wall_us_per_particle"][precision]
        assert row["decided"][precision]["same_best_rotation"] >= 0.85


@pytest.mark.slow
def test_real_particles(shared: Path, tmp_path: Path) -> None:
    """One run on the real particles: nearer to the published poses than the list (8.7 degrees, 21.8 A)."""
    real = load("real_particles")
    (case,) = [name for name in real._CASES if name.startswith("one pass")]
    row = real.measure(shared, tmp_path / "run", "premultiplied", case, real._PRIOR, 1)
    assert row["particles"] == 40 and row["prior"] is True
    assert 0 < row["median_deg"] < 8.7 and 0 < row["median_angst"] < 21.8 and row["sigma_deg"] > 0


@pytest.mark.slow
def test_classes(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few particles of two kinds: from both maps nearly all are in the class of their kind; shares are of all that were made."""
    classes = load("classes")
    monkeypatch.setattr(classes, "SETS", ({"removed": 0.3, "snr": 1.0, "box": 24},))
    classes.main([str(tmp_path / "sets"), "--count", "12", "--seeds", "0", "--iterations", "2", "-o", str(tmp_path)])
    rows = json.loads((tmp_path / "classes.json").read_text())["rows"]
    assert [(row["start"], row["assignment"], row["iteration"]) for row in rows] == [
        *[("maps", "hard", 1), ("maps", "hard", 2), ("maps", "soft", 1), ("maps", "soft", 2)],
        ("random", "hard", 2),
    ]
    assert rows[0]["right"] > 0.9 and all(0.5 <= row["right"] <= 1.0 for row in rows)
