"""The contrast transfer function of a tilt image, and what exposure leaves of its signal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def wavelength_angst(voltage_kv: float) -> float:
    """Of electrons, relativistic."""
    volts = voltage_kv * 1e3
    return 12.2643 / math.sqrt(volts * (1.0 + 0.978466e-6 * volts))


def contrast_transfer(
    kx: NDArray[Any],
    ky: NDArray[Any],
    defocus_u_angst: float,
    defocus_v_angst: float,
    astigmatism_deg: float = 0.0,
    *,
    voltage_kv: float = 300.0,
    spherical_aberration_mm: float = 2.7,
    amplitude_contrast: float = 0.07,
    phase_shift_deg: float = 0.0,
) -> NDArray[np.float64]:
    """CTF of an image, positive at low frequencies: particles that are bright stay bright.

    Parameters
    ----------
    kx, ky : arrays
        Frequencies in 1/Angstrom along the image's axes.
    defocus_u_angst, defocus_v_angst : float
        Defocus along and across the direction of `astigmatism_deg`; underfocus is positive.
    astigmatism_deg : float
        Angle from x to y.
    voltage_kv, spherical_aberration_mm, amplitude_contrast, phase_shift_deg : float

    Returns
    -------
    float64 array
        ``sin(pi lambda z k^2 - pi/2 Cs lambda^3 k^4 + phase shift + asin(amplitude contrast))``.
    """
    wave = wavelength_angst(voltage_kv)
    k2 = np.asarray(kx, np.float64) ** 2 + np.asarray(ky, np.float64) ** 2
    mean, half = 0.5 * (defocus_u_angst + defocus_v_angst), 0.5 * (defocus_u_angst - defocus_v_angst)
    defocus = mean + half * np.cos(2.0 * (np.arctan2(ky, kx) - math.radians(astigmatism_deg))) if half else mean
    phase = np.pi * wave * defocus * k2 - 0.5 * np.pi * spherical_aberration_mm * 1e7 * wave**3 * k2**2
    return np.sin(phase + math.radians(phase_shift_deg) + math.asin(amplitude_contrast))


def exposure_filter(k: NDArray[Any], exposure: float, voltage_kv: float = 300.0) -> NDArray[np.float64]:
    """What is left of the signal's amplitude after an exposure: ``exp(-exposure / (2 Ne(k)))``, Ne of Grant and Grigorieff (2015).

    Parameters
    ----------
    k : array
        Frequency in 1/Angstrom.
    exposure : float
        Electrons per square Angstrom before the image was taken.
    voltage_kv : float
        At 200 kV and below the critical exposure is 0.8 of that at 300 kV.
    """
    k = np.maximum(np.asarray(k, np.float64), 1e-6)
    critical = (0.245 * k**-1.665 + 2.81) * (0.8 if voltage_kv <= 200.0 else 1.0)
    return np.exp(-0.5 * exposure / critical)
