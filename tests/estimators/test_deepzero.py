"""DeepZero: exact on its coordinates, zero elsewhere, every query charged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flops import DeepZero, ForwardGradient, Group
from tests.conftest import estimate, exact, flat, squared


def model_and_data() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, torch.randn(6, 4).double(), torch.randn(6, 2).double()


@pytest.mark.parametrize("pruning", ["zo-grasp", "random"])
def test_all_coordinates_give_the_gradient(pruning: str) -> None:
    model, x, y = model_and_data()
    size = sum(p.numel() for p in model.parameters())
    groups = [Group(model, DeepZero(sigma=1e-7, pruning=pruning, score_draws=3), queries=size)]
    found = estimate(model, squared, x, y, groups)
    torch.testing.assert_close(flat(found), flat(exact(model, squared, x, y)), rtol=1e-5, atol=1e-6)


def test_a_part_is_exact_and_the_rest_zero() -> None:
    model, x, y = model_and_data()
    groups = [Group(model, DeepZero(sigma=1e-7, score_draws=3), queries=9)]
    found, truth = flat(estimate(model, squared, x, y, groups)), flat(exact(model, squared, x, y))
    chosen = found != 0
    assert int(chosen.sum()) == 9
    torch.testing.assert_close(found[chosen], truth[chosen], rtol=1e-5, atol=1e-6)


def test_scores_cost_queries_once_and_are_part_of_the_state() -> None:
    model, x, y = model_and_data()
    groups = [Group(model, DeepZero(score_draws=3), queries=9, name="all")]
    fg = ForwardGradient(model, squared, groups)
    assert fg.estimate(x, y).queries == 6 * (9 + 4 * 3)
    assert fg.estimate(x, y).queries == 6 * 9
    again = ForwardGradient(model, squared, groups)
    again.load_state_dict(fg.state_dict())
    model.zero_grad()
    assert again.estimate(x, y).queries == 6 * 9


def test_other_coordinates_after_shuffle_steps() -> None:
    model, x, y = model_and_data()
    groups = [Group(model, DeepZero(pruning="random", shuffle=2), queries=9)]
    fg = ForwardGradient(model, squared, groups)
    chosen = []
    for _ in range(3):
        model.zero_grad()
        fg.estimate(x, y)
        chosen.append(flat({n: p.grad for n, p in model.named_parameters()}) != 0)
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[1], chosen[2])


def test_late_coordinates_reuse_features() -> None:
    model, x, y = model_and_data()
    model[0].requires_grad_(False)
    groups = [Group(model[2], DeepZero(pruning="random"), queries=5)]
    report = ForwardGradient(model, squared, groups).estimate(x, y)
    whole = ForwardGradient(model, squared, groups, reuse=False).estimate(x, y)
    assert report.forward_equivalents.queries < 0.5 * whole.forward_equivalents.queries


class Padded(nn.Module):
    """A table with padding; `tied` uses it once more, where the padding does learn."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.tied = nn.Embedding(5, 3, padding_idx=1), tied
        with torch.no_grad():
            self.embed.weight.normal_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed(ids).sum(1))
        return F.linear(h, self.embed.weight) if self.tied else h


@pytest.mark.parametrize("pruning", ["zo-grasp", "random"])
@pytest.mark.parametrize(("tied", "size"), [(False, 12), (True, 15)])
def test_padding_is_no_coordinate_of_a_lookup(tied: bool, size: int, pruning: str) -> None:
    model, ids = Padded(tied).double(), torch.tensor([[1, 2], [0, 1], [3, 4]])
    y = torch.randn(3, 5 if tied else 3).double()
    estimator = DeepZero(sigma=1e-7, pruning=pruning, score_draws=3)
    groups = [Group(parameters=[model.embed.weight], estimator=estimator, queries=99)]
    fg = ForwardGradient(model, squared, groups)
    model.zero_grad()
    report = fg.estimate(ids, y)
    found = model.embed.weight.grad.clone()
    assert report.queries == 3 * (size + (12 if pruning == "zo-grasp" else 0))
    truth = exact(model, squared, ids, y)["embed.weight"]
    assert bool(found[1].any()) == bool(truth[1].any()) == tied
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)


def test_weights_in_another_memory_format_and_scalars() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(2, 3, 3), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.conv(x)) * self.scale

    model = Scaled().double().to(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    x, y = torch.randn(3, 2, 4, 4).double(), torch.randn(3, 3, 2, 2).double()
    groups = [Group(model, DeepZero(sigma=1e-7, pruning="random"), queries=58)]
    found = estimate(model, squared, x, y, groups)
    torch.testing.assert_close(flat(found), flat(exact(model, squared, x, y)), rtol=1e-5, atol=1e-5)


def test_ratios_of_the_parts_add_up_to_one() -> None:
    model, x, y = model_and_data()
    fg = ForwardGradient(model, squared, Group(model, DeepZero(score_draws=3), 9, name="all"))
    fg.estimate(x, y)
    assert float(fg.memory["all"]["ratios"].sum()) == pytest.approx(1)


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan")])
def test_sigma_is_checked(sigma: float) -> None:
    with pytest.raises(ValueError, match="sigma must be positive"):
        DeepZero(sigma=sigma)
