"""The local deviation that flcf divides by, under a mask that turns with the reference: two products of turned masks with the particle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..fourier import PAD, centred_rfftn, grid_band, max_band, padded_offset, padded_spectrum
from . import interpolation as kernels

_LOST_POWER = 1e-3
"""Share of a mask's power that may lie beyond the band it is used in: soft masks need few shells, and white noise does not see the rest."""

_BLOCK_BYTES = 64 << 20


class TurnedMask:
    """A mask on the worked grid, any shape, ready to be turned.

    Parameters
    ----------
    mask : (n, n, n) float32
        Values 0..1, centre at ``n // 2``.

    Attributes
    ----------
    total : float
        Sum of the mask.
    """

    def __init__(self, mask: NDArray[np.float32]) -> None:
        n = self._n = len(mask)
        self.total = float(mask.sum(dtype=np.float64))
        whole = grid_band(n, float(max_band(n)))
        power = np.abs(centred_rfftn(mask).ravel()[whole.index]) ** 2
        beyond = np.cumsum(np.bincount(whole.shell, power, n)[::-1])[::-1]  # shell and all after it
        within = beyond <= _LOST_POWER * (beyond[0] + 0.5 * self.total**2)
        self._reach = int(min(max(int(np.argmax(within)) if within.any() else n, 2), max_band(n)))
        self._band = grid_band(n, float(self._reach))
        self._points = np.ascontiguousarray(self._band.k, np.float32)
        self._offset = padded_offset(self._reach)
        self._spectrum = padded_spectrum(mask, self._reach).view(np.float32).ravel()
        self._curvature = kernels.interpolation_curvature(mask, n)

    def spectra(self, volume: NDArray[np.float32]) -> NDArray[np.complex64]:
        """What `deviations` needs of a filtered particle (n, n, n): spectra of it and of its square, (2, samples), each with its mean in front."""
        out = np.empty((2, 1 + len(self._points)), np.complex64)
        for row, values in enumerate((volume, volume * volume)):
            transform = centred_rfftn(values.astype(np.float32)).ravel()
            out[row, 0], out[row, 1:] = transform[0].real / self._n**3, transform[self._band.index] * (2.0 / (self._n**3 * self.total))
        return out

    def deviations(self, spectra: NDArray[np.complex64], rotations: NDArray[np.float64], shifts_voxels: NDArray[np.float64]) -> NDArray[np.float32]:
        """Standard deviation of a particle under the mask at poses, every rotation with every shift.

        Parameters
        ----------
        spectra : (2, samples) complex64
            From `spectra`.
        rotations : (a, 3, 3) float64
        shifts_voxels : (t, 3) float64
            On the worked grid.

        Returns
        -------
        (a, t) float32
            ``sqrt(<m x^2> / sum m - (<m x> / sum m)^2)``, m turned by R and moved by s.
        """
        size = len(self._points)
        phase = np.exp((2j * np.pi / self._n) * (self._points.astype(np.float64) @ shifts_voxels.T)).astype(np.complex64)
        # Re conj(M) V: real and imaginary parts beside each other, one real product
        banks = [np.concatenate([(bank := spectrum[1:, None] * phase).real, bank.imag]) for spectrum in spectra]
        out = np.empty((len(rotations), len(shifts_voxels)), np.float32)
        block = max(1, _BLOCK_BYTES // (8 * size))
        values = np.empty(size, np.complex64)
        turned = np.empty((min(block, len(rotations)), 2 * size), np.float32)
        for first in range(0, len(rotations), block):
            part = rotations[first : first + block]
            for row, rotation in enumerate(part):
                matrix = np.ascontiguousarray(rotation, np.float32)
                kernels.gather(self._spectrum, 2 * self._offset + 1, self._offset, self._points, matrix, np.float32(PAD), values, self._curvature)
                turned[row, :size], turned[row, size:] = values.real, values.imag
            mean, square = (turned[: len(part)] @ bank + np.float32(spectrum[0].real) for bank, spectrum in zip(banks, spectra, strict=True))
            variance = square - mean * mean
            out[first : first + len(part)] = np.sqrt(np.maximum(variance, 1e-6 * max(float(spectra[1, 0].real), 1e-30)))
        return out
