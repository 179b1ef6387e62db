"""The global search against the exhaustive grid of its last level, and against copies that a symmetry makes equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from numba_glocal.alignment import SearchPlan, align_chunk, all_rotations, global_start, search_levels
from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.protocols import Candidates, SearchLevel, as_candidates
from numba_glocal.masks import sphere_mean_square, spherical_mask
from numba_glocal.noise import NoiseModel
from numba_glocal.sampling import rotations_for_increment, shift_ball

N, N_SYMMETRIC = 16, 20
BLOCK = 16384


class Counting:
    """A session that counts what it scores: rotations times shifts of every start."""

    def __init__(self, session: Any) -> None:
        self._session, self.evaluations, self.first_level, self.seeds = session, 0, 0, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def search(self, starts: Candidates, anchor_angst: NDArray[np.float64], level: SearchLevel) -> Candidates:
        shifts = len(shift_ball(level.shift_radius_angst, level.shift_step_angst))
        done = int((starts.scores > -np.inf).sum()) * len(level.rotations) * shifts
        self.evaluations += done
        self.first_level = self.first_level or done
        self.seeds.append(starts)
        return self._session.search(starts, anchor_angst, level)


def global_plan(case: Any, symmetry: str = "C1") -> SearchPlan:
    return SearchPlan(0.0, 0, 2.0 * case.voxel_angst, case.setup.k_max, True, symmetry)


def search_everywhere(case: Any, symmetry: str = "C1", starts: NDArray[np.float64] | None = None) -> tuple[Any, Counting]:
    """As a task does it: all levels, unlikely candidates dropped, refined."""
    mask, plan = case.setup.particle_mask, global_plan(case, symmetry)
    levels = search_levels(plan, case.setup.grid.binned_box_size, case.voxel_angst, mask.radius_voxels)
    session = Counting(CPUBackend().open_search(case.setup))
    rotations = case.starts.rotations[:, 0] if starts is None else starts
    origin = np.zeros((len(rotations), 3))
    evidence = sphere_mean_square(case.setup.grid.binned_box_size, mask.radius_voxels, mask.soft_edge_voxels)
    return align_chunk(session, case.batch, rotations, origin, origin, levels, True, plan, evidence), session


def exhaustive(case: Any) -> tuple[Any, int]:
    """The best of the whole grid at the last level's angular step, band and shifts, refined; and the evaluations before."""
    plan, mask = global_plan(case), case.setup.particle_mask
    levels = search_levels(plan, case.setup.grid.binned_box_size, case.voxel_angst, mask.radius_voxels)
    step_deg = global_start(plan.k_max, case.setup.grid.binned_box_size, mask.radius_voxels)[0] / 2.0 ** (len(levels) - 1)
    rotations = rotations_for_increment(step_deg)
    session = Counting(CPUBackend().open_search(case.setup))
    session.load(case.batch)
    count = len(case.volumes)
    nowhere, origin = as_candidates(np.eye(3)[None].repeat(count, 0), np.zeros((count, 3))), np.zeros((count, 3))
    best = None
    for first in range(0, len(rotations), BLOCK):
        part = replace(levels[-1], rotations=rotations[first : first + BLOCK], shift_radius_angst=plan.shift_radius_angst, keep=1)
        found = session.search(nowhere, origin, part)
        if best is None:
            best = found
            continue
        better = found.scores[:, 0] > best.scores[:, 0]
        for old, new in ((best.rotations, found.rotations), (best.shifts_angst, found.shifts_angst), (best.scores, found.scores)):
            old[better] = new[better]
    return session.refine(best, origin), session.evaluations


