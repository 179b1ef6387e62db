"""FSC curves as STAR, in the labels of RELION's postprocess, so that its readers and plotting scripts understand them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ListError
from ..resolution import resolution_angst, shell_resolution_angst
from ..values import FSCCurve
from .star import StarBlock, StarDocument, read_star, write_star

_CURVES = {
    "corrected": "rlnFourierShellCorrelationCorrected",
    "unmasked": "rlnFourierShellCorrelationUnmaskedMaps",
    "masked": "rlnFourierShellCorrelationMaskedMaps",
    "randomised": "rlnCorrectedFourierShellCorrelationPhaseRandomizedMaskedMaps",
}
_SHELL_0_ANGST = 999.0  # what RELION writes where the resolution is infinite


def write_fsc_star(path: str | Path, curve: FSCCurve, criterion: float = 0.143) -> None:
    """Write a curve: ``data_general`` with box, pixel size, mask and resolution, and ``data_fsc`` with a row per shell.

    Parameters
    ----------
    path : path
        Replaced whole or not at all.
    curve : FSCCurve
        What to write.
    criterion : float
        Where ``rlnFinalResolution`` is read on the corrected curve.
    """
    box, pixel = curve.box_size, curve.pixel_size_angst
    general = {
        "rlnFinalResolution": _angst(resolution_angst(curve.corrected, box, pixel, criterion)),
        "rlnOriginalImageSize": str(box),
        "rlnPixelSize": f"{pixel:.9g}",
        "rlnMaskName": curve.mask_name,
    }
    if curve.mask_name != "none":
        general["rlnRandomiseFrom"] = _angst(shell_resolution_angst(curve.randomised_from_shell, box, pixel))
    shells = range(curve.unmasked.size)
    table = {
        "rlnSpectralIndex": [str(shell) for shell in shells],
        "rlnResolution": [f"{shell / (box * pixel):.8f}" for shell in shells],
        "rlnAngstromResolution": [_angst(shell_resolution_angst(shell, box, pixel)) for shell in shells],
    }
    table |= {label: [f"{value:.6f}" for value in getattr(curve, name)] for name, label in _CURVES.items()}
    write_star(path, StarDocument([StarBlock.from_pairs("general", general), StarBlock.from_columns("fsc", table)]))


def read_fsc_star(path: str | Path) -> FSCCurve:
    """Read what `write_fsc_star` wrote.

    Raises
    ------
    ListError
        A block, label or number is missing or wrong.
    """
    document = read_star(path)
    general, fsc = document["general"], document["fsc"]
    numbers = {}
    for label in ("rlnOriginalImageSize", "rlnPixelSize", *(["rlnRandomiseFrom"] if "rlnRandomiseFrom" in general else [])):
        try:
            numbers[label] = float(general.value(label))
        except ValueError:
            raise ListError(f"{general.where()}: expected a number for _{label}; found {general.value(label)}") from None
    box, pixel = round(numbers["rlnOriginalImageSize"]), numbers["rlnPixelSize"]
    curves = {name: fsc.floats(label) for name, label in _CURVES.items()}
    found = len(curves["unmasked"])
    if found != box // 2 + 1:
        raise ListError(f"{fsc.where()}: expected {box // 2 + 1} shells for a box of {box}; found {found}")
    randomised_from = numbers.get("rlnRandomiseFrom")
    first = int(np.rint(box * pixel / randomised_from)) if randomised_from else 0
    return FSCCurve(box, pixel, **curves, mask_name=general.value("rlnMaskName"), randomised_from_shell=first)


def _angst(value: float) -> str:
    return f"{value if np.isfinite(value) else _SHELL_0_ANGST:.6f}"
