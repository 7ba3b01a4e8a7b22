"""Rows that failed: an estimate from those that arrived.

A black box may fail to answer: its loss is NaN. Point j keeps the weight of every other point, and
its draws the weight 1/A'_j, with the A'_j of its A_j draws that arrived:

    g = (1/B') sum_j (1/A'_j) sum_i w_ij z_ij

B' counts the points without those whose draws all failed. One row of an antithetic pair is of no
use without the other. The estimate stays unbiased if failures do not depend on the noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrived:
    """Draws that arrived.

    Attributes:
        draws: Mask of them, shape (draws,).
        ratio: A_j / A'_j of each point, 1 for a point without draws, shape (B,).
        lost: Points whose draws all failed, shape (B,).
    """

    draws: Tensor
    ratio: Tensor
    lost: Tensor

    @classmethod
    def among(cls, values: Tensor, points: Tensor, size: int) -> Arrived | None:
        """The draws whose value is a number; None if all are.

        Args:
            values: Of each draw, or several values of it, shape (draws,) or (draws, K).
            points: Point of each draw.
            size: Points B of the batch.
        """
        missing = torch.isnan(values if values.dim() == 1 else values.sum(1))
        if not bool(missing.any()):
            return None
        planned = torch.bincount(points, minlength=size)
        there = torch.bincount(points[~missing], minlength=size)
        ratio = torch.where(there > 0, planned.double() / there.clamp(min=1), 1.0)
        return cls(~missing, ratio, (planned > 0) & (there == 0))

    @property
    def size(self) -> int:
        """B', the points of the batch without those that are lost."""
        return max(1, len(self.lost) - int(self.lost.sum()))
