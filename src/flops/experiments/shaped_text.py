"""A language model on texts by shaped noise: cosine to the exact gradient, and the training loss.

The methods are those of `flops finetune --task text`: `shaped-lr` in two stages, with noise on the
last tokens. All layers are trained, and, for comparison, the last ones alone with the same batches:
training early layers by estimates that are mostly noise would do harm.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from flops.report.intervals import interval, paired
from flops.report.table import Sheet
from flops.tasks.text import TextConfig
from flops.training.methods import MethodName
from flops.training.trainer import Trainer

START = 30  # first step of the means
KEEP = 0.9  # decay of the running loss


@dataclass(frozen=True)
class TextRun:
    """Settings of one run.

    Attributes:
        last: Layers that are trained, the last ones.
        method: Method; bp for the loss alone.
        model: Language model.
        data: Labelled texts.
        steps: Training steps.
        batch: Batch size.
        queries: Mean queries per point and stage.
        learning_rate: Learning rate of Adam.
        max_tokens: Longest text in tokens.
        every: Steps between two cosines.
        seed: Seed of the order of the texts and of the noise.
        device: cpu, cuda, or auto.
    """

    last: int
    method: MethodName = "shaped-lr"
    model: str = "smollm2"
    data: str = "sentences"
    steps: int = 48
    batch: int = 8
    queries: int = 16
    learning_rate: float = 2e-5
    max_tokens: int = 32
    every: int = 6
    seed: int = 0
    device: str = "auto"

    def config(self) -> TextConfig:
        """Configuration of the training run."""
        return TextConfig(
            model=self.model,
            data=self.data,
            method=self.method,
            queries=self.queries,
            train_last=self.last,
            epochs=None,
            steps=self.steps,
            batch=self.batch,
            learning_rate=self.learning_rate,
            max_tokens=self.max_tokens,
            chunk=self.batch,
            seed=self.seed,
            device=self.device,
        )


def train_text(settings: TextRun) -> dict[str, Any]:
    """Train; return losses by step, cosines by step and group, accuracy and cost."""
    trainer = Trainer(settings.config())
    task, progress, optimizer = trainer.task, trainer.progress, trainer.optimizer
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    steps, cosines, groups, losses = [], [], [], []
    for step in range(settings.steps):
        rows = trainer.batches[progress.position]
        inputs, targets = task.batch(rows)
        look = settings.method != "bp" and step % settings.every == 0
        truth = _exact(trainer, parameters, inputs, targets) if look else {}
        optimizer.zero_grad()
        report = trainer.fg.estimate(inputs, targets, index=rows)
        if look:
            steps.append(step)
            cosines.append(_cosine(truth, parameters))
            groups.append({g.name: _cosine(truth, g.parameters) for g in trainer.fg.groups})
            truth.clear()
        losses.append(report.loss)
        optimizer.step()
        progress.add(report, len(rows))
        if progress.position == len(trainer.batches):
            progress.epoch, progress.position = progress.epoch + 1, 0
    accuracy, loss = task.measure(trainer.data.validation, trainer.ranks)
    return {
        "steps": steps,
        "cosines": cosines,
        "groups": groups,
        "losses": losses,
        "validation": accuracy,
        "validation loss": loss,
        "forward equivalents": progress.spent,
    }


def _exact(
    trainer: Trainer, parameters: Sequence[nn.Parameter], inputs: Mapping[str, Any], targets: Any
) -> dict[nn.Parameter, Tensor]:
    """The backpropagated gradient of a batch."""
    trainer.optimizer.zero_grad()
    task: Any = trainer.task
    with torch.enable_grad():
        task.loss_fn(trainer.model(**inputs, use_cache=False), targets).mean().backward()
    return {p: p.grad for p in parameters if p.grad is not None}


def _cosine(truth: Mapping[nn.Parameter, Tensor], parameters: Iterable[nn.Parameter]) -> float:
    """Cosine of the estimate in `.grad`; a parameter without one counts as zeros."""
    product = exact = found = 0.0
    for p in parameters:
        if p not in truth:
            continue
        exact += float(truth[p].double().square().sum())
        if p.grad is not None:
            product += float((truth[p].double() * p.grad.double()).sum())
            found += float(p.grad.double().square().sum())
    return product / (exact * found) ** 0.5 if exact > 0 and found > 0 else 0.0


def running(losses: Sequence[float]) -> list[float]:
    """Running average of the training loss."""
    return list(accumulate(losses, lambda old, new: KEEP * old + (1 - KEEP) * new))


def text_sheet(found: Mapping[str, Sequence[Mapping[str, Any]]], start: int = START) -> Sheet:
    """Cosines and losses by what is trained; the last row is the reference of the losses."""
    reference = list(found.values())[-1]
    lines = []
    for name, results in found.items():
        late = [[c for s, c in _pairs(result) if s >= start] for result in results]
        mean = interval([statistics.fmean(row) for row in late]).shown() if all(late) else "-"
        ends = [running(result["losses"])[-1] for result in results]
        above = max(
            max(a - b for a, b in _after(one["losses"], other["losses"], start))
            for one, other in zip(results, reference, strict=True)
        )
        gap = paired(ends, [running(r["losses"])[-1] for r in reference])
        right = interval([100 * result["validation"] for result in results])
        own = results is reference
        lines.append(
            [
                name,
                mean,
                interval(ends).shown(),
                "" if own else gap.shown(sign=True),
                "" if own else f"{above:+.3f}",
                right.shown(1),
            ]
        )
    header = [
        "trained",
        f"cosine from step {start}",
        "training loss at the end",
        "over the last layers alone",
        "largest excess",
        "validation (%)",
    ]
    note = (
        "Cosine over all trained parameters; the training loss is a running average over ten "
        f"steps, its largest excess over that of the last layers alone from step {start} on, over "
        "all seeds. 95 % intervals over seeds, differences paired by seed."
    )
    return Sheet("A language model on texts", header, lines, note)


def _pairs(result: Mapping[str, Any]) -> Iterable[tuple[int, float]]:
    return zip(result["steps"], result["cosines"], strict=True)


def _after(one: Sequence[float], other: Sequence[float], start: int) -> list[tuple[float, float]]:
    pairs = list(zip(running(one), running(other), strict=True))
    return pairs[start:] or pairs
