"""Optional dependencies: imported when needed, with an install command if missing."""

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
    """An optional dependency is not installed, or cannot be imported."""


def require(module: str, extra: str = "vision") -> Any:
    """Import an optional dependency, or raise with its install command.

    Args:
        module: Module to import.
        extra: The extra of this package that installs it.

    Raises:
        MissingPackageError: It is not installed, or cannot be imported.
    """
    state = random.getstate()  # importing scikit-learn imports rich, which draws a number
    try:
        return importlib.import_module(module)
    except ImportError as error:
        said = " ".join(str(error).split())  # on one line
        raise MissingPackageError(
            f"this needs {module} ({said}); install it with: {install_command(extra)}",
            name=module,
        ) from error
    finally:
        random.setstate(state)


def install_command(extra: str, checkout: Path = CHECKOUT) -> str:
    """A command that installs an extra from the source of this copy of the package.

    The package is on no public index, so its name is sufficient only if it came from an index.

    Args:
        extra: The extra.
        checkout: The repository, if this copy is part of one.
    """
    if (checkout / "pyproject.toml").is_file() and (checkout / "src/flops").is_dir():
        return f'pip install -e "{checkout}[{extra}]"'
    try:
        kept = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # not installed by pip
        return f'pip install ".[{extra}]" (in a checkout of the repository)'
    source = _source(kept)
    return f'pip install "{PACKAGE}[{extra}]{f" @ {source}" if source else ""}"'


def _source(text: str | None) -> str | None:
    """The folder, wheel or repository that pip installed the package from; None for an index."""
    if text is None:
        return None
    kept = json.loads(text)
    if "vcs_info" not in kept:
        return str(kept["url"])
    return f"{kept['vcs_info']['vcs']}+{kept['url']}@{kept['vcs_info']['commit_id']}"
