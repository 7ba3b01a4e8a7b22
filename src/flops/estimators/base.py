"""The extension point for gradient estimators: ask, tell, write.

An estimator says what to perturb and what the answers mean; who runs the rows is somebody else
(`flops.engine`): a model on this machine, several ranks, or a service behind a journal. In a step
every group has one `Estimation`:

    plan    which rows it wants next; None when it has all it needs
    ask     perturbation of a chunk of rows (point, draw, sign)
    tell    their losses (and outputs, where they are shown) -> directional derivatives
    collect those of all ranks, in the order of the plan
    write   gradients, parameter by parameter
    finish  what allocators and reports want to know

Up to `collect` nothing may change but the estimation itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flops.passes.intercept import Action
from flops.passes.local_vjp import Gradients, LocalTarget
from flops.passes.replay import Edit, Passes, Prefix
from flops.passes.selection import Selection
from flops.perturb.activations import Sites
from flops.perturb.draws import Draws
from flops.subspace.config import Shaping
from flops.subspace.step import Decide, ShapedEstimate


@dataclass(frozen=True)
class Queries:
    """One group's part of one step, as its estimator sees it.

    Attributes:
        name: The group's name.
        size: Number of points B.
        losses: Clean losses, shape (B,); NaN if there was no clean pass.
        counts: Queries per point, shape (B,).
        key: (seed, step, group), the key of all noise.
        ids: Identity of each point for its noise.
        memory: What the estimator keeps from step to step for this group; part of the state.
            Replace entries, never write into them: a failed step must leave the old ones.
        recorded: Calls whose clean outputs can be replayed.
        clean: What else the clean pass showed, for estimators that read outputs, shape (B, K).
        decide: Told each discrete decision, which a journal may have kept from another machine;
            None where those of this process count.
    """

    name: str
    size: int
    losses: Tensor
    counts: Tensor
    key: tuple[int, ...]
    ids: list[int]
    memory: dict[str, Any]
    recorded: frozenset[int] = frozenset()
    clean: Tensor | None = None
    decide: Decide | None = None


@dataclass(frozen=True)
class Rows:
    """A chunk of rows: points, draws and signs of shape (R,), and their weights 1/A_j.

    The weight of a row is one over the number of *draws* of its point: the mean over a point's
    draws, however unequal the counts, so that every point keeps the weight 1/B in the batch.
    """

    points: Tensor
    draws: Tensor
    signs: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Perturbation:
    """How the forward pass of some rows differs from the clean one.

    Attributes:
        prefix: What is replayed.
        edits: Changes to the outputs of calls.
        around: What calls do instead of their own forward.
        evaluate: Runs the pass, loss function included, that it is given, where more than its
            losses is wanted; None runs it as it is.
    """

    prefix: Prefix
    edits: Mapping[int, Edit] = field(default_factory=dict)
    around: Mapping[int, Action] = field(default_factory=dict)
    evaluate: Callable[[Callable[[], Tensor]], Answer] | None = None


@dataclass(frozen=True)
class Answer:
    """What a chunk of rows showed: losses of shape (R,), and outputs of shape (R, K) if any.

    Outputs of a model on this machine are tangents of the losses, of shape (R, 1).
    """

    losses: Tensor
    outputs: Tensor | None = None


@dataclass(frozen=True)
class PointPlan:
    """Every point has draws of its own: ``counts`` queries, ``unit`` of them per draw."""

    counts: Tensor
    unit: int


@dataclass(frozen=True)
class BatchPlan:
    """All points run under each of some perturbations; ``prefixes`` has one for each."""

    prefixes: Sequence[Prefix]


Plan = PointPlan | BatchPlan


@dataclass
class Estimate:
    """What an estimation found out, beside the gradients.

    Attributes:
        derivatives: Directional derivative w = (l - b) / sigma of each draw, shape (draws,).
        points: The point of each draw; None if the draws are shared by the batch.
        factors: Trace of one draw's covariance over its squared derivative: one number, or one
            for each point, shape (B,).
        directions: Number of noise dimensions if a point's draws are mutually orthogonal, else 0.
        shaped: Energies and errors, where the estimate is not an average over the draws.
        loss: Mean loss, of an estimator that reads no clean pass.
    """

    derivatives: Tensor = field(default_factory=lambda: torch.empty(0))
    points: Tensor | None = None
    factors: float | Tensor = 0.0
    directions: int = 0
    shaped: ShapedEstimate | None = None
    loss: float | None = None


class Sink(Protocol):
    """Takes the gradients of a group."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient; the tensor now belongs to the sink."""
        ...

    def add_draws(self, draws: Draws) -> None:
        """The whole gradient of a group, as keys and scalars: nothing more comes for it."""
        ...

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """Nothing more comes for these parameters; the pass behind them has come to ``after``."""
        ...


