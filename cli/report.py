"""`numba-glocal report`: rebuild the HTML report of a run."""

from __future__ import annotations

from pathlib import Path

import click

from numba_glocal.errors import InputError

from .console import say
from .options import PATH


@click.command("report")
@click.argument("run", type=PATH)
def report_command(run: Path) -> None:
    """Write RUN/report.html anew from the files of the run folder RUN."""
    if not run.is_dir():
        raise InputError(f"{run}: expected the folder of a run; found {'a file' if run.exists() else 'nothing'}")
    # loaded here: matplotlib takes a second
    from numba_glocal.report import write_report
    from numba_glocal.results import load_report_data

    say(f"wrote {write_report(run, load_report_data(run))}")
