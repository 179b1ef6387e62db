"""One self-contained HTML page about a run: what was reached, what moved, what it was made with."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from . import __version__
from .geometry import matrix_to_relion
from .io.paths import whole_file
from .report_template import PAGE
from .resolution import Crossing, find_crossing
from .values import FloatArray, FSCCurve, Volume

REPORT_NAME = "report.html"
_SHOWN_BAD = 50
_CLASSES_A_ROW = 4
_SHOWN_GROUPS = 12
_INK, _BLUE, _SKY, _GREY, _ORANGE = "#1d2733", "#14507a", "#5b9bc8", "#8c99a6", "#d9822b"


@dataclass(frozen=True, slots=True)
class IterationSummary:
    """One line of the iteration table; what is None is left out.

    Attributes
    ----------
    number : int
        From 1 on.
    resolution_angst : float or None
        At the run's criterion; infinite where not even the first shell reaches it.
    increment_deg : float or None
        Finest angular step searched.
    band_angst : float or None
        Finest detail used in the search.
    angle_change_deg, shift_change_angst : float or None
        Median change of the poses in this iteration.
    angle_sigma_deg, shift_sigma_angst : float or None
        Median uncertainty of the poses, along one axis.
    settled : bool
        Poses moved by little of that, and the resolution was no better than before.
    noise : mapping or None
        `noise.noise_facts` of each half's groups.
    ambiguous : int or None
        Particles with another mode in what was searched, at odds of more than 1 to 100.
    left_out : int or None
        Particles that were aligned but are not in the averages, by --keep-best.
    seconds : float or None
        Wall time.
    class_change : float or None
        Share of the particles that changed their class.
    classes : sequence of mapping
        ``number``, ``half_counts``, ``share`` and ``resolution_angst`` of each class; `resolution_angst` is then the best one's.
    """

    number: int
    resolution_angst: float | None = None
    increment_deg: float | None = None
    band_angst: float | None = None
    angle_change_deg: float | None = None
    shift_change_angst: float | None = None
    seconds: float | None = None
    angle_sigma_deg: float | None = None
    shift_sigma_angst: float | None = None
    settled: bool = False
    noise: Mapping[str, Any] | None = None
    ambiguous: int | None = None
    left_out: int | None = None
    class_change: float | None = None
    classes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One of several classes.

    Attributes
    ----------
    number : int
        From 1 on.
    half_counts : (int, int)
        Particles of each half whose class it is.
    share : float
        Of all particles.
    fsc : FSCCurve or None
        None where it was too small for maps.
    average : Volume or None
        To be shown, filtered.
    """

    number: int
    half_counts: tuple[int, int]
    share: float
    fsc: FSCCurve | None = None
    average: Volume | None = None


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """What one worker did: its name, its device ("CPU" or a GPU's name), passes (a particle counts each time) and seconds busy with them."""

    name: str
    device: str
    particles: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything a report can show. All but the title is optional; what is missing is left out of the page.

    Attributes
    ----------
    title : str
        The page's heading.
    subtitle : str
        A line under it.
    particle_count : int or None
        Particles in the averages.
    half_counts : (int, int) or None
        Of each half-set.
    criterion : float
        FSC value at which the resolution is read.
    fsc : FSCCurve or None
        Of the final half-maps.
    half1, half2, average, filtered : Volume or None
        Final maps.
    iterations : sequence of IterationSummary
        In order.
    scores : (n,) array or None
        Final score of every particle.
    score_name : str
        Which score.
    angle_changes_deg, shift_changes_angst : (n,) array or None
        Between the list that was given and the result.
    rotations : (n, 3, 3) array or None
        Final rotations, for the distribution of views.
    workers : sequence of WorkerSummary
        Throughput.
    bad_particles : sequence of (name, reason)
        Skipped ones.
    warnings : sequence of str
        Shown under the summary.
    converged : bool or None
        True when the run stopped because nothing moved any more.
    wall_seconds : float or None
        Of the whole run.
    resumed : int
        How often it was resumed.
    symmetry : str
        Point group that was imposed.
    symmetry_agreement : (float, float) or None
        How well the map had it before; see `symmetry.symmetry_agreement`.
    classes : sequence of ClassSummary
        Where there are several; `fsc` and the maps are then left out.
    noise : mapping of half to rows, or None
        `noise.noise_facts` of its groups.
    noise_groups : sequence of str
        Names of the groups.
    hand : sequence of (str, bool)
        What --check-hand has said of each start map, and whether the particles have its hand; if not, it is shown as a warning.
    files : mapping of str to str
        File name to what it is.
    settings : mapping
        Every option with its value.
    provenance : mapping
        Version, command, machine, date: as given, nothing is looked up.
    """

    title: str
    subtitle: str = ""
    particle_count: int | None = None
    half_counts: tuple[int, int] | None = None
    criterion: float = 0.143
    fsc: FSCCurve | None = None
    half1: Volume | None = None
    half2: Volume | None = None
    average: Volume | None = None
    filtered: Volume | None = None
    iterations: Sequence[IterationSummary] = ()
    scores: FloatArray | None = None
    score_name: str = "score"
    angle_changes_deg: FloatArray | None = None
    shift_changes_angst: FloatArray | None = None
    rotations: FloatArray | None = None
    workers: Sequence[WorkerSummary] = ()
    bad_particles: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    converged: bool | None = None
    wall_seconds: float | None = None
    resumed: int = 0
    symmetry: str = "C1"
    symmetry_agreement: Sequence[float] | None = None
    classes: Sequence[ClassSummary] = ()
    noise: Mapping[str, Sequence[Sequence[float]]] | None = None
    noise_groups: Sequence[str] = ()
    hand: Sequence[tuple[str, bool]] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


def write_report(run_folder: Path, data: ReportData) -> Path:
    """Write ``report.html`` into a folder; it appears whole or not at all.

    Parameters
    ----------
    run_folder : Path
        Must exist.
    data : ReportData
        What to show.

    Returns
    -------
    Path
        The page.
    """
    path = Path(run_folder) / REPORT_NAME
    text = render_report(data).encode("utf-8")
    with whole_file(path) as handle:
        handle.write(text)
    return path


def render_report(data: ReportData) -> str:
    """The page as text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    columns, rows = _iteration_table(data.iterations)
    return environment.from_string(PAGE).render(
        title=data.title,
        subtitle=data.subtitle,
        version=__version__,
        tiles=_tiles(data),
        summary=summarise(data),
        warnings=[_sentence(line) for line in (*_own_warnings(data), *data.warnings)],
        criterion=f"{data.criterion:g}",
        fsc_image=_png(_fsc_figure(data.fsc, data.criterion)) if data.fsc is not None else "",
        resolutions=_resolutions(data),
        fsc_note=_fsc_note(data),
        slices_image=_slices(data),
        classes_image=_png(_classes_figure(data.classes, data.criterion)) if any(c.fsc is not None for c in data.classes) else "",
        classes_slices=_class_slices(data.classes),
        class_rows=[_class_row(reached, data.criterion) for reached in data.classes],
        iterations_image=_png(_iterations_figure(data.iterations)) if _has_progress(data.iterations) else "",
        iteration_columns=columns,
        iteration_rows=rows,
        particle_images=_particle_images(data),
        noise_rows=_noise_rows(data),
        bad_particles=data.bad_particles[:_SHOWN_BAD],
        bad_total=_plural(len(data.bad_particles), "particle was", "particles were"),
        bad_more=max(len(data.bad_particles) - _SHOWN_BAD, 0),
        workers=[_worker_row(worker) for worker in data.workers],
        files=list(data.files.items()),
        tables=[
            (heading, [(name, _plain(value)) for name, value in table.items()])
            for heading, table in (("Settings", data.settings), ("Provenance", data.provenance))
            if table
        ],
    )


