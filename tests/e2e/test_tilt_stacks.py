"""The forty real ribosomes read as stacks of tilt images, against the volumes that were made of the same images by other means.

As they are written, stacks and tomograms file give mirrored volumes: with ``M = diag(1, 1, -1)`` the volume is M of the right one, and its pose
``M R M``. A start map has to be mirrored too (``--mirror``).
"""

from __future__ import annotations

import re

import mrcfile
import numpy as np
import pytest

from numba_glocal.io import read_particles
from numba_glocal.io.star import read_star, write_star
from numba_glocal.tilt_images import multipliers, plane_frequencies, stack_weights, volume_from_stack, with_tilt_images

N = 32
GRID = np.indices((N,) * 3) - N // 2
RADIUS = np.sqrt((GRID**2).sum(0))


def mirrored(volume):
    """z turned round about voxel n / 2; the first plane has no partner and stays."""
    other = volume.copy()
    other[1:] = volume[1:][::-1]
    return other


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "data" / "relion5-2d-stacks"


@pytest.fixture(scope="module")
def real(shared):
    return shared / "data" / "real-70s"


def name_3d(stack):
    return re.sub(r".*(Unt_\d+)_12.00A_0*(\d+)\.mrcs", lambda m: f"{m[1]}_{int(m[2]):02d}.mrc", str(stack))


def test_volumes_are_those_of_the_premultiplied_set(folder, real, tools):
    """Inside the wedge and a soft sphere around the particle (radius 280 A / 2); the volumes of the set were made with a coarser interpolation."""
    with pytest.warns(UserWarning, match="rlnTomoHand is -1, but the images' own CTF says"):
        particles = with_tilt_images(read_particles(folder / "optimisation_set.star"))
    assert len(particles) == 40 and particles.premultiplied
    sphere = tools.soft_sphere(N, 8, 4)
    frequency = np.fft.ifftshift(RADIUS)
    right, wrong = [], []
    for stack, geometry in zip(particles.volume_paths, particles.weight_paths, strict=True):
        expected = tools.read_map(real / "premultiplied" / name_3d(stack))
        wedge = np.fft.ifftshift(tools.read_map(real / re.sub(r"_\d\d\.mrc", "_wedge.mrc", name_3d(stack))))
        inside = (frequency > 0) & (frequency <= 14) & (wedge > 0.5)
        b = np.fft.fftn((expected - expected.mean()) * sphere)[inside]
        volume = volume_from_stack(stack, geometry, N).astype(float)
        for result, found in ((right, mirrored(volume)), (wrong, volume)):
            a = np.fft.fftn((found - found.mean()) * sphere)[inside]
            result.append((a * b.conj()).sum().real / np.sqrt((abs(a) ** 2).sum() * (abs(b) ** 2).sum()))
    assert np.mean(right) >= 0.95 and min(right) >= 0.9, (np.mean(right), min(right))
    assert np.mean(wrong) < 0.5 and max(wrong) < 0.75


def test_volumes_are_the_exact_sum_over_all_samples(folder):
    """One of each series, in the measure of the test above: what insertion into a grid leaves is far below what the other volumes differ by."""
    particles = with_tilt_images(read_particles(folder / "optimisation_set.star"))
    sphere, frequency, k, v = np.clip((12 - RADIUS) / 4, 0, 1), np.fft.ifftshift(RADIUS), plane_frequencies(N), np.arange(N) - N // 2
    inside = (frequency > 0) & (frequency <= 14)
    for row in (0, 10, 20, 30):
        stack, geometry = particles.volume_paths[row], particles.weight_paths[row]
        exact = 0
        for image, axes in zip(mrcfile.read(stack)[geometry.images].astype(float), geometry.axes, strict=True):
            samples = np.fft.fft2(np.fft.ifftshift(image))[k[:, 1].astype(int), k[:, 0].astype(int)]
            x, y, z = (np.exp(2j * np.pi * np.outer((k @ axes)[:, i], v) / N) for i in range(3))
            exact = exact + np.einsum("mz,my,mx->zyx", z * samples[:, None], y, x, optimize=True).real
        a, b = (np.fft.fftn((m - m.mean()) * sphere)[inside] for m in (volume_from_stack(stack, geometry, N).astype(float), exact))
        assert (a * b.conj()).sum().real / np.sqrt((abs(a) ** 2).sum() * (abs(b) ** 2).sum()) > 0.999


def test_the_images_tell_that_the_projections_are_mirrored(folder):
    """rlnTomoHand is -1, which fits projections of the right hand; the defocus at the particles' heights fits 1."""
    particles = read_particles(folder / "optimisation_set.star")
    with pytest.warns(UserWarning, match="rlnTomoHand is -1, but the images' own CTF says"):
        with_tilt_images(particles)


