"""`flops diagnose`: the estimates for a task's model, in thirds of its layers."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn

from flops.diagnostics.diagnose import Diagnosis, diagnose
from flops.engine.auto_groups import automatic_groups
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import FlopsError, check_least
from flops.estimators import ES, SPSA, Estimator, Exact, LikelihoodRatio
from flops.estimators.likelihood_ratio import Targets
from flops.passes.batch import LossFunction
from flops.subspace.config import Shaping
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.classification.task import loss_fn
from flops.tasks.text import Text, TextConfig
from flops.training.device import find_device
from flops.training.task import Task, open_task

EstimatorName = Literal["lr", "spsa", "es"]
THIRDS = {"blocks-1": "first third", "blocks-2": "middle third", "blocks-3": "last third"}
LEARNING_BATCHES = 40  # training batches of shaped noise before the measurement
RATE = 1e-3  # of Adam in the steps before the measurement


def diagnose_task(
    config: FinetuneConfig | TextConfig,
    estimator: EstimatorName = "lr",
    targets: Targets = "block",
    *,
    shaping: bool = False,
    sigma: float = 1e-3,
    queries: int = 20,
    steps: int = 0,
    repeats: int = 8,
) -> Diagnosis:
    """Diagnose the estimates for a model, fine-tuned by backpropagation for some steps.

    Args:
        config: Model, data, batch, seed, chunk and device.
        estimator: Estimator of the layers: likelihood ratio, SPSA or ES.
        targets: What likelihood ratio perturbs.
        shaping: Use shaped noise with likelihood ratio, trained on other batches.
        sigma: Noise scale.
        queries: Mean queries per point and group.
        steps: Steps of backpropagation before measuring.
        repeats: Estimates per group and allocator.

    Raises:
        FlopsError: If the options are inconsistent, or model and data cannot be loaded.
    """
    if shaping and estimator != "lr":
        raise FlopsError(
            "--shaping needs likelihood ratio here: the layers are too large for other estimators"
        )
    check_least({"batch": 2}, config)
    given = SimpleNamespace(repeats=repeats, queries=queries, steps=steps)
    check_least({"repeats": 1, "queries": 1, "steps": 0}, given)
    if not 0 < sigma < math.inf:
        raise FlopsError(f"--sigma must be a positive number, not {sigma}")
    kinds: dict[EstimatorName, Estimator] = {
        "lr": LikelihoodRatio(sigma, targets, shaping=Shaping() if shaping else None),
        "spsa": SPSA(sigma),
        "es": ES(sigma),
    }
    task = open_task(config, find_device(config.device))
    loss: LossFunction = task.loss_fn if isinstance(task, Text) else loss_fn
    _finetune(task, loss, steps)
    groups = thirds(task.model, kinds[estimator], queries)
    rows = torch.arange(min(config.batch, len(task.data.train)))
    state = None
    if shaping:
        fg = ForwardGradient(task.model, loss, groups, seed=config.seed, chunk=config.chunk)
        state = _learned(task, fg, config.batch, config.seed)
    return diagnose(
        task.model,
        loss,
        *task.batch(rows),
        groups=groups,
        repeats=repeats,
        seed=config.seed,
        chunk=config.chunk,
        state=state,
    )


def thirds(model: nn.Module, estimator: Estimator, queries: int) -> list[Group]:
    """The repeated layers in thirds; what is before and after them is backpropagated.

    Raises:
        FlopsError: If the model has no repeated layers that are trained.
    """
    found = automatic_groups(dict(model.named_modules()), estimator, queries, 3)
    if not any(group.name in THIRDS for group in found):
        raise FlopsError("the model has no repeated layers to diagnose; use flops.diagnose in code")
    return [
        dataclasses.replace(group, name=THIRDS[group.name])
        if group.name in THIRDS
        else dataclasses.replace(group, estimator=Exact())
        for group in found
    ]


def _finetune(task: Task, loss: LossFunction, steps: int, batch: int = 64) -> None:
    """Some steps of backpropagation with Adam; uses a private generator."""
    trained = [p for p in task.model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, RATE)
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randperm(len(task.data.train), generator=source)[:batch]
        inputs, targets = task.batch(rows)
        optimizer.zero_grad()
        outputs = task.model(**inputs) if isinstance(inputs, dict) else task.model(inputs)
        loss(outputs, targets).mean().backward()
        optimizer.step()
    task.model.zero_grad()


def _learned(task: Task, fg: ForwardGradient, batch: int, seed: int) -> dict[str, object]:
    """State of an engine trained on other batches than the one to diagnose."""
    others = torch.arange(batch, len(task.data.train))
    if len(others) < 2:
        count = len(task.data.train)
        raise FlopsError(f"--shaping trains on the other points: none are left of {count}")
    source = torch.Generator().manual_seed(seed)
    for _ in range(LEARNING_BATCHES):
        rows = others[torch.randperm(len(others), generator=source)[:batch]]
        fg.estimate(*task.batch(rows), index=rows)
    task.model.zero_grad()
    return fg.state_dict()
