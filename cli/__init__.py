"""The command line: one file a command. Installed as `numba_glocal.cli`."""

from .main import main

__all__ = ["main"]
