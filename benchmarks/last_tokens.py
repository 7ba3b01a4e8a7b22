"""Where the gradient of a language model is, and what noise on the last tokens makes of it.

SmolLM2-135M (`make real-models`) classifies the sentences by label words after a prompt, as in
`flops finetune --task text --preset smollm2`; parameters are held still.

*Energy.* Share of the squared norm of the exact gradient at the output of a layer that is in the
last token, and in the last two; sums over 64 sentences.

*Cosine* of the estimate to the exact gradient over all parameters of a stage: two shaped stages
that end after 80 % of the layers and at the last, batches of 8, 16 queries, with noise on the last
two tokens and on all. "early" is the mean over steps 5 to 8, "late" over steps 9 to 12.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flops.passes.batch import Batch
from flops.tasks.models.language import REAL_MODELS, SMOLLM2
from flops.tasks.text import Text, TextConfig
from flops.tasks.text.config import PRESETS
from flops.training.methods import Method, engine

LAYERS = (6, 12, 18, 24, 29)
BATCH, QUERIES, STEPS = 8, 16.0, 12
TOKENS: tuple[int | None, ...] = (2, None)


def task(limit: int, **changed: Any) -> Text:
    """The task of the preset; all layers are trained, the embeddings are not."""
    values = {**PRESETS["smollm2"], "batch": BATCH, "limit": limit, **changed}
    return Text(TextConfig(**values), torch.device("cpu"))


def energy(text: Text, layers: tuple[int, ...] = LAYERS, batches: int = 8) -> dict[str, Any]:
    """Shares of the last tokens after some layers, counted from 1."""
    stack = text.model.model.layers
    sums = {layer: torch.zeros(3, dtype=torch.float64) for layer in layers}

    def add(layer: int, gradient: Tensor) -> None:
        by_token = gradient.double().square().sum((0, 2))
        sums[layer] += torch.stack([by_token[-1], by_token[-2:].sum(), by_token.sum()])

    def watch(layer: int, _: Any, __: Any, out: Tensor) -> None:
        out.register_hook(partial(add, layer))

    handles = [stack[n - 1].register_forward_hook(partial(watch, n)) for n in layers]
    try:
        for number in range(batches):
            inputs, targets = text.batch(torch.arange(BATCH * number, BATCH * (number + 1)))
            batch = Batch(inputs, targets, text.loss_fn)
            with torch.enable_grad():
                batch.losses(text.model).sum().backward()
            text.model.zero_grad()
    finally:
        for handle in handles:
            handle.remove()
    return {
        f"energy after layer {n}": {
            "last token": float(total[0] / total[2]),
            "last two": float(total[1] / total[2]),
        }
        for n, total in sums.items()
    }


def cosines(text: Text, last_tokens: int | None, steps: int = STEPS) -> dict[str, Any]:
    """Mean cosines of both stages, early and late."""
    method = Method(queries=QUERIES, sigma=(1e-2,), stages=(0.8, 1.0), last_tokens=last_tokens)
    fg = engine(text.model, text.loss_fn, method, chunk=BATCH)
    found: dict[str, list[float]] = {}
    for step in range(steps):
        rows = torch.arange(BATCH * step, BATCH * (step + 1)) % len(text.data.train)
        inputs, targets = text.batch(rows)
        text.model.zero_grad()
        report = fg.estimate(inputs, targets, index=rows, exact=step >= steps // 3)
        for name, value in report.cosine.items():
            found.setdefault(name, []).append(value)
    half = len(next(iter(found.values()))) // 2
    where = "all tokens" if last_tokens is None else f"last {last_tokens} tokens"
    return {
        f"{name}, {where}": {
            "early": sum(values[:half]) / half,
            "late": sum(values[half:]) / (len(values) - half),
        }
        for name, values in found.items()
    }


def run() -> dict[str, Any]:
    """Energies, and cosines with both kinds of noise."""
    if not (REAL_MODELS / SMOLLM2).is_dir():
        return {"not measured": {"why": "run `make real-models` first"}}
    warnings.simplefilter("ignore")
    text = task(limit=BATCH * STEPS)
    found = energy(text)
    for last in TOKENS:
        found |= cosines(text, last)
    return found
