"""Rows that fail: retried, left out with the right weights, recorded, and too many of them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flops import SPSA, LikelihoodRatio, Shaping
from flops.blackbox import FailureError, OnFailure, Outputs, Tuner
from flops.blackbox.failures import FailureMeter
from flops.blackbox.objective import Candidates, ObjectiveError
from flops.errors import FlopsError
from tests.support.tuned_functions import START, A, N, make, quadratic

NAN = float("nan")


class Recorded(torch.optim.SGD):
    """Remembers the gradient of the last step."""

    seen: Tensor

    def step(self, closure=None):
        (parameter,) = self.param_groups[0]["params"]
        Recorded.seen = parameter.grad.clone()


def gradient(
    answers, estimator, points: int = N, **options
) -> tuple[Tensor, Tuner, list[Candidates]]:
    """Gradient of one step, whose rounds are answered by ``answers(candidates, losses)``."""
    tuner = Tuner(
        START,
        points=points,
        estimator=estimator,
        queries=6,
        optimizer=lambda p: Recorded(p, 1.0),
        on_failure=OnFailure(retries=0, share=1.0),
        **options,
    )
    asked = []
    while tuner.steps == 0:
        candidates = tuner.ask()
        asked.append(candidates)
        tuner.tell(answers(candidates, quadratic(candidates.parameters, candidates.points)))
    return Recorded.seen, tuner, asked


def by_hand(asked: list[Candidates], lost: set[int], sigma: float, pairs: bool) -> Tensor:
    """(1/B') sum_j (1/A'_j) sum_i w z, from the candidates themselves."""
    clean = dict(
        zip(
            asked[0].points.tolist(),
            quadratic(asked[0].parameters, asked[0].points).tolist(),
            strict=True,
        )
    )
    rows = asked[1]
    losses = quadratic(rows.parameters, rows.points)
    means = {}
    for point in clean:
        at = torch.nonzero(rows.points == point).flatten().tolist()
        terms = []
        if pairs:
            for plus, minus in zip(at[::2], at[1::2], strict=True):
                if not {plus, minus} & lost:
                    z = (rows.parameters[plus] - rows.parameters[minus]).double() / (2 * sigma)
                    terms.append((losses[plus] - losses[minus]) / (2 * sigma) * z)
        else:
            for i in set(at) - lost:
                z = (rows.parameters[i] - START).double() / sigma
                terms.append((losses[i] - clean[point]) / sigma * z)
        if terms:
            means[point] = torch.stack(terms).mean(0)
    return torch.stack(list(means.values())).mean(0)


@pytest.mark.parametrize("pairs", [False, True])
def test_rows_that_fail_are_left_out_and_the_others_weigh_more(pairs) -> None:
    estimator = SPSA(0.1) if pairs else LikelihoodRatio(0.1)
    lost = {1, 4, 8, 12, 13, 14, 15, 16, 17}  # the last six are all of one point

    def answers(candidates: Candidates, losses: Tensor) -> Tensor:
        if candidates.kind == "query":
            losses[list(lost)] = NAN
        return losses

    found, tuner, asked = gradient(answers, estimator)
    expected = by_hand(asked, lost, 0.1, pairs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert tuner.report is not None
    assert tuner.report.failed == len(lost)
    whole, _, _ = gradient(lambda _, losses: losses, estimator)
    assert not torch.allclose(found, whole, rtol=0.05)


def test_a_point_without_a_clean_loss_is_not_queried() -> None:
    def answers(candidates: Candidates, losses: Tensor) -> Tensor:
        if candidates.kind == "clean":
            losses[2] = NAN
        return losses

    found, _, asked = gradient(answers, LikelihoodRatio(0.1))
    gone = int(asked[0].points[2])
    assert gone not in asked[1].points.tolist()
    assert len(asked[1]) == 6 * (N - 1)
    kept = Candidates(asked[0].parameters, asked[0].points)
    clean = kept.take(torch.tensor([0, 1, 3, 4]))
    expected = by_hand([clean, asked[1]], set(), 0.1, pairs=False)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


def test_shared_draws_use_the_points_that_arrived_under_both_signs() -> None:
    lost = {0, 6, 7, *range(10, 15)}  # all points of the second draw's first sign
    tuner = Tuner(
        START,
        points=N,
        estimator=SPSA(0.1, shared=True),
        queries=6,
        optimizer=lambda p: Recorded(p, 1.0),
        on_failure=OnFailure(retries=0, share=1.0),
    )
    passes, row = [], 0
    while tuner.steps == 0:
        candidates = tuner.ask()
        losses = quadratic(candidates.parameters, candidates.points)
        for i in range(N):
            losses[i] = NAN if row + i in lost else losses[i]
        row += N
        passes.append((candidates.parameters[0].double(), losses))
        tuner.tell(losses)
    assert row == 6 * N
    terms = []
    for (up, plus), (down, minus) in zip(passes[::2], passes[1::2], strict=True):
        there = ~torch.isnan(plus + minus)
        if bool(there.any()):
            w = float((plus - minus)[there].mean()) / 0.2
            terms.append(w * (up - down) / 0.2)
    assert len(terms) == 2
    expected = torch.stack(terms).mean(0)
    torch.testing.assert_close(Recorded.seen.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["lr", "spsa", "shaped-lr", "shaped-spsa"])
def test_every_estimator_learns_although_a_fifth_of_the_rows_fails(kind) -> None:
    source = torch.Generator().manual_seed(0)

    def answers(parameters: Tensor, points: Tensor) -> Tensor:
        losses = quadratic(parameters, points)
        return torch.where(torch.rand(len(losses), generator=source) < 0.2, NAN, losses)

    policy = OnFailure(retries=0, share=0.9)
    tuner = make(answers, kind, "gaussian", on_failure=policy, queries=12.0)
    list(tuner.run(40))
    everything = torch.arange(N)
    before = float(quadratic(START.expand(N, -1), everything).mean())
    after = float(quadratic(tuner.parameters.expand(N, -1), everything).mean())
    least = float(quadratic(A.double().mean(0).expand(N, -1), everything).mean())
    assert after - least < 0.4 * (before - least)
    assert len(tuner.failures) > 50


def test_a_call_that_raises_is_repeated_then_split_then_left_out() -> None:
    calls: list[list[int]] = []

    def broken(parameters: Tensor, points: Tensor) -> Tensor:
        calls.append(points.tolist())
        if 3 in points.tolist():
            raise ConnectionError("point 3 is broken")
        return quadratic(parameters, points)

    tuner = make(broken, on_failure=OnFailure(retries=1, wait=0.0))
    with pytest.warns(RuntimeWarning, match=r"several rows failed .*broken\), a row alone did not"):
        report = tuner.step()
    assert sorted(map(tuple, calls[:2])) == [tuple(calls[0])] * 2  # the batch, and its retry
    assert calls[2:7].count([3]) == 1
    assert report.failed == 1
    ((round_, _, point, why),) = tuner.failures
    assert (round_, point) == (0, 3)
    assert why == "ConnectionError: point 3 is broken"
    assert 3 not in [p for call in calls[8:] for p in call]


def test_a_loss_that_is_not_finite_is_evaluated_again_and_paid_for_again() -> None:
    rows = []

    def flaky(parameters: Tensor, points: Tensor) -> Tensor:
        rows.extend(points.tolist())
        losses = quadratic(parameters, points)
        if len(rows) <= N:
            losses[2] = float("inf")
        return losses

    tuner, steady = make(flaky), make()
    tuner.step()
    steady.step()
    assert torch.equal(tuner.parameters, steady.parameters)
    assert tuner.failures == []
    assert (len(rows), tuner.spent, tuner.asked) == (7 * N + 1, 7 * N + 1, 7 * N)


def test_no_loss_is_evaluated_again_beyond_the_budget() -> None:
    rows = []

    def flaky(parameters: Tensor, points: Tensor) -> Tensor:
        rows.extend(points.tolist())
        losses = quadratic(parameters, points)
        losses[0] = NAN
        return losses

    tuner = make(flaky, budget=7 * N + 1, on_failure=OnFailure(retries=5))
    list(tuner.run())
    assert len(rows) == tuner.spent <= 7 * N + 1
    assert tuner.steps == 1


@pytest.mark.filterwarnings("ignore:a call with several rows failed")
def test_a_call_that_takes_too_long_is_a_failure() -> None:
    def slow(parameters: Tensor, points: Tensor) -> Tensor:
        if points.tolist() == [3] or (len(points) == N and 3 in points.tolist()):
            time.sleep(1.5)
        return quadratic(parameters, points)

    tuner = make(slow, on_failure=OnFailure(retries=0, timeout=0.3))
    began = time.monotonic()
    tuner.ask()
    tuner.step()
    assert time.monotonic() - began < 20
    ((_, _, point, why),) = tuner.failures
    assert (point, why) == (3, "TimeoutError: no answer within 0.3 s")


def test_too_many_failures_stop_the_run_and_nothing_is_lost(tmp_path) -> None:
    down, rows = [True], []

    def service(parameters: Tensor, points: Tensor) -> Tensor:
        if down[0] and len(rows) >= 3 * 7 * N:
            raise ConnectionError("the service is down")
        rows.extend(points.tolist())
        return quadratic(parameters, points)

    policy = OnFailure(retries=1, wait=0.0)
    tuner = make(service, journal=tmp_path / "run.db", on_failure=policy)
    with pytest.raises(FailureError, match=r"all 5 rows of a round.*ConnectionError.*down"):
        list(tuner.run(until=5))
    assert tuner.steps == 3
    tuner.close()
    down[0] = False
    again = make(service, journal=tmp_path / "run.db", on_failure=policy)
    list(again.run(until=5))
    steady = make()
    list(steady.run(5))
    assert torch.equal(again.parameters, steady.parameters)
    assert len(rows) == again.spent == 5 * 7 * N
    assert again.failures == []
    again.close()


def test_an_objective_that_cannot_work_is_explained_at_once() -> None:
    with pytest.raises(FailureError, match="must return one loss for each of the 1 rows"):
        make(lambda parameters, points: torch.zeros(3), on_failure=OnFailure(1, wait=0.0)).step()
    with pytest.raises(ObjectiveError, match="must return one loss"):
        make(lambda parameters, points: torch.zeros(3), on_failure="raise").step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": -1}, "must not be negative"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"share": 1.5}, "share must be between 0 and 1"),
    ],
)
def test_policies_that_make_no_sense_are_refused(options, message) -> None:
    with pytest.raises(FlopsError, match=message):
        OnFailure(**options)


def test_outputs_are_learned_from_the_rows_that_arrived() -> None:
    """Jacobian memory: without noise in the outputs, fewer rows say nothing else."""
    weights = torch.randn(N, 3, len(START), generator=torch.Generator().manual_seed(0))
    labels, source = torch.arange(N) % 3, torch.Generator().manual_seed(1)

    def service(parameters: Tensor, points: Tensor) -> Tensor:
        logits = torch.einsum("qkd,qd->qk", weights[points], parameters)
        found = F.cross_entropy(logits, labels[points], reduction="none")
        columns = torch.cat([found.unsqueeze(1), logits], 1)
        lost = torch.rand(len(found), generator=source) < 0.2
        columns[lost] = NAN  # also what the loss is computed from
        return columns

    tuner = Tuner(
        START,
        service,
        points=N,
        queries=6,
        estimator=LikelihoodRatio(0.01, shaping=Shaping()),
        outputs=Outputs(
            lambda columns: columns[:, 1:],
            lambda logits, points: F.cross_entropy(logits, labels[points], reduction="none"),
        ),
        optimizer=lambda p: Recorded(p, 1.0),
        on_failure=OnFailure(retries=3, share=0.9),
    )
    list(tuner.run(12))
    at = START.clone().requires_grad_()
    logits = torch.einsum("qkd,d->qk", weights, at)
    F.cross_entropy(logits, labels).backward()
    assert at.grad is not None
    assert float(F.cosine_similarity(Recorded.seen, at.grad, dim=0)) > 0.95


def test_a_share_of_failures_names_its_option() -> None:
    meter = FailureMeter(0.5)
    meter.check(40, 39, "down")  # too few rows to judge by
    meter.close(40, 10)
    with pytest.raises(FailureError, match=r"41 of the last 80 rows failed, more than 0.5 \(on"):
        meter.check(40, 31, "down")
