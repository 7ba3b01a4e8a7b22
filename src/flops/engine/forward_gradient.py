"""`ForwardGradient`: fills ``.grad`` from forward passes, in place of ``loss.backward()``.

One step: clean pass, allocation and queries of all groups at the same parameters, and only then
``.grad``; so an error leaves parameters and gradients unchanged (`flops.engine.step`).
"""

from __future__ import annotations

import copy
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Signal
from flops.allocators.equal import Equal
from flops.allocators.gaussian import Gaussian
from flops.engine.auto_groups import block_groups, default_groups
from flops.engine.budgets import budgets_of
from flops.engine.collectives import axes
from flops.engine.fingerprint import fingerprint
from flops.engine.gradients import Update
from flops.engine.group_step import GroupStep, budget_of, floor_of
from flops.engine.groups import Group, ResolvedGroup, check_allocators, check_seeded, resolve
from flops.engine.layout import Layout, Layouts
from flops.engine.report import StepReport
from flops.engine.state import SCHEMA, check_state, memory_in
from flops.engine.step import (
    Session,
    clean_pass,
    report_of,
    run_queries,
    write_gradients,
    writer_of,
)
from flops.engine.summary import summary
from flops.errors import CoverageError, FlopsError
from flops.estimators.exact import exact_gradients
from flops.passes.batch import Batch, LossFunction, positions
from flops.passes.checks import unwrap
from flops.passes.guards import (
    Atomic,
    Claim,
    DeferSignals,
    RandomState,
    check_deterministic,
    check_modes,
    no_autocast_cache,
    slow_attention_path,
)
from flops.passes.local_vjp import Gradients
from flops.passes.loss_view import joint_view
from flops.passes.ranks import Axes, Parallel, ProcessGroup, in_group
from flops.passes.replay import Passes


