"""The methods, each a configuration of the same engine.

| name | noise | draws | allocation |
|---|---|---|---|
| bp | none: backpropagation | | |
| mezo | all parameters | shared by the batch, 2 queries | |
| fzoo | all parameters, signs | shared, 8 queries and a clean pass | |
| lozo | all parameters, of rank 2 on matrices | shared, 2 queries | |
| jvp | tangents of all parameters: forward differentiation | shared, 1 direction | |
| n-spsa | parameters, by group | per point | equal |
| deepzero | single coordinates of a pruned set | shared by the batch | |
| lr | leaf outputs, the paper's | per point | equal |
| ops-spsa, ops-lr | as n-spsa and lr | per point | Gaussian, the paper's |
| shaped-lr | stage outputs, shaped | per point | Gaussian |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from flops import presets
from flops.allocators import Equal, Gaussian
from flops.allocators.base import Allocator
from flops.allocators.gaussian import Feature
from flops.engine.auto_groups import PARTS, STAGE_ENDS, automatic_groups, before
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.estimators import DeepZero, Exact, LikelihoodRatio
from flops.estimators.automatic_sigma import Auto
from flops.estimators.base import Estimator
from flops.estimators.likelihood_ratio import Targets
from flops.estimators.spsa import SPSA
from flops.passes.batch import LossFunction
from flops.perturb.random import Kind
from flops.subspace.config import RELIABLE, Shaping

MethodName = Literal[
    "bp",
    "mezo",
    "fzoo",
    "lozo",
    "jvp",
    "n-spsa",
    "deepzero",
    "lr",
    "ops-spsa",
    "ops-lr",
    "shaped-lr",
]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
FIXED_QUERIES: frozenset[MethodName] = frozenset({"mezo", "fzoo", "lozo", "jvp"})
WITHOUT_SIGMA: frozenset[MethodName] = frozenset({"bp", "jvp"})
AUTOMATIC_SIGMA: frozenset[MethodName] = frozenset({"shaped-lr"})  # where none is given


@dataclass(frozen=True)
class Method:
    """A method and its hyperparameters.

    Args:
        name: Name of the method.
        queries: Mean queries per point and group. Those of mezo and lozo (2), fzoo (8) and jvp (1)
            are their authors', for the whole model. "auto" chooses them step by step, where draws
            are those of each point; shaped-lr then withholds unreliable gradients, too, as
            ``ForwardGradient(model, loss_fn)`` does.
        sigma: Noise scale: one for all groups, or one per stage of layers (modules before and after
            them take the first and the last). None is automatic for shaped-lr, 1e-3 for the others.
        targets: What likelihood ratio perturbs; None is "leaf" for lr and ops-lr, "stage" for
            shaped-lr.
        stages: Number of groups of layers, or where each ends as a share of the depth, such as
            (0.8, 1.0); None is 3, or for stage targets two, of which the first ends after two
            thirds. Norm and head are separate groups, and so are the embeddings, which belong to
            the first stage under stage targets.
        clip_attention: Clip the gradient norm of all attention parameters; None does not clip.
        noise: Distribution of the noise of likelihood ratio.
        last_tokens: Likelihood ratio perturbs only so many tokens at the end of each sequence, from
            the layers on; None for all.
    """

    name: MethodName = "shaped-lr"
    queries: float | Literal["auto"] = 20.0
    sigma: tuple[float, ...] | None = None
    targets: Targets | None = None
    stages: int | tuple[float, ...] | None = None
    clip_attention: float | None = None
    noise: Kind = "gaussian"
    last_tokens: int | None = None

    def __post_init__(self) -> None:
        """Validate."""
        if self.name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not '{self.name}'")
        if isinstance(self.stages, tuple):
            if not min(self.stages, default=0) > 0 or sorted(set(self.stages)) != [*self.stages]:
                raise ValueError(f"the ends of stages must ascend from above 0, not {self.stages}")
            if self.stages[-1] != 1:
                raise ValueError(f"the last stage must end at 1, not {self.stages[-1]}")
        elif self.stages is not None and self.stages < 1:
            raise ValueError(f"stages must be at least 1, not {self.stages}")
        if self.sigma is not None and len(self.sigma) not in (1, self.stage_count):
            raise ValueError(
                f"sigma must be one value or one per stage ({self.stage_count}), not {self.sigma}"
            )
        if self.queries == "auto" and self.name == "deepzero":
            raise ValueError(
                "automatic queries need draws of each point, and those of deepzero are shared by "
                "the batch; give a number"
            )
        if self.targets is not None and "lr" not in self.name:
            raise ValueError(f"targets applies to likelihood ratio only, not to {self.name}")
        if self.last_tokens is not None and "lr" not in self.name:
            raise ValueError(f"last_tokens applies to likelihood ratio only, not to {self.name}")

    @property
    def cuts(self) -> int | tuple[float, ...]:
        """Number of groups of layers, or where each ends."""
        if self.stages is not None:
            return self.stages
        return STAGE_ENDS if self.perturbs == "stage" else PARTS

    @property
    def stage_count(self) -> int:
        """Number of groups of layers."""
        return self.cuts if isinstance(self.cuts, int) else len(self.cuts)

    @property
    def sigmas(self) -> tuple[float | Auto, ...]:
        """Noise scale of each stage."""
        found: tuple[float | Auto, ...] = self.sigma or (self.last_sigma,)
        if self.sigma is None and self.name in AUTOMATIC_SIGMA:
            found = ("auto",)
        return found * self.stage_count if len(found) == 1 else found

    @property
    def last_sigma(self) -> float:
        """Noise scale of the last stage, of methods that have no automatic one."""
        return self.sigma[-1] if self.sigma else 1e-3

    @property
    def perturbs(self) -> Targets | None:
        """What likelihood ratio perturbs; None for the other methods."""
        if "lr" not in self.name:
            return None
        return self.targets or ("stage" if self.name == "shaped-lr" else "leaf")


def method_groups(model: nn.Module, method: Method) -> list[Group]:
    """The groups of a method for any model with a stack of layers."""
    if method.name == "bp":
        return [Group(model, Exact(), name="model")]
    if method.name == "jvp":
        return presets.jvp(model)
    if method.name in ("mezo", "fzoo", "lozo"):
        whole = {"mezo": presets.mezo, "fzoo": presets.fzoo, "lozo": presets.lozo}[method.name]
        return whole(model, method.last_sigma)
    modules = dict(model.named_modules())
    base = estimator(method, method.sigmas[-1])
    join = method.perturbs == "stage"
    groups = automatic_groups(modules, base, method.queries, method.cuts, join=join)
    return [
        group
        if group.name == "loose"
        else dataclasses.replace(group, estimator=_estimator_of(group, method, sigma))
        for group, sigma in zip(groups, _by_place(groups, method), strict=True)
    ]


def engine(
    model: nn.Module,
    loss_fn: LossFunction,
    method: Method,
    *,
    seed: int = 0,
    chunk: int | None = None,
    groups: Sequence[Group] | None = None,
    feature: Feature | None = None,
    embedding: nn.Module | str | None = None,
) -> ForwardGradient:
    """The engine of a method.

    Args:
        model: Model to train.
        loss_fn: One loss per point.
        method: The method.
        seed: Seed of the noise.
        chunk: Largest number of rows per pass.
        groups: Groups to perturb; None for those of a model with a stack of layers.
        feature: Feature of the losses for learned allocators; None for the paper's, or with shaped
            noise that of `ForwardGradient`.
        embedding: Module whose output measures the similarity of points; None to choose one.
    """
    learned = method.name in ("ops-spsa", "ops-lr", "shaped-lr")
    if feature is None:
        feature = "standardised" if method.name == "shaped-lr" else "tanh"
    allocator: Allocator = Gaussian(feature) if learned else Equal()
    groups = method_groups(model, method) if groups is None else groups
    return ForwardGradient(
        model,
        loss_fn,
        groups,
        allocator=allocator,
        embedding=embedding,
        seed=seed,
        chunk=chunk,
    )


def estimator(method: Method, sigma: float | Auto) -> Estimator:
    """The estimator of a group."""
    if method.name == "bp":
        return Exact()
    if sigma == "auto":
        return _likelihood_ratio(method, "auto")
    if method.name == "deepzero":
        return DeepZero(sigma)
    if method.name in ("n-spsa", "ops-spsa"):
        return SPSA(sigma)
    return _likelihood_ratio(method, sigma)


def _likelihood_ratio(method: Method, sigma: float | Auto) -> Estimator:
    assert method.perturbs is not None
    withhold = RELIABLE if method.queries == "auto" else 0.0
    shaping = Shaping(withhold=withhold) if method.name == "shaped-lr" else None
    return LikelihoodRatio(
        sigma,
        method.perturbs,
        noise=method.noise,
        shaping=shaping,
        last_tokens=method.last_tokens,
    )


def _estimator_of(group: Group, method: Method, sigma: float | Auto) -> Estimator:
    """The estimator of a group; embeddings may stand side by side, and all their tokens count."""
    if before(group) and method.perturbs == "stage":
        method = dataclasses.replace(method, last_tokens=None, targets="block")
    elif before(group):
        method = dataclasses.replace(method, last_tokens=None)
    return estimator(method, sigma)


def _by_place(groups: Sequence[Group], method: Method) -> list[float | Auto]:
    """Sigma of each group: of the first stage before the layers, of the last after them."""
    sigmas, found = list(method.sigmas), []
    for group in groups:
        _, is_stage, number = (group.name or "").rpartition("blocks-")
        if is_stage:
            found.append(sigmas[min(int(number), len(sigmas)) - 1])
        elif any("blocks-" in (other.name or "") for other in groups[: len(found)]):
            found.append(sigmas[-1])
        else:
            found.append(sigmas[0])
    return found
