"""The commands fsc, mask, simulate and report, as a person calls them."""

from __future__ import annotations

import sys
import types

import gemmi
import mrcfile
import numpy as np
import pytest
from click.testing import CliRunner
from scipy import ndimage

from numba_glocal.cli.main import main
from numba_glocal.masks import spherical_mask
from numba_glocal.report import ReportData


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def write(path, data, pixel=5.0):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(np.asarray(data, np.float32))
        file.voxel_size = pixel
    return path


def read(path):
    with mrcfile.open(path) as file:
        return np.array(file.data), float(file.voxel_size.x)


@pytest.fixture
def halves(tmp_path):
    rng = np.random.default_rng(1)
    signal = ndimage.gaussian_filter(rng.normal(size=(32,) * 3), 1.2) * spherical_mask(32, 9)
    signal /= signal.std()
    return [write(tmp_path / f"half{i}.mrc", signal + rng.normal(size=signal.shape)) for i in (1, 2)]


def refused(result, *expected):
    """Exit code 2, one line, nothing else."""
    text = result.output
    assert result.exit_code == 2, text
    assert len(text.strip().splitlines()) == 1 and "Traceback" not in text
    for part in expected:
        assert str(part) in text


def test_fsc_prints_resolutions_and_writes_curves(halves, tmp_path):
    mask = write(tmp_path / "mask.mrc", spherical_mask(32, 11, 3))
    result = run("fsc", *halves, "--mask", mask, "-o", tmp_path / "fsc.star")
    assert result.exit_code == 0, result.output
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in result.output.splitlines() if "\t" in line}
    assert list(rows) == ["curve", "unmasked", "masked", "randomised", "corrected"]
    assert "mask mask.mrc" in result.output
    # the file and the table agree, and so does the resolution with the shell it stands beside
    block = gemmi.cif.read(str(tmp_path / "fsc.star")).find_block("fsc")
    corrected = [float(v) for v in block.find_values("_rlnFourierShellCorrelationCorrected")]
    shell = next(i for i, v in enumerate(corrected) if i and v < 0.143) - 1
    assert rows["corrected"][1] == str(shell) and float(rows["corrected"][0]) == pytest.approx(32 * 5.0 / shell, abs=0.01)


def test_fsc_pixel_size_and_criterion(halves):
    result = run("fsc", *halves, "--pixel-size", 10, "--fsc-criterion", 0.5)
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in result.output.splitlines() if "\t" in line}
    assert list(rows) == ["curve", "unmasked"] and "0.5" in rows["curve"][0]
    assert float(rows["unmasked"][0]) == pytest.approx(320 / int(rows["unmasked"][1]), abs=0.01)


def test_fsc_of_a_map_with_itself_is_limited_by_its_voxels(halves):
    result = run("fsc", halves[0], halves[0])
    assert result.exit_code == 0 and "never falls below" in result.output and "10.00" in result.output
    assert "same voxels" in result.output and "same voxels" not in run("fsc", *halves).output


def test_fsc_refusals(halves, tmp_path):
    small = write(tmp_path / "small.mrc", np.ones((16,) * 3))
    other = write(tmp_path / "other.mrc", np.ones((32,) * 3), 7.0)
    unknown = write(tmp_path / "unknown.mrc", np.ones((32,) * 3), 0.0)
    star = tmp_path / "fsc.star"
    star.write_text("precious")
    refused(run("fsc", halves[0], tmp_path / "no.mrc"), "no.mrc")
    refused(run("fsc", halves[0], small), "small.mrc", 32, 16)
    refused(run("fsc", halves[0], other), "other.mrc", 5, 7)
    refused(run("fsc", unknown, unknown), "unknown.mrc", "--pixel-size")
    refused(run("fsc", *halves, "--pixel-size", "-2"), "--pixel-size")
    refused(run("fsc", *halves, "--mask", small), "small.mrc", "32 x 32 x 32")
    refused(run("fsc", *halves, "-o", star), "--overwrite")
    refused(run("fsc", *halves, "-o", halves[0], "--overwrite"), "half1.mrc", "input")
    refused(run("fsc", *halves, "-o", tmp_path / "absent" / "fsc.star"), "no folder")
    assert star.read_text() == "precious" and read(halves[0])[0].shape == (32, 32, 32)
    assert run("fsc", *halves, "-o", star, "--overwrite").exit_code == 0 and "data_fsc" in star.read_text()


def test_mask_sphere_in_angstrom(tmp_path):
    result = run("mask", "sphere", "--diameter", 80, "--box", 24, "--pixel-size", 5, "--soft-edge", 10, "-o", tmp_path / "m.mrc")
    assert result.exit_code == 0, result.output
    mask, pixel = read(tmp_path / "m.mrc")
    assert pixel == 5.0 and mask.shape == (24,) * 3
    line = mask[12, 12, 12:]
    np.testing.assert_allclose(line[:12], [1] * 9 + [0.5] + [0] * 2, atol=1e-5)  # radius 8 voxels, edge 2


@pytest.mark.parametrize(("diameter", "warned"), [(400, True), (200, False)])  # the box's diagonal is 208 A
def test_a_mask_that_fills_the_box_is_said(diameter, warned, tmp_path):
    result = run("mask", "sphere", "--diameter", diameter, "--box", 24, "--pixel-size", 5, "--soft-edge", 0, "-o", tmp_path / "m.mrc")
    assert result.exit_code == 0 and ("warning" in result.stderr and "fills the whole box" in result.stderr) == warned


