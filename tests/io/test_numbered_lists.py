"""Dynamo, STOPGAP and TOM/AV3 lists: real ones cell by cell, names and numbers, wedges by the planes they sample, and what is refused."""

from __future__ import annotations

import dataclasses
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from numba_glocal.cli.main import main
from numba_glocal.errors import GlocalError, WeightsLeftOutWarning
from numba_glocal.io import format_of_file, left_behind, list_formats, read_particles, write_particles
from numba_glocal.io.wedge_list import read_wedge_list, write_wedge_list
from numba_glocal.values import Poses, TiltRange
from numba_glocal.wedge import union_weights

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sampled import check_sampled  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:.*the list has no angles"), pytest.mark.filterwarnings("ignore:.*have no half-sets")]


def read(path, **options):
    return read_particles(path, **{"pixel_size_angst": 2.0, "require_volumes": False, **options})


def refined(particles):
    """New poses, halves and scores for every particle."""
    n = len(particles)
    poses = Poses(particles.poses.rotations[::-1].copy(), particles.poses.shifts_angst + [2.0, 4.0, -1.0])
    return particles.with_poses(poses).with_half(np.arange(n) % 2 + 1), {"ngScore": np.linspace(0.25, 0.75, n), "ngShiftSigmaAngst": np.ones(n)}


def tbl(path, *rows, columns=36):
    """A table of rows given as {column: cell}."""
    path.write_text("".join(" ".join(str(row.get(c, 0)) for c in range(1, columns + 1)) + "\n" for row in rows))
    return path


def motl(path, rows, labels="motl_idx tomo_num object subtomo_num halfset x_shift y_shift z_shift phi psi the", block="stopgap_motivelist"):
    head = f"\ndata_{block}\n\nloop_\n" + "".join(f"_{label}\n" for label in labels.split())
    path.write_text(head + "\n" + "\n".join(rows) + "\n")
    return path


def em(path, table, kind=5, order="<"):
    """An EM file of columns x rows x 1 numbers."""
    table = np.asarray(table)
    header = struct.pack(f"{order}4B3i", 6 if order == "<" else 5, 0, 0, kind, table.shape[1], len(table), 1).ljust(512, b"\7")
    path.write_bytes(header + table.astype(f"{order}f{4 if kind == 5 else 8}").tobytes())
    return path


def motive_rows(n, **rows):
    """A motive list table; rows are named r4=..., counted from 1."""
    table = np.zeros((n, 20))
    table[:, 3] = np.arange(1, n + 1)
    for name, values in rows.items():
        table[:, int(name[1:]) - 1] = values
    return table


# ---- real lists


REAL = ["dynamo_35col.tbl", "dynamo_double.tbl", "stopgap_motl.star", "emmotl_au_1.em", "emmotl_ribosome.em"]


def numbers(path):
    """The cells of a list by the simplest means: (n, columns) texts, or numbers of an EM file."""
    if path.suffix == ".em":
        raw = path.read_bytes()
        return np.frombuffer(raw, "<f8" if raw[3] == 9 else "<f4", offset=512).reshape(-1, 20)
    rows = [line.split() for line in path.read_text().splitlines()]
    return np.array([row for row in rows if len(row) > 9])


# of each kind, counted from 0: number, tomogram, shifts, phi/psi/the (or tdrot/tilt/narot), coordinates, score, class
COLUMNS = {
    ".tbl": (0, 19, [3, 4, 5], [6, 7, 8], [23, 24, 25], 9, 21),
    ".star": (3, 1, [9, 10, 11], [12, 13, 14], [5, 6, 7], 8, 15),
    ".em": (3, 4, [10, 11, 12], [16, 17, 18], [7, 8, 9], 0, 19),
}


