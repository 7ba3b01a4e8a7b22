"""Overhead: time of `estimate` over that of the minimal computation.

The floor (`benchmarks.floor`) is written by hand: the same rows through the same suffixes in
chunks of the same size, in inference mode and without noise, one clean pass, and a plain
vector-Jacobian product of each target. Three groups of two layers of the bundled ViT (64 wide),
batch 64, 20 queries per point and group; and of a ViT that is 384 wide, as ViT-small, with random
weights, batch 32, 8 queries. MeZO has one group and 2 queries. "work" is the forward equivalents of
the floor's queries over those that the engine reports: 1 means the same rows through the same part
of the model. "query loop" compares the marginal time of additional queries, without clean pass,
local VJPs and everything else done once per step. Engine and floor are interleaved; medians of
the ratios per repeat, and half their interquartile range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from rich.progress import track
from torch import Tensor

from benchmarks.floor import CHUNK, Floor, Start
from benchmarks.quality import BATCH, loss_fn
from benchmarks.timing import interleaved, median_and_spread, ratios
from flops import SPSA, ForwardGradient, Group, LikelihoodRatio
from flops.estimators import Estimator
from flops.passes.flop_count import WorkMeter
from flops.presets import mezo
from flops.tasks.classification import bundled_vit, digits
from flops.tasks.data.digits import IMAGE_SIZE

REPEATS = 9
WARM = 9  # block and stage targets measure Jacobians in the first eight steps


@dataclass(frozen=True)
class Case:
    """A kind of noise, the queries per step, and a second number for the marginal time."""

    start: Start
    estimator: Estimator | None
    target: float | None
    queries: int = 20
    others: int = 4

    def engine(self, model: Any, queries: int, chunk: int = CHUNK) -> ForwardGradient:
        """The engine with three groups of two layers; MeZO has one."""
        if self.estimator is None:
            return ForwardGradient(model, loss_fn, mezo(model, queries=queries), chunk=chunk)
        layers = list(model.vit.layers)
        groups = [
            Group(layers[i : i + 2], self.estimator, queries, name=f"layers {i + 1}-{i + 2}")
            for i in range(0, len(layers), 2)
        ]
        return ForwardGradient(model, loss_fn, groups, chunk=chunk)


CASES = {
    "LR, block targets": Case("block", LikelihoodRatio(), 1.15),
    "LR, leaf targets": Case("leaf", LikelihoodRatio(targets="leaf"), 1.5),
    "LR, leaf targets, signs": Case(
        "leaf", LikelihoodRatio(targets="leaf", noise="rademacher"), 1.5
    ),
    "LR, stage targets": Case("stage", LikelihoodRatio(targets="stage"), None),
    "SPSA, per-point draws": Case("parameters", SPSA(), 1.4),
    "SPSA, shared draws": Case("shared", SPSA(shared=True), 1.15),
    "MeZO, 2 queries": Case("mezo", None, None, queries=2, others=18),
}


def wide_vit() -> Any:
    """Six layers as wide as ViT-small's, 17 tokens, random weights."""
    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=IMAGE_SIZE,
        patch_size=8,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.ViTForImageClassification(config).eval()


def tuned_layers(case: Case, model: Any) -> Any:
    """The model with only the layers trainable; MeZO trains all parameters."""
    if case.estimator is not None:
        model.requires_grad_(False)
        model.vit.layers.requires_grad_(True)
    return model


def work(floor: Floor, queries: int) -> float:
    """Forward equivalents of the floor's queries, counted as in the engine."""
    with torch.no_grad(), WorkMeter(lambda _: None) as whole:
        floor.model(floor.x)
    _, inputs = floor.clean() if floor.start != "mezo" else (None, {})
    with WorkMeter(lambda _: None) as meter:
        for _ in floor.losses(queries, inputs, torch.no_grad):
            pass
    return meter.total / (whole.total / len(floor.y))


def measure(
    case: Case, model: Any, x: Tensor, y: Tensor, repeats: int, warm: int
) -> dict[str, Any]:
    """One row of the table."""
    tuned_layers(case, model)
    floor = Floor(model, x, y, case.start)
    runs: dict[str, Any] = {}
    for queries in (case.queries, case.others):
        engine = case.engine(model, queries)
        runs[f"ours {queries}"] = lambda engine=engine: engine.estimate(x, y)
        runs[f"floor {queries}"] = lambda queries=queries: floor.step(queries)
    equivalents = runs[f"ours {case.queries}"]().forward_equivalents.queries
    seconds = interleaved(runs, repeats, warm)
    ours, least = seconds[f"ours {case.queries}"], seconds[f"floor {case.queries}"]
    more, least_more = (
        [a - b for a, b in zip(all_, other, strict=True)]
        for all_, other in (
            (ours, seconds[f"ours {case.others}"]),
            (least, seconds[f"floor {case.others}"]),
        )
    )
    step, spread = median_and_spread(ratios(ours, least))
    loop, loop_spread = median_and_spread(ratios(more, least_more))
    return {
        "ratio": step,
        "spread": spread,
        "target": case.target,
        "query loop": loop,
        "loop spread": loop_spread,
        "seconds": median_and_spread(ours)[0],
        "floor, s": median_and_spread(least)[0],
        "work": work(floor, case.queries) / equivalents,
    }


def run(repeats: int = REPEATS, warm: int = WARM) -> dict[str, Any]:
    """All kinds of noise."""
    train = digits().train
    x, y = train.images[:BATCH], train.labels[:BATCH]
    found = {
        f"64 wide: {name}": measure(case, bundled_vit(), x, y, repeats, warm)
        for name, case in track(CASES.items(), description="64 wide", transient=True)
    }
    for name, case in track(CASES.items(), description="384 wide", transient=True):
        fewer = replace(case, queries=min(case.queries, 8), others=2 if case.estimator else 8)
        row = measure(fewer, wide_vit(), x[:32], y[:32], max(1, repeats // 2), warm)
        found[f"384 wide: {name}"] = row
    return found
