"""Automatic groups of models that cannot be cut into stages: noise on the output of every block."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.errors import CoverageError


class Residual(nn.Module):
    """Residual connections in the model's own forward, past the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(6)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Opaque(nn.Linear):
    """A layer without a derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() @ self.weight.detach().numpy().T)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(32, 8, generator=source), torch.randint(4, (32,), generator=source)


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual()


def test_every_block_is_perturbed_with_one_warning(batch: tuple[Tensor, Tensor]) -> None:
    fg = ForwardGradient(residual(), loss_fn)
    with pytest.warns(UserWarning, match=r"every block.*blocks-1.*skip connection") as said:
        fg.estimate(*batch)
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fg.estimate(*batch, exact=True)
    assert {len(s.sites) for s in report.shaping.values()} == {5, 2, 1}
    assert all(cosine > 0.7 for cosine in report.cosine.values())


def test_a_resumed_engine_falls_back_too(batch: tuple[Tensor, Tensor]) -> None:
    model = residual()
    fg = ForwardGradient(model, loss_fn)
    with pytest.warns(UserWarning, match="every block"):
        fg.estimate(*batch)
    other = ForwardGradient(model, loss_fn)
    other.load_state_dict(fg.state_dict())
    grads = []
    for engine in (fg, other):
        model.zero_grad()
        if engine is other:
            with pytest.warns(UserWarning, match="every block"):
                engine.estimate(*batch)
        else:
            engine.estimate(*batch)
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 0
    assert all(map(torch.equal, *grads))


def test_given_groups_are_an_error(batch: tuple[Tensor, Tensor]) -> None:
    model = residual()
    stage = LikelihoodRatio("auto", "stage")
    groups = [Group(["inp", *(f"blocks.{i}" for i in range(6))], stage, 8), Group("head", stage, 8)]
    with pytest.raises(CoverageError, match="skip connection"):
        ForwardGradient(model, loss_fn, groups).estimate(*batch)


def test_what_blocks_do_not_mend_is_the_first_error(batch: tuple[Tensor, Tensor]) -> None:
    model = residual()
    model.head = Opaque(16, 4, bias=False)
    fg = ForwardGradient(model, loss_fn)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CoverageError, match=r"skip connection|differentiabl"):
        fg.estimate(*batch)
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
