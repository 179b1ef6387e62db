"""Volumes against mrcfile and emfile, and files that break strict readers."""

from __future__ import annotations

import bz2
import errno
import gzip
import os
import struct
import time
import warnings
from pathlib import Path

import mrcfile
import numpy as np
import pytest

from numba_glocal.errors import GlocalError, InputError, VolumeError
from numba_glocal.io import read_header, read_volume, write_volume
from numba_glocal.io.volumes import read_array, survey
from numba_glocal.values import Volume

RNG = np.random.default_rng(7)


def _mrc(path, data, pixel_size=5.0):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(data)
        file.voxel_size = pixel_size
    return path


def _patch(path, offset, raw):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(raw)] = raw
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("mode", "dtype"), [(0, "i1"), (1, "i2"), (2, "f4"), (6, "u2"), (12, "f2")])
@pytest.mark.parametrize("order", ["<", ">"])
def test_modes_read_as_mrcfile_reads_them(tmp_path, mode, dtype, order):
    data = (RNG.normal(size=(6, 6, 6)) * 50).astype(dtype) if mode != 6 else RNG.integers(0, 65536, (6, 6, 6)).astype(dtype)
    path = _mrc(tmp_path / "a.mrc", data.astype(order + dtype))
    with mrcfile.open(path) as file:
        assert int(file.header.mode) == mode
        expected = file.data.astype(np.float32)
    volume = read_volume(path)
    assert volume.data.dtype == np.float32 and volume.data.flags.c_contiguous and volume.data.flags.writeable
    np.testing.assert_array_equal(volume.data, expected)
    assert volume.pixel_size_angst == 5.0
    for name, pack in (("a.mrc.gz", gzip.compress), ("a.map.bz2", bz2.compress)):
        (tmp_path / name).write_bytes(pack(path.read_bytes()))
        again = read_volume(tmp_path / name)
        np.testing.assert_array_equal(again.data, expected)
        assert again.data.flags.writeable


def test_all_real_volumes_read_as_mrcfile_reads_them(shared):
    paths = [*(shared / "data/real-70s").glob("*.mrc"), *(shared / "data/maps").glob("*.mrc")]
    assert len(paths) > 40
    for path in paths:
        with mrcfile.open(path, permissive=True) as file:
            np.testing.assert_array_equal(read_volume(path).data, file.data.astype(np.float32))


def test_imod_bytes_are_unsigned_only_with_its_flag(tmp_path):
    path = _mrc(tmp_path / "a.mrc", np.full((2, 2, 2), -1, dtype=np.int8))
    assert read_volume(path).data.max() == -1
    _patch(path, 152, struct.pack("<2i", 1146047817, 0))
    assert read_volume(path).data.min() == 255
    _patch(path, 152, struct.pack("<2i", 1146047817, 1))
    assert read_volume(path).data.max() == -1


def test_axis_order_of_a_real_map(shared):
    path = shared / "data/odd-volumes/EMD-3001.map.bz2"
    data, header = read_array(path)
    with mrcfile.open(path) as file:
        # columns run along z, rows along x, sections along y
        assert [int(file.header[k]) for k in ("mapc", "mapr", "maps")] == [3, 1, 2]
        expected = np.moveaxis(file.data, (0, 1, 2), (1, 2, 0))
    assert data.shape == header.shape == (73, 25, 43)
    np.testing.assert_array_equal(data, expected)
    with pytest.raises(VolumeError, match="43 x 25 x 73 is not cubic"):
        read_volume(path)


@pytest.mark.parametrize("order", [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)])
def test_axis_orders_put_a_marked_voxel_at_its_place(tmp_path, order):
    # one marked voxel at x = 1, y = 2, z = 3
    place = {1: 1, 2: 2, 3: 3}
    stored = np.zeros((5, 5, 5), dtype=np.float32)
    stored[place[order[2]], place[order[1]], place[order[0]]] = 1
    path = _patch(_mrc(tmp_path / "a.mrc", stored), 64, struct.pack("<3i", *order))
    assert np.argwhere(read_volume(path).data == 1).tolist() == [[3, 2, 1]]


