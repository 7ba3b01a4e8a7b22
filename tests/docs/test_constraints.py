"""constraints.txt: pins for all that is installed, and nothing of the machine that made it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("lock")


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    apart = ("peers", "llama-cpp")  # not of `dev`; the Makefile pins what it builds of them
    wanted += [one for name, some in extras.items() if name not in apart for one in some]
    for requirement in map(Requirement, wanted):
        if requirement.name == "flops-torch":
            continue
        pins = [p for p in PINS if canonicalize_name(p.name) == canonicalize_name(requirement.name)]
        assert pins, f"{requirement.name} is not pinned; run make lock"
        for pin in pins:
            (version,) = (given.version for given in pin.specifier)
            assert requirement.specifier.contains(version), f"{pin} is not {requirement}"


def test_pins_are_of_versions_that_every_index_has() -> None:
    assert "torch==2.13.0" in LINES
    assert len(PINS) > 90
    for line in LINES:
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", line), line
        assert not re.search(r"://|\+|^(nvidia|cuda|triton)|--", line), line
    (uvloop,) = (pin for pin in PINS if pin.name == "uvloop")
    assert uvloop.marker is not None
    assert not uvloop.marker.evaluate({"sys_platform": "win32"})


def test_what_belongs_to_one_machine_is_left_out(script: ModuleType) -> None:
    resolved = "nvidia-cublas==1.0 ; sys_platform == 'linux'\ntorch==2.13.0+cpu\ntriton==3.7.1\n"
    assert script.pins(resolved) == ["torch==2.13.0"]
    for line in ("--find-links /somewhere", "torch @ file:///somewhere/torch.whl"):
        with pytest.raises(ValueError, match="not a pin"):
            script.pins(line)
