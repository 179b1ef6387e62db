"""Who stays in a full pool."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numba_glocal.backends.cuda.slots import Slots
from numba_glocal.errors import DeviceError


def scan(slots, keys, chunk):
    """Goes through a list in chunks, as a run does; returns how many were found."""
    hits = 0
    for first in range(0, len(keys), chunk):
        part = keys[first : first + chunk]
        found = {key: slots.get(key) for key in part}
        busy = {place[0] for place in found.values() if place}
        missing = [key for key in part if not found[key]]
        taken = slots.take(missing, [0] * len(missing), busy)
        assert not set(taken) & busy and len(set(taken)) == len(taken)
        hits += len(part) - len(missing)
    return hits


def test_slots_rise_and_are_told_apart():
    slots = Slots(4)
    assert slots.take(["a", "b"], [7, 8]) == [0, 1]
    assert slots.get("a") == (0, 7) and slots.get("b") == (1, 8) and slots.get("c") is None
    slots.drop("a")
    assert slots.take(["c", "d"], [9, 9]) == [0, 2] and slots.version == 0 and len(slots) == 3


@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_a_list_that_does_not_fit_keeps_most_of_what_fits(chunk):
    """Least recently used first out would find nothing, ever."""
    slots, keys = Slots(100), [f"p{i}" for i in range(130)]
    scan(slots, keys, chunk)
    hits = [scan(slots, keys, chunk) for _ in range(20)]
    assert min(hits) >= 100 - 2 * chunk
    assert slots.version > 0


def test_busy_slots_are_not_taken_away():
    slots = Slots(3)
    slots.take(["a", "b", "c"], [0] * 3)
    assert slots.take(["d"], [0], busy={2, 1}) == [0]
    with pytest.raises(DeviceError, match="chunk"):
        slots.take(["e"], [0], busy={0, 1, 2})
    with pytest.raises(DeviceError, match="chunk"):
        slots.take(["e", "f", "g", "h"], [0] * 4)


def test_what_nobody_asks_for_any_more_makes_room():
    """Particles that were read in another way must not hold a pool for ever."""
    slots = Slots(10)
    slots.take([f"old{i}" for i in range(10)], [0] * 10)
    new = [f"new{i}" for i in range(10)]
    for _ in range(12):
        scan(slots, new, 2)
    assert scan(slots, new, 2) == 10
