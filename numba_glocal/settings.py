"""Every option of a run as one validated value, and its TOML file."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SettingsError
from .values import CTF_KINDS, EDGES, NOISE_GROUPS, SCORES, VOLUME_AXES

SPLITS = ("file", "particle", "tomogram")
GPU_PRECISIONS = ("auto", "int8", "half", "single")
ASSIGNMENTS = ("hard", "soft")
MOST_CLASSES = 50
MOST_ANGLE_SHELLS = 20
"""33 thousand rotations in the first search; more is a mistake, not a local search."""
MOST_PROCS_PER_GPU = 32
_LARGEST_FOLD = 99


def symmetry_name(name: str, option: str = "--symmetry") -> str:
    """A point group's name in capitals.

    Raises
    ------
    SettingsError
        There is no such group.
    """
    upper = name.strip().upper()
    if upper in ("T", "O", "I", "I1", "I2", "I3", "I4"):
        return upper
    found = re.fullmatch(r"([CD])([1-9][0-9]*)", upper, re.ASCII)
    if found is None or int(found.group(2)) > _LARGEST_FOLD:
        raise SettingsError(f"{option}: expected C1, Cn or Dn (n up to {_LARGEST_FOLD}), T, O, I or I1 to I4; found {name!r}")
    return upper


@dataclass(frozen=True, slots=True)
class AlignSettings:
    """Options of `align`; lengths in Angstrom, angles in degrees, None for "decide".

    Attributes
    ----------
    particles : str
        The particle list.
    output : str
        The run folder.
    reference : str or None
        Start map; None: the average of the given poses.
    further_references : tuple of str
        Start maps of the second class and those after it; then each class has its own.
    classes : int
        How many; follows from the start maps where there are several. With one start map or none classes are drawn at random.
    class_assignment : str
        "hard": a particle belongs to its best class. "soft": to each class by its probability.
    initial_lowpass_angst : float
        Low-pass of the start map, so that the halves start unbiased.
    mask : str or None
        Mask file; None: a sphere of the particle's diameter.
    particle_diameter_angst : float or None
        None: from the mask, else 0.8 of the box.
    soft_edge_voxels : float
        Width of the spherical mask's edge.
    pixel_size_angst : float or None
        Overrides list and headers.
    binning : float
        Fourier cropping, whole or fractional.
    angle_shells, angle_increment_deg
        Local search of the first iteration; of the second one when the first is global.
    global_search : bool
        The first iteration looks at all orientations; those of the list do not matter.
    angle_list : str or None
        File of orientations that such a search begins with, in place of an even cover.
    shift_range_angst : float or None
        Shifts tried in the first iteration; None: 0.15 of the diameter.
    max_shift_angst : float or None
        Hard limit of the distance from the list's shifts.
    max_angle_deg : float or None
        Hard limit of the turn from the list's orientations, or from the nearest of their symmetric copies.
    angle_prior_deg, shift_prior_angst : float or None
        Standard deviations, along one axis, of Gaussian priors about the list's poses.
    symmetry : str
        Point group, about RELION's axes.
    relax_symmetry : str or None
        Point group whose copies of each pose are searched too, while nothing is averaged by it.
    adaptive : bool
        Increment and shift range follow the poses' changes; else they stay.
    score : str
        flcf, ncc or ml.
    noise_groups : str
        What particles of one noise model have in common: "tomogram", "optics", "none" (one model a half), or "auto".
    highpass_angst, lowpass_angst : float or None
        Limits of the band.
    fsc_criterion : float
    tilt_range_deg : (float, float) or None
    tilt_axis : str
    flip_tilt : bool
        Tilts have the other sign, those of `tilt_range_deg` and those of the list.
    particle_names : str or None
        How files are named after their numbers, for lists that only number particles.
    wedge_list : str or None
        Tilts of the tomograms, for motive lists.
    volume_axes : str or None
        How volumes of a list with subtomogram angles stand: "tomogram" or "subtomogram"; None: what the list says of how they were cut.
    tomograms : str or None
        Folder of tomograms that particles are cut from as they are read, or the only one; None: particles are files. The following options
        are about that.
    box_size : int or None
        Edge of the boxes in voxels of the tomograms.
    tilts : str or None
        Tilts of the tomograms, for weights.
    ctf : str
        What tomograms hold of the CTF: none, plain, flipped or multiplied.
    edge : str
        What becomes of a box that reaches beyond its tomogram: skip or pad.
    coordinate_pixel_size_angst : float or None
        Voxels that the list's coordinates count; None: what the list says, else the tomogram's own.
    split : str
        Half-sets: "file", "particle" or "tomogram".
    root : str or None
        Folder that the list's names start from; it goes before the list's own, its parents and the current one.
    mirror : bool
        The particles have the other hand: start map and mask are mirrored along z.
    check_hand : bool
        Before the first iteration, say whether particles match the start map or its mirror image better.
    keep_best_percent : float or None
        Share of each half, by score, that averages are made of; the others are aligned and listed all the same.
    iterations : int
        At most, with `until_converged`.
    until_converged : bool
        Stops before where poses and resolution have settled (docs/scoring.md, 7).
    seed : int
    invert_contrast, normalise : bool
    subset : int or None
        Particles of each half.
    max_bad : int or None
        Unusable particles tolerated; None: the larger of 1 % and 3.
    gpus, procs_per_gpu, cpu_procs
        Workers.
    cache_gib : float
        Budget of prepared particles of each CPU worker.
    gpu_memory_gib : float or None
        Device memory of each GPU that may be used; None: what is free.
    gpu_precision : str or None
        Of searches on GPUs: "half" lets them use the tensor cores, "int8" whole numbers of 8 bits there, "single" neither; "auto" (None) is "int8"
        on GPUs that have it, else "half".
    """

    particles: str
    output: str
    reference: str | None = None
    further_references: tuple[str, ...] = ()
    classes: int = 1
    class_assignment: str = "hard"
    initial_lowpass_angst: float = 50.0
    mask: str | None = None
    particle_diameter_angst: float | None = None
    soft_edge_voxels: float = 5.0
    pixel_size_angst: float | None = None
    binning: float = 1.0
    angle_shells: int = 3
    angle_increment_deg: float = 4.5
    global_search: bool = False
    angle_list: str | None = None
    shift_range_angst: float | None = None
    max_shift_angst: float | None = None
    max_angle_deg: float | None = None
    angle_prior_deg: float | None = None
    shift_prior_angst: float | None = None
    symmetry: str = "C1"
    relax_symmetry: str | None = None
    adaptive: bool = True
    score: str = "ml"
    noise_groups: str = "auto"
    highpass_angst: float | None = None
    lowpass_angst: float | None = None
    fsc_criterion: float = 0.143
    tilt_range_deg: tuple[float, float] | None = None
    tilt_axis: str = "y"
    flip_tilt: bool = False
    particle_names: str | None = None
    wedge_list: str | None = None
    volume_axes: str | None = None
    tomograms: str | None = None
    box_size: int | None = None
    tilts: str | None = None
    ctf: str = "none"
    edge: str = "skip"
    coordinate_pixel_size_angst: float | None = None
    split: str = "file"
    root: str | None = None
    mirror: bool = False
    check_hand: bool = False
    keep_best_percent: float | None = None
    iterations: int = 4
    until_converged: bool = False
    seed: int = 0
    invert_contrast: bool = False
    normalise: bool = True
    subset: int | None = None
    max_bad: int | None = None
    gpus: str | None = None
    procs_per_gpu: str = "auto"
    cpu_procs: int | None = None
    cache_gib: float = 2.0
    gpu_memory_gib: float | None = None
    gpu_precision: str | None = None

    def __post_init__(self) -> None:
        """Refuses values that mean nothing, by their option's name."""
        object.__setattr__(self, "further_references", tuple(self.further_references))
        for name in (
            *("particles", "output", "reference", "further_references", "mask", "angle_list", "particle_names", "wedge_list", "root"),
            *("tomograms", "tilts"),
        ):
            try:
                "".join(getattr(self, name) or "").encode()
            except UnicodeEncodeError:
                raise SettingsError(f"{name}: {getattr(self, name)!r} is not UTF-8; expected another name, or a UTF-8 locale") from None
        self._check_classes()
        self._check_tomograms()
        object.__setattr__(self, "symmetry", symmetry_name(self.symmetry))
        _one_of("--score", self.score, SCORES)
        _one_of("--split", self.split, SPLITS)
        _one_of("--noise-groups", self.noise_groups, NOISE_GROUPS)
        _one_of("--tilt-axis", self.tilt_axis, ("x", "y"))
        for option, value in (
            ("--initial-lowpass", self.initial_lowpass_angst),
            ("--particle-diameter", self.particle_diameter_angst),
            ("--pixel-size", self.pixel_size_angst),
            ("--coordinate-pixel-size", self.coordinate_pixel_size_angst),
            ("--shift-range", self.shift_range_angst),
            ("--max-shift", self.max_shift_angst),
            ("--max-angle", self.max_angle_deg),
            ("--angle-prior-deg", self.angle_prior_deg),
            ("--shift-prior-angst", self.shift_prior_angst),
            ("--highpass", self.highpass_angst),
            ("--lowpass", self.lowpass_angst),
            ("--angle-increment", self.angle_increment_deg),
            ("--cache-gib", self.cache_gib),
            ("--gpu-memory", self.gpu_memory_gib),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise SettingsError(f"{option}: expected a positive number, found {value}")
        if not (math.isfinite(self.binning) and self.binning >= 1):
            raise SettingsError(f"--binning: expected 1 or more, found {self.binning}")
        if not 0 < self.fsc_criterion < 1:
            raise SettingsError(f"--fsc-criterion: expected between 0 and 1, found {self.fsc_criterion}")
        if not 0 <= self.angle_shells <= MOST_ANGLE_SHELLS:
            raise SettingsError(f"--angle-shells: expected 0 to {MOST_ANGLE_SHELLS}, found {self.angle_shells}")
        if self.angle_shells * self.angle_increment_deg >= 180:
            raise SettingsError(
                f"--angle-shells {self.angle_shells} x --angle-increment {self.angle_increment_deg:g} reaches 180 degrees; expected a local search"
            )
        if self.angle_list is not None:
            object.__setattr__(self, "global_search", True)
        self._check_search()
        if self.global_search and self.reference is None:
            raise SettingsError(
                "--global: orientations are taken as unknown, so there is no average to start from; expected a start map (--reference),"
                " such as the average.mrc of `numba-glocal average` where the list's poses are good for one"
            )
        if self.check_hand and self.reference is None:
            raise SettingsError("--check-hand: compares particles with a start map and its mirror image; expected one (--reference)")
        if self.mirror and self.reference is None and self.mask is None:
            raise SettingsError("--mirror: mirrors start map and mask; expected one of them (--reference, --mask)")
        if self.keep_best_percent is not None and not 0 < self.keep_best_percent <= 100:
            raise SettingsError(f"--keep-best: expected more than 0 and at most 100 percent, found {self.keep_best_percent:g}")
        if self.iterations < 1:
            raise SettingsError(f"--iterations: expected 1 or more, found {self.iterations}")
        if self.seed < 0:
            raise SettingsError(f"--seed: expected 0 or more, found {self.seed}")
        if not 0 <= self.soft_edge_voxels < math.inf:
            raise SettingsError(f"--soft-edge: expected 0 or more, found {self.soft_edge_voxels}")
        if self.highpass_angst is not None and self.lowpass_angst is not None and self.highpass_angst <= self.lowpass_angst:
            raise SettingsError(f"--highpass {self.highpass_angst:g} A must be coarser than --lowpass {self.lowpass_angst:g} A: nothing is left")
        if self.tilt_range_deg is not None:
            low, high = self.tilt_range_deg
            if not -90 <= low < high <= 90:
                raise SettingsError(f"--tilt-range: expected -90 <= smallest < largest <= 90 degrees, found {low:g} {high:g}")
        if self.cpu_procs is not None and self.cpu_procs < 1:
            raise SettingsError(f"--cpu-procs: expected 1 or more, found {self.cpu_procs}")
        if self.procs_per_gpu != "auto" and not (self.procs_per_gpu.isdecimal() and 1 <= int(self.procs_per_gpu) <= MOST_PROCS_PER_GPU):
            raise SettingsError(f"--procs-per-gpu: expected auto or a number from 1 to {MOST_PROCS_PER_GPU}, found {self.procs_per_gpu!r}")
        if self.subset is not None and self.subset < 2:
            raise SettingsError(f"--subset: expected 2 or more particles of each half, found {self.subset}")
        if self.max_bad is not None and self.max_bad < 0:
            raise SettingsError(f"--max-bad: expected 0 or more, found {self.max_bad}")
        if self.gpu_precision is not None:
            object.__setattr__(self, "gpu_precision", self.gpu_precision.lower())
            _one_of("--gpu-precision", self.gpu_precision, GPU_PRECISIONS)
        if self.gpu_precision == "auto":
            object.__setattr__(self, "gpu_precision", None)

    def _check_classes(self) -> None:
        """Start maps and classes agree; `classes` is their number where there are several maps."""
        _one_of("--class-assignment", self.class_assignment, ASSIGNMENTS)
        if self.further_references:
            given = 1 + len(self.further_references)
            if self.reference is None:
                raise SettingsError("further_references: expected a first start map (reference) before them")
            if self.classes not in (1, given):
                raise SettingsError(f"--classes {self.classes}: {given} start maps are given; expected one --reference a class, or one for all")
            object.__setattr__(self, "classes", given)
            paths = [self.reference, *self.further_references]
            twice = sorted({path for path in paths if paths.count(path) > 1})
            if twice:
                raise SettingsError(f"--reference {twice[0]} is given twice: two classes with one start map stay alike; expected different maps")
        if not 1 <= self.classes <= MOST_CLASSES:
            raise SettingsError(f"--classes: expected 1 to {MOST_CLASSES}, found {self.classes}")
        if self.classes == 1 and self.class_assignment != "hard":
            raise SettingsError(f"--class-assignment {self.class_assignment}: there is one class; expected --classes or several --reference")
        if self.class_assignment == "soft" and self.score != "ml":
            raise SettingsError(f"--class-assignment soft with --score {self.score}: probabilities come from likelihoods; expected --score ml")
        if self.classes > 1 and not self.further_references and self.iterations < 2:
            raise SettingsError("--classes: the first iteration finds poses, the next ones classes; expected --iterations 2 or more")

    @property
    def references(self) -> tuple[str, ...]:
        """Start maps, none to one for each class."""
        return () if self.reference is None else (self.reference, *self.further_references)

    def _check_tomograms(self) -> None:
        """Options of boxes in tomograms belong together."""
        if self.volume_axes is not None:
            _one_of("--volume-axes", self.volume_axes, VOLUME_AXES)
            if self.tomograms is not None:
                raise SettingsError("--volume-axes: particles that are cut from tomograms stand as they do; expected no --tomograms with it")
        _one_of("--ctf", self.ctf, CTF_KINDS)
        _one_of("--edge", self.edge, EDGES)
        if self.tomograms is None:
            idle = {
                "--box": self.box_size is not None,
                "--tilts": self.tilts is not None,
                "--ctf": self.ctf != "none",
                "--edge": self.edge != "skip",
                "--coordinate-pixel-size": self.coordinate_pixel_size_angst is not None,
            }
            for option, given in idle.items():
                if given:
                    raise SettingsError(f"{option}: is about particles that are cut from tomograms; expected --tomograms with it")
            return
        if self.box_size is None:
            raise SettingsError("--tomograms: particles are cut from them; expected their size in voxels of the tomograms (--box)")
        if self.box_size < 8:
            raise SettingsError(f"--box: expected 8 voxels or more, found {self.box_size}")
        if self.tilts is None and self.ctf != "none":
            raise SettingsError(f"--ctf {self.ctf}: needs the defocus of each tilt; expected --tilts with a tomograms file")
        if self.tilts is not None and self.tilt_range_deg is not None:
            raise SettingsError("--tilts and --tilt-range: expected one of them")

    def _check_search(self) -> None:
        """Refuses priors, limits and relaxed groups that contradict the rest."""
        priors = {"--angle-prior-deg": self.angle_prior_deg, "--shift-prior-angst": self.shift_prior_angst}
        for option, value in priors.items():
            if value is not None and self.score != "ml":
                raise SettingsError(
                    f"{option}: a prior is added to log-likelihoods, and --score {self.score} is none; expected --score ml, or a hard limit"
                    " (--max-angle, --max-shift)"
                )
        if self.global_search:
            given = {"--max-angle": self.max_angle_deg, "--angle-prior-deg": self.angle_prior_deg, "--relax-symmetry": self.relax_symmetry}
            for option, wanted in given.items():
                if wanted is not None:
                    how = "--global" if self.angle_list is None else "--angle-list"
                    raise SettingsError(f"{option}: {how} takes orientations as unknown; expected one of them only")
        if self.relax_symmetry is not None:
            object.__setattr__(self, "relax_symmetry", symmetry_name(self.relax_symmetry, "--relax-symmetry"))
            if self.relax_symmetry == "C1":
                raise SettingsError("--relax-symmetry C1: there is nothing to relax; expected another group, or none")
            if self.symmetry != "C1":
                raise SettingsError(f"--relax-symmetry {self.relax_symmetry}: averages are made without it; expected no --symmetry {self.symmetry}")
            if self.reference is None:
                raise SettingsError(
                    f"--relax-symmetry {self.relax_symmetry}: copies of a pose are taken as unknown, so the average of the given poses tells them"
                    " not apart; expected a start map without the symmetry (--reference)"
                )


@dataclass(frozen=True, slots=True)
class AverageSettings:
    """Options of `average`; see `AlignSettings` for those of the same name.

    Attributes
    ----------
    weighting : str
        "noise": weights from fitted noise. "ctf": the classical sums, ``C X`` over ``C^2`` (``X`` over ``C`` for lists flagged as premultiplied).
    premultiplied : bool or None
        Overrides what the list says; only the classical sums ask.
    """

    particles: str
    output: str
    weighting: str = "noise"
    noise_groups: str = "auto"
    mask: str | None = None
    particle_diameter_angst: float | None = None
    soft_edge_voxels: float = 5.0
    pixel_size_angst: float | None = None
    binning: float = 1.0
    symmetry: str = "C1"
    fsc_criterion: float = 0.143
    tilt_range_deg: tuple[float, float] | None = None
    tilt_axis: str = "y"
    flip_tilt: bool = False
    particle_names: str | None = None
    wedge_list: str | None = None
    volume_axes: str | None = None
    tomograms: str | None = None
    box_size: int | None = None
    tilts: str | None = None
    ctf: str = "none"
    edge: str = "skip"
    coordinate_pixel_size_angst: float | None = None
    split: str = "file"
    root: str | None = None
    seed: int = 0
    invert_contrast: bool = False
    normalise: bool = True
    premultiplied: bool | None = None
    subset: int | None = None
    max_bad: int | None = None
    gpus: str | None = None
    procs_per_gpu: str = "auto"
    cpu_procs: int | None = None
    cache_gib: float = 2.0
    gpu_memory_gib: float | None = None

    def __post_init__(self) -> None:
        """Refuses what `AlignSettings` refuses, and unknown weightings."""
        _one_of("--weighting", self.weighting, ("ctf", "noise"))
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("weighting", "premultiplied")}
        AlignSettings(**shared)
        object.__setattr__(self, "symmetry", symmetry_name(self.symmetry))
        if self.weighting == "ctf" and self.noise_groups in ("tomogram", "optics"):
            raise SettingsError(f"--noise-groups {self.noise_groups}: matters for --weighting noise only; the classical sums know of no noise")
        if self.premultiplied is not None and self.weighting != "ctf":
            raise SettingsError("--premultiplied: matters for --weighting ctf only; other weights come from the noise itself")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(f"{option}: expected one of {', '.join(allowed)}; found {value!r}")


