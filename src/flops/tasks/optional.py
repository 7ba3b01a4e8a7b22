"""Optional dependencies: imported when they are needed, with advice when they are missing."""

from __future__ import annotations

import importlib
import random
from typing import Any


def require(module: str, extra: str = "vision") -> Any:
    """Import an optional dependency, or say how to get it.

    Args:
        module: What to import.
        extra: The extra of this package that installs it.

    Raises:
        ImportError: It is not installed, or does not import.
    """
    state = random.getstate()  # importing scikit-learn imports rich, which draws a number
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f'install it with: pip install "flops-torch[{extra}]"'
        raise ImportError(f"this needs {module} ({error}); {hint}") from error
    finally:
        random.setstate(state)
