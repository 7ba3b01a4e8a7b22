"""A run that was killed without warning resumes to the same weights; missing packages are named."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flops.integrations import transformers
from flops.optional import MissingPackageError, install_command
from tests.support.language import arguments, language_model, same, trainer, weights

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from tests.support.language import arguments, language_model, trainer

class Kill(TrainerCallback):
    def on_substep_end(self, args, state, control, **options):
        if state.global_step == 3:  # in the middle of the fourth step
            os.kill(os.getpid(), signal.SIGKILL)

options = dict(save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
args = arguments(Path(sys.argv[1]), **options)
trainer(language_model(), args, callbacks=[Kill()]).train()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = trainer(language_model(), arguments(tmp_path / "whole", **options))
    whole.train()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cut")]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr[-2000:]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["checkpoint-2"]
    resumed = trainer(language_model(), arguments(tmp_path / "cut", **options))
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed.model), weights(whole.model))
    assert resumed.engine.steps == whole.engine.steps == 8


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.spec_from_file_location("without", transformers.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(MissingPackageError, match=f"this needs {package}") as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert str(caught.value).endswith(install_command("llm"))
