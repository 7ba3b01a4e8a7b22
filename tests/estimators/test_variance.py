"""How noisy an estimate is, from its scalars: against Jacobians, single draws and repeats.

For Gaussian noise on outputs one draw G = w D^T z has the covariance trace |g|^2 F + |grad l|^2,
with g the gradient at the outputs; for signs on d parameters it is |grad l|^2 (d - 1). The traces
in use leave the single |grad l|^2 out ("a small term"); here it is added back, so that small
models can be compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from flops import ES, SPSA, ForwardGradient, Group, LikelihoodRatio
from flops.diagnostics.spend import Spent
from flops.diagnostics.traces import gradient_traces, spend_counts
from flops.engine.rows import Cost
from flops.estimators.base import Estimate
from flops.estimators.variance import (
    ENERGY_STEPS,
    energy,
    jacobian_energy,
    leaf_energy,
    mean_by_point,
    traces_of,
    variance,
)
from tests.conftest import squared

SIGMA = 1e-5
SIZE = 4

LEAVES = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear, tokens": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear, no bias": (lambda: nn.Linear(3, 4, bias=False), (3,)),
    "layer norm": (lambda: nn.LayerNorm(4), (4,)),
    "layer norm, tokens": (lambda: nn.LayerNorm(4), (3, 4)),
    "layer norm, two axes": (lambda: nn.LayerNorm((3, 4), eps=0.1), (2, 3, 4)),
    "layer norm, no bias": (lambda: nn.LayerNorm(4, bias=False), (4,)),
    "embedding": (lambda: nn.Embedding(6, 3), None),
    "embedding, padding": (lambda: nn.Embedding(6, 3, padding_idx=2), None),
    "embedding, last is padding": (lambda: nn.Embedding(6, 3, padding_idx=-1), None),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv1d, circular": (
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular", groups=1),
        (2, 6),
    ),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 4)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, (2, 3), groups=2, dilation=(1, 2)), (4, 4, 7)),
    "conv2d, depthwise": (lambda: nn.Conv2d(3, 6, 2, groups=3, bias=False), (3, 4, 4)),
    "conv2d, same": (lambda: nn.Conv2d(2, 2, 3, padding="same"), (2, 4, 4)),
    "conv2d, reflect": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "conv2d, same and zeros beyond": (
        lambda: nn.Conv2d(2, 2, 3, padding="same", padding_mode="replicate"),
        (2, 4, 4),
    ),
}


def jacobian_norm(module: nn.Module, live: dict[str, Tensor], row: Tensor) -> Tensor:
    """|D_theta phi(x)|_F^2 of one row, by autograd."""
    if not live:
        return torch.zeros((), dtype=torch.float64)
    parts = torch.autograd.functional.jacobian(
        lambda *ps: functional_call(module, dict(zip(live, ps, strict=True)), row),
        tuple(live.values()),
    )
    return sum(part.square().sum() for part in parts)


@pytest.mark.parametrize("frozen", ["none", "weight", "bias", "both"])
@pytest.mark.parametrize("name", LEAVES)
def test_leaf_energy_is_the_norm_of_the_jacobian(name: str, frozen: str) -> None:
    make, shape = LEAVES[name]
    module = make().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randint(0, 6, (SIZE, 5)) if shape is None else torch.randn(SIZE, *shape).double()
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(frozen not in (key, "both"))
    live = {k: p for k, p in module.named_parameters() if p.requires_grad}
    expected = torch.stack([jacobian_norm(module, live, row) for row in x.split(1)])
    found = leaf_energy(module, x).double()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_leaf_energy_of_one_token_per_point() -> None:
    assert leaf_energy(nn.Embedding(6, 3), torch.tensor([2, 0])).tolist() == [3, 3]
    assert leaf_energy(nn.Embedding(6, 3, padding_idx=0), torch.tensor([2, 0])).tolist() == [3, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_leaf_energy_of_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    module = nn.Linear(8, 4).to(dtype)
    found = leaf_energy(module, torch.full((2, 8), 1000.0, dtype=dtype))
    assert found.tolist() == pytest.approx([8e6 * 4 + 4] * 2, rel=0.01)


# Single draws


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)).sum(1))


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(SIZE, 3)


def norms() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    return model, torch.randn(SIZE, 3)


def cnn() -> tuple[nn.Module, Tensor]:
    conv = nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)), torch.randn(
        SIZE, 2, 4, 4
    )


def tokens() -> tuple[nn.Module, Tensor]:
    return Tokens(), torch.tensor([[1, 2, 2, 0], [3, 4, 5, 6], [7, 0, 0, 0], [1, 1, 1, 1]])


MODELS = {"mlp": mlp, "norms": norms, "cnn": cnn, "tokens": tokens}
ESTIMATORS = {
    "leaf": LikelihoodRatio(SIGMA, "leaf"),
    "leaf, pairs": LikelihoodRatio(SIGMA, "leaf", baseline="antithetic"),
    "block": LikelihoodRatio(SIGMA),
    "spsa": SPSA(SIGMA),
    "es": ES(SIGMA),
}


class Case:
    """A model with data, opened for queries."""

    def __init__(self, model: str, estimator: str) -> None:
        torch.manual_seed(7)
        made, x = MODELS[model]()
        self.model = made.double()
        self.x = x.double() if x.is_floating_point() else x
        if estimator == "block":  # it has one factor for all points: take points that are alike
            self.x = nn.functional.normalize(self.x.flatten(1)).view(self.x.shape) * 2
        self.y = torch.randn(SIZE, 2).double()
        self.estimator = ESTIMATORS[estimator]
        self.engine = ForwardGradient(self.model, squared, Group(self.model, self.estimator, 8))
        self.memory: dict[str, Any] = {}

    @contextmanager
    def opened(self, step: int = 0) -> Iterator[tuple[Any, ...]]:
        """Session, group, binding and queries."""
        (group,) = self.engine.groups
        with self.engine.session(self.x, self.y) as session:
            queries = session.queries(group.name, (0, step, 0), self.memory)
            yield session, group, session.layout.bindings[0], queries

    def spent(self, draws: Any, step: int = 0) -> Spent:
        counts = torch.as_tensor(draws).expand(SIZE) * self.estimator.unit
        with self.opened(step) as given:
            return spend_counts(*given, counts)

    def estimate(self, draws: Any, step: int = 0) -> Estimate:
        return self.spent(draws, step).step.estimate

    def gradients(self) -> Tensor:
        """Of each point's loss, shape (B, P)."""
        found = []
        for loss in squared(self.model(self.x), self.y):
            self.model.zero_grad()
            loss.backward(retain_graph=True)
            found.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        self.model.zero_grad()
        return torch.stack(found)

    def exact(self, values: Tensor) -> Tensor:
        """Traces from the scalars, with the small term that they leave out."""
        norms = self.gradients().square().sum(1)
        return values + norms if "Ratio" in type(self.estimator).__name__ else values - norms

    def settle(self) -> None:
        """For a block: the Jacobian's energy from many random products, not from one."""
        if self.estimator == ESTIMATORS["block"]:
            self.memory["jacobian_energy"] = (sum(self.energies(100)), 100)

    def energies(self, count: int) -> list[float]:
        found = []
        for step in range(count):
            with self.opened(step) as (session, _, binding, queries):
                self.memory.pop("jacobian_energy", None)
                found.append(jacobian_energy(binding, queries, session.runner(Cost())))
        return found


