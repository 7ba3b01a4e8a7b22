"""What a run directory holds, for its report: also of old, unfinished and partly damaged ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flops.errors import FlopsError
from flops.report.counts import QueryCounts, read_counts
from flops.report.curves import read_metrics
from flops.report.names import method_name
from flops.storage.plain import parse_object


class ReportError(FlopsError):
    """There is nothing to report on, or it cannot be read."""


@dataclass(frozen=True)
class RunRecord:
    """A run, as its folder records it.

    Attributes:
        folder: The run directory.
        settings: Its settings; those of older versions may lack some.
        environment: Versions, cores and threads; empty if unknown.
        steps: A line for every step.
        evaluations: A line for every evaluation.
        counts: Where the queries went; None before the end of a run, and with backpropagation.
        result: Result of a finished run, with its peak memory; empty if it was not recorded.
        problems: Sentences about what is missing or cannot be read.
    """

    folder: Path
    settings: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    counts: QueryCounts | None
    result: dict[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        """The method's name for people."""
        return method_name(str(self.settings.get("method", "unknown method")))

    @property
    def test(self) -> float | None:
        """Test accuracy at the last evaluation that had one."""
        found = [e["test"] for e in self.evaluations if e["test"] is not None]
        return float(found[-1]) if found else None

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing; None if it is unknown."""
        if self.counts is None or len(self.counts.classes) < 2 or "encoder" in self.settings:
            return None
        return 1 / len(self.counts.classes)


def read_record(folder: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        ReportError: There is no run, or its settings or metrics cannot be read.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder; give a run directory, such as runs/digits")
    if not (folder / "config.json").is_file():
        raise ReportError(
            f"{folder} holds no run (there is no config.json); give the folder that `flops "
            "finetune`, `align` or `compare` wrote"
        )
    settings = _object(folder / "config.json")
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            steps, evaluations = read_metrics(folder / "metrics.jsonl")
        except FileNotFoundError:
            steps, evaluations = [], []
            problems.append("metrics.jsonl is missing: there are no curves")
        except OSError as error:
            raise ReportError(f"cannot read {error.filename}: {error.strerror}") from error
    problems += [str(one.message) for one in caught]
    if not steps and not problems:
        problems.append("no step was taken yet")
    counts = None
    if (folder / "counts.safetensors").exists():
        try:
            counts = read_counts(folder / "counts.safetensors")
        except (OSError, ValueError) as error:
            problems.append(f"the counts of queries cannot be read: {error}")
    elif steps:
        problems.append("the run has not finished: where its queries went is written at the end")
    more = {}
    for name in ("environment", "result"):
        try:
            more[name] = _object(folder / f"{name}.json")
        except ReportError as error:
            more[name] = {}
            if (folder / f"{name}.json").exists():
                problems.append(str(error))
    return RunRecord(
        folder,
        settings,
        more["environment"],
        steps,
        evaluations,
        counts,
        more["result"],
        tuple(problems),
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes())
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{path} is damaged: {error}") from error
