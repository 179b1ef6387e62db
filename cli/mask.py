"""`numba-glocal mask`: sphere, cylinder, or threshold + dilation + soft edge from a map."""

from __future__ import annotations

import math
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from numba_glocal.errors import SettingsError
from numba_glocal.io.volumes import read_volume, write_volume
from numba_glocal.masks import cylinder_mask, spherical_mask, threshold_mask
from numba_glocal.values import Volume

from .console import say, shown_warnings, warn
from .options import PATH, together
from .outputs import check_output_file, overwrite_option

SOFT_EDGE_VOXELS = 5.0
EXTEND_VOXELS = 3.0

grid_options = together(
    click.option("--like", type=PATH, metavar="MAP", help="Take box and pixel size from this map."),
    click.option("--box", "box_size", type=click.IntRange(min=2), metavar="VOXELS", help="Edge of the box."),
    click.option("--pixel-size", "pixel_size_angst", type=float, metavar="ANGSTROM", help="Voxel edge; overrides the map's."),
)
edge_option = click.option("--soft-edge", "soft_edge_angst", type=float, metavar="ANGSTROM", help="Width of the edge. [default: 5 voxels]")
centre_option = click.option("--centre", type=(float, float, float), metavar="X Y Z", help="In voxels from 0. [default: box // 2]")
output_option = click.option("-o", "--output", type=PATH, required=True, metavar="FILE", help="MRC, or EM by its name.")


@click.group("mask")
def mask_command() -> None:
    """Make a mask. Lengths are in Angstrom."""


@mask_command.command("sphere")
@click.option("--diameter", "diameter_angst", type=float, required=True, metavar="ANGSTROM", help="Of the part that is 1.")
@grid_options
@edge_option
@centre_option
@output_option
@overwrite_option
@shown_warnings()
def sphere_command(
    diameter_angst: float,
    like: Path | None,
    box_size: int | None,
    pixel_size_angst: float | None,
    soft_edge_angst: float | None,
    centre: tuple[float, float, float] | None,
    output: Path,
    overwrite: bool,
) -> None:
    """A sphere."""
    check_output_file(output, overwrite, (like,))
    box, pixel = _grid(like, box_size, pixel_size_angst)
    mask = spherical_mask(box, _voxels("--diameter", diameter_angst, pixel) / 2, _edge(soft_edge_angst, pixel), centre)
    _write(output, mask, pixel)


@mask_command.command("cylinder")
@click.option("--diameter", "diameter_angst", type=float, required=True, metavar="ANGSTROM", help="Across z, of the part that is 1.")
@click.option("--height", "height_angst", type=float, required=True, metavar="ANGSTROM", help="Along z, of the part that is 1.")
@grid_options
@edge_option
@centre_option
@output_option
@overwrite_option
@shown_warnings()
def cylinder_command(
    diameter_angst: float,
    height_angst: float,
    like: Path | None,
    box_size: int | None,
    pixel_size_angst: float | None,
    soft_edge_angst: float | None,
    centre: tuple[float, float, float] | None,
    output: Path,
    overwrite: bool,
) -> None:
    """A cylinder along z."""
    check_output_file(output, overwrite, (like,))
    box, pixel = _grid(like, box_size, pixel_size_angst)
    radius, height = _voxels("--diameter", diameter_angst, pixel) / 2, _voxels("--height", height_angst, pixel)
    _write(output, cylinder_mask(box, radius, height, _edge(soft_edge_angst, pixel), centre), pixel)


@mask_command.command("threshold")
@click.argument("map_path", metavar="MAP", type=PATH)
@click.option("--threshold", type=float, required=True, metavar="GREY", help="Density from which on a voxel belongs to the object.")
@click.option("--extend", "extend_angst", type=float, metavar="ANGSTROM", help="How far the object is grown. [default: 3 voxels]")
@click.option("--largest-part", is_flag=True, help="Only the largest connected part above the threshold.")
@click.option("--pixel-size", "pixel_size_angst", type=float, metavar="ANGSTROM", help="Voxel edge; overrides the map's.")
@edge_option
@output_option
@overwrite_option
@shown_warnings()
def threshold_command(
    map_path: Path,
    threshold: float,
    extend_angst: float | None,
    largest_part: bool,
    pixel_size_angst: float | None,
    soft_edge_angst: float | None,
    output: Path,
    overwrite: bool,
) -> None:
    """Everything in MAP above a density, grown, with a soft edge."""
    check_output_file(output, overwrite, (map_path,))
    volume = read_volume(map_path)
    _, pixel = _grid(map_path, None, pixel_size_angst, volume)
    extend = EXTEND_VOXELS if extend_angst is None else _not_negative("--extend", extend_angst) / pixel
    _write(output, threshold_mask(volume.data, threshold, extend, _edge(soft_edge_angst, pixel), largest_part), pixel)


def _grid(like: Path | None, box_size: int | None, pixel_size_angst: float | None, volume: Volume | None = None) -> tuple[int, float]:
    """Box and pixel size from the options, then from the map."""
    if volume is None and like is not None:
        volume = read_volume(like)
    box = box_size if box_size is not None else volume.box_size if volume is not None else None
    pixel = pixel_size_angst if pixel_size_angst is not None else volume.pixel_size_angst if volume is not None else None
    if box is None or pixel is None:
        raise SettingsError("mask: expected --like MAP, or --box and --pixel-size")
    if pixel_size_angst is None and not pixel > 0:
        raise SettingsError(f"{like}: its header has no pixel size that can be believed; give --pixel-size")
    return box, _voxels("--pixel-size", pixel, 1.0)


def _voxels(option: str, value: float, pixel_size_angst: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise SettingsError(f"{option}: expected more than 0 Angstrom; found {value}")
    return value / pixel_size_angst


def _not_negative(option: str, value: float) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise SettingsError(f"{option}: expected 0 Angstrom or more; found {value}")
    return value


def _edge(soft_edge_angst: float | None, pixel_size_angst: float) -> float:
    return SOFT_EDGE_VOXELS if soft_edge_angst is None else _not_negative("--soft-edge", soft_edge_angst) / pixel_size_angst


def _write(output: Path, mask: NDArray[np.float32], pixel_size_angst: float) -> None:
    if not mask.any():
        raise SettingsError(f"{output}: expected a mask with voxels above 0; all of it lies outside the box of {mask.shape[0]} voxels")
    if mask.min() > 0.999:
        edge = f"{len(mask) * pixel_size_angst:.4g} A"
        warn(f"{output}: the mask fills the whole box of {edge}, so that it masks nothing; expected a smaller one")
    write_volume(output, Volume(mask, pixel_size_angst))
    share = 100.0 * float(mask.mean(dtype=np.float64))
    say(f"wrote {output}: box {mask.shape[0]}, pixel {pixel_size_angst:.6g} A, {share:.1f} % of the box")
