"""Reading and writing maps, whatever the format: ``.em`` is EM, everything else MRC; gzip and bzip2 are recognised by content."""

from __future__ import annotations

import bz2
import gzip
import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import VolumeError
from ..values import Volume
from .em import em_bytes, parse_em_header
from .mrc import HEADER_BYTES, VolumeHeader, check_size, mrc_bytes, parse_mrc_header
from .paths import whole_file

_GZIP, _BZIP2 = b"\x1f\x8b", b"BZh"


def read_header(path: str | Path) -> VolumeHeader:
    """The header of a volume, without its data and without a check of the file's size.

    Raises
    ------
    VolumeError
        No such file, or no header that is understood.
    """
    try:
        with open(path, "rb", buffering=0) as handle:
            raw = handle.read(HEADER_BYTES)
        if raw[:2] == _GZIP:
            with gzip.open(path) as unzipped:
                raw = unzipped.read(HEADER_BYTES)
        elif raw[:3] == _BZIP2:
            with bz2.open(path) as unzipped:
                raw = unzipped.read(HEADER_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise VolumeError(f"{path}: cannot be read ({_reason(error)})") from None
    return _parse(raw, path)


def read_array(path: str | Path, *, quiet: bool = False) -> tuple[NDArray[Any], VolumeHeader]:
    """Data of a volume of any shape, in the file's own number type.

    Parameters
    ----------
    path : path
        MRC (modes 0, 1, 2, 6, 12) or EM, plain, gzip or bzip2.
    quiet : bool
        Leave out the warning about an odd but readable header.

    Returns
    -------
    data : (nz, ny, nx) array
        Indexed ``[z, y, x]``.
    header : VolumeHeader

    Raises
    ------
    VolumeError
        Missing, truncated, not a volume, or a mode that is not read.
    """
    try:
        with open(path, "rb", buffering=0) as handle:
            raw = handle.read(HEADER_BYTES)
            if raw[:2] != _GZIP and raw[:3] != _BZIP2:
                header = _parse(raw, path)
                check_size(header, os.fstat(handle.fileno()).st_size, path, quiet)
                data = np.empty(_stored_shape(header), dtype=header.dtype)
                handle.seek(header.offset)
                _fill(handle, data)
                return _finish(data, header, path, quiet)
        with (gzip.open if raw[:2] == _GZIP else bz2.open)(path) as unzipped:
            content = unzipped.read()
    except (OSError, EOFError, zlib.error) as error:
        raise VolumeError(f"{path}: cannot be read ({_reason(error)})") from None
    header = _parse(content[:HEADER_BYTES], path)
    check_size(header, len(content), path, quiet)
    shape = _stored_shape(header)
    data = np.frombuffer(content, dtype=header.dtype, count=int(np.prod(shape)), offset=header.offset).reshape(shape)
    return _finish(data, header, path, quiet)


def map_array(path: str | Path, *, quiet: bool = False) -> tuple[NDArray[Any], VolumeHeader]:
    """As `read_array`, without reading: a read-only view of the file, from which slices are read when they are taken.

    A compressed file is read whole.
    """
    try:
        with open(path, "rb", buffering=0) as handle:
            raw = handle.read(HEADER_BYTES)
            present = os.fstat(handle.fileno()).st_size
        if raw[:2] == _GZIP or raw[:3] == _BZIP2:
            return read_array(path, quiet=quiet)
        header = _parse(raw, path)
        check_size(header, present, path, quiet)
        data = np.memmap(path, header.dtype, "r", header.offset, _stored_shape(header))
    except OSError as error:
        raise VolumeError(f"{path}: cannot be read ({_reason(error)})") from None
    return _finish(data, header, path, quiet)


def read_volume(path: str | Path, *, quiet: bool = False) -> Volume:
    """Read a cubic map.

    Parameters
    ----------
    path : path
        MRC (modes 0, 1, 2, 6, 12) or EM, plain, gzip or bzip2.
    quiet : bool
        Leave out the warning about an odd but readable header.

    Returns
    -------
    Volume
        float32, C order ``[z, y, x]``, writable.

    Raises
    ------
    VolumeError
        As `read_array`, and for a volume that is not cubic.
    """
    data, header = read_array(path, quiet=quiet)
    check_cubic(header, path)
    result = np.ascontiguousarray(data, dtype=np.float32)
    if not result.flags.writeable:
        result = result.copy()
    return Volume(result, header.pixel_size_angst)


def write_volume(path: str | Path, volume: Volume) -> None:
    """Write a map, whole or not at all: EM when the name ends in ``.em``, else MRC mode 2 with the pixel size in the header.

    Raises
    ------
    InputError
        When the file cannot be written.
    """
    if Path(path).suffix.lower() == ".em":
        header, data = em_bytes(volume.data)
    else:
        header, data = mrc_bytes(volume.data, volume.pixel_size_angst)
    with whole_file(path) as handle:
        handle.write(header)
        handle.write(data.data)


def check_cubic(header: VolumeHeader, path: str | Path) -> None:
    """Refuse a volume whose three edges differ."""
    nz, ny, nx = header.shape
    if not nz == ny == nx:
        raise VolumeError(f"{path}: {nx} x {ny} x {nz} is not cubic")


def survey(paths: Sequence[Path], what: str = "particle volumes") -> tuple[int, float]:
    """Box size and pixel size that the headers of many volumes agree on.

    A file that cannot be understood is passed over: it is for the run to skip and count, and not a reason to refuse a list.

    Parameters
    ----------
    paths : sequence of Path
        Existing files.
    what : str
        What they are, for messages.

    Returns
    -------
    box_size : int
    pixel_size_angst : float
        nan when no header has one that can be believed, or when they differ.

    Raises
    ------
    VolumeError
        Box sizes differ, a volume is not cubic, or no header can be read.
    """
    example: dict[int, Path] = {}
    counts: dict[int, int] = {}
    pixel_sizes: set[float] = set()
    first_error: VolumeError | None = None
    for path in dict.fromkeys(paths):
        try:
            header = read_header(path)
        except VolumeError as error:
            first_error = first_error or error
            continue
        check_cubic(header, path)
        box_size = header.shape[0]
        example.setdefault(box_size, path)
        counts[box_size] = counts.get(box_size, 0) + 1
        if header.pixel_size_angst == header.pixel_size_angst:
            pixel_sizes.add(header.pixel_size_angst)
    if len(example) > 1:
        found = ", ".join(f"{counts[n]} of box {n} (such as {example[n]})" for n in sorted(example, key=lambda n: -counts[n])[:4])
        raise VolumeError(f"the {what} have different box sizes: {found}")
    if not example:
        raise first_error or VolumeError(f"there are no {what}")
    agreed = bool(pixel_sizes) and max(pixel_sizes) <= 1.001 * min(pixel_sizes)
    return next(iter(example)), (min(pixel_sizes) if agreed else float("nan"))


def _parse(raw: bytes, path: str | Path) -> VolumeHeader:
    name = str(path).lower()
    if name.endswith((".em", ".em.gz", ".em.bz2")):
        return parse_em_header(raw, path)
    return parse_mrc_header(raw, path)


def _stored_shape(header: VolumeHeader) -> tuple[int, int, int]:
    stored = [0, 0, 0]
    for size, axis in zip(header.shape, header.axes, strict=True):
        stored[axis] = size
    return (stored[0], stored[1], stored[2])


def _fill(handle: Any, data: NDArray[Any]) -> None:
    """Read until the array is full: one call may return less than was asked for."""
    view = data.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        n = handle.readinto(view[done:])
        if not n:
            raise OSError("the file became shorter while it was read")
        done += n


def _finish(data: NDArray[Any], header: VolumeHeader, path: str | Path, quiet: bool) -> tuple[NDArray[Any], VolumeHeader]:
    if header.remarks and not quiet:
        warnings.warn(f"{path}: {'; '.join(header.remarks)}", stacklevel=4)
    return (data if header.axes == (0, 1, 2) else data.transpose(header.axes)), header


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error)
