"""The training loop: settings, marks, metrics, the command line."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console

from flops.cli.main import main
from flops.errors import FlopsError
from flops.report.curves import read_metrics
from flops.tasks.classification.config import PRESETS, FinetuneConfig
from flops.tasks.classification.task import clip_attention
from flops.tasks.data.images import load
from flops.tasks.models.vit import load_model
from flops.training.config import ConfigError
from flops.training.console import Lines
from flops.training.loop import train
from flops.training.methods import METHODS
from flops.training.progress import budget_mark, epoch_mark
from flops.training.run_directory import RunDirectoryError, new_folder
from flops.training.trainer import Trainer

SMALL = FinetuneConfig(
    limit=40, batch=16, queries=4, epochs=1, checkpoint_seconds=None, plots=False
)


def small(**changed) -> FinetuneConfig:
    return SMALL.replace(**changed)


def printed(capsys, *arguments: str) -> FinetuneConfig:
    main(["finetune", *arguments, "--print-config"])
    return FinetuneConfig(**json.loads(capsys.readouterr().out))


def test_a_config_survives_json() -> None:
    config = small(sigma=(1e-5, 0.1 + 0.2), marks=(10.0, 1e6), epochs=None, budget=1 / 3)
    assert FinetuneConfig(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"zzz": 3}, "known are"),
        ({"queries": "many"}, "queries must be a number or auto, not 'many'"),
        ({"queries": 0.0}, "queries must be greater than 0 or auto, not 0.0"),
        ({"epochs": "3"}, "epochs must be an integer, or None, not '3'"),
        ({"epochs": True}, "epochs must be"),
        ({"epochs": 1.5}, "epochs must be"),
        ({"sigma": 0.1}, "sigma must be a list, or None, not 0.1"),
        ({"method": "sgd"}, "method must be bp, mezo, .* or shaped-lr, not 'sgd'"),
        ({"epochs": 0}, "epochs must be greater than 0, or None, not 0"),
        ({"epochs": None}, "set epochs, budget or steps"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, not nan"),
        ({"marks": [0]}, "marks must be greater than 0"),
        ({"sigma": [1e-3, 1e-3, 1e-3]}, r"one value or one per stage \(2\)"),
        ({"chunk": 1}, "chunk must be at least 2, or None, not 1"),
        ({"splits": ["test"]}, "splits are given as train=NAME"),
        ({"splits": ["dev=train"]}, "splits are given as train=NAME"),
        ({"seed": 2**63}, "seed must be less than 9223372036854775808"),
        ({"learning_rate": 10**400}, "learning_rate must be a number, not so large"),
    ],
)
def test_wrong_settings_are_explained(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FinetuneConfig(**values)


def test_command_line_over_file_over_preset(tmp_path: Path, capsys) -> None:
    toml, other = tmp_path / "a.toml", tmp_path / "b.json"
    toml.write_text('preset = "vit-base"\nepochs = 3\nlearning_rate = 0.5\nmarks = [1, 2.5]\n')
    found = printed(capsys, "--config", str(toml), "--learning-rate", "0.25")
    base = FinetuneConfig(**PRESETS["vit-base"])
    assert (found.batch, found.sigma, found.stages) == (base.batch, base.sigma, base.stages)
    assert (found.epochs, found.learning_rate, found.marks) == (3, 0.25, (1.0, 2.5))
    other.write_text(json.dumps(found.to_dict()))
    assert printed(capsys, f"--config={other}") == found
    assert printed(capsys, "--preset", "vit-large").sigma == PRESETS["vit-large"]["sigma"]
    assert printed(capsys, "--config", str(toml), "--preset", "vit-large").stages == 4
    assert printed(capsys) == FinetuneConfig()
    nothing = ("--config", "None", "--preset", "None", "--resume", "None")  # as the help says
    assert printed(capsys, *nothing) == FinetuneConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a table of settings"),
        ('{"a": 1}', "unknown setting 'a'"),
        ('{"preset": ["tiny"]}', "preset must be one of tiny"),
    ],
)
def test_a_wrong_file_is_explained(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        main(["finetune", "--config", str(path)])
    with pytest.raises(SystemExit, match="cannot read"):
        main(["finetune", "--config", str(tmp_path / "none.json")])


def test_unknown_options_fail(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["finetune", "--learningrate", "3"])
    assert stopped.value.code == 2
    assert "learningrate" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="epochs must be greater than 0"):
        main(["finetune", "--epochs", "-1"])
    with pytest.raises(SystemExit, match="no data 'nowhere'"):
        main(["finetune", "--data", "nowhere"])


def test_help_teaches_with_examples(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["finetune", "--help"])
    shown = capsys.readouterr().out
    assert "$ flops finetune --resume runs/ops" in shown
    assert "--learning-rate" in shown


def test_backpropagation_is_plain_training() -> None:
    """The loop with bp takes the steps of a loop without this library."""
    config = small(method="bp", epochs=2, learning_rate=1e-3)
    trainer = Trainer(config)
    model, format = load_model("bundled", 10, seed=0)
    data = load("digits", format, limit=40)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(6):
        pixels, labels = data.train.batch(trainer.batches[trainer.progress.position])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixels).logits, labels)
        loss.backward()
        optimizer.step()
        assert trainer.step()["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-3, atol=1e-5)


def test_orders_follow_from_seed_and_epoch() -> None:
    def orders(seed: int) -> list[list[int]]:
        trainer, found = Trainer(small(method="bp", seed=seed)), []
        for epoch in (0, 1, 0):
            trainer.progress.epoch = epoch
            assert [len(rows) for rows in trainer.batches] == [16, 16, 8]
            found.append(torch.cat(trainer.batches).tolist())
        return found

    first, other = orders(0), orders(1)
    assert first[0] == first[2] != first[1]
    assert first[0] != other[0]
    assert all(sorted(order) == list(range(40)) for order in [*first, *other])


@pytest.mark.parametrize("until", ["first", "last"])
def test_marks_of_epochs_and_budgets(until: str) -> None:
    """A budget is reached before the step that would go beyond it."""
    one = train(small(method="bp", epochs=3)).evaluations
    costs = [e.forward_equivalents for e in one]
    middle, late = (costs[1] + costs[2]) / 2, costs[2] + (1 if until == "last" else 1000)
    config = small(method="bp", epochs=2, budget=late, marks=(middle, 1.0), until=until, test=True)
    found = train(config)
    assert dataclasses.replace(found.at(epoch=1), seconds=0) == dataclasses.replace(
        one[1], seconds=0
    )
    at = found.at(budget=middle)
    per_step = 16 * (costs[1] - costs[0]) / 40
    assert middle - per_step < at.forward_equivalents <= middle
    assert found.at(budget=1.0).step == 1  # nothing is known about a step before the first
    assert found.at(epoch=2).test is not None
    assert at.test is None
    if until == "first":
        assert found.steps == 6
        with pytest.raises(ValueError, match="no evaluation at"):
            found.at(budget=late)
    else:  # one more forward equivalent buys no step
        assert found.at(budget=late) is found.at(epoch=2)
        assert found.at(epoch=2).marks == (epoch_mark(2), budget_mark(late))
    assert [e for e in found.evaluations if e.test is not None] == [found.evaluations[-1]]


def test_a_budget_alone_ends_a_run() -> None:
    found = train(small(method="bp", epochs=None, budget=800.0))
    assert 700 < found.forward_equivalents <= 800
    assert found.evaluations[-1].marks == (budget_mark(800.0),)


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")  # single coordinates
@pytest.mark.parametrize(
    "method",
    [
        # DeepZero's pruning alone takes 2,328 passes before the first step.
        pytest.param(method, marks=pytest.mark.slow if method == "deepzero" else ())
        for method in METHODS
    ],
)
def test_every_method_runs_and_reports(method: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train(small(method=method, output=str(out), limit=20, clip_attention=1.0))
    steps, evaluations = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert [line["marks"] for line in evaluations] == [["epoch 0"], ["epoch 1"]]
    last = steps[-1]
    assert last["queries"] == result.queries
    assert last["forward_equivalents"] == result.forward_equivalents
    assert sum(last["parts"].values()) == pytest.approx(result.forward_equivalents)
    assert (result.queries == 0) == (method == "bp")
    assert ("blocks-1" in last["shaping"]) == (method == "shaped-lr")
    assert (
        json.loads((out / "config.json").read_text())
        == small(method=method, output=str(out), limit=20, clip_attention=1.0).to_dict()
    )


def test_the_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = train(small(output=str(out), plots=True))
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert names == {
        *(
            "config.json",
            "environment.json",
            "result.json",
            "metrics.jsonl",
            "checkpoints",
            "model",
        ),
        *("counts.safetensors", "curves.png", "allocation.png"),
    }
    assert str(Path.home()) not in (out / "environment.json").read_text()
    assert (out / "curves.png").stat().st_size > 5000
    assert (out / "allocation.png").stat().st_size > 5000
    from transformers import AutoImageProcessor, ViTForImageClassification

    saved = ViTForImageClassification.from_pretrained(out / "model").eval()
    assert saved.config.id2label[3] == "3"
    assert tuple(AutoImageProcessor.from_pretrained(out / "model").image_mean) == (0.5,)
    data = load("digits", limit=40)
    pixels, labels = data.validation.batch(torch.arange(40))
    with torch.no_grad():
        right = saved(pixels).logits.argmax(1) == labels
    assert float(right.double().mean()) == pytest.approx(result.accuracy)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = small(method="bp", output=str(out), limit=8)
    train(config)
    with pytest.raises(RunDirectoryError, match="already holds a run; continue it with --resume"):
        train(config)
    assert new_folder(small(), tmp_path).name == "digits-shaped-lr-seed0"
    (tmp_path / "digits-shaped-lr-seed0").mkdir()
    assert new_folder(small(), tmp_path).name == "digits-shaped-lr-seed0-2"
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="not empty"):
        train(small(output=str(tmp_path)))
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("mine")
    absent = small(model="nowhere")  # whoever loads it fails
    with pytest.raises(RunDirectoryError, match="file is a file; choose another"):
        train(absent.replace(output=str(tmp_path / "file/a/b")))
    with pytest.raises(RunDirectoryError, match=r"cannot write to .*too long"):
        train(absent.replace(output=str(tmp_path / ("x" * 300))))
    monkeypatch.setattr(
        "flops.training.run_directory.os.access", lambda *_: False
    )  # root may write everywhere
    with pytest.raises(RunDirectoryError, match="is not writable"):
        train(absent.replace(output=str(tmp_path / "a/b")))


def test_settings_that_do_not_fit_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FlopsError, match="no model"):
        train(small(model="nowhere", output=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["meta", "cuda:77", "nothing"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(FlopsError, match=f"device must be auto, cpu or cuda, not '{device}'"):
        Trainer(small(device=device))


def image_folder(folder: Path, *classes: str, each: int) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(folder / name / f"{number}.png")
    return folder


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlopsError, match="has a single class, 'cat'"):
        Trainer(small(data=str(image_folder(tmp_path, "cat", each=9))))


def test_what_was_held_out_is_said(tmp_path: Path) -> None:
    out = io.StringIO()
    data = image_folder(tmp_path, "a", "b", "c", "d", each=1)
    display = Lines(Console(file=out))
    train(small(data=str(data), method="bp"), display=display)
    assert "note: test: 1 points held out of the 4 training points" in out.getvalue()
    assert "note: 2 of 4 classes have no training points" in out.getvalue()


def test_stopped_while_loading_there_is_nothing_to_resume(tmp_path: Path, monkeypatch) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flops.training.loop.Trainer", stop)
    with pytest.raises(SystemExit, match="stopped before the run started"):
        main(["finetune", "--output", str(tmp_path / "run")])
    monkeypatch.setattr("flops.experiments.compare.compare", stop)
    with pytest.raises(SystemExit, match="stopped; finished runs are saved"):
        main(["compare", "--output", str(tmp_path / "compare")])
    with pytest.raises(SystemExit, match="--checkpoint needs --resume"):
        main(["finetune", "--checkpoint", "previous", "--output", str(tmp_path / "run")])


def test_gradients_of_attention_are_clipped_alone() -> None:
    model = Trainer(small(method="bp", limit=8)).model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip_attention(model, 2.0)
    attention = [p.grad.flatten() for n, p in model.named_parameters() if "attention" in n]
    others = [p.grad for n, p in model.named_parameters() if "attention" not in n]
    assert torch.cat(attention).norm() == pytest.approx(2.0, rel=1e-3)
    assert len(attention) == 6 * 8
    assert all(bool((g == 1).all()) for g in others)
