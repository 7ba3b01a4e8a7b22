"""Metadata of the package: URLs, and README links that work on the page of an index."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flops.version import __version__
from tests.support.pages import ROOT
from tests.support.scripts import load_script

ADDRESS = "https://host.example/owner/flops"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("metadata")


def described(script: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    script.Metadata(str(ROOT), {}).update(found)
    return found


def test_links_become_absolute(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPS_REPOSITORY", f"{ADDRESS}.git/")
    found = described(script)
    text = re.sub(r"^```.*?^```", "", found["readme"]["text"], flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 15
    assert all(link.startswith("https://") for link in links)
    assert f"{ADDRESS}/raw/v{__version__}/docs/figures/" in text
    assert f"{ADDRESS}/blob/v{__version__}/docs/tutorial.md" in text
    assert found["urls"]["Homepage"] == ADDRESS


def test_the_address_is_that_of_origin(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOPS_REPOSITORY", raising=False)
    assert script.repository(tmp_path) is None
    for command in (["init", "-q"], ["remote", "add", "origin", f"{ADDRESS}.git"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert script.repository(tmp_path) == ADDRESS
    for other in ("git@host.example:owner/flops.git", "https://user:word@host.example/owner/flops"):
        subprocess.run(["git", "remote", "set-url", "origin", other], cwd=tmp_path, check=True)
        assert script.repository(tmp_path) is None  # no password gets into the metadata


def test_versions_agree() -> None:
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"flops_torch-{__version__}-py3" in (ROOT / "README.md").read_text("utf-8")
    assert f"version is {__version__}," in (ROOT / "docs/api/index.md").read_text("utf-8")


def test_classifiers_name_the_tested_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = (ROOT / ".github/workflows/checks.yml").read_text("utf-8")
    matrix = re.findall(r'"(3\.\d+)"', re.findall(r"python: \[(.*)\]", workflow)[0])
    assert named == matrix == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={named[0]}"