def settings_to_toml(settings: AlignSettings | AverageSettings) -> str:
    """All options as TOML text; options that are None are left out."""
    again = "; `numba-glocal align --job THIS_FILE -o NEW_FOLDER` runs it again" if isinstance(settings, AlignSettings) else ""
    lines = [f"# Every option of this run that is set{again}."]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else {'"': '\\"', "\\": "\\\\"}.get(c, c) for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


_KINDS = {"bool": (bool, "true or false"), "int": (int, "a whole number"), "str": (str, "text")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_job_file(path: Path) -> dict[str, Any]:
    """Options of a job file, checked by name and kind.

    Raises
    ------
    SettingsError
        Unreadable, not TOML, an unknown option, or a value of another kind.
    """
    try:
        with open(path, "rb") as handle:
            values = tomllib.load(handle)
    except OSError as problem:
        raise SettingsError(f"{path}: cannot be read ({problem.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SettingsError(f"{path}: not a TOML file ({problem})") from None
    known = {field.name: field for field in dataclasses.fields(AlignSettings)}
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{path}: unknown option {name!r}")
        kind = str(known[name].type)
        kind = kind.removesuffix(" | None")
        if kind == "tuple[str, ...]":
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise SettingsError(f"{path}: {name} expects a list of texts, found {value!r}")
            values[name] = tuple(value)
        elif kind.startswith("tuple"):
            if not isinstance(value, list) or len(value) != 2 or not all(_is_number(v) for v in value):
                raise SettingsError(f"{path}: {name} expects two numbers, found {value!r}")
            values[name] = tuple(float(v) for v in value)
        elif kind == "float":
            if not _is_number(value):
                raise SettingsError(f"{path}: {name} expects a number, found {value!r}")
            values[name] = float(value)
        elif type(value) is not _KINDS[kind][0]:
            raise SettingsError(f"{path}: {name} expects {_KINDS[kind][1]}, found {value!r}")
    return values
