"""`numba-glocal fsc`: resolution of two half-maps."""

from __future__ import annotations

import math
from pathlib import Path

import click
import numpy as np

from numba_glocal.errors import SettingsError, VolumeError
from numba_glocal.io.fsc_star import write_fsc_star
from numba_glocal.io.volumes import read_volume
from numba_glocal.masks import check_mask
from numba_glocal.resolution import find_crossing, half_map_fsc, shell_resolution_angst
from numba_glocal.values import FSCCurve, Volume

from .console import print_table, say, shown_warnings, warn
from .options import PATH
from .outputs import check_output_file, overwrite_option


@click.command("fsc")
@click.argument("half1", type=PATH)
@click.argument("half2", type=PATH)
@click.option("--mask", "mask_path", type=PATH, metavar="FILE", help="Soft mask, values 0..1; the curve is corrected for what it adds.")
@click.option("--pixel-size", "pixel_size_angst", type=float, metavar="ANGSTROM", help="Overrides the headers.")
@click.option("--fsc-criterion", "criterion", type=click.FloatRange(0, 1, True, True), default=0.143, show_default=True, help="Where to read.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Write the curves as STAR, in the labels of RELION's postprocess.")
@overwrite_option
@shown_warnings()
def fsc_command(
    half1: Path, half2: Path, mask_path: Path | None, pixel_size_angst: float | None, criterion: float, output: Path | None, overwrite: bool
) -> None:
    """Fourier shell correlation of HALF1 and HALF2: unmasked, masked, phase-randomised, corrected."""
    if output is not None:
        check_output_file(output, overwrite, (half1, half2, mask_path))
    first, second = read_volume(half1), read_volume(half2)
    if first.box_size != second.box_size:
        raise VolumeError(f"{half2}: expected a box of {first.box_size} voxels as {half1} has; found {second.box_size}")
    pixel = _pixel_size(pixel_size_angst, half1, first, half2, second)
    mask = None if mask_path is None else check_mask(read_volume(mask_path).data, first.box_size, str(mask_path))
    curve = half_map_fsc(first.data, second.data, pixel, mask, "none" if mask_path is None else mask_path.name)
    say(f"# box {first.box_size}, pixel {pixel:.6g} A, mask {curve.mask_name}")
    show_resolutions(curve, criterion)
    if np.array_equal(first.data, second.data):
        warn("both half-maps have the same voxels: their FSC says nothing of a resolution")
    if output is not None:
        write_fsc_star(output, curve, criterion)
        say(f"wrote {output}")


def show_resolutions(curve: FSCCurve, criterion: float) -> None:
    """Print one line per curve, and warn of a curve that rises again."""
    masked = curve.mask_name != "none"
    curves = {"unmasked": curve.unmasked, "masked": curve.masked, "corrected": curve.corrected} if masked else {"unmasked": curve.unmasked}
    rows: list[tuple[str, str, str, str]] = []
    for name, values in curves.items():
        crossing = find_crossing(values, curve.box_size, curve.pixel_size_angst, criterion)
        remark = "" if crossing.crossed else "never falls below: limited by the voxel size"
        if crossing.rises_again:
            remark = "rises above it again"
        rows.append((name, _angst(crossing.resolution_angst), str(crossing.shell), remark))
    if masked:
        first = curve.randomised_from_shell
        none = first >= curve.unmasked.size
        where = "none" if none else _angst(shell_resolution_angst(first, curve.box_size, curve.pixel_size_angst))
        remark = "unmasked curve never below 0.8" if none else "where phases are randomised from"
        rows.insert(2, ("randomised", where, "" if none else str(first), remark))
    print_table(("curve", f"resolution at {criterion:g} (A)", "shell", "remark"), rows)
    final = find_crossing(curve.corrected, curve.box_size, curve.pixel_size_angst, criterion)
    if final.rises_again:
        warn(f"the {'corrected' if masked else 'unmasked'} FSC rises above {criterion:g} again: look at the curve before quoting the resolution")


def _angst(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "none"


def _pixel_size(given: float | None, path1: Path, first: Volume, path2: Path, second: Volume) -> float:
    if given is not None:
        if not (given > 0 and math.isfinite(given)):
            raise SettingsError(f"--pixel-size: expected more than 0 Angstrom; found {given}")
        return given
    expected, found = first.pixel_size_angst, second.pixel_size_angst
    if not expected > 0:
        raise VolumeError(f"{path1}: its header has no pixel size that can be believed; give --pixel-size")
    if found > 0 and not math.isclose(expected, found, rel_tol=1e-3):
        raise VolumeError(f"{path2}: expected a pixel size of {expected:g} A as {path1} has; found {found:g} A (or give --pixel-size)")
    return expected
