"""Gradient estimates of other packages and of a plain MeZO loop; each step fills ``.grad``.

torchzero and torchopt are used as documented. The plain loop is Algorithm 1 of Malladi et al.
(MeZO, 2023), with several seeds as in their n-SPSA: parameters are changed in place by +eps z,
-2 eps z, +eps z with z regenerated from the seed each time, and once more for the update.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality import loss_fn

EPSILON = 1e-3
Step = Callable[[Tensor, Tensor], Any]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class PlainMezo:
    """The loop of the paper; with a learning rate it also updates the parameters.

    Args:
        model: The model.
        draws: Seeds per step, two passes each.
        rate: Learning rate.
    """

    def __init__(self, model: nn.Module, draws: int, rate: float = 0.0) -> None:
        self.model, self.draws, self.rate = model, draws, rate
        self.parameters = list(trained(model).values())
        self.seed = 0

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> None:
        derivatives = {}
        for _ in range(self.draws):
            self.seed += 1
            self._move(self.seed, 1)
            above = loss_fn(self.model(x), y).mean()
            self._move(self.seed, -2)
            below = loss_fn(self.model(x), y).mean()
            self._move(self.seed, 1)
            derivatives[self.seed] = float(above - below) / (2 * EPSILON)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for seed, derivative in derivatives.items():
            torch.manual_seed(seed)
            for parameter in self.parameters:
                z = torch.randn_like(parameter)
                parameter.grad.add_(z, alpha=derivative / self.draws)  # type: ignore[union-attr]
                parameter.sub_(self.rate * derivative / self.draws * z)

    def _move(self, seed: int, times: float) -> None:
        torch.manual_seed(seed)
        for parameter in self.parameters:
            parameter.add_(torch.randn_like(parameter), alpha=times * EPSILON)


def torchzero_step(model: nn.Module, draws: int, kind: str) -> Step:
    """One of torchzero's estimators, with a learning rate of 0."""
    import torchzero as tz

    make = getattr(tz.m, kind)
    optimizer = tz.Optimizer(trained(model).values(), make(h=EPSILON, n_samples=draws), tz.m.LR(0))

    def step(x: Tensor, y: Tensor) -> None:
        def closure(backward: bool = True) -> Tensor:
            return loss_fn(model(x), y).mean()

        optimizer.step(closure)

    return step


def torchopt_step(model: nn.Module, draws: int) -> Step:
    """Torchopt's antithetic zero-order derivative of a function of the parameters."""
    import torchopt

    def losses(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(torch.func.functional_call(model, parameters, (x,)), y).mean()

    normal = torch.distributions.Normal(0.0, 1.0)
    estimated = torchopt.diff.zero_order.zero_order(
        normal, method="antithetic", argnums=0, num_samples=draws, sigma=EPSILON
    )(losses)

    def step(x: Tensor, y: Tensor) -> None:
        parameters = trained(model)
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        gradients = torch.autograd.grad(estimated(leaves, x, y), list(leaves.values()))
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient

    return step


def rivals(model: nn.Module, passes: int) -> dict[str, Step | None]:
    """Steps of about this many passes of the batch; None for a package that is not installed."""
    found: dict[str, Step | None] = {"plain MeZO loop": PlainMezo(model, passes // 2)}
    has = {name: importlib.util.find_spec(name) is not None for name in ("torchzero", "torchopt")}
    for kind in ("MeZO", "SPSA"):
        ready = has["torchzero"]
        found[f"torchzero {kind}"] = torchzero_step(model, passes // 2, kind) if ready else None
    found["torchopt zero-order"] = torchopt_step(model, passes // 2) if has["torchopt"] else None
    return found


def gradient(parameters: Iterable[nn.Parameter]) -> Tensor:
    """All gradients as one vector; zero for parameters without one."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([part.flatten() for part in parts])
