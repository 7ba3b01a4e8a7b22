"""Folders of a CLIP: loaded without a trace, refused when they hold none, damaged or hostile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from flops.cli.main import main
from flops.tasks.models.clip import ClipError, PromptedClip
from tests.support.clips import ANIMALS

pytest.importorskip("transformers")


def test_loading_leaves_the_random_state_alone_and_the_digest_tells_models_apart(
    bundled: PromptedClip, folder: Path
) -> None:
    state = torch.get_rng_state()
    again = PromptedClip.load("tiny-clip")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.digest() == bundled.digest()
    renamed = PromptedClip.load("tiny-clip", ["tee", "pants"])
    others = [renamed.digest(), PromptedClip.load(folder, ANIMALS).digest()]
    assert len({bundled.digest(), *others}) == 3
    bare = PromptedClip.load("tiny-clip", template="{}")
    assert bare.text_limit > bundled.text_limit


def test_what_is_no_clip_is_refused(tmp_path: Path, folder: Path) -> None:
    import flops.tasks

    vit = Path(flops.tasks.__file__).parent / "assets" / "tiny-vit"
    with pytest.raises(
        ClipError, match=r"holds a vit model, not a CLIP: give 'tiny-clip', the path"
    ):
        PromptedClip.load(vit, ANIMALS)
    with pytest.raises(FileNotFoundError, match=r"no model in .*give 'tiny-clip'"):
        PromptedClip.load(tmp_path, ANIMALS)
    with pytest.raises(FileNotFoundError, match="no model in 'huge-clip'"):
        PromptedClip.load("huge-clip", ANIMALS)
    shutil.copytree(folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"no CLIP in .*safetensors"):
        PromptedClip.load(tmp_path / "pickled", ANIMALS)
    shutil.copytree(folder, tmp_path / "mute")
    for file in (tmp_path / "mute").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ClipError, match=r"does not know all words of 'a photo of a cat\.'"):
        PromptedClip.load(tmp_path / "mute", ANIMALS)
    with pytest.raises(ClipError, match="must be named"):
        PromptedClip.load(folder)


def spoil(folder: Path, name: str, content: bytes | None) -> None:
    """Other content, or none of the end."""
    file = folder / name
    file.write_bytes(file.read_bytes()[:-1000] if content is None else content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", None),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b""),
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": "clip", "text_config": 3}'),
        ("config.json", b"\xff\xfe"),
        ("config.json", b"[" * 100_000),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"null"),
        ("preprocessor_config.json", b"{"),
        ("preprocessor_config.json", b"[1]"),
        ("preprocessor_config.json", b'{"image_mean": "red"}'),
        ("preprocessor_config.json", b'{"image_std": [0.5, [1]]}'),
    ],
)
def test_damaged_files_are_said_in_one_sentence(name, content, tmp_path, folder) -> None:
    shutil.copytree(folder, tmp_path / "clip")
    spoil(tmp_path / "clip", name, content)
    with pytest.raises((ClipError, OSError)) as caught:
        PromptedClip.load(tmp_path / "clip", ANIMALS)
    assert "\n" not in str(caught.value)
    options = ["serve", "--model", str(tmp_path / "clip"), "--classes", ",".join(ANIMALS)]
    with pytest.raises(SystemExit) as stopped:
        main([*options, "--ledger", str(tmp_path / "ledger.sqlite")])
    assert "\n" not in str(stopped.value)
    assert str(tmp_path) in str(stopped.value)


def test_python_of_a_folder_is_never_run(tmp_path, folder) -> None:
    shutil.copytree(folder, tmp_path / "clip")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (tmp_path / "clip" / "evil.py").write_text(code, "utf-8")
    names = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    for file in ("config.json", "tokenizer_config.json"):
        path = tmp_path / "clip" / file
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"auto_map": names}))
    assert PromptedClip.load(tmp_path / "clip", ANIMALS).classes == ANIMALS
    path = tmp_path / "clip" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"model_type": "evil"}))
    with pytest.raises(ClipError):
        PromptedClip.load(tmp_path / "clip", ANIMALS)
    assert not (tmp_path / "ran").exists()


def test_class_texts_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(ClipError, match=r"needs \{\} where"):
        PromptedClip.load(template="a photo")
    with pytest.raises(ClipError, match="at least 2 classes"):
        PromptedClip.load(classes=["bag"])
    with pytest.raises(ClipError, match="cannot be told apart: Bag, bag"):
        PromptedClip.load(classes=["Bag", "coat", "bag"])
    with pytest.raises(ClipError, match="does not know all words of 'a photo of a f\u00eate"):
        PromptedClip.load(folder, ["cat", "f\u00eate"])
    with pytest.raises(ClipError, match="reads at most 64: shorten"):
        PromptedClip.load(folder, ["cat", "d" * 60])
