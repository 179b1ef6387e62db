"""Particles cut out of made tomograms: where they are to a twentieth of a voxel, what lies beyond the edge, weights against marked planes."""

from __future__ import annotations

import gzip
import subprocess
from dataclasses import replace

import mrcfile
import numpy as np
import pytest
from click.testing import CliRunner

from numba_glocal.backends.protocols import Grid, ParticleMask
from numba_glocal.cli import main
from numba_glocal.errors import GlocalError
from numba_glocal.geometry import matrix_to_relion, rotvec_to_matrix
from numba_glocal.io import read_particles, write_particles
from numba_glocal.io.tilt_series import TiltFiles, tilt_matrices
from numba_glocal.particles import ParticleReader
from numba_glocal.phantom import render_phantom
from numba_glocal.tomogram_boxes import cut, cut_from_tomograms, series_weight, tomogram_weights
from numba_glocal.wedge import read_weight_volume, tilt_range_weights

PIXEL = 8.0


def blob(shape, place, sigma):
    """A Gaussian at (x, y, z), in voxels from the first voxel's centre."""
    z, y, x = np.ogrid[: shape[0], : shape[1], : shape[2]]
    return np.exp(-0.5 * ((x - place[0]) ** 2 + (y - place[1]) ** 2 + (z - place[2]) ** 2) / sigma**2)


def write_tomogram(path, data, pixel=PIXEL):
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(data.astype(np.float32))
        file.voxel_size = pixel


def write_list(path, places, extra=None, tomogram="tomo_1"):
    columns = {"rlnMicrographName": [tomogram] * len(places)}
    columns |= {f"rlnCoordinate{axis}": [f"{v:.4f}" for v in np.asarray(places)[:, i]] for i, axis in enumerate("XYZ")}
    columns |= extra or {}
    rows = "\n".join(" ".join(str(values[i]) for values in columns.values()) for i in range(len(places)))
    optics = f"data_optics\nloop_\n_rlnOpticsGroup\n_rlnImagePixelSize\n1 {PIXEL}\n\n"
    path.write_text(optics + "data_particles\nloop_\n" + "".join(f"_{label}\n" for label in columns) + rows + "\n")


def run(*arguments, code=0):
    done = CliRunner().invoke(main, ["extract", *map(str, arguments)], prog_name="numba-glocal")
    assert done.exit_code == code, done.output
    return done.output


def centre_of(volume):
    """Centre of a Gaussian on a flat ground as offset (x, y, z) from the box's centre: phases of the lowest frequencies."""
    n = volume.shape[0]
    spectrum = np.fft.fftn(np.fft.ifftshift(volume.astype(float)))
    return np.array([-np.angle(spectrum[index]) * n / (2 * np.pi) for index in ((0, 0, 1), (0, 1, 0), (1, 0, 0))])


@pytest.mark.parametrize("recentre", [True, False])
@pytest.mark.parametrize("binning", [1, 2, 4])
@pytest.mark.parametrize("box", [16, 17])
@pytest.mark.parametrize("shape", [(96, 111, 128), (97, 110, 127)])
def test_centres_to_a_twentieth_of_a_voxel(tmp_path, shape, box, binning, recentre):
    half = box * binning // 2 + 4
    rng = np.random.default_rng(box + binning)
    nz, ny, nx = shape
    offsets_angst = rng.uniform(-20, 20, (3, 3))  # what refinement found: particles lie there from the coordinates
    size = np.array([nx, ny, nz])
    places = np.column_stack([rng.uniform(half, n - half, 3) for n in size])
    data = np.zeros(shape)
    lists = [places - offsets_angst / PIXEL]
    for number, place in enumerate(places):
        data = blob(shape, place, 2.0 * binning)
        write_tomogram(tmp_path / f"tomo_{number}.mrc", data)
    extra = {f"rlnOrigin{axis}Angst": [f"{-v:.4f}" for v in offsets_angst[:, i]] for i, axis in enumerate("XYZ")}
    write_list(tmp_path / "list.star", lists[0], extra)
    text = (tmp_path / "list.star").read_text()
    for number in range(3):
        text = text.replace("tomo_1 ", f"tomo_{number}.mrc ", 1) if number == 0 else text
    lines = text.splitlines()
    lines[-3:] = [f"tomo_{i}.mrc {line.split(' ', 1)[1]}" for i, line in enumerate(lines[-3:])]
    (tmp_path / "list.star").write_text("\n".join(lines) + "\n")
    out = tmp_path / "out"
    run(tmp_path / "list.star", "-o", out, "--tomograms", tmp_path, "--box", box, "--binning", binning, "--recentre" if recentre else "--no-recentre")
    found = read_particles(out / "particles.star")
    assert found.box_size == box and len(found) == 3
    cut_size = round(box * binning)
    assert found.pixel_size_angst == pytest.approx(PIXEL * cut_size / box, rel=1e-6)
    for path, shift, number in zip(found.volume_paths, found.poses.shifts_angst, range(3), strict=True):
        volume = mrcfile.read(path)
        # the pose in the list says where the particle is in its box
        expected = shift / found.pixel_size_angst
        assert np.abs(centre_of(volume) - expected).max() < 0.05, (number, centre_of(volume), expected)
        if recentre:
            assert np.abs(shift).max() <= 0.5 * PIXEL + 1e-6
        else:
            assert np.abs(shift - offsets_angst[number]).max() <= 0.5 * PIXEL + 1e-3
    # coordinate + shift is the place in the tomogram
    np.testing.assert_allclose(found.coordinates.as_voxels() + found.poses.shifts_angst / PIXEL, places, atol=1e-3)


