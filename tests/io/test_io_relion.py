"""RELION lists: poses by hand and against gemmi, what is written back, and what is refused."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import mrcfile
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.errors import GlocalError, InputError, ListError
from numba_glocal.geometry import angle_between_deg, rotvec_to_matrix
from numba_glocal.io import ListFormat, read_particles, register_format, write_particles
from numba_glocal.io.relion import ANGLES, ORIGINS_ANGST
from numba_glocal.io.star import read_star
from numba_glocal.values import ParticleSet, Poses

gemmi = pytest.importorskip("gemmi")
pytestmark = pytest.mark.filterwarnings("ignore:.*the list has no angles")  # most of these lists need none


def _volumes(folder: Path, names, box=4, pixel_size=3.0):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with mrcfile.new(path, overwrite=True) as file:
            file.set_data(np.ones((box, box, box), np.float32))
            file.voxel_size = pixel_size


def _list(path: Path, columns: dict[str, list[str]], block="particles", optics: dict[str, list[str]] | None = None, extra=""):
    def table(name, cols):
        rows = "".join(" ".join(row) + "\n" for row in zip(*cols.values(), strict=True))
        return f"\ndata_{name}\n\nloop_\n" + "".join(f"_{label} #{i + 1}\n" for i, label in enumerate(cols)) + rows + "\n"

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(extra + (table("optics", optics) if optics else "") + table(block, columns))
    return path


OPTICS = {"rlnOpticsGroup": ["1"], "rlnOpticsGroupName": ["og1"], "rlnImagePixelSize": ["3.000000"], "rlnImageSize": ["4"]}
POSES = {
    "rlnImageName": ["a.mrc", "b.mrc", "c.mrc"],
    "rlnAngleRot": ["10.0", "-170.50", "1.5e1"],
    "rlnAngleTilt": ["0", "90.00", "180"],
    "rlnAnglePsi": ["5", "0.250", "-60"],
}
ANGST = {"rlnOriginXAngst": ["1.5", "-2.25", "0"], "rlnOriginYAngst": ["0", "3.0", "0.0"], "rlnOriginZAngst": ["-6", "0", "00.00"]}
PIXEL = {"rlnOriginX": ["0.5", "-0.75", "0"], "rlnOriginY": ["0", "1.0", "0.0"], "rlnOriginZ": ["-2", "0", "00.00"]}


def _cif(path, label, block=None):
    document = gemmi.cif.read(str(path))
    found = document[block] if block else next(b for b in document if b.find_loop("_rlnImageName"))
    return list(found.find_loop(f"_{label}"))


# ---- poses


@pytest.mark.parametrize("kind", ["angst", "pixel", "both", "3.0"])
def test_poses_by_hand(tmp_path, kind):
    _volumes(tmp_path, POSES["rlnImageName"])
    columns = {**POSES, **(ANGST if kind in ("angst", "both") else {}), **(PIXEL if kind in ("pixel", "both", "3.0") else {})}
    path = _list(tmp_path / "p.star", columns, optics=None if kind == "3.0" else OPTICS, block="" if kind == "3.0" else "particles")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        particles = read_particles(path)
    # origin = -s, 3 A a voxel
    np.testing.assert_allclose(particles.poses.shifts_angst, [[-1.5, 0, 6], [2.25, -3, 0], [0, 0, 0]])

    def rz(deg):
        c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
        return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])

    def ry(deg):
        c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
        return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])

    for rotation, (rot, tilt, psi) in zip(particles.poses.rotations, [(10, 0, 5), (-170.5, 90, 0.25), (15, 180, -60)], strict=True):
        np.testing.assert_allclose(rotation, (rz(rot) @ ry(tilt) @ rz(psi)).T, atol=1e-12)
    assert particles.pixel_size_angst == 3.0 and particles.box_size == 4
    assert particles.pixel_size_source == ("volume headers" if kind == "3.0" else "list (rlnImagePixelSize)")


def test_real_lists_hold_what_gemmi_finds(shared):
    folder = shared / "data/real-70s"
    for name, kind, premultiplied in (
        ("particles.star", "", False),
        ("perturbed.star", "Angst", False),
        ("premultiplied/perturbed.star", "Angst", True),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            particles = read_particles(folder / name)
        path = folder / name
        origins = np.array([_cif(path, f"rlnOrigin{a}{kind}") for a in "XYZ"], dtype=float).T * (1 if kind else 12)
        np.testing.assert_allclose(particles.poses.shifts_angst, -origins)
        angles = np.array([_cif(path, f"rlnAngle{a}") for a in ("Rot", "Tilt", "Psi")], dtype=float).T
        expected = Rotation.from_euler("ZYZ", angles, degrees=True).as_matrix().swapaxes(1, 2)
        np.testing.assert_allclose(particles.poses.rotations, expected, atol=1e-12)
        assert list(particles.names) == _cif(path, "rlnImageName")
        assert particles.half.tolist() == [int(v) for v in _cif(path, "rlnRandomSubset")]
        assert list(particles.tomograms) == _cif(path, "rlnMicrographName")
        assert [p.name for p in particles.weight_paths] == _cif(path, "rlnCtfImage")
        assert all(p.parent.samefile(path.parent) for p in particles.volume_paths)
        assert (len(particles), particles.box_size, particles.pixel_size_angst, particles.premultiplied) == (40, 32, 12.0, premultiplied)


def test_angstrom_wins_with_a_warning(shared, tmp_path):
    with pytest.warns(UserWarning, match="perturbed.star:37: .* differ in 40 of 40 rows; Angstrom is taken"):
        particles = read_particles(shared / "data/real-70s/perturbed.star")
    assert np.abs(particles.poses.shifts_angst).max() > 10
    out = tmp_path / "out.star"
    write_particles(out, particles)
    angst, pixel = (np.array([_cif(out, f"rlnOrigin{a}{kind}") for a in "XYZ"], dtype=float) for kind in ("Angst", ""))
    np.testing.assert_allclose(angst, pixel * 12, atol=1e-5)
    for label in ("rlnOriginXAngst", "rlnAngleRot", "rlnImageName", "rlnCoordinateZ"):
        assert _cif(out, label) == _cif(shared / "data/real-70s/perturbed.star", label)


# ---- writing


def test_unchanged_lists_come_back_token_by_token(shared, tmp_path):
    """Every accepted list: all blocks, columns, tokens and their order, by gemmi's reading."""
    names = [
        "lists/relion30_small.star",
        "lists/relion30_warp_1037.star",
        "lists/relion31_no_optics.star",
        "real-70s/particles.star",
        "real-70s/premultiplied/particles.star",
    ]
    for name in names:
        path = shared / "data" / name
        write_particles(tmp_path / "out.star", read_particles(path, require_volumes=False))
        before, after = gemmi.cif.read(str(path)), gemmi.cif.read(str(tmp_path / "out.star"))
        assert [b.name for b in before] == [b.name for b in after]
        for b, a in zip(before, after, strict=True):
            loops = [[(i.loop.tags, i.loop.values) for i in block if i.loop is not None] for block in (b, a)]
            assert loops[0] == loops[1], name


