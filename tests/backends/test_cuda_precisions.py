"""Level 3: searches in half precision and whole numbers, by every way there is, against those in single precision. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.pose_prior import PosePrior, PriorWidths

pytestmark = pytest.mark.cuda

WAYS = {"lines": None, "references shifted": (2, False), "particles shifted": (2, True), "int8, references": (1, False), "int8, particles": (1, True)}


@pytest.fixture
def backends(monkeypatch):
    """Makes a backend in single precision and one whose searches go a given way."""
    try:
        from numba_glocal.backends.cuda import backend, gemm
        from numba_glocal.backends.cuda.product import Way

        single = backend.CUDABackend(memory_bytes=4 << 30, precision="single")
    except Exception as problem:
        pytest.skip(f"no CUDA device: {' '.join(str(problem).split())[:120]}")
    if not gemm.eight_available():
        pytest.skip("no 8-bit products here")

    def make(name):
        way = WAYS[name]
        monkeypatch.setattr(backend, "ways", lambda precision: [] if way is None else [Way(*way)])
        if way is not None:
            monkeypatch.setattr(backend, "tensor_us", lambda *_: np.inf)
        return single, backend.CUDABackend(memory_bytes=4 << 30, precision="int8" if way is not None and way[0] == 1 else "half")

    return make


def angle_deg(a, b):
    return np.rad2deg(Rotation.from_matrix((a @ np.swapaxes(b, -1, -2)).reshape(-1, 3, 3)).magnitude())


@pytest.mark.parametrize("score", ["ml", "ncc"])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_candidates_and_poses_are_those_of_single_precision(backends, make_case, way, limited, score):
    case = make_case(24, particles=20, noise=1.0, weight="wedge", score=score)
    prior = None
    if limited:  # trial shifts and rotations are weighted
        case = replace(case, setup=replace(case.setup, max_shift_angst=40.0))
        prior = PosePrior.about(PriorWidths(8.0, 30.0), case.starts.rotations[:, 0], case.starts.shifts_angst[:, 0])
    level = case.level(60, keep=3)
    found = []
    for backend in backends(way):
        session = backend.open_search(case.setup)
        assert session.load(case.batch, prior) == []
        candidates = session.search(case.starts, case.starts.shifts_angst[:, 0], level)
        found.append((candidates, session.refine(candidates, case.starts.shifts_angst[:, 0])))
        session.close()
    (single, refined), (narrow, refined_narrow) = found
    same = (angle_deg(single.rotations, narrow.rotations).reshape(-1, 3) < 0.01) & (np.abs(single.shifts_angst - narrow.shifts_angst).max(2) < 0.01)
    assert same[:, 0].mean() >= 0.95, "the best candidate"
    # kept candidates are scored again in single precision
    scale = np.abs(single.scores).max()
    assert np.abs(single.scores - narrow.scores)[same].max() < 1e-5 * scale
    assert (np.diff(narrow.scores, axis=1) <= 0).all()
    assert angle_deg(refined.rotations, refined_narrow.rotations).max() < 0.02
    assert np.abs(refined.shifts_angst - refined_narrow.shifts_angst).max() < 0.02
