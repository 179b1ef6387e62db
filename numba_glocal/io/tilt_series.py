"""Tilt series of RELION 4, RELION 5 and WarpTools tomograms files, of .tlt files, and stacks of tilt images as particles (docs/conventions.md, 10)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from ..errors import InputError, ListError, VolumeError
from ..values import FloatArray, TiltGeometry
from .paths import VolumeFinder
from .star import StarBlock, StarDocument, read_star
from .volumes import read_header

_PROJECTION = ("rlnTomoProjX", "rlnTomoProjY", "rlnTomoProjZ")
_TILTS = ("rlnTomoXTilt", "rlnTomoYTilt", "rlnTomoZRot")
_SUFFIX = ".tomostar"


@dataclass(frozen=True, slots=True, eq=False)
class TiltSeries:
    """One tilt series, its images in the order of its file.

    Attributes
    ----------
    name : str
    matrices : (t, 3, 3) float64
        Rotations from the tomogram's frame to each image's: rows are the image's x and y axis and the beam, as ``(x, y, z)``.
    defocus_angst : (t, 3) float64 or None
        U, V, and the angle of U in degrees; None where the file has none.
    phase_shift_deg, scale, exposure : (t,) float64
        Of the CTF, and electrons per square Angstrom before each image.
    pixel_size_angst : float
        Of the tilt images, unbinned; nan where the file does not say.
    tomogram_size_voxels : (3,) float64
        ``(x, y, z)`` unbinned; nan where the file does not say.
    hand : float
        ``rlnTomoHand``: whether defocus grows (1) or falls (-1) along the beam axis of `matrices`.
    voltage_kv, spherical_aberration_mm, amplitude_contrast : float
        nan where the file does not say.
    """

    name: str
    matrices: FloatArray
    defocus_angst: FloatArray | None
    phase_shift_deg: FloatArray
    scale: FloatArray
    exposure: FloatArray
    pixel_size_angst: float = float("nan")
    tomogram_size_voxels: FloatArray = np.full(3, np.nan)
    hand: float = 1.0
    voltage_kv: float = float("nan")
    spherical_aberration_mm: float = float("nan")
    amplitude_contrast: float = float("nan")

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def tilts_deg(self) -> FloatArray:
        """Tilt angles, with the sign of docs/conventions.md: about the axis that the images turn about."""
        return np.rad2deg(np.arctan2(np.hypot(self.matrices[:, 2, 0], self.matrices[:, 2, 1]) * self._sides(), self.matrices[:, 2, 2]))

    def _sides(self) -> FloatArray:
        """On which side of the middle image each beam lies, as -1 or 1."""
        beams = self.matrices[:, 2]
        spread = beams - beams.mean(0)
        along = np.linalg.svd(spread, full_matrices=False)[2][0]
        side = beams @ along
        # the beam's x (or y) component is -sin t for a turn by t about y: rows of a rotation are the inverse turned
        lead = int(np.argmax(np.abs(along[:2])))
        return np.where(side * np.sign(along[lead]) > 0, -1.0, 1.0)

    def geometry(
        self,
        chosen: NDArray[np.intp],
        images: NDArray[np.intp],
        pixel_size_angst: float,
        *,
        multiplied: bool = True,
        centred_angst: FloatArray | None = None,
    ) -> TiltGeometry:
        """How some of the series' images make a particle.

        Parameters
        ----------
        chosen : (t,) int
            Images of the series.
        images : (t,) int
            Where they stand in the particle's stack.
        pixel_size_angst : float
            Of the stack.
        multiplied : bool
            Whether the stack's images are multiplied by their CTF.
        centred_angst : (3,), optional
            The particle's place from the tomogram's centre: its defocus then differs from the image's by its height along the beam.
        """
        if self.defocus_angst is None:
            raise ListError(f"tilt series {self.name}: no column _rlnDefocusU; expected the defocus of each image")
        defocus = self.defocus_angst[chosen].copy()
        if centred_angst is not None:
            defocus[:, :2] += self.hand * (self.matrices[chosen, 2] @ np.asarray(centred_angst, np.float64))[:, None]
        return TiltGeometry(
            images,
            self.matrices[chosen, :2].copy(),
            defocus,
            self.phase_shift_deg[chosen],
            self.scale[chosen],
            self.exposure[chosen],
            pixel_size_angst,
            *self.optics(),
            multiplied=multiplied,
        )

    def optics(self) -> tuple[float, float, float]:
        """Voltage (kV), spherical aberration (mm) and amplitude contrast; 300, 2.7 and 0.07 where the file does not say."""
        given = (self.voltage_kv, self.spherical_aberration_mm, self.amplitude_contrast)
        usual = (300.0, 2.7, 0.07)
        return tuple(float(v) if np.isfinite(v) else u for v, u in zip(given, usual, strict=True))  # type: ignore[return-value]


class Tomograms:
    """The tilt series of a tomograms file, read when they are asked for."""

    def __init__(self, path: str | Path, document: StarDocument | None = None, root: str | Path | None = None) -> None:
        self.path = Path(path)
        self.document = read_star(path) if document is None else document
        tables = [b for b in self.document.blocks if b.has_loop and "rlnTomoName" in b.labels]
        table = next((b for b in tables if b.name == "global"), tables[0] if tables else None)
        if table is None:
            found = ", ".join(f"data_{b.name}" for b in self.document.blocks) or "nothing"
            raise ListError(f"{path}: expected a tomograms file (a table data_global with _rlnTomoName), found {found}")
        self.table = table
        self.names = table.texts("rlnTomoName")
        self._rows = {_bare(name): row for row, name in enumerate(self.names)}
        self._finder = VolumeFinder(path, root)
        self._read: dict[int, TiltSeries] = {}

    def __getitem__(self, name: str) -> TiltSeries:
        """The tilt series of a tomogram, with or without ``.tomostar``.

        Raises
        ------
        ListError
            A tomogram that the file does not know.
        """
        row = self._rows.get(_bare(name))
        if row is None:
            raise ListError(f"{self.path}: no tomogram {name}; expected one of {_some(self.names)}")
        if row not in self._read:
            self._read[row] = self._series(row)
        return self._read[row]

    def _series(self, row: int) -> TiltSeries:
        table, name = self.table, self.names[row]
        block: StarBlock | None = None
        if "rlnTomoTiltSeriesStarFile" in table.labels:
            text = table.texts("rlnTomoTiltSeriesStarFile")[row]
            found = self._finder.find(text)
            if found is None:
                raise InputError(f"{table.where(row)}: {text} not found; tried {', '.join(self._finder.candidates(text))}")
            block = next((b for b in read_star(found).blocks if b.has_loop), None)
        else:
            block = next((b for b in self.document.blocks if b.has_loop and b is not table and _bare(b.name) == _bare(name)), None)
        if block is None or not block.n_rows:
            raise ListError(f"{table.where(row)}: tomogram {name} has no table of its tilt images (data_{name})")

        def one(label: str) -> float:
            return float(table.floats(label)[row]) if label in table.labels else float("nan")

        return TiltSeries(
            name,
            *_images(block),
            pixel_size_angst=one("rlnTomoTiltSeriesPixelSize"),
            tomogram_size_voxels=np.array([one(f"rlnTomoSize{axis}") for axis in "XYZ"]),
            hand=one("rlnTomoHand") if "rlnTomoHand" in table.labels else 1.0,
            voltage_kv=one("rlnVoltage"),
            spherical_aberration_mm=one("rlnSphericalAberration"),
            amplitude_contrast=one("rlnAmplitudeContrast"),
        )


def _bare(name: str) -> str:
    return name.removesuffix(_SUFFIX)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" ... ({len(names)})" if len(names) > 5 else "")


def _images(block: StarBlock) -> tuple[FloatArray, FloatArray | None, FloatArray, FloatArray, FloatArray]:
    """Matrices, defocus, phase shift, scale and exposure of the images that a table lists."""
    n = block.n_rows

    def column(label: str, otherwise: FloatArray) -> FloatArray:
        return block.floats(label) if label in block.labels else otherwise

    if all(label in block.labels for label in _PROJECTION):
        matrices = np.stack([_vectors(block, label) for label in _PROJECTION], axis=1)[:, :, :3]
    elif _TILTS[1] in block.labels:
        x, y, z = (column(label, np.zeros(n)) for label in _TILTS)
        # the specimen is turned about x, then y, then z
        matrices = Rotation.from_euler("xyz", np.column_stack([x, y, z]), degrees=True).as_matrix()
    else:
        raise ListError(f"{block.where()}: expected the columns {', '.join('_' + b for b in _PROJECTION)} or {', '.join('_' + b for b in _TILTS)}")
    skew = np.abs(matrices @ np.swapaxes(matrices, 1, 2) - np.eye(3)).max(axis=(1, 2))
    if skew.max() > 0.02:
        raise ListError(f"{block.where(int(skew.argmax()))}: the projection matrix is no rotation (off by {skew.max():.2g})")
    defocus = None
    if "rlnDefocusU" in block.labels:
        u = block.floats("rlnDefocusU")
        defocus = np.column_stack([u, column("rlnDefocusV", u), column("rlnDefocusAngle", np.zeros(n))])
    if "rlnMicrographPreExposure" not in block.labels:
        warnings.warn(f"{block.where()}: no column _rlnMicrographPreExposure; no exposure filter is applied", stacklevel=5)
    return (
        matrices,
        defocus,
        column("rlnPhaseShift", np.zeros(n)),
        column("rlnCtfScalefactor", np.ones(n)),
        column("rlnMicrographPreExposure", np.zeros(n)),
    )


def _vectors(block: StarBlock, label: str) -> FloatArray:
    """A column of texts such as ``[1,0,0,0]``, (rows, 4)."""
    rows = []
    for row, text in enumerate(block.texts(label)):
        try:
            numbers = [float(part) for part in text.strip("[]").split(",")]
        except ValueError:
            numbers = []
        if len(numbers) != 4 or not np.isfinite(numbers).all():
            raise ListError(f"{block.where(row)}: _{label} is '{text}', expected four numbers such as [1,0,0,0]")
        rows.append(numbers)
    return np.array(rows)


def stack_geometries(
    stacks: Sequence[Path],
    tomograms: Sequence[str],
    visible: Sequence[str] | None,
    series: Tomograms,
    pixel_size_angst: float,
    *,
    multiplied: bool,
    centred_angst: NDArray[Any] | None = None,
) -> tuple[TiltGeometry, ...]:
    """How each particle's stack of tilt images makes a volume.

    Parameters
    ----------
    stacks : sequence of Path
        Each particle's stack.
    tomograms : sequence of str
        Each particle's tomogram, a name in `series`.
    visible : sequence of str, optional
        ``rlnTomoVisibleFrames``: ``[1,0,1]``, an entry for each image of the series.
    series : Tomograms
    pixel_size_angst : float
        Of the stacks.
    multiplied : bool
        ``rlnCtfDataAreCtfPremultiplied``.
    centred_angst : (n, 3), optional
        Places from the tomograms' centres, for the defocus at each particle's height.

    Returns
    -------
    tuple of TiltGeometry
        Particles with the same images at the same defocus share one.

    Raises
    ------
    ListError, VolumeError
        Names the particle or file: an unknown tomogram, another number of images than the series has, no image at all.
    """
    shared: dict[tuple[Any, ...], TiltGeometry] = {}
    result = []
    for row, (stack, tomogram) in enumerate(zip(stacks, tomograms, strict=True)):
        found = series[tomogram]
        flags = np.ones(len(found), bool) if visible is None else _flags(visible[row], len(found), stack, found.name)
        count = read_header(stack).shape[0]
        place = None if centred_angst is None else tuple(float(v) for v in centred_angst[row])
        key = (found.name, flags.tobytes(), count, place)
        if key not in shared:
            chosen = np.flatnonzero(flags)
            # RELION leaves images that are not visible out of the stack, Warp writes them as zeros
            if count == len(chosen):
                images = np.arange(count)
            elif count == len(found):
                images = chosen
            else:
                raise VolumeError(f"{stack}: {count} images, expected {len(chosen)} (the visible ones) or {len(found)} (all of {found.name})")
            if not len(chosen):
                raise ListError(f"{stack}: none of the {len(found)} images of {found.name} is visible")
            # a scale of 0 marks an image that was left out
            kept = found.scale[chosen] != 0
            shared[key] = found.geometry(chosen[kept], images[kept], pixel_size_angst, multiplied=multiplied, centred_angst=centred_angst[row] if place else None)  # type: ignore[index]
        result.append(shared[key])
    return tuple(result)


def _flags(text: str, count: int, stack: Path, series: str) -> NDArray[np.bool_]:
    parts = text.strip("[]").split(",")
    if any(part.strip() not in ("0", "1") for part in parts) or len(parts) != count:
        raise ListError(f"{stack}: _rlnTomoVisibleFrames is '{text[:60]}', expected {count} flags 0 or 1 for the images of {series}")
    return np.array([part.strip() == "1" for part in parts])


def survey_stacks(paths: Sequence[Path]) -> tuple[int, float]:
    """Edge of the images and pixel size that the headers of many stacks agree on; as `volumes.survey` for volumes."""
    edges: dict[int, Path] = {}
    pixel_sizes = set()
    first_error: VolumeError | None = None
    for path in dict.fromkeys(paths):
        try:
            header = read_header(path)
        except VolumeError as error:
            first_error = first_error or error
            continue
        _, ny, nx = header.shape
        if ny != nx:
            raise VolumeError(f"{path}: images of {nx} x {ny} are not square")
        edges.setdefault(nx, path)
        if np.isfinite(header.pixel_size_angst):
            pixel_sizes.add(header.pixel_size_angst)
    if len(edges) > 1:
        raise VolumeError(f"the stacks have different boxes: {', '.join(f'{n} (such as {path})' for n, path in sorted(edges.items())[:4])}")
    if not edges:
        raise first_error or VolumeError("there are no stacks")
    agreed = bool(pixel_sizes) and max(pixel_sizes) <= 1.001 * min(pixel_sizes)
    return next(iter(edges)), (min(pixel_sizes) if agreed else float("nan"))
