"""Models of real size and a batch of eight for each, for `benchmarks.real`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.tasks.alignment.models import load_language, smollm2_file
from flops.tasks.classification import logits

BATCH = 8
TEXT = Path(__file__).parent.parent / "LICENSE"


@dataclass(frozen=True)
class Problem:
    """A model, frozen, and a batch.

    Attributes:
        model: In float32 and evaluation mode.
        inputs: What the model takes, shape (B, ...).
        targets: What the loss compares with.
        loss_fn: One loss for each point.
        layers: The repeated layers.
        stages: Groups into which these are cut.
        head: Logits by the output of the last layer.
    """

    model: Any
    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]
    layers: list[nn.Module]
    stages: int
    head: Callable[[Tensor], Tensor]

    def parts(self) -> list[list[nn.Module]]:
        """The layers, stage by stage."""
        size = len(self.layers) // self.stages
        return [self.layers[i : i + size] for i in range(0, len(self.layers), size)]


def next_token_losses(outputs: Any, tokens: Tensor) -> Tensor:
    """Mean over a sequence of the cross entropy of its next tokens; logits are not copied."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)  # the last position predicts nothing
    flat = F.cross_entropy(logits(outputs).flatten(0, 1), labels.flatten(), reduction="none")
    return flat.view_as(labels).sum(1) / (tokens.size(1) - 1)


def causal(name: str, tokens: int, stages: int, batch: int = BATCH) -> Problem:
    """A causal language model on sentences of this repository's license, without padding."""
    language = load_language(name)
    model: Any = language.model
    model.config.use_cache = False
    found = language.tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")
    rows = found["input_ids"][0, : batch * tokens].view(batch, tokens)
    return Problem(
        model,
        rows,
        rows,
        next_token_losses,
        list(model.model.layers),
        stages,
        lambda hidden: model.lm_head(model.model.norm(hidden)),
    )


def vit_base(batch: int = BATCH) -> Problem:
    """A ViT-base of 224 pixels with random weights, on random images."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model: Any = ViTForImageClassification(ViTConfig()).eval().requires_grad_(False)
    x = torch.randn(batch, 3, model.config.image_size, model.config.image_size)
    return Problem(
        model,
        x,
        torch.arange(batch) % model.config.num_labels,
        lambda outputs, y: F.cross_entropy(logits(outputs), y, reduction="none"),
        list(model.vit.layers),
        4,
        lambda hidden: model.classifier(model.vit.layernorm(hidden)[:, 0]),
    )


MODELS: dict[str, Callable[[], Problem]] = {
    "smollm2-48": partial(causal, "smollm2", 48, stages=5),
    "smollm2-128": partial(causal, "smollm2", 128, stages=5),
    "vit-base": vit_base,
    "tiny": partial(causal, "bundled", 12, stages=2),
}


def missing(name: str) -> str | None:
    """Why a model cannot be loaded, and what to do; None if it can."""
    if name.startswith("smollm2"):
        try:
            smollm2_file()
        except FileNotFoundError as error:
            return str(error)
    return None
