"""`numba-glocal align`: the main job."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from numba_glocal.errors import SettingsError
from numba_glocal.job import prepare_job
from numba_glocal.refinement import Refinement
from numba_glocal.results import RunFolder, RunResult
from numba_glocal.schedule import last_iteration
from numba_glocal.settings import ASSIGNMENTS, GPU_PRECISIONS, SPLITS, AlignSettings, read_job_file
from numba_glocal.values import NOISE_GROUPS, SCORES

from .console import Stage, note, print_facts, say, shown_warnings, warn
from .options import (
    PATH,
    diameter_option,
    dry_run_option,
    numbered_options,
    pixel_size_option,
    root_option,
    seed_option,
    subset_option,
    symmetry_option,
    tomogram_options,
    verbosity_options,
    wedge_options,
    worker_options,
)
from .running import choose_workers, input_paths, new_folder, plan_facts, run_job

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(AlignSettings)}
_CHANGEABLE_ON_RESUME = {"iterations", "until_converged", "gpus", "procs_per_gpu", "cpu_procs", "cache_gib", "gpu_memory_gib", "max_bad", "output"}
_PATHS = {"particles", "reference", "further_references", "mask", "angle_list", "wedge_list", "root", "tomograms", "tilts"}
_BEGINS_AGAIN = "holds no finished iteration; the run begins again"


def _option(*names: str, key: str, kind: Any = None, text: str, **more: Any) -> Any:
    """An option whose default is the settings' own, shown in the help; None until given, so that --job can set it."""
    default = _DEFAULTS[key]
    shown = "" if default is None or default is dataclasses.MISSING else f" [default: {default}]"
    return click.option(*names, key, type=kind, default=None, help=text + shown, **more)