@pytest.mark.parametrize("name", REAL)
def test_real_lists(shared, tmp_path, name):
    path = shared / "data/lists" / name
    particles = read(path)
    table = numbers(path)
    number, tomogram, shifts, angles, places, score, kind = COLUMNS[path.suffix]
    ids = [int(float(cell)) for cell in table[:, number]]
    shown = {".tbl": "particle_{:06d}.em", ".star": "subtomograms/subtomo_{}.mrc", ".em": "particle_{}.em"}[path.suffix]
    assert list(particles.names) == [shown.format(i) for i in ids]
    assert list(particles.tomograms) == [str(int(float(cell))) for cell in table[:, tomogram]]
    np.testing.assert_allclose(particles.poses.shifts_angst, 2 * table[:, shifts].astype(float), rtol=1e-6)
    np.testing.assert_array_equal(particles.coordinates.voxels, table[:, places].astype(float))
    np.testing.assert_array_equal(particles.scores, table[:, score].astype(float))
    np.testing.assert_array_equal(particles.classes, table[:, kind].astype(float))
    assert particles.pixel_size_angst == 2.0
    expected_halves = {"A": 1, "B": 2}
    assert particles.half.tolist() == [expected_halves[row[4]] if path.suffix == ".star" else 0 for row in table]
    # written back: the same bytes; refined: only what was refined
    out = tmp_path / f"out{path.suffix}"
    write_particles(out, particles)
    assert out.read_bytes() == path.read_bytes()
    better, columns = refined(particles)
    write_particles(out, better, columns)
    after = numbers(out)
    changed = {score, *shifts, *angles} | ({4} if path.suffix == ".star" else set())
    same = [c for c in range(table.shape[1]) if c not in changed]
    np.testing.assert_array_equal(after[:, same], table[:, same])
    back = read(out)
    np.testing.assert_allclose(back.poses.rotations, better.poses.rotations, atol=2e-7)
    np.testing.assert_allclose(back.poses.shifts_angst, better.poses.shifts_angst, atol=2e-6)
    np.testing.assert_allclose(back.scores, columns["ngScore"], atol=1e-6)
    if path.suffix == ".star":
        np.testing.assert_array_equal(back.half, better.half)
    # a part of it, in another order
    write_particles(out, particles.take([5, 2]))
    np.testing.assert_array_equal(numbers(out), table[[5, 2]])
    assert read(out).names == (particles.names[5], particles.names[2])


def test_a_complex_cell_is_read_by_its_real_part(shared, tmp_path):
    assert "0+1.2074e-06i" in (shared / "data/lists/dynamo_35col.tbl").read_text()
    path = tbl(tmp_path / "a.tbl", {1: 1, 4: "1.5-2e-7i", 10: "-.25+3.i"}, {1: 2, 4: "2"})
    particles = read(path)
    np.testing.assert_array_equal(particles.poses.shifts_angst[:, 0], [3, 4])
    assert particles.scores.tolist() == [-0.25, 0]
    write_particles(tmp_path / "b.tbl", particles)
    assert (tmp_path / "b.tbl").read_bytes() == path.read_bytes()


def test_motive_lists_of_other_machines_and_with_a_header_of_their_own(tmp_path):
    table = motive_rows(3, r11=[1, 2, 3], r17=[10, 20, 30], r19=[0, 180, 90])
    path = em(tmp_path / "a.em", table, kind=9, order=">")
    particles = read(path)
    np.testing.assert_array_equal(particles.poses.shifts_angst[:, 0], [2, 4, 6])
    write_particles(tmp_path / "b.em", particles)
    assert (tmp_path / "b.em").read_bytes() == path.read_bytes()
    write_particles(tmp_path / "b.em", particles.take([2]))
    raw = (tmp_path / "b.em").read_bytes()
    assert struct.unpack(">3i", raw[4:16]) == (20, 1, 1) and raw[16:512] == b"\7" * 496 and len(raw) == 512 + 160


# ---- names and numbers


def test_group_numbers_are_no_particle_numbers(tmp_path):
    """Field case 15: object and subtomogram numbers differ; repeated ones are refused with both lines."""
    rows = ["1 1 1 11 A 0 0 0 0 0 0", "2 1 1 12 B 0 0 0 0 0 0", "3 1 2 13 A 0 0 0 0 0 0", "4 1 2 14 B 0 0 0 0 0 0"]
    particles = read(motl(tmp_path / "a.star", rows), particle_names="{:03d}.mrc")
    assert particles.names == ("011.mrc", "012.mrc", "013.mrc", "014.mrc")
    assert read(tmp_path / "a.star", particle_names="t{tomogram}/o{object}_{particle}.mrc").names[2] == "t1/o2_13.mrc"
    with pytest.raises(GlocalError, match="no place for the particle's number"):
        read(tmp_path / "a.star", particle_names="o{object}.mrc")
    rows[3] = rows[3].replace("14", "12")
    with pytest.raises(GlocalError, match=r"a.star:20: subtomo_num 12 stands twice, first in .*a.star:18"):
        read(motl(tmp_path / "a.star", rows), particle_names="{}.mrc")
    table = motive_rows(4, r6=[1, 1, 2, 2])
    assert read(em(tmp_path / "a.em", table)).names == ("particle_1.em", "particle_2.em", "particle_3.em", "particle_4.em")
    table[3, 3] = 2
    with pytest.raises(GlocalError, match=r"a.em, particle 4: the particle's number \(row 4\) 2 stands twice, first in .*a.em, particle 2"):
        read(em(tmp_path / "a.em", table))
    with pytest.raises(GlocalError, match=r"a.tbl:3: tag 5 stands twice, first in .*a.tbl:1"):
        read(tbl(tmp_path / "a.tbl", {1: 5}, {1: 6}, {1: 5}))


