"""Candidates know themselves."""

from __future__ import annotations

import torch

from flops.blackbox import Candidates
from tests.support.tuned_functions import START, N


def test_a_question_knows_itself() -> None:
    one = Candidates(START.expand(N, -1), torch.arange(N), "clean")
    same = Candidates(START.clone().expand(N, -1), torch.arange(N), "clean")
    assert one.digest() == same.digest()
    others = [
        Candidates(START.expand(N, -1), torch.arange(N), "query"),
        Candidates(START.expand(N, -1), torch.arange(N).flip(0), "clean"),
        Candidates(torch.nextafter(START, START + 1).expand(N, -1), torch.arange(N), "clean"),
        one.part(0, 2),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 5
    assert torch.equal(one.part(1, 3).points, torch.tensor([1, 2]))
