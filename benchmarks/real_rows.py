"""What `benchmarks.real` compares: steps of forward learning and of backpropagation.

A row makes a step of a `Problem`: a function of inputs and targets that moves the parameters by
plain SGD. The learning rate is tiny, so that all steps see the same model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real_models import Problem
from flops import ForwardGradient, Group, LikelihoodRatio, Shaping, StepReport
from flops.estimators.variance import ENERGY_STEPS
from flops.presets import mezo

RATE, EPSILON, QUERIES, RANK = 1e-8, 1e-3, 16, 8

Step = Callable[[Tensor, Tensor], StepReport | None]


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        make: Prepares the model and returns the step.
        text: What it is.
        settle: Steps on two points between the first and the later ones: block and stage targets
            measure their Jacobians in their first steps, and shaped noise starts isotropic.
        steps: Later steps.
        beside: A row whose steps are timed in turn with these, in the same process.
    """

    make: Callable[[Problem], Step]
    text: str
    settle: int = 0
    steps: int = 5
    beside: str | None = None


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def whole(problem: Problem) -> None:
    """Train everything."""
    problem.model.requires_grad_(True)


def layers_only(problem: Problem) -> None:
    """Train the layers; embedding, last norm and head stay frozen."""
    for layer in problem.layers:
        layer.requires_grad_(True)


def lora(problem: Problem) -> None:
    """Train adapters of all linear modules of the layers."""
    from peft import LoraConfig, inject_adapter_in_model

    inside = {id(module) for layer in problem.layers for module in layer.modules()}
    names = [
        name
        for name, module in problem.model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]
    inject_adapter_in_model(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names), problem.model
    )


def step_and_free(parameters: Iterable[nn.Parameter]) -> None:
    """Step each parameter as its gradient appears, and free that."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=RATE)
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)


def inference(problem: Problem, mode: Callable[[], Any] = torch.inference_mode) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        with mode():
            problem.loss_fn(problem.model(x), y).mean()

    return step


def mezo_loop(problem: Problem) -> Step:
    """Algorithm 1 of Malladi et al. (MeZO, 2023), in place: noise is made four times by its seed.

    theta + eps z, theta - eps z, theta, and theta - eta (l+ - l-) / (2 eps) z
    """
    whole(problem)
    model, parameters, seeds = problem.model, trained(problem.model), iter(range(10**9))

    def move(seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        for p in parameters:
            p.add_(torch.normal(0.0, 1.0, p.shape, dtype=p.dtype, device=p.device), alpha=scale)

    @torch.no_grad()
    def step(x: Tensor, y: Tensor) -> None:
        seed = next(seeds)
        move(seed, EPSILON)
        above = problem.loss_fn(model(x), y).mean()
        move(seed, -2 * EPSILON)
        below = problem.loss_fn(model(x), y).mean()
        move(seed, EPSILON)
        move(seed, -RATE * float(above - below) / (2 * EPSILON))

    return step


def estimated(engine: ForwardGradient) -> Step:
    """Gradients in ``.grad``, then a step of SGD."""
    optimizer = torch.optim.SGD(trained(engine.model), RATE)

    def step(x: Tensor, y: Tensor) -> StepReport:
        report = engine.estimate(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return report

    return step


def mezo_preset(problem: Problem) -> Step:
    whole(problem)
    return estimated(ForwardGradient(problem.model, problem.loss_fn, mezo(problem.model, EPSILON)))


def mezo_in_place(problem: Problem) -> Step:
    """By `flops.optim.ZerothOrderSGD`; by hooks that step and free in a version without it."""
    whole(problem)
    engine = ForwardGradient(problem.model, problem.loss_fn, mezo(problem.model, EPSILON))
    if importlib.util.find_spec("flops.optim") is None:
        step_and_free(trained(problem.model))
        return engine.estimate
    step: Step = importlib.import_module("flops.optim").ZerothOrderSGD(engine, RATE).step
    return step


def backpropagation(
    train: Callable[[Problem], None], checkpoint: bool = False, hooks: bool = False
) -> Callable[[Problem], Step]:
    """SGD by backpropagation; with hooks each parameter steps as soon as it has its gradient."""

    def make(problem: Problem) -> Step:
        train(problem)
        model, parameters = problem.model, trained(problem.model)
        if checkpoint:  # transformers does it in training mode only; there is no dropout
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if hooks:
            step_and_free(parameters)
        optimizer = torch.optim.SGD(parameters, RATE)

        def step(x: Tensor, y: Tensor) -> None:
            problem.loss_fn(model(x), y).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def likelihood_ratio(
    estimator: LikelihoodRatio, train: Callable[[Problem], None]
) -> Callable[[Problem], Step]:
    """Groups of as many layers, queries in passes of the batch's size, hooks that step and free."""

    def make(problem: Problem) -> Step:
        train(problem)
        step_and_free(trained(problem.model))
        groups = [Group(part, estimator, QUERIES) for part in problem.parts()]
        return ForwardGradient(
            problem.model, problem.loss_fn, groups, chunk=len(problem.targets)
        ).estimate

    return make


