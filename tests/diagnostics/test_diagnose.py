"""Diagnostics: rows for every group and allocator, the right sigma, nothing changed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flops import SPSA, Exact, Group, LikelihoodRatio, diagnose
from flops.allocators import Equal, Gaussian
from flops.cli.main import main
from flops.diagnostics.diagnose import AllocatorRow, Diagnosis
from flops.diagnostics.table import diagnosis_tables
from flops.experiments.theorem import ClosedFormProblem, theorem1, theorem2
from tests.conftest import squared
from tests.support.pictures import make_folder


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def data() -> tuple[Tensor, Tensor]:
    scale = torch.logspace(-2, 1, 8).unsqueeze(1)
    return torch.randn(8, 4), scale * torch.randn(8, 2)


def test_rows_by_group_and_allocator() -> None:
    net, (x, y) = model(), data()
    net[0].weight.grad = before = torch.randn(6, 4)
    groups = [
        Group(net[0], LikelihoodRatio(), queries=10, name="a"),
        Group(net[2], SPSA(), queries=10, name="b"),
    ]
    found = diagnose(net, squared, x, y, groups=groups, repeats=4)
    assert net[0].weight.grad is before
    assert net[2].weight.grad is None
    names = ["equal", "bernoulli", "gaussian", "neyman"]
    assert [(r.group, r.allocator) for r in found.allocators] == [
        (g, n) for g in "ab" for n in names
    ]
    rows = {(r.group, r.allocator): r for r in found.allocators}
    for group in "ab":
        equal, gaussian = rows[group, "equal"], rows[group, "gaussian"]
        assert equal.equal_over == pytest.approx(1, rel=1e-6)
        assert gaussian.equal_over > 1.5  # residuals differ by a factor of 1000
        assert gaussian.over_optimal >= 1 - 1e-9
        assert gaussian.over_optimal == pytest.approx(
            equal.over_optimal / gaussian.equal_over, rel=1e-6
        )
        assert gaussian.cosine > equal.cosine
    json.dumps(found.to_dict())
    assert len(diagnosis_tables(found)) == 2
    shown = str(found).splitlines()
    assert sum("bernoulli" in line for line in shown) == 2
    assert any(line.split()[-1:] == ["recommended"] for line in shown)
    assert max(map(len, shown)) <= 80
    assert len(repr(found.sigmas[0])) < 200  # repr stays what it was


def test_the_recommended_sigma_is_on_the_plateau() -> None:
    net, (x, y) = model(), data()
    groups = [Group(net, LikelihoodRatio(targets="leaf"), queries=4, name="all")]
    found = diagnose(net, squared, x, y, groups=groups, repeats=1, allocators={"equal": Equal()})
    sigma = found.recommended("all")
    assert sigma is not None
    assert 1e-4 <= sigma <= 1e-1
    by_sigma = {row.sigma: row for row in found.sigmas}
    assert by_sigma[sigma].change < 0.2
    assert by_sigma[1e-6].change > 3 * by_sigma[sigma].change  # rounding
    assert by_sigma[1.0].change > 3 * by_sigma[sigma].change  # curvature
    units = [row.rounding_units for row in found.sigmas]
    assert units == sorted(units)


def test_large_ratios_leave_the_table_within_a_terminal() -> None:
    """Shaped noise on the last layer has almost no noise: signal-to-noise ratios of 1e9."""
    row = AllocatorRow("blocks-2", "bernoulli", 1.0, 0.0, 1.08, 0.95, 1065693668.067, 17.0, 3.54)
    shown = str(Diagnosis(1.1, [row], []))
    assert "1.066e+09" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_without_an_exact_gradient_the_cosine_is_nan() -> None:
    class Numpy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * 2)

    net, (x, y) = nn.Sequential(nn.Linear(4, 2), Numpy()), data()
    found = diagnose(net, squared, x, y, groups=[Group(net[0], LikelihoodRatio())], repeats=2)
    assert all(math.isnan(row.cosine) for row in found.allocators)
    assert all(row.snr >= 0 for row in found.allocators)


def test_shared_draws_and_exact_groups() -> None:
    net, (x, y) = model(), data()
    groups = [
        Group(net[0], SPSA(shared=True), queries=4, name="shared"),
        Group(net[2], Exact(), name="exact"),
    ]
    chosen = {"equal": Equal(), "gaussian": Gaussian()}
    found = diagnose(net, squared, x, y, groups=groups, allocators=chosen, repeats=2)
    assert [(r.group, r.allocator) for r in found.allocators] == [("shared", "equal")]


@pytest.mark.slow
def test_theorem_1_orders_allocations_by_the_objective() -> None:
    rows = sorted(theorem1(repeats=400, progress=False), key=lambda r: r.objective)
    assert [r.bound for r in rows] == sorted((r.bound for r in rows), reverse=True)
    assert [r.measured for r in rows] == sorted((r.measured for r in rows), reverse=True)
    for row in rows:
        assert abs(row.measured - row.bound) < 5 * row.error
    assert rows[0].allocation == "optimal"
    assert rows[0].error < 0.1 * rows[0].bound


def test_known_traces_are_those_of_the_engine() -> None:
    problem = ClosedFormProblem(0)
    counts = torch.full((8,), 6)
    found = problem.estimates(counts, 600, seed=1)
    predicted = float((problem.traces() / 6).sum()) / 64
    measured = found.var(0).sum().item()
    spread = (found - found.mean(0)).square().sum(1).std().item() / 600**0.5
    assert abs(measured - predicted) < 5 * spread
    assert spread < 0.2 * predicted


def test_theorem_2() -> None:
    found = theorem2()
    assert found.gap == pytest.approx(found.identity, rel=1e-9)
    assert found.neyman < found.gaussian < found.equal


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", "--batch", "8", "--repeats", "2", "--queries", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {row["group"] for row in found["allocators"]} == {
        "first third",
        "middle third",
        "last third",
    }
    assert any(row["recommended"] for row in found["sigmas"])
    main(["study", "theorem", "--repeats", "20"])
    assert "Theorem 2" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["image", "text"])
def test_own_model_and_data(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "photos", {"cat": 12, "dog": 12})
    texts = [
        {"text": f"this is a {('tree', 'coat')[i % 2]}.", "label": ("bad", "good")[i % 2]}
        for i in range(24)
    ]
    lines = "".join(json.dumps(line) + "\n" for line in texts)
    (tmp_path / "reviews.jsonl").write_text(lines)
    data = str(tmp_path / {"image": "photos", "text": "reviews.jsonl"}[task])
    few = ["--batch", "4", "--repeats", "2", "--queries", "2", "--steps", "1"]
    few += ["--words", "bad= tree", "good= dress"] if task == "text" else []
    main(["diagnose", "--task", task, "--data", data, *few])
    shown = capsys.readouterr().out
    assert "recommended" in shown
    assert "first third" in shown
    with pytest.raises(SystemExit, match="nowhere"):
        main(["diagnose", "--task", task, "--data", str(tmp_path / "nowhere"), *few])


def test_bad_arguments_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diagnose", "--bogus", "1"])
    with pytest.raises(SystemExit, match="--batch must be at least 2"):
        main(["diagnose", "--batch", "1"])
