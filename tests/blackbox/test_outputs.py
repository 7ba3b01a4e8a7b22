"""Outputs of a black box: the view of its loss, and what is learned from it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.blackbox import OnFailure, Outputs, Tuner
from flops.blackbox.journal import JournalError
from flops.blackbox.vector import Part
from flops.errors import FlopsError
from flops.passes.batch import Batch
from flops.passes.loss_view import loss_view

K = 4
LABELS = torch.arange(9) % K


def losses(outputs: Tensor, points: Tensor) -> Tensor:
    return F.cross_entropy(outputs, LABELS[points], reduction="none")


def columns_of(logits: Tensor, points: Tensor) -> Tensor:
    return torch.cat([losses(logits, points).unsqueeze(1), logits], 1)


OUTPUTS = Outputs(lambda columns: columns[:, 1:], losses)


def test_the_view_is_the_engines() -> None:
    logits, points = torch.randn(5, K), torch.tensor([7, 0, 3, 4, 2])
    view = replace(OUTPUTS, newest=0).view(columns_of(logits, points), points)
    assert view is not None
    batch = Batch(torch.zeros(5, 1), LABELS[points], lambda o, y: losses(o, points))
    engine = loss_view(batch, logits, None)
    assert engine is not None
    for name in ("clean", "residuals", "roots"):
        assert torch.equal(getattr(view, name), getattr(engine, name))
    assert (view.name, view.basis, view.size) == (engine.name, None, K)


def test_rows_that_failed_have_no_outputs() -> None:
    points = torch.tensor([0, 1, 2])
    logits = torch.randn(3, K)
    columns = columns_of(logits, points)
    view = OUTPUTS.view(columns, points)
    columns[1] = torch.nan
    found = OUTPUTS.results(columns, view)
    assert found.outputs is not None
    assert torch.equal(found.outputs[[0, 2]], logits[[0, 2]])
    assert bool(found.outputs[1].isnan().all())
    nothing = OUTPUTS.results(torch.full((2, 1), torch.nan), view)
    assert nothing.outputs is not None
    assert nothing.outputs.shape == (2, K)


@pytest.mark.parametrize("known", [False, True])
def test_outputs_without_a_derivative_count_only_where_the_loss_is_known(known: bool) -> None:
    """A hinge loss is flat at some points, whose outputs will be read later."""
    logits, points = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])

    def hinge(outputs: Tensor, which: Tensor) -> Tensor:
        return (1 - outputs).clamp(min=0).sum(1)

    view = loss_view(Batch(torch.zeros(2, 1), points, hinge), logits, None)
    if known:
        columns = torch.cat([hinge(logits, points).unsqueeze(1), logits], 1)
        view = Outputs(lambda c: c[:, 1:], hinge).view(columns, points)
    assert view is not None
    own, features = view.derivatives(torch.ones(2, 2), points)
    assert own.tolist() == [-1, -1]
    assert features.tolist() == ([[1, 1], [1, 1]] if known else [[0, 1], [1, 0]])


D, N = 24, 9
_source = torch.Generator().manual_seed(4)
COMMON = torch.randn(K, D, generator=_source)
JACOBIANS = COMMON + 0.3 * torch.randn(N, K, D, generator=_source)
START = 0.1 * torch.randn(D, generator=_source)
MEAN = replace(OUTPUTS, newest=0)  # learns the mean Jacobian


def logits_of(parameters: Tensor, points: Tensor) -> Tensor:
    return torch.einsum("qkd,qd->qk", JACOBIANS[points], parameters)


def service(parameters: Tensor, points: Tensor) -> Tensor:
    return columns_of(logits_of(parameters, points), points)


def tuner(**options) -> Tuner:
    given = {
        "estimator": LikelihoodRatio(1e-2, shaping=Shaping()),
        "queries": 5,
        "batch": 4,
        "optimizer": lambda p: torch.optim.SGD(p, 0.1),
        "outputs": MEAN,
        "objective": service,
    }
    return Tuner(START, points=N, **(given | options))


class White(nn.Module):
    """The same objective as a model."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(START.clone())

    def forward(self, points: Tensor) -> Tensor:
        return logits_of(self.part(points), points)


