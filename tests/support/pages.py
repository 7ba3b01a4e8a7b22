"""Pages of the documentation: their code blocks, links and headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def fenced(page: Path) -> list[tuple[str, str]]:
    """Language and text of all fenced blocks."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found]


def python_blocks(page: Path) -> list[str]:
    """Code to be run; a block that starts with a comment is a file of its own."""
    return [
        text for language, text in fenced(page) if language == "python" and not text.startswith("#")
    ]


def run(page: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a page one after the other, in one namespace."""
    for number, block in enumerate(python_blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    return namespace


def prose(page: Path) -> str:
    """The text without fenced blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def links(page: Path) -> list[str]:
    """Targets of all links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Slugs of the headings, as the site and public hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().lower().replace(" ", "-"))
    return found
