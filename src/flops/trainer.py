"""A model, its data, its engine and its optimizer, with everything a resumed run needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from flops.classifying import clip_attention, loss_fn, measure
from flops.devices import find_device
from flops.distributed import Team
from flops.errors import FlopsError
from flops.methods import engine
from flops.noise import generator
from flops.options import Config
from flops.progress import Evaluation, Progress, budget_mark, epoch_mark
from flops.step_report import StepReport
from flops.tasks.images import ImageData, ImageFormat, load
from flops.tasks.models import image_format, load_model
from flops.tasks.weights import warn_of_other_classes

ORDER = 0x0D0E  # sets the order of the points apart from other uses of the seed
LOOK = 16  # rows by which the engine finds out how the model is built


class Trainer:
    """One run: the parts that `flops.training.train` moves forward.

    Args:
        config: What to train.

    Attributes:
        team: Processes that train together.
        latest: Queries that each training point got when it was last seen, over all groups;
            -1 for a point that was not seen yet.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.team = config, Team.find("auto")
        self.device = find_device(config.device)
        self.model, self.format, self.data = _load(config)
        self.model.to(self.device).eval()
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(config, trainable)
        self.fg = engine(self.model, loss_fn, config.recipe(), seed=config.seed, chunk=config.chunk)
        self.progress = Progress()
        self.latest = torch.full((len(self.data.train),), -1)
        self._order: tuple[int, list[Tensor]] = (-1, [])
        self._look()

    @property
    def points(self) -> int:
        """Training points."""
        return len(self.data.train)

    @property
    def batches(self) -> list[Tensor]:
        """Rows of the batches of the running epoch, a function of the seed and the epoch alone."""
        epoch = self.progress.epoch
        if self._order[0] != epoch:
            source = generator(self.config.seed, epoch, ORDER)
            order = torch.randperm(len(self.data.train), generator=source)
            self._order = (epoch, list(order.split(self.config.batch)))
        return self._order[1]

    def _look(self) -> None:
        """Let the engine find out how the model is built, on the untrained weights.

        It would do so at the first step; then a resumed run would look at trained weights, and
        pay twice.
        """
        rows = self.batches[0][:LOOK]
        pixels, labels = self._batch(rows)
        with self.fg.session(pixels, labels, index=rows, skip=True) as session:
            self.progress.charge("probe", float(session.probe) + session.cost)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        pixels, labels = self.data.train.batch(rows)
        return pixels.to(self.device), labels.to(self.device)

    def step(self) -> dict[str, Any]:
        """One step; returns its line for the metrics."""
        rows = self.batches[self.progress.position]
        pixels, labels = self._batch(rows)
        self.optimizer.zero_grad()
        report = self.fg.estimate(pixels, labels, index=rows)
        if self.config.clip_attention is not None:
            clip_attention(self.model, self.config.clip_attention)
        self.optimizer.step()
        self.latest[rows] = sum(report.counts.values(), torch.zeros(len(rows), dtype=torch.long))
        self.progress.add(report, len(rows))
        line = self._line(report, len(rows))
        if self.progress.position == len(self.batches):
            self.progress.epoch, self.progress.position = self.progress.epoch + 1, 0
        return line

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
            "snr": dict(report.snr),
            "shaping": {n: {"k": s.k, "captured": s.captured} for n, s in report.shaping.items()},
            "seconds": progress.seconds,
        }

    @property
    def epochs_done(self) -> float:
        """Epochs, with the part of the running one."""
        return self.progress.epoch + self.progress.position / len(self.batches)

    def due(self) -> list[str]:
        """Marks that are reached here and were not before.

        A budget is used up when the next step would go beyond it, by what the last one took.
        """
        config, progress, found = self.config, self.progress, []
        if progress.position == 0 and (
            progress.epoch % config.evaluate_every == 0 or progress.epoch == config.epochs
        ):
            found.append(epoch_mark(progress.epoch))
        # The first step says nothing about the next: it may have looked at the model, or pruned.
        per_point = (progress.per_point or 0.0) if progress.step > 1 else 0.0
        after = progress.spent + per_point * len(self.batches[progress.position])
        budgets = [*config.marks, *([] if config.budget is None else [config.budget])]
        if progress.step:
            found += [budget_mark(b) for b in sorted(set(budgets)) if after > b * (1 + 1e-12)]
        return [mark for mark in found if mark not in progress.reached]

    @property
    def stops(self) -> list[str]:
        """The marks that training may end at."""
        epochs, budget = self.config.epochs, self.config.budget
        marks = [epoch_mark(epochs)] if epochs is not None else []
        return marks if budget is None else [*marks, budget_mark(budget)]

    def finished(self) -> bool:
        """Whether the first or the last of the stops is reached, as configured."""
        met = [mark in self.progress.reached for mark in self.stops]
        return any(met) if self.config.until == "first" else all(met)

    def fraction(self) -> float:
        """How much of the run is done, between 0 and 1."""
        parts = []
        if self.config.epochs is not None:
            parts.append(self.epochs_done / self.config.epochs)
        if self.config.budget is not None:
            parts.append(self.progress.spent / self.config.budget)
        return min(1.0, max(parts) if self.config.until == "first" else min(parts))

    def evaluate(self, marks: list[str]) -> Evaluation:
        """Look at the validation split, and at a stop, if asked, at the test split."""
        how = (self.config.batch, self.device, self.team)
        accuracy, loss = measure(self.model, self.data.validation, *how)
        test = None
        if self.config.test and set(marks) & set(self.stops):
            test, _ = measure(self.model, self.data.test, *how)
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

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the model's weights."""
        return {
            "engine": self.fg.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.to_dict(),
            "latest": self.latest.clone(),
            "points": [len(self.data.train), len(self.data.validation), len(self.data.classes)],
            "labels": self._digest(),
        }

    def _digest(self) -> int:
        """A number that changes when classes or the labels of any split do."""
        data = self.data
        found = crc32("\n".join(data.classes).encode())
        for split in (data.train, data.validation, data.test):
            found = crc32(split.labels.long().cpu().numpy().tobytes(), found)
        return found

    def load_state_dict(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint was taken.

        Raises:
            FlopsError: If the data are not those that the run was started with.
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
                f"labels or classes of '{self.config.data}' are not those that the run was started "
                "with; restore the data, or start a new run"
            )
        self.model.load_state_dict(weights)
        self.fg.load_state_dict(state["engine"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress.from_dict(state["progress"])
        self.latest = state["latest"].clone()


def load_data(config: Config, format: ImageFormat) -> ImageData:
    """The data of a configuration, in a model's format; errors as `flops.tasks.images.load`."""
    return load(
        config.data,
        format,
        image_column=config.image_column,
        label_column=config.label_column,
        split_column=config.split_column,
        splits=config.named_splits(),
        config=config.data_config,
        strict=config.strict,
        limit=config.limit,
    )


def _load(config: Config) -> tuple[nn.Module, ImageFormat, ImageData]:
    try:
        # The data want the model's format, and the model's head wants the number of classes.
        data = load_data(config, image_format(config.model))
        if len(data.classes) < 2:
            raise ValueError(
                f"'{config.data}' has the class '{data.classes[0]}' and no other: there is nothing "
                "to learn"
            )
        model, format = load_model(
            config.model, len(data.classes), seed=config.seed, head=config.head
        )
        if config.head == "kept":
            warn_of_other_classes(model, data.classes)
    except (OSError, ValueError, ImportError) as error:
        raise FlopsError(str(error)) from error
    return model, format, data


def _optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, rate, weight_decay=decay)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, rate, weight_decay=decay)
