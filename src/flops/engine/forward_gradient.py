"""`ForwardGradient`: fills ``.grad`` from forward passes, in place of ``loss.backward()``.

One step: clean pass, allocation, queries of each group at the same parameters, local products,
and only then ``.grad``; so an error anywhere leaves parameters and gradients as they were.
"""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flops.allocators.base import Allocator, Learner, Signal
from flops.allocators.equal import Equal
from flops.diagnostics.exact import cosine, exact_gradients
from flops.engine.allocation import check_allocators, floor_of, spending, total_budgets
from flops.engine.auto_groups import automatic_groups
from flops.engine.collectives import ProcessGroup, Team, fingerprint
from flops.engine.groups import Group, ResolvedGroup, resolve
from flops.engine.layout import Layout, Layouts
from flops.engine.meetings import together
from flops.engine.report import ForwardEquivalents, StepReport
from flops.engine.step import Session, opened
from flops.errors import FlopsError
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.passes.batch import Batch, LossFunction, positions
from flops.passes.checks import (
    check_modes,
    unwrap,
)
from flops.passes.claims import Claim
from flops.passes.interrupts import Hold, Whole
from flops.passes.local_vjp import Gradients, add_gradients
from flops.passes.memory import free_room, rows_for

SCHEMA = 1


class ForwardGradient:
    """Estimates gradients of a model's mean loss with forward passes only.

    Args:
        model: Any module. Wrappers (DDP, a compiled copy) are unwrapped.
        loss_fn: ``losses = loss_fn(outputs, targets)``, one loss per point, shape (B,).
        groups: What is perturbed together; None for automatic groups.
        allocator: How a group's budget is spread over the points; each group gets a copy.
        embedding: Module (or its name) whose output allocators may compare points by.
        seed: Key of all noise.
        chunk: Most rows in one pass of queries or local products; None goes by the free memory. The
            clean pass takes the whole batch at once.
        reuse: Replay what lies before the first noise instead of computing it again.
        process_group: Processes of `torch.distributed` that share the queries of every step;
            "auto" takes the default group where one is initialised, None runs alone. All of them
            must call `estimate` with the same batch in the same order, and the same index.

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
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        if chunk is not None and operator.index(chunk) < 2:
            raise ValueError(f"chunk must be at least 2 rows, not {chunk}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (outputs, targets), not {loss_fn!r}")
        if isinstance(allocator, type) or not isinstance(allocator, Allocator | None):
            raise TypeError(f"allocator must be an allocator like Equal(), not {allocator!r}")
        self.model = unwrap(model)
        self.loss_fn, self.embedding, self.reuse = loss_fn, embedding, reuse
        self.seed, self.process_group = operator.index(seed), process_group
        self.chunk = chunk
        self._room = free_room(self.model)
        self.modules: Mapping[str, nn.Module] = dict(self.model.named_modules())
        if groups is None:
            groups = automatic_groups(self.modules, LikelihoodRatio())
        self.groups: list[ResolvedGroup] = resolve(groups, self.modules, self.model)
        self.allocators = {g.name: copy.deepcopy(allocator or Equal()) for g in self.groups}
        check_allocators(self.groups, self.allocators)
        self.memory: dict[str, dict[str, Any]] = {group.name: {} for group in self.groups}
        self.step = 0
        embed = any(isinstance(a, Learner) and a.wants_embeddings for a in self.allocators.values())
        self._layouts = Layouts(self.model, self.modules, self.groups, reuse, embedding, embed)

    def estimate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        index: Tensor | Sequence[int] | None = None,
        exact: bool = False,
    ) -> StepReport:
        """Add the estimated gradient of the batch's mean loss to ``.grad``.

        It is done as a whole or not at all, also under Ctrl-C and other signals whose handlers
        raise: these are raised at once in the model's own code and the loss function, else at the
        next call of a module; in the last moment of a step, when all of it is written.

        While it runs, no other thread may call it on this model or on one that shares modules or
        trainable parameters with it: that is an error before anything changes. Threads that train
        one model must take turns, with a lock around `estimate` *and* the optimizer's step.

        Args:
            inputs: A tensor, a tuple (``model(*inputs)``) or a dict (``model(**inputs)``).
            targets: What ``loss_fn`` compares the outputs with.
            index: The points' positions in the data set; noise is then keyed by them.
            exact: Backpropagate as well, for the cosines in the report only (not charged, NaN
                for a model that cannot be differentiated).

        Returns:
            What the step saw and cost.

        Raises:
            FlopsError: With parameters, gradients, hooks and random state as before. So do
                errors of the model, and what signal handlers raise.
        """
        with Hold():
            return self._estimate(inputs, targets, index, exact)

    def _estimate(
        self, inputs: Any, targets: Any, index: Tensor | Sequence[int] | None, exact: bool
    ) -> StepReport:
        started = time.perf_counter()
        memory = {name: dict(kept) for name, kept in self.memory.items()}
        allocators = {name: copy.copy(a) for name, a in self.allocators.items()}
        with self.session(inputs, targets, index, skip=True) as session:
            works = (
                spending(
                    group,
                    session.layout.bindings[number],
                    allocators[group.name],
                    self.signal(number, session),
                    session.queries(group.name, self.key(number), memory[group.name]),
                )
                for number, group in enumerate(self.groups)
            )
            spent = together(works) if not session.team.alone else session.in_turn(works)
            truth = exact_gradients(self.model, session.passes.batch) if exact else None
        ledger = session.ledger
        named = {group.name: s for group, s in zip(self.groups, spent, strict=True)}
        report = StepReport(
            loss=_mean_loss(session, [s.loss for s in spent]),
            queries=ledger.rows,
            forward_equivalents=ForwardEquivalents(
                session.cost, ledger.queries, ledger.local, float(session.probe)
            ),
            counts={name: s.counts for name, s in named.items()},
            dropped={name: s.dropped for name, s in named.items()},
            snr={name: s.signal_to_noise for name, s in named.items()},
            seconds=time.perf_counter() - started,
            shaping={name: s.shaping for name, s in named.items() if s.shaping is not None},
            cosine={n: cosine(s.gradients, truth) for n, s in named.items()} if exact else {},
        )
        # Nothing is written before this line, so that whatever fails leaves all as it was.
        with Whole():
            self._commit([s.gradients for s in spent])
            self.memory, self.allocators = memory, allocators
            self.step += 1
        return report

    @contextmanager
    def session(
        self,
        inputs: Any,
        targets: Any = None,
        index: Tensor | Sequence[int] | None = None,
        skip: bool = False,
    ) -> Iterator[Session]:
        """A batch after its clean pass, for queries that start from it; see `flops.engine.step`.

        Nothing of the model changes while it is open, and the random state is restored after it.
        With ``skip`` the clean pass is left out where nothing reads it (MeZO, backpropagation):
        losses are NaN then.
        """
        if torch.is_inference_mode_enabled():
            raise FlopsError("call estimate outside of torch.inference_mode: it makes gradients")
        batch = Batch(inputs, targets, self.loss_fn)
        places = positions(index, batch.size)
        check_modes(self.modules)
        team = Team.find(self.process_group)
        if not team.alone:
            prints = fingerprint(self.model, batch.leaves, places, self.step, self.seed)
            team.check_same(prints)
        room = int(team.first(torch.tensor(self._room)))

        def rows(layout: Layout) -> int:
            return self.chunk or rows_for(room, layout.structure, layout.noise)

        reads = self._reads_clean if skip else None
        model = opened(self.model, self.modules, self._layouts, batch, reads, rows, team)
        with Hold(), Claim(self.modules), model as session:
            session.places = places
            yield session

    def embed_points(self) -> None:
        """Also look at embeddings, though no allocator of this engine wants them."""
        self._layouts = Layouts(
            self.model, self.modules, self.groups, self.reuse, self.embedding, embed=True
        )

    def key(self, number: int) -> tuple[int, int, int]:
        """Key of the noise of a group in this step."""
        return (self.seed, self.step, number)

    def signal(self, number: int, session: Session) -> Signal:
        """What a group's allocator may know about this batch."""
        group, size = self.groups[number], len(session.losses)
        embedding = session.layout.embedding
        return Signal(
            session.losses.detach().cpu(),
            total_budgets(self.groups, self.allocators, self.memory, size)[group.name],
            group.estimator.unit,
            floor_of(self.allocators[group.name], group),
            group.name,
            session.places,
            None if embedding is None else embedding.value[:size],
            self.key(number),
        )

    def _reads_clean(self, layout: Layout) -> bool:
        if (
            layout.embedding is not None
            or not all(isinstance(allocator, Equal) for allocator in self.allocators.values())
            or any(getattr(g.estimator, "reads_clean", True) for g in self.groups)
        ):
            return True
        # A pass only to replay a part of it pays if that part is large, or used often.
        prefixes = [getattr(binding, "prefix", None) for binding in layout.bindings]
        pairs = zip(prefixes, self.groups, strict=True)
        return bool(sum(prefix.share * group.queries for prefix, group in pairs if prefix) >= 1)

    def _commit(self, found: Sequence[Gradients]) -> None:
        total: Gradients = {}
        for gradients in found:
            add_gradients(total, gradients)
            gradients.clear()
        with torch.no_grad():
            while total:  # one by one, so that copy and original never stand side by side for all
                parameter, gradient = total.popitem()
                if parameter.grad is not None:
                    parameter.grad.add_(gradient.to(parameter))
                else:  # a copy: autograd may hand out one tensor for two parameters
                    parameter.grad = gradient.to(parameter, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs beside model and optimizer."""
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "step": self.step,
            "room": self._room,
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
        for part in ("allocators", "memory"):
            if set(state[part]) != set(names):
                raise ValueError(f"state has {part} of groups {sorted(state[part])}, not {names}")
        loaded = {name: copy.copy(allocator) for name, allocator in self.allocators.items()}
        for name, allocator in loaded.items():
            allocator.load_state_dict(copy.deepcopy(state["allocators"][name]))
        self.allocators = loaded
        self.seed, self.step = int(state["seed"]), int(state["step"])
        self._room = int(state.get("room", self._room))
        self.memory = copy.deepcopy(dict(state["memory"]))


def _mean_loss(session: Session, seen: Sequence[float | None]) -> float:
    """Of the clean pass; without one, what the estimators saw in its place."""
    if session.cost:
        return float(session.losses.mean())
    found = [loss for loss in seen if loss is not None]
    return sum(found) / len(found)
