"""Plain MRC files read in one call: the same numbers as mrcfile's, and everything odd left to the reader that knows it."""

from __future__ import annotations

import gzip
import os
import struct

import mrcfile
import numpy as np
import pytest

from numba_glocal.errors import VolumeError
from numba_glocal.io import read_volume
from numba_glocal.io.mrc import read_plain_mrc

N = 6
DATA = np.random.default_rng(3).normal(size=(N, N, N)).astype(np.float32)


def mrc(path, data=DATA, extended=b""):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(data)
        if extended:
            file.set_extended_header(np.frombuffer(extended, "V1"))
    return path


def patched(path, offset, raw):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(raw)] = raw
    path.write_bytes(content)
    return path


def plain(path, box=N):
    out = np.full((box, box, box), np.nan, np.float32)
    return read_plain_mrc(path, out), out


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("extended", [0, 1, 80, 4096])
def test_the_same_numbers_as_mrcfile(tmp_path, dtype, extended):
    path = mrc(tmp_path / "a.mrc", DATA.astype(dtype), bytes(range(256)) * 16 if extended == 4096 else b"x" * extended)
    taken, out = plain(path)
    assert taken
    with mrcfile.open(path) as file:
        assert np.array_equal(out, file.data.astype(np.float32))
    assert np.array_equal(out, read_volume(path).data)


@pytest.mark.parametrize(("stamp", "map_id"), [("44440000", b"MAP "), ("44410000", b"MAP\0"), ("44410000", b"    "), ("00000000", b"MAP ")])
def test_a_map_id_or_a_stamp_is_enough(tmp_path, stamp, map_id):
    path = patched(mrc(tmp_path / "a.mrc"), 208, map_id + bytes.fromhex(stamp))
    taken, out = plain(path)
    assert taken and np.array_equal(out, DATA)


ODD = {
    "big endian": lambda p: mrc(p, DATA.astype(">f4")),
    "big endian with a little stamp": lambda p: patched(mrc(p, DATA.astype(">f4")), 212, b"\x44\x44"),
    "little endian with a big stamp": lambda p: patched(mrc(p), 212, b"\x11\x11"),
    "neither id nor stamp": lambda p: patched(mrc(p), 208, bytes(8)),
    "axes not stored x, y, z": lambda p: patched(mrc(p), 64, struct.pack("<3i", 3, 2, 1)),
    "axes not given": lambda p: patched(mrc(p), 64, bytes(12)),
    "integers": lambda p: mrc(p, (10 * DATA).astype(np.int16)),
    "bytes": lambda p: mrc(p, (10 * DATA).astype(np.int8)),
    "unsigned": lambda p: mrc(p, np.abs(10 * DATA).astype(np.uint16)),
    "another box": lambda p: mrc(p, DATA[:4, :4, :4].copy()),
    "not a cube": lambda p: mrc(p, DATA[:4].copy()),
    "not a cube, as many voxels": lambda p: mrc(p, DATA.reshape(2, 6, 18)),
    "truncated": lambda p: p.write_bytes(mrc(p).read_bytes()[:-1]),
    "half precision truncated": lambda p: p.write_bytes(mrc(p, DATA.astype("f2")).read_bytes()[:-2]),
    "header only": lambda p: p.write_bytes(mrc(p).read_bytes()[:1024]),
    "half a header": lambda p: p.write_bytes(mrc(p).read_bytes()[:512]),
    "empty": lambda p: p.write_bytes(b""),
    "too long": lambda p: p.write_bytes(mrc(p).read_bytes() + b"\0"),
    "extended header longer than the file": lambda p: patched(mrc(p), 92, struct.pack("<i", 4096)),
    "negative extended header": lambda p: patched(mrc(p), 92, struct.pack("<i", -4)),
    "compressed": lambda p: p.write_bytes(gzip.compress(mrc(p).read_bytes())),
    "a folder": lambda p: p.mkdir(),
    "missing": lambda p: None,
}


@pytest.mark.parametrize("what", ODD)
def test_everything_odd_is_declined(tmp_path, what):
    path = tmp_path / "a.mrc"
    ODD[what](path)
    assert not plain(path)[0]


def test_em_files_are_declined_whatever_they_hold(tmp_path):
    path = mrc(tmp_path / "a.mrc").rename(tmp_path / "a.EM")
    assert not plain(path)[0]
    with pytest.raises(VolumeError):
        read_volume(path)


def test_a_system_that_returns_less_than_asked_for(tmp_path, monkeypatch):
    path = mrc(tmp_path / "a.mrc", extended=b"x" * 80)
    whole = os.preadv

    def little_by_little(handle, buffers, offset):
        return whole(handle, [memoryview(buffers[0])[:100]], offset) if offset >= 1024 else whole(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", little_by_little)
    taken, out = plain(path)
    assert taken and np.array_equal(out, DATA)
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, offset: 0 if offset else whole(handle, buffers, 0))
    assert not plain(path)[0]  # became shorter while it was read


def test_all_real_volumes_are_the_same_either_way(shared):
    taken = 0
    for path in [*(shared / "data/real-70s").glob("*.mrc"), *(shared / "data/odd-volumes").iterdir()]:
        try:
            expected = read_volume(path, quiet=True).data
        except VolumeError:
            for box in (4, 20, 32, 64, 301, 512):
                assert not plain(path, box)[0]
            continue
        found, out = plain(path, expected.shape[0])
        taken += found
        if found:
            assert np.array_equal(out, expected)
    assert taken > 20