def test_mask_cylinder_like_a_map(halves, tmp_path):
    result = run("mask", "cylinder", "--diameter", 50, "--height", 100, "--like", halves[0], "--soft-edge", 0, "-o", tmp_path / "m.mrc")
    assert result.exit_code == 0, result.output
    mask, pixel = read(tmp_path / "m.mrc")
    assert pixel == 5.0 and mask[:, 16, 16].sum() == 21 and mask[16, 16].sum() == 11


def test_mask_threshold(tmp_path):
    data = np.zeros((24,) * 3)
    data[12, 12, 12] = 3.0
    path = write(tmp_path / "map.mrc", data)
    result = run("mask", "threshold", path, "--threshold", 1, "--extend", 20, "--soft-edge", 10, "-o", tmp_path / "m.mrc")
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(read(tmp_path / "m.mrc")[0][12, 12, 12:20], [1] * 5 + [0.5] + [0] * 2, atol=1e-5)


def test_a_doubtful_header_is_said_in_one_line(tmp_path):
    with mrcfile.new(tmp_path / "map.mrc") as file:
        file.set_data(np.pad(np.ones((4, 4, 4), np.float32), 6))
        file.voxel_size = 2.0
        file.header.map = b"    "
    result = CliRunner().invoke(main, ["mask", "threshold", str(tmp_path / "map.mrc"), "--threshold", "0.5", "-o", str(tmp_path / "mask.mrc")])
    assert result.exit_code == 0 and f"numba-glocal: warning: {tmp_path / 'map.mrc'}: no MAP id\n" in result.output
    assert "UserWarning" not in result.output and (tmp_path / "mask.mrc").exists()


def test_mask_refusals(halves, tmp_path):
    out = tmp_path / "m.mrc"
    refused(run("mask", "sphere", "--diameter", 80, "--box", 24, "-o", out), "--pixel-size")
    refused(run("mask", "sphere", "--diameter", 0, "--box", 24, "--pixel-size", 5, "-o", out), "--diameter")
    refused(run("mask", "sphere", "--diameter", 80, "--like", halves[0], "-o", halves[0]), "input")
    refused(run("mask", "sphere", "--diameter", 20, "--like", halves[0], "--centre", 100, 0, 0, "-o", out), "outside the box")
    refused(run("mask", "threshold", halves[0], "--threshold", 1e6, "-o", out), "no voxel")
    refused(run("mask", "threshold", halves[0], "--threshold", 1, "--extend", "-4", "-o", out), "--extend")
    assert not out.exists()


def test_simulate_from_the_phantom(tmp_path):
    result = run("simulate", "-o", tmp_path / "sim", "--n", 4, "--box", 16, "--pixel-size", 20, "--tilt-range", -40, 60, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "sim" / "start.star") in result.output
    assert len(list((tmp_path / "sim" / "subtomo").glob("particle_*.mrc"))) == 4
    particle, pixel = read(tmp_path / "sim" / "subtomo" / "particle_00001.mrc")
    assert pixel == 20.0 and particle.shape == (16,) * 3
    again = run("simulate", "-o", tmp_path / "sim", "--n", 4)
    refused(again, "--overwrite")


def test_simulate_from_a_map(halves, tmp_path):
    result = run("simulate", halves[0], "-o", tmp_path / "sim", "--n", 2, "--ctf")
    assert result.exit_code == 0, result.output
    particle, pixel = read(tmp_path / "sim" / "subtomo" / "ctf_00002.mrc")
    assert pixel == 5.0 and particle.shape == (32,) * 3
    reference, _ = read(tmp_path / "sim" / "reference.mrc")
    inside = spherical_mask(32, 9, 0) > 0
    smooth = ndimage.gaussian_filter(read(halves[0])[0], 1.0)
    assert np.corrcoef(ndimage.gaussian_filter(reference, 1.0)[inside], smooth[inside])[0, 1] > 0.95


def test_simulate_refusals(tmp_path):
    unknown = write(tmp_path / "unknown.mrc", np.random.default_rng(1).normal(size=(16,) * 3), 0.0)
    refused(run("simulate", unknown, "-o", tmp_path / "sim"), "unknown.mrc", "--map-pixel-size")
    refused(run("simulate", tmp_path / "no.mrc", "-o", tmp_path / "sim"), "no.mrc")
    refused(run("simulate", "-o", tmp_path / "sim", "--snr", 0), "--snr: expected a positive number; found 0")
    refused(run("simulate", "-o", tmp_path / "sim", "--n", 0), "--n: expected 1 or more; found 0")
    refused(run("simulate", "-o", tmp_path / "sim", "--perturb", 181), "--perturb: expected 0 to 180 degrees; found 181")
    refused(run("simulate", "-o", tmp_path / "sim", "--tilt-range", 60, -60), "tilt range")
    refused(run("simulate", "-o", unknown), "folder")
    assert not (tmp_path / "sim").exists()


def test_report_is_rebuilt_from_a_run(tmp_path, monkeypatch):
    results = types.ModuleType("numba_glocal.results")
    results.load_report_data = lambda folder: ReportData(f"report of {folder.name}")
    monkeypatch.setitem(sys.modules, "numba_glocal.results", results)
    (tmp_path / "run1").mkdir()
    result = run("report", tmp_path / "run1")
    assert result.exit_code == 0 and "report.html" in result.output
    assert "report of run1" in (tmp_path / "run1" / "report.html").read_text()
    refused(run("report", tmp_path / "run2"), "run2", "nothing")
