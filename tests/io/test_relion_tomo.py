"""RELION 4, RELION 5 and Warp lists: poses by rendering an object without symmetry, places by hand, everything else by gemmi."""

from __future__ import annotations

import itertools
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from numba_glocal.cli.main import main
from numba_glocal.errors import GlocalError, InputError, ListError
from numba_glocal.geometry import rotvec_to_matrix
from numba_glocal.io import read_particles, write_particles
from numba_glocal.values import Poses

gemmi = pytest.importorskip("gemmi")
sys.path.insert(0, str(Path(__file__).parent))
from tomo_lists import (  # noqa: E402
    ANGLES,
    BLOBS,
    BOX,
    CASES,
    CENTRED,
    ORIGINS,
    PLACES,
    SERIES_PIXEL,
    SUBTOMOGRAM,
    alike,
    average_of,
    blobs_at,
    euler,
    in_tomogram,
    numbers,
    of_cif,
    relion4_list,
    rendered,
    save,
    table,
)

# ---- poses


@pytest.mark.parametrize("cut_by_relion", [False, True])
def test_subtomogram_and_particle_angles_are_composed(tmp_path, cut_by_relion):
    particles = read_particles(relion4_list(tmp_path / "p.star", cut_by_relion), require_volumes=False)
    for pose, (sub, part, origin) in enumerate(CASES):
        expected = in_tomogram(sub, part, origin)
        found = rendered(particles.poses.rotations[pose], particles.poses.shifts_angst[pose])
        assert alike(found, expected) > 0.999999
    # the first rotation cannot be left out: the usual mistake looks different
    sub, part, origin = CASES[0]
    assert alike(rendered(euler(*part), -np.array(origin)), in_tomogram(*CASES[0])) < 0.8
    # position = coordinate - A_subtomogram origin, in voxels of the tilt series
    places = np.array([[100.5 + 10 * i + axis for axis in range(3)] for i in range(len(CASES))])
    shifts = np.array([euler(*sub) @ np.array(origin) for sub, _, origin in CASES])
    np.testing.assert_allclose(particles.positions_voxels(), places - shifts / SERIES_PIXEL)


def test_volumes_cut_by_relion_are_compared_about_their_own_axes(tmp_path):
    """What RELION cuts stands along the subtomogram's axes: poses in volumes are the particle's own angles and origins."""
    particles = read_particles(relion4_list(tmp_path / "p.star", True), require_volumes=False)
    inside = particles.in_volumes()
    for pose, (_, part, origin) in enumerate(CASES):
        found = rendered(inside.poses.rotations[pose], inside.poses.shifts_angst[pose])
        assert alike(found, blobs_at(BLOBS @ euler(*part).T - np.array(origin))) > 0.999999
    straight = read_particles(relion4_list(tmp_path / "q.star", False), require_volumes=False)
    assert straight.in_volumes() is straight


@pytest.mark.parametrize("cut_by_relion", [False, True])
def test_average_of_a_relion_4_list(tmp_path, cut_by_relion):
    """Volumes of either kind average to the object, and the list that comes out is the list that went in."""
    path = relion4_list(tmp_path / "p.star", cut_by_relion)
    for i, (sub, part, origin) in enumerate(CASES):
        inside = blobs_at(BLOBS @ euler(*part).T - np.array(origin))
        save(tmp_path / f"sub/{i}_data.mrc", inside if cut_by_relion else in_tomogram(sub, part, origin))
    average = average_of(path, tmp_path / "run")
    axis = np.arange(BOX) - BOX // 2
    inside = axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2 < 8**2
    assert alike(average[inside], blobs_at(BLOBS)[inside]) > 0.99
    for label in (*ANGLES, *ORIGINS, *SUBTOMOGRAM):
        assert of_cif(tmp_path / "run" / "particles.star", label) == of_cif(path, label)


