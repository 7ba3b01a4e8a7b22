"""One group's gradient that goes nowhere; for diagnostics and studies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flops.allocators.base import Allocator, Signal
from flops.engine.gradients import Collector
from flops.engine.group_step import GroupStep
from flops.engine.groups import ResolvedGroup
from flops.engine.step import Run, Session, run_queries, run_query
from flops.estimators.base import Queries
from flops.passes.local_vjp import Gradients


@dataclass(frozen=True)
class Spent:
    """A group's gradient that goes nowhere, and the step behind it."""

    gradients: Gradients
    step: GroupStep


def spend(
    session: Session,
    group: ResolvedGroup,
    binding: Any,
    allocator: Allocator,
    signal: Signal,
    queries: Queries,
    run: Run = run_query,
) -> Spent:
    """Both phases of one group, into a dict instead of ``.grad``.

    Args:
        session: The batch.
        group: The group.
        binding: What its estimator worked out.
        allocator: Spreads the queries; it learns.
        signal: What the allocator knows.
        queries: The group's part of the step.
        run: Runs a query.
    """
    step = GroupStep(group, binding, allocator, signal, queries, session.runner)
    run_queries([step], session, run)
    found = Collector()
    step.write(found)
    session.cost.add(step.cost)
    return Spent(found.gradients, step)
