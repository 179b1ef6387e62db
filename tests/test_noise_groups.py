"""Which particles share a noise model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numba_glocal.errors import SettingsError
from numba_glocal.noise_groups import find_noise_groups
from numba_glocal.settings import AverageSettings
from numba_glocal.values import ParticleSet, Poses


def particles(tomograms, half, optics=None):
    count = len(tomograms)
    optics = np.zeros(count, np.int32) if optics is None else np.asarray(optics, np.int32)
    names = tuple(f"p{i}.mrc" for i in range(count))
    poses = Poses(np.repeat(np.eye(3)[None], count, 0), np.zeros((count, 3)))
    return ParticleSet(names, tuple(map(Path, names)), (None,) * count, poses, np.asarray(half, np.int8), tuple(tomograms), optics, 10.0, "here", 16)


def halves(count):
    return np.arange(count) % 2 + 1


def test_tomograms_with_five_in_each_half_are_their_own_group():
    names = ["late"] * 10 + ["small"] * 3 + ["early"] * 12 + ["tiny"]
    found = find_noise_groups(particles(names, halves(26)), "auto")
    assert found.by == "tomogram" and found.names == ("late", "early", "the 4 particles of smaller ones")
    assert found.index.tolist() == [0] * 10 + [2] * 3 + [1] * 12 + [2]
    assert str(found).startswith("3 by tomogram in each half: late, early")


def test_auto_falls_back_to_optics_groups_and_to_one():
    names = [f"t{i}" for i in range(20)]
    found = find_noise_groups(particles(names, halves(20), [0] * 10 + [1] * 10), "auto")
    assert found.by == "optics" and found.names == ("optics group 1", "optics group 2") and found.index.tolist() == [0] * 10 + [1] * 10
    found = find_noise_groups(particles(names, halves(20)), "auto")
    assert (found.by, len(found.names), found.index.max()) == ("none", 1, 0) and str(found) == "one noise model for each half"


@pytest.mark.parametrize(
    ("wanted", "by", "count"), [("none", "none", 1), ("tomogram", "tomogram", 2), ("optics", "optics", 2), ("auto", "tomogram", 2)]
)
def test_what_was_asked_for(wanted, by, count):
    found = find_noise_groups(particles(["a"] * 10 + ["b"] * 10, halves(20), [0, 0, 1, 1] * 5), wanted)
    assert (found.by, len(found.names)) == (by, count)


def test_halves_split_by_tomogram_leave_every_tomogram_its_group():
    found = find_noise_groups(particles(["a"] * 6 + ["b"] * 6 + ["c"] * 4, [1] * 6 + [2] * 6 + [1] * 4), "tomogram")
    assert found.names == ("a", "b", "the 4 particles of smaller ones")


def test_a_lopsided_half_makes_a_tomogram_too_small():
    """Eight particles, but two in half 2."""
    found = find_noise_groups(particles(["a"] * 8 + ["b"] * 10, [1] * 6 + [2] * 2 + [1] * 5 + [2] * 5), "tomogram")
    assert found.names == ("b", "the 8 particles of smaller ones")


def test_many_are_not_all_named():
    found = find_noise_groups(particles([f"t{i}" for i in range(20) for _ in range(10)], halves(200)), "auto")
    assert len(found.names) == 20 and str(found).endswith("t10, 9 more")


def test_refused():
    with pytest.raises(SettingsError, match="--noise-groups: expected one of auto, none, tomogram, optics"):
        find_noise_groups(particles(["a"] * 4, halves(4)), "micrograph")
    with pytest.raises(SettingsError, match="--noise-groups tomogram: matters for --weighting noise only"):
        AverageSettings("p.star", "run", weighting="ctf", noise_groups="tomogram")
    AverageSettings("p.star", "run", weighting="ctf")
