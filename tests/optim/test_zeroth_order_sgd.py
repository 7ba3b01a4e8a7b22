"""MeZO's update in place, against a torch optimizer on ``.grad``."""

from __future__ import annotations

import copy
import io
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, Exact, FlopsError, ForwardGradient, Group, LikelihoodRatio, MeZO
from flops.optim import ZerothOrderSGD
from flops.perturb import draws
from flops.presets import fzoo, jvp, lozo, mezo
from tests.conftest import squared


class Net(nn.Module):
    """Two layers that share a matrix, a frozen one, and a table with a row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, padding_idx=0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).sum(1)
        return self.head(self.frozen(self.second(self.first(x).tanh()).tanh()).tanh())


def problem(dtype: torch.dtype = torch.float64) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    ids = torch.tensor([[1, 2], [0, 3], [4, 0], [5, 6], [2, 2]])
    return model, ids, torch.randn(5, 2, dtype=dtype)


def two_groups(model: Net) -> list[Group]:
    """One parameter is in both."""
    return [
        Group([model.embed, model.first], SPSA(shared=True), 4, name="body"),
        Group([model.second, model.head], ES(shared=True), 3, name="head"),
    ]


GROUPS = {
    "mezo": mezo,
    "fzoo": fzoo,
    "lozo": lambda m: lozo(m, queries=4, interval=2),
    "jvp": lambda m: jvp(m, queries=2),
    "several draws": lambda m: mezo(m, queries=6),
    "signs": lambda m: [Group(m, SPSA(shared=True, noise="rademacher"), 4)],
    "two groups": two_groups,
}


@pytest.fixture(params=[0, draws.KEEP], ids=["large", "small"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a large and as a small group is treated."""
    monkeypatch.setattr(draws, "KEEP", request.param)


def same(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", GROUPS)
def test_a_step_is_that_of_sgd_on_the_same_estimate(name: str, dtype: torch.dtype) -> None:
    model, ids, y = problem(dtype)
    twin = copy.deepcopy(model)
    start = copy.deepcopy(model)
    fg = ForwardGradient(twin, squared, GROUPS[name](twin))
    sgd = torch.optim.SGD(twin.parameters(), lr=0.01)
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, GROUPS[name](model)), 0.01)
    for _ in range(3):
        sgd.zero_grad()
        expected = fg.estimate(ids, y)
        sgd.step()
        report = optimizer.step(ids, y)
        assert report.loss == expected.loss
        assert report.snr == pytest.approx(expected.snr, rel=1e-3)
        if name == "two groups" or dtype == torch.float32:  # sums in another order
            same(model, twin, rtol=1e-5, atol=1e-6)
            model.load_state_dict(twin.state_dict())
        else:
            same(model, twin)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.engine.steps == 3
    assert torch.equal(model.frozen.weight, start.frozen.weight)
    assert torch.equal(model.embed.weight[0], start.embed.weight[0])
    assert not torch.equal(model.first.weight, start.first.weight)
    assert model.second.weight is model.first.weight


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("window", [1, 2, 3, 10])
def test_momentum_is_the_sum_over_the_window(window: int) -> None:
    """Gradients along the way: each step of a twin uses the parameters of this one."""
    model, ids, y = problem()
    twin = copy.deepcopy(model)
    optimizer = ZerothOrderSGD(
        ForwardGradient(model, squared, mezo(model, queries=4)),
        0.01,
        momentum=0.8,
        window=window,
        weight_decay=0.1,
    )
    fg = ForwardGradient(twin, squared, mezo(twin, queries=4))
    seen: list[list[Tensor]] = []
    learning = [p for p in twin.parameters() if p.requires_grad]
    for _ in range(5):
        twin.zero_grad()
        fg.estimate(ids, y)
        seen.insert(0, [p.grad.clone() for p in learning])
        with torch.no_grad():
            for number, p in enumerate(learning):
                past = [g[number] for g in seen[:window]]
                total = sum(0.8**k * g for k, g in enumerate(past))
                p.mul_(1 - 0.01 * 0.1).sub_(0.01 * total)
        optimizer.step(ids, y)
        same(model, twin, rtol=1e-6, atol=1e-9)
    assert window > 1 or optimizer.state_dict()["draws"] == []


