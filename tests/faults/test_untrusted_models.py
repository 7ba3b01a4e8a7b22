"""Files of a model are data: none of them is run, and whatever is wrong with them is said."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flops.cli.main import main
from flops.tasks.alignment.models import load_encoder, load_language
from flops.tasks.models.vit import image_format, load_model

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "src" / "flops" / "tasks" / "assets"
AUTO = ("AutoConfig", "AutoModel", "AutoModelForImageClassification", "AutoModelForCausalLM")
AUTO += ("AutoModelForSequenceClassification",)
SHORT = ["--limit", "24", "--epochs", "1", "--method", "bp"]
ONE_SETTING = ["--seeds", "1", "--workers", "0", "--learning-rates", "1e-3", "--sigmas", "1e-3"]
COMMANDS = {
    "finetune": ("tiny-vit", ["finetune", *SHORT, "--model"]),
    "compare": (
        "tiny-vit",
        ["compare", *SHORT[:4], "--methods", "bp", *ONE_SETTING, "--model"],
    ),
    "encoder": ("tiny-vit", ["align", *SHORT, "--encoder"]),
    "language": ("tiny-llama", ["align", *SHORT, "--language"]),
    "text": ("tiny-llama", ["finetune", "--task", "text", *SHORT, "--model"]),
    "head": (
        "tiny-llama",
        ["finetune", "--task", "text", "--objective", "head", *SHORT, "--model"],
    ),
    "serve": ("tiny-clip", ["serve", "--port", "0", "--classes", "a,b", "--model"]),
}


def copied(asset: str, folder: Path) -> Path:
    shutil.copytree(ASSETS / asset, folder)
    return folder


def change(file: Path, **values: Any) -> None:
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**kept, **values}), encoding="utf-8")


def hostile(asset: str, folder: Path, kind: str) -> tuple[Path, Path]:
    """A copy of a model with code of its own that writes a file when it is imported."""
    marker = folder.with_name("marker")
    copied(asset, folder)
    (folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "class Config: pass\nclass Model: pass\nclass Tokens: pass\n",
        encoding="utf-8",
    )
    classes = {name: "evil.Config" if name == "AutoConfig" else "evil.Model" for name in AUTO}
    if kind != "tokenizer":
        change(folder / "config.json", auto_map=classes)
    if kind == "unknown":  # else transformers has a class of its own for it
        change(folder / "config.json", model_type="evil")
    tokens = {"AutoTokenizer": ["evil.Tokens", "evil.Tokens"]}
    change(folder / "tokenizer_config.json", auto_map=tokens, tokenizer_class="EvilTokens")
    return folder, marker


@pytest.mark.parametrize(
    ("command", "kind"),
    [(command, kind) for command in COMMANDS for kind in ("unknown", "known")]
    + [("language", "tokenizer"), ("text", "tokenizer"), ("serve", "tokenizer")],
)
def test_code_in_a_model_folder_is_never_run(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset, arguments = COMMANDS[command]
    folder, marker = hostile(asset, tmp_path / "model", kind)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.chdir(tmp_path)
    if command == "serve":
        monkeypatch.setattr("flops.serve.server.serve", lambda *_: None)  # it never ends
    output = [] if command == "serve" else ["--output", str(tmp_path / "run")]
    said = ""
    try:
        main([*arguments, str(folder), *output])
    except SystemExit as error:
        said = str(error)
    assert not marker.exists()
    if kind == "unknown" and command != "serve":
        assert "code of a model is never run" in said


@pytest.mark.parametrize("typed", ["y\ny\n", pytest.param("", marks=pytest.mark.slow)])
def test_an_answer_in_a_pipe_runs_no_code(typed: str, tmp_path: Path) -> None:
    folder, marker = hostile("tiny-vit", tmp_path / "model", "unknown")
    found = subprocess.run(
        [sys.executable, "-m", "flops", *COMMANDS["finetune"][1], str(folder)],
        input=typed,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert not marker.exists()


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize(
    ("asset", "load"),
    [("tiny-vit", load_model), ("tiny-vit", load_encoder), ("tiny-llama", load_language)],
)
def test_pickled_weights_are_not_read(asset: str, load: Any, tmp_path: Path) -> None:
    folder, marker = copied(asset, tmp_path / "model"), tmp_path / "marker"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")  # harmless, and yet not read
    with pytest.raises(OSError, match=r"pickled ones \(.bin, .pt\) are not read"):
        load(str(folder))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(OSError, match="convert them with save_pretrained"):
        load(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("asset", "load"),
    [
        ("tiny-vit", image_format),
        ("tiny-vit", load_model),
        ("tiny-vit", load_encoder),
        ("tiny-llama", load_language),
    ],
)
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_the_hub_is_not_run(asset: str, load: Any, name: str, tmp_path: Path) -> None:
    folder = copied(asset, tmp_path / "model")
    change(folder / "config.json", **{name: "someone/kernel"})
    with pytest.raises(ValueError, match="names the hub kernel 'someone/kernel'"):
        load(str(folder))


def calls(names: tuple[str, ...]) -> list[tuple[str, ast.Call, str]]:
    found = []
    for place in ("src", "scripts", "benchmarks", "examples"):
        for path in sorted((ROOT / place).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                    if name in names:
                        where = f"{path.relative_to(ROOT)}:{node.lineno}"
                        found.append((where, node, ast.unparse(node.func)))
    return found


def test_every_call_that_loads_refuses_code() -> None:
    found = calls(("from_pretrained", "load_dataset", "from_config"))
    assert len(found) >= 10
    for where, call, name in found:
        given = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert given.get("trust_remote_code") == "False", f"{where} needs trust_remote_code=False"
        if "Model" in name or "ViT" in name:
            assert given.get("use_safetensors") == "True", f"{where} needs use_safetensors=True"
    for where, call, _ in calls(("load",)):
        if ast.unparse(call.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(call), f"{where} needs weights_only=True"


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def garbled(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def wrong_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = max(weights, key=lambda n: weights[n].numel())
    save_file(
        {**weights, name: torch.zeros(3, 5)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def lost_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {n: w for n, w in weights.items() if "layers.0." not in n and "layer.0." not in n}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def bad_json(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


def no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]", encoding="utf-8")


def no_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def deep(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000, encoding="utf-8")


def odd_sizes(folder: Path) -> None:
    change(folder / "config.json", hidden_size="many")


def no_heads(folder: Path) -> None:
    change(folder / "config.json", num_attention_heads=0)


FAULTS = (truncated, garbled, empty, wrong_shapes, lost_weights, bad_json, no_object, no_text)
FAULTS += (deep, odd_sizes, no_heads)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", ["finetune", "encoder", "language", "head"])
def test_broken_files_of_a_model_are_said_in_a_sentence(
    command: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset, arguments = COMMANDS[command]
    folder = copied(asset, tmp_path / "model")
    fault(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main([*arguments, str(folder), "--output", str(tmp_path / "run")])
    said = str(raised.value)
    assert said.startswith("flops: ")
    assert "model" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"image_mean": "grey"}',
        b'{"image_mean": [0.5, null]}',
        b'{"image_mean": {"a": 1}}',
        b'{"image_std": 0}',
        b'{"image_std": NaN}',
        b'{"rescale_factor": "1/255"}',
        b'{"rescale_factor": 0}',
    ],
)
def test_a_broken_preprocessor_is_said_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    folder = copied("tiny-vit", tmp_path / "model")
    (folder / "preprocessor_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json|mean and a positive std"):
        image_format(str(folder))
