"""The ablations: cosines of the thirds of the network with other kernels, targets or baselines.

An engine is used as in training: it is trained on some earlier batches (the allocator's parameters,
the directions of shaped noise), then every repeat starts from this state, on another batch with
other noise. Settings with the same seed see the same batches.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import PrecisionWarning
from flops.estimators import LikelihoodRatio
from flops.estimators.likelihood_ratio import Baseline, Targets
from flops.experiments.cells import Result
from flops.experiments.gradients_panel import ALLOCATORS, MEASURE, MEASURED, WARM, named
from flops.experiments.warm_starts import WarmStart, batch_of, load_warm_start
from flops.experiments.weight_matrices import thirds
from flops.subspace.config import Shaping
from flops.tasks.classification.task import loss_fn
from flops.tasks.models.vit import parts

NAMES = {1: ("all layers",), 2: ("first half", "last half")}
THIRDS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Thirds(WarmStart):
    """Settings of one ablation.

    Attributes:
        targets: What likelihood ratio perturbs.
        shaped: Shaped or isotropic noise.
        baseline: Baseline of the losses.
        allocator: A key of `ALLOCATORS`.
        queries: Mean queries per point and third.
        repeats: Number of batches, each with its own noise.
        batch: Batch size.
        warm: Training batches before the measurement.
        sigma: Noise scale.
    """

    targets: Targets = "block"
    shaped: bool = False
    baseline: Baseline = "clean"
    allocator: str = "equal"
    queries: int = 20
    repeats: int = 20
    batch: int = 32
    warm: int = 12
    sigma: float = 1e-3


def measure_thirds(folder: Path, settings: Thirds) -> Result:
    """Cosines by third, then by repeat."""
    started = time.perf_counter()
    model, data = load_warm_start(folder, settings.start)
    model.requires_grad_(False)
    estimator = LikelihoodRatio(
        settings.sigma,
        settings.targets,
        settings.baseline,
        shaping=Shaping() if settings.shaped else None,
    )
    layers, groups = parts(model).layers, []
    cuts = thirds(len(layers))
    for name, third in zip(NAMES.get(len(cuts), THIRDS), cuts, strict=True):
        chosen = [layers[number - 1].requires_grad_(True) for number in third]
        groups.append(Group(chosen, estimator, settings.queries, name=name))
    allocator = named(ALLOCATORS, settings.allocator, "allocator")()
    fg = ForwardGradient(model, loss_fn, groups, allocator=allocator, seed=settings.seed)
    device = next(model.parameters()).device

    def estimate(use: int, number: int, exact: bool) -> dict[str, float]:
        rows = batch_of(data, settings.batch, settings.seed, use, number)
        pixels, labels = (value.to(device) for value in data.train.batch(rows))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)  # rounding is part of the study
            report = fg.estimate(pixels, labels, index=rows, exact=exact)
        return dict(report.cosine)

    learns = settings.shaped or settings.allocator not in ("equal", "bernoulli")
    for step in range(settings.warm if learns else 0):
        estimate(WARM, step, exact=False)
    learned = fg.state_dict()
    cosines: dict[str, list[float]] = {group.name: [] for group in fg.groups}
    for repeat in range(settings.repeats):
        fg.load_state_dict({**learned, "step": MEASURED + repeat})
        found = estimate(MEASURE, repeat, exact=True)
        for name, value in found.items():
            cosines[name].append(value)
    model.zero_grad()
    return {"cosine": cosines, "seconds": time.perf_counter() - started}