@pytest.mark.parametrize("says", [False, True])
def test_how_volumes_stand_can_be_said(tmp_path, says):
    """A list that says the opposite of how its volumes were cut: wrong as it stands, right with the option; its angles stay."""
    path = relion4_list(tmp_path / "p.star", says)
    for i, (sub, part, origin) in enumerate(CASES):
        inside = blobs_at(BLOBS @ euler(*part).T - np.array(origin))
        save(tmp_path / f"sub/{i}_data.mrc", in_tomogram(sub, part, origin) if says else inside)
    axis = np.arange(BOX) - BOX // 2
    inside = axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2 < 8**2
    assert alike(average_of(path, tmp_path / "wrong")[inside], blobs_at(BLOBS)[inside]) < 0.9
    average = average_of(path, tmp_path / "run", volume_axes="tomogram" if says else "subtomogram")
    assert alike(average[inside], blobs_at(BLOBS)[inside]) > 0.99
    for label in (*ANGLES, *ORIGINS, *SUBTOMOGRAM):
        assert of_cif(tmp_path / "run" / "particles.star", label) == of_cif(path, label)


@pytest.mark.parametrize(
    ("cut_by_relion", "option", "text"),
    [
        (True, None, "stand as rlnTomoSubtomogramRot/Tilt/Psi turn them (by the list)"),
        (False, None, "stand as the tomogram (by the list)"),
        (True, "tomogram", "stand as the tomogram (--volume-axes tomogram)"),
        (False, "subtomogram", "stand as rlnTomoSubtomogramRot/Tilt/Psi turn them (--volume-axes subtomogram)"),
    ],
)
def test_the_plan_says_how_volumes_stand(tmp_path, cut_by_relion, option, text):
    path = relion4_list(tmp_path / "p.star", cut_by_relion)
    for i in range(len(CASES)):
        save(tmp_path / f"sub/{i}_data.mrc", blobs_at(BLOBS) + i)
    more = [] if option is None else ["--volume-axes", option]
    command = ["average", str(path), "-o", str(tmp_path / "run"), "--cpu-procs", "1", "--tilt-range", "-60", "60", *more]
    done = CliRunner().invoke(main, [*command, "--dry-run"])
    assert done.exit_code == 0 and f"volumes {text}" in " ".join(done.output.split()), done.output


def test_the_log_says_how_volumes_stand(tmp_path):
    path = relion4_list(tmp_path / "p.star", False)
    for i, (sub, part, origin) in enumerate(CASES):
        save(tmp_path / f"sub/{i}_data.mrc", in_tomogram(sub, part, origin))
    done = CliRunner().invoke(main, ["average", str(path), "-o", str(tmp_path / "run"), "--cpu-procs", "1", "--volume-axes", "tomogram"])
    assert done.exit_code == 0, done.output
    assert "volumes stand as the tomogram (--volume-axes tomogram)" in (tmp_path / "run" / "log.txt").read_text()


def test_axes_that_the_list_does_not_give(tmp_path, shared):
    path = relion4_list(tmp_path / "p.star", False)
    path.write_text(path.read_text().replace("rlnTomoSubtomogram", "rlnOther"))
    with pytest.raises(InputError, match="--volume-axes subtomogram: no column _rlnTomoSubtomogramRot"):
        read_particles(path, require_volumes=False, volume_axes="subtomogram")
    with pytest.raises(InputError, match="stacks of 2-D images, which stand as the tomogram"):
        read_particles(shared / "data/relion5-2d-stacks/particles.star", require_volumes=False, volume_axes="subtomogram")
    with pytest.raises(InputError, match="a Dynamo table takes no --volume-axes"):
        read_particles(shared / "data/lists/dynamo_35col.tbl", require_volumes=False, volume_axes="tomogram")


