"""Which TrainingArguments make sense without a backward pass, and what to do about the others."""

from __future__ import annotations

import copy
import logging
from typing import Any

from flops.errors import FlopsError

logger = logging.getLogger(__name__)

REFUSED = {
    "deepspeed": "DeepSpeed shards parameters, which queries need whole; launch with torchrun "
    "alone, and every process trains on its own batches",
    "fsdp": "FSDP shards parameters, which queries need whole; launch with torchrun alone, and "
    "every process trains on its own batches",
    "torch_compile": "a compiled model cannot be perturbed or replayed; leave torch_compile out",
    "fp16": "fp16=True scales the loss for a backward pass that is never made; load the model in "
    "half precision (dtype=torch.float16), or use bf16=True",
    "neftune_noise_alpha": "the noise of NEFTune would be seen by every query as if it were its "
    "own; leave neftune_noise_alpha out",
    "use_liger_kernel": "kernels of Liger return one loss for the batch, and no logits; leave "
    "use_liger_kernel out",
}
BACKWARD_OPTIMIZERS = ("lomo", "adalomo")


def accept(args: Any) -> Any:
    """The arguments to train with: as given, or a copy without what is ignored.

    Raises:
        FlopsError: For what needs a backward pass, or shards or compiles the model.
    """
    for name, reason in REFUSED.items():
        if getattr(args, name, None) not in (None, False, "", [], {}):
            raise FlopsError(f"ForwardTrainer: {reason}")
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer in BACKWARD_OPTIMIZERS:
        raise FlopsError(
            f"ForwardTrainer: optim='{optimizer}' steps inside the backward pass, and there is "
            "none; choose another optimizer"
        )
    if args.world_size > 1 and args.train_sampling_strategy == "batch_rebalance":
        raise FlopsError(
            "ForwardTrainer: batches of batch_rebalance are not split over processes here; choose "
            "another train_sampling_strategy"
        )
    if args.gradient_checkpointing:
        logger.warning(
            "gradient_checkpointing is ignored: no activations are kept for a backward pass"
        )
        args = copy.copy(args)
        args.gradient_checkpointing = False
    return args