def automatic(problem: Problem) -> Step:
    whole(problem)
    return estimated(ForwardGradient(problem.model, problem.loss_fn))


class BlockFloor:
    """The least that a step of block LR has to compute, written by hand without the engine.

    One clean pass that keeps the layers' inputs; for each group the rows of all queries through
    what lies behind its first layer, in chunks, in inference mode, without noise; and one plain
    vector-Jacobian product of each layer.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._options: dict[str, Any] = {}

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.clean(x, y)
        for _ in self.losses(y):
            pass
        self.products()

    def clean(self, x: Tensor, y: Tensor) -> Tensor:
        """Clean losses; what goes into the layers and comes out is kept."""
        self._inputs, self._outputs = [], []

        def keep(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], out: Tensor) -> None:
            self._inputs.append(args[0])
            self._outputs.append(out)
            self._options = options  # masks and positions, the same for all points and layers

        layers = self.problem.layers
        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
        try:
            with torch.no_grad():
                return self.problem.loss_fn(self.problem.model(x), y)
        finally:
            for handle in handles:
                handle.remove()

    def losses(
        self,
        y: Tensor,
        queries: int = QUERIES,
        mode: Callable[[], Any] = torch.inference_mode,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Points and losses of each chunk."""
        problem, size = self.problem, len(self.problem.layers) // self.problem.stages
        points = torch.arange(len(y)).repeat_interleave(queries)
        for first in range(0, len(problem.layers), size):
            for at in points.split(len(y)):
                with mode():
                    hidden = self._outputs[first].index_select(0, at)
                    for layer in problem.layers[first + 1 :]:
                        hidden = layer(hidden, **self._options)
                    yield at, problem.loss_fn(problem.head(hidden), y[at])

    def products(self) -> dict[nn.Parameter, Tensor]:
        """The vector-Jacobian product of each layer for a vector of ones."""
        found: dict[nn.Parameter, Tensor] = {}
        for layer, hidden in zip(self.problem.layers, self._inputs, strict=True):
            with torch.enable_grad():
                out = layer(hidden, **self._options)
            parameters = trained(layer)
            gradients = torch.autograd.grad(out, parameters, torch.ones_like(out))
            found.update(zip(parameters, gradients, strict=True))
        return found


_STAGES = LikelihoodRatio(targets="stage", shaping=Shaping())

ROWS = {
    "inference": Row(inference, "one pass in inference mode"),
    "mezo-loop": Row(mezo_loop, "plain MeZO loop, noise by torch.normal from a seed, in place"),
    "mezo": Row(mezo_preset, "our MeZO, gradient in .grad, SGD", beside="mezo-loop"),
    "mezo-in-place": Row(mezo_in_place, "our MeZO, ZerothOrderSGD", beside="mezo-loop"),
    "bp": Row(backpropagation(whole), "backpropagation, SGD"),
    "bp-checkpoint": Row(backpropagation(whole, checkpoint=True), "with gradient checkpointing"),
    "bp-checkpoint-hooks": Row(
        backpropagation(whole, checkpoint=True, hooks=True),
        "with gradient checkpointing and hooks that step and free",
    ),
    "bp-lora": Row(backpropagation(lora), f"backpropagation, LoRA of rank {RANK}"),
    "bp-lora-checkpoint": Row(
        backpropagation(lora, checkpoint=True), "LoRA with gradient checkpointing"
    ),
    "block": Row(
        likelihood_ratio(LikelihoodRatio(), layers_only),
        f"block LR of all layers, {QUERIES} queries, hooks",
        ENERGY_STEPS,
        3,
        beside="block-floor",
    ),
    "shaped": Row(
        likelihood_ratio(_STAGES, layers_only),
        f"shaped stages of all layers, {QUERIES} queries, hooks",
        ENERGY_STEPS,
        3,
    ),
    "shaped-lora": Row(
        likelihood_ratio(_STAGES, lora),
        f"shaped stages of all layers, LoRA of rank {RANK}, {QUERIES} queries, hooks",
        ENERGY_STEPS,
        3,
    ),
    "default": Row(automatic, "ForwardGradient(model, loss_fn), SGD", ENERGY_STEPS, 3),
}
REFERENCES: dict[str, Callable[[Problem], Step]] = {
    "mezo-loop": mezo_loop,
    "block-floor": BlockFloor,
}
