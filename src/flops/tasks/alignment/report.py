"""The report of a run of `flops align`: its metrics and some generated captions."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

from flops.report.curves import read_metrics
from flops.storage.files import atomic_write
from flops.tasks.alignment.config import AlignConfig
from flops.training.progress import Evaluation


@dataclass(frozen=True)
class Sample:
    """A validation image: its caption, and those generated before and after training."""

    caption: str
    before: str
    after: str


def write_report(
    folder: Path, config: AlignConfig, evaluations: list[Evaluation], samples: list[Sample]
) -> None:
    """Write report.md; idempotent."""
    steps, _ = read_metrics(folder / "metrics.jsonl")
    lines = [
        f"# {config.method}: {config.encoder} encoder, {config.language} language model, "
        f"{config.data}",
        "",
        f"{config.queries:g} queries per point, batches of {config.batch}, seed {config.seed}"
        + (", **control: training images shuffled**" if config.shuffled else ""),
        "",
        "| step | caption loss | caption accuracy | seconds | forward equivalents |",
        "|---|---|---|---|---|",
        *(
            f"| {e.step} | {e.loss:.4f} | {e.accuracy:.1%} | {e.seconds:.1f} "
            f"| {e.forward_equivalents:,.0f} |"
            for e in evaluations
        ),
        "",
        "On the validation split. Caption accuracy: share of images whose own caption is the most "
        "likely of the choices.",
    ]
    if last := evaluations[-1:]:
        test = last[0].test
        lines += ["", f"Test: {test:.1%}."] if test is not None else []
    if len(steps) > 1:
        times = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(steps)]
        lines += ["", f"A step takes {statistics.median(times):.3f} s (median)."]
    if samples:
        lines += ["", "| caption | before | after |", "|---|---|---|"]
        lines += [f"| {_cell(s.caption)} | {_cell(s.before)} | {_cell(s.after)} |" for s in samples]
    atomic_write(folder / "report.md", "\n".join(lines) + "\n", durable=False)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
