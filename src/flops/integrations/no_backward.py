"""Calls without derivatives: what runs in an inference engine has no backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flops.errors import BackwardError


def without_backward(
    engine: str, run: Callable[..., tuple[Tensor, ...]], *given: Tensor
) -> tuple[Tensor, ...]:
    """Run a function of tensors; derivatives through it raise `BackwardError`, not be zero.

    Args:
        engine: What has no backward pass, for the message: "an ONNX Runtime session".
        run: From the given tensors to a tuple of tensors.
        given: Its inputs.
    """
    apply: Any = _NoBackward.apply
    found: tuple[Tensor, ...] = apply(engine, run, *given)
    return found


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: str, run: Callable[..., tuple[Tensor, ...]], *given: Tensor
    ) -> tuple[Tensor, ...]:
        found = run(*given)
        ctx.engine = engine
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _error(ctx.engine)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _error(ctx.engine)


def _error(engine: str) -> BackwardError:
    return BackwardError(
        f"{engine} has no backward pass, so what comes before it cannot be backpropagated; train "
        "that with flops.ForwardGradient (LikelihoodRatio, SPSA or ES), or detach its inputs to "
        "train only what comes after it"
    )