def test_names_are_templates(tmp_path):
    path = tbl(tmp_path / "a.tbl", {1: 3, 20: 2, 21: 4}, {1: 40, 20: 2, 21: 4})
    for template, first in {
        "x/{}.mrc": "x/3.mrc",
        "{0:04d}.mrc": "0003.mrc",
        "{tomogram:02d}_{object}_{particle:05d}.mrc": "02_4_00003.mrc",
        "a{{b}}_{}": "a{b}_3",
    }.items():
        assert read(path, particle_names=template).names[0] == first
    for template, message in {
        "p.mrc": "no place for the particle's number",
        "{:06z}.mrc": "expected a format such as",
        "{part}.mrc": "no field {part}",
        "{.mrc": "expected a format such as",
        "{0}{1}": "no field {1}",
    }.items():
        with pytest.raises(GlocalError) as error:
            read(path, particle_names=template)
        assert message in str(error.value) and template in str(error.value)
    with pytest.raises(GlocalError, match=r"2 of 2 particle volumes not found: particle_000003.em, .*--particle-names gives others"):
        read_particles(path, pixel_size_angst=2.0)
    star = tmp_path / "relion.star"
    star.write_text("data_\nloop_\n_rlnImageName\na.mrc\n")
    with pytest.raises(GlocalError, match="relion.star: a RELION STAR takes no --particle-names; that is for: Dynamo table, STOPGAP"):
        read(star, particle_names="{}.mrc")
    with pytest.raises(GlocalError, match="takes no --wedge-list"):
        read(path, wedge_list="w.star")


def test_formats_that_share_a_suffix_are_told_apart(shared, tmp_path):
    lists = shared / "data/lists"
    found = {
        name: format_of_file(lists / name).key for name in ("stopgap_motl.star", "relion31_no_optics.star", "emmotl_au_1.em", "dynamo_double.tbl")
    }
    assert list(found.values()) == ["stopgap", "relion", "av3", "dynamo"]
    particles = read(lists / "stopgap_motl.star").take([0, 1, 2])
    # its own format under its own suffix, any other when asked for
    write_particles(tmp_path / "a.star", particles)
    write_particles(tmp_path / "b.star", particles, to="relion")
    assert (format_of_file(tmp_path / "a.star").key, format_of_file(tmp_path / "b.star").key) == ("stopgap", "relion")
    assert read(tmp_path / "b.star").names == particles.names


@pytest.mark.parametrize("target", ["dynamo", "stopgap", "av3"])
def test_numbers_for_particles_with_names(tmp_path, target):
    """The last number of each file's name where all differ; else 1 to n, which is said."""
    star = tmp_path / "relion.star"

    def listed(*names):
        labels = "rlnImageName rlnMicrographName rlnRandomSubset rlnCoordinateX rlnCoordinateY rlnCoordinateZ rlnClassNumber".split()
        rows = [f"{name} tomo_{'ab'[i % 2]}.mrc {i % 2 + 1} {10 + i} {20 + i} {30 + i} {i}" for i, name in enumerate(names)]
        star.write_text("data_\nloop_\n" + "".join(f"_{label}\n" for label in labels) + "\n".join(rows) + "\n")
        return read(star)

    suffix = {"dynamo": ".tbl", "stopgap": ".star", "av3": ".em"}[target]
    out = tmp_path / f"out{suffix}"
    particles = listed("s/p0012.mrc", "s/p0007.mrc", "s/q00013.mrc")
    write_particles(out, particles, to=target)
    back = read(out, particle_names="{}")
    assert back.names == ("12", "7", "13") and back.tomograms == ("1", "2", "1")
    np.testing.assert_array_equal(back.coordinates.voxels, particles.coordinates.voxels)
    assert back.classes.tolist() == [0, 1, 2]
    assert back.half.tolist() == ([1, 2, 1] if target == "stopgap" else [0, 0, 0])
    for names in (("a1.mrc", "b1.mrc"), ("a1_2.00A.mrc", "a2_2.00A.mrc"), ("a.mrc", "b2.mrc")):
        with pytest.warns(UserWarning, match="numbered 1 to 2 in the list's order"):
            write_particles(out, listed(*names), to=target)
        assert read(out, particle_names="{}").names == ("1", "2")


