"""Backpropagation, for reference and diagnostics: charged three forward passes per point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.errors import CoverageError
from flops.estimators.base import Estimate, Estimation, Estimator, Queries, Runner, Sink
from flops.passes.batch import Batch, check_finite
from flops.passes.binding import Binding
from flops.passes.local_vjp import Gradients
from flops.passes.ranks import Replicas
from flops.passes.replay import Passes, empty_prefix
from flops.passes.selection import Selection
from flops.passes.structure import Use

BACKWARD = 3.0  # forward equivalents of backpropagation, per point


@dataclass(frozen=True)
class Exact(Estimator):
    """The exact gradient by one backward pass through the whole model.

    It makes no queries (`queries` of its group is ignored), has no noise, and covers every use of
    its parameters.
    """

    whole_model = True
    makes_queries = False
    reads_clean = False

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> WholeModel:
        """Bind the parameters."""
        return WholeModel(selection)

    def begin(self, binding: WholeModel, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step."""
        return _Backward(binding.selection, queries, runner)


class _Backward(Estimation):
    """Backpropagates in phase 1, where models that are not differentiable must fail."""

    partial = True

    def __init__(self, selection: Selection, queries: Queries, runner: Runner) -> None:
        begin, end = runner.share(queries.size)
        gradients, losses = _backpropagate(selection.parameters, begin, end, queries.size, runner)
        if len(losses) and not losses.requires_grad:
            raise CoverageError(
                f"group '{selection.name}': the loss does not depend differentiably on "
                "its parameters (the model detaches or runs outside torch, or the loss is a "
                "reward), so it cannot be backpropagated; use LikelihoodRatio, SPSA or ES"
            )
        whole = torch.zeros(queries.size, dtype=queries.losses.dtype)
        whole[begin:end] = losses.detach().to("cpu", whole.dtype)
        whole = runner.sum(whole)
        check_finite(whole, "the forward pass")
        self._loss = float(whole.mean())
        pairs = zip(selection.parameters, gradients, strict=True)
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


def _backpropagate(
    parameters: Sequence[nn.Parameter], begin: int, end: int, size: int, runner: Runner
) -> tuple[Sequence[Tensor | None], Tensor]:
    """Gradients of some points' part of the mean loss, and their losses."""
    runner.charge(BACKWARD * size)
    if begin == end:
        return [None] * len(parameters), torch.empty(0)
    single = runner.world_size == 1
    with torch.enable_grad():
        passes = runner.passes
        losses = passes.run(empty_prefix(passes.structure), {}, torch.arange(begin, end))
        if single:
            check_finite(losses.detach(), "the forward pass")
        if not losses.requires_grad:
            return [None] * len(parameters), losses
        mean = losses.mean() if single else losses.sum() / size
        return torch.autograd.grad(mean, parameters, allow_unused=True), losses


class WholeModel(Binding):
    """All uses of the group's parameters."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def covers(self, use: Use) -> bool:
        """Always, for the group's parameters."""
        return use.parameter in {id(p) for p in self.selection.parameters}


def exact_gradients(
    model: nn.Module,
    batch: Batch,
    replicas: Replicas | None = None,
    trained: Sequence[nn.Parameter] = (),
) -> Gradients | None:
    """Backpropagated gradients of the mean loss; None if it is not differentiable.

    Args:
        model: The model.
        batch: The batch, or this rank's part of it.
        replicas: Ranks with other points, if the loss is that of all.
        trained: The parameters whose gradients are summed over them.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    found: Gradients | None = None
    with torch.enable_grad():
        losses = batch.losses(model)
        if losses.requires_grad:
            gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
            pairs = zip(parameters, gradients, strict=True)
            found = {p: g for p, g in pairs if g is not None}
    if replicas is None or not replicas.several:
        return found
    own = {p: g * replicas.share for p, g in (found or {}).items()}
    return replicas.sum_gradients(own, trained) or None


def cosine(found: Gradients, exact: Gradients | None) -> float:
    """Cosine of two gradients over the parameters of the first."""
    if exact is None or not all(p in exact for p in found) or not found:
        return float("nan")
    a = torch.cat([g.flatten().double() for g in found.values()])
    b = torch.cat([exact[p].flatten().double() for p in found])
    return float(F.cosine_similarity(a, b, dim=0))