def summarise(data: ReportData) -> str:
    """The result in a few plain sentences."""
    sentences = []
    if data.fsc is not None:
        crossing = _crossing(data)
        curve = "half-maps under the mask, corrected for what the mask adds" if data.fsc.mask_name != "none" else "unmasked half-maps"
        if not crossing.crossed:
            sentences.append(
                f"The {curve} agree up to the finest detail these voxels can hold, {_angst(crossing.resolution_angst)} (Nyquist): "
                "smaller voxels would be needed to say more."
            )
        elif crossing.shell == 0:
            sentences.append(f"The half-maps do not agree: their FSC is below {data.criterion:g} from the first shell on.")
        else:
            sentences.append(f"The average reaches a resolution of {_angst(crossing.resolution_angst)} (FSC {data.criterion:g}, {curve}).")
    if data.classes:
        parts = [
            f"class {c.number} holds {100 * c.share:.0f} % and "
            + ("is too small for maps" if c.fsc is None else f"reaches {_angst(_class_crossing(c, data.criterion).resolution_angst)}")
            for c in data.classes
        ]
        sentences.append(f"The particles were sorted into {_plural(len(data.classes), 'class', 'classes')}: {'; '.join(parts)}.")
        change = data.iterations[-1].class_change if data.iterations else None
        if change is not None:
            sentences.append(f"In the last iteration {100 * change:.1f} % of the particles changed their class.")
    if data.particle_count is not None:
        halves = f", {data.half_counts[0]} and {data.half_counts[1]} in the two half-sets" if data.half_counts else ""
        left_out = data.iterations[-1].left_out if data.iterations else None
        more = f"; {_plural(left_out, 'more was', 'more were')} aligned and left out by score" if left_out else ""
        holds = "They hold" if data.classes else "It holds"
        sentences.append(f"{holds} {_plural(data.particle_count, 'particle', 'particles')}{halves}{more}.")
    if data.symmetry != "C1":
        had = ""
        if data.symmetry_agreement is not None:
            whole, apart = data.symmetry_agreement
            had = f"; before that, the map correlated with its symmetrised self by {whole:.2f}, without its round part by {apart:.2f}"
        sentences.append(f"Symmetry {data.symmetry} was imposed on each half by itself{had}.")
    sentences += [f"{_sentence(verdict)}." for verdict, right in data.hand if right]
    if data.iterations:
        ended = {True: ", after which the poses no longer moved", False: "", None: ""}[data.converged]
        sentences.append(f"{_plural(len(data.iterations), 'iteration was', 'iterations were')} run{ended}.")
    if data.resumed:
        sentences.append(f"The run was resumed {_plural(data.resumed, 'time', 'times')}; time and workers are those of all its parts.")
    turn, shift = _median(data.angle_changes_deg), _median(data.shift_changes_angst)
    moved = []
    if turn is not None:
        moved.append(f"half of the particles turned by more than {turn:.2g} degrees")
    if shift is not None:
        moved.append(f"half {'of the particles ' if turn is None else ''}moved by more than {_angst(shift)}")
    if moved:
        sentences.append(f"Compared with the poses of the input list, {' and '.join(moved)}.")
    if data.bad_particles:
        sentences.append(f"{_plural(len(data.bad_particles), 'particle was', 'particles were')} skipped.")
    return " ".join(sentences) or "Nothing has been computed yet."


