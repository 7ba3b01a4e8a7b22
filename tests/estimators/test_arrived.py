"""Which draws arrived, and what the others weigh then."""

from __future__ import annotations

import torch

from flops.estimators.arrived import Arrived

NAN = float("nan")


def test_weights_of_the_draws_that_arrived() -> None:
    points = torch.tensor([0, 0, 0, 1, 1, 3, 3])
    values = torch.tensor([1.0, NAN, 2.0, NAN, NAN, 3.0, 4.0])
    found = Arrived.among(values, points, 4)
    assert found is not None
    assert found.draws.tolist() == [True, False, True, False, False, True, True]
    assert found.ratio.tolist() == [1.5, 1, 1, 1]
    assert found.lost.tolist() == [False, True, False, False]  # point 2 had no query to lose
    assert found.size == 3


def test_nothing_to_do_if_all_arrived() -> None:
    assert Arrived.among(torch.tensor([1.0, float("inf")]), torch.tensor([0, 1]), 2) is None


def test_a_draw_of_several_values_is_lost_with_any_of_them() -> None:
    values = torch.tensor([[1.0, 2.0], [NAN, 1.0], [1.0, NAN]])
    found = Arrived.among(values, torch.tensor([0, 0, 1]), 2)
    assert found is not None
    assert found.draws.tolist() == [True, False, False]
    assert found.size == 1
