"""Draws that the batch shares: what the model sees, and that the parameters are never touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ES, FZOO, JVP, LOZO, SPSA, DeepZero, ForwardGradient, Group, MeZO
from flops.perturb import draws
from flops.perturb.random import fill
from flops.presets import mezo
from tests.conftest import gradients, squared


class Language(nn.Module):
    """An embedding that is tied to the head, as of most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.middle(self.norm(self.embed(ids))).tanh()
        return self.head(x)


def watched(model: Language) -> Language:
    """Keep what each module reads."""

    def see(module: Any, args: Any, kept: Any = None) -> None:
        model.seen.append(tuple(p.detach().clone() for p in module.parameters()))

    for module in (model.embed, model.norm, model.middle, model.head):
        # In a call of its own: hooks run before the parameters are replaced.
        child = nn.Identity()
        child.forward = lambda x, m=module: see(m, ()) or x
        module.register_module("spy", child)
        module.forward = lambda x, m=module: m.spy(type(m).forward(m, x))
    return model


def language() -> tuple[Language, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (5, 3), generator=source)
    return Language(), ids, torch.randn(5, 3, 11, generator=source)


@pytest.fixture(params=[0, draws.KEEP], ids=["large", "small"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a large and as a small group is treated."""
    monkeypatch.setattr(draws, "KEEP", request.param)


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("estimator", [MeZO(), SPSA(shared=True, noise="rademacher")])
def test_the_gradient_is_that_of_a_plain_loop(estimator: Any) -> None:
    """Bit by bit: theta + sigma z and theta - sigma z, the slope between them, and w z."""
    model, ids, y = language()
    parameters = list(model.parameters())  # a tied one once
    sizes = [p.numel() for p in parameters]
    row = fill(estimator.noise, (7, 0, 0, 0), torch.empty(sum(sizes)))
    noise = [z.view(p.shape) for z, p in zip(row.split(sizes), parameters, strict=True)]
    losses = []
    with torch.no_grad():
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            for p, z in zip(moved.parameters(), noise, strict=True):
                p.add_(z, alpha=sign * estimator.sigma)
            losses.append(squared(moved(ids), y).mean())
    w = float((losses[0] - losses[1]) / (2 * estimator.sigma))
    group = Group(parameters=parameters, estimator=estimator, queries=2)
    ForwardGradient(model, squared, group, seed=7).estimate(ids, y)
    for p, z in zip(parameters, noise, strict=True):
        assert torch.equal(p.grad, z * w)


@pytest.mark.usefixtures("_size")
def test_a_tied_parameter_has_one_draw_wherever_it_is_used() -> None:
    model, ids, y = language()
    fg = ForwardGradient(watched(model), squared, mezo(model))
    clean = [p.detach().clone() for p in model.parameters()]
    model.seen.clear()
    fg.inspect(ids, y)
    model.seen.clear()
    fg.estimate(ids, y)
    assert len(model.seen) == 8  # four modules, both signs
    for above, below in zip(model.seen[:4], model.seen[4:], strict=True):
        assert not torch.equal(above[0], below[0])
    for embed, *_, head in (model.seen[:4], model.seen[4:]):
        assert torch.equal(embed[0], head[0])
        assert not torch.equal(embed[0], model.embed.weight)
    assert all(torch.equal(a, b) for a, b in zip(clean, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "estimator",
    [
        MeZO(),
        FZOO(1e-2),
        LOZO(),
        JVP(),
        ES(shared=True),
        SPSA(shared=True, noise="rademacher"),
        DeepZero(score_draws=2),
    ],
)
@pytest.mark.parametrize("queries", [2, 6, 12])
def test_small_groups_have_the_gradient_of_large_ones(
    estimator: Any, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for keep in (0, draws.KEEP):
        monkeypatch.setattr(draws, "KEEP", keep)
        torch.manual_seed(0)
        model, ids, y = language()
        fg = ForwardGradient(model, squared, Group(model, estimator, queries, name="all"))
        reports = [fg.estimate(ids, y) for _ in range(2)]
        found.append((gradients(model), reports[-1].snr["all"], reports[-1].loss))
    large, small = found
    assert large[0].keys() == small[0].keys()
    assert all(torch.equal(small[0][name], g) for name, g in large[0].items())
    assert small[1] == pytest.approx(large[1], rel=1e-3)
    assert small[2] == large[2]


class Broken(Exception):
    """What a model may raise."""


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2])
def test_whatever_a_query_raises_leaves_the_parameters_in_place(
    error: type[BaseException], call: int
) -> None:
    model, ids, y = language()
    fg = ForwardGradient(model, squared, mezo(model))
    fg.inspect(ids, y)
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise error

    model.middle.register_forward_hook(fail)
    with pytest.raises(error):
        fg.estimate(ids, y)
    for p, (place, values) in zip(model.parameters(), before, strict=True):
        assert p.data_ptr() == place
        assert torch.equal(p, values)
        assert p.grad is None
    assert fg.steps == 0
    fg.estimate(ids, y)


@pytest.mark.usefixtures("_size")
def test_a_use_in_no_unit_of_the_group_reads_the_clean_parameter() -> None:
    """Two groups share a parameter: each perturbs the uses in its own modules only."""
    model, ids, y = language()
    estimator = SPSA(shared=True)
    groups = [
        Group([model.embed, model.norm, model.middle], estimator, 2, name="body"),
        Group(model.head, estimator, 2, name="head"),
    ]
    fg = ForwardGradient(watched(model), squared, groups, reuse=False)
    fg.inspect(ids, y)
    model.seen.clear()
    fg.estimate(ids, y)
    assert len(model.seen) == 16  # two groups, both signs, four modules
    queries = [model.seen[i : i + 4] for i in range(0, 16, 4)]
    for embed, _, _, head in queries[:2]:
        assert not torch.equal(embed[0], model.embed.weight)
        assert torch.equal(head[0], model.embed.weight)
    for embed, _, _, head in queries[2:]:
        assert torch.equal(embed[0], model.embed.weight)
        assert not torch.equal(head[0], model.embed.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.usefixtures("_size")
@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_parameters_and_gradients_keep_their_type(dtype: torch.dtype) -> None:
    model, ids, y = language()
    model.to(dtype)
    fg = ForwardGradient(watched(model), squared, mezo(model, sigma=0.1, queries=4))
    fg.estimate(ids, y.to(dtype))
    assert {p.dtype for seen in model.seen for p in seen} == {dtype}
    assert {p.grad.dtype for p in model.parameters()} == {dtype}


def test_convolutions_in_another_memory_format() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x, y = torch.randn(3, 3, 4, 4), torch.randn(3, 2)
    for m in (model, twin):
        ForwardGradient(m, squared, mezo(m)).estimate(x, y)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
        assert q.grad.stride() == q.stride()
