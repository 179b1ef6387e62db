"""Times every step of the CUDA backend on one GPU: microseconds per particle and rotation, from spectra on the device to the best pose.

    python benchmarks/cuda_steps.py [--quick] [-o FOLDER]

Particles are distinct noise volumes (spectra of random values, weights of a +-60 degree wedge); every step does the work it does in a run. The
steps: turn (columns and weights), search (all shifts of all rotations), den2, scores, choice (of contenders first, where whole numbers
searched), the chosen again in single precision. Templates are built once a level and are given apart and as a share. Times are the device's:
launches are queued behind another kernel, so that Python's time for them does not show; `wall_us_per_particle` is with it. `decided` compares
with the search in single precision. Copy bandwidth and fp32 rate of this GPU are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, environment, need_gpus, write_results
from numba import cuda, float32

from numba_glocal.backends import lines
from numba_glocal.backends.cuda import choosing, gemm, launching, normal_equations, packing, refining, scoring, turning
from numba_glocal.backends.cuda.backend import _ANY_TRACE as ANY_TRACE
from numba_glocal.backends.cuda.backend import _CONTENDERS as CONTENDERS
from numba_glocal.backends.cuda.backend import _ball_radius2, den_products, device_name
from numba_glocal.backends.cuda.product import ProductSearch, Way, shift_turns
from numba_glocal.backends.cuda.scratch import Scratch
from numba_glocal.backends.cuda.search import coefficient_table, launch, shift_groups
from numba_glocal.backends.cuda.tensor import TensorSearch, Weighting, available, tensor_us
from numba_glocal.backends.cuda.transform import Transform
from numba_glocal.fourier import grid_band, max_band, padded_offset
from numba_glocal.geometry import rotvec_to_matrix
from numba_glocal.noise import TABLE_SIZE
from numba_glocal.sampling import local_rotations, uniform_rotations
from numba_glocal.wedge import tilt_range_weights

NOTES = (
    "Microseconds, all steps from spectra on the device to the best pose, wedge of +-60 degrees. PyTom covers every shift of the box, this search the"
    " ball of the given shifts. Best rotations, as decided in the end, are compared with the line kernel's, whose sums are in single precision, on"
    " particles of noise alone. Times are the device's, launches queued before."
)


def milliseconds(call: Any, repeats: int = 5) -> float:
    """Median device time of a call; its launches wait behind another kernel until all are queued."""
    call()
    busy = cuda.device_array(32, np.float32)
    cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = cuda.event(), cuda.event()
        _multiply_add[1, 32](busy, 10000)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(cuda.event_elapsed_time(start, stop))
    return float(np.median(times))


class _Marked:
    """A kernel, or a function, that notes when the device begins and ends with it."""

    def __init__(self, name: str, call: Any, marks: list[tuple[str, Any, Any]]) -> None:
        self.name, self.call, self.marks = name, call, marks

    def __getitem__(self, grid: Any) -> _Marked:
        return _Marked(self.name, self.call[grid], self.marks)

    def __call__(self, *arguments: Any) -> None:
        start, stop = cuda.event(), cuda.event()
        start.record()
        self.call(*arguments)
        stop.record()
        self.marks.append((self.name, start, stop))


PARTS = {
    "factors": (packing, "column_factors"),
    "columns": (packing, "narrow_columns"),
    "templates": (packing, "narrow_templates"),
    "product": (gemm, "product_narrow"),
    "best_of_tile": (scoring, "best_of_tile"),
}
"""What a search by products consists of: where `ProductSearch.run` finds each."""


def parts_ms(run: Any) -> dict[str, float]:
    """Device time of each of `PARTS` in a search, all tiles together, in milliseconds."""
    marks: list[tuple[str, Any, Any]] = []
    kept = {name: getattr(*place) for name, place in PARTS.items()}
    busy = cuda.device_array(32, np.float32)
    try:
        for name, place in PARTS.items():
            setattr(*place, _Marked(name, kept[name], marks))
        _multiply_add[1, 32](busy, 10000)
        run()
    finally:
        for name, place in PARTS.items():
            setattr(*place, kept[name])
    cuda.synchronize()
    found: dict[str, float] = {}
    for name, start, stop in marks:
        found[name] = found.get(name, 0.0) + cuda.event_elapsed_time(start, stop)
    return found


@cuda.jit(fastmath=True)
def _copy(a, b):
    i = cuda.grid(1)
    if i < a.shape[0]:
        b[i] = a[i]


@cuda.jit(fastmath=True)
def _multiply_add(out, rounds):
    i = cuda.grid(1)
    a, b, c, d = float32(i), float32(i + 1), float32(i + 2), float32(i + 3)
    e, f, g, h = float32(i + 4), float32(i + 5), float32(i + 6), float32(i + 7)
    m = float32(0.999)
    for _ in range(rounds):
        for _ in range(16):
            a, b, c, d = a * m + m, b * m + m, c * m + m, d * m + m
            e, f, g, h = e * m + m, f * m + m, g * m + m, h * m + m
    out[i] = a + b + c + d + e + f + g + h


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes read and written) and fp32 multiply-add rate."""
    n = 1 << 28
    a, b = cuda.device_array(n, np.float32), cuda.device_array(n, np.float32)
    copy = milliseconds(lambda: _copy[n // 256, 256](a, b))
    blocks, rounds = 132 * 16, 2000
    out = cuda.device_array(blocks * 256, np.float32)
    fma = milliseconds(lambda: _multiply_add[blocks, 256](out, rounds))
    return {"copy_tb_s": 2 * 4 * n / copy / 1e9, "fp32_tflop_s": blocks * 256 * rounds * 16 * 8 * 2 / fma / 1e9}


def case(
    box: int,
    k_max: int,
    rotations: np.ndarray,
    radius_voxels: float,
    particles: int,
    global_search: bool = False,
    threads: int | None = None,
    step_voxels: float | None = None,
) -> dict[str, Any]:
    """One row: all steps for `particles` particles."""
    rng = np.random.default_rng(0)
    step = step_voxels or 0.8 * box / (2 * k_max)
    cube = lines.shift_cube(radius_voxels, step)
    band = lines.line_band(float(k_max))
    c = padded_offset(k_max)
    size = 2 * (2 * c + 1) ** 2 * (c + 1)
    held = int(min(particles, 60e9 // (4 * size)))
    spectra = cuda.device_array(held * size + 65536, np.float32)
    block = cuda.to_device(rng.normal(size=size).astype(np.float32))
    for i in range(held):  # distinct: each is another stretch of the same noise
        shift = int(rng.integers(0, size))
        spectra[i * size : i * size + size - shift].copy_to_device(block[shift:])
        if shift:
            spectra[i * size + size - shift : (i + 1) * size].copy_to_device(block[:shift])
    weight = tilt_range_weights(box, -60.0, 60.0)
    weights = cuda.to_device(weight.ravel())
    n_rotations = len(rotations)
    items = particles
    slots = cuda.to_device((np.arange(items) % held).astype(np.int32))
    kinds = cuda.to_device(np.zeros(items, np.int32))
    tables = cuda.to_device(np.ones((2, TABLE_SIZE), np.float32))
    signed, table_scale = cuda.to_device(np.zeros(1, np.int32)), cuda.to_device(np.full(1, TABLE_SIZE - 1, np.float32))
    inverse, gains = cuda.to_device(np.full((1, box), 1e-3, np.float32)), cuda.to_device(np.ones(1, np.float32))
    one_group = cuda.to_device(np.zeros(items, np.int32))
    points, radius, point_weight = cuda.to_device(band.points.ravel()), cuda.to_device(band.radius), cuda.to_device(band.sample_weight)
    line_start, line_length, plane_start = cuda.to_device(band.line_start), cuda.to_device(band.line_length), cuda.to_device(band.plane_start)
    starts_host = uniform_rotations(items) if not global_search else np.repeat(np.eye(3)[None], items, 0)
    starts = cuda.to_device(starts_host.reshape(-1, 9).astype(np.float32))
    shifts = cuda.to_device(rng.normal(size=(items, 3)).astype(np.float32) / box)
    padded = -(-n_rotations // 16) * 16
    templates, powers = (
        cuda.device_array(padded * band.n_pairs * 4 + 65536, np.float32),
        cuda.device_array((n_rotations, 2 * band.n_pairs), np.float32),
    )
    matrices = cuda.to_device(rotations.reshape(-1, 9).astype(np.float32))
    reference = cuda.device_array(size + 65536, np.float32)
    reference[:size].copy_to_device(block)
    coefficients = cuda.to_device(coefficient_table(cube.steps, cube.step_voxels, box, k_max))
    groups = shift_groups(cube.steps, _ball_radius2(cube))
    entries = [cuda.to_device(group.entries()) for group in groups]
    part = int(max(1, min(items, 12e9 // (24 * band.n_pairs + 12 * n_rotations))))
    flat = cuda.device_array(part * 4 * band.n_pairs + 65536, np.float32)
    columns, den_weight = flat[: part * 4 * band.n_pairs].reshape(part, 4 * band.n_pairs), cuda.device_array((part, 2 * band.n_pairs), np.float32)
    den, best = cuda.device_array((part, n_rotations), np.float32), cuda.device_array((part, n_rotations), np.float32)
    best_shift = cuda.device_array((part, n_rotations), np.int32)
    none = cuda.to_device(np.ones((1, 1), np.float32))
    power = cuda.to_device(np.ones(part, np.float32))
    first, count = cuda.to_device(np.arange(part, dtype=np.int32)), cuda.to_device(np.ones(part, np.int32))
    chosen, chosen_score = cuda.device_array((part, 1), np.int32), cuda.device_array((part, 1), np.float32)

    def build() -> None:
        turning.fill_templates[(-(-2 * band.n_pairs // 128), n_rotations), 128](reference, c, points, matrices, templates, powers)

    def turn() -> None:
        turning.turn[(-(-2 * band.n_pairs // 128), part), 128](
            spectra,
            size,
            slots,
            c,
            weights,
            weight.size,
            kinds,
            box,
            tables,
            signed,
            table_scale,
            inverse,
            gains,
            one_group,
            points,
            radius,
            point_weight,
            starts,
            shifts,
            columns,
            den_weight,
        )

    def search() -> None:
        for group, rows in zip(groups, entries, strict=True):
            launch(
                group,
                k_max,
                n_rotations,
                part,
                (
                    templates,
                    flat,
                    line_start,
                    line_length,
                    plane_start,
                    coefficients,
                    k_max,
                    band.n_pairs,
                    n_rotations,
                    part,
                    rows,
                    0,
                    none,
                    none,
                    best,
                    best_shift,
                ),
                threads,
            )

    def den2() -> None:
        den_products(powers, den_weight, den, True)

    build()
    inverse_sigma2 = np.full(box, 1e-3, np.float32)
    halves: dict[str, Any] = {}
    if available():
        halves["tensor"] = TensorSearch.make(band, cube, _ball_radius2(cube), box, templates, powers, n_rotations, inverse_sigma2)
    lattice = cuda.to_device(np.ascontiguousarray(band.lattice, np.int32).ravel())
    products = {}
    if gemm.available():
        products = {"product": Way(2, False), "product, particles shifted": Way(2, True)}
        if gemm.eight_available():
            products |= {"int8": Way(1, False), "int8, particles shifted": Way(1, True)}
        if 2 * particles > n_rotations:  # the other side would be far too much
            products = {name: way for name, way in products.items() if not way.shifts_particles}
    for name, way in products.items():
        halves[name] = ProductSearch.make(way, band, cube, box, templates, powers, n_rotations, lattice, inverse_sigma2)
    scratch = Scratch()

    def narrow(way: str) -> None:
        halves[way].run(columns, part, Weighting(False, none, none), best, best_shift, scratch)

    def scores() -> None:
        scoring.finish_scores[(-(-n_rotations // 128), part), 128](best, den, power, 0, np.float32(1.0))

    kept = cuda.device_array((part, CONTENDERS, 9), np.float32)
    contenders, contender_score = cuda.device_array((part, CONTENDERS), np.int32), cuda.device_array((part, CONTENDERS), np.float32)
    turns, no_loss = cuda.to_device(shift_turns(cube, box)), cuda.to_device(np.zeros((1, 1), np.float32))

    def choose(keep: int, min_trace: float, rows: Any, values: Any) -> None:
        choosing.choose[part, choosing.CHOOSE_THREADS](best, first, count, starts, matrices, np.float32(min_trace), keep, kept, rows, values)

    def score(rows: Any, known: int, values: Any) -> None:
        choosing.score_chosen[choosing.chosen_grid(rows), launching.REDUCE_THREADS](
            *(templates, columns, den_weight, lattice, turns, first, n_rotations, best_shift, 0, none, none, power, 0),
            *(np.float32(1.0), no_loss, 0, rows, contenders, known, best, values),
        )

    def contend() -> None:
        choose(CONTENDERS, ANY_TRACE, contenders, contender_score)
        score(contenders, 0, contender_score)

    def choice() -> None:
        choose(1, 2.9, chosen, chosen_score)

    def again(known: int = 0) -> None:
        score(chosen, known, chosen_score)

    def whole(way: str) -> None:
        turn()
        den2()
        narrow(way) if way in halves else search()
        scores()
        if way.startswith("int8"):
            contend()
        choice()
        if way != "line":
            again(CONTENDERS if way.startswith("int8") else 0)

    built = milliseconds(build)
    build()
    turn()
    search()
    line_best, line_shift = best.copy_to_host(), best_shift.copy_to_host()
    ways = {"line": milliseconds(search, 1)}
    agreement = {}
    for way in halves:
        ways[way] = milliseconds(lambda way=way: narrow(way), 2)
        other, other_shift = best.copy_to_host(), best_shift.copy_to_host()
        spread = float(np.abs(line_best).max())
        agreement[way] = {
            "against_line_max": round(float(np.abs(other - line_best).max()) / spread, 6),
            "same_best_rotation": round(float((other.argmax(1) == line_best.argmax(1)).mean()), 4),
            "same_shift": round(float((other_shift == line_shift).mean()), 4),
        }
    estimates = {"tensor": tensor_us(band, cube, _ball_radius2(cube), n_rotations, part)}
    estimates |= {name: way.microseconds(band, len(cube.inside), n_rotations, part) for name, way in products.items()}
    ways_of = {}
    for precision in ("half", "int8") if any(name.startswith("int8") for name in halves) else ("half",):
        fitting = [name for name in halves if name == "tensor" or name.startswith("int8") == (precision == "int8")]
        ways_of[precision] = min(fitting, key=lambda name: estimates[name], default="line")
    named = (("turn", turn), ("den2", den2), ("scores", scores), ("contenders", contend), ("choice", choice), ("again", again))
    steps = {name: milliseconds(step) for name, step in named}
    per_particle = {name: 1e3 * value / part for name, value in steps.items()}
    device, wall, decided = {}, {}, {}
    reference_best = line_best - den.copy_to_host() / 2.0
    for precision, way in ways_of.items():
        device[precision] = 1e3 * (milliseconds(lambda way=way: whole(way), 3) / part + built / items)
        cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(3):
            whole(way)
        cuda.synchronize()
        wall[precision] = 1e6 * (time.perf_counter() - begun) / 3 / part + 1e3 * built / items
        rows = chosen.copy_to_host()[:, 0]
        # what the decision costs: the score that single precision gives the best rotation, less that of the chosen one, in deviations of scores
        lost = reference_best.max(1) - np.take_along_axis(reference_best, rows[:, None], 1)[:, 0]
        decided[precision] = {
            "same_best_rotation": round(float((rows == reference_best.argmax(1)).mean()), 4),
            "mean_lost": round(float(lost.mean() / reference_best.std()), 6),
        }
    operations = _operations(band, cube.steps, groups)
    parts = {precision: parts_ms(lambda way=way: narrow(way)) for precision, way in ways_of.items() if way in products}
    return {
        "box": box,
        "k_max": k_max,
        "rotations": n_rotations,
        "shifts": len(cube.inside),
        "shift_radius_voxels": radius_voxels,
        "particles": particles,
        "distinct": held,
        "batch": part,
        "templates_us": round(1e3 * built, 1),
        "per_particle_us": {name: round(value, 4) for name, value in per_particle.items()},
        "search_way": ways_of,
        "search_us": {name: round(1e3 * value / part, 3) for name, value in ways.items()},
        "parts_us": {precision: {name: round(1e3 * ms / part, 4) for name, ms in each.items()} for precision, each in parts.items()},
        "agreement": agreement,
        "estimates_us": {way: round(value / part, 3) for way, value in estimates.items() if math.isfinite(value)},
        "decided": decided,
        "us_per_particle": {precision: round(total, 3) for precision, total in device.items()},
        "wall_us_per_particle": {precision: round(total, 3) for precision, total in wall.items()},
        "us_per_particle_and_rotation": {precision: round(total / n_rotations, 6) for precision, total in device.items()},
        "search_fp32_tinstructions_s": round(operations * n_rotations / (1e3 * ways["line"] / part) / 1e6, 2),
    }


def _operations(band: lines.LineBand, steps: int, groups: Any) -> float:
    """Floating-point instructions (a multiply-add is one) of the search kernel for one particle and rotation."""
    pairs = band.n_pairs
    line_pairs = (len(band.line_start) - (len(band.plane_start) - 1)) / 2
    total = 0.0
    for group in groups:
        rows = len(group.z_rows)
        total += pairs * (12 + (2 if group.has_zero else 0) + 4 * group.count)
        total += line_pairs * rows * (4 + 2 + 4 * steps)
        total += (len(band.plane_start) - 1) * group.n_sums
    return total


def refinement(box: int, k_max: int, particles: int) -> dict[str, Any]:
    """Gauss-Newton: five steps of every particle."""
    rng = np.random.default_rng(1)
    c = padded_offset(k_max)
    size = 2 * (2 * c + 1) ** 2 * (c + 1)
    reach = max_band(box)
    cube_size = 2 * (2 * reach + 1) ** 2 * (reach + 1)
    held = int(min(particles, 40e9 // (4 * cube_size)))
    reference = cuda.to_device(rng.normal(size=size + 65536).astype(np.float32))
    cubes = cuda.device_array(held * cube_size + 65536, np.float32)
    noise = cuda.to_device(rng.normal(size=cube_size).astype(np.float32))
    for i in range(held):
        cubes[i * cube_size : (i + 1) * cube_size].copy_to_device(noise)
    band = grid_band(box, float(reach))
    inside = np.flatnonzero(band.radius2 <= k_max**2 + 1e-6)
    k = band.k[inside].astype(np.int32)
    rows = 2 * reach + 1
    at = ((k[:, 2] + reach) * rows + k[:, 1] + reach) * (reach + 1) + k[:, 0]
    weight = tilt_range_weights(box, -60.0, 60.0)
    items = particles
    rotations, shifts = cuda.to_device(uniform_rotations(items).reshape(-1, 9)), cuda.to_device(rng.normal(size=(items, 3)))
    anchors = cuda.to_device(np.zeros((items, 3)))
    sums, taken = cuda.device_array((items, normal_equations.N_SUMS), np.float64), cuda.device_array(items, np.int32)
    arguments = (
        reference,
        c,
        box,
        cubes,
        cube_size,
        cuda.to_device((np.arange(items) % held).astype(np.int32)),
        cuda.to_device(at.astype(np.int32)),
        cuda.to_device(np.ascontiguousarray(k.astype(np.int16)).ravel()),
        cuda.to_device(weight.ravel()),
        weight.size,
        cuda.to_device(np.zeros(items, np.int32)),
        cuda.to_device(band.index[inside].astype(np.int32)),
        cuda.to_device(band.shell[inside].astype(np.int32)),
        cuda.to_device(np.ones((2, TABLE_SIZE), np.float32)),
        cuda.to_device(np.zeros(1, np.int32)),
        cuda.to_device(np.full(1, TABLE_SIZE - 1, np.float32)),
        cuda.to_device(np.full((1, box), 1e-3, np.float32)),
        cuda.to_device(np.ones(1, np.float32)),
        cuda.to_device(np.zeros(items, np.int32)),
        cuda.to_device(np.full(3, 0.03, np.float32)),
        rotations,
        shifts,
        anchors,
        1e9,
        5,
        math.radians(3.0),
        -1.0,
        -1.0,
        sums,
        taken,
    )
    time_ms = milliseconds(lambda: refining.refine[items, normal_equations.REFINE_THREADS](*arguments))
    return {"box": box, "k_max": k_max, "particles": items, "evaluations": 6, "us_per_particle": round(1e3 * time_ms / items, 3)}


def transforms(box: int, particles: int) -> dict[str, Any]:
    """Padding and transforming volumes already on the device, at the full band."""
    reach = max_band(box)
    rng = np.random.default_rng(2)
    volumes = cuda.to_device(rng.normal(size=(particles, box**3)).astype(np.float32))
    row: dict[str, Any] = {"box": box, "particles": particles}
    for name, k_max, padded in (("padded_full", reach, True), ("padded_k20", 20, True), ("cube", reach, False)):
        transform = Transform(box, k_max, padded)
        out = cuda.device_array(particles * transform.size, np.float32)
        row[f"{name}_us"] = round(1e3 * milliseconds(lambda t=transform, o=out: t(volumes, particles, o)) / particles, 2)
    return row


def main(arguments: list[str] | None = None) -> None:
    """Runs all rows and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    need_gpus()
    local = np.concatenate([local_rotations(4.0, 4)] * 2)[:343] if len(local_rotations(4.0, 4)) < 343 else local_rotations(4.0, 4)[:343]
    local = local.copy()
    local[1:] = local[1:] @ rotvec_to_matrix(np.random.default_rng(3).normal(size=(len(local) - 1, 3)) * 0.01)
    about = environment()
    begun = time.perf_counter()
    ceiling = ceilings()
    print(device_name(), ceiling, flush=True)
    rows: list[tuple[int, int, np.ndarray, float, int, float | None]] = [
        (64, 20, local, 4.0, 10000, None),
        (64, 20, local, 4.0, 100, None),
        (64, 12, local, 4.0, 10000, None),
    ]
    if not options.quick:
        rows += [(64, 31, local, 4.0, 10000, 1.0), (64, 31, local, 4.0, 10000, None), (128, 40, local, 5.0, 2000, None)]
    found: list[dict[str, Any]] = []
    refined, transformed = refinement(64, 20, 10000), transforms(64, 64)
    print(json.dumps(refined), json.dumps(transformed), sep="\n", flush=True)
    more = {"refinement": [refined], "transforms": [transformed], "ceilings": ceiling}

    def keep(row: dict[str, Any]) -> None:
        """What was measured stays, should a time limit end the rest."""
        found.append(row)
        print(json.dumps(row), flush=True)
        write_results("cuda_steps", found, about, NOTES, options.output, more | {"seconds": round(time.perf_counter() - begun, 1)})

    for box, k_max, rotations, radius, particles, step in rows:
        keep(case(box, min(k_max, max_band(box)), rotations, radius, particles, step_voxels=step))
    keep(case(64, 8, uniform_rotations(4608), 6.0, 10000, True))
    print(options.output / "cuda_steps.json")


if __name__ == "__main__":
    main()
