"""Objectives: functions of parameters and points that return losses; and candidates for them.

    losses = objective(parameters, points)    # (Q, d) and (Q,) -> (Q,)

Row q is the loss of point ``points[q]`` under ``parameters[q]``. The objective may be a service or
a simulator, and need not be differentiable: an error rate will do. A metric of a whole data set
(F1) is an objective with a single point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
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
        ending: Whether they belong to the end of a run, which may later go on from before them.
        round: Number of the `ask` that returned them; -1 if none did.
        rows: Which rows of that round these are, shape (Q,); None for all.
    """

    parameters: Tensor
    points: Tensor
    kind: str = "query"
    ending: bool = False
    round: int = -1
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return f"Candidates({len(self)} rows of {self.parameters.size(1)} parameters, {self.kind})"

    def part(self, begin: int, end: int) -> Candidates:
        """A range of rows."""
        rows = None if self.round < 0 else self.places[begin:end]
        return replace(
            self, parameters=self.parameters[begin:end], points=self.points[begin:end], rows=rows
        )

    def take(self, rows: Tensor) -> Candidates:
        """Some rows, by their positions; one vector for all rows is not copied."""
        shared = len(self) > 1 and self.parameters.stride(0) == 0
        values = self.parameters[:1].expand(len(rows), -1) if shared else self.parameters[rows]
        places = None if self.round < 0 else self.places[rows]
        return replace(self, parameters=values, points=self.points[rows], rows=places)

    def split(self, size: int) -> list[Candidates]:
        """Parts of at most ``size`` rows, each of which may be told on its own."""
        return [self.part(i, min(i + size, len(self))) for i in range(0, len(self), size)]

    @property
    def places(self) -> Tensor:
        """Positions of the rows in their round, shape (Q,)."""
        return torch.arange(len(self)) if self.rows is None else self.rows

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


def columns_of(values: Tensor, rows: int) -> Tensor:
    """Values as float32 of shape (Q, k), the loss in the first column.

    Raises:
        ObjectiveError: If there is not one loss per row.
    """
    values = torch.as_tensor(values).detach().cpu()
    columns = values.unsqueeze(1) if values.dim() == 1 else values
    if columns.dim() != 2 or len(columns) != rows or columns.size(1) < 1:
        raise ObjectiveError(
            f"the objective must return one loss for each of the {rows} rows (or "
            f"columns with the loss first), but returned shape {tuple(values.shape)}"
        )
    return columns.to(torch.float32)


def checked(values: Tensor, candidates: Candidates) -> Tensor:
    """As `columns_of`, with finite losses.

    Raises:
        ObjectiveError: If they are not one finite loss per row.
    """
    columns = columns_of(values, len(candidates))
    bad = torch.nonzero(~torch.isfinite(columns[:, 0])).flatten()
    if len(bad):
        points = candidates.points[bad[:3]].tolist()
        raise ObjectiveError(
            f"the objective returned a loss that is not finite for {len(bad)} of "
            f"{len(candidates)} rows, the first of points {points}; return a large finite one "
            "instead"
        )
    return columns


@dataclass(frozen=True)
class NumpyObjective:
    """An objective on numpy arrays."""

    function: Callable[..., Any]

    def __call__(self, parameters: Tensor, points: Tensor) -> Tensor:
        """Evaluate rows; values may be anything that numpy makes an array of."""
        return torch.as_tensor(np.asarray(self.function(parameters.numpy(), points.numpy())))
