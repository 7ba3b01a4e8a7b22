"""The study of gradients: what a panel measures, and that its comparisons are paired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flops.allocators import Equal, Gaussian
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import FlopsError, PrecisionWarning
from flops.estimators import Exact, LikelihoodRatio
from flops.experiments import common_random_numbers, gradients_panel
from flops.experiments.gradients_panel import MEASURE, MEASURED, WARM, Panel, measure_panel
from flops.experiments.gradients_tables import panel_sheets, records
from flops.experiments.gradients_thirds import Thirds, measure_thirds
from flops.experiments.warm_starts import WarmStart, batch_of, finetuned, load_warm_start
from flops.experiments.weight_matrices import layer_numbers, matrix_of, third_of, thirds
from flops.tasks.classification import bundled_vit, digits
from flops.tasks.classification.task import loss_fn
from flops.tasks.models.vit import parts

SMALL: dict[str, Any] = {"steps": 2, "layer": 6, "budgets": (4,), "repeats": 3, "batch": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


def same(one: Any, other: Any, most: float = 1e-4) -> bool:
    return bool(one == pytest.approx(other, rel=1e-3, abs=most))


@pytest.mark.parametrize("perturb", ["matrix", "third"])
def test_the_cosine_of_the_exact_gradient_is_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, perturb: Any
) -> None:
    monkeypatch.setitem(gradients_panel.ESTIMATORS, "exact", lambda sigma: Exact())
    panel = Panel(**SMALL, estimator="exact", allocators=("equal",), perturb=perturb)
    found = measure_panel(folder, panel)
    assert found["cosine"]["equal"] == [pytest.approx([1.0] * 3, abs=1e-6)]
    assert min(found["norm"]) > 0


@pytest.mark.parametrize("name", ["equal", "gaussian"])
def test_common_random_numbers_change_nothing(folder: Path, name: str) -> None:
    """A panel of many estimates gives what an engine alone gives, step by step."""
    panel = Panel(**SMALL | {"budgets": (4, 7)}, warm=2, sigma=1e-2)
    found = measure_panel(folder, panel)
    model, data = load_warm_start(folder, panel.start)
    target = matrix_of(model, 6, "key")
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "vit.layers.5.attention.k_proj.weight"
    ]
    for place, budget in enumerate(panel.budgets):
        group = Group([target], LikelihoodRatio(1e-2, "leaf"), budget, name="panel")
        allocator: Any = Equal() if name == "equal" else Gaussian()
        fg = ForwardGradient(model, loss_fn, group, allocator=allocator, seed=panel.seed)
        for step in range(2):
            rows = batch_of(data, 6, panel.seed, WARM, step)
            fg.estimate(*data.train.batch(rows), index=rows)
        learned = fg.state_dict()
        for repeat in range(panel.repeats):
            fg.load_state_dict({**learned, "step": MEASURED + repeat})
            rows = batch_of(data, 6, panel.seed, MEASURE, repeat)
            report = fg.estimate(*data.train.batch(rows), index=rows, exact=True)
            assert same(found["cosine"][name][place][repeat], report.cosine["panel"])
    model.zero_grad()


@pytest.mark.bits
def test_allocators_are_paired(folder: Path) -> None:
    """Neither other allocators, nor other budgets, nor more repeats change what one sees."""
    every = measure_panel(folder, Panel(**SMALL, warm=2))
    alone = measure_panel(folder, Panel(**SMALL | {"repeats": 2, "budgets": (2, 4)}, warm=2))
    only = measure_panel(folder, Panel(**SMALL, allocators=("neyman",), warm=2))
    assert every["loss"][:2] == alone["loss"]
    assert every["norm"] == pytest.approx(only["norm"])
    # Batches of other rows round losses otherwise, and a learned share that lies between two counts
    # may then go to the other one: a query of the same noise, more here and less there.
    for name, most in {"equal": 1e-4, "bernoulli": 2e-3, "gaussian": 2e-3, "neyman": 2e-3}.items():
        assert same(alone["cosine"][name][1], every["cosine"][name][0][:2], most)
    assert same(only["cosine"]["neyman"][0], every["cosine"]["neyman"][0], 2e-3)
    other = measure_panel(folder, Panel(**SMALL, allocators=("equal",), seed=1))
    assert not same(other["cosine"]["equal"][0], every["cosine"]["equal"][0])


def test_each_draw_is_run_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[common_random_numbers.RememberedLosses] = []

    class Watched(common_random_numbers.RememberedLosses):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(common_random_numbers, "RememberedLosses", Watched)
    for estimator in ("lr", "spsa"):
        panel = Panel(**SMALL | {"budgets": (4, 8)}, estimator=estimator, allocators=("equal",))
        measure_panel(folder, panel)
    assert [known.runs for known in made] == [8 * 6] * 6


def test_more_queries_are_closer(folder: Path) -> None:
    panel = Panel(**SMALL | {"budgets": (2, 200)}, allocators=("equal",), sigma=1e-2)
    few, many = (sum(c) / 3 for c in measure_panel(folder, panel)["cosine"]["equal"])
    assert many > few + 0.2


def test_thirds_start_from_what_was_learned(folder: Path) -> None:
    base = {"steps": 2, "repeats": 2, "batch": 4, "queries": 2}
    state = torch.get_rng_state()
    one = measure_thirds(folder, Thirds(**base, allocator="gaussian", warm=2))  # type: ignore[arg-type]
    more = measure_thirds(folder, Thirds(**base | {"repeats": 3}, allocator="gaussian", warm=2))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert list(one["cosine"]) == ["first third", "middle third", "last third"]
    for name, values in one["cosine"].items():
        assert more["cosine"][name][:2] == values
        assert len(set(more["cosine"][name])) == 3


def test_starts_are_made_once(tmp_path: Path) -> None:
    start = WarmStart(steps=2)
    model, _ = load_warm_start(tmp_path, start)
    straight = finetuned(bundled_vit(), digits().train, 2)
    weights = dict(straight.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    load_warm_start.cache_clear()
    made = start.path(tmp_path).stat().st_mtime_ns
    again, _ = load_warm_start(tmp_path, start)
    assert again is not model
    assert start.path(tmp_path).stat().st_mtime_ns == made
    assert all(torch.equal(p, weights[n]) for n, p in again.named_parameters())
    assert WarmStart(steps=3).path(tmp_path) != start.path(tmp_path)
    assert Panel(steps=2, matrix="ff").path(tmp_path) == start.path(tmp_path)
    load_warm_start.cache_clear()


@pytest.mark.parametrize(
    ("count", "numbers"), [(6, [1, 3, 6]), (12, [1, 6, 12]), (24, [1, 12, 24]), (1, [1])]
)
def test_layers_of_the_paper(count: int, numbers: list[int]) -> None:
    assert layer_numbers(("first", "middle", "last"), count) == numbers


def test_layers_and_matrices_by_name() -> None:
    assert layer_numbers(("6", "2", "first"), 6) == [1, 2, 6]
    for wrong in ("0", "7", "-1", "deep"):
        with pytest.raises(FlopsError, match=f"no layer '{wrong}'.* 1 to 6"):
            layer_numbers((wrong,), 6)
    model = bundled_vit()
    layer: Any = parts(model).layers[2]
    assert matrix_of(model, 3, "key") is layer.attention.k_proj
    assert matrix_of(model, 3, "ff") is matrix_of(model, 3, "mlp.fc1") is layer.mlp.fc1
    with pytest.raises(FlopsError, match=r"no matrix 'keys' in layer 3: .*key.*mlp\.fc1"):
        matrix_of(model, 3, "keys")
    assert thirds(6) == [range(1, 3), range(3, 5), range(5, 7)]
    assert [len(third) for third in thirds(2)] == [1, 1]
    assert third_of(4, 6) == range(3, 5)


def test_a_rounding_warning_is_not_repeated_for_every_cell(folder: Path) -> None:
    panel = Panel(**SMALL, sigma=1e-6, allocators=("equal",))
    measure_panel(folder, panel)  # warnings are errors here
    model, data = load_warm_start(folder, panel.start)
    group = Group([matrix_of(model, 6, "key")], LikelihoodRatio(1e-6, "leaf"), 4)
    with pytest.warns(PrecisionWarning):
        ForwardGradient(model, loss_fn, group).estimate(*data.train.batch(torch.arange(6)))
    model.zero_grad()


def test_of_a_third_there_is_no_variance_of_a_matrix() -> None:
    result = {kind: {"equal": [[0.5, 0.6]]} for kind in ("cosine", "noise")} | {
        "norm": [1.0, 2.0],
        "loss": [1.0, 1.0],
    }
    titles = {}
    for perturb in ("matrix", "third"):
        panel = Panel(perturb=perturb, budgets=(20,), allocators=("equal",), repeats=2)
        titles[perturb] = [sheet.title for sheet in panel_sheets([(panel, result)])[0]]
        assert ("" in {line["variance"] for line in records([(panel, result)])}) == (
            perturb == "third"
        )
    variance = "Variance by matrix and layer"
    assert variance in titles["matrix"]
    assert variance not in titles["third"]
