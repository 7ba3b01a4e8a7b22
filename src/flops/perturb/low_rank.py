"""Low-rank noise on matrices: z = U V^T, of which U is new in each step and V stays for some.

U of shape (m, r) and V of shape (n, r) are Gaussian, so E[vec(z) vec(z)^T] = r I, and a directional
derivative along z is multiplied by z / r: the mean of <G, z> z / r is G. A matrix is any parameter
of two or more axes, its first axis against all others, unless one of the two has size 1; other
parameters have plain Gaussian noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flops.perturb.random import fill

PIECE = 1 << 18  # values at a time, 1 MB


@dataclass(frozen=True)
class LowRank:
    """Noise of rank r whose right factors stay for some steps.

    Both factors follow from the key (seed, step, group, ..., draw): U from all of it, V from the
    number of the interval in the place of the step. So nothing is remembered between steps.

    Attributes:
        rank: r.
        interval: Steps for which V stays.
    """

    rank: int
    interval: int

    def gain(self, parameter: Tensor) -> float:
        """What noise is multiplied by in a gradient: 1/r, or 1 where it is plain."""
        return 1 / self.rank if self.applies(parameter) else 1.0

    @staticmethod
    def applies(parameter: Tensor) -> bool:
        """Whether a parameter is a matrix."""
        return parameter.dim() > 1 and 1 < len(parameter) < parameter.numel()

    def pieces(
        self, key: tuple[int, ...], number: int, parameter: Tensor, first: int, count: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Values first, ..., first + count - 1 of a matrix's noise, at most some rows at a time.

        Args:
            key: (seed, step, group, ..., draw).
            number: Of the matrix in its group.
            parameter: The matrix.
            first: Place of the first value.
            count: How many values.

        Yields:
            Where each piece begins, from 0 on, and its values in a buffer: use them before the
            next.
        """
        columns, device = parameter.numel() // len(parameter), parameter.device
        seed, step, *rest = key
        v = torch.empty(columns, self.rank, dtype=torch.float32, device=device)
        fill("gaussian", (seed, step // self.interval, *rest, number, self.interval), v)
        low, high = first // columns, -(-(first + count) // columns)
        most = min(high - low, max(1, PIECE // columns))
        buffer = torch.empty(most, columns, dtype=torch.float32, device=device)
        for row in range(low, high, most):
            u = torch.empty(min(most, high - row), self.rank, dtype=torch.float32, device=device)
            fill("gaussian", (*key, number), u, offset=row * self.rank)
            # With `out`, autocast leaves the product in single precision.
            z = torch.mm(u, v.T, out=buffer[: len(u)]).view(-1)
            begin, end = row * columns, (row + len(u)) * columns
            cut = slice(max(first - begin, 0), min(first + count, end) - begin)
            yield max(begin - first, 0), z[cut]
