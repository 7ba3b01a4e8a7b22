"""The minimal computation of a step on the bundled ViT, written by hand without the engine.

One clean pass that keeps the inputs of later modules; for each third of the layers, the rows of all
queries through the model from the first noise on, in chunks, in inference mode, without noise; and
one plain vector-Jacobian product of each target. There is no noise, no sum over queries, no check
and no choice of what to replay: any additional time of the engine is overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Start = Literal["leaf", "block", "stage", "parameters", "shared", "mezo"]
"""Location of noise: outputs of leaves, layers or stages; per-point or shared parameters; MeZO."""

CHUNK = 256


class Floor:
    """One batch, and the location of its first noise.

    Args:
        model: The bundled ViT.
        x: Images.
        y: Classes.
        start: Location of noise.
        layers: Layers of each group.
        chunk: Rows per pass.
    """

    def __init__(
        self, model: Any, x: Tensor, y: Tensor, start: Start, layers: int = 2, chunk: int = CHUNK
    ) -> None:
        self.model, self.x, self.y, self.start = model, x, y, start
        self.layers, self.chunk = layers, chunk
        self.firsts = range(0, len(model.vit.layers), layers)

    def step(self, queries: int) -> None:
        """The computation of one step."""
        if self.start != "mezo":
            _, inputs = self.clean()
        else:
            inputs = {}
        for _ in self.losses(queries, inputs):
            pass
        if self.start in ("leaf", "block", "stage"):
            self.products(inputs)

    def clean(self) -> tuple[Tensor, dict[nn.Module, Tensor]]:
        """Losses, and the first input of every module."""
        with torch.no_grad(), kept_inputs(self.model.vit) as inputs:
            losses = self._loss(self.model(self.x).logits, self.y)
        return losses, inputs

    def losses(
        self,
        queries: int,
        inputs: dict[nn.Module, Tensor],
        mode: Callable[[], Any] = torch.inference_mode,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Points and losses of each chunk."""
        size = len(self.y)
        if self.start in ("shared", "mezo"):
            chunks = [torch.arange(size)] * queries
        else:
            chunks = list(torch.arange(size).repeat_interleave(queries).split(self.chunk))
        for first in self.firsts if self.start != "mezo" else [0]:
            for points in chunks:
                with mode():
                    yield points, self._loss(self._outputs(first, inputs, points), self.y[points])

    def _outputs(self, first: int, inputs: dict[nn.Module, Tensor], points: Tensor) -> Tensor:
        """Logits of rows from the first noise on; each row starts from its point's clean state."""
        vit = self.model.vit
        chain = [*vit.layers, vit.layernorm]
        if self.start == "mezo":
            return self.model(self.x).logits
        if self.start == "shared":  # the whole batch
            return self._rest(first, inputs[chain[first]])
        if self.start == "leaf":  # the first leaf is a norm, the input of attention
            layer = vit.layers[first]
            residual = inputs[layer].index_select(0, points)
            normal = inputs[layer.attention.q_proj].index_select(0, points)
            hidden = layer.attention(normal)[0] + residual
            return self._rest(first + 1, hidden + layer.mlp(layer.layernorm_after(hidden)))
        skipped = {"block": 1, "stage": self.layers}.get(self.start, 0)
        return self._rest(first + skipped, inputs[chain[first + skipped]].index_select(0, points))

    def _rest(self, first: int, hidden: Tensor) -> Tensor:
        for layer in self.model.vit.layers[first:]:
            hidden = layer(hidden)
        logits: Tensor = self.model.classifier(self.model.vit.layernorm(hidden)[:, 0])
        return logits

    def products(self, inputs: dict[nn.Module, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The vector-Jacobian product of each target at its clean input, for a vector of ones."""
        found: dict[nn.Parameter, Tensor] = {}
        for target in self._targets():
            with torch.enable_grad():
                out = inputs[target[0]]
                for module in target:
                    out = module(out)
            parameters = [p for module in target for p in module.parameters()]
            gradients = torch.autograd.grad(out, parameters, torch.ones_like(out))
            found.update(zip(parameters, gradients, strict=True))
        return found

    def _targets(self) -> list[list[nn.Module]]:
        layers = list(self.model.vit.layers)
        if self.start == "stage":
            return [layers[first : first + self.layers] for first in self.firsts]
        if self.start == "block":
            return [[layer] for layer in layers]
        leaves = [m for layer in layers for m in layer.modules()]
        return [[m] for m in leaves if isinstance(m, nn.Linear | nn.LayerNorm)]

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none")


@contextmanager
def kept_inputs(model: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """The first input of every module that runs."""
    inputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor):
            inputs[module] = given[0]

    handles = [module.register_forward_pre_hook(keep) for module in model.modules()]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
