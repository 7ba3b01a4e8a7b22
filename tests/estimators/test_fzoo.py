"""FZOO: its formula by a plain loop, its expected value, and losses that do not differ."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flops import FZOO, ForwardGradient, Group, QueryError
from flops.perturb import draws
from flops.perturb.random import fill
from flops.presets import fzoo
from tests.conftest import estimate, exact, flat, gradients, sign_vectors, squared
from tests.statistical.helpers import REPLICATES, assert_mean


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, torch.randn(5, 4).double(), torch.randn(5, 2).double()


def linear(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum(1)


@pytest.mark.parametrize("count", [2, 8])
def test_a_step_of_sgd_is_that_of_the_paper(count: int) -> None:
    """theta - eta sum_i (l_i - l_0) / (N s) u_i, by a loop over copies of the model."""
    model, x, y = problem()
    size, losses, noise = sum(p.numel() for p in model.parameters()), [], []
    with torch.no_grad():
        for i in range(count):
            u = fill("rademacher", (7, 0, 0, i), torch.empty(size)).double()
            moved = copy.deepcopy(model)
            before = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(before + 1e-2 * u, moved.parameters())
            losses.append(float(squared(moved(x), y).mean()))
            noise.append(u)
        clean = float(squared(model(x), y).mean())
        mean = sum(losses) / count
        deviation = (sum((loss - mean) ** 2 for loss in losses) / (count - 1)) ** 0.5
        step = sum((loss - clean) * u for loss, u in zip(losses, noise, strict=True))
        expected = before - 0.1 * step / (count * deviation)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fg = ForwardGradient(model, squared, fzoo(model, 1e-2, count), seed=7)
    report = fg.estimate(x, y)
    optimizer.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)
    assert report.loss == pytest.approx(clean)
    assert report.queries == count * len(x)
    assert report.forward_equivalents.clean == len(x)
    assert report.forward_equivalents.queries == count * len(x)


def test_over_all_signs_it_is_the_direction_of_a_linear_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variance of <g, u> over all sign vectors is |g|^2."""
    model, x, y = nn.Linear(3, 2).double(), torch.randn(4, 3).double(), torch.randn(4, 2).double()
    size = sum(p.numel() for p in model.parameters())

    def signs(kind: str, key: tuple[int, ...], out: Tensor) -> Tensor:
        return out.copy_(sign_vectors(size)[key[-1]])

    monkeypatch.setattr(draws, "fill", signs)
    found = estimate(model, linear, x, y, [Group(model, FZOO(), queries=2**size)])
    truth = flat(exact(model, linear, x, y))
    unbiased = (1 - 2.0**-size) ** 0.5  # N - 1 in the place of N
    torch.testing.assert_close(flat(found), unbiased * truth / truth.norm())


@pytest.mark.parametrize("factor", [1e-4, pytest.param(1e4, marks=pytest.mark.slow)])
def test_its_mean_is_the_direction_of_the_gradient(factor: float) -> None:
    model, x, y = problem()
    truth = flat(exact(model, squared, x, y))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return factor * squared(outputs, targets)

    fg = ForwardGradient(model, loss_fn, fzoo(model, 1e-6, queries=200))
    samples = []
    for _ in range(REPLICATES):
        model.zero_grad()
        fg.estimate(x, y)
        samples.append(flat(gradients(model)))
    assert_mean(torch.stack(samples), truth / truth.norm())


def test_equal_losses_give_a_zero_gradient() -> None:
    model, x, y = problem()
    groups = fzoo(model)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (squared(outputs, targets) > 0).double()  # an error rate

    with pytest.warns(UserWarning, match="raise sigma"):
        report = ForwardGradient(model, loss_fn, groups).estimate(x, y)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    assert report.loss == 1.0


def test_one_loss_has_no_deviation() -> None:
    model, *_ = problem()
    with pytest.raises(QueryError, match="FZOO needs at least 2 queries per point, not 1"):
        ForwardGradient(model, squared, fzoo(model, queries=1))
    with pytest.raises(ValueError, match="sigma must be positive"):
        FZOO(0.0)
