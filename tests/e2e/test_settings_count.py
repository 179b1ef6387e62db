"""Every setting of `align` does something, or is refused: one row each, and a setting without a row fails."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
from pathlib import Path

import gemmi
import mrcfile
import numpy as np
import pytest
from scipy import ndimage
from scipy.spatial.transform import Rotation

from numba_glocal.errors import GlocalError
from numba_glocal.geometry import matrix_to_relion
from numba_glocal.io import read_particles, write_particles
from numba_glocal.settings import AlignSettings
from numba_glocal.simulation import SimulationSettings, simulate


def column(run, label):
    block = gemmi.cif.read(str(run / "particles.star")).find_block("particles")
    return np.array([float(v) for v in block.find_values("_" + label)])


def shifts_angst(run):
    return np.stack([column(run, f"rlnOrigin{axis}Angst") for axis in "XYZ"], 1)


def poses(run):
    return np.concatenate([np.stack([column(run, f"rlnAngle{name}") for name in ("Rot", "Tilt", "Psi")], 1), shifts_angst(run)], 1)


def history(run):
    with np.load(sorted(run.glob("iter_*/state.npz"))[-1]) as state:
        return json.loads(str(state["facts"]))["history"]


def class_shares(run):
    with np.load(sorted(run.glob("iter_*/state.npz"))[-1]) as state:
        return state["class_shares"]


def partly(run):
    """Whether any particle belongs to several classes."""
    return bool(((class_shares(run) > 0) & (class_shares(run) < 1)).any())


def average(run):
    with mrcfile.open(run / "average.mrc") as file:
        return np.array(file.data), round(float(file.voxel_size.x), 3)


def likeness_to_half_turn(run):
    """Correlation with itself turned by 180 degrees about z; an even box has its centre at n / 2."""
    volume = average(run)[0][1:, 1:, 1:]
    return np.corrcoef(volume.ravel(), volume[:, ::-1, ::-1].ravel())[0, 1]


def other_poses(base, changed):
    return np.abs(poses(base) - poses(changed)).max() > 1e-3


def other_mask(base, changed):
    return np.abs(mrcfile.read(base / "mask.mrc") - mrcfile.read(changed / "mask.mrc")).max() > 0.1


def other_halves(base, changed):
    return (column(base, "rlnRandomSubset") != column(changed, "rlnRandomSubset")).any()


def rotations(run):
    angles_deg = np.stack([column(run, f"rlnAngle{name}") for name in ("Rot", "Tilt", "Psi")], 1)
    return Rotation.from_euler("ZYZ", angles_deg, degrees=True).inv()


def started(run):
    """The list that the base runs start from, half a turn away from that of `half_turned`."""
    text = (run / "job.toml").read_text()
    return Path(next(line for line in text.splitlines() if line.startswith("particles")).split('"')[1]).with_name("start.star")


def start_turned(run):
    """How far particles are from the orientations that `start.star` gives, degrees."""
    block = gemmi.cif.read(str(started(run))).find_block("particles")
    angles_deg = [[float(v) for v in row] for row in block.find(["_rlnAngleRot", "_rlnAngleTilt", "_rlnAnglePsi"])]
    return np.rad2deg((Rotation.from_euler("ZYZ", angles_deg, degrees=True) * rotations(run)).magnitude())


def start_moved(run):
    """How far they are from its positions, Angstrom."""
    block = gemmi.cif.read(str(started(run))).find_block("particles")
    start_angst = [[float(v) for v in row] for row in block.find([f"_rlnOrigin{axis}Angst" for axis in "XYZ"])]
    return np.linalg.norm(shifts_angst(run) - start_angst, axis=1)


# setting -> (value, further settings of both runs, what differs between a run without and with it)
SETTINGS = {
    "particles": (lambda t: str(t.truth), {}, other_poses),
    "output": (None, {}, lambda base, changed: base != changed and changed.exists()),
    "reference": (lambda t: str(t.blurred), {}, other_poses),
    "further_references": (
        lambda t: (str(t.blurred),),
        {},
        lambda base, changed: [len(history(run)[0].get("classes", ())) for run in (base, changed)] == [0, 2],
    ),
    "classes": (2, {"iterations": 2}, lambda base, changed: set(column(changed, "ngClass")) == {1, 2}),
    "class_assignment": (
        "soft",
        {"classes": 2, "iterations": 2},  # of particles of one kind
        lambda base, changed: partly(changed) and not partly(base),
    ),
    "initial_lowpass_angst": (100.0, {}, other_poses),
    "mask": (lambda t: str(t.mask), {}, other_mask),
    "particle_diameter_angst": (120.0, {}, other_mask),
    "soft_edge_voxels": (1.0, {}, other_mask),
    "pixel_size_angst": (
        8.0,
        {"initial_lowpass_angst": 40.0, "reference": "unsized"},
        lambda base, changed: average(base)[1] == 16 and average(changed)[1] == 8,
    ),
    "binning": (1.25, {}, lambda base, changed: average(changed)[0].shape == (16,) * 3 and average(changed)[1] == 20),
    "angle_shells": (0, {}, other_poses),
    "global_search": (True, {"iterations": 1}, other_poses),
    "angle_increment_deg": (1.0, {}, lambda base, changed: history(changed)[0]["increment_deg"] == 1.0 and other_poses(base, changed)),
    "shift_range_angst": (1.0, {}, other_poses),
    "max_shift_angst": (
        4.0,
        {},
        # the halves' common frame moves all of a half by an Angstrom or two afterwards
        lambda base, changed: np.linalg.norm(shifts_angst(changed), axis=1).max() < 6 < 10 < np.linalg.norm(shifts_angst(base), axis=1).max(),
    ),
    "angle_list": (
        lambda t: str(t.angles),
        {"iterations": 1, "global_search": True},
        lambda base, changed: history(base)[0]["increment_deg"] < 26 < 40 < history(changed)[0]["increment_deg"],
    ),
    "max_angle_deg": (1.0, {}, lambda base, changed: start_turned(changed).max() < 1.01 < 3 < start_turned(base).max()),
    # the halves' common frame moves all of a half alike, prior or not
    "angle_prior_deg": (0.1, {}, lambda base, changed: np.ptp(start_turned(changed)) < 0.5 < 3 < np.ptp(start_turned(base))),
    "shift_prior_angst": (
        0.3,
        {},
        lambda base, changed: np.ptp(start_moved(changed)) < 0.6 < 3 < np.ptp(start_moved(base)),
    ),
    "relax_symmetry": (
        "C2",
        {"particles": "half_turned"},
        lambda base, changed: np.median(start_turned(changed)) < 20 < 160 < np.median(start_turned(base)),
    ),
    "symmetry": ("C2", {}, lambda base, changed: likeness_to_half_turn(changed) > 0.999 > 0.9 > likeness_to_half_turn(base)),
    "adaptive": (
        False,
        {"iterations": 2, "angle_increment_deg": 12.0},
        lambda base, changed: history(changed)[1]["increment_deg"] == 12 > history(base)[1]["increment_deg"],
    ),
    "score": ("ncc", {}, lambda base, changed: column(base, "ngScore").max() > 1 >= column(changed, "ngScore").max()),
    "noise_groups": (
        "none",
        {"particles": "two_tomograms"},
        lambda base, changed: [len(history(run)[0]["noise"]["1"]) for run in (base, changed)] == [2, 1] and other_poses(base, changed),
    ),
    "highpass_angst": (130.0, {}, other_poses),
    "lowpass_angst": (70.0, {"iterations": 2}, lambda base, changed: history(base)[1]["band_angst"] < 70 <= history(changed)[1]["band_angst"]),
    "fsc_criterion": (0.9, {}, lambda base, changed: history(changed)[0]["resolution_angst"] > history(base)[0]["resolution_angst"]),
    "tilt_range_deg": ((-30.0, 50.0), {"particles": "no_weights"}, other_poses),
    "tilt_axis": ("x", {"particles": "no_weights", "tilt_range_deg": (-30.0, 50.0)}, other_poses),
    "flip_tilt": (True, {"particles": "no_weights", "tilt_range_deg": (-20.0, 60.0)}, other_poses),
    "particle_names": (
        "louder/p{}.mrc",
        {"particles": "numbered"},
        lambda base, changed: (column(base, "ngScore") != column(changed, "ngScore")).any(),
    ),
    "wedge_list": (lambda t: str(t.wedges), {"particles": "numbered"}, other_poses),
    "volume_axes": ("subtomogram", {"particles": "with_axes"}, other_poses),
    "tilts": (lambda t: str(t.tilts), {"particles": "placed", "tomograms": "tomogram", "box_size": 20}, other_poses),
    "ctf": ("plain", {"particles": "placed", "tomograms": "tomogram", "box_size": 20, "tilts": "tilts"}, other_poses),
    "edge": (
        "pad",
        {"particles": "placed", "tomograms": "tomogram", "box_size": 20},
        lambda base, changed: len(column(base, "ngScore")) == 12 and len(column(changed, "ngScore")) == 13,
    ),
    "coordinate_pixel_size_angst": (16.3, {"particles": "placed", "tomograms": "tomogram", "box_size": 20, "edge": "pad"}, other_poses),
    "split": ("tomogram", {}, other_halves),
    "seed": (5, {"split": "particle"}, other_halves),
    # two folders hold particles of the same names
    "root": (lambda t: str(t.elsewhere), {}, other_poses),
    "mirror": (True, {"initial_lowpass_angst": 50.0}, other_poses),
    "check_hand": (
        True,
        {},
        lambda base, changed: ['"event": "hand"' in (run / "events.jsonl").read_text() for run in (base, changed)] == [False, True],
    ),
    "iterations": (2, {}, lambda base, changed: (len(history(base)), len(history(changed))) == (1, 2)),
    "until_converged": (
        True,
        # a run that has nothing left to find: truth as the start, no wider search
        {"particles": "truth", "iterations": 8, "angle_shells": 0, "initial_lowpass_angst": 40.0},
        lambda base, changed: len(history(changed)) < len(history(base)) == 8,
    ),
    "invert_contrast": (True, {}, "leave out --invert-contrast"),
    "normalise": (False, {"particles": "louder"}, lambda base, changed: average(changed)[0].std() > 5 * average(base)[0].std()),
    "subset": (3, {}, lambda base, changed: len(column(base, "ngScore")) == 12 and len(column(changed, "ngScore")) == 6),
    "keep_best_percent": (
        50.0,
        {},
        lambda base, changed: (
            column(changed, "ngIncluded").sum() == 6
            and column(base, "ngIncluded").sum() == 12
            and np.abs(average(base)[0] - average(changed)[0]).max() > 0.1 * average(base)[0].std()
        ),
    ),
    "max_bad": (0, {"particles": "one_bad"}, "at most 0"),
}
ELSEWHERE = {
    "tomograms": "tests/test_extraction.py",
    "box_size": "tests/test_extraction.py",
    "gpus": "tests/cli/test_bad_input.py",
    "procs_per_gpu": "tests/cli/test_bad_input.py",
    "cpu_procs": "tests/e2e/test_determinism.py",
    "cache_gib": "a budget: no result may depend on it",
    "gpu_memory_gib": "a budget of GPUs",
    "gpu_precision": "tests/execution/test_gpu_binding.py",
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    made = simulate(folder, SimulationSettings(count=12, box_size=20, pixel_size_angst=16.0, snr=0.5, seed=2))

    def write(name, data, pixel=16.0):
        with mrcfile.new(folder / name) as file:
            file.set_data(np.asarray(data, np.float32))
            file.voxel_size = pixel
        return folder / name

    reference = mrcfile.read(made.reference)
    grid = np.indices(reference.shape) - 10
    lists = {"truth": made.truth, "start": made.start, "reference": made.reference}
    lists["unsized"] = write("unsized.mrc", reference, pixel=0.0)
    lists["blurred"] = write("blurred.mrc", ndimage.gaussian_filter(reference, 1.5))
    lists["mask"] = write("box_mask.mrc", np.abs(grid).max(0) <= 6)
    text = made.start.read_text()
    # ten particles in one tomogram, two in another: enough of the first for a noise model of its own
    lists["two_tomograms"] = folder / "two_tomograms.star"
    lists["two_tomograms"].write_text(re.sub(r"(particle_000(?:0\d|10).* )tomo_\d", r"\1tomo_9", text))
    # without the weight volumes
    labels = [line.split()[0] for line in text.splitlines() if line.startswith("_rln")]
    labels = labels[labels.index("_rlnImageName") :]
    place = labels.index("_rlnCtfImage")
    lines = []
    for line in text.splitlines():
        cells = line.split()
        if "subtomo/" in line:
            line = " ".join(cells[:place] + cells[place + 1 :])
        if not line.startswith("_rlnCtfImage"):
            lines.append(line)
    lists["no_weights"] = folder / "no_weights.star"
    lists["no_weights"].write_text("\n".join(lines) + "\n")
    lists["elsewhere"] = folder / "elsewhere"
    simulate(lists["elsewhere"], SimulationSettings(count=12, box_size=20, pixel_size_angst=16.0, snr=0.5, seed=7))
    # each turned by half a turn about the reference's z: (R g)^-1 = g^-1 Rz(rot) ..
    turned = gemmi.cif.read(str(made.start))
    for row in turned.find_block("particles").find(["_rlnAngleRot"]):
        row[0] = f"{float(row[0]) + 180.0:.6f}"
    lists["half_turned"] = folder / "half_turned.star"
    turned.write_file(str(lists["half_turned"]))
    z1, x, z2 = Rotation.random(26, random_state=4).as_euler("zxz").T
    lists["angles"] = folder / "angles.em"
    header = struct.pack("<4B3i", 6, 0, 0, 9, 3, 26, 1).ljust(512, b"\0")
    lists["angles"].write_bytes(header + np.stack([z1, z2, x], axis=1).astype("<f8").tobytes())
    # ten times as loud; one that is constant
    for name in ("louder", "one_bad"):
        lists[name] = folder / f"{name}.star"
        lists[name].write_text(text.replace("subtomo/particle", f"{name}/particle"))
        shutil.copytree(folder / "subtomo", folder / name)
    for path in (folder / "louder").glob("particle*"):
        with mrcfile.open(path, "r+") as file:
            file.set_data(np.array(file.data) * np.float32(10))
    with mrcfile.open(folder / "one_bad" / "particle_00003.mrc", "r+") as file:
        file.set_data(np.ones((20,) * 3, np.float32))
    # the same by number, in STOPGAP's words, and its tilts
    (folder / "subtomograms").mkdir()
    for i in range(1, 13):
        shutil.copy(folder / "subtomo" / f"particle_{i:05d}.mrc", folder / "subtomograms" / f"subtomo_{i}.mrc")
        shutil.copy(folder / "subtomo" / f"particle_{i % 12 + 1:05d}.mrc", folder / "louder" / f"p{i}.mrc")
    particles = read_particles(lists["no_weights"])
    lists["numbered"], lists["wedges"] = folder / "numbered.star", folder / "wedges.star"
    names = tuple(f"{i + 1}.mrc" for i in range(12))
    write_particles(lists["numbered"], dataclasses.replace(particles, names=names, source=None), to="stopgap")
    rows = "".join(f"{tomogram} {tilt}\n" for tomogram in range(1, 6) for tilt in (-30, 0, 50))
    lists["wedges"].write_text(f"data_stopgap_wedgelist\nloop_\n_tomo_num\n_tilt_angle\n{rows}")
    # volumes that the list has angles of their axes for, and does not say that they are cut along them
    lists["with_axes"] = folder / "with_axes.star"
    axed = gemmi.cif.read(str(made.start))
    loop = axed.find_block("particles").find_loop("_rlnAngleRot").get_loop()
    loop.add_columns(["_rlnTomoSubtomogramRot", "_rlnTomoSubtomogramTilt", "_rlnTomoSubtomogramPsi"], "20")
    axed.write_file(str(lists["with_axes"]))
    # the same in one tomogram, and a place at its edge
    tomogram = np.zeros((20, 60, 80), np.float32)
    places = []
    for i in range(12):
        x, y = 20 * (i % 4), 20 * (i // 4)
        tomogram[:, y : y + 20, x : x + 20] = mrcfile.read(folder / "subtomo" / f"particle_{i + 1:05d}.mrc")
        places.append((x + 10, y + 10, 10))
    lists["tomogram"] = write("tomogram.mrc", tomogram)
    columns = read_particles(made.start)
    angles = matrix_to_relion(columns.poses.rotations)
    rows = [f"tomogram {x} {y} {z} {' '.join(f'{a:.4f}' for a in angles[i % 12])}" for i, (x, y, z) in enumerate([*places, (78, 50, 10)])]
    labels = ["rlnMicrographName", *(f"rlnCoordinate{axis}" for axis in "XYZ"), "rlnAngleRot", "rlnAngleTilt", "rlnAnglePsi"]
    lists["placed"] = folder / "placed.star"
    optics = "data_optics\nloop_\n_rlnOpticsGroup\n_rlnImagePixelSize\n1 16\n\n"
    lists["placed"].write_text(optics + "data_particles\nloop_\n" + "".join(f"_{label}\n" for label in labels) + "\n".join(rows) + "\n")
    images = "".join(f"0 {tilt} 0 25000 0\n" for tilt in range(-30, 51, 4))
    lists["tilts"] = folder / "tilts.star"
    lists["tilts"].write_text(
        "data_global\nloop_\n_rlnTomoName\n_rlnTomoTiltSeriesPixelSize\n_rlnTomoHand\ntomogram 4 1\n\ndata_tomogram\nloop_\n"
        "_rlnTomoXTilt\n_rlnTomoYTilt\n_rlnTomoZRot\n_rlnDefocusU\n_rlnMicrographPreExposure\n" + images
    )
    return type("Sets", (), lists)


@pytest.fixture(scope="module")
def base_run(sets, align_here, tmp_path_factory):
    """Runs by their settings, each made once."""
    runs = {}

    def base_run(settings):
        key = repr(sorted(settings.items()))
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("base") / "run"
            align_here(output=runs[key], **settings)
        return runs[key]

    return base_run


def test_no_setting_is_forgotten():
    assert {field.name for field in dataclasses.fields(AlignSettings)} <= set(SETTINGS) | set(ELSEWHERE)


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_counts(name, sets, base_run, align_here, tmp_path):
    value, common, differs = SETTINGS[name]
    settings = {
        "particles": "start",
        "reference": "reference",
        "particle_diameter_angst": 200.0,
        "initial_lowpass_angst": 80.0,
        "iterations": 1,
        **common,
    }
    if name == "invert_contrast" or name == "mask":
        settings["initial_lowpass_angst"] = 60.0
    for key in {"particles", "reference", "tomograms", "tilts"} & settings.keys():
        settings[key] = str(getattr(sets, settings[key]))
    base = base_run(settings)
    changed = dict(settings)
    if value is not None:
        changed[name] = value(sets) if callable(value) else value
    if isinstance(differs, str):
        with pytest.raises(GlocalError, match=differs):
            align_here(output=tmp_path / "run", **changed)
    else:
        align_here(output=tmp_path / "run", **changed)
        assert differs(base, Path(tmp_path / "run"))


def test_unused_tilt_range_is_said(sets, align_here, tmp_path):
    job = align_here(str(sets.start), tmp_path / "run", reference=str(sets.reference), iterations=1, tilt_range_deg=(-30.0, 50.0))
    assert any("--tilt-range is not used" in line for line in job.warnings)
