"""Base class of gradient estimators: ask, tell, write.

An estimator defines the perturbation and turns losses into gradients; the engine runs the rows
(`flops.engine`), on a local model, on several ranks, or by a remote service. In a step every group
has one `Estimation`:

    plan    the next rows to run; None after the last
    ask     perturbation of a chunk of rows (point, draw, sign)
    tell    their losses (and outputs, if available) -> directional derivatives
    collect directional derivatives of all ranks, in the order of the plan
    write   gradients, parameter by parameter
    finish  statistics for allocators and reports

Before `write`, only the estimation itself may change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from flops.passes.local_vjp import Gradients, LocalTarget
from flops.passes.loss_view import LossView
from flops.passes.ranks import Replicas
from flops.passes.replay import Action, Edit, Passes, Prefix
from flops.passes.selection import Selection
from flops.perturb.activations import Sites
from flops.perturb.draws import Draws
from flops.subspace.config import Shaping
from flops.subspace.report import ShapedEstimate
from flops.subspace.step import Decide


@dataclass(frozen=True)
class Queries:
    """The queries of one group in one step.

    Attributes:
        name: The group's name.
        size: Number of points B.
        losses: Clean losses, shape (B,); NaN without a clean pass.
        counts: Queries per point, shape (B,).
        key: (seed, step, group), the key of all noise.
        ids: Identity of each point for its noise.
        memory: State of the estimator for this group. Replace entries, never modify them in place:
            a failed step must keep the old ones.
        recorded: Calls whose clean outputs can be replayed.
        view: What the loss reads of the model's outputs, for estimators that do, too.
        decide: Called with each discrete decision; returns the decision to use, which a journal may
            have recorded on another machine. None uses this process's.
    """

    name: str
    size: int
    losses: Tensor
    counts: Tensor
    key: tuple[int, ...]
    ids: list[int]
    memory: dict[str, Any]
    recorded: frozenset[int] = frozenset()
    view: LossView | None = None
    decide: Decide | None = None


@dataclass(frozen=True)
class Rows:
    """A chunk of rows: points, draws and signs of shape (R,), and their weights 1/A_j.

    The weight of a row is one over the number of *draws* of its point. So a point's estimate is the
    mean over its draws, and all points have the weight 1/B, for any counts.
    """

    points: Tensor
    draws: Tensor
    signs: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Perturbation:
    """Perturbation of the forward pass of some rows.

    Attributes:
        prefix: Calls to replay.
        edits: Changes to the outputs of calls.
        around: Actions that calls run instead of their own forward.
        evaluate: Runs the pass, loss function included, and returns more than its losses; None
            for the losses alone. The pass takes a function that sees the model's outputs.
    """

    prefix: Prefix
    edits: Mapping[int, Edit] = field(default_factory=dict)
    around: Mapping[int, Action] = field(default_factory=dict)
    evaluate: Callable[[Callable[..., Tensor]], RowResults] | None = None


@dataclass(frozen=True)
class RowResults:
    """Results of a chunk of rows: losses, shape (R,), and outputs, shape (R, K), if any.

    Forward differentiation returns the tangents of the losses as outputs, shape (R, 1).
    """

    losses: Tensor
    outputs: Tensor | None = None


@dataclass(frozen=True)
class PointPlan:
    """Per-point draws: ``counts`` queries of each point, ``unit`` of them per draw."""

    counts: Tensor
    unit: int


@dataclass(frozen=True)
class BatchPlan:
    """Shared draws: all points run under each perturbation; ``prefixes`` has one for each."""

    prefixes: Sequence[Prefix]


Plan = PointPlan | BatchPlan


@dataclass
class Estimate:
    """Statistics of an estimation, besides the gradients.

    Attributes:
        derivatives: Directional derivative w = (l - b) / sigma of each draw, shape (draws,).
        points: The point of each draw; None for shared draws.
        factors: Trace of one draw's covariance over its squared derivative: one number, or one
            for each point, shape (B,).
        directions: Number of noise dimensions if a point's draws are mutually orthogonal, else 0.
        shaped: Energies and errors under shaped noise, whose estimate is no mean over draws.
        loss: Mean loss, of an estimator without a clean pass.
    """

    derivatives: Tensor = field(default_factory=lambda: torch.empty(0))
    points: Tensor | None = None
    factors: float | Tensor = 0.0
    directions: int = 0
    shaped: ShapedEstimate | None = None
    loss: float | None = None


class Sink(Protocol):
    """Receives the gradients of a group."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient; the sink owns the tensor."""
        ...

    def add_draws(self, draws: Draws) -> None:
        """The complete gradient of a group, as keys and scalars."""
        ...

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """Mark gradients as complete; the pass that computed them has reached ``after``."""
        ...