def _tiles(data: ReportData) -> list[tuple[str, str]]:
    tiles = []
    if data.fsc is not None:
        tiles.append((_angst(_crossing(data).resolution_angst), f"resolution, FSC {data.criterion:g}"))
    if data.classes:
        tiles.append((str(len(data.classes)), "classes"))
    if data.particle_count is not None:
        tiles.append((f"{data.particle_count:,}", "particles"))
    if data.iterations:
        tiles.append((str(len(data.iterations)), "iterations" if len(data.iterations) != 1 else "iteration"))
    if data.average is not None:
        box, pixel = data.average.box_size, data.average.pixel_size_angst
        tiles.append((f"{box} \u00d7 {pixel:.4g} \u00c5", "box \u00d7 voxel"))
    if data.wall_seconds is not None:
        label = f"in all, resumed {_plural(data.resumed, 'time', 'times')}" if data.resumed else "from start to end"
        tiles.append((_duration(data.wall_seconds), label))
    return tiles


def _crossing(data: ReportData) -> Crossing:
    assert data.fsc is not None
    return find_crossing(data.fsc.corrected, data.fsc.box_size, data.fsc.pixel_size_angst, data.criterion)


def _own_warnings(data: ReportData) -> list[str]:
    found = [verdict for verdict, right in data.hand if not right]
    if data.fsc is not None and _crossing(data).rises_again:
        found.append(f"The FSC rises above {data.criterion:g} again beyond its first crossing: look at the curve before quoting the resolution.")
    return found


