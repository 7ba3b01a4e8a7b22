"""What is found out about a kind of input: rows in a pass, other lengths, the cost of probing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.presets import mezo
from tests.conftest import flat, gradients, squared


def model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def engine(net: nn.Module, **options: Any) -> ForwardGradient:
    return ForwardGradient(net, squared, [Group(net, LikelihoodRatio(), 100)], **options)


@pytest.mark.parametrize(("width", "size", "rows"), [(8, 6, 256), (10**6, 6, 8), (10**7, 6, 6)])
def test_rows_in_a_pass(width: int, size: int, rows: int) -> None:
    """Many where they take little memory, else as many as the clean pass has."""
    net = nn.Sequential(nn.Linear(4, width), nn.Flatten(), nn.AdaptiveAvgPool1d(2)).eval()
    fg = ForwardGradient(net, squared, [Group(net[0], LikelihoodRatio(targets="leaf"), 1)])
    with fg.session(torch.randn(size, 4), torch.randn(size, 2)) as session:
        assert session.layout.chunk(size) == rows
        assert session.chunk == rows


@pytest.mark.bits
def test_the_number_of_rows_changes_no_gradient() -> None:
    net, x, y = model(32).double(), torch.randn(6, 4).double(), torch.randn(6, 2).double()
    engine(net).estimate(x, y)
    whole = flat(gradients(net))
    for chunk in (2, 7, 16):
        net.zero_grad()
        engine(net, chunk=chunk).estimate(x, y)
        torch.testing.assert_close(flat(gradients(net)), whole, rtol=1e-9, atol=1e-11)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Sequence(nn.Module):
    """Tokens of any number, with a table of positions that all points share."""

    def __init__(self, layers: int = 3, width: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, width), nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        scale = x.mean(2, keepdim=True)
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x[:, -1])


def sequence_engine(layers: int = 3, **options: Any) -> tuple[nn.Module, ForwardGradient]:
    torch.manual_seed(0)
    net = Sequence(layers).double()
    estimator = LikelihoodRatio()
    groups = [Group(block, estimator, 4, name=str(i)) for i, block in enumerate(net.blocks)]
    groups += [Group(["tokens", "places"], estimator, 4), Group("head", estimator, 4)]
    return net, ForwardGradient(net, squared, groups, **options)


def tokens(length: int, size: int = 5) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 11, (size, length), generator=source)
    return ids, torch.randn(size, 2, generator=source).double()


def test_probing_costs_the_same_at_any_depth() -> None:
    costs = []
    for layers in (2, 30):
        _, fg = sequence_engine(layers)
        costs.append(fg.estimate(*tokens(4)).forward_equivalents.probe)
    assert costs[1] <= costs[0] + 1
    assert costs[1] < 18  # the table of positions takes two passes of three rows


def test_another_length_is_not_discovered_again() -> None:
    _, fg = sequence_engine()
    fg.estimate(*tokens(4))
    probes = [fg.estimate(*tokens(n)).forward_equivalents.probe for n in (7, 9, 7, 4)]
    assert probes == [2, 2, 0, 0]


def test_another_length_has_the_gradient_of_a_fresh_engine() -> None:
    net, fg = sequence_engine()
    fg.estimate(*tokens(4))
    net.zero_grad()
    report = fg.estimate(*tokens(7))
    other, fresh = sequence_engine()
    fresh.steps = 1
    truth = fresh.estimate(*tokens(7))
    assert flat(gradients(net)).equal(flat(gradients(other)))
    assert report.forward_equivalents.queries == truth.forward_equivalents.queries
    assert report.forward_equivalents.local == truth.forward_equivalents.local


def test_mezo_needs_no_pass_for_another_length() -> None:
    net = Sequence().double()
    fg = ForwardGradient(net, squared, mezo(net))
    first = fg.estimate(*tokens(4)).forward_equivalents
    assert first.probe == 5
    assert fg.estimate(*tokens(7)).forward_equivalents.probe == 0


class ByLength(nn.Module):
    """Runs other modules for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.short(x) if x.size(1) < 5 else self.short(torch.tanh(self.long(x)))
        return self.head(x.mean(1))


def test_a_length_that_runs_other_modules_is_discovered() -> None:
    torch.manual_seed(0)
    net = ByLength().double()
    net.long.requires_grad_(False)
    groups = [Group("short", LikelihoodRatio(), 4), Group("head", LikelihoodRatio(), 4)]
    fg = ForwardGradient(net, squared, groups)
    y = torch.randn(3, 2).double()
    fg.estimate(torch.randn(3, 4, 4).double(), y)
    x = torch.randn(3, 6, 4).double()
    net.zero_grad()
    assert fg.estimate(x, y).forward_equivalents.probe > 5
    found = flat(gradients(net))
    net.zero_grad()
    fresh = ForwardGradient(net, squared, groups)
    fresh.steps = 1
    fresh.estimate(x, y)
    assert found.equal(flat(gradients(net)))
