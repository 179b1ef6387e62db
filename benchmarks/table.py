"""Writes tables from the results: what stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` in a text is replaced.

python benchmarks/table.py [FILE.md ...] (by default all that have such tables)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_tables
from common import MADE_SETS, RESULTS, ROOT, duration, markdown, times

Measured = dict[str, Any]
TEXTS = ("README.md", "docs/benchmarks.md", "docs/gpu.md")
OVERVIEW = ("kernels", "cuda_steps", "end_to_end", "no_poses")
"""Files that the README's table is made of."""


def _select(results: Measured, **wanted: Any) -> list[Measured]:
    return [row for row in results["rows"] if all(row.get(key) == value for key, value in wanted.items())]


def kernels_table(results: Measured) -> str:
    """Kernels and the search, against what they are compared with; then the search against its alternatives."""
    rows = []
    for benchmark, what in (("gather", "gather"), ("normal equations", "normal equations"), ("insert", "insertion")):
        ours, *others = _select(results, benchmark=benchmark)
        if others:
            other = others[0]
            name = f"{what}, {ours['samples']:,} samples"
            rows.append([name, duration(ours["min_s"]), f"prototype: {duration(other['min_s'])}", times(other["ours_faster"])])
    for other in _select(results, benchmark="search", variant="rotate and four transforms"):
        ours = _select(results, benchmark="search", variant="ours")[0]
        name = f"search, a particle and rotation, band {ours['k_max']}, shifts within {ours['window_voxels']} voxels"
        rows.append([name, duration(ours["min_s"]), f"rotation and four FFTs: {duration(other['min_s'])}", times(other["ours_faster"])])
    parts = [markdown(["one core", "ours", "against", "faster"], rows)]
    compared = []
    for ours in _select(results, benchmark="alternatives", variant="ours"):
        same = {key: ours[key] for key in ("k_max", "window_voxels")}
        cells = [str(ours["k_max"]), f"{ours['window_voxels']}", str(ours["shifts"]), duration(ours["min_s"])]
        for variant in ("matrix products", "band transform"):
            other = _select(results, benchmark="alternatives", variant=variant, **same)[0]
            cells.append(f"{duration(other['min_s'])} ({times(other['ours_faster'])})")
        compared.append(cells)
    if compared:
        head = ["band", "shifts within (voxels)", "shifts", "ours", "matrix products (ours faster)", "transform of the band (ours faster)"]
        parts.append("The search's alternatives, a particle and rotation:\n\n" + markdown(head, compared))
    return "\n\n".join(parts)


def iteration_table(results: Measured) -> str:
    """Compared iterations, then whole runs with the errors they end with."""
    rows = []
    for row in _select(results, benchmark="comparison"):
        ratio = f"{times(row['ours_faster_stages'])} ({times(row['ours_faster'])})"
        cells = [f"{row['ours']}, band {row['ours_band']:.0f}", duration(row["ours_min_s"])]
        rows.append([*cells, f"{duration(row['prototype_stages_min_s'])} ({duration(row['prototype_min_s'])})", ratio, times(row["ours_less_cpu"])])
    parts = []
    if rows:
        parts.append(markdown(["an iteration", "ours", "prototype: stages (whole)", "faster", "less CPU time"], rows))
    runs = []
    for program, variant in (("ours", "defaults, cold"), ("ours", "defaults"), ("prototype", "prototype"), ("ours", "quick")):
        found = sorted(_select(results, benchmark="run", program=program, variant=variant), key=lambda row: row["wall_s"])
        if found:
            row = found[0]
            cells = [f"{row['iterations']}", duration(row["wall_s"]), duration(row["cpu_s"])]
            cells.append(duration(row["workers_ready_after_s"]) if row.get("workers_ready_after_s") else "")
            runs.append([f"{program}: {variant}", *cells, f"{row['median_deg']:.2f} / {row['max_deg']:.2f}", f"{row['median_angst']:.2f}"])
    head = ["whole run", "iterations", "wall", "CPU", "of it until workers were ready", "median / largest error (degrees)", "median error (A)"]
    return "\n\n".join([*parts, markdown(head, runs)])


