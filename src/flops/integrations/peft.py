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
    peft: Any = model  # of the type PeftModel, if it has a prompt
    config = getattr(model, "active_peft_config", None)
    if config is None or getattr(config.peft_type, "value", None) not in ONCE:
        yield
        return

    def get_prompt(batch_size: int, task_ids: Any = None, **_: Any) -> Tensor:
        encoder = peft.prompt_encoder[peft.active_adapter]
        tokens = peft.prompt_tokens[peft.active_adapter].to(encoder.embedding.weight.device)
        prompts: Tensor = encoder(tokens.unsqueeze(0).expand(batch_size, -1))
        return prompts  # (B, virtual tokens, width)

    peft.get_prompt = get_prompt
    try:
        yield
    finally:
        del peft.get_prompt
