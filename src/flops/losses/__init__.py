"""Losses with one value per example, for models whose own loss is a mean over the batch.

`from_model` derives the loss from what a transformers model is; `reward` makes one of a function
that has no derivative.
"""

from flops.losses.base import TokenLoss
from flops.losses.classes import Classification, MultiLabel, Regression
from flops.losses.derive import from_model
from flops.losses.rewards import Reward, reward
from flops.losses.tokens import CausalLM, LabelWords, MaskedLM, Seq2SeqLM, TokenClassification

__all__ = [
    "CausalLM",
    "Classification",
    "LabelWords",
    "MaskedLM",
    "MultiLabel",
    "Regression",
    "Reward",
    "Seq2SeqLM",
    "TokenClassification",
    "TokenLoss",
    "from_model",
    "reward",
]
