"""`ForwardGradient`: fills ``.grad`` from forward passes, in place of ``loss.backward()``.

One step: clean pass, allocation, queries of each group at the same parameters, local products,
and only then ``.grad``; so an error anywhere leaves parameters and gradients as they were.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Signal
from flops.allocators.equal import Equal
from flops.automatic import automatic_groups
from flops.batch import Batch, LossFunction, positions
from flops.errors import BatchError, CoverageError, FlopsError, QueryError
from flops.estimators.base import Binding
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.groups import Group, ResolvedGroup, resolve
from flops.guards import (
    Buffers,
    RandomState,
    check_counts,
    check_deterministic,
    check_finite,
    check_modes,
    no_autocast_cache,
    slow_attention_path,
    unwrap,
)
from flops.local import Gradients, add_gradients
from flops.queries import Estimate, ForwardEquivalents, Ledger, Queries
from flops.replay import Passes
from flops.structure import FEW, MORE, Structure, inspect
from flops.trace import signal_to_noise

SCHEMA = 1
DEFAULT_CHUNK = 256
MOST_LAYOUTS = 64


@dataclass(frozen=True)
class StepReport:
    """What one step saw and cost.

    Attributes:
        loss: Mean clean loss of the batch.
        queries: Rows run under noise, over all groups.
        forward_equivalents: Cost in passes of one point; its parts are attributes.
        counts: Queries of each point, shape (B,), by group.
        snr: Signal-to-noise ratio of the gradient estimate, by group.
        seconds: Time of the step.
    """

    loss: float
    queries: int
    forward_equivalents: ForwardEquivalents
    counts: dict[str, Tensor]
    snr: dict[str, float]
    seconds: float


@dataclass
class _Layout:
    """What is known about one kind of input.

    ``alone`` if it was seen with a single point, which cannot show whether points mix.
    """

    structure: Structure
    bindings: list[Binding]
    alone: bool

    @property
    def needed(self) -> frozenset[int]:
        return frozenset().union(*(binding.needed for binding in self.bindings))


class ForwardGradient:
    """Estimates gradients of a model's mean loss with forward passes only.

    Args:
        model: Any module. Wrappers (DDP, a compiled copy) are unwrapped.
        loss_fn: ``losses = loss_fn(outputs, targets)``, one loss per point, shape (B,).
        groups: What is perturbed together; None for automatic groups.
        allocator: How a group's budget is spread over the points; each group gets a copy.
        embedding: Module (or its name) whose output allocators may compare points by.
        seed: Key of all noise.
        chunk: Most rows in one pass; None for a default.
        reuse: Replay what lies before the first noise instead of computing it again.

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
        allocator: Allocator | None = None,
        embedding: nn.Module | str | None = None,
        seed: int = 0,
        chunk: int | None = None,
        reuse: bool = True,
    ) -> None:
        if chunk is not None and chunk < 2:
            raise ValueError(f"chunk must be at least 2 rows, not {chunk}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (outputs, targets), not {loss_fn!r}")
        if isinstance(allocator, type) or not isinstance(allocator, Allocator | None):
            raise TypeError(f"allocator must be an allocator like Equal(), not {allocator!r}")
        self.model = unwrap(model)
        self.loss_fn, self.embedding, self.reuse = loss_fn, embedding, reuse
        self.seed = operator.index(seed)
        self.chunk = chunk or DEFAULT_CHUNK
        self.modules: Mapping[str, nn.Module] = dict(self.model.named_modules())
        if groups is None:
            groups = automatic_groups(self.modules, LikelihoodRatio())
        self.groups: list[ResolvedGroup] = resolve(groups, self.modules, self.model)
        self.allocators = {g.name: copy.deepcopy(allocator or Equal()) for g in self.groups}
        self.memory: dict[str, dict[str, Any]] = {group.name: {} for group in self.groups}
        self.step = 0
        self._layouts: dict[Any, _Layout] = {}
        self._trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def estimate(
        self, inputs: Any, targets: Any = None, *, index: Tensor | Sequence[int] | None = None
    ) -> StepReport:
        """Add the estimated gradient of the batch's mean loss to ``.grad``.

        Args:
            inputs: A tensor, a tuple (``model(*inputs)``) or a dict (``model(**inputs)``).
            targets: What ``loss_fn`` compares the outputs with.
            index: The points' positions in the data set; noise is then keyed by them.

        Returns:
            What the step saw and cost.

        Raises:
            FlopsError: With parameters, gradients, hooks and random state as before.
        """
        started = time.perf_counter()
        if torch.is_inference_mode_enabled():
            raise FlopsError("call estimate outside of torch.inference_mode: it makes gradients")
        batch = Batch(inputs, targets, self.loss_fn)
        places = positions(index, batch.size)
        ids: list[int] = torch.arange(batch.size).tolist() if places is None else places.tolist()
        check_modes(self.modules)
        state = RandomState()
        ledger = Ledger()
        memory = {name: dict(kept) for name, kept in self.memory.items()}
        try:
            with slow_attention_path(), no_autocast_cache():
                layout, probe = self._layout(batch, state)
                passes = Passes(self.model, self.modules, layout.structure, batch)
                with torch.no_grad():
                    losses, record = passes.clean(layout.needed)
                check_deterministic(state, self.modules)
                check_finite(losses, "the clean pass")
                counts = self._allocate(losses, places)
                estimates = []
                for number, (group, binding) in enumerate(
                    zip(self.groups, layout.bindings, strict=True)
                ):
                    queries = Queries(
                        group.name,
                        passes,
                        record,
                        losses,
                        counts[group.name],
                        (self.seed, self.step, number),
                        ids,
                        self.chunk,
                        ledger,
                        memory[group.name],
                    )
                    with torch.no_grad():
                        estimates.append(group.estimator.estimate(binding, queries))
                check_deterministic(state, self.modules)
        finally:
            state.restore()
        named = zip(self.groups, estimates, strict=True)
        report = StepReport(
            loss=float(losses.mean()),
            queries=ledger.rows,
            forward_equivalents=ForwardEquivalents(
                float(batch.size), ledger.queries, ledger.local, float(probe)
            ),
            counts=counts,
            snr={group.name: signal_to_noise(e, batch.size) for group, e in named},
            seconds=time.perf_counter() - started,
        )
        # Nothing is written before this line, so that whatever fails leaves all as it was.
        self._commit(estimates)
        self.memory = memory
        self.step += 1
        return report

    def _layout(self, batch: Batch, state: RandomState) -> tuple[_Layout, int]:
        """The structure for this kind of input, and how many rows it took to find out."""
        trainable = {id(p): n for n, p in self.model.named_parameters() if p.requires_grad}
        before = {n: id(p) for n, p in self._trainable.items()}
        changed = {n for n, _ in before.items() ^ {n: i for i, n in trainable.items()}.items()}
        if changed:
            raise CoverageError(
                f"parameters were frozen, unfrozen or replaced since this ForwardGradient was "
                f"made: {sorted(changed)[:5]}. Make a new one, and load the state_dict of this one."
            )
        modes = tuple(module.training for module in self.modules.values())
        kinds = tuple((p.dtype, p.device) for p in self.model.parameters())
        key = (batch.signature(), modes, kinds)
        known = self._layouts.get(key)
        if known and not (known.alone and batch.size > 1):
            return known, 0
        buffers = Buffers(self.modules)
        try:
            with torch.no_grad():
                structure = inspect(self.model, self.modules, batch, trainable)
                check_deterministic(state, self.modules)
                buffers.check()
                # A trial of what can be reused compares losses, so they must be numbers.
                check_finite(structure.losses, "the clean pass", structure.rows)
                passes = Passes(self.model, self.modules, structure, batch)
                bindings = [g.estimator.bind(g, passes, self.reuse) for g in self.groups]
        except BatchError:  # losses that differ from pass to pass may have a simpler cause
            check_deterministic(state, self.modules)
            buffers.check()
            raise
        finally:
            buffers.restore()
        self._check_uses(structure, bindings, trainable)
        structure.outputs = {}
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)))  # the oldest
        self._layouts[key] = _Layout(structure, bindings, batch.size == 1)
        return self._layouts[key], FEW + MORE + passes.trials * MORE

    def _check_uses(
        self, structure: Structure, bindings: Sequence[Binding], trainable: Mapping[int, str]
    ) -> None:
        for use in structure.uses:
            if not any(binding.covers(use) for binding in bindings):
                where = [structure.calls[c].name for c in use.calls if structure.calls[c].name]
                place = f"inside '{where[-1]}'" if where else "in the model's own forward"
                raise CoverageError(
                    f"parameter '{trainable[use.parameter]}' is also used {place}, which lies in "
                    "no group: its gradient would miss that use. Add that module to a group, or "
                    "give the parameter as Group(parameters=[...], estimator=SPSA(shared=True))."
                )

    def _allocate(self, losses: Tensor, index: Tensor | None) -> dict[str, Tensor]:
        counts = {}
        for group in self.groups:
            if group.estimator.minimum_queries == 0:  # it makes none
                counts[group.name] = torch.zeros(len(losses), dtype=torch.long)
                continue
            signal = Signal(
                losses.detach().cpu(),
                group.budget(len(losses)),
                group.estimator.unit,
                group.estimator.minimum_queries,
                group.name,
                index,
            )
            found = counts[group.name] = self.allocators[group.name].allocate(signal)
            check_counts(found, signal)
            if group.estimator.shared and len(set(found.tolist())) > 1:
                raise QueryError(
                    f"group '{group.name}': its draws are shared by the batch, so every point "
                    "must get the same number of queries; make `queries` a whole number of "
                    f"draws ({group.estimator.unit} queries each), or use independent draws"
                )
        return counts

    def _commit(self, estimates: Sequence[Estimate]) -> None:
        total: Gradients = {}
        for estimate in estimates:
            add_gradients(total, estimate.gradients)
            estimate.gradients.clear()
        with torch.no_grad():
            while total:  # one by one, so that copy and original never stand side by side for all
                parameter, gradient = total.popitem()
                if parameter.grad is not None:
                    parameter.grad.add_(gradient.to(parameter))
                else:  # a copy: autograd may hand out one tensor for two parameters
                    parameter.grad = gradient.to(parameter, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        # Layouts know parameters by their identity, which no copy shares: it finds its own.
        return {**self.__dict__, "_layouts": {}}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs beside model and optimizer."""
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "step": self.step,
            "groups": [group.name for group in self.groups],
            "allocators": {n: copy.deepcopy(a.state_dict()) for n, a in self.allocators.items()},
            "memory": copy.deepcopy(self.memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: If the state is of another version or of other groups.
        """
        if state.get("schema") != SCHEMA:
            raise ValueError(f"state has schema {state.get('schema')}, this version reads {SCHEMA}")
        names = [group.name for group in self.groups]
        if list(state["groups"]) != names:
            raise ValueError(f"state is of groups {list(state['groups'])}, not {names}")
        missing = {"seed", "step", "allocators", "memory"} - state.keys()
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}; was it made by state_dict()?")
        for name, allocator in self.allocators.items():
            allocator.load_state_dict(copy.deepcopy(state["allocators"][name]))
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self.memory = copy.deepcopy(dict(state["memory"]))
