"""Particles with a symmetry: a D3 object by formula, start poses that name any of its equal copies, and groups that are wrong."""

from __future__ import annotations

import json
import logging

import gemmi
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.io import read_particles, write_particles
from numba_glocal.results import RunFolder
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Poses, Volume

BOX, PIXEL = 28, 10.0
# three about z, and each again turned about x
ABOUT_Z = Rotation.from_rotvec([[0, 0, angle] for angle in np.deg2rad([0, 120, 240])]).as_matrix()
D3 = np.concatenate([ABOUT_Z, ABOUT_Z @ Rotation.from_rotvec([np.pi, 0, 0]).as_matrix()])


@pytest.fixture(scope="module")
def d3_set(tmp_path_factory):
    """24 particles; each start pose is a random one of its six equal ones."""
    z, y, x = np.indices((BOX,) * 3) - BOX // 2
    volume = np.zeros((BOX,) * 3)
    for g in D3:
        for place in ((6.0, 1.0, 2.5), (3.0, 3.0, 6.0)):
            px, py, pz = g @ place
            volume += np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * 1.3**2))
    folder = tmp_path_factory.mktemp("d3")
    made = simulate(
        folder, SimulationSettings(count=24, box_size=BOX, pixel_size_angst=PIXEL, snr=0.2, seed=3), Volume(volume.astype(np.float32), PIXEL)
    )
    start = read_particles(made.start)
    copies = D3[np.random.default_rng(4).integers(6, size=24)]
    mixed = folder / "mixed.star"
    write_particles(mixed, start.with_poses(Poses(start.poses.rotations @ copies, start.poses.shifts_angst)))
    return made, mixed


def errors(truth, found):
    """Degrees to the nearest equal pose, and Angstrom; D3 leaves no common motion to take out."""
    true, poses = (read_particles(path, require_volumes=False).poses for path in (truth, found))
    apart = [Rotation.from_matrix(np.swapaxes(true.rotations, 1, 2) @ poses.rotations @ g).magnitude() for g in D3]
    return np.rad2deg(np.min(apart, 0)), np.linalg.norm(true.shifts_angst - poses.shifts_angst, axis=1)


def likeness(volume, axes):
    """Correlation with itself after a half turn that reverses `axes`."""
    inner = volume[1:, 1:, 1:]
    return np.corrcoef(inner.ravel(), np.flip(inner, axes).ravel())[0, 1]


def test_poses_maps_and_what_is_reported(d3_set, align_here, tools, tmp_path, caplog):
    made, mixed = d3_set
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO, "numba_glocal"):
        align_here(mixed, run, workers=0, reference=str(made.reference), particle_diameter_angst=200.0, iterations=2, symmetry="d3")
    assert 'symmetry = "D3"' in (run / "job.toml").read_text()
    start_deg, _ = errors(made.truth, mixed)
    found_deg, found_angst = errors(made.truth, run / "particles.star")
    assert np.median(start_deg) > 4 and np.percentile(found_deg, 90) < 2 and np.median(found_angst) < 2
    for half in (1, 2):
        assert likeness(tools.read_map(run / f"half{half}.mrc"), (0, 1)) > 0.999  # about x
    # each by itself: they are not the same map
    assert likeness(tools.read_map(run / "half1.mrc"), (1, 2)) < 0.9
    assert not np.allclose(tools.read_map(run / "half1.mrc"), tools.read_map(run / "half2.mrc"), atol=1e-3)
    state = RunFolder(run).last_state()
    assert min(state.symmetry_agreement) > 0.98
    assert "its D3-symmetrised self" in caplog.text
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert all(event["halves_apart"] == [0, 0] for event in events if event["event"] == "iteration")
    # start and result often name different copies: what is reported is how far a particle turned
    assert state.history[0]["angle_change_deg"] < 15


def test_a_wrong_group_is_said(d3_set, command, tmp_path):
    made, _ = d3_set
    run = tmp_path / "run"
    options = ("--particle-diameter", 200, "--iterations", 1, "--symmetry", "C4", "--cpu-procs", 1)
    done = command("align", made.start, "-o", run, "--reference", made.reference, *options)
    facts = json.loads((run / "summary.json").read_text())
    assert facts["symmetry"] == "C4" and facts["symmetry_agreement"][1] < 0.5
    assert any(line.startswith("--symmetry C4") for line in facts["warnings"]) and "--symmetry C4: without" in done.stderr
    assert "Symmetry C4: the start had it" in done.stdout
    assert "Symmetry C4 was imposed" in (run / "report.html").read_text()
    again = command("align", "-o", run, "--resume", "--iterations", 2, "--symmetry", "D3", code=2)
    assert "symmetry was C4" in again.stderr


def test_without_a_start_map_the_poses_are_asked(d3_set, align_here, tmp_path):
    made, _ = d3_set
    apart = {}
    for name in ("D3", "C4"):
        align_here(made.start, tmp_path / name, particle_diameter_angst=200.0, iterations=1, symmetry=name)
        apart[name] = RunFolder(tmp_path / name).last_state().symmetry_agreement[1]
    assert apart["D3"] > 0.6 > 0.5 > apart["C4"]


def test_average_adds_every_copy(d3_set, average_here, command, tools, tmp_path):
    made, _ = d3_set
    maps = {}
    for name in ("C1", "D3"):
        average_here(made.truth, tmp_path / name, particle_diameter_angst=200.0, symmetry=name)
        maps[name] = tools.read_map(tmp_path / name / "average.mrc")
    reference = tools.read_map(made.reference)
    mask = tools.soft_sphere(BOX, 9, 3)
    fsc = {name: tools.shell_correlation(volume, reference, mask)[4:12].mean() for name, volume in maps.items()}
    assert fsc["D3"] > fsc["C1"] + 0.02
    done = command("average", made.truth, "-o", tmp_path / "bad", "--symmetry", "C0", code=2)
    assert "--symmetry: expected C1, Cn or Dn" in done.stderr and not (tmp_path / "bad").exists()


def test_equal_modes_are_counted_as_ambiguous_only_where_they_are_not_the_symmetry(d3_set, align_here, tmp_path):
    """Without the group a D3 object has six poses of equal likelihood: no pose is clear. With it, each is."""
    made, _ = d3_set
    for group, ambiguous in (("C1", 24), ("D3", 0)):
        run = tmp_path / group
        align_here(made.start, run, reference=str(made.reference), particle_diameter_angst=200.0, iterations=1, symmetry=group, global_search=True)
        state = RunFolder(run).last_state()
        assert abs(state.history[0]["ambiguous"] - ambiguous) <= 1, group
        margins = np.array(gemmi.cif.read(str(run / "iter_001" / "particles.star")).find_block("particles").find_values("_ngModeMargin"), float)
        assert (state.history[0]["angle_sigma_deg"] > 20) == (group == "C1"), "uncertainties know the other modes"
        assert np.sum(margins < np.log(100)) == state.history[0]["ambiguous"] and np.isfinite(margins).all()
