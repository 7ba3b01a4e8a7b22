"""Outputs of a black box, of which the loss is a known function.

A service that returns logits reveals with every query how all of them change, at no extra cost. The
client computes the loss from them, so its derivative with respect to the outputs is known; the
Jacobian of the outputs is learned from all queries of a run (`flops.blackbox.jacobian_memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.errors import FlopsError


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs of an objective that returns several columns.

    Args:
        of: Outputs in the columns: ``outputs = of(columns)``, shapes (Q, k) and (Q, K). They should
            hold nothing that the loss does not depend on: for instance centred logits.
        loss: Losses of outputs: ``losses = loss(outputs, points)``, shapes (Q, K), (Q,) and (Q,),
            differentiable in the outputs.
        newest: Stored derivatives per point, unless one step has more.
        room: Noise values kept, 4 bytes each.
    """

    of: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    newest: int = 96
    room: int = 1 << 27

    def derivative(self, columns: Tensor, points: Tensor) -> Tensor:
        """Derivative of each row's loss with respect to its outputs, shape (Q, K).

        Raises:
            FlopsError: If `loss` differs from the objective's, or its derivative is not finite.
        """
        outputs = self.read(columns).detach().requires_grad_()
        with torch.enable_grad():
            losses = self.loss(outputs, points)
            (found,) = torch.autograd.grad(losses.sum(), outputs)
        own = columns[:, 0]
        same = losses.shape == own.shape
        if not same or not torch.allclose(losses.detach().to(own), own, 1e-3, 1e-3):
            raise FlopsError(
                "`outputs.loss` does not reproduce the losses that the objective returns"
            )
        if not bool(torch.isfinite(found).all()):
            raise FlopsError("the derivative of `outputs.loss` is not finite")
        return found

    def read(self, columns: Tensor) -> Tensor:
        """Extract and check the outputs."""
        outputs = self.of(columns)
        if outputs.dim() != 2 or len(outputs) != len(columns) or outputs.size(1) < 1:
            raise FlopsError(
                f"`outputs.of` must return (rows, outputs) for columns of shape "
                f"{tuple(columns.shape)}, not {tuple(outputs.shape)}"
            )
        if not bool(torch.isfinite(outputs).all()):
            raise FlopsError("the objective returned outputs that are not finite")
        return outputs.to(torch.float32)
