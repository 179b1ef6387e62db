"""MRC volumes: one reader for header and data, permissive towards what programs of the field write, with checks of its own."""

from __future__ import annotations

import os
import struct
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import VolumeError

HEADER_BYTES = 1024
_MODES = {0: "i1", 1: "i2", 2: "f4", 6: "u2", 12: "f2"}
_UNREAD_MODES = {3: "complex int16", 4: "complex float32", 16: "RGB bytes", 101: "4-bit integers"}
# what bytes 212-213 should hold in a little or big endian file; CCP4 and others write 44 41
_STAMPS = {b"\x44\x44": "<", b"\x44\x41": "<", b"\x11\x11": ">"}
_IMOD_STAMP = 1146047817
_LARGEST_EDGE = 65536
_FIELDS = {order: struct.Struct(f"{order}10i6f3i3f2i") for order in "<>"}
_MAP_IDS = (b"MAP ", b"MAP\0")
_IMOD = {order: struct.Struct(f"{order}2i") for order in "<>"}


@dataclass(frozen=True, slots=True)
class VolumeHeader:
    """What a volume's header says.

    Attributes
    ----------
    shape : (int, int, int)
        ``(nz, ny, nx)`` as the data are read, after any transposition.
    dtype : numpy dtype
        Of the file, with byte order.
    offset : int
        First byte of the data.
    pixel_size_angst : float
        nan when 0, 1, not finite or different along the axes.
    axes : (int, int, int)
        For each axis ``z, y, x`` of the result, the axis of the stored array.
    remarks : tuple of str
        Oddities that do not prevent reading.
    """

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    offset: int
    pixel_size_angst: float = float("nan")
    axes: tuple[int, int, int] = (0, 1, 2)
    remarks: tuple[str, ...] = ()

    @property
    def expected_bytes(self) -> int:
        """Size a file with this header must have."""
        nz, ny, nx = self.shape
        return self.offset + nz * ny * nx * self.dtype.itemsize


def parse_mrc_header(raw: bytes, path: str | Path) -> VolumeHeader:
    """Parse the first 1024 bytes of an MRC file.

    Parameters
    ----------
    raw : bytes
        At least the first 1024 bytes, if the file has them.
    path : path
        For messages.

    Raises
    ------
    VolumeError
        Too short, not an MRC header, a mode that is not read.
    """
    if len(raw) < HEADER_BYTES:
        raise VolumeError(f"{path}: expected an MRC header of {HEADER_BYTES} bytes, found {len(raw)} bytes" if raw else f"{path}: the file is empty")
    stamp = raw[212:214]
    first = _STAMPS.get(stamp, "<")
    for order in (first, "><"[first == ">"]):
        values = _FIELDS[order].unpack_from(raw)
        nx, ny, nz, mode = values[:4]
        # byte order from the header itself: stamps are often wrong, a swapped size or mode is never plausible
        if all(0 < n <= _LARGEST_EDGE for n in (nx, ny, nz)) and 0 <= mode <= 255:
            break
    else:
        found = f"sizes {nx} x {ny} x {nz}, mode {mode}" if b"\0" in raw[:HEADER_BYTES] else "it is text"
        raise VolumeError(f"{path}: not an MRC file ({found})")
    if mode not in _MODES:
        kind = f" ({_UNREAD_MODES[mode]})" if mode in _UNREAD_MODES else ""
        raise VolumeError(f"{path}: MRC mode {mode}{kind} is not read, expected one of 0, 1, 2, 6, 12")
    code = _MODES[mode]
    if mode == 0:
        imod_stamp, imod_flags = _IMOD[order].unpack_from(raw, 152)
        if imod_stamp == _IMOD_STAMP and not imod_flags & 1:
            code = "u1"
    remarks = []
    if raw[208:212] not in _MAP_IDS:
        remarks.append("no MAP id")
    if _STAMPS.get(stamp) != order:
        remarks.append(f"machine stamp {raw[212:216].hex()} is odd, byte order taken from the sizes")
    stored: tuple[int, int, int] = tuple(values[16:19])
    axes = (0, 1, 2)
    if sorted(stored) == [1, 2, 3]:
        # stored = which of x, y, z (1, 2, 3) runs along columns, rows, sections; sections are axis 0 of the array
        axes = tuple(2 - stored.index(letter) for letter in (3, 2, 1))  # type: ignore[assignment]
    elif stored != (0, 0, 0):
        raise VolumeError(f"{path}: axis order mapc, mapr, maps is {stored}, expected a permutation of 1, 2, 3")
    extended = values[23]
    if extended < 0:
        raise VolumeError(f"{path}: the extended header has {extended} bytes, expected 0 or more")
    sizes = (nz, ny, nx)
    return VolumeHeader(
        shape=(sizes[axes[0]], sizes[axes[1]], sizes[axes[2]]),
        dtype=np.dtype(order + code),
        offset=HEADER_BYTES + extended,
        pixel_size_angst=_pixel_size(values[7:10], values[10:13]),
        axes=axes,
        remarks=tuple(remarks),
    )


