"""PyTom lists: what is read against ElementTree, every kind of wedge by the planes it samples, bytes that stay, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from numba_glocal.errors import GlocalError, NoAnglesWarning
from numba_glocal.io import left_behind, list_formats, read_particles, write_particles
from numba_glocal.io.volumes import write_volume
from numba_glocal.values import Poses, TiltRange, Volume
from numba_glocal.wedge import union_weights

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sampled import check_sampled  # noqa: E402

ROTATION = '<Rotation Z1="10" Z2="20" X="30" Paradigm="ZXZ"/>'


def single(angle1, angle2, more="", inside=""):
    return f'<SingleTiltWedge Angle1="{angle1}" Angle2="{angle2}" {more}>{inside}</SingleTiltWedge>'


def pytom(path, *particles, head="<ParticleList>", tail="</ParticleList>\n"):
    """A list whose particles have these children."""
    rows = "".join(f'  <Particle Filename="p{i}.em">{children}</Particle>\n' for i, children in enumerate(particles))
    path.write_text(f"{head}\n{rows}{tail}")
    return path


def read(path, **options):
    return read_particles(path, **{"pixel_size_angst": 2.0, "require_volumes": False, **options})


def test_the_real_list(shared, tmp_path):
    path = shared / "data/lists/pytom_particles_10.xml"
    particles = read(path)
    elements = list(ElementTree.parse(path).getroot())
    assert len(particles) == len(elements) == 10
    assert list(particles.names) == [e.attrib["Filename"] for e in elements]
    assert set(particles.tomograms) == {"tomo1.tomostar"} and particles.classes.tolist() == [0] * 10 and particles.scores.tolist() == [0.0] * 10
    assert set(particles.weight_paths) == {(TiltRange(-60.0, 60.0, smooth_voxels=0.0, cutoff_voxels=50.0),)}
    assert not particles.half.any() and not particles.poses.shifts_angst.any() and particles.coordinates is None
    write_particles(tmp_path / "out.xml", particles)
    assert (tmp_path / "out.xml").read_bytes() == path.read_bytes()
    with pytest.raises(GlocalError, match="10 of 10 particle volumes not found: ./testparticles/particle_0.em"):
        read_particles(path, pixel_size_angst=2.0)
    with pytest.raises(GlocalError, match="no pixel size in the list"):
        read_particles(path, require_volumes=False)


def test_refined_lists_differ_in_what_was_refined(shared, tmp_path):
    path = shared / "data/lists/pytom_particles_10.xml"
    particles = read(path)
    turned = Poses(particles.poses.rotations[::-1].copy(), particles.poses.shifts_angst + [2.0, 4.0, -1.0])
    scores = np.linspace(0.1, 1, 10)
    some = particles.with_poses(turned).with_half(np.arange(10) % 2 + 1)
    write_particles(tmp_path / "out.xml", some, {"ngScore": scores, "ngAngleSigmaDeg": scores})
    old, new = (list(ElementTree.parse(p).getroot()) for p in (path, tmp_path / "out.xml"))
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        assert {k: float(v) for k, v in b.find("Shift").attrib.items()} == {"X": 1.0, "Y": 2.0, "Z": -0.5}
        assert float(b.find("Score").attrib["Value"]) == pytest.approx(scores[i], rel=1e-5)
        assert b.find("HalfSet").attrib == {"Number": str(i % 2 + 1)}
        # everything else is as it was
        for name in ("PickPosition", "InfoGUI", "Class", "Wedge/SingleTiltWedge", "Wedge/SingleTiltWedge/TiltAxisRotation", "Score/PeakPrior"):
            assert a.find(name).attrib == b.find(name).attrib
        assert {k: v for k, v in a.find("Score").attrib.items() if k != "Value"} == {k: v for k, v in b.find("Score").attrib.items() if k != "Value"}
    assert (tmp_path / "out.xml").read_text().startswith("<!-- PyTom Version: 1.0 -->\n<ParticleList>\n")
    back = read(tmp_path / "out.xml")
    np.testing.assert_allclose(back.poses.rotations, turned.rotations, atol=1e-7)
    np.testing.assert_array_equal(back.half, some.half)


def test_every_child_may_be_missing(tmp_path):
    path = pytom(tmp_path / "a.xml", "", ROTATION, '<Shift X="1" Y="2" Z="3"/>', '<Score Value="NAN"/>', '<Class Name="left"/>')
    path.write_text(path.read_text().replace('<Particle Filename="p0.em"></Particle>', '<Particle Filename="p0.em"/>'))
    particles = read(path)
    assert (particles.scores, particles.classes, particles.coordinates) == (None, None, None)
    np.testing.assert_array_equal(particles.poses.shifts_angst[2], [2, 4, 6])
    np.testing.assert_array_equal(particles.poses.rotations[0], np.eye(3))
    assert particles.weight_paths == (None,) * 5
    # all get poses and scores: what was missing is added, the rest stays
    shifts = np.arange(15.0).reshape(5, 3)
    write_particles(tmp_path / "b.xml", particles.with_poses(Poses(particles.poses.rotations[[1] * 5], shifts)), {"ngScore": np.arange(5.0)})
    back = read(tmp_path / "b.xml")
    np.testing.assert_allclose(back.poses.shifts_angst, shifts, atol=1e-6)
    np.testing.assert_allclose(back.poses.rotations, particles.poses.rotations[[1] * 5], atol=1e-7)
    np.testing.assert_array_equal(back.scores, np.arange(5.0))
    assert '<Class Name="left"/>' in (tmp_path / "b.xml").read_text()
    with pytest.warns(NoAnglesWarning):
        read(pytom(tmp_path / "c.xml", "", ""))


def test_what_is_not_known_survives(tmp_path):
    text = (
        "<?xml version='1.0' encoding='UTF-8'?>\n<!-- mine --><Job>\n<ParticleList Path='x/'>\n"
        "<Particle Extra='1' Filename='p&amp;0.em' ><!-- a > b --><Special value='a&lt;b'><Shift X='9' Y='9' Z='9'/></Special>"
        "<Shift Z = '3' X='1' Y='2' Note=\"it's\"/></Particle>\n\n\t<Particle Filename=\"p1.em\"/>\n</ParticleList>\n<Other/></Job>\n"
    )
    (tmp_path / "a.xml").write_text(text)
    with pytest.warns(NoAnglesWarning):
        particles = read(tmp_path / "a.xml")
    assert particles.names == ("p&0.em", "p1.em")
    # the shift is the particle's own, not that of another element
    np.testing.assert_array_equal(particles.poses.shifts_angst, [[2, 4, 6], [0, 0, 0]])
    write_particles(tmp_path / "b.xml", particles)
    assert (tmp_path / "b.xml").read_text() == text
    moved = dataclasses.replace(particles, names=("new<&0.em", "p1.em"))
    write_particles(tmp_path / "b.xml", moved.with_poses(Poses(particles.poses.rotations, particles.poses.shifts_angst + 2)))
    expected = text.replace("'p&amp;0.em'", '"new&lt;&amp;0.em"').replace(
        "<Shift Z = '3' X='1' Y='2' Note", '<Shift Z = "4.000000" X="2.000000" Y="3.000000" Note'
    )
    expected = expected.replace(
        '<Particle Filename="p1.em"/>', '<Particle Filename="p1.em">\n    <Shift X="1.000000" Y="1.000000" Z="1.000000"/>\n  </Particle>'
    )
    assert (tmp_path / "b.xml").read_text() == expected
    write_particles(tmp_path / "b.xml", particles.take([1]))
    assert (tmp_path / "b.xml").read_text() == text.replace(text[text.index("<Particle Extra") : text.index('<Particle Filename="p1')], "")
    assert left_behind(particles, next(f for f in list_formats() if f.key == "relion")) == ["element Special"]


# ---- wedges


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(("angles", "tilts"), [((20, 50), (-70, 40)), ((50, 20), (-40, 70)), ((30, 30), (-60, 60)), ((60, 10), (-30, 80))])
def test_single_tilt_wedges_sample_their_half_planes(tmp_path, wrapped, angles, tilts):
    """Field case 34: -70 to 40 and its mirror image are not the same."""
    wedge = single(*angles, 'CutoffRadius="0.0" Smooth="0.0"')
    wedge = f'<Wedge Type="SingleTiltWedge">{wedge}</Wedge>' if wrapped else wedge
    (weight,) = read(pytom(tmp_path / "a.xml", ROTATION + wedge)).weight_paths
    assert weight == (TiltRange(*map(float, tilts), smooth_voxels=0.0),)
    for n in (32, 33):
        check_sampled(union_weights(n, weight), *tilts)


@pytest.mark.parametrize(("z1", "across", "sign"), [(90, "y", 1), (-90, "y", -1), (180, "x", -1)])
def test_a_turned_tilt_axis(tmp_path, z1, across, sign):
    """TiltAxisRotation turns the plain wedge as PyTom turns volumes: the direction x of the plain one goes to Rz(z1) x."""
    axis = f'<TiltAxisRotation Z1="{z1}" Z2="0" X="0"/>'
    (weight,) = read(pytom(tmp_path / "a.xml", ROTATION + single(20, 50, inside=axis))).weight_paths
    # Rz(90) x = y, Rz(-90) x = -y, Rz(180) x = -x: k and -k are one, so the sign goes to z
    check_sampled(union_weights(32, weight), -70, 40, across, sign)


def test_double_tilt_old_and_volume_wedges(tmp_path):
    axis = '<TiltAxisRotation Z1="90" Z2="0" X="0"/>'
    double = f"<DoubleTiltWedge>{single(30, 30, 'Smooth=' + chr(34) + '0' + chr(34))}{single(40, 35, inside=axis)}</DoubleTiltWedge>"
    path = pytom(
        tmp_path / "a.xml",
        ROTATION + f'<Wedge Type="DoubleTiltWedge">{double}</Wedge>',
        '<WedgeInfo Angle="25" CutoffRadius="7"><TiltAxisRotation Z1="0" Z2="0" X="0"/></WedgeInfo>',
        '<Wedge Type="Wedge3dCTF"><Wedge3dCTF Filename="ctf.mrc"/></Wedge>',
        '<GeneralWedge Filename="general.em"/>',
        "<Wedge Type='SingleTiltWedge'/>",
    )
    double, old, ctf, general, none = read(path).weight_paths
    n = 32
    weights = union_weights(n, double)
    y_series, x_series = (union_weights(n, [part]) for part in double)
    check_sampled(y_series, -60, 60)
    check_sampled(x_series, -50, 55, "y")
    np.testing.assert_array_equal(weights, np.maximum(y_series, x_series))
    assert old == (TiltRange(-65.0, 65.0, smooth_voxels=0.0, cutoff_voxels=7.0),)
    assert (ctf, general, none) == (tmp_path / "ctf.mrc", tmp_path / "general.em", None)
    with pytest.raises(GlocalError, match="5 of 5 particle volumes not found"):
        read(path, require_volumes=True)
    for i in range(5):
        write_volume(tmp_path / f"p{i}.em", Volume(np.ones((4, 4, 4), np.float32), 2.0))
    with pytest.raises(GlocalError, match="2 of 2 weight volumes not found: ctf.mrc, general.em"):
        read(path, require_volumes=True)


def test_no_wedge_and_wedges_without_sense(tmp_path):
    """Field case 35: 0 is no wedge; negative angles and 90 or more are refused with their line."""
    assert read(pytom(tmp_path / "a.xml", ROTATION + single(0, 0))).weight_paths == (None,)
    assert read(pytom(tmp_path / "a.xml", ROTATION + single(30, 45))).weight_paths == ((TiltRange(-60.0, 45.0, smooth_voxels=0.0),),)
    for angles, said in (((-10, 30), "-10"), ((30, 90), "90"), ((95, 30), "95"), (("nan", 30), "nan")):
        with pytest.raises(GlocalError, match=rf"a.xml:3: .*{said}"):
            read(pytom(tmp_path / "a.xml", ROTATION, ROTATION + single(*angles)))


# ---- from elsewhere


def test_a_new_list_holds_what_it_can(tmp_path):
    """A list of another format becomes XML that says the same."""
    labels = "subtomo_num tomo_num halfset x_shift y_shift z_shift phi psi the orig_x orig_y orig_z score class".split()
    rows = ["7 3 A 1 2 3 10 20 30 100 200 50 0.5 2", "9 4 B -1 0 0.5 10 20 180 101 201 51 0.25 1"]
    (tmp_path / "m.star").write_text("data_stopgap_motivelist\nloop_\n" + "".join(f"_{k}\n" for k in labels) + "\n".join(rows) + "\n")
    particles = read(tmp_path / "m.star", particle_names="s<{}>.em")
    wedges = ((TiltRange(-70, 40, cutoff_voxels=6.0),), (TiltRange(-60, 60), TiltRange(-50, 45, "x")))
    particles = dataclasses.replace(particles, weight_paths=wedges, box_size=16)
    write_particles(tmp_path / "out.xml", particles)
    back = read(tmp_path / "out.xml")
    assert (back.names, back.tomograms, back.half.tolist()) == (("s<7>.em", "s<9>.em"), ("3", "4"), [1, 2])
    np.testing.assert_allclose(back.poses.rotations, particles.poses.rotations, atol=1e-7)
    np.testing.assert_allclose(back.poses.shifts_angst, particles.poses.shifts_angst, atol=1e-5)
    np.testing.assert_array_equal(back.coordinates.voxels, particles.coordinates.voxels)
    assert back.scores.tolist() == [0.5, 0.25] and back.classes.tolist() == [2, 1]
    for mine, found in zip(wedges, back.weight_paths, strict=True):
        inside = union_weights(16, [dataclasses.replace(t, cutoff_voxels=6.0) for t in mine])
        np.testing.assert_array_equal(union_weights(16, [dataclasses.replace(t, cutoff_voxels=6.0) for t in found]), inside)
    with pytest.warns(UserWarning, match="cannot hold the wedge of tilts 10 to 60"):
        write_particles(tmp_path / "out.xml", dataclasses.replace(particles, weight_paths=((TiltRange(10, 60),), None)))


@pytest.mark.filterwarnings("ignore:.*the list has no angles")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("data_\n", "not a PyTom particle list: expected XML, found 'data_'"),
        ("<TiltSeries/>", "expected one element ParticleList, found element TiltSeries"),
        ("<ParticleList/>", "a.xml:1: the list has no particles"),
        ("<ParticleList>\n<Particle Filename='a'>\n</ParticleList>", "a.xml:3: not well-formed XML"),
        ("<ParticleList>\n<Particle/></ParticleList>", "a.xml:2: Particle has no Filename"),
        ("<ParticleList>\n<Particle Filename='a'><Shift X='1' Y='2'/></Particle></ParticleList>", "a.xml:2: Shift has no Z"),
        ("<ParticleList><Particle Filename='a'>\n<Rotation Z1='x' Z2='0' X='0'/></Particle></ParticleList>", "a.xml:2: Z1 of Rotation is 'x'"),
        (
            "<ParticleList><Particle Filename='a'><Rotation Z1='0' Z2='0' X='0' Paradigm='ZYZ'/></Particle></ParticleList>",
            "the Paradigm ZYZ, expected ZXZ",
        ),
        ("<ParticleList><Particle Filename='a'><Wedge><Other/></Wedge></Particle></ParticleList>", "a wedge of the kind Other is not read"),
        ("<ParticleList><Particle Filename='a'><DoubleTiltWedge/></Particle></ParticleList>", "holds 0 elements SingleTiltWedge, expected 2"),
        (
            "<ParticleList>\n<Particle Filename='a'/>\n<Particle Filename='./a'/></ParticleList>",
            r"a.xml:3: particle ./a stands twice, first in .*:2 as a",
        ),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><ParticleList/>", "entities of its own"),
    ],
)
def test_refused(tmp_path, text, message):
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(GlocalError, match=message) as error:
        read(tmp_path / "a.xml")
    assert "\n" not in str(error.value)
