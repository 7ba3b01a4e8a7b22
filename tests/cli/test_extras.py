"""A package that is missing: one line that says how to get it, in every command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from PIL import Image

from flops import optional
from tests.support.forking import Forks

CASES = [
    ("transformers", "vision", "finetune"),
    ("PIL", "vision", "finetune --data photos"),
    ("datasets", "data", "finetune --data owner/name"),
    ("gguf", "llm", "align --language model.gguf"),
    ("transformers", "llm", "finetune --task text"),
    ("peft", "llm", "finetune --task text --lora 2"),
    ("transformers", "blackbox", "serve --port 0"),
    ("fastapi", "blackbox", "serve --port 0"),
    ("prometheus_client", "blackbox", "serve --port 0"),
    ("httpx", "blackbox", "tune"),
    ("tenacity", "blackbox", "tune"),
    ("fastapi", "blackbox", "tune"),
    ("cma", "cma", "tune --methods cma-es"),
    ("sklearn", "vision", "compare"),
    ("transformers", "vision", "diagnose"),
    ("sklearn", "vision", "study shaped --parts main --seeds 1 --workers 0"),
    ("transformers", "vision", "study gradients --quick"),
    ("sklearn", "vision", "study robustness"),
]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.mark.parametrize(("module", "extra", "command"), CASES)
def test_a_missing_package_is_one_line(
    module: str, extra: str, command: str, forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "photos/cat").mkdir(parents=True)
    (tmp_path / "photos/dog").mkdir()
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
        Image.new("L", (8, 8)).save(tmp_path / "photos" / name)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    ran = forks.run(command.split(), tmp_path, without=module)
    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 1
    assert line.startswith("flops: this needs ")
    assert line.endswith(f"install it with: {optional.install_command(extra)}")


def test_a_run_without_plots_says_so(forks: Forks, tmp_path: Path) -> None:
    command = "finetune --limit 32 --batch 16 --queries 2 --epochs 1 --output run"
    ran = forks.run(command.split(), tmp_path, without="matplotlib")
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

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert optional.install_command("cma", tmp_path).startswith('pip install ".[cma]" ')
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())
    assert optional.install_command("cma", tmp_path) == 'pip install "flops-torch[cma]"'
    for kept, expected in [
        ({"url": "file:///x/flops_torch-0.1.0-py3-none-any.whl", "archive_info": {}}, None),
        (
            {"url": "https://h.example/r.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "git+https://h.example/r.git@ab12",
        ),
    ]:
        Installed.kept = json.dumps(kept)
        shown = expected or kept["url"]
        found = optional.install_command("cma", tmp_path)
        assert found == f'pip install "flops-torch[cma] @ {shown}"'