def test_tomograms_get_their_names_from_the_files_beside_a_table(tmp_path):
    path = tbl(tmp_path / "a.tbl", {1: 1, 20: 2}, {1: 2, 20: 1}, {1: 3, 20: 3}, {1: 4, 20: 0})
    assert read(path).tomograms == ("2", "1", "3", "")
    (tmp_path / "a.vll").write_text("/d/one.rec\n* index = 1\n\n/d/two tomo.rec # mine\n")
    assert read(path).tomograms == ("/d/two tomo.rec", "/d/one.rec", "3", "")
    (tmp_path / "indices_column20.doc").write_text("1 one.em\n2 two.em\n3 three.em\n")
    assert read(path).tomograms == ("two.em", "one.em", "three.em", "")
    (tmp_path / "a.doc").write_text("1 first\nnonsense\n")
    with pytest.raises(GlocalError, match="a.doc: found the line 'nonsense', expected a tomogram's number"):
        read(path)


def test_pixel_size_of_a_table(tmp_path):
    rows = {1: 1, 4: 2, 36: 3.0}, {1: 2, 4: 1, 36: 3.0}
    path = tbl(tmp_path / "a.tbl", *rows)
    particles = read(path, pixel_size_angst=None)
    assert (particles.pixel_size_angst, particles.pixel_size_source) == (3.0, "list (column 36)")
    with pytest.warns(UserWarning, match=r"the list \(column 36\) says 3 A"):
        other = read(path, pixel_size_angst=6.0)
    write_particles(tmp_path / "b.tbl", other)
    assert read(tmp_path / "b.tbl", pixel_size_angst=None).pixel_size_angst == 6.0
    with pytest.raises(GlocalError, match=r"a.tbl:2: pixel size 4 A \(column 36\), but 3 A in .*a.tbl:1"):
        read(tbl(path, rows[0], {**rows[1], 36: 4}), pixel_size_angst=None)
    with pytest.raises(GlocalError, match="no pixel size in the list"):
        read(tbl(path, {1: 1}), pixel_size_angst=None)


# ---- wedges


@pytest.mark.parametrize("n", [32, 33])
def test_limits_of_a_table_sample_their_half_planes(tmp_path, n):
    """Field case 34, for each kind of Fourier sampling."""
    limits = {14: -70, 15: 40, 16: -20, 17: 60}
    path = tbl(tmp_path / "a.tbl", {1: 1, 13: 1, **limits}, {1: 2, 13: 2, **limits}, {1: 3, 13: 4, **limits}, {1: 4, 13: 0, **limits}, {1: 5, 13: 1})
    about_y, about_x, both, whole, unfilled = read(path).weight_paths
    check_sampled(union_weights(n, about_y), -70, 40)
    # a tilt about x samples (y, z) = (cos t, sin t)
    check_sampled(union_weights(n, about_x), -20, 60, "y", -1)
    np.testing.assert_array_equal(union_weights(n, both), np.maximum(union_weights(n, about_y), union_weights(n, about_x)))
    assert (whole, unfilled) == (None, None)
    write_particles(tmp_path / "b.tbl", dataclasses.replace(read(path), source=None))
    again = read(tmp_path / "b.tbl")
    assert again.weight_paths == read(path).weight_paths
    np.testing.assert_array_equal(again.tilt_ranges_deg[[0, 1]], [[-70, 40], [np.nan, np.nan]])


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({13: 3}, "Fourier sampling of type 3"),
        ({13: 1, 14: 60, 15: -60}, "tilt limits 60 and -60"),
        ({13: 1, 14: -95, 15: 60}, "tilt limits -95 and 60"),
        ({13: 1, 14: 10, 15: 10}, "tilt limits 10 and 10"),
        ({13: 2, 16: -60, 17: 91}, r"\(columns 16, 17\)"),
    ],
)
def test_limits_without_sense(tmp_path, cells, message):
    """Field case 35."""
    with pytest.raises(GlocalError, match=f"a.tbl:2: .*{message}"):
        read(tbl(tmp_path / "a.tbl", {1: 1}, {1: 2, **cells}))


