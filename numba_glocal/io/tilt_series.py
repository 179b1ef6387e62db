"""Tilt series of RELION 4, RELION 5 and WarpTools tomograms files (docs/conventions.md, 10)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from ..errors import InputError, ListError
from ..values import FloatArray, TiltGeometry
from .paths import VolumeFinder
from .star import StarBlock, StarDocument, read_star, write_star

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
    tomogram_size_voxels: FloatArray = field(default_factory=lambda: np.full(3, np.nan))
    hand: float = 1.0
    voltage_kv: float = float("nan")
    spherical_aberration_mm: float = float("nan")
    amplitude_contrast: float = float("nan")

    def __len__(self) -> int:
        return len(self.matrices)

    def geometry(
        self,
        chosen: NDArray[np.intp],
        images: NDArray[np.intp],
        pixel_size_angst: float,
        *,
        multiplied: bool = True,
        centred_angst: FloatArray | None = None,
        hand: float | None = None,
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
        hand : float, optional
            In place of the series' own.
        """
        if self.defocus_angst is None:
            raise ListError(f"tilt series {self.name}: no column _rlnDefocusU; expected the defocus of each image")
        defocus = self.defocus_angst[chosen].copy()
        if centred_angst is not None:
            defocus[:, :2] += (self.hand if hand is None else hand) * (self.matrices[chosen, 2] @ np.asarray(centred_angst, np.float64))[:, None]
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


def write_optimisation_set(path: Path, particles_path: Path, tomograms_path: Path) -> None:
    """A set that names a list of stacks and its tomograms file: relative to the current folder (the project's) where they are inside it."""

    def named(file: Path) -> str:
        absolute = Path(os.path.abspath(file))
        return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)

    general = StarBlock.from_pairs("general", {"rlnTomoSubTomosAre2DStacks": "1"})
    files = {"rlnTomoParticlesFile": named(particles_path), "rlnTomoTomogramsFile": named(tomograms_path)}
    write_star(path, StarDocument([StarBlock.from_pairs("", files), general], str(path)))
