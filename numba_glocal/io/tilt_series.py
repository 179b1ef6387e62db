"""Tilt series of RELION 4, RELION 5 and WarpTools tomograms files (docs/conventions.md, 10)."""

from __future__ import annotations

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
from .star import StarBlock, StarDocument, read_star

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
        ctf: bool = True,
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
        ctf : bool
            False where the CTF does not matter: then no defocus is needed.
        centred_angst : (3,), optional
            The particle's place from the tomogram's centre: its defocus then differs from the image's by its height along the beam.
        hand : float, optional
            In place of the series' own.
        """
        if self.defocus_angst is None and ctf:
            raise ListError(f"tilt series {self.name}: no column _rlnDefocusU; expected the defocus of each image")
        defocus = np.zeros((len(chosen), 3)) if self.defocus_angst is None else self.defocus_angst[chosen].copy()
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


def tilt_matrices(tilts_deg: FloatArray, tilt_axis: str = "y") -> FloatArray:
    """Rows of each image's x axis, y axis and beam, (t, 3, 3), for tilts about an axis of the tomogram (docs/conventions.md, 4)."""
    t = np.deg2rad(np.asarray(tilts_deg, np.float64))
    c, s, nothing, one = np.cos(t), np.sin(t), np.zeros_like(t), np.ones_like(t)
    if tilt_axis == "y":
        rows = [[c, nothing, -s], [nothing, one, nothing], [s, nothing, c]]
    else:
        rows = [[one, nothing, nothing], [nothing, c, s], [nothing, -s, c]]
    return np.moveaxis(np.array(rows), 2, 0)


class TiltFiles:
    """Tilt series by the tomograms' names, from what a user has: a tomograms file, a file for one series, or a folder with a file for each.

    Files of one series are plain angles (``.tlt``, ``.rawtlt``: a number a line), Warp's ``.tomostar`` (tilts and exposure), or a STAR table
    of RELION's tilt images. Plain angles and ``.tomostar`` are turns about `tilt_axis` of the tomogram.

    Parameters
    ----------
    path : path
    tilt_axis : {"y", "x"}
    flip : bool
        Take plain angles with the other sign. Projections are never flipped.

    Attributes
    ----------
    notes : list of str
        The range of plain angles as read and as used, a line for each file.
    """

    suffixes = (".tlt", ".rawtlt", ".tomostar", ".star")

    def __init__(self, path: str | Path, tilt_axis: str = "y", flip: bool = False) -> None:
        self.path, self._axis, self._flip = Path(path), tilt_axis, flip
        self.notes: list[str] = []
        self._known: dict[Path, TiltSeries | Tomograms] = {}
        if not self.path.exists():
            raise InputError(f"{path}: no such file or folder of tilts")

    def __getitem__(self, name: str) -> TiltSeries:
        """The tilt series of a tomogram.

        Raises
        ------
        InputError, ListError
            No file for it, with every path tried; a file that is not understood.
        """
        path = self.path
        if path.is_dir():
            stem = _bare(Path(name).name)
            stems = dict.fromkeys((stem, Path(stem).stem))
            tried = [path / f"{stem}{suffix}" for stem in stems for suffix in self.suffixes]
            found = next((file for file in tried if file.is_file()), None)
            if found is None:
                raise InputError(f"no tilts for tomogram {name}; tried {', '.join(map(str, tried))}")
            path = found
        if path not in self._known:
            self._known[path] = self._open(path)
        known = self._known[path]
        return known[name] if isinstance(known, Tomograms) else known

    def _open(self, path: Path) -> TiltSeries | Tomograms:
        if path.suffix.lower() not in (".star", _SUFFIX):
            return self._plain(path, _angles(path), None)
        document = read_star(path)
        for block in document.blocks:
            if "wrpAngleTilt" in block.labels:
                exposure = block.floats("wrpDose") if "wrpDose" in block.labels else None
                return self._plain(path, block.floats("wrpAngleTilt"), exposure)
        if any("rlnTomoName" in block.labels for block in document.blocks):
            return Tomograms(path, document)
        block = next((b for b in document.blocks if b.has_loop), None)  # type: ignore[assignment]
        if block is None:
            raise ListError(f"{path}: expected a table of tilt images, found none")
        return TiltSeries(_bare(path.stem), *_images(block))

    def _plain(self, path: Path, tilts_deg: FloatArray, exposure: FloatArray | None) -> TiltSeries:
        steep = np.abs(tilts_deg) >= 90
        if steep.any() or not len(tilts_deg):
            what = f"a tilt of {tilts_deg[steep][0]:g} degrees, expected less than 90" if steep.any() else "no tilts"
            raise ListError(f"{path}: {what}")
        used = -tilts_deg if self._flip else tilts_deg
        self.notes.append(
            f"{path}: {len(used)} tilts from {tilts_deg.min():g} to {tilts_deg.max():g} degrees as read, {used.min():g} to {used.max():g} as used"
            f" about {self._axis}{' (--flip-tilt)' if self._flip else ''}"
        )
        n = len(used)
        return TiltSeries(
            _bare(path.stem), tilt_matrices(used, self._axis), None, np.zeros(n), np.ones(n), np.zeros(n) if exposure is None else exposure
        )


def _angles(path: Path) -> FloatArray:
    """The first number of each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a list of angles ({getattr(error, 'strerror', None) or 'not text'})") from None
    angles = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            angles.append(float(words[0]))
        except ValueError:
            raise ListError(f"{path}:{number}: '{words[0]}' is no angle, expected a number of degrees") from None
    if not np.isfinite(angles).all():
        raise ListError(f"{path}: angles that are not finite, expected degrees")
    return np.array(angles)


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
