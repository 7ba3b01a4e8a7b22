"""The extension point for gradient estimators: one file, one class that has these members."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from flops.engine.groups import ResolvedGroup
from flops.engine.meetings import Work
from flops.engine.queries import Estimate, Queries
from flops.passes.replay import Passes
from flops.passes.structure import Use


class Binding(Protocol):
    """What an estimator worked out for one group and one structure of the forward pass."""

    @property
    def needed(self) -> frozenset[int]:
        """Calls whose clean outputs must be recorded."""
        ...

    def covers(self, use: Use) -> bool:
        """Whether the estimate contains the effect of this use of a parameter."""
        ...


@runtime_checkable
class Estimator(Protocol):
    """Estimates the gradient of the mean loss with respect to a group's parameters.

    Attributes:
        unit: Queries per draw: 1, or 2 for antithetic pairs.
        minimum_queries: Fewest queries per point.
        shared: Whether all points of the batch see the same draw; counts must then be equal.
        whole_model: Whether the estimate contains all uses of a parameter wherever they are.

    One that never looks at the clean losses may say so by ``reads_clean = False`` and return the
    mean loss in its `Estimate`: where nothing else reads it, the clean pass is then left out. One
    may also have ``work(binding, queries)``, a generator that returns the `Estimate` and stops
    before every exchange with other processes, so that groups meet together
    (`flops.engine.meetings`).
    """

    @property
    def unit(self) -> int: ...  # noqa: D102

    @property
    def minimum_queries(self) -> int: ...  # noqa: D102

    @property
    def shared(self) -> bool: ...  # noqa: D102

    @property
    def whole_model(self) -> bool: ...  # noqa: D102

    def check(self, group: ResolvedGroup) -> None:
        """Refuse a group that this estimator cannot serve, before any pass."""
        ...

    def bind(self, group: ResolvedGroup, passes: Passes, reuse: bool) -> Any:
        """Find targets and prefixes in the structure of the forward pass; returns a Binding."""
        ...

    def estimate(self, binding: Any, queries: Queries) -> Estimate:
        """Run the queries and return the gradients; nothing in the model may change."""
        ...


def work_of(estimator: Estimator, binding: Any, queries: Queries) -> Work[Estimate]:
    """An estimate with a stop before every exchange, where the estimator has such stops."""
    work = getattr(estimator, "work", None)
    if work is None:
        return estimator.estimate(binding, queries)
    estimate: Estimate = yield from work(binding, queries)
    return estimate
