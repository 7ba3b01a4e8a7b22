"""Layers of torch and transformers against the brute-force twin; their row-wise products."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from flops.passes.trace import inspect
from flops.perturb.rowwise import generic, is_rank_one, rowwise_product_of
from tests.support.targets import ESTIMATORS, check, randomised


def layer(module: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    return module.double(), torch.randn(*shape).double()


LAYERS = {
    "linear": lambda: layer(nn.Linear(4, 3), 3, 4),
    "linear without bias": lambda: layer(nn.Linear(4, 3, bias=False), 3, 4),
    "linear over tokens": lambda: layer(nn.Linear(4, 3), 3, 2, 5, 4),
    "linear, sizes coincide": lambda: layer(nn.Linear(3, 3), 3, 3, 3),
    "conv1d": lambda: layer(nn.Conv1d(4, 6, 3, groups=2, dilation=2, padding=1), 3, 4, 9),
    "conv1d same": lambda: layer(nn.Conv1d(2, 3, 3, padding="same", dilation=2), 3, 2, 7),
    "conv2d": lambda: layer(nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2)), 3, 2, 6, 5),
    "conv2d depthwise": lambda: layer(nn.Conv2d(3, 6, 3, groups=3, bias=False), 3, 3, 5, 5),
    "conv2d reflect": lambda: layer(
        nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="reflect", groups=2), 3, 2, 5, 6
    ),
    "conv2d circular": lambda: layer(
        nn.Conv2d(2, 3, (3, 2), padding=1, padding_mode="circular", dilation=(1, 2)), 3, 2, 5, 5
    ),
    "conv2d same, replicate": lambda: layer(
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="replicate"), 3, 2, 5, 5
    ),
    "conv2d channels last": lambda: (
        nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last),
        torch.randn(3, 2, 5, 5).double().to(memory_format=torch.channels_last),
    ),
    "gpt-2's conv1d": lambda: layer(Conv1D(3, 4), 3, 2, 4),
    "conv3d": lambda: layer(nn.Conv3d(2, 3, 2, padding="valid"), 3, 2, 3, 3, 3),
    "transposed conv": lambda: layer(nn.ConvTranspose2d(2, 3, 3, stride=2), 3, 2, 3, 3),
    "layer norm": lambda: layer(nn.LayerNorm(4), 3, 5, 4),
    "layer norm of two axes": lambda: layer(nn.LayerNorm((2, 3)), 3, 2, 3),
    "layer norm without bias": lambda: layer(nn.LayerNorm(4, bias=False), 3, 4),
    "group norm": lambda: layer(nn.GroupNorm(2, 4), 3, 4, 3),
    "rms norm": lambda: layer(nn.RMSNorm(4), 3, 2, 4),
    "batch norm in eval": lambda: layer(nn.BatchNorm2d(3).eval(), 3, 3, 2, 2),
    "prelu": lambda: layer(nn.PReLU(4), 3, 4),
    "embedding": lambda: (nn.Embedding(6, 3).double(), torch.randint(0, 6, (3, 4))),
    "embedding with padding": lambda: (
        nn.Embedding(6, 3, padding_idx=1).double(),
        torch.tensor([[1, 2, 3], [1, 1, 4], [5, 5, 0]]),
    ),
    "weight norm": lambda: layer(weight_norm(nn.Linear(4, 3)), 3, 2, 4),
    "gru": lambda: layer(Sequence(nn.GRU(3, 2, batch_first=True)), 3, 4, 3),
    "attention": lambda: layer(SelfAttention(), 3, 5, 4),
}


class Sequence(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, kind: str) -> None:
    module, x = LAYERS[name]()
    model = nn.Sequential(randomised(module))
    check(model, x, [module], ESTIMATORS[kind])


@pytest.mark.parametrize("name", LAYERS)
def test_rowwise_products_equal_rows_with_perturbed_weights(name: str) -> None:
    """Large noise, four rows, every parameter: exactly what the module itself gives row by row."""
    module, x = LAYERS[name]()
    randomised(module)
    x, rows = x[torch.tensor([0, 1, 2, 0])], 4
    modules = {"": module}
    batch_like = Whole(x)
    with torch.no_grad():
        call = inspect(module, modules, batch_like, {}).calls[0]
    noise: dict[str, Any] = {}
    dense: dict[str, Tensor] = {}
    for path, p in module.named_parameters():
        if is_rank_one(module, p):
            a, b = torch.randn(rows, p.size(0)).double(), torch.randn(rows, p[0].numel()).double()
            noise[path] = (a, b)
            dense[path] = (a.unsqueeze(2) * b.unsqueeze(1)).reshape(rows, *p.shape)
        else:
            noise[path] = torch.randn(rows, p.numel()).double()
            dense[path] = noise[path].reshape(rows, *p.shape)
    with torch.no_grad():
        found = rowwise_product_of(module)(module, module.forward, (x,), {}, noise, call)
        for r in range(rows):
            weights = {n: p + dense[n][r] for n, p in module.named_parameters()}
            truth = torch.func.functional_call(module, weights, (x[r : r + 1],))
            torch.testing.assert_close(found[r : r + 1], truth, rtol=1e-10, atol=1e-10)


def test_transformers_layers_have_rowwise_products_without_its_import() -> None:
    assert rowwise_product_of(Conv1D(3, 4)) is not generic
    code = "import sys, flops.perturb.rowwise as t; t.rowwise_products(); "
    code += "assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Whole:
    """As much of a batch as the structure needs."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.size, self.leaves = x, len(x), [x]

    def saving(self, model: nn.Module) -> frozenset[str]:
        return frozenset()

    def losses(self, model: nn.Module, rows: Tensor) -> Tensor:
        return model(self.x[rows]).flatten(1).double().sum(1)
