"""Prompts: geometry of the gradients of a prompt, and quality of their estimates.

The bundled CLIP on its hazy shots, with the settings of `flops tune`. Along a run of
backpropagation, after every epoch:

- spread: mean squared norm of the per-point gradients over that of their mean. The variance of
  per-point noise grows with the former; the signal is the latter.
- dimensions: number of directions with 95 % of the energy of the per-point gradients (of 704).
- stale: share of that energy in the 15 leading directions of 8 steps before.
- moved: change of the Jacobians of the logits over one epoch, relative to their energy.

And along runs of likelihood ratio (isotropic; with a learned allocation; shaped by losses only;
shaped with Jacobian memory): the cosine to the exact gradient of the batch, the length of the
estimate along that gradient relative to it, the explained variance, and V, the total variance of
isotropic draws with the method's counts over that with equal counts ("least": optimal counts).
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from flops import LikelihoodRatio, Shaping
from flops.allocators import Equal, Gaussian
from flops.blackbox.objective import Candidates
from flops.blackbox.tuner import Tuner
from flops.tasks.data.few_shot import few_shots
from flops.tasks.models.clip import PromptedClip
from flops.tasks.prompts.prompt import LocalObjective, PromptSpace, outputs_of

EPOCHS, BATCH, RATE, SIGMA = 14, 64, 0.1, 0.01
LAG, TOP = 8, 15
NAMES = ("isotropic", "allocated", "shaped", "jacobian memory")


def objective() -> tuple[LocalObjective, Tensor]:
    """The objective on a local model, and the training points."""
    model, shots = PromptedClip.load(), few_shots()
    space = PromptSpace(model.text_width, model.image_width, 12, 10, 32, 32)
    images = model.prepare(shots.pixels)
    return LocalObjective(model, images, shots.labels, space), shots.points.train


def gradients(local: LocalObjective, z: Tensor, points: Tensor) -> Tensor:
    """Gradient of every point's loss, shape (n, d)."""
    rows = z.detach().expand(len(points), -1).clone().requires_grad_()
    return torch.autograd.grad(local.losses(rows, points).sum(), rows)[0]


def jacobians(local: LocalObjective, z: Tensor, points: Tensor) -> Tensor:
    """Jacobian of every point's centred logits, shape (n, classes, d)."""
    rows = z.detach().expand(len(points), -1).clone().requires_grad_()
    logits = local.logits(rows, points)
    logits = logits - logits.mean(1, keepdim=True)
    parts = [torch.autograd.grad(column.sum(), rows, retain_graph=True)[0] for column in logits.T]
    return torch.stack(parts, 1)


def geometry(local: LocalObjective, train: Tensor) -> dict[str, float]:
    """Along a run of backpropagation: medians over its epochs, without the first two."""
    z = local.space.start().requires_grad_()
    optimizer = torch.optim.Adam([z], RATE)
    found: dict[str, list[float]] = {"spread": [], "dimensions": [], "stale": [], "moved": []}
    past: list[Tensor] = []
    before: Tensor | None = None
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        now = jacobians(local, z, train)
        if epoch > 1 and before is not None:
            found["moved"].append(float((now - before).square().sum() / now.square().sum()))
        before = now
        for points in train[order].split(BATCH):
            whole = gradients(local, z, train)
            _, sizes, directions = torch.linalg.svd(whole, full_matrices=False)
            past.append(directions[:TOP])
            if epoch > 1 and len(past) > LAG:
                mean = whole.mean(0).square().sum()
                energy = sizes.square().cumsum(0) / sizes.square().sum()
                seen = (whole @ past[-1 - LAG].T).square().sum() / whole.square().sum()
                found["spread"].append(float(whole.square().sum(1).mean() / mean))
                found["dimensions"].append(int((energy < 0.95).sum()) + 1)
                found["stale"].append(float(seen))
            z.grad = gradients(local, z, points).mean(0)
            optimizer.step()
    return {name: statistics.median(values) for name, values in found.items()}


def estimates(local: LocalObjective, train: Tensor, name: str, queries: int) -> dict[str, float]:
    """Along a run of an estimator: means from the third epoch on."""
    start, remembers = local.space.start(), name == "jacobian memory"
    shaping = Shaping() if name in ("shaped", "jacobian memory") else None
    asked = replace(local, shown=remembers)
    tuner = Tuner(
        start,
        lambda z, points: asked.evaluate(Candidates(z, points), "").columns,
        points=len(train),
        estimator=LikelihoodRatio(SIGMA, shaping=shaping),
        queries=queries,
        allocator=Gaussian() if name == "allocated" else Equal(),
        learning_rate=RATE,
        parts=local.space.parts,
        outputs=outputs_of(local.labels) if remembers else None,
        embeddings=local.logits(start.expand(len(train), -1), train).detach(),
    )
    kinds = ("cosine", "length", "explained_variance", "V", "least V")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(EPOCHS * tuner.steps_per_epoch):
        points = tuner._batch(tuner.steps)
        whole = gradients(local, tuner.parameters, points)
        exact, energy = whole.mean(0), whole.square().sum(1)
        before: list[Tensor] = []

        def keep(optimizer: torch.optim.Optimizer, *_: Any, kept: list[Tensor] = before) -> None:
            parts = optimizer.param_groups[0]["params"]
            kept.append(torch.cat([part.grad.flatten() for part in parts]))

        handle = tuner.optimizer.register_step_pre_hook(keep)
        report = tuner.step()
        handle.remove()
        if tuner.steps > 2 * tuner.steps_per_epoch:
            found["cosine"].append(float(F.cosine_similarity(before[0], exact, 0)))
            found["length"].append(float(before[0] @ exact / exact.square().sum()))
            shaped = [s.explained_variance for s in report.shaping.values()]
            found["explained_variance"] += shaped
            counts, equal = report.counts["parameters"], float(energy.sum()) / queries
            found["V"].append(float((energy / counts).sum()) / equal)
            best = float(energy.sqrt().sum()) ** 2 / (queries * len(points))
            found["least V"].append(best / equal)
    columns = local.evaluate(Candidates(tuner.parameters.expand(len(train), -1), train), "").columns
    means = {name: statistics.fmean(values) for name, values in found.items() if values}
    return means | {"training loss": float(columns[:, 0].mean())}


def run() -> dict[str, Any]:
    """Geometry, and cosines by estimator."""
    local, train = objective()
    results: dict[str, Any] = {"gradients along backpropagation": geometry(local, train)}
    cases = [(n, q) for q in (20, 60) for n in NAMES]
    for name, queries in track(cases, description="prompts", transient=True):
        results[f"{name}, {queries} queries"] = estimates(local, train, name, queries)
    return results
