"""Two independent half-sets: taken from the particle list, or assigned once and then kept."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from .errors import SettingsError
from .values import ParticleSet

SPLITS = ("file", "particle", "tomogram")


def assign_half_sets(particles: ParticleSet, split: str = "file", seed: int = 0) -> tuple[NDArray[np.int8], list[str]]:
    """Half-set of every particle.

    Parameters
    ----------
    particles : ParticleSet
        `half` holds what the list says: 1, 2, or 0 where it says nothing.
    split : {"file", "particle", "tomogram"}
        "file": keep what the list says and assign the particles it says nothing about at random. "particle": at random,
        whatever the list says. "tomogram": whole tomograms go to one half or the other.
    seed : int
        The same list and seed give the same half-sets.

    Returns
    -------
    half : (n,) int8
        1 or 2; the two sizes differ by at most one where they are assigned at random by particle.
    warnings : list of str
        What the user should know, one line each.

    Raises
    ------
    SettingsError
        All particles in one half, a half of fewer than two particles, fewer than two tomograms to split by.
    """
    if split not in SPLITS:
        raise SettingsError(f"--split: expected one of {', '.join(SPLITS)}; found {split!r}")
    count = len(particles)
    if count < 4:
        raise SettingsError(f"half-sets: expected at least 4 particles, two for each half; found {count}")
    rng = np.random.default_rng(seed)
    given = np.asarray(particles.half)
    warnings: list[str] = []
    if split == "tomogram":
        half = _by_tomogram(particles.tomograms, rng)
        warnings += _replaced(given, half)
    elif split == "particle":
        half = _fill(np.zeros(count, dtype=np.int8), rng)
        warnings += _replaced(given, half)
    else:
        half = _from_file(given, rng, warnings)
    for number in (1, 2):
        size = int(np.count_nonzero(half == number))
        if size < 2:
            raise SettingsError(
                f"half-sets: expected at least 2 particles in each half; found {size} of {count} in half {number}"
                " (--split particle assigns them anew)"
            )
    return half, warnings + _shared_volumes(particles, half)


def positions_angst(particles: ParticleSet) -> NDArray[np.float64]:
    """(n, 3) places of the particles in their tomograms, Angstrom; ``nan`` where the list does not tell.

    Coordinates of unknown voxels are taken to count those of the particles: for what lies on one spot it makes no difference.
    """
    places = particles.coordinates
    nowhere = np.full((len(particles), 3), np.nan)
    if places is None:
        return nowhere
    if places.centred_angst is not None:
        centres = places.centred_angst
    else:
        voxel = np.where(np.isfinite(places.voxel_size_angst), places.voxel_size_angst, particles.pixel_size_angst)
        centres = places.as_voxels() * voxel[:, None]
        if not centres.any():  # nobody filled them in
            return nowhere
    named = np.array([bool(name) for name in particles.tomograms])
    return np.asarray(np.where(named[:, None], centres + particles.poses.shifts_angst, np.nan))


def neighbours_across(
    positions: NDArray[np.float64], tomograms: Sequence[str], half: NDArray[np.int8], within_angst: float, names: Sequence[str]
) -> list[str]:
    """A line where particles of one half lie on those of the other: the same data in both makes their correlation meaningless.

    Parameters
    ----------
    positions : (n, 3) float64
        Of `positions_angst`.
    tomograms : sequence of str
    half : (n,) int8
        1 or 2.
    within_angst : float
        What is nearer than this is the same particle, or mostly.
    names : sequence of str
        Of the particles, for the message.
    """
    count, pair = 0, (-1, -1)
    members: dict[str, list[int]] = {}
    for row in np.flatnonzero(np.isfinite(positions).all(axis=1)).tolist():
        members.setdefault(tomograms[row], []).append(row)
    for rows in members.values():
        first, second = (np.array([row for row in rows if half[row] == number], dtype=np.intp) for number in (1, 2))
        if not (first.size and second.size):
            continue
        distance, nearest = cKDTree(positions[first]).query(positions[second], distance_upper_bound=within_angst)
        near = np.flatnonzero(np.isfinite(distance))
        if near.size and not count:
            pair = int(first[nearest[near[0]]]), int(second[near[0]])
        count += near.size
    if not count:
        return []
    verb = "particle of half 2 lies" if count == 1 else "particles of half 2 lie"
    such = f"such as {names[pair[1]]} of {names[pair[0]]}"
    return [
        f"half-sets: {count} {verb} within {within_angst:.3g} A (a quarter of the diameter) of one of half 1 ({such}): the halves share data,"
        " and the resolution will be overestimated; remove duplicates, or use --split tomogram"
    ]


def _from_file(given: NDArray[np.int8], rng: np.random.Generator, warnings: list[str]) -> NDArray[np.int8]:
    known = (given == 1) | (given == 2)
    if not known.any():
        warnings.append("half-sets: the list has none; assigned at random and stored with the particles")
    elif not known.all():
        missing = int(np.count_nonzero(~known))
        warnings.append(f"half-sets: {missing} of {given.size} particles have none in the list; those were assigned at random")
    elif np.unique(given).size == 1:
        raise SettingsError(
            f"half-sets: all {given.size} particles are in half {given[0]} of the list; expected two halves (--split particle assigns them anew)"
        )
    return _fill(np.where(known, given, 0).astype(np.int8), rng)


def _fill(half: NDArray[np.int8], rng: np.random.Generator) -> NDArray[np.int8]:
    """Gives the particles that are in no half (0) a random one so that both end up as equal in size as they can."""
    free = np.flatnonzero(half == 0)
    wanted = (half.size + 1) // 2 - np.count_nonzero(half == 1)
    in_first = min(max(int(wanted), 0), free.size)
    filled = half.copy()
    filled[free] = 2
    filled[rng.permutation(free)[:in_first]] = 1
    return filled


def _by_tomogram(tomograms: Sequence[str], rng: np.random.Generator) -> NDArray[np.int8]:
    names, member, sizes = np.unique(np.asarray(tomograms, dtype=object).astype(str), return_inverse=True, return_counts=True)
    if names.size < 2:
        raise SettingsError(f"--split tomogram: expected particles from at least 2 tomograms; found {names.size}")
    # the largest first, each to the smaller half: the halves come out nearly equal; the shuffle decides among equals
    order = rng.permutation(names.size)
    order = order[np.argsort(-sizes[order], kind="stable")]
    half_of = np.zeros(names.size, dtype=np.int8)
    filled = [0, 0]
    for tomogram in order:
        smaller = int(filled[1] < filled[0])
        half_of[tomogram] = smaller + 1
        filled[smaller] += int(sizes[tomogram])
    return half_of[member.ravel()]


def _replaced(given: NDArray[np.int8], half: NDArray[np.int8]) -> list[str]:
    if not np.any(given):
        return []
    changed = np.count_nonzero((given != half) & (given != 0))
    return [f"half-sets: assigned anew, {changed} particles change their half; start maps made from the old halves are not independent"]


def _shared_volumes(particles: ParticleSet, half: NDArray[np.int8]) -> list[str]:
    """A volume listed in both halves makes their correlation meaningless."""
    halves_of: dict[tuple[str, str], set[int]] = {}
    first: dict[tuple[str, str], str] = {}
    for name, path, number in zip(particles.names, particles.voxels_from, half, strict=True):
        slice_match = re.match(r"\s*0*(\d+)@", name)  # the place in a stack: 7@stack.mrcs
        key = (str(path), slice_match.group(1) if slice_match else "")
        halves_of.setdefault(key, set()).add(int(number))
        first.setdefault(key, name)
    shared = [first[key] for key, numbers in halves_of.items() if len(numbers) == 2]
    if not shared:
        return []
    return [f"half-sets: {len(shared)} volumes are listed in both halves (first: {shared[0]}); the resolution will be overestimated"]
