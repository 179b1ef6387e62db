"""`convert` from and to optimisation sets: names lead to the right files, wherever the new set stands, as gemmi reads them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from numba_glocal.cli.main import main
from numba_glocal.io import read_particles

gemmi = pytest.importorskip("gemmi")

TOMOGRAMS = "data_global\nloop_\n_rlnTomoName\n_rlnTomoSizeX\n_rlnTomoSizeY\n_rlnTomoSizeZ\n_rlnTomoTiltSeriesPixelSize\nt1 400 300 200 2.0\n"
PARTICLES = """# version 50001

data_optics
loop_
_rlnOpticsGroup
_rlnImagePixelSize
_rlnTomoTiltSeriesPixelSize
1 4.0 2.0

data_particles
loop_
_rlnTomoName
_rlnCenteredCoordinateXAngst
_rlnCenteredCoordinateYAngst
_rlnCenteredCoordinateZAngst
_rlnOpticsGroup
_rlnImageName
t1 10 20 30 1 a.mrc
t1 -10 2 3 1 b.mrc
"""
SET = """# version 50001

data_

_rlnTomoParticlesFile   Refine/job1/run_data.star
_rlnTomoTomogramsFile   Tomograms/tomograms.star
_rlnTomoTrajectoriesFile "motion of frames.star"
_rlnTomoManifoldsFile   ""
_rlnOther 7
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for folder in ("Refine/job1", "Tomograms", "new"):
        (project / folder).mkdir(parents=True)
    (project / "Refine/job1/run_data.star").write_text(PARTICLES)
    (project / "Refine/job1/set.star").write_text(SET)
    (project / "Refine/job1/motion of frames.star").write_text("data_\n")
    (project / "Tomograms/tomograms.star").write_text(TOMOGRAMS)
    monkeypatch.chdir(project)
    return project


def convert(*arguments, code=0):
    done = CliRunner().invoke(main, ["convert", *map(str, arguments)], prog_name="numba-glocal")
    assert done.exit_code == code, done.output
    return done.output


def pairs(path):
    block = gemmi.cif.read(str(path))[0]
    return {item.pair[0]: gemmi.cif.as_string(item.pair[1]) for item in block if item.pair is not None}


def test_a_set_gives_a_set(project):
    convert("Refine/job1/set.star", "new/particles.star")
    # the motion file is found beside the old set only
    assert pairs("new/particles_optimisation_set.star") == {
        "_rlnTomoParticlesFile": "new/particles.star",
        "_rlnTomoTomogramsFile": "Tomograms/tomograms.star",
        "_rlnTomoTrajectoriesFile": "Refine/job1/motion of frames.star",
        "_rlnTomoManifoldsFile": "",
        "_rlnOther": "7",
    }
    again = read_particles("new/particles_optimisation_set.star", require_volumes=False)
    assert again.source.document.path == str(project / "new/particles.star") or again.source.document.path == "new/particles.star"
    assert again.coordinates.as_voxels()[0].tolist() == [199 + 5, 149 + 10, 99 + 15]
    assert "particles_optimisation_set.star" in convert("Refine/job1/set.star", "new/particles.star", "--overwrite")


