"""Rows: the perturbed passes of a step, each of one point under one draw with one sign."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """A chunk of rows: points, draws and signs of shape (R,), and their weights 1/A_j.

    The weight of a row is one over the number of *draws* of its point: the mean over a point's
    draws, however unequal the counts, so that every point keeps the weight 1/B in the batch.
    """

    points: Tensor
    draws: Tensor
    signs: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.points)

    def part(self, begin: int, end: int) -> Rows:
        """Some rows that follow each other."""
        cut = slice(begin, end)
        return Rows(self.points[cut], self.draws[cut], self.signs[cut], self.weights[cut])
