"""`numba-glocal convert`: particle lists of one program to those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numba_glocal.errors import SettingsError, plural
from numba_glocal.io import HELD, format_to_write, left_behind, list_formats, read_particles, write_particles

from .console import say, warn
from .options import PATH, numbered_options, pixel_size_option, verbosity_options
from .outputs import check_output_file, overwrite_option
from .running import shown_warnings


def _formats() -> list[str]:
    return [f.key for f in list_formats() if f.key and f.write is not None]


@click.command("convert")
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.option(
    "--to",
    "to",
    type=click.Choice(_formats()),
    metavar="FORMAT",
    help=f"{', '.join(_formats())}. [default: by the name of OUT; from STAR to STAR: that of IN]",
)
@click.option(
    "--poses",
    type=click.Choice(["tomogram", "volume"]),
    default="tomogram",
    show_default=True,
    help="Where volumes are turned (RELION 4 and 5) and FORMAT cannot say so: poses as in the tomogram, or as in the volumes that the list names.",
)
@click.option("--tomograms", type=PATH, metavar="FILE", help="Sizes of tomograms, for coordinates about their centres. [default: that of the set]")
@pixel_size_option
@numbered_options
@overwrite_option
@verbosity_options
def convert_command(
    source: Path,
    target: Path,
    to: str | None,
    poses: str,
    tomograms: Path | None,
    pixel_size_angst: float | None,
    particle_names: str | None,
    wedge_list: str | None,
    overwrite: bool,
) -> None:
    """Write the particle list IN as OUT, in the same or another format. Volumes are not touched and need not be there."""
    check_output_file(target, overwrite, (source, tomograms, None if wedge_list is None else Path(wedge_list)))
    options: dict[str, Any] = {"require_volumes": False, "pixel_size_angst": pixel_size_angst}
    options |= {"tomograms": tomograms, "particle_names": particle_names, "wedge_list": wedge_list}
    with shown_warnings():
        particles = read_particles(source, **options)
        chosen = format_to_write(target, particles, to)
        if particles.pixel_sizes_angst is not None and "relion" not in chosen.key and chosen.key != "warp":
            sizes = ", ".join(f"{size:g}" for size in sorted(set(particles.pixel_sizes_angst.tolist())))
            raise SettingsError(f"{source}: optics groups have pixel sizes of {sizes} A, expected one for a {chosen.name}")
        lost = left_behind(particles, chosen)
        if particles.volume_axes is not None and poses == "volume" and HELD["volume_axes"] in lost:
            particles = particles.in_volumes()
            lost.append("places of particles in the tomograms (poses are those in the turned volumes)")
        write_particles(target, particles, to=chosen.key or None)
    if lost:
        warn(f"{target}: a {chosen.name} cannot hold {', '.join(lost)}")
    say(f"{target}: {plural(len(particles), 'particle')}, {chosen.name}")
