"""sigma="auto": between rounding and curvature, for outputs of any size."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.estimators import automatic_sigma
from flops.estimators.automatic_sigma import EVERY, chosen, relative_errors, rounding
from tests.conftest import cosine, exact, flat, gradients, squared


class Bent(nn.Module):
    """Outputs of any size, and a loss that bends at their scale, on top of a constant."""

    def __init__(self, size: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.target = nn.Linear(4, 6).to(dtype)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return 10 + torch.sin(self.target(x * self.size) / self.size).sum(1)


def take(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def run(
    size: float, dtype: torch.dtype, steps: int, sigma: float | str = "auto"
) -> tuple[ForwardGradient, float]:
    """The engine after some steps at the same parameters, and the mean cosine of the last ones."""
    torch.manual_seed(2)
    model = Bent(size, dtype)
    with torch.no_grad():
        model.target.bias.mul_(size)
    x, y = torch.randn(8, 4, dtype=dtype), torch.zeros(8, dtype=dtype)
    estimator = LikelihoodRatio(sigma)  # type: ignore[arg-type]
    fg = ForwardGradient(model, take, Group(model.target, estimator, 60, name="g"))
    truth = flat(exact(copy.deepcopy(model).double(), take, x.double(), y.double()))
    found = []
    for _ in range(steps):
        model.zero_grad()
        fg.estimate(x, y)
        found.append(cosine(flat(gradients(model)).double(), truth))
    return fg, sum(found[-3:]) / 3


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")  # of the sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-2, 1.0, 300.0])
def test_it_is_as_good_as_the_best_of_a_sweep(size: float, dtype: torch.dtype) -> None:
    fg, found = run(size, dtype, 3)
    eps = torch.finfo(dtype).eps
    best = max(run(size, dtype, 3, size * eps**power)[1] for power in (0.75, 0.5, 0.4, 0.3, 0.2))
    assert found > 0.97 * best
    assert fg.memory["g"]["sigma"][0] / size < 3  # below the bend


def test_the_search_is_repeated_after_many_steps() -> None:
    assert chosen({}, 7) == (None, True)
    assert chosen({"sigma": (1e-2, 0)}, 0) == (1e-2, False)  # the rest after a pilot
    assert chosen({"sigma": (1e-2, 0)}, EVERY - 1) == (1e-2, False)
    assert chosen({"sigma": (1e-2, 0)}, EVERY) == (1e-2, True)


def test_the_error_of_a_query_is_the_even_part_over_the_odd_one() -> None:
    odd, even = torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([[0.5, 1.0], [0.0, 1.0]])
    assert relative_errors(odd, even) == [pytest.approx(0.1), math.inf]


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_a_loss_without_any_change_leaves_sigma_as_it_is() -> None:
    """A head of zeros hides all that is before it, in the first step; then it is searched again."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    nn.init.zeros_(model[2].weight)
    group = Group(model[0], LikelihoodRatio("auto"), 4, name="g")
    rest = Group(model[2], LikelihoodRatio(1e-6), 4)
    fg = ForwardGradient(model, squared, [group, rest])
    x, y = torch.randn(4, 4).double(), torch.randn(4, 2).double()
    fg.estimate(x, y)
    assert "sigma" not in fg.memory["g"]
    nn.init.normal_(model[2].weight)
    fg.estimate(x, y)
    sigma, step = fg.memory["g"]["sigma"]
    assert sigma < 1e-2
    assert step == 1
    fg.steps = 1 + EVERY
    nn.init.zeros_(model[2].weight)
    fg.estimate(x, y)
    assert fg.memory["g"]["sigma"] == (sigma, 1 + EVERY)


def test_noise_that_is_far_too_large_does_not_fail_the_step() -> None:
    model = Bent(1.0, torch.float64)
    group = Group(model.target, LikelihoodRatio("auto"), 4, name="g")

    def log(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - 10 + 0.5).log()  # not a number beyond some noise

    with torch.no_grad():
        model.target.weight.zero_()
        model.target.bias.fill_(0.01)
    ForwardGradient(model, log, group).estimate(torch.randn(4, 4).double(), torch.zeros(4))


def test_its_queries_are_charged_and_only_in_steps_that_search() -> None:
    torch.manual_seed(0)
    model = Bent(1.0, torch.float64)
    x, y = torch.randn(8, 4).double(), torch.zeros(8).double()
    estimator = LikelihoodRatio("auto", baseline="antithetic")
    fg = ForwardGradient(model, take, Group(model.target, estimator, 6, name="g"))
    cost = []
    for step in range(3):
        report = fg.estimate(x, y)
        rows = report.queries - 8 * 6
        assert rows % (4 * 5 * 2) == 0  # points, sigmas, signs
        assert (rows > 0) == (step == 0)
        assert int(report.counts["g"].sum()) == 8 * 6
        cost.append(report.forward_equivalents.queries / report.queries)
    assert cost == pytest.approx([cost[0]] * 3)  # each row like any other


