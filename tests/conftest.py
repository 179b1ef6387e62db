"""Shared fixtures. Data and tools that are not part of the package are looked for in one place, and tests skip without them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # modules that several folders of tests share

# A shell that starts the tests in the background has told them, and all that they start, to ignore Ctrl-C; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and independent tools (`../shared`, or `NUMBA_GLOCAL_SHARED`)."""
    folder = Path(os.environ.get("NUMBA_GLOCAL_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"shared data not found at {folder} (set NUMBA_GLOCAL_SHARED)")
    return folder


@pytest.fixture(scope="session")
def relion() -> None:
    """Skips where RELION's programs are not installed."""
    if shutil.which("relion_reconstruct") is None:
        pytest.skip("relion_reconstruct not found (apt-get install relion)")
