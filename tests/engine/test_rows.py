"""From counts to rows to chunks: weights and bounds that must hold exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flops.engine.rows import own_chunks, plan_rows, shares, spans
from flops.estimators.base import PointPlan
from flops.passes.ranks import Ranks

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

UNITS = st.sampled_from([1, 2])
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(COUNTS, UNITS)
def test_rows_are_the_mean_over_each_points_draws(draws: list[int], unit: int) -> None:
    rows = plan_rows(unit * torch.tensor(draws), unit)
    assert len(rows.points) == unit * sum(draws)
    for point, number in enumerate(draws):
        mine = rows.points == point
        once = mine & (rows.signs == 1)
        assert rows.draws[once].tolist() == list(range(number))
        if number:
            assert float(rows.weights[once].sum()) == pytest.approx(1, rel=1e-12)
        assert int(mine.sum()) == unit * number


@given(COUNTS)
def test_pairs_stand_side_by_side_on_one_point(draws: list[int]) -> None:
    rows = plan_rows(2 * torch.tensor(draws), 2)
    for values in (rows.points, rows.draws, rows.weights):
        assert torch.equal(values[0::2], values[1::2])
    assert (rows.signs[0::2] == 1).all()
    assert (rows.signs[1::2] == -1).all()


@given(COUNTS.filter(any), UNITS, st.integers(2, 30))
def test_chunks_cover_all_rows_once(draws: list[int], unit: int, size: int) -> None:
    counts = unit * torch.tensor(draws)
    whole = plan_rows(counts, unit)
    parts = list(own_chunks(PointPlan(counts, unit), len(draws), size, Ranks()))
    for name in ("points", "draws", "signs", "weights"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name))
    lengths = [len(part.points) for part in parts]
    assert max(lengths) <= max(size, 3)
    assert max(lengths) - min(lengths) <= unit
    assert min(lengths) > 1 or lengths == [1]
    assert not any(length % unit for length in lengths)


@given(st.integers(1, 5000), st.integers(2, 300))
def test_spans_are_few_and_never_of_one_row(count: int, size: int) -> None:
    cut = spans(count, size)
    lengths = [end - begin for begin, end in cut]
    assert cut[0][0] == 0
    assert cut[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(cut))
    assert min(lengths) > 1 or lengths == [1]
    assert max(lengths) <= max(size, 3)
    assert len(cut) <= -(-count // size)


def test_no_rows_no_chunks() -> None:
    none = PointPlan(torch.zeros(3, dtype=torch.long), 1)
    assert list(own_chunks(none, 3, 8, Ranks())) == []


def test_rows_are_shared_out_by_cost() -> None:
    assert shares([1.0], 10, 2) == [0, 5, 10]
    assert shares([1.0, 1.0, 1.0, 1.0], 4, 4) == [0, 4, 8, 12, 16]
    assert shares([3.0, 1.0], 4, 2) == [0, 3, 8]  # 8 of 16 each, to the next row
    assert shares([1.0], 2, 4) == [0, 0, 1, 2, 2]
    costs, size, ranks = [0.0, 1.0, 0.5, 2 / 3], 30, 7
    bounds = shares(costs, size, ranks)
    assert len(bounds) == ranks + 1
    work = [sum(costs[r // size] for r in range(a, b)) for a, b in pairwise(bounds)]
    assert max(work) <= sum(costs) * size / ranks + 1
    assert (bounds[0], bounds[-1]) == (0, size * len(costs))
    assert bounds == sorted(bounds)
