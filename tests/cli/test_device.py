"""--device: every command that runs a model has it, and the model goes there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flops.cli.main import SUMMARIES, main

STUDIES = ("theorem", "shaped", "gradients", "robustness")
RUNNING = [
    *([name] for name in SUMMARIES if name not in ("report", "study")),
    *(["study", name] for name in STUDIES),
    *([name, "--task", "text"] for name in ("finetune", "compare")),
]
NAMES = [" ".join(arguments) for arguments in RUNNING]


@pytest.mark.parametrize("command", RUNNING, ids=NAMES)
def test_every_command_that_runs_a_model_has_it(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    assert "--device" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["serve", "--port", "0"], ["tune"], ["study", "shaped"], ["study", "theorem"]]
)
def test_a_device_that_is_not_there_is_an_error_at_once(
    command: list[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"device must be auto, cpu or cuda, not 'abacus'"):
        main([*command, "--device", "abacus"])
    assert not list(tmp_path.iterdir())  # nothing was started


PROGRAM = """
import json
import os
import torch
from flops.experiments.shaped_problems import Comparison, compare
from flops.experiments.shaped_training import TrainingRun, train
from flops.experiments.theorem import ClosedFormProblem
from flops.tasks.models.clip import PromptedClip
from tests.support.simulated_device import DEVICE, Traffic

torch.__future__.set_overwrite_module_params_on_conversion(True)  # it holds tensors of its own


def scored(clip):
    source = torch.Generator().manual_seed(0)
    text = torch.randn(2, 3, clip.text_width, generator=source).requires_grad_()
    image = torch.randn(2, 2, clip.image_width, generator=source)
    pixels = clip.prepare(torch.randint(255, (2, 30, 30), generator=source).to(torch.uint8))
    logits = clip.logits(clip.image_features(pixels, image), clip.text_features(text))
    logits.square().sum().backward()
    return torch.cat([logits.detach().flatten(), text.grad.flatten()])


one = PromptedClip.load()
expected, found = scored(one), {}
with Traffic() as traffic:
    other = PromptedClip.load().to(DEVICE)
    got = scored(other)
    found["clip"] = [str(got.device), float((got - expected).abs().max())]
    found["digest"] = one.digest() == other.digest()
run = Comparison("sequences", queries=2, steps=1)
expected = compare(run)["losses"][0]
with Traffic() as traffic:
    got = compare(Comparison("sequences", queries=2, steps=1, device=str(DEVICE)))["losses"][0]
found["problems"] = [len(traffic.copies) > 0, abs(got - expected)]
run = dict(method="backpropagation", batch=4, most=1)
expected = train(TrainingRun(**run))["losses"][0]
with Traffic() as traffic:
    got = train(TrainingRun(**run, device=str(DEVICE)))["losses"][0]
found["training"] = [len(traffic.copies) > 0, abs(got - expected)]
with Traffic() as traffic:
    problem = ClosedFormProblem(0, str(DEVICE))
    got = problem.estimates(torch.full((8,), 6), 60, 0)
found["theorem"] = [len(traffic.copies) > 0, str(got.device)]
error = got.mean(0) - problem.gradients().mean(0)
found["standard errors"] = float((error / (got.std(0) / len(got) ** 0.5)).abs().max())
print(json.dumps(found), flush=True)
os._exit(0)  # torch's threads of the simulated device are not always joined at exit
"""


def test_models_of_the_service_and_of_studies_run_elsewhere() -> None:
    """On a simulated device, in a process of its own: it cannot be unregistered."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["clip"][0] == "cpu"  # results are where the arguments were
    assert found["clip"][1] < 1e-4
    assert found["digest"]
    for name in ("problems", "training"):
        copied, difference = found[name]
        assert copied
        assert difference < 1e-5
    assert found["theorem"] == [True, "cpu"]
    assert found["standard errors"] < 5
