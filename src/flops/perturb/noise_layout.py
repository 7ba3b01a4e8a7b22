"""Where each parameter's noise lies in a row of a group's noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flops.perturb.parameter_calls import Unit


@dataclass(frozen=True)
class Entry:
    """Where a parameter's noise lies in a row: a of length ``out``, then b of length ``rest``."""

    unit: Unit
    path: str
    parameter: nn.Parameter
    offset: int
    out: int
    rest: int

    def cut(self, z: Tensor) -> Any:
        """The signs of this parameter: a and b, or a vector."""
        middle = self.offset + self.out
        z = z.to(self.parameter.device)
        a = z[:, self.offset : middle]
        if not self.rest:
            return a
        padding = self.unit.padding.get(self.path)
        if padding is not None:
            a = a.index_fill(1, torch.tensor([padding], device=a.device), 0)
        return a, z[:, middle : middle + self.rest]

    def noise(self, z: Tensor, scale: Tensor | float = 1.0) -> Any:
        """Cut, in the precision of the parameter; a and vectors times a scale, b as it is."""
        found, dtype = self.cut(z), self.parameter.dtype
        if isinstance(scale, Tensor):
            scale = scale.to(self.parameter.device)
        if isinstance(found, tuple):
            return (found[0] * scale).to(dtype), found[1].to(dtype)
        return (found * scale).to(dtype)
