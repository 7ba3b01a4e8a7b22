"""Commands of README and docs exist, with the options that are shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flops.cli.main import main
from tests.support.pages import PAGES, ROOT, fenced

SHOWN = [ROOT / "README.md", *PAGES]


def commands(page: Path) -> list[list[str]]:
    """Words of all lines of fenced blocks that call `flops`."""
    found = []
    for language, text in fenced(page):
        if language not in ("", "bash", "sh"):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "flops" in words:
                found.append(words[words.index("flops") + 1 :])
    return found


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    named = [words[0], *(words[1:2] if words[0] == "study" else [])]
    task = ["--task", "text"] if "text" in words else []
    with pytest.raises(SystemExit):
        main([*named, *task, "--help"])
    return capsys.readouterr().out


def missing(words: list[str], said: str) -> list[str]:
    """Options of a command that its help does not name."""
    options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    return sorted(o for o in options if not re.search(rf"{o}\b", said))


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    for words in commands(page):
        if not words or words[0].startswith("-") or words[0] == "&&":
            continue
        words = words[: words.index("&&")] if "&&" in words else words
        name = " ".join(
            [*words[: 2 if words[0] == "study" else 1], *(["text"] * ("text" in words))]
        )
        if name not in helps:
            helps[name] = help_of(words, capsys)
        assert not missing(words, helps[name]), f"flops {' '.join(words)}"


def test_an_unknown_option_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of(["diagnose"], capsys)
    assert missing(["diagnose", "--steps", "3", "--nothing"], said) == ["--nothing"]


def test_commands_are_found() -> None:
    assert sum(len(commands(page)) for page in SHOWN) > 30
