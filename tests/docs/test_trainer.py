"""The code of docs/trainer.md runs, block by block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from peft import PeftModel

from flops.integrations.transformers import ForwardTrainer

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"


@pytest.mark.filterwarnings("ignore:.*rounding units")  # rewards that no query changes
def test_the_code_runs_and_trains() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
        trainer = namespace.get("trainer")
        if trainer is not None:
            assert isinstance(trainer, ForwardTrainer)
            assert trainer.state.global_step == 4
            assert trainer.totals.queries > 0
    assert isinstance(namespace["trainer"].model, PeftModel)  # type: ignore[attr-defined]