def test_only_changed_poses_get_new_digits(tmp_path):
    _volumes(tmp_path, POSES["rlnImageName"])
    columns = {**POSES, **ANGST, "rlnLCCmax": ["0.1", "1e-3", "007"], "rlnRandomSubset": ["1", "2", "1"]}
    path = _list(tmp_path / "p.star", columns, optics=OPTICS, extra="# version 30001\n\ndata_general\n_kept  'as it is'\n")
    particles = read_particles(path)
    rotations, shifts = particles.poses.rotations.copy(), particles.poses.shifts_angst.copy()
    rotations[1] = rotvec_to_matrix([0.1, 0.2, 0.3]) @ rotations[1]
    shifts[2] = [1.25, -2, 0]
    out = tmp_path / "out.star"
    write_particles(
        out,
        particles.with_poses(Poses(rotations, shifts)),
        {"rlnLogLikeliContribution": np.array([1.5, -2e12, np.nan]), "ngAngleSigmaDeg": np.array([0.25, 1e-5, 3])},
    )
    for label in ("rlnAngleRot", "rlnAngleTilt", "rlnAnglePsi"):
        found = _cif(out, label)
        assert [found[0], found[2]] == [POSES[label][0], POSES[label][2]] and len(found[1].split(".")[1]) == 6
    assert _cif(out, "rlnOriginXAngst") == ["1.5", "-2.25", "-1.250000"]
    assert _cif(out, "rlnOriginZAngst") == ["-6", "0", "0.000000"]
    assert _cif(out, "rlnLCCmax") == ["0.1", "1e-3", "007"]
    assert _cif(out, "rlnLogLikeliContribution") == ["1.500000", "-2.000000e+12", "nan"]
    assert _cif(out, "ngAngleSigmaDeg") == ["0.250000", "1.000000e-05", "3.000000"]
    text = out.read_text()
    assert text.index("# version 30001") < text.index("data_general") < text.index("data_optics") < text.index("data_particles")
    assert "'as it is'" in text
    again = read_particles(out)
    assert angle_between_deg(again.poses.rotations, rotations).max() < 1e-5
    np.testing.assert_allclose(again.poses.shifts_angst, shifts, atol=1e-6)
    # the first set is as it was
    write_particles(out, particles)
    assert _cif(out, "rlnAngleRot") == POSES["rlnAngleRot"]