@pytest.mark.parametrize("cut_by_relion", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_refined_poses_go_into_the_particles_angles(tmp_path, cut_by_relion, inside):
    path = relion4_list(tmp_path / "p.star", cut_by_relion)
    particles = read_particles(path, require_volumes=False)
    turn = rotvec_to_matrix([0.3, -0.2, 0.5])
    moved = Poses(particles.poses.rotations.copy(), particles.poses.shifts_angst.copy())
    for i in (1, 2, 5):
        moved.rotations[i] = turn @ moved.rotations[i]
        moved.shifts_angst[i] = moved.shifts_angst[i] + [3, -2, 1]
    refined = particles.with_poses(moved)
    if inside and particles.volume_axes is not None:  # as a run has them
        axes = np.swapaxes(particles.volume_axes, 1, 2)
        own = Poses(axes @ moved.rotations, np.einsum("nij,nj->ni", axes, moved.shifts_angst))
        refined = particles.in_volumes().with_poses(own)
    out = tmp_path / "out.star"
    write_particles(out, refined)
    for label in (*SUBTOMOGRAM, *PLACES, "rlnTomoName", "rlnTomoParticleName", "rlnLCCmax", "rlnRandomSubset"):
        assert of_cif(out, label) == of_cif(path, label), label
    part, origins = numbers(out, *ANGLES), numbers(out, *ORIGINS)
    for i, (sub, _, _) in enumerate(CASES):
        assert alike(in_tomogram(sub, part[i], origins[i]), rendered(moved.rotations[i], moved.shifts_angst[i])) > 0.999999
        for label in (*ANGLES, *ORIGINS):
            if i not in (1, 2, 5):  # digits of what was not refined stay
                assert of_cif(out, label)[i] == of_cif(path, label)[i]


def test_gimbal_lock_of_both_rotations_at_once(tmp_path):
    """Field case 26: a grid of rot and tilt with 0 and 180, in either rotation."""
    grid = list(itertools.product(np.linspace(-180, 180, 7), (0.0, 60.0, 120.0, 180.0)))
    pairs = [(a, b) for a in grid[::3] for b in grid]
    n = len(pairs)
    columns = {
        "rlnImageName": [f"{i}.mrc" for i in range(n)],
        "rlnTomoName": ["t"] * n,
        **{label: [f"{(*a, 25.0)[axis]:.6f}" for a, _ in pairs] for axis, label in enumerate(SUBTOMOGRAM)},
        **{label: [f"{(*b, -40.0)[axis]:.6f}" for _, b in pairs] for axis, label in enumerate(ANGLES)},
    }
    path = tmp_path / "p.star"
    path.write_text(
        table("optics", {"rlnOpticsGroup": ["1"], "rlnImagePixelSize": ["2.0"]}) + table("particles", columns | {"rlnOpticsGroup": ["1"] * n})
    )
    particles = read_particles(path, require_volumes=False)
    expected = np.array([euler(*a, 25.0) @ euler(*b, -40.0) for a, b in pairs])
    np.testing.assert_allclose(particles.poses.rotations, expected, atol=1e-12)
    turned = particles.with_poses(Poses(expected @ rotvec_to_matrix([0, 0, 1e-3]), particles.poses.shifts_angst))
    write_particles(tmp_path / "out.star", turned)
    again = np.array([euler(*a, 25.0) @ euler(*angles) for (a, _), angles in zip(pairs, numbers(tmp_path / "out.star", *ANGLES), strict=True)])
    np.testing.assert_allclose(again, turned.poses.rotations, atol=1e-7)


# ---- real lists

REAL = {
    "lists/relion40_1746.star": (1746, 3.942, 64),
    "lists/relion40_empiar10064.star": (284, 10.48, 64),
    "lists/relion5_run_it050_data.star": (5, 12.42, 64),
    "lists/warp2_particles_matching.star": (1218, 4.0, 64),
    "relion5-2d-stacks/particles.star": (40, 12.0, 32),
}


@pytest.mark.parametrize("name", REAL)
def test_real_lists_hold_what_gemmi_finds(shared, tmp_path, name):
    path = shared / "data" / name
    particles = read_particles(path, require_volumes=False)
    count, pixel, box = REAL[name]
    assert len(particles) == count
    assert (particles.pixel_size_angst, particles.box_size, particles.premultiplied) == (pixel, box, True)
    assert list(particles.names) == of_cif(path, "rlnImageName") and list(particles.tomograms) == of_cif(path, "rlnTomoName")
    rotations = np.array([euler(*angles) for angles in numbers(path, *ANGLES)])
    shifts = -numbers(path, *ORIGINS)
    if of_cif(path, SUBTOMOGRAM[0]):
        axes = np.array([euler(*angles) for angles in numbers(path, *SUBTOMOGRAM)])
        rotations, shifts = axes @ rotations, np.einsum("nij,nj->ni", axes, shifts)
    np.testing.assert_allclose(particles.poses.rotations, rotations, atol=1e-9)
    np.testing.assert_allclose(particles.poses.shifts_angst, shifts, atol=1e-9)
    assert particles.half.tolist() == [int(v) for v in of_cif(path, "rlnRandomSubset")] or not particles.half.any()
    if of_cif(path, CENTRED[0]):
        np.testing.assert_array_equal(particles.coordinates.as_centred_angst(), numbers(path, *CENTRED))
    else:
        np.testing.assert_array_equal(particles.coordinates.as_voxels(), numbers(path, *PLACES))
    if particles.stacks is not None:
        frames = [[int(v) for v in text.strip("[]").split(",")] for text in of_cif(path, "rlnTomoVisibleFrames")]
        assert [f.astype(int).tolist() for f in particles.stacks.visible_frames] == frames
    # and comes back token by token, blocks and pairs too
    out = tmp_path / "out.star"
    write_particles(out, particles)
    before, after = gemmi.cif.read(str(path)), gemmi.cif.read(str(out))
    assert [b.name for b in before] == [b.name for b in after] and after.find_block("particles") is not None
    for b, a in zip(before, after, strict=True):
        items = [[(i.loop.tags, i.loop.values) if i.loop is not None else i.pair for i in block] for block in (b, a)]
        assert items[0] == items[1]


def test_stacks_of_images_keep_names_poses_and_places(shared):
    particles = read_particles(shared / "data/relion5-2d-stacks/optimisation_set.star")
    assert particles.stacks is not None and len(particles.stacks.visible_frames) == 40
    assert particles.stacks.tomograms_path.samefile(shared / "data/relion5-2d-stacks/tomograms.star")
    assert all(path.suffix == ".mrcs" and path.is_file() for path in particles.volume_paths)
    assert particles.stacks.take([2, 0]).visible_frames[1] is particles.stacks.visible_frames[0]
    # Warp counts coordinates in voxels of what it exports: they then fill the tomogram, 4400 x 6000 x 1400 voxels of 1.667 A
    size = np.array([4400, 6000, 1400]) * 1.667 / 12
    places = particles.coordinates.as_voxels()
    assert (places > 0).all() and (places < size).all() and (places.max(axis=0) > 0.8 * size).all()
    np.testing.assert_allclose(particles.coordinates.voxel_size_angst, 12)
    np.testing.assert_allclose(particles.coordinates.centre_voxels, [(np.array([4400, 6000, 1400]) / 2 - 1) * 1.667 / 12] * 40)


def test_names_of_tomograms_and_unknown_columns_are_text(tmp_path):
    """Field cases 1, 10 and 13: names with no number or several, digits with zeros in front, columns that nobody knows."""
    names = ["01", "12e3", "250531_l10p1_6.tomostar", "TS", "a.mrc.tomostar", "1.0", "-7", "nan"]
    extra = {"rlnLCCmax": ["0.10", "1e-3", "007", "nan", "None", "+1", "0x1", "1."], "rlnCutOff": ["01"] * 8, "rlnSearchStd": ["1.500"] * 8}
    columns = {"rlnTomoName": names, "rlnImageName": [f"{i}.mrc" for i in range(8)], **dict.fromkeys(ANGLES, ["0"] * 8), **extra}
    path = tmp_path / "p.star"
    path.write_text(
        table("optics", {"rlnOpticsGroup": ["1"], "rlnImagePixelSize": ["2.0"]}) + table("particles", columns | {"rlnOpticsGroup": ["1"] * 8})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        particles = read_particles(path, require_volumes=False)
    assert particles.tomograms == tuple(names)
    turned = particles.with_poses(Poses(particles.poses.rotations @ rotvec_to_matrix([0, 0.1, 0]), particles.poses.shifts_angst)).take([7, 2, 0])
    write_particles(tmp_path / "out.star", turned)
    for label in ("rlnTomoName", *extra):
        assert of_cif(tmp_path / "out.star", label) == [columns[label][i] for i in (7, 2, 0)]


# ---- optimisation sets


def test_an_optimisation_set_is_followed(shared, tmp_path):
    """Names in it start from the project's folder; the set lies deep inside."""
    lists = shared / "data/lists"
    (tmp_path / "Refine3D/job_refine").mkdir(parents=True)
    (tmp_path / "Tomograms/job_tomo").mkdir(parents=True)
    shutil.copy(lists / "relion5_run_it050_data.star", tmp_path / "Refine3D/job_refine/run_it050_data.star")
    set_path = tmp_path / "Refine3D/job_refine/run_it050_optimisation_set.star"
    shutil.copy(lists / "relion5_run_it050_optimisation_set.star", set_path)
    tomograms = {
        "rlnTomoName": ["TS_01", "TS_02"],
        "rlnTomoSizeX": ["3710", "3711"],
        "rlnTomoSizeY": ["3838", "3838"],
        "rlnTomoSizeZ": ["2000", "2000"],
        "rlnTomoTiltSeriesPixelSize": ["3.105", "3.105"],
    }
    (tmp_path / "Tomograms/job_tomo/tomograms.star").write_text(table("global", tomograms))
    particles = read_particles(set_path, require_volumes=False)
    assert len(particles) == 5 and particles.names[0] == "Extract/job_extract/Subtomograms/TS_01/1_data.mrc"
    # from Angstrom about the centre, voxel size / 2 - 1, to voxels, odd sizes too
    expected = (
        numbers(lists / "relion5_run_it050_data.star", *CENTRED) / 3.105 + np.array([[3710, 3838, 2000]] * 3 + [[3711, 3838, 2000]] * 2) / 2 - 1
    )
    np.testing.assert_allclose(particles.coordinates.as_voxels(), expected)
    write_particles(tmp_path / "out.star", particles)
    assert of_cif(tmp_path / "out.star", CENTRED[0]) == of_cif(lists / "relion5_run_it050_data.star", CENTRED[0])
    # Warp's name of the same tomogram joins (field case 10); nothing joined is an error that lists both sides (11)
    text = (tmp_path / "Tomograms/job_tomo/tomograms.star").read_text()
    (tmp_path / "Tomograms/job_tomo/tomograms.star").write_text(text.replace("TS_01", "TS_01.tomostar").replace("TS_02", "TS_02.tomostar"))
    np.testing.assert_allclose(read_particles(set_path, require_volumes=False).coordinates.as_voxels(), expected)
    (tmp_path / "Tomograms/job_tomo/tomograms.star").write_text(text.replace("TS_01", "TS_01.mrc").replace("TS_02", "TS_2"))
    with pytest.raises(ListError, match=r"2 of 2 tomograms are not in .*tomograms.star: TS_01, TS_02; it has TS_01.mrc, TS_2"):
        read_particles(set_path, require_volumes=False)
    (tmp_path / "Tomograms/job_tomo/tomograms.star").write_text(text.replace("TS_02", "TS_2"))
    with pytest.warns(UserWarning, match="1 of 2 tomograms are not in .*: TS_02; it has TS_01, TS_2"):
        particles = read_particles(set_path, require_volumes=False)
    assert np.isnan(particles.coordinates.as_voxels()[3:]).all() and not np.isnan(particles.coordinates.as_voxels()[:3]).any()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("data_\n\n_rlnTomoParticlesFile\n_rlnTomoTomogramsFile  t.star\n", ":3: key _rlnTomoParticlesFile has no value"),
        ('data_\n\n_rlnTomoParticlesFile ""\n_rlnTomoTomogramsFile  t.star\n', ":1: an optimisation set without particles"),
        ("data_\n\n_rlnTomoTomogramsFile  t.star\n", ":1: an optimisation set without particles; expected a file under _rlnTomoParticlesFile"),
        ("data_\n\n_rlnTomoParticlesFile p.star\n", "_rlnTomoParticlesFile p.star not found; tried "),
    ],
)
def test_optimisation_sets_without_particles(tmp_path, text, part):
    """Field case 6."""
    (tmp_path / "set.star").write_text(text)
    with pytest.raises(GlocalError) as error:
        read_particles(tmp_path / "set.star")
    assert part in str(error.value) and "set.star" in str(error.value) and "\n" not in str(error.value)


