"""The messages that docs/troubleshooting.md explains are those of the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.support.pages import DOCS, ROOT

PAGE = DOCS / "troubleshooting.md"
MESSAGES = [
    message
    for line in re.findall(r"^\*\*`.*$", PAGE.read_text("utf-8"), re.MULTILINE)
    for message in re.findall(r"\*\*`([^`]+)`\*\*", line)
]


@cache
def texts() -> list[str]:
    """All strings of the source; what is filled in is a mark."""
    found = []
    for path in (ROOT / "src/flops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(str(part) for part in parts))
    return found


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message: str) -> None:
    said = message.removeprefix("PrecisionWarning: ")
    parts = [part.strip(" .[]'") for part in said.split("...")]
    for part in (part for part in parts if len(part) > 6):
        assert any(part in text for text in texts()), part


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 25
