"""Batches that say which rows of the data set they hold, on one process or several.

Allocators recognise a point by its row, and noise is keyed by it. The row travels with the item
through the data loader, so that workers, samplers and skipped batches of a resumed run need no
bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

ROWS = "flops_rows"  # key of a batch


@dataclass
class NumberedRows(Dataset[tuple[int, Any]]):
    """The items of a data set with their rows."""

    items: Any

    def __len__(self) -> int:
        """As many as the data set has."""
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[int, Any]:
        """A row and its item."""
        return int(row), self.items[row]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[int, Any]]:
        """Several at once, where the data set can."""
        several = getattr(self.items, "__getitems__", None)
        items = several(rows) if several else [self.items[row] for row in rows]
        return [(int(row), item) for row, item in zip(rows, items, strict=True)]


@dataclass
class NumberedCollator:
    """Collates items as before, and adds their rows to the batch."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, numbered: list[tuple[int, Any]]) -> dict[str, Any]:
        """A batch with its rows."""
        batch = self.collate([item for _, item in numbered])
        return {**batch, ROWS: torch.tensor([row for row, _ in numbered])}


def points_in(batch: Mapping[str, Any]) -> int:
    """Number of points of a batch."""
    if ROWS in batch:
        return len(batch[ROWS])
    return next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), 0)
