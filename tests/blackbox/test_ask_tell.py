"""Answers that come late, out of order and in parts."""

from __future__ import annotations

import random

import pytest
import torch

from flops.blackbox import OnFailure, Tuner
from flops.blackbox.objective import Candidates, ObjectiveError
from flops.errors import FlopsError
from tests.support.tuned_functions import KINDS, START, N, make, quadratic


def answers(candidates: Candidates) -> torch.Tensor:
    return quadratic(candidates.parameters, candidates.points)


@pytest.mark.parametrize("kind", ["lr", "shaped-lr"])
@pytest.mark.parametrize("kept", [False, True])
def test_answers_in_parts_and_in_any_order_make_the_same_run(kind, kept, tmp_path) -> None:
    journal = tmp_path / "run.db" if kept else None
    tuner, whole, chance = make(None, kind, journal=journal), make(kind=kind), random.Random(0)
    late: list[Candidates] = []
    while tuner.steps < 4:
        parts = tuner.ask().split(4)
        chance.shuffle(parts)
        for part in parts:
            left = len(tuner.ask())
            tuner.tell(answers(part), part)
            if tuner.waiting and tuner.ask().round == part.round:
                assert len(tuner.ask()) == left - len(part)
        for old in late:  # once more, when nobody waits for it
            tuner.tell(answers(old) + 100, old)
        late = parts
    list(whole.run(4))
    assert torch.equal(tuner.parameters, whole.parameters)
    assert tuner.asked == whole.asked == tuner.spent
    tuner.close()


def test_the_first_answer_of_a_row_counts() -> None:
    tuner, whole = make(None), make()
    candidates = tuner.ask()
    first = candidates.take(torch.tensor([3, 1]))
    tuner.tell(answers(first), first)
    assert sorted(tuner.ask().places.tolist()) == [0, 2, 4]
    tuner.tell(answers(candidates) + torch.tensor([0.0, 7.0, 0.0, 7.0, 0.0]), candidates)
    while tuner.steps == 0:
        tuner.tell(answers(tuner.ask()))
    whole.step()
    assert torch.equal(tuner.parameters, whole.parameters)


def test_what_was_told_survives_a_restart_and_only_the_rest_is_asked(tmp_path) -> None:
    told = 0
    tuner = make(None, journal=tmp_path / "run.db")
    for steps in range(1, 30):
        candidates = tuner.ask()
        part = candidates.part(0, 1 + steps % 4)
        tuner.tell(answers(part), part)
        told += len(part)
        if steps % 3 == 0:
            tuner.close()
            tuner = make(None, journal=tmp_path / "run.db")
            if len(part) < len(candidates):
                assert len(tuner.ask()) == len(candidates) - len(part)
    assert tuner.spent == told
    while tuner.steps < 5:
        tuner.tell(answers(tuner.ask()))
    whole = make()
    list(whole.run(5))
    assert torch.equal(tuner.parameters, whole.parameters)
    tuner.close()


def test_losses_that_are_not_finite_are_asked_again_then_left_out() -> None:
    tuner = make(None, on_failure=OnFailure(retries=1))
    first = tuner.ask()
    values = answers(first)
    values[2] = float("nan")
    tuner.tell(values)
    again = tuner.ask()
    assert again.places.tolist() == [2]
    assert int(again.points) == int(first.points[2])
    tuner.tell(torch.tensor([float("inf")]))
    assert tuner.ask().kind == "query"
    assert int(first.points[2]) not in tuner.ask().points.tolist()
    assert [lost[2] for lost in tuner.failures] == [int(first.points[2])]


def test_a_step_may_begin_by_hand_and_end_with_the_objective() -> None:
    tuner, whole = make(), make()
    part = tuner.ask().part(1, 3)
    tuner.tell(answers(part), part)
    tuner.step()
    whole.step()
    assert torch.equal(tuner.parameters, whole.parameters)
    assert tuner.spent == whole.spent


def test_answers_of_others_are_refused() -> None:
    tuner = make(None)
    with pytest.raises(FlopsError, match="no candidates are pending"):
        tuner.tell(torch.zeros(N), Candidates(START.expand(N, -1), torch.arange(N)))
    part = tuner.ask().part(0, 2)
    with pytest.raises(FlopsError, match="not returned by ask"):
        tuner.tell(torch.zeros(N), Candidates(START.expand(N, -1), torch.arange(N)))
    with pytest.raises(ObjectiveError, match="each of the 2 rows"):
        tuner.tell(torch.zeros(3), part)
    tuner.tell(torch.zeros(2, 3), part)
    rest = tuner.ask()
    tuner.tell(torch.zeros(len(rest), 3), rest)


def test_a_tuner_starts_from_numpy_and_from_lists() -> None:
    found = []
    for start in (START, START.numpy(), START.tolist(), START.double().numpy()):
        seen = []

        def objective(parameters, points):
            seen.append(type(parameters).__name__)
            return quadratic(torch.as_tensor(parameters), torch.as_tensor(points)).tolist()

        tuner = Tuner(
            start, objective, points=N, estimator=KINDS["lr"], queries=6, learning_rate=0.05
        )
        list(tuner.run(2))
        found.append(tuner.parameters)
        assert set(seen) == {"ndarray" if hasattr(start, "tobytes") else "Tensor"}
    assert all(torch.equal(found[0], other) for other in found)
