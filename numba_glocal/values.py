"""Frozen value types that travel between rooms. Structure of arrays; units stand in the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]

SCORES = ("flcf", "ncc", "ml")
"""Kinds of score (docs/scoring.md, 1)."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A map on a cubic grid.

    Attributes
    ----------
    data : (n, n, n) float32
        Indexed ``[z, y, x]``; the centre is voxel ``n // 2`` on each axis.
    pixel_size_angst : float
        Voxel edge in Angstrom; ``nan`` when the file does not say (0, 1 and NaN in a header are not believed).
    """

    data: NDArray[np.float32]
    pixel_size_angst: float

    @property
    def box_size(self) -> int:
        """Edge of the box in voxels."""
        return int(self.data.shape[0])


@dataclass(frozen=True, slots=True)
class Poses:
    """Rotations and shifts that carry the reference onto particles (docs/conventions.md, 1).

    Attributes
    ----------
    rotations : (n, 3, 3) float64
        ``R``, acting on column vectors ``(x, y, z)``.
    shifts_angst : (n, 3) float64
        ``s = (x, y, z)`` in Angstrom, applied after the rotation.
    """

    rotations: FloatArray
    shifts_angst: FloatArray

    def __len__(self) -> int:
        return int(self.rotations.shape[0])

    def take(self, index: IntArray | Sequence[int]) -> Poses:
        """The poses at `index`, in that order."""
        index = np.asarray(index, dtype=np.intp)
        return Poses(self.rotations[index], self.shifts_angst[index])


@dataclass(frozen=True, slots=True)
class ParticleSet:
    """A particle list, read and understood. Immutable; `dataclasses.replace` or the methods make changed copies.

    Attributes
    ----------
    names : tuple of str
        Particle volumes as the list names them, kept byte for byte.
    volume_paths : tuple of Path
        Where those volumes were found.
    weight_paths : tuple of (Path or None)
        Wedge, CTF or CTF^2 volume of each particle (``rlnCtfImage``), None when the list has none.
    poses : Poses
        Current poses.
    half : (n,) int8
        Half-set 1 or 2; 0 where the list does not say.
    tomograms : tuple of str
        Micrograph or tomogram names; opaque text.
    groups : (n,) int32
        Optics group (index from 0) of each particle.
    pixel_size_angst : float
        Of the particle volumes.
    pixel_size_source : str
        Where that number came from, for the plan that is printed.
    box_size : int
        Edge of the particle volumes in voxels.
    premultiplied : bool
        True when volumes are already multiplied by their CTF and the weight volume holds CTF^2.
    classes : (n,) int32 or None
        Class of each particle, from 1, as the list has it; None when it says nothing.
    source : object
        The document the list came from, with every column, block and digit, so that it can be written back.
    """

    names: tuple[str, ...]
    volume_paths: tuple[Path, ...]
    weight_paths: tuple[Path | None, ...]
    poses: Poses
    half: NDArray[np.int8]
    tomograms: tuple[str, ...]
    groups: NDArray[np.int32]
    pixel_size_angst: float
    pixel_size_source: str
    box_size: int
    premultiplied: bool = False
    classes: NDArray[np.int32] | None = None
    source: Any = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.names)

    def with_poses(self, poses: Poses) -> ParticleSet:
        """The same particles at other poses."""
        return replace(self, poses=poses)

    def with_half(self, half: IntArray) -> ParticleSet:
        """The same particles with other half-sets."""
        return replace(self, half=np.asarray(half, dtype=np.int8))

    def take(self, index: IntArray | Sequence[int]) -> ParticleSet:
        """The particles at `index`, in that order; the source rows go with them."""
        index = np.asarray(index, dtype=np.intp)
        source = self.source.take(index) if self.source is not None else None
        return replace(
            self,
            names=tuple(self.names[i] for i in index),
            volume_paths=tuple(self.volume_paths[i] for i in index),
            weight_paths=tuple(self.weight_paths[i] for i in index),
            poses=self.poses.take(index),
            half=self.half[index],
            tomograms=tuple(self.tomograms[i] for i in index),
            groups=self.groups[index],
            classes=None if self.classes is None else self.classes[index],
            source=source,
        )


@dataclass(frozen=True, slots=True)
class FSCCurve:
    """Fourier shell correlation between two half-maps, a value per shell, shell 0 first.

    Attributes
    ----------
    box_size : int
        Edge of the maps in voxels.
    pixel_size_angst : float
        Voxel edge.
    unmasked, masked, randomised, corrected : (n_shells,) float64
        The four curves; without a mask `masked`, `randomised` and `corrected` repeat `unmasked`.
    mask_name : str
        Which mask was used; "none" without one.
    randomised_from_shell : int
        First shell whose phases were randomised (0 without a mask).
    """

    box_size: int
    pixel_size_angst: float
    unmasked: FloatArray
    masked: FloatArray
    randomised: FloatArray
    corrected: FloatArray
    mask_name: str = "none"
    randomised_from_shell: int = 0
