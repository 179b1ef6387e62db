from __future__ import annotations

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_glocal.errors import SettingsError
from numba_glocal.settings import AlignSettings, AverageSettings, read_job_file, settings_to_toml

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
LENGTHS = st.floats(1e-3, 1e6)


@given(
    particles=NAMES,
    reference=st.none() | NAMES,
    diameter=st.none() | LENGTHS,
    tilts=st.none() | st.tuples(st.floats(-90, -1), st.floats(1, 90)),
    seed=st.integers(0, 2**63 - 1),
    invert=st.booleans(),
    score=st.sampled_from(["flcf", "ncc", "ml"]),
)
def test_toml_says_what_the_settings_say(particles, reference, diameter, tilts, seed, invert, score):
    settings = AlignSettings(
        particles, "run", reference, particle_diameter_angst=diameter, tilt_range_deg=tilts, seed=seed, invert_contrast=invert, score=score
    )
    values = tomllib.loads(settings_to_toml(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            assert field.name not in values
        else:
            assert values[field.name] == (list(value) if isinstance(value, tuple) else value)


def test_a_job_file_gives_the_settings_back(tmp_path):
    options = {"mask": "m.mrc", "tilt_range_deg": (-60.0, 40.0), "max_bad": 7, "binning": 1.5, "normalise": False}
    settings = AlignSettings('a "list" \\ with\ttricks.star', "run", **options)
    (tmp_path / "job.toml").write_text(settings_to_toml(settings))
    assert AlignSettings(**read_job_file(tmp_path / "job.toml")) == settings


def test_whole_numbers_in_a_job_file_may_stand_for_lengths(tmp_path):
    (tmp_path / "job.toml").write_text("binning = 2\ntilt_range_deg = [-60, 60]\nparticle_diameter_angst = 300\n")
    values = read_job_file(tmp_path / "job.toml")
    assert values == {"binning": 2.0, "tilt_range_deg": (-60.0, 60.0), "particle_diameter_angst": 300.0}
    assert all(type(v) is float for v in (values["binning"], *values["tilt_range_deg"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("iterations = 2.5", "iterations expects a whole number, found 2.5"),
        ("particles = 3", "particles expects text"),
        ("score = ['ml']", "score expects text"),
        ("binning = '2'", "binning expects a number"),
        ("adaptive = 'yes'", "adaptive expects true or false"),
        ("tilt_range_deg = 60", "tilt_range_deg expects two numbers"),
        ("[align]\nseed = 1", "unknown option 'align'"),
    ],
)
def test_a_job_file_is_checked_by_name_and_kind(text, words, tmp_path):
    (tmp_path / "job.toml").write_text(text + "\n")
    with pytest.raises(SettingsError, match="job.toml") as caught:
        read_job_file(tmp_path / "job.toml")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [AlignSettings, AverageSettings])
@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("particle_diameter_angst", 0.0, "--particle-diameter"),
        ("particle_diameter_angst", float("inf"), "--particle-diameter"),
        ("pixel_size_angst", -1.0, "--pixel-size"),
        ("binning", 0.99, "--binning"),
        ("binning", float("nan"), "--binning"),
        ("fsc_criterion", 0.0, "--fsc-criterion"),
        ("fsc_criterion", float("nan"), "--fsc-criterion"),
        ("soft_edge_voxels", float("nan"), "--soft-edge"),
        ("tilt_range_deg", (60.0, -60.0), "--tilt-range"),
        ("tilt_range_deg", (-91.0, 60.0), "--tilt-range"),
        ("tilt_range_deg", (float("nan"), 60.0), "--tilt-range"),
        ("tilt_axis", "z", "--tilt-axis"),
        ("split", "half", "--split"),
        ("symmetry", "C0", "--symmetry"),
        ("seed", -1, "--seed"),
        ("subset", 1, "--subset"),
        ("max_bad", -1, "--max-bad"),
        ("cache_gib", 0.0, "--cache-gib"),
        ("cpu_procs", 0, "--cpu-procs"),
        ("procs_per_gpu", "0", "--procs-per-gpu"),
        ("procs_per_gpu", "few", "--procs-per-gpu"),
    ],
)
def test_values_that_mean_nothing(kind, name, value, option):
    with pytest.raises(SettingsError, match=option):
        kind("list.star", "run", **{name: value})


@pytest.mark.parametrize("range_deg", [(-90.0, 90.0), (0.0, 60.0), (-60.0, 40.0), (-30.0, -10.0)])
def test_tilt_ranges_that_mean_something(range_deg):
    AlignSettings("list.star", "run", tilt_range_deg=range_deg)


def test_premultiplied_is_refused_where_it_would_do_nothing():
    AverageSettings("list.star", "run", weighting="ctf", premultiplied=True)
    with pytest.raises(SettingsError, match="--premultiplied"):
        AverageSettings("list.star", "run", premultiplied=True)


@pytest.mark.parametrize("name", ["output", "mask"])
def test_names_that_no_text_file_can_hold_are_refused(name):
    with pytest.raises(SettingsError, match=f"{name}.*UTF-8"):
        AlignSettings(**({"particles": "p.star", "output": "run"} | {name: "b\udcff"}))
