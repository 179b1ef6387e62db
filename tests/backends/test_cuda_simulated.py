"""Level 2: the CUDA backend in Numba's simulator. It is chosen when Numba is imported, so it runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

HERE = Path(__file__).parent


def test_in_the_simulator():
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "simulated.py"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
