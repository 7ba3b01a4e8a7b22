"""`flops tune` from its options to its table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flops.cli.main import main
from tests.support.serving import Server, until
from tests.support.tuning import ROWS, charged, command, finish, paid, prompts, start


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("service")) as running:
        yield running


def tune(output: Path, *options: str, **settings) -> None:
    """In this process."""
    main(command(output, *options, **settings)[3:])


def refused(output: Path, *options: str, **settings) -> str:
    with pytest.raises(SystemExit) as caught:
        tune(output, *options, **settings)
    return str(caught.value)


def results(output: Path) -> list[dict]:
    return json.loads((output / "results.json").read_text())


def test_a_service_is_started_and_prompts_are_tuned_against_it(tmp_path, capsys) -> None:
    threads = torch.get_num_threads()
    tune(tmp_path, "--price", "2.5", methods="manual lr bp")
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    ledger = tmp_path / "service-0" / "ledger.sqlite"
    manual, lr, bp = results(tmp_path)
    assert (manual["method"], manual["queries"], manual["epochs"]) == ("manual", 210, 0)
    assert (lr["method"], lr["queries"], lr["step_size"], lr["seed"]) == ("lr", ROWS, 0.1, 0)
    assert lr["chosen"]
    assert manual["chosen"]
    assert 0 < lr["accuracy"] <= 100
    assert (bp["method"], bp["requests"], bp["queries"]) == ("bp", 0, 3 * 160 + 50)
    assert charged(ledger) == 210 + ROWS
    assert paid(tmp_path) == 210 + ROWS + bp["queries"]  # rows of its own model
    table = (tmp_path / "table.md").read_text("utf-8")
    for text in (table, said):
        assert "price" in text
        assert f"{ROWS:,}" in text
    cells = {
        line.split("|")[1].strip(): line.split("|") for line in table.splitlines() if "|" in line
    }
    assert cells["lr"][-2].strip() == f"{2.5 * ROWS / 1000:.2f}"
    assert cells["bp"][-2].strip() == "0.00"
    assert (tmp_path / "validation.png").read_bytes().startswith(b"\x89PNG")
    assert "validation.png" in said
    metrics = (tmp_path / "lr-0.1-seed0" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert lines[-1]["asked"] == ROWS - 50  # all but the test
    found = load_file(tmp_path / "lr-0.1-seed0" / "prompts.safetensors")
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "z": (64,),
        "text": (8, 64),
        "image": (8, 64),
    }


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    tune(folder, "--url", server.url, "--seeds", "2", epochs=1)
    return folder


def test_every_seed_is_run_and_its_difference_reported(finished) -> None:
    assert [(r["seed"], r["chosen"]) for r in results(finished)] == [(0, True), (1, True)]
    assert "over 2 seeds" in (finished / "table.md").read_text("utf-8")
    one, two = (load_file(finished / f"lr-0.1-seed{s}" / "prompts.safetensors") for s in (0, 1))
    assert not torch.equal(one["z"], two["z"])
    assert not torch.equal(one["text"], two["text"])


def test_a_finished_folder_asks_nothing_more(server, finished) -> None:
    before, table = charged(server.ledger), (finished / "table.md").read_text("utf-8")
    tune(finished, "--url", server.url, "--seeds", "2", epochs=1)
    assert charged(server.ledger) == before
    assert (finished / "table.md").read_text("utf-8") == table


@pytest.mark.parametrize("garbled", ["", "{", "[1]", "null", "\x00\x00"])
def test_a_result_that_cannot_be_read_is_made_again(garbled, server, finished, capsys) -> None:
    before, path = charged(server.ledger), finished / "lr-0.1-seed0" / "result.json"
    result, found = json.loads(path.read_text("utf-8")), prompts(finished)
    path.write_text(garbled, "utf-8")
    tune(finished, "--url", server.url, "--seeds", "2", epochs=1)
    assert "result.json cannot be read" in capsys.readouterr().out
    again = json.loads(path.read_text("utf-8"))
    for volatile in ("seconds", "requests"):  # the new process asks what the service is
        result.pop(volatile), again.pop(volatile)
    assert again == result
    assert prompts(finished) == found
    assert charged(server.ledger) == before


def test_other_settings_in_the_same_folder_are_refused(server, finished) -> None:
    before = charged(server.ledger)
    said = refused(finished, "--url", server.url, "--sigma", "0.5", epochs=1)
    assert "sigma was 0.01, is 0.5" in said
    assert "another folder" in said
    assert charged(server.ledger) == before


def test_the_best_of_several_step_sizes_is_reported(server, tmp_path) -> None:
    options = ["--url", server.url, "--step-sizes", "0.1", "3.0"]
    tune(tmp_path, *options, epochs=1)
    tried = results(tmp_path)
    assert [r["step_size"] for r in tried] == [0.1, 3.0]
    best = min(tried, key=lambda r: r["validation_loss"])
    assert [r["chosen"] for r in tried] == [r is best for r in tried]
    assert tried[0]["validation_loss"] != tried[1]["validation_loss"]


def test_the_budget_is_respected(server, tmp_path) -> None:
    before = charged(server.ledger)
    tune(tmp_path, "--url", server.url, "--budget", "900", epochs=9)
    (found,) = results(tmp_path)
    assert found["stopped"] == "budget"
    assert 500 < found["queries"] <= 900
    assert paid(tmp_path) == charged(server.ledger) - before == found["queries"]
    assert found["loss"] == found["loss"]
    before = charged(server.ledger)
    said = refused(tmp_path / "poor", "--url", server.url, "--budget", "100")
    assert "100 queries does not cover" in said
    assert charged(server.ledger) == before


def test_the_data_must_be_of_the_services_classes(server, tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for i in range(30):
            image.new("L", (12, 12), 8 * i).save(folder / f"{i}.png")
    options = ["--url", server.url, "--data", str(tmp_path / "data")]
    said = refused(tmp_path / "out", *options)
    assert "has the classes ['t-shirt'" in said
    assert "['cat', 'dog']" in said
    assert "--classes" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--queries", "0"], "--queries must be at least 1"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--part", "0"], "--part must be at least 1"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--budget", "0"], "--budget must be at least 1"),
        (["--price", "-2"], "--price must be at least 0"),
        (["--timeout", "0"], "--timeout must be a positive number"),
        (["--queries", "1", "--methods", "spsa"], "--queries must be at least 2 for spsa"),
        (["--step-sizes", "-1"], "--step-sizes must be one or more positive numbers"),
        (["--sigma", "0"], "--sigma must be a positive number, not 0"),
        (["--text-tokens", "0", "--image-tokens", "0"], "at least one text or image prompt vector"),
        (["--api-key-env", "NO_SUCH_KEY", "--url", "http://127.0.0.1:9"], "NO_SUCH_KEY is not set"),
    ],
)
def test_options_that_do_not_fit_are_explained(options, message, tmp_path) -> None:
    assert message in refused(tmp_path, *options)


def test_more_shots_than_there_are(server, tmp_path) -> None:
    said = refused(tmp_path, "--url", server.url, "--shots", "17")
    assert "at most 16 shots per class, not 17" in said


def test_methods_that_there_are_not(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        tune(tmp_path, methods="magic")
    assert "magic" in capsys.readouterr().err


def test_ctrl_c_stops_it_and_says_how_to_go_on(server, tmp_path) -> None:
    before = charged(server.ledger)
    process = start(command(tmp_path, "--url", server.url, epochs=200))
    until(lambda: charged(server.ledger) > before + 300 or process.poll() is not None, 120)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "no evaluation is lost. Continue with: flops tune --methods lr" in said
    assert "Traceback" not in said
    assert paid(tmp_path) == charged(server.ledger) - before


@pytest.mark.slow
@pytest.mark.bits
def test_the_number_of_threads_changes_nothing(server, tmp_path) -> None:
    found = []
    for threads in (1, 2):
        folder = tmp_path / str(threads)
        given = f"--methods shaped-lr --step-sizes 0.3 --epochs 1 --limit 50 --output {folder}"
        arguments = [*given.split(), "--url", server.url]
        finish(start([sys.executable, "-m", "flops", "tune", *arguments], threads))
        found.append(prompts(folder))
    assert len(found[0]) == 1
    assert found[0] == found[1]


def test_the_command_line_starts_without_what_only_tune_needs() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(('httpx', 'uvicorn', 'fastapi', 'cma'))"
    code = f"{blocked}; import flops.cli.main"
    subprocess.run([sys.executable, "-c", code], check=True)