def test_weights_follow_the_power_of_the_images(folder):
    """Images are noise times CTF, scale and exposure filter: their power must go as the square of that, from tilt to tilt and shell to shell."""
    with pytest.warns(UserWarning, match="rlnTomoHand is -1, but the images' own CTF says"):
        particles = with_tilt_images(read_particles(folder / "optimisation_set.star"))
    k = plane_frequencies(N)
    shell = np.rint(np.hypot(k[:, 0], k[:, 1])).astype(int)
    for geometry in dict.fromkeys(particles.weight_paths):
        power = 0
        for stack in [p for p, g in zip(particles.volume_paths, particles.weight_paths, strict=True) if g == geometry]:
            images = mrcfile.read(stack)[geometry.images].astype(float)
            spectra = np.fft.fft2(images)
            power = power + np.abs(spectra[:, k[:, 1].astype(int), k[:, 0].astype(int)]) ** 2
        expected = multipliers(geometry, N) ** 2
        # where the structure adds least, and the CTF is far from its zero
        per_tilt = [p[(shell >= 6) & (shell <= 12)].mean() / e[(shell >= 6) & (shell <= 12)].mean() for p, e in zip(power, expected, strict=True)]
        assert np.std(per_tilt) / np.mean(per_tilt) < 0.25
        without = expected / geometry.scale[:, None] ** 2
        flat = [p[(shell >= 6) & (shell <= 12)].mean() / e[(shell >= 6) & (shell <= 12)].mean() for p, e in zip(power, without, strict=True)]
        assert np.std(per_tilt) / np.mean(per_tilt) < 0.7 * np.std(flat) / np.mean(flat)
        assert stack_weights(geometry, N).max() > 5


@pytest.fixture(scope="module")
def likeness(real, tools):
    published = tools.read_map(real / "published_map.mrc")
    inside = RADIUS <= 13
    band = tools.shell_radii(N) / (N * 12.0) <= 1 / 35

    def likeness(path, hand=mirrored):
        cut = np.fft.ifftn(np.fft.fftn(hand(tools.read_map(path))) * band).real
        return np.corrcoef(cut[inside], published[inside])[0, 1]

    return likeness


def test_average_has_the_other_hand(folder, likeness, average_here, tmp_path):
    average_here(folder / "optimisation_set.star", tmp_path / "run")
    assert likeness(tmp_path / "run" / "average.mrc") >= 0.855  # the premultiplied volumes: 0.864
    assert likeness(tmp_path / "run" / "average.mrc", hand=lambda volume: volume) < 0.7


def perturbed(folder, real, target):
    """The stacks with the poses of `real-70s/premultiplied/perturbed.star` in their own hand, as an optimisation set."""
    document = read_star(folder / "particles.star")
    table, other = document["particles"], read_star(real / "premultiplied" / "perturbed.star")["particles"]
    row = {name: i for i, name in enumerate(other.texts("rlnImageName"))}
    rows = [row[name_3d(name)] for name in table.texts("rlnImageName")]

    def column(label):
        return other.floats(label)[rows]

    # M R M of R^-1 = Rz(rot) Ry(tilt) Rz(psi): M is -Rz(180)
    for label, values in {
        "rlnAngleRot": column("rlnAngleRot") + 180,
        "rlnAngleTilt": column("rlnAngleTilt"),
        "rlnAnglePsi": column("rlnAnglePsi") + 180,
        "rlnOriginXAngst": column("rlnOriginXAngst"),
        "rlnOriginYAngst": column("rlnOriginYAngst"),
        "rlnOriginZAngst": -column("rlnOriginZAngst"),
        "rlnRandomSubset": other.floats("rlnRandomSubset")[rows].astype(int),
    }.items():
        table.set_column(label, [str(v) for v in values])
    table.set_column("rlnImageName", [str(folder / name) for name in table.texts("rlnImageName")])
    write_star(target / "particles.star", document)
    (target / "set.star").write_text(
        f"data_\n_rlnTomoParticlesFile {target / 'particles.star'}\n_rlnTomoTomogramsFile {folder / 'tomograms.star'}\n"
        "data_general\n_rlnTomoSubTomosAre2DStacks 1\n"
    )
    return target / "set.star"


def test_align_from_poses_ten_degrees_off(folder, real, likeness, command, pose_errors, tmp_path):
    options = ["--reference", real / "published_map.mrc", "--initial-lowpass", 50, "--particle-diameter", 280, "--iterations", 3, "--cpu-procs", 2]
    command("align", perturbed(folder, real, tmp_path), "-o", tmp_path / "run", "--mirror", *options)
    command("align", real / "premultiplied" / "perturbed.star", "-o", tmp_path / "volumes", *options)
    assert likeness(tmp_path / "run" / "average.mrc") >= 0.85
    assert likeness(tmp_path / "run" / "average.mrc") >= likeness(tmp_path / "volumes" / "average.mrc", hand=lambda volume: volume) - 0.005
    ours, _ = pose_errors(folder / "particles.star", tmp_path / "run" / "particles.star")
    theirs, _ = pose_errors(real / "premultiplied" / "particles.star", tmp_path / "volumes" / "particles.star")
    assert len(ours) == 40 and np.median(ours) <= 1.1 * np.median(theirs)
    # the run's own set is a list like any other
    command("average", tmp_path / "run" / "optimisation_set.star", "-o", tmp_path / "again", "--cpu-procs", 1)
    assert likeness(tmp_path / "again" / "average.mrc") >= 0.85
