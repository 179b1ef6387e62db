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

NOISE_GROUPS = ("auto", "none", "tomogram", "optics")
"""What particles of one noise model have in common (docs/scoring.md, 4)."""


EDGES = ("skip", "pad")
"""What becomes of a box that reaches beyond its tomogram: left out, or padded with the mean of what is there."""

VOLUME_AXES = ("tomogram", "subtomogram")
"""How a list's volumes stand: as the tomogram does, or along axes of their own (RELION's pseudo-subtomograms)."""

CTF_KINDS = ("none", "plain", "flipped", "multiplied")
"""What tomograms hold of the CTF: not modelled, uncorrected, phases flipped, multiplied by it."""


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


@dataclass(frozen=True, slots=True)
class TiltRange:
    """A missing wedge given by the tilts of a series; a tuple of them is the union of what each samples (dual-axis series).

    Attributes
    ----------
    tilt_min_deg, tilt_max_deg : float
        Within -90 .. 90.
    tilt_axis : {"y", "x"}
    flip : bool
        Take tilts with the other sign.
    turn : (9,) tuple of float, optional
        Rotation matrix (row by row) that carries the tilt axis and the beam onto those of the particle's volume; None: they are.
    smooth_voxels : float
        Width of a cosine edge outside of the sampled region, in voxels of the unbinned spectrum.
    cutoff_voxels : float
        Nothing is sampled beyond this radius of the unbinned spectrum; 0: no limit.
    """

    tilt_min_deg: float
    tilt_max_deg: float
    tilt_axis: str = "y"
    flip: bool = False
    turn: tuple[float, ...] | None = None
    smooth_voxels: float = 1.0
    cutoff_voxels: float = 0.0


@dataclass(frozen=True, slots=True)
class TomogramWeight:
    """What a tomogram holds of a particle: the tilts that it was made of, and what was done about their CTF.

    Attributes
    ----------
    geometry : TiltGeometry
        Of the tilts at the particle's place.
    ctf : str
        Of `CTF_KINDS`.
    """

    geometry: TiltGeometry
    ctf: str

    def __str__(self) -> str:
        return f"tomogram ({self.ctf}) of {self.geometry}"


Weight = Path | tuple[TiltRange, ...] | TiltGeometry | TomogramWeight
"""Where a particle's weights come from: a volume, the range of tilts of its series, the tilt images that it is made of, or the tilts of the
tomogram that it is cut from."""


@dataclass(frozen=True, slots=True)
class TomogramBox:
    """Where a particle is cut from a tomogram.

    Attributes
    ----------
    path : Path
        The tomogram.
    centre : (int, int, int)
        Voxel ``(x, y, z)`` of the tomogram that the box has as its voxel ``n // 2``.
    edge : str
        Of `EDGES`.
    """

    path: Path
    centre: tuple[int, int, int]
    edge: str = "skip"

    def __str__(self) -> str:
        return f"{self.path} at {', '.join(map(str, self.centre))} ({self.edge})"


Source = Path | TomogramBox
"""Where a particle's voxels are: a file of its own, or a box of a tomogram."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where the centres of the particle volumes lie in their tomograms; the particle itself is at centre + shift.

    Attributes
    ----------
    voxels : (n, 3) float64 or None
        ``(x, y, z)`` from the centre of the tomogram's first voxel, in voxels of `voxel_size_angst`.
    centred_angst : (n, 3) float64 or None
        From the tomogram's centre (docs/conventions.md). At least one of the two is there; both say the same.
    voxel_size_angst : (n,) float64
        Edge of those voxels; ``nan`` where nobody knows it.
    centre_voxels : (n, 3) float64
        The tomogram's centre in those voxels; ``nan`` where nobody knows it.
    """

    voxels: FloatArray | None
    centred_angst: FloatArray | None
    voxel_size_angst: FloatArray
    centre_voxels: FloatArray

    @classmethod
    def in_voxels(cls, voxels: FloatArray, voxel_size_angst: float = float("nan")) -> Coordinates:
        """Coordinates of a list that knows voxels only."""
        n = len(voxels)
        return cls(np.asarray(voxels, np.float64), None, np.full(n, voxel_size_angst), np.full((n, 3), np.nan))

    def __len__(self) -> int:
        return len(self.voxel_size_angst)

    def take(self, index: IntArray | Sequence[int]) -> Coordinates:
        """The coordinates at `index`, in that order."""
        index = np.asarray(index, dtype=np.intp)
        kept = [None if part is None else part[index] for part in (self.voxels, self.centred_angst)]
        return Coordinates(kept[0], kept[1], self.voxel_size_angst[index], self.centre_voxels[index])

    def counted_in(self, voxel_size_angst: float) -> Coordinates:
        """The same places in voxels of another size; as they are where the size of theirs is unknown."""
        voxels = self.as_voxels()
        scale = np.where(np.isfinite(self.voxel_size_angst), self.voxel_size_angst / voxel_size_angst, 1.0)
        if np.abs(scale - 1).max(initial=0) <= 1e-6:
            return self
        size = np.where(np.isfinite(self.voxel_size_angst), voxel_size_angst, np.nan)
        return Coordinates(voxels * scale[:, None], self.centred_angst, size, self.centre_voxels * scale[:, None])

    def as_voxels(self) -> FloatArray:
        """(n, 3) from the first voxel's centre; rows of ``nan`` where the tomogram's centre or voxel size is needed and unknown."""
        if self.voxels is not None:
            return self.voxels
        assert self.centred_angst is not None
        return self.centred_angst / self.voxel_size_angst[:, None] + self.centre_voxels

    def as_centred_angst(self) -> FloatArray:
        """(n, 3) from the tomogram's centre; rows of ``nan`` where the tomogram's centre or voxel size is needed and unknown."""
        if self.centred_angst is not None:
            return self.centred_angst
        assert self.voxels is not None
        return (self.voxels - self.centre_voxels) * self.voxel_size_angst[:, None]


