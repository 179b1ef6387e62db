"""Where results may be written: never over an input, and over something else only when told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from numba_glocal.errors import SettingsError

overwrite_option = click.option("--overwrite", is_flag=True, help="Replace the output where it exists.")


def check_output_file(output: Path, overwrite: bool, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse a file that is an input, exists already, or has no folder to stand in."""
    for source in inputs:
        if source is not None and output.resolve() == source.resolve():
            raise SettingsError(f"--output {output}: expected another file than the input of the same name")
    if output.is_dir():
        raise SettingsError(f"--output {output}: expected a file; found a folder")
    if output.exists() and not overwrite:
        raise SettingsError(f"--output {output}: exists already (--overwrite replaces it)")
    if not output.parent.is_dir():
        raise SettingsError(f"--output {output}: no folder {output.parent}")


def check_output_folder(output: Path, overwrite: bool) -> None:
    """Refuse a path that is a file, or a folder with something in it."""
    if output.exists() and not output.is_dir():
        raise SettingsError(f"--output {output}: expected a folder; found a file")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise SettingsError(f"--output {output}: expected a new or empty folder; found files in it (--overwrite adds and replaces)")
