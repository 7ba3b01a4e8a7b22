"""What holds for all allocators: counts fit, whatever was learned; a state survives."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from flops.allocators import Gaussian, Learner, Neyman, Signal
from flops.errors import QueryError
from tests.support.allocation import MAKERS, check, learners, relative_j, sampled, signal, traces

every = pytest.mark.parametrize("name", MAKERS)


# What holds for all of them


LOSSES = st.one_of(
    arrays.arrays(
        np.float64,
        st.integers(1, 30),
        elements=st.one_of(
            st.floats(-10, 10), st.sampled_from([0.0, 1e-12, -1e-12, 1e12, -1e12, 1e-300])
        ),
    ),
    st.builds(np.full, st.integers(1, 30), st.sampled_from([0.0, 0.1, 3.3, -2.0, 1e-12, 1e12])),
)

TRACE = st.one_of(
    st.floats(0, 100), st.sampled_from([0.0, 1e-300, 5e-324, 1e-12, 1e12, 1e308, np.inf, np.nan])
)

EMBEDDINGS = ("none", "random", "same", "zero", "tiny", "huge", "infinite")


def embed(kind: str, size: int) -> Tensor | None:
    source = torch.Generator().manual_seed(size)
    vectors = torch.randn(size, 3, generator=source)
    vectors[1::2] = vectors[0]  # some are always alike
    return {
        "none": None,
        "random": vectors,
        "same": torch.ones(size, 3),
        "zero": torch.zeros(size, 3),
        "tiny": 1e-30 * vectors,
        "huge": 1e30 * vectors,
        "infinite": torch.where(torch.arange(size).unsqueeze(1) % 3 == 0, torch.inf, vectors),
    }[kind]


@every
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_counts_fit_whatever_was_learned(name: str, data: st.DataObject) -> None:
    losses = data.draw(LOSSES)
    unit = data.draw(st.sampled_from([1, 2]))
    floor = data.draw(st.sampled_from([0, unit, 2 * unit]))
    kind = data.draw(st.sampled_from(EMBEDDINGS))
    mean = data.draw(st.sampled_from([max(floor, unit), 5.3 + floor, 40]))
    allocator = MAKERS[name]()
    for step in range(3):
        batch = signal(losses, mean, unit, floor, embeddings=embed(kind, len(losses)), key=(step,))
        if isinstance(allocator, Learner):
            size = len(losses)
            values = data.draw(arrays.arrays(np.float64, size, elements=TRACE))
            draws = data.draw(arrays.arrays(np.int64, size, elements=st.integers(0, 5)))
            allocator.learn(batch, traces(np.where(draws == 0, 0.0, values), draws))
        check(allocator.allocate(batch), batch)
        later = replace(batch, key=(step, 9))
        check(allocator.allocate(later), later)


@pytest.mark.parametrize("bad", [0.0, 1e308, np.inf, np.nan])
@learners
def test_bad_traces_do_not_poison_what_is_learned(name: str, bad: float) -> None:
    """After a spoiled batch the state is finite, and good batches teach as before."""
    spoiled, found = after_good_batches(name, bad)
    for value in spoiled.state_dict().values():
        assert torch.as_tensor(value).isfinite().all()
    assert found == pytest.approx(after_good_batches(name)[1], rel=0.1)


@lru_cache
def after_good_batches(name: str, bad: float | None = None) -> tuple[Any, float]:
    """An allocator that has learned, also from spoiled batches if `bad` is given; and its J."""
    losses = torch.linspace(0, 2, 40)
    good = (0.05 + losses.double()).square()
    allocator = MAKERS[name]()
    for step in range(150):
        batch = signal(losses, 20, embeddings=embed("random", 40), key=(step,))
        if step in (0, 5) and bad is not None:
            allocator.learn(batch, traces([bad] * 40))
            one = good.clone()
            one[3] = bad
            allocator.learn(batch, traces(one))
        allocator.learn(batch, sampled(good, 20, step))
    return allocator, relative_j(allocator.allocate(batch), good)


@every
@pytest.mark.parametrize("unit", [1, 2])
def test_too_small_a_budget_is_a_clear_error(name: str, unit: int) -> None:
    batch = signal(torch.rand(10), 1, embeddings=torch.randn(10, 3))
    short = replace(batch, budget=8 * unit, unit=unit, minimum=unit)
    with pytest.raises(QueryError, match=f"{8 * unit} queries are too few for 10 points"):
        MAKERS[name]().allocate(short)


@every
def test_a_floor_holds_also_when_it_leaves_no_choice(name: str) -> None:
    options = {} if name == "equal" else {"min_queries": 8}
    batch = signal(torch.rand(10), 8, minimum=8, embeddings=torch.randn(10, 3))
    assert MAKERS[name](**options).allocate(batch).tolist() == [8] * 10


@pytest.mark.parametrize(
    "name",
    ["equal", "bernoulli", "bernoulli-learned", "gaussian", "neyman-pilot", "neyman-running"],
)
def test_ten_thousand_points(name: str) -> None:
    size = 10_000
    losses = torch.rand(size) * 3
    batch = signal(losses, 8, embeddings=torch.randn(size, 4))
    allocator = MAKERS[name]()
    if isinstance(allocator, Learner):
        allocator.learn(batch, sampled(losses.double() + 0.1, 2, 0))
    check(allocator.allocate(batch), batch)


@every
@pytest.mark.parametrize("loss", [0.1, 1e-12, 1e12, -3.0])
def test_equal_losses_and_nothing_learned(name: str, loss: float) -> None:
    """Only the Gaussian one, which is random by nature, treats alike points differently."""
    counts = MAKERS[name]().allocate(signal([loss] * 12, 8))
    if not name.startswith("gaussian"):
        assert counts.tolist() == [8] * 12


@every
def test_options_that_make_no_sense(name: str) -> None:
    if name != "equal":
        with pytest.raises(ValueError, match="min_queries"):
            MAKERS[name](min_queries=-1)


def taught(name: str, steps: int = 4) -> tuple[Any, Signal]:
    allocator = MAKERS[name]()
    source = torch.Generator().manual_seed(5)
    losses = torch.rand(20, generator=source) * 2
    vectors = torch.randn(20, 3, generator=source)
    batch = signal(losses, 12, embeddings=vectors)
    if isinstance(allocator, Learner):
        for step in range(steps):
            allocator.learn(replace(batch, key=(step,)), sampled(losses.double() ** 2, 4, step))
    return allocator, replace(batch, key=(steps,))


@every
@pytest.mark.bits
def test_a_state_survives_a_file(name: str) -> None:
    allocator, batch = taught(name)
    file = io.BytesIO()
    torch.save(allocator.state_dict(), file)
    file.seek(0)
    resumed = MAKERS[name]()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(10, 14):
        batch = replace(batch, key=(step,))
        assert torch.equal(resumed.allocate(batch), allocator.allocate(batch))
        if isinstance(allocator, Learner):
            for one in (allocator, resumed):
                one.learn(batch, sampled(batch.losses.double(), 3, step))
            assert torch.equal(resumed.allocate(batch), allocator.allocate(batch))


@every
def test_a_state_is_a_copy(name: str) -> None:
    allocator, batch = taught(name)
    before = allocator.allocate(batch)
    state = allocator.state_dict()
    for value in state.values():
        if isinstance(value, Tensor):
            value.fill_(7)
    assert torch.equal(allocator.allocate(batch), before)


@every
def test_the_key_decides_the_sample(name: str) -> None:
    allocator, batch = taught(name)
    counts = [allocator.allocate(replace(batch, key=(0, step, 1))) for step in range(5)]
    again = allocator.allocate(replace(batch, key=(0, 2, 1)))
    assert torch.equal(again, counts[2])
    random = name.startswith("gaussian") or name in ("bernoulli", "bernoulli-learned")
    assert (len({tuple(c.tolist()) for c in counts}) > 1) == random


@learners
def test_learning_replaces_and_never_writes(name: str) -> None:
    """The engine keeps shallow copies; a failed step goes back to them."""
    allocator, batch = taught(name)
    kept = copy.copy(allocator)
    before, counts = copy.deepcopy(kept.state_dict()), kept.allocate(batch)
    for step in range(5, 8):
        allocator.learn(replace(batch, key=(step,)), sampled(batch.losses.double(), 4, step))
    for key, value in kept.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[key])), key
    assert torch.equal(kept.allocate(batch), counts)


@pytest.mark.parametrize("kind", [Gaussian, Neyman])
def test_learned_allocators_drop_no_point_by_default(kind: type[Gaussian | Neyman]) -> None:
    assert kind().min_queries == 1