class Runner(Protocol):
    """Services of the engine for estimations."""

    @property
    def passes(self) -> Passes:
        """Passes over the batch."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks that share the rows."""
        ...

    @property
    def replicas(self) -> Replicas:
        """Ranks with other points of the same step."""
        ...

    @property
    def fitters(self) -> Replicas | None:
        """Ranks that share the rows, each with a part of the points to fit; None for none."""
        ...

    def share(self, count: int) -> tuple[int, int]:
        """First and last + 1 of this rank's share of ``count`` items."""
        ...

    def own_points(self, plan: PointPlan) -> tuple[int, int]:
        """First and last + 1 of this rank's points, including those without rows."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        ...

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sum of gradients over the ranks, some of which may have none."""
        ...

    def local_share(self, sites: Sites) -> float:
        """Cost of the local VJPs of a point, in forward passes."""
        ...

    def local_vjps(
        self,
        sites: Sites,
        deltas: Mapping[int, Mapping[int, Tensor]],
        sink: Sink,
        points: tuple[int, int] | None = None,
        watch: Callable[[Tensor, LocalTarget, Any], None] | None = None,
    ) -> None:
        """Sum of the local VJPs of some points; charged for all. See `flops.passes.local_vjp`.

        Args:
            sites: Noise sites, with the targets in the order in which they end.
            deltas: Deltas, shape (B, ...).
            sink: Receives the gradients.
            points: First and last + 1 of the points; None for all.
            watch: Called with points, each target and its arguments.
        """
        ...

    def charge(self, cost: float) -> None:
        """Charge forward equivalents of work that is neither a query nor a local VJP."""
        ...


class Estimation(ABC):
    """One group's part of one step.

    Attributes:
        partial: Whether `write` adds this rank's part of a sum over the ranks that share its rows.
        joint: Whether `write` adds the gradient of all replicas' points, from sums over them
            (`flops.passes.ranks`); else it is that of this replica's, and the engine sums them.
        dtype: Type of the values that `tell` returns.
        width: Values that `tell` returns for each draw or row; their shape is (draws, width) if
            that is more than one.
        withheld: Whether the gradient is too unreliable for ``.grad``; known after `collect`.
    """

    partial: bool = False
    joint: bool = False
    dtype: torch.dtype = torch.float32
    width: int = 1
    withheld: bool = False

    @abstractmethod
    def plan(self) -> Plan | None:
        """The next rows to run; None after the last."""

    def ask(self, rows: Rows) -> Perturbation:
        """Perturbation of a chunk of rows; for a `BatchPlan`, all ``draws`` are its number."""
        raise NotImplementedError

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Results of the last `ask`; returns values for all ranks.

        These are directional derivatives, one per draw of a `PointPlan`, or losses, one per row of
        a `BatchPlan`.
        """
        return results.losses.cpu()

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Receives the values of `tell` for all rows of the plan on all ranks, and their points."""
        return

    @abstractmethod
    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """Add the gradient of the mean loss times a scale to the sink, and complete it."""

    @abstractmethod
    def finish(self) -> Estimate:
        """Statistics for the allocator and the report, after `write`."""


class Estimator(ABC):
    """Estimates the gradient of the mean loss with respect to a group's parameters.

    Attributes:
        sigma: Noise scale; None without noise, "auto" if it is searched for.
        shaping: Options of shaped noise; None for isotropic noise.
        shared: Whether all points of the batch see the same draw; counts must then be equal.
        seeded: Whether its gradients are keys and scalars (`Sink.add_draws`).
        whole_model: Whether the estimate covers all uses of its parameters in the model.
        makes_queries: Whether it makes queries; backpropagation does not.
        has_sigma: Whether its queries have a noise scale; exact derivatives have none.
        work: Work of a query, in forward passes of the part of the model that runs.
        unit: Queries per draw: 1, or 2 for antithetic pairs.
        minimum_queries: Minimum queries per point; 0 if it makes none.
        reads_outputs: Whether it reads the outputs of the model (`Queries.view`).
        reads_clean: Whether it reads the clean losses. If no estimator does, there is no clean
            pass, and `Estimate.loss` is reported instead.
    """

    sigma: float | Literal["auto"] | None = None
    shaping: Shaping | None = None
    shared: bool = False
    whole_model: bool = False
    makes_queries: bool = True
    has_sigma: bool = True
    work: float = 1.0

    @property
    def unit(self) -> int:  # noqa: D102
        return 1

    @property
    def seeded(self) -> bool:  # noqa: D102
        return False

    @property
    def reads_clean(self) -> bool:  # noqa: D102
        return True

    @property
    def reads_outputs(self) -> bool:  # noqa: D102
        return False

    @property
    def minimum_queries(self) -> int:  # noqa: D102
        return self.unit if self.makes_queries else 0

    def check(self, selection: Selection) -> None:
        """Raise if this estimator does not support a group, before any pass."""
        return

    @abstractmethod
    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> Any:
        """Find noise sites and prefixes in the structure of the forward pass; returns a Binding."""

    def verify(self, binding: Any, passes: Passes) -> None:
        """Check assumptions by trials with a few rows; once per kind of input."""
        return

    @abstractmethod
    def begin(self, binding: Any, queries: Queries, runner: Runner) -> Estimation:
        """Start one group's part of a step; the model must not change."""
