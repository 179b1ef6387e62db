"""Level 2: the CUDA backend in Numba's simulator. It is chosen when Numba is imported, so it runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

HERE = Path(__file__).parent


def test_in_the_simulator(tmp_path):
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "NUMBA_GLOCAL_LAUNCHES": str(tmp_path / "launches.json")}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "simulated.py"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
    check_types(json.loads((tmp_path / "launches.json").read_text()))


def check_types(launches: dict[str, list[str]]) -> None:
    """Kernels are compiled ahead for the types with which they are launched."""
    try:
        from numba.cuda.types import int8, int32

        from numba_glocal.backends.cuda.signatures import KERNELS, PREPARE, SEARCH
    except ImportError:  # no CUDA toolkit
        return
    listed = {f"{kernel.__module__}.{kernel.__name__}": types for kernel, types in (KERNELS | PREPARE).items()}
    seen = 0
    for name, found in launches.items():
        types = SEARCH if name.endswith(".search") else listed.get(name)
        if types is not None:  # functions that kernels call are none
            seen += 1
            narrow = [types]
            if name.endswith((".narrow_columns", ".narrow_templates")):
                narrow += [(*types[:-1], int8[::1])]
            elif name.endswith(".best_of_tile"):
                narrow += [(int32[::1], *types[1:])]
            assert found == sorted(", ".join(map(str, each)) for each in narrow), name
    assert seen >= 18
