"""RELION's programs as judges: its reconstruction from the same list, and whether it reads what we write."""

from __future__ import annotations

import shutil
import subprocess

import gemmi
import mrcfile
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

pytestmark = pytest.mark.relion


def relion_run(program, *arguments, cwd):
    done = subprocess.run([program, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def agreement(tools, ours, theirs, radius):
    a, b = tools.read_map(ours), tools.read_map(theirs)
    n = a.shape[0]
    return tools.shell_correlation(a, b, tools.soft_sphere(n, radius))[1 : int(0.8 * n / 2) + 1]


@pytest.fixture(scope="module")
def real_for_relion(shared, tmp_path_factory):
    """The real particles as RELION 3.1 wants them: no float16."""
    folder = tmp_path_factory.mktemp("real32")
    for path in (shared / "data" / "real-70s").glob("Unt_*.mrc"):
        with mrcfile.open(path, permissive=True) as source, mrcfile.new(folder / path.name) as copy:
            copy.set_data(np.asarray(source.data, np.float32))
            copy.voxel_size = 12.0
    shutil.copy(shared / "data" / "real-70s" / "particles.star", folder)
    return folder


@pytest.mark.parametrize("normalise", [True, False])
def test_reconstruction_of_made_particles(planted, relion, average_here, tools, tmp_path, normalise):
    options = ["--i", "truth.star", "--o", tmp_path / "relion.mrc", "--3d_rot", "--ctf", "--skip_gridding"]
    relion_run("relion_reconstruct", *options, cwd=planted)
    average_here(planted / "truth.star", tmp_path / "run", weighting="ctf", particle_diameter_angst=360.0, normalise=normalise)
    assert agreement(tools, tmp_path / "run" / "average.mrc", tmp_path / "relion.mrc", 19).min() >= 0.99  # seen: 0.994


def test_reconstruction_of_each_half(planted, relion, average_here, tools, tmp_path):
    """Halves are the halves of the list; a mixed-up one would agree only where the signal is strong."""
    average_here(planted / "truth.star", tmp_path / "run", weighting="ctf", particle_diameter_angst=360.0)
    values = {}
    for ours in (1, 2):
        for theirs in (1, 2):
            options = ["--i", "truth.star", "--o", tmp_path / f"relion{theirs}.mrc", "--3d_rot", "--ctf", "--skip_gridding", "--subset", theirs]
            relion_run("relion_reconstruct", *options, cwd=planted)
            values[ours, theirs] = agreement(tools, tmp_path / "run" / f"half{ours}.mrc", tmp_path / f"relion{theirs}.mrc", 19)[13:17].mean()
    assert min(values[1, 1], values[2, 2]) > 0.98 > 0.7 > max(values[1, 2], values[2, 1])


def test_reconstruction_of_real_particles(real_for_relion, relion, command, tools, tmp_path):
    options = ["--i", "particles.star", "--o", tmp_path / "relion.mrc", "--3d_rot", "--ctf", "--skip_gridding", "--angpix", 12]
    relion_run("relion_reconstruct", *options, cwd=real_for_relion)
    command("average", real_for_relion / "particles.star", "-o", tmp_path / "run", "--weighting", "ctf")
    assert agreement(tools, tmp_path / "run" / "average.mrc", tmp_path / "relion.mrc", 13).min() >= 0.99  # seen: 0.993


def test_relion_reads_our_list(planted, planted_run, relion, tools, tmp_path):
    """Our poses, scores and uncertainties beside the columns of the input: RELION averages from them what we average."""
    for name in ("subtomo", "truth.mrc"):
        (tmp_path / name).symlink_to(planted / name)
    shutil.copy(planted_run / "particles.star", tmp_path)
    relion_run("relion_reconstruct", "--i", "particles.star", "--o", "relion.mrc", "--3d_rot", "--ctf", "--skip_gridding", cwd=tmp_path)
    correlation = agreement(tools, planted_run / "average.mrc", tmp_path / "relion.mrc", 19)
    assert correlation[:8].min() > 0.995  # beyond, our noise weights differ from RELION's; seen: 0.9992
    relion_run("relion_star_handler", "--i", "particles.star", "--o", "handled.star", cwd=tmp_path)
    ours, theirs = (gemmi.cif.read(str(tmp_path / name)).find_block("particles") for name in ("particles.star", "handled.star"))
    for label in ("_rlnImageName", "_rlnRandomSubset", "_rlnMicrographName"):
        assert list(ours.find_values(label)) == list(theirs.find_values(label)), label
    for label in ("_rlnAngleRot", "_rlnAngleTilt", "_rlnAnglePsi", "_rlnOriginXAngst", "_rlnLogLikeliContribution", "_ngScore"):
        values = [np.array([float(v) for v in block.find_values(label)]) for block in (ours, theirs) if block.find_values(label)]
        assert np.allclose(values[0], values[-1], rtol=1e-5, atol=2e-5), label


def as_relion_4(source, path):
    """The list `source` in RELION 4's terms: random subtomogram angles A, and R = A R', s = A s' split between the two sets of angles."""
    document = gemmi.cif.read(str(source))
    table = document.find_block("particles").find_loop("_rlnImageName").get_loop()
    tags, width = list(table.tags), len(table.tags)
    rows = [dict(zip(tags, table.values[i : i + width], strict=True)) for i in range(0, len(table.values), width)]
    angles = [[float(row[f"_rlnAngle{a}"]) for a in ("Rot", "Tilt", "Psi")] for row in rows]
    shifts = -np.array([[float(row[f"_rlnOrigin{a}Angst"]) for a in "XYZ"] for row in rows])
    # RELION's matrix is the inverse of Rz(rot) Ry(tilt) Rz(psi)
    rotations = Rotation.from_euler("ZYZ", angles, degrees=True).inv()
    axes = Rotation.random(len(rows), random_state=8)
    inner = (axes.inv() * rotations).inv().as_euler("ZYZ", degrees=True)
    outer = axes.inv().as_euler("ZYZ", degrees=True)
    origins = -axes.inv().apply(shifts)
    columns = {
        "rlnTomoName": [row["_rlnMicrographName"] for row in rows],
        **{f"rlnCoordinate{a}": [row[f"_rlnCoordinate{a}"] for row in rows] for a in "XYZ"},
        **{f"rlnTomoSubtomogram{a}": [f"{v:.6f}" for v in outer[:, i]] for i, a in enumerate(("Rot", "Tilt", "Psi"))},
        **{f"rlnAngle{a}": [f"{v:.6f}" for v in inner[:, i]] for i, a in enumerate(("Rot", "Tilt", "Psi"))},
        **{f"rlnOrigin{a}Angst": [f"{v:.6f}" for v in origins[:, i]] for i, a in enumerate("XYZ")},
        **{label: [row[f"_{label}"] for row in rows] for label in ("rlnImageName", "rlnCtfImage", "rlnOpticsGroup", "rlnRandomSubset")},
    }
    optics = document.find_block("optics").find_loop("_rlnOpticsGroup").get_loop()
    lines = ["# version 30001", "", "data_optics", "", "loop_", *optics.tags, "_rlnTomoTiltSeriesPixelSize", " ".join([*optics.values, "2.0"])]
    lines += ["", "# version 30001", "", "data_particles", "", "loop_", *(f"_{label}" for label in columns)]
    lines += ["  ".join(row) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(lines) + "\n")


def test_a_relion_4_list_and_its_conversion_average_alike(planted, relion, command, average_here, tools, tmp_path):
    """Our average of a RELION 4 list, relion_reconstruct's of the RELION 3.1 list that `convert` makes of it: with CTF, to 0.8 Nyquist."""
    for name in ("subtomo", "truth.mrc"):
        (tmp_path / name).symlink_to(planted / name)
    as_relion_4(planted / "truth.star", tmp_path / "list4.star")
    command("convert", tmp_path / "list4.star", tmp_path / "list31.star", "--to", "relion31")
    options = ["--i", "list31.star", "--o", "relion.mrc", "--3d_rot", "--ctf", "--skip_gridding"]
    relion_run("relion_reconstruct", *options, cwd=tmp_path)
    average_here(tmp_path / "list4.star", tmp_path / "run", weighting="ctf", particle_diameter_angst=360.0)
    assert agreement(tools, tmp_path / "run" / "average.mrc", tmp_path / "relion.mrc", 19).min() >= 0.99  # seen: 0.994
    # and both are the structure: without the first rotation nothing of it is left
    truth = agreement(tools, tmp_path / "run" / "average.mrc", planted / "truth.mrc", 19)
    assert truth[:8].min() > 0.98
    text = (tmp_path / "list4.star").read_text().replace("_rlnTomoSubtomogram", "_lost")
    (tmp_path / "lost.star").write_text(text)
    average_here(tmp_path / "lost.star", tmp_path / "lost", weighting="ctf", particle_diameter_angst=360.0)
    assert agreement(tools, tmp_path / "lost" / "average.mrc", planted / "truth.mrc", 19)[3:8].mean() < 0.3
