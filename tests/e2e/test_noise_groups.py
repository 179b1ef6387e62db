"""Two tomograms that differ in noise and in how strong the signal is: what the fit finds is what was planted, and poses know how good they are."""

from __future__ import annotations

import json
import re

import gemmi
import mrcfile
import numpy as np
import pytest

from numba_glocal.simulation import SimulationSettings, simulate

COUNT, BOX = 80, 24
GAINS = np.array([1.0, 0.5])
DEVIATIONS = np.array([3.0, 5.0])
SLOPES = np.array([0.0, 1.2])
"""Amplitude of the noise falls as exp(-slope k / Nyquist)."""


def tomogram_of(index):
    return index // 2 % 2  # halves alternate from particle to particle


@pytest.fixture(scope="module")
def two_tomograms(tmp_path_factory):
    """Particles that are nearly free of noise, to which each tomogram's own noise and scale are given."""
    folder = tmp_path_factory.mktemp("two")
    made = simulate(folder, SimulationSettings(count=COUNT, box_size=BOX, pixel_size_angst=14.0, snr=1e4, perturb_deg=5.0, seed=7))
    rng = np.random.default_rng(3)
    k = np.fft.fftfreq(BOX) * 2
    radius = np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + np.fft.rfftfreq(BOX) ** 2 * 4)
    for index in range(COUNT):
        t = tomogram_of(index)
        with mrcfile.open(folder / "subtomo" / f"particle_{index + 1:05d}.mrc", "r+") as file:
            spectrum = np.fft.rfftn(rng.normal(0, DEVIATIONS[t], (BOX,) * 3)) * np.exp(-SLOPES[t] * radius)
            file.set_data((GAINS[t] * file.data / 100 + np.fft.irfftn(spectrum, s=(BOX,) * 3, axes=(0, 1, 2))).astype(np.float32))
    with mrcfile.open(made.reference, "r+") as file:
        file.set_data(file.data / np.float32(100))
    for path in (made.start, made.truth):
        names = [f"thin_{tomogram_of(index)}" for index in range(COUNT)]
        pieces = re.split(r"\btomo_\d+", path.read_text())
        path.write_text("".join(piece + name for piece, name in zip(pieces, [*names, ""], strict=True)))
    return made


def settings(made, **more):
    usual = {"reference": str(made.reference), "particle_diameter_angst": 240.0, "initial_lowpass_angst": 60.0, "iterations": 2, "normalise": False}
    return usual | more


@pytest.fixture(scope="module")
def runs(two_tomograms, align_here, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for wanted in ("none", "auto"):
        align_here(two_tomograms.start, folder / wanted, **settings(two_tomograms, noise_groups=wanted))
    return folder


def history(run):
    with np.load(sorted(run.glob("iter_*/state.npz"))[-1]) as state:
        return json.loads(str(state["facts"]))["history"]


def noise(run):
    return {half: np.array(rows) for half, rows in history(run)[-1]["noise"].items()}


def column(run, label):
    return np.array([float(v) for v in gemmi.cif.read(str(run / "particles.star")).find_block("particles").find_values("_" + label)])


def test_levels_and_gains_are_those_planted(runs):
    """The spectra cross: the level is their mean ratio over the band that chose the form."""
    found, alone = noise(runs / "auto"), noise(runs / "none")
    band = int(BOX * 14.0 / history(runs / "auto")[-1]["band_angst"])
    k = 2 * np.arange(3, band + 1) / BOX
    planted = np.exp(np.diff([2 * np.log(deviation) - 2 * slope * k for deviation, slope in zip(DEVIATIONS, SLOPES, strict=True)], axis=0).mean())
    for half in ("1", "2"):
        assert alone[half].shape == (1, 4) and alone[half][0, 2:].tolist() == [1.0, 1.0]
        (_, _, level_0, gain_0), (_, _, level_1, gain_1) = found[half]
        assert gain_1 / gain_0 == pytest.approx(GAINS[1] / GAINS[0], rel=0.12)  # 20 particles: 4 % by the noise, and poses a few degrees off
        assert level_1 / level_0 == pytest.approx(planted, rel=0.1)


def test_poses_know_how_good_they_are(runs, two_tomograms, pose_errors):
    """One model for both is too sure of the weak tomogram, by more than twice; with their own, errors over sigmas are alike and poses no worse."""
    weak = tomogram_of(np.arange(COUNT)) == 1
    ratio, error = {}, {}
    for wanted in ("none", "auto"):
        found = pose_errors(two_tomograms.truth, runs / wanted / "particles.star")
        sigma = column(runs / wanted, "ngAngleSigmaDeg"), column(runs / wanted, "ngShiftSigmaAngst")
        over = [e / s for e, s in zip(found, sigma, strict=True)]
        ratio[wanted] = np.array([np.median(z[weak]) / np.median(z[~weak]) for z in over])
        error[wanted] = np.array([np.median(e) for e in found])
    assert (ratio["none"] > 1.7).all()
    assert (ratio["auto"] > 1 / 1.6).all() and (ratio["auto"] < 1.6).all()
    assert (error["auto"] < 1.1 * error["none"]).all()


def test_any_number_of_workers_and_a_resumed_run(runs, two_tomograms, align_here, tmp_path):
    """The same bits; a resumed run knows the gains."""
    align_here(two_tomograms.start, tmp_path / "pool", 3, **settings(two_tomograms))
    align_here(two_tomograms.start, tmp_path / "stopped", **settings(two_tomograms, iterations=1))
    align_here(two_tomograms.start, tmp_path / "stopped", resume=True, **settings(two_tomograms))
    for run in (tmp_path / "pool", tmp_path / "stopped"):
        assert (run / "particles.star").read_bytes() == (runs / "auto" / "particles.star").read_bytes()
        for name in ("half1.mrc", "half2.mrc"):
            np.testing.assert_array_equal(mrcfile.read(run / name), mrcfile.read(runs / "auto" / name))
    assert (runs / "none" / "particles.star").read_bytes() != (runs / "auto" / "particles.star").read_bytes()


def test_the_average_weighs_tomograms_by_their_noise_and_signal(two_tomograms, average_here, tools, tmp_path):
    """At the true poses the map is closer to the object in every shell. By noise alone, without the gains, it is worse than ungrouped."""
    truth = tools.read_map(two_tomograms.reference)
    mask = tools.soft_sphere(BOX, 9)
    found = {}
    for wanted in ("none", "auto"):
        average_here(two_tomograms.truth, tmp_path / wanted, noise_groups=wanted, normalise=False, particle_diameter_angst=240.0)
        found[wanted] = tools.shell_correlation(tools.read_map(tmp_path / wanted / "average.mrc"), truth, mask)[1:10]
    assert (found["auto"] > found["none"]).all()


def test_said_in_plan_summary_and_report(two_tomograms, command, tmp_path):
    done = command("align", two_tomograms.start, "-o", tmp_path / "run", "--dry-run", "--noise-groups", "tomogram")
    assert "2 by tomogram in each half: thin_0, thin_1" in " ".join(done.stdout.split())
    done = command("average", two_tomograms.truth, "-o", tmp_path / "run", "--particle-diameter", 240)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["noise_groups"] == ["thin_0", "thin_1"] and [len(rows) for rows in summary["noise"].values()] == [2, 2]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Noise</h2>" in report and "<td>thin_1</td>" in report
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "noise: 2 by tomogram in each half: thin_0, thin_1" in log
    assert re.search(r"noise: exponent \S+, level \S+ to \S+, gain \S+ to \S+ / exponent", log)