# Every estimator and every model; the other pairs, whose many draws take half a minute, are slow.
FAST = {*(("mlp", e) for e in ESTIMATORS), ("norms", "es"), ("cnn", "leaf"), ("tokens", "leaf")}
CASES = [
    pytest.param(model, estimator, marks=[] if (model, estimator) in FAST else pytest.mark.slow)
    for model in MODELS
    for estimator in ESTIMATORS
    # A block has one factor for all points, which rows of padding do not have.
    if (model, estimator) != ("tokens", "block") and (model == "mlp" or estimator != "leaf, pairs")
]


@pytest.mark.parametrize(("model", "estimator"), CASES)
def test_traces_from_scalars_are_those_of_single_gradients(model: str, estimator: str) -> None:
    case = Case(model, estimator)
    case.settle()
    scalars = case.exact(traces_of(case.estimate(2000), SIZE).values)
    block = estimator == "block"
    draws = 400 if block else 100
    with case.opened(1) as given:
        single = gradient_traces(*given, draws)
    # A squared Gaussian slope varies by twice its squared mean; products of signs have heavier
    # tails, and the heaviest has the block with its two outputs, since slope and noise go together.
    error = ((8 if block else 3) / draws) ** 0.5 * scalars.square().sum().sqrt()
    assert float((single.sum() - scalars.sum()).abs()) < 4 * float(error)
    assert float(error) < 0.15 * float(scalars.sum())
    assert ((single / scalars).log().abs() < 0.6).all()


