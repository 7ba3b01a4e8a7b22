"""The batch gradient stays unbiased under every allocator, with pilots too; planted bugs fail.

Queries are few. Weights that go by rows do visible harm where one point is much noisier than the
others, and counts that depend on the noise they weight where all points are alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import SPSA, ForwardGradient, Group, LikelihoodRatio
from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman
from flops.engine.gradients import Collector
from flops.engine.group_step import GroupStep
from flops.engine.pilot import PILOT
from flops.engine.rows import plan_rows
from flops.engine.step import QueryLoop, run_query
from flops.estimators.base import Rows
from tests.conftest import flat, gradients
from tests.statistical.helpers import assert_mean
from tests.support.covering import in_turn

SIGMA = 1e-5
SIZE = 6
WARM = 10


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets hold a scale for each point: the traces go by its square."""
    return targets * outputs.square().sum(1)


class Problem:
    """A linear map of a few points, whose scales differ by a factor of 300, or not at all."""

    def __init__(self, alike: bool = False) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
        self.x = torch.randn(SIZE, 3).double()
        self.scales = torch.tensor([0.1, 0.3, 1.0, 3.0, 10.0, 30.0]).double()
        if alike:
            self.scales = torch.ones_like(self.scales)

    def truth(self) -> Tensor:
        self.model.zero_grad()
        loss_fn(self.model(self.x), self.scales).mean().backward()
        return flat(gradients(self.model))

    def samples(
        self, allocator: Any, estimator: Any, queries: float = 6, count: int = 200
    ) -> Tensor:
        """Steps at the same parameters; the allocator goes on learning."""
        group = Group(self.model, estimator, queries)
        fg = ForwardGradient(self.model, loss_fn, group, allocator=allocator)
        found, spread = [], []
        for step in range(WARM + count):
            self.model.zero_grad()
            report = fg.estimate(self.x, self.scales, index=range(SIZE))
            if step >= WARM:
                found.append(flat(gradients(self.model)))
                counts = next(iter(report.counts.values()))
                spread.append(int(counts.max()) / int(counts.min()))
        self.spread = sum(spread) / len(spread)
        return torch.stack(found)


LEAF, BLOCK = LikelihoodRatio(SIGMA, "leaf"), LikelihoodRatio(SIGMA)
ALLOCATORS = {
    "equal": Equal(),
    "bernoulli": Bernoulli(),
    "bernoulli learned": Bernoulli(p=None),
    "gaussian": Gaussian(iterations=2),
    "gaussian, standardised": Gaussian(feature="standardised", iterations=2, kernel=False),
    "gaussian, pilot": Gaussian(pilot=2, iterations=2),
    "neyman": Neyman(),
    "neyman, running": Neyman(running=True),
    "neyman, pilot": Neyman(pilot=2),
    "neyman, pilot and running": Neyman(pilot=2, running=True),
    "neyman, raw pilot": Neyman(pilot=2, shrink=False),
}


# Others have the parts of these: a pilot, a running mean, another feature.
LONG = ("gaussian, standardised", "neyman, pilot", "neyman, running")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in ALLOCATORS]
)
def test_the_mean_is_the_gradient(name: str) -> None:
    problem = Problem()
    samples = problem.samples(ALLOCATORS[name], LEAF)
    assert_mean(samples, problem.truth())
    if name not in ("equal", "bernoulli"):
        assert problem.spread > 2  # else equal counts would pass for any of them


@pytest.mark.parametrize(
    ("name", "estimator"),
    in_turn(["gaussian", "neyman, pilot and running"], [BLOCK, SPSA(SIGMA)]),
    ids=str,
)
def test_the_mean_is_the_gradient_for_other_estimators(name: str, estimator: Any) -> None:
    problem = Problem()
    samples = problem.samples(ALLOCATORS[name], estimator, queries=12)
    assert_mean(samples, problem.truth())


def row_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row weighs the same, so a point weighs as much as it has queries."""

    def plan(counts: Tensor, unit: int) -> Rows:
        rows = plan_rows(counts, unit)
        return replace(rows, weights=torch.full_like(rows.weights, len(counts) / len(rows.points)))

    monkeypatch.setattr("flops.engine.rows.plan_rows", plan)


@pytest.mark.parametrize(
    "name",
    ["bernoulli", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gaussian", "neyman"))],
)
def test_row_means_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem()
    row_mean(monkeypatch)
    samples = problem.samples(ALLOCATORS[name], LEAF)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_mean(samples, problem.truth())


def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pilots pooled with the later queries by 1/A_j: counts depend on the noise they weight."""
    write, plan = GroupStep.write, GroupStep.plan

    def estimated(self: Any) -> Any:
        total, found = self.counts, Collector()
        first = torch.full_like(total, self.allocator.pilot)

        def weighted(counts: Tensor, unit: int) -> Rows:
            rows = plan_rows(counts, unit)
            return replace(rows, weights=1 / total[rows.points].double())

        key = self._queries.key
        with monkeypatch.context() as planted:
            planted.setattr("flops.engine.rows.plan_rows", weighted)
            for counts, keyed in ((first, (*key, PILOT)), (total - first, key)):
                part = GroupStep(
                    self.group,
                    self._binding,
                    Fixed(counts),
                    replace(self._signal, budget=int(counts.sum())),
                    replace(self._queries, key=keyed),
                    lambda _: self.runner,
                )
                loop = QueryLoop([part], len(total), 1000, self.runner.ranks)
                while (query := loop.next()) is not None:
                    loop.tell(query, run_query(query))
                write(part, found)
        return found.gradients

    def planned(self: Any) -> Any:
        found = plan(self)
        if found is None and self.allocator.pilot:  # all is asked, and can still be replayed
            self.pooled = estimated(self)
        return found

    def written(self: Any, writer: Any, exact: Any = None, scale: float = 1.0) -> None:
        for parameter, gradient in self.pooled.items():
            writer.take(parameter, gradient)
        self.snr = 0.0

    monkeypatch.setattr(GroupStep, "plan", planned)
    monkeypatch.setattr(GroupStep, "write", written)


@pytest.mark.slow
def test_pooled_pilots_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all traces are alike, raw pilots turn their own noise into counts."""
    problem, allocator = Problem(alike=True), Neyman(pilot=1, shrink=False)
    samples = problem.samples(allocator, LEAF, queries=3, count=500)
    assert_mean(samples, problem.truth(), relative=0.04)
    assert problem.spread > 1.5
    pooled(monkeypatch)  # the length of the gradient falls by about a seventh
    samples = problem.samples(allocator, LEAF, queries=3, count=500)
    with pytest.raises(AssertionError, match="standard errors off"):
        assert_mean(samples, problem.truth(), relative=0.04)


def test_a_dropped_point_is_a_bias_and_is_reported() -> None:
    """`min_queries=0` follows the paper; what it costs can be seen, and is not hidden."""
    problem = Problem()
    group = Group(problem.model, LEAF, 2)
    allocator = Gaussian(min_queries=0, feature="standardised", kernel=False)
    fg = ForwardGradient(problem.model, loss_fn, group, allocator=allocator)
    dropped = 0
    for _ in range(60):
        report = fg.estimate(problem.x, problem.scales)
        (counts,) = report.counts.values()
        assert sum(report.dropped.values()) == int((counts == 0).sum())
        dropped += sum(report.dropped.values())
    assert dropped > 0