class ForwardGradient:
    """Estimates gradients of a model's mean loss by forward passes.

    Args:
        model: Any module. Wrappers (DDP, a compiled copy) are unwrapped.
        loss_fn: ``losses = loss_fn(outputs, targets)``, one loss per point, shape (B,).
        groups: Groups to perturb. None chooses everything: stages of the model's blocks, shaped
            noise, sigma and queries; see ``print(fg)``. Others are in `flops.presets`.
        allocator: Allocation of a group's budget over the points; each group gets a copy. None for
            the Gaussian allocator with automatic groups, and an equal one with given groups.
        embedding: Module (or its name) whose output measures the similarity of points.
        seed: Seed of all noise.
        chunk: Largest number of rows in a pass of queries or local VJPs; None for the batch size,
            or more if rows take little memory.
        reuse: Replay modules before the first noise instead of recomputing them.
        process_group: Process group of `torch.distributed` that trains together; "auto" is the
            default group if initialised, None a single process. A `DeviceMesh` with dimensions
            "data" and "query" has ranks of both kinds.
        parallel: What its ranks share. "data": each has its own batch, of any size, and a step is
            that of all points. "query": all have the same batch in the same order (and the same
            index), and share its queries; for few points with many queries. Also an attribute,
            which may be set between two steps, on all ranks.

    Raises:
        CoverageError: If groups, targets and trainable parameters do not fit together.
        TypeError: If an argument is of the wrong type.
        ValueError: If the chunk is too small.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        groups: Group | Sequence[Group] | None = None,
        *,
        allocator: Allocator | None = None,
        embedding: nn.Module | str | None = None,
        seed: int = 0,
        chunk: int | None = None,
        reuse: bool = True,
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
        parallel: Parallel = "data",
    ) -> None:
        if chunk is not None and operator.index(chunk) < 2:
            raise ValueError(f"chunk must be at least 2 rows, not {chunk}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (outputs, targets), not {loss_fn!r}")
        if not isinstance(allocator, Allocator | None):
            raise TypeError(f"allocator must be an allocator like Equal(), not {allocator!r}")
        self.model = unwrap(model)
        self.loss_fn, self.embedding, self.reuse = loss_fn, embedding, reuse
        self.seed, self.process_group = operator.index(seed), process_group
        self.chunk, self.parallel = chunk, parallel
        self.modules: Mapping[str, nn.Module] = dict(self.model.named_modules())
        self._automatic = groups is None
        if groups is None:
            groups = default_groups(self.modules)
            allocator = Gaussian("standardised") if allocator is None else allocator
        self.groups: list[ResolvedGroup] = resolve(groups, self.modules, self.model)
        self.allocators = {g.name: copy.deepcopy(allocator or Equal()) for g in self.groups}
        check_allocators(self.groups, self.allocators)
        self.memory: dict[str, dict[str, Any]] = {group.name: {} for group in self.groups}
        self.steps = 0
        self._reads = any(g.estimator.reads_clean for g in self.groups) or not all(
            isinstance(allocator, Equal) for allocator in self.allocators.values()
        )
        self._reads_outputs = any(g.estimator.reads_outputs for g in self.groups)
        embed = any(a.wants_embeddings for a in self.allocators.values())
        self._layouts = Layouts(self.model, self.modules, self.groups, reuse, embedding, embed)

    def estimate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        index: Tensor | Sequence[int] | None = None,
        scale: float = 1.0,
        exact: bool = False,
        update: Update | None = None,
    ) -> StepReport:
        """Add the estimated gradient of the batch's mean loss to ``.grad``.

        With data-parallel ranks (`parallel`) the batch is that of all of them: gradient, loss and
        costs are of all points, and the same on all ranks; only ``counts`` of the report are of
        this rank's points.

        It is atomic, also under Ctrl-C and other signals whose handlers raise: their exceptions are
        raised immediately in the model's code and the loss function, else at the next call of a
        module; those during the commit are raised after it.

        No other thread may call it at the same time on this model, or on one that shares modules or
        trainable parameters with it: that raises an error. Threads that train the same model need a
        lock around `estimate` *and* the optimizer's step.

        Args:
            inputs: A tensor, a tuple (``model(*inputs)``) or a dict (``model(**inputs)``).
            targets: Second argument of ``loss_fn``.
            index: The points' positions in the data set, as keys of their noise.
            scale: Factor of the gradient, for gradient accumulation: with each micro-batch's share
                of the points, the sum is the gradient of the whole batch.
            exact: Also backpropagate, only for the cosines in the report (not charged; NaN if the
                model is not differentiable).
            update: Receives the gradients instead of ``.grad``: called with a group's name and its
                gradient as keys and scalars, it returns the squared norm of the gradient. All
                groups must have shared draws. For `flops.optim.ZerothOrderSGD`.

        Returns:
            Results and cost of the step.

        Raises:
            FlopsError: With parameters, gradients, hooks and random state restored, as for errors
                of the model and of signal handlers.
        """
        if not (isinstance(scale, float | int) and math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be a positive number, not {scale!r}")
        if update is not None:
            self.check_seeded()
            if exact:
                raise ValueError("exact=True compares gradients in .grad; leave update out")
        try:
            with DeferSignals(), ExitStack() as atomic:
                return self._estimate(inputs, targets, index, float(scale), exact, update, atomic)
        except BaseException as error:
            self._axes().fail(error)
            raise

    def _estimate(
        self,
        inputs: Any,
        targets: Any,
        index: Tensor | Sequence[int] | None,
        scale: float,
        exact: bool,
        update: Update | None,
        atomic: ExitStack,
    ) -> StepReport:
        started = time.perf_counter()
        memory = {name: dict(kept) for name, kept in self.memory.items()}
        allocators = {name: copy.copy(a) for name, a in self.allocators.items()}
        with self._session(inputs, targets, index, skip=True, join=True) as session:
            replicas = session.replicas
            budgets = torch.tensor([*self.budgets(session.size, replicas.max).values()])
            if any(group.automatic for group in self.groups):  # ranks may round differently
                budgets = session.ranks.broadcast(budgets)
            steps = [
                GroupStep(
                    group,
                    session.layout.bindings[number],
                    allocators[group.name],
                    self.signal(number, session, int(budgets[number])),
                    session.queries(group.name, self.key(number), memory[group.name]),
                    session.runner,
                )
                for number, group in enumerate(self.groups)
            ]
            run_queries(steps, session)
            truth: Gradients | None = None
            if exact:
                trained = [p for group in self.groups for p in group.parameters]
                truth = exact_gradients(self.model, session.passes.batch, replicas, trained)
            writer = writer_of(steps, session, update)
            if writer.streaming:  # hooks may change parameters: from here on the step is atomic
                atomic.enter_context(Atomic())
            write_gradients(steps, session, writer, truth, scale)
        report = report_of(steps, session, started, exact)
        # Without hooks nothing is written before this line: errors leave everything unchanged.
        with Atomic():
            writer.commit()
            self.memory, self.allocators = memory, allocators
            self.steps += 1
        return report

    def check_seeded(self) -> None:
        """Raise if a group's gradient is not given by keys and scalars."""
        check_seeded(self.groups)

    @contextmanager
    def session(
        self,
        inputs: Any,
        targets: Any = None,
        index: Tensor | Sequence[int] | None = None,
        skip: bool = False,
    ) -> Iterator[Session]:
        """A batch after its clean pass, for queries; see `flops.engine.step`.

        The model must not change while it is open; the random state is restored afterwards. With
        ``skip`` there is no clean pass if nothing reads it (MeZO, backpropagation): losses are NaN.
        Data-parallel ranks do not join their batches here, as they do in `estimate`.
        """
        with self._session(inputs, targets, index, skip, join=False) as session:
            yield session

    @contextmanager
    def _session(
        self,
        inputs: Any,
        targets: Any,
        index: Tensor | Sequence[int] | None,
        skip: bool,
        join: bool,
    ) -> Iterator[Session]:
        if torch.is_inference_mode_enabled():
            raise FlopsError("call estimate outside of torch.inference_mode: it makes gradients")
        batch = Batch(inputs, targets, self.loss_fn)
        places = positions(index, batch.size)
        check_modes(self.modules)
        run = partial(fingerprint, self.model, self.steps, self.seed)
        ranks, replicas = self._axes().meet(batch, places, run, join)
        with DeferSignals(), Claim(self.modules):
            state = RandomState()
            try:
                with slow_attention_path(), no_autocast_cache():
                    layout, probe = self._find(batch, state)
                    passes = Passes(self.model, self.modules, layout.structure, batch)
                    chunk = self.chunk or layout.chunk(batch.size)
                    reads = not skip or self._reads_clean(layout)
                    check = partial(check_deterministic, state, self.modules)
                    with torch.no_grad():
                        losses, record, view = clean_pass(
                            passes, layout, reads, ranks, check, self._reads_outputs
                        )
                        clean = float(batch.size) if reads else 0.0
                        if self._reads_outputs:
                            view = joint_view(view, replicas)
                        yield Session(
                            layout,
                            passes,
                            record,
                            losses,
                            places,
                            chunk,
                            ranks,
                            replicas,
                            clean,
                            probe,
                            view,
                        )
                    check()
            finally:
                state.restore()

    def _axes(self) -> Axes:
        group, parallel = self.process_group, self.parallel
        return axes(group, parallel) if in_group(group, parallel) else Axes()

    def _find(self, batch: Batch, state: RandomState) -> tuple[Layout, float]:
        """The batch's layout and its cost; automatic groups are no stages where they cannot be."""
        try:
            return self._layouts.find(batch, state)
        except CoverageError as error:
            if not self._automatic or self._layouts.latest is not None:
                raise
            groups = resolve(block_groups(self.modules), self.modules, self.model)
            layouts = self._layouts.of(groups)
            found = layouts.find_without_stages(batch, state, error)
            self.groups, self._layouts = groups, layouts
            return found

    def inspect(self, inputs: Any, targets: Any = None) -> Self:
        """Trace the forward pass for ``print(fg)``, without an estimate."""
        with self.session(inputs, targets, skip=True):
            return self

    def __str__(self) -> str:
        return summary(self.groups, self._layouts.latest)

    def __repr__(self) -> str:
        model, names = type(self.model).__name__, [group.name for group in self.groups]
        return f"ForwardGradient({model}, groups={names}, steps={self.steps})"

    def embed_points(self) -> None:
        """Compute embeddings, even if no allocator needs them."""
        self._layouts = Layouts(
            self.model, self.modules, self.groups, self.reuse, self.embedding, embed=True
        )

    def key(self, number: int) -> tuple[int, int, int]:
        """(seed, step, group), the key of a group's noise."""
        return (self.seed, self.steps, number)

    def signal(self, number: int, session: Session, budget: int | None = None) -> Signal:
        """Inputs of a group's allocator for this batch; its configured budget if None is given."""
        group, size = self.groups[number], session.size
        embedding = session.layout.embedding
        return Signal(
            session.losses.detach().cpu(),
            budget_of(group, size) if budget is None else budget,
            group.estimator.unit,
            floor_of(self.allocators[group.name], group),
            group.name,
            session.index,
            None if embedding is None else embedding.value[:size],
            self.key(number),
        )

    def budgets(self, size: int, agree: Callable[[Tensor], Tensor] | None = None) -> dict[str, int]:
        """Queries of each group for ``size`` points; groups may share a total.

        Args:
            size: Points.
            agree: Makes queries per point equal on ranks that round differently.
        """
        shared = any(allocator.across_groups for allocator in self.allocators.values())
        if shared or any(group.automatic for group in self.groups):
            return budgets_of(self.groups, self.allocators, self.memory, size, self.steps, agree)
        return {group.name: budget_of(group, size) for group in self.groups}

    def _reads_clean(self, layout: Layout) -> bool:
        if layout.embedding is not None or self._reads:
            return True
        return layout.saved_passes(self.groups) >= 1  # by replays: else a clean pass costs more

    def state_dict(self) -> dict[str, Any]:
        """State for resuming, besides that of model and optimizer."""
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "step": self.steps,
            "groups": [group.name for group in self.groups],
            "allocators": {n: copy.deepcopy(a.state_dict()) for n, a in self.allocators.items()},
            "memory": copy.deepcopy(self.memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: If the state has another version or other groups.
        """
        check_state(state, [group.name for group in self.groups])
        loaded = {name: copy.copy(allocator) for name, allocator in self.allocators.items()}
        for name, allocator in loaded.items():
            allocator.load_state_dict(copy.deepcopy(state["allocators"][name]))
        self.allocators = loaded
        self.seed, self.steps = int(state["seed"]), int(state["step"])
        self.memory = memory_in(state)
