"""Files that are broken, cut off, not text or no files at all: a sentence, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flops.cli.main import main
from flops.errors import FlopsError
from flops.experiments.cells import Cell, run_cells
from flops.experiments.robustness_runs import read_run
from flops.experiments.warm_starts import WarmStart, load_warm_start
from flops.report.allocation import plot_allocation
from flops.report.curves import plot_curves, read_metrics
from flops.tasks.alignment.config import AlignConfig
from flops.tasks.alignment.figures import read_run as read_aligned
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.data.folders import read_folder
from flops.tasks.data.images import load
from flops.training.loop import NullDisplay, train

DEEP = b"[" * 100_000
NOT_JSON = {"empty": b"", "cut": b'{"a"', "deep": DEEP, "bytes": b"\xff\xfe", "list": b"[1]"}
SHORT = ["--method", "bp", "--epochs", "1", "--limit", "24"]


class Stop(Exception):
    pass


class Stopper(NullDisplay):
    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        if line["step"] == 3:
            raise Stop


def pictures(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 8) -> Path:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for row in range(count):
            pixels = np.full((8, 8), 12 * row + number, np.uint8)
            image.fromarray(pixels).save(folder / name / f"{row}.png")
    return folder


@contextmanager
def not_hanging(seconds: int = 60) -> Iterator[None]:
    """Whoever opens a pipe and waits for its other end fails; the tests behind it still run."""

    def late(*_: object) -> None:
        pytest.fail("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_configuration_file(content: bytes, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"run.{suffix}"
    file.write_bytes(b"a = " + content if suffix == "toml" else content)
    if suffix == "toml" and content == b"[1]":
        pytest.skip("is TOML")
    for command in ("finetune", "align"):
        with pytest.raises(SystemExit, match=rf"flops: .*run.{suffix} (is not|must hold)"):
            main([command, "--config", str(file)])


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_the_settings_of_a_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for command in ("finetune", "align"):
        with pytest.raises(SystemExit, match=r"flops: .*config.json (is not JSON|must hold)"):
            main([command, "--resume", str(tmp_path)])
    with pytest.raises(FlopsError, match=r"config.json (is not JSON|must hold)"):
        read_run(tmp_path)


BAD_LINES = [b"", b"{", DEEP, b"\xff", b"[]", b'{"kind": "else"}', b'{"kind": "step"}']
BAD_LINES += [b'{"kind": "step", "step": 1, "loss": "low", "forward_equivalents": 1, "seconds": 1}']


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_garbled_line_of_metrics_is_left_out(line: bytes, tmp_path: Path) -> None:
    good = {"kind": "step", "step": 1, "loss": 1.0, "forward_equivalents": 3, "seconds": 0.1}
    seen = {**good, "kind": "evaluation", "accuracy": None}
    nan = json.dumps({**good, "loss": float("nan")})  # no JSON, and yet it is written so
    lines = [json.dumps(good), json.dumps(seen), nan]
    file = tmp_path / "metrics.jsonl"
    whole = "".join(f"{text}\n" for text in lines).encode()
    file.write_bytes(whole + line + b"\n" + b'{"kind": "st')
    with pytest.warns(UserWarning, match=r"skipped 1 of 4 lines of .*metrics.jsonl.*: line 4 \("):
        steps, evaluations = read_metrics(file)
    assert (len(steps), len(evaluations)) == (2, 1)
    with pytest.warns(UserWarning, match="skipped 1"):
        assert read_aligned(tmp_path).steps == (1,)
    pytest.importorskip("matplotlib")
    with pytest.warns(UserWarning, match="skipped 1"):
        plot_curves(file, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").is_file()


@pytest.mark.filterwarnings("default:skipped")  # shown, as it is to a user
@pytest.mark.parametrize("command", ["finetune", "align"])
def test_a_run_with_garbled_metrics_goes_on(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind: Any = {"finetune": FinetuneConfig, "align": AlignConfig}[command]
    config = kind(
        method="bp", limit=20, batch=8, epochs=1, checkpoint_steps=1, checkpoint_seconds=None
    )
    with pytest.raises(Stop):
        train(config.replace(output=str(tmp_path)), display=Stopper())
    content = bytearray((tmp_path / "metrics.jsonl").read_bytes())
    content[:20] = b"\xff" * 20
    (tmp_path / "metrics.jsonl").write_bytes(content)
    main([command, "--resume", str(tmp_path)])
    said = capsys.readouterr().out
    assert "warning: skipped 1 of" in said
    assert "results are in" in said
    assert (tmp_path / "model").is_dir()


def test_broken_counts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "counts.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match=r"counts.safetensors is not a complete file of counts"):
        plot_allocation(tmp_path / "counts.safetensors", tmp_path / "a.png")


@dataclass(frozen=True)
class Setting:
    seed: int = 0


def measure(setting: Setting) -> dict[str, Any]:
    return {"seed": setting.seed}


NO_RESULTS = {**NOT_JSON, "nothing": b"{}", "null": b'{"settings": {"seed": 0}, "result": null}'}


@pytest.mark.parametrize("content", NO_RESULTS.values(), ids=NO_RESULTS)
def test_a_broken_result_is_measured_again(content: bytes, tmp_path: Path) -> None:
    cell, console = Cell("part", measure, Setting()), Console(file=sys.stderr)
    run_cells([cell], tmp_path, 0, console, "test")
    cell.path(tmp_path).write_bytes(content)
    assert run_cells([cell], tmp_path, 0, console, "test") == [{"seed": 0}]
    assert cell.load(tmp_path) == {"seed": 0}


@pytest.mark.parametrize("content", [b"", b"\xff" * 100])
def test_a_broken_start_of_a_study_is_made_again(content: bytes, tmp_path: Path) -> None:
    start = WarmStart(limit=16, steps=1)
    model, _ = load_warm_start(tmp_path, start)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_warm_start.cache_clear()
    start.path(tmp_path).write_bytes(content)
    with pytest.warns(UserWarning, match=r"safetensors is damaged and trained again"):
        model, _ = load_warm_start(tmp_path, start)
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    load_warm_start.cache_clear()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names are bytes on Linux alone")
def test_a_class_name_that_is_no_text_is_said_at_the_start(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    os.rename(data / "dog", os.fsencode(data) + b"/d\xffg")
    for command in ("finetune", "align"):
        with pytest.raises(SystemExit, match=r"the class folder d\\xffg in .* not UTF-8: rename"):
            main([command, *SHORT, "--data", str(data), "--output", str(tmp_path / command)])
        assert not (tmp_path / command).exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names are bytes on Linux alone")
@pytest.mark.filterwarnings("default:skipped")
def test_a_file_name_that_is_no_text_can_be_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pictures(tmp_path / "data")
    Path(os.fsdecode(os.fsencode(data / "cat") + b"/x\xff.png")).write_bytes(b"no image")
    main(["finetune", *SHORT, "--data", str(data), "--output", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert r"cat/x\xff.png" in said
    said.encode("utf-8")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes among files here")
def test_only_files_are_opened_as_images(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    os.mkfifo(data / "cat" / "pipe.png")
    (data / "dog" / "device.png").symlink_to("/dev/zero")
    (data / "dog" / "folder.png").mkdir()
    bound = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(data / "dog")  # the name of a socket must be short
    try:
        bound.bind("socket.png")
    finally:
        os.chdir(here)
        bound.close()
    listings, _ = read_folder(data)
    assert len(listings["train"]) == 16 + 3  # the folder is none of them
    message = r"skipped 3 of 19 images.*it is a (pipe|socket|device)"
    with not_hanging(), pytest.warns(UserWarning, match=message):
        assert load(str(data)).skipped == 3
    message = r"cannot read .*(pipe|socket|device).png"
    with not_hanging(), pytest.raises(ValueError, match=message):
        load(str(data), strict=True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes among files here")
def test_only_files_are_opened_as_captioned_images(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", ("all",), 16) / "all"
    names = [*(f"{n}.png" for n in range(16)), "pipe.png"]
    os.mkfifo(data / "pipe.png")
    lines = (json.dumps({"file_name": name, "text": f"picture {name}"}) for name in names)
    (data / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = AlignConfig(method="bp", data=str(data), epochs=1, batch=4)
    message = "skipped 1 images that cannot be read"
    with not_hanging(), pytest.warns(UserWarning, match=message):
        train(config)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    (data / "cat" / "0.png").chmod(0)
    with pytest.warns(UserWarning, match=r"skipped 1 of 16 images.*Permission denied"):
        load(str(data))
    file = tmp_path / "run.json"
    file.touch(mode=0)
    with pytest.raises(SystemExit, match=r"cannot read .*run.json: Permission denied"):
        main(["finetune", "--config", str(file)])


@pytest.mark.parametrize("content", [DEEP, b"\xff", b"{", b"3"])
@pytest.mark.parametrize("name", ["metadata.jsonl", "chat.json", "0.txt"])
def test_broken_captions(name: str, content: bytes, tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", ("all",)) / "all"
    (data / name).write_bytes(content)
    given = str(data / name if name == "chat.json" else data)
    if name == "0.txt" and content != b"\xff":
        pytest.skip("a caption may be any text")
    with pytest.raises(SystemExit, match=rf"flops: .*{name}"):
        main(["align", *SHORT, "--data", given, "--output", str(tmp_path / "run")])


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_a_robustness_study_of_a_broken_model(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model/model.safetensors", "model/preprocessor_config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "model" / "config.json").write_bytes(content)
    with pytest.raises(SystemExit, match=r"flops: .*config.json does not name the classes"):
        main(["study", "robustness", "--runs", str(tmp_path), "--output", str(tmp_path / "out")])
