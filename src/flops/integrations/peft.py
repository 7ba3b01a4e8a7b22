"""Adapters of PEFT: what likelihood ratio can perturb in a model with a trained prompt.

LoRA and IA3 need nothing: their parameters act inside the blocks of the model, whose outputs are
perturbed, and the local VJP goes into the adapters. Prefix tuning computes its keys and values for
every row. Prompt tuning and P-tuning compute the prompt once and repeat it for the rows, behind
the last module that could be perturbed; `prompts_by_row` computes it for every row instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

ONCE = ("PROMPT_TUNING", "P_TUNING")  # kinds whose prompt is computed once for all rows


@contextmanager
def prompts_by_row(model: nn.Module) -> Iterator[None]:
    """Within it, a prompt that all rows share is computed for every row, with the same values.

    Noise on the prompt encoder's output then differs from row to row. Nothing happens to models
    without such a prompt. Wrap every call of `estimate`; `ForwardTrainer` does.

    Args:
        model: Any model; the virtual tokens of a PeftModel are looked for.
    """
    config = _config(model)
    if config is None or getattr(config.peft_type, "value", None) not in ONCE:
        yield
        return
    peft: Any = model  # a PeftModel

    def get_prompt(batch_size: int, task_ids: Any = None, **_: Any) -> Tensor:
        encoder = peft.prompt_encoder[peft.active_adapter]
        tokens = peft.prompt_tokens[peft.active_adapter].to(encoder.embedding.weight.device)
        prompts: Tensor = encoder(tokens.unsqueeze(0).expand(batch_size, -1))
        return prompts  # (B, virtual tokens, width)

    if "get_prompt" in vars(peft):  # inside another one
        yield
        return
    peft.get_prompt = get_prompt
    try:
        yield
    finally:
        del peft.get_prompt


def prompt_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, if the model has a trained prompt; else none.

    An adapter in PEFT's format holds the prompt, but not the encoder that computes it, which a
    resumed run goes on training.
    """
    config = _config(model)
    if config is None or not config.is_prompt_learning:
        return {}
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _config(model: nn.Module) -> Any:
    """Of the active adapter of a PeftModel; None for other models."""
    return getattr(model, "active_peft_config", None)
