"""Natural noise on images: Gaussian, uniform and Poisson.

Noise is drawn from a private generator keyed by (seed, kind, index of the image): every model sees
the same noisy images, whatever the batches, and the global random state is left unchanged. Results
are clipped to [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.perturb.random import generator

_GAUSSIAN, _UNIFORM, _POISSON = 0x0C01, 0x0C02, 0x0C03  # streams


def gaussian(pixels: Tensor, rows: Tensor, std: float, seed: int = 0) -> Tensor:
    """clip(x + e, 0, 1) with e ~ N(0, std^2) for every value.

    Args:
        pixels: Images in [0, 1], (n, channels, side, side).
        rows: Their indices in the data set, (n,).
        std: Standard deviation, 0 or more.
        seed: Seed of the noise.

    Raises:
        FlopsError: If std is negative, or rows do not fit the pixels.
    """
    _check("the standard deviation of Gaussian noise", std, std >= 0, "0 or more")

    def draw(image: Tensor, source: torch.Generator) -> Tensor:
        return image + std * torch.randn(image.shape, generator=source)

    return _corrupt(pixels, rows, (seed, _GAUSSIAN), draw)


def uniform(pixels: Tensor, rows: Tensor, half: float, seed: int = 0) -> Tensor:
    """clip(x + e, 0, 1) with e ~ U(-half, half) for every value; its std is half / sqrt(3).

    Args:
        pixels: Images in [0, 1], (n, channels, side, side).
        rows: Their indices in the data set, (n,).
        half: Half the width, 0 or more.
        seed: Seed of the noise.

    Raises:
        FlopsError: If half is negative, or rows do not fit the pixels.
    """
    _check("the half width of uniform noise", half, half >= 0, "0 or more")

    def draw(image: Tensor, source: torch.Generator) -> Tensor:
        return image + half * (2 * torch.rand(image.shape, generator=source) - 1)

    return _corrupt(pixels, rows, (seed, _UNIFORM), draw)


def poisson(pixels: Tensor, rows: Tensor, scale: float, seed: int = 0) -> Tensor:
    """clip(k / scale, 0, 1) with k ~ Poisson(scale * x): shot noise.

    Mean x and variance x / scale before clipping. Black stays black.

    Args:
        pixels: Images in [0, 1], (n, channels, side, side).
        rows: Their indices in the data set, (n,).
        scale: Mean count of a white pixel, greater than 0; lower means more noise.
        seed: Seed of the noise.

    Raises:
        FlopsError: If scale is not positive, or rows do not fit the pixels.
    """
    _check("the scale of Poisson noise", scale, scale > 0, "greater than 0")

    def draw(image: Tensor, source: torch.Generator) -> Tensor:
        return torch.poisson(scale * image, generator=source) / scale

    return _corrupt(pixels, rows, (seed, _POISSON), draw)


def _corrupt(
    pixels: Tensor,
    rows: Tensor,
    key: tuple[int, int],
    draw: Callable[[Tensor, torch.Generator], Tensor],
) -> Tensor:
    if len(rows) != len(pixels):
        raise FlopsError(f"{len(pixels)} images need as many rows, not {len(rows)}")
    images = pixels.cpu()  # on the CPU, so that every device sees the same noise
    pairs = zip(images, rows.tolist(), strict=True)
    noisy = [draw(image, generator(*key, row)) for image, row in pairs]
    return torch.stack(noisy).clamp_(0, 1).to(pixels) if noisy else pixels.clone()


def _check(name: str, value: float, met: bool, allowed: str) -> None:
    if not (met and math.isfinite(value)):
        raise FlopsError(f"{name} must be {allowed}, not {value}")
