"""Noise on the last tokens of each sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flops import BatchError, CoverageError, ForwardGradient, Group, LikelihoodRatio, Shaping
from tests.conftest import cosine, estimate, exact, flat, gradients, squared

WIDTH = 4


class Reader(nn.Module):
    """Mixes tokens in its layers; the head reads the last ``read`` ones."""

    def __init__(self, read: int = 1) -> None:
        super().__init__()
        self.mix, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.read = nn.Linear(WIDTH, 2).requires_grad_(False), read

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x)).cumsum(1)
        return self.head(torch.tanh(self.layer(x))[:, -self.read :]).mean(1)


def groups(last_tokens: int | None, queries: int, **options) -> list[Group]:
    estimator = LikelihoodRatio(
        1e-6, "stage", noise="orthogonal", last_tokens=last_tokens, **options
    )
    return [Group(["mix", "layer"], estimator, queries, name="all")]


@pytest.mark.parametrize("read", [1, 2])
def test_is_exact_with_one_direction_for_each_value_of_what_the_loss_reads(read: int) -> None:
    """Orthogonal draws of all dimensions, which are those of the last tokens only."""
    model = Reader(read).double()
    x, y = torch.randn(3, 5, WIDTH).double(), torch.randn(3, 2).double()
    found = estimate(model, squared, x, y, groups(read, read * WIDTH))
    torch.testing.assert_close(flat(found), flat(exact(model, squared, x, y)), rtol=1e-4, atol=1e-6)


def test_leaves_out_what_earlier_tokens_hold() -> None:
    model = Reader(read=2).double()
    x, y = torch.randn(3, 5, WIDTH).double(), torch.randn(3, 2).double()
    found = estimate(model, squared, x, y, groups(1, WIDTH))
    model.zero_grad()
    out = model.layer(torch.tanh(model.mix(x)).cumsum(1))
    masked = torch.cat([out[:, :-1].detach(), out[:, -1:]], 1)
    squared(model.head(torch.tanh(masked)[:, -2:]).mean(1), y).mean().backward()
    torch.testing.assert_close(flat(found), flat(gradients(model)), rtol=1e-4, atol=1e-6)


def test_lengths_may_vary_and_the_moments_are_kept() -> None:
    """Tokens are counted from the end, so that a position means the same in every batch."""
    model = Reader().double()
    estimator = LikelihoodRatio(1e-6, "stage", shaping=Shaping(), last_tokens=2)
    fg = ForwardGradient(model, squared, Group(["mix", "layer"], estimator, 6, name="all"))
    for step in range(12):
        x = torch.randn(8, 3 + step % 4, WIDTH).double()
        y = torch.randn(8, 2).double()
        model.zero_grad()
        report = fg.estimate(x, y)
    found = flat(gradients(model))
    assert fg.memory["all"]["positions"] == [2]
    assert report.shaping["all"].explained_variance > 0.9
    assert cosine(found, flat(exact(model, squared, x, y))) > 0.95


def test_a_shorter_sequence_is_perturbed_as_a_whole() -> None:
    model = Reader(read=2).double()
    x, y = torch.randn(3, 2, WIDTH).double(), torch.randn(3, 2).double()
    found = estimate(model, squared, x, y, groups(9, 2 * WIDTH))
    torch.testing.assert_close(flat(found), flat(exact(model, squared, x, y)), rtol=1e-4, atol=1e-6)


def test_outputs_without_tokens_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    group = Group(model, LikelihoodRatio(last_tokens=1))
    with pytest.raises(CoverageError, match=r"last_tokens needs outputs of shape \(B, tokens"):
        ForwardGradient(model, squared, group).estimate(torch.randn(3, 3), torch.randn(3, 2))
    with pytest.raises(ValueError, match="last_tokens must be at least 1"):
        LikelihoodRatio(last_tokens=0)


class Padded(Reader):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x * attention_mask.unsqueeze(2))


def test_padding_on_the_right_is_refused() -> None:
    """The last tokens would be padding, and the gradient 0."""
    model, x, y = Padded().double(), torch.randn(3, 5, WIDTH).double(), torch.randn(3, 2).double()
    fg = ForwardGradient(model, squared, groups(1, WIDTH))
    mask = torch.ones(3, 5).double()
    mask[1, 0] = 0
    fg.estimate({"x": x, "attention_mask": mask}, y)
    mask[2, 4] = 0
    with pytest.raises(BatchError, match="padding in some rows; pad on the left"):
        fg.estimate({"x": x, "attention_mask": mask}, y)
