"""Tomograms files of RELION 4, RELION 5 and WarpTools: projections against hand-made rotations, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from numba_glocal.errors import GlocalError
from numba_glocal.io import read_particles
from numba_glocal.io.mrc import mrc_bytes
from numba_glocal.io.tilt_series import Tomograms
from numba_glocal.tilt_images import with_tilt_images

HEAD = """
data_global

loop_
_rlnTomoName
_rlnTomoTiltSeriesPixelSize
_rlnTomoSizeX
_rlnTomoSizeY
_rlnTomoSizeZ
_rlnTomoHand
_rlnVoltage
_rlnSphericalAberration
_rlnAmplitudeContrast
"""
EULER = ("rlnTomoXTilt", "rlnTomoYTilt", "rlnTomoZRot")


def table(name, labels, rows):
    return f"\ndata_{name}\n\nloop_\n" + "".join(f"_{label}\n" for label in labels) + "".join(" ".join(row.split("|")) + "\n" for row in rows) + "\n"


def tomograms(tmp_path, *tables, rows=("a 2 400 300 200 -1 200 2.0 0.1",)):
    path = tmp_path / "tomograms.star"
    path.write_text(HEAD + "\n".join(rows) + "\n\n" + "".join(tables))
    return path


COMMON = ("rlnDefocusU", "rlnDefocusV", "rlnDefocusAngle", "rlnMicrographPreExposure")
TILTED = table("a", (*EULER, *COMMON), ["0|-40|0|20000|21000|10|6", "0|0|0|20000|21000|10|0", "0|50|0|20000|21000|10|3"])


def test_a_tilt_about_y_samples_what_the_conventions_say(tmp_path):
    series = Tomograms(tomograms(tmp_path, TILTED))["a"]
    assert len(series) == 3 and series.hand == -1 and series.optics() == (200.0, 2.0, 0.1)
    assert series.tomogram_size_voxels.tolist() == [400, 300, 200] and series.pixel_size_angst == 2
    t = np.deg2rad([-40, 0, 50])
    # the image's x axis is the direction (cos t, 0, -sin t) or its mirror: a tilt's sign is the file's own, rows are R's
    np.testing.assert_allclose(series.matrices[:, 0], np.column_stack([np.cos(t), 0 * t, np.sin(t)]), atol=1e-12)
    np.testing.assert_allclose(series.matrices[:, 1], [[0, 1, 0]] * 3, atol=1e-12)
    np.testing.assert_array_equal(series.exposure, [6, 0, 3])  # 33: every column in the order of the file


def test_angles_turn_about_x_then_y_then_z(tmp_path):
    series = Tomograms(tomograms(tmp_path, table("a", (*EULER, *COMMON), ["10|20|30|2e4|2e4|0|0"])))["a"]

    def turn(axis, angle):
        c, s = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
        i, j = [(1, 2), (2, 0), (0, 1)][axis]
        matrix = np.eye(3)
        matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = c, -s, s, c
        return matrix

    np.testing.assert_allclose(series.matrices[0], turn(2, 30) @ turn(1, 20) @ turn(0, 10), atol=1e-12)


def test_matrices_of_relion_4_and_warp(tmp_path):
    rows = ["[0,-1,0,7]|[1,0,0,8]|[0,0,1,9]|[0,0,0,1]|20000|21000|10|0"]
    labels = ("rlnTomoProjX", "rlnTomoProjY", "rlnTomoProjZ", "rlnTomoProjW", *COMMON)
    series = Tomograms(tomograms(tmp_path, table("a.tomostar", labels, rows)))["a.tomostar"]  # 10: with and without .tomostar
    np.testing.assert_array_equal(series.matrices[0], [[0, -1, 0], [1, 0, 0], [0, 0, 1]])


def test_a_file_for_each_series(tmp_path):
    (tmp_path / "series").mkdir()
    (tmp_path / "series/a.star").write_text(TILTED)
    path = tmp_path / "tomograms.star"
    path.write_text("data_global\nloop_\n_rlnTomoName\n_rlnTomoTiltSeriesStarFile\na series/a.star\nb series/b.star\n")
    found = Tomograms(path)
    assert len(found["a"]) == 3 and found["a"].optics() == (300.0, 2.7, 0.07) and np.isnan(found["a"].pixel_size_angst)
    with pytest.raises(GlocalError, match=r"tomograms.star:\d+.*series/b.star not found; tried .*series/b.star"):
        found["b"]


def test_defocus_follows_the_height_along_the_beam(tmp_path):
    series = Tomograms(tomograms(tmp_path, TILTED))["a"]
    every = np.arange(3)
    place = np.array([100.0, 30.0, 50.0])
    at_centre = series.geometry(every, every, 4.0)
    there = series.geometry(every, every, 4.0, centred_angst=place)
    t = np.deg2rad([-40, 0, 50])
    height = -np.sin(t) * 100 + np.cos(t) * 50
    np.testing.assert_allclose(there.defocus_angst[:, :2] - at_centre.defocus_angst[:, :2], -height[:, None] * [1, 1], atol=1e-9)
    assert there != at_centre and there.key != at_centre.key and hash(at_centre) == hash(series.geometry(every, every, 4.0))


REFUSED = {
    "another matrix": (
        table("a", ("rlnTomoProjX", "rlnTomoProjY", "rlnTomoProjZ", *COMMON), ["[1,0,0,0]|[0,2,0,0]|[0,0,1,0]|2e4|2e4|0|0"]),
        "no rotation",
    ),
    "three numbers": (
        table("a", ("rlnTomoProjX", "rlnTomoProjY", "rlnTomoProjZ", *COMMON), ["[1,0,0]|[0,1,0,0]|[0,0,1,0]|2e4|2e4|0|0"]),
        r"_rlnTomoProjX is '\[1,0,0\]', expected four numbers",
    ),
    "no projections": (table("a", COMMON, ["2e4|2e4|0|0"]), "expected the columns _rlnTomoProjX"),
    "no table": ("", "tomogram a has no table of its tilt images"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(tmp_path, what):
    text, part = REFUSED[what]
    with pytest.raises(GlocalError, match=part):
        Tomograms(tomograms(tmp_path, text))["a"]


def test_an_unknown_tomogram_and_a_file_of_another_kind(tmp_path):
    with pytest.raises(GlocalError, match="no tomogram b; expected one of a"):
        Tomograms(tomograms(tmp_path, TILTED))["b"]
    (tmp_path / "other.star").write_text("data_particles\nloop_\n_rlnImageName\na.mrc\n")
    with pytest.raises(GlocalError, match="expected a tomograms file .*found data_particles"):
        Tomograms(tmp_path / "other.star")


def test_no_exposure_is_said(tmp_path):
    with pytest.warns(UserWarning, match="no column _rlnMicrographPreExposure; no exposure filter"):
        Tomograms(tomograms(tmp_path, table("a", (*EULER, *COMMON[:3]), ["0|0|0|2e4|2e4|0"])))["a"]


def stacks(tmp_path, images=3, visible="[1,1,1]", box=8, size=8, tomo="a", table=TILTED, with_set=True):
    header, data = mrc_bytes(np.random.default_rng(0).normal(size=(images, box, box)).astype(np.float32), 4.0)
    (tmp_path / "p.mrcs").write_bytes(header + data.tobytes())
    tomograms(tmp_path, table)
    (tmp_path / "particles.star").write_text(
        f"data_general\n_rlnTomoSubTomosAre2DStacks 1\n\ndata_optics\nloop_\n_rlnOpticsGroup\n_rlnImagePixelSize\n_rlnImageSize\n"
        f"_rlnImageDimensionality\n_rlnCtfDataAreCtfPremultiplied\n1 4 {size} 2 1\n\n"
        "data_particles\nloop_\n_rlnTomoName\n_rlnImageName\n_rlnOpticsGroup\n_rlnAngleRot\n_rlnAngleTilt\n_rlnAnglePsi\n"
        f"_rlnTomoVisibleFrames\n{tomo} p.mrcs 1 0 0 0 {visible}\n"
    )
    (tmp_path / "set.star").write_text("data_\n_rlnTomoParticlesFile particles.star\n_rlnTomoTomogramsFile tomograms.star\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return with_tilt_images(read_particles(tmp_path / ("set.star" if with_set else "particles.star"))).weight_paths[0]


def test_which_images_of_a_stack(tmp_path):
    assert stacks(tmp_path).images.tolist() == [0, 1, 2]
    some = stacks(tmp_path, visible="[1,0,1]")  # all are in the stack, as Warp writes them
    assert some.images.tolist() == [0, 2] and some.exposure.tolist() == [6, 3]
    some = stacks(tmp_path, images=2, visible="[1,0,1]")  # the visible ones are, as RELION does
    assert some.images.tolist() == [0, 1] and some.exposure.tolist() == [6, 3]
    left_out = TILTED.replace("rlnMicrographPreExposure", "rlnMicrographPreExposure\n_rlnCtfScalefactor").replace("10 6\n", "10 6 0\n")
    left_out = left_out.replace("10 0\n", "10 0 1\n").replace("10 3\n", "10 3 0.5\n")
    some = stacks(tmp_path, table=left_out)
    assert some.images.tolist() == [1, 2] and some.scale.tolist() == [1, 0.5] and some.multiplied


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"images": 4}, "p.mrcs: 4 images, expected 3 .the visible ones. or 3"),
        ({"visible": "[1,0]"}, "has 2 flags, expected 3, one for each image of a"),
        ({"visible": "[0,0,0]"}, "none of the 3 images of a is visible"),
        ({"box": 10}, "images of 10 x 10, expected 8 x 8"),
        ({"tomo": "b"}, "no tomogram b; expected one of a"),
        ({"with_set": False}, "needs the tomograms file"),
        ({"table": table("a", (*EULER, "rlnMicrographPreExposure"), ["0|0|0|0"] * 3)}, "no column _rlnDefocusU"),
    ],
)
def test_stacks_that_are_refused(tmp_path, given, part):
    with pytest.raises(GlocalError, match=part) as error:
        stacks(tmp_path, **given)
    assert "\n" not in str(error.value)
