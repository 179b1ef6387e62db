"""Einstein from noise: where there is no particle, no resolution may be reported beyond what the start map brought along."""

from __future__ import annotations

import json

import gemmi
import mrcfile
import numpy as np
import pytest

from numba_glocal.simulation import SimulationSettings, simulate

BOX, PIXEL = 24, 14.0


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """96 particles that hold nothing but noise, and a sharp map of what somebody hopes to find."""
    folder = tmp_path_factory.mktemp("noise")
    made = simulate(folder, SimulationSettings(count=96, box_size=BOX, pixel_size_angst=PIXEL, snr=0.3, seed=4))
    rng = np.random.default_rng(6)
    for path in (folder / "subtomo").glob("particle*.mrc"):
        with mrcfile.open(path, "r+") as file:
            file.set_data(rng.normal(size=(BOX,) * 3).astype(np.float32))
    return made


def corrected_fsc(run):
    block = gemmi.cif.read(str(run / "fsc.star")).find_block("fsc")
    return np.array([float(v) for v in block.find_values("_rlnFourierShellCorrelationCorrected")])


@pytest.mark.parametrize(("score", "everywhere"), [("ml", False), ("flcf", False), ("ml", True)])
def test_noise_does_not_become_structure(score, everywhere, noise, align_here, tmp_path):
    lowest = BOX * PIXEL / 5  # the start map holds shells up to 5
    options = {"reference": str(noise.reference), "initial_lowpass_angst": lowest, "particle_diameter_angst": 200.0}
    align_here(noise.start, tmp_path / "run", iterations=3, score=score, global_search=everywhere, **options)
    for number in (1, 2, 3):
        curve = corrected_fsc(tmp_path / "run" / f"iter_{number:03d}")
        # the mask carries a little of shell 5 into the next two
        assert (curve[1:] < 0.143).any() and int(np.argmax(curve[1:] < 0.143)) <= 7
        assert curve[7:].mean() < 0.1


def test_the_trap_is_real(noise, align_here, tmp_path):
    """The counterpart: a start map that is not low-passed makes both halves agree on noise, so the guard above has something to guard."""
    options = {"reference": str(noise.reference), "initial_lowpass_angst": 30.0, "particle_diameter_angst": 200.0}
    align_here(noise.start, tmp_path / "run", iterations=1, **options)
    curve = corrected_fsc(tmp_path / "run")
    assert curve[7:10].mean() > 0.25


def test_agreement_that_the_start_map_brought_is_called_so(noise, planted_run, command, tmp_path):
    """In the log, the summary, the report and the last words; not where the particles hold what is found, nor without a start map."""
    options = ["--particle-diameter", 200, "--iterations", 1, "--cpu-procs", 2]
    run, words = tmp_path / "run", "is no finer than what the start map brought (--initial-lowpass 50"
    done = command("align", noise.start, "-o", run, "--reference", noise.reference, "--quiet", *options)
    assert json.loads((run / "summary.json").read_text())["resolution_angst"] > 45  # the trap: a resolution from nothing
    assert done.stderr.count(words) == 1  # --quiet hushes no warning
    for name in ("log.txt", "summary.json", "report.html"):
        assert words in (run / name).read_text(), name
    done = command("align", noise.start, "-o", tmp_path / "own", *options)
    assert "no finer" not in done.stderr
    assert "no finer" not in (planted_run / "log.txt").read_text() + (planted_run / "summary.json").read_text()


def test_noise_under_a_large_group_is_called_chance(noise, command, tmp_path):
    """Sixty copies of every sample: halves of noise alone agree above 0.143 somewhere, and the words for it are there."""
    found = 0
    for group in ("O", "I", "I1", "I3"):
        done = command("average", noise.truth, "-o", tmp_path / group, "--symmetry", group, "--particle-diameter", 160, "--quiet")
        summary = json.loads((tmp_path / group / "summary.json").read_text())
        read = summary["resolution_angst"]
        assert (read is not None) == ("may be chance" in done.stderr), (group, read, done.stderr)
        found += read is not None
    assert found