def memory_table(results: Measured) -> str:
    """Peaks by number of particles."""
    rows = [
        [
            f"{row['particles']}, binning 2" if "--binning 2" in row["options"] else f"{row['particles']}",
            str(row["chunk"]),
            f"{row['worker_peak_mib']:.0f} MiB",
            f"{row['parent_peak_mib']:.0f} MiB",
            duration(row["wall_s"]),
        ]
        for row in _select(results, benchmark="memory")
    ]
    return markdown(["particles", "in a task", "a worker's peak", "the parent's peak", "wall"], rows)


def accuracy_table(results: Measured) -> str:
    """Each set: errors that its noise lets expect, ours with each score, RELION's."""
    rows = []

    def cells(row: Measured, before: str = "") -> list[str]:
        return [f"{row[f'{before}median_{unit}']:.2f} / {row[f'{before}p90_{unit}']:.2f}" for unit in ("deg", "angst")]

    for name, options in MADE_SETS.items():
        for row in _select(results, set=name, benchmark="limit", band="the run's last band"):
            rows.append([f"`{name}` ({options}): expected", *cells(row, "expected_"), "", "", ""])
            rows.append(["aligned to the true map", *cells(row, "true_map_"), "", "", ""])
        for row in _select(results, set=name, benchmark="run"):
            about = f"ours, {row['score']}" if row["program"] == "ours" else row["program"]
            if not row.get("finished", True):
                about += ", stopped before its end"
            lost = f"{row['share_over_15_deg']:.0%}"
            rows.append(
                [
                    about,
                    *cells(row),
                    lost,
                    str(row["iterations"]),
                    f"{duration(row['wall_s'])} / {'?' if row['cpu_s'] is None else duration(row['cpu_s'])}",
                ]
            )
            if row["program"] == "RELION":
                at_best = min(_select(results, set=name, benchmark="iteration", program="RELION"), key=lambda entry: entry["median_deg"])
                rows.append([f"its best iteration, {at_best['iteration']}", *cells(at_best), f"{at_best['share_over_15_deg']:.0%}", "", ""])
    head = ["", "degrees, median / 90 %", "Angstrom, median / 90 %", "over 15 degrees", "iterations", "wall / CPU"]
    return markdown(head, rows)


def real_particles_table(results: Measured) -> str:
    """Distances to the published poses."""
    rows = []
    for row in _select(results, benchmark="real"):
        about = f"{row['case']}, {row['data']}{', priors' if row['prior'] else ''}"
        cells = [f"{row[f'median_{unit}']:.1f} / {row[f'p90_{unit}']:.1f}" for unit in ("deg", "angst")]
        sigma = f"{row['sigma_deg']:.1f} ({row['error_over_sigma_deg']:.1f}) / {row['sigma_angst']:.1f} ({row['error_over_sigma_angst']:.1f})"
        rows.append([about, *cells, f"{row['share_over_15_deg']:.1%}", sigma])
    head = ["", "degrees, median / 90 %", "Angstrom, median / 90 %", "over 15 degrees", "sigma in degrees / Angstrom (error / sigma)"]
    return markdown(head, rows)


def classes_table(results: Measured) -> str:
    """Share of particles in the class of their kind, run by run and iteration by iteration."""
    runs: dict[tuple[Any, ...], dict[int, Measured]] = {}
    for row in results["rows"]:
        runs.setdefault((row["removed"], row["snr"], row["start"], row["assignment"], row.get("seed")), {})[row["iteration"]] = row
    last = max(row["iteration"] for row in results["rows"])
    rows = []
    for (removed, snr, start, assignment, seed), found in runs.items():
        begun = "both maps at 40 A" if start == "maps" else f"random, seed {seed}"
        cells = [f"{100 * found[number]['right']:.1f} %" if number in found else "" for number in range(1, last + 1)]
        end = found[max(found)]
        rows.append([f"{100 * removed:g} %, {snr:g}", begun, assignment, *cells, f"{end['median_margin']:.0f}", duration(end["wall_s"])])
    return markdown(["lobe, SNR", "start", "assignment", *(f"iteration {number}" for number in range(1, last + 1)), "median margin", "wall"], rows)


def read_results(name: str, folder: Path) -> list[Measured]:
    """The files that a table is made of."""
    paths = [folder / f"{name}.json"]
    if name == "accuracy":
        paths = [folder / f"{name}_{made}{program}.json" for made in MADE_SETS for program in ("", "_relion")]
    found = [json.loads(path.read_text()) for path in paths if path.is_file()]
    if name == "accuracy":
        for results in found:
            made = results["name"].split("_")[1]
            results["rows"] = [{"set": made, **row} for row in results["rows"]]
    return found


