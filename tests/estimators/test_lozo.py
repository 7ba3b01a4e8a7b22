"""LOZO: its formula by a plain loop, the subspace that stays, and what is a matrix."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import LOZO, ForwardGradient, Group
from flops.perturb import draws
from flops.perturb.random import fill
from flops.presets import lozo
from tests.conftest import exact, flat, gradients, squared
from tests.statistical.helpers import REPLICATES, assert_mean


class Net(nn.Module):
    """A matrix, a convolution, a table with padding, vectors and a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, padding_idx=0)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.mix = nn.Conv1d(4, 5, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(30, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.token
        return self.head(self.norm(self.mix(x).tanh()).flatten(1))


def problem() -> tuple[Net, Tensor, Tensor]:
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [3, 3, 1, 2]])
    return Net().double(), ids, torch.randn(3, 2).double()


@pytest.fixture(params=[0, draws.KEEP], ids=["large", "small"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a large and as a small group is treated."""
    monkeypatch.setattr(draws, "KEEP", request.param)


def noise(p: Tensor, number: int, offset: int, key: tuple[int, ...], rank: int, nu: int) -> Tensor:
    """U V^T, or plain noise, from the keys."""
    if p.dim() < 2 or p[0].numel() == p.numel():
        return fill("gaussian", key, torch.empty(p.shape), offset).double()
    seed, step, *rest = key
    u = fill("gaussian", (*key, number), torch.empty(len(p), rank))
    v = fill("gaussian", (seed, step // nu, *rest, number, nu), torch.empty(p[0].numel(), rank))
    return (u @ v.T).view(p.shape).double()


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("step", [0, 3])
def test_the_gradient_is_that_of_a_plain_loop(step: int) -> None:
    """Pairs at +-sigma U V^T, and c U V^T / r; vectors have c z."""
    (model, ids, y), rank, nu, sigma = problem(), 2, 2, 1e-3
    parameters = list(model.parameters())
    offsets = [0, *torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()]
    key = (7, step, 0, 0)
    z = [noise(p, i, offsets[i], key, rank, nu) for i, p in enumerate(parameters)]
    z[1][0] = 0  # the padding of the table
    assert [tuple(part.shape) for part in z[:2]] == [(1, 1, 8), (6, 8)]
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            for p, part in zip(moved.parameters(), z, strict=True):
                p.add_(part, alpha=sign * sigma)
            losses.append(float(squared(moved(ids), y).mean()))
    c = (losses[0] - losses[1]) / (2 * sigma)
    fg = ForwardGradient(model, squared, lozo(model, sigma, rank=rank, interval=nu), seed=7)
    fg.steps = step
    report = fg.estimate(ids, y)
    for p, part in zip(parameters, z, strict=True):
        gain = 1 / rank if p.dim() > 1 and 1 < len(p) < p.numel() else 1
        torch.testing.assert_close(p.grad, c * gain * part, rtol=1e-7, atol=1e-9)
    assert report.queries == 2 * len(ids)
    assert report.forward_equivalents.parts() | {"probe": 0} == {
        "clean": 0,
        "queries": 2 * len(ids),
        "local": 0,
        "probe": 0,
    }


def steps(fg: ForwardGradient, data: Any, count: int) -> list[Tensor]:
    """Gradients of the head's matrix in some steps."""
    found = []
    for _ in range(count):
        fg.model.zero_grad()
        fg.estimate(*data)
        found.append(fg.model.head.weight.grad.clone())
    return found


def test_the_subspace_stays_for_an_interval_also_when_resumed() -> None:
    model, *data = problem()
    groups = lozo(model, rank=1, interval=4)
    fg = ForwardGradient(model, squared, groups, seed=5)
    first = steps(fg, data, 2)
    state = fg.state_dict()
    rest = steps(fg, data, 6)
    assert torch.linalg.matrix_rank(torch.cat([*first, *rest[:2]]), rtol=1e-5) == 1
    assert torch.linalg.matrix_rank(torch.cat(rest[2:]), rtol=1e-5) == 1
    assert torch.linalg.matrix_rank(torch.cat(rest[1:3]), rtol=1e-5) == 2
    resumed = ForwardGradient(model, squared, groups, seed=99)
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(steps(resumed, data, 6), rest, strict=True))
    assert set(state["memory"]["lozo"]) <= {"warned_of_rounding"}  # keys are all there is


def test_over_the_left_factor_its_mean_is_the_projected_gradient() -> None:
    """G V V^T / r: what one interval of steps descends along."""
    model = nn.Linear(6, 4, bias=False).double()
    x, y = torch.randn(5, 6).double(), torch.randn(5, 4).double()
    truth = exact(model, squared, x, y)["weight"]
    v = fill("gaussian", (0, 0, 0, 0, 0, 10**6), torch.empty(6, 2)).double()
    fg = ForwardGradient(model, squared, lozo(model, 1e-5, interval=10**6))
    samples = []
    for _ in range(20 * REPLICATES):
        model.zero_grad()
        fg.estimate(x, y)
        samples.append(flat(gradients(model)))
    expected = (truth @ v @ v.T / 2).flatten()
    assert_mean(torch.stack(samples), expected)
    assert float(torch.cosine_similarity(expected, truth.flatten(), dim=0)) < 0.9


def test_draws_of_one_step_have_subspaces_of_their_own() -> None:
    model, *data = problem()
    fg = ForwardGradient(model, squared, Group(model, LOZO(rank=1), queries=6))
    assert torch.linalg.matrix_rank(steps(fg, data, 1)[0], rtol=1e-5) == 2  # of (2, 30)


@pytest.mark.parametrize("options", [{"rank": 0}, {"interval": 0}, {"sigma": 0.0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LOZO(**options)
    assert repr(LOZO(1e-2, 4, 100)) == "LOZO(sigma=0.01, rank=4, interval=100)"


def test_defaults_are_the_authors() -> None:
    assert (LOZO().rank, LOZO().interval) == (2, 50)