def _resolutions(data: ReportData) -> list[tuple[str, str]]:
    if data.fsc is None:
        return []
    fsc, rows = data.fsc, []
    curves = {"unmasked": fsc.unmasked, "masked": fsc.masked, "corrected": fsc.corrected}
    for name, curve in list(curves.items())[: 3 if fsc.mask_name != "none" else 1]:
        crossing = find_crossing(curve, fsc.box_size, fsc.pixel_size_angst, data.criterion)
        rows.append((name, _angst(crossing.resolution_angst) + ("" if crossing.crossed else " (Nyquist)")))
    return rows


def _fsc_note(data: ReportData) -> str:
    if data.fsc is None:
        return ""
    if data.fsc.mask_name == "none":
        return "No mask was used."
    first = data.fsc.randomised_from_shell
    if first >= data.fsc.unmasked.size:
        return f"Mask: {data.fsc.mask_name}. The unmasked curve never falls below 0.8, so no phases were randomised and nothing is corrected."
    edge = data.fsc.box_size * data.fsc.pixel_size_angst / max(first, 1)
    return (
        f"Mask: {data.fsc.mask_name}. Phases were randomised beyond {_angst(edge)}; correlation left there comes from the mask "
        "and is taken out of the corrected curve."
    )


def _iteration_table(iterations: Sequence[IterationSummary]) -> tuple[list[str], list[list[str]]]:
    """Only columns that hold something."""
    formats: list[tuple[str, Callable[[IterationSummary], Any], Callable[[Any], str]]] = [
        ("iteration", lambda i: i.number, str),
        ("resolution", lambda i: i.resolution_angst, _angst),
        ("increment", lambda i: i.increment_deg, lambda v: f"{v:.3g}\u00b0"),
        ("searched to", lambda i: i.band_angst, _angst),
        ("median turn", lambda i: i.angle_change_deg, lambda v: f"{v:.2f}\u00b0"),
        ("median shift", lambda i: i.shift_change_angst, lambda v: f"{v:.2f} \u00c5"),
        ("angle sigma", lambda i: i.angle_sigma_deg, lambda v: f"{v:.2f}\u00b0"),
        ("shift sigma", lambda i: i.shift_sigma_angst, lambda v: f"{v:.2f} \u00c5"),
        ("ambiguous", lambda i: i.ambiguous, str),
        ("left out", lambda i: i.left_out, str),
        ("changed class", lambda i: i.class_change, lambda v: f"{100 * v:.1f} %"),
        ("classes", lambda i: i.classes or None, lambda v: " / ".join(f"{100 * c['share']:.0f} %" for c in v)),
        ("time", lambda i: i.seconds, _duration),
    ]
    used = [column for column in formats if any(column[1](i) is not None for i in iterations)]
    rows = [["" if get(i) is None else show(get(i)) for _, get, show in used] for i in iterations]
    return [name for name, _, _ in used], rows


def _class_crossing(reached: ClassSummary, criterion: float) -> Crossing:
    assert reached.fsc is not None
    return find_crossing(reached.fsc.corrected, reached.fsc.box_size, reached.fsc.pixel_size_angst, criterion)


def _class_row(reached: ClassSummary, criterion: float) -> tuple[str, ...]:
    where = "no maps" if reached.fsc is None else _angst(_class_crossing(reached, criterion).resolution_angst)
    return str(reached.number), f"{100 * reached.share:.1f} %", *(f"{count:,}" for count in reached.half_counts), where