@pytest.mark.parametrize("estimator", ["spsa", "es"])
@pytest.mark.parametrize("model", ["mlp", "norms", "cnn"])
def test_traces_of_parameter_noise_have_a_closed_form(model: str, estimator: str) -> None:
    case = Case(model, estimator)
    gradients = case.gradients()
    expected = gradients.square().sum(1) * gradients.size(1)
    found = traces_of(case.estimate(6000), SIZE).values
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0)


def test_gradient_traces_of_some_parameters() -> None:
    case = Case("mlp", "leaf")
    with case.opened(1) as given:
        every = gradient_traces(*given, 20)
        parts = [gradient_traces(*given, 20, [p]) for p in case.model.parameters()]
    torch.testing.assert_close(sum(parts), every)
    assert all((part > 0).all() for part in parts)


# Blocks


@pytest.mark.parametrize("model", ["mlp", "norms", "cnn"])
def test_jacobian_energy_is_unbiased(model: str) -> None:
    case = Case(model, "block")
    found = torch.tensor(case.energies(250)).double()
    live = dict(case.model.named_parameters())
    expected = sum(float(jacobian_norm(case.model, live, r)) for r in case.x.split(1)) / SIZE
    error = float(found.std()) / len(found) ** 0.5
    assert abs(float(found.mean()) - expected) < 5 * error
    assert error < 0.05 * expected


def test_jacobian_energy_is_averaged_over_the_first_steps_and_kept() -> None:
    case = Case("mlp", "block")
    seen = []
    for step in range(ENERGY_STEPS + 2):
        case.estimate(2, step=step)
        seen.append(case.memory["jacobian_energy"])
    assert [count for _, count in seen] == [*range(1, ENERGY_STEPS + 1), ENERGY_STEPS, ENERGY_STEPS]
    assert seen[-1] == seen[ENERGY_STEPS - 1]
    assert len({total for total, _ in seen}) == ENERGY_STEPS


@pytest.mark.parametrize(
    "draws", [*(pytest.param(d, marks=pytest.mark.slow) for d in (2, 16)), 5, 8, 11]
)
def test_variance_of_orthogonal_draws(draws: int) -> None:
    """Full blocks of orthogonal draws are exact for a linear loss; what is left is sampled."""
    model = nn.Linear(3, 8).double()
    x, y = torch.randn(2, 3).double(), torch.randn(2, 8).double()
    estimator = LikelihoodRatio(1e-6, noise="orthogonal")
    fg = ForwardGradient(model, squared, [Group(model, estimator, queries=draws)])
    found, predicted = [], []
    for _ in range(300):
        model.zero_grad()
        with fg.session(x, y) as session:
            binding, counts = session.layout.bindings[0], torch.full((2,), draws)
            queries = session.queries("model", fg.key(0), {})
            spent = spend_counts(session, fg.groups[0], binding, queries, counts)
        fg.steps += 1
        found.append(torch.cat([g.flatten() for g in spent.gradients.values()]))
        predicted.append(variance(spent.step.estimate, 2))
    samples = torch.stack(found)
    measured = samples.var(0).sum().item()
    if draws % 8 == 0:
        assert measured < 1e-8 * samples.mean(0).square().sum().item()
        assert sum(predicted) / 300 < 1e-8 * samples.mean(0).square().sum().item()
    else:
        assert sum(predicted) / 300 == pytest.approx(measured, rel=0.25)


