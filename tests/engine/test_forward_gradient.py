"""The engine as a user sees it: fills .grad, accumulates, reports, resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flops import (
    ES,
    SPSA,
    CoverageError,
    FlopsError,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    presets,
)
from flops.allocators import Equal, Fixed
from flops.estimators import Exact
from flops.estimators.likelihood_ratio import _Isotropic
from flops.perturb.random import COMPACT
from flops.presets import mezo
from tests.conftest import (
    ESTIMATORS,
    cosine,
    estimate,
    exact,
    exact_group,
    flat,
    gradients,
    squared,
)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def data(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2)


def test_exact_equals_backpropagation() -> None:
    model, (x, y) = mlp(), data()
    ours, theirs = estimate(model, squared, x, y, exact_group(model)), exact(model, squared, x, y)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_many_queries_point_to_the_gradient(name: str) -> None:
    model, (x, y) = mlp().double(), tuple(t.double() for t in data(3))
    truth = exact(model, squared, x, y)
    queries = 800 if ESTIMATORS[name].shared else 2000  # those of points run in one batch
    group = [Group(model, ESTIMATORS[name], queries)]
    found = estimate(model, squared, x, y, group)
    assert cosine(flat(found), flat(truth)) > 0.9


def test_gradients_accumulate() -> None:
    model, (x, y) = mlp(), data()
    groups = presets.paper(model)
    fg = ForwardGradient(model, squared, groups, seed=3)
    fg.estimate(x, y)
    first = flat(gradients(model))
    second_only = ForwardGradient(model, squared, groups, seed=3)
    second_only.steps = 1
    fg.estimate(x, y)
    both = flat(gradients(model))
    model.zero_grad()
    second_only.estimate(x, y)
    torch.testing.assert_close(both, first + flat(gradients(model)))


@pytest.mark.bits
def test_resumed_run_is_bit_identical() -> None:
    x, y = data(12)

    def train(model: nn.Module, fg: ForwardGradient, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in steps:
            optimizer.zero_grad()
            rows = torch.arange(4) + 4 * (step % 3)
            fg.estimate(x[rows], y[rows], index=rows)
            optimizer.step()

    model = mlp()
    other = copy.deepcopy(model)
    train(model, ForwardGradient(model, squared, seed=5), range(6))
    part = ForwardGradient(other, squared, seed=5)
    train(other, part, range(3))
    resumed = copy.deepcopy(other)
    again = ForwardGradient(resumed, squared, seed=99)
    again.load_state_dict(part.state_dict())
    train(resumed, again, range(3, 6))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_other_groups_or_schema_is_refused() -> None:
    model = mlp()
    fg = ForwardGradient(model, squared)
    with pytest.raises(ValueError, match="schema"):
        fg.load_state_dict({**fg.state_dict(), "schema": 0})
    with pytest.raises(ValueError, match="groups"):
        fg.load_state_dict({**fg.state_dict(), "groups": ["other"]})


def test_report() -> None:
    model, (x, y) = mlp(), data()
    groups = [Group(model, LikelihoodRatio(), queries=8, name="all")]
    report = ForwardGradient(model, squared, groups).estimate(x, y)
    assert report.loss == pytest.approx(squared(model(x), y).mean().item(), rel=1e-5)
    assert report.queries == 48
    assert report.counts["all"].tolist() == [8] * 6
    assert report.forward_equivalents == sum(report.forward_equivalents.parts().values())
    assert report.forward_equivalents.clean == 6
    assert report.snr["all"] >= 0
    assert report.seconds > 0


def passes_of(model: nn.Module) -> list[int]:
    """Rows of each pass of the model, from here on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def test_a_step_of_mezo_is_two_passes_and_one_of_backpropagation_is_one() -> None:
    for groups, rows in ((mezo, [6, 6]), (lambda m: [Group(m, Exact())], [6])):
        model, (x, y) = mlp(), data()
        fg = ForwardGradient(model, squared, groups(model))
        fg.estimate(x, y)  # looks at the structure, too
        seen = passes_of(model)
        report = fg.estimate(x, y)
        assert seen == rows
        assert report.loss == pytest.approx(squared(model(x), y).mean().item(), rel=1e-3)
        assert report.forward_equivalents.clean == 0
        assert report.forward_equivalents == (12 if groups is mezo else 18)


def test_the_clean_pass_is_made_as_soon_as_anything_reads_it() -> None:
    for estimator, allocator in ((SPSA(shared=True), Fixed([2] * 6)), (ES(shared=True), Equal())):
        model, (x, y) = mlp(), data()
        report = ForwardGradient(
            model, squared, [Group(model, estimator, queries=2)], allocator=allocator
        ).estimate(x, y)
        assert report.forward_equivalents.clean == 6
        assert report.loss == pytest.approx(squared(model(x), y).mean().item(), rel=1e-5)


