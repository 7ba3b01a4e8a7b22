"""One step from queries to estimate, report and memory, written out with its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flops.subspace.config import Shaping
from flops.subspace.measurements import Design
from flops.subspace.moments import Moments, leading, learn
from flops.subspace.regression import (
    Regression,
    StepSums,
    coherence,
    decay,
    explained_by_site,
    explained_variance,
    exploration,
    regress,
)
from flops.subspace.step import ShapedStep, teachers
from tests.support.shaped_cases import SIZE, Case, case

AVERAGE, RECENT, KEEP = 0.9, 0.8, 0.98  # decays of running averages, and of moments
COUNTS = torch.tensor([9, 6, 7, 10])
LOSSES = torch.ones(SIZE).double()


def memory_of(of: Case, **more: Any) -> dict[str, Any]:
    """As after some steps."""
    return {
        "moments": [m.to_memory() for m in of.moments],
        "shaped_steps": 9,
        "explained_variance": 0.4,
        "best": 0.5,
        "ridge": 0.3,
        **more,
    }


def begin(of: Case, memory: dict[str, Any], shaping: Shaping | None = None) -> ShapedStep:
    view = of.view if memory.get("sees_outputs") else None
    return ShapedStep(of.space, shaping or Shaping(), memory, COUNTS, LOSSES, view=view)


def measure(of: Case, step: ShapedStep) -> tuple[Tensor, Tensor, Tensor]:
    """Points of all draws, and exact derivatives of losses and of features."""
    draws = COUNTS // of.space.unit
    points = torch.repeat_interleave(torch.arange(SIZE), draws)
    number = torch.cat([torch.arange(int(n)) for n in draws])
    z = step.rows(points, number)
    along = (z * of.gradients[points]).sum(1)
    features = (of.jacobians[points] @ z.unsqueeze(2)).squeeze(2)
    return (
        points,
        step.scaled(points, number, along),
        step.scaled(points, number, features),
    )


def sums_of(design: Design) -> Any:
    """What the outlook reads of a step's sums."""
    prior, counts = SIZE * design.prior.mean(0), [SIZE, design.draws.sum()]
    return SimpleNamespace(points=SIZE, prior=prior, expected=SIZE * design.expected, counts=counts)


def running(old: float, new: float) -> float:
    return AVERAGE * old + (1 - AVERAGE) * new


