"""Objectives: functions of parameters and points that return losses; and candidates for them.

    losses = objective(parameters, points)    # (Q, d) and (Q,) -> (Q,)

Row q is the loss of point ``points[q]`` under ``parameters[q]``. The objective may be a service or
a simulator, and need not be differentiable: an error rate will do. A metric of a whole data set
(F1) is an objective with a single point.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flops.errors import FlopsError


class ObjectiveError(FlopsError, ValueError):
    """An objective did not return one finite loss per row."""


@runtime_checkable
class Objective(Protocol):
    """Losses of points, each under its own parameters.

    It may return several columns, shape (Q, k): the first is the loss, the others are kept
    (whether a point was classified correctly, say).
    """

    def __call__(self, parameters: Tensor, points: Tensor) -> Tensor:
        """Evaluate rows, shapes (Q, d) and (Q,)."""
        ...


@dataclass(frozen=True, eq=False)
class Candidates:
    """Rows to evaluate.

    Attributes:
        parameters: Of each row, shape (Q, d), float32. Rows may share memory.
        points: Position of each row's point in the data set, shape (Q,).
        kind: Purpose of the values: "clean", "query", "validation", "test".
    """

    parameters: Tensor
    points: Tensor
    kind: str = "query"

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return f"Candidates({len(self)} rows of {self.parameters.size(1)} parameters, {self.kind})"

    def part(self, begin: int, end: int) -> Candidates:
        """A range of rows."""
        return Candidates(self.parameters[begin:end], self.points[begin:end], self.kind)

    def digest(self) -> bytes:
        """Hash of all bits of the candidates."""
        mark = hashlib.sha256(f"{self.kind} {tuple(self.parameters.shape)}".encode())
        values = self.parameters
        if len(values) > 1 and values.stride(0) == 0:  # one vector for all rows
            mark.update(b"shared")
            values = values[:1]
        mark.update(values.contiguous().numpy().tobytes())
        mark.update(self.points.contiguous().numpy().tobytes())
        return mark.digest()


def checked(values: Tensor, candidates: Candidates) -> Tensor:
    """Values as float32 of shape (Q, k), the loss in the first column.

    Raises:
        ObjectiveError: If they are not one finite loss per row.
    """
    values = torch.as_tensor(values).detach().cpu()
    columns = values.unsqueeze(1) if values.dim() == 1 else values
    if columns.dim() != 2 or len(columns) != len(candidates) or columns.size(1) < 1:
        raise ObjectiveError(
            f"the objective must return one loss for each of the {len(candidates)} rows (or "
            f"columns with the loss first), but returned shape {tuple(values.shape)}"
        )
    columns = columns.to(torch.float32)
    bad = torch.nonzero(~torch.isfinite(columns[:, 0])).flatten()
    if len(bad):
        points = candidates.points[bad[:3]].tolist()
        raise ObjectiveError(
            f"the objective returned a loss that is not finite for {len(bad)} of "
            f"{len(candidates)} rows, the first of points {points}; return a large finite one "
            "instead"
        )
    return columns
