"""Bad input gives a clear error, and leaves everything as it was.

Every test of a failing step goes through `refused`, which compares parameters, gradients, hooks,
``forward`` attributes, random states and the step number, and then runs a correct step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import (
    ForwardGradient,
    LikelihoodRatio,
)
from tests.support.random_state import global_random_state

SIZE = 5


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def data(size: int = SIZE) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a failed step must leave alone."""
    return {
        "values": {n: t.clone() for n, t in model.state_dict().items()},
        "storage": [p.data_ptr() for p in model.parameters()],
        "grad": {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        },
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "random": global_random_state(),
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            [m.training for m in model.modules()],
        ),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in ("storage", "attributes", "hooks", "random", "modes"):
        assert before[name] == after[name], name
    for part in ("values", "grad"):
        assert before[part].keys() == after[part].keys()
        for name, value in before[part].items():
            other = after[part][name]
            same = value is other if value is None or other is None else torch.equal(value, other)
            assert same, (part, name)


@contextmanager
def refused(
    fg: ForwardGradient, error: type[BaseException], match: str | None = None, grad: bool = False
) -> Iterator[None]:
    """The enclosed step fails with this error and changes nothing."""
    fg.model.zero_grad()
    if grad:
        for parameter in fg.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
    before, state = snapshot(fg.model), str(fg.state_dict())
    with pytest.raises(error, match=match):
        yield
    assert_same(before, snapshot(fg.model))
    assert str(fg.state_dict()) == state


def works(fg: ForwardGradient, *batch: Any, **options: Any) -> None:
    """A correct step fills all gradients."""
    fg.model.zero_grad()
    step = fg.steps
    fg.estimate(*batch, **options)
    assert fg.steps == step + 1
    assert all(p.grad is not None for p in fg.model.parameters() if p.requires_grad)


class Noisy(nn.Module):
    """Calls a source of randomness in its forward."""

    def __init__(self, source: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.source: Callable[[Tensor], Tensor] | None = source

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x if self.source is None else self.source(x)


BLOCK, PAIRS = LikelihoodRatio(), LikelihoodRatio(baseline="antithetic")