def test_wedge_lists(shared, tmp_path):
    path = shared / "data/lists/stopgap_wedge_list.star"
    rows = [line.split() for line in path.read_text().splitlines() if len(line.split()) == 11]
    wedges = read_wedge_list(path)
    assert list(wedges.tilts_deg) == [17, 18]
    for tomogram in (17, 18):
        assert list(wedges.tilts_deg[tomogram]) == [float(row[6]) for row in rows if row[0] == str(tomogram)]
    write_wedge_list(tmp_path / "w.star", wedges)
    assert (tmp_path / "w.star").read_bytes() == path.read_bytes()
    write_wedge_list(tmp_path / "w.star", wedges, [18])
    assert read_wedge_list(tmp_path / "w.star").tilts_deg == {18: wedges.tilts_deg[18]}
    rows = [f"{i} {17 + i % 2}.000000 1 {i} A 0 0 0 0 0 0" for i in range(1, 5)]
    particles = read(motl(tmp_path / "m.star", rows), wedge_list=path)
    for weight, tomogram in zip(particles.weight_paths, (18, 17, 18, 17), strict=True):
        assert weight == (TiltRange(min(wedges.tilts_deg[tomogram]), max(wedges.tilts_deg[tomogram])),)
    write_particles(tmp_path / "n.star", particles)
    assert (tmp_path / "n.star").read_bytes() == (tmp_path / "m.star").read_bytes()
    with pytest.raises(GlocalError, match="stopgap_wedge_list.star: no tilts of tomogram 24; found those of 17, 18"):
        read(shared / "data/lists/stopgap_motl.star", wedge_list=path)
    with pytest.raises(GlocalError, match="m.star: not a wedge list: expected data_stopgap_wedgelist, found data_stopgap_motivelist"):
        read(tmp_path / "m.star", wedge_list=tmp_path / "m.star")


def test_wedge_lists_of_av3_sample_their_half_planes(tmp_path):
    wedge = em(tmp_path / "wedge.em", [(3, -70, 40), (8, -20.5, 60)])
    particles = read(em(tmp_path / "m.em", motive_rows(2, r5=[8, 3])), wedge_list=wedge)
    check_sampled(union_weights(32, particles.weight_paths[0]), -20.5, 60)
    check_sampled(union_weights(32, particles.weight_paths[1]), -70, 40)
    with pytest.raises(GlocalError, match="needs every tilt"):
        write_wedge_list(tmp_path / "w.star", read_wedge_list(wedge))
    with pytest.raises(GlocalError, match="20 x 2 x 1 numbers, expected a wedge list of 3 x n x 1"):
        read_wedge_list(tmp_path / "m.em")
    with pytest.raises(GlocalError, match="tilts of tomogram 3 from -70 to 95"):
        read(tmp_path / "m.em", wedge_list=em(wedge, [(3, -70, 95), (8, -20, 60)]))


# ---- what is lost, and what is refused


def test_what_cannot_be_held_is_named(tmp_path):
    formats = {f.key: f for f in list_formats()}
    table = tbl(tmp_path / "a.tbl", {1: 1, 13: 1, 14: -60, 15: 60, 20: 1}, {1: 2, 13: 1, 14: -60, 15: 60, 20: 1})
    particles = read(table).with_half(np.array([1, 2]))
    assert "tilt ranges" in left_behind(particles, formats["stopgap"]) and "half-sets" in left_behind(particles, formats["av3"])
    assert left_behind(particles, formats["dynamo"]) == []
    assert "tilt ranges" not in left_behind(particles, formats["pytom"])
    with pytest.warns(UserWarning, match="a motive list holds no wedges"):
        write_particles(tmp_path / "b.em", particles, to="av3")
    with pytest.warns(UserWarning, match="cannot hold the wedge or CTF of 2 of 2"):
        write_particles(tmp_path / "b.tbl", dataclasses.replace(particles, source=None, weight_paths=(tmp_path / "w.mrc",) * 2))
    rows = read(em(tmp_path / "a.em", motive_rows(2, r2=[1, 2], r14=[0, 3])))
    assert left_behind(rows, formats["relion"])[-1] == "rows 2, 14 of the motive list"


