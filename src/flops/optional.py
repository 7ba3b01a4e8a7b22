"""Optional dependencies: imported when they are needed, with advice when they are missing."""

from __future__ import annotations

import importlib
import json
import random
from importlib import metadata
from pathlib import Path
from typing import Any

from flops.errors import FlopsError

PACKAGE = "flops-torch"
CHECKOUT = Path(__file__).parents[2]  # the repository, if this is not an installed copy


class MissingPackageError(FlopsError, ImportError):
    """An optional dependency is not installed, or does not import."""


def require(module: str, extra: str = "vision") -> Any:
    """Import an optional dependency, or say how to get it.

    Args:
        module: What to import.
        extra: The extra of this package that installs it.

    Raises:
        MissingPackageError: It is not installed, or does not import.
    """
    state = random.getstate()  # importing scikit-learn imports rich, which draws a number
    try:
        return importlib.import_module(module)
    except ImportError as error:
        said = " ".join(str(error).split())  # one line, whatever a package says
        raise MissingPackageError(
            f"this needs {module} ({said}); install it with: {install_command(extra)}",
            name=module,
        ) from error
    finally:
        random.setstate(state)


def install_command(extra: str) -> str:
    """A command that installs an extra from where this copy of the package came from.

    The package is on no index, so its name alone would not be found.
    """
    if (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "src/flops").is_dir():
        return f'pip install -e "{CHECKOUT}[{extra}]"'
    source = _source()
    if source is None:  # unpacked by hand, or by another tool
        return f'pip install ".[{extra}]" (in a checkout of the repository)'
    return f'pip install "{PACKAGE}[{extra}] @ {source}"'


def _source() -> str | None:
    """Where pip took the package from: a folder, a wheel or a repository; None if it is unknown."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    if text is None:
        return None
    kept = json.loads(text)
    if "vcs_info" not in kept:
        return str(kept["url"])
    return f"{kept['vcs_info']['vcs']}+{kept['url']}@{kept['vcs_info']['commit_id']}"
