"""Who lies in which slot of a pool, and who makes room."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence, Set
from itertools import islice

from ...errors import DeviceError

_STALE = 8


class Slots:
    """Slots of a pool. While there is room everything stays; then what came last goes first.

    A list is gone through in the same order again and again. Dropping what was used least recently would then drop what is wanted next, and
    nothing would ever be found; this way only what does not fit takes turns. What has not been asked for while the pool was asked `_STALE`
    times as often as it has slots is of no use any more, and goes before all else.

    Parameters
    ----------
    capacity : int

    Attributes
    ----------
    version : int
        Changes whenever something had to go.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.version = 0
        self._held: dict[Hashable, tuple[int, int]] = {}  # slot and weight row, in order of arrival
        self._asked: OrderedDict[Hashable, int] = OrderedDict()  # when last asked for, longest ago first
        self._clock = 0
        self._free = list(range(capacity))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> tuple[int, int] | None:
        """Slot and weight row of a particle that is there."""
        self._clock += 1
        found = self._held.get(key)
        if found is not None:
            self._asked[key] = self._clock
            self._asked.move_to_end(key)
        return found

    def take(self, keys: Sequence[Hashable], kinds: Sequence[int], busy: Set[int] = frozenset()) -> list[int]:
        """Slots, in rising order, for new particles; those in `busy` are not taken away.

        Raises
        ------
        DeviceError
            Too many are busy.
        """
        self._make_room(len(keys) - len(self._free), busy)
        taken = [heapq.heappop(self._free) for _ in keys]
        for key, slot, kind in zip(keys, taken, kinds, strict=True):
            self._held[key] = slot, kind
            self._asked[key] = self._clock
            self._asked.move_to_end(key)
        return taken

    def drop(self, key: Hashable) -> None:
        """Frees a particle's slot."""
        heapq.heappush(self._free, self._held.pop(key)[0])
        del self._asked[key]

    def _make_room(self, count: int, busy: Set[int]) -> None:
        if count <= 0:
            return
        stale_since = self._clock - _STALE * self.capacity
        stale = (key for key, asked in self._asked.items() if asked < stale_since and self._held[key][0] not in busy)
        victims = list(islice(stale, count))
        if len(victims) < count:
            known = set(victims)
            last = (key for key in reversed(self._held) if key not in known and self._held[key][0] not in busy)
            victims += islice(last, count - len(victims))
        if len(victims) < count:
            raise DeviceError("the GPU's memory does not hold one chunk of particles; use fewer workers a GPU, --binning, or a larger --gpu-memory")
        for key in victims:
            self.drop(key)
        self.version += 1
