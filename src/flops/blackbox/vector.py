"""The parameters of a black box as a model: an identity whose output rows are the candidates.

Every row has its own copy of the parameters, so noise on the outputs of an identity is noise on the
parameters, and its local VJP is the gradient. The estimators of the engine apply unchanged: the
engine perturbs this model, and an objective evaluates the rows that come out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from flops.engine.groups import ResolvedGroup
from flops.engine.layout import Layouts
from flops.engine.rows import Cost, LocalRunner, part
from flops.engine.step import Query
from flops.estimators.base import Estimator
from flops.passes.batch import Batch
from flops.passes.guards import RandomState
from flops.passes.replay import Passes


class Part(nn.Module):
    """A part of the vector, expanded to all rows."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self, points: Tensor) -> Tensor:
        """The part for each row."""
        values = self.values.flatten(0, -2) if self.values.dim() > 2 else self.values
        return values.expand(len(points), *values.shape)  # positions x channels


class Vector(nn.Module):
    """A vector of parameters, in named parts.

    Args:
        start: Initial values, shape (d,).
        shapes: Shape of each part by name.
    """

    def __init__(self, start: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        values = start.detach().to("cpu", torch.float32, copy=True).split(sizes)
        self.names = tuple(shapes)
        self.parts = nn.ModuleList(
            Part(part.reshape(shape).clone())
            for part, shape in zip(values, shapes.values(), strict=True)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Parameters of each row, shape (rows, d)."""
        return torch.cat([part(points).flatten(1) for part in self.parts], 1)

    @property
    def flat(self) -> Tensor:
        """All parameters, shape (d,)."""
        return torch.cat([p.detach().flatten() for p in self.parameters()])

    def load(self, values: Tensor) -> None:
        """Set the parameters, shape (d,)."""
        with torch.no_grad():
            sizes = [p.numel() for p in self.parameters()]
            for parameter, part in zip(self.parameters(), values.split(sizes), strict=True):
                parameter.copy_(part.view_as(parameter))

    def name(self, module: str) -> str:
        """Name of the part that a module of this model holds."""
        prefix, _, number = module.rpartition(".")
        return self.names[int(number)] if prefix == "parts" else module


class VectorEngine:
    """Binds an estimator to a vector, and turns its queries into rows of parameters.

    Args:
        vector: The parameters.
        estimator: Estimates their gradient.
        queries: Mean queries per point.
        name: Of the group of all parameters.
    """

    def __init__(self, vector: Vector, estimator: Estimator, queries: float, name: str) -> None:
        self._vector, self._seen = vector, torch.empty(0)
        self.modules = dict(vector.named_modules())
        parts = {n: m for n, m in self.modules.items() if isinstance(m, Part)}
        self.group = ResolvedGroup(name, parts, tuple(vector.parameters()), estimator, queries)
        estimator.check(self.group)
        batch = self._batch(torch.arange(2))
        layouts = Layouts(vector, self.modules, [self.group], False, None, False)
        self._layout, _ = layouts.find(batch, RandomState())
        self.binding = self._layout.bindings[0]

    def _batch(self, points: Tensor) -> Batch:
        def losses(outputs: Tensor, targets: None) -> Tensor:
            self._seen = outputs
            return outputs.sum(1)  # the objective evaluates the true losses

        return Batch(points, None, losses)

    def runner(self, points: Tensor, chunk: int, cost: Cost) -> LocalRunner:
        """Passes over a batch of points."""
        batch = self._batch(points)
        passes = Passes(self._vector, self.modules, self._layout.structure, batch)
        return LocalRunner(passes, {}, len(points), chunk, cost)

    def rows(self, query: Query, shared: bool) -> Tensor:
        """Parameters of the rows of a query, shape (rows, d); they share memory if equal."""
        runner, rows = query.step.runner, query.rows
        some = part(rows, 0, 1) if shared else rows
        perturbation = replace(query.perturbation, evaluate=None)  # the objective has the outputs
        with torch.no_grad():
            runner.run(query.step.group.name, perturbation, some)
        found, self._seen = self._seen.detach(), torch.empty(0)
        found = found.clone() if found.is_inference() else found
        return found[:1].expand(len(rows.points), -1) if shared else found
