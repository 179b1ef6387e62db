"""A cache of prepared particles under a byte budget, least recently used first out. It outlives sessions; no result depends on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class ByteCache:
    """Keeps values up to a total size.

    Parameters
    ----------
    budget_bytes : int
        Upper bound of the sum of sizes; a value larger than all of it is not kept.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = int(budget_bytes)
        self.used_bytes = 0
        self._items: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Any | None:
        """The value, or None."""
        item = self._items.get(key)
        if item is None:
            return None
        self._items.move_to_end(key)
        return item[0]

    def put(self, key: Hashable, value: Any, size_bytes: int) -> None:
        """Keeps a value, dropping old ones to make room."""
        if key in self._items:
            self.used_bytes -= self._items.pop(key)[1]
        if size_bytes > self.budget_bytes:
            return
        while self._items and self.used_bytes + size_bytes > self.budget_bytes:
            _, (_, dropped) = self._items.popitem(last=False)
            self.used_bytes -= dropped
        self._items[key] = (value, size_bytes)
        self.used_bytes += size_bytes
