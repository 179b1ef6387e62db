"""Which particles share a noise model: those of a tomogram, of an optics group, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import SettingsError, plural
from .values import NOISE_GROUPS, ParticleSet

LEAST_PARTICLES = 5
"""Of each half that has any: fewer do not tell a spectrum or a scale from chance."""

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class NoiseGroups:
    """Groups of particles.

    Attributes
    ----------
    index : (n,) int32
        Group of each particle.
    names : tuple of str
        One a group; the last may be that of all who are too few to be their own.
    by : str
        "tomogram", "optics" or "none".
    """

    index: NDArray[np.int32]
    names: tuple[str, ...]
    by: str

    def __str__(self) -> str:
        """In words."""
        if len(self.names) == 1:
            return "one noise model for each half"
        shown = self.names if len(self.names) <= _SHOWN else (*self.names[: _SHOWN - 1], f"{len(self.names) - _SHOWN + 1} more")
        return f"{len(self.names)} by {'optics group' if self.by == 'optics' else self.by} in each half: {', '.join(shown)}"


def find_noise_groups(particles: ParticleSet, wanted: str) -> NoiseGroups:
    """Groups with at least `LEAST_PARTICLES` in each half that has any; the particles of smaller ones make one more group.

    Parameters
    ----------
    particles : ParticleSet
        With half-sets assigned.
    wanted : {"auto", "none", "tomogram", "optics"}
        "auto": by tomogram where that gives more than one group, else by optics group, else one.

    Returns
    -------
    NoiseGroups

    Raises
    ------
    SettingsError
        `wanted` is none of these.
    """
    if wanted not in NOISE_GROUPS:
        raise SettingsError(f"--noise-groups: expected one of {', '.join(NOISE_GROUPS)}; found {wanted!r}")
    tried = {"auto": ("tomogram", "optics"), "none": ()}.get(wanted, (wanted,))
    for by in tried:
        found = _large_enough(particles.tomograms if by == "tomogram" else particles.groups.tolist(), particles.half, by)
        if len(found.names) > 1:
            return found
    return NoiseGroups(np.zeros(len(particles), np.int32), ("all",), "none")


def _large_enough(labels: Sequence[str | int], half: NDArray[np.int8], by: str) -> NoiseGroups:
    rows: dict[str | int, int] = {}  # in the order of the list
    member = np.array([rows.setdefault(label, len(rows)) for label in labels], np.intp)
    counts = np.stack([np.bincount(member[half == h], minlength=len(rows)) for h in (1, 2)])
    least = np.where(counts > 0, counts, len(member)).min(axis=0)  # halves split by tomogram have all or none of one
    own = least >= LEAST_PARTICLES
    place = np.where(own, np.cumsum(own) - 1, own.sum()).astype(np.int32)
    index = place[member]
    names = [f"optics group {label + 1}" if isinstance(label, int) else label or "unnamed" for label, row in rows.items() if own[row]]
    if not own.all():
        names.append(f"the {plural(int((index == own.sum()).sum()), 'particle')} of smaller ones")
    return NoiseGroups(index, tuple(names), by)
