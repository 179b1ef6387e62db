from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_glocal.errors import SettingsError
from numba_glocal.half_sets import assign_half_sets, neighbours_across, positions_angst
from numba_glocal.job import prepare_job
from numba_glocal.settings import AverageSettings
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Coordinates, ParticleSet, Poses


def particles(half, tomograms=None, names=None):
    count = len(half)
    names = names or [f"p{i}.mrc" for i in range(count)]
    return ParticleSet(
        names=tuple(names),
        volume_paths=tuple(Path(name.split("@")[-1]) for name in names),
        weight_paths=(None,) * count,
        poses=Poses(np.broadcast_to(np.eye(3), (count, 3, 3)), np.zeros((count, 3))),
        half=np.asarray(half, np.int8),
        tomograms=tuple(tomograms or ["t"] * count),
        groups=np.zeros(count, np.int32),
        pixel_size_angst=4.0,
        pixel_size_source="test",
        box_size=16,
    )


def test_the_files_halves_are_kept():
    given_half = [1, 1, 1, 2, 1, 2]
    half, warnings = assign_half_sets(particles(given_half))
    assert half.tolist() == given_half and half.dtype == np.int8 and warnings == []


@given(st.integers(4, 60), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_random_halves_are_balanced_and_repeatable(count, seed):
    half, warnings = assign_half_sets(particles([0] * count), seed=seed)
    assert set(half.tolist()) == {1, 2}
    assert abs(int((half == 1).sum()) - int((half == 2).sum())) <= 1
    np.testing.assert_array_equal(half, assign_half_sets(particles([0] * count), seed=seed)[0])
    assert "assigned at random" in warnings[0]


def test_random_halves_differ_between_seeds_and_are_not_alternating():
    first, second = (assign_half_sets(particles([0] * 40), seed=seed)[0] for seed in (1, 2))
    assert (first != second).any()
    assert not np.array_equal(first, np.tile([1, 2], 20)) and not np.array_equal(first, np.tile([2, 1], 20))


def test_particles_without_a_half_join_the_smaller_one():
    half, warnings = assign_half_sets(particles([1, 1, 1, 0, 0, 2, 0, 3]))
    assert half[[0, 1, 2, 5]].tolist() == [1, 1, 1, 2]
    assert (half == 1).sum() == 4 and (half == 2).sum() == 4
    assert "4 of 8" in warnings[0]


def test_split_particle_replaces_the_files_halves_and_says_so():
    half, warnings = assign_half_sets(particles([1] * 10), split="particle")
    assert (half == 1).sum() == 5 and "5 particles change" in warnings[0]


def test_split_by_tomogram_keeps_tomograms_whole_and_halves_nearly_equal():
    tomograms = ["a"] * 10 + ["b"] * 6 + ["c"] * 5 + ["d"] * 1
    for seed in range(5):
        half, _ = assign_half_sets(particles([0] * 22, tomograms), split="tomogram", seed=seed)
        for name in "abcd":
            assert len({h for h, t in zip(half, tomograms, strict=True) if t == name}) == 1
        assert (half == 1).sum() == 11


@pytest.mark.parametrize(
    ("half", "tomograms", "split", "message"),
    [
        ([1] * 6, None, "file", "--split particle"),
        ([2] * 6, None, "file", "--split particle"),
        ([1] * 5 + [2], None, "file", "found 1 of 6 in half 2"),
        ([0] * 3, None, "file", "at least 4"),
        ([0] * 6, None, "tomogram", "2 tomograms"),
        ([0] * 6, ["a"] * 5 + ["b"], "tomogram", "found 1 of 6"),
        ([0] * 6, None, "random", "--split"),
    ],
)
def test_unusable_halves_are_refused_in_one_line(half, tomograms, split, message):
    with pytest.raises(SettingsError, match=message) as error:
        assign_half_sets(particles(half, tomograms), split=split)
    assert "\n" not in str(error.value)


def test_a_volume_in_both_halves_is_reported():
    _, warnings = assign_half_sets(particles([1, 2, 1, 2], names=["a.mrc", "a.mrc", "b.mrc", "c.mrc"]))
    assert "1 volumes" in warnings[0] and "a.mrc" in warnings[0]
    _, warnings = assign_half_sets(particles([1, 2, 1, 2], names=["1@s.mrcs", "2@s.mrcs", "3@s.mrcs", "4@s.mrcs"]))
    assert warnings == []
    _, warnings = assign_half_sets(particles([1, 2, 1, 2], names=["1@s.mrcs", "0001@s.mrcs", "3@s.mrcs", "4@s.mrcs"]))
    assert len(warnings) == 1


def placed(half, voxels, tomograms=None, shifts=None, voxel_size=2.0):
    listed = particles(half, tomograms)
    poses = Poses(listed.poses.rotations, np.zeros((len(half), 3)) if shifts is None else np.asarray(shifts, float))
    return replace(listed, poses=poses, coordinates=Coordinates.in_voxels(np.asarray(voxels, float), voxel_size))


def told(listed, within=20.0):
    return neighbours_across(positions_angst(listed), listed.tomograms, listed.half, within, listed.names)


def test_one_place_in_both_halves_is_said():
    """Places 8 A apart once the shifts are added, 28 A without; 2 A voxels."""
    voxels = [[50, 50, 50], [64, 50, 50], [150, 50, 50], [250, 50, 50]]
    shifts = [[20.0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    (line,) = told(placed([1, 2, 1, 2], voxels, shifts=shifts))
    assert line.startswith("half-sets: 1 particle of half 2 lies within 20 A") and "p1.mrc of p0.mrc" in line and "--split tomogram" in line
    assert not told(placed([1, 2, 1, 2], voxels))
    assert not told(placed([1, 1, 2, 2], voxels, shifts=shifts))  # one half has both
    assert not told(placed([1, 2, 1, 2], voxels, ["a", "b", "a", "b"], shifts))  # two tomograms
    assert not told(placed([1, 2, 1, 2], voxels, [""] * 4, shifts))  # nobody says which


def test_places_that_nobody_filled_in_are_none():
    assert not told(placed([1, 2, 1, 2], np.zeros((4, 3))))
    assert not told(particles([1, 2, 1, 2]))
    assert told(placed([1, 2, 1, 2], np.ones((4, 3)), voxel_size=float("nan")))


def test_the_plan_warns_of_one_place_in_both_halves(tmp_path):
    made = simulate(tmp_path, SimulationSettings(count=8, box_size=20, pixel_size_angst=16.0))
    assert not any("share data" in w for w in prepare_job(AverageSettings(str(made.start), "run")).warnings)
    lines = made.start.read_text().splitlines()
    rows = [i for i, line in enumerate(lines) if line.startswith("subtomo/")]
    first, other = lines[rows[0]].split(), lines[rows[1]].split()
    lines[rows[1]] = " ".join([*other[:2], *first[2:6], *other[6:]])
    made.start.write_text("\n".join(lines) + "\n")
    assert sum("share data" in w for w in prepare_job(AverageSettings(str(made.start), "run")).warnings) == 1
