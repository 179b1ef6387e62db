from __future__ import annotations

import re

import mrcfile
import numpy as np
import pytest

from numba_glocal.errors import GlocalError, SettingsError, VolumeError
from numba_glocal.fourier import max_band
from numba_glocal.job import far_off, make_chunks, prepare_job
from numba_glocal.schedule import first_search
from numba_glocal.settings import AlignSettings, AverageSettings
from numba_glocal.simulation import SimulationSettings, simulate
from numba_glocal.values import Poses

BOX, PIXEL = 20, 16.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("job"), SimulationSettings(count=30, box_size=BOX, pixel_size_angst=PIXEL, snr=0.5, seed=2))


def job(made, kind=AlignSettings, **settings):
    return prepare_job(kind(str(made.start), "run", **settings))


def write(path, data, pixel=PIXEL):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(np.asarray(data, np.float32))
        file.voxel_size = pixel
    return str(path)


# --- chunks ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "largest"), [(8, 128), (1, 128), (3, 5), (100, 128)])
def test_chunks_hold_every_particle_of_a_half_once_and_in_order(made, parts, largest):
    particles = job(made).particles
    for half in (1, 2):
        chunks = make_chunks(particles, particles.poses, half, parts, largest)
        rows = np.concatenate([chunk.rows for chunk in chunks])
        assert np.array_equal(rows, np.flatnonzero(particles.half == half))
        assert all(len(chunk) <= largest and chunk.half == half for chunk in chunks)
        for chunk in chunks:
            for i, row in enumerate(chunk.rows):
                assert (chunk.names[i], chunk.volume_paths[i]) == (particles.names[row], particles.volume_paths[row])
                assert np.array_equal(chunk.rotations[i], particles.poses.rotations[row])


@pytest.mark.parametrize(
    ("largest", "smallest", "expected"), [(128, 10, [15]), (128, 7, [8, 7]), (9, 40, [9, 6]), (1024, 8, [8, 7]), (1024, 1024, [15])]
)
def test_chunks_are_no_smaller_than_a_gpu_wants_them(made, largest, smallest, expected):
    particles = job(made).particles
    assert np.count_nonzero(particles.half == 1) == 15
    chunks = make_chunks(particles, particles.poses, 1, largest=largest, smallest=smallest)
    assert [len(chunk) for chunk in chunks] == expected
    assert np.array_equal(np.concatenate([chunk.rows for chunk in chunks]), np.flatnonzero(particles.half == 1))


def test_anchors_are_not_starts(made):
    particles = job(made).particles
    anchors = Poses(np.swapaxes(particles.poses.rotations, 1, 2), particles.poses.shifts_angst + 7.0)
    chunk = make_chunks(particles, anchors, 1)[0]
    assert np.array_equal(chunk.anchor_rotations, anchors.rotations[chunk.rows])
    assert np.array_equal(chunk.rotations, particles.poses.rotations[chunk.rows])
    assert np.array_equal(chunk.anchors_angst, anchors.shifts_angst[chunk.rows])
    assert np.array_equal(chunk.shifts_angst, particles.poses.shifts_angst[chunk.rows])


# --- band and masks -------------------------------------------------------------------------------------------------------------------------


def test_band_limits_are_resolutions_of_the_box(made):
    plain = job(made)
    assert (plain.k_min, plain.k_limit) == (0.0, max_band(BOX))
    limited = job(made, highpass_angst=160.0, lowpass_angst=64.0)
    assert limited.k_min == pytest.approx(BOX * PIXEL / 160.0) and limited.k_limit == pytest.approx(BOX * PIXEL / 64.0)
    assert limited.shell_of(64.0) == pytest.approx(limited.k_limit)
    # the same resolution on a coarser grid of the same edge
    binned = job(made, binning=1.25, lowpass_angst=64.0)
    assert binned.grid.binned_box_size == 16 and binned.k_limit == pytest.approx(limited.k_limit)


