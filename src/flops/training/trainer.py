"""Model, data, engine, optimizer and progress of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from flops.engine.collectives import Collectives
from flops.engine.report import StepReport
from flops.errors import FlopsError
from flops.perturb.random import generator
from flops.training.config import RunConfig
from flops.training.device import find_device
from flops.training.progress import Evaluation, RunProgress, budget_mark, epoch_mark, step_mark
from flops.training.task import open_task

ORDER = 0x0D0E  # stream of the order of points, distinct from other uses of the seed
PROBE_ROWS = 16  # rows for tracing the model


class Trainer:
    """The state of one run, advanced by `flops.training.loop.train`.

    Args:
        config: Options of the run.

    Attributes:
        task: Model and data.
        ranks: Collectives of the processes that train together.
        latest: Queries of each training point at its last visit, over all groups; -1 for a point
            not visited yet.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.ranks = config, Collectives.of("auto")
        self.task = open_task(config, find_device(config.device))
        self.model, self.data = self.task.model, self.task.data
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(config, trainable)
        self.fg = self.task.engine()
        self.fg.parallel = config.parallel
        self.progress = RunProgress()
        self.latest = torch.full((len(self.data.train),), -1)
        self._order: tuple[int, list[Tensor]] = (-1, [])
        self._probe()

    @property
    def points(self) -> int:
        """Number of training points."""
        return len(self.data.train)

    @property
    def batches(self) -> list[Tensor]:
        """Rows of the batches of the current epoch, a function of seed and epoch."""
        epoch = self.progress.epoch
        if self._order[0] != epoch:
            source = generator(self.config.seed, epoch, ORDER)
            order = torch.randperm(len(self.data.train), generator=source)
            self._order = (epoch, list(order.split(self.config.batch)))
        return self._order[1]

    def _probe(self) -> None:
        """Trace the model with its untrained weights.

        At the first step instead, a resumed run would trace trained weights and be charged twice.
        """
        rows = self.batches[0][:PROBE_ROWS]
        with self.fg.session(*self.task.batch(rows), index=rows, skip=True) as session:
            cost = float(session.probe) + session.clean
            self.progress.charge("probe", self.ranks.size * cost)  # every process does this

    def step(self) -> dict[str, Any]:
        """One step; returns its line for the metrics."""
        rows = self.batches[self.progress.position]
        first, last = self._share(len(rows))
        inputs, targets = self.task.batch(rows[first:last])
        self.optimizer.zero_grad()
        every = self.config.cosine_steps
        compared = every is not None and self.progress.step % every == 0
        report = self.fg.estimate(inputs, targets, index=rows[first:last], exact=compared)
        self.task.limit_gradients()
        if self.config.schedule == "cosine":  # from the state only, so that runs can resume
            self._set_rate(0.5 * (1 + math.cos(math.pi * self.fraction())))
        self.optimizer.step()
        counts = sum(report.counts.values(), torch.zeros(last - first, dtype=torch.long))
        if last - first < len(rows):
            counts = self.ranks.all_gather(counts, first, len(rows))
        self.latest[rows] = counts
        self.progress.add(report, len(rows))
        line = self._line(report, len(rows))
        if self.progress.position == len(self.batches):
            self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
        return line

    def _share(self, size: int) -> tuple[int, int]:
        """First and last + 1 of this process's points of a batch.

        Of a batch with fewer points than processes (the last of an epoch) they share the queries.
        """
        shared = self.config.parallel == "query" or size < self.ranks.size
        self.fg.parallel = "query" if shared else "data"
        return (0, size) if shared else self.ranks.shard(size)

    def _set_rate(self, share: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = share * self.config.learning_rate

    def _line(self, report: StepReport, points: int) -> dict[str, Any]:
        progress = self.progress
        return {
            "kind": "step",
            "step": progress.step,
            "epoch": self.epochs_done,
            "points": points,
            "loss": report.loss,
            "queries": progress.queries,
            "forward_equivalents": progress.spent,
            "parts": dict(progress.parts),
            "group_queries": {n: int(counts.sum()) for n, counts in report.counts.items()},
            "snr": dict(report.snr),
            "shaping": {
                n: {
                    "k": s.k,
                    "explained_variance": s.explained_variance,
                    "reliability": s.reliability,
                    "explore": s.explore,
                    "withheld": s.withheld,
                }
                for n, s in report.shaping.items()
            },
            **({"cosine": dict(report.cosine)} if report.cosine else {}),
            "seconds": progress.seconds,
        }

    @property
    def epochs_done(self) -> float:
        """Epochs, including the fraction of the current one."""
        return self.progress.epoch + self.progress.position / len(self.batches)

    def due(self) -> list[str]:
        """Marks newly reached at this step.

        A budget is used up when a step of the last one's cost would exceed it.
        """
        config, progress, found = self.config, self.progress, []
        if progress.position == 0 and (
            progress.epoch == config.epochs
            or (config.evaluate_every is not None and progress.epoch % config.evaluate_every == 0)
        ):
            found.append(epoch_mark(progress.epoch))
        if progress.step and (
            progress.step == config.steps
            or (config.evaluate_steps is not None and progress.step % config.evaluate_steps == 0)
        ):
            found.append(step_mark(progress.step))
        # The first step may include tracing or pruning, so its cost does not predict the next.
        per_point = (progress.per_point or 0.0) if progress.step > 1 else 0.0
        after = progress.spent + per_point * len(self.batches[progress.position])
        budgets = [*config.marks, *([] if config.budget is None else [config.budget])]
        if progress.step:
            found += [budget_mark(b) for b in sorted(set(budgets)) if after > b * (1 + 1e-12)]
        return [mark for mark in found if mark not in progress.reached]

    @property
    def stops(self) -> list[str]:
        """Marks at which training may end."""
        config, marks = self.config, []
        if config.epochs is not None:
            marks.append(epoch_mark(config.epochs))
        if config.budget is not None:
            marks.append(budget_mark(config.budget))
        if config.steps is not None:
            marks.append(step_mark(config.steps))
        return marks

    def finished(self) -> bool:
        """Whether the first or the last of the stops is reached, as configured."""
        met = [mark in self.progress.reached for mark in self.stops]
        return any(met) if self.config.until == "first" else all(met)

    def fraction(self) -> float:
        """Completed fraction of the run."""
        parts = []
        if self.config.epochs is not None:
            parts.append(self.epochs_done / self.config.epochs)
        if self.config.budget is not None:
            parts.append(self.progress.spent / self.config.budget)
        if self.config.steps is not None:
            parts.append(self.progress.step / self.config.steps)
        return min(1.0, max(parts) if self.config.until == "first" else min(parts))

    def evaluate(self, marks: list[str]) -> Evaluation:
        """Evaluate on the validation split and, at a stop and if configured, the test split."""
        accuracy, loss = self.task.measure(self.data.validation, self.ranks)
        test = None
        if self.config.test and set(marks) & set(self.stops):
            test, _ = self.task.measure(self.data.test, self.ranks)
        progress = self.progress
        found = Evaluation(
            progress.step,
            self.epochs_done,
            accuracy,
            loss,
            progress.queries,
            progress.spent,
            progress.seconds,
            tuple(marks),
            test,
        )
        progress.evaluations.append(found)
        return found

    def weights(self) -> dict[str, Tensor]:
        """The model's weights without frozen ones."""
        parameters = self.model.named_parameters(
            remove_duplicate=False
        )  # tied parameters have two names
        frozen = {n for n, p in parameters if not p.requires_grad}
        return {n: value for n, value in self.model.state_dict().items() if n not in frozen}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights."""
        return {
            "engine": self.fg.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.to_dict(),
            "latest": self.latest.clone(),
            "points": [len(self.data.train), len(self.data.validation), len(self.data.classes)],
            "labels": self._digest(),
        }

    def _digest(self) -> int:
        """Hash of the contents of the data, such as labels and classes."""
        found = 0
        for content in self.task.contents():
            found = crc32(content, found)
        return found

    def load_state_dict(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises:
            FlopsError: If the data have changed since the run was started.
        """
        now = self.state_dict()["points"]
        if now != state["points"]:
            raise FlopsError(
                f"the run was started with {state['points']} training points, validation points "
                f"and classes, and '{self.config.data}' has {now} now; restore the data, or start "
                "a new run"
            )
        if state.get("labels", self._digest()) != self._digest():
            raise FlopsError(
                f"labels or classes of '{self.config.data}' have changed since the run was "
                "started; restore the data, or start a new run"
            )
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        if unexpected or trained & set(missing):
            raise FlopsError("the checkpoint is of another model; start a new run")
        self.fg.load_state_dict(state["engine"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = RunProgress.from_dict(state["progress"])
        self.latest = state["latest"].clone()


def _optimizer(config: RunConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, rate, weight_decay=decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, rate, weight_decay=decay)