# The batch gradient


@pytest.mark.parametrize(
    "counts", [pytest.param([5, 5, 5, 5], marks=pytest.mark.slow), [1, 3, 8, 20]]
)
@pytest.mark.parametrize(
    ("model", "estimator"),
    [
        ("mlp", "leaf"),
        ("mlp", "block"),
        ("mlp", "spsa"),
        ("norms", "es"),
        ("cnn", "leaf"),
        ("tokens", "leaf"),
    ],
)
def test_variance_is_that_of_repeats(model: str, estimator: str, counts: list[int]) -> None:
    case = Case(model, estimator)
    case.settle()
    repeats = 400 if estimator == "block" else 200
    predicted, samples = [], []
    for step in range(repeats):
        spent = case.spent(torch.tensor(counts), step)
        predicted.append(variance(spent.step.estimate, SIZE))
        parts = [spent.gradients[p].flatten() for p in case.model.parameters()]
        samples.append(torch.cat(parts))
    stacked = torch.stack(samples)
    seen = (stacked - stacked.mean(0)).square().sum(1) * repeats / (repeats - 1)
    small = case.exact(torch.zeros(SIZE).double()) / torch.tensor(counts) / SIZE**2
    told = torch.tensor(predicted).double() + small.sum()
    error = float(seen.std() + told.std()) / repeats**0.5
    assert abs(float(seen.mean() - told.mean())) < 5 * error
    assert error < 0.2 * float(seen.mean())
    assert abs(float(seen.mean() / told.mean()) - 1) < 0.25


def test_variance_with_shared_draws() -> None:
    model, x = mlp()
    model, x, y = model.double(), x.double(), torch.randn(SIZE, 2).double()
    estimator = SPSA(SIGMA, shared=True, noise="rademacher")
    engine = ForwardGradient(model, squared, Group(model, estimator, 8))
    predicted, samples = [], []
    with engine.session(x, y) as session:
        for step in range(200):
            binding, counts = session.layout.bindings[0], torch.full((SIZE,), 4)
            queries = session.queries("model", (0, step), {})
            spent = spend_counts(session, engine.groups[0], binding, queries, counts)
            predicted.append(variance(spent.step.estimate, SIZE))
            samples.append(torch.cat([g.flatten() for g in spent.gradients.values()]))
    stacked = torch.stack(samples)
    size = stacked.size(1)
    seen = float(stacked.var(0).sum())
    assert sum(predicted) / 200 == pytest.approx(seen * size / (size - 1), rel=0.15)


def test_parts() -> None:
    values, points = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    means, counts = mean_by_point(values, points, 4)
    assert means.tolist() == [2, 0, 5, 0]
    assert counts.tolist() == [2, 0, 1, 0]
    assert variance(Estimate(), 4) == 0
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    assert energy({p: torch.tensor([1.0, 2.0]), q: torch.tensor([3.0])}) == 14
    estimate = Estimate(torch.tensor([2.0, 4.0, 1.0]), points, torch.tensor([1.0, 1, 6, 1]))
    assert traces_of(estimate, 4).values.tolist() == [10, 0, 6, 0]
    assert variance(estimate, 4) == (10 / 2 + 6) / 16
