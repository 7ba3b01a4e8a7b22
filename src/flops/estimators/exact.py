"""Backpropagation, for reference and diagnostics: charged three forward passes per point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.errors import CoverageError
from flops.estimators.base import Estimate, Estimation, Estimator, Queries, Runner, Sink
from flops.passes.batch import Batch
from flops.passes.binding import Binding
from flops.passes.checks import check_finite
from flops.passes.local_vjp import Gradients
from flops.passes.replay import Passes
from flops.passes.selection import Selection
from flops.passes.structure import Use


@dataclass(frozen=True)
class Exact(Estimator):
    """The exact gradient by one backward pass through the whole model.

    It makes no queries (`queries` of its group is not used), has no noise, and covers every use
    of its parameters.
    """

    whole_model = True
    minimum_queries = 0
    reads_clean = False

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> WholeModel:
        """Remember the parameters."""
        return WholeModel(selection)

    def begin(self, binding: WholeModel, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step."""
        return _Backward(binding.selection, queries)


class _Backward(Estimation):
    """Backpropagates in the first phase: what cannot be differentiated must fail there."""

    partial = True

    def __init__(self, selection: Selection, queries: Queries) -> None:
        self._selection, self._queries = selection, queries
        self._found: list[tuple[nn.Parameter, Tensor]] = []
        self._loss = float("nan")

    def prepare(self, runner: Runner) -> None:
        """Gradients of this rank's points."""
        parameters: Sequence[nn.Parameter] = self._selection.parameters
        gradients, losses = runner.backpropagate(parameters)
        if len(losses) and not losses.requires_grad:
            raise CoverageError(
                f"group '{self._selection.name}': the loss does not depend differentiably on "
                "its parameters (the model detaches, or runs outside torch), so it cannot be "
                "backpropagated; use LikelihoodRatio, SPSA or ES"
            )
        begin, _ = runner.share(self._queries.size)
        whole = torch.zeros(self._queries.size, dtype=self._queries.losses.dtype)
        whole[begin : begin + len(losses)] = losses.detach().to("cpu", whole.dtype)
        whole = runner.sum(whole)
        check_finite(whole, "the forward pass")
        self._loss = float(whole.mean())
        pairs = zip(parameters, gradients, strict=True)
        self._found = [(p, g) for p, g in pairs if g is not None]

    def plan(self) -> None:
        """No queries."""
        return

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """Parameter by parameter."""
        while self._found:
            parameter, gradient = self._found.pop()
            sink.add(parameter, gradient if scale == 1 else gradient * scale)
            sink.complete([parameter])

    def finish(self) -> Estimate:
        """The mean loss."""
        return Estimate(loss=self._loss)


class WholeModel(Binding):
    """All uses of the group's parameters."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def covers(self, use: Use) -> bool:
        """Wherever it is."""
        return use.parameter in {id(p) for p in self.selection.parameters}


def exact_gradients(model: nn.Module, batch: Batch) -> Gradients | None:
    """Backpropagated gradients of the mean loss, or None where the model cannot be."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        losses = batch.losses(model)
        if not losses.requires_grad:
            return None
        found = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
    return {p: g for p, g in zip(parameters, found, strict=True) if g is not None}


def cosine(found: Gradients, exact: Gradients | None) -> float:
    """Cosine of two gradients over the parameters of the first."""
    if exact is None or not all(p in exact for p in found) or not found:
        return float("nan")
    a = torch.cat([g.flatten().double() for g in found.values()])
    b = torch.cat([exact[p].flatten().double() for p in found])
    return float(F.cosine_similarity(a, b, dim=0))
