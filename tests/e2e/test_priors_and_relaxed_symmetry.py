"""What is known of poses beforehand: Gaussians and hard limits about the list's; and a symmetry that is nearly, but not quite, there."""

from __future__ import annotations

import re

import gemmi
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.errors import SettingsError
from numba_glocal.io import read_particles, write_particles
from numba_glocal.settings import AlignSettings
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Poses, Volume

BOX, PIXEL = 28, 10.0
C4 = Rotation.from_rotvec(np.arange(4)[:, None] * [0.0, 0.0, np.pi / 2]).as_matrix()


def blobs(missing_lobe: bool) -> Volume:
    """Four lobes about z, each of two blobs; of one lobe the outer blob is gone."""
    z, y, x = np.indices((BOX,) * 3) - BOX // 2
    volume = np.zeros((BOX,) * 3)
    for number, g in enumerate(C4):
        for place in ((6.5, 1.0, 2.5), (3.0, 2.0, -5.0)):
            if number == 0 and missing_lobe and place[0] > 6:
                continue
            px, py, pz = g @ place
            volume += np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * 1.3**2))
    return Volume(volume.astype(np.float32), PIXEL)


@pytest.fixture(scope="module")
def broken_set(tmp_path_factory):
    """24 particles; each start pose is one of the four copies, whichever."""
    folder = tmp_path_factory.mktemp("broken")
    made = simulate(folder, SimulationSettings(count=24, box_size=BOX, pixel_size_angst=PIXEL, snr=0.3, seed=3), blobs(True))
    start = read_particles(made.start)
    copies = C4[np.random.default_rng(4).integers(4, size=24)]
    mixed = folder / "mixed.star"
    write_particles(mixed, start.with_poses(Poses(start.poses.rotations @ copies, start.poses.shifts_angst)))
    return made, mixed


def poses(path):
    return read_particles(path, require_volumes=False).poses


def turned_deg(a, b):
    return np.rad2deg(Rotation.from_matrix(np.swapaxes(poses(a).rotations, 1, 2) @ poses(b).rotations).magnitude())


def moved_angst(a, b):
    return np.linalg.norm(poses(a).shifts_angst - poses(b).shifts_angst, axis=1)


def likeness_to_quarter_turn(run, tools):
    volume = tools.read_map(run / "average.mrc")[1:, 1:, 1:]
    return np.corrcoef(volume.ravel(), np.rot90(volume, axes=(1, 2)).ravel())[0, 1]


def test_a_relaxed_symmetry_finds_the_right_copy(broken_set, align_here, tools, tmp_path):
    made, mixed = broken_set
    assert (turned_deg(made.truth, mixed) > 60).mean() > 0.6
    settings = {"reference": str(made.reference), "particle_diameter_angst": 220.0, "iterations": 2}
    align_here(mixed, tmp_path / "plain", **settings)
    align_here(mixed, tmp_path / "relaxed", relax_symmetry="c4", **settings)
    stays = turned_deg(made.truth, tmp_path / "plain" / "particles.star")
    found = turned_deg(made.truth, tmp_path / "relaxed" / "particles.star")
    assert (stays > 60).mean() > 0.4  # a local search does not reach another copy
    assert (found < 5).mean() > 0.95 and np.median(found) < 2
    assert likeness_to_quarter_turn(tmp_path / "relaxed", tools) < likeness_to_quarter_turn(tmp_path / "plain", tools) - 0.02


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"relax_symmetry": "C4"}, "--relax-symmetry C4: copies of a pose are taken as unknown"),
        ({"relax_symmetry": "C4", "reference": "a.mrc", "symmetry": "D2"}, "averages are made without it; expected no --symmetry D2"),
        ({"relax_symmetry": "C4", "reference": "a.mrc", "global_search": True}, "--relax-symmetry: --global takes orientations as unknown"),
        ({"relax_symmetry": "C1", "reference": "a.mrc"}, "--relax-symmetry C1: there is nothing to relax"),
        ({"relax_symmetry": "X4", "reference": "a.mrc"}, "--relax-symmetry: expected C1, Cn or Dn"),
        ({"angle_prior_deg": 3.0, "score": "ncc"}, "--angle-prior-deg: a prior is added to log-likelihoods, and --score ncc is none"),
        ({"shift_prior_angst": 3.0, "score": "flcf"}, "--shift-prior-angst: a prior is added to log-likelihoods"),
        ({"angle_prior_deg": 3.0, "global_search": True, "reference": "a.mrc"}, "--angle-prior-deg: --global takes orientations as unknown"),
        ({"max_angle_deg": 3.0, "angle_list": "a.em", "reference": "a.mrc"}, "--max-angle: --angle-list takes orientations as unknown"),
        ({"angle_prior_deg": -1.0}, "--angle-prior-deg: expected a positive number"),
    ],
)
def test_what_contradicts_is_refused(options, text):
    with pytest.raises(SettingsError, match=re.escape(text)) as refused:
        AlignSettings("list.star", "run", **options)
    assert "\n" not in str(refused.value)


