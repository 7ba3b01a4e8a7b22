"""One loss per example for models that classify or score an example as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flops.errors import BatchError
from flops.losses.base import logits_of


@dataclass(frozen=True)
class Classification:
    """Cross-entropy of the class of each row: of a text, an image or a recording.

        l_j = -log softmax(z_j)[y_j]

    ``targets`` are classes, shape (B,); the model's logits have shape (B, C).

    Args:
        label_smoothing: Share of the target that is spread over all classes.

    Raises:
        BatchError: If logits or targets are of another kind.
    """

    label_smoothing: float = 0.0

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """One loss per row, shape (B,)."""
        logits = logits_of(outputs)
        if logits.dim() != 2:
            raise BatchError(
                f"Classification takes logits of shape (B, C), not {tuple(logits.shape)}; for "
                "logits of tokens use CausalLM, TokenClassification or LabelWords"
            )
        if targets.is_floating_point():
            raise BatchError(
                f"Classification takes one class per row, not targets of {targets.dtype}; for "
                "several classes per row use MultiLabel, for numbers Regression"
            )
        smooth = self.label_smoothing
        return F.cross_entropy(logits, targets.view(-1), reduction="none", label_smoothing=smooth)


@dataclass(frozen=True)
class MultiLabel:
    """Binary cross-entropy of each class, averaged over the classes of a row.

        l_j = -1/C sum_c [y_jc log s(z_jc) + (1 - y_jc) log(1 - s(z_jc))]

    ``targets`` are 0 or 1 (or between), shape (B, C).
    """

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """One loss per row, shape (B,)."""
        logits = logits_of(outputs)
        _check_shape("MultiLabel", logits, targets)
        wanted = targets.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(1)


@dataclass(frozen=True)
class Regression:
    """Mean squared error of the numbers of a row.

        l_j = 1/C sum_c (z_jc - y_jc)^2

    ``targets`` have shape (B, C), or (B,) for a model with one output.
    """

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """One loss per row, shape (B,)."""
        predicted = logits_of(outputs)
        wanted = targets.to(predicted.dtype)
        wanted = wanted.view(-1, 1) if wanted.dim() == 1 and predicted.dim() == 2 else wanted
        _check_shape("Regression", predicted, wanted)
        return (predicted - wanted).square().flatten(1).mean(1)


def _check_shape(name: str, logits: Tensor, targets: Tensor) -> None:
    if logits.shape != targets.shape:
        raise BatchError(
            f"{name} takes targets of the shape of the logits, {tuple(logits.shape)}, not "
            f"{tuple(targets.shape)}"
        )
