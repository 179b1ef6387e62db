"""`convert` between RELION's versions and Warp: poses by rendering, places by hand, tokens by gemmi, and RELION's own programs."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path

import mrcfile
import numpy as np
import pytest
from click.testing import CliRunner

from numba_glocal.cli.main import main
from numba_glocal.io import format_to_write, left_behind, list_formats, read_particles, write_particles

sys.path.insert(0, str(Path(__file__).parent))
from tomo_lists import (  # noqa: E402
    ANGLES,
    BLOBS,
    BOX,
    CASES,
    CENTRED,
    ORIGINS,
    PIXEL,
    PLACES,
    SERIES_PIXEL,
    SUBTOMOGRAM,
    alike,
    average_of,
    blobs_at,
    euler,
    in_tomogram,
    of_cif,
    relion4_list,
    rendered,
    save,
    table,
)

gemmi = pytest.importorskip("gemmi")

KEYS = ("relion30", "relion31", "relion4", "relion5", "warp")
PIXEL_ORIGINS = ("rlnOriginX", "rlnOriginY", "rlnOriginZ")
SIZE = np.array([3711, 3838, 2000])


def convert(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def block_of(path):
    document = gemmi.cif.read(str(path))
    return next(b for b in document if b.find_loop("_rlnImageName"))


def columns_of(path, *labels):
    block = block_of(path)
    return np.array([list(block.find_loop(f"_{label}")) for label in labels], dtype=float).T


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A RELION 4 list of volumes along the tomogram's axes, with the sizes of its tomograms, converted to every version."""
    folder = tmp_path_factory.mktemp("versions")
    source = relion4_list(folder / "source.star", False)
    tomograms = {
        "rlnTomoName": ["01", "12e3"],
        **{f"rlnTomoSize{a}": [str(n)] * 2 for a, n in zip("XYZ", SIZE, strict=True)},
        "rlnTomoTiltSeriesPixelSize": ["2.0"] * 2,
    }
    (folder / "tomograms.star").write_text(table("global", tomograms))
    for key in KEYS:
        result = convert(source, folder / f"{key}.star", "--to", key, "--tomograms", folder / "tomograms.star")
        assert result.exit_code == 0, result.output
    return folder


def judged(path, key):
    """Poses and places of a converted list, from its columns by the rules of its version, without our readers."""
    angles = columns_of(path, *ANGLES)
    rotations = np.array([euler(*row) for row in angles])
    labels = PIXEL_ORIGINS if key in ("relion30", "warp") else ORIGINS
    shifts = -columns_of(path, *labels) * (PIXEL if key in ("relion30", "warp") else 1)
    if key in ("relion4", "relion5"):
        axes = np.array([euler(*row) for row in columns_of(path, *SUBTOMOGRAM)])
        rotations, shifts = axes @ rotations, np.einsum("nij,nj->ni", axes, shifts)
    if key == "relion5":
        centres = columns_of(path, *CENTRED) / SERIES_PIXEL + SIZE / 2 - 1
    else:
        centres = columns_of(path, *PLACES) * (PIXEL / SERIES_PIXEL if key == "warp" else 1)
    return rotations, shifts, centres + shifts / SERIES_PIXEL


@pytest.mark.parametrize("key", KEYS)
def test_every_version_says_the_same(lists, key):
    rotations, shifts, places = judged(lists / f"{key}.star", key)
    for i, (sub, part, origin) in enumerate(CASES):
        assert alike(rendered(rotations[i], shifts[i]), in_tomogram(sub, part, origin)) > 0.999999
    expected = np.array([[100.5 + 10 * i + axis for axis in range(3)] for i in range(len(CASES))])
    expected = expected - np.array([euler(*sub) @ np.array(origin) for sub, _, origin in CASES]) / SERIES_PIXEL
    np.testing.assert_allclose(places, expected, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [pair for pair in itertools.product(KEYS, KEYS) if pair[0] != pair[1]])
