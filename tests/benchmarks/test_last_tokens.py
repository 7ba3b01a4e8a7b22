"""The benchmark of noise on the last tokens, on the bundled model."""

from __future__ import annotations

import pytest
import torch

from benchmarks import last_tokens
from flops.tasks.text import Text, TextConfig


@pytest.fixture
def text() -> Text:
    return Text(TextConfig(train_last=2, limit=32, batch=8), torch.device("cpu"))


def test_all_of_the_gradient_is_in_the_last_token_after_the_last_layer(text: Text) -> None:
    found = last_tokens.energy(text, layers=(1, 2), batches=2)
    assert found["energy after layer 2"]["last token"] == pytest.approx(1)
    first = found["energy after layer 1"]
    assert first["last token"] < first["last two"] < 1


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_cosines_of_both_stages(text: Text) -> None:
    before = [p.detach().clone() for p in text.model.parameters()]
    found = last_tokens.cosines(text, 2, steps=9)
    assert {name for name in found if "blocks" in name} == {
        "blocks-1, last 2 tokens",
        "blocks-2, last 2 tokens",
    }
    assert found["blocks-2, last 2 tokens"]["late"] > 0.5
    for a, b in zip(before, text.model.parameters(), strict=True):
        assert torch.equal(a, b)
