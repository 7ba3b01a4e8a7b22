"""Draws on a group's parameters as keys and scalars; their noise is generated piece by piece.

A draw is one row of noise over the concatenated parameters of the group, from its key. So the noise
of a parameter depends on its position among them, not on the order of the modules, and a tied
parameter always has the same noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from flops.passes.inner_products import squared_norm
from flops.perturb.random import SharedKind, fill, noise_pieces

KEEP = 1 << 22  # values of a small group, 16 MB


@dataclass(frozen=True)
class DrawShape:
    """Parameters of a draw, and their rows without noise.

    Attributes:
        parameters: Parameters of a group, in a fixed order.
        padding: Rows without noise, by the number of the parameter.
    """

    parameters: tuple[nn.Parameter, ...]
    padding: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of values of each parameter."""
        return [p.numel() for p in self.parameters]

    @cached_property
    def offsets(self) -> list[int]:
        """Start of each parameter in a draw, and the end of the last one."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def small(self) -> bool:
        """Whether a draw is stored as one row: it is small, and of one device and type."""
        kinds = {(p.device, p.dtype, p.is_contiguous()) for p in self.parameters}
        return self.offsets[-1] <= KEEP and len(kinds) == 1 and not self.padding

    def views(self, row: Tensor) -> tuple[Tensor, ...]:
        """Views of a row in the shapes of the parameters."""
        parts: tuple[Tensor, ...] = _unflatten_dense_tensors(row, self.parameters)
        return parts


def shifted(
    data: Tensor,
    kind: SharedKind,
    key: tuple[int, ...],
    alpha: float,
    offset: int = 0,
    padding: int | None = None,
) -> Tensor:
    """``data + alpha z`` as a new tensor, for the noise z of a key from an offset on.

    Args:
        data: Data of a parameter.
        kind: Distribution of the noise.
        key: Key of the draw.
        alpha: Scale.
        offset: Start of the parameter in the draw.
        padding: A row without noise.
    """
    if not data.is_contiguous():
        z = torch.empty(data.shape, dtype=torch.float32, device=data.device)
        out = torch.add(data, fill(kind, key, z, offset), alpha=alpha).to(data.dtype)
    else:
        out = torch.empty_like(data)
        clean, noisy = data.view(-1), out.view(-1)
        for begin, z in noise_pieces(kind, key, len(clean), data.device, offset):
            end = begin + len(z)
            torch.add(clean[begin:end], z, alpha=alpha, out=noisy[begin:end])
    if padding is not None:
        out[padding] = data[padding]
    return out


@dataclass(frozen=True)
class Draws:
    """A gradient g = sum_i weights[i] z_i of a group, where z_i is generated from (*key, i).

    Attributes:
        kind: Distribution of the noise.
        key: (seed, step, group).
        weights: Weights of the draws.
        shape: Parameters of the draws.
        kept: Cached rows of draws, by number.
    """

    kind: SharedKind
    key: tuple[int, ...]
    weights: tuple[float, ...]
    shape: DrawShape
    kept: Mapping[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor, float]]:
        """Each parameter with its gradient, in float32 or wider, and the squared norm of that.

        Gradients are generated one after the other, except for small groups; none is a view.
        """
        if self.shape.small:
            for parameter, part in zip(
                self.shape.parameters, self.shape.views(self._row()), strict=True
            ):
                yield parameter, part.clone(), squared_norm(part)
            return
        for number, parameter in enumerate(self.shape.parameters):
            gradient = torch.empty(parameter.shape, dtype=_wide(parameter), device=parameter.device)
            flat, energy = gradient.view(-1), 0.0
            for begin, part in self._pieces(number):
                flat[begin : begin + len(part)] = part
                energy += squared_norm(part)
            if not parameter.is_contiguous():  # the memory format that optimizers expect
                gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            yield parameter, gradient, energy

    def move(self, alpha: float, earlier: Sequence[tuple[float, Draws]] = ()) -> float:
        """In place theta += alpha (g + sum_k f_k g_k) for all parameters; returns |g|^2.

        Sums are formed in float32 or wider and rounded once.

        Args:
            alpha: Common scale.
            earlier: Factors f_k and gradients g_k of the same parameters.
        """
        parameters: list[Tensor] = list(self.shape.parameters)
        if self.shape.small:
            row = self._row()
            energy = squared_norm(row)
            for factor, draws in earlier:
                row.add_(draws._row(), alpha=factor)
            torch._foreach_add_(parameters, self.shape.views(row), alpha=alpha)
            return energy
        return sum(self._move_one(number, alpha, earlier) for number in range(len(parameters)))

    def _move_one(self, number: int, alpha: float, earlier: Sequence[tuple[float, Draws]]) -> float:
        parameter, energy = self.shape.parameters[number], 0.0
        others = [(factor, draws._pieces(number)) for factor, draws in earlier]
        target: Tensor = parameter
        if not parameter.is_contiguous():  # its memory is not in the order of the noise
            target = torch.zeros(parameter.shape, dtype=_wide(parameter), device=parameter.device)
        flat = target.view(-1)
        for begin, part in self._pieces(number):
            energy += squared_norm(part)
            for factor, pieces in others:
                part.add_(next(pieces)[1], alpha=factor)
            flat[begin : begin + len(part)].add_(part, alpha=alpha if target is parameter else 1)
        if target is not parameter:
            parameter.add_(target, alpha=alpha)
        return energy

    def _row(self) -> Tensor:
        """The gradient of all parameters of a small group, as a new row."""
        first, size = self.shape.parameters[0], self.shape.offsets[-1]
        total, spare = torch.empty(0), torch.empty(0)
        for draw, weight in enumerate(self.weights):
            noise = self.kept.get(draw)
            if noise is None:
                if not len(spare):
                    spare = torch.empty(size, dtype=torch.float32, device=first.device)
                noise = fill(self.kind, (*self.key, draw), spare)
            total = noise.to(_wide(first)) * weight if not draw else total.add_(noise, alpha=weight)
        return total

    def _pieces(self, number: int) -> Iterator[tuple[int, Tensor]]:
        """Start and values of each piece of a parameter's gradient; the next overwrites them.

        A parameter has the same pieces in all draws.
        """
        parameter, at = self.shape.parameters[number], self.shape.offsets[number]
        size, device, wide = parameter.numel(), parameter.device, _wide(parameter)
        row = parameter[0].numel() if number in self.shape.padding else 0
        low = row * self.shape.padding.get(number, 0)
        first, *weights = self.weights
        for begin, z in noise_pieces(self.kind, (*self.key, 0), size, device, at):
            total = z.to(wide).mul_(first)
            for draw, weight in enumerate(weights, start=1):
                key = (*self.key, draw)
                for _, more in noise_pieces(self.kind, key, len(z), device, at + begin):
                    total.add_(more, alpha=weight)
            if row:
                total[max(0, low - begin) : max(0, low + row - begin)] = 0
            yield begin, total


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, parameter.dtype)