# ---- places


def one_particle(path, columns, optics=None):
    optics = {"rlnOpticsGroup": ["1"], "rlnImagePixelSize": ["8.0"], "rlnTomoTiltSeriesPixelSize": ["2.0"], **(optics or {})}
    columns = {"rlnTomoName": ["t"], "rlnImageName": ["a.mrc"], "rlnOpticsGroup": ["1"], **dict.fromkeys(ANGLES, ["0"]), **columns}
    path.write_text(table("optics", optics) + table("particles", columns))
    return read_particles(path, require_volumes=False)


@pytest.mark.parametrize("binning", [1, 4])
@pytest.mark.parametrize("size", [9, 10])
def test_centre_of_odd_and_even_tomograms(tmp_path, size, binning):
    """Field case 21: centred coordinates count from voxel size / 2 - 1 of the unbinned tomogram, whatever the binning of the images."""
    sizes = {f"rlnTomoSize{axis}": [str(size)] for axis in "XYZ"}
    optics = {**sizes, "rlnImagePixelSize": [f"{2.0 * binning}"], "rlnTomoSubtomogramBinning": [f"{binning}"]}
    particles = one_particle(tmp_path / "p.star", dict(zip(CENTRED, (["0.0"], ["2.0"], ["-4.0"]), strict=True)), optics)
    np.testing.assert_allclose(particles.coordinates.as_voxels(), [np.array([0, 1, -2]) + size / 2 - 1])
    back = one_particle(tmp_path / "q.star", {label: [f"{v}"] for label, v in zip(PLACES, particles.coordinates.as_voxels()[0], strict=True)}, optics)
    np.testing.assert_allclose(back.coordinates.as_centred_angst(), [[0, 2, -4]])


