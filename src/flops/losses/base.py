"""Losses that read the logits of some positions, and models that can leave out the others.

A `TokenLoss` says which positions it reads. Where the model can leave out the logits of the others
(``logits_to_keep`` of transformers), the engine lets it: for a vocabulary of 50,000 they are the
largest tensors of a pass.

Positions are counted from the end, -1 for the last: padding on the left and the virtual tokens of
prompt tuning, which the labels do not have, leave them as they are.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class TokenLoss(ABC):
    """A loss that reads the logits of some positions."""

    @abstractmethod
    def positions(self, targets: Any) -> Tensor:
        """Positions that the loss of any row reads, negative and ascending, shape (K,)."""

    @abstractmethod
    def __call__(self, outputs: Any, targets: Any, positions: Tensor | None = None) -> Tensor:
        """One loss per row, shape (B,).

        Args:
            outputs: Of the model; logits have shape (B, T, V), or (B, K, V) for some positions.
            targets: Of the rows.
            positions: Those of the logits; None for all.
        """


def logits_of(outputs: Any) -> Tensor:
    """The logits in a model's outputs."""
    if isinstance(outputs, Tensor):
        return outputs
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    return logits


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model; any other model as it is."""
    inner = getattr(model, "get_base_model", None)
    found: nn.Module = inner() if callable(inner) else model
    return found


def optional_arguments(model: nn.Module) -> set[str]:
    """Arguments of transformers' models that save computation; peft passes them on."""
    base = base_model(model)
    if not hasattr(getattr(base, "config", None), "use_cache"):
        return set()  # a parameter of that name may mean anything
    return {"logits_to_keep", "use_cache"} & set(_parameters(type(base)))


def bound_arguments(model: nn.Module, count: int) -> set[str]:
    """Names of the first ``count`` arguments of a model, which are given by position."""
    return set(_parameters(type(model))[1 : count + 1])


def _parameters(kind: type[nn.Module]) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)
