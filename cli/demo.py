"""`numba-glocal demo`: everything once, without input."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from numba_glocal.geometry import angle_between_deg
from numba_glocal.io import read_particles
from numba_glocal.simulation import SimulationSettings, simulate

from .align import align_command
from .console import Stage, say
from .options import PATH
from .outputs import check_output_folder


@click.command("demo")
@click.option("-o", "--output", type=PATH, default=Path("demo_run"), show_default=True, metavar="FOLDER", help="Gets data/ and run/.")
@click.option("--n", "count", type=click.IntRange(min=8), default=60, show_default=True, help="Number of particles.")
@click.option("--cpu-procs", type=click.IntRange(min=1), metavar="N", help="Workers. [default: the usable cores]")
@click.pass_context
def demo_command(ctx: click.Context, output: Path, count: int, cpu_procs: int | None) -> None:
    """Simulate particles of a built-in phantom, align them, and compare the poses with the truth."""
    check_output_folder(output, overwrite=False)
    data, run = output / "data", output / "run"
    wanted = SimulationSettings(count=count, box_size=48, pixel_size_angst=8.0)
    with Stage("simulate", count) as stage:
        made = simulate(data, wanted, progress=lambda done, total: stage.advance(done - stage.done))
    ctx.invoke(
        align_command,
        particles=made.start,
        output=run,
        reference=str(made.reference),
        particle_diameter_angst=300.0,
        iterations=3,
        cpu_procs=cpu_procs,
    )
    # the lists name their volumes from data/ on, where those of the run are not looked for
    truth, found = read_particles(made.truth).poses, read_particles(run / "particles.star", require_volumes=False).poses
    start = read_particles(made.start).poses
    for name, poses in (("before", start), ("after", found)):
        angle = np.median(angle_between_deg(truth.rotations, poses.rotations))
        shift = np.median(np.linalg.norm(truth.shifts_angst - poses.shifts_angst, axis=1))
        say(f"Median distance to the true poses {name}: {angle:.2f} degrees, {shift:.2f} A.")
    say(f"Open {run / 'report.html'} in a browser.")