@pytest.mark.parametrize("sizes", [{}, {f"rlnTomoSize{axis}": ["-999"] for axis in "XYZ"}, {f"rlnTomoSize{axis}": ["9"] for axis in "XYZ"}])
def test_sizes_that_are_odd_unknown_or_left_out(tmp_path, sizes):
    """Field cases 22 and 28: centred coordinates alone are enough, and poses and what is written do not depend on the size."""
    columns = {**dict(zip(CENTRED, (["1.50"], ["2"], ["-4.0"]), strict=True)), **dict.fromkeys(ORIGINS, ["6"])}
    particles = one_particle(tmp_path / "p.star", columns, sizes)
    np.testing.assert_array_equal(particles.coordinates.as_centred_angst(), [[1.5, 2, -4]])
    np.testing.assert_allclose(particles.poses.shifts_angst, [[-6, -6, -6]])
    assert np.isnan(particles.coordinates.as_voxels()).all() == (sizes.get("rlnTomoSizeX") != ["9"])
    write_particles(tmp_path / "out.star", particles)
    assert [of_cif(tmp_path / "out.star", label) for label in CENTRED] == [["1.50"], ["2"], ["-4.0"]]


def test_position_is_coordinate_minus_origin(tmp_path):
    """Field case 23: coordinate 50, origin 10 A, 2 A a pixel: 45."""
    columns = {**dict.fromkeys(PLACES, ["50"]), "rlnOriginXAngst": ["10"], "rlnOriginYAngst": ["0"], "rlnOriginZAngst": ["-4"]}
    np.testing.assert_allclose(one_particle(tmp_path / "p.star", columns).positions_voxels(), [[45, 50, 52]])
    columns = {**columns, "rlnTomoName": ["t.tomostar"]}  # a RELION 4 list of volumes from Warp's tomograms
    np.testing.assert_allclose(one_particle(tmp_path / "p.star", columns).positions_voxels(), [[45, 50, 52]])
    columns = {**columns, "rlnTomoVisibleFrames": ["[1,1]"]}  # Warp's 2-D stacks: voxels of the image, 8 A
    np.testing.assert_allclose(one_particle(tmp_path / "p.star", columns).positions_voxels(), [[50 - 10 / 8, 50, 50.5]])