@dataclass(frozen=True, slots=True)
class TiltStacks:
    """What a list says of particles that are stacks of 2-D images, one image a tilt: `ParticleSet.volume_paths` then names the stacks.

    Attributes
    ----------
    visible_frames : tuple of ((n_tilts,) bool) or None
        Tilts of the tomogram that the stack holds, for each particle, in the tomogram's order; None where the list does not say.
    tomograms_path : Path or None
        The file with the tomograms' projections; None where it is not known.
    """

    visible_frames: tuple[NDArray[np.bool_], ...] | None
    tomograms_path: Path | None

    def take(self, index: IntArray | Sequence[int]) -> TiltStacks:
        """Those of the particles at `index`, in that order."""
        frames = self.visible_frames
        return TiltStacks(None if frames is None else tuple(frames[int(i)] for i in np.asarray(index)), self.tomograms_path)


@dataclass(frozen=True, slots=True)
class BoxesInTomograms:
    """Particles that are cut from tomograms as they are read, and the list that places them.

    Attributes
    ----------
    boxes : tuple of TomogramBox
    offsets_angst : (n, 3) float64
        Where the boxes' centre voxels lie from the list's coordinates.
    listed : ParticleSet
        As the list has them: with shifts from its coordinates, and its pixel size, which may be another or unknown.
    """

    boxes: tuple[TomogramBox, ...]
    offsets_angst: FloatArray
    listed: ParticleSet

    def take(self, index: IntArray | Sequence[int]) -> BoxesInTomograms:
        """Those of the particles at `index`, in that order."""
        index = np.asarray(index, dtype=np.intp)
        return BoxesInTomograms(tuple(self.boxes[i] for i in index), self.offsets_angst[index], self.listed.take(index))


