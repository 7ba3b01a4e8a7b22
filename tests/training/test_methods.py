"""Every method is a configuration of the engine; each trains the bundled model."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch.nn.functional as F
from torch import nn

from flops.allocators import Equal, Gaussian
from flops.engine.forward_gradient import ForwardGradient
from flops.errors import PrecisionWarning
from flops.estimators import DeepZero, LikelihoodRatio
from flops.estimators.spsa import SPSA
from flops.tasks.classification import bundled_vit, digits, logits
from flops.tasks.classification.config import PRESETS, FinetuneConfig
from flops.training.methods import METHODS, Method, engine, method_groups


def loss_fn(outputs, targets):
    return F.cross_entropy(logits(outputs), targets, reduction="none")


@pytest.fixture(scope="module")
def batch():
    train = digits().train
    return train.images[:2], train.labels[:2]


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
@pytest.mark.parametrize("name", METHODS)
def test_a_step_fills_every_gradient(name: str, batch, monkeypatch: pytest.MonkeyPatch) -> None:
    # DeepZero's pruning alone takes 2,328 passes before the first step.
    monkeypatch.setattr("flops.training.methods.DeepZero", partial(DeepZero, score_draws=2))
    model = bundled_vit()
    fg = engine(model, loss_fn, Method(name, queries=2))
    report = fg.estimate(*batch)
    assert all(p.grad is not None for p in model.parameters())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert math.isfinite(report.loss)
    assert report.forward_equivalents > 2
    queries = {"bp": 0, "mezo": 2 * 2, "fzoo": 2 * 8, "lozo": 2 * 2, "jvp": 2 * 1}.get(name)
    if queries is not None:
        assert report.queries == queries


def test_automatic_queries_make_the_default_engine() -> None:
    """`shaped-lr` with them is ``ForwardGradient(model, loss_fn)``, which withholds, too."""
    model = bundled_vit()
    method = engine(model, loss_fn, Method("shaped-lr", queries="auto"))
    default = ForwardGradient(model, loss_fn)
    assert repr(method) == repr(default)
    assert [(g.name, g.estimator, g.automatic) for g in method.groups] == [
        (g.name, g.estimator, g.automatic) for g in default.groups
    ]
    fixed = engine(model, loss_fn, Method("shaped-lr"))
    assert all(g.estimator.shaping.withhold == 0 for g in fixed.groups)


def test_automatic_queries_need_draws_of_each_point() -> None:
    with pytest.raises(ValueError, match="those of deepzero are shared by the batch"):
        Method("deepzero", queries="auto")


def test_sigma_goes_by_place() -> None:
    method = Method("lr", sigma=(1e-5, 1e-4, 1e-3))
    found = {g.name: g.estimator.sigma for g in method_groups(bundled_vit(), method)}
    assert found["before"] == found["blocks-1"] == 1e-5
    assert found["blocks-2"] == 1e-4
    assert found["blocks-3"] == found["vit.layernorm"] == found["classifier"] == 1e-3


def test_paper_presets() -> None:
    base, large = (FinetuneConfig(**PRESETS[name]) for name in ("vit-base", "vit-large"))
    assert (base.stages, base.sigma, base.queries) == (3, (1e-5, 1e-4, 1e-3), 20)
    assert (large.stages, large.sigma) == (4, (5e-6, 1e-5, 1e-4, 1e-3))
    assert {(p.batch, p.epochs, p.learning_rate) for p in (base, large)} == {(128, 10, 1e-4)}


def test_pairs_of_methods_differ_in_the_allocation_alone() -> None:
    model = bundled_vit()
    for plain, learned in (("n-spsa", "ops-spsa"), ("lr", "ops-lr")):
        a, b = (method_groups(model, Method(name)) for name in (plain, learned))
        assert [(g.targets, g.estimator, g.queries) for g in a] == [
            (g.targets, g.estimator, g.queries) for g in b
        ]
        first, second = (engine(model, loss_fn, Method(n)) for n in (plain, learned))
        assert all(isinstance(x, Equal) for x in first.allocators.values())
        assert all(isinstance(x, Gaussian) for x in second.allocators.values())
    assert not any(g.estimator.shared for g in method_groups(model, Method("n-spsa")))


def test_targets_of_each_method() -> None:
    assert Method("lr").perturbs == Method("ops-lr").perturbs == "leaf"
    assert Method("shaped-lr").perturbs == "stage"
    assert Method("ops-lr", targets="block").perturbs == "block"
    estimators = [g.estimator for g in method_groups(bundled_vit(), Method("shaped-lr"))]
    assert all(isinstance(e, LikelihoodRatio) and e.shaping is not None for e in estimators)
    estimators = [g.estimator for g in method_groups(bundled_vit(), Method("ops-spsa"))]
    assert all(isinstance(e, SPSA) for e in estimators)


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_layers_are_cut_into_stages(stages: int) -> None:
    names = [g.name for g in method_groups(bundled_vit(), Method(stages=stages))]
    assert sum("blocks-" in n for n in names) == stages


@pytest.mark.parametrize(
    "options",
    [
        {"name": "adam"},
        {"stages": 0},
        {"sigma": (1e-3, 1e-4, 1e-5)},
        {"name": "ops-spsa", "targets": "leaf"},
    ],
)
def test_settings_are_checked(options) -> None:
    with pytest.raises(ValueError, match=r"method|stages|sigma|targets"):
        Method(**options)


def test_shaped_noise_searches_for_sigma_unless_it_is_given() -> None:
    def sigmas(method: Method) -> set[float | str]:
        return {g.estimator.sigma for g in method_groups(bundled_vit(), method)}

    assert sigmas(Method("shaped-lr")) == {"auto"}
    assert sigmas(Method("shaped-lr", sigma=(1e-2,))) == {1e-2}
    assert sigmas(Method("lr")) == sigmas(Method("ops-spsa")) == {1e-3}


def test_stages_of_shaped_noise_hold_the_embeddings_and_end_after_two_thirds() -> None:
    first, second, norm, head = method_groups(bundled_vit(), Method("shaped-lr"))
    layers = [f"vit.layers.{i}" for i in range(6)]
    assert list(first.targets) == ["vit.embeddings", *layers[:4]]
    assert list(second.targets) == layers[4:]
    assert (norm.name, head.name) == ("vit.layernorm", "classifier")


def test_too_small_a_sigma_is_warned_of(batch) -> None:
    fg = engine(bundled_vit(), loss_fn, Method("lr", queries=2, sigma=(1e-7,)))
    with pytest.warns(PrecisionWarning, match="raise sigma"):
        fg.estimate(*batch)


def test_stages_end_where_they_are_told_to_and_the_layers_have_noise_on_the_last_tokens() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(10)),
            "head": nn.Linear(4, 2),
        }
    )
    groups = method_groups(model, Method(stages=(0.8, 1.0), last_tokens=3))
    sizes = {g.name: len(g.targets) for g in groups}
    assert sizes == {"blocks-1": 9, "blocks-2": 2, "head": 1}  # with the embedding
    assert [g.estimator.last_tokens for g in groups] == [3, 3, 3]
    groups = method_groups(model, Method(targets="block", stages=(0.8, 1.0), last_tokens=3))
    assert {g.name: len(g.targets) for g in groups} == {"before": 1, **sizes, "blocks-1": 8}
    assert [g.estimator.last_tokens for g in groups] == [None, 3, 3, 3]
    for stages, said in (((1.0, 0.5), "ascend"), ((0.0, 1.0), "ascend"), ((0.5, 0.8), "end at 1")):
        with pytest.raises(ValueError, match=said):
            Method(stages=stages)


@pytest.mark.parametrize(
    ("count", "ends", "sizes"),
    [
        (2, (0.8, 1.0), [1, 1]),
        (2, (0.2, 0.5, 1.0), [1, 1]),
        (30, (0.8, 1.0), [24, 6]),
        (4, (0.1, 0.2, 1.0), [1, 1, 2]),
    ],
)
def test_every_stage_has_a_layer(count: int, ends: tuple[float, ...], sizes: list[int]) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(count))})
    model["head"] = nn.Linear(4, 2)
    groups = method_groups(model, Method(stages=ends))
    assert [len(g.targets) for g in groups if "blocks" in (g.name or "")] == sizes


def test_last_tokens_are_of_likelihood_ratio() -> None:
    with pytest.raises(ValueError, match="last_tokens applies to likelihood ratio only"):
        Method("mezo", last_tokens=2)