def test_names_start_from_the_project_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tomogram(tmp_path / "tomo_1.mrc", np.random.default_rng(0).normal(size=(40, 40, 40)))
    write_list(tmp_path / "list.star", [[20, 20, 20]])
    run("list.star", "-o", "job/out", "--tomograms", ".", "--box", 16, "--tilt-range", -60, 60)
    found = read_particles(tmp_path / "job/out/particles.star")
    assert found.names == ("job/out/subtomo/tomo_1/tomo_1_000001.mrc",)
    assert found.source.block.texts("rlnCtfImage") == ["job/out/weights/wedge.mrc"]
    np.testing.assert_array_equal(read_weight_volume(found.weight_paths[0], 16), tilt_range_weights(16, -60, 60, smooth_voxels=1))


def test_relion_reads_the_list(tmp_path, monkeypatch, relion):
    """Poses and weights: RELION's reconstruction is the blob, which lies off the list's coordinates."""
    monkeypatch.chdir(tmp_path)
    places = np.array([[30.4, 31.2, 29.7], [62.2, 30.1, 30.6], [31.3, 60.5, 31.4], [61.7, 61.2, 30.2]])
    write_tomogram(tmp_path / "tomo_1.mrc", sum(blob((60, 92, 92), place, 2.0) for place in places))
    write_list(tmp_path / "list.star", places)
    (tmp_path / "a.tlt").write_text("\n".join(map(str, range(-60, 61, 3))))
    run("list.star", "-o", "out", "--tomograms", ".", "--box", 24, "--tilts", "a.tlt")
    done = subprocess.run(
        ["relion_reconstruct", "--i", "out/particles.star", "--o", "r.mrc", "--3d_rot", "--ctf"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert np.abs(centre_of(mrcfile.read(tmp_path / "r.mrc"))).max() < 0.05


class Planted:
    """Phantoms at known poses in a tomogram with a missing wedge and noise, and a list of them with orientations that are off."""

    def __init__(self, folder, count=16, pixel=10.0):
        rng = np.random.default_rng(4)
        shape = (80, 200, 200)
        self.pixel, self.folder = pixel, folder
        self.places = np.array([[30 + 46 * (i % 4), 30 + 46 * (i // 4), 40] for i in range(count)]) + rng.uniform(-6, 6, (count, 3))
        self.rotations = rotvec_to_matrix(rng.normal(size=(count, 3)) * 1.5)
        data = np.zeros(shape)
        for place, rotation in zip(self.places, self.rotations, strict=True):
            whole = np.rint(place).astype(int)
            x, y, z = whole - 20
            data[z : z + 40, y : y + 40, x : x + 40] += render_phantom(40, pixel, rotation, (place - whole) * pixel)
        data = data / data.std() + 2.0 * rng.normal(size=shape)
        # the wedge of tilts from -50 to 60 degrees about y, by the formula of the conventions
        kz, ky, kx = np.meshgrid(*(np.fft.fftfreq(n) for n in shape), indexing="ij")
        tilt = np.rad2deg(np.arctan2(-kz * np.where(kx < 0, -1, 1), np.abs(kx)))
        data = np.fft.ifftn(np.fft.fftn(data) * ((tilt >= -50) & (tilt <= 60))).real
        write_tomogram(folder / "t1.mrc", data, pixel)
        (folder / "t1.tlt").write_text("\n".join(f"{t:.1f}" for t in np.arange(-50, 60.1, 2)) + "\n")
        start = self.rotations @ rotvec_to_matrix(rng.normal(size=(count, 3)) * np.deg2rad(6) / np.sqrt(3))
        angles = matrix_to_relion(start)
        extra = {label: [f"{v:.4f}" for v in angles[:, i]] for i, label in enumerate(("rlnAngleRot", "rlnAngleTilt", "rlnAnglePsi"))}
        self.list = folder / "list.star"
        write_list(self.list, np.rint(self.places), extra | {"rlnRandomSubset": [i % 2 + 1 for i in range(count)]}, "t1")

    def reference(self, box):
        path = self.folder / f"reference{box}.mrc"
        write_tomogram(path, render_phantom(box, self.pixel, np.eye(3), np.zeros(3)), self.pixel)
        return path

    def errors(self, found, order):
        """Angles in degrees, distances in voxels after one common motion, and that."""
        relative = np.einsum("pji,pjk->pik", self.rotations[order], found.poses.rotations)
        error_deg = np.rad2deg(np.arccos(np.clip((np.trace(relative, axis1=1, axis2=2) - 1) / 2, -1, 1)))
        off = found.coordinates.as_voxels() + found.poses.shifts_angst / self.pixel - self.places[order]
        # the map itself may move, which moves all particles alike in its own frame
        common = np.median(np.einsum("pji,pj->pi", found.poses.rotations, off), axis=0)
        return error_deg, np.linalg.norm(off - found.poses.rotations @ common, axis=1), np.linalg.norm(common)


def align(particles, output, reference, *more, code=0):
    arguments = ["align", particles, "-o", output, "--reference", reference, "--initial-lowpass", 45]
    arguments += ["--particle-diameter", 220, "--cpu-procs", 1, "--gpus", "none", "--shift-range", 25, *more]
    done = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="numba-glocal")
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return Planted(tmp_path_factory.mktemp("planted"))


def test_planted_particles_are_aligned(tmp_path, planted):
    """Extract, then align from poses that are off."""
    output = run(
        *(planted.list, "-o", tmp_path / "cut", "--tomograms", planted.folder, "--box", 32, "--tilts", planted.folder / "t1.tlt"),
        *("--edge", "pad", "--list-pixel-size", planted.pixel),
    )
    assert "56 tilts from -50 to 60 degrees as read, -50 to 60 as used about y" in output
    align(tmp_path / "cut/particles.star", tmp_path / "run", planted.reference(32), "--iterations", 2)
    found = read_particles(tmp_path / "run/particles.star", require_volumes=False)
    order = [int(name.rsplit("_", 1)[1].removesuffix(".mrc")) - 1 for name in found.names]
    error_deg, off, common = planted.errors(found, order)
    assert common < 0.5 and np.median(off) < 0.15 and np.median(error_deg) < 2.0, (common, np.median(off), np.median(error_deg))


@pytest.mark.parametrize(("box", "binning"), [(32, 1), (33, 1), (32, 2), (33, 2), (48, 4), (49, 4)])
def test_straight_from_tomograms_as_from_files(tmp_path, planted, box, binning):
    tilts = ("--tilts", planted.folder / "t1.tlt", "--edge", "pad")
    run(planted.list, "-o", tmp_path / "cut", "--tomograms", planted.folder, "--box", box, *tilts)
    # a later option goes before an earlier one; 5.5 voxels would be too few
    options = ("--iterations", 1, "--binning", binning, "--particle-diameter", 220 if binning < 4 else 260)
    align(tmp_path / "cut/particles.star", tmp_path / "files", planted.reference(box), *options)
    align(planted.list, tmp_path / "boxes", planted.reference(box), *options, "--tomograms", planted.folder, "--box", box, *tilts)
    files, boxes = (read_particles(tmp_path / name / "particles.star", require_volumes=False) for name in ("files", "boxes"))
    order = [int(name.rsplit("_", 1)[1].removesuffix(".mrc")) - 1 for name in files.names]
    assert order == list(range(16)) and np.array_equal(files.half, boxes.half)
    places = [found.coordinates.as_voxels() * planted.pixel + found.poses.shifts_angst for found in (files, boxes)]
    np.testing.assert_allclose(boxes.poses.rotations, files.poses.rotations, atol=2e-5)
    np.testing.assert_allclose(places[0], places[1], atol=2e-3)
    maps = [mrcfile.read(tmp_path / name / "average.mrc") for name in ("files", "boxes")]
    np.testing.assert_allclose(maps[0], maps[1], atol=2e-4 * maps[0].std())
    # and they are the planted ones, in a list that has the first one's coordinates
    error_deg, off, _ = planted.errors(boxes, np.arange(16))
    assert binning == 4 or (np.median(off) < 0.3 and np.median(error_deg) < 4)
    before = read_particles(planted.list, require_volumes=False)
    for label in ("rlnCoordinateX", "rlnCoordinateY", "rlnCoordinateZ", "rlnMicrographName"):
        assert boxes.source.block.texts(label) == before.source.block.texts(label)


def test_coordinates_of_another_voxel_size_and_centred_ones(tmp_path):
    """Field cases 21, 23 and 24: one particle, coordinates in unbinned voxels of 2.17 A, a tomogram of 15 A: the factor is 6.912."""
    shape = (60, 70, 80)
    place = np.array([41.3, 33.8, 28.4])
    write_tomogram(tmp_path / "t.mrc", blob(shape, place, 2.0), 15.0)
    (tmp_path / "four.star").write_text(
        "data_optics\nloop_\n_rlnOpticsGroup\n_rlnTomoTiltSeriesPixelSize\n1 2.17\n\ndata_particles\nloop_\n_rlnTomoName\n_rlnCoordinateX\n"
        "_rlnCoordinateY\n_rlnCoordinateZ\n_rlnOpticsGroup\nt " + " ".join(f"{v:.4f}" for v in place * 15 / 2.17) + " 1\n"
    )
    output = run(tmp_path / "four.star", "-o", tmp_path / "four", "--tomograms", tmp_path, "--box", 20)
    assert "voxels of 2.17 A (list) are divided by 6.912" in output
    found = read_particles(tmp_path / "four/particles.star")
    assert np.abs(centre_of(mrcfile.read(found.volume_paths[0])) - found.poses.shifts_angst[0] / 15).max() < 0.05
    # RELION 5: Angstrom from voxel size / 2 - 1 of the unbinned tomogram; here the tomogram is the unbinned one
    centred = (place - (np.array(shape[::-1]) / 2 - 1)) * 15
    (tmp_path / "five.star").write_text(
        "data_particles\nloop_\n_rlnTomoName\n_rlnCenteredCoordinateXAngst\n_rlnCenteredCoordinateYAngst\n_rlnCenteredCoordinateZAngst\n"
        "t " + " ".join(f"{v:.4f}" for v in centred) + "\n"
    )
    run(tmp_path / "five.star", "-o", tmp_path / "five", "--tomograms", tmp_path / "t.mrc", "--box", 20)
    found = read_particles(tmp_path / "five/particles.star")
    assert np.abs(centre_of(mrcfile.read(found.volume_paths[0])) - found.poses.shifts_angst[0] / 15).max() < 0.05


def test_what_lies_beyond_the_edge():
    data = np.random.default_rng(1).normal(size=(20, 22, 24)).astype(np.float32)
    box, beyond = cut(data, np.array([12, 11, 10]), 8, "skip")
    assert not beyond and np.array_equal(box, data[6:14, 7:15, 8:16])
    with pytest.raises(GlocalError, match=r"box of 8 voxels around voxel 22, 11, 10 of 24 x 22 x 20: reaches beyond the tomogram"):
        cut(data, np.array([22, 11, 10]), 8, "skip")
    box, beyond = cut(data, np.array([22, 11, 10]), 8, "pad")
    there = data[6:14, 7:15, 18:24]
    assert beyond and np.array_equal(box[:, :, :6], there) and np.allclose(box[:, :, 6:], there.mean(), atol=1e-6)
    for centre in ([40, 11, 10], [12, -9, 10]):
        with pytest.raises(GlocalError, match="outside of the tomogram"):
            cut(data, np.array(centre), 8, "pad")
    data[:] = 3
    with pytest.raises(GlocalError, match="every value is 3"):
        cut(data, np.array([12, 11, 10]), 8, "pad")
    data[10, 11, 12] = np.nan
    with pytest.raises(GlocalError, match="not finite"):
        cut(data, np.array([12, 11, 10]), 8, "pad")


def test_particles_that_are_left_out_are_listed(tmp_path):
    write_tomogram(tmp_path / "tomo_1.mrc", np.random.default_rng(0).normal(size=(40, 40, 40)))
    write_list(tmp_path / "list.star", [[20, 20, 20], [2, 20, 20]], {"rlnCustom": ["a", "007"]})
    output = run(tmp_path / "list.star", "-o", tmp_path / "out", "--tomograms", tmp_path, "--box", 16)
    assert "1 particle left out" in output and "tomo_1/2" in (tmp_path / "out/left_out.txt").read_text()
    assert len(read_particles(tmp_path / "out/particles.star")) == 1
    output = run(tmp_path / "list.star", "-o", tmp_path / "padded", "--tomograms", tmp_path, "--box", 16, "--edge", "pad", "--invert-contrast")
    assert "1 box beyond" in output
    found = read_particles(tmp_path / "padded/particles.star")
    assert len(found) == 2 and found.source.block.texts("rlnCustom") == ["a", "007"]
    np.testing.assert_array_equal(mrcfile.read(found.volume_paths[0]), -mrcfile.read(read_particles(tmp_path / "out/particles.star").volume_paths[0]))


WRONG = {
    "no tomogram": ({}, ["--tomograms", "."], "tomogram nowhere not found; tried"),
    "two that could be it": ({"tomogram": "two"}, [], "could all be it"),
    "no pixel size": ({"tomogram": "unsized"}, [], "unsized.mrc: no pixel size in its header"),
    "no tilts": ({"tomogram": "tomo_1"}, ["--tilts", "none.tlt"], "none.tlt: no such file or folder of tilts"),
    "ctf without tilts": ({"tomogram": "tomo_1"}, ["--ctf", "plain"], "--ctf plain: needs the defocus of each tilt"),
    "ctf without defocus": ({"tomogram": "tomo_1"}, ["--ctf", "plain", "--tilts", "a.tlt"], "expected the defocus of each image"),
    "steep": ({"tomogram": "tomo_1"}, ["--tilts", "steep.tlt"], "steep.tlt: a tilt of 95 degrees, expected less than 90"),
    "words": ({"tomogram": "tomo_1"}, ["--tilts", "words.tlt"], "words.tlt:2: 'hello' is no angle"),
    "both": ({"tomogram": "tomo_1"}, ["--tilts", "a.tlt", "--tilt-range", "-60", "60"], "--tilts and --tilt-range"),
    "small box": ({"tomogram": "tomo_1"}, ["--box", "4"], "--box: expected 8 voxels or more, found 4"),
    "tilt range": (
        {"tomogram": "tomo_1"},
        ["--tilt-range", "60", "-60"],
        "--tilt-range: expected -90 <= smallest < largest <= 90 degrees, found 60 -60",
    ),
    "nothing that can be cut": ({"tomogram": "tomo_1"}, ["--box", "64"], "none of 1 particles could be cut"),
    "binning": ({"tomogram": "tomo_1"}, ["--binning", "0.5"], "--binning: expected 1 or more"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    given, options, part = WRONG[what]
    data = np.random.default_rng(0).normal(size=(40, 40, 40))
    for name, pixel in (("tomo_1.mrc", 8.0), ("two_8.00Apx.mrc", 8.0), ("two_4.00Apx.mrc", 4.0), ("unsized.mrc", 0.0)):
        write_tomogram(tmp_path / name, data, pixel)
    for name, text in (("a.tlt", "-60\n0\n60\n"), ("steep.tlt", "0\n95\n"), ("words.tlt", "0\nhello\n")):
        (tmp_path / name).write_text(text)
    write_list(tmp_path / "list.star", [[20, 20, 20]], tomogram=given.get("tomogram", "nowhere"))
    base = ["list.star", "-o", "out", "--tomograms", ".", "--box", "16"]
    output = run(*base, *options, code=2)
    assert part in output and not (tmp_path / "out").exists()


def test_warp_names_are_found(tmp_path):
    write_tomogram(tmp_path / "TS_1_8.00Apx.mrc", np.random.default_rng(0).normal(size=(40, 40, 40)))
    write_list(tmp_path / "list.star", [[20, 20, 20]], tomogram="TS_1.tomostar")
    run(tmp_path / "list.star", "-o", tmp_path / "out", "--tomograms", tmp_path, "--box", 16)
    assert (tmp_path / "out/subtomo/TS_1/TS_1_000001.mrc").is_file()


@pytest.mark.parametrize("name", ["TS_1.tomostar", "TS_1.mrc", "TS_1"])
def test_the_list_of_a_binned_extraction_is_one_for_the_next(tmp_path, name):
    place = np.array([50.3, 47.8, 44.6])
    write_tomogram(tmp_path / "TS_1.mrc", blob((90, 96, 100), place, 3.0))
    write_list(tmp_path / "list.star", [place + [0.4, -1.3, 2.2]], tomogram=name)
    found = None
    source = tmp_path / "list.star"
    for binning in (4, 2, 1):
        run(source, "-o", tmp_path / f"b{binning}", "--tomograms", tmp_path, "--box", 16, "--binning", binning)
        found = read_particles(tmp_path / f"b{binning}/particles.star")
        at = centre_of(mrcfile.read(found.volume_paths[0])) * found.pixel_size_angst
        # what an alignment would find
        poses = replace(found.poses, shifts_angst=at[None])
        source = tmp_path / f"b{binning}/aligned.star"
        write_particles(source, found.with_poses(poses))
    assert np.abs(at).max() <= 0.5 * PIXEL + 0.05 and np.abs(found.coordinates.as_voxels()[0] + at / PIXEL - place).max() < 0.05


def test_weights_of_tilts_lie_on_their_planes(tmp_path):
    n = 32
    (tmp_path / "a.tlt").write_text("-40\n-10 # a comment\n\n25\n55\n")
    series = TiltFiles(tmp_path / "a.tlt")["whatever"]
    weights = tomogram_weights(series_weight(series, 8.0), n)
    k = np.rint(np.fft.fftfreq(n) * n)
    kz, _, kx = np.meshgrid(k, k, np.arange(n // 2 + 1), indexing="ij")
    tilts = np.deg2rad([-40, -10, 25, 55])
    # a tilt t samples the direction (x, z) = (cos t, -sin t)
    distance = np.abs(kx[..., None] * np.sin(tilts) + kz[..., None] * np.cos(tilts)).min(-1)
    ky = np.meshgrid(k, k, np.arange(n // 2 + 1), indexing="ij")[1]
    band = (kx**2 + ky**2 + kz**2 < 14**2) & (kx**2 + kz**2 > 36)
    assert weights[band & (distance > 1.5)].max() == 0 and weights[band & (distance < 0.1)].min() > 0.8
    flipped = tomogram_weights(series_weight(TiltFiles(tmp_path / "a.tlt", flip=True)["x"], 8.0), n)
    assert flipped[band & (distance < 0.1)].mean() < 0.5
    # an even series is what its range is
    even = TiltFiles(tmp_path / "a.tlt")["x"]
    dense = type(even)("a", tilt_matrices(np.arange(-50, 60.1, 1.0)), None, *(np.zeros(111), np.ones(111), np.zeros(111)))
    fine = tomogram_weights(series_weight(dense, 8.0), n)
    wide = tilt_range_weights(n, -50, 60, smooth_voxels=1)
    inner = (kx**2 + ky**2 + kz**2 < 13**2) & (kx**2 + ky**2 + kz**2 > 4)
    assert np.corrcoef(fine[inner], wide[inner])[0, 1] > 0.96
    about_x = TiltFiles(tmp_path / "a.tlt", tilt_axis="x")["x"]
    np.testing.assert_allclose(about_x.matrices[2, 1], [0, np.cos(np.deg2rad(25)), np.sin(np.deg2rad(25))])


TOMOGRAMS = """
data_global
loop_
_rlnTomoName
_rlnTomoTiltSeriesPixelSize
_rlnTomoHand
tomo_1 4 1

data_tomo_1
loop_
_rlnTomoXTilt
_rlnTomoYTilt
_rlnTomoZRot
_rlnDefocusU
_rlnMicrographPreExposure
0 -45 0 25000 40
0 0 0 25000 0
0 45 0 25000 80
"""


@pytest.mark.parametrize(("box", "kind", "edge"), [(16, "none", "pad"), (17, "plain", "pad"), (16, "flipped", "skip"), (17, "multiplied", "pad")])
def test_a_box_is_read_as_it_is_extracted(tmp_path, box, kind, edge):
    """Volumes and weights, bit by bit, at heights that differ and beyond the edge."""
    write_tomogram(tmp_path / "tomo_1.mrc", np.random.default_rng(0).normal(size=(60, 64, 70)), 3.0)
    (tmp_path / "tilts.star").write_text(TOMOGRAMS)
    write_list(tmp_path / "list.star", [[30.2, 31.7, 30], [20.4, 40, 12.6], [66, 20, 30], [40, 22, 49.5]])
    options = ("--ctf", kind, "--edge", edge)
    run(tmp_path / "list.star", "-o", tmp_path / "out", "--tomograms", tmp_path, "--box", box, "--tilts", tmp_path / "tilts.star", *options)
    written = read_particles(tmp_path / "out/particles.star")
    listed = read_particles(tmp_path / "list.star", require_volumes=False)
    tilts = TiltFiles(tmp_path / "tilts.star")
    boxes, _, left_out = cut_from_tomograms(listed, box, tmp_path, edge=edge, tilts=tilts, ctf=kind)
    assert [name for name, _ in left_out] == (["tomo_1/3"] if edge == "skip" else []) and len(boxes) == len(written)
    assert boxes.premultiplied == (kind == "multiplied") and boxes.pixel_size_angst == 3
    assert len(set(map(str, boxes.voxels_from))) == len(boxes)  # what a worker knows a particle by
    np.testing.assert_allclose(boxes.poses.shifts_angst, written.poses.shifts_angst, atol=1e-6)
    reader = ParticleReader(Grid(box, box, 3.0), ParticleMask(box / 3, 2.0))
    for row, (source, weight) in enumerate(zip(boxes.voxels_from, boxes.weight_paths, strict=True)):
        volume = np.empty((box,) * 3, np.float32)
        reader.read_raw("a", source, volume, weight)
        np.testing.assert_array_equal(volume, mrcfile.read(written.volume_paths[row]))
        np.testing.assert_array_equal(reader.read_weight(weight), read_weight_volume(written.weight_paths[row], box))
    distinct = len({str(weight) for weight in boxes.weight_paths})
    assert distinct == len(set(written.weight_paths)) and (distinct > 1) == (kind != "none")


def test_lists_come_back_as_they_were(tmp_path, planted):
    """A Dynamo table, whose shifts count voxels that only the option knows, and a list without pixel size; each is one for the next run."""
    before = read_particles(planted.list, require_volumes=False)
    shifts = np.random.default_rng(3).uniform(-9, 9, (16, 3))
    moved = replace(before, poses=replace(before.poses, shifts_angst=shifts), pixel_size_angst=planted.pixel)
    places = before.coordinates.as_voxels() - shifts / planted.pixel
    moved = replace(moved, coordinates=type(before.coordinates).in_voxels(places), source=None)
    table, bare = tmp_path / "table.tbl", tmp_path / "bare.star"
    write_particles(table, moved, to="dynamo")
    names = {**{f"rlnCoordinate{a}": places[:, i] for i, a in enumerate("XYZ")}, **{f"rlnOrigin{a}": -shifts[:, i] / 10 for i, a in enumerate("XYZ")}}
    rows = "\n".join(" ".join(["t1", *(f"{values[i]:.5f}" for values in names.values())]) for i in range(16))
    bare.write_text("data_\nloop_\n_rlnMicrographName\n" + "".join(f"_{name}\n" for name in names) + rows + "\n")
    text = table.read_text().splitlines()
    table.write_text("".join(" ".join([*line.split()[:35], "0", *line.split()[36:]]) + "\n" for line in text))  # column 36, the pixel size
    boxes = ("--tomograms", planted.folder / "t1.mrc", "--box", 24, "--edge", "pad", "--coordinate-pixel-size", planted.pixel, "--weighting", "ctf")
    for source, result in ((table, "particles.tbl"), (bare, "particles.star")):
        found = []
        for step, given in (("first", source), ("second", tmp_path / source.stem / "first" / result)):
            folder = tmp_path / source.stem / step
            folder.parent.mkdir(exist_ok=True)
            arguments = ["average", given, "-o", folder, *boxes, "--cpu-procs", 1, "--gpus", "none", "--particle-diameter", 150]
            done = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="numba-glocal")
            assert done.exit_code == 0, done.output
            found.append(read_particles(folder / result, require_volumes=False, pixel_size_angst=planted.pixel))
            np.testing.assert_allclose(
                found[-1].positions_voxels() if source is table else places + found[-1].shifts_voxels(), np.rint(planted.places), atol=2e-4
            )
            np.testing.assert_allclose(found[-1].coordinates.as_voxels(), places, atol=1e-4)
        # poses about the boxes' centres are the same whichever list they come from
        maps = [mrcfile.read(tmp_path / source.stem / step / "average.mrc") for step in ("first", "second")]
        np.testing.assert_allclose(maps[0], maps[1], atol=1e-4 * maps[0].std())


NOT_BOXES = {
    "no box": (["--tomograms", "."], "expected their size in voxels of the tomograms (--box)"),
    "no tomograms": (["--box", 16], "--box: is about particles that are cut from tomograms"),
    "tilts alone": (["--tilts", "a.tlt"], "--tilts: is about particles that are cut from tomograms"),
    "small": (["--tomograms", ".", "--box", 4], "--box: expected 8 voxels or more, found 4"),
    "ctf": (["--tomograms", ".", "--box", 16, "--ctf", "plain"], "--ctf plain: needs the defocus of each tilt"),
    "elsewhere": (["--tomograms", "no", "--box", 16], "no: no such file or folder of tomograms"),
    "large": (["--tomograms", ".", "--box", 42], "none of 1 particles can be cut: tomo_1/1: box of 42 voxels around voxel 20, 20, 20"),
    "compressed": (["--tomograms", "tomo_1.mrc.gz", "--box", 16], "tomo_1.mrc.gz: compressed; expected a plain file"),
    "a constant one": (["--tomograms", "flat.mrc", "--box", 16, "--max-bad", 0], "every value is 1"),
}


@pytest.mark.parametrize("what", NOT_BOXES)
def test_boxes_that_are_refused(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    options, part = NOT_BOXES[what]
    write_tomogram(tmp_path / "tomo_1.mrc", np.random.default_rng(0).normal(size=(40, 40, 40)))
    write_tomogram(tmp_path / "flat.mrc", np.ones((40, 40, 40)))
    (tmp_path / "tomo_1.mrc.gz").write_bytes(gzip.compress((tmp_path / "tomo_1.mrc").read_bytes()))
    many = what == "a constant one"
    write_list(tmp_path / "list.star", [[20, 20, 20]] * (4 if many else 1))
    arguments = ["align", "list.star", "-o", "out", "--particle-diameter", 60, "--cpu-procs", 1, "--gpus", "none", *options]
    done = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="numba-glocal")
    assert done.exit_code == 2 and part in done.output, done.output
    assert many or not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["none", "plain", "flipped", "multiplied"])
def test_ctf_volumes(tmp_path, kind):
    """On the middle tilt's plane the weights are that image's CTF (33: with its own exposure, whatever the order of tilts)."""
    n = 24
    write_tomogram(tmp_path / "tomo_1.mrc", np.random.default_rng(0).normal(size=(40, 40, 40)))
    (tmp_path / "tomograms.star").write_text(TOMOGRAMS)
    write_list(tmp_path / "list.star", [[19, 19, 19]])  # the tomogram's centre: defocus as it stands
    run(tmp_path / "list.star", "-o", tmp_path / "out", "--tomograms", tmp_path, "--box", n, "--tilts", tmp_path / "tomograms.star", "--ctf", kind)
    found = read_particles(tmp_path / "out/particles.star")
    weights = read_weight_volume(found.weight_paths[0], n)
    assert found.premultiplied == (kind == "multiplied")
    k = np.arange(4, n // 2 - 1)
    k2 = (k / (n * PIXEL)) ** 2
    ctf = np.sin(np.pi * 0.019687 * 25000 * k2 - 0.5 * np.pi * 2.7e7 * 0.019687**3 * k2**2 + np.arcsin(0.07))
    expected = {"none": np.ones_like(ctf), "plain": ctf, "flipped": np.abs(ctf), "multiplied": ctf**2}[kind]
    np.testing.assert_allclose(weights[0, 0, k], expected, atol=2e-3)
    # tilts of 45 degrees: the one with more exposure has less left
    near, far = weights[(-k) % n, 0, k], weights[k, 0, k]
    lower, higher = sorted([np.abs(near).sum(), np.abs(far).sum()])
    assert higher > 1.1 * lower
    # rlnTomoYTilt 45 has image x axis (cos 45, 0, sin 45)
    assert np.abs(far).sum() == lower


def test_exposure_can_be_left_out_and_tomostar_has_it(tmp_path):
    (tmp_path / "tilts").mkdir()
    (tmp_path / "tilts/tomo_1.tomostar").write_text("data_\nloop_\n_wrpMovieName\n_wrpAngleTilt\n_wrpDose\na.tif -30 60\nb.tif 0 0\nc.tif 30 30\n")
    series = TiltFiles(tmp_path / "tilts")["tomo_1.tomostar"]
    assert series.exposure.tolist() == [60, 0, 30]
    with_dose, without = (tomogram_weights(series_weight(series, 8.0, with_exposure=with_it), 24) for with_it in (True, False))
    assert with_dose.sum() < without.sum()
    with pytest.raises(GlocalError, match=r"no tilts for tomogram other; tried .*other.tlt, .*other.star"):
        TiltFiles(tmp_path / "tilts")["other"]
