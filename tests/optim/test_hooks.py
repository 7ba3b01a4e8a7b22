"""Stepping as gradients appear, against stepping after all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import FlopsError, ForwardGradient, Group, LikelihoodRatio, MeZO
from flops.optim import step_as_gradients_appear
from tests.conftest import squared


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    ).double()
    model[2].bias.requires_grad_(False)
    return model, torch.randn(6, 4).double(), torch.randn(6, 2).double()


def groups(model: nn.Sequential, name: str) -> list[Group]:
    if name == "mezo":
        return [Group(model, MeZO(), 4)]
    return [
        Group([model[0], model[2]], LikelihoodRatio(), 6, name="body"),
        Group(model[4], MeZO(), 4, name="head"),
    ]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def parameter_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    """Two learning rates, and a frozen parameter among the others."""
    return [
        {"params": [*model[0].parameters(), *model[2].parameters()]},
        {"params": list(model[4].parameters()), "lr": 0.002},
    ]


@pytest.mark.parametrize("method", ["mezo", "likelihood ratio"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_hooks_are_steps_after_the_estimate(name: str, method: str) -> None:
    model, x, y = problem()
    twin = copy.deepcopy(model)
    hooked, plain = (OPTIMIZERS[name](parameter_groups(m)) for m in (model, twin))
    handle = step_as_gradients_appear(hooked)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (hooked, plain)]
    engines = [ForwardGradient(m, squared, groups(m, method)) for m in (model, twin)]
    for number in range(6):
        for fg, optimizer, schedule in zip(engines, (hooked, plain), schedules, strict=True):
            fg.estimate(x, y)
            if optimizer is plain or number % 2:  # the loop may stay as it was
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        assert all(p.grad is None for p in model.parameters())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert hooked.param_groups[1]["lr"] == plain.param_groups[1]["lr"] == 0.002 / 8
    assert [len(g["params"]) for g in hooked.param_groups] == [4, 2]

    # The state is that of the optimizer itself, and goes on without hooks.
    handle.remove()
    other = OPTIMIZERS[name](parameter_groups(twin))
    other.load_state_dict(copy.deepcopy(hooked.state_dict()))  # torch shares the tensors
    for fg, optimizer in zip(engines, (hooked, other), strict=True):
        fg.estimate(x, y)
        assert all((p.grad is not None) == p.requires_grad for p in fg.model.parameters())
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_at_most_one_gradient_of_parameter_noise_exists() -> None:
    model, x, y = problem()
    alive: list[int] = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(
                lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with step_as_gradients_appear(optimizer):
        ForwardGradient(model, squared, groups(model, "mezo")).estimate(x, y)
    assert alive == [1] * 5


def test_it_works_for_backpropagation_too() -> None:
    model, x, y = problem()
    twin = copy.deepcopy(model)
    with step_as_gradients_appear(torch.optim.AdamW(model.parameters(), lr=0.01)):
        squared(model(x), y).mean().backward()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    squared(twin(x), y).mean().backward()
    optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


class Counting(torch.optim.SGD):
    """Keeps a number for all parameters of a group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_optimizers_of_all_parameters_together_are_refused() -> None:
    model, x, y = problem()
    with pytest.raises(FlopsError, match="LBFGS"):
        step_as_gradients_appear(torch.optim.LBFGS(model.parameters()))
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["k"] = 0
    fg = ForwardGradient(model, squared, groups(model, "mezo"))
    with (
        step_as_gradients_appear(optimizer),
        pytest.raises(FlopsError, match=r"Counting keeps \['k'\] for all parameters together"),
    ):
        fg.estimate(x, y)
    assert optimizer.param_groups[0]["k"] == 0
    assert len(optimizer.param_groups[0]["params"]) == 6
