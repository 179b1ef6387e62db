from __future__ import annotations

import json
from pathlib import Path

import gemmi
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.errors import GlocalError, InputError, SettingsError
from numba_glocal.io import read_particles
from numba_glocal.results import RunFolder, RunState, load_report_data
from numba_glocal.settings import AlignSettings, AverageSettings, read_job_file
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Poses

COUNT = 6


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(AlignSettings("list.star", str(tmp_path / "run"), seed=7), [])
    return folder


def state(iteration=1, **changes):
    rng = np.random.default_rng(iteration)
    poses = Poses(Rotation.random(COUNT, random_state=iteration).as_matrix(), rng.normal(size=(COUNT, 3)))
    values = {"scores": rng.normal(size=COUNT), "bad": {2: "it is constant"}, "history": [{"number": 1, "resolution_angst": None}], "scale": 0.123}
    values |= changes
    nothing = np.full(COUNT, np.nan)
    return RunState(iteration, poses, 12.5, 0.1, 33.3, values["scores"], nothing, nothing, nothing, values["bad"], values["history"], values["scale"])


def some_particles(tmp_path):
    return read_particles(simulate(tmp_path / "set", SimulationSettings(count=COUNT, box_size=16, pixel_size_angst=10.0)).start)


def test_a_state_comes_back_to_the_last_bit(folder):
    first, second = state(1), state(2, bad={0: 'says "no"\n', 5: "x"})
    folder.write_state(first)
    folder.write_state(second)
    found = folder.last_state()
    assert (found.iteration, found.k_max, found.increment_deg, found.shift_range_angst, found.scale) == (2, 12.5, 0.1, 33.3, 0.123)
    assert found.bad == second.bad and found.history == second.history
    assert found.poses.rotations.tobytes() == second.poses.rotations.tobytes()
    assert found.poses.shifts_angst.tobytes() == second.poses.shifts_angst.tobytes()
    assert found.scores.tobytes() == second.scores.tobytes()


def test_an_iteration_without_its_state_does_not_count(folder):
    folder.write_state(state(1))
    folder.iteration_folder(2).mkdir()
    (folder.iteration_folder(2) / "state.npz.part").write_bytes(b"half")
    assert folder.last_state().iteration == 1


def test_states_are_ordered_by_number(folder):
    for iteration in (999, 2, 1000):
        folder.write_state(state(iteration))
    assert folder.last_state().iteration == 1000


def test_a_new_folder_is_new(folder, tmp_path):
    settings = AlignSettings("list.star", "x")
    with pytest.raises(SettingsError, match="not empty.*--resume begins again"):
        folder.create(settings, [])
    folder.write_state(state(1))
    with pytest.raises(SettingsError, match="not empty.*--resume goes on"):
        folder.create(settings, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="found a file"):
        RunFolder(tmp_path / "file").create(settings, [])
    with pytest.raises(SettingsError, match="is an input"):
        RunFolder(tmp_path / "file").create(settings, [tmp_path / "sub" / ".." / "file"])
    with pytest.raises(GlocalError, match="cannot be made"):
        RunFolder(tmp_path / "file" / "below").create(settings, [])
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").create(settings, [])
    assert read_job_file(tmp_path / "empty" / "job.toml")["particles"] == "list.star"


def test_only_align_is_resumed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(AverageSettings("list.star", "run"), [])
    with pytest.raises(SettingsError) as caught:
        folder.check_new([])
    assert "not empty" in str(caught.value) and "--resume" not in str(caught.value)


def test_the_start_is_known_again(folder, tmp_path):
    particles = some_particles(tmp_path)
    folder.write_start(particles, 16)
    assert folder.changed_since_start(particles, 16) == ""
    poses = particles.poses
    moved = particles.with_poses(Poses(poses.rotations, poses.shifts_angst + 1e-6))
    other_order = particles.take([1, 0, 2, 3, 4, 5]).with_poses(poses)
    for changed in (moved, other_order, particles.take([0, 1])):
        assert "list has changed" in folder.changed_since_start(changed, 16)
    assert "half-sets" in folder.changed_since_start(particles.with_half(3 - particles.half), 16)
    assert "--binning" in folder.changed_since_start(particles, 12)


def test_written_particles(folder, tmp_path):
    """New poses as RELION means them, ours in further columns; an unusable particle is last however the list is sorted."""
    particles, now = some_particles(tmp_path), state(1, scores=np.array([1.0, 2.0, np.nan, -4.0, 5.0, 6.0]))
    now.angle_sigma_deg = np.array([0.1, 0.2, np.nan, 0.4, 0.5, 0.6])
    now.shift_sigma_angst = np.array([1.0, 2.0, np.nan, 4.0, 5.0, 6.0])
    folder.write_particles(folder.path, particles, now)
    block = gemmi.cif.read(str(folder.path / "particles.star")).find_block("particles")

    def column(label):
        return np.array([float(v) for v in block.find_values(label)])

    angles = np.stack([column(f"_rlnAngle{name}") for name in ("Rot", "Tilt", "Psi")], 1)
    # RELION's angles turn the particle onto the reference: the inverse of ours
    turned = Rotation.from_euler("ZYZ", angles, degrees=True).inv() * Rotation.from_matrix(now.poses.rotations).inv()
    assert np.rad2deg(turned.magnitude()).max() < 1e-4
    origins = np.stack([column(f"_rlnOrigin{axis}Angst") for axis in "XYZ"], 1)
    assert np.abs(origins + now.poses.shifts_angst).max() < 1e-5
    assert column("_ngScore").tolist() == [1, 2, -4, -4, 5, 6] and not column("_rlnLogLikeliContribution").size
    assert column("_ngAngleSigmaDeg").tolist() == [0.1, 0.2, 180, 0.4, 0.5, 0.6]
    assert column("_ngShiftSigmaAngst").tolist() == [1, 2, 80, 4, 5, 6]  # half of 16 voxels of 10 A


def test_what_a_run_does_not_know_stays_as_listed(folder, tmp_path):
    """`average` scores nothing: the scores of the run that made the list are not replaced by zeros."""
    folder.write_particles(tmp_path, some_particles(tmp_path), state(1, scores=np.arange(1.0, 1.0 + COUNT)))
    scored = read_particles(tmp_path / "particles.star", require_volumes=False)
    folder.write_particles(folder.path, scored, state(2, scores=np.full(COUNT, np.nan)))
    block = gemmi.cif.read(str(folder.path / "particles.star")).find_block("particles")
    assert [float(v) for v in block.find_values("_ngScore")] == [1, 2, 3, 4, 5, 6]
    assert not list(block.find_values("_ngAngleSigmaDeg"))


def test_a_damaged_state_is_one_line(folder):
    for iteration in (1, 2):
        folder.write_state(state(iteration))
    path = folder.iteration_folder(2) / "state.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="iter_002.*damaged.*before"):
        folder.last_state()


def test_results_are_complete_when_the_summary_counts_them(folder):
    assert not folder.is_complete(state(1))
    folder.write_json("summary.json", {"iterations": [{}]})
    assert folder.is_complete(state(1)) and not folder.is_complete(state(2))


def test_events_are_lines_of_json(folder):
    folder.event("iteration", value=np.float32(1.5), array=np.arange(2), path=Path("x"), text="two\nlines")
    folder.event("end")
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["iteration", "end"]
    assert lines[0]["value"] == 1.5 and lines[0]["array"] == [0, 1] and lines[0]["text"] == "two\nlines"


def test_a_report_needs_a_finished_run(folder):
    with pytest.raises(InputError, match="finished run"):
        load_report_data(folder.path)