def test_from_every_version_to_every_other(lists, tmp_path, first, second):
    if second == "relion5" and first == "warp":
        pytest.skip("Warp's names of tomograms keep their .tomostar; the next test has this pair")
    out = tmp_path / "out.star"
    result = convert(lists / f"{first}.star", out, "--to", second, "--tomograms", lists / "tomograms.star")
    assert result.exit_code == 0, result.output
    rotations, shifts, places = judged(out, second) if _has_axes(out) or second not in ("relion4", "relion5") else judged_without_axes(out, second)
    for i, case in enumerate(CASES):
        assert alike(rendered(rotations[i], shifts[i]), in_tomogram(*case)) > 0.999999
    expected = judged(lists / "relion4.star", "relion4")[2]
    if first == "warp" and second in ("relion30", "relion31"):  # Warp's voxels, as its names of tomograms still tell
        places, expected = columns_of(out, *PLACES), columns_of(lists / "warp.star", *PLACES)
    np.testing.assert_allclose(places, expected, atol=1e-5)
    before, after = block_of(lists / f"{first}.star"), block_of(out)
    for label in ("rlnImageName", "rlnRandomSubset", "rlnLCCmax", "rlnClassNumber"):  # text and unknown columns as they were
        assert list(before.find_loop(f"_{label}")) == list(after.find_loop(f"_{label}")), label
    names = list(after.find_loop("_rlnTomoName" if second in ("relion4", "relion5") else "_rlnMicrographName"))
    plain = [("01", "12e3")[i % 2] for i in range(len(CASES))]
    assert names == [name + ".tomostar" * ("warp" in (first, second)) for name in plain]


def _has_axes(path):
    return bool(block_of(path).find_loop("_rlnTomoSubtomogramRot"))


def judged_without_axes(path, key):
    rotations, shifts, _ = (
        judged(path, "relion31")
        if key == "relion4"
        else (np.array([euler(*row) for row in columns_of(path, *ANGLES)]), -columns_of(path, *ORIGINS), None)
    )
    centres = columns_of(path, *CENTRED) / SERIES_PIXEL + SIZE / 2 - 1 if key == "relion5" else columns_of(path, *PLACES)
    return rotations, shifts, centres + shifts / SERIES_PIXEL


def test_layout_of_versions(lists):
    """Blocks, names of columns and what is not there, as each program expects them."""
    expected = {
        "relion30": ([""], ["rlnMicrographName", "rlnOriginX", "rlnMagnification", "rlnDetectorPixelSize", "rlnVoltage"], ["rlnOriginXAngst"]),
        "warp": ([""], ["rlnMicrographName", "rlnOriginX", "rlnMagnification"], ["rlnOriginXAngst", "rlnTomoName", "rlnTomoSubtomogramRot"]),
        "relion31": (["optics", "particles"], ["rlnMicrographName", "rlnOriginXAngst"], ["rlnTomoSubtomogramRot", "rlnTomoName", "rlnOriginX"]),
        "relion4": (["optics", "particles"], ["rlnTomoName", "rlnCoordinateX", "rlnTomoSubtomogramRot"], ["rlnCenteredCoordinateXAngst"]),
        "relion5": (["optics", "particles"], ["rlnTomoName", "rlnCenteredCoordinateXAngst", "rlnTomoParticleName"], ["rlnCoordinateX"]),
    }
    for key, (blocks, present, absent) in expected.items():
        path = lists / f"{key}.star"
        assert [b.name.strip() for b in gemmi.cif.read(str(path))] == blocks
        labels = [tag[1:] for tag in block_of(path).find_loop("_rlnImageName").get_loop().tags]
        assert set(present) <= set(labels) and not set(absent) & set(labels), key
        assert len(set(labels)) == len(labels)
    np.testing.assert_allclose(columns_of(lists / "relion30.star", "rlnDetectorPixelSize", "rlnMagnification"), [[8, 10000]] * len(CASES))