def test_a_long_window_is_the_momentum_of_torch() -> None:
    model, ids, y = problem()
    twin = copy.deepcopy(model)
    optimizer = ZerothOrderSGD(
        ForwardGradient(model, squared, mezo(model)), 0.01, momentum=0.9, window=50
    )
    fg = ForwardGradient(twin, squared, mezo(twin))
    sgd = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.01, momentum=0.9)
    for _ in range(8):
        sgd.zero_grad()
        fg.estimate(ids, y)
        sgd.step()
        optimizer.step(ids, y)
    same(model, twin, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", GROUPS)
def test_a_resumed_run_is_the_same_bit_by_bit(name: str) -> None:
    model, ids, y = problem(torch.float32)
    optimizer = ZerothOrderSGD(
        ForwardGradient(model, squared, GROUPS[name](model)), 0.01, momentum=0.7, window=4
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(3):
        optimizer.step(ids, y)
        scheduler.step()
    saved = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "engine": optimizer.engine.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        saved,
    )
    assert len(saved.getvalue()) < 40_000  # seeds and scalars beside a tiny model
    for _ in range(4):
        optimizer.step(ids, y)
        scheduler.step()

    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other, *_ = problem(torch.float32)
    other.load_state_dict(state["model"])
    resumed = ZerothOrderSGD(ForwardGradient(other, squared, GROUPS[name](other)), 1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(resumed, 0.9)
    resumed.engine.load_state_dict(state["engine"])
    resumed.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["scheduler"])
    for _ in range(4):
        resumed.step(ids, y)
        schedule.step()
    same(other, model)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.01


def test_schedules_and_groups_have_learning_rates_of_their_own() -> None:
    model, ids, y = problem()
    start = copy.deepcopy(model)
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, two_groups(model)), 0.01)
    assert [group["name"] for group in optimizer.param_groups] == ["body", "head"]
    optimizer.param_groups[1]["lr"] = 0.0
    optimizer.step(ids, y)
    assert torch.equal(model.head.weight, start.head.weight)
    assert not torch.equal(model.embed.weight, start.embed.weight)
    assert not torch.equal(model.first.weight, start.first.weight)


def test_momentum_follows_its_schedule() -> None:
    """Steps are remembered while any group has momentum, and weighted by that of the moment."""
    model, ids, y = problem()
    twin = copy.deepcopy(model)
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, two_groups(model)), 0.01)
    fg = ForwardGradient(twin, squared, two_groups(twin))
    learning = [p for p in twin.parameters() if p.requires_grad]
    kept: dict[str, list[list[Tensor]]] = {"body": [], "head": []}
    for momenta in [(0.9, 0.5), (0.0, 0.5), (0.9, 0.5), (0.3, 0.0)]:
        for group, momentum in zip(optimizer.param_groups, momenta, strict=True):
            group["momentum"] = momentum
        optimizer.step(ids, y)
        parts = collected_by_group(fg, (ids, y))
        for name, momentum in zip(kept, momenta, strict=True):
            kept[name].insert(0, parts[name])
            with torch.no_grad():
                for number, p in enumerate(learning):
                    past = [g[number] for g in kept[name]]
                    p.sub_(0.01 * sum(momentum**k * g for k, g in enumerate(past)))
        same(model, twin, rtol=1e-6, atol=1e-9)


def collected_by_group(fg: ForwardGradient, data: Any) -> dict[str, list[Tensor]]:
    """The gradient of each group by itself, for all parameters that learn."""
    learning = [p for p in fg.model.parameters() if p.requires_grad]
    found: dict[str, list[Tensor]] = {}

    def take(name: str, gradient: draws.Draws) -> float:
        parts = {p: g for p, g, _ in gradient.gradients()}
        found[name] = [parts.get(p, torch.zeros_like(p)) for p in learning]
        return 0.0

    fg.estimate(*data, update=take)
    return found


def test_a_group_may_own_nothing_but_what_it_shares() -> None:
    """Its part of the gradient counts, and decay is of the group that owns the parameter."""
    model, ids, y = problem()
    model.second.bias.requires_grad_(False)
    spsa = SPSA(shared=True)
    groups = [
        Group([model.embed, model.first, model.head], spsa, 2, name="most"),
        Group(model.second, spsa, 2, name="second"),
    ]
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, groups), 0.01, weight_decay=0.1)
    assert optimizer.param_groups[1]["params"] == []
    before = model.first.weight.detach().clone()
    parts = collected_by_group(ForwardGradient(model, squared, groups), (ids, y))
    learning = [p for p in model.parameters() if p.requires_grad]
    number = next(i for i, p in enumerate(learning) if p is model.first.weight)
    optimizer.step(ids, y)
    moved = 0.01 * (parts["most"][number] + parts["second"][number])
    torch.testing.assert_close(model.first.weight.detach(), before * 0.999 - moved)