def apart_deg(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.rad2deg(Rotation.from_matrix(np.swapaxes(a, -1, -2) @ b).magnitude())


@pytest.mark.parametrize("noise", [2.0, 8.0])
def test_the_optimum_of_the_exhaustive_grid_is_found_at_a_twentieth_of_its_cost(make_case, noise):
    case = make_case(N, "wedge", noise=noise, particles=8, seed=5)
    found, session = search_everywhere(case)
    whole, evaluations = exhaustive(case)
    assert session.evaluations <= 0.05 * evaluations  # measured: 0.017
    # where the noise leaves several modes of about one likelihood, the refined pose may be of a better one than the grid's best
    assert (found.estimates.log_likelihood > whole.log_likelihood - 0.1).all()
    same = apart_deg(found.rotations, whole.rotations) < (0.2 if noise < 5 else 2.0)
    assert (same | (found.estimates.log_likelihood > whole.log_likelihood)).all()
    if noise < 5:
        assert same.all() and apart_deg(found.rotations, case.rotations).max() < 8
    else:
        assert (apart_deg(whole.rotations, case.rotations) > 20).any()  # else there was nothing hard about it


def test_repeats_are_bit_identical_and_the_starts_do_not_matter(make_case):
    case = make_case(N, "wedge", noise=5.0, particles=3, seed=4)
    first, again, elsewhere = (search_everywhere(case, starts=starts)[0] for starts in (None, None, Rotation.random(3, random_state=9).as_matrix()))
    for other in (again, elsewhere):
        assert np.array_equal(first.rotations, other.rotations) and np.array_equal(first.shifts_angst, other.shifts_angst)
        assert np.array_equal(first.estimates.covariances, other.estimates.covariances)


def about_z(fold: int) -> NDArray[np.float64]:
    return Rotation.from_rotvec(np.arange(fold)[:, None] * [0.0, 0.0, 2.0 * np.pi / fold]).as_matrix()


GROUPS = {
    "C7": about_z(7),
    "D7": np.concatenate([about_z(7), about_z(7) @ np.diag([1.0, -1.0, -1.0])]),
    "O": Rotation.create_group("O").as_matrix(),
}


def symmetric_case(make_case: Any, group: NDArray[np.float64], noise: float, particles: int) -> Any:
    """Blobs at all copies of two generic places, at planted poses, under a wedge."""
    case = make_case(N_SYMMETRIC, "wedge", particles=particles, seed=6)
    n, voxel = N_SYMMETRIC, case.voxel_angst
    z, y, x = np.indices((n,) * 3) - n // 2

    def volume(rotation: NDArray[np.float64], shift: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.zeros((n,) * 3)
        for g in group:
            for place, height in (((5.0, 1.2, 2.6), 1.0), ((2.2, 3.1, 5.2), 0.7)):
                px, py, pz = rotation @ g @ np.array(place) + shift
                out += height * np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * 1.0**2))
        return out

    clean = [volume(r, s / voxel) for r, s in zip(case.rotations, case.shifts_angst, strict=True)]
    weighted = [np.fft.irfftn(np.fft.rfftn(v) * w, s=(n,) * 3, axes=(0, 1, 2)) for v, w in zip(clean, case.weights, strict=True)]
    deviation = noise * float(weighted[0].std())
    rng = np.random.default_rng(8)
    noisy = [(v + rng.normal(0, deviation, v.shape)).astype(np.float32) for v in weighted]
    mask = case.setup.particle_mask
    inside = spherical_mask(n, mask.radius_voxels, mask.soft_edge_voxels)
    reference = volume(np.eye(3), np.zeros(3))
    reference = ((reference - reference[inside < 0.01].mean()) * inside).astype(np.float32)
    sigma2 = np.full(n // 2 + 1, deviation**2 * n**3 * float((inside**2).mean()))
    case = case.with_setup(reference=reference, noise=NoiseModel(sigma2))
    return replace(case, volumes=noisy, name=f"{len(group)}-fold-{noise}")


@pytest.mark.parametrize("name", GROUPS)
def test_a_symmetry_divides_the_work_and_seeds_are_modes_not_copies(make_case, name):
    group = GROUPS[name]
    case = symmetric_case(make_case, group, 6.0, 6)
    found, session = search_everywhere(case, name)
    without, whole = search_everywhere(case)
    assert session.first_level == pytest.approx(whole.first_level / len(group), rel=0.05)

    def equal_deg(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.min([apart_deg(a, b @ g) for g in group], axis=0)

    assert equal_deg(found.rotations, case.rotations).max() < 6
    assert equal_deg(found.rotations, without.rotations).max() < 2  # copies of a map interpolate a little differently
    # no two seeds of a particle are one orientation: without the group the copies crowd out other modes
    closest = {"with": [], "without": []}
    for which, one in (("with", session), ("without", whole)):
        for p in range(len(case.volumes)):
            seeds = one.seeds[1].rotations[p][one.seeds[1].scores[p] > -np.inf]
            pairs = [(a, b) for i, a in enumerate(seeds) for b in seeds[:i]]
            closest[which] += [float(equal_deg(a[None], b[None])[0]) for a, b in pairs]
    step_deg = global_start(case.setup.k_max, N_SYMMETRIC, case.setup.particle_mask.radius_voxels)[0]
    assert closest["with"] and min(closest["with"]) > step_deg > 2 * min(closest["without"])


def test_a_cover_of_the_asymmetric_unit_has_every_orientation_once():
    rng = Rotation.random(150, random_state=2).as_matrix()
    for name, group in GROUPS.items():
        cover = all_rotations(15.0, name)
        whole = all_rotations(15.0)
        assert len(cover) == pytest.approx(len(whole) / len(group), rel=0.05)
        nearest = np.min([[apart_deg(r[None], cover @ g).min() for r in rng] for g in group], axis=0)
        assert nearest.max() < 15.0  # what the next level reaches; along the seam the cover is a little wider than within (12)
