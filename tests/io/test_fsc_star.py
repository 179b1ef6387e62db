from __future__ import annotations

import gemmi
import numpy as np
import pytest

from numba_glocal.errors import ListError
from numba_glocal.io.fsc_star import read_fsc_star, write_fsc_star
from numba_glocal.values import FSCCurve


def curve(mask="a mask.mrc", first=5):
    shells = np.arange(11)
    return FSCCurve(20, 6.8, 1 / (1 + shells), 1 / (1 + shells**0.9), 0.1 / (1 + shells), 1.2 / (1 + shells), mask, first)


def column(path, label):
    return np.array([float(v) for v in gemmi.cif.read(str(path)).find_block("fsc").find_values(f"_{label}")])


def test_gemmi_reads_every_curve_and_the_mask_name(tmp_path):
    path = tmp_path / "fsc.star"
    write_fsc_star(path, curve(), criterion=0.3)
    np.testing.assert_array_equal(column(path, "rlnSpectralIndex"), np.arange(11))
    np.testing.assert_allclose(column(path, "rlnAngstromResolution")[1:], 20 * 6.8 / np.arange(1, 11), rtol=1e-5)
    np.testing.assert_allclose(column(path, "rlnFourierShellCorrelationUnmaskedMaps"), curve().unmasked, atol=1e-6)
    np.testing.assert_allclose(column(path, "rlnFourierShellCorrelationMaskedMaps"), curve().masked, atol=1e-6)
    np.testing.assert_allclose(column(path, "rlnCorrectedFourierShellCorrelationPhaseRandomizedMaskedMaps"), curve().randomised, atol=1e-6)
    np.testing.assert_allclose(column(path, "rlnFourierShellCorrelationCorrected"), curve().corrected, atol=1e-6)
    general = gemmi.cif.read(str(path)).find_block("general")
    assert gemmi.cif.as_string(general.find_value("_rlnMaskName")) == "a mask.mrc"
    # 1.2 / (1 + shell) falls below 0.3 after shell 3
    assert float(general.find_value("_rlnFinalResolution")) == pytest.approx(20 * 6.8 / 3, rel=1e-5)


@pytest.mark.parametrize(("mask", "first"), [("a mask.mrc", 5), ("m.mrc", 1), ("m.mrc", 11), ("none", 0)])
def test_read_back(tmp_path, mask, first):
    path = tmp_path / "fsc.star"
    write_fsc_star(path, curve(mask, first))
    back = read_fsc_star(path)
    assert (back.box_size, back.pixel_size_angst, back.mask_name, back.randomised_from_shell) == (20, 6.8, mask, first)
    np.testing.assert_allclose(back.corrected, curve().corrected, atol=1e-6)
    np.testing.assert_allclose(back.randomised, curve().randomised, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("data_fsc", "data_other", "data_fsc"),
        ("_rlnMaskName", "_rlnOther", "rlnMaskName"),
        ("6.8", "wide", "rlnPixelSize"),
        ("0.500000", "high", "high"),
        ("20\n", "30\n", "16 shells"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, old, new, message):
    path = tmp_path / "fsc.star"
    write_fsc_star(path, curve())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ListError, match=message) as error:
        read_fsc_star(path)
    assert "fsc.star" in str(error.value) and "\n" not in str(error.value)