@click.command("align")
@click.argument("particles", type=PATH, required=False)
@click.option("-o", "--output", type=PATH, metavar="FOLDER", help="Run folder; must not hold another run.")
@click.option(
    "--reference",
    "references",
    multiple=True,
    metavar="FILE",
    help="Start map; given several times, one for each class. [default: average of the given poses]",
)
@_option("--classes", key="classes", kind=int, text="Classes; drawn at random where they have no start maps of their own.", metavar="K")
@_option("--class-assignment", key="class_assignment", kind=click.Choice(ASSIGNMENTS), text="To the best class, or to each by its probability.")
@_option("--initial-lowpass", key="initial_lowpass_angst", kind=float, text="Low-pass of the start map.", metavar="ANGSTROM")
@_option("--mask", key="mask", kind=str, text="Mask of the reference; it turns with it. [default: sphere of --particle-diameter]", metavar="FILE")
@click.option("--spherical-mask", is_flag=True, help="A soft sphere of --particle-diameter (what is used without --mask).")
@diameter_option
@_option("--soft-edge", key="soft_edge_voxels", kind=float, text="Width of the sphere's edge.", metavar="VOXELS")
@pixel_size_option
@numbered_options
@tomogram_options
@_option("--binning", key="binning", kind=float, text="Fourier cropping, whole or fractional; results stay in Angstrom.")
@_option("--angle-shells", key="angle_shells", kind=int, text="Steps to either side of each pose in the first search.")
@_option("--angle-increment", key="angle_increment_deg", kind=float, text="Angular step of the first search.", metavar="DEGREES")
@click.option("--global", "global_search", is_flag=True, default=None, help="First iteration from no orientations; those of the list do not matter.")
@_option("--angle-list", key="angle_list", kind=str, text="Orientations that a global search begins with (PyTom's EM file).", metavar="FILE")
@_option("--shift-range", key="shift_range_angst", kind=float, text="Shifts tried at first. [default: 0.15 of the diameter]", metavar="ANGSTROM")
@_option("--max-shift", key="max_shift_angst", kind=float, text="Hard limit of the distance from the list's positions.", metavar="ANGSTROM")
@_option("--max-angle", key="max_angle_deg", kind=float, text="Hard limit of the turn from the list's orientations.", metavar="DEGREES")
@_option("--angle-prior-deg", key="angle_prior_deg", kind=float, text="Gaussian prior about the list's orientations (score ml).", metavar="SIGMA")
@_option("--shift-prior-angst", key="shift_prior_angst", kind=float, text="Gaussian prior about the list's positions (score ml).", metavar="SIGMA")
@symmetry_option
@_option(
    "--relax-symmetry", key="relax_symmetry", kind=str, text="Search all copies of each pose by this group; average without it.", metavar="GROUP"
)
@click.option("--adaptive/--fixed", "adaptive", default=None, help="Increment and shift range follow the poses' changes. [default: adaptive]")
@_option("--score", key="score", kind=click.Choice(SCORES), text="What candidates are compared by.")
@_option("--highpass", key="highpass_angst", kind=float, text="Coarsest detail used.", metavar="ANGSTROM")
@_option("--lowpass", key="lowpass_angst", kind=float, text="Finest detail used.", metavar="ANGSTROM")
@_option("--fsc-criterion", key="fsc_criterion", kind=float, text="FSC value at which the resolution is read.")
@wedge_options
@root_option
@_option("--split", key="split", kind=click.Choice(SPLITS), text="Half-sets: as the list says, by particle, or by tomogram.")
@click.option("--mirror", is_flag=True, default=None, help="The particles have the other hand: start map and mask are mirrored along z.")
@click.option("--check-hand", is_flag=True, default=None, help="Say at the start whether particles match the start map or its mirror image better.")
@_option("--noise-groups", key="noise_groups", kind=click.Choice(NOISE_GROUPS), text="Particles that share a noise model and a scale of the signal.")
@_option(
    "--keep-best", key="keep_best_percent", kind=float, text="Average this share of each half only, by score; all are aligned.", metavar="PERCENT"
)
@_option("--iterations", key="iterations", kind=int, text="How often to iterate.")
@click.option(
    "--until-converged/--no-until-converged",
    "until_converged",
    default=None,
    help="Stop before --iterations where poses and resolution have settled. [default: no]",
)
@click.option("--invert-contrast", is_flag=True, default=None, help="The particles' contrast is opposite to the map's.")
@click.option("--normalise/--no-normalise", "normalise", default=None, help="Particles to mean 0, deviation 1 outside the mask. [default: yes]")
@_option("--max-bad", key="max_bad", kind=int, text="Unusable particles tolerated. [default: the larger of 1 % and 3]", metavar="N")
@_option("--cache-gib", key="cache_gib", kind=float, text="Memory of each CPU worker for prepared particles.", metavar="GIB")
@_option("--gpu-memory", key="gpu_memory_gib", kind=float, text="Memory of each GPU that may be used. [default: what is free]", metavar="GIB")
@_option(
    "--gpu-precision",
    key="gpu_precision",
    kind=click.Choice(GPU_PRECISIONS, case_sensitive=False),
    text="Of searches on GPUs; int8 and half may use tensor cores; auto is int8 where the GPU has it. [default: auto]",
)
@seed_option
@subset_option
@worker_options
@click.option("--job", "job_file", type=PATH, metavar="FILE.toml", help="Options from a file; those on the command line win.")
@click.option("--resume", is_flag=True, help="Go on after the last finished iteration of the run in --output.")
@dry_run_option
@verbosity_options
@click.pass_context
def align_command(
    ctx: click.Context, particles: Path | None, output: Path | None, job_file: Path | None, resume: bool, dry_run: bool, **options: Any
) -> None:
    """Align PARTICLES (a list of RELION, PyTom, Dynamo, STOPGAP or AV3) and average them, two independent halves, until --iterations are done.

    \b
    numba-glocal align particles.star -o run1 --reference ref.mrc --particle-diameter 300
    """
    with shown_warnings(), ExitStack() as until_the_end:
        settings, filed = _settings(ctx, particles, output, job_file, resume, options)
        folder = RunFolder(Path(settings.output))
        inputs = input_paths(
            settings.particles, *settings.references, settings.mask, settings.angle_list, settings.wedge_list, settings.tomograms, settings.tilts
        )
        if not resume:
            folder.check_new(inputs)
        elif not dry_run:
            until_the_end.enter_context(folder.held())  # before anything is read that a live run may be writing
        state = folder.last_state() if resume else None
        goes_on = state is not None
        if state is not None:
            folder.check_unfinished(state, last_iteration(state, settings))
        if resume and not goes_on:
            note(f"--resume: {folder.path} {_BEGINS_AGAIN}")
        plan = choose_workers(settings, filed)
        if plan.unused:
            note(plan.unused)
        job = prepare_job(settings, goes_on)
        for line in [*([plan.note] if plan.note else []), *job.warnings]:
            warn(line)
        print_facts("Plan", plan_facts(job, plan))
        if dry_run:
            say("Dry run: nothing was written.")
            return
        if resume:
            folder.write_job(settings)
        else:
            until_the_end.enter_context(new_folder(folder, inputs, settings))

        def work(executor: Any) -> RunResult:
            if resume and not goes_on:
                logging.getLogger("numba_glocal.plan").info(_BEGINS_AGAIN)  # shown already
            loop = Refinement(job, executor, folder, Stage, plan.chunk_limit)
            result = loop.run(goes_on)
            loop.finish(result)
            return result

        run_job(job, plan, folder, "align", work)