def test_options_arrive_from_the_command_line(broken_set, command, tmp_path):
    made, mixed = broken_set
    shown = command("align", mixed, "-o", tmp_path / "run", "--reference", made.reference, "--relax-symmetry", "C4", "--dry-run")
    assert "around each pose and its C4 copies" in shown.stdout
    options = ("--max-angle", 12, "--angle-prior-deg", 3, "--shift-prior-angst", 4, "--score", "ncc")
    assert "--angle-prior-deg: a prior" in command("align", mixed, "-o", tmp_path / "run", *options, code=2).stderr


def test_limits_hold_through_the_whole_run(broken_set, align_here, tmp_path):
    made, _ = broken_set
    settings = {"reference": str(made.reference), "particle_diameter_angst": 220.0, "iterations": 2}
    align_here(made.start, tmp_path / "free", **settings)
    align_here(made.start, tmp_path / "limited", max_angle_deg=3.0, max_shift_angst=6.0, **settings)
    free, limited = (tmp_path / name / "particles.star" for name in ("free", "limited"))
    assert turned_deg(made.start, free).max() > 6 and moved_angst(made.start, free).max() > 9
    assert turned_deg(made.start, limited).max() < 3.01 and moved_angst(made.start, limited).max() < 6.01
    # as far towards the truth as it is allowed to go
    wrong = turned_deg(made.truth, made.start)
    assert (turned_deg(made.truth, limited) < wrong)[wrong > 4].all() and (wrong > 4).sum() > 10


def test_a_limit_of_turns_counts_symmetric_copies_as_one(broken_set, align_here, tmp_path):
    made, mixed = broken_set
    settings = {"reference": str(made.reference), "particle_diameter_angst": 220.0, "iterations": 1, "symmetry": "C4", "max_angle_deg": 4.0}
    align_here(mixed, tmp_path / "run", **settings)
    copies = [np.swapaxes(poses(mixed).rotations, 1, 2) @ poses(tmp_path / "run" / "particles.star").rotations @ g for g in C4]
    nearest = np.min([np.rad2deg(Rotation.from_matrix(c).magnitude()) for c in copies], axis=0)
    assert 3.5 < nearest.max() < 4.01


def test_a_right_prior_helps_and_is_in_the_uncertainty(align_here, tmp_path):
    """Little signal: a prior as wide as the start poses are wrong brings poses nearer to the truth than the data alone."""
    made = simulate(tmp_path / "set", SimulationSettings(count=40, box_size=BOX, pixel_size_angst=PIXEL, snr=0.01, seed=5), blobs(True))
    settings = {"reference": str(made.reference), "particle_diameter_angst": 220.0, "iterations": 1, "initial_lowpass_angst": 60.0}
    angle_deg, shift_angst = (np.sqrt((v(made.truth, made.start) ** 2).mean() / 3) for v in (turned_deg, moved_angst))
    align_here(made.start, tmp_path / "free", **settings)
    align_here(made.start, tmp_path / "prior", angle_prior_deg=float(angle_deg), shift_prior_angst=float(shift_angst), **settings)
    errors = {name: turned_deg(made.truth, tmp_path / name / "particles.star") for name in ("free", "prior")}
    rms = {name: np.sqrt((error**2).mean()) for name, error in errors.items()}
    assert rms["prior"] < 0.9 * rms["free"] and rms["prior"] < 0.9 * np.sqrt(3) * angle_deg
    sigma = {name: read_column(tmp_path / name / "particles.star", "ngAngleSigmaDeg") for name in errors}
    assert (sigma["prior"] < sigma["free"]).mean() > 0.9 and sigma["prior"].max() <= angle_deg * 1.001


def read_column(path, label):
    return np.array([float(v) for v in gemmi.cif.read(str(path)).find_block("particles").find_values("_" + label)])