@pytest.mark.parametrize("options", [{"lowpass_angst": 200.0}, {"highpass_angst": 60.0, "lowpass_angst": 50.0}, {"binning": 2.5}])
def test_bands_that_leave_nothing(made, options):
    with pytest.raises(SettingsError, match="nothing is left to align") as caught:
        job(made, **options)
    assert all(f"--{name.split('_')[0]}" in str(caught.value) for name in options)


def test_where_the_diameter_comes_from(made, tmp_path):
    grid = np.indices((BOX,) * 3) - BOX // 2
    ball = write(tmp_path / "ball.mrc", (grid**2).sum(0) <= 6**2)
    assert job(made, particle_diameter_angst=200.0).diameter_source == "--particle-diameter"
    assert job(made).diameter_angst == pytest.approx(0.8 * BOX * PIXEL) and "0.8 of the box" in job(made).diameter_source
    from_mask = job(made, mask=ball)
    assert from_mask.diameter_source == "the mask" and from_mask.diameter_angst == pytest.approx(2 * 6 * PIXEL, abs=0.1)
    assert from_mask.radius_voxels == pytest.approx(6.0)
    assert job(made, mask=ball, particle_diameter_angst=150.0).diameter_angst == 150.0
    # binned, the sphere is as large in Angstrom
    binned = job(made, particle_diameter_angst=200.0, binning=1.25)
    assert binned.radius_voxels * binned.grid.binned_pixel_size_angst == pytest.approx(100.0)
    assert binned.mask.shape == (16,) * 3 and binned.mask[8, 8, 8] == 1


def test_a_mask_need_not_be_spherical_and_the_particles_sphere_holds_it(made, tmp_path):
    grid = np.indices((BOX,) * 3) - BOX // 2
    rod = write(tmp_path / "rod.mrc", (np.abs(grid[0]) <= 8) & (np.abs(grid[1]) <= 2) & (np.abs(grid[2]) <= 2))
    prepared = job(made, mask=rod)
    assert prepared.mask.sum() == pytest.approx(17 * 5 * 5) and prepared.particle_mask.radius_voxels >= np.sqrt(8**2 + 2 * 2**2)


@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({"particle_diameter_angst": 160.0}, None),  # 80 + 5 * 16 = 160, half of 20 * 16
        ({"particle_diameter_angst": 170.0}, 165),
        ({"particle_diameter_angst": 170.0, "soft_edge_voxels": 4.0}, None),
        ({"particle_diameter_angst": 170.0, "soft_edge_voxels": 4.0, "binning": 1.25}, 165),  # 85 + 4 * 20; the box stays 320 A
        ({}, None),  # nobody asked for a diameter
    ],
)
def test_a_sphere_that_the_box_cuts_is_said(made, options, reach):
    lines = job(made, **options).warnings
    assert len(lines) == (reach is not None)
    if reach:
        assert f"reach {reach} A from the centre, the box only 160 A" in lines[0]
        fits = float(re.search(r"expected at most (\d+) A,", lines[0]).group(1))
        assert not job(made, **(options | {"particle_diameter_angst": fits})).warnings
        assert job(made, **(options | {"particle_diameter_angst": fits + 1})).warnings


@pytest.mark.parametrize(
    ("radius", "offset", "warned"),
    [
        (4, (0, 0, 0), False),
        (4, (1, 0, 1), False),  # 1.4 voxels; a quarter of its diameter is 2, a tenth of the box as well
        (4, (3, 0, 0), True),
        (2, (0, 1.2, 0.8), True),  # 1.44 voxels are within a tenth of the box, but more than a quarter of 4
        (7, (0, 0, -2.5), True),  # less than a quarter of 14, more than a tenth of the box
    ],
)
def test_a_mask_beside_the_centre_is_said(made, tmp_path, radius, offset, warned):
    grid = np.indices((BOX,) * 3) - BOX // 2 - np.array(offset)[:, None, None, None]
    name = write(tmp_path / "aside.mrc", np.clip(radius + 0.5 - np.sqrt((grid**2).sum(0)), 0, 1))
    lines = [line for line in job(made, mask=name).warnings if "centre of mass" in line]
    assert len(lines) == warned
    if warned:
        distance, diameter, box = (float(number) for number in re.findall(r"(\d+) A", lines[0]))
        assert distance == pytest.approx(PIXEL * np.linalg.norm(offset), abs=1.5) and box == BOX * PIXEL
        assert diameter == pytest.approx(2 * radius * PIXEL, rel=0.05) and "aside.mrc" in lines[0]