def plain_data_offset(raw: bytes, box_size: int) -> int:
    """First byte of the data of a plain file: a cube of the box, little-endian float32 or float16, stored along x, y, z; else 0.

    What this takes, `parse_mrc_header` understands in the same way; what it declines may still be fine and wants the whole parser.
    """
    stamp_order = _STAMPS.get(raw[212:214])
    if stamp_order == ">" or (stamp_order is None and raw[208:212] not in _MAP_IDS):
        return 0
    values = _FIELDS["<"].unpack_from(raw)
    if values[:3] != (box_size,) * 3 or values[3] not in (2, 12) or values[16:19] != (1, 2, 3) or values[23] < 0:
        return 0
    return HEADER_BYTES + int(values[23])


def read_plain_mrc(path: str | Path, out: NDArray[np.float32]) -> bool:
    """Reads a plain MRC file straight into an array, in one system call where it can: no other thread waits meanwhile.

    Parameters
    ----------
    path : path
    out : (n, n, n) float32, C order
        Undefined where the answer is False.

    Returns
    -------
    bool
        False for any file that is not plain (`plain_data_offset`) or not exactly as long as its header says, for one that cannot be read,
        and for names that say EM: `volumes.read_volume` reads it, or says what is wrong.
    """
    if sys.byteorder != "little" or str(path).lower().endswith(".em"):
        return False
    raw = bytearray(HEADER_BYTES)
    view = out.reshape(-1).view(np.uint8).data
    beyond = bytearray(1)
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        got = os.preadv(handle, [raw, view, beyond], 0)
        offset = plain_data_offset(bytes(raw), out.shape[0]) if got > HEADER_BYTES else 0
        if not offset:
            return False
        if offset == HEADER_BYTES and got == HEADER_BYTES + len(view) and raw[12] == 2:
            return True
        # an extended header, half precision, or a call that returned less than was asked for
        half = np.empty(out.size, np.float16) if raw[12] == 12 else None
        view = view if half is None else half.view(np.uint8).data
        if os.fstat(handle).st_size != offset + len(view):
            return False
        done = 0
        while done < len(view):
            got = os.preadv(handle, [view[done:]], offset + done)
            if got <= 0:
                return False
            done += got
        if half is not None:
            out.reshape(-1)[:] = half
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _pixel_size(samples: tuple[int, ...], cell_angst: tuple[float, ...]) -> float:
    """Voxel edge, nan where the header cannot be believed."""
    if min(samples) <= 0:
        return float("nan")
    sizes = [edge / n for edge, n in zip(cell_angst, samples, strict=True)]
    # float32 in the header: 6 digits are what it can hold
    size = float(f"{sizes[0]:.6g}")
    if not believable(size) or max(sizes) > 1.001 * min(sizes):
        return float("nan")
    return size


def believable(pixel_size_angst: float) -> bool:
    """Whether a header's pixel size can be true; 0, 1 and nan are what programs write when they do not know."""
    return bool(np.isfinite(pixel_size_angst)) and pixel_size_angst > 0 and abs(pixel_size_angst - 1) > 1e-6


def check_size(header: VolumeHeader, present: int, path: str | Path, quiet: bool = False) -> None:
    """Refuse a file that is shorter than its header says, warn about one that is longer."""
    expected = header.expected_bytes
    if present < expected:
        raise VolumeError(f"{path}: expected {expected} bytes ({_shape_text(header.shape)} voxels), found {present}; the file is truncated")
    if present > expected and not quiet:
        warnings.warn(f"{path}: expected {expected} bytes, found {present}; the rest is ignored", stacklevel=4)


def _shape_text(shape: tuple[int, ...]) -> str:
    """Sizes as people write them, x first."""
    return " x ".join(str(n) for n in reversed(shape))


def mrc_bytes(data: NDArray[np.float32], pixel_size_angst: float) -> tuple[bytes, NDArray[np.float32]]:
    """Header and data of an MRC file, mode 2, of an array indexed ``[z, y, x]``.

    Parameters
    ----------
    data : (nz, ny, nx) array
    pixel_size_angst : float
        nan is written as an empty cell.

    Returns
    -------
    (bytes, array)
        1024 bytes of header, and the array as it is to be written.
    """
    order = "<" if sys.byteorder == "little" else ">"
    data = np.ascontiguousarray(data, dtype=np.float32)
    nz, ny, nx = data.shape
    edge = pixel_size_angst if np.isfinite(pixel_size_angst) else 0.0
    header = bytearray(HEADER_BYTES)
    statistics = (float(data.min()), float(data.max()), float(data.mean(dtype=np.float64)))
    _FIELDS[order].pack_into(
        header, 0, nx, ny, nz, 2, 0, 0, 0, nx, ny, nz, edge * nx, edge * ny, edge * nz, 90.0, 90.0, 90.0, 1, 2, 3, *statistics, 1, 0
    )
    struct.pack_into(f"{order}i", header, 108, 20140)
    header[208:216] = b"MAP " + (b"\x44\x44\0\0" if order == "<" else b"\x11\x11\0\0")
    label = b"numba-glocal"
    struct.pack_into(f"{order}fi{len(label)}s", header, 216, float(data.std(dtype=np.float64)), 1, label)
    return bytes(header), data