# name, shape in z y x or part of the message
ODD = {
    "10076_classE_32.mrc": (32, 32, 32),
    "EMD-3001.map.bz2": (73, 25, 43),
    "emd_3197.map.gz": (20, 20, 20),
    "empty1.map": "the file is empty",
    "headerTest.st": "expected 526336 bytes (512 x 512 x 1 voxels), found 2048",
    "header_only.mrc": "expected 132096 bytes (32 x 32 x 32 voxels), found 1024",
    "human_ribo_mask_32_8_5.mrc": (32, 32, 32),
    "sm50.em": (8, 6, 4),
    "test_data_corrupt_header.map": "expected 34280108 bytes (301 x 401 x 71 voxels), found 1108",
}


@pytest.mark.filterwarnings("ignore")
def test_odd_volumes_are_read_or_refused(shared):
    folder = shared / "data/odd-volumes"
    assert {p.name for p in folder.iterdir()} == set(ODD)
    for name, expected in ODD.items():
        if isinstance(expected, str):
            with pytest.raises(VolumeError) as error:
                read_array(folder / name)
            assert name in str(error.value) and expected in str(error.value) and "\n" not in str(error.value)
            continue
        data, _ = read_array(folder / name)
        assert data.shape == expected and np.isfinite(data).all()
        if name.endswith(".mrc"):
            with mrcfile.open(folder / name, permissive=True) as file:
                np.testing.assert_array_equal(data, file.data)


