"""`numba-glocal extract`: particles out of tomograms."""

from __future__ import annotations

from pathlib import Path

import click

from numba_glocal.errors import SettingsError, plural
from numba_glocal.extraction import ExtractionSettings, extract
from numba_glocal.io import read_particles
from numba_glocal.io.tilt_series import TiltFiles
from numba_glocal.values import CTF_KINDS, EDGES

from .console import Stage, detail, note, say, shown_warnings, warn
from .options import PATH, particles_argument, wedge_options
from .outputs import check_output_folder, overwrite_option


@click.command("extract")
@particles_argument
@click.option("-o", "--output", type=PATH, required=True, metavar="FOLDER", help="Gets particles.star, subtomo/ and weights/.")
@click.option(
    "--tomograms", type=PATH, required=True, metavar="PATH", help="Folder with NAME.mrc (.rec, .map, .em) for each, or the file of the only one."
)
@click.option("--box", "box_size", type=int, required=True, metavar="VOXELS", help="Edge of the particles that are written.")
@click.option("--binning", type=float, default=1.0, show_default=True, help="Fourier cropping, whole or fractional.")
@click.option(
    "--recentre/--no-recentre", default=True, show_default=True, help="Boxes at the refined positions, else at the coordinates; poses stay true."
)
@click.option(
    "--edge",
    type=click.Choice(EDGES),
    default=EDGES[0],
    show_default=True,
    help="Boxes beyond the tomogram: leave out, or pad with the mean.",
)
@click.option("--pixel-size", "pixel_size_angst", type=float, metavar="ANGSTROM", help="Voxel edge of the tomograms; overrides their headers.")
@click.option(
    "--coordinate-pixel-size",
    "coordinate_pixel_size_angst",
    type=float,
    metavar="ANGSTROM",
    help="Voxels that the list's coordinates count. [default: as the list says, else the tomograms' own]",
)
@click.option("--list-pixel-size", "list_pixel_size_angst", type=float, metavar="ANGSTROM", help="Of shifts that the list gives in pixels.")
@click.option(
    "--tilts",
    type=PATH,
    metavar="PATH",
    help="Tilts for weight volumes: tomograms.star, a .tlt, .tomostar or tilt-series .star, or a folder with one for each tomogram.",
)
@wedge_options
@click.option(
    "--ctf",
    type=click.Choice(CTF_KINDS),
    default=CTF_KINDS[0],
    show_default=True,
    help="What the tomograms hold of the CTF: not modelled, uncorrected, phase-flipped, or multiplied by it.",
)
@click.option("--exposure-filter/--no-exposure-filter", default=True, show_default=True, help="Weights fall with each tilt's exposure.")
@click.option("--invert-contrast", is_flag=True, help="Turn black into white.")
@overwrite_option
def extract_command(
    particles: Path,
    output: Path,
    tomograms: Path,
    list_pixel_size_angst: float | None,
    tilts: Path | None,
    tilt_axis: str,
    flip_tilt: bool,
    overwrite: bool,
    **options: object,
) -> None:
    """Cut the particles of PARTICLES (a list with coordinates) out of their tomograms, with wedge or CTF volumes, and write a list for `align`."""
    with shown_warnings():
        check_output_folder(output, overwrite)
        settings = ExtractionSettings(
            tomogram_folder=tomograms,
            tilts=None if tilts is None else TiltFiles(tilts, tilt_axis, flip_tilt),
            tilt_axis=tilt_axis,
            flip_tilt=flip_tilt,
            **options,  # type: ignore[arg-type]
        )
        chosen = read_particles(particles, pixel_size_angst=list_pixel_size_angst, require_volumes=False)
        if output.resolve() == particles.resolve().parent and overwrite:
            raise SettingsError(f"--output {output}: holds the list that is read; expected another folder")
        done = extract(chosen, output, settings, Stage)
    for line in done.notes:
        note(line)
    if settings.tilts is None and settings.tilt_range_deg is None:
        warn("no --tilts and no --tilt-range: no weight volumes are written; `align` then takes --tilt-range")
    for name, reason in done.left_out:
        detail(f"left out {name}: {reason}")
    if done.left_out:
        (output / "left_out.txt").write_text("".join(f"{name}\t{reason}\n" for name, reason in done.left_out), encoding="utf-8")
        name, reason = done.left_out[0]
        warn(f"{plural(len(done.left_out), 'particle')} left out, such as {name}: {reason} (all in {output / 'left_out.txt'})")
    if done.padded:
        say(f"padded       {plural(done.padded, 'box')} beyond the tomogram's edge")
    say(
        f"particles    {len(done.particles)} of {settings.box_size} voxels, {done.particles.pixel_size_angst:.4g} A"
        f" (cut {settings.cut_size} voxels, scale {settings.cut_size / settings.box_size:.4g})"
    )
    say(f"list         {done.list_path}")