# --- the list -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AlignSettings, AverageSettings])
def test_a_list_without_angles_is_said(made, tmp_path, kind):
    """In the job's warnings, which log and report show; a list without origins is a normal one."""
    lines = made.start.read_text().splitlines()
    head = [line.split()[0] for line in lines if line.startswith("_rln")]
    head = head[head.index("_rlnImageName") :]

    def without(word, name):
        dropped = [i for i, label in enumerate(head) if word in label]
        assert len(dropped) == 3
        kept = [
            " ".join(cell for i, cell in enumerate(line.split()) if i not in dropped) if "subtomo/" in line else line
            for line in lines
            if not line.startswith(f"_rln{word}")
        ]
        (made.start.parent / name).write_text("\n".join(kept) + "\n")
        return prepare_job(kind(str(made.start.parent / name), "run"))

    turned = without("Angle", "no_angles.star")
    assert any("the list has no angles: every particle starts at 0, 0, 0" in line for line in turned.warnings)
    assert np.allclose(turned.particles.poses.rotations, np.eye(3))
    assert not without("Origin", "no_origins.star").warnings and not prepare_job(kind(str(made.start), "run")).warnings


# --- the start map --------------------------------------------------------------------------------------------------------------------------


def test_the_start_map_is_low_passed_and_on_the_worked_grid(made):
    prepared = job(made, reference=str(made.reference), initial_lowpass_angst=80.0, binning=1.25)
    power = np.abs(np.fft.fftn(prepared.start_map)) ** 2
    k = np.fft.fftfreq(16) * 16
    radius = np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)
    assert prepared.start_map.shape == (16,) * 3
    assert power[radius > 320 / 80.0 + 2].sum() < 1e-3 * power[(radius > 0) & (radius < 3)].sum()
    assert job(made).start_map is None


@pytest.mark.parametrize(("pixel", "refused"), [(16.0, False), (16.15, False), (15.85, False), (0.0, False), (1.0, False), (16.2, True), (8.0, True)])
def test_a_map_of_another_pixel_size_is_refused(made, tmp_path, pixel, refused):
    """By more than 1 %; a header that says 0 or 1 says nothing. The remedy in the line works."""
    path = write(tmp_path / "r.mrc", mrcfile.read(made.reference), pixel=pixel)
    if refused:
        with pytest.raises(VolumeError, match=rf"expected the particles' pixel size of 16 A \(from list.*found {pixel:g} A in its header") as caught:
            job(made, reference=path)
        exec(re.search(r'python -c "(.*)"$', str(caught.value)).group(1))
    assert job(made, reference=path).start_map is not None


def test_a_given_pixel_size_that_contradicts_is_said(made):
    lines = job(made, pixel_size_angst=15.0).warnings
    assert len(lines) == 1 and "given pixel size is 15 A" in lines[0] and "the list (rlnImagePixelSize) says 16 A" in lines[0]
    assert "the volumes' headers say 16 A" in lines[0]
    assert not job(made, pixel_size_angst=16.1).warnings


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the writer, when it is given NaN
@pytest.mark.parametrize(("values", "words"), [(np.nan, "not finite.*in 1 voxel$"), (None, "a constant one .every value is 3")])
def test_a_map_that_is_none_says_which(made, tmp_path, values, words):
    data = np.full((BOX,) * 3, 3.0) if values is None else np.random.default_rng(0).normal(size=(BOX,) * 3)
    if values is not None:
        data[1, 2, 3] = values
    with pytest.raises(VolumeError, match=words):
        job(made, reference=write(tmp_path / "r.mrc", data))


def test_a_resumed_run_does_not_need_the_start_map(made, tmp_path):
    settings = AlignSettings(str(made.start), "run", reference=str(tmp_path / "gone.mrc"))
    assert prepare_job(settings, resume=True).start_map is None
    with pytest.raises(GlocalError, match=r"gone\.mrc"):
        prepare_job(settings)


