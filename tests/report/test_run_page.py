"""The report page of runs: what it says, from whole, old and damaged folders."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flops.report.html import image_source
from flops.report.run_page import duration, run_page
from flops.report.run_record import ReportError, read_record
from tests.support.html_page import Page
from tests.support.recorded_runs import write_run


def test_a_run_is_told_in_one_page(tmp_path: Path) -> None:
    page = Page(run_page([read_record(write_run(tmp_path / "run"))]))
    for said in (
        "pets: shaped likelihood ratio (ours)",
        "94.0%",  # validation accuracy
        "91.0%",  # test accuracy
        "512 MB",
        "Accuracy against cost",
        "chance, 33%",
        "Cosine to the backpropagated gradient",
        "Expected cosine of a point's estimate",
        "Explained variance of shaped noise",
        "Signal-to-noise ratio of the estimate",
        "From 10 to 124 queries per image (12.4 times)",
        "Images with most queries",
        "Images with fewest queries",
        "dog & <wolf>",
        "photos/pets",
        "2.13.0",
    ):
        assert said in page.text, said
    assert len(page.images) == 24
    assert page.text.index("Curves") < page.text.index("Settings")
    assert "group\nqueries\nshare\nblocks-1\n3k\n62%" in page.text  # 50 of 80 queries a step


def test_texts_are_shown_with_their_counts(tmp_path: Path) -> None:
    page = Page(run_page([read_record(write_run(tmp_path / "run", texts=True))]))
    assert "Texts with most queries" in page.text
    assert "124\nsentence 38 <b>not bold</b>" in page.text
    assert not page.images


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "ours"),
        write_run(tmp_path / "again", seed=1),
        write_run(tmp_path / "short", "mezo", steps=20),
    ]
    page = Page(run_page([read_record(run) for run in runs]))
    assert "pets: 3 runs" in page.text
    assert "shaped likelihood ratio (ours) (again)" in page.text  # two of one method
    assert "Settings that differ" in page.text
    assert "seed\n0\n1\n0" in page.text
    assert "data\nphotos" not in page.text.partition("Settings that differ")[2][:200]
    assert page.text.count("Gradient quality by group") == 3


def test_an_old_run_gives_what_it_has(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("environment.json", "result.json", "counts.safetensors"):
        (folder / name).unlink()
    kept = ("kind", "step", "loss", "accuracy", "forward_equivalents", "seconds")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    old = [{n: v for n, v in line.items() if n in kept} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    page = Page(run_page([read_record(folder)]))
    assert "Accuracy against cost" in page.text
    assert "Gradient quality" not in page.text
    assert "the run has not finished" in page.text


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"method": "lr", "data": "digits"}')
    page = Page(run_page([read_record(tmp_path)]))
    assert "metrics.jsonl is missing" in page.text
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no step was taken yet" in Page(run_page([read_record(tmp_path)])).text


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="nowhere is not a folder"):
        read_record(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"holds no run \(there is no config.json\)"):
        read_record(tmp_path)
    folder = write_run(tmp_path / "run")
    (folder / "counts.safetensors").write_bytes(b"torn")
    (folder / "environment.json").write_text("{")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("no JSON\n")
    said = " ".join(read_record(folder).problems)
    assert "counts of queries cannot be read" in said
    assert "environment.json is damaged" in said
    assert "skipped 1 of 65 lines" in said
    Page(run_page([read_record(folder)]))
    (folder / "config.json").write_text('{"method": ')
    with pytest.raises(ReportError, match=r"config\.json is damaged"):
        read_record(folder)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_kept_bit_by_bit(channels: int) -> None:
    pixels = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(0))
    source = image_source(pixels.to(torch.uint8))
    raw = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    seen = torch.tensor(list(Image.open(io.BytesIO(raw)).tobytes())).view(5, 7, channels)
    assert torch.equal(seen, pixels.permute(1, 2, 0))


def test_durations() -> None:
    assert [duration(s) for s in (41.6, 185, 7800)] == ["42 s", "3 min 5 s", "2 h 10 min"]
