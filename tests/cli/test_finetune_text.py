"""`flops finetune --task text`: the task chooses the settings, runs resume, help teaches both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flops.cli.main import main
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.text import TextConfig
from flops.tasks.text.config import PRESETS
from flops.training.loop import train
from tests.support.resuming import Stop, Stopper, lines

pytestmark = pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
SMALL = ["--task", "text", "--limit", "24", "--batch", "8", "--queries", "4", "--no-plots"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    main(["finetune", *arguments, "--print-config"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_task_chooses_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == FinetuneConfig().to_dict()
    assert printed(capsys, "--task", "image") == FinetuneConfig().to_dict()
    assert printed(capsys, "--task", "text") == TextConfig().to_dict()
    assert printed(capsys, "--task=text", "--lora", "8")["lora"] == 8
    smollm2 = TextConfig(**PRESETS["smollm2"]).to_dict()
    assert printed(capsys, "--task", "text", "--preset", "smollm2") == smollm2
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"task": "text", "steps": 3, "epochs": None}))
    found = printed(capsys, "--config", str(file), "--words", "garment=hat", "other=dog")
    assert (found["task"], found["steps"]) == ("text", 3)
    assert found["words"] == ["garment=hat", "other=dog"]


def test_wrong_tasks_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="task must be image or text, not 'sound'"):
        main(["finetune", "--task", "sound"])
    with pytest.raises(SystemExit, match="--lora needs --task text"):
        main(["finetune", "--lora", "8"])
    with pytest.raises(SystemExit, match="--image-column needs --task image"):
        main(["finetune", "--task", "text", "--image-column=x"])
    with pytest.raises(SystemExit, match="holds no run"):  # a value is no option
        main(["finetune", "--output", "lora", "--resume", "words"])
    with pytest.raises(SystemExit):
        main(["finetune", "--lore", "8"])
    assert "--lore" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="holds no run"):
        main(["finetune", "--resume", str(tmp_path)])


def test_help_teaches_both(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, taught in (
        ([], ("$ flops finetune --task text", "--image-column")),
        (["--task", "text"], ("--task text --preset smollm2", "--train-last")),
    ):
        with pytest.raises(SystemExit):
            main(["finetune", *arguments, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        for text in taught:
            assert text in shown


@pytest.mark.parametrize("lora", [(), ("--lora", "2")])
def test_a_stopped_run_goes_on_bit_for_bit(lora: tuple[str, ...], tmp_path: Path) -> None:
    steps = ["--steps", "6", "--epochs", "None", "--checkpoint-steps", "2"]
    main(["finetune", *SMALL, *steps, *lora, "--output", str(tmp_path / "whole")])
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    broken = TextConfig(**{**config, "output": str(tmp_path / "broken")})
    with pytest.raises(Stop):
        train(broken, display=Stopper(5))
    main(["finetune", "--resume", str(tmp_path / "broken")])
    assert lines(tmp_path / "whole") == lines(tmp_path / "broken")
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    whole, again = (load_file(tmp_path / n / "model" / name) for n in ("whole", "broken"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    with pytest.raises(SystemExit, match="leave out queries"):
        main(["finetune", "--resume", str(tmp_path / "broken"), "--queries", "5"])


def test_a_changed_text_stops_a_resumed_run(tmp_path: Path) -> None:
    rows = [
        {"text": f"a photo of a {'hat' if i % 2 else 'dog'}.", "label": i % 2} for i in range(40)
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--data", str(file), "--words", "0=ball", "1=coat", "--method", "bp"]
    run = str(tmp_path / "run")
    main(["finetune", *SMALL, *given, "--epochs", "1", "--output", run])
    rows[0]["text"] = "a photo of a tree."
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit, match="have changed since the run was started"):
        main(["finetune", "--resume", run])


def test_evaluations_by_steps(tmp_path: Path) -> None:
    steps = ["--epochs", "None", "--steps", "7", "--evaluate-every", "None", "--test"]
    given = [*SMALL, "--method", "bp", *steps, "--evaluate-steps", "3"]
    main(["finetune", *given, "--output", str(tmp_path / "run")])
    found = [line for line in lines(tmp_path / "run") if line["kind"] == "evaluation"]
    assert [e["step"] for e in found] == [3, 6, 7]
    assert [e["marks"] for e in found] == [["step 3"], ["step 6"], ["step 7"]]
    assert [e["test"] is not None for e in found] == [False, False, True]
