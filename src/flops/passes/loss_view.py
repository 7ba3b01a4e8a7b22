"""What the loss reads: outputs of the model, and the derivative of the loss with respect to them.

A query changes all outputs of a point, by J z with J the Jacobian of the outputs at the noise, and
the loss by r^T J z with r its derivative. r follows from the outputs of the clean pass and the loss
function alone, without a graph of the model. So a query shows the derivative of the loss without
the loss's own curvature and without cancellation, and also what the gradient J^T r would be for the
residuals r of other points: the gradients of points that were not drawn lie in the same space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.passes.batch import Batch
from flops.passes.ranks import Replicas

MOST = 1 << 24  # values of all points' outputs
EVERY = 32  # outputs that are all looked at; of more, the directions of the residuals
DIRECTIONS = 12  # of residuals
LEAST = 1e-3  # singular value of a direction of residuals, relative to the largest


@dataclass(frozen=True)
class LossView:
    """The outputs that a loss reads, flattened to K values of each point.

    *Features* are p linear functions of them: all K, or, of many, the directions of the residuals.

    Attributes:
        leaves: Which leaves of the outputs.
        columns: Which values of these leaves; None for all.
        clean: Outputs of the clean pass, shape (B, K).
        residuals: Derivative of each point's loss with respect to them, shape (B, K).
        basis: Orthonormal, shape (p, K); None for the outputs themselves.
        roots: Residuals of the batch, each normalised, have the second moment roots^T roots in the
            features, shape (q, p).
        common: Whether all replicas have the same features.
        known: Whether the loss is known to be a function of these outputs and of nothing else.
    """

    leaves: tuple[int, ...]
    columns: Tensor | None
    clean: Tensor
    residuals: Tensor
    basis: Tensor | None
    roots: Tensor
    common: bool = True
    known: bool = False

    @classmethod
    def of(
        cls,
        clean: Tensor,
        residuals: Tensor,
        leaves: tuple[int, ...] = (0,),
        columns: Tensor | None = None,
        known: bool = False,
    ) -> LossView:
        """The view of a batch; of many outputs, the directions of the residuals are features."""
        with torch.autocast(residuals.device.type, enabled=False):
            basis, roots = _directions(residuals)
        return cls(leaves, columns, clean, residuals, basis, roots, known=known)

    @property
    def size(self) -> int:
        """Number of features p."""
        return self.roots.size(1)

    @property
    def name(self) -> tuple[Any, ...] | None:
        """Identifies the features; None if those of the next batch are others."""
        if self.basis is not None or not self.common:
            return None
        columns = () if self.columns is None else tuple(self.columns.tolist())
        return (self.leaves, columns, self.clean.size(1))

    @property
    def coordinates(self) -> Tensor:
        """Residuals in the features, shape (B, p)."""
        return self.features(self.residuals)

    @property
    def resolution(self) -> float:
        """Rounding of an output."""
        return torch.finfo(self.clean.dtype).eps * float(self.clean.abs().max())

    def read(self, outputs: Any) -> Tensor:
        """The values that the loss reads, shape (rows, K)."""
        found = tree_flatten(outputs)[0]
        flat = torch.cat([_flat(found[i].detach()) for i in self.leaves], 1)
        flat = flat if self.columns is None else flat[:, self.columns]
        return flat.to(self.clean.dtype)

    def features(self, change: Tensor) -> Tensor:
        """Features of a change of the outputs, shape (rows, p)."""
        return change if self.basis is None else change @ self.basis.T

    def derivatives(self, change: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Of the points' losses, (rows,), and of the features, (rows, p), along a change.

        Outputs that a point's loss does not read (logits at its padding, which others read) say
        nothing of its gradient, and are left out, unless the loss is known to read them all.
        """
        residuals = self.residuals[points]
        read = change if self.known else change * (residuals != 0)
        return (change * residuals).sum(1), self.features(read)


