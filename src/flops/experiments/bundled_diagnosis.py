"""`flops diagnose`: the bundled vision transformer on the digits, in thirds of its layers."""

from __future__ import annotations

from typing import Any, Literal

import torch

from flops.diagnostics.diagnose import Diagnosis, diagnose
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import FlopsError
from flops.estimators import ES, SPSA, Estimator, Exact, LikelihoodRatio
from flops.estimators.likelihood_ratio import Targets
from flops.experiments.warm_starts import finetuned
from flops.subspace.config import Shaping
from flops.tasks.classification.task import loss_fn
from flops.tasks.data.digits import Split, digits
from flops.tasks.models.vit import bundled_vit

EstimatorName = Literal["lr", "spsa", "es"]
THIRDS = ("first third", "middle third", "last third")
LEARNING_BATCHES = 40  # training batches of shaped noise before the measurement


def diagnose_bundled(
    estimator: EstimatorName = "lr",
    targets: Targets = "block",
    *,
    shaping: bool = False,
    sigma: float = 1e-3,
    queries: int = 20,
    batch: int = 64,
    steps: int = 0,
    repeats: int = 8,
    seed: int = 0,
) -> Diagnosis:
    """Diagnose the estimates for the bundled model, fine-tuned by backpropagation for some steps.

    Args:
        estimator: Estimator of the layers: likelihood ratio, SPSA or ES.
        targets: What likelihood ratio perturbs.
        shaping: Use shaped noise with likelihood ratio, trained on other batches.
        sigma: Noise scale.
        queries: Mean queries per point and group.
        batch: Batch size.
        steps: Steps of backpropagation before measuring.
        repeats: Estimates per group and allocator.
        seed: Seed of the noise.

    Raises:
        FlopsError: If the options are inconsistent.
    """
    if shaping and estimator != "lr":
        raise FlopsError(
            "--shaping needs likelihood ratio here: the layers are too large for other estimators"
        )
    if batch < 2 or repeats < 1 or queries < 1 or steps < 0:
        raise FlopsError("batch >= 2, repeats >= 1, queries >= 1 and steps >= 0 are needed")
    train = digits().train
    model: Any = finetuned(bundled_vit(), train, steps)
    kinds: dict[EstimatorName, Estimator] = {
        "lr": LikelihoodRatio(sigma, targets, shaping=Shaping() if shaping else None),
        "spsa": SPSA(sigma),
        "es": ES(sigma),
    }
    layers = list(model.vit.layers)
    groups = [
        Group(layers[2 * i : 2 * i + 2], kinds[estimator], queries, name=name)
        for i, name in enumerate(THIRDS)
    ]
    rest = [model.vit.embeddings, model.vit.layernorm, model.classifier]
    groups.append(Group(rest, Exact(), name="rest"))
    rows = slice(0, min(batch, len(train)))
    return diagnose(
        model,
        loss_fn,
        train.images[rows],
        train.labels[rows],
        groups=groups,
        repeats=repeats,
        seed=seed,
        state=_learned(model, groups, train, batch, seed) if shaping else None,
    )


def _learned(
    model: Any, groups: list[Group], train: Split, batch: int, seed: int
) -> dict[str, Any]:
    """State of an engine trained on other batches than the one to diagnose."""
    fg = ForwardGradient(model, loss_fn, groups, seed=seed)
    others = torch.arange(batch, len(train))
    if len(others) < 2:
        raise FlopsError(f"--shaping trains on the other points: none are left of {len(train)}")
    source = torch.Generator().manual_seed(seed)
    for _ in range(LEARNING_BATCHES):
        rows = others[torch.randperm(len(others), generator=source)[:batch]]
        fg.estimate(train.images[rows], train.labels[rows], index=rows)
    model.zero_grad()
    return fg.state_dict()
