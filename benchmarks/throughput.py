"""Search throughput of the CUDA backend over boxes, bands and shift windows, beside ceilings of the same GPU and one rotation at a time in CuPy.

    python benchmarks/throughput.py [--quick] [--cpu] [--seconds 150] [-o FOLDER]

All steps of a search from spectra on the device to the best pose, as `cuda_steps.py` times them (turned columns, products or lines over all
shifts, den2, scores, choice; templates shared by the particles). The loop beside it is our own and does what a straightforward program does for
each particle and rotation: turn the reference, transform, multiply with the particle, transform back, take the largest value.
`--cpu` runs that loop in NumPy on a small box, to see that it works.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, environment, need_gpus, show, write_results

from numba_glocal.backends import lines
from numba_glocal.fourier import padded_offset
from numba_glocal.geometry import rotvec_to_matrix
from numba_glocal.sampling import local_rotations, uniform_rotations

Measured = dict[str, Any]

# box, band (1 / box), radius of the shift window in voxels
LOCAL = (
    (64, 20, 4.0),
    (64, 12, 4.0),
    (64, 30, 4.0),
    (64, 20, 2.0),
    (64, 20, 6.0),
    (32, 14, 4.0),
    (48, 15, 4.0),
    (48, 22, 4.0),
    (96, 30, 4.0),
    (128, 40, 5.0),
    (96, 44, 4.0),
    (128, 20, 4.0),
    (32, 8, 4.0),
    (128, 60, 4.0),
)
GLOBAL = ((64, 8, 6.0), (128, 8, 10.0))
BOXES = (32, 48, 64, 96, 128)
ROTATIONS = 343
PARTICLES = 2000
SPECTRA_BYTES = 24e9

NOTES = (
    "us_per_particle_and_rotation: everything from spectra on the device to the best pose, all trial shifts included."
    " parts_us: device time per particle of each kernel of the search by products. Shares: of product and den2 the arithmetic over the time and the"
    " rate of a 8192^3 product by cuBLAS in the same run (half, int8; tf32 for den2); of line its floating-point instructions over the measured"
    " multiply-add rate; of the others the bytes that must be read and written (turn: the band's ball of the spectrum and the columns; templates or"
    " columns: the shifted ones; best_of_tile: the product; scores, choice: a number each rotation) over the copy bandwidth. Arrays that lie in the"
    " cache (scores, choice) can exceed it."
    " 'one rotation' rows: the CuPy loop, for every shift of the box, one particle and rotation at a time."
)


def local_list(count: int) -> np.ndarray:
    """`count` distinct rotations near the identity."""
    shells = next(shells for shells in range(1, 20) if len(local_rotations(4.0, shells)) >= count or shells > 8)
    rotations = local_rotations(4.0, shells)
    rotations = np.concatenate([rotations] * (-(-count // len(rotations))))[:count].copy()
    rotations[1:] = rotations[1:] @ rotvec_to_matrix(np.random.default_rng(3).normal(size=(count - 1, 3)) * 0.01)
    return rotations


def spectrum_floats(k_max: int) -> int:
    """Size of a particle's padded, band-cropped spectrum."""
    c = padded_offset(k_max)
    return 2 * (2 * c + 1) ** 2 * (c + 1)