@pytest.mark.parametrize(("optics", "expected"), [(OPTICS, "rlnOriginXAngst"), (None, "rlnOriginX")])
def test_missing_pose_columns_are_added(tmp_path, optics, expected):
    _volumes(tmp_path, ["a.mrc", "b.mrc"])
    particles = read_particles(_list(tmp_path / "p.star", {"rlnImageName": ["a.mrc", "b.mrc"]}, optics=optics))
    write_particles(tmp_path / "out.star", particles)
    assert read_star(tmp_path / "out.star")["particles"].labels == ["rlnImageName"]
    moved = Poses(rotvec_to_matrix([[0, 0, 0.5], [0, 0, 0]]), np.array([[3.0, 0, 0], [0, 0, 0]]))
    write_particles(tmp_path / "out.star", particles.with_poses(moved).with_half([2, 1]))
    assert _cif(tmp_path / "out.star", expected) == ["-3.000000" if optics else "-1.000000", "0.000000"]
    assert _cif(tmp_path / "out.star", "rlnRandomSubset") == ["2", "1"]
    again = read_particles(tmp_path / "out.star")
    np.testing.assert_allclose(again.poses.rotations, moved.rotations, atol=1e-7)
    assert particles.half.tolist() == [0, 0] and again.half.tolist() == [2, 1]


def test_particle_block_is_called_particles_beside_optics(tmp_path):
    # field case 12
    _volumes(tmp_path, POSES["rlnImageName"])
    for block in ("", "images", "particles"):
        with_optics = read_particles(_list(tmp_path / "p.star", POSES, block=block, optics=OPTICS))
        write_particles(tmp_path / "out.star", with_optics)
        assert [b.name for b in read_star(tmp_path / "out.star").blocks] == ["optics", "particles"]
        alone = read_particles(_list(tmp_path / "p.star", POSES, block=block))
        write_particles(tmp_path / "out.star", alone)
        assert [b.name for b in read_star(tmp_path / "out.star").blocks] == [block]


def test_take_keeps_rows_together(shared, tmp_path):
    path = shared / "data/real-70s/particles.star"
    particles = read_particles(path)
    some = particles.take([7, 3, 30]).take([2, 0])
    write_particles(tmp_path / "out.star", some)
    for label in ("rlnImageName", "rlnAngleRot", "rlnCoordinateX"):
        column = _cif(path, label)
        assert _cif(tmp_path / "out.star", label) == [column[30], column[7]]
    with pytest.raises(ListError, match=r"column _x has shape \(3,\), expected \(2,\)"):
        write_particles(tmp_path / "out.star", some, {"x": [1, 2, 3]})


def test_particles_from_elsewhere_become_a_31_list(tmp_path):
    names = ("a.mrc", "sub/b c.mrc")
    _volumes(tmp_path, [*names, "sub/w.mrc"])
    poses = Poses(rotvec_to_matrix([[0.1, 0.2, 0.3], [1, 2, 0.5]]), np.array([[1.0, 2, 3], [0, 0, -0.5]]))
    particles = ParticleSet(
        names, tuple(tmp_path / n for n in names), (None, tmp_path / "sub/w.mrc"), poses, np.array([1, 2], np.int8), ("01", "12e3"),
        np.zeros(2, np.int32), 3.0, "simulation", 4, True,
    )  # fmt: skip
    write_particles(tmp_path / "out.star", particles)
    again = read_particles(tmp_path / "out.star")
    np.testing.assert_allclose(again.poses.rotations, poses.rotations, atol=1e-7)
    np.testing.assert_allclose(again.poses.shifts_angst, poses.shifts_angst, atol=1e-6)
    assert again.names == names and again.tomograms == ("01", "12e3") and again.half.tolist() == [1, 2] and again.premultiplied
    assert again.weight_paths[0] is None and again.weight_paths[1].samefile(tmp_path / "sub/w.mrc")
    assert _cif(tmp_path / "out.star", "rlnCtfImage") == ["None", "sub/w.mrc"]


