"""The part of a model card that says how a model was trained without a backward pass."""

from __future__ import annotations

from pathlib import Path

from flops.engine.forward_gradient import ForwardGradient
from flops.engine.summary import queries
from flops.integrations.totals import Totals
from flops.storage.files import atomic_write
from flops.version import __version__

TITLE = "## Forward-only training"


def append_section(card: Path, method: str, engine: ForwardGradient, totals: Totals) -> None:
    """Append method, queries and cost to a card that was just written.

    Args:
        card: The README.md.
        method: Name of the method.
        engine: Its groups are listed.
        totals: Of the run.
    """
    text = card.read_text(encoding="utf-8").rstrip()
    atomic_write(card, f"{text}\n\n{section(method, engine, totals)}", durable=False)


def section(method: str, engine: ForwardGradient, totals: Totals) -> str:
    """The text of the section."""
    rows = [
        f"| {group.name} | {type(group.estimator).__name__} "
        f"| {sum(p.numel() for p in group.parameters):,} "
        f"| {queries(group)} |"
        for group in engine.groups
    ]
    how = "gradients were estimated from forward passes, without a backward pass through the model"
    if not all(group.estimator.makes_queries for group in engine.groups):
        how = "gradients are those of backpropagation, for comparison"
    parts = ", ".join(f"{name} {cost:,.0f}" for name, cost in totals.parts.items())
    return "\n".join(
        [
            TITLE,
            "",
            f"Trained with FLOPS {__version__}, method `{method}`, seed {engine.seed}: {how}.",
            "",
            "| group | estimator | trainable parameters | queries per example and step |",
            "|---|---|---|---|",
            *rows,
            "",
            f"- Examples: {totals.points:,}, each counted as often as it was trained on",
            f"- Queries: {totals.queries:,}",
            f"- Cost: {totals.forward_equivalents:,.0f} forward passes of one example ({parts})",
            "",
        ]
    )
