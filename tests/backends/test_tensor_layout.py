"""Level 2: the order of the tensor cores' operands, and the sums that are made of their products, without tensor cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


def test_fragments_give_the_search_its_numbers():
    script = Path(__file__).with_name("tensor_layout.py")
    done = subprocess.run([sys.executable, script], env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fragments agree" in done.stdout
