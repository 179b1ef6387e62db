"""`numba-glocal simulate`: particles with known poses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from numba_glocal.errors import VolumeError
from numba_glocal.io.volumes import read_volume
from numba_glocal.simulation import SimulationSettings, simulate

from .console import Stage, say, shown_warnings
from .options import PATH, seed_option
from .outputs import check_output_folder, overwrite_option

_DEFAULT = SimulationSettings()


@click.command("simulate")
@click.argument("map_path", metavar="[MAP]", type=PATH, required=False)
@click.option("-o", "--output", type=PATH, required=True, metavar="FOLDER", help="Gets truth.star, start.star, reference.mrc and subtomo/.")
@click.option("--n", "count", type=int, default=_DEFAULT.count, show_default=True, help="Number of particles.")
@click.option("--box", "box_size", type=int, metavar="VOXELS", help=f"Edge of their boxes. [default: the map's, or {_DEFAULT.box_size}]")
@click.option(
    "--pixel-size",
    "pixel_size_angst",
    type=float,
    metavar="ANGSTROM",
    help=f"Voxel edge of the particles. [default: the map's, or {_DEFAULT.pixel_size_angst:g}]",
)
@click.option(
    "--map-pixel-size", "map_pixel_size_angst", type=float, metavar="ANGSTROM", help="Voxel edge of MAP, where its header is not to be believed."
)
@click.option("--snr", type=float, default=_DEFAULT.snr, show_default=True, help="Variance of the signal over that of the noise.")
@click.option(
    "--tilt-range",
    "tilt_range_deg",
    type=(float, float),
    metavar="MIN MAX",
    default=(_DEFAULT.tilt_min_deg, _DEFAULT.tilt_max_deg),
    show_default=True,
    help="Degrees about y.",
)
@click.option("--ctf/--no-ctf", default=_DEFAULT.ctf, show_default=True, help="CTF-multiplied particles and CTF^2 volumes.")
@click.option("--perturb", "perturb_deg", type=float, default=_DEFAULT.perturb_deg, show_default=True, help="RMS error of the start angles, degrees.")
@click.option("--shift", "shift_angst", type=float, default=_DEFAULT.shift_angst, show_default=True, help="Largest offset along each axis, Angstrom.")
@seed_option
@click.option("--invert", is_flag=True, help="Particles dark on bright, as tomograms often are; the reference stays bright.")
@overwrite_option
@shown_warnings()
def simulate_command(
    map_path: Path | None,
    output: Path,
    count: int,
    box_size: int | None,
    pixel_size_angst: float | None,
    map_pixel_size_angst: float | None,
    snr: float,
    tilt_range_deg: tuple[float, float],
    ctf: bool,
    perturb_deg: float,
    shift_angst: float,
    seed: int,
    invert: bool,
    overwrite: bool,
) -> None:
    """Make particles with known poses, from MAP or from a built-in phantom.

    truth.star lists them with their true poses, start.star with poses to align from.
    """
    check_output_folder(output, overwrite)
    source = None
    if map_path is not None:
        source = read_volume(map_path)
        if map_pixel_size_angst is not None:
            source = replace(source, pixel_size_angst=map_pixel_size_angst)
        if not source.pixel_size_angst > 0:
            raise VolumeError(f"{map_path}: its header has no pixel size that can be believed; give --map-pixel-size")
        box_size = source.box_size if box_size is None else box_size
        pixel_size_angst = source.pixel_size_angst if pixel_size_angst is None else pixel_size_angst
    settings = SimulationSettings(
        count=count,
        box_size=_DEFAULT.box_size if box_size is None else box_size,
        pixel_size_angst=_DEFAULT.pixel_size_angst if pixel_size_angst is None else pixel_size_angst,
        snr=snr,
        tilt_min_deg=tilt_range_deg[0],
        tilt_max_deg=tilt_range_deg[1],
        ctf=ctf,
        perturb_deg=perturb_deg,
        shift_angst=shift_angst,
        seed=seed,
        invert=invert,
    )
    with Stage("simulate", count) as stage:
        made = simulate(output, settings, source, lambda done, total: stage.advance(1))
    say(f"true poses   {made.truth}")
    say(f"start poses  {made.start}")
    say(f"reference    {made.reference}")
