"""A run that was finished goes on when it gets more epochs, steps or budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flops.cli.main import main
from flops.tasks.classification.config import FinetuneConfig
from flops.training.config import ConfigError
from flops.training.loop import train

SMALL = FinetuneConfig(limit=24, batch=8, queries=4, epochs=1, method="lr", plots=False, test=True)


def weights(folder: Path) -> dict[str, list[float]]:
    found = load_file(folder / "model" / "model.safetensors")
    return {name: value.flatten().tolist() for name, value in found.items()}


def test_an_extended_run_is_the_longer_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, run = tmp_path / "long", tmp_path / "run"
    train(SMALL.replace(epochs=2, output=str(long)))
    train(SMALL.replace(output=str(run)))
    main(["finetune", "--resume", str(run), "--epochs", "2"])
    shown = capsys.readouterr().out
    assert "from step 3" in shown
    assert "after 6 steps" in shown
    assert weights(run) == weights(long)
    assert json.loads((run / "config.json").read_text())["epochs"] == 2
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 6
    assert result["test"] is not None
    train(SMALL.replace(epochs=2, output=str(run)), resume=True)  # complete: nothing to do
    assert weights(run) == weights(long)


def test_other_limits_and_other_settings(tmp_path: Path) -> None:
    run = SMALL.replace(method="bp", output=str(tmp_path / "run"))
    train(run)
    for changed, said in (
        ({"steps": 2}, "already reached 3 of steps, and 2 would not extend it"),
        ({"steps": 9}, "the run ended at epoch 1, which still limits it"),
        ({"epochs": 2, "schedule": "cosine"}, "cosine schedule cannot change its length"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(run.replace(**changed), resume=True)
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] is None
    assert train(run.replace(epochs=None, steps=5), resume=True).steps == 5
    with pytest.raises(SystemExit, match="keeps its settings but epochs, steps, budget: leave out"):
        main(["finetune", "--resume", str(tmp_path / "run"), "--learning-rate", "0.1"])