class Runner(Protocol):
    """What an estimation may ask of the engine beside the answers to its queries."""

    @property
    def passes(self) -> Passes:
        """Passes over the batch."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks that share the rows."""
        ...

    def share(self, count: int) -> tuple[int, int]:
        """First and last + 1 of so many things that are this rank's."""
        ...

    def own_points(self, plan: PointPlan) -> tuple[int, int]:
        """First and last + 1 of the points whose rows run here, with those that have none."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """Largest value over the ranks, entry by entry."""
        ...

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sum over the ranks of gradients that some of them may lack."""
        ...

    def local_share(self, sites: Sites) -> float:
        """Cost of the local products of a point, in forward passes."""
        ...

    def products(
        self,
        sites: Sites,
        deltas: Mapping[int, Mapping[int, Tensor]],
        sink: Sink,
        points: tuple[int, int] | None = None,
        watch: Callable[[Tensor, LocalTarget, Any], None] | None = None,
    ) -> None:
        """Sum of the local products of some points; charged for all. See `flops.passes.local_vjp`.

        Args:
            sites: Where the noise was, with the targets in the order in which they end.
            deltas: Of shape (B, ...), with their batch first here.
            sink: Where the gradients go.
            points: First and last + 1 of the points; None for all of them.
            watch: Sees points, each target and its arguments.
        """
        ...

    def charge(self, cost: float) -> None:
        """Forward equivalents of work that is neither a query nor a local product."""
        ...


class Estimation(ABC):
    """One group's part of one step.

    Attributes:
        partial: Whether what `write` adds is this rank's part of a sum over the ranks.
        dtype: Of what `tell` returns.
    """

    partial: bool = False
    dtype: torch.dtype = torch.float32

    @abstractmethod
    def plan(self) -> Plan | None:
        """The rows that are wanted next; None if there are none."""

    def ask(self, rows: Rows) -> Perturbation:
        """Perturbation of a chunk of rows; of a `BatchPlan`, ``draws`` is its number for all."""
        raise NotImplementedError

    def tell(self, rows: Rows, answer: Answer) -> Tensor:
        """The answer to the last `ask`: returns what all ranks must know.

        One value per draw of a `PointPlan`, the directional derivatives; one per row of a
        `BatchPlan`, the losses.
        """
        return answer.losses.cpu()

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """What `tell` returned for all rows of the plan, on all ranks; the points of the values."""
        return

    @abstractmethod
    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """Hand over the gradient of the mean loss times a scale, and say what is complete."""

    @abstractmethod
    def finish(self) -> Estimate:
        """After `write`: what the allocator and the report want to know."""


class Estimator(ABC):
    """Estimates the gradient of the mean loss with respect to a group's parameters.

    Attributes:
        sigma: Noise scale; None without noise.
        shaping: Options of shaped noise; None for isotropic noise.
        shared: Whether all points of the batch see the same draw; counts must then be equal.
        seeded: Whether its gradients follow from keys and scalars (`Sink.add_draws`).
        whole_model: Whether the estimate contains all uses of a parameter wherever they are.
        makes_queries: Whether it makes any; backpropagation does not.
        has_sigma: Whether its queries have a noise scale; exact derivatives have none.
        work: Work of a query, in forward passes of the part of the model that runs.
        unit: Queries per draw: 1, or 2 for antithetic pairs.
        minimum_queries: Fewest queries per point; 0 if it makes none.
        reads_clean: Whether it looks at the clean losses. Where nothing does, there is no clean
            pass, and `Estimate.loss` is reported instead.
    """

    sigma: float | None = None
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
    def minimum_queries(self) -> int:  # noqa: D102
        return self.unit if self.makes_queries else 0

    def check(self, selection: Selection) -> None:
        """Refuse a group that this estimator cannot serve, before any pass."""
        return

    @abstractmethod
    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> Any:
        """Find targets and prefixes in the structure of the forward pass; returns a Binding."""

    def verify(self, binding: Any, passes: Passes) -> None:
        """Try out with a few rows what the structure cannot tell; once per kind of input."""
        return

    @abstractmethod
    def begin(self, binding: Any, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step; nothing in the model may change."""