@dataclass(frozen=True, slots=True)
class ParticleSet:
    """A particle list, read and understood. Immutable; `dataclasses.replace` or the methods make changed copies.

    Attributes
    ----------
    names : tuple of str
        Particle volumes as the list names them, kept byte for byte.
    volume_paths : sequence of Path
        Where those volumes (or stacks of tilt images) were found.
    weight_paths : sequence of (Path, tuple of TiltRange, TiltGeometry or None)
        Wedge, CTF or CTF^2 volume of each particle (``rlnCtfImage``), or its tilts where the list gives a wedge by angles; for a stack of
        tilt images how it makes a volume and CTF^2 weights; None when the list has none of them. A tuple where any is no path.
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
    noise_groups : (n,) int32 or None
        Which noise model of its half each particle has; None: there is one.
    source : object
        The document the list came from, with every column, block and digit, so that it can be written back. It has `take`, may have
        `in_volumes`, the name of its format as `format_key`, and ``extras()``, what only that format can hold.
    coordinates : Coordinates or None
        Places in the tomograms.
    classes : (n,) int32 or None
        As the list has them.
    scores : (n,) float64 or None
        Of the program that wrote the list; higher is better, ``nan`` where there is none.
    volume_axes : (n, 3, 3) float64 or None
        Where volumes were cut along axes of their own (RELION's pseudo-subtomograms): the rotation from the volume's axes to the
        tomogram's. None: the volumes stand as the tomograms do. `poses` are about the tomogram's axes until `in_volumes` is called.
    stacks : TiltStacks or None
        Where particles are stacks of 2-D images and not volumes.
    pixel_sizes_angst : (n,) float64 or None
        Of each particle, where optics groups differ (only lists are handled so); `pixel_size_angst` is then that of the first.
    cut_from : BoxesInTomograms or None
        Where particles are boxes of tomograms and no volumes of their own: `volume_paths` then says nothing, and `poses` are about the boxes'
        centres.
    """

    names: tuple[str, ...]
    volume_paths: Sequence[Path]
    weight_paths: Sequence[Weight | None]
    poses: Poses
    half: NDArray[np.int8]
    tomograms: tuple[str, ...]
    groups: NDArray[np.int32]
    pixel_size_angst: float
    pixel_size_source: str
    box_size: int
    premultiplied: bool = False
    noise_groups: NDArray[np.int32] | None = None
    source: Any = field(default=None, repr=False, compare=False)
    coordinates: Coordinates | None = None
    classes: NDArray[np.int32] | None = None
    scores: FloatArray | None = None
    volume_axes: FloatArray | None = None
    stacks: TiltStacks | None = None
    pixel_sizes_angst: FloatArray | None = None
    cut_from: BoxesInTomograms | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def voxels_from(self) -> Sequence[Source]:
        """Where each particle's voxels are."""
        return self.volume_paths if self.cut_from is None else self.cut_from.boxes

    def as_listed(self) -> ParticleSet:
        """The same particles as a list has them: of those that are cut from tomograms, shifts count from the list's own coordinates."""
        if self.cut_from is None:
            return self
        listed = self.cut_from.listed
        known = bool(np.isfinite(listed.pixel_size_angst))
        return replace(
            listed,
            poses=Poses(self.poses.rotations, self.poses.shifts_angst + self.cut_from.offsets_angst),
            half=self.half,
            pixel_size_angst=listed.pixel_size_angst if known else self.pixel_size_angst,
        )

    @property
    def wedges(self) -> dict[tuple[TiltRange, ...], list[int]]:
        """Wedges that the list gives by tilts, and the rows of each; empty where it names volumes only."""
        rows: dict[tuple[TiltRange, ...], list[int]] = {}
        if isinstance(self.weight_paths, tuple):  # other sequences make a path when it is asked for, and hold nothing else
            for row, weight in enumerate(self.weight_paths):
                if isinstance(weight, tuple):
                    rows.setdefault(weight, []).append(row)
        return rows

    @property
    def tilt_ranges_deg(self) -> FloatArray | None:
        """(n, 2) lowest and highest tilt about y of particles whose list gives a wedge by such angles, ``nan`` for others; None without any."""
        ranges = np.full((len(self), 2), np.nan)
        for wedge, rows in self.wedges.items():
            if len(wedge) == 1 and wedge[0].tilt_axis == "y" and wedge[0].turn is None:
                low, high = wedge[0].tilt_min_deg, wedge[0].tilt_max_deg
                ranges[rows] = (-high, -low) if wedge[0].flip else (low, high)
        return None if np.isnan(ranges).all() else ranges

    def shifts_voxels(self) -> FloatArray:
        """(n, 3) shifts in voxels of the particle volumes."""
        sizes = np.full(len(self), self.pixel_size_angst) if self.pixel_sizes_angst is None else self.pixel_sizes_angst
        return self.poses.shifts_angst / sizes[:, None]

    def with_poses(self, poses: Poses) -> ParticleSet:
        """The same particles at other poses."""
        return replace(self, poses=poses)

    def with_half(self, half: IntArray) -> ParticleSet:
        """The same particles with other half-sets."""
        return replace(self, half=np.asarray(half, dtype=np.int8))

    def in_volumes(self) -> ParticleSet:
        """The same particles, poses about the axes of their volumes: what a search and an average compare volumes with.

        Coordinates are of the tomogram's axes and do not go along where volumes are turned.
        """
        if self.volume_axes is None:
            return self
        source = self.source.in_volumes(self.volume_axes) if self.source is not None else None
        return replace(self, poses=turned_back(self.poses, self.volume_axes), volume_axes=None, source=source, coordinates=None)

    def positions_voxels(self) -> FloatArray:
        """(n, 3) places of the particles themselves, centre + shift, in voxels of `coordinates`; ``nan`` where it takes what nobody knows."""
        if self.coordinates is None:
            return np.full((len(self), 3), np.nan)
        shifts = self.poses.shifts_angst
        # a shift of zero needs no voxel size
        steps = np.divide(shifts, self.coordinates.voxel_size_angst[:, None], out=np.zeros_like(shifts), where=shifts != 0)
        return self.coordinates.as_voxels() + steps

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
            noise_groups=None if self.noise_groups is None else self.noise_groups[index],
            source=source,
            coordinates=None if self.coordinates is None else self.coordinates.take(index),
            classes=None if self.classes is None else self.classes[index],
            scores=None if self.scores is None else self.scores[index],
            volume_axes=None if self.volume_axes is None else self.volume_axes[index],
            stacks=None if self.stacks is None else self.stacks.take(index),
            pixel_sizes_angst=None if self.pixel_sizes_angst is None else self.pixel_sizes_angst[index],
            cut_from=None if self.cut_from is None else self.cut_from.take(index),
        )


def turned_back(poses: Poses, axes: FloatArray) -> Poses:
    """Poses about the axes of `axes` (n, 3, 3), from poses about those that `axes` leads to: ``axes^T R`` and ``axes^T s``."""
    back = np.swapaxes(axes, 1, 2)
    return Poses(back @ poses.rotations, np.einsum("nij,nj->ni", back, poses.shifts_angst))


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
