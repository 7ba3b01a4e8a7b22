"""Logits and accuracy of image classifiers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flops.tasks.data.splits import ImageSplit


def logits(outputs: object) -> Tensor:
    """Extract the logits from the outputs of a classifier.

    Args:
        outputs: A tensor; a transformers `ModelOutput` or another object with `logits`; or a tuple,
            of which the first tensor with a class axis is taken (a loss may precede it).

    Raises:
        TypeError: There are no logits in it.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple):
        found = next((o for o in outputs if isinstance(o, Tensor) and o.dim() > 1), None)
    else:
        found = getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    allowed = "a tensor, a tuple that holds one, or an output with a tensor `logits`"
    raise TypeError(f"no logits in a {type(outputs).__name__}: the model must return {allowed}")


def accuracy(model: nn.Module, split: ImageSplit, batch: int = 256) -> float:
    """Return the share of points, in [0, 1], whose largest logit is at their label.

    Runs on the model's device, in evaluation mode; each module gets its training flag back.

    Raises:
        ValueError: The split is empty or `batch` is not positive.
    """
    if len(split) == 0 or batch < 1:
        raise ValueError(f"need at least one point and batch >= 1, got {len(split)} and {batch=}")
    device = next((p.device for p in model.parameters()), split.labels.device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    correct = 0
    try:
        with torch.inference_mode():
            for start in range(0, len(split), batch):
                rows = torch.arange(start, min(start + batch, len(split)))
                images, labels = split.batch(rows)
                predicted = logits(model(images.to(device))).argmax(-1)
                correct += int((predicted == labels.to(device)).sum())
    finally:
        for module in training:
            module.training = True  # not .train(), which would also reach submodules in eval mode
    return correct / len(split)
