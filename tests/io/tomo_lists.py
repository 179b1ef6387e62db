"""An object without symmetry, RELION 4 lists of it, and RELION's rules written out by hand; for the tests of lists."""

from __future__ import annotations

from pathlib import Path

import gemmi
import mrcfile
import numpy as np
from silent_stage import Silent

BOX, PIXEL, SERIES_PIXEL = 20, 8.0, 2.0
# an object without symmetry, not even a mirror plane: (x, y, z) in Angstrom and mass
BLOBS = np.array([[0.0, 0, 0], [26, 5, -3], [-4, 30, 7], [8, -9, 33], [-18, -14, -6]])
MASSES = np.array([1.0, 2.0, 1.4, 0.8, 1.7])


def rz(deg):
    c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def ry(deg):
    c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def euler(rot, tilt, psi):
    """RELION's matrix from its definition: it carries the reference's axes onto the particle's."""
    return (rz(rot) @ ry(tilt) @ rz(psi)).T


def blobs_at(points_angst, box=BOX, pixel=PIXEL):
    """A volume ``[z, y, x]`` of Gaussian blobs; the centre is voxel ``box // 2``."""
    axis = (np.arange(box) - box // 2) * pixel
    z, y, x = np.meshgrid(axis, axis, axis, indexing="ij")
    volume = np.zeros((box, box, box))
    for (px, py, pz), mass in zip(points_angst, MASSES, strict=True):
        volume += mass * np.exp(-((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) / (2 * 10.0**2))
    return volume.astype(np.float32)


def rendered(rotation, shift_angst):
    """The object at a pose of docs/conventions.md, 1: ``particle(v) = reference(R^-1 (v - s))``."""
    return blobs_at(BLOBS @ np.asarray(rotation).T + np.asarray(shift_angst))


def alike(a, b):
    return np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]


def save(path: Path, volume, pixel=PIXEL):
    path.parent.mkdir(parents=True, exist_ok=True)
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(np.asarray(volume, np.float32))
        file.voxel_size = pixel


def table(name, columns):
    rows = "".join("  ".join(row) + "\n" for row in zip(*columns.values(), strict=True))
    return f"\n# version 50001\n\ndata_{name}\n\nloop_\n" + "".join(f"_{label} #{i + 1}\n" for i, label in enumerate(columns)) + rows + "\n"


def of_cif(path, label, block="particles"):
    return list(gemmi.cif.read(str(path)).find_block(block).find_values(f"_{label}"))


def numbers(path, *labels, block="particles"):
    return np.array([of_cif(path, label, block) for label in labels], dtype=float).T


ANGLES = ("rlnAngleRot", "rlnAngleTilt", "rlnAnglePsi")
SUBTOMOGRAM = ("rlnTomoSubtomogramRot", "rlnTomoSubtomogramTilt", "rlnTomoSubtomogramPsi")
ORIGINS = ("rlnOriginXAngst", "rlnOriginYAngst", "rlnOriginZAngst")
PLACES = ("rlnCoordinateX", "rlnCoordinateY", "rlnCoordinateZ")
CENTRED = ("rlnCenteredCoordinateXAngst", "rlnCenteredCoordinateYAngst", "rlnCenteredCoordinateZAngst")

# subtomogram angles, particle angles, origins: general ones, and gimbal lock in either and in both
CASES = [
    ((20.0, 50.0, -70.0), (130.0, 80.0, 15.0), (6.0, -9.0, 12.0)),
    ((-35.0, 0.0, 80.0), (40.0, 100.0, -20.0), (0.0, 10.0, 0.0)),
    ((60.0, 180.0, 10.0), (-110.0, 65.0, 33.0), (-8.0, 0.0, 5.0)),
    ((75.0, 120.0, 140.0), (25.0, 0.0, 50.0), (7.0, 7.0, -7.0)),
    ((-150.0, 40.0, 5.0), (95.0, 180.0, -60.0), (0.0, 0.0, 0.0)),
    ((10.0, 180.0, 20.0), (-45.0, 180.0, 80.0), (4.0, -4.0, 9.0)),
    ((0.0, 0.0, 0.0), (30.0, 60.0, 90.0), (-5.0, 5.0, 5.0)),
    ((10.0, 90.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, -11.0)),
]


def relion4_list(path: Path, cut_by_relion: bool, cases=CASES):
    n = len(cases)
    optics = {
        "rlnOpticsGroup": ["1"],
        "rlnOpticsGroupName": ["opticsGroup1"],
        "rlnSphericalAberration": ["2.700000"],
        "rlnVoltage": ["300.000000"],
        "rlnTomoTiltSeriesPixelSize": [f"{SERIES_PIXEL:.6f}"],
        "rlnCtfDataAreCtfPremultiplied": ["1" if cut_by_relion else "0"],
        "rlnImageDimensionality": ["3"],
        "rlnTomoSubtomogramBinning": ["4.000000"],
        "rlnImagePixelSize": [f"{PIXEL:.6f}"],
        "rlnImageSize": [str(BOX)],
    }
    columns = {
        **{label: [f"{100.5 + 10 * i + axis:.6f}" for i in range(n)] for axis, label in enumerate(PLACES)},
        **{label: [f"{case[0][axis]:.5f}" for case in cases] for axis, label in enumerate(SUBTOMOGRAM)},
        "rlnTomoName": [("01", "12e3")[i % 2] for i in range(n)],
        "rlnTomoParticleName": [f"{('01', '12e3')[i % 2]}/{i}" for i in range(n)],
        "rlnRandomSubset": [str(1 + i % 2) for i in range(n)],
        "rlnOpticsGroup": ["1"] * n,
        **{label: [f"{case[2][axis]:.6f}" for case in cases] for axis, label in enumerate(ORIGINS)},
        **{label: [f"{case[1][axis]:.6f}" for case in cases] for axis, label in enumerate(ANGLES)},
        "rlnImageName": [f"sub/{i}_data.mrc" for i in range(n)],
        "rlnLCCmax": [("0.10", "1e-3", "007", "4", "5.5")[i % 5] for i in range(n)],
        "rlnClassNumber": ["1"] * n,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table("optics", optics) + table("particles", columns))
    return path


def in_tomogram(sub, part, origin):
    """RELION 4's own way from the reference to the tomogram, about the box's centre: the object as it lies in the tomogram."""
    return blobs_at((BLOBS @ euler(*part).T - np.array(origin)) @ euler(*sub).T)


def average_of(path, output, **options):
    """What `average` makes of a list, within this process."""
    from numba_glocal.execution.executors import make_executor
    from numba_glocal.execution.tasks import start_worker
    from numba_glocal.job import prepare_job
    from numba_glocal.refinement import average_run
    from numba_glocal.results import RunFolder
    from numba_glocal.settings import AverageSettings

    settings = AverageSettings(str(path), str(output), normalise=False, weighting="ctf", **options)
    job, folder = prepare_job(settings), RunFolder(output)
    folder.create(settings, [])
    with make_executor(0, initializer=start_worker) as executor:
        average_run(job, executor, folder, Silent)
    with mrcfile.open(output / "average.mrc") as file:
        return np.array(file.data)