def test_pixel_size_of_places_and_of_images_are_two_things(tmp_path):
    """Field case 24: images of 15 A from a tilt series of 2.17 A, a factor of 6.912."""
    optics = {"rlnImagePixelSize": ["15.0"], "rlnTomoTiltSeriesPixelSize": ["2.17"]}
    particles = one_particle(tmp_path / "p.star", dict.fromkeys(PLACES, ["50"]), optics)
    assert particles.pixel_size_angst == 15.0 and particles.pixel_size_source == "list (rlnImagePixelSize)"
    assert particles.coordinates.voxel_size_angst.tolist() == [2.17]


def test_a_list_of_places_alone(tmp_path):
    """No volumes yet: names are made up, and a command that needs volumes says so."""
    columns = {"rlnTomoName": ["a", "b.tomostar"], **{label: ["1.0", "2.0"] for label in PLACES}}
    path = tmp_path / "p.star"
    path.write_text(table("particles", columns))
    with pytest.warns(UserWarning, match="no angles"):
        particles = read_particles(path, require_volumes=False)
    assert particles.names == ("a/1", "b.tomostar/2") and np.isnan(particles.pixel_size_angst)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_particles(tmp_path / "out.star", particles)
        assert of_cif(tmp_path / "out.star", "rlnTomoName") == columns["rlnTomoName"]
        with pytest.raises(ListError, match="no column _rlnImageName: a list of places without volumes, .*`extract`.* or --tomograms and --box"):
            read_particles(path)