def test_digits_of_what_means_the_same_stay(lists):
    """Row 7 has no turn of its own: its angles and origins keep their digits in every version that counts in Angstrom."""
    row = CASES.index(((0.0, 0.0, 0.0), (30.0, 60.0, 90.0), (-5.0, 5.0, 5.0)))
    for key in ("relion31", "relion4", "relion5"):
        for label in (*ANGLES, *ORIGINS):
            assert of_cif(lists / f"{key}.star", label)[row] == of_cif(lists / "source.star", label)[row]
    for label in (*ANGLES, *ORIGINS, *PLACES):
        assert of_cif(lists / "relion4.star", label) == of_cif(lists / "source.star", label)
    assert of_cif(lists / "relion31.star", PLACES[0]) == of_cif(lists / "source.star", PLACES[0])


@pytest.mark.parametrize("key", ["relion30", "warp", "relion31", "relion4"])
def test_real_lists_change_nothing_but_what_they_must(shared, tmp_path, key):
    """Every other real list to this version and back to its own program's reader: poses, names, halves, places."""
    names = ("relion30_warp_1037", "relion31_no_optics", "relion_3.1_optics2", "relion40_1746", "relion40_empiar10064", "warp2_particles_matching")
    for name in names:
        path = shared / "data/lists" / f"{name}.star"
        before = read_particles(path, require_volumes=False)
        write_particles(tmp_path / "out.star", before, to=key)
        after = read_particles(tmp_path / "out.star", require_volumes=False)
        np.testing.assert_allclose(after.poses.rotations, before.poses.rotations, atol=2e-8)
        np.testing.assert_allclose(after.poses.shifts_angst, before.poses.shifts_angst, atol=1e-4)
        assert after.names == before.names and after.half.tolist() == before.half.tolist()
        assert after.pixel_size_angst == pytest.approx(before.pixel_size_angst)
        rotations = np.array([euler(*row) for row in columns_of(tmp_path / "out.star", *ANGLES)])
        if not _has_axes(tmp_path / "out.star"):
            np.testing.assert_allclose(rotations, before.poses.rotations, atol=2e-8)


@pytest.mark.parametrize("name", ["relion30_small", "relion30_warp_1037", "relion31_no_optics", "relion_3.1_optics2"])
def test_older_lists_hold_what_gemmi_finds(shared, name):
    path = shared / "data/lists" / f"{name}.star"
    particles = read_particles(path, require_volumes=False)
    block = block_of(path)
    assert list(particles.names) == list(block.find_loop("_rlnImageName")) and list(particles.tomograms) == list(
        block.find_loop("_rlnMicrographName")
    )
    np.testing.assert_allclose(particles.poses.rotations, [euler(*row) for row in columns_of(path, *ANGLES)], atol=1e-9)
    if block.find_loop("_rlnOriginXAngst"):
        np.testing.assert_allclose(particles.poses.shifts_angst, -columns_of(path, *ORIGINS))
    elif block.find_loop("_rlnOriginX"):
        np.testing.assert_allclose(particles.poses.shifts_angst, -columns_of(path, *PIXEL_ORIGINS) * particles.pixel_size_angst)
    np.testing.assert_array_equal(particles.coordinates.as_voxels(), columns_of(path, *PLACES))
    assert particles.half.tolist() == [int(v) for v in block.find_loop("_rlnRandomSubset")] or not particles.half.any()
    assert [p.name for p in particles.weight_paths] == [Path(v).name for v in block.find_loop("_rlnCtfImage")]


# ---- the command