def test_without_a_clean_pass_a_loss_that_is_not_finite_is_still_an_error() -> None:
    for groups in (mezo, lambda m: [Group(m, Exact())]):
        model, (x, y) = mlp(), data()
        fg = ForwardGradient(model, squared, groups(model))
        fg.estimate(x, y)
        with pytest.raises(FlopsError, match=r"finite|NaN|nan"):
            fg.estimate(x, torch.full_like(y, torch.nan))


# Of the paths in turn; what rounds otherwise does so for any number of chunks.
CUTS = [(2, "cpu"), (3, "device"), (7, "cpu"), (1000, "device")]
CUTS += [(chunk, "device" if path == "cpu" else "cpu") for chunk, path in CUTS]


@pytest.mark.parametrize(
    ("chunk", "path"),
    [
        pytest.param(*cut, marks=pytest.mark.bits if cut[0] == 3 else ())
        if i < 4 or cut[0] == 3
        else pytest.param(*cut, marks=pytest.mark.slow)
        for i, cut in enumerate(CUTS)
    ],
    indirect=["path"],
)
@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "exact"])
@pytest.mark.usefixtures("path")
def test_chunk_size_does_not_matter(name: str, chunk: int) -> None:
    model, (x, y) = mlp().double(), tuple(t.double() for t in data())
    counts = [2, 4, 8, 2, 6, 4] if not ESTIMATORS[name].shared else [4] * 6
    options = {"groups": [Group(model, ESTIMATORS[name])], "allocator": Fixed(counts)}
    whole = estimate(model, squared, x, y, **options)
    cut = estimate(model, squared, x, y, chunk=chunk, **options)
    torch.testing.assert_close(flat(cut), flat(whole), rtol=1e-9, atol=1e-11)


def test_parameters_that_share_a_gradient_tensor_stay_apart() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b  # autograd returns one tensor for both

    model = Shifts()
    x, y = torch.randn(6, 2).double(), torch.randn(6, 2).double()
    groups = [Group(model, LikelihoodRatio(1e-6, noise="orthogonal"), queries=2)]
    found = estimate(model, squared, x, y, groups, chunk=2)  # three local VJPs
    truth = exact(model, squared, x, y)
    torch.testing.assert_close(flat(found), flat(truth), rtol=1e-4, atol=1e-6)
    assert model.a.grad is not model.b.grad


def test_exact_refuses_what_cannot_be_backpropagated() -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(super().forward(x).detach().numpy())

    model = Detached(4, 2)
    with pytest.raises(CoverageError, match="cannot be backpropagated"):
        ForwardGradient(model, squared, exact_group(model)).estimate(*data())


def test_a_parameter_that_acts_through_numpy_inside_a_target_is_refused() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.v + torch.from_numpy(x.detach().numpy() * self.w.detach().numpy())

    model = Half()
    fg = ForwardGradient(model, squared, [Group(model, LikelihoodRatio(), queries=4)])
    with pytest.raises(CoverageError, match="'w', but no gradient flows"):
        fg.estimate(torch.randn(4, 2), torch.randn(4, 2))


def test_a_state_that_lacks_a_group_is_refused_whole() -> None:
    model = mlp()
    fg = ForwardGradient(model, squared, seed=1)
    for part in ("allocators", "memory"):
        state = fg.state_dict()
        state[part].popitem()
        with pytest.raises(ValueError, match=part):
            fg.load_state_dict(state)


@pytest.mark.parametrize("baseline", ["clean", "antithetic"])
@pytest.mark.usefixtures("path")
@pytest.mark.bits
def test_noise_that_is_kept_as_bits_gives_the_same_gradient(baseline: str) -> None:
    """So it is in large chunks only."""
    width, x, y = 30_000, torch.randn(6, 2).double(), torch.randn(6, 2).double()
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2, bias=False)).double()
    model[1].requires_grad_(False)
    group = [Group(model, LikelihoodRatio(1e-2, "leaf", baseline), queries=24)]
    small, large = (flat(estimate(model, squared, x, y, group, chunk=chunk)) for chunk in (24, 144))
    assert 24 * width < COMPACT < 72 * width  # a pair has one draw
    torch.testing.assert_close(large, small, rtol=1e-5, atol=1e-6)


def test_what_no_later_product_replays_is_forgotten() -> None:
    model, (x, y) = mlp(), data()
    held: list[int] = []

    class Watching(_Isotropic):
        def write(self, sink, runner, scale=1.0):
            held.append(len(runner.record))
            super().write(sink, runner, scale)

    class Watched(LikelihoodRatio):
        def begin(self, binding, queries, runner):
            return Watching(self, binding, queries, runner)

    groups = [Group(model[i], Watched(1e-3), queries=2) for i in (0, 2, 4)]
    ForwardGradient(model, squared, groups).estimate(x, y)
    assert held[0] > held[1] > held[2] >= 0  # the last group comes first