@pytest.mark.parametrize("to", ["dynamo", "av3"])
def test_convert_says_once_that_weights_are_lost(tmp_path, to):
    """In one warning: the list of what is lost has them, and the writer need not say it again."""
    (tmp_path / "a.star").write_text(
        "data_\nloop_\n_rlnImageName\n_rlnCtfImage\n_rlnRandomSubset\n_rlnDetectorPixelSize\n_rlnMagnification\n_rlnAngleRot\n_rlnAngleTilt\n_rlnAnglePsi\n"
        + "".join(f"p_{i}.mrc w_{i}.mrc {1 + i % 2} 8.0 10000 0 0 0\n" for i in (1, 2, 3))
    )
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "a.star"), str(tmp_path / f"b.{'tbl' if to == 'dynamo' else 'em'}"), "--to", to])
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "warning" in line]
    assert line.lower().count("wedge") == 1 and line.count("CTF") == 1 and "wedge or CTF volumes" in line


def test_wedges_that_only_the_writer_cannot_hold_are_still_named(tmp_path):
    """A turned tilt series has no columns in a Dynamo table, though tilt ranges have; beside volumes both are told."""
    table = tbl(tmp_path / "a.tbl", {1: 1, 13: 1, 14: -60, 15: 60, 20: 1}, {1: 2, 13: 1, 14: -60, 15: 60, 20: 1})
    particles = dataclasses.replace(read(table), source=None)
    turned = (TiltRange(-60.0, 60.0, turn=(0, 1, 0, 1, 0, 0, 0, 0, -1)),)
    particles = dataclasses.replace(particles, weight_paths=(turned, tmp_path / "w.mrc"))
    with pytest.warns() as caught:
        write_particles(tmp_path / "b.tbl", particles, to="dynamo")
    assert [("1 of 2" in str(w.message), issubclass(w.category, WeightsLeftOutWarning)) for w in caught] == [(True, True), (True, False)]


def test_halves_and_scores_get_a_column_where_there_is_none(tmp_path):
    path = motl(tmp_path / "a.star", ["1 0 0 0 10 20 30", "2 1 0 0 10 20 30"], "subtomo_num x_shift y_shift z_shift phi psi the")
    particles = read(path).with_half(np.array([2, 1]))
    write_particles(tmp_path / "b.star", particles, {"ngScore": np.array([0.5, 0.25])})
    back = read(tmp_path / "b.star")
    assert back.half.tolist() == [2, 1] and back.scores.tolist() == [0.5, 0.25]
    np.testing.assert_array_equal(back.poses.rotations, particles.poses.rotations)


def test_layout_stays_around_changed_cells(tmp_path):
    """Field case 2 (a blank line behind the labels), quoted cells, comments, and blanks of any width."""
    text = (
        "# mine\n\ndata_stopgap_motivelist\n\nloop_\n_note #1\n_subtomo_num #2\n_x_shift #3\n_y_shift #4\n_z_shift #5\n_phi #6\n_psi #7\n_the #8\n\n"
        "'a b'   1\t0.5  0 0 10 20   30 \r\nit's 2 0 0 0 10 20 30\n\ndata_other\n\n_key  value\n"
    )
    (tmp_path / "a.star").write_bytes(text.encode())
    particles = read(tmp_path / "a.star")
    write_particles(tmp_path / "b.star", particles)
    assert (tmp_path / "b.star").read_bytes() == text.encode()
    write_particles(tmp_path / "b.star", particles.with_poses(Poses(particles.poses.rotations, particles.poses.shifts_angst + 1.0)))
    moved = text.replace("0.5  0 0", "1.000000  0.500000 0.500000").replace("2 0 0 0", "2 0.500000 0.500000 0.500000")
    assert (tmp_path / "b.star").read_bytes() == moved.encode()
    write_particles(tmp_path / "b.star", particles.with_half(np.array([1, 2])))
    halved = text.replace("_the #8\n", "_the #8\n_halfset #9\n").replace("30 \r\n", "30\tA \r\n").replace("30\n", "30\tB\n")
    assert (tmp_path / "b.star").read_bytes() == halved.encode()


