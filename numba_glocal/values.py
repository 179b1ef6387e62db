"""Frozen value types that travel between rooms. Structure of arrays; units stand in the names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
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


@dataclass(frozen=True, slots=True, eq=False)
class TiltGeometry:
    """How a stack of tilt images makes a particle's volume and weights: an entry for each image that takes part.

    Two of them are equal where all their numbers are.

    Attributes
    ----------
    images : (t,) int
        Which images of the stack, counted from 0.
    axes : (t, 2, 3) float64
        Each image's x and y axis as ``(x, y, z)`` in the frame of the particle's volume: its sample (kx, ky) lies at ``kx x + ky y``.
    defocus_angst : (t, 3) float64
        Defocus U and V in Angstrom, and the angle of U in degrees.
    phase_shift_deg, scale, exposure : (t,) float64
        Phase shift of the CTF; factor of the CTF (``rlnCtfScalefactor``); electrons per square Angstrom before the image was taken.
    pixel_size_angst : float
        Of the images.
    voltage_kv, spherical_aberration_mm, amplitude_contrast : float
    multiplied : bool
        Images come multiplied by their CTF (with scale and exposure filter) already.
    key : str
        A digest of all the above.
    """

    images: IntArray
    axes: FloatArray
    defocus_angst: FloatArray
    phase_shift_deg: FloatArray
    scale: FloatArray
    exposure: FloatArray
    pixel_size_angst: float
    voltage_kv: float = 300.0
    spherical_aberration_mm: float = 2.7
    amplitude_contrast: float = 0.07
    multiplied: bool = True
    key: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for each in fields(self):
            if each.name != "key":
                digest.update(np.ascontiguousarray(getattr(self, each.name), np.float64).tobytes())
        object.__setattr__(self, "key", digest.hexdigest()[:24])

    def __len__(self) -> int:
        return len(self.images)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TiltGeometry) and self.key == other.key

    def __str__(self) -> str:
        return f"{len(self)} tilt images ({self.key})"


WeightSource = Path | TiltGeometry | None
"""Where a particle's weights come from: a file, the tilt images that it is made of, or nowhere."""


@dataclass(frozen=True, slots=True)
class ParticleSet:
    """A particle list, read and understood. Immutable; `dataclasses.replace` or the methods make changed copies.

    Attributes
    ----------
    names : tuple of str
        Particle volumes as the list names them, kept byte for byte.
    volume_paths : tuple of Path
        Where those volumes (or stacks of tilt images) were found.
    weight_paths : tuple of (Path, TiltGeometry or None)
        Wedge, CTF or CTF^2 volume of each particle (``rlnCtfImage``); for a stack of tilt images how it makes a volume and CTF^2 weights;
        None when the list has none.
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
    source : object
        The document the list came from, with every column, block and digit, so that it can be written back.
    """

    names: tuple[str, ...]
    volume_paths: tuple[Path, ...]
    weight_paths: tuple[WeightSource, ...]
    poses: Poses
    half: NDArray[np.int8]
    tomograms: tuple[str, ...]
    groups: NDArray[np.int32]
    pixel_size_angst: float
    pixel_size_source: str
    box_size: int
    premultiplied: bool = False
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
