"""Draws on a group's parameters as keys and scalars; their noise is generated piece by piece.

A draw is one row of noise over the concatenated parameters of the group, from its key. So the noise
of a parameter depends on its position among them, not on the order of the modules, and a tied
parameter always has the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from flops.perturb.low_rank import LowRank
from flops.perturb.random import SharedKind, fill, noise_pieces

KEEP = 1 << 22  # values of a small group, 16 MB

Noise = SharedKind | LowRank
"""Distribution of a draw."""

Pieces = Iterator[tuple[int, Tensor]]
"""Start and values of each piece of noise; the next overwrites them."""


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

    @cached_property
    def numbers(self) -> dict[nn.Parameter, int]:
        """The number of each parameter."""
        return {p: number for number, p in enumerate(self.parameters)}

    def pieces(
        self,
        noise: Noise,
        key: tuple[int, ...],
        number: int,
        first: int = 0,
        count: int | None = None,
    ) -> Pieces:
        """A parameter's part of a draw, a small piece at a time.

        Args:
            noise: Of the draw.
            key: Of the draw.
            number: Of the parameter.
            first: Place of the first value in the parameter.
            count: How many values; None for all that follow.
        """
        parameter = self.parameters[number]
        count = self.sizes[number] - first if count is None else count
        if isinstance(noise, LowRank) and noise.applies(parameter):
            return noise.pieces(key, number, parameter, first, count)
        kind: SharedKind = "gaussian" if isinstance(noise, LowRank) else noise
        return noise_pieces(kind, key, count, parameter.device, self.offsets[number] + first)

    def fill(self, noise: Noise, key: tuple[int, ...], row: Tensor) -> Tensor:
        """Overwrite a row by a draw on all parameters."""
        if not isinstance(noise, LowRank):
            return fill(noise, key, row)
        for number, start in enumerate(self.offsets[:-1]):
            for begin, z in self.pieces(noise, key, number):
                row[start + begin : start + begin + len(z)] = z
        return row

    def gain(self, noise: Noise, number: int) -> float:
        """What a parameter's noise is multiplied by in a gradient, so that E[gain z z^T] = I."""
        return noise.gain(self.parameters[number]) if isinstance(noise, LowRank) else 1.0

    def energy(self, noise: Noise) -> float:
        """E |gain z|^2 of a draw on all parameters, without what gets no noise."""
        total = 0.0
        for number, (parameter, size) in enumerate(zip(self.parameters, self.sizes, strict=True)):
            idle = parameter[0].numel() if number in self.padding else 0
            total += (size - idle) * self.gain(noise, number)
        return total


def shifted(data: Tensor, pieces: Pieces, alpha: float, padding: int | None = None) -> Tensor:
    """``data + alpha z`` as a new tensor.

    Args:
        data: Data of a parameter.
        pieces: Its noise z; see `DrawShape.pieces`.
        alpha: Scale.
        padding: A row without noise.
    """
    if not data.is_contiguous():
        out = torch.add(data, gathered(data, pieces), alpha=alpha).to(data.dtype)
    else:
        out = torch.empty_like(data)
        clean, noisy = data.view(-1), out.view(-1)
        for begin, z in pieces:
            end = begin + len(z)
            torch.add(clean[begin:end], z, alpha=alpha, out=noisy[begin:end])
    if padding is not None:
        out[padding] = data[padding]
    return out


def gathered(data: Tensor, pieces: Pieces) -> Tensor:
    """A parameter's noise as one tensor of its shape, float32."""
    z = torch.empty(data.shape, dtype=torch.float32, device=data.device)
    for begin, part in pieces:
        z.view(-1)[begin : begin + len(part)] = part
    return z


@dataclass(frozen=True)
class Draws:
    """A gradient g = sum_i weights[i] z_i of a group, where z_i is generated from (*key, i).

    Low-rank noise z_i is multiplied by its gain 1/r; see `flops.perturb.low_rank`.

    Attributes:
        noise: Distribution of the noise.
        key: (seed, step, group).
        weights: Weights of the draws.
        shape: Parameters of the draws.
        kept: Cached rows of draws, by number.
    """

    noise: Noise
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
        target: Tensor = parameter
        if not parameter.is_contiguous():  # its memory is not in the order of the noise
            target = torch.zeros(parameter.shape, dtype=_wide(parameter), device=parameter.device)
        flat = target.view(-1)
        for begin, part in self._pieces(number):
            energy += squared_norm(part)
            for factor, draws in earlier:
                for place, more in draws._pieces(number, begin, len(part)):
                    part[place : place + len(more)].add_(more, alpha=factor)
            flat[begin : begin + len(part)].add_(part, alpha=alpha if target is parameter else 1)
        if target is not parameter:
            parameter.add_(target, alpha=alpha)
        return energy

    def part(self, first: int, last: int) -> Draws:
        """The part of the gradient that draws first, ..., last - 1 add to it."""
        kept = [w if first <= i < last else 0.0 for i, w in enumerate(self.weights)]
        return replace(self, weights=tuple(kept))

    def _weighted(self) -> list[tuple[int, float]]:
        """Draws that add something, with their weights; the first if none does."""
        return [(i, w) for i, w in enumerate(self.weights) if w != 0] or [(0, 0.0)]

    def _row(self) -> Tensor:
        """The gradient of all parameters of a small group, as a new row."""
        first, size = self.shape.parameters[0], self.shape.offsets[-1]
        total, spare = torch.empty(0), torch.empty(0)
        for draw, weight in self._weighted():
            z = self.kept.get(draw)
            if z is None:
                if not len(spare):
                    spare = torch.empty(size, dtype=torch.float32, device=first.device)
                z = self.shape.fill(self.noise, (*self.key, draw), spare)
            fresh = not len(total)
            total = z.to(_wide(first)) * weight if fresh else total.add_(z, alpha=weight)
        for number, part in enumerate(self.shape.views(total)):
            if (gain := self.shape.gain(self.noise, number)) != 1:
                part.mul_(gain)
        return total

    def _pieces(self, number: int, begin: int = 0, count: int | None = None) -> Pieces:
        """A parameter's gradient, or ``count`` values of it from ``begin`` on."""
        parameter, gain = self.shape.parameters[number], self.shape.gain(self.noise, number)
        wide = _wide(parameter)
        row = parameter[0].numel() if number in self.shape.padding else 0
        low = row * self.shape.padding.get(number, 0)
        (one, first), *others = self._weighted()
        for place, z in self.shape.pieces(self.noise, (*self.key, one), number, begin, count):
            at = begin + place
            total = z.to(wide).mul_(first)
            for draw, weight in others:
                key = (*self.key, draw)
                for _, more in self.shape.pieces(self.noise, key, number, at, len(z)):
                    total.add_(more, alpha=weight)
            if gain != 1:
                total.mul_(gain)
            if row:
                total[max(0, low - at) : max(0, low + row - at)] = 0
            yield place, total


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, parameter.dtype)


def squared_norm(a: Tensor) -> float:
    """|a|^2 of a piece that is in the cache, in single precision if that is in range."""
    a = a.float() if a.dtype.itemsize < 4 else a
    found = float(a.square().sum())
    if 1e-30 < found < math.inf:
        return found
    return float(a.double().square().sum())  # overflow or underflow
