"""Adversarial attacks: the three sign methods of the paper's robustness table.

All of them increase the loss l of a classifier of pixels in [0, 1], changing every pixel by at most
``bound``. They use the exact gradient with respect to the pixels, however the classifier was
trained, and are untargeted. Parameters and their ``.grad`` are left unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.errors import FlopsError

Classifier = Callable[[Tensor], Tensor]
"""From pixels in [0, 1], (n, channels, side, side), to logits, (n, classes)."""


def fgsm(model: Classifier, pixels: Tensor, labels: Tensor, bound: float) -> Tensor:
    """Fast gradient sign method: x' = clip(x + bound * sign(dl/dx), 0, 1).

    Goodfellow, Shlens, Szegedy: Explaining and harnessing adversarial examples, 2015,
    arXiv:1412.6572. One forward and one backward pass.

    Args:
        model: The classifier.
        pixels: Clean images in [0, 1], (n, channels, side, side).
        labels: Their classes, (n,).
        bound: Largest change of a pixel.

    Raises:
        FlopsError: If pixels or bound are invalid.
    """
    return i_fgsm(model, pixels, labels, bound, steps=1)


def i_fgsm(
    model: Classifier, pixels: Tensor, labels: Tensor, bound: float, steps: int = 5
) -> Tensor:
    """Iterated FGSM, with steps of bound / steps, each followed by a projection.

        x_0 = x,   x_{t+1} = P(x_t + bound / steps * sign(dl/dx_t)),

    where P clips every pixel to [x - bound, x + bound] and to [0, 1].
    Kurakin, Goodfellow, Bengio: Adversarial examples in the physical world, 2017, arXiv:1607.02533
    (there with steps of 1/255; these reach the bound in exactly ``steps`` of them).

    Args:
        model: The classifier.
        pixels: Clean images in [0, 1], (n, channels, side, side).
        labels: Their classes, (n,).
        bound: Largest change of a pixel.
        steps: Iterations, one forward and one backward pass each.

    Raises:
        FlopsError: If pixels, bound or steps are invalid.
    """
    return _iterate(model, pixels, labels, bound, steps, None)


def mi_fgsm(
    model: Classifier,
    pixels: Tensor,
    labels: Tensor,
    bound: float,
    steps: int = 5,
    momentum: float = 1.0,
) -> Tensor:
    """Iterated FGSM along a running sum of normalised gradients (momentum).

        g_0 = 0,   g_{t+1} = momentum * g_t + (dl/dx_t) / |dl/dx_t|_1,
        x_{t+1} = P(x_t + bound / steps * sign(g_{t+1})),

    with the L1 norm per image and P as in `i_fgsm`.
    Dong et al.: Boosting adversarial attacks with momentum, 2018, arXiv:1710.06081.

    Args:
        model: The classifier.
        pixels: Clean images in [0, 1], (n, channels, side, side).
        labels: Their classes, (n,).
        bound: Largest change of a pixel.
        steps: Iterations, one forward and one backward pass each.
        momentum: Weight of the earlier gradients; 0 is `i_fgsm`.

    Raises:
        FlopsError: If pixels, bound, steps or momentum are invalid.
    """
    if not (math.isfinite(momentum) and momentum >= 0):
        raise FlopsError(f"momentum must be 0 or more, not {momentum}")
    return _iterate(model, pixels, labels, bound, steps, momentum)


def _iterate(
    model: Classifier,
    pixels: Tensor,
    labels: Tensor,
    bound: float,
    steps: int,
    momentum: float | None,
) -> Tensor:
    if not (math.isfinite(bound) and bound >= 0) or steps < 1:
        raise FlopsError(f"an attack needs bound >= 0 and steps >= 1, not {bound=}, {steps=}")
    if not pixels.is_floating_point() or not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise FlopsError(
            "an attack needs floating-point pixels in [0, 1], before the model's normalisation; "
            f"given were {pixels.dtype} from {float(pixels.min()):g} to {float(pixels.max()):g}"
        )
    clean = pixels.detach()
    low, high = (clean - bound).clamp(min=0), (clean + bound).clamp(max=1)
    found, total = clean, torch.zeros_like(clean)
    for _ in range(steps):
        direction = _gradient(model, found, labels)
        if momentum is not None:
            sizes = direction.abs().flatten(1).sum(1)  # (n,)
            sizes = sizes.clamp(min=torch.finfo(sizes.dtype).tiny)  # a zero gradient stays zero
            total = momentum * total + direction / sizes.view(-1, *[1] * (clean.dim() - 1))
            direction = total
        found = (found + bound / steps * direction.sign()).clamp(low, high)
    return found


def _gradient(model: Classifier, pixels: Tensor, labels: Tensor) -> Tensor:
    """dl/dx of every image, from the sum of their losses."""
    with torch.enable_grad():
        asked = pixels.clone().requires_grad_()
        loss = F.cross_entropy(model(asked), labels, reduction="sum")
        (found,) = torch.autograd.grad(loss, asked)  # not backward(): it would fill .grad
    return found