def _noise_rows(data: ReportData) -> list[list[str]]:
    """Group, and of each half form, level and gain; of many groups the ranges alone."""
    if not data.noise or len(data.noise_groups) < 2:
        return []

    def cells(rows: Sequence[Sequence[float]]) -> list[str]:
        exponent, epsilon, level, gain = zip(*rows, strict=True)
        return [f"{_span(exponent)} ({_span(epsilon)})", _span(level), _span(gain)]

    halves = [data.noise[half] for half in sorted(data.noise)]
    if len(data.noise_groups) > _SHOWN_GROUPS:
        return [[f"all {len(data.noise_groups)}", *(cell for rows in halves for cell in cells(rows))]]
    return [[name, *(cell for rows in halves for cell in cells([rows[place]]))] for place, name in enumerate(data.noise_groups)]


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _worker_row(worker: WorkerSummary) -> tuple[str, str, str, str, str]:
    rate = f"{worker.particles / worker.busy_seconds:.1f}" if worker.busy_seconds > 0 else ""
    return worker.name, worker.device, f"{worker.particles:,}", f"{worker.busy_seconds:.1f}", rate


# figures -------------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure, dpi: int = 130) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c1ca")
    axes.tick_params(colors=_INK, labelsize=9, length=3)
    axes.grid(True, color="#eceff2", linewidth=0.8)
    axes.set_axisbelow(True)


def _fsc_figure(fsc: FSCCurve, criterion: float) -> Figure:
    figure = _figure(6.2, 3.9)
    axes = figure.add_subplot()
    frequency = np.arange(fsc.unmasked.size) / (fsc.box_size * fsc.pixel_size_angst)
    if fsc.mask_name != "none":
        axes.plot(frequency, fsc.randomised, color=_ORANGE, linestyle="--", linewidth=1.2, label="phases randomised")
        axes.plot(frequency, fsc.unmasked, color=_GREY, linewidth=1.4, label="unmasked")
        axes.plot(frequency, fsc.masked, color=_SKY, linewidth=1.4, label="masked")
        axes.plot(frequency, fsc.corrected, color=_BLUE, linewidth=2.2, label="corrected")
    else:
        axes.plot(frequency, fsc.unmasked, color=_BLUE, linewidth=2.2, label="unmasked")
    axes.axhline(0.0, color="#b8c1ca", linewidth=0.8)
    axes.axhline(criterion, color=_INK, linewidth=0.9, linestyle=":")
    axes.text(frequency[-1], criterion + 0.015, f"{criterion:g}", ha="right", va="bottom", fontsize=9, color=_INK)
    crossing = find_crossing(fsc.corrected, fsc.box_size, fsc.pixel_size_angst, criterion)
    if crossing.shell > 0:
        at = frequency[crossing.shell]
        axes.plot([at, at], [-0.05, criterion], color=_BLUE, linewidth=1.0)
        axes.plot([at], [criterion], "o", color=_BLUE, markersize=5)
        axes.annotate(
            _angst(crossing.resolution_angst), (at, criterion), xytext=(6, 9), textcoords="offset points", fontsize=10, color=_BLUE, weight="bold"
        )
    axes.set_xlim(0, frequency[-1])
    axes.set_ylim(min(-0.1, float(np.nanmin(fsc.corrected)) - 0.05), 1.05)
    ticks = [t for t in MaxNLocator(6).tick_values(0, frequency[-1]) if 0 < t <= frequency[-1] * 1.0001]
    axes.set_xticks(ticks, [f"{1 / t:.3g}" for t in ticks])
    axes.set_xlabel("resolution (\u00c5)", fontsize=9.5)
    axes.set_ylabel("Fourier shell correlation", fontsize=9.5)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    _tidy(axes)
    return figure


