"""`sigma="auto"` over the best of a sweep: three models, single precision and bfloat16.

The bundled ViT on the digits and a convolutional network on them, both after some steps of
backpropagation, and the bundled tiny Llama on garments. Isotropic noise on every block, 20 queries
per point and group, one batch, five seeds of the noise, which is the same for all sigmas. The exact
gradient is that of the rounded weights in single precision.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from benchmarks.quality import loss_fn as image_loss
from flops import ForwardGradient, Group, LikelihoodRatio, PrecisionWarning
from flops.experiments.warm_starts import finetuned
from flops.losses import CausalLM
from flops.tasks.classification import bundled_vit, digits
from flops.tasks.models.language import load_language

QUERIES, BATCH, SEEDS = 20, 32, 5
SIGMAS = tuple(10 ** (power / 2) for power in range(-10, 2))  # 1e-5 to 3
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model, the blocks whose parameters are estimated, and a batch."""

    model: nn.Module
    blocks: Sequence[str]
    loss_fn: Any
    inputs: Any
    targets: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """With weights and inputs in another type."""
        inputs = self.inputs.to(dtype) if isinstance(self.inputs, Tensor) else self.inputs
        model = copy.deepcopy(self.model).to(dtype)
        return Case(model, self.blocks, self.loss_fn, inputs, self.targets)

    def outputs(self) -> Any:
        """The model's outputs."""
        given = self.inputs
        return self.model(given) if isinstance(given, Tensor) else self.model(**given)

    def gradient(self) -> Tensor:
        """That of all blocks."""
        parameters = [p for n in self.blocks for p in self.model.get_submodule(n).parameters()]
        return torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])


def cosine(case: Case, truth: Tensor, sigma: Any) -> tuple[float, list[float]]:
    """Mean over the seeds, and the sigmas that were used."""
    groups = [
        Group(name, LikelihoodRatio(sigma), QUERIES, name=name.replace(".", "-"))
        for name in case.blocks
    ]
    found, used = [], []
    for seed in range(SEEDS):
        case.model.zero_grad()
        fg = ForwardGradient(case.model, case.loss_fn, groups, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)  # rounding is what is measured
            fg.estimate(case.inputs, case.targets)
        found.append(float(F.cosine_similarity(case.gradient(), truth, dim=0)))
        used += [memory["sigma"][0] for memory in fg.memory.values() if "sigma" in memory]
    return statistics.mean(found), used


def cases() -> dict[str, Case]:
    """The three models."""
    data = digits()
    x, y = data.train.images[:BATCH], data.train.labels[:BATCH]
    vit = finetuned(bundled_vit(classes=10), data.train, 40)
    layers = [f"vit.layers.{i}" for i in range(len(vit.vit.layers))]
    small = digits(size=8).train
    cnn = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.Adam(cnn.parameters(), 3e-3)
    for _ in range(40):
        rows = torch.randperm(len(small))[:64]
        optimizer.zero_grad()
        F.cross_entropy(cnn(small.images[rows]), small.labels[rows]).backward()
        optimizer.step()
    llama = load_language("bundled").model
    tokens = torch.randint(4, llama.config.vocab_size, (BATCH, 12))
    inputs = {"input_ids": tokens, "use_cache": False}
    return {
        "ViT": Case(vit, layers, image_loss, x, y),
        "CNN": Case(cnn, ["0", "1", "2"], _plain, small.images[:BATCH], small.labels[:BATCH]),
        "Llama": Case(
            llama,
            [f"model.layers.{i}" for i in range(len(llama.model.layers))],
            CausalLM(),
            inputs,
            tokens,
        ),
    }


def _plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets, reduction="none")


def run() -> dict[str, Any]:
    torch.manual_seed(0)
    every = {
        f"{name}, {kind}": case.to(dtype)
        for name, case in cases().items()
        for kind, dtype in TYPES.items()
    }
    rows: dict[str, Any] = {}
    for name, case in track(every.items(), description="sigma"):
        case.model.requires_grad_(False)
        for block in case.blocks:
            case.model.get_submodule(block).requires_grad_(True)
        wide = case.to(torch.float32)
        wide.model.zero_grad()
        wide.loss_fn(wide.outputs(), wide.targets).mean().backward()
        truth = wide.gradient()
        swept = {sigma: cosine(case, truth, sigma)[0] for sigma in SIGMAS}
        best = max(swept, key=lambda sigma: swept[sigma])
        found, used = cosine(case, truth, "auto")
        rows[name] = {
            "best of the sweep": swept[best],
            "its sigma": best,
            "automatic": found,
            "its sigmas, median": statistics.median(used),
            "automatic over best": found / swept[best],
        }
    return rows
