"""Estimates against the exact gradient, where there is one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from flops.passes.batch import Batch
from flops.passes.local_vjp import Gradients


def exact_gradients(model: nn.Module, batch: Batch) -> Gradients | None:
    """Backpropagated gradients of the mean loss, or None where the model cannot be."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        losses = batch.losses(model)
        if not losses.requires_grad:
            return None
        found = torch.autograd.grad(losses.mean(), parameters, allow_unused=True)
    return {p: g for p, g in zip(parameters, found, strict=True) if g is not None}


def cosine(found: Gradients, exact: Gradients | None) -> float:
    """Cosine of two gradients over the parameters of the first."""
    if exact is None or not all(p in exact for p in found) or not found:
        return float("nan")
    a = torch.cat([g.flatten().double() for g in found.values()])
    b = torch.cat([exact[p].flatten().double() for p in found])
    return float(F.cosine_similarity(a, b, dim=0))
