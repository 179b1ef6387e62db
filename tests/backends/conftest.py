"""Made particles for the backends' tests: the exact phantom at planted poses, weighted and with noise, nothing interpolated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from numba_glocal.backends.cpu import CPUBackend
from numba_glocal.backends.protocols import Candidates, Grid, ParticleBatch, ParticleMask, SearchLevel, SearchSetup, as_candidates
from numba_glocal.noise import NoiseModel
from numba_glocal.phantom import phantom_spectrum, render_phantom

BOX_ANGST = 400.0
OBJECT_ANGST = 270.0

BACKENDS: dict[str, Callable[[], Any]] = {"cpu": CPUBackend}
"""The fast backends that must agree with the oracle."""


def _cuda_backend() -> Any:
    """Level 3: the CUDA backend in single precision, on a real device; the skip says why there is none."""
    try:
        from numba_glocal.backends.cuda.backend import CUDABackend

        return CUDABackend(memory_bytes=4 << 30, precision="single")
    except Exception as problem:
        pytest.skip(f"no CUDA device: {' '.join(str(problem).split())[:120]}")


BACKENDS["cuda"] = _cuda_backend


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def make_backend(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a fresh fast backend."""
    return BACKENDS[request.param]


def radii(n: int) -> NDArray[np.float64]:
    """|k| on the grid half-spectrum."""
    k = np.fft.fftfreq(n, 1 / n)
    return np.sqrt(k[:, None, None] ** 2 + k[None, :, None] ** 2 + np.arange(n // 2 + 1)[None, None, :] ** 2)


def weights(kind: str, n: int) -> NDArray[np.float32]:
    """Fourier weights: nothing missing, a wedge, a smooth CTF^2 with a wedge, a smooth CTF that changes sign."""
    k = np.fft.fftfreq(n, 1 / n)
    kz, kx = np.abs(k)[:, None, None], np.arange(n // 2 + 1)[None, None, :]
    wedge = np.broadcast_to(kx >= np.tan(np.deg2rad(30)) * kz, (n, n, n // 2 + 1)).astype(float)
    ctf = np.cos(1.3 * (radii(n) * 16 / n / 4) ** 2)
    made = {"none": np.ones_like(wedge), "wedge": wedge, "ctf2": ctf**2 * wedge, "ctf": ctf}
    return np.ascontiguousarray(made[kind], np.float32)


def ball(n: int, radius: float, soft: float) -> NDArray[np.float64]:
    """The particle mask."""
    axis = np.arange(n) - n // 2
    r = np.sqrt(axis[:, None, None] ** 2 + axis[None, :, None] ** 2 + axis[None, None, :] ** 2)
    return 0.5 + 0.5 * np.cos(np.pi * np.clip((r - radius) / soft, 0, 1))


def crop_volume(volume: NDArray[Any], m: int) -> NDArray[np.float64]:
    """Fourier cropping n -> m about the centre."""
    n = volume.shape[0]
    whole = np.fft.fftshift(np.fft.fftn(np.fft.ifftshift(volume)))
    part = slice(n // 2 - m // 2, n // 2 - m // 2 + m)
    return np.fft.fftshift(np.fft.ifftn(np.fft.ifftshift(whole[part, part, part])).real) * (m / n) ** 3


@dataclass(frozen=True)
class Case:
    """Particles with planted poses and what a session needs."""

    setup: SearchSetup
    volumes: list[NDArray[np.float32]]
    weights: list[NDArray[np.float32]]
    rotations: NDArray[np.float64]
    shifts_angst: NDArray[np.float64]
    starts: Candidates  # near the planted poses
    name: str

    @property
    def voxel_angst(self) -> float:
        return self.setup.grid.pixel_size_angst * self.setup.grid.box_size / self.setup.grid.binned_box_size

    @property
    def batch(self) -> ParticleBatch:
        return ParticleBatch(tuple(f"{self.name}-{i}" for i in range(len(self.volumes))), lambda i: (self.volumes[i], self.weights[i]))

    def with_setup(self, **changes: Any) -> Case:
        return replace(self, setup=replace(self.setup, **changes))

    def level(self, rotations: int = 40, reach_deg: float = 15.0, **changes: Any) -> SearchLevel:
        rng = np.random.default_rng(11)
        axes = rng.normal(size=(rotations, 3))
        angles = np.deg2rad(reach_deg) * rng.random((rotations, 1)) ** (1 / 3)
        small = Rotation.from_rotvec(axes / np.linalg.norm(axes, axis=1, keepdims=True) * angles).as_matrix()
        usual = SearchLevel(small, 1.6 * self.voxel_angst, 0.8 * self.voxel_angst, self.setup.k_max, rotations, 0.0)
        return replace(usual, **changes)


def make_case(
    n: int = 16,
    weight: str = "wedge",
    *,
    noise: float = 1.0,
    gamma: float = 0.0,
    particles: int = 3,
    seed: int = 0,
    box: int = 0,
    spread_voxels: float = 0.6,
    rotations: NDArray[np.float64] | None = None,
    **setup: Any,
) -> Case:
    """Particles of box `box` worked on at `n` (the same by default), with noise of `noise` times the signal's deviation."""
    rng = np.random.default_rng(seed)
    box = box or n
    pixel_angst = BOX_ANGST / box
    voxel_angst = BOX_ANGST / n
    mask = ParticleMask(0.36 * n, 0.13 * n)
    inside = ball(n, mask.radius_voxels, mask.soft_edge_voxels)
    reference = crop_volume(render_phantom(box, pixel_angst, diameter_angst=OBJECT_ANGST), n)
    reference = (reference - reference[inside < 0.01].mean()) * inside  # as particles are
    if rotations is None:
        rotations = Rotation.random(particles, random_state=seed + 1).as_matrix()
    particles = len(rotations)
    shifts = rng.normal(0, spread_voxels, (particles, 3)) * voxel_angst
    c = weights(weight, n)
    model = NoiseModel(np.ones(n // 2 + 1), gamma, 0.02)
    a = np.abs(c) / np.abs(c).max()
    form = model.variance_form(a * a if c.min() < 0 else a)
    volumes = []
    deviation = 0.0
    for rotation, shift in zip(rotations, shifts, strict=True):
        spectrum = phantom_spectrum(box, pixel_angst, rotation, shift, OBJECT_ANGST)
        clean = crop_volume(np.fft.irfftn(spectrum, s=(box,) * 3, axes=(0, 1, 2)), n)
        clean = np.fft.irfftn(np.fft.rfftn(np.fft.ifftshift(clean)) * c, s=(n,) * 3, axes=(0, 1, 2))
        deviation = deviation or float(clean.std()) * noise
        white = np.fft.rfftn(rng.normal(0, deviation, (n, n, n))) * np.sqrt(form)
        volumes.append(np.fft.fftshift(clean + np.fft.irfftn(white, s=(n,) * 3, axes=(0, 1, 2))).astype(np.float32))
    level = max(deviation, 0.2 * float(volumes[0].std()))
    sigma2 = np.full(n // 2 + 1, level**2 * n**3 * float((inside**2).mean()))
    usual = SearchSetup(Grid(box, n, pixel_angst), reference.astype(np.float32), mask, NoiseModel(sigma2, gamma, 0.02), "ml", 0.0, n // 2 - 2.0)
    starts = as_candidates(
        Rotation.from_rotvec(rng.normal(0, 0.05, (particles, 3))).as_matrix() @ rotations, shifts + rng.normal(0, 0.3, (particles, 3)) * voxel_angst
    )
    name = f"{n}-{weight}-{noise}-{gamma}-{seed}-{box}-{spread_voxels}"
    return Case(replace(usual, **setup), volumes, [c] * particles, rotations, shifts, starts, name)


@pytest.fixture(name="make_case")
def _make_case() -> Callable[..., Case]:
    """`make_case`: particles with planted poses."""
    return make_case
