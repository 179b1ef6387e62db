"""Level 3: searches in half precision and whole numbers, by every way there is, against those in single precision. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.backends.protocols import Candidates
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


def places_of(candidates, others):
    """Where each kept candidate is among those of the other search, (p, s); -1 where it is not."""
    traces = np.einsum("psij,ptij->pst", candidates.rotations, others.rotations)
    apart = np.linalg.norm(candidates.shifts_angst[:, :, None] - others.shifts_angst[:, None], axis=3)
    same = (traces > 3.0 - 1e-7) & (apart < 0.01) & (others.scores > -np.inf)[:, None] & (candidates.scores > -np.inf)[:, :, None]
    return np.where(same.any(2), same.argmax(2), -1)


def check_candidates(single, narrow):
    """Nearly always the same ones; scored alike, for those kept are scored again; and what is kept instead is nearly as good."""
    kept = single.scores > -np.inf
    np.testing.assert_array_equal(kept, narrow.scores > -np.inf)
    some = kept[:, 0]
    scale = np.abs(single.scores[kept]).max()
    places = places_of(single, narrow)
    assert (places[some, 0] == 0).mean() >= 0.9, "the best candidate"
    assert (places[kept] >= 0).mean() >= 0.75, "those kept, some of which are as good as others"
    found = places >= 0
    theirs = np.take_along_axis(narrow.scores, np.maximum(places, 0), 1)
    assert np.abs(single.scores[found] - theirs[found]).max() < 1e-5 * scale
    assert (single.scores - narrow.scores)[kept].max() < 0.01 * scale
    assert (np.diff(np.where(kept, narrow.scores, -1e30), axis=1) <= 0).all()


@pytest.mark.parametrize("score", ["ml", "ncc", "flcf"])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_candidates_and_poses_are_those_of_single_precision(backends, make_case, way, limited, score):
    case = make_case(24, particles=20, noise=1.0, weight="wedge", score=score)
    prior, anchors = None, case.starts.shifts_angst[:, 0].copy()
    if limited:  # trial shifts and rotations are weighted, those far off forbidden, and for one particle all
        case = replace(case, setup=replace(case.setup, max_shift_angst=20.0))
        prior = PosePrior.about(PriorWidths(8.0, 30.0, 12.0), case.starts.rotations[:, 0], case.starts.shifts_angst[:, 0])
        anchors[7] += 500.0
    level = case.level(60, keep=3)
    found = []
    for backend in backends(way):
        session = backend.open_search(case.setup)
        assert session.load(case.batch, prior) == []
        candidates = session.search(case.starts, anchors, level)
        found.append((candidates, session.refine(candidates, anchors)))
        session.close()
    (single, refined), (narrow, refined_narrow) = found
    check_candidates(single, narrow)
    some = single.scores[:, 0] > -np.inf
    assert some.tolist() == [not (limited and p == 7) for p in range(20)]
    if limited:
        kept = narrow.scores > -np.inf
        assert np.linalg.norm(narrow.shifts_angst - anchors[:, None], axis=2)[kept].max() < 20.1
        away = angle_deg(narrow.rotations, np.broadcast_to(case.starts.rotations, narrow.rotations.shape)).reshape(kept.shape)
        assert away[kept].max() < 12.1
    assert angle_deg(refined.rotations, refined_narrow.rotations)[some].max() < 0.02
    assert np.abs(refined.shifts_angst - refined_narrow.shifts_angst)[some].max() < 0.02


@pytest.mark.parametrize("way", ["int8, references", "int8, particles"])
def test_several_starts_in_any_parts_and_tiles(backends, make_case, monkeypatch, way):
    """Best of all starts of a particle; sums of whole numbers are exact, so tiles and parts of a search change no bit."""
    from numba_glocal.backends.cuda import backend as module

    case = make_case(24, particles=20, noise=1.0, weight="wedge")
    turn = Rotation.from_rotvec(np.deg2rad([[0.0, 0.0, 0.0], [20.0, 0.0, 10.0], [0.0, -25.0, 15.0]])).as_matrix()
    scores = np.where(np.arange(3) <= np.arange(20)[:, None] % 3, 0.0, -np.inf)  # one, two or three of them
    starts = Candidates(case.starts.rotations @ turn, np.repeat(case.starts.shifts_angst, 3, axis=1), scores)
    anchors, level = case.starts.shifts_angst[:, 0], case.level(60, keep=4, separation_deg=3.0)
    single, eight = backends(way)
    found = []
    for backend, part_bytes, tile_bytes in (
        (single, 1 << 30, 1 << 30),
        (eight, 1 << 30, 1 << 30),
        (eight, 1 << 30, 1 << 18),
        (eight, 1 << 20, 1 << 30),
    ):
        monkeypatch.setattr(module, "_PART_BYTES", part_bytes)
        monkeypatch.setattr(backend.scratch, "part_bytes", tile_bytes)
        session = backend.open_search(case.setup)
        assert session.load(case.batch) == []
        found.append(session.search(starts, anchors, level))
        session.close()
    check_candidates(*found[:2])
    for other in found[2:]:
        for name in ("rotations", "shifts_angst", "scores"):
            np.testing.assert_array_equal(getattr(other, name), getattr(found[1], name), err_msg=name)