def _classes_figure(classes: Sequence[ClassSummary], criterion: float) -> Figure:
    """Corrected FSC of every class."""
    figure = _figure(6.2, 3.9)
    axes = figure.add_subplot()
    last = 0.0
    for reached in classes:
        if reached.fsc is not None:
            frequency = np.arange(reached.fsc.corrected.size) / (reached.fsc.box_size * reached.fsc.pixel_size_angst)
            last = float(frequency[-1])
            axes.plot(frequency, reached.fsc.corrected, linewidth=1.8, label=f"class {reached.number}")
    axes.axhline(0.0, color="#b8c1ca", linewidth=0.8)
    axes.axhline(criterion, color=_INK, linewidth=0.9, linestyle=":")
    axes.set_xlim(0, last)
    axes.set_ylim(-0.1, 1.05)
    ticks = [t for t in MaxNLocator(6).tick_values(0, last) if 0 < t <= last * 1.0001]
    axes.set_xticks(ticks, [f"{1 / t:.3g}" for t in ticks])
    axes.set_xlabel("resolution (\u00c5)", fontsize=9.5)
    axes.set_ylabel("Fourier shell correlation, corrected", fontsize=9.5)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    _tidy(axes)
    return figure


def _class_slices(classes: Sequence[ClassSummary]) -> list[str]:
    """Slices of the classes' averages, a picture for every few of them."""
    maps = [(f"class {reached.number}", reached.average) for reached in classes if reached.average is not None]
    return [_slices_of(maps[first : first + _CLASSES_A_ROW]) for first in range(0, len(maps), _CLASSES_A_ROW)]


def _slices(data: ReportData) -> str:
    maps = [
        (name, volume)
        for name, volume in (("half-map 1", data.half1), ("half-map 2", data.half2), ("average", data.average), ("average, filtered", data.filtered))
        if volume is not None
    ]
    return _slices_of(maps)


def _slices_of(maps: list[tuple[str, Volume]]) -> str:
    if not maps:
        return ""
    figure = _figure(2.35 * len(maps), 7.1)
    grid = figure.subplots(3, len(maps), squeeze=False)
    for column, (name, volume) in enumerate(maps):
        data_zyx = np.asarray(volume.data, dtype=np.float32)
        middle = volume.box_size // 2
        low, high = np.nanpercentile(data_zyx, [0.5, 99.8])
        for row, (plane, image) in enumerate((("xy", data_zyx[middle]), ("xz", data_zyx[:, middle]), ("yz", data_zyx[:, :, middle]))):
            axes = grid[row, column]
            axes.imshow(image, cmap="gray", origin="lower", vmin=low, vmax=high if high > low else low + 1, interpolation="bilinear")
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(False)
            if row == 0:
                axes.set_title(name, fontsize=10.5, color=_INK)
            if column == 0:
                axes.set_ylabel(plane, fontsize=10.5, color=_INK)
    _scale_bar(grid[2, 0], maps[0][1])
    return _png(figure, dpi=115)


def _scale_bar(axes: Any, volume: Volume) -> None:
    extent = volume.box_size * volume.pixel_size_angst
    if not math.isfinite(extent) or extent <= 0:
        return
    unit = 10.0 ** math.floor(math.log10(0.3 * extent))
    length = unit * max(step for step in (1, 2, 5) if step * unit <= 0.3 * extent)
    start, height = 0.05 * volume.box_size, 0.06 * volume.box_size
    axes.plot([start, start + length / volume.pixel_size_angst], [height] * 2, color="white", linewidth=3, solid_capstyle="butt")
    axes.text(start, height * 1.5, f"{length:g} \u00c5", color="white", fontsize=9)


def _has_progress(iterations: Sequence[IterationSummary]) -> bool:
    return any(i.resolution_angst is not None or i.increment_deg is not None for i in iterations)


