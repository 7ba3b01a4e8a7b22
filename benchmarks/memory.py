"""Memory: peak growth of `estimate` over inference and over backpropagation.

A ViT of 12 layers (192 channels, 65 tokens) in three groups with block targets, all parameters
trained, a batch of 32, chunks of 128 rows; MeZO's passes have the 32 rows of the batch, and each is
compared with inference on as many rows. Growth is the peak resident memory during a step over that
with the model loaded, after a small pass and a small step, and with ``.grad`` None.

Parameters are not counted. The gradient, as large as the parameters, is part of the growth of
`estimate` and of backpropagation; "over inference" adds it to inference too, since any training
needs one, and "raw" does not. Every case runs in a separate process, with a single malloc arena and
tensors mapped one by one, so that freed memory is returned; medians of repeats, except for 200
queries, which run once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks.timing import median_and_spread
from flops import ForwardGradient, Group, LikelihoodRatio
from flops.presets import mezo
from flops.tasks.classification import logits

BATCH, CHUNK = 32, 128
PIXELS, PATCH, CHANNELS, LAYERS = 64, 8, 192, 12
GROUPS = 3
REPEATS = 3
COMPARED = {  # reference of each case
    "inference, 128 rows": "inference, 128 rows",
    "inference, 32 rows": "inference, 32 rows",
    "LR, 20 queries": "inference, 128 rows",
    "LR, 200 queries": "inference, 128 rows",
    "MeZO": "inference, 32 rows",
    "backpropagation": "inference, 32 rows",
}
TARGETS = {"over inference": 1.3, "over backpropagation": 0.5, "200 over 20 queries": 1.05}
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=CHANNELS,
        num_hidden_layers=LAYERS,
        num_attention_heads=CHANNELS // 64,
        intermediate_size=4 * CHANNELS,
        image_size=PIXELS,
        patch_size=PATCH,
        num_labels=10,
    )
    return ViTForImageClassification(config).eval()


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def block_groups(model: Any, queries: int) -> list[Group]:
    """Block targets for all parameters: the layers in equal groups, others separately."""
    layers, lr = list(model.vit.layers), LikelihoodRatio()
    size = LAYERS // GROUPS
    return [
        Group(model.vit.embeddings, lr, queries),
        *(Group(layers[i : i + size], lr, queries) for i in range(0, LAYERS, size)),
        Group([model.vit.layernorm, model.classifier], lr, queries),
    ]


def step_of(case: str, model: Any) -> Callable[[Tensor, Tensor], Any]:
    """The step to measure, a function of images and classes."""

    def infer(x: Tensor, y: Tensor) -> Any:
        rows = torch.arange(int(case.split()[1])) % len(y)
        with torch.inference_mode():
            return loss_fn(model(x[rows]), y[rows])

    def backpropagate(x: Tensor, y: Tensor) -> None:
        loss_fn(model(x), y).mean().backward()

    if case.startswith("inference"):
        return infer
    if case == "backpropagation":
        return backpropagate
    groups = mezo(model) if case == "MeZO" else block_groups(model, int(case.split()[1]))
    return ForwardGradient(model, loss_fn, groups, chunk=CHUNK).estimate


def resident() -> int:
    """Resident memory in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def reset_peak() -> None:
    """The peak of resident memory starts from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def highest() -> int:
    """Most bytes that were resident since `reset_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    most = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(most.split()[1]) * 1024


def peak(run: Callable[[], Any]) -> int:
    """Peak growth of resident memory."""
    before = resident()
    reset_peak()
    run()
    return highest() - before


def child(case: str) -> dict[str, float]:
    """Measure one case in this process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = vit()
    x, y = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.arange(BATCH) % 10
    step = step_of(case, model)
    with torch.inference_mode():
        model(x[:2])
    step(x[:2], y[:2])
    model.zero_grad()
    found = {"MB": peak(lambda: step(x, y)) / 2**20}
    found["gradient, MB"] = sum(
        p.grad.nbytes / 2**20 for p in model.parameters() if p.grad is not None
    )
    return found


def measure(case: str) -> dict[str, float]:
    """Measure one case in a separate process."""
    command = [sys.executable, "-m", "benchmarks.memory", case]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    if done.returncode:
        raise RuntimeError(f"memory of {case}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(repeats: int = REPEATS) -> dict[str, Any]:
    """All cases, in turn."""
    slow = "LR, 200 queries"
    cases = [case for i in range(repeats) for case in COMPARED if case != slow or i == 0]
    found: dict[str, list[dict[str, float]]] = {case: [] for case in COMPARED}
    for case in track(cases, description="memory", transient=True):
        found[case].append(measure(case))
    growth = {case: median_and_spread([row["MB"] for row in rows]) for case, rows in found.items()}
    whole = growth["backpropagation"][0]
    results: dict[str, Any] = {}
    for case, rows in found.items():
        middle, spread = growth[case]
        inference, gradient = growth[COMPARED[case]][0], rows[0]["gradient, MB"]
        results[case] = {
            "growth, MB": middle,
            "spread": spread,
            "gradient, MB": gradient,
            "over inference": middle / (inference + gradient),
            "raw": middle / inference,
            "over backpropagation": middle / whole,
        }
    few = growth["LR, 20 queries"][0]
    results[slow]["200 over 20 queries"] = growth[slow][0] / few
    results["target"] = TARGETS
    return results


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1])))
