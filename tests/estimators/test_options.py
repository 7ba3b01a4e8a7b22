"""Options of estimators: their defaults, the bounds of what is accepted, and what follows."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from flops import ES, FZOO, JVP, LOZO, SPSA, DeepZero, Exact, LikelihoodRatio, MeZO, Shaping
from flops.estimators import Estimator
from flops.estimators.base import Estimation

DEFAULTS = [
    "LikelihoodRatio(sigma=None, targets='block', baseline='clean', noise='gaussian', "
    "shaping=None, last_tokens=None)",
    "ES(sigma=0.001, shared=False, noise='gaussian', shaping=None, baseline='clean')",
    "SPSA(sigma=0.001, shared=False, noise='gaussian', shaping=None)",
    "MeZO(sigma=0.001, noise='gaussian')",
    "FZOO(sigma=0.001)",
    "LOZO(sigma=0.001, rank=2, interval=50)",
    "JVP(noise='gaussian')",
    "DeepZero(sigma=0.001, pruning='zo-grasp', score_draws=96, shuffle=1)",
    "Exact()",
]
CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (LikelihoodRatio, ES, SPSA, MeZO, FZOO, LOZO, JVP, DeepZero, Exact)
}


@pytest.mark.parametrize("shown", DEFAULTS, ids=lambda shown: shown.partition("(")[0])
def test_defaults_are_what_is_documented(shown: str) -> None:
    """Exactly the options that are shown can be given."""
    cls = CLASSES[shown.partition("(")[0]]
    assert repr(cls()) == shown
    given = inspect.signature(cls).parameters.values()
    assert {p.name: p.default for p in given} == {p.name: getattr(cls(), p.name) for p in given}
    assert all(f"{p.name}={p.default!r}" in shown for p in given)


@pytest.mark.parametrize("cls", [LikelihoodRatio, ES, SPSA, MeZO, FZOO, LOZO, DeepZero])
@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_sigma_is_positive(cls: Any, sigma: float) -> None:
    assert cls(sigma=1e-30).sigma == 1e-30
    with pytest.raises(ValueError, match="sigma must be positive"):
        cls(sigma=sigma)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (LikelihoodRatio, {"sigma": math.inf}, "positive and finite, not inf"),
        (LikelihoodRatio, {"sigma": "best"}, "'auto', not 'best'"),
        (LikelihoodRatio, {"sigma": "auto", "baseline": "none"}, "needs directional derivatives"),
        (LikelihoodRatio, {"last_tokens": 0}, "at least 1, not 0"),
        (LikelihoodRatio, {"targets": "layer"}, "'layer' is not one of"),
        (LikelihoodRatio, {"baseline": "mean"}, "'mean' is not one of"),
        (LikelihoodRatio, {"noise": "uniform"}, "'uniform' is not one of"),
        (LikelihoodRatio, {"shaping": Shaping(), "baseline": "none"}, "needs directional"),
        (
            LikelihoodRatio,
            {"shaping": Shaping(unbiased=True), "noise": "orthogonal"},
            "needs independent draws",
        ),
        (ES, {"baseline": "mean"}, "'mean' is not one of"),
        (ES, {"noise": "orthogonal"}, "'orthogonal' is not one of"),
        (ES, {"shaping": Shaping(), "baseline": "none"}, "needs directional derivatives"),
        (ES, {"shaping": Shaping(), "shared": True}, "needs per-point draws"),
        (SPSA, {"shaping": Shaping(), "shared": True}, "needs per-point draws"),
        (MeZO, {"noise": "orthogonal"}, "'orthogonal' is not one of"),
        (LOZO, {"rank": 0}, "rank"),
        (LOZO, {"interval": 0}, "interval"),
        (JVP, {"noise": "orthogonal"}, "'orthogonal' is not one of"),
        (DeepZero, {"pruning": "magnitude"}, "'magnitude' is not one of"),
        (DeepZero, {"score_draws": 0}, "must be at least 1"),
        (DeepZero, {"shuffle": 0}, "must be at least 1"),
    ],
)
def test_other_options_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (LikelihoodRatio, {"last_tokens": 1}),
        (LikelihoodRatio, {"sigma": "auto", "baseline": "antithetic"}),
        (LikelihoodRatio, {"baseline": "none"}),
        (LikelihoodRatio, {"shaping": Shaping(), "noise": "orthogonal"}),
        (LikelihoodRatio, {"shaping": Shaping(unbiased=True)}),
        (ES, {"baseline": "none"}),
        (ES, {"shaping": Shaping(), "baseline": "antithetic"}),
        (LOZO, {"rank": 1, "interval": 1}),
        (DeepZero, {"score_draws": 1, "shuffle": 1, "pruning": "random"}),
    ],
)
def test_the_least_of_every_option_is_accepted(cls: Any, options: dict[str, Any]) -> None:
    made = cls(**options)
    assert {name: getattr(made, name) for name in options} == options


ALIKE = {
    "unit": 1,
    "shared": False,
    "seeded": False,
    "whole_model": False,
    "makes_queries": True,
    "has_sigma": True,
    "work": 1.0,
    "minimum_queries": 1,
    "reads_outputs": False,
    "reads_clean": True,
}
PAIRS = {"unit": 2, "minimum_queries": 2}
SHARED = {"shared": True, "seeded": True}


@pytest.mark.parametrize(
    ("estimator", "traits"),
    [
        (LikelihoodRatio(), {}),
        (LikelihoodRatio(baseline="antithetic"), PAIRS),
        (LikelihoodRatio(shaping=Shaping()), {"reads_outputs": True}),
        (LikelihoodRatio(shaping=Shaping(outputs=False)), {}),
        (ES(), {}),
        (ES(baseline="antithetic"), PAIRS),
        (ES(shared=True), SHARED),
        (ES(shared=True, baseline="antithetic"), {**SHARED, **PAIRS, "reads_clean": False}),
        (SPSA(), PAIRS),
        (SPSA(shared=True), {**SHARED, **PAIRS, "reads_clean": False}),
        (MeZO(), {**SHARED, **PAIRS, "reads_clean": False}),
        (FZOO(), {**SHARED, "minimum_queries": 2}),
        (LOZO(), {**SHARED, **PAIRS, "reads_clean": False}),
        (JVP(), {**SHARED, "has_sigma": False, "work": 3.0, "reads_clean": False}),
        (DeepZero(), {"shared": True}),
        (
            Exact(),
            {
                "whole_model": True,
                "makes_queries": False,
                "minimum_queries": 0,
                "reads_clean": False,
            },
        ),
    ],
    ids=repr,
)
def test_what_the_engine_reads_of_an_estimator(
    estimator: Estimator, traits: dict[str, Any]
) -> None:
    assert {name: getattr(estimator, name) for name in ALIKE} == {**ALIKE, **traits}


def estimations(cls: type) -> list[type]:
    return [cls, *(found for below in cls.__subclasses__() for found in estimations(below))]


def test_gradients_are_not_scaled_unless_asked() -> None:
    found = estimations(Estimation)
    assert len(found) >= 9
    for cls in found:
        assert inspect.signature(cls.write).parameters["scale"].default == 1, cls