def _iterations_figure(iterations: Sequence[IterationSummary]) -> Figure:
    panels: list[tuple[str, list[float | None], str]] = [
        ("resolution (\u00c5)", [i.resolution_angst for i in iterations], _BLUE),
        ("angular increment (degrees)", [i.increment_deg for i in iterations], _ORANGE),
    ]
    panels = [panel for panel in panels if any(value is not None for value in panel[1])]
    figure = _figure(4.9 * len(panels), 2.9)
    for axes, (label, values, colour) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        points = [(i.number, value) for i, value in zip(iterations, values, strict=True) if value is not None and math.isfinite(value)]
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color=colour, linewidth=1.8, markersize=5)
        axes.set_ylim(0, max((p[1] for p in points), default=1.0) * 1.12)
        axes.set_xlabel("iteration", fontsize=9.5)
        axes.set_title(label, fontsize=10.5, color=_INK, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _tidy(axes)
    return figure


def _particle_images(data: ReportData) -> list[tuple[str, str]]:
    images = []
    for values, label, caption, colour in (
        (data.scores, data.score_name, "Final score of every particle.", _BLUE),
        (data.angle_changes_deg, "degrees", "Turn of every particle, from the input list to the result.", _BLUE),
        (data.shift_changes_angst, "\u00c5", "Shift of every particle, from the input list to the result.", _BLUE),
    ):
        if values is not None and np.isfinite(values).any():
            images.append((_png(_histogram(np.asarray(values), label, colour)), caption))
    if data.rotations is not None and len(data.rotations):
        caption = "Directions the particles are seen from; every cell covers the same solid angle, so even views give an even picture."
        images.append((_png(_views_figure(np.asarray(data.rotations))), caption))
    return images


def _histogram(values: FloatArray, label: str, colour: str) -> Figure:
    values = values[np.isfinite(values)]
    figure = _figure(4.7, 2.9)
    axes = figure.add_subplot()
    least, most = float(values.min()), float(values.max())
    if most - least < 1e-6 * max(abs(least), abs(most)):  # all alike (every shift at --max-shift): no bins fit between them
        pad = 0.05 * abs(most)
        least, most = least - pad, most + pad
    axes.hist(values, range=(least, most), bins=int(np.clip(np.sqrt(values.size) * 1.5, 8, 60)), color=colour, edgecolor="white", linewidth=0.4)
    median = float(np.median(values))
    axes.axvline(median, color=_ORANGE, linewidth=1.6)
    axes.set_title(f"median {median:.3g}", fontsize=9.5, color=_ORANGE, loc="right")
    axes.set_xlabel(label, fontsize=9.5)
    axes.set_ylabel("particles", fontsize=9.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _tidy(axes)
    return figure


def _views_figure(rotations: FloatArray) -> Figure:
    angles = matrix_to_relion(rotations)
    figure = _figure(4.7, 2.9)
    axes = figure.add_subplot()
    across = int(np.clip(np.sqrt(len(rotations)), 9, 36))
    counts, x, y = np.histogram2d(angles[:, 0], np.cos(np.deg2rad(angles[:, 1])), bins=(across, max(across // 2, 4)), range=((-180, 180), (-1, 1)))
    mesh = axes.pcolormesh(x, y, counts.T, cmap="Blues", vmin=0)
    axes.set_xticks([-180, -90, 0, 90, 180])
    tilts = [0, 45, 90, 135, 180]
    axes.set_yticks([math.cos(math.radians(t)) for t in tilts], [str(t) for t in tilts])
    axes.set_ylim(-1, 1)
    axes.set_xlabel("rot (degrees)", fontsize=9.5)
    axes.set_ylabel("tilt (degrees)", fontsize=9.5)
    axes.tick_params(labelsize=9, length=3)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label("particles", fontsize=9)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return figure


# words ---------------------------------------------------------------------------------------------------------------


def _median(values: FloatArray | None) -> float | None:
    finite = np.asarray([] if values is None else values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite)) if finite.size else None


def _angst(value: float) -> str:
    return f"{value:.3g} \u00c5" if math.isfinite(value) else "none"


def _sentence(line: str) -> str:
    """A capital where a line begins with a word; names of files and options stay as they are."""
    return line[0].upper() + line[1:] if re.match(r"[a-z]+(-[a-z]+)*:?\s", line) else line


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _plain(value: Any) -> str:
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value) or "\u2013"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    return str(value)
