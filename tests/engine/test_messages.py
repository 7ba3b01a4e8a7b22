"""How many messages a step sends, and how much: a rank whose other ranks are copies of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.engine.collectives import BUCKET, Collectives
from flops.engine.fingerprint import Fingerprint
from flops.engine.shared_clean_pass import shared_clean_pass
from flops.passes.structure import Leaf


@dataclass
class Copies(Collectives):
    """The first of two ranks; the second is a copy of it."""

    size: int = 2

    def meet(
        self, points: int, prints: Fingerprint, batch: Callable[[bool], float]
    ) -> tuple[int, ...]:
        return (points, points)

    def exchange(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        return tensor.mul_(2) if how == "SUM" else tensor

    def fail(self, error: BaseException, always: bool = False) -> None:
        """Nobody is told."""


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=source), torch.randint(0, 5, (4,), generator=source)


def test_a_group_at_rest_sends_no_gradient() -> None:
    """Withheld for long, a group with automatic queries makes them every eighth step only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 5))
    ranks, stage = Copies(), LikelihoodRatio("auto", "stage", shaping=Shaping(withhold=0.2))
    groups = [Group(model[:3], stage, "auto", name="early"), Group(model[3], stage, "auto")]
    fg = ForwardGradient(model, entropy, groups, process_group=ranks)
    early = sum(p.numel() for p in model[:3].parameters())
    sent = {}
    for step in range(5):
        if step >= 3:
            fg.memory["early"]["withheld"] = 20
        before = ranks.sent
        report = fg.estimate(*batch(step))
        sent[int(report.counts["early"].sum()) > 0] = ranks.sent - before
    assert sent[True] > 4 * early
    assert sent[False] < 4 * early


def test_a_groups_gradients_are_one_message() -> None:
    model, ranks = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), Copies()
    parameters = list(model.parameters())
    given = {p: torch.ones_like(p) for p in parameters[1:]}
    found = ranks.sum_gradients(given, parameters)
    assert ranks.messages == 1
    assert list(found) == parameters[1:]  # none for the first, on no rank
    assert all(torch.equal(g, torch.full_like(g, 2)) for g in found.values())


def test_large_gradients_are_several_messages() -> None:
    ranks, parameters = Copies(), [nn.Parameter(torch.zeros(BUCKET // 2)) for _ in range(3)]
    found = ranks.sum_gradients({p: torch.ones_like(p) for p in parameters}, parameters)
    assert ranks.messages == 3
    assert all(float(g.sum()) == BUCKET for g in found.values())


@pytest.mark.parametrize(("most", "messages"), [(1 << 22, 2), (20, 3)])
def test_a_shared_clean_pass_is_a_message_for_each_type(
    most: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several, if all outputs together are too large for one."""
    monkeypatch.setattr("flops.engine.shared_clean_pass.BUCKET", most)
    cpu = torch.device("cpu")
    outputs = {
        0: [torch.ones(2, 3), "same on all"],
        1: [torch.ones(2, 2, dtype=torch.bfloat16).T],
        2: [torch.ones(2, 7, dtype=torch.int32)],
    }
    leaves = {
        0: [Leaf((4, 3), 0, torch.float32, cpu), None],
        1: [Leaf((2, 4), 1, torch.bfloat16, cpu)],
        2: [Leaf((4, 7), 0, torch.int32, cpu)],
    }
    calls = {number: SimpleNamespace(leaves=each) for number, each in leaves.items()}
    layout: Any = SimpleNamespace(
        needed=set(calls), embedding=None, structure=SimpleNamespace(calls=calls)
    )
    passes: Any = SimpleNamespace(
        batch=SimpleNamespace(size=4), clean=lambda *_, **__: (torch.ones(2), outputs)
    )
    ranks = Copies()
    losses, record = shared_clean_pass(passes, layout, ranks, lambda: None, None)
    assert ranks.messages == messages
    assert losses.tolist() == [2, 2, 0, 0]  # the copy has sent the same points
    assert record[0][0].tolist() == [[2] * 3] * 2 + [[0] * 3] * 2
    assert record[0][1] == "same on all"
    assert (record[1][0].dtype, record[2][0].dtype) == (torch.bfloat16, torch.int32)
    assert record[1][0].tolist() == [[2, 2, 0, 0]] * 2
    assert record[2][0].tolist() == [[2] * 7] * 2 + [[0] * 7] * 2
