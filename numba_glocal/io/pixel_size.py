"""The one place that decides on a pixel size, and says where it came from."""

from __future__ import annotations

import warnings

import numpy as np

from ..errors import InputError
from .mrc import believable

SAME_PIXEL_SIZE = 0.01
"""Pixel sizes that differ by less mean the same one: calibrations and rounded headers."""


def resolve_pixel_size(
    option_angst: float | None, list_angst: float | None, list_source: str, header_angst: float, list_path: object
) -> tuple[float, str]:
    """Pixel size of particle volumes: option, then list, then headers.

    Parameters
    ----------
    option_angst : float or None
        What the user gave.
    list_angst : float or None
        What the particle list says.
    list_source : str
        Where in the list it stands.
    header_angst : float
        What the volumes' headers say; nan when they do not.
    list_path : path
        For messages.

    Returns
    -------
    pixel_size_angst : float
    source : str

    Raises
    ------
    InputError
        When nothing says it, or when what is said cannot be true.
    """
    if option_angst is not None:
        if not np.isfinite(option_angst) or option_angst <= 0:
            raise InputError(f"pixel size {option_angst} A: expected a number above 0")
        others = [f"the list ({list_source}) says {list_angst:g} A"] if _differs(list_angst, option_angst) else []
        others += [f"the volumes' headers say {header_angst:g} A"] if _differs(header_angst, option_angst) else []
        if others:
            warnings.warn(f"{list_path}: the given pixel size is {option_angst:g} A, {', '.join(others)}; what is given is taken", stacklevel=3)
        return float(option_angst), "option"
    if list_angst is not None:
        if not np.isfinite(list_angst) or list_angst <= 0:
            raise InputError(f"{list_path}: {list_source} gives a pixel size of {list_angst} A, expected a number above 0")
        if _differs(header_angst, list_angst):
            warnings.warn(
                f"{list_path}: {list_source} gives a pixel size of {list_angst:g} A, the volumes' headers {header_angst:g} A; the list is taken",
                stacklevel=3,
            )
        return float(list_angst), f"list ({list_source})"
    if believable(header_angst):
        return float(header_angst), "volume headers"
    raise InputError(f"{list_path}: no pixel size in the list or in the volumes' headers (0, 1 and NaN are not believed); give it as an option")


def resolve_header_pixel_size(option_angst: float | None, header_angst: float, path: object) -> tuple[float, str]:
    """Pixel size of a volume that no list speaks of, such as a tomogram, and its source: option, then header.

    Raises
    ------
    InputError
        When neither says it.
    """
    if option_angst is not None:
        if _differs(header_angst, option_angst):
            said = f"the given pixel size is {option_angst:g} A, the header says {header_angst:g} A"
            warnings.warn(f"{path}: {said}; what is given is taken", stacklevel=3)
        return float(option_angst), "option"
    if not believable(header_angst):
        raise InputError(f"{path}: no pixel size in its header (0, 1 and NaN are not believed); give --pixel-size")
    return float(header_angst), "header"


def _differs(said_angst: float | None, angst: float) -> bool:
    return said_angst is not None and bool(np.isfinite(said_angst)) and said_angst > 0 and abs(said_angst / angst - 1) > SAME_PIXEL_SIZE
