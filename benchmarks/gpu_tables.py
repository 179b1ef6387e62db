"""Tables of what GPUs were measured at, for `table.py`: each function turns the content of one results file into Markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

from common import duration, markdown, times

from numba_glocal.settings import GPU_PRECISIONS

Measured = dict[str, Any]

PYTOM_US = {"one process": 2944.0, "eight processes": 1325.0}
"""Of PyTom's GPU plan on an H200, microseconds per particle and rotation at 64^3: a measurement made apart from these benchmarks. It covers all
shifts of the box."""

AIMS_US = {(64, 20, 123, 10000): 0.015, (64, 20, 123, 100): 0.03, (64, 30, 257, 10000): 0.10, (128, 40, 257, 2000): 0.25, (64, 8, 33, 10000): 3.0}
"""By box, band, trial shifts and particles; that of the global search is per particle."""

_GLOBAL = 1000  # rotations from which a row is one of a global search


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _of(row: Measured, key: str) -> Measured:
    """A figure by precision; earlier rows had half precision alone."""
    value = row[key]
    return value if isinstance(value, dict) else {"half": value}


def _search_figures(row: Measured) -> Measured:
    """What is shown of a search: per particle and rotation, of a global search per particle."""
    scale = row["rotations"] if row["rotations"] > _GLOBAL else 1
    return {precision: value * scale for precision, value in _of(row, "us_per_particle_and_rotation").items()}


def _precisions(rows: list[Measured]) -> list[str]:
    """Those that any row has, in the order of the first that has most."""
    return list(dict.fromkeys(name for row in rows for name in _of(row, "us_per_particle_and_rotation")))


def _same_best(row: Measured, precision: str) -> str:
    """Share of particles with the best rotation of single precision: as decided in the end where that was compared, else by the search alone."""
    compared = row.get("decided", {}).get(precision) or row["agreement"].get(row["search_way"].get(precision))
    return "" if compared is None else f"{100 * compared['same_best_rotation']:.1f} %"


def cuda_steps_table(results: Measured) -> str:
    """Steps from spectra on the device to the best pose; then how it stands to PyTom."""
    precisions = _precisions(results["rows"])
    has_wall = any("wall_us_per_particle" in row for row in results["rows"])
    rows = []
    for row in results["rows"]:
        what = (
            f"{row['box']}^3, k_max {row['k_max']}, {row['rotations']:,} rotations, {row['shifts']} shifts (+-{row['shift_radius_voxels']:g} voxels)"
        )
        what += f", {row['particles']:,} particles" + ("; us per particle" if row["rotations"] > _GLOBAL else "")
        figures = _search_figures(row)
        aim = _figure(AIMS_US.get((row["box"], row["k_max"], row["shifts"], row["particles"])))
        cells = [_figure(figures.get(name)) for name in precisions] + [aim, " / ".join(_same_best(row, name) for name in precisions)]
        if has_wall:
            scale = 1 if row["rotations"] > _GLOBAL else row["rotations"]
            cells.append(" / ".join(_figure(row["wall_us_per_particle"][name] / scale) for name in precisions))
        rows.append([what, *cells])
    for row in results.get("refinement", ()):
        what = (
            f"Gauss-Newton, {row['box']}^3, k_max {row['k_max']}, {row['evaluations']} evaluations, {row['particles']:,} particles; us per particle"
        )
        rows.append([what, *[_figure(row["us_per_particle"])] * len(precisions), "4", *[""] * (1 + has_wall)])
    named = " / ".join(map(_named, precisions))
    head = ["us per particle and rotation", *map(_named, precisions), "aim", f"same best rotation as in single precision, {named}"]
    if has_wall:
        head.append(f"with Python's time for the launches, {named}")
    parts = [markdown(head, rows)]
    if results.get("ceilings"):
        copy, rate = results["ceilings"]["copy_tb_s"], results["ceilings"]["fp32_tflop_s"]
        parts.append(f"This GPU, in the same run: {copy:.2f} TB/s copied (read and written), {rate:.1f} TFLOP/s of single-precision multiply-adds.")
    return "\n\n".join([*parts, beside_pytom(results)])


def beside_pytom(results: Measured) -> str:
    """The first row, as a ratio; never without what each covers."""
    row = results["rows"][0]
    beside = []
    for processes, pytom_us in PYTOM_US.items():
        ratios = [f"{_ratio(pytom_us, value)} times ({_named(name)})" for name, value in _search_figures(row).items()]
        beside.append(f"{pytom_us:,.0f} us with {processes}, {' and '.join(ratios)} the first row's time")
    return (
        f"PyTom's GPU plan takes, per particle and rotation at {row['box']}^3 on the same kind of card, {'; '.join(beside)}. But it covers every"
        f" shift of the box, and this +-{row['shift_radius_voxels']:g} voxels: the ratios hold for that smaller window."
    )


def _ratio(other: float, ours: float) -> str:
    return f"{float(f'{other / ours:.3g}'):,.0f}"


def _named(precision: str) -> str:
    return {"int8": "8-bit"}.get(precision, precision)


def _stages(iterations: list[Measured]) -> str:
    """Seconds of the stages of a run."""
    rows = [
        [
            str(row["iteration"]),
            f"{row['band_angst']:.1f} A",
            *(
                f"{seconds:.2f}"
                for seconds in (row["seconds"], row["noise_s"], row["align_s"] + row.get("refine_s", 0.0), row["average_s"], row["rest_s"])
            ),
        ]
        for row in iterations
    ]
    return markdown(["iteration", "band", "seconds", "noise", "search and refinement", "averages", "parent alone"], rows)


def end_to_end_table(results: Measured) -> str:
    """Start of the workers, then the iterations of the last warm run of each box."""
    parts = []
    for box in dict.fromkeys(row["box"] for row in results["rows"]):
        runs = [row for row in results["rows"] if row["benchmark"] == "run" and row["box"] == box]
        ready = {kind: [row["workers_ready_s"] for row in runs if row["jit_cache"] == kind] for kind in ("cold", "warm")}
        said = ", ".join(f"{min(seconds):.1f} s with a {kind} JIT cache" for kind, seconds in ready.items() if seconds)
        last = runs[-1]["run"]
        iterations = [row for row in results["rows"] if row["benchmark"] == "iteration" and row["box"] == box and row["run"] == last]
        parts.append(
            f"{runs[0]['particles']:,} particles of {box}^3. Workers ready after {said} (aim 15 and 6). Aim of an iteration: 2 s, later ones 0.5 s."
        )
        parts.append(_stages(iterations))
    return "\n\n".join(parts)


def no_poses_table(results: Measured) -> str:
    """A global run to convergence."""
    rows = []
    for row in (row for row in results["rows"] if row["benchmark"] == "no_poses"):
        errors = f"{row['angle_median_deg']:.2f} / {row['angle_p90_deg']:.2f}"
        ready, seconds = f"{row['workers_ready_s']:.1f} s", f"{row['after_start_s']:.1f} s (aim 20)"
        rows.append([f"{row['particles']:,} of {row['box']}^3", ready, seconds, str(row["iterations"]), errors, f"{row['beyond_10_deg']:.1%}"])
    head = ["particles", "workers ready", "then, to the end", "iterations", "error in degrees, median / 90 %", "beyond 10 degrees"]
    return markdown(head, rows) + "\n\n" + _stages([row for row in results["rows"] if row["benchmark"] == "iteration"])


def cold_start_table(results: Measured) -> str:
    """Starts of the pool, and what worker 0 had to compile by itself."""
    rows = []
    for row in results["rows"]:
        reached = [f"{row['reached_s'][name]:.1f} s" for name in ("backend", "helpers", "warm")]
        alone = f"{len(row['compiled'])}, {sum(row['compiled'].values()):.1f} s" if row["compiled"] else "none"
        rows.append([row["start"], str(row["workers"]), f"{row['ready_s']:.1f} s", *reached, alone])
    head = ["JIT cache", "workers", "all ready", "worker 0: backend stands", "helpers are done", "warm-up is over", "kernels it compiled itself"]
    return markdown(head, rows)


_KERNELS = {
    "turn": "turn (copy)",
    "columns": "shifted particles (copy)",
    "templates": "shifted templates (copy)",
    "product": "product (GEMM)",
    "best_of_tile": "best shift (copy)",
    "den2": "den2 (GEMM)",
    "scores": "scores (copy)",
    "choice": "choice (copy)",
}
"""Kernels of a search by products, each with the rate that bounds it."""


def throughput_table(results: Measured) -> str:
    """Boxes, bands and windows; then the loop that does one rotation at a time."""
    searches = [row for row in results["rows"] if row["benchmark"] in ("local", "global")]
    precisions = _precisions(searches)
    rows: list[list[str]] = []
    parts_of: list[list[str]] = []
    for row in searches:
        figures = _of(row, "us_per_particle_and_rotation")
        what = f"{row['benchmark']}, {row['box']}^3, k_max {row['k_max']}, {row['rotations']:,} rotations, {row['shifts']} shifts"
        what += f" (+-{row['window_voxels']:g} voxels)"
        rows.append([what, f"{row['particles']:,}", *(_figure(figures.get(name)) for name in precisions), f"{row['shares']['fp32']['line']:.0%}"])
        for precision, measured in row["parts_us"].items():
            kernels, times_us = row["shares"][precision], row["per_particle_us"] | measured
            cells = [f"{times_us[name]:.3g} us, {kernels[name]:.0%}" if name in kernels else "" for name in _KERNELS]
            parts_of.append([what, _named(precision), *cells])
    parts = []
    if rows:
        head = ["us per particle and rotation", "particles", *map(_named, precisions), "line kernel, single precision: share of multiply-add rate"]
        parts.append(markdown(head, rows))
    if parts_of:
        head = ["device time of a particle in each kernel, and its share of what the GPU can do", "", *_KERNELS.values()]
        parts.append(markdown(head, parts_of, texts=2))
    ceilings = next((row for row in results["rows"] if row["benchmark"] == "ceilings"), {})
    named = {"copy_tb_s": "{:.2f} TB/s copied", "fp32_tflop_s": "{:.1f} TFLOP/s of single-precision multiply-adds"}
    named |= {"gemm_half_tflop_s": "products of 8192^3 {:.0f} TFLOP/s in half precision", "gemm_int8_top_s": "{:.0f} TOP/s in whole numbers"}
    named |= {"gemm_tf32_tflop_s": "{:.0f} TFLOP/s in tf32"}
    told = [text.format(ceilings[name]) for name, text in named.items() if name in ceilings]
    if told:
        parts.append(f"What this GPU can do, measured in the same run: {', '.join(told)}.")
    loop = []
    for row in (row for row in results["rows"] if row["benchmark"] == "one rotation" and "box" in row):
        taken = [
            row[f"{way}_us_per_particle_and_rotation"] for way in ("texture", "affine_transform") if f"{way}_us_per_particle_and_rotation" in row
        ]
        loop.append([f"{row['box']}^3, {row['on']}", _figure(min(taken)) if taken else "failed"])
    if loop:
        parts.append(markdown(["one rotation at a time, every shift of the box", "us per particle and rotation"], loop))
    left = [row for row in results["rows"] if row["benchmark"] == "left out"]
    if left:
        parts.append(f"{len(left[0]['cases'])} cases were left out for want of time.")
    return "\n\n".join(parts)


def _workers_row(row: Measured) -> list[str]:
    later = row["iteration_s"][1:] or row["iteration_s"]
    return [f"{row['workers_ready_s']:.1f} s", duration(row["iteration_s"][0]), duration(median(later))]


def procs_per_gpu_table(results: Measured) -> str:
    """Workers that share one GPU."""
    good = [row for row in results["rows"] if "iteration_s" in row]
    rows = [
        [str(row["workers"]), row["mps"], *_workers_row(row), "yes" if row["maps"] == good[0]["maps"] else "no"]
        for row in results["rows"]
        if row in good
    ]
    parts = [markdown(["workers", "MPS", "ready", "first iteration", "later ones, median", "same maps as the first row"], rows)]
    for row in results["rows"]:
        if "problem" in row:
            workers = f"{row['workers']} workers, " if "workers" in row else ""
            parts.append(f"{workers}MPS {row['mps']}: {' '.join(row['problem'].split())}")
    return "\n\n".join(parts)


def gpu_memory_table(results: Measured) -> str:
    """Runs under a cap of device memory."""
    rows = []
    for row in results["rows"]:
        what = [f"{row['particles']:,} of {row['box']}^3", str(row["workers"]), "none" if row["cap_gib"] is None else f"{row['cap_gib']:g} GiB"]
        if "problem" in row:
            rows.append([*what, " ".join(row["problem"].split()), "", "", "", ""])
        else:
            same = "yes" if row["maps"] == results["rows"][0].get("maps") else "no"
            rows.append([*what, f"{row['peak_gib']:.2f} GiB", *_workers_row(row), same])
    head = [
        "particles",
        "workers",
        "--gpu-memory",
        "most used on the GPU",
        "ready",
        "first iteration",
        "later ones, median",
        "same maps as the first row",
    ]
    return markdown(head, rows)


def scaling_table(results: Measured) -> str:
    """Several GPUs."""
    rows = []
    for row in results["rows"]:
        own = {True: "yes", False: "no", None: "not known"}[row["own_gpu_only"]]
        efficiency = f"{row['later_efficiency']:.0%}" if "later_efficiency" in row else ""
        same = "yes" if row["maps"] == results["rows"][0]["maps"] else "no"
        cells = [str(row["gpus"]), str(row["workers_per_gpu"]), row["load"], f"{row['later_particles_per_s']:,.0f}", efficiency, own, same]
        rows.append([*cells, f"{row['share_of_ideal']:.0%}" if "share_of_ideal" in row else ""])
    head = ["GPUs", "workers each", "competing load", "particles a second, later iterations", "efficiency", "memory on its own GPU only", "same maps"]
    return markdown([*head, "share of the ideal under load"], rows)


def gpu_against_cpu_table(results: Measured) -> str:
    """Differences between the backends."""
    searches = [
        [
            f"{row['box']}^3, {row['precision']}, {row['search']}",
            f"{row['score_difference']:.1e}",
            f"{row['same_best_rotation']:.0%} / {row['same_best_shift']:.0%}",
            f"{row['end_deg']:.1e} / {row['end_angst']:.1e}",
        ]
        for row in results["rows"]
        if row["benchmark"] == "search"
    ]
    rest = [
        [
            f"{row['box']}^3, {row['precision']}",
            f"{row['refined_deg']:.1e} / {row['refined_angst']:.1e}",
            *(f"{row[f'{name}_difference']:.1e}" for name in ("log_likelihood", "residual", "numerator", "denominator")),
        ]
        for row in results["rows"]
        if row["benchmark"] == "refinement and sums"
    ]
    head = ["search", "scores, over their spread", "same best rotation / shift", "poses at the end, degrees / A"]
    tail = ["refinement and sums", "poses, degrees / A", "log-likelihood", "residual power", "sums: numerator", "denominator"]
    return markdown(head, searches) + "\n\n" + markdown(tail, rest)


def overview_table(named: dict[str, Measured]) -> str:
    """The README's: a few figures of several files (`named`, by name), each with what it is compared with."""
    rows = []
    if "kernels" in named:
        found = {row["variant"]: row for row in named["kernels"]["rows"] if row["benchmark"] == "search"}
        ours, other = found["ours"], found["rotate and four transforms"]
        what = f"search, {ours['box']}^3, band {ours['k_max']}, shifts within {ours['window_voxels']} voxels"
        beside = f"one rotation and four FFTs, which cover every shift of the box: {times(other['ours_faster'])} as long"
        rows.append([what, "one CPU core", f"{duration(ours['min_s'])} per particle and rotation", beside])
    if "cuda_steps" in named:
        row = named["cuda_steps"]["rows"][0]
        window = f"{row['shift_radius_voxels']:g} voxels"
        what = f"search, {row['box']}^3, band {row['k_max']}, shifts within {window}, {row['particles']:,} particles"
        pytom_us = PYTOM_US["one process"]
        for precision, value in ((name, value) for name, value in _search_figures(row).items() if name in GPU_PRECISIONS):
            beside = f"PyTom, one process: {pytom_us:,.0f} us, {_ratio(pytom_us, value)} x as long, but for every shift of the box, not +-{window}"
            rows.append([what, f"one {gpu_of(named['cuda_steps'])}, {_named(precision)}", f"{value:.3g} us per particle and rotation", beside])
    if "end_to_end" in named:
        everything = named["end_to_end"]["rows"]
        run = [row for row in everything if row["benchmark"] == "run"][-1]
        seconds = [row["seconds"] for row in everything if row["benchmark"] == "iteration" and (row["box"], row["run"]) == (run["box"], run["run"])]
        what = f"`align`, {run['particles']:,} particles of {run['box']}^3"
        taken = f"first iteration {seconds[0]:.2f} s, last {seconds[-1]:.2f} s"
        rows.append([what, f"one {gpu_of(named['end_to_end'])}", taken, f"workers ready after {run['workers_ready_s']:.1f} s"])
    if "no_poses" in named:
        row = next(row for row in named["no_poses"]["rows"] if row["benchmark"] == "no_poses")
        what = f"`align --global --until-converged`, {row['particles']:,} simulated particles of {row['box']}^3"
        taken = f"{row['after_start_s']:.1f} s, {row['iterations']} iterations"
        beside = f"median error {row['angle_median_deg']:.2f} degrees; workers ready after {row['workers_ready_s']:.1f} s"
        rows.append([what, f"one {gpu_of(named['no_poses'])}", taken, beside])
    return markdown(["", "on", "takes", "beside"], rows, texts=4)


def gpu_of(results: Measured) -> str:
    """Name of the GPU."""
    return str(results["environment"]["gpus"][0])
