"""`numba-glocal average`: maps from the poses as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numba_glocal.job import prepare_job
from numba_glocal.refinement import average_run
from numba_glocal.results import RunFolder
from numba_glocal.settings import SPLITS, AverageSettings
from numba_glocal.values import NOISE_GROUPS

from .console import Stage, print_facts, say, shown_warnings, warn
from .options import (
    PATH,
    diameter_option,
    dry_run_option,
    numbered_options,
    output_option,
    particles_argument,
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


@click.command("average")
@particles_argument
@output_option
@click.option(
    "--weighting",
    type=click.Choice(["noise", "ctf"]),
    default="noise",
    show_default=True,
    help="Weights from fitted noise, or the classical C X over C^2 (X over C for premultiplied lists).",
)
@click.option("--mask", type=PATH, metavar="FILE", help="Mask of the FSC. [default: sphere of --particle-diameter]")
@diameter_option
@click.option("--soft-edge", "soft_edge_voxels", type=float, default=5.0, show_default=True, metavar="VOXELS", help="Width of the sphere's edge.")
@pixel_size_option
@numbered_options
@tomogram_options
@click.option("--binning", type=float, default=1.0, show_default=True, help="Fourier cropping, whole or fractional.")
@symmetry_option
@click.option("--fsc-criterion", type=float, default=0.143, show_default=True, help="FSC value at which the resolution is read.")
@wedge_options
@root_option
@click.option("--split", type=click.Choice(SPLITS), default="file", show_default=True, help="Half-sets: of the list, by particle, by tomogram.")
@click.option("--noise-groups", type=click.Choice(NOISE_GROUPS), default="auto", show_default=True, help="Particles that share a noise model.")
@click.option("--invert-contrast", is_flag=True, help="Turn black into white.")
@click.option("--normalise/--no-normalise", "normalise", default=True, show_default=True, help="Particles to mean 0, deviation 1 outside the mask.")
@click.option("--premultiplied/--not-premultiplied", "premultiplied", default=None, help="Overrides the list's flag (--weighting ctf).")
@click.option("--max-bad", type=int, metavar="N", help="Unusable particles tolerated. [default: the larger of 1 % and 3]")
@click.option("--cache-gib", type=float, default=2.0, show_default=True, metavar="GIB", help="Memory of each CPU worker for prepared particles.")
@click.option("--gpu-memory", "gpu_memory_gib", type=float, metavar="GIB", help="Memory of each GPU that may be used. [default: what is free]")
@seed_option
@subset_option
@worker_options
@dry_run_option
@verbosity_options
def average_command(particles: Path, output: Path, mask: Path | None, dry_run: bool, **options: Any) -> None:
    """Reconstruct half-maps and average of PARTICLES from the poses as they are, and their FSC."""
    with shown_warnings():
        settings = AverageSettings(particles=str(particles), output=str(output), mask=None if mask is None else str(mask), **options)
        folder, inputs = RunFolder(output), input_paths(settings.particles, settings.mask, settings.wedge_list, settings.tomograms, settings.tilts)
        folder.check_new(inputs)
        plan = choose_workers(settings)
        job = prepare_job(settings)
        for line in [*([plan.note] if plan.note else []), *job.warnings]:
            warn(line)
        print_facts("Plan", plan_facts(job, plan))
        if dry_run:
            say("Dry run: nothing was written.")
            return
        with new_folder(folder, inputs, settings):
            run_job(job, plan, folder, "average", lambda executor: average_run(job, executor, folder, Stage, plan.chunk_limit))
