"""One panel: the cosine of one matrix's estimated gradient, by allocator and query budget.

Allocators are used as in training: learned ones are trained on some earlier batches, with the
budget of the measurement but at most 20 queries, and without the exact gradient. All see the same
batches and the same draws, so that differences are paired by repeat; the draws of a small budget
are the first draws of a large one.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from flops.allocators import Allocator, Bernoulli, Equal, Gaussian, Neyman
from flops.allocators.base import Learner
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.engine.step import Session
from flops.errors import FlopsError
from flops.estimators import ES, SPSA, Estimator, LikelihoodRatio
from flops.estimators.exact import cosine, exact_gradients
from flops.estimators.variance import energy
from flops.experiments.cells import Result
from flops.experiments.common_random_numbers import spend_sharing
from flops.experiments.warm_starts import WarmStart, batch_of, load_warm_start
from flops.experiments.weight_matrices import matrix_of, third_of
from flops.tasks.classification.task import loss_fn
from flops.tasks.data.images import ImageData
from flops.tasks.models.vit import parts

ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "equal": Equal,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "neyman": Neyman,
    "diagonal": lambda: Gaussian(kernel=False),
}
ESTIMATORS: dict[str, Callable[[float], Estimator]] = {
    "lr": lambda sigma: LikelihoodRatio(sigma, "leaf"),
    "spsa": SPSA,
    "es": ES,
}
WARM_QUERIES = 20  # more would not improve the few parameters of an allocator
WARM, MEASURE = 1, 2  # streams of batches
MEASURED = 10**6  # first measured step, for noise distinct from the warm-up's


@dataclass(frozen=True)
class Panel(WarmStart):
    """Settings of one panel.

    Attributes:
        estimator: A key of `ESTIMATORS`.
        matrix: Matrix of the layer; see `flops.experiments.weight_matrices`.
        layer: Number of the layer, from 1 on.
        budgets: Mean queries per point.
        allocators: Keys of `ALLOCATORS`.
        perturb: Only the matrix, or all leaves of its third of the layers; the cosine is that of
            the matrix in both cases.
        repeats: Number of batches, each with its own noise.
        batch: Batch size.
        warm: Training batches of learned allocators.
        sigma: Noise scale.
    """

    estimator: str = "lr"
    matrix: str = "key"
    layer: int = 1
    budgets: tuple[int, ...] = (5, 10, 20, 50, 100, 200)
    allocators: tuple[str, ...] = ("equal", "bernoulli", "gaussian", "neyman")
    perturb: Literal["matrix", "third"] = "matrix"
    repeats: int = 20
    batch: int = 32
    warm: int = 12
    sigma: float = 1e-3


def named(table: dict[str, Any], name: str, what: str) -> Any:
    """An entry of a table.

    Raises:
        FlopsError: If there is none of this name.
    """
    if name not in table:
        raise FlopsError(f"there is no {what} '{name}': give one of {', '.join(table)}")
    return table[name]


def measure_panel(folder: Path, panel: Panel) -> Result:
    """Cosine and variance by allocator, then by budget and repeat.

    Args:
        folder: Folder of the study, with the start models.
        panel: Settings.

    Returns:
        ``cosine`` and ``noise`` (trace of the estimate's covariance, from its own queries) by
        allocator; ``norm``, the squared length of the exact gradient, and ``loss`` by repeat.
    """
    started = time.perf_counter()
    model, data = load_warm_start(folder, panel.start)
    estimator = named(ESTIMATORS, panel.estimator, "estimator")(panel.sigma)
    weight, groups = _perturbed(model, panel, estimator)
    fg = ForwardGradient(model, loss_fn, groups, seed=panel.seed)
    fg.embed_points()
    learned = _warmed(fg, data, panel)
    found: Result = {
        kind: {name: [[] for _ in panel.budgets] for name in panel.allocators}
        for kind in ("cosine", "noise")
    }
    norms, losses = [], []
    for repeat in range(panel.repeats):
        with _session(fg, data, panel, MEASURE, repeat) as session:
            exact = exact_gradients(fg.model, session.passes.batch)
            assert exact is not None
            fresh = {key: copy.copy(a) for key, a in learned.items()}  # repeats do not train them
            for (budget, name), spent in _spent(fg, session, fresh, MEASURED + repeat).items():
                place = panel.budgets.index(budget)
                own = {weight: spent.gradients[weight]}
                found["cosine"][name][place].append(cosine(own, exact))
                found["noise"][name][place].append(spent.step.noise)
            norms.append(energy({weight: exact[weight]}))
            losses.append(float(session.losses.mean()))
    return {**found, "norm": norms, "loss": losses, "seconds": time.perf_counter() - started}


def _perturbed(
    model: nn.Module, panel: Panel, estimator: Estimator
) -> tuple[nn.Parameter, list[Group]]:
    """The matrix, and the perturbed modules; everything else is frozen."""
    model.requires_grad_(False)
    module, layers = matrix_of(model, panel.layer, panel.matrix), parts(model).layers
    targets: list[nn.Module] = [module]
    if panel.perturb == "third":
        targets = [layers[number - 1] for number in third_of(panel.layer, len(layers))]
    for target in targets:
        target.requires_grad_(True)
    if panel.perturb == "matrix" and module.bias is not None:
        module.bias.requires_grad_(False)
    weight: Any = module.weight
    return weight, [Group(targets, estimator, WARM_QUERIES, name="panel")]


def _warmed(fg: ForwardGradient, data: ImageData, panel: Panel) -> dict[tuple[int, str], Allocator]:
    """Allocators by budget and name, trained."""
    fresh = {name: named(ALLOCATORS, name, "allocator") for name in panel.allocators}
    made = {(budget, name): make() for budget in panel.budgets for name, make in fresh.items()}
    # Above this many queries, all budgets share one warm-up.
    alike = {key: (min(key[0], WARM_QUERIES), key[1]) for key in made}
    learners: dict[tuple[int, str], Allocator] = {
        alike[key]: a for key, a in made.items() if isinstance(a, Learner)
    }
    for step in range(panel.warm if learners else 0):
        with _session(fg, data, panel, WARM, step) as session:
            _spent(fg, session, learners, step)
    return {key: copy.copy(learners.get(alike[key], own)) for key, own in made.items()}


def _session(fg: ForwardGradient, data: ImageData, panel: Panel, use: int, number: int) -> Any:
    rows = batch_of(data, panel.batch, panel.seed, use, number)
    pixels, labels = data.train.batch(rows)
    device = next(fg.model.parameters()).device
    return fg.session(pixels.to(device), labels.to(device), index=rows)


def _spent(
    fg: ForwardGradient, session: Session, chosen: dict[tuple[int, str], Allocator], step: int
) -> dict[tuple[int, str], Any]:
    """Estimates of one batch by budget and allocator, which are trained on them."""
    key = (fg.seed, step, 0)
    signal = dataclasses.replace(fg.signal(0, session), key=key)
    # Rounding is part of the measurement: no warning for each cell.
    queries = session.queries("panel", key, {"warned_of_rounding": True})
    asked = [(budget, allocator) for (budget, _), allocator in chosen.items()]
    binding = session.layout.bindings[0]
    found = spend_sharing(session, fg.groups[0], binding, asked, signal, queries)
    return dict(zip(chosen, found, strict=True))
