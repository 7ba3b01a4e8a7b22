"""Backpropagation, for reference and diagnostics: charged three forward passes per point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flops.engine.groups import ResolvedGroup
from flops.engine.meetings import Work, completed
from flops.engine.queries import Estimate, Queries
from flops.errors import CoverageError
from flops.passes.checks import check_finite
from flops.passes.prefix import nothing
from flops.passes.replay import Passes
from flops.passes.structure import Use

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
        return completed(self.work(binding, queries))

    def work(self, binding: WholeModel, queries: Queries) -> Work[Estimate]:
        """The estimate, with a stop before every exchange with other processes."""
        parameters = binding.group.parameters
        passes, team = queries.passes, queries.team
        begin, end = team.span(queries.size)
        gradients: tuple[Tensor | None, ...] = (None,) * len(parameters)
        losses = torch.empty(0, dtype=queries.losses.dtype)
        with torch.enable_grad():
            if end > begin:
                points = torch.arange(begin, end)
                losses = passes.run(nothing(passes.structure), {}, points)
            if end > begin and not losses.requires_grad:
                raise CoverageError(
                    f"group '{binding.group.name}': the loss does not depend differentiably on "
                    "its parameters (the model detaches, or runs outside torch), so it cannot be "
                    "backpropagated; use LikelihoodRatio, SPSA or ES"
                )
            if team.alone:
                check_finite(losses.detach(), "the forward pass")
            if end > begin:
                mean = losses.sum() / queries.size if not team.alone else losses.mean()
                gradients = torch.autograd.grad(mean, parameters, allow_unused=True)
        queries.ledger.local += COST * queries.size
        yield
        seen = team.join(losses.detach().cpu(), begin, queries.size)
        check_finite(seen, "the forward pass")
        found = zip(parameters, gradients, strict=True)
        kept = team.add_gradients({p: g for p, g in found if g is not None}, parameters)
        return Estimate(kept, loss=float(seen.mean()))


@dataclass(frozen=True)
class WholeModel:
    """All uses of the group's parameters."""

    group: ResolvedGroup
    needed: frozenset[int] = frozenset()

    def covers(self, use: Use) -> bool:
        """Wherever it is."""
        return use.parameter in {id(p) for p in self.group.parameters}
