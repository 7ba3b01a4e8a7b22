"""The skeletons in CONTRIBUTING.md work: an allocator and an estimator, one file each."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.allocators import Signal
from tests.conftest import exact, flat, gradients, squared

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def defined(name: str, monkeypatch: pytest.MonkeyPatch) -> type:
    (source,) = [block for block in BLOCKS if f"class {name}" in block]
    module = types.ModuleType("skeleton")
    monkeypatch.setitem(sys.modules, "skeleton", module)
    exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
    found: type = getattr(module, name)
    return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return (
        torch.randn(5, 4, generator=source).double(),
        torch.randn(5, 2, generator=source).double(),
    )


def test_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = defined("ByLoss", monkeypatch)()
    counts = allocator.allocate(Signal(torch.tensor([0.0, 1.0, 3.0]), 12, 1, 1, "group"))
    assert counts.tolist() == [1, 3, 8]
    net, (x, y) = model(), data()
    fg = ForwardGradient(net, squared, Group(net, LikelihoodRatio(), 8), allocator=allocator)
    report = fg.estimate(x, y)
    (found,) = report.counts.values()
    assert int(found.sum()) == 40
    assert len(set(found.tolist())) > 1


def test_the_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = defined("WeightNoise", monkeypatch)(sigma=1e-6)
    net, (x, y) = model(), data()
    truth = flat(exact(net, squared, x, y))
    net.zero_grad()
    before = [p.clone() for p in net.parameters()]
    report = ForwardGradient(net, squared, Group(net, estimator, queries=4000)).estimate(x, y)
    found = flat(gradients(net))
    assert float(torch.nn.functional.cosine_similarity(found, truth, dim=0)) > 0.98
    assert float(found.norm() / truth.norm()) == pytest.approx(1, abs=0.1)
    assert report.queries == 5 * 4000
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
