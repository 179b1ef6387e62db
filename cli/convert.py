"""`numba-glocal convert`: particle lists of one program to those of another."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np

from numba_glocal.errors import SettingsError, WeightsLeftOutWarning, plural
from numba_glocal.io import HELD, ListFormat, format_to_write, left_behind, list_formats, read_particles, with_tomograms, write_particles
from numba_glocal.io.optimisation_set import read_optimisation_set, tomograms_of, write_optimisation_set
from numba_glocal.io.relion import RelionSource
from numba_glocal.io.relion_versions import version_of
from numba_glocal.io.star import StarDocument
from numba_glocal.values import ParticleSet

from .console import say, shown_warnings, warn
from .options import PATH, numbered_options, pixel_size_option, verbosity_options
from .outputs import check_output_file, overwrite_option

_WEIGHTS = {HELD[part] for part in ("weights", "tilt_ranges", "tilt_series")}


def _formats() -> list[str]:
    return [f.key for f in list_formats() if f.key and f.write is not None]


def _refuse_unknown_places(particles: ParticleSet, chosen: ListFormat, source: Path) -> None:
    """Coordinates about a centre that nobody knows would be left out without a word; RELION's own writers look themselves."""
    places, own = particles.coordinates, getattr(particles.source, "format_key", None)
    if places is None or "coordinates" not in chosen.holds or own == chosen.key or chosen.scales:
        return
    unknown = int((~np.isfinite(places.as_voxels())).any(axis=1).sum())
    if unknown:
        raise SettingsError(
            f"{source}: coordinates about the tomogram's centre, whose place is unknown for {unknown} of {len(particles)} particles; "
            "expected --tomograms, a file with sizes and pixel sizes of the tomograms"
        )


def _set_to_write(
    asked: Path | None, target: Path, chosen: ListFormat, particles: ParticleSet, like: StarDocument | None, tomograms: Path | None
) -> Path | None:
    """Where an optimisation set goes, if one does."""
    version = chosen.key
    if version == "relion":
        version = version_of(particles.source) if isinstance(particles.source, RelionSource) else "relion31"
    if version not in ("relion4", "relion5"):
        if asked is not None:
            raise SettingsError(f"--optimisation-set {asked}: a {chosen.name} goes into none; expected --to relion4 or relion5")
        return None
    if asked is not None and tomograms is None and (like is None or tomograms_of(like) is None):
        raise SettingsError(f"--optimisation-set {asked}: which tomograms belong to the list is not known; expected --tomograms")
    return asked or (target.with_name(f"{target.stem}_optimisation_set.star") if like is not None else None)


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
@click.option(
    "--tomograms",
    type=PATH,
    metavar="FILE",
    help="Sizes of tomograms, for coordinates about their centres, in place of the set's own file. [default: that of the set]",
)
@click.option(
    "--optimisation-set",
    type=PATH,
    metavar="FILE",
    help="Also write a set that names OUT and the tomograms, for RELION 4 and 5. [default: OUT_optimisation_set.star where IN is a set]",
)
@pixel_size_option
@numbered_options
@overwrite_option
@verbosity_options
def convert_command(
    source: Path, target: Path, to: str | None, poses: str, tomograms: Path | None, optimisation_set: Path | None, overwrite: bool, **options: Any
) -> None:
    """Write the particle list IN as OUT, in the same or another format. Volumes are not touched and need not be there."""
    check_output_file(target, overwrite, (source, tomograms, Path(options["wedge_list"]) if options["wedge_list"] else None))
    with shown_warnings():
        like = read_optimisation_set(source) if source.is_file() else None
        if like is not None and tomograms is not None:
            options["tomograms"] = tomograms  # the set's own may be elsewhere
        particles = read_particles(source, require_volumes=False, **options)
        if tomograms is not None:
            particles = with_tomograms(particles, tomograms, source)
        chosen = format_to_write(target, particles, to)
        with_set = _set_to_write(optimisation_set, target, chosen, particles, like, tomograms)
        if with_set is not None:
            check_output_file(with_set, overwrite, (source, target, tomograms))
        counts_voxels = chosen.key != "relion" and getattr(particles.source, "format_key", None) != chosen.key
        if counts_voxels and not np.isfinite(particles.pixel_size_angst) and particles.poses.shifts_angst.any():
            raise SettingsError(f"{source}: no pixel size for shifts in voxels; expected --pixel-size")
        if particles.pixel_sizes_angst is not None and "relion" not in chosen.key and chosen.key != "warp":
            sizes = ", ".join(f"{size:g}" for size in sorted(set(particles.pixel_sizes_angst.tolist())))
            raise SettingsError(f"{source}: optics groups have pixel sizes of {sizes} A, expected one for a {chosen.name}")
        lost = left_behind(particles, chosen)
        if particles.volume_axes is not None and poses == "volume" and HELD["volume_axes"] in lost:
            particles = particles.in_volumes()
            lost.append("places of particles in the tomograms (poses are those in the turned volumes)")
        _refuse_unknown_places(particles, chosen, source)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            write_particles(target, particles, to=chosen.key or None)
    # what the writer says of the same loss is part of one warning
    told = not _WEIGHTS.isdisjoint(lost)
    remarks = [str(w.message).removeprefix(f"{target}: ") for w in caught if not (told and issubclass(w.category, WeightsLeftOutWarning))]
    if lost or remarks:
        warn(f"{target}: " + "; ".join([f"a {chosen.name} cannot hold {', '.join(lost)}"] * bool(lost) + remarks))
    say(f"{target}: {plural(len(particles), 'particle')}, {chosen.name}")
    if with_set is not None:
        write_optimisation_set(with_set, target, tomograms, like, particles.stacks is not None and "stacks" in chosen.holds)
        say(f"{with_set}: optimisation set")
