"""Options of shaped noise that follow the data: the share of isotropic queries, and decay."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.subspace.regression import decay, exploration


@pytest.mark.parametrize(
    ("explained", "share"),
    [(-0.5, 0.7), (0.0, 0.7), (0.25, 0.55), (0.5, 0.4), (1.0, 0.1), (1.5, 0.1)],
)
def test_the_share_of_isotropic_queries(explained: float, share: float) -> None:
    assert exploration(Shaping(), explained) == pytest.approx(share, rel=1e-12)
    assert exploration(Shaping(explore=0.3), explained) == 0.3


def test_a_tenth_of_the_queries_explores_however_much_is_explained() -> None:
    """Else a task that moves would never be noticed."""

    def loss(outputs: Tensor, g: Tensor) -> Tensor:
        return (outputs * g).sum(1)

    model = nn.Linear(3, 40).double()
    x, g = torch.randn(4, 3).double(), torch.zeros(4, 40).double()
    g[:, :2] = torch.randn(4, 2).double()
    estimator = LikelihoodRatio(1e-3, shaping=Shaping())
    fg = ForwardGradient(model, loss, Group(model, estimator, 30, name="site"))
    for _ in range(60):
        report = fg.estimate(x, g)
    shaping = report.shaping["site"]
    assert shaping.explained_variance > 0.99
    assert shaping.explore == pytest.approx(0.1)


def test_exploration_falls_as_the_explained_variance_rises() -> None:
    shares = [exploration(Shaping(), explained) for explained in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.2 < shares[0]
    assert exploration(Shaping(explore=0.4), 0.9) == 0.4


def test_moments_are_doubted_when_the_explained_variance_drops() -> None:
    same, best = decay(Shaping(), 0.8, 0.0, 0.8, 0.8)
    assert (same, best) == (decay(Shaping(), 0.7, 0.0, 0.79, 0.8)[0], 0.8)
    less, best = decay(Shaping(), 0.2, 0.01, 0.74, 0.8)
    assert less < 0.5 * same
    assert best == 0.74  # the old best was of another task
    assert decay(Shaping(), 0.2, 0.1, 0.74, 0.8)[0] == same  # no more than sampling error
    assert decay(Shaping(decay=0.9), 0.2, 0.0, 0.74, 0.8)[0] == 0.9


def test_older_steps_count_less_as_the_explained_variance_rises() -> None:
    same, _ = decay(Shaping(), 0.5, 0.0, 0.5, 0.5)
    slow, _ = decay(Shaping(), 0.6, 0.0, 0.51, 0.5)
    fast, best = decay(Shaping(), 0.9, 0.0, 0.54, 0.5)
    assert fast < slow < same
    assert best == 0.54
    assert decay(Shaping(), 0.5, 0.0, 0.5, 0.54)[0] == same  # going down again forgets nothing


@pytest.mark.parametrize(
    "options",
    [
        {"warm": -1},
        {"explore": 0.0},
        {"explore": 1.01},
        {"decay": 1.0},
        {"decay": -0.01},
        {"withhold": 1.0},
        {"withhold": -0.01},
    ],
)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        Shaping(**options)


@pytest.mark.parametrize(
    "options",
    [{"warm": 0}, {"explore": 1}, {"explore": 1e-9}, {"decay": 0}, {"decay": 0.5, "withhold": 0.9}],
)
def test_bounds_are_allowed_and_shown(options: dict[str, float]) -> None:
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    assert repr(Shaping(**options)) == f"Shaping({shown})"


def test_defaults_are_what_is_documented() -> None:
    given = inspect.signature(Shaping).parameters.values()
    assert {p.name: p.default for p in given} == {
        "explore": None,
        "decay": None,
        "unbiased": False,
        "mask": "attention_mask",
        "warm": None,
        "outputs": True,
        "withhold": 0.0,
    }


def test_large_batches_whose_outputs_are_seen_need_a_short_memory() -> None:
    """.98 for 12 points, or for a step of fewer; .85 at least."""
    keep = [decay(Shaping(), 0.5, 0.0, 0.5, 0.5, points)[0] for points in (0, 8, 12, 24, 64, 999)]
    assert keep == pytest.approx([0.98, 0.98, 0.98, 0.98**2, 0.98 ** (64 / 12), 0.85])
    assert decay(Shaping(decay=0.9), 0.5, 0.0, 0.5, 0.5, 64)[0] == 0.9
