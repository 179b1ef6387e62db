"""Wedges against the planes that a tilt series samples, marked one by one."""

from __future__ import annotations

import numpy as np


def check_sampled(weights, low_deg, high_deg, across="x", sign=1):
    """Every tilt t samples (across, z) = r (cos t, -sign sin t); voxels near the edge of the range (1.8 voxels) are not judged."""
    n = weights.shape[0]
    r = np.arange(1, n // 2)
    judged = {0: 0, 1: 0}
    for tilt_deg in range(-89, 90):
        a, z = np.rint(r * np.cos(np.deg2rad(tilt_deg))).astype(int), np.rint(-sign * r * np.sin(np.deg2rad(tilt_deg))).astype(int)
        found = weights[z, 0, a] if across == "x" else weights[z, a, 0]
        apart = min((low_deg - tilt_deg) % 180, (tilt_deg - low_deg) % 180, (high_deg - tilt_deg) % 180, (tilt_deg - high_deg) % 180)
        clear = r * np.sin(np.deg2rad(min(apart, 90))) > 1.8
        expected = int(low_deg < tilt_deg < high_deg)
        assert (found[clear] == expected).all(), tilt_deg
        judged[expected] += int(clear.sum())
    assert judged[0] > 100 or (low_deg, high_deg) == (-90, 90)
    assert judged[1] > 100
