"""Files and wedges from the field (rows 33 to 52 of the list of cases): one small reproducer for each, by its number."""

from __future__ import annotations

import struct
import warnings

import mrcfile
import numpy as np
import pytest

from numba_glocal.errors import GlocalError, InputError, SettingsError, VolumeError
from numba_glocal.io import read_header, read_particles, read_volume, write_volume
from numba_glocal.io.paths import VolumeFinder, find_volumes
from numba_glocal.io.pixel_size import resolve_header_pixel_size, resolve_pixel_size
from numba_glocal.io.tilt_series import TiltFiles
from numba_glocal.io.volumes import map_array, read_array
from numba_glocal.job import prepare_job
from numba_glocal.masks import check_mask
from numba_glocal.settings import AlignSettings, AverageSettings
from numba_glocal.tilt_images import multipliers
from numba_glocal.values import Volume
from numba_glocal.wedge import read_weight_volume, tilt_range_weights, wedge_to_tilt_range

NAN = float("nan")


def volume(path, data=None, pixel=5.0):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(np.arange(64, dtype=np.float32).reshape(4, 4, 4) if data is None else data)
        file.voxel_size = pixel
    return path


def patch(path, offset, raw):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(raw)] = raw
    path.write_bytes(content)
    return path


def quietly(function, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


# ---- wedge


def test_row_33_columns_of_tilts_stay_together(tmp_path):
    path = tmp_path / "a.tomostar"
    path.write_text("data_\nloop_\n_wrpAngleTilt\n_wrpDose\n60 1\n0 2\n-60 3\n")
    series = TiltFiles(path)["a"]
    assert dict(zip(np.rint(np.rad2deg(np.arcsin(series.matrices[:, 2, 0]))).astype(int), series.exposure, strict=True)) == {60: 1, 0: 2, -60: 3}
    geometry = series.geometry(np.arange(3), np.arange(3), 5.0, ctf=False)
    left = multipliers(geometry, 16, ctf=False)[:, -1]
    assert left[0] > left[1] > left[2]


def test_row_34_an_asymmetric_range_and_its_mirror_differ():
    there, mirror = tilt_range_weights(16, -70, 40), tilt_range_weights(16, -40, 70)
    assert (there != mirror).mean() > 0.1
    np.testing.assert_array_equal(tilt_range_weights(16, -70, 40, flip=True), mirror)


@pytest.mark.parametrize(("wedge", "expected"), [((0, 0), (-90, 90)), ((30, 45), (-60, 45)), ((-10, 30), None), ((90, 30), None), ((95, 30), None)])
def test_row_35_wedge_angles(wedge, expected):
    if expected is None:
        with pytest.raises(SettingsError, match="expected 0 .no wedge. to less than 90"):
            wedge_to_tilt_range(*wedge)
    else:
        assert wedge_to_tilt_range(*wedge) == expected


@pytest.mark.parametrize("flip", [False, True])
def test_row_37_the_range_is_said_as_read_and_as_used(tmp_path, flip):
    (tmp_path / "a.tlt").write_text("-60\n-20\n40\n")
    files = TiltFiles(tmp_path / "a.tlt", flip=flip)
    assert not files.notes and files["a"] is files["a"]
    used = "-40 to 60" if flip else "-60 to 40"
    (note,) = files.notes
    assert f"3 tilts from -60 to 40 degrees as read, {used} as used about y" in note and ("--flip-tilt" in note) == flip


def test_row_38_tilts_off_the_nominal_ones_keep_their_row(tmp_path):
    """All that is known of a tilt stands in its row: nothing is matched by angles, an offset of 2.1 degrees moves planes only."""
    nominal = np.arange(-60, 61, 3)
    for name, offset in (("a", 0.0), ("b", 2.1)):
        rows = "\n".join(f"{t + offset} {i}" for i, t in enumerate(nominal))
        (tmp_path / f"{name}.tomostar").write_text(f"data_\nloop_\n_wrpAngleTilt\n_wrpDose\n{rows}\n")
    files = TiltFiles(tmp_path)
    assert files["a"].exposure.tolist() == files["b"].exposure.tolist() == list(range(41))
    turned = np.rad2deg(np.arcsin(files["b"].matrices[:, 2, 0])) - np.rad2deg(np.arcsin(files["a"].matrices[:, 2, 0]))
    np.testing.assert_allclose(turned, 2.1, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((8, 8, 8), None), ((8, 8, 5), None), ((5, 8, 8), None), ((6, 6, 6), "full volume of box 6"), ((7, 8, 5), "a volume of 5 x 8 x 7")],
)
def test_row_39_weights_say_which_kind_was_found(tmp_path, shape, said):
    path = volume(tmp_path / "w.mrc", np.ones(shape, np.float32))
    if said is None:
        assert read_weight_volume(path, 8).shape == (8, 8, 5)
    else:
        with pytest.raises(VolumeError, match=said):
            read_weight_volume(path, 8)


