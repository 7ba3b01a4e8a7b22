"""The examples of the gallery: they learn, and draw their picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import DOCS

ROOT = Path(__file__).parents[2]


def run(name: str, tmp_path: Path, *options: str) -> str:
    picture = tmp_path / "picture.png"
    command = [sys.executable, "-W", "error", f"examples/{name}.py", *options]
    ran = subprocess.run(
        [*command, "--output", str(picture)], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return ran.stdout


@pytest.mark.slow
def test_numpy_inside(tmp_path: Path) -> None:
    said = run("numpy_inside", tmp_path, "--epochs", "1")
    forward, backward = map(float, re.findall(r"accuracy ([\d.]+) %", said))
    assert forward > backward + 20


@pytest.mark.slow
def test_where_queries_go(tmp_path: Path) -> None:
    said = run("where_queries_go", tmp_path, "--steps", "40")
    total, points, share = re.findall(r"^(\d+) queries for (\d+) points.* (\d+)%", said)[0]
    assert int(total) == 20 * int(points)
    assert int(share) > 55  # equal counts: 50


def test_staircase(tmp_path: Path) -> None:
    said = run("staircase", tmp_path, "--steps", "50")
    before, after = map(float, re.findall(r"from ([\d.]+) to ([\d.]+) in", said)[0])
    assert after < before / 4


def test_the_page_shows_them_all() -> None:
    page = (DOCS / "gallery.md").read_text("utf-8")
    for name in ("numpy_inside", "where_queries_go", "staircase"):
        assert f"python examples/{name}.py" in page
        assert (DOCS / f"figures/{name.replace('_', '-')}.png").is_file()
