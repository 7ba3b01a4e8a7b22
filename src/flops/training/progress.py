"""Progress, cost and evaluations of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flops.engine.report import StepReport


def epoch_mark(epoch: int) -> str:
    """Name of the end of an epoch."""
    return f"epoch {epoch}"


def budget_mark(budget: float) -> str:
    """Name of the step at which a budget of forward equivalents is used up."""
    return f"budget {budget:.12g}"


def step_mark(step: int) -> str:
    """Name of the end of a step."""
    return f"step {step}"


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the model at one step of a run.

    Attributes:
        step: Steps taken.
        epoch: Epochs, including the fraction of the current one.
        accuracy: Accuracy on the validation split.
        loss: Mean loss on the validation split.
        queries: Rows with noise so far.
        forward_equivalents: Cost of training so far; evaluations are not charged.
        seconds: Time of the training steps so far.
        marks: Marks reached at this step: `epoch_mark`, `budget_mark` and `step_mark`.
        test: Accuracy on the test split; None if it was not evaluated.
    """

    step: int
    epoch: float
    accuracy: float
    loss: float
    queries: int
    forward_equivalents: float
    seconds: float
    marks: tuple[str, ...] = ()
    test: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {**dataclasses.asdict(self), "marks": list(self.marks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Inverse of `to_dict`."""
        return cls(**{**values, "marks": tuple(values["marks"])})


@dataclass
class RunProgress:
    """Progress of a run, saved in its checkpoints.

    Attributes:
        step: Steps taken.
        epoch: Completed epochs.
        position: Batches taken in the current epoch.
        queries: Rows with noise.
        parts: Forward equivalents by part.
        per_point: Forward equivalents per point of the last step; None before the first.
        seconds: Time of the steps.
        evaluations: All evaluations, in order.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    queries: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    per_point: float | None = None
    seconds: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Total forward equivalents."""
        return float(sum(self.parts.values()))

    @property
    def reached(self) -> set[str]:
        """Marks reached so far."""
        return {mark for evaluation in self.evaluations for mark in evaluation.marks}

    def charge(self, part: str, cost: float) -> None:
        """Add to the cost of a part."""
        self.parts[part] = self.parts.get(part, 0.0) + cost

    def add(self, report: StepReport, points: int) -> None:
        """Count a step."""
        self.step += 1
        self.position += 1
        self.queries += report.queries
        self.seconds += report.seconds
        parts = report.forward_equivalents.parts()
        for part, cost in parts.items():
            self.charge(part, cost)
        self.per_point = (float(report.forward_equivalents) - parts["probe"]) / points

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        found = [evaluation.to_dict() for evaluation in self.evaluations]
        return {**vars(self), "parts": dict(self.parts), "evaluations": found}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunProgress:
        """Inverse of `to_dict`."""
        found = [Evaluation.from_dict(e) for e in values["evaluations"]]
        return cls(**{**values, "evaluations": found})


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        evaluations: All evaluations, in order; the last one is the end.
        steps: Steps taken.
        queries: Rows with noise.
        forward_equivalents: Cost of training.
        parts: Cost by part.
        seconds: Time of the training steps.
        peak_memory: Peak memory of the process in bytes, data and libraries included.
        folder: The run directory; None if nothing was written.
    """

    evaluations: tuple[Evaluation, ...]
    steps: int
    queries: int
    forward_equivalents: float
    parts: Mapping[str, float]
    seconds: float
    peak_memory: int
    folder: str | None = None

    @property
    def accuracy(self) -> float:
        """Validation accuracy at the end."""
        return self.evaluations[-1].accuracy

    @property
    def test(self) -> float | None:
        """Test accuracy at the end, if evaluated."""
        return self.evaluations[-1].test

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON: the last evaluation and the cost, without the folder."""
        return {
            "accuracy": self.accuracy,
            "loss": self.evaluations[-1].loss,
            "test": self.test,
            "steps": self.steps,
            "queries": self.queries,
            "forward_equivalents": self.forward_equivalents,
            "parts": dict(self.parts),
            "seconds": self.seconds,
            "peak_memory": self.peak_memory,
        }

    def at(self, *, epoch: int | None = None, budget: float | None = None) -> Evaluation:
        """The evaluation at the end of an epoch, or where a budget was used up.

        Raises:
            ValueError: If neither or both are given, or the run was not evaluated there.
        """
        if (epoch is None) == (budget is None):
            raise ValueError("pass either epoch or budget")
        mark = epoch_mark(epoch) if epoch is not None else budget_mark(budget or 0.0)
        for evaluation in self.evaluations:
            if mark in evaluation.marks:
                return evaluation
        known = [m for e in self.evaluations for m in e.marks]
        raise ValueError(f"the run has no evaluation at '{mark}'; it has {known}")