@pytest.mark.parametrize("baseline", ["clean", "antithetic"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_box_that_shows_its_outputs_is_tuned_as_a_model(baseline: str, unbiased: bool) -> None:
    """By the same draws, directions, predictions and gradients."""
    estimator = LikelihoodRatio(1e-2, baseline=baseline, shaping=Shaping(unbiased=unbiased))
    black, white = tuner(estimator=estimator, queries=10), White()
    engine = ForwardGradient(white, losses, Group("part", estimator, 10))
    optimizer = torch.optim.SGD(white.parameters(), 0.1)
    for step in range(6):
        points = black._batch(step)
        optimizer.zero_grad()
        report = engine.estimate(points, points, index=points)
        optimizer.step()
        other = black.step()
        (mine,), (theirs,) = other.shaping.values(), report.shaping.values()
        assert mine.predicted == theirs.predicted
        assert mine.explained_variance == pytest.approx(theirs.explained_variance, rel=1e-3)
        torch.testing.assert_close(black.parameters, white.part.values, rtol=1e-4, atol=1e-5)
    assert float((black.parameters - START).norm()) > 0.1
    assert theirs.predicted > 0.5


def gradient(parameters: Tensor) -> Tensor:
    at = parameters.clone().requires_grad_()
    points = torch.arange(N)
    losses(logits_of(at.expand(N, -1), points), points).mean().backward()
    assert at.grad is not None
    return at.grad


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_rows_that_fail_are_left_out(rate: float) -> None:
    source = torch.Generator().manual_seed(1)

    def failing(parameters: Tensor, points: Tensor) -> Tensor:
        columns, query = service(parameters, points), (parameters != START).any(1)
        columns[query & (torch.rand(len(points), generator=source) < rate)] = torch.nan
        return columns

    found: list[Tensor] = []

    class Kept(torch.optim.SGD):
        def step(self, closure=None) -> None:
            (p,) = self.param_groups[0]["params"]
            found.append(p.grad.clone())

    given = OnFailure(retries=0, share=0.9)
    box = tuner(
        objective=failing,
        batch=N,
        queries=8,
        optimizer=lambda p: Kept(p, 0.0),
        on_failure=given,
    )
    *_, report = box.run(12)
    assert (report.failed > 0) == (rate > 0)
    cosines = F.cosine_similarity(torch.stack(found[4:]), gradient(START).unsqueeze(0))
    assert float(cosines.mean()) > 0.85


def test_it_is_no_setting_to_change(tmp_path) -> None:
    """A journal's queries are those of the one or of the other."""
    path = tmp_path / "journal.db"
    with tuner(journal=path, optimizer=None, learning_rate=0.1) as box:
        box.step()
    with pytest.raises(JournalError, match="outputs was 'mean', is True"):
        tuner(journal=path, optimizer=None, learning_rate=0.1, outputs=OUTPUTS)


@pytest.mark.parametrize("searched", [False, True])
def test_what_is_unreliable_is_not_stepped(searched: bool) -> None:
    """From the second step on: of the first, the reliability is not known."""
    given = {} if searched else {"learning_rate": 0.1}
    shaping = Shaping(withhold=0.999)
    box = tuner(estimator=LikelihoodRatio(1e-2, shaping=shaping), optimizer=None, **given)
    box.step()
    before, asked = box.parameters, box.asked
    report = box.step()
    assert report.shaping["parameters"].withheld
    assert torch.equal(box.parameters, before)
    assert box.asked - asked == 4 * (1 + 5)  # and no rate is searched for


def test_the_first_step_that_is_not_withheld_searches_for_its_rate() -> None:
    """Until then the optimizer's rate is 1, whatever the scale of the parameters."""
    shaping = Shaping(withhold=0.9, warm=0)
    box = tuner(estimator=LikelihoodRatio(1e-2, shaping=shaping), optimizer=None)
    decisions = iter([True, True, True, False])  # of the steps 0 to 3, of which 3 is not due
    box.decide = lambda name, value: next(decisions) if name == "withheld" else value
    for _ in range(3):
        box.step()
    assert torch.equal(box.parameters, START)
    box.step()
    assert 0 < float((box.parameters - START).abs().max()) < 0.5


def test_whether_a_step_is_withheld_is_a_decision() -> None:
    """Another machine, which rounds differently, takes the recorded one."""
    names = []
    for withhold in (0.5, 0.0):
        shaping = Shaping(withhold=withhold)
        box = tuner(estimator=LikelihoodRatio(1e-2, shaping=shaping), learning_rate=0.1)
        made: list[str] = []

        def decide(name: str, value: object, made: list[str] = made) -> object:
            made.append(name)
            return value

        box.decide = decide
        box.step()
        names.append("withheld" in made)
    assert names == [True, False]


def test_a_loss_that_does_not_read_its_outputs_is_said() -> None:
    points = torch.tensor([0, 1])
    columns = torch.cat([torch.ones(2, 1), torch.randn(2, K)], 1)
    other = torch.ones((), requires_grad=True)
    wrong = replace(OUTPUTS, loss=lambda outputs, which: other.expand(len(which)))
    with pytest.raises(FlopsError, match="does not depend on the outputs"):
        wrong.view(columns, points)


def test_a_loss_that_is_flat_at_all_points_is_learned_from_as_a_loss() -> None:
    def hinge(outputs: Tensor, points: Tensor) -> Tensor:
        return (outputs - 100).clamp(min=0).sum(1)

    def flat(parameters: Tensor, points: Tensor) -> Tensor:
        found = logits_of(parameters, points)
        return torch.cat([hinge(found, points).unsqueeze(1), found], 1)

    for newest in (0, 96):
        box = tuner(objective=flat, outputs=Outputs(lambda c: c[:, 1:], hinge, newest=newest))
        with pytest.warns(UserWarning, match="rounding") if not newest else nullcontext():
            box.step()
        assert torch.equal(box.parameters, START)


def test_options_of_outputs() -> None:
    with pytest.raises(FlopsError, match="newest must be at least 0, not -1"):
        replace(OUTPUTS, newest=-1)
    for shaping in (None, Shaping(outputs=False)):
        with pytest.raises(FlopsError, match="shaped noise"):
            tuner(estimator=LikelihoodRatio(1e-2, shaping=shaping))
    free = LikelihoodRatio(1e-2, noise="orthogonal", shaping=Shaping(explore=0.5, decay=0.9))
    box = tuner(estimator=free)
    state = copy.deepcopy(box.state_dict())
    box.step()
    assert box.report is not None
    assert float((box.parameters - state["theta"]).norm()) > 0


def test_many_outputs_are_seen_along_their_residuals() -> None:
    """Directions of the residuals are features, which change: there is no mean Jacobian."""
    many = 40
    wide = torch.randn(N, many, D, generator=torch.Generator().manual_seed(0)) / 5

    def loss(outputs: Tensor, points: Tensor) -> Tensor:
        return F.cross_entropy(outputs, points, reduction="none")

    def box(parameters: Tensor, points: Tensor) -> Tensor:
        found = torch.einsum("qkd,qd->qk", wide[points], parameters)
        return torch.cat([loss(found, points).unsqueeze(1), found], 1)

    found = tuner(objective=box, outputs=Outputs(lambda c: c[:, 1:], loss, newest=0))
    *_, report = found.run(3)
    assert report.shaping["parameters"].predicted == 0
    assert found.memory["sees_outputs"]
    assert "mean_jacobian" not in found.memory