def share_of_signal(found: Regression, design: Any, old: tuple[float, float] | None) -> Any:
    sums: Any = coherence(StepSums.of(design, found))
    if old is not None:
        sums = tuple(running(a, b) for a, b in zip(old, sums, strict=True))
    return sums, max(0.0, 1 - sums[1] / sums[0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("steps", [8, 9])
@pytest.mark.parametrize("old", [None, (3.0, 1.0)])
def test_a_step_from_losses(masked: bool, steps: int, old: Any) -> None:
    """Every fourth step searches for a ridge."""
    of = case(masked)
    sums = {} if old is None else {"coherence": old, "reliability": (5.0, 2.0)}
    memory = memory_of(of, shaped_steps=steps, explained_by_site=[0.2, 0.9], **sums)
    step = begin(of, memory)
    points, w, _ = measure(of, step)
    step.collect(w, points)
    share = exploration(Shaping(), 0.4)
    iso = (COUNTS * share).round().long()
    design = Design(of.space, leading(of.space.grids, of.moments, 9), iso, COUNTS)
    measurements = design.measurements(points, w, None)
    found = regress(measurements, 0.3, tune=steps % 4 == 0)
    sums, eta = share_of_signal(found, measurements, old)
    delta = found.inside + found.tail + eta * found.correction
    torch.testing.assert_close(step.delta, delta * of.mask)
    whole = StepSums.of(measurements, found)
    now, spread = explained_variance(whole)
    after = running(0.4, now)
    keep, best = decay(Shaping(), now, spread, after, 0.5)
    assert memory["best"] == pytest.approx(best)
    assert memory["explained_variance"] == pytest.approx(after)
    assert memory["ridge"] == pytest.approx(found.ridge)
    assert memory["coherence"] == pytest.approx(sums)
    assert memory["shaped_steps"] == steps + 1
    assert memory["sees_outputs"] is False
    moments = learn(measurements, found, of.moments, keep, steps, LOSSES)
    for saved, expected in zip(memory["moments"], moments, strict=True):
        again = Moments.from_memory(saved, torch.double)
        for a, b in zip(vars(again).values(), vars(expected).values(), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                matrix, other = (
                    x.matrix if x.matrix is not None else (x.vectors * x.values) @ x.vectors.T
                    for x in (a, b)
                )
                torch.testing.assert_close(matrix, other)
                assert a.trace == pytest.approx(b.trace)
    # The error of the posterior mean is held out; that of the correction is noise.
    error = (1 - eta) ** 2 * found.error + eta**2 * found.error * 16 / iso
    torch.testing.assert_close(step.shaped.error, error)
    torch.testing.assert_close(step.shaped.energy, found.energy)
    assert step.shaped.dimensions == 16
    sums = (float(found.energy.sum()), float(error.sum()))
    if old is not None:
        sums = tuple(RECENT * a + (1 - RECENT) * b for a, b in zip((5.0, 2.0), sums, strict=True))
    reliability = max(0.0, 1 - sums[1] / sums[0]) ** 0.5
    report = step.shaped.report
    assert report.reliability == pytest.approx(reliability)
    assert memory["reliability"] == pytest.approx(sums)
    assert report.explained_variance == pytest.approx(after)
    assert report.correction == pytest.approx(eta)
    assert report.explore == pytest.approx(int(iso.sum()) / int(COUNTS.sum()))
    assert report.k == pytest.approx(float((COUNTS - iso).double().mean()))
    assert report.predicted == 0
    assert not report.withheld
    sites = [running(a, b) for a, b in zip((0.2, 0.9), explained_by_site(whole), strict=True)]
    assert [s.explained_variance for s in report.sites] == pytest.approx(sites)
    assert memory["explained_by_site"] == pytest.approx(sites)
    per_site = [
        float(measurements.measured[:, design.known.site == s].sum()) / SIZE for s in range(2)
    ]
    assert [s.k for s in report.sites] == pytest.approx(per_site)
    assert [s.site for s in report.sites] == ["a", "b"]
    place = torch.cat([torch.arange(int(n)) for n in COUNTS])
    assert torch.equal(step.isotropic, place < iso[points])


def test_a_step_from_outputs_measures_what_it_predicts() -> None:
    of = case()
    whole = [Moments.empty(g, torch.double) for g in of.space.grids]
    memory = memory_of(of, sees_outputs=True, moments=[m.to_memory() for m in whole])
    first = begin(of, memory)
    points, w, features = measure(of, first)
    first.collect(w, points, features)
    assert first.shaped.report.predicted == 0  # there was nothing to predict from
    assert memory["sees_outputs"] is True
    mean = memory["mean_jacobian"]
    assert mean["name"] == of.view.name
    second = begin(of, memory)
    predicted = second._design.predicted
    assert predicted is not None
    used = predicted.any(1)
    assert bool(used.any())
    guess = of.view.residuals @ mean["values"]
    share = (predicted * guess).sum(1).square() / guess.square().sum(1)
    assert float(share[used].min()) > 0.01  # it is a part of that guess
    points, w, features = measure(of, second)
    second.collect(w, points, features)
    assert second.shaped.report.predicted == pytest.approx(float(used.double().mean()))
    assert float((memory["mean_jacobian"]["values"] - mean["values"]).norm()) > 0


def again(of: Case, memory: dict[str, Any], points: Tensor, w: Tensor) -> Tensor:
    """Estimate of an isotropic step, given the directions and the mean Jacobian that it learned."""
    moments = [Moments.from_memory(m, torch.double) for m in memory["moments"]]
    known = leading(of.space.grids, moments, 0)
    design = Design(of.space, known, COUNTS, COUNTS)
    guess = of.view.residuals @ memory["mean_jacobian"]["values"]
    norms = guess.norm(dim=1)
    measurements = replace(
        design.measurements(points, w, None),
        predicted=guess / norms.unsqueeze(1),
        a=norms,
        features=None,
    )
    found = regress(measurements, 1.0, tune=True)
    _, eta = share_of_signal(found, measurements, None)
    return found.inside + found.tail + eta * found.correction


@pytest.mark.parametrize("unbiased", [False, True])
def test_an_isotropic_step(unbiased: bool) -> None:
    """From losses, or unbiased: the mean of w z. From outputs: again, with its own directions."""
    of = case()
    shaping = Shaping(unbiased=unbiased)
    for outputs in (False, True):
        memory: dict[str, Any] = {"sees_outputs": True} if outputs else {}
        step = begin(of, memory, replace(shaping, warm=1))
        points, w, features = measure(of, step)
        step.collect(w, points, features if outputs else None)
        z = step.rows(points, torch.cat([torch.arange(int(n)) for n in COUNTS]))
        mean = torch.zeros(SIZE, 16).double().index_add_(0, points, w.unsqueeze(1) * z)
        report = step.shaped.report
        assert report.k == 0
        assert report.explore == 1
        assert report.explained_variance == 0
        assert [s.explained_variance for s in report.sites] == [0, 0]
        assert "ridge" not in memory
        assert "explained_variance" not in memory
        assert memory["shaped_steps"] == 1
        if outputs and not unbiased:
            assert math.isnan(report.reliability)
            assert step.shaped.left == ()
            assert "reliability" not in memory
            torch.testing.assert_close(step.delta, again(of, memory, points, w))
        else:
            torch.testing.assert_close(step.delta, mean / COUNTS.unsqueeze(1))
            squares = torch.zeros(SIZE).double().index_add_(0, points, w.square()) / COUNTS
            torch.testing.assert_close(step.shaped.energy, squares)
            torch.testing.assert_close(step.shaped.error, squares * 16 / COUNTS)
            assert report.reliability == 0  # 16 dimensions, fewer draws: nothing but noise
            assert report.correction == 1


@pytest.mark.parametrize("masked", [False, True])
def test_isotropic_steps_add_up(masked: bool) -> None:
    """Before the first directions nothing is forgotten."""
    of = case(masked)
    memory = memory_of(of, shaped_steps=2)
    step = begin(of, memory)
    points, w, _ = measure(of, step)
    step.collect(w, points)
    design = Design(of.space, leading(of.space.grids, of.moments, 0), COUNTS, COUNTS)
    measurements = design.measurements(points, w, None)
    found = regress(measurements, 0.3, tune=False)
    torch.testing.assert_close(step.delta, found.outside * of.mask)
    expected = learn(measurements, found, of.moments, 1.0, 2, LOSSES)
    for saved, m in zip(memory["moments"], expected, strict=True):
        again = Moments.from_memory(saved, torch.double)
        for a, b in ((again.positions, m.positions), (again.channels, m.channels)):
            if a is not None and b is not None:
                assert a.trace == pytest.approx(b.trace)
                torch.testing.assert_close(a.matrix, b.matrix)
                torch.testing.assert_close(a.values, b.values)
    assert memory["best"] == 0.5
    assert memory["explained_variance"] == 0.4


@pytest.mark.parametrize(
    ("explore", "counts", "iso"),
    [
        (None, [9, 6, 7, 10], [4, 3, 3, 5]),  # 0.46 of them
        (0.01, [9, 6, 7, 10], [1, 1, 1, 1]),  # at least one of each kind
        (0.99, [9, 6, 7, 2], [8, 5, 6, 1]),
        (0.5, [0, 1, 2, 5], [0, 1, 1, 2]),
        (1, [9, 6, 7, 10], [9, 6, 7, 10]),
        (0.5, [1, 1, 1, 1], [1, 1, 1, 1]),
        (0.01, [20, 20, 20, 14], [7, 7, 7, 1]),  # no more than 13 directions
    ],
)
def test_isotropic_draws(explore: float | None, counts: list[int], iso: list[int]) -> None:
    of = case()
    memory = memory_of(of, explained_variance=0.4)
    step = ShapedStep(of.space, Shaping(explore=explore), memory, torch.tensor(counts), LOSSES)
    assert step._design.iso.tolist() == iso
    pairs = replace(of.space, unit=2)
    twice = ShapedStep(pairs, Shaping(explore=explore), memory, 2 * torch.tensor(counts), LOSSES)
    assert twice._design.iso.tolist() == iso


@pytest.mark.parametrize(
    ("memory", "shaping", "isotropic"),
    [
        ({"shaped_steps": 3}, Shaping(), True),
        ({"shaped_steps": 4}, Shaping(), False),
        ({"shaped_steps": 0, "sees_outputs": True}, Shaping(), True),
        ({"shaped_steps": 1, "sees_outputs": True}, Shaping(), False),
        ({"shaped_steps": 6}, Shaping(warm=7), True),
        ({"shaped_steps": 7}, Shaping(warm=7), False),
        ({}, Shaping(warm=0), False),
    ],
)
def test_the_first_steps_are_isotropic(
    memory: dict[str, Any], shaping: Shaping, isotropic: bool
) -> None:
    of = case()
    known = {} if shaping.warm == 0 else {"moments": [m.to_memory() for m in of.moments]}
    step = begin(of, {**memory, **known}, shaping)
    assert torch.equal(step._design.iso, COUNTS) == isotropic


def test_decisions_of_another_machine_are_used() -> None:
    of = case()
    seen: dict[str, Any] = {}

    def record(name: str, value: Any) -> Any:
        seen[name] = value
        return value

    ShapedStep(of.space, Shaping(), memory_of(of), COUNTS, LOSSES, record)
    kept = seen["directions"]
    assert set(kept) == {"warm", "iso", "known"}
    other = {**kept, "iso": COUNTS - 1, "known": {**kept["known"], "rest": 0.125}}
    step = ShapedStep(of.space, Shaping(), memory_of(of), COUNTS, LOSSES, lambda *_: other)
    assert torch.equal(step._design.iso, COUNTS - 1)
    assert step._design.known.rest == 0.125


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("now", [0.1, 0.9, 3.0])
def test_what_more_queries_would_leave_out(unit: int, now: float) -> None:
    of = case()
    space = replace(of.space, unit=unit)
    step = ShapedStep(space, Shaping(), memory_of(of), unit * COUNTS, LOSSES)
    energy = sorted(of.known.energy.tolist(), reverse=True)

    def outside(queries: int) -> float:
        draws = queries // unit
        iso = min(max(1, round(draws * exploration(Shaping(), 0.4))), draws)
        return max(1e-3, 1 - sum(energy[: draws - iso]))

    here = outside(round(float((unit * COUNTS).double().mean())))
    scale, beyond = min(1.0, now / here), max(0.0, now - here)
    left = step._left(now, sums_of(step._design))
    assert left == pytest.approx([scale * outside(n) + beyond for n in range(65)])
    assert left[0] == left[unit] == scale + beyond  # nothing is measured yet


def test_a_prediction_takes_the_place_of_the_last_direction() -> None:
    of = case()
    step = begin(of, memory_of(of))
    step._design.expected = 0.3
    energy = sorted(of.known.energy.tolist(), reverse=True)
    left = step._left(1e-4, sums_of(step._design))
    base = left[0]  # all is left
    share = exploration(Shaping(), 0.4)
    for queries in range(2, 20):
        count = queries - max(1, round(queries * share))
        kept = sum(energy[: count - 1]) + max(0.3, energy[count - 1])
        assert left[queries] / base == pytest.approx(max(1e-3, 1 - kept))


def test_reliability_is_of_sums_and_finite() -> None:
    of = case()
    step = begin(of, memory_of(of))
    assert step._reliability(4.0, 0.76) == pytest.approx(0.9)
    assert step._reliability(4.0, 12.0) == pytest.approx(
        (1 - (RECENT * 0.19 + (1 - RECENT) * 3)) ** 0.5
    )
    kept = step._memory["reliability"]
    assert step._reliability(math.inf, 4.0) == 0
    assert step._memory["reliability"] == kept
    step._memory["reliability"] = (0.0, 0.0)
    assert step._reliability(0.0, 0.0) == 0
    assert step._reliability(4.0, 36.0) == 0


@pytest.mark.parametrize(
    ("shaping", "signal", "reliability", "withheld"),
    [
        (Shaping(withhold=0.2), None, 0.19, True),
        (Shaping(withhold=0.2), None, 0.2, False),
        (Shaping(withhold=0.2), 1.0, 0.21, False),
        (Shaping(withhold=0.2), 0.99, 0.21, True),
        (Shaping(withhold=0.2), 0.5, 0.49, True),
        (Shaping(withhold=0.2), 0.5, 0.5, False),
        (Shaping(withhold=0.2, unbiased=True), 0.5, 0.1, False),
        (Shaping(), 0.5, 0.0, False),
    ],
)
def test_what_is_withheld(
    shaping: Shaping, signal: float | None, reliability: float, withheld: bool
) -> None:
    """Below the option; or below 2.5 times as much, if the batch's gradient is below its noise."""
    of = case()
    memory = memory_of(of) if signal is None else memory_of(of, signal=signal)
    assert begin(of, memory, shaping)._withheld(reliability) == withheld


def test_points_teach_the_moments_by_their_outputs_if_there_is_room() -> None:
    """For 2^22 values: two directions of residuals of every point, on the largest replica."""
    assert teachers((64,), 1 << 15) == 64
    assert teachers((64,), (1 << 15) + 1) == 0
    assert teachers((8, 64), 1 << 15) == 72
    assert teachers((8, 65), 1 << 15) == 0
