"""Every Python block of the documentation runs, page by page."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flops
from tests.support.pages import DOCS, PAGES, python_blocks, run

TESTED = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
RUN = [p for p in PAGES if python_blocks(p) and not (p.parent == DOCS and p.stem in TESTED)]


def network() -> dict[str, Any]:
    """A model and a batch, for pages that show a part of a loop."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    inputs, targets = torch.randn(8, 16), torch.randint(4, (8,))
    return {
        "flops": flops,
        "torch": torch,
        "ForwardGradient": flops.ForwardGradient,
        "model": model,
        "layers": layers,
        "loss_fn": loss_fn,
        "inputs": inputs,
        "targets": targets,
        "rows": torch.arange(8),
    }


PREPARED: dict[str, Callable[[], dict[str, Any]]] = {"speed": network, "shaped-noise": network}
QUIET = {"lightning"}  # Lightning warns of few workers, and of what it imports


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = PREPARED[page.stem]() if page.stem in PREPARED else {}
    with warnings.catch_warnings():
        if page.stem in QUIET:
            warnings.simplefilter("ignore")
        run(page, namespace)
    report = namespace.get("report")
    assert report is None or isinstance(report, flops.StepReport)


def test_pages_are_found() -> None:
    names = {page.stem for page in RUN}
    assert names >= {"tutorial", "own-model", "lightning", "speed", "shaped-noise"}
    assert not names & {"blackbox", "onnx", "trainer"}  # which have tests of their own
