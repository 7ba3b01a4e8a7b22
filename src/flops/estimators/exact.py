"""Backpropagation, for reference and diagnostics: charged three forward passes per point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flops.errors import CoverageError
from flops.groups import ResolvedGroup
from flops.guards import check_finite
from flops.queries import Estimate, Queries
from flops.replay import Passes, nothing
from flops.structure import Use

COST = 3.0


@dataclass(frozen=True)
class Exact:
    """The exact gradient by one backward pass through the whole model.

    It makes no queries (`queries` of its group is not used), has no noise, and covers every use
    of its parameters.
    """

    shared = False
    whole_model = True
    unit = 1
    minimum_queries = 0
    reads_clean = False

    def check(self, group: ResolvedGroup) -> None:
        """Any group will do."""

    def bind(self, group: ResolvedGroup, passes: Passes, reuse: bool) -> WholeModel:
        """Remember the parameters."""
        return WholeModel(group)

    def estimate(self, binding: WholeModel, queries: Queries) -> Estimate:
        """Backpropagate the mean loss."""
        parameters = binding.group.parameters
        passes = queries.passes
        with torch.enable_grad():
            points = torch.arange(queries.size)
            losses = passes.run(nothing(passes.structure), {}, points)
            if not losses.requires_grad:
                raise CoverageError(
                    f"group '{binding.group.name}': the loss does not depend differentiably on "
                    "its parameters (the model detaches, or runs outside torch), so it cannot be "
                    "backpropagated; use LikelihoodRatio, SPSA or ES"
                )
            check_finite(losses, "the forward pass")
            gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
        queries.ledger.local += COST * queries.size
        found = zip(parameters, gradients, strict=True)
        kept = {p: g for p, g in found if g is not None}
        return Estimate(kept, loss=float(losses.detach().mean()))


@dataclass(frozen=True)
class WholeModel:
    """All uses of the group's parameters."""

    group: ResolvedGroup
    needed: frozenset[int] = frozenset()

    def covers(self, use: Use) -> bool:
        """Wherever it is."""
        return use.parameter in {id(p) for p in self.group.parameters}
