"""Compiled: gain from `torch.compile` of the layers after the noise.

The rows of a chunk through the last layers of the bundled ViT, its norm and its head: time without
over time with compilation (inductor, fixed shapes), in inference mode, and the time to compile.
"Steps to pay" is the number of steps (20 queries, batch 64, three groups) that amortise compiling
one suffix per group. The engine compiles nothing: noise, recording and replay intercept calls of
modules, which a compiled model bypasses, so it is unwrapped.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.floor import CHUNK
from benchmarks.quality import BATCH, QUERIES
from benchmarks.timing import interleaved, median_and_spread, ratios
from flops.tasks.classification import bundled_vit

REPEATS = 15


def run(repeats: int = REPEATS) -> dict[str, Any]:
    """Suffixes of four and of two layers."""
    model: Any = bundled_vit()
    vit = model.vit
    tokens, channels = vit.embeddings.position_embeddings.shape[1:]
    hidden = torch.randn(CHUNK, tokens, channels)
    results = {}
    for first in (2, 4):

        def suffix(hidden: Tensor, first: int = first) -> Tensor:
            for layer in vit.layers[first:]:
                hidden = layer(hidden)
            found: Tensor = model.classifier(vit.layernorm(hidden)[:, 0])
            return found

        fast = torch.compile(suffix, dynamic=False)
        with torch.inference_mode():
            started = time.perf_counter()
            compiled = fast(hidden)
            compiling = time.perf_counter() - started
            torch.testing.assert_close(compiled, suffix(hidden), rtol=1e-3, atol=1e-4)
            runs = {
                "eager": lambda suffix=suffix: suffix(hidden),
                "compiled": lambda fast=fast: fast(hidden),
            }
            seconds = interleaved(runs, repeats, 3)
        ratio, spread = median_and_spread(ratios(seconds["eager"], seconds["compiled"]))
        saved = median_and_spread(seconds["eager"])[0] - median_and_spread(seconds["compiled"])[0]
        chunks = BATCH * QUERIES / CHUNK
        results[f"last {len(vit.layers) - first} layers"] = {
            "eager / compiled": ratio,
            "spread": spread,
            "seconds to compile": compiling,
            "steps to pay": compiling / (saved * chunks) if saved > 0 else None,
        }
    return results
