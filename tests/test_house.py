"""The house stays in order: few files at the root, tests apart from each other, short reprs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flops
import flops.allocators
import flops.blackbox
import flops.estimators
import flops.presets
from flops import (
    ES,
    FZOO,
    JVP,
    LOZO,
    SPSA,
    DeepZero,
    Exact,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    MeZO,
    Shaping,
)
from flops.allocators import Bernoulli, Equal, Fixed, Gaussian, Neyman, Signal, Traces
from flops.blackbox import Candidates, OnFailure, Outputs, Tuner
from tests.support.scripts import load_script

SOURCE, TESTS = Path(flops.__file__).parent, Path(__file__).parent
MODULES = sorted(TESTS.rglob("*.py"))
ROOT_FILES = 8
LINES = 400  # of a test module, and of a file that a step runs through
READ = {"likelihood ratio": 15, "shaped, Gaussian allocator": 24}  # files that a step runs through
REPR = 200  # characters


def test_the_root_of_the_package_has_few_files() -> None:
    found = sorted(path.name for path in SOURCE.iterdir() if path.is_file())
    assert len(found) <= ROOT_FILES, found


def test_test_modules_are_short() -> None:
    long = {str(p.relative_to(TESTS)): n for p in MODULES if (n := len(lines(p))) > LINES}
    assert not long, "split them by topic, along the tree of src/flops"


def test_a_step_runs_through_few_files() -> None:
    """Merging files is no way out: these stay as short as test modules."""
    trace = load_script("trace_files")
    found = {name: trace.files(fg) for name, fg in trace.steps().items()}
    assert all(len(files) <= READ[name] for name, files in found.items()), found
    sizes = {file: len(lines(SOURCE / file)) for files in found.values() for file in files}
    assert max(sizes.values()) <= LINES, sizes


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def imported(source: str, package: str) -> Iterator[str]:
    """Full names of all that a module imports, also in programs that it holds as text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = ".".join([*above, node.module or ""]) if node.level else str(node.module)
            yield from (f"{start.strip('.')}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\b(?:from|import|-m) +(tests[\w.]*)", node.value)


def imported_tests(source: str, package: str) -> list[str]:
    return [
        name
        for name in imported(source, package)
        if name.startswith("tests.") and any(p.startswith("test_") for p in name.split("."))
    ]


def test_no_test_imports_another() -> None:
    for path in set(MODULES) - {Path(__file__)}:  # which shows how it would look
        package = ".".join(("tests", *path.relative_to(TESTS).parent.parts))
        found = imported_tests(path.read_text(encoding="utf-8"), package)
        assert not found, f"{path.relative_to(TESTS)} imports {found}: use tests/support"


@pytest.mark.parametrize(
    "source",
    [
        "import tests.engine.test_x",
        "from tests.engine.test_x import f",
        "from tests.engine import test_x",
        "def f():\n    from .test_x import g",
        "from ..other.test_x import g",
        "CODE = 'import sys\\nfrom tests.engine.test_x import f'",
    ],
)
def test_such_an_import_is_found(source: str) -> None:
    assert imported_tests(source, "tests.engine")
    assert not imported_tests(source.replace("test_x", "support"), "tests.engine")


def deep() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(24)))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum(1)


def objective(parameters: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return parameters.square().sum(1)


MANY = torch.ones(1000, dtype=torch.long)
OUTPUTS = Outputs(lambda columns: columns[:, 1:], loss)
EXAMPLES: dict[str, list[Any]] = {
    "LikelihoodRatio": [LikelihoodRatio(), LikelihoodRatio(shaping=Shaping())],
    "ES": [ES(), ES(shaping=Shaping())],
    "SPSA": [SPSA(), SPSA(shaping=Shaping())],
    "MeZO": [MeZO()],
    "FZOO": [FZOO()],
    "LOZO": [LOZO()],
    "JVP": [JVP()],
    "DeepZero": [DeepZero()],
    "Exact": [Exact()],
    "Shaping": [Shaping()],
    "Equal": [Equal()],
    "Bernoulli": [Bernoulli()],
    "Gaussian": [Gaussian()],
    "Neyman": [Neyman()],
    "Fixed": [Fixed([1, 2]), Fixed(MANY), Fixed(MANY.tolist())],
    "Signal": [Signal(MANY.float(), 1000, 1, 1, "blocks-1", embeddings=torch.ones(1000, 8))],
    "Traces": [Traces(MANY.float(), MANY)],
    "Group": [Group(deep(), LikelihoodRatio(), 20), Group("layers.*", SPSA(), 4, name="layers")],
    "ForwardGradient": [ForwardGradient(deep(), loss)],
    "Candidates": [Candidates(torch.ones(1000, 50), MANY)],
    "OnFailure": [OnFailure(), OnFailure(3, 60.0, 0.2)],
    "Outputs": [OUTPUTS],
    "Tuner": [
        Tuner(torch.zeros(1000), objective, points=1000),
        Tuner(
            torch.zeros(1000),
            objective,
            points=1000,
            estimator=LikelihoodRatio(shaping=Shaping()),
            outputs=OUTPUTS,
            allocator=Fixed(MANY),
        ),
    ],
    "paper": flops.presets.paper(deep()),
    "mezo": flops.presets.mezo(deep()),
    "fzoo": flops.presets.fzoo(deep()),
    "lozo": flops.presets.lozo(deep()),
    "jvp": flops.presets.jvp(deep()),
}
RETURNED = {"Diagnosis", "StepReport"}  # by the library, with a printed form of their own
WRAPPERS = {"Shared"}  # prints as the tensor in it does


def constructed() -> set[str]:
    """Names of all exported classes that a user makes an object of, and of all presets."""
    found = {
        name
        for name, value in vars(flops.presets).items()
        if inspect.isfunction(value) and value.__module__ == flops.presets.__name__
        if not name.startswith("_")
    }
    for package in (flops, flops.estimators, flops.allocators, flops.blackbox):
        for name in package.__all__:
            value = getattr(package, name)
            if not inspect.isclass(value) or issubclass(value, Exception):
                continue
            if not inspect.isabstract(value) and not getattr(value, "_is_protocol", False):
                found.add(name)
    return found - RETURNED - WRAPPERS


def test_every_constructed_object_has_an_example() -> None:
    assert set(EXAMPLES) == constructed()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repr_is_one_short_line(name: str) -> None:
    for example in EXAMPLES[name]:
        shown = repr(example)
        assert shown.startswith(f"{type(example).__name__}(")
        assert len(shown) <= REPR
        assert "\n" not in shown
