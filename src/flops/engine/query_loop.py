"""The query loop: rounds of all groups' rows, and their collection from all ranks.

Every group plans rows; they run chunk by chunk, anywhere; and ranks synchronise once per round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flops.engine.group_step import GroupStep
from flops.engine.rows import gathered, own_chunks
from flops.estimators.base import Perturbation, Plan, RowResults, Rows
from flops.passes.checks import check_finite
from flops.passes.ranks import Ranks


@dataclass(frozen=True)
class Query:
    """A chunk of rows of one group to run."""

    step: GroupStep
    rows: Rows
    perturbation: Perturbation


class QueryLoop:
    """All queries of a step: `next` returns a query to run, `tell` takes its results.

    Args:
        steps: The groups.
        size: Points of the batch.
        chunk: Largest number of rows of a query.
        ranks: Ranks that share the rows.
        together: Whether all groups run before any of them is collected, which several ranks do to
            wait for each other once; else one group after the other.
    """

    def __init__(
        self,
        steps: Sequence[GroupStep],
        size: int,
        chunk: int,
        ranks: Ranks,
        together: bool = False,
    ) -> None:
        self._steps, self._size, self._chunk, self._ranks = steps, size, chunk, ranks
        self._together = together or ranks.size > 1
        self._queue: deque[tuple[int, Rows]] = deque()
        self._round: dict[int, Plan] = {}
        self._values: dict[int, list[Tensor]] = {}

    def next(self) -> Query | None:
        """The next query; None after the last of all groups."""
        while not self._queue:
            if not self._advance():
                return None
        number, rows = self._queue.popleft()
        step = self._steps[number]
        return Query(step, rows, step.estimation.ask(rows))

    def tell(self, query: Query, results: RowResults) -> None:
        """Take the results of a query, and charge its group."""
        step, count = query.step, len(query.rows.points)
        step.cost.rows += count
        share = 1 - query.perturbation.prefix.share
        step.cost.queries += count * share * step.group.estimator.work
        values = step.estimation.tell(query.rows, results)
        self._values[self._steps.index(step)].append(values)

    def _advance(self) -> bool:
        """Synchronise the ranks, and collect the next plans."""
        if self._round:
            self._synchronise()
        self._round = {}
        for number, step in enumerate(self._steps):
            plan = step.plan()
            if plan is not None:
                self._round[number] = plan
                if not self._together:  # no other ranks: one group's noise at a time
                    break
        self._values = {number: [] for number in self._round}
        for number, plan in self._round.items():
            chunks = own_chunks(plan, self._size, self._chunk, self._ranks)
            self._queue.extend((number, rows) for rows in chunks)
        if self._ranks.size > 1 and not self._round:
            self._sum_costs()
        return bool(self._round)

    def _synchronise(self) -> None:
        found = gathered(
            [(p, self._values[n], self._steps[n].estimation) for n, p in self._round.items()],
            self._size,
            self._ranks,
        )
        for number, (values, points) in zip(self._round, found, strict=True):
            step = self._steps[number]
            if self._ranks.size > 1:  # on all ranks
                losses = values if values.dim() == 1 else values[:, 0]
                check_finite(losses, f"queries of group '{step.group.name}'", points)
            step.estimation.collect(values, points, step.runner)

    def _sum_costs(self) -> None:
        """Sum costs over the ranks."""
        costs = [value for s in self._steps for value in (float(s.cost.rows), s.cost.queries)]
        found = iter(self._ranks.sum_scalars(costs))
        for step in self._steps:
            step.cost.rows, step.cost.queries = round(next(found)), next(found)


Run = Callable[[Query], RowResults]
"""Evaluates a query."""


def run_query(query: Query) -> RowResults:
    """Run a query on the model."""
    return query.step.runner.run(query.step.group.name, query.perturbation, query.rows)
