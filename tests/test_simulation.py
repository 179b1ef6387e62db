from __future__ import annotations

import subprocess
import time

import gemmi
import mrcfile
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from numba_glocal.errors import SettingsError, VolumeError
from numba_glocal.phantom import render_phantom
from numba_glocal.simulation import SimulationSettings, ctf_squared, map_renderer, simulate
from numba_glocal.values import Volume

BOX, PIXEL = 32, 10.0


def data(path):
    with mrcfile.open(path) as file:
        return np.array(file.data, np.float64)


def ball(box, radius):
    grid = np.indices((box,) * 3) - box // 2
    return (grid**2).sum(axis=0) < radius**2


def correlation(a, b, inside=None):
    inside = ball(a.shape[0], 0.42 * a.shape[0]) if inside is None else inside
    return float(np.corrcoef(a[inside], b[inside])[0, 1])


def columns(path):
    """The particle table as gemmi reads it."""
    block = gemmi.cif.read(str(path)).find_block("particles")
    loop = next(item.loop for item in block if item.loop is not None)
    return {tag.removeprefix("_rln"): list(block.find_values(tag)) for tag in loop.tags}


def poses(path):
    """R and s from a list, by scipy alone."""
    table = columns(path)
    angles = np.array([table[f"Angle{a}"] for a in ("Rot", "Tilt", "Psi")], float).T
    origins = np.array([table[f"Origin{a}Angst"] for a in "XYZ"], float).T
    return Rotation.from_euler("ZYZ", angles, degrees=True).inv(), -origins


@pytest.fixture(scope="module", params=[False, True], ids=["wedge", "ctf"])
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    settings = SimulationSettings(
        count=60, box_size=BOX, pixel_size_angst=PIXEL, snr=0.2, ctf=request.param, tilt_min_deg=-50, shift_angst=15.0, seed=4
    )
    return folder, settings, simulate(folder, settings)


def test_relion_reconstructs_the_object_from_the_true_list(relion, made):
    folder, settings, result = made
    truth = data(result.reference)

    def reconstruct(name):
        command = f"relion_reconstruct --i {name}.star --o {name}.mrc --3d_rot --ctf --skip_gridding"
        done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return correlation(truth, data(folder / f"{name}.mrc"))

    right = reconstruct("truth")
    assert right > 0.95
    text = result.truth.read_text()
    lines = text.splitlines()
    for name, edit in {
        "inverse": lambda f: [*f[:6], f"{-float(f[8])}", f"{-float(f[7])}", f"{-float(f[6])}", *f[9:]],
        "shifted": lambda f: [*f[:9], *(f"{-float(v)}" for v in f[9:12]), *f[12:]],
    }.items():
        edited = [" ".join(edit(line.split())) if line.startswith("subtomo/") else line for line in lines]
        (folder / f"{name}.star").write_text("\n".join(edited) + "\n")
        assert reconstruct(name) < right - 0.04, name


def test_particles_hold_the_object_at_the_listed_pose(made):
    """Each particle less its noise is the phantom at the pose in the list: the mean of many correlations is far above zero."""
    folder, settings, result = made
    rotations, shifts = poses(result.truth)
    np.testing.assert_allclose(rotations.as_matrix(), result.poses.rotations, atol=1e-6)
    np.testing.assert_allclose(shifts, result.poses.shifts_angst, atol=1e-5)
    names, weights = columns(result.truth)["ImageName"], columns(result.truth)["CtfImage"]
    right, wrong = [], []
    for i in range(0, 60, 6):
        particle = data(folder / names[i])
        weight = np.fft.ifftshift(data(folder / weights[i]))

        def seen(rotation, shift, weight=weight):
            return np.fft.ifftn(np.fft.fftn(render_phantom(BOX, PIXEL, rotation, shift)) * weight).real

        right.append(correlation(particle, seen(rotations[i].as_matrix(), shifts[i])))
        wrong.append(correlation(particle, seen(rotations[i].as_matrix().T, -shifts[i])))
    assert min(right) > 0.5 and np.mean(wrong) < np.mean(right) - 0.1


def test_signal_to_noise_and_where_the_noise_lies(made):
    folder, settings, result = made
    table = columns(result.truth)
    reference = np.fft.fftn(data(result.reference))
    noise_power, weights_seen, ratios = [], [], []
    for i in range(0, 60, 5):
        particle = data(folder / table["ImageName"][i])
        weight = np.fft.ifftshift(data(folder / table["CtfImage"][i]))
        scale = np.sqrt((np.abs(reference) ** 2).sum() / (np.abs(np.fft.fftn(render_phantom(BOX, PIXEL))) ** 2).sum())
        signal = scale * np.fft.fftn(render_phantom(BOX, PIXEL, result.poses.rotations[i], result.poses.shifts_angst[i])) * weight
        noise = np.fft.fftn(particle) - signal
        noise[0, 0, 0] = signal[0, 0, 0] = 0
        assert np.abs(noise[weight == 0]).max(initial=0) < 1e-3 * np.abs(noise).max()
        ratios.append((np.abs(signal) ** 2).sum() / (np.abs(noise) ** 2).sum())
        noise_power.append(np.abs(noise).ravel() ** 2)
        weights_seen.append(weight.ravel())
    assert np.mean(ratios) == pytest.approx(0.2, rel=0.25)
    noise_power, weights_seen = np.concatenate(noise_power), np.concatenate(weights_seen)
    weak, strong = (weights_seen > 0.05) & (weights_seen < 0.2), weights_seen > 0.9
    if settings.ctf:  # variance proportional to the weight volume
        expected = weights_seen[weak].mean() / weights_seen[strong].mean()
        assert noise_power[weak].mean() / noise_power[strong].mean() == pytest.approx(expected, rel=0.05)
    else:
        assert noise_power[strong].sum() > 0.8 * noise_power.sum()


