"""Outputs of a black box, of which the loss is a known function.

A service that returns logits reveals with every query how all of them change, at no extra cost. The
client computes the loss from them, so its derivative with respect to the outputs is known: they
become the engine's view of a loss (`flops.passes.loss_view`), and estimators learn from it as they
do from the outputs of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.estimators.base import RowResults
from flops.passes.loss_view import LossView, differentiate


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs of an objective that returns several columns.

    Args:
        of: Outputs in the columns: ``outputs = of(columns)``, shapes (Q, k) and (Q, K). They should
            hold nothing that the loss does not depend on: for instance centred logits.
        loss: Losses of outputs: ``losses = loss(outputs, points)``, shapes (Q, K), (Q,) and (Q,),
            differentiable in the outputs.
        newest: Stored derivatives per point, unless one step has more, from which its Jacobian is
            estimated (`flops.blackbox.jacobian_memory`). 0 stores none: the mean Jacobian of all
            points is learned instead, as by `ForwardGradient`.
        room: Noise values kept, 4 bytes each.
    """

    of: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    newest: int = 96
    room: int = 1 << 27

    def __post_init__(self) -> None:
        """Check the options."""
        if self.newest < 0:
            raise FlopsError(f"newest must be at least 0, not {self.newest}")

    def view(self, columns: Tensor, points: Tensor) -> LossView | None:
        """The view of a batch's loss, from the columns of its clean rows.

        None if nothing is stored and the loss is flat at all points, as in the engine.

        Raises:
            FlopsError: If `loss` differs from the objective's, or its derivative is not finite.
        """
        outputs = self._read(columns)
        losses, (found,) = differentiate(lambda values: self.loss(values[0], points), [outputs])
        own = columns[:, 0]
        if losses.shape != own.shape or not torch.allclose(losses.to(own), own, 1e-3, 1e-3):
            raise FlopsError(
                "`outputs.loss` does not reproduce the losses that the objective returns"
            )
        if found is None:
            raise FlopsError("`outputs.loss` does not depend on the outputs that it is given")
        if not bool(torch.isfinite(found).all()):
            raise FlopsError("the derivative of `outputs.loss` is not finite")
        if self.newest:  # the memory reads the outputs and residuals alone: no SVD of many outputs
            return LossView((0,), None, outputs, found, None, found[:0], known=True)
        view = LossView.of(outputs, found, known=True)
        return view if len(view.roots) else None

    def results(self, columns: Tensor, view: LossView) -> RowResults:
        """Losses of rows, and what the loss reads of each; NaN where it failed."""
        losses, clean = columns[:, 0], view.clean
        there = ~torch.isnan(losses)
        outputs = clean.new_full((len(losses), clean.size(1)), torch.nan)
        if bool(there.any()):
            outputs[there] = view.read(self._read(columns[there]))
        return RowResults(losses, outputs)

    def _read(self, columns: Tensor) -> Tensor:
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
