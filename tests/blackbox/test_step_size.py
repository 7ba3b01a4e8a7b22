"""The step size that a run searches for itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flops import SPSA, LikelihoodRatio
from flops.blackbox import Tuner
from flops.blackbox.evaluator import BudgetError
from flops.blackbox.step_size import FRACTION, LineSearch, StepSize, due


def searched(losses, first: float) -> tuple[float, list[float]]:
    """The rate that a search finds on f(eta), and the rates that it has tried."""
    search = LineSearch(first)
    rates = search.rates()
    rate = next(rates)
    while True:
        try:
            rate = rates.send(losses(rate))
        except StopIteration as found:
            return found.value, list(search.tried)


@pytest.mark.parametrize("first", [1e-4, 0.02, 1.0, 30.0])
def test_a_search_ends_near_the_minimum_from_far_away(first) -> None:
    best, tried = searched(lambda rate: torch.full((4,), (rate - 1.0) ** 2 - 1.0).double(), first)
    if first > 16:  # its first search only turns back; the next ones go on
        assert best < first
    else:
        assert 0.4 < best < 1.9
    assert len(tried) <= 10


def test_a_direction_that_is_bad_at_every_length_lowers_the_rate_a_little() -> None:
    best, tried = searched(lambda rate: torch.full((4,), rate).double(), 1.0)
    assert best == 0.25
    assert len(tried) == 4


def test_differences_within_their_noise_change_nothing() -> None:
    source = torch.Generator().manual_seed(0)

    def noise(_: float) -> Tensor:
        return torch.randn(16, generator=source).double()

    found = [searched(noise, 1.0)[0] for _ in range(40)]
    assert 0.4 < torch.tensor(found).log().mean().exp() < 2.5
    assert sum(0.2 < rate < 5 for rate in found) > 25


def test_a_step_too_short_to_change_an_error_is_lengthened() -> None:
    best, _ = searched(lambda rate: torch.full((4,), -1.0 if rate > 3 else 0.0).double(), 0.1)
    assert 3 < best < 15


def test_rates_move_by_the_geometric_mean() -> None:
    sizes = StepSize(0.01)
    assert sizes.guess == 0.01
    assert sizes.update(0.8) == pytest.approx(0.8 * FRACTION)
    assert sizes.guess == pytest.approx(0.8)
    assert sizes.update(0.2) == pytest.approx((0.8 * 0.2) ** 0.5 * FRACTION)
    again = StepSize(0.01)
    again.load_state_dict(sizes.state_dict())
    assert again.guess == sizes.guess
    assert [step for step in range(40) if due(step)] == [0, 1, 2, 4, 8, 16, 32]


CENTRES = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)) + 2


def made(scale: float = 1.0, unit: float = 1.0, **options) -> tuple[Tuner, list[int]]:
    rows: list[int] = []

    def objective(parameters: Tensor, points: Tensor) -> Tensor:
        rows.append(len(points))
        return unit * (parameters / scale - CENTRES[points]).square().sum(1)

    given = {"estimator": LikelihoodRatio(0.01 * scale), "queries": 6, "batch": 8} | options
    return Tuner(torch.zeros(6), objective, points=12, **given), rows


def test_every_row_of_a_search_is_charged() -> None:
    tuner, rows = made()
    list(tuner.run(9))
    assert tuner.asked == tuner.spent == sum(rows)
    plain, others = made(learning_rate=0.1)
    list(plain.run(9))
    assert sum(rows) > sum(others)
    least = float((CENTRES.mean(0) - CENTRES).square().sum(1).mean())
    before = float(CENTRES.square().sum(1).mean())
    after = float((tuner.parameters - CENTRES).square().sum(1).mean())
    assert after - least < 0.5 * (before - least)


def test_it_does_not_depend_on_the_scale_of_parameters_or_losses() -> None:
    found = []
    for scale, unit in ((1.0, 1.0), (2.0**-10, 2.0**-8), (2.0**12, 2.0**9)):
        tuner, rows = made(scale, unit)
        list(tuner.run(20))
        assert tuner.step_size is not None
        found.append((tuner.step_size.rate / scale, tuner.parameters / scale, sum(rows)))
    for rate, parameters, rows in found[1:]:
        assert rate == pytest.approx(found[0][0], rel=1e-3)
        torch.testing.assert_close(parameters, found[0][1], rtol=1e-2, atol=1e-2)
        assert rows == found[0][2]


@pytest.mark.bits
def test_a_run_resumed_within_a_search_is_the_same_run(tmp_path) -> None:
    whole, rows = made()
    list(whole.run(6))
    left = [40]

    def breaks(objective):
        def evaluate(parameters: Tensor, points: Tensor) -> Tensor:
            left[0] -= len(points)
            if left[0] < 0:
                left[0] = 57
                raise ConnectionError
            return objective(parameters, points)

        return evaluate

    starts = 0
    while True:
        starts += 1
        tuner, _ = made(journal=tmp_path / "run.db", on_failure="raise")
        tuner.objective = breaks(tuner.objective)
        try:
            list(tuner.run(until=6))
            break
        except ConnectionError:
            pass
        finally:
            tuner.close()
    assert starts > 5
    assert torch.equal(tuner.parameters, whole.parameters)
    assert tuner.spent == sum(rows)


def test_a_search_is_never_begun_that_the_budget_does_not_cover() -> None:
    tuner, rows = made(budget=300)
    list(tuner.run())
    assert sum(rows) <= 300
    with pytest.raises(BudgetError):
        tuner.step()


def test_shared_pairs_search_without_clean_losses() -> None:
    tuner, rows = made(estimator=SPSA(0.01, shared=True))
    list(tuner.run(5))
    assert tuner.spent == sum(rows)
    assert tuner.step_size is not None
    assert tuner.step_size.rate is not None
