"""The root of the package imports what it exports when it is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flops

PROGRAM = """
import sys
import flops
assert "torch" not in sys.modules
assert set(flops.__all__) | {"estimators", "__version__"} <= set(dir(flops))
flops.estimators.SPSA(), flops.Group("*", flops.MeZO())  # without an import of their own
for name in flops.__all__:
    assert getattr(flops, name) is vars(flops)[name], name
from flops import *
missing = set(flops.__all__) - globals().keys()
assert not missing, missing
"""


def test_every_name_is_there_in_a_new_process() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_type_checkers_see_the_same_names() -> None:
    """They read the imports, Python the names that are imported when used."""
    tree = ast.parse(Path(flops.__file__).read_text(encoding="utf-8"))
    found = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flops")
        for alias in node.names
    }
    assert found.keys() == {*flops.__all__, "__version__"}
    for name, module in found.items():
        assert getattr(flops, name) is getattr(sys.modules[str(module)], name)
    late = {name: module for name, module in found.items() if name in flops._HOMES}
    assert late == flops._HOMES


def test_an_unknown_name_is_the_usual_error() -> None:
    with pytest.raises(AttributeError, match="module 'flops' has no attribute 'Nothing'"):
        flops.Nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'flops'"):
        from flops import Nothing  # noqa: F401
    assert not hasattr(flops, "__wrapped__")


FIRST = """
import importlib, os, sys
import scipy.stats, torch.distributed, transformers  # what takes seconds
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process for each would take minutes")
def test_any_module_may_be_the_first_that_is_imported() -> None:
    """The root, which is imported before all others, sets no order in which cycles work."""
    root = Path(flops.__file__).parent
    paths = [path.relative_to(root.parent) for path in sorted(root.rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.name[:2] != "__"]
    assert len(names) > 200
    command = [sys.executable, "-c", FIRST, *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not ran.stdout, ran.stderr