def star_rows_table(results: Measured) -> str:
    """Steps of reading and writing a long list."""
    steps = {
        "read_star": "STAR file read",
        "write_star": "STAR file written as it is",
        "read_particles": "particle list read",
        "write_particles": "particle list written, every pose changed",
    }
    rows = [[steps[row["step"]], duration(row["seconds"]), duration(row["cpu_seconds"]), f"{row['peak_gib']:.2f} GiB"] for row in results["rows"]]
    return markdown([f"{results['rows'][0]['rows']:,} rows", "by the clock", "processor", "peak memory"], rows)


TABLES: dict[str, Callable[[Measured], str]] = {
    "kernels": kernels_table,
    "iteration": iteration_table,
    "memory": memory_table,
    "accuracy": accuracy_table,
    "classes": classes_table,
    "real_particles": real_particles_table,
    "star_rows": star_rows_table,
    "cuda_steps": gpu_tables.cuda_steps_table,
    "end_to_end": gpu_tables.end_to_end_table,
    "no_poses": gpu_tables.no_poses_table,
    "cold_start": gpu_tables.cold_start_table,
    "throughput": gpu_tables.throughput_table,
    "procs_per_gpu": gpu_tables.procs_per_gpu_table,
    "gpu_memory": gpu_tables.gpu_memory_table,
    "scaling": gpu_tables.scaling_table,
    "gpu_against_cpu": gpu_tables.gpu_against_cpu_table,
}


def table(name: str, folder: Path = RESULTS) -> str | None:
    """The table of one benchmark with where, when and how it was measured; None without results. Of `overview` the table alone."""
    if name == "overview":
        named = {one: found[0] for one in OVERVIEW if (found := read_results(one, folder))}
        return gpu_tables.overview_table(named) if named else None
    found = read_results(name, folder) if name in TABLES else []
    if not found:
        return None
    whole = {**found[0], "rows": [row for results in found for row in results["rows"]]}
    where = []
    for results in found:
        more = results["notes"].removeprefix(found[0]["notes"])  # what is to be known of this file alone
        line = measured_at(results["environment"])
        line += "" if results is found[0] or more == results["notes"] else f".{more}"
        where.append(f"{machine(results['environment'])}, {line}" if not where else line)
    return "\n\n".join(part for part in (TABLES[name](whole), found[0]["notes"], "\\\n".join(where)) if part)


def machine(about: Measured) -> str:
    """What it ran on, as far as it was recorded."""
    parts = [" and ".join(f"{about['gpus'].count(gpu)} {gpu}" for gpu in dict.fromkeys(about["gpus"]))] if about.get("gpus") else []
    if "processor" in about:
        parts += [f"{about['processor']} ({about['vectors']})", f"{about['cores_used']} cores"]
    return ", ".join(parts)


def measured_at(about: Measured) -> str:
    """Under what load, of which commit, when and by which command."""
    load, commit, command = (about.get(name) for name in ("load_average_at_start", "commit", "command"))
    line = f"load {'not recorded' if load is None else format(load, 'g')} at the start; commit {commit or 'not recorded'}, {about['date']}"
    return line + (f"; `{command}`" if command else "")


def fill(text: str, folder: Path = RESULTS) -> str:
    """The text with the tables for which there are results."""

    def replaced(found: re.Match[str]) -> str:
        new = table(found[2], folder)
        return found[0] if new is None else f"{found[1]}\n{new}\n{found[4]}"

    return re.sub(r"(<!-- benchmark:([\w-]+) -->)(.*?)(<!-- /benchmark -->)", replaced, text, flags=re.DOTALL)


def main(arguments: list[str]) -> None:
    """Rewrites files in place where something changed."""
    for path in [Path(name) for name in arguments] or [ROOT / name for name in TEXTS]:
        if not path.is_file():
            print(f"{path}: not found")
            continue
        old = path.read_text()
        new = fill(old)
        if new != old:
            path.write_text(new)
        print(f"{path}: {'tables renewed' if new != old else 'nothing changed'}")


if __name__ == "__main__":
    main(sys.argv[1:])