def test_a_copy_goes_its_own_way() -> None:
    model, ids, y = problem()
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, mezo(model)), 0.01, momentum=0.9)
    optimizer.step(ids, y)
    twin = copy.deepcopy(optimizer)
    start = copy.deepcopy(model)
    twin.step(ids, y)
    same(model, start)
    optimizer.step(ids, y)
    same(model, twin.engine.model)
    assert twin.engine.model is not model


class Failed(Exception):
    """What a model may raise."""


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("call", [1, 2])
def test_an_error_leaves_everything_as_it_was(call: int) -> None:
    model, ids, y = problem()
    optimizer = ZerothOrderSGD(
        ForwardGradient(model, squared, mezo(model)), 0.01, momentum=0.9, weight_decay=0.1
    )
    optimizer.step(ids, y)
    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise Failed

    handle = model.head.register_forward_hook(fail)
    with pytest.raises(Failed):
        optimizer.step(ids, y)
    handle.remove()
    same(model, twin)
    assert optimizer.state_dict() == state
    assert optimizer.engine.steps == 1


@pytest.mark.usefixtures("handlers_stay")
def test_a_signal_in_the_update_waits_until_the_step_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids, y = problem()
    twin = copy.deepcopy(model)
    made = [
        ZerothOrderSGD(ForwardGradient(m, squared, mezo(m)), 0.01, momentum=0.9)
        for m in (model, twin)
    ]
    move = draws.Draws.move

    def interrupted(self: Any, *args: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        return move(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(draws.Draws, "move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made[0].step(ids, y)
    made[1].step(ids, y)
    for optimizer in made:
        optimizer.step(ids, y)
    same(model, twin)


@pytest.mark.parametrize("estimator", [LikelihoodRatio(), Exact(), SPSA(), ES()], ids=repr)
def test_gradients_that_are_no_seeds_are_refused_with_the_helper(estimator: Any) -> None:
    model, ids, y = problem()
    groups = [
        Group([model.embed, model.first, model.second], MeZO(), 2, name="seeded"),
        Group(model.head, estimator, 4, name="other"),
    ]
    fg = ForwardGradient(model, squared, groups)
    with pytest.raises(FlopsError, match=r"group 'other'.*step_as_gradients_appear"):
        ZerothOrderSGD(fg, 0.1)
    with pytest.raises(FlopsError, match="group 'other'"):
        fg.estimate(ids, y, update=lambda *_: 0.0)
    assert fg.steps == 0


def test_bad_options_are_refused() -> None:
    model, ids, y = problem()
    fg = ForwardGradient(model, squared, mezo(model))
    for options in (
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"learning_rate": 0.1, "momentum": 1.0},
        {"learning_rate": 0.1, "window": 0},
        {"learning_rate": 0.1, "weight_decay": -0.1},
    ):
        with pytest.raises(ValueError, match=list(options)[-1]):
            ZerothOrderSGD(fg, **options)
    with pytest.raises(ValueError, match="exact"):
        fg.estimate(ids, y, exact=True, update=lambda *_: 0.0)


def test_a_state_of_another_optimizer_is_refused() -> None:
    model, *_ = problem()
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, mezo(model)), 0.1)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with pytest.raises(ValueError, match=r"groups \['mezo'\]"):
        optimizer.load_state_dict(sgd.state_dict())


def test_other_lengths_of_input_replay_the_same_draws() -> None:
    """Momentum remembers draws of parameters, not of one structure of the forward pass."""
    model, ids, y = problem()
    twin = copy.deepcopy(model)
    optimizer = ZerothOrderSGD(ForwardGradient(model, squared, mezo(model)), 0.01, momentum=0.9)
    fg = ForwardGradient(twin, squared, mezo(twin))
    sgd = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.01, momentum=0.9)
    for length in (2, 1, 2):
        sgd.zero_grad()
        fg.estimate(ids[:, :length], y)
        sgd.step()
        optimizer.step(ids[:, :length], y)
    same(model, twin, rtol=1e-6, atol=1e-9)