@pytest.mark.parametrize("name", ["relion40_1746", "relion5_run_it050_data", "warp2_particles_matching", "relion_3.1_optics2", "relion31_no_optics"])
def test_within_a_format_every_token_stays(shared, tmp_path, name):
    path = shared / "data/lists" / f"{name}.star"
    result = convert(path, tmp_path / "out.star")
    assert result.exit_code == 0 and "warning" not in result.output, result.output
    before, after = gemmi.cif.read(str(path)), gemmi.cif.read(str(tmp_path / "out.star"))
    for b, a in zip(before, after, strict=True):
        assert [(i.loop.tags, i.loop.values) if i.loop else i.pair for i in b] == [(i.loop.tags, i.loop.values) if i.loop else i.pair for i in a]


def test_what_is_lost_is_one_warning(shared, tmp_path):
    result = convert(shared / "data/lists/relion40_empiar10064.star", tmp_path / "out.star", "--to", "relion31")
    lines = result.output.strip().splitlines()
    assert result.exit_code == 0 and len(lines) == 2
    assert "warning" in lines[0] and "rlnTomoSubtomogramRot/Tilt/Psi (composed into the angles and origins)" in lines[0] and "turned" in lines[0]
    assert lines[1].endswith("out.star: 284 particles, RELION 3.1 STAR")


@pytest.mark.parametrize("says", [False, True])
def test_how_volumes_stand_can_be_said(tmp_path, says):
    """Volumes cut straight lose nothing with subtomogram angles; turned ones can have poses of their own."""
    path = relion4_list(tmp_path / "p.star", says)
    straight = convert(path, tmp_path / "straight.star", "--to", "relion31", "--volume-axes", "tomogram", "--poses", "volume")
    assert straight.exit_code == 0 and "turned" not in straight.output
    turned = convert(path, tmp_path / "turned.star", "--to", "relion31", "--volume-axes", "subtomogram", "--poses", "volume")
    assert turned.exit_code == 0 and "that volumes are turned" in turned.output
    for (sub, part, _), straight_pose, pose in zip(
        CASES, *(read_particles(tmp_path / f"{name}.star", require_volumes=False).poses.rotations for name in ("straight", "turned")), strict=True
    ):
        np.testing.assert_allclose(pose, euler(*part), atol=1e-6)
        np.testing.assert_allclose(straight_pose, euler(*sub) @ euler(*part), atol=1e-6)


def test_angles_of_no_turn_are_no_loss(tmp_path):
    """Subtomogram angles that are all zero turn nothing, and nothing is warned of."""
    cases = [((0.0, 0.0, 0.0), part, origin) for _, part, origin in CASES]
    path = relion4_list(tmp_path / "p.star", True, cases)
    result = convert(path, tmp_path / "out.star", "--to", "relion31")
    assert result.exit_code == 0 and "warning" not in result.output
    for label in (*ANGLES, *ORIGINS):
        assert of_cif(tmp_path / "out.star", label) == of_cif(path, label)
    assert read_particles(path, require_volumes=False).volume_axes is None


def test_coordinates_of_unknown_size(shared, tmp_path):
    """To RELION 5 without sizes: voxels stay, and it is said; with a file of tomograms Dynamo's places become RELION 5's."""
    result = convert(shared / "data/lists/relion40_1746.star", tmp_path / "out.star", "--to", "relion5")
    assert result.exit_code == 0 and result.output.count("warning") == 1 and "coordinates stay in voxels" in result.output
    assert of_cif(tmp_path / "out.star", PLACES[0]) == of_cif(shared / "data/lists/relion40_1746.star", PLACES[0])
    table_path = shared / "data/lists/dynamo_35col.tbl"
    rows = np.array([[float(v) for v in line.split()[:26]] for line in table_path.read_text().splitlines()])
    names = [f"{int(v)}" for v in np.unique(rows[:, 19])]
    sizes = {f"rlnTomoSize{axis}": [str(size)] * len(names) for axis, size in zip("XYZ", (4000, 4001, 1200), strict=True)}
    (tmp_path / "t.star").write_text(table("global", {"rlnTomoName": names, **sizes, "rlnTomoTiltSeriesPixelSize": ["2.0"] * len(names)}))
    result = convert(table_path, tmp_path / "d.star", "--to", "relion5", "--pixel-size", "4", "--tomograms", tmp_path / "t.star")
    assert result.exit_code == 0, result.output
    centre = (np.array([4000, 4001, 1200]) / 2 - 1) * 2.0
    np.testing.assert_allclose(columns_of(tmp_path / "d.star", *CENTRED), rows[:, 23:26] * 4 - centre, atol=1e-5)


