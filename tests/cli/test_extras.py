"""A package that is missing: one line that says how to get it, in every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from PIL import Image

from flops import optional

BLOCK = """
import os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["BLOCKED"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
CASES = [
    ("transformers", "vision", "finetune"),
    ("PIL", "vision", "finetune --data photos"),
    ("datasets", "data", "finetune --data owner/name"),
    ("gguf", "llm", "align --language model.gguf"),
    ("transformers", "blackbox", "serve --port 0"),
    ("fastapi", "blackbox", "serve --port 0"),
    ("prometheus_client", "blackbox", "serve --port 0"),
    ("httpx", "blackbox", "tune"),
    ("tenacity", "blackbox", "tune"),
    ("fastapi", "blackbox", "tune"),
    ("cma", "cma", "tune --methods cma-es"),
    ("sklearn", "vision", "compare"),
    ("transformers", "vision", "diagnose"),
    ("sklearn", "vision", "study shaped --parts main --seeds 1"),
    ("transformers", "vision", "study gradients --quick"),
    ("sklearn", "vision", "study robustness"),
]


def without(module: str, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where a module, here and in its children, does not import."""
    (folder / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    paths = [str(folder), str(Path(optional.__file__).parents[1])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "BLOCKED": module, "COLUMNS": "500"}
    return subprocess.run(
        [sys.executable, "-m", "flops", *command.split()],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.mark.parametrize(("module", "extra", "command"), CASES)
def test_a_missing_package_is_one_line(
    module: str, extra: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / "photos/cat").mkdir(parents=True)
    (tmp_path / "photos/dog").mkdir()
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
        Image.new("L", (8, 8)).save(tmp_path / "photos" / name)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    ran = without(module, command, tmp_path)
    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 1
    assert line.startswith("flops: this needs ")
    assert line.endswith(f"install it with: {optional.install_command(extra)}")


def test_a_run_without_plots_says_so(tmp_path: Path) -> None:
    command = "finetune --limit 32 --batch 16 --queries 2 --epochs 1 --output run"
    ran = without("matplotlib", command, tmp_path)
    assert ran.returncode == 0, ran.stderr
    said = " ".join((ran.stdout + ran.stderr).split())
    assert "no plots were drawn" in said
    assert optional.install_command("plots") in said
    assert "Traceback" not in said


def test_commands_name_what_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Path(optional.__file__).parents[2]
    assert optional.install_command("cma") == f'pip install -e "{checkout}[cma]"'

    class Installed:
        kept: str | None = None

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self.kept

    monkeypatch.setattr(optional, "CHECKOUT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())
    assert optional.install_command("cma").startswith('pip install ".[cma]" ')
    for kept, expected in [
        ({"url": "file:///x/flops_torch-0.1.0-py3-none-any.whl", "archive_info": {}}, None),
        (
            {"url": "https://h.example/r.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "git+https://h.example/r.git@ab12",
        ),
    ]:
        Installed.kept = json.dumps(kept)
        shown = expected or kept["url"]
        assert optional.install_command("cma") == f'pip install "flops-torch[cma] @ {shown}"'
