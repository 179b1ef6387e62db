"""EM volumes (TOM, PyTom, AV3): a 512-byte header without pixel size, then the data with x fastest."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import VolumeError
from .mrc import VolumeHeader

HEADER_BYTES = 512
_TYPES = {1: "i1", 2: "i2", 4: "i4", 5: "f4", 9: "f8"}
_LARGEST_EDGE = 65536


def parse_em_header(raw: bytes, path: str | Path) -> VolumeHeader:
    """Parse the first 512 bytes of an EM file.

    Raises
    ------
    VolumeError
        Too short, not an EM header, a type that is not read.
    """
    if len(raw) < HEADER_BYTES:
        raise VolumeError(f"{path}: expected an EM header of {HEADER_BYTES} bytes, found {len(raw)} bytes" if raw else f"{path}: the file is empty")
    kind = raw[3]
    # byte 0 names the machine (6 = little endian); as in MRC, the sizes tell more reliably
    for order in "<>":
        nx, ny, nz = struct.unpack_from(f"{order}3i", raw, 4)
        if all(0 < n <= _LARGEST_EDGE for n in (nx, ny, nz)):
            break
    else:
        raise VolumeError(f"{path}: not an EM file (sizes {nx} x {ny} x {nz}, type {kind})")
    if kind not in _TYPES:
        name = " (complex float32)" if kind == 8 else ""
        raise VolumeError(f"{path}: EM type {kind}{name} is not read, expected one of 1, 2, 4, 5, 9")
    return VolumeHeader(shape=(nz, ny, nx), dtype=np.dtype(order + _TYPES[kind]), offset=HEADER_BYTES)


def em_bytes(data: NDArray[Any]) -> tuple[bytes, NDArray[np.float32]]:
    """Header and data of an EM file, float32, of an array indexed ``[z, y, x]``."""
    order, machine = ("<", 6) if sys.byteorder == "little" else (">", 5)
    data = np.ascontiguousarray(data, dtype=np.float32)
    nz, ny, nx = data.shape
    header = bytearray(HEADER_BYTES)
    struct.pack_into(f"{order}4B3i", header, 0, machine, 0, 0, 5, nx, ny, nz)
    return bytes(header), data
