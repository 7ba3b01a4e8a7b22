"""What a black box is, a function of parameters and points that returns losses; questions to it.

    losses = objective(parameters, points)    # (Q, d) and (Q,) -> (Q,)

Row q asks for the loss of point ``points[q]`` under ``parameters[q]``. Nothing else is known of it:
it may be a service, a simulator, a person. It need not be differentiable; an accuracy will do.
A value of a whole data set (F1) is an objective with a single point.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flops.errors import FlopsError


class ObjectiveError(FlopsError, ValueError):
    """An objective's answer is not one finite loss for each row."""


@runtime_checkable
class Objective(Protocol):
    """Losses of points, each under parameters of its own.

    An answer may have several columns, shape (Q, k): the first is the loss, the others are kept
    for whoever reads the answers (whether a point was classified rightly, say).
    """

    def __call__(self, parameters: Tensor, points: Tensor) -> Tensor:
        """Answer a question, shapes (Q, d) and (Q,)."""
        ...


@dataclass(frozen=True, eq=False)
class Question:
    """Rows to ask an objective about.

    Attributes:
        parameters: Of each row, shape (Q, d), float32. Rows may share memory.
        points: Position of each row's point in the data set, shape (Q,).
        kind: What the answer is for: "clean", "query", "validation", "test".
    """

    parameters: Tensor
    points: Tensor
    kind: str = "query"

    def __len__(self) -> int:
        return len(self.points)

    def part(self, begin: int, end: int) -> Question:
        """Some rows that follow each other."""
        return Question(self.parameters[begin:end], self.points[begin:end], self.kind)

    def digest(self) -> bytes:
        """Tells this question from any other, bit by bit."""
        mark = hashlib.sha256(f"{self.kind} {tuple(self.parameters.shape)}".encode())
        values = self.parameters
        if len(values) > 1 and values.stride(0) == 0:  # one vector for all rows
            mark.update(b"shared")
            values = values[:1]
        mark.update(values.contiguous().numpy().tobytes())
        mark.update(self.points.contiguous().numpy().tobytes())
        return mark.digest()


def checked(answer: Tensor, question: Question) -> Tensor:
    """An answer as float32 of shape (Q, k), the loss in the first column.

    Raises:
        ObjectiveError: If it is not one finite loss for each row.
    """
    answer = torch.as_tensor(answer).detach().cpu()
    columns = answer.unsqueeze(1) if answer.dim() == 1 else answer
    if columns.dim() != 2 or len(columns) != len(question) or columns.size(1) < 1:
        raise ObjectiveError(
            f"the objective must return one loss for each of the {len(question)} rows (or columns "
            f"with the loss first), but returned shape {tuple(answer.shape)}"
        )
    columns = columns.to(torch.float32)
    bad = torch.nonzero(~torch.isfinite(columns[:, 0])).flatten()
    if len(bad):
        points = question.points[bad[:3]].tolist()
        raise ObjectiveError(
            f"the objective returned a loss that is not finite for {len(bad)} of {len(question)} "
            f"rows, the first of points {points}; return a large finite one instead"
        )
    return columns
