"""LRU cache of features in one tensor, so that many rows are gathered at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch


class FeatureCache:
    """Rows of features by key; the least recently used are evicted."""

    def __init__(self, slots: int, shape: Sequence[int]) -> None:
        self.rows = torch.empty(slots, *shape)
        self.hits = self.misses = 0
        self._slots: OrderedDict[Hashable, int] = OrderedDict()

    def claim(self, keys: Iterator[Hashable]) -> tuple[list[int], dict[Any, int]]:
        """Slot of every key, and the keys whose slots must be filled.

        With more distinct keys than slots, the first are evicted.
        """
        slots, missing = [], {}
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
                self.hits += 1
            else:
                full = len(self._slots) == len(self.rows)
                slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
                self._slots[key] = missing[key] = slot
                self.misses += 1
            slots.append(slot)
        return slots, missing

    def clear(self) -> None:
        """Evict everything, for instance slots that were not filled because of an error."""
        self._slots.clear()
