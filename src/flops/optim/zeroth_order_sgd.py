"""MeZO's update: stochastic gradient descent in place, from seeds and scalars.

Malladi et al., "Fine-tuning language models with just forward passes", 2023. With the estimate
g_t = (1/n) sum_i w_i z_i of a step, whose noise z_i follows from its key, parameters move by

    theta <- (1 - eta lambda) theta - eta sum_{k < K} mu^k g_{t-k}

for the learning rate eta, decoupled weight decay lambda, momentum mu and a window of K steps. No
gradient is ever stored: noise is made again a piece at a time and added to the parameters in place.
Momentum remembers keys and scalars of the last K - 1 steps and makes their noise again, too; what
an endless sum would have behind them, mu^K of it, is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from flops.engine.forward_gradient import ForwardGradient
from flops.engine.report import StepReport
from flops.passes.guards import DeferSignals
from flops.perturb.draws import Draws, DrawShape, Noise
from flops.perturb.low_rank import LowRank
from flops.perturb.random import SharedKind

Moves = dict[str, Draws]
"""The gradients of a step by group."""


class ZerothOrderSGD(torch.optim.Optimizer):
    """SGD for groups whose draws the batch shares (MeZO, FZOO, LOZO, JVP, ...), without ``.grad``.

    >>> fg = ForwardGradient(model, loss_fn, flops.presets.mezo(model))
    >>> optimizer = ZerothOrderSGD(fg, learning_rate=1e-6)
    >>> report = optimizer.step(inputs, targets)  # in place of estimate, step and zero_grad

    It is a `torch.optim.Optimizer` with a parameter group for each group of the engine, so torch's
    schedulers work; ``param_groups`` have ``lr``, ``momentum``, ``window`` and ``weight_decay``.
    ``.grad`` is neither read nor written, and nobody's hooks are called.

    Memory: that of an inference pass, and a perturbed copy of the largest module. Time: that of
    `estimate`; momentum makes the noise of ``window - 1`` more steps.

    A step is taken as a whole or not at all, as `ForwardGradient.estimate` says. To resume, keep
    the state of the engine beside that of the optimizer: both are seeds and numbers.

    Args:
        engine: Estimates the gradients.
        learning_rate: eta.
        momentum: mu; 0 for none.
        window: K, steps that momentum remembers, this one included.
        weight_decay: lambda.

    Raises:
        FlopsError: If a group's gradient is not given by seeds and scalars.
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        engine: ForwardGradient,
        learning_rate: float,
        *,
        momentum: float = 0.0,
        window: int = 8,
        weight_decay: float = 0.0,
    ) -> None:
        if not learning_rate >= 0:
            raise ValueError(f"learning_rate must not be negative, but is {learning_rate}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        if window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, but is {weight_decay}")
        engine.check_seeded()
        self.engine = engine
        self._history: list[Moves] = []  # the latest step first
        defaults = {
            "lr": learning_rate,
            "momentum": momentum,
            "window": window,
            "weight_decay": weight_decay,
        }
        super().__init__(list(_parameter_groups(engine)), defaults)

    def step(  # type: ignore[override]
        self, inputs: Any, targets: Any = None, *, index: Tensor | Sequence[int] | None = None
    ) -> StepReport:
        """Estimate the gradient of the batch's mean loss, and move the parameters.

        Args:
            inputs: As of `ForwardGradient.estimate`.
            targets: What the loss function compares the outputs with.
            index: The points' positions in the data set.

        Returns:
            What the step saw and cost.
        """
        groups = {group["name"]: group for group in self.param_groups}
        moves: Moves = {}

        @torch.no_grad()
        def update(name: str, draws: Draws) -> float:
            if not moves:
                self._decay()
            moves[name] = replace(draws, kept={})
            group = groups[name]
            past = enumerate(self._history[: group["window"] - 1], start=1)
            earlier = [(group["momentum"] ** k, step[name]) for k, step in past if name in step]
            return draws.move(-group["lr"], earlier if group["momentum"] else ())

        with DeferSignals():  # a signal waits until the step is remembered, too
            report = self.engine.estimate(inputs, targets, index=index, update=update)
            windows = [group["window"] for group in self.param_groups if group["momentum"]]
            self._history = [moves, *self._history][: max(windows, default=1) - 1]
        return report

    def _decay(self) -> None:
        """Shrink the parameters, before any of them moves."""
        for group in self.param_groups:
            if group["weight_decay"] and group["params"]:
                torch._foreach_mul_(group["params"], 1 - group["lr"] * group["weight_decay"])

    def __getstate__(self) -> dict[str, Any]:
        # torch's own leaves out what it does not know, and a copy would have no engine.
        return {**super().__getstate__(), "engine": self.engine, "_history": self._history}

    def state_dict(self) -> dict[str, Any]:
        """Options, and keys and scalars of the steps that momentum remembers."""
        steps = [
            {
                name: (_plain(d.noise), d.key, d.weights, dict(d.shape.padding))
                for name, d in step.items()
            }
            for step in self._history
        ]
        return {**super().state_dict(), "draws": steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: If the state is of another optimizer or of other groups.
        """
        shapes = {group.name: group.parameters for group in self.engine.groups}
        names = [group.get("name") for group in state_dict["param_groups"]]
        if "draws" not in state_dict or names != list(shapes):
            raise ValueError(
                f"the state is not one of ZerothOrderSGD with groups {list(shapes)}; it has the "
                f"groups {names}"
            )
        super().load_state_dict(state_dict)
        self._history = [
            {
                name: Draws(
                    noise if noise in get_args(SharedKind) else LowRank(*noise),
                    tuple(key),
                    tuple(weights),
                    DrawShape(shapes[name], padding),
                )
                for name, (noise, key, weights, padding) in step.items()
            }
            for step in state_dict["draws"]
        ]


def _plain(noise: Noise) -> str | tuple[int, int]:
    """Noise as `torch.load` reads it without running code."""
    return noise if isinstance(noise, str) else (noise.rank, noise.interval)


def _parameter_groups(engine: ForwardGradient) -> Iterator[dict[str, Any]]:
    """One for each group of the engine; what two of them share belongs to the first."""
    seen: set[nn.Parameter] = set()
    for group in engine.groups:
        own = [p for p in group.parameters if p not in seen]
        seen.update(own)
        yield {"params": own, "name": group.name}