def test_from_elsewhere_names_are_whole(project, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    convert(project / "Refine/job1/set.star", "p.star", "--to", "relion4")
    found = pairs("p_optimisation_set.star")
    assert found["_rlnTomoParticlesFile"] == "p.star" and found["_rlnTomoTomogramsFile"] == str(project / "Tomograms/tomograms.star")
    assert read_particles("p_optimisation_set.star", require_volumes=False).coordinates.as_voxels()[1].tolist() == [199 - 5, 149 + 1, 99 + 1.5]


def test_all_names_start_from_one_folder(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    convert("project/Refine/job1/set.star", "project/new/p.star")
    found = pairs("project/new/p_optimisation_set.star")
    assert found["_rlnTomoParticlesFile"] == "project/new/p.star" and found["_rlnTomoTomogramsFile"] == "project/Tomograms/tomograms.star"
    assert len(read_particles("project/new/p_optimisation_set.star", require_volumes=False)) == 2


def test_a_list_whose_tomograms_are_not_there_is_named(project):
    (project / "Tomograms/others.star").write_text(TOMOGRAMS.replace("\nt1 ", "\nt9 "))
    said = convert("Refine/job1/run_data.star", "new/p.star", "--tomograms", "Tomograms/others.star", code=2)
    assert "Refine/job1/run_data.star: 1 of 1 tomograms are not in Tomograms/others.star: t1; it has t9" in said


def test_other_lists_have_none(project):
    convert("Refine/job1/set.star", "new/p31.star", "--to", "relion31")
    convert("Refine/job1/run_data.star", "new/plain.star")
    assert sorted(path.name for path in (project / "new").iterdir()) == ["p31.star", "plain.star"]


def test_one_that_is_asked_for(project):
    convert("Refine/job1/run_data.star", "new/p.star", "--tomograms", "Tomograms/tomograms.star", "--optimisation-set", "new/s.star")
    assert pairs("new/s.star") == {"_rlnTomoParticlesFile": "new/p.star", "_rlnTomoTomogramsFile": "Tomograms/tomograms.star"}
    assert len(gemmi.cif.read("new/s.star")) == 1  # no flag of stacks
    assert len(read_particles("new/s.star", require_volumes=False)) == 2


def test_tomograms_elsewhere_take_the_place_of_the_sets_own(project):
    """The set names a file that is not there; --tomograms gives it, for the places and for the new set."""
    convert("Refine/job1/set.star", "new/before.star")
    places = read_particles("new/before_optimisation_set.star", require_volumes=False).coordinates.as_voxels()
    (project / "Tomograms/tomograms.star").rename(project / "new/mine.star")
    assert "Tomograms/tomograms.star not found" in convert("Refine/job1/set.star", "new/p.star", code=2)
    convert("Refine/job1/set.star", "new/p.star", "--tomograms", "new/mine.star")
    found = pairs("new/p_optimisation_set.star")
    assert (found["_rlnTomoParticlesFile"], found["_rlnTomoTomogramsFile"]) == ("new/p.star", "new/mine.star")
    np.testing.assert_array_equal(read_particles("new/p_optimisation_set.star", require_volumes=False).coordinates.as_voxels(), places)
    assert places[0].tolist() == [199 + 5, 149 + 10, 99 + 15]
    # Warp's voxels need the file: 4 A in the list, 2 A in the tilt series
    convert("Refine/job1/set.star", "new/p.tbl", "--tomograms", "new/mine.star")
    assert (project / "new/p.tbl").read_text().splitlines()[0].split()[23:26] == ["102", "79.5", "57"]


def test_another_file_of_tomograms_goes_before_the_sets_own(project):
    (project / "new/mine.star").write_text(TOMOGRAMS.replace("400 300 200", "600 300 200"))
    convert("Refine/job1/set.star", "new/p.star", "--to", "relion4", "--tomograms", "new/mine.star")
    found = read_particles("new/p.star", require_volumes=False).coordinates.as_voxels()
    assert found[:, 0].tolist() == [299 + 5, 299 - 5]


def test_refusals(project):
    base = ("Refine/job1/run_data.star", "new/p.star")
    assert "expected --tomograms" in convert(*base, "--optimisation-set", "new/s.star", code=2)
    assert "goes into none; expected --to relion4 or relion5" in convert("Refine/job1/set.star", "p.tbl", "--optimisation-set", "s.star", code=2)
    (project / "new/s.star").write_text("mine")
    more = ("--tomograms", "Tomograms/tomograms.star", "--optimisation-set", "new/s.star")
    assert "exists already" in convert(*base, *more, code=2)
    assert not (project / "new/p.star").exists() and (project / "new/s.star").read_text() == "mine"
    assert "expected another file" in convert(*base, "--tomograms", "Tomograms/tomograms.star", "--optimisation-set", "new/p.star", code=2)


def test_stacks_stay_stacks(shared, tmp_path):
    folder = tmp_path / "s"
    shutil.copytree(shared / "data/relion5-2d-stacks", folder)
    (tmp_path / "out").mkdir()
    convert(folder / "optimisation_set.star", tmp_path / "out/list.star")
    found = read_particles(tmp_path / "out/list_optimisation_set.star", require_volumes=False)
    assert found.stacks is not None and found.stacks.tomograms_path.samefile(folder / "tomograms.star") and len(found) == 40