@pytest.mark.parametrize("middle", ["pytom", "dynamo", "stopgap", "av3", "warp"])
@pytest.mark.parametrize("last", ["relion4", "relion5"])
def test_places_come_back_with_a_file_of_tomograms(lists, tmp_path, middle, last):
    """Voxels of the particles (8 A) become those of the tilt series (2 A) again, by way of any list, and stay so when read again."""
    path, out = tmp_path / f"m{ {'pytom': '.xml', 'dynamo': '.tbl', 'av3': '.em'}.get(middle, '.star') }", tmp_path / "out.star"
    assert convert(lists / "relion5.star", path, "--to", middle, "--tomograms", lists / "tomograms.star").exit_code == 0
    if middle not in ("pytom", "warp"):  # these have numbers for names
        text = (lists / "tomograms.star").read_text()
        (tmp_path / "t.star").write_text(re.sub(r"^01(\s)", r"1\1", re.sub(r"^12e3(\s)", r"2\1", text, flags=re.M), flags=re.M))
    else:
        (tmp_path / "t.star").write_text((lists / "tomograms.star").read_text())
    result = convert(path, out, "--to", last, "--pixel-size", PIXEL, "--tomograms", tmp_path / "t.star")
    assert result.exit_code == 0, result.output
    expected = judged(lists / "relion4.star", "relion4")[2]
    np.testing.assert_allclose(judged_without_axes(out, last)[2], expected, atol=1e-4)
    assert convert(out, tmp_path / "again.tbl", *(("--tomograms", tmp_path / "t.star") if last == "relion5" else ())).exit_code == 0
    rows = np.loadtxt(tmp_path / "again.tbl")
    np.testing.assert_allclose((rows[:, 23:26] + rows[:, 3:6]) * PIXEL / SERIES_PIXEL, expected, atol=1e-4)


def test_coordinates_that_may_count_anything_are_warned_of(lists, tmp_path):
    """A RELION 3.1 list does not say what its coordinates count."""
    text = (lists / "relion31.star").read_text()
    assert "rlnTomoTiltSeriesPixelSize" in text
    (tmp_path / "p.star").write_text(text.replace("rlnTomoTiltSeriesPixelSize", "rlnNothing"))
    result = convert(tmp_path / "p.star", tmp_path / "out.star", "--to", "relion5", "--tomograms", lists / "tomograms.star")
    assert result.exit_code == 0 and "does not say which voxels its coordinates count; those of the tilt series are taken (2 A" in result.output