STAR = "subtomo_num x_shift y_shift z_shift phi psi the halfset"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: tbl(p / "a.tbl", {1: 1}, columns=20), r"a.tbl:1: not a Dynamo table: expected 26 columns or more, found 20"),
        (
            lambda p: (p / "a.tbl").write_text("1 " * 35 + "\n\n" + "1 " * 34 + "\n") and p / "a.tbl",
            "a.tbl:3: expected 35 columns as in line 1, found 34",
        ),
        (lambda p: tbl(p / "a.tbl", {1: 1, 5: "x"}), "a.tbl:1: column 5 is 'x', expected a number"),
        (lambda p: tbl(p / "a.tbl", {1: 1, 8: "NaN"}), "a.tbl:1: column 8 is nan, expected a finite number"),
        (lambda p: tbl(p / "a.tbl", {1: 1.5}), r"a.tbl:1: the tag \(column 1\) is 1.5, expected a whole number of 0 or more"),
        (lambda p: (p / "a.tbl").write_bytes(b"\0\1") and p / "a.tbl", "it is binary"),
        (lambda p: (p / "a.tbl").write_text("\n") and p / "a.tbl", "the file is empty"),
        (lambda p: motl(p / "a.star", ["1 0 0 0"], "subtomo_num x_shift y_shift z_shift"), "a.star:2: no column _phi and _psi and _the"),
        (lambda p: motl(p / "a.star", ["1 0 0 0 0 0 0 C"], STAR), "a.star:14: _halfset is 'C', expected A or B"),
        (lambda p: motl(p / "a.star", ["1 0 0 0 0 0 0"], STAR), "a.star:14: expected 8 columns, found 7"),
        (lambda p: motl(p / "a.star", ["1.5 0 0 0 0 0 0 A"], STAR), "a.star:14: _subtomo_num is 1.5, expected a whole number"),
        (lambda p: em(p / "a.em", np.zeros((2, 19))), "19 x 2 x 1 numbers, expected a motive list of 20 x n x 1"),
        (lambda p: em(p / "a.em", motive_rows(2, r17=[0, np.nan])), "a.em, particle 2: rows 17 to 19 hold values that are not finite"),
        (
            lambda p: (p / "a.em").write_bytes(em(p / "a.em", motive_rows(2)).read_bytes()[:-4]) and p / "a.em",
            "expected 672 bytes for 2 particles, found 668",
        ),
        (lambda p: (p / "a.em").write_bytes(b"text") and p / "a.em", "expected an EM header of 512 bytes, found 4 bytes"),
    ],
)
def test_refused(tmp_path, make, message):
    with pytest.raises(GlocalError, match=message) as error:
        read(make(tmp_path))
    assert "\n" not in str(error.value)


def test_tilts_in_columns_of_a_relion_list(tmp_path):
    """Wedges by tilts survive as columns of our own; weight volumes go before them, and what is no range is refused."""
    limits = {13: 1, 14: -70, 15: 40.5}
    particles = read(tbl(tmp_path / "a.tbl", {1: 1, **limits}, {1: 2}, {1: 3, **limits, 13: 2, 16: -60, 17: 60}))
    write_particles(tmp_path / "b.star", particles)
    back = read(tmp_path / "b.star")
    assert back.weight_paths == ((TiltRange(-70.0, 40.5),), None, None)
    relion = next(f for f in list_formats() if f.key == "relion31")
    lost = left_behind(particles, relion)
    assert "wedges of two tilt series or of other axes than y" in lost and "tilt ranges" not in lost
    write_particles(tmp_path / "c.star", back)
    assert read(tmp_path / "c.star").weight_paths == back.weight_paths
    text = "data_\nloop_\n_rlnImageName\n_rlnCtfImage\n_ngTiltMinDeg\n_ngTiltMaxDeg\na.mrc w.mrc -50 60\nb.mrc None {} 60\n"
    (tmp_path / "d.star").write_text(text.format(-50))
    assert read(tmp_path / "d.star").weight_paths == (tmp_path / "w.mrc", (TiltRange(-50.0, 60.0),))
    (tmp_path / "d.star").write_text(text.format(70))
    with pytest.raises(GlocalError, match="d.star:8: _ngTiltMinDeg 70 and _ngTiltMaxDeg 60: expected -90 <= smallest < largest"):
        read(tmp_path / "d.star")
    (tmp_path / "d.star").write_text("data_\nloop_\n_rlnImageName\n_ngTiltMaxDeg\na.mrc 60\n")
    with pytest.raises(GlocalError, match="no column _ngTiltMinDeg"):
        read(tmp_path / "d.star")
