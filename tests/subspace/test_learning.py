"""What shaped noise learns from a step: it goes by the gradient, not by the scale of the noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.diagnostics.traces import spend_counts
from tests.conftest import flat, gradients
from tests.support.noise import noise

CHANNELS, QUERIES = 6, 8
SIGMAS = [2.0**-10, 1.0, 2.0**10]


class Site(nn.Module):
    """Outputs of one layer; the loss says what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(3, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.target(x)


def linear(outputs: Tensor, g: Tensor) -> Tensor:
    """Of which every directional derivative is exact but for rounding."""
    return (outputs * g).sum(1)


def rounded(outputs: Tensor, g: Tensor) -> Tensor:
    """As `linear`; where g is 0 a constant, and the rounding of what was added and taken away."""
    some = outputs.sum(1).sin() / 3
    constant = (1 + some) * (1 - some) + some * some
    return linear(outputs, g) + torch.where((g == 0).all(1), constant, 0.0)


def learned(
    sigma: float, x: Tensor, g: Tensor, steps: int, loss: Any = linear
) -> tuple[dict[str, Any], Tensor, Any]:
    """Moments of both axes, gradient and report of the last step."""
    torch.manual_seed(5)
    model = Site().double()
    estimator = LikelihoodRatio(sigma, shaping=Shaping(outputs=False))
    group = Group(model.target, estimator, QUERIES, name="site")
    fg = ForwardGradient(model, loss, group)
    for _ in range(steps):
        model.zero_grad()
        report = fg.estimate(x, g)
    return fg.memory["site"]["moments"][0], flat(gradients(model)), report


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    return torch.randn(size, 3).double(), torch.randn(size, CHANNELS).double()


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("steps", [1, 6])
def test_the_scale_of_the_noise_does_not_matter(steps: int, sigma: float) -> None:
    """Derivatives and moments of a linear loss: of isotropic steps, and of shaped ones."""
    x, g = batch()
    truth, expected, before = learned(0.25, x, g, steps)
    found, estimate, report = learned(sigma, x, g, steps)
    for axis in ("positions", "channels"):
        torch.testing.assert_close(found[axis]["matrix"], truth[axis]["matrix"], rtol=1e-8, atol=0)
    torch.testing.assert_close(estimate, expected, rtol=1e-8, atol=1e-9)
    assert report.shaping["site"].explore == before.shaping["site"].explore
    assert (report.shaping["site"].k > 0) == (steps == 6)


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
@pytest.mark.parametrize("sigma", SIGMAS)
def test_points_that_show_only_rounding_teach_nothing(sigma: float) -> None:
    """They would count most: a point's weight is one over its energy."""
    x, g = batch()
    g[2:] = 0
    truth, *_ = learned(sigma, x[:2], g[:2], 1)
    near = rounded(torch.randn(100, CHANNELS).double(), torch.zeros(100, CHANNELS).double())
    assert 0 < float((near - 1).abs().max()) < 1e-15  # there is something, but not much
    found, *_ = learned(sigma, x, g, 1, rounded)
    torch.testing.assert_close(found["channels"], truth["channels"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_points_well_above_rounding_teach_however_weak_they_are(sigma: float) -> None:
    x, g = batch(1)
    truth, *_ = learned(sigma, x, g, 1)
    # The losses differ by 1e-11 of the largest: about a hundred thousand times their resolution.
    weak = g / sigma * 1e-11
    x, both = torch.cat([x, x]), torch.cat([weak, torch.zeros_like(weak)])
    found, *_ = learned(sigma, x, both, 1, lambda out, g: linear(out, g) + 1 * (g == 0).all(1))
    torch.testing.assert_close(found["channels"], truth["channels"], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("queries", [1, 2, 5])
def test_an_isotropic_step_has_the_error_of_isotropic_noise(queries: int) -> None:
    """Energy |g|^2, which the mean of w^2 estimates, and d |g|^2 over the number of draws."""
    (x, g), model = batch(), Site().double()
    group = Group(
        model.target, LikelihoodRatio(1e-3, shaping=Shaping(outputs=False)), queries, name="site"
    )
    fg = ForwardGradient(model, linear, group)
    with fg.session(x, g) as session:
        given = session.queries("site", fg.key(0), {})
        counts, binding = torch.full((len(x),), queries), session.layout.bindings[0]
        shaped = spend_counts(session, fg.groups[0], binding, given, counts).step.estimate.shaped
    for j in range(len(x)):
        w = noise("gaussian", (*fg.key(0), j), queries, CHANNELS) @ g[j]
        square = float(w.square().mean())
        assert float(shaped.energy[j]) == pytest.approx(square, rel=1e-6)
        assert float(shaped.error[j]) == pytest.approx(square * CHANNELS / queries, rel=1e-6)