def differentiate(
    loss: Callable[[list[Tensor]], Any], outputs: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses of outputs, and their derivative; None for outputs that are not read."""
    values = [x.detach().clone().requires_grad_() for x in outputs]
    with torch.inference_mode(False), torch.enable_grad():
        losses = loss(values)
        found = torch.autograd.grad(losses.sum(), values, allow_unused=True)
    return losses.detach(), list(found)


def loss_view(batch: Batch, outputs: Any, positions: Tensor | None) -> LossView | None:
    """The view of a batch's loss; None if the loss has no derivative there.

    Args:
        batch: The batch.
        outputs: Outputs of its clean pass.
        positions: Positions of the logits, if not all.
    """
    found, spec = tree_flatten(outputs)
    size = batch.size
    rows = next((len(x) for x in found if isinstance(x, Tensor) and x.dim()), 0)
    if rows < size:
        return None
    at = [
        i
        for i, x in enumerate(found)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() and len(x) == rows
    ]
    own = [found[i][:size] for i in at]
    if not own or sum(x.numel() for x in own) > MOST:
        return None

    def losses(values: list[Tensor]) -> Any:
        new = dict(zip(at, values, strict=True))
        whole = tree_unflatten([new.get(i, x) for i, x in enumerate(found)], spec)
        return batch.loss(whole, torch.arange(size), positions)

    try:
        _, grads = differentiate(losses, own)
    except (RuntimeError, TypeError):  # integers, numpy, detached outputs; not signal handlers'
        return None
    used = [(i, x, g) for i, x, g in zip(at, own, grads, strict=True) if g is not None]
    if not used:
        return None
    residuals = torch.cat([_flat(g) for _, _, g in used], 1)
    columns = torch.nonzero(residuals.abs().amax(0) > 0).flatten()
    if not len(columns) or not bool(torch.isfinite(residuals).all()):
        return None
    clean = torch.cat([_flat(x.detach()) for _, x, _ in used], 1)
    every = len(columns) == clean.size(1)
    if not every:
        residuals, clean = residuals[:, columns], clean[:, columns]
    if not bool(torch.isfinite(clean).all()):  # logits that are masked by -inf have no change
        return None
    leaves = tuple(i for i, _, _ in used)
    view = LossView.of(clean, residuals, leaves, None if every else columns)
    return view if len(view.roots) else None


def joint_view(view: LossView | None, replicas: Replicas) -> LossView | None:
    """The view with the residuals of all replicas' points; None if one of them has no view.

    Of many outputs, the directions of the residuals stay those of each replica's points.
    """
    if not replicas.several:
        return view
    code = float(crc32(repr(None if view is None else view.name).encode()))
    named = view is not None and view.name is not None
    mine = torch.tensor([code, -code, float(view is None), float(not named)], dtype=torch.float64)
    high, low, missing, unnamed = replicas.max(mine).tolist()
    if missing or view is None:
        return None
    if unnamed or high != -low:
        return replace(view, common=False)
    unit = _normalised(view.residuals)
    moment = unit.T @ unit  # (K, K)
    moment, count = replicas.sum([moment, moment.new_tensor([len(unit)])])
    values, vectors = torch.linalg.eigh(moment / count.clamp(min=1))
    values, vectors = values.flip(0)[:DIRECTIONS].clamp(min=0).sqrt(), vectors.flip(1).T
    keep = values > LEAST * values[0]
    roots = vectors[:DIRECTIONS][keep] * values[keep].unsqueeze(1)
    return replace(view, roots=roots.to(view.roots))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1)


def _normalised(residuals: Tensor) -> Tensor:
    """Residuals of length 1, in double precision, without those that are zero."""
    wide = residuals.double()  # squares of float32 underflow at a batch that is fitted
    norms = wide.norm(dim=1, keepdim=True)
    unit: Tensor = wide / norms.clamp(min=torch.finfo(wide.dtype).tiny)
    return unit[norms.squeeze(1) > 0]


def _directions(residuals: Tensor) -> tuple[Tensor | None, Tensor]:
    """Basis of the features, and the root of the second moment of the normalised residuals."""
    unit = _normalised(residuals)
    if not len(unit):
        return None, residuals[:0]
    _, values, vectors = torch.linalg.svd(unit, full_matrices=False)
    keep = values[:DIRECTIONS] > LEAST * values[0]
    values = (values[:DIRECTIONS][keep] / len(unit) ** 0.5).to(residuals.dtype)
    vectors = vectors[:DIRECTIONS][keep].to(residuals.dtype)
    if residuals.size(1) <= EVERY:
        return None, vectors * values.unsqueeze(1)
    return vectors, torch.diag(values)