@pytest.mark.parametrize(("source", "target"), [
    ("pytom_particles_10.xml", "relion4"), ("dynamo_35col.tbl", "relion31"), ("stopgap_motl.star", "relion4"), ("emmotl_ribosome.em", "warp"),
    ("relion40_empiar10064.star", "pytom"), ("relion40_empiar10064.star", "dynamo"), ("relion40_1746.star", "stopgap"), ("relion40_1746.star", "av3"),
])  # fmt: skip
def test_between_programs(shared, tmp_path, source, target):
    """RELION's side of a conversion by its own rules; the other side by its reader, which its own tests judge."""
    suffix = {"pytom": ".xml", "dynamo": ".tbl", "av3": ".em"}.get(target, ".star")
    path = shared / "data/lists" / source
    pixel = () if source.startswith("relion") else ("--pixel-size", "4")
    result = convert(path, tmp_path / f"out{suffix}", "--to", target, *pixel)
    warned = result.output.count("warning")
    assert result.exit_code == 0 and warned == (source != "pytom_particles_10.xml") == len(result.output.strip().splitlines()) - 1, result.output
    size = None if source.startswith("relion") else 4.0
    before = read_particles(path, require_volumes=False, pixel_size_angst=size)
    after = read_particles(tmp_path / f"out{suffix}", require_volumes=False, pixel_size_angst=before.pixel_size_angst)
    if target in KEYS:
        labels = PIXEL_ORIGINS if target == "warp" else ORIGINS
        rotations = np.array([euler(*row) for row in columns_of(tmp_path / "out.star", *ANGLES)])
        shifts = -columns_of(tmp_path / "out.star", *labels) * (4 if target == "warp" else 1)
    else:
        rotations, shifts = after.poses.rotations, after.poses.shifts_angst
    for i in range(0, len(before), max(1, len(before) // 10)):
        expected = rendered(before.poses.rotations[i], before.poses.shifts_angst[i] / 4)  # within the box
        assert alike(rendered(rotations[i], shifts[i] / 4), expected) > 0.9999
    assert (before.coordinates is None) == (after.coordinates is None)
    if before.coordinates is None:
        return
    # lists without a voxel size of their own for places count them as they count shifts
    pixel = before.pixel_size_angst
    places = [p.coordinates.as_voxels() * np.nan_to_num(p.coordinates.voxel_size_angst, nan=pixel)[:, None] for p in (before, after)]
    np.testing.assert_allclose(places[1], places[0], rtol=1e-5, atol=0.02)


def test_poses_in_turned_volumes_can_be_asked_for(tmp_path):
    """A list of RELION's own pseudo-subtomograms: a RELION 3.1 list of the same volumes needs the particle's own angles."""
    source = relion4_list(tmp_path / "p.star", True)
    result = convert(source, tmp_path / "v.star", "--to", "relion31", "--poses", "volume")
    assert result.exit_code == 0 and "places of particles in the tomograms" in result.output
    for label in (*ANGLES, *ORIGINS):
        assert of_cif(tmp_path / "v.star", label) == of_cif(source, label)
    assert not _has_axes(tmp_path / "v.star")
    convert(source, tmp_path / "t.star", "--to", "relion31")
    rotations, shifts, _ = judged(tmp_path / "t.star", "relion31")
    assert all(alike(rendered(r, s), in_tomogram(*case)) > 0.999999 for r, s, case in zip(rotations, shifts, CASES, strict=True))


def test_refused(shared, tmp_path):
    source = relion4_list(tmp_path / "p.star", False)
    other = shared / "data/lists/relion5_run_it050_data.star"
    for arguments, part in {
        (source, source): "expected another file than the input",
        (source, tmp_path / "none" / "x.star"): "no folder",
        (tmp_path / "nothing.star", tmp_path / "x.star"): "no such file",
        (source, tmp_path / "x.docx"): "a list named *.docx is not written yet",
        (
            other,
            tmp_path / "x.star",
            "--to",
            "relion4",
        ): "take the sizes of the tomograms, unknown for 5 of 5",
    }.items():
        result = convert(*arguments)
        assert result.exit_code == 2 and part in result.output and len(result.output.strip().splitlines()) == 1, result.output
        assert not (tmp_path / "x.star").exists()
    assert convert(source, tmp_path / "x.star", "--to", "nonsense").exit_code == 2


def test_particles_from_elsewhere_become_any_version(tmp_path):
    """Without a RELION document: as from another program's list."""
    particles = read_particles(relion4_list(tmp_path / "p.star", False), require_volumes=False)
    foreign = dataclasses.replace(particles, source=None, scores=np.linspace(0.1, 0.8, len(CASES)), box_size=BOX)
    for key in ("relion30", "relion31", "relion4", "warp"):
        write_particles(tmp_path / "out.star", foreign, to=key)
        again = read_particles(tmp_path / "out.star", require_volumes=False)
        np.testing.assert_allclose(again.poses.rotations, particles.poses.rotations, atol=1e-7)
        np.testing.assert_allclose(again.poses.shifts_angst, particles.poses.shifts_angst, atol=1e-5)
        np.testing.assert_allclose(again.scores, foreign.scores, atol=1e-6)
        assert again.names == particles.names and again.half.tolist() == particles.half.tolist() and again.pixel_size_angst == PIXEL
        assert again.tomograms == tuple(t + ".tomostar" * (key == "warp") for t in particles.tomograms)
        scale = SERIES_PIXEL / PIXEL if key == "warp" else 1.0
        np.testing.assert_allclose(again.coordinates.as_voxels(), particles.coordinates.as_voxels() * scale, atol=1e-5)
    assert format_to_write("x.star", foreign).key == "relion" and format_to_write("x.star", particles).key == "relion"
    assert left_behind(foreign, format_to_write("x.star", foreign, "relion31")) == []
    assert {f.key for f in list_formats()} >= set(KEYS)


# ---- RELION's programs


@pytest.mark.parametrize("key", ["relion31", "relion4", "relion5"])
def test_relion_reads_converted_lists(lists, relion, tmp_path, key):
    for name in [key, *(["relion30"] if key == "relion31" else [])]:
        arguments = ["relion_star_handler", "--i", lists / f"{name}.star", "--o", tmp_path / "copy.star"]
        done = subprocess.run(list(map(str, arguments)), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for label in ("rlnImageName", "rlnRandomSubset", "rlnLCCmax"):
            copied = list(block_of(tmp_path / "copy.star").find_loop(f"_{label}"))
            assert copied == list(block_of(lists / f"{name}.star").find_loop(f"_{label}"))


def many(count, seed=4):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield (
            tuple(rng.uniform([-180, 0, -180], [180, 180, 180])),
            tuple(rng.uniform([-180, 0, -180], [180, 180, 180])),
            tuple(rng.uniform(-6, 6, 3)),
        )


@pytest.mark.relion
@pytest.mark.parametrize("turned", [False, True])
def test_relion_reconstructs_from_a_converted_list_what_we_average(relion, tmp_path, turned):
    """A RELION 4 list to RELION 3.1: relion_reconstruct's map agrees with ours, FSC above 0.99 to 0.8 Nyquist."""
    cases = list(many(60))
    noise = np.random.default_rng(1)
    path = relion4_list(tmp_path / "p.star", turned, cases)
    for i, (sub, part, origin) in enumerate(cases):
        volume = blobs_at(BLOBS @ euler(*part).T - np.array(origin)) if turned else in_tomogram(sub, part, origin)
        save(tmp_path / f"sub/{i}_data.mrc", volume + 0.005 * noise.normal(size=volume.shape))
    result = convert(path, tmp_path / "c.star", "--to", "relion31", "--poses", "volume" if turned else "tomogram")
    assert result.exit_code == 0, result.output
    ours = average_of(path, tmp_path / "run")
    command = ["relion_reconstruct", "--i", "c.star", "--o", "relion.mrc", "--3d_rot", "--skip_gridding"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with mrcfile.open(tmp_path / "relion.mrc", permissive=True) as file:
        theirs = np.array(file.data)
    axis = np.arange(BOX) - BOX // 2
    radius = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
    soft = np.clip((9 - radius) / 2, 0, 1)
    k = np.fft.fftfreq(BOX) * BOX
    shells = np.rint(np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)).astype(int)
    a, b = np.fft.fftn(ours * soft), np.fft.fftn(theirs * soft)
    sums = [np.bincount(shells.ravel(), v.ravel()) for v in ((a * b.conj()).real, np.abs(a) ** 2, np.abs(b) ** 2)]
    fsc = sums[0] / np.sqrt(sums[1] * sums[2])
    assert fsc[1 : int(0.8 * BOX / 2) + 1].min() > 0.99
    assert alike(ours * soft, blobs_at(BLOBS) * soft) > 0.99