def particles_for(k_max: int) -> int:
    """As many as are wanted, and fit."""
    return int(max(64, min(PARTICLES, SPECTRA_BYTES // (4 * spectrum_floats(k_max)) // 64 * 64)))


def shares(row: Measured, ceilings: Measured) -> Measured:
    """How near each kernel of a row of `cuda_steps.case` comes to what this GPU can do.

    Bytes are those of arrays read or written once, arithmetic is that of the band's samples without padding. By precision, so that each stands
    beside the others of its search; ``fp32`` is that of the line kernel.
    """
    pairs, rotations, shifts = lines.line_band(float(row["k_max"])).n_pairs, row["rotations"], row["shifts"]
    operations = 2.0 * rotations * shifts * 4 * pairs
    # of the cube that is held, the ball of the band is read
    per_particle = {"turn": 4 * spectrum_floats(row["k_max"]) * math.pi / 6.0 + 24 * pairs, "scores": 12 * rotations, "choice": 4 * rotations}
    shared = {name: moved / row["per_particle_us"][name] * 1e-6 / ceilings["copy_tb_s"] for name, moved in per_particle.items()}
    if "gemm_tf32_tflop_s" in ceilings:
        shared["den2"] = 2.0 * rotations * 2 * pairs / row["per_particle_us"]["den2"] * 1e-6 / ceilings["gemm_tf32_tflop_s"]
    found: Measured = {}
    for precision, parts in row["parts_us"].items():
        number, rate = {"half": (2, "gemm_half_tflop_s"), "int8": (1, "gemm_int8_top_s")}[precision]
        shifted = "columns" if "particles shifted" in row["search_way"][precision] else "templates"
        rows = 1.0 if shifted == "columns" else rotations / row["batch"]
        moved = {shifted: number * 4 * pairs * rows * shifts, "best_of_tile": 4.0 * rotations * shifts}
        found[precision] = shared | {name: moved[name] / parts[name] * 1e-6 / ceilings["copy_tb_s"] for name in moved}
        found[precision]["product"] = operations / parts["product"] * 1e-6 / ceilings[rate]
    found["fp32"] = {"line": row["search_fp32_tinstructions_s"] / (0.5 * ceilings["fp32_tflop_s"])}
    return found


def gemm_rates() -> Measured:
    """cuBLAS on 8192^3 numbers that are not zeros: half precision with single-precision sums, whole numbers, and single rounded to tf32."""
    from cuda_steps import milliseconds
    from numba import cuda

    from numba_glocal.backends.cuda import gemm

    found: Measured = {}
    n = 8192
    noise = np.random.default_rng(0).normal(size=n * n)
    kinds = {"gemm_half_tflop_s": (noise.astype(np.float16), np.float32)} if gemm.available() else {}
    if gemm.eight_available():
        kinds["gemm_int8_top_s"] = np.clip(np.rint(30 * noise), -127, 127).astype(np.int8), np.int32
    for name, (block, kind) in kinds.items():
        a, b, out = cuda.to_device(block), cuda.to_device(block[::-1].copy()), cuda.device_array(n * n, kind)
        found[name] = 2.0 * n**3 / milliseconds(lambda a=a, b=b, out=out: gemm.product_narrow(a, b, out, n, n, n)) / 1e9
    if gemm.available():
        wide, sums = cuda.to_device(noise.astype(np.float32).reshape(n, n)), cuda.device_array((n, n), np.float32)
        found["gemm_tf32_tflop_s"] = 2.0 * n**3 / milliseconds(lambda: gemm.product(wide, wide, sums, n, n, n, True)) / 1e9
    return found


# --- one rotation at a time -----------------------------------------------------------------------------------------------------------------


def one_rotation_at_a_time(
    xp: Any, turn: Callable[[Any, np.ndarray, np.ndarray], Any], reference: Any, particle: Any, weight: Any, rotations: np.ndarray
) -> tuple[int, Any]:
    """Best rotation of a particle, and the place of the largest correlation, by the loop described above.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    turn : callable
        ``turn(volume, matrix, offset)``, trilinear.
    reference, particle : (n, n, n) float32
    weight : (n, n, n // 2 + 1) float32
        Missing wedge.
    rotations : (r, 3, 3)
    """
    n = reference.shape[0]
    conjugate = xp.conj(xp.fft.rfftn(particle)) * weight
    centre = np.full(3, n // 2, np.float64)
    values, places = xp.empty(len(rotations), xp.float32), xp.empty(len(rotations), xp.int64)
    for r, rotation in enumerate(rotations):
        matrix = np.ascontiguousarray(rotation.T[::-1, ::-1])  # R^-1, axes z, y, x
        spectrum = xp.fft.rfftn(turn(reference, matrix, centre - matrix @ centre)) * weight
        scale = xp.sqrt(xp.sum(spectrum.real**2 + spectrum.imag**2))
        correlation = xp.fft.irfftn(spectrum * conjugate, s=(n, n, n), axes=(0, 1, 2)).ravel()
        places[r] = xp.argmax(correlation)
        values[r] = correlation[places[r]] / scale
    best = int(xp.argmax(values))
    return best, places[best]


def loop_row(box: int, on_gpu: bool, rotations: np.ndarray, seconds: float = 3.0) -> Measured:
    """Microseconds of the loop for a particle and rotation; it must find the rotation that the particle was made with."""
    from scipy import ndimage as cpu_ndimage

    rng = np.random.default_rng(5)
    reference = cpu_ndimage.gaussian_filter(rng.normal(size=(box,) * 3), box / 24.0).astype(np.float32)
    zyx = np.indices((box,) * 3) - box // 2
    reference *= (zyx**2).sum(0) < (0.4 * box) ** 2
    wanted = len(rotations) // 2
    matrix, centre = rotations[wanted].T[::-1, ::-1], np.full(3, box // 2)
    particle = cpu_ndimage.affine_transform(reference, matrix, centre - matrix @ centre, order=1)
    from numba_glocal.wedge import tilt_range_weights

    weight = np.asarray(tilt_range_weights(box, -60.0, 60.0), np.float32)
    xp: Any
    if on_gpu:
        import cupy as xp
        from cupyx.scipy import ndimage

        reference, particle, weight = xp.asarray(reference), xp.asarray(particle), xp.asarray(weight)

        def finish() -> None:
            xp.cuda.Device().synchronize()

        def textured(volume: Any, matrix: np.ndarray, offset: np.ndarray) -> Any:
            homogeneous = np.eye(4, dtype=np.float32)  # of the volume's type
            homogeneous[:3, :3], homogeneous[:3, 3] = matrix, offset
            return ndimage.affine_transform(volume, xp.asarray(homogeneous), order=1, texture_memory=True)

        def plain(volume: Any, matrix: np.ndarray, offset: np.ndarray) -> Any:
            return ndimage.affine_transform(volume, xp.asarray(matrix), offset, order=1)

        ways = {"texture": textured, "affine_transform": plain}
    else:
        xp = np

        def finish() -> None:
            pass

        ways = {"affine_transform": lambda volume, matrix, offset: cpu_ndimage.affine_transform(volume, matrix, offset, order=1)}
    row: Measured = {"benchmark": "one rotation", "box": box, "on": "GPU, CuPy" if on_gpu else "CPU, NumPy"}
    for name, turn in ways.items():
        try:
            best, _ = one_rotation_at_a_time(xp, turn, reference, particle, weight, rotations)
            found = best == wanted
            finish()
            begun, passes = time.perf_counter(), 0
            while passes == 0 or time.perf_counter() - begun < seconds / len(ways):
                one_rotation_at_a_time(xp, turn, reference, particle, weight, rotations)
                finish()
                passes += 1
            row[f"{name}_us_per_particle_and_rotation"] = 1e6 * (time.perf_counter() - begun) / passes / len(rotations)
            row[f"{name}_finds_it"] = found
        except Exception as problem:  # another CuPy, or no compiler for its kernels: said, not hidden
            row[f"{name}_problem"] = f"{type(problem).__name__}: {problem}"[:300]
    return row


# --- all ------------------------------------------------------------------------------------------------------------------------------------


def on_the_gpu(quick: bool, seconds: float) -> Iterator[Measured]:
    """Rows of the CUDA backend, the most telling first; what does not fit into the time is said."""
    import cuda_steps

    begun = time.perf_counter()
    ceilings: Measured = dict(cuda_steps.ceilings()) | gemm_rates()
    yield {"benchmark": "ceilings", "device": cuda_steps.device_name(), **ceilings}
    rotations = local_list(ROTATIONS)
    wanted = [("local", *entry) for entry in (LOCAL[:2] if quick else LOCAL)]
    wanted[2:2] = [("global", *entry) for entry in GLOBAL[: 1 if quick else None]]
    for number, (kind, box, k_max, window) in enumerate(wanted):
        if time.perf_counter() - begun > seconds:
            yield {"benchmark": "left out", "cases": [list(entry) for entry in wanted[number:]]}
            return
        angles = rotations if kind == "local" else uniform_rotations(4608)
        row = cuda_steps.case(box, k_max, angles, window, particles_for(k_max), kind == "global")
        del row["agreement"], row["decided"]
        yield {"benchmark": kind, "window_voxels": window, **row, "shares": shares(row, ceilings)}


def measured(on_cpu: bool, quick: bool, seconds: float) -> Iterator[Measured]:
    """All rows."""
    if on_cpu:
        yield loop_row(16, False, local_list(27), 0.5)
        return
    # the loop first: CuPy's pool is given back before the backend takes what is free
    try:
        import cupy
    except ImportError as problem:
        yield {"benchmark": "one rotation", "problem": f"CuPy is not installed: {problem}"}
    else:
        for box in (64,) if quick else BOXES:
            yield loop_row(box, True, local_list(ROTATIONS))
        cupy.get_default_memory_pool().free_all_blocks()
    yield from on_the_gpu(quick, seconds)


def main(arguments: list[str] | None = None) -> None:
    """Runs all and writes ``throughput.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three cases and one box of the loop")
    parser.add_argument("--cpu", action="store_true", help="the loop in NumPy only")
    parser.add_argument("--seconds", type=float, default=130.0, help="no further case is begun after this")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if not options.cpu:
        need_gpus()
    about = environment()
    rows: list[Measured] = []
    path = Path()
    for row in measured(options.cpu, options.quick, options.seconds):
        show([row])
        rows.append(row)
        path = write_results("throughput", rows, about, NOTES, options.output)  # what was measured stays, should a time limit end the rest
    print(path)


if __name__ == "__main__":
    main()
