"""The loss of a transformers model, from what the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flops.errors import FlopsError
from flops.losses.base import base_model
from flops.losses.classes import Classification, MultiLabel, Regression
from flops.losses.tokens import CausalLM, MaskedLM, Seq2SeqLM, TokenClassification

TOKEN_KINDS = {
    "ForCausalLM": CausalLM,
    "LMHeadModel": CausalLM,
    "ForMaskedLM": MaskedLM,
    "ForTokenClassification": TokenClassification,
}
WHOLE_KINDS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
)
PROBLEMS = {
    "regression": Regression,
    "single_label_classification": Classification,
    "multi_label_classification": MultiLabel,
}


def from_model(model: nn.Module, *, label_smoothing: float = 0.0) -> Callable[..., Tensor]:
    """The loss for a transformers model, or for a PEFT model around one.

    It follows from the class (``...ForCausalLM``, ``...ForSequenceClassification``, ...) and, for
    classification, from ``config.problem_type``; where that is None, one output is a regression.

    Args:
        model: The model.
        label_smoothing: Share of the target that is spread over all classes.

    Raises:
        FlopsError: If no loss is known for the model, or it has none that could be smoothed.
    """
    base = base_model(model)
    kind = _kind(base)
    if kind is None:
        raise FlopsError(
            f"no loss is known for {type(base).__name__}; give a function of (outputs, targets) "
            "that returns one loss per row, such as those in flops.losses"
        )
    if kind in (MultiLabel, Regression):
        if label_smoothing:
            raise FlopsError(f"labels of {kind.__name__} cannot be smoothed; leave it at 0")
        found: Callable[..., Tensor] = kind()
        return found
    found = kind(label_smoothing=label_smoothing)
    return found


def advice(model: nn.Module) -> str:
    """What to do about a loss that is a mean over the batch: the name of the right one."""
    kind = _kind(base_model(model))
    if kind is None:
        return 'Use reduction="none", and average a per-token loss over the tokens of each point.'
    return f"For {type(base_model(model)).__name__} use flops.losses.{kind.__name__}()."


def _kind(base: nn.Module) -> Any:
    name, config = type(base).__name__, getattr(base, "config", None)
    for ending, kind in TOKEN_KINDS.items():
        if name.endswith(ending):
            return kind
    if name.endswith("ForConditionalGeneration"):
        return Seq2SeqLM if getattr(config, "is_encoder_decoder", False) else CausalLM
    if name.endswith(WHOLE_KINDS):
        problem = getattr(config, "problem_type", None)
        if problem is None:
            one = getattr(config, "num_labels", None) == 1
            problem = "regression" if one else "single_label_classification"
        return PROBLEMS.get(problem)
    return None