def test_row_40_volumes_that_are_not_cubic(tmp_path):
    path = volume(tmp_path / "m.mrc", np.zeros((40, 24, 32), np.float32))
    with pytest.raises(VolumeError, match="m.mrc: 32 x 24 x 40 is not cubic"):
        read_volume(path)
    with pytest.raises(GlocalError, match="m.mrc"):
        check_mask(np.ones((24, 24, 24), np.float32), 32, "m.mrc")


# ---- io


@pytest.mark.parametrize("stamp", ["44000000", "44202020", "44110000", "00000000"])
def test_row_41_machine_stamps(tmp_path, stamp):
    path = patch(volume(tmp_path / "a.mrc"), 212, bytes.fromhex(stamp))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read_volume(path).data
    assert found[3, 3, 3] == 63 and len(caught) == 1 and stamp in str(caught[0].message)


@pytest.mark.parametrize("identifier", [b"MAP\0", b"\0\0\0\0", b"    "])
def test_row_42_and_50_without_map_id(tmp_path, identifier):
    path = patch(volume(tmp_path / "a.mrc"), 208, identifier)
    assert quietly(read_volume, path).data[0, 0, 1] == 1 and read_header(path).pixel_size_angst == 5
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(VolumeError, match="expected 1280 bytes .* found 1276"):
        quietly(read_volume, path)


def test_row_44_half_floats_are_not_summed_as_such(tmp_path):
    path = volume(tmp_path / "a.mrc", np.ones((42, 42, 42), np.float16))
    found = read_volume(path).data
    assert found.dtype == np.float32 and found.sum() == 42**3 > 65504


@pytest.mark.parametrize(("mode", "said"), [(101, "mode 101 .4-bit integers. is not read"), (7, "mode 7 is not read")])
def test_row_45_modes_are_named(tmp_path, mode, said):
    with pytest.raises(VolumeError, match=said):
        read_volume(patch(volume(tmp_path / "a.mrc"), 12, struct.pack("<i", mode)))


@pytest.mark.parametrize(
    "cell", [(40, struct.pack("<3f", 0, 0, 0)), (40, struct.pack("<3f", 4, 4, 4)), (40, struct.pack("<3f", NAN, NAN, NAN)), (28, bytes(12))]
)
def test_row_47_a_voxel_of_0_1_or_nan_is_not_true(tmp_path, cell):
    path = patch(volume(tmp_path / "a.mrc"), *cell)
    header = read_header(path).pixel_size_angst
    assert np.isnan(header)
    with pytest.raises(InputError, match="list.star: no pixel size in the list or in the volumes' headers"):
        resolve_pixel_size(None, None, "", header, "list.star")
    assert resolve_pixel_size(None, 6.8, "rlnImagePixelSize", header, "list.star") == (6.8, "list (rlnImagePixelSize)")
    assert resolve_pixel_size(7.0, None, "", header, "list.star") == (7.0, "option")
    with pytest.raises(InputError, match="a.mrc: no pixel size in its header"):
        resolve_header_pixel_size(None, header, path)
    assert resolve_header_pixel_size(7.0, header, path) == (7.0, "option")
    write_volume(tmp_path / "out.mrc", Volume(read_volume(path).data, 6.8))
    assert read_header(tmp_path / "out.mrc").pixel_size_angst == 6.8