def _meant_from(folder: Path, paths: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """A path, or several, as they were meant from a folder; those that are not there stay."""
    if isinstance(paths, tuple):
        return tuple(str(_meant_from(folder, path)) for path in paths)
    return str(folder / paths) if (folder / paths).exists() else paths


def _resolved(paths: str | tuple[str, ...]) -> list[Path]:
    """One path, or several, without ways around."""
    return [Path(path).resolve() for path in ((paths,) if isinstance(paths, str) else paths)]


def _settings(
    ctx: click.Context, particles: Path | None, output: Path | None, job_file: Path | None, resume: bool, options: dict[str, Any]
) -> tuple[AlignSettings, set[str]]:
    """Options of the command line over those of a job file (of the run itself when resuming), and the names of those that come from there."""
    if options.pop("spherical_mask") and options["mask"] is not None:
        raise SettingsError("--mask and --spherical-mask exclude each other")
    references = options.pop("references")
    given = {key: value for key, value in options.items() if value is not None}
    if references:
        given |= {"reference": references[0], "further_references": tuple(references[1:])}
    for key in (
        "seed",
        "symmetry",
        "tilt_axis",
        "flip_tilt",
        "ctf",
        "edge",
        "procs_per_gpu",
    ):  # options with a default of their own: only what the user typed counts
        if ctx.get_parameter_source(key) != click.core.ParameterSource.COMMANDLINE:
            given.pop(key, None)
    if particles is not None:
        given["particles"] = str(particles)
    if output is not None:
        given["output"] = str(output)
    base: dict[str, Any] = {}
    if resume:
        if output is None:
            raise SettingsError("--resume needs the run's folder: -o FOLDER")
        if not (output / "job.toml").is_file():
            raise SettingsError(f"--resume: no run in {output} (there is no job.toml); expected the folder of a run that was stopped")
        base = read_job_file(output / "job.toml")
        started_in = RunFolder(output).started_in()
        for key in _PATHS & base.keys():  # they were meant from there, wherever we are now
            if started_in is not None and started_in != Path.cwd():
                base[key] = _meant_from(started_in, base[key])
        for key, value in given.items():
            before = base.get(key, _DEFAULTS.get(key))
            same = _resolved(before) == _resolved(value) if key in _PATHS and before is not None else _plain(key, before) == _plain(key, value)
            if key not in _CHANGEABLE_ON_RESUME and not same:
                raise SettingsError(f"--resume: {_typed(ctx, key)} was {_shown(before)} in this run and cannot become {_shown(value)}")
    elif job_file is not None:
        base = read_job_file(job_file)
    merged = base | given
    if "particles" not in merged:
        raise SettingsError("no particle list is given; expected `numba-glocal align PARTICLES.star -o FOLDER`")
    if "output" not in merged:
        raise SettingsError("no output folder is given; expected -o FOLDER")
    return AlignSettings(**merged), base.keys() - given.keys()


def _plain(key: str, value: Any) -> Any:
    """A value as `AlignSettings` keeps it, to be compared."""
    return None if key == "gpu_precision" and value == "auto" else value


def _shown(value: Any) -> str:
    """A value for people."""
    if value is None or value == ():
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _typed(ctx: click.Context, key: str) -> str:
    """An option as it is typed, of the setting that it gives."""
    key = {"reference": "references", "further_references": "references"}.get(key, key)
    for parameter in ctx.command.params:
        if parameter.name == key:
            return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else "PARTICLES"
    return key
