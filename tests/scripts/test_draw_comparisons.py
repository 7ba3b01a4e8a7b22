"""Comparisons side by side, from their results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.scripts import load_script


def curve(*accuracies: float) -> list[dict[str, Any]]:
    return [
        {"step": 10 * i, "accuracy": a, "forward_equivalents": 300.0 * i}
        for i, a in enumerate(accuracies)
    ]


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = []
    for name, chance in (("text", 0.5), ("vit", 0.1)):
        results = {"bp": [{"curve": curve(0.1, 0.9)}], "mezo": [{"curve": curve(0.1, 0.5)}]}
        kept = {"epochs": 1, "budget": 9.0, "chosen": {}, "results": results, "chance": chance}
        kept["settings"] = {"model": name, "data": "points"}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(kept))
        found.append(tmp_path / name)
    return found


def test_panels_have_titles_chance_and_the_chosen_methods(folders: list[Path]) -> None:
    script = load_script("draw_comparisons")
    first = script.panel(f"a = b={folders[0]}", ["bp", "shaped-lr"])
    assert (first.title, first.chance, list(first.results)) == ("a = b", 0.5, ["bp"])
    second = script.panel(str(folders[1]))
    assert (second.title, second.chance) == ("vit on points", 0.1)
    assert list(second.results) == ["bp", "mezo"]


def test_one_picture_of_several_folders(folders: list[Path], tmp_path: Path, capsys) -> None:
    script, path = load_script("draw_comparisons"), tmp_path / "two.png"
    script.main([str(path), f"Texts={folders[0]}", str(folders[1]), "--methods", "bp"])
    assert capsys.readouterr().out == f"{path}\n"
    with Image.open(path) as image:
        assert image.width > 1.5 * image.height


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["{}/none"], r"cannot read .*results\.json"), (["{}/vit", "--methods", "lr"], "none of lr")],
)
def test_what_cannot_be_drawn_is_said(
    folders: list[Path], tmp_path: Path, arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        load_script("draw_comparisons").main(
            [str(tmp_path / "out.png"), *(a.format(tmp_path) for a in arguments)]
        )
    assert not (tmp_path / "out.png").exists()