@pytest.mark.parametrize("order", [(1, 2, 3), (2, 1, 3), (3, 2, 1), (3, 1, 2), (2, 3, 1), (1, 3, 2)])
def test_row_48_axis_orders(tmp_path, order):
    """Mapped, whole or in the header: sizes and voxels are those of x, y, z."""
    sizes = dict(zip(order, (4, 5, 6), strict=True))  # columns, rows, sections
    stored = np.zeros((6, 5, 4), np.float32)
    at = dict(zip(order, (3, 2, 1), strict=True))
    stored[1, 2, 3] = 1
    path = patch(volume(tmp_path / "a.mrc", stored), 64, struct.pack("<3i", *order))
    for read in (read_array, map_array):
        data, header = quietly(read, path)
        assert data.shape == header.shape == (sizes[3], sizes[2], sizes[1])
        assert np.argwhere(np.asarray(data) == 1).tolist() == [[at[3], at[2], at[1]]]


@pytest.mark.parametrize("read", [read_array, map_array])
def test_row_49_what_the_header_says_and_the_file_has_not(tmp_path, read):
    path = patch(volume(tmp_path / "a.mrc"), 92, struct.pack("<i", 80))
    with pytest.raises(VolumeError, match=r"a.mrc: expected 1360 bytes .* found 1280"):
        read(path)
    path = volume(tmp_path / "b.mrc")
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(VolumeError, match=r"b.mrc: expected 1280 bytes .* found 1024"):
        read(path)


def test_row_52_names_are_tried_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "project/a/b").mkdir(parents=True)
    (tmp_path / "project/a/c").mkdir()
    (tmp_path / "given").mkdir()
    here = tmp_path / "somewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    list_path = tmp_path / "project/a/b/list.star"
    places = {
        "../c/x.mrc": tmp_path / "project/a/c/x.mrc",  # from the list's folder, with ..
        "a/c/y.mrc": tmp_path / "project/a/c/y.mrc",  # from the project's
        "z.mrc": tmp_path / "given/z.mrc",  # from a root
        "w.mrc:mrc": here / "w.mrc",  # from the current folder
    }
    for path in places.values():
        volume(path)
    for name, path in places.items():
        assert find_volumes([name], VolumeFinder(list_path, tmp_path / "given"), list_path)[name].samefile(path)
    with pytest.raises(InputError) as error:
        find_volumes(["none.mrc"], VolumeFinder(list_path, tmp_path / "given"), list_path)
    for folder in ("given", "project/a/b", "project/a", "project", "somewhere"):
        assert str(tmp_path / folder / "none.mrc") in str(error.value)


def test_the_root_option_reaches_the_reader_and_the_source_is_kept(tmp_path):
    (tmp_path / "far").mkdir()
    rng = np.random.default_rng(0)
    for i in range(4):
        volume(tmp_path / f"far/{i}.mrc", rng.normal(size=(16, 16, 16)).astype(np.float32), 0.0)
    rows = "\n".join(f"{i}.mrc 0 0 0 {i % 2 + 1}" for i in range(4))
    path = tmp_path / "list.star"
    path.write_text(f"data_\nloop_\n_rlnImageName\n_rlnAngleRot\n_rlnAngleTilt\n_rlnAnglePsi\n_rlnRandomSubset\n{rows}\n")
    for kind in (AlignSettings, AverageSettings):
        with pytest.raises(InputError, match="not found"):
            prepare_job(kind(str(path), "out", pixel_size_angst=8.0))
        job = prepare_job(kind(str(path), "out", pixel_size_angst=8.0, root=str(tmp_path / "far")))
        assert job.particles.pixel_size_source == "option" and job.particles.volume_paths[0] == tmp_path / "far/0.mrc"
    with pytest.raises(InputError, match="no pixel size"):
        read_particles(path, root=tmp_path / "far")