@pytest.mark.parametrize("stamp", ["44000000", "44202020", "44110000", "00000000", "44440000", "44410000"])
def test_stamps(tmp_path, stamp):
    # field case 41: read, one warning a file, byte order from the header
    data = RNG.normal(size=(4, 4, 4)).astype(np.float32)
    path = _patch(_mrc(tmp_path / "a.mrc", data), 212, bytes.fromhex(stamp))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(read_volume(path).data, data)
    assert len(caught) == (stamp not in ("44440000", "44410000"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_volume(path, quiet=True)


def test_wrong_stamp_of_a_big_endian_file(tmp_path):
    data = RNG.normal(size=(4, 4, 4)).astype(">f4")
    path = _patch(_mrc(tmp_path / "a.mrc", data), 212, b"\x44\x44")
    with pytest.warns(UserWarning, match="machine stamp 44440000 is odd|machine stamp 4444"):
        np.testing.assert_array_equal(read_volume(path).data, data)


@pytest.mark.parametrize("identifier", [b"MAP\0", b"\0\0\0\0", b"junk"])
def test_without_map_id(tmp_path, identifier):
    # field case 42; 50: header and data come from one reader
    data = RNG.normal(size=(4, 4, 4)).astype(np.float32)
    path = _patch(_mrc(tmp_path / "a.mrc", data), 208, identifier)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(read_volume(path).data, data)
    assert len(caught) == (identifier != b"MAP\0")
    assert read_header(path).shape == (4, 4, 4)


# field cases 40, 44, 45, 48, 49: how the file is spoilt, part of the message
SPOILT = {
    "mode 101": (lambda p: _patch(p, 12, struct.pack("<i", 101)), "MRC mode 101 (4-bit integers) is not read"),
    "mode 7": (lambda p: _patch(p, 12, struct.pack("<i", 7)), "MRC mode 7 is not read"),
    "mode 4": (lambda p: _patch(p, 12, struct.pack("<i", 4)), "MRC mode 4 (complex float32) is not read"),
    "axes": (lambda p: _patch(p, 64, struct.pack("<3i", 1, 1, 3)), "axis order mapc, mapr, maps is (1, 1, 3)"),
    "extended header not written": (lambda p: _patch(p, 92, struct.pack("<i", 80)), "expected 1360 bytes (4 x 4 x 4 voxels), found 1280"),
    "negative extended header": (lambda p: _patch(p, 92, struct.pack("<i", -80)), "extended header has -80 bytes"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "expected 1280 bytes (4 x 4 x 4 voxels), found 1279"),
    "short header": (lambda p: p.write_bytes(p.read_bytes()[:1000]), "expected an MRC header of 1024 bytes, found 1000"),
    "zero bytes": (lambda p: p.write_bytes(b""), "the file is empty"),
    "text": (lambda p: p.write_bytes(b"hello world " * 200), "not an MRC file (it is text)"),
    "zeros": (lambda p: p.write_bytes(bytes(4096)), "not an MRC file"),
    "cut gzip": (lambda p: p.write_bytes(gzip.compress(RNG.bytes(5000))[:900]), "cannot be read"),
    "spoilt gzip": (lambda p: p.write_bytes(b"\x1f\x8b" + bytes(2000)), "cannot be read"),
    "spoilt bzip2": (lambda p: p.write_bytes(b"BZh" + bytes(2000)), "cannot be read"),
    "not cubic": (lambda p: _mrc(p, np.zeros((40, 24, 32), np.float32)), "32 x 24 x 40 is not cubic"),
    "missing": (lambda p: p.unlink(), "cannot be read (No such file or directory)"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_files_are_refused(tmp_path, name):
    spoil, part = SPOILT[name]
    path = _mrc(tmp_path / "a.mrc", np.ones((4, 4, 4), np.float32))
    spoil(path)
    with pytest.raises(VolumeError) as error:
        read_volume(path)
    assert str(path) in str(error.value) and part in str(error.value) and "\n" not in str(error.value)


def test_longer_file_warns(tmp_path):
    path = _mrc(tmp_path / "a.mrc", np.ones((4, 4, 4), np.float32))
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.warns(UserWarning, match="expected 1280 bytes, found 1284"):
        assert read_volume(path).data.sum() == 64


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({}, 5.0),
        ({40: struct.pack("<3f", 0, 0, 0)}, np.nan),
        ({40: struct.pack("<3f", 4, 4, 4)}, np.nan),
        ({40: struct.pack("<3f", np.nan, 20, 20)}, np.nan),
        ({40: struct.pack("<3f", np.inf, np.inf, np.inf)}, np.nan),
        ({40: struct.pack("<3f", -8, -8, -8)}, np.nan),
        ({40: struct.pack("<3f", 20, 20, 8)}, np.nan),
        ({28: struct.pack("<3i", 0, 0, 0)}, np.nan),
        ({40: struct.pack("<3f", 4 * 6.8, 4 * 6.8, 4 * 6.8)}, 6.8),
    ],
)
def test_pixel_size_of_the_header(tmp_path, patch, expected):
    path = _mrc(tmp_path / "a.mrc", np.ones((4, 4, 4), np.float32))
    for offset, raw in patch.items():
        _patch(path, offset, raw)
    assert read_volume(path).pixel_size_angst == pytest.approx(expected, nan_ok=True, abs=0)


@pytest.mark.parametrize(("kind", "dtype"), [(1, "i1"), (2, "i2"), (4, "i4"), (5, "f4"), (9, "f8")])
@pytest.mark.parametrize("order", ["<", ">"])
def test_em_types(tmp_path, kind, dtype, order):
    data = (RNG.normal(size=(5, 5, 5)) * 50).astype(order + dtype)
    path = tmp_path / "a.em"
    path.write_bytes(struct.pack(f"{order}4B3i", 6 if order == "<" else 3, 0, 0, kind, 5, 5, 5).ljust(512, b"\0") + data.tobytes())
    volume = read_volume(path)
    np.testing.assert_array_equal(volume.data, data.astype(np.float32))
    assert np.isnan(volume.pixel_size_angst)


@pytest.mark.parametrize(("raw", "part"), [(8, "EM type 8 (complex float32) is not read"), (3, "EM type 3 is not read")])
def test_em_types_that_are_not_read(tmp_path, raw, part):
    path = tmp_path / "a.em"
    path.write_bytes(struct.pack("<4B3i", 6, 0, 0, raw, 2, 2, 2).ljust(1024, b"\0"))
    with pytest.raises(VolumeError) as error:
        read_volume(path)
    assert part in str(error.value)


def test_em_against_emfile(shared, tmp_path):
    emfile = pytest.importorskip("emfile")
    for path in sorted((shared / "data/maps").glob("*.em")):
        np.testing.assert_array_equal(read_volume(path).data, emfile.read(str(path))[1])
    volume = Volume(RNG.normal(size=(6, 6, 6)).astype(np.float32), 3.0)
    write_volume(tmp_path / "out.em", volume)
    np.testing.assert_array_equal(emfile.read(str(tmp_path / "out.em"))[1], volume.data)


def test_written_mrc_is_valid_for_mrcfile(tmp_path):
    volume = Volume(RNG.normal(size=(7, 7, 7)).astype(np.float32), 6.8)
    path = tmp_path / "out.mrc"
    write_volume(path, volume)
    assert mrcfile.validate(path)
    with mrcfile.open(path) as file:
        np.testing.assert_array_equal(file.data, volume.data)
        assert float(file.voxel_size.x) == pytest.approx(6.8) and file.is_volume()
        assert float(file.header.rms) == pytest.approx(float(volume.data.std()), rel=1e-5)
    write_volume(path, Volume(np.asfortranarray(volume.data), float("nan")))
    again = read_volume(path)
    np.testing.assert_array_equal(again.data, volume.data)
    assert np.isnan(again.pixel_size_angst)


def test_writing_is_whole_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "out.mrc"
    path.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(InputError, match="out.mrc: cannot be written .No space left on device"):
            write_volume(path, Volume(np.ones((2, 2, 2), np.float32), 2.0))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(GlocalError, match="cannot be written"):
        write_volume(tmp_path / "none/out.mrc", Volume(np.ones((2, 2, 2), np.float32), 2.0))


def test_a_file_system_that_can_only_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "x")

    monkeypatch.setattr("numba_glocal.io.paths.open", refuse, raising=False)
    monkeypatch.setattr(Path, "unlink", refuse)  # there even what is missing cannot be removed
    with pytest.raises(InputError, match="m.mrc: cannot be written .Read-only"):
        write_volume(tmp_path / "m.mrc", Volume(np.ones((4, 4, 4), np.float32), 2.0))


def test_survey(tmp_path):
    paths = [_mrc(tmp_path / f"{i}.mrc", np.ones((4, 4, 4), np.float32), 3.0) for i in range(4)]
    assert survey(paths) == (4, 3.0)
    # one unreadable particle is for the run to skip, not a reason to refuse the list
    paths[1].write_bytes(b"")
    assert survey(paths) == (4, 3.0)
    with pytest.raises(VolumeError, match="the file is empty"):
        survey(paths[1:2])
    _mrc(paths[2], np.ones((6, 6, 6), np.float32))
    with pytest.raises(VolumeError, match=r"different box sizes: 2 of box 4 \(such as .*0.mrc\), 1 of box 6 \(such as .*2.mrc\)"):
        survey(paths)
    _mrc(paths[3], np.ones((4, 4, 6), np.float32))
    with pytest.raises(VolumeError, match="3.mrc: 6 x 4 x 4 is not cubic"):
        survey(paths[3:])


def test_speed_of_reading(tmp_path):
    data = RNG.normal(size=(64, 64, 64)).astype(np.float32)
    paths = [tmp_path / f"{i}.mrc" for i in range(40)]
    for path in paths:
        write_volume(path, Volume(data, 5.0))

    def best(read):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for path in paths:
                read(path)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(read_volume) < 1.5 * best(lambda p: np.fromfile(p, dtype=np.float32)) + 40 * 100e-6