def test_renamed_particles_are_written_under_their_names(shared, tmp_path):
    particles = read_particles(shared / "data/real-70s/particles.star")
    absolute = dataclasses.replace(particles, names=tuple(str(p) for p in particles.volume_paths))
    write_particles(tmp_path / "out.star", absolute)
    assert _cif(tmp_path / "out.star", "rlnImageName")[0] == str(particles.volume_paths[0])


def test_relion_reads_what_is_written(shared, relion, tmp_path):
    import subprocess

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        particles = read_particles(shared / "data/real-70s/perturbed.star")
    write_particles(tmp_path / "out.star", particles, {"rlnLogLikeliContribution": np.arange(40.0), "ngAngleSigmaDeg": np.ones(40)})
    subprocess.run(
        ["relion_star_handler", "--i", "out.star", "--o", "copy.star", "--select", "rlnRandomSubset", "--minval", "1", "--maxval", "1"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert _cif(tmp_path / "copy.star", "rlnImageName", "particles") == [n for n, h in zip(particles.names, particles.half, strict=True) if h == 1]
    copied = np.array(_cif(tmp_path / "copy.star", "rlnOriginXAngst", "particles"), dtype=float)
    np.testing.assert_allclose(copied, -particles.poses.shifts_angst[particles.half == 1, 0], atol=1e-5)


# ---- pixel size


def test_pixel_size_of_a_30_list(shared):
    particles = read_particles(shared / "data/lists/relion30_warp_1037.star", require_volumes=False)
    assert (particles.pixel_size_angst, particles.pixel_size_source) == (6.896, "list (rlnPixelSize)")
    assert read_particles(shared / "data/lists/relion30_small.star", require_volumes=False).names[0].startswith("../warp/")


def test_pixel_size_resolver(tmp_path):
    _volumes(tmp_path, ["a.mrc"], pixel_size=3.0)
    detector = {
        "rlnImageName": ["a.mrc"],
        "rlnDetectorPixelSize": ["6.0"],
        "rlnMagnification": ["20000"],
        "rlnOriginX": ["2"],
        "rlnOriginY": ["0"],
        "rlnOriginZ": ["0"],
    }
    path = _list(tmp_path / "p.star", detector, block="")
    particles = read_particles(path)
    assert (particles.pixel_size_angst, particles.pixel_size_source) == (3.0, "list (rlnDetectorPixelSize, rlnMagnification)")
    # the option goes before all, and is written, so that origins in voxels mean the same
    with pytest.warns(UserWarning, match="given pixel size is 3.5 A, the list .* says 3 A, the volumes' headers say 3 A"):
        particles = read_particles(path, pixel_size_angst=3.5)
    assert (particles.pixel_size_angst, particles.pixel_size_source) == (3.5, "option")
    assert particles.poses.shifts_angst[0, 0] == -7.0
    write_particles(tmp_path / "out.star", particles)
    with pytest.warns(UserWarning, match="list is taken|list.*3.5 A, the volumes' headers 3 A"):
        assert read_particles(tmp_path / "out.star").pixel_size_angst == pytest.approx(3.5)
    # a header that says 0 or 1 is not believed
    for unbelievable in (0.0, 1.0):
        _volumes(tmp_path, ["a.mrc"], pixel_size=unbelievable)
        plain = _list(tmp_path / "q.star", {"rlnImageName": ["a.mrc"]})
        with pytest.raises(InputError, match="no pixel size in the list or in the volumes' headers"):
            read_particles(plain)
        assert read_particles(plain, pixel_size_angst=1.0).pixel_size_angst == 1.0
    with pytest.raises(InputError, match="expected a number above 0"):
        read_particles(plain, pixel_size_angst=0)


# ---- paths


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # beside the list; relative to the project two folders up; .. inside; with :mrc; under a given root; absolute
    _volumes(tmp_path / "project", ["Extract/x.mrc", "lists/y.mrc", "c/z.mrc", "a[15.00]-1.ctf"])
    _volumes(tmp_path / "elsewhere", ["deep/w.mrc"])
    where = {
        "y.mrc": "project/lists/y.mrc",
        "Extract/x.mrc": "project/Extract/x.mrc",
        "../c/z.mrc": "project/c/z.mrc",
        "a[15.00]-1.ctf:mrc": "project/a[15.00]-1.ctf",
        "deep/w.mrc": "elsewhere/deep/w.mrc",
        str(tmp_path / "elsewhere/../project/c/../lists/../Extract/../a[15.00]-1.ctf:mrc"): None,
    }
    for name, expected in where.items():
        path = _list(tmp_path / "project/lists/p.star", {"rlnImageName": [name]}, optics=OPTICS)
        particles = read_particles(path, root=tmp_path / "elsewhere")
        assert particles.names == (name,)  # kept byte for byte
        assert particles.volume_paths[0].samefile(tmp_path / (expected or "project/a[15.00]-1.ctf"))
        write_particles(tmp_path / "out.star", particles)
        assert _cif(tmp_path / "out.star", "rlnImageName") == [name]
    # the current folder, when the list is elsewhere
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    path = _list(tmp_path / "other/p.star", {"rlnImageName": ["Extract/x.mrc"]}, optics=OPTICS)
    assert read_particles(path).volume_paths[0].samefile(tmp_path / "project/Extract/x.mrc")
    # a root that was named goes first
    _volumes(tmp_path / "named", ["Extract/x.mrc"])
    assert read_particles(path, root=tmp_path / "named").volume_paths[0].samefile(tmp_path / "named/Extract/x.mrc")
    with pytest.raises(InputError, match="folder for volumes does not exist"):
        read_particles(path, root=tmp_path / "nothing")


def test_missing_volumes_are_one_error(tmp_path):
    _volumes(tmp_path, ["v0.mrc"])
    path = _list(tmp_path / "p.star", {"rlnImageName": [f"v{i}.mrc" for i in range(7)]}, optics=OPTICS)
    with pytest.raises(InputError) as error:
        read_particles(path, root=tmp_path)
    text = str(error.value)
    assert "6 of 7 particle volumes not found: v1.mrc, v2.mrc, v3.mrc ...; tried" in text and "\n" not in text
    assert "--root" not in text
    with pytest.raises(InputError, match="--root gives it$"):
        read_particles(path)
    for folder in (tmp_path, tmp_path.parent, Path.cwd()):
        assert str(folder / "v1.mrc") in text
    _volumes(tmp_path, [f"v{i}.mrc" for i in range(7)])
    path = _list(tmp_path / "p.star", {"rlnImageName": [f"v{i}.mrc" for i in range(7)], "rlnCtfImage": ["w.mrc"] * 7}, optics=OPTICS)
    with pytest.raises(InputError, match="1 of 1 weight volumes not found: w.mrc"):
        read_particles(path)
    assert read_particles(path, require_volumes=False).weight_paths[0] == tmp_path / "w.mrc"


def test_names_are_opaque_text(tmp_path):
    # field cases 1 and 10
    _volumes(tmp_path, ["01.mrc", "12e3.mrc"])
    columns = {"rlnImageName": ["01.mrc", "12e3.mrc"], "rlnTomoName": ["01", "250531_l10p1_6.tomostar"]}
    particles = read_particles(_list(tmp_path / "p.star", columns, optics=OPTICS))
    assert particles.tomograms == ("01", "250531_l10p1_6.tomostar")
    write_particles(tmp_path / "out.star", particles)
    assert _cif(tmp_path / "out.star", "rlnTomoName") == columns["rlnTomoName"]


def test_half_sets(tmp_path):
    _volumes(tmp_path, POSES["rlnImageName"])

    def halves(*values):
        return read_particles(_list(tmp_path / "p.star", {**POSES, "rlnRandomSubset": list(values)}, optics=OPTICS)).half.tolist()

    assert halves("1", "2", "2.000000") == [1, 2, 2]
    # field case 14: one half only is for the run to refuse, the list is as it is
    assert halves("1", "1", "1") == [1, 1, 1]
    for value in ("0", "3", '""', "A", "1.5", "-1"):
        with pytest.raises(ListError, match=r"p.star:\d+: _rlnRandomSubset is .*, expected 1 or 2") as error:
            halves("1", value, "2")
        # the line that holds it
        line = int(str(error.value).split(":")[1])
        assert (tmp_path / "p.star").read_text().split("\n")[line - 1].endswith(f" {value}")


def test_unreadable_particle_does_not_refuse_the_list(tmp_path):
    _volumes(tmp_path, POSES["rlnImageName"])
    (tmp_path / "b.mrc").write_bytes(b"")
    assert len(read_particles(_list(tmp_path / "p.star", POSES, optics=OPTICS))) == 3


# ---- refused

NAMES = {"rlnImageName": ["a.mrc", "b.mrc", "c.mrc"], "rlnOpticsGroup": ["1", "2", "1"]}
TWO = {"rlnOpticsGroup": ["1", "2"], "rlnImagePixelSize": ["3.0", "3.0"], "rlnImageSize": ["4", "4"], "rlnCtfDataAreCtfPremultiplied": ["1", "1"]}
ONE = {"rlnImageName": ["a.mrc"]}
# name: columns, optics, part of the message
REFUSED = {
    "name twice": ({"rlnImageName": ["a.mrc", "b.mrc", "a.mrc"]}, OPTICS, ":18: particle a.mrc stands twice, first in line 16"),
    "volume twice": (
        {"rlnImageName": ["a.mrc", "b.mrc", "./a.mrc:mrc"]},
        OPTICS,
        ":18: particle ./a.mrc:mrc stands twice, first in line 16 (as a.mrc)",
    ),
    "stack": ({"rlnImageName": ["a.mrc", "000007@stack.mrcs", "b.mrc"]}, OPTICS, ":17: 000007@stack.mrcs is an image of a stack"),
    "empty name": ({"rlnImageName": ["a.mrc", '""', "b.mrc"]}, OPTICS, ":17: _rlnImageName is empty"),
    "no image names": ({"rlnMicrographName": ["t.mrc"], "rlnCoordinateX": ["1"]}, OPTICS, "no column _rlnImageName"),
    "no rows": ({"rlnImageName": []}, OPTICS, "the list has no particles"),
    "pixel sizes": (NAMES, {**TWO, "rlnImagePixelSize": ["3.0", "4.0"]}, "different pixel sizes: 1 3 A (line 9), 2 4 A (line 10); expected one"),
    "box sizes": (NAMES, {**TWO, "rlnImageSize": ["4", "6"]}, "different box sizes: 1 4 (line 9), 2 6 (line 10); expected one"),
    "premultiplied or not": (NAMES, {**TWO, "rlnCtfDataAreCtfPremultiplied": ["1", "0"]}, "_rlnCtfDataAreCtfPremultiplied is 0 and 1"),
    "unknown group": ({**NAMES, "rlnOpticsGroup": ["1", "3", "1"]}, TWO, ":19: optics group 3 is not in data_optics"),
    "no group column": ({"rlnImageName": ["a.mrc", "b.mrc", "c.mrc"]}, TWO, "no column _rlnOpticsGroup"),
    "group twice": (NAMES, {**TWO, "rlnOpticsGroup": ["1", "1"]}, ":10: optics group 1 stands twice, first in line 9"),
    "box against list": ({"rlnImageName": ["a.mrc"]}, {**OPTICS, "rlnImageSize": ["8"]}, "rlnImageSize is 8, the volumes have box 4"),
    "mixed boxes": ({"rlnImageName": ["a.mrc", "big.mrc"]}, None, "different box sizes: 1 of box 4"),
    "angle": ({**ONE, **dict.fromkeys(ANGLES, ["0"]), "rlnAngleRot": ["north"]}, OPTICS, ":19: _rlnAngleRot is 'north', expected a finite"),
    "one angle missing": ({**ONE, "rlnAngleRot": ["1"], "rlnAnglePsi": ["2"]}, OPTICS, "no column _rlnAngleTilt; expected all of"),
    "two angles missing": ({**ONE, "rlnAngleTilt": ["1"]}, None, "no column _rlnAngleRot and _rlnAnglePsi; expected"),
    "one origin missing": ({**ONE, "rlnOriginX": ["1"], "rlnOriginY": ["2"]}, None, "no column _rlnOriginZ; expected"),
    "origin": ({**ONE, **dict.fromkeys(ORIGINS_ANGST, ["nan"])}, OPTICS, ":19: _rlnOriginXAngst is 'nan', expected a finite number"),
    "pixel size 0": ({"rlnImageName": ["a.mrc"]}, {**OPTICS, "rlnImagePixelSize": ["0"]}, "gives a pixel size of 0.0 A, expected a number above 0"),
    "pixel size differs by row": (
        {"rlnImageName": ["a.mrc", "b.mrc"], "rlnPixelSize": ["3", "4"]},
        None,
        ":8: pixel size 4 A (rlnPixelSize), but 3 A in line 7; expected one",
    ),
    "magnification 0": ({"rlnImageName": ["a.mrc"], "rlnDetectorPixelSize": ["3"], "rlnMagnification": ["0"]}, None, ":8: _rlnMagnification is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    columns, optics, part = REFUSED[name]
    _volumes(tmp_path, ["a.mrc", "b.mrc", "c.mrc"])
    _volumes(tmp_path, ["big.mrc"], box=6)
    path = _list(tmp_path / "p.star", columns, optics=optics)
    with pytest.raises(GlocalError) as error:
        read_particles(path)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_premultiplied_can_be_told(tmp_path):
    _volumes(tmp_path, ["a.mrc", "b.mrc", "c.mrc"])
    path = _list(tmp_path / "p.star", NAMES, optics=TWO)
    particles = read_particles(path)
    assert particles.premultiplied and particles.groups.tolist() == [0, 1, 0]
    assert not read_particles(path, premultiplied=False).premultiplied
    # a group without particles does not count
    used = {**NAMES, "rlnOpticsGroup": ["1", "1", "1"]}
    odd = {**TWO, "rlnImagePixelSize": ["3.0", "9.0"], "rlnImageSize": ["4", "9"], "rlnCtfDataAreCtfPremultiplied": ["0", "1"]}
    particles = read_particles(_list(tmp_path / "p.star", used, optics=odd))
    assert not particles.premultiplied and particles.pixel_size_angst == 3.0


# what is no list of particles, or not one that is read yet: one clear line
OTHERS = {
    "lists/relion5_run_it050_optimisation_set.star": "_rlnTomoTomogramsFile Tomograms/job_tomo/tomograms.star not found; tried /",
    "lists/warp2_matching_optimisation_set.star": "_rlnTomoTomogramsFile matching_tomograms.star not found; tried /",
    "lists/warp2_matching_tomograms.star": "a file of tomograms (data_global), expected a list of particles or an optimisation set",
    "relion5-2d-stacks/tomograms.star": "a file of tomograms (data_global)",
    "lists/stopgap_wedge_list.star": "expected data_stopgap_motivelist, found data_stopgap_wedgelist; a wedge list goes with its motive list",
    "lists/angles_90_26.em": "an EM file of 3 x 26 x 1 numbers, expected a motive list of 20 x n x 1; it looks like an angle list",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_named(shared, name):
    with pytest.raises(GlocalError) as error:
        read_particles(shared / "data" / name)
    text = str(error.value)
    assert OTHERS[name] in text and name in text and "\n" not in text


def test_other_refusals_of_real_lists(shared):
    for name, part in {
        "lists/relion_3.1_optics2.star": "different pixel sizes: opticsGroup1 2.446 A (line 14), opticsGroup2 3.446 A (line 15)",
        "lists/relion31.6opticsgroups.star": ":58: 3@Polish/job520/Micrographs/0003_shiny.mrcs is an image of a stack",
        "lists/relion30_warp_1037.star": "1037 of 1037 particle volumes not found",
        "bad-lists/duplicate_label.star": ":29: label",
        "bad-lists/stray_token.star": ":20: expected 4 columns, found 5",
        "bad-lists/web_page.star": "not a STAR file",
    }.items():
        with pytest.raises(GlocalError) as error:
            read_particles(shared / "data" / name)
        assert part in str(error.value)


def test_the_door(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_particles(tmp_path / "none.star")
    with pytest.raises(InputError, match="is a folder"):
        read_particles(tmp_path)
    _volumes(tmp_path, ["a.mrc"])
    particles = read_particles(_list(tmp_path / "list_without_suffix", {"rlnImageName": ["a.mrc"]}, optics=OPTICS))
    with pytest.raises(ListError, match="a list named \\*.docx is not written yet; expected .*RELION STAR"):
        write_particles(tmp_path / "out.docx", particles)
    seen = []
    register_format(ListFormat("test list", (".testlist",), read=lambda path, **options: seen.append((path, options)) or particles))
    (tmp_path / "x.testlist").write_text("")
    assert read_particles(tmp_path / "x.testlist", root="r") is particles and seen == [(tmp_path / "x.testlist", {"root": "r"})]
