"""Shares, margins, and what noise in a class's map is worth; whole runs are judged in tests/e2e/test_classes.py."""

from __future__ import annotations

import numpy as np
import pytest

from numba_glocal.alignment import align_chunk
from numba_glocal.averaging import reconstruct
from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.protocols import SearchSetup, SumSetup, WeightedSum, as_candidates
from numba_glocal.classification import Classification, class_doubts, margins_of, shares_of
from numba_glocal.errors import SettingsError
from numba_glocal.job import prepare_job
from numba_glocal.noise import NoiseModel, fit_noise, held_in_average
from numba_glocal.results import ClassResult
from numba_glocal.settings import AlignSettings, read_job_file, settings_to_toml
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import FSCCurve

INF = np.inf


def test_hard_shares_are_one_for_the_best():
    likelihood = np.array([[3.0, 1.0, -INF, -INF], [2.0, 5.0, 0.0, -INF]])
    assert shares_of(likelihood, soft=False).tolist() == [[1, 0, 0, 0], [0, 1, 1, 0]]


def test_soft_shares_are_probabilities():
    likelihood = np.array([[3.0, 1000.0, -INF, 0.0], [3.0 + np.log(3.0), 1001.0, -INF, 20.0]])
    shares = shares_of(likelihood, soft=True)
    np.testing.assert_allclose(shares[:, 0], [0.25, 0.75])
    np.testing.assert_allclose(shares[:, 1], [1 / (1 + np.e), np.e / (1 + np.e)])
    assert shares[:, 2].tolist() == [0, 0] and shares[:, 3].tolist() == [0, 1]


def test_margins_are_about_the_class_that_was_chosen():
    likelihood = np.array([[3.0, 1.0, -INF, 2.0], [2.5, 5.0, 0.0, -INF], [0.0, 4.0, -1.0, -INF]])
    margins = margins_of(likelihood, np.array([0, 2, 1, 0]))
    assert margins[:3].tolist() == [0.5, -1.0, 1.0] and np.isnan(margins[3])


def test_classes_that_differ_between_the_halves_are_said():
    fsc = FSCCurve(8, 1.0, *(np.ones(5),) * 4)

    def doubts(*counts):
        return class_doubts([ClassResult(number, halves, 0.5, fsc, None) for number, halves in enumerate(counts, 1)])

    assert doubts((50, 55), (50, 45)) == []
    assert [line.split(",")[0] for line in doubts((80, 30), (20, 70))] == [
        "class 1 holds 80 % of half-set 1 and 30 % of half-set 2",
        "class 2 holds 20 % of half-set 1 and 70 % of half-set 2",
    ]
    assert class_doubts([ClassResult(1, (9, 9), 0.9, fsc, None), ClassResult(2, (1, 1), 0.1, None, None)]) == [
        "class 2 has 1 + 1 particles in the half-sets, too few for maps"
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reference": "a", "further_references": ("b",), "classes": 3}, "--classes 3: 2 start maps are given; expected one --reference a class"),
        ({"reference": "a", "further_references": ("a",)}, "--reference a is given twice"),
        ({"further_references": ("a",)}, "expected a first start map"),
        ({"classes": 2, "iterations": 1}, "expected --iterations 2 or more"),
        ({"classes": 0}, "--classes: expected 1 to 50, found 0"),
        ({"class_assignment": "soft"}, "there is one class"),
        ({"classes": 2, "class_assignment": "soft", "score": "ncc"}, "expected --score ml"),
    ],
)
def test_what_makes_no_sense_is_refused(given, expected):
    with pytest.raises(SettingsError, match=expected):
        AlignSettings("particles.star", "run", **given)


