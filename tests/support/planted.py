"""Models whose gradient lives in a subspace that is known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.subspace.config import Shaping
from tests.conftest import flat, gradients, squared


class Planted(nn.Module):
    """A site of 12 channels of which the loss reads three combinations."""

    def __init__(self, tokens: int = 1) -> None:
        super().__init__()
        self.target = nn.Linear(4, 12)
        self.register_buffer("reads", torch.randn(12, 3))
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        out = self.target(x) @ self.reads  # (B, [T,] 3)
        return out if self.tokens == 1 else out[:, 0]  # as with a classification token


def planted(tokens: int = 1) -> tuple[Planted, Tensor, Tensor]:
    x = torch.randn(6, 4) if tokens == 1 else torch.randn(6, tokens, 4)
    return Planted(tokens).double(), x.double(), torch.randn(6, 3).double()


def engine(model: nn.Module, queries: int, shaping: Shaping | None = None, **options):
    estimator = LikelihoodRatio(1e-7, shaping=shaping or Shaping(outputs=False))
    groups = [Group(model.target, estimator, queries=queries, name="site")]
    return ForwardGradient(model, squared, groups, **options)


def step(fg: ForwardGradient, x: Tensor, y: Tensor) -> Tensor:
    fg.model.zero_grad()
    fg.estimate(x, y)
    return flat(gradients(fg.model))
