"""Options that several commands share, so that a name means the same everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .console import Verbosity, set_verbosity

Command = TypeVar("Command", bound=Callable[..., Any])

# As `numba_glocal.values` has them, which would load NumPy for the help.
_CTF_KINDS = ("none", "plain", "flipped", "multiplied")
_EDGES = ("skip", "pad")
_VOLUME_AXES = ("tomogram", "subtomogram")

# Existence is checked by the library, whose errors say what was expected and found.
PATH = click.Path(path_type=Path)


def _more(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        set_verbosity(Verbosity.VERBOSE)


def _less(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        set_verbosity(Verbosity.QUIET)


def verbosity_options(command: Command) -> Command:
    """``--verbose`` and ``--quiet``: they act at once and are no parameters of the command."""
    command = click.option("--quiet", is_flag=True, expose_value=False, callback=_less, help="Only results' files, warnings and errors.")(command)
    return click.option("--verbose", is_flag=True, expose_value=False, callback=_more, help="Say more.")(command)


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order in which they are to appear in the help."""

    def decorate(command: Command) -> Command:
        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


particles_argument = click.argument("particles", type=PATH)

output_option = click.option("-o", "--output", type=PATH, required=True, metavar="FOLDER", help="Folder for the results; must not hold another run.")

pixel_size_option = click.option(
    "--pixel-size", "pixel_size_angst", type=float, metavar="ANGSTROM", help="Voxel edge of the particles; overrides list and headers."
)

numbered_options = together(
    click.option(
        "--particle-names",
        metavar="TEMPLATE",
        help="Files of a list that numbers its particles (Dynamo, STOPGAP, AV3): 'subtomo/p_{:06d}.mrc'. [default: the package's own names]",
    ),
    click.option(
        "--volume-axes",
        type=click.Choice(_VOLUME_AXES),
        help="How volumes of RELION 4 and 5 stand: as the tomogram, or as rlnTomoSubtomogramRot/Tilt/Psi turn them. [default: as the list says]",
    ),
    click.option("--wedge-list", metavar="FILE", help="Tilts of each tomogram for a STOPGAP or AV3 list: STOPGAP's wedge list, or AV3's (.em)."),
)

diameter_option = click.option(
    "--particle-diameter",
    "particle_diameter_angst",
    type=float,
    metavar="ANGSTROM",
    help="Diameter of the particle. [default: that of --mask, else 0.8 of the box]",
)


def _group(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    from numba_glocal.settings import symmetry_name  # the help must not load NumPy

    return symmetry_name(value)


symmetry_option = click.option(
    "--symmetry",
    callback=_group,
    default="C1",
    show_default=True,
    metavar="GROUP",
    help="Point group about RELION's axes: C1, Cn, Dn, T, O, I or I1 to I4.",
)

seed_option = click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is drawn at random.")

subset_option = click.option("--subset", type=click.IntRange(min=2), metavar="N", help="A quick try on N particles of each half.")

dry_run_option = click.option("--dry-run", is_flag=True, help="Read, check, print the plan, and stop.")

root_option = click.option("--root", metavar="FOLDER", help="Where the list's names start. [default: its folder, a parent, or the current folder]")

mask_options = together(
    click.option("--mask", "mask_path", type=PATH, metavar="FILE", help="Mask of the reference; it turns with it."),
    click.option("--spherical-mask", is_flag=True, help="A soft sphere of --particle-diameter."),
)

wedge_options = together(
    click.option(
        "--tilt-range", "tilt_range_deg", type=(float, float), metavar="MIN MAX", help="Missing wedge in degrees where the list carries none: -60 60."
    ),
    click.option("--tilt-axis", type=click.Choice(["x", "y"]), default="y", show_default=True, help="Axis of the tilt series; the beam is z."),
    click.option("--flip-tilt", is_flag=True, help="The other sign of the tilt angles, also those of the list (matters for one-sided series)."),
)

tomogram_options = together(
    click.option(
        "--tomograms", metavar="PATH", help="Cut particles from tomograms as they are read: folder with NAME.mrc (.rec, .map, .em), or the only one."
    ),
    click.option("--box", "box_size", type=int, metavar="VOXELS", help="Edge of those particles, in voxels of the tomograms (before --binning)."),
    click.option("--tilts", metavar="PATH", help="Tilts of the tomograms, for weights: as `extract` takes them."),
    click.option(
        "--ctf", type=click.Choice(_CTF_KINDS), default=_CTF_KINDS[0], show_default=True, help="What the tomograms hold of the CTF, as of `extract`."
    ),
    click.option("--edge", type=click.Choice(_EDGES), default=_EDGES[0], show_default=True, help="Boxes beyond the tomogram: leave out, or pad."),
    click.option(
        "--coordinate-pixel-size",
        "coordinate_pixel_size_angst",
        type=float,
        metavar="ANGSTROM",
        help="Voxels that the list's coordinates count. [default: as the list says, else the tomograms' own]",
    ),
)

worker_options = together(
    click.option("--gpus", metavar="LIST", help="0,1 or UUIDs, all, none. [default: all that are visible]"),
    click.option("--procs-per-gpu", "--perdevice", "procs_per_gpu", default="auto", show_default=True, metavar="N|auto", help="Workers on each GPU."),
    click.option("--cpu-procs", type=click.IntRange(min=1), metavar="N", help="Workers without GPU. [default: the usable cores]"),
)
