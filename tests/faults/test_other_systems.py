"""Other systems and other versions of Python: as far as one machine can tell."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "scripts", "examples", "benchmarks")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
COMPILE = """
import pathlib, sys
for name in sys.stdin.read().splitlines():
    compile(pathlib.Path(name).read_bytes(), name, "exec")
print(*sys.version_info[:2], sep=".")
"""


@pytest.mark.slow
def test_all_works_without_what_windows_lacks(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ran = subprocess.run(
        [
            sys.executable,
            "-X",
            "warn_default_encoding",
            "tests/support/as_on_windows.py",
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, **plain},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("done\n")


def without_encoding(path: Path) -> Iterator[str]:
    """Calls that read or write text in whatever encoding the system has."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        given = {keyword.arg for keyword in node.keywords}
        values = [a.value for a in node.args if isinstance(a, ast.Constant)]
        binary = any(isinstance(v, str) and "b" in v and len(v) <= 3 for v in values)
        builtin = isinstance(called, ast.Name) or ast.unparse(called).endswith("path.open")
        text = name in ("read_text", "write_text") and not {"utf-8", "ascii"} & set(values)
        text &= "metadata.distribution" not in ast.unparse(called)  # always UTF-8
        text |= name == "open" and builtin and not binary
        text |= name in ("run", "Popen", "check_output") and bool(
            {"text", "universal_newlines"} & given
        )
        if text and "encoding" not in given:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_text_is_read_and_written_with_an_encoding() -> None:
    assert len(SOURCES) > 200
    assert [line for path in SOURCES for line in without_encoding(path)] == []


def interpreter(version: str) -> str | None:
    """A Python of this version, if there is one on this machine."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *kept.glob(f"{version}.*/bin/python")]
    for path in filter(None, found):
        ran = subprocess.run([path, "-c", ""], capture_output=True)  # a shim may lead nowhere
        if ran.returncode == 0:
            return str(path)
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_sources_compile_without_warnings(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    sources = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
    ran = subprocess.run(
        [python, "-W", "error", "-c", COMPILE],
        input="\n".join(map(str, sources)),
        capture_output=True,
        encoding="utf-8",
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, version), ran.stderr