def test_several_pixel_sizes(shared, tmp_path):
    """Each particle has its own where only the list is handled; a run refuses, naming the groups."""
    path = shared / "data/lists/relion_3.1_optics2.star"
    particles = read_particles(path, require_volumes=False)
    by_group = {"1": 2.446, "2": 3.446}
    assert particles.pixel_sizes_angst.tolist() == [by_group[group] for group in of_cif(path, "rlnOpticsGroup")]
    assert set(particles.pixel_sizes_angst) == {2.446, 3.446}
    np.testing.assert_allclose(particles.poses.shifts_angst, -numbers(path, *ORIGINS))
    write_particles(tmp_path / "out.star", particles)
    assert of_cif(tmp_path / "out.star", "rlnImagePixelSize", "optics") == of_cif(path, "rlnImagePixelSize", "optics")
    with pytest.raises(ListError, match="different pixel sizes: opticsGroup1 2.446 A .*, opticsGroup2 3.446 A .*; expected one"):
        read_particles(path)


@pytest.mark.parametrize("text", ["[1,0,2]", "1,0", "[]", "[1,0"])
def test_visible_frames_that_make_no_sense(tmp_path, text):
    path = tmp_path / "p.star"
    optics = {"rlnOpticsGroup": ["1"], "rlnImagePixelSize": ["8.0"], "rlnImageDimensionality": ["2"]}
    path.write_text(
        table("optics", optics) + table("particles", {"rlnImageName": ["a.mrcs"], "rlnOpticsGroup": ["1"], "rlnTomoVisibleFrames": [text]})
    )
    with warnings.catch_warnings(), pytest.raises(ListError, match=r"p.star:\d+: _rlnTomoVisibleFrames is '.*', expected zeros and ones"):
        warnings.simplefilter("ignore")
        read_particles(path, require_volumes=False)
