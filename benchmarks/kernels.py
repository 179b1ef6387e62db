"""One core: kernels against the prototype's, the search against rotate-and-transform, against matrix products, and against transforms of the band.

    python benchmarks/kernels.py [--quick]

Everything that is compared runs in turn in the same process on one core; ratios are of minima.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyfftw
from common import RESULTS, compare, environment, need_shared, pin_to_one_core, prototype_functions, shared_folder, show, write_results
from numpy.typing import NDArray
from scipy.ndimage import affine_transform

from numba_glocal.backends import interpolation as kernels
from numba_glocal.backends import lines
from numba_glocal.backends.cpu import CPUBackend, CPUSearchSession
from numba_glocal.backends.protocols import Grid, ParticleBatch, ParticleMask, SearchLevel, SearchSetup, as_candidates
from numba_glocal.fourier import PAD, grid_band, padded_offset, padded_spectrum
from numba_glocal.geometry import angle_between_deg, rotvec_to_matrix
from numba_glocal.masks import spherical_mask
from numba_glocal.noise import NoiseModel
from numba_glocal.phantom import render_phantom

PIXEL_ANGST = 6.8
CHUNK = 125
"""Particles that are searched together; a run uses chunks of up to 128."""

Measured = dict[str, Any]


def small_rotations(increment_deg: float, reach: int) -> NDArray[np.float64]:
    """A cube of (2 reach + 1)^3 rotation vectors."""
    axis = np.arange(-reach, reach + 1) * np.radians(increment_deg)
    return rotvec_to_matrix(np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3))


def ratio_rows(benchmark: str, seconds: dict[str, Measured], **facts: Any) -> list[Measured]:
    """One row a variant, with how many times the first one is faster than it."""
    ours = next(iter(seconds.values()))["min_s"]
    return [{"benchmark": benchmark, "variant": name, **facts, **times, "ours_faster": times["min_s"] / ours} for name, times in seconds.items()]


def turned_by(rotation: NDArray[np.float64]) -> NDArray[np.float32]:
    """A rotation for the prototype, whose axes run z, y, x."""
    return np.ascontiguousarray(rotation[::-1, ::-1], np.float32)


# -- kernels against the prototype's ---------------------------------------------------------------------------------------


def prototype_kernels(shared: Path, box: int = 64, k_max: int = 29, repeats: int = 30) -> list[Measured]:
    """Gather, normal equations and insertion: the same samples, spectrum and pose for both; results are compared, too."""
    theirs = prototype_functions(shared, ("smp", "gather", "normal_eq", "insert"))
    rng = np.random.default_rng(1)
    reference = render_phantom(box, PIXEL_ANGST).astype(np.float32)
    c = padded_offset(k_max)
    spectrum = padded_spectrum(reference, k_max)
    flat = spectrum.view(np.float32).ravel()
    rotation = rotvec_to_matrix(np.array([0.3, -0.5, 0.8]))
    matrix, matrix_zyx = rotation.astype(np.float32), turned_by(rotation)
    points = grid_band(box, float(k_max)).k
    points_zyx = np.ascontiguousarray(points[:, ::-1])
    by_radius = np.argsort((points**2).sum(1), kind="stable")  # the prototype's own order
    points_by_radius = np.ascontiguousarray(points_zyx[by_radius])
    count = len(points)
    out, out_theirs = np.empty(count, np.complex64), np.empty(count, np.complex64)
    scale = np.float32(PAD)
    facts = {"box": box, "k_max": k_max, "samples": count}

    def gather() -> None:
        kernels.gather(flat, 2 * c + 1, c, points, matrix, scale, out)

    seconds = compare(
        {
            "ours": gather,
            "prototype": lambda: theirs["gather"](spectrum, c, points_by_radius, matrix_zyx, scale, out_theirs),
            "prototype, samples in our order": lambda: theirs["gather"](spectrum, c, points_zyx, matrix_zyx, scale, out_theirs),
        },
        repeats,
    )
    _agree("gather", out, out_theirs, 1e-4)
    rows = ratio_rows("gather", seconds, **facts)

    # normal equations: signal, weights and a pose a little off
    ctf = rng.uniform(0.1, 1.0, count).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, count).astype(np.float32)
    data = (ctf * out * (1 + 0.1 * rng.normal(size=count))).astype(np.complex64)
    shift = np.array([0.7, -1.3, 0.4])
    tables = np.empty((3, 2 * (box // 2) + 1), np.complex64)
    scratch, sums = np.zeros(kernels.SCRATCH_SIZE, np.float32), np.zeros(kernels.N_SUMS)
    hessian, gradient = np.zeros((6, 6)), np.zeros(6)
    cost = [0.0]

    def normal_equations() -> None:
        kernels.phase_tables(shift * (2.0 * np.pi / box), box // 2, tables)
        kernels.normal_equations(flat, 2 * c + 1, c, points, matrix, tables, scale, data, ctf, weight, scratch, sums)

    def normal_equations_theirs(at: NDArray[np.float32], order: Any) -> Any:
        x, t, w = data[order], ctf[order], weight[order]

        def run() -> None:
            cost[0] = theirs["normal_eq"](spectrum, c, at, matrix_zyx, shift[::-1].copy(), x, t, w, box, hessian, gradient)

        return run

    seconds = compare(
        {
            "ours": normal_equations,
            "prototype": normal_equations_theirs(points_by_radius, by_radius),
            "prototype, samples in our order": normal_equations_theirs(points_zyx, slice(None)),
        },
        repeats,
    )
    whole = float((weight * np.abs(data) ** 2).sum(dtype=np.float64))
    _agree("normal equations", np.array(whole - 2.0 * sums[27] + sums[28]), np.array(cost[0]), 1e-3)
    rows += ratio_rows("normal equations", seconds, **facts)

    # insertion
    rows_, columns = 2 * c + 1, c + 2
    grid = np.zeros(rows_ * rows_ * columns * 4, np.float32)
    numerator, denominator = np.zeros((rows_, rows_, columns), np.complex128), np.zeros((rows_, rows_, columns))
    points64, matrix64 = points_by_radius.astype(np.float64), rotation[::-1, ::-1].copy()
    data128, weight64 = data[by_radius].astype(np.complex128), weight[by_radius].astype(np.float64)
    seconds = compare(
        {
            "ours": lambda: kernels.insert(grid, rows_, c, points, matrix, scale, data, weight),
            "prototype": lambda: theirs["insert"](numerator, denominator, points64, matrix64, data128, weight64, c),
        },
        repeats,
    )
    ours = grid.reshape(rows_, rows_, columns, 4)
    _agree("insert", ours[..., 0] + 1j * ours[..., 1], numerator, 1e-3)
    return rows + ratio_rows("insert", seconds, **facts)


def _agree(what: str, a: NDArray[Any], b: NDArray[Any], tolerance: float) -> None:
    """A benchmark of two functions that compute different things would mean nothing."""
    a, b = np.asarray(a), np.asarray(b)
    if what == "gather":  # the last variant ran in our order
        difference = np.abs(a - b).max() / np.abs(b).max()
    else:
        difference = np.linalg.norm(a - b) / np.linalg.norm(b)
    if not difference < tolerance:
        raise AssertionError(f"{what}: results differ by {difference:.2g} of the largest; expected at most {tolerance:g}")


# -- the search ------------------------------------------------------------------------------------------------------------


class SearchProblem:
    """Noisy particles around a phantom, and the session that searches them.

    Weights are one everywhere: nothing is missing, so no sample is skipped.
    """

    def __init__(self, box: int, k_max: float, n_particles: int, seed: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self.box, self.k_max = box, k_max
        self.reference = render_phantom(box, PIXEL_ANGST).astype(np.float32)
        self.grid, self.mask = Grid(box, box, 1.0), ParticleMask(0.36 * box, 4.0)
        weight = np.ones((box, box, box // 2 + 1), np.float32)
        different = min(8, n_particles)
        self.true_rotations = rotvec_to_matrix(rng.uniform(-0.12, 0.12, (different, 3)))[np.arange(n_particles) % different]
        self.true_shifts = rng.uniform(-2.0, 2.0, (different, 3))[np.arange(n_particles) % different]
        clean = [
            render_phantom(box, PIXEL_ANGST, self.true_rotations[i], self.true_shifts[i] * PIXEL_ANGST).astype(np.float32) for i in range(different)
        ]
        deviation = 2.0 * float(self.reference.std())

        def read(i: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
            noise = np.random.default_rng(seed + i).standard_normal((box,) * 3, dtype=np.float32)
            return clean[i % different] + np.float32(deviation) * noise, weight

        self.read = read
        self.n_particles = n_particles
        noise = NoiseModel(np.full(box // 2 + 1, deviation**2 * box**3))
        self.setup = SearchSetup(self.grid, self.reference, self.mask, noise, "ml", 0.0, float(k_max))

    def session(self) -> CPUSearchSession:
        """A new session; nothing is cached."""
        return CPUBackend(0).open_search(self.setup)

    def load(self, session: CPUSearchSession, first: int, count: int) -> None:
        """Makes some of the particles ready."""
        session.load(ParticleBatch(tuple(str(i) for i in range(first, first + count)), lambda i: self.read(first + i)))

    def level(self, rotations: NDArray[np.float64], window_voxels: float, keep: int = 1) -> SearchLevel:
        """Trial shifts as close as the schedule makes them."""
        return SearchLevel(rotations, window_voxels, 0.8 * self.box / (2.0 * self.k_max), self.k_max, keep, 1.0)


def classical(problem: SearchProblem, rotations: NDArray[np.float64], window_voxels: int, repeats: int) -> list[float]:
    """Seconds of one particle and rotation the classical way: turn the reference, weight it, normalise it, correlate, find the peak.

    SciPy turns (trilinear), pyFFTW transforms (planned by measuring, one thread): there, back for the normalisation under the mask, there, and
    back to the correlation map.
    """
    n = problem.box
    forward_in, forward_out = pyfftw.empty_aligned((n,) * 3, "float32"), pyfftw.empty_aligned((n, n, n // 2 + 1), "complex64")
    forward = pyfftw.FFTW(forward_in, forward_out, axes=(0, 1, 2), flags=("FFTW_MEASURE",), threads=1)
    back_in, back_out = pyfftw.empty_aligned((n, n, n // 2 + 1), "complex64"), pyfftw.empty_aligned((n,) * 3, "float32")
    back = pyfftw.FFTW(back_in, back_out, axes=(0, 1, 2), direction="FFTW_BACKWARD", flags=("FFTW_MEASURE",), threads=1)
    volume, weight = problem.read(0)
    centre = np.full(3, n // 2)
    distance = np.sqrt(((np.indices((n,) * 3) - n // 2) ** 2).sum(0))
    mask = (distance < problem.mask.radius_voxels).astype(np.float32)
    size = float(mask.sum())
    particle = np.conj(np.fft.rfftn(volume)).astype(np.complex64)
    w = window_voxels
    seconds = []
    for i in range(repeats):
        begun = time.perf_counter()
        inverse = rotations[i % len(rotations)].T[::-1, ::-1]
        affine_transform(problem.reference, inverse, centre - inverse @ centre, output=forward_in, order=1)
        forward.execute()
        np.multiply(forward_out, weight, out=back_in)
        back.execute()
        under = back_out * mask
        mean = under.sum() / size
        under -= mean * mask
        under /= np.sqrt((under * under).sum() / size)
        forward_in[...] = under
        forward.execute()
        np.multiply(forward_out, particle, out=back_in)
        back.execute()
        window = np.roll(back_out, (w, w, w), (0, 1, 2))[: 2 * w + 1, : 2 * w + 1, : 2 * w + 1]
        np.unravel_index(int(window.argmax()), window.shape)
        seconds.append(time.perf_counter() - begun)
    return seconds


def against_classical(
    box: int = 64, k_max: int = 20, window_voxels: int = 4, n_particles: int = 500, reach: int = 3, repeats: int = 3
) -> list[Measured]:
    """The whole public `search` of many particles, templates included, against rotate-and-four-transforms of one particle and rotation."""
    problem = SearchProblem(box, k_max, n_particles)
    rotations = small_rotations(3.0, reach)
    level = problem.level(rotations, float(window_voxels))
    chunk = min(CHUNK, n_particles)
    warm = problem.session()
    problem.load(warm, 0, min(20, chunk))
    first_begun = time.perf_counter()
    warm.search(as_candidates(np.repeat(np.eye(3)[None], min(20, chunk), 0), np.zeros((min(20, chunk), 3))), np.zeros((min(20, chunk), 3)), level)
    first_s = time.perf_counter() - first_begun
    classical(problem, rotations, window_voxels, 2)
    ours, theirs, errors = [], [], []
    for _ in range(repeats):
        session, used = problem.session(), 0.0
        for start in range(0, n_particles, chunk):
            count = min(chunk, n_particles - start)
            problem.load(session, start, count)
            zero = np.zeros((count, 3))
            begun = time.perf_counter()
            found = session.search(as_candidates(np.repeat(np.eye(3)[None], count, 0), zero), zero, level)
            used += time.perf_counter() - begun
            theirs += classical(problem, rotations, window_voxels, 20)
            errors.append(angle_between_deg(found.rotations[:, 0], problem.true_rotations[start : start + count]))
        ours.append(used / (n_particles * len(rotations)))
        session.close()
    facts = {"box": box, "k_max": k_max, "window_voxels": window_voxels, "rotations": len(rotations), "particles": n_particles}
    error = float(np.median(np.concatenate(errors)))
    seconds: dict[str, Measured] = {
        "ours": {"first_s": first_s, "min_s": min(ours), "median_s": float(np.median(ours)), "repeats": repeats},
        "rotate and four transforms": {"first_s": None, "min_s": min(theirs), "median_s": float(np.median(theirs)), "repeats": len(theirs)},
    }
    return [row | {"median_error_deg": error if row["variant"] == "ours" else None} for row in ratio_rows("search", seconds, **facts)]


def matrix_product(problem: SearchProblem, level: SearchLevel, n_particles: int, n_shifts: int) -> tuple[float, float, NDArray[np.float32]]:
    """Scores as a product of (rotations x samples) templates with (samples x particles) columns, one shift after another, with a running best.

    Returns
    -------
    seconds_per_shift, product_seconds_per_shift : float
    best : (rotations, particles) float32
        Best of ``num`` over the first `n_shifts` shifts of the ball, by BLAS.
    """
    band = lines.line_band(problem.k_max)
    used = band.sample_weight > 0
    points, sample_weight = np.ascontiguousarray(band.points[used]), band.sample_weight[used]
    reach = int(np.ceil(problem.k_max))
    c = padded_offset(reach)

    def gathered(volume: NDArray[np.float32], rotation: NDArray[np.float64]) -> NDArray[np.complex64]:
        out = np.empty(len(points), np.complex64)
        kernels.gather(
            padded_spectrum(volume, reach).view(np.float32).ravel(), 2 * c + 1, c, points, rotation.astype(np.float32), np.float32(PAD), out
        )
        return out

    flat = padded_spectrum(problem.reference, reach).view(np.float32).ravel()
    templates = np.empty((len(level.rotations), len(points)), np.complex64)
    for a, rotation in enumerate(level.rotations):
        kernels.gather(flat, 2 * c + 1, c, points, rotation.astype(np.float32), np.float32(PAD), templates[a])
    mask = spherical_mask(problem.box, problem.mask.radius_voxels, problem.mask.soft_edge_voxels)
    inverse_sigma2 = np.float32(1.0 / problem.setup.noise.sigma2[0])
    columns = np.empty((n_particles, len(points)), np.complex64)
    for p in range(n_particles):
        volume, _ = problem.read(p)
        columns[p] = gathered((volume - volume[mask < 0.01].mean()) * mask, np.eye(3)) * sample_weight * inverse_sigma2
    columns_real = columns.view(np.float32)
    cube = lines.shift_cube(level.shift_radius_angst, level.shift_step_angst)
    shifts = cube.shifts_voxels[cube.inside][:n_shifts]
    best = np.full((len(templates), n_particles), -np.inf, np.float32)
    turned = np.empty_like(templates)
    product_s = 0.0
    begun = time.perf_counter()
    for shift in shifts:
        np.multiply(templates, np.exp(-2j * np.pi / problem.box * (points @ shift)).astype(np.complex64), out=turned)
        at = time.perf_counter()
        product = turned.view(np.float32) @ columns_real.T
        product_s += time.perf_counter() - at
        np.maximum(best, product, out=best)
    return (time.perf_counter() - begun) / len(shifts), product_s / len(shifts), best


def band_transform(problem: SearchProblem, level: SearchLevel, repeats: int) -> float:
    """Seconds of one particle and rotation by an inverse transform of the cropped band: multiply, transform, take the best of the window."""
    step = level.shift_step_angst
    m = pyfftw.next_fast_len(max(2 * int(problem.k_max) + 2, int(np.ceil(problem.box / step))))
    template = np.random.default_rng(0).normal(size=(m, m, m // 2 + 1)).astype(np.complex64)
    column = template[::-1].copy()
    source, target = pyfftw.empty_aligned(template.shape, "complex64"), pyfftw.empty_aligned((m,) * 3, "float32")
    back = pyfftw.FFTW(source, target, axes=(0, 1, 2), direction="FFTW_BACKWARD", flags=("FFTW_MEASURE",), threads=1)
    w = int(round(level.shift_radius_angst * m / problem.box))
    around = np.r_[-w : w + 1] % m
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        np.multiply(template, column, out=source)
        back.execute()
        target[np.ix_(around, around, around)].argmax()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def alternatives(
    box: int = 64,
    bands: tuple[int, ...] = (8, 12, 20, 29),
    windows: tuple[int, ...] = (2, 4, 8),
    n_particles: int = 125,
    reach: int = 3,
    repeats: int = 3,
    n_shifts: int = 4,
) -> list[Measured]:
    """The search kernel, matrix products and band transforms on the same problems: seconds per particle and rotation."""
    rows = []
    rotations = small_rotations(3.0, reach)
    for k_max in bands:
        problem = SearchProblem(box, k_max, n_particles)
        session = problem.session()
        problem.load(session, 0, n_particles)
        starts, zero = as_candidates(np.repeat(np.eye(3)[None], n_particles, 0), np.zeros((n_particles, 3))), np.zeros((n_particles, 3))
        for window in windows:
            level = problem.level(rotations, float(window))
            cube = lines.shift_cube(level.shift_radius_angst, level.shift_step_angst)
            session.search(starts, zero, level)
            ours, product, only, transform = [], [], [], []
            for _ in range(repeats):
                begun = time.perf_counter()
                session.search(starts, zero, level)
                ours.append(time.perf_counter() - begun)
                whole, part, _ = matrix_product(problem, level, n_particles, n_shifts)
                product.append(whole)
                only.append(part)
                transform.append(band_transform(problem, level, 30))
            each = n_particles * len(rotations)
            shifts = len(cube.inside)
            best = {
                "ours": min(ours) / each,
                "products": min(product) * shifts / each,
                "only": min(only) * shifts / each,
                "transform": min(transform),
            }
            samples = int((lines.line_band(k_max).sample_weight > 0).sum())
            facts = {"box": box, "k_max": k_max, "window_voxels": window, "shifts": shifts, "rotations": len(rotations), "particles": n_particles}
            rows += [
                {
                    "benchmark": "alternatives",
                    "variant": name,
                    **facts,
                    "samples": samples,
                    "min_s": best[key],
                    "ours_faster": best[key] / best["ours"],
                }
                for name, key in (("ours", "ours"), ("matrix products", "products"), ("products alone", "only"), ("band transform", "transform"))
            ]
        session.close()
    return rows


NOTES = (
    "One core (pinned), one thread; variants run in turn, times are minima over repeats, first_s is the first call with compilation or loading."
    " search: seconds per particle and rotation, templates and everything else of the session's search included, reading and loading not;"
    " particles in chunks of 125 as a run makes them, weights one everywhere."
    " rotate and four transforms: SciPy's trilinear rotation and pyFFTW, float32."
    " alternatives: seconds per particle and rotation; matrix products were timed on the first 4 shifts of the ball and scaled by the number of"
    " shifts ('products alone' is the BLAS part); band transform uses the smallest fast box that holds the band at the same shift spacing."
)


def main(arguments: list[str] | None = None, folder: Path = RESULTS) -> None:
    """Runs all of it and writes ``kernels.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny problems: does it run?")
    options = parser.parse_args(arguments)
    about = environment()
    if options.quick:
        shared = shared_folder()
        rows = prototype_kernels(shared, 32, 12, 2) if shared else []
        rows += against_classical(24, 8, 2, 6, 1, 1)
        rows += alternatives(24, (6,), (2,), 4, 1, 1, 2)
    else:
        about["core"] = pin_to_one_core()
        rows = prototype_kernels(need_shared())
        show(rows)
        rows += (searched := against_classical())
        show(searched)
        rows += (others := alternatives())
        show(others)
    write_results("kernels", rows, about, NOTES, folder)


if __name__ == "__main__":
    main()