def test_weight_volume_is_centred_and_symmetric(made):
    folder, settings, result = made
    weight = data(folder / columns(result.truth)["CtfImage"][0])
    odd = weight[1:, 1:, 1:]  # without the Nyquist planes
    np.testing.assert_allclose(odd, odd[::-1, ::-1, ::-1], atol=1e-6)
    centre = BOX // 2
    assert weight[centre, centre, centre + 5] > 0.01 or settings.ctf  # kx axis: sampled by the untilted image
    assert (weight[centre + 3 :, centre, centre] == 0).all()  # kz axis: missing
    assert (weight[:, :, centre] == 0).sum() > 0.5 * BOX * BOX  # of the plane kx = 0 only ky is sampled


def test_start_list_is_off_by_as_much_as_asked(made):
    _, settings, result = made
    true, _ = poses(result.truth)
    start, shifts = poses(result.start)
    off = np.rad2deg((true.inv() * start).magnitude())
    assert np.sqrt(np.mean(off**2)) == pytest.approx(settings.perturb_deg, rel=0.2)
    assert (shifts == 0).all()
    assert np.abs(result.poses.shifts_angst).max() > 12 and np.abs(result.poses.shifts_angst).max() <= 15
    assert columns(result.start)["RandomSubset"] == ["1", "2"] * 30
    optics = gemmi.cif.read(str(result.truth)).find_block("optics")
    assert float(optics.find_values("_rlnImagePixelSize")[0]) == PIXEL


def test_rotations_are_uniform(tmp_path):
    result = simulate(tmp_path, SimulationSettings(count=400, box_size=8, pixel_size_angst=40))
    assert np.abs(result.poses.rotations.mean(axis=0)).max() < 0.12
    np.testing.assert_allclose((result.poses.rotations**2).mean(axis=0), 1 / 3, atol=0.07)


def test_same_seed_same_files_and_inverted_particles_are_the_negative(tmp_path):
    base = dict(count=2, box_size=16, pixel_size_angst=20.0)
    for name, extra in {"a": {}, "b": {}, "c": {"seed": 2}, "d": {"invert": True}}.items():
        simulate(tmp_path / name, SimulationSettings(**base, **extra))
    particle = {name: data(tmp_path / name / "subtomo" / "particle_00002.mrc") for name in "abcd"}
    np.testing.assert_array_equal(particle["a"], particle["b"])
    assert (tmp_path / "a" / "truth.star").read_bytes() == (tmp_path / "b" / "truth.star").read_bytes()
    assert correlation(particle["a"], particle["c"]) < 0.9
    np.testing.assert_allclose(particle["d"], -particle["a"], atol=1e-6)
    assert correlation(data(tmp_path / "d" / "reference.mrc"), data(tmp_path / "a" / "reference.mrc")) > 0.999


@pytest.mark.parametrize(("box", "pixel"), [(32, 8.0), (31, 8.0), (40, 6.5)])
def test_a_map_is_turned_and_resampled_as_the_phantom_itself_is(box, pixel):
    source = Volume(render_phantom(64, 5.0, diameter_angst=180.0), 5.0)
    rotation = Rotation.from_euler("ZYZ", [20, 80, -130], degrees=True).as_matrix()
    shift = np.array([7.0, -4.0, 9.0])
    turned = map_renderer(source, box, pixel)(rotation, shift)
    exact = render_phantom(box, pixel, rotation, shift, diameter_angst=180.0)
    inside = ball(box, 0.45 * box)
    assert np.std((turned - exact)[inside]) < 0.002 * np.std(exact[inside])


@pytest.mark.parametrize("source", [Volume(np.ones((16,) * 3, np.float32), 5.0), Volume(np.eye(16)[None].repeat(16, 0), float("nan"))])
def test_maps_without_content_or_pixel_size_are_refused(source):
    with pytest.raises(VolumeError):
        map_renderer(source, 16, 5.0)


def test_ctf_against_a_published_zero():
    """300 kV, 2.7 mm, no amplitude contrast to speak of: the first zero lies near 1 / sqrt(wavelength * defocus)."""
    box, pixel, defocus = 128, 4.0, 30_000.0
    line = ctf_squared(box, pixel, defocus)[0, 0]
    frequency = np.arange(65) / (box * pixel)
    first_zero = 1 / np.sqrt(0.0196875 * defocus)
    start = np.argmax(line > 0.9)
    found = start + np.argmin(line[start : start + 10])
    assert abs(frequency[found] - first_zero) < 1.5 / (box * pixel)
    assert line[0] == pytest.approx(0.07**2)


def test_hundred_particles_take_seconds(tmp_path):
    start = time.process_time()
    steps = []
    simulate(tmp_path, SimulationSettings(count=100, ctf=True), progress=lambda done, total: steps.append((done, total)))
    assert time.process_time() - start < 5.0  # 0.4 s on the machine it was written on
    assert steps == [(i + 1, 100) for i in range(100)]


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"snr": 0.0}, {"box_size": 4}, {"tilt_min_deg": 60.0}, {"tilt_max_deg": 95.0}, {"pixel_size_angst": float("nan")}, {"seed": -1}],
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(SettingsError):
        SimulationSettings(**wrong)
