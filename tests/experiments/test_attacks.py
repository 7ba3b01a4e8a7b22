"""Attacks: their bounds, what they leave alone, and an independent implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.errors import FlopsError
from flops.experiments.attacks import fgsm, i_fgsm, mi_fgsm
from flops.tasks.classification import bundled_vit, digits
from flops.tasks.data.images import BUNDLED_FORMAT

BOUND = 8 / 255
ATTACKS: dict[str, Callable[..., Tensor]] = {"fgsm": fgsm, "i-fgsm": i_fgsm, "mi-fgsm": mi_fgsm}


class OfPixels(nn.Module):
    """The bundled model, trained for a moment, as a function of pixels in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = bundled_vit()
        train = digits().train
        optimizer = torch.optim.Adam(self.inner.parameters(), 1e-3)
        for start in range(0, 640, 64):
            images, labels = train.batch(torch.arange(start, start + 64))
            optimizer.zero_grad()
            F.cross_entropy(self.inner(images).logits, labels).backward()
            optimizer.step()
        self.inner.zero_grad()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.inner((pixels - 0.5) / 0.5).logits


@pytest.fixture(scope="module")
def model() -> OfPixels:
    return OfPixels()


@pytest.fixture(scope="module")
def points() -> tuple[Tensor, Tensor]:
    test = digits().test
    rows = torch.arange(64)
    return BUNDLED_FORMAT.restore(test.batch(rows)[0]), test.labels[rows]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_stays_within_its_bounds_and_raises_the_loss(
    name: str, model: OfPixels, points: tuple[Tensor, Tensor]
) -> None:
    pixels, labels = points
    before, state = pixels.clone(), {n: v.clone() for n, v in model.state_dict().items()}
    random = torch.get_rng_state()
    with torch.no_grad():  # the caller's mode does not matter
        found = ATTACKS[name](model, pixels, labels, BOUND)
    assert torch.equal(torch.get_rng_state(), random)
    assert not found.requires_grad
    assert found.min() >= 0
    assert found.max() <= 1
    assert (found - pixels).abs().max() <= BOUND + 1e-6
    assert (found - pixels).abs().max() > 0.99 * BOUND
    with torch.no_grad():
        clean, raised = (
            F.cross_entropy(model(x), labels, reduction="none") for x in (pixels, found)
        )
    assert (raised > clean).float().mean() > 0.95
    assert raised.mean() > 1.2 * clean.mean()
    assert torch.equal(pixels, before)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_more_iterations_do_more_harm(model: OfPixels, points: tuple[Tensor, Tensor]) -> None:
    pixels, labels = points
    with torch.no_grad():
        losses = [
            float(F.cross_entropy(model(attack(model, pixels, labels, 4 * BOUND)), labels))
            for attack in (fgsm, i_fgsm)
        ]
    assert losses[1] > 1.1 * losses[0]


def test_one_step_is_the_fast_gradient_sign_method(
    model: OfPixels, points: tuple[Tensor, Tensor]
) -> None:
    asked = points[0].clone().requires_grad_()
    F.cross_entropy(model(asked), points[1], reduction="sum").backward()
    assert asked.grad is not None
    model.zero_grad()
    expected = (points[0] + BOUND * asked.grad.sign()).clamp(0, 1)
    for attack in (i_fgsm, mi_fgsm):
        assert torch.equal(attack(model, *points, BOUND, steps=1), fgsm(model, *points, BOUND))
    assert torch.allclose(fgsm(model, *points, BOUND), expected, rtol=0, atol=1e-7)


def test_without_momentum_it_is_the_iterated_one(
    model: OfPixels, points: tuple[Tensor, Tensor]
) -> None:
    plain, none = i_fgsm(model, *points, BOUND), mi_fgsm(model, *points, BOUND, momentum=0.0)
    assert torch.equal(plain, none)
    assert not torch.equal(plain, mi_fgsm(model, *points, BOUND))