# --- particles and weights ------------------------------------------------------------------------------------------------------------------


def test_subset_and_tolerance(made):
    assert [int((job(made, subset=4).particles.half == h).sum()) for h in (1, 2)] == [4, 4]
    halves = [int((job(made).particles.half == h).sum()) for h in (1, 2)]
    assert not job(made, subset=min(halves)).warnings
    larger = job(made, subset=max(halves) + 1)
    assert f"--subset {max(halves) + 1}: the half-sets have {halves[0]} and {halves[1]} particles" in larger.warnings[0]
    assert len(larger.particles) == sum(halves)
    assert job(made).max_bad == 3 and job(made, max_bad=0).max_bad == 0


def test_a_share_given_for_a_percentage_is_said(made):
    assert [line for line in job(made, keep_best_percent=0.8).warnings if "80 was meant?" in line] and not job(made, keep_best_percent=80.0).warnings


def test_weights_are_looked_at_before_work(made, tmp_path):
    empty = write(tmp_path / "empty.mrc", np.pad([[[1.0]]], ((0, BOX - 1),) * 3))  # one corner of Fourier space, far beyond the band
    text = made.start.read_text().replace("subtomo/wedge.mrc", empty).replace("subtomo/", f"{made.start.parent}/subtomo/")
    (tmp_path / "list.star").write_text(text)
    for kind in (AlignSettings, AverageSettings):
        with pytest.raises(VolumeError, match=r"empty\.mrc.*leaves nothing"):
            prepare_job(kind(str(tmp_path / "list.star"), "run"))


def test_particles_that_lie_outside_their_boxes_are_said(made, tmp_path):
    """An origin in the wrong unit, or a wrong pixel size: what is aligned then is what has come round the box."""
    text = made.start.read_text()
    first = next(line for line in text.splitlines() if "particle_00001" in line)
    values = first.split()
    moved = first.replace(values[9], "170.0", 1)  # rlnOriginXAngst; half a box is 160 A
    path = made.start.parent / "far.star"
    path.write_text(text.replace(first, moved))
    warnings = prepare_job(AlignSettings(str(path), "run")).warnings
    assert any(
        w.startswith("1 of 30 particles lie farther from the centres of their boxes than half a box (160 A)") and "00001" in w for w in warnings
    )
    assert not any("half a box" in w for w in job(made).warnings)


@pytest.mark.parametrize("binning", [1.0, 1.5])
def test_a_search_reaches_to_the_edges_of_the_box_and_no_further(made, binning):
    """Half a box is 160 A in the file's own voxels, whatever the binning; a hard limit counts too, and ranges of the package's own never reach it."""
    assert job(made, binning=binning, shift_range_angst=160.0).settings.shift_range_angst == 160.0
    said = str(refused(lambda: job(made, binning=binning, shift_range_angst=161.0)))
    assert said == "--shift-range 161 A reaches beyond the box (+-160 A); expected at most 160"
    assert job(made, binning=binning, shift_range_angst=600.0, max_shift_angst=50.0)
    widest = BOX * PIXEL * 3**0.5
    assert first_search(job(made, binning=binning, particle_diameter_angst=0.999 * widest)).shift_radius_angst < 160.0


def test_positions_beyond_their_boxes_are_said_at_the_end_too(made):
    prepared = job(made)
    poses = prepared.particles.poses
    shifts = np.zeros_like(poses.shifts_angst)
    assert far_off(prepared.particles.names, Poses(poses.rotations, shifts), prepared.grid, found=True) == []
    shifts[3] = 0.0, -170.0, 0.0
    (line,) = far_off(prepared.particles.names, Poses(poses.rotations, shifts), prepared.grid, found=True)
    assert line.startswith("1 of 30 particles were found farther") and "00004.mrc, 170 A" in line and "--max-shift" in line


def test_more_classes_than_particles_are_refused_before_work(made):
    assert "15 particles; expected at least two a class, 16" in str(refused(lambda: job(made, classes=8)))
    assert job(made, classes=7).settings.classes == 7


def refused(call):
    with pytest.raises(SettingsError) as caught:
        call()
    return caught.value
