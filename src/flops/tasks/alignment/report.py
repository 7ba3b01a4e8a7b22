"""The report of a run of `flops align`, from its metrics and what the model says of some images."""

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
    """A validation image: its caption, and what is said of it before and after training."""

    caption: str
    before: str
    after: str


def write_report(
    folder: Path, config: AlignConfig, evaluations: list[Evaluation], samples: list[Sample]
) -> None:
    """Write report.md; writing it again gives the same."""
    steps, _ = read_metrics(folder / "metrics.jsonl")
    lines = [
        f"# {config.method}: {config.encoder} encoder, {config.language} language model, "
        f"{config.data}",
        "",
        f"{config.queries:g} queries a point, batches of {config.batch}, seed {config.seed}"
        + (", **control: training images shuffled**" if config.shuffled else ""),
        "",
        "| step | caption loss | right caption | seconds | forward equivalents |",
        "|---|---|---|---|---|",
        *(
            f"| {e.step} | {e.loss:.4f} | {e.accuracy:.1%} | {e.seconds:.1f} "
            f"| {e.forward_equivalents:,.0f} |"
            for e in evaluations
        ),
        "",
        "Caption loss, and share of images whose own caption is the likeliest of those to choose "
        "from, both on the validation split.",
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