@pytest.mark.bits
def test_an_image_does_not_depend_on_its_batch(
    model: OfPixels, points: tuple[Tensor, Tensor]
) -> None:
    together = mi_fgsm(model, *points, BOUND)
    alone = torch.cat([mi_fgsm(model, p, y, BOUND) for p, y in zip(*(t.split(16) for t in points),
                                                                   strict=True)])  # fmt: skip
    # a gradient near 0 may change its sign with the kernel's order of summation
    assert ((together - alone).abs() > 1e-6).float().mean() < 1e-3


def test_no_gradient_no_change() -> None:
    def constant(pixels: Tensor) -> Tensor:
        return 0 * pixels.flatten(1)[:, :3]

    pixels, labels = torch.rand(4, 1, 5, 5), torch.tensor([0, 1, 2, 0])
    for attack in ATTACKS.values():
        assert torch.equal(attack(constant, pixels, labels, 0.1), pixels)


@pytest.mark.parametrize("size", [7, 32])  # batches that divide the points, and do not
@pytest.mark.parametrize("name", ATTACKS)
def test_an_independent_implementation_agrees(
    name: str, size: int, model: OfPixels, points: tuple[Tensor, Tensor]
) -> None:
    from art.attacks.evasion import (
        BasicIterativeMethod,
        FastGradientMethod,
        MomentumIterativeMethod,
    )
    from art.estimators.classification import PyTorchClassifier

    pixels, labels = (t[:32] for t in points)
    classifier = PyTorchClassifier(
        model, nn.CrossEntropyLoss(), tuple(pixels.shape[1:]), 10,
        clip_values=(0.0, 1.0), device_type="cpu",
    )  # fmt: skip
    common: dict[str, Any] = {"eps": BOUND, "batch_size": size}
    # Its step size is free, ours is bound / steps. It normalises momentum's gradients as we do, by
    # the L1 norm of each image; its loss is the batch's mean, which neither sign nor norm sees.
    iterated = {**common, "eps_step": BOUND / 5, "max_iter": 5, "verbose": False}
    theirs = {
        "fgsm": lambda: FastGradientMethod(classifier, **common),
        "i-fgsm": lambda: BasicIterativeMethod(classifier, **iterated),
        "mi-fgsm": lambda: MomentumIterativeMethod(classifier, decay=1.0, **iterated),
    }[name]()
    expected = torch.from_numpy(theirs.generate(pixels.numpy(), labels.numpy()))
    batches = zip(pixels.split(size), labels.split(size), strict=True)
    found = torch.cat([ATTACKS[name](model, p, y, BOUND) for p, y in batches])
    model.zero_grad()  # it leaves gradients
    # Where a gradient is 0 but for rounding, either sign is right: the pixel moves a step or back.
    apart = (found - expected).abs()
    assert (apart > 1e-6).float().mean() < 1e-3
    assert apart.max() <= 2 * BOUND + 1e-6


def test_what_an_attack_refuses() -> None:
    pixels, labels = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])

    def model(pixels: Tensor) -> Tensor:
        return pixels.flatten(1)

    with pytest.raises(FlopsError, match=r"pixels in \[0, 1\], before the model's .* to 2"):
        fgsm(model, 0 * pixels + 2, labels, 0.1)
    with pytest.raises(FlopsError, match=r"given were torch\.uint8"):
        fgsm(model, pixels.byte(), labels, 0.1)
    with pytest.raises(FlopsError, match=r"bound=-0\.1, steps=5"):
        i_fgsm(model, pixels, labels, -0.1)
    with pytest.raises(FlopsError, match="steps=0"):
        i_fgsm(model, pixels, labels, 0.1, steps=0)
    with pytest.raises(FlopsError, match="momentum must be 0 or more, not -1"):
        mi_fgsm(model, pixels, labels, 0.1, momentum=-1.0)
