"""Evaluate the model of a run: on a split of its data, or on other data with the same classes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flops.errors import FlopsError
from flops.passes.ranks import Ranks
from flops.report.counts import read_counts
from flops.tasks.alignment import AlignConfig
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.text import TextConfig
from flops.tasks.text.data import load_texts
from flops.tasks.text.prompts import default_prompt
from flops.training import checkpoint as checkpoints
from flops.training.config import RunConfig, read_file
from flops.training.device import find_device
from flops.training.run_directory import check_run, read_settings
from flops.training.task import Task, open_task

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Tested:
    """Accuracy of a run's model.

    Attributes:
        data: The data set.
        splits: Its splits that were evaluated.
        step: Step of the checkpoint.
        points: Number of points.
        accuracy: Share of right answers.
        low: Lower end of its 95 % interval over the choice of points (Wilson's).
        high: Upper end.
        loss: Mean loss.
    """

    data: str
    splits: tuple[str, ...]
    step: int
    points: int
    accuracy: float
    low: float
    high: float
    loss: float

    def __str__(self) -> str:
        """One line for people."""
        where = " and ".join(filter(None, [", ".join(self.splits[:-1]), self.splits[-1]]))
        return (
            f"{self.data}, {where} split{'s' if len(self.splits) > 1 else ''} ({self.points:,} "
            f"points), after step {self.step}: accuracy {self.accuracy:.1%} (95 % interval "
            f"{self.low:.1%} to {self.high:.1%}), loss {self.loss:.4f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {**asdict(self), "splits": list(self.splits)}


def evaluate_run(
    folder: Path,
    data: str | None = None,
    *,
    splits: tuple[SplitName, ...] | None = None,
    limit: int | None = None,
    device: str = "auto",
) -> Tested:
    """Evaluate the last intact checkpoint of a run; nothing in its folder is changed.

    Args:
        folder: The run directory, also of a run that is not finished.
        data: Other data with the same classes; None for the run's own.
        splits: Splits to evaluate; None for test, and for all points of other data.
        limit: Largest number of points per split; None for the run's setting, or for all of other
            data.
        device: Where the model runs.

    Raises:
        FlopsError: If there is no run or no checkpoint, or the data do not fit.
    """
    kept = run_settings(folder)
    config = kept.replace(output=None, device=device)
    if data is not None:
        config = _on(config, data)
    if limit is not None or data is not None:
        config = config.replace(limit=limit)
    found = checkpoints.last_intact(folder / "checkpoints")
    if found is None:
        raise FlopsError(f"{folder} has no checkpoint yet: train it first, with --resume {folder}")
    weights, state = found
    task = open_task(config, find_device(device))
    _check_classes(folder, task, int(state["points"][2]))
    missing, unexpected = task.model.load_state_dict(weights, strict=False)
    trained = {n for n, p in task.model.named_parameters() if p.requires_grad}
    if unexpected or trained & set(missing):
        raise FlopsError(f"the checkpoint in {folder} is of another model than its settings say")
    chosen = splits or (("test",) if data is None else SPLITS)
    parts = [
        (len(split), *task.measure(split, Ranks()))
        for name in chosen
        for split in _named(task, name)
    ]
    if not parts:
        raise FlopsError(f"'{config.data}' has no points in {', '.join(chosen)}")
    points = sum(size for size, _, _ in parts)
    accuracy = sum(size * score for size, score, _ in parts) / points
    loss = sum(size * value for size, _, value in parts) / points
    step = int(state["progress"]["step"])
    return Tested(task.data.name, chosen, step, points, accuracy, *wilson(accuracy, points), loss)


def run_settings(folder: Path) -> RunConfig:
    """The settings of a run of any task.

    Raises:
        FlopsError: If there is no run, or its settings cannot be read.
    """
    check_run(folder)
    values = read_file(folder / "config.json")
    kind: type[RunConfig] = FinetuneConfig
    if values.get("task") == "text":
        kind = TextConfig
    elif "encoder" in values:
        kind = AlignConfig
    return read_settings(folder, kind)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    middle = share + Z**2 / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _named(task: Task, name: SplitName) -> list[Any]:
    """A split, unless it is empty."""
    split = {
        "train": task.data.train,
        "validation": task.data.validation,
        "test": task.data.test,
    }[name]
    return [split] if len(split) else []


def _on(config: RunConfig, data: str) -> RunConfig:
    """The configuration with other data; prompt and label words stay those of the run."""
    if not isinstance(config, TextConfig):
        return (
            config.replace(data=data, splits=())
            if isinstance(config, FinetuneConfig)
            else (config.replace(data=data))
        )
    given: dict[str, Any] = {"data": data, "splits": (), "validation_points": None}
    texts = load_texts(
        config.data,
        config.named_columns(),
        splits=config.named_splits(),
        config=config.data_config,
        limit=config.limit,
    )
    if not texts.train.completions and config.objective in (None, "words"):
        template, words = default_prompt(texts.classes)
        given["template"] = config.template or texts.template or template
        named = dict(config.label_words()) or dict(texts.words or words)
        given["words"] = tuple(f"{label}={word}" for label, word in named.items())
    return config.replace(**given)


def _check_classes(folder: Path, task: Task, count: int) -> None:
    """Raise if the data have other classes than the run."""
    classes = tuple(task.data.classes)
    try:
        known = read_counts(folder / "counts.safetensors").classes
    except (OSError, ValueError):  # not finished yet
        known = ()
    if len(classes) != count or (known and known != classes):
        names = f" ({', '.join(known[:8])}{', ..' if len(known) > 8 else ''})" if known else ""
        raise FlopsError(
            f"the run has {count} classes{names}, and '{task.data.name}' has {len(classes)} "
            f"({', '.join(classes[:8])}{', ..' if len(classes) > 8 else ''}); evaluate on data "
            "with the same classes"
        )
