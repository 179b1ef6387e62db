"""A RELION 4 list of a million rows: seconds to read and to write it, as a STAR file and as particles with new poses, and memory.

    python benchmarks/star_rows.py [--rows N] [--quick]

Each step runs in a process of its own, so that its peak memory is its own; what is written is read again and compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, environment, show, write_results

NOTES = (
    "25 columns as RELION 4 writes them, subtomogram angles included. Steps: the STAR file read; read and written as it is; the particle list read "
    "(volumes are not looked for); read and written with every pose changed. Seconds of the step alone, without start and imports, by the clock and "
    "of the processor (they differ on a machine that others use); peak memory of the whole process. One core is used."
)

_OPTICS = """
# version 30001

data_optics

loop_
_rlnOpticsGroup #1
_rlnOpticsGroupName #2
_rlnSphericalAberration #3
_rlnVoltage #4
_rlnTomoTiltSeriesPixelSize #5
_rlnCtfDataAreCtfPremultiplied #6
_rlnImageDimensionality #7
_rlnTomoSubtomogramBinning #8
_rlnImagePixelSize #9
_rlnImageSize #10
           1 opticsGroup1     2.700000   300.000000     2.620000            1            3     4.000000    10.480000           64
"""
_LABELS = (
    "CoordinateX CoordinateY CoordinateZ TomoSubtomogramRot TomoSubtomogramTilt TomoSubtomogramPsi TomoName ObjectNumber TomoParticleName "
    "RandomSubset OpticsGroup OriginXAngst OriginYAngst OriginZAngst AngleRot AngleTilt AnglePsi ImageName CtfImage GroupNumber ClassNumber "
    "NormCorrection LogLikeliContribution MaxValueProbDistribution NrOfSignificantSamples"
).split()

# one step: prints {"seconds": ..., "peak_bytes": ...} last
_STEP = """
import json, resource, sys, time
import numpy as np
from numba_glocal.io import read_particles, write_particles
from numba_glocal.io.star import read_star, write_star
from numba_glocal.geometry import rotvec_to_matrix
from numba_glocal.values import Poses
step, path, out = sys.argv[1:]
begun, cpu = time.perf_counter(), time.process_time()
if step == "read_star":
    read_star(path)
elif step == "write_star":
    document = read_star(path)
    begun, cpu = time.perf_counter(), time.process_time()
    write_star(out, document)
elif step == "read_particles":
    read_particles(path, require_volumes=False)
elif step == "write_particles":
    particles = read_particles(path, require_volumes=False)
    turn = rotvec_to_matrix(np.array([0.01, 0.02, -0.03]))
    particles = particles.with_poses(Poses(turn @ particles.poses.rotations, particles.poses.shifts_angst + 1.0))
    begun, cpu = time.perf_counter(), time.process_time()
    write_particles(out, particles)
seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def make_list(path: Path, rows: int) -> None:
    """A list as RELION 4 writes it, numbers padded with blanks."""
    with open(path, "w") as file:
        file.write(_OPTICS + "\n\n# version 30001\n\ndata_particles\n\nloop_\n")
        file.writelines(f"_rln{label} #{i}\n" for i, label in enumerate(_LABELS, 1))
        for i in range(rows):
            tomogram = f"TS_{i // 1000 + 1:03d}"
            name = f"PseudoSubtomo/job005/Subtomograms/{tomogram}/{i}"
            a = i * 0.7390851 % 360 - 180
            file.write(
                f"{i % 3700:12.6f} {i % 3800:12.6f} {i % 1200:12.6f} {a:12.6f} {abs(a):12.6f} {-a:12.6f} {tomogram} {i % 7:12d} {tomogram}/{i:<9d} "
                f"{1 + i % 2:12d} {1:12d} {a / 9:12.6f} {-a / 7:12.6f} {a / 5:12.6f} {-a / 2:12.6f} {abs(a / 3):12.6f} {a / 4:12.6f} "
                f"{name}_data.mrc {name}_weights.mrc {1:12d} {1:12d} {1:12.6f} {4.55e5 + i:12.6e} {0.01:12.6f} {i % 90:12d}\n"
            )


def run_step(step: str, path: Path, out: Path) -> dict[str, Any]:
    """One step in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _STEP, step, str(path), str(out)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def same_tokens(first: Path, second: Path) -> bool:
    """Whether two lists hold the same rows, whatever blanks stand between the tokens."""
    with open(first) as one, open(second) as other:
        rows = (
            [line.split() for line in file if len(line.split()) == len(_LABELS)]  # the rows of the particles; no other line has as many tokens
            for file in (one, other)
        )
        return next(rows) == next(rows)


def main(arguments: list[str] | None = None, results: Path = RESULTS) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="A list of 2,000 rows.")
    options = parser.parse_args(arguments)
    count = 2000 if options.quick else options.rows
    about = environment()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "particles.star", Path(name) / "out.star"
        make_list(path, count)
        for step in ("read_star", "write_star", "read_particles", "write_particles"):
            measured = run_step(step, path, out)
            rows.append(
                {
                    "step": step,
                    "rows": count,
                    "file_bytes": path.stat().st_size,
                    "seconds": measured["seconds"],
                    "cpu_seconds": measured["cpu_seconds"],
                    "peak_gib": measured["peak_bytes"] / 2**30,
                }
            )
            show(rows[-1:])
            if step == "write_star" and count <= 100_000:
                rows[-1]["same_tokens"] = same_tokens(path, out)
    write_results("star_rows", rows, about, NOTES, results)


if __name__ == "__main__":
    main()
