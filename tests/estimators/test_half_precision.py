"""Half precision: noise that the outputs can hold, losses and sums in single precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, PrecisionWarning
from flops.estimators.likelihood_ratio import default_sigma
from tests.conftest import flat, gradients


def model(width: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(4)
    ]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def classes(outputs: Tensor, targets: Tensor) -> Tensor:
    assert outputs.dtype == torch.float32  # whatever the model computes in
    return F.cross_entropy(outputs, targets, reduction="none")


def cosine(dtype: torch.dtype, sigma: float | None = None, replicates: int = 8) -> float:
    """Mean over replicates of the cosine to the exact gradient of the same rounded weights."""
    net = model().to(dtype)
    net[4].requires_grad_(False)
    x, y = torch.randn(32, 48).to(dtype), torch.randint(0, 10, (32,))
    wide = copy.deepcopy(net).float()
    classes(wide(x.float()), y).mean().backward()
    truth, found = flat(gradients(wide)), []
    groups = [Group(net[i], LikelihoodRatio(sigma), 20, name=str(i)) for i in range(4)]
    for seed in range(replicates):
        net.zero_grad()
        ForwardGradient(net, classes, groups, seed=seed).estimate(x, y)
        found.append(F.cosine_similarity(flat(gradients(net)).float(), truth, dim=0))
    return float(torch.stack(found).mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_nine_tenths_of_the_cosine(dtype: torch.dtype) -> None:
    assert cosine(dtype) > 0.9 * cosine(torch.float32) > 0.2


@pytest.mark.filterwarnings("ignore::flops.PrecisionWarning")
def test_the_scale_of_single_precision_is_lost_in_bfloat16() -> None:
    assert cosine(torch.bfloat16, 1e-3, 4) < 0.3 * cosine(torch.bfloat16, None, 4)


@pytest.mark.parametrize(
    ("dtype", "sigma"),
    [
        (torch.float64, 1e-3),
        (torch.float32, 1e-3),
        (torch.float16, 0.0117),
        (torch.bfloat16, 0.094),
    ],
)
def test_the_default_goes_by_the_type(dtype: torch.dtype, sigma: float) -> None:
    assert default_sigma(dtype) == pytest.approx(sigma, rel=0.01)


def test_noise_that_is_rounded_away_is_said_once_with_the_scale_to_use() -> None:
    net = model().bfloat16()
    x, y = torch.randn(4, 48).bfloat16(), torch.randint(0, 10, (4,))
    fg = ForwardGradient(net, classes, [Group(net, LikelihoodRatio(1e-3), 4)])
    with pytest.warns(
        PrecisionWarning, match=r"0\.1 units in the last place of torch\.bfloat16.*0\.094"
    ):
        fg.estimate(x, y)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "group.*units in the last place")
        fg.estimate(x, y)


@pytest.mark.parametrize(("units", "warned"), [(3.9, True), (4.0, False)])
def test_four_units_in_the_last_place_are_the_least(units: float, warned: bool) -> None:
    """The warning shows the user's line."""
    net = model().bfloat16()
    x, y = torch.randn(4, 48).bfloat16(), torch.randint(0, 10, (4,))
    sigma = units * torch.finfo(torch.bfloat16).eps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ForwardGradient(net, classes, [Group(net, LikelihoodRatio(sigma), 4)]).estimate(x, y)
    found = [w for w in caught if "units in the last place" in str(w.message)]
    assert bool(found) == warned
    assert all(w.filename == __file__ for w in found)
