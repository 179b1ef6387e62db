"""The group of commands: each is loaded when it is called, and every error ends here."""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from numba_glocal import __version__
from numba_glocal.errors import GlocalError

from .options import verbosity_options

PROGRAM = "numba-glocal"
EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

# Name -> what --help says. The help must not import the commands: they load Numba and much else. `name` lives in `<name>.py` as `<name>_command`.
COMMANDS = {
    "align": "Align particles and average them, two independent halves.",
    "average": "Reconstruct half-maps and average from the poses as they are.",
    "fsc": "Resolution of two half-maps.",
    "convert": "Particle lists of one program to those of another.",
    "mask": "Make a mask: sphere, cylinder, or from a map.",
    "extract": "Cut particles out of tomograms.",
    "simulate": "Make particles with known poses from a map.",
    "demo": "Simulate a small set, align it, write the report. Needs no input.",
    "devices": "Show cores, memory, libraries and GPUs.",
    "report": "Rebuild the HTML report of a run.",
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and turns every exception into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        # The workers will use this cache; what this process compiles should be in the same place.
        from numba_glocal.execution.pinning import use_jit_cache

        use_jit_cache()
        name = f"{__package__}.{cmd_name}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # something the command needs, not the command
                raise
            raise GlocalError(f"the command '{cmd_name}' is not part of this version ({__version__})") from error
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; ends the process, unless `standalone_mode` is off."""
        prog_name = prog_name or PROGRAM
        _make_streams_safe()
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.unraisablehook = _say_nothing  # objects that were half made complain when they are collected
            _log("interrupted")
            _complain("interrupted")
            sys.exit(EXIT_INTERRUPTED)
        except GlocalError as error:
            _log(f"stopped by an error: {_one_line(error)}", getattr(error, "traceback_text", ""))
            _complain(f"error: {_one_line(error)}")
            sys.exit(EXIT_BAD_INPUT)
        except BrokenPipeError:  # `numba-glocal ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_ERROR)
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                _end_unexpected(error)
            line = f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror}"
            _log(f"stopped by an {line}")
            _complain(line)
            sys.exit(EXIT_BAD_INPUT)
        except Exception as error:
            _end_unexpected(error)
        # A command's own `ctx.exit(n)` comes back as a number.
        sys.exit(code if isinstance(code, int) and not isinstance(code, bool) else 0)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name=PROGRAM)
@verbosity_options
def main() -> None:
    """Gold-standard subtomogram alignment and averaging, on every CPU core and GPU."""


# A disk that is full or can only be read, a file that is not ours: nothing to trace.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def _make_streams_safe() -> None:
    """Printing never ends a run: streams that are closed swallow what is said, and names that they cannot encode are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process lives)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _say_nothing(_: Any) -> None:
    """In place of Python's report of an error that cannot be raised."""


def _end_unexpected(error: Exception) -> NoReturn:
    place = _log("unexpected error", with_traceback=True) or _save_traceback()
    _complain(f"unexpected error: {type(error).__name__}: {_one_line(error)} (the traceback is in {place})")
    sys.exit(EXIT_ERROR)


def _complain(text: str) -> None:
    click.echo(f"{PROGRAM}: {text}", err=True)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _log(text: str, worker_traceback: str = "", with_traceback: bool = False) -> str:
    """Write how the run ended to its log file and return the file's name; empty when there is none. The unexpected is written with traceback."""
    log = logging.getLogger("numba_glocal")
    files = [handler.baseFilename for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    if not files:
        return ""
    # Only to the files: handlers that write to the screen would show the traceback.
    others = [handler for handler in log.handlers if not isinstance(handler, logging.FileHandler)]
    propagate, log.propagate = log.propagate, False
    try:
        for handler in others:
            log.removeHandler(handler)
        log.error(f"{text}\n{worker_traceback}".rstrip(), exc_info=with_traceback)
    finally:
        for handler in others:
            log.addHandler(handler)
        log.propagate = propagate
    return files[0]


def _save_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="numba-glocal-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{PROGRAM} {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    return file.name
