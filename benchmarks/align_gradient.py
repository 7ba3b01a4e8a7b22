"""Cosine of the adapter's estimated gradient to the exact one, by queries and kind of noise.

The embedded models, batches of 64 after some steps of backpropagation, equal counts; mean and
standard deviation over batches. Orthogonal directions of a point are not redundant: with as many
queries as the visual token has channels (64) they determine the whole gradient, up to the curvature
error of one-sided differences.
"""

from __future__ import annotations

import statistics
from typing import Any

from rich.progress import track

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.perturb.random import Kind
from flops.tasks.alignment.adapter import identity_loss
from flops.tasks.alignment.config import AlignConfig
from flops.training.trainer import Trainer

QUERIES = (20, 60, 64, 200)
KINDS: tuple[Kind, ...] = ("gaussian", "orthogonal")
STEPS, BATCHES = 20, 4


def run(steps: int = STEPS, batches: int = BATCHES, limit: int | None = None) -> dict[str, Any]:
    """All kinds and numbers of queries on the same batches."""
    config = AlignConfig(method="bp", limit=limit)
    trainer = Trainer(config)
    for _ in range(steps):
        trainer.step()
    model, sigma = trainer.task.model, config.recipe().sigmas[-1]
    chosen = [trainer.batches[i % len(trainer.batches)] for i in range(batches)]
    cases = [(kind, queries) for kind in KINDS for queries in QUERIES]
    found: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for kind, queries in track(cases, description="align_gradient", transient=True):
        estimator = LikelihoodRatio(sigma, "block", noise=kind)
        groups = [Group("adapter", estimator, queries)]
        cosines = []
        for seed, rows in enumerate(chosen):
            fg = ForwardGradient(model, identity_loss, groups, seed=seed)
            inputs, targets = trainer.task.batch(rows)
            report = fg.estimate(inputs, targets, index=rows, exact=True)
            cosines.append(report.cosine["adapter"])
            model.zero_grad()
        found[kind][f"{queries} queries"] = statistics.fmean(cosines)
        found[kind][f"{queries}, spread"] = statistics.pstdev(cosines)
    return found