def test_it_resumes_bit_identically() -> None:
    torch.manual_seed(3)
    model = Bent(1.0, torch.float64)
    x, y = torch.randn(8, 4).double(), torch.zeros(8).double()

    def engine() -> ForwardGradient:
        group = Group(model.target, LikelihoodRatio("auto", shaping=Shaping()), 6, name="g")
        return ForwardGradient(model, take, group, seed=5)

    one = engine()
    for _ in range(3):
        one.estimate(x, y)
    two = engine()
    two.load_state_dict(one.state_dict())
    for fg in (one, two):
        model.zero_grad()
        fg.estimate(x, y)
        found = flat(gradients(model))
        if fg is one:
            first = found
    assert torch.equal(first, found)


def test_it_needs_derivatives() -> None:
    with pytest.raises(ValueError, match='sigma="auto" needs directional derivatives'):
        LikelihoodRatio("auto", baseline="none")
    with pytest.raises(ValueError, match="sigma must be a number, None or 'auto', not 'best'"):
        LikelihoodRatio("best")  # type: ignore[arg-type]


def test_the_noise_is_the_same_at_all_sigmas_and_for_all_chunks() -> None:
    """A linear loss has the same derivative along it at every sigma, however rows are split."""
    torch.manual_seed(4)
    x, y = torch.randn(8, 4).double(), torch.zeros(8).double()
    seen: dict[int, list[Tensor]] = {}

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(4, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.target(x).sum(1)

    original = automatic_sigma.relative_errors
    for chunk in (3, 7, 1000):
        found = seen[chunk] = []

        def record(odd: Tensor, even: Tensor, found: list[Tensor] = found) -> list[float]:
            found.append(odd)
            return original(odd, even)

        model = Linear()
        group = Group(model.target, LikelihoodRatio("auto"), 4, name="g")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(automatic_sigma, "relative_errors", record)
            ForwardGradient(model, take, group, chunk=chunk).estimate(x, y)
    ratios = seen[1000][0] / (seen[1000][0][:, :1])
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-3, atol=0)
    for chunk in (3, 7):
        torch.testing.assert_close(seen[chunk][0], seen[1000][0], rtol=1e-3, atol=0)


@pytest.mark.parametrize(("queries", "draws"), [(4, 8), (16, 32), (200, 128)])
def test_a_staircase_is_searched_with_at_most_a_quarter_of_the_queries(
    queries: int, draws: int
) -> None:
    """Rows of a round: few draws, then many, each at five sigmas with both signs."""
    torch.manual_seed(5)
    x, y = torch.randn(8, 4).double(), torch.zeros(8).double()

    class Stairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(4, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            return (self.target(x) * 20).round().sum(1)

    model, rows = Stairs(), list[int]()
    original = automatic_sigma.relative_errors

    def record(odd: Tensor, even: Tensor) -> list[float]:
        rows.append(len(odd))
        return original(odd, even)

    group = Group(model.target, LikelihoodRatio("auto"), queries, name="g")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic_sigma, "relative_errors", record)
        ForwardGradient(model, take, group).estimate(x, y)
    assert set(rows) == {4, draws}


def test_rounding_is_that_of_the_numbers_themselves() -> None:
    torch.manual_seed(6)
    exact = torch.randn(100_000, dtype=torch.float64) * 3
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        lost = exact.to(dtype).double() - exact
        assert rounding(exact.to(dtype)) == pytest.approx(float(lost.square().mean()), rel=0.02)
    assert rounding(torch.zeros(3)) == 0


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")  # of the sweep
def test_noise_that_is_rounded_when_it_is_added_is_seen() -> None:
    """Rounding is symmetric, so a loss in single precision right behind it does not show it."""
    torch.manual_seed(7)
    model = nn.Linear(4, 10).bfloat16()
    with torch.no_grad():
        model.weight.mul_(8)
    x, y = torch.randn(32, 4).bfloat16(), torch.randint(10, (32,))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), targets, reduction="none")

    truth = flat(exact(copy.deepcopy(model).float(), loss_fn, x.float(), y)).double()

    def quality(sigma: float | str) -> float:
        group = Group(model, LikelihoodRatio(sigma), 40, name="g")  # type: ignore[arg-type]
        found = []
        for seed in range(3):
            model.zero_grad()
            ForwardGradient(model, loss_fn, group, seed=seed).estimate(x, y)
            found.append(cosine(flat(gradients(model)).double(), truth))
        return sum(found) / 3

    best = max(quality(sigma) for sigma in (0.01, 0.03, 0.1, 0.3, 1.0))
    assert quality("auto") > 0.97 * best
    assert quality(0.003) < 0.9 * best