def test_start_maps_say_how_many_classes_and_are_kept_in_a_job_file(tmp_path):
    settings = AlignSettings("particles.star", "run", reference="a.mrc", further_references=("b.mrc", "c.mrc"))
    assert settings.classes == 3 and settings.references == ("a.mrc", "b.mrc", "c.mrc")
    (tmp_path / "job.toml").write_text(settings_to_toml(settings))
    assert AlignSettings(**read_job_file(tmp_path / "job.toml")) == settings
    (tmp_path / "job.toml").write_text('further_references = "b.mrc"')
    with pytest.raises(SettingsError, match="expects a list of texts"):
        read_job_file(tmp_path / "job.toml")


@pytest.mark.parametrize("seed", [4, 5])
def test_a_particles_own_noise_is_worth_what_leaving_it_out_costs(tmp_path, seed):
    """Each particle against the map of all, and against that of all others: the difference is what `_noise_gain` says of it."""
    made = simulate(tmp_path, SimulationSettings(count=16, box_size=24, pixel_size_angst=12.0, snr=0.05, seed=seed, ctf=seed == 5))
    settings = AlignSettings(str(made.truth), "unused", reference=str(made.reference), particle_diameter_angst=180.0)
    job = prepare_job(settings)
    particles, n, k_max = job.particles, job.grid.binned_box_size, 8.0
    rotations, shifts = particles.poses.rotations, particles.poses.shifts_angst
    backend = CPUBackend()

    def batch(rows):
        return job.reader.batch(*(tuple(part[i] for i in rows) for part in (particles.names, particles.volume_paths, particles.weight_paths)))

    everyone = range(len(particles))
    noise, value = NoiseModel(np.ones(n // 2 + 1)), np.full(n // 2 + 1, 0.8)

    def sums(rows):
        total = backend.open_sum(SumSetup(job.grid, job.particle_mask, noise))
        assert total.add(batch(rows), rotations[rows], shifts[rows]) == []
        return total.result()

    def masked(total):
        volume = reconstruct(total, n, value / (1 - value))
        return ((volume - volume[job.mask < 0.01].mean()) * job.mask).astype(np.float32)

    def session(reference):
        return backend.open_search(SearchSetup(job.grid, reference, job.particle_mask, noise, "ml", 0.0, k_max))

    def likelihood(reference, rows):
        opened = session(reference)
        opened.load(batch(rows))
        return opened.refine(as_candidates(rotations[rows], shifts[rows]), shifts[rows]).log_likelihood

    rows = np.arange(len(particles))
    for _ in range(2):  # noise against the average
        result = align_chunk(session(masked(sums(rows))), batch(rows), rotations[rows], shifts[rows], shifts[rows], (), False)
        noise = fit_noise(result.residuals[0], 3, int(k_max))
    whole = sums(rows)
    with_all = likelihood(masked(whole), rows)
    without = []
    for row in everyone:
        one = sums(np.array([row]))
        rest = WeightedSum(
            whole.numerator.astype(np.complex128) - one.numerator, whole.denominator.astype(np.float64) - one.denominator, len(rows) - 1
        )
        without.append(likelihood(masked(rest), np.array([row]))[0])
    measured = with_all - np.array(without)

    opened = session(masked(whole))
    opened.load(batch(rows))
    weight, power = held_in_average(*opened.residuals_each(rotations[rows], shifts[rows]), (noise,), np.zeros(len(rows), int))
    told = Classification.__new__(Classification)
    told.job = job
    in_map = told._noise_gain(value, np.ones(len(rows)), weight, power, k_max)
    nobody = told._noise_gain(value, np.ones(len(rows)), weight, np.zeros_like(power), k_max)  # what the map's noise takes from all
    expected = in_map - nobody
    assert measured.mean() > 5, "else there is nothing to tell"
    assert expected.mean() == pytest.approx(measured.mean(), rel=0.15)  # seen: 1.05 and 1.04 times
    assert np.corrcoef(measured, expected)[0, 1] > 0.6  # particle by particle; seen: 0.78 and 0.94
    np.testing.assert_allclose(-2.0 * nobody.mean(), expected.mean(), rtol=0.1)
