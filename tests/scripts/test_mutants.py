"""Mutation testing on a small package: what is caught, what survives, what no test executes."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutants.py"
SOURCE = '''
"""A mean that is too careful."""

LIMIT = 3


def mean(values: list[int], least: int = 1) -> float:
    if len(values) < least:
        raise ValueError(f"{len(values) + 1} values")
    count = len(values)
    assert sum(1 for _ in zip(values, values, strict=True)) == count
    return sum(values[:LIMIT]) / max(count, 1)


def unused(x: int) -> int:
    return x + 1
'''
TESTS = """
import pytest

from flops.estimators.mean import mean


def test_mean():
    assert mean([2, 4]) == 3
    assert mean([1, 1, 1]) == 1


def test_fails_anyway():
    assert mean([2]) == 3


def test_too_few():
    with pytest.raises(ValueError):
        mean([])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one module and its tests, with a copy of the script."""
    for folder in ("scripts", "src/flops/estimators", "tests/estimators", "tests/support"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # names start here
    for path in ("src/flops/__init__.py", "src/flops/estimators/__init__.py", "tests/conftest.py"):
        (tmp_path / path).write_text("", encoding="utf-8")
    (tmp_path / "src/flops/estimators/mean.py").write_text(SOURCE.lstrip(), encoding="utf-8")
    test = tmp_path / "tests/estimators/test_mean.py"
    test.write_text(TESTS.lstrip(), encoding="utf-8")
    return tmp_path


def run(project: Path, *options: str) -> str:
    command = [sys.executable, "scripts/mutants.py", *options]
    found = subprocess.run(command, cwd=project, capture_output=True, text=True, encoding="utf-8")
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def listed(project: Path, title: str) -> list[str]:
    """The changed lines of a section of the report."""
    report = (project / "runs/mutants/report.md").read_text(encoding="utf-8")
    section = report.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line[1:].strip() for line in re.findall(r"^\+.*$", section, re.MULTILINE)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_a_small_package(project: Path) -> None:
    shown = run(project)
    assert "3 tests, 1 fail anyway" in shown
    assert listed(project, "Not covered") == ["return (x - 1)", "return x + (2)", "return x + (0)"]
    survived = listed(project, "Survived")
    assert "LIMIT = (4)" in survived  # no test has more than three values
    assert "return sum(values[:LIMIT]) / max(count, (0))" in survived  # one is never met
    assert "LIMIT = (2)" not in survived
    assert "pass" not in survived  # the error has a test
    assert not any("strict" in line and "False" in line for line in survived)
    assert listed(project, "Timed out") == []
    report = (project / "runs/mutants/report.md").read_text(encoding="utf-8")
    assert "- `tests/estimators/test_mean.py::test_fails_anyway`" in report
    # A new test: only its module is traced, and only those that were not caught are run again.
    test = project / "tests/estimators/test_mean.py"
    more = "\n\ndef test_four():\n    assert mean([1, 1, 1, 5]) == 0.75\n"
    test.write_text(test.read_text(encoding="utf-8") + more, encoding="utf-8")
    again = run(project)
    assert f"/{len(survived) + 3} " in again
    assert "LIMIT = (4)" not in listed(project, "Survived")
    assert "written" in run(project, "--files", "src/flops/estimators/mean.py:3")


def test_changes_are_python_and_leave_messages_alone(project: Path) -> None:
    code = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, "scripts")
        import mutants
        for found in mutants.mutants_of(mutants.sources()):
            source = (mutants.ROOT / found.file).read_bytes()
            print(found.line, repr(found.applied(source).decode()))
        """
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    ).stdout
    changes = [line.partition(" ") for line in shown.splitlines()]
    assert len(changes) == len({text for *_, text in changes}) == 16
    for _, _, text in changes:
        changed = ast.literal_eval(text)
        ast.parse(changed)
        assert "{len(values) + 1} values" in changed or "        pass\n" in changed
        assert "strict=True" in changed
