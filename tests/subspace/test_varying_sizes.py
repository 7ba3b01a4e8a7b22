"""Sites whose size or number varies: what is known of them is kept where it still fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.subspace.config import Shaping
from tests.conftest import squared


class Padded(nn.Module):
    """Mean over the real tokens of a nonlinear reading of each; lengths vary."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(3, 10)
        self.register_buffer("reads", torch.randn(10, 2))
        self.seen: list[tuple[Tensor, ...]] | None = None

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        outputs = self.target(x)
        if self.seen is not None:
            self.seen.append((outputs, x, attention_mask))
        read = torch.tanh(outputs @ self.reads) * attention_mask.unsqueeze(2)
        return read.sum(1) / attention_mask.sum(1, keepdim=True)


def padded_batch(longest: int, size: int = 8) -> dict[str, Tensor]:
    lengths = torch.randint(2, longest + 1, (size,))
    lengths[0] = longest
    mask = (torch.arange(longest) < lengths.unsqueeze(1)).double()
    return {"x": torch.randn(size, longest, 3).double(), "attention_mask": mask}


def sequence_engine(model: nn.Module, queries: int = 24, **options) -> ForwardGradient:
    estimator = LikelihoodRatio(1e-7, shaping=Shaping(**options))
    return ForwardGradient(model, squared, [Group(model.target, estimator, queries, name="site")])


def test_sequences_of_varying_length_learn_their_channels() -> None:
    """Two channel directions times the real positions: 24 queries know all of up to 9 tokens."""
    model = Padded().double()
    fg = sequence_engine(model)
    found = []
    for number in range(40):
        batch, y = padded_batch(5 + number % 5), torch.randn(8, 2).double()
        fg.model.zero_grad()
        found.append(fg.estimate(batch, y, exact=True).cosine["site"])
    moments = fg.memory["site"]["moments"][0]
    assert moments["positions"] is None
    values = torch.linalg.eigvalsh(moments["channels"]["matrix"]).flip(0)
    assert float(values[:2].sum() / values.sum()) > 0.99
    assert sum(found[-10:]) / 10 > 0.98
    assert sum(found[:4]) / 4 < 0.93


class Narrow(nn.Module):
    """One channel per token; the loss of a row that is all padding is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(3, 1)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        read = torch.tanh(self.target(x)) * attention_mask.unsqueeze(2)
        return read.sum(1).expand(-1, 2) + 1


@pytest.mark.parametrize("outputs", [False, True])
def test_one_channel_and_a_row_of_nothing_but_padding(outputs: bool) -> None:
    model = Narrow().double()
    fg = sequence_engine(model, outputs=outputs)
    batch, y = padded_batch(6), torch.randn(8, 2).double()
    batch["attention_mask"][3] = 0
    for _ in range(8):
        model.zero_grad()
        report = fg.estimate(batch, y, exact=True)
    assert report.cosine["site"] == pytest.approx(1, abs=1e-6)  # all positions are measured
    assert 0 < report.shaping["site"].k <= 6


@pytest.mark.parametrize("longest", [6, 64])
def test_padding_is_never_measured(longest: int) -> None:
    """A direction of which the channels alone are known moves one position."""
    model = Padded().double()
    fg = sequence_engine(model)
    for number in range(6):
        batch = padded_batch(longest)
        if number == 5:
            model.seen = []
        fg.estimate(batch, torch.randn(8, 2).double())
    real = []
    for outputs, x, mask in model.seen:
        with torch.no_grad():
            moved = (outputs - model.target(x)).abs().amax(2) > 1e-12
        single = moved.sum(1) == 1
        real.append((moved & mask.bool()).any(1)[single])
    assert len(torch.cat(real)) >= 8 * 8
    assert bool(torch.cat(real).all())
    assert not batch["attention_mask"].bool().all()


def test_without_a_mask_a_change_of_length_drops_the_positions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.target(x)).mean(1)

    model = Net().double()
    fg = sequence_engine(model, 8)
    y = torch.randn(4, 6).double()
    for length in (5, 5, 5, 5, 5, 5):
        fg.estimate(torch.randn(4, length, 3).double(), y)
    before = fg.memory["site"]["moments"][0]
    assert before["positions"]["matrix"].shape == (5, 5)
    fg.estimate(torch.randn(4, 7, 3).double(), y)
    after = fg.memory["site"]["moments"][0]
    assert after["positions"] is None
    assert after["channels"]["matrix"].shape == (6, 6)
    fg.estimate(torch.randn(4, 5, 3).double(), y)  # and it stays so
    assert fg.memory["site"]["moments"][0]["positions"] is None


@pytest.mark.parametrize("dimensions", [1, 2])
def test_images_of_varying_size_learn_their_channels(dimensions: int) -> None:
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = kind(1, 5, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.target(x)).flatten(2).mean(2)

    fg = sequence_engine(Net().double(), 8)
    for side in (4, 4, 4, 4, 4, 6, 4, 5):
        fg.estimate(torch.randn(3, 1, *[side] * dimensions).double(), torch.randn(3, 5).double())
    moments = fg.memory["site"]["moments"][0]
    assert moments["positions"] is None
    assert moments["channels"]["matrix"].shape == (5, 5)


def test_a_varying_number_of_sites_starts_anew() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[:, 0])
            for t in range(x.size(1)):
                h = torch.tanh(self.target(h + x[:, t]))
            return h

    fg = sequence_engine(Recurrent().double(), 8)
    for length in (2, 2, 2, 2, 2, 3, 3, 2):
        report = fg.estimate(torch.randn(3, length, 4).double(), torch.randn(3, 4).double())
        assert len(report.shaping["site"].sites) == length
