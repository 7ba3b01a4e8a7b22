"""Image classification as the training loop sees it: loss, accuracy, clipped attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.distributed import Team
from flops.errors import FlopsError
from flops.tasks.splits import ImageSplit
from flops.tasks.vision import logits


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of each point."""
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def measure(
    model: nn.Module,
    split: ImageSplit,
    batch: int,
    device: torch.device,
    team: Team | None = None,
) -> tuple[float, float]:
    """Accuracy and mean loss on a split; the processes of a team take the batches in turn.

    Raises:
        FlopsError: If it has no points.
    """
    if not len(split):
        raise FlopsError("there is nothing to evaluate on: the split has no points")
    right, total, team = 0, 0.0, team or Team()
    with torch.inference_mode():
        for rows in torch.arange(len(split)).split(max(64, batch))[team.rank :: team.size]:
            pixels, labels = split.batch(rows)
            outputs, labels = model(pixels.to(device)), labels.to(device)
            right += int((logits(outputs).argmax(-1) == labels).sum())
            total += float(loss_fn(outputs, labels).double().sum())
    all_right, all_loss = team.sum([right, total])
    return all_right / len(split), all_loss / len(split)


def clip_attention(model: nn.Module, most: float) -> None:
    """Scale the gradient of all attention parameters down to a norm of at most ``most``."""
    names = ("attention", "attn")
    parameters = [p for n, p in model.named_parameters() if any(part in n for part in names)]
    torch.nn.utils.clip_grad_norm_(parameters, most)
