"""JSON that others wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        content: The text, or its bytes in UTF-8.

    Raises:
        ValueError: It is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        return json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except RecursionError:  # one must not need to know this to read a file
        raise ValueError("nested too deeply") from None


def parse_object(content: str | bytes) -> dict[str, Any]:
    """The same for a text that must hold names and values.

    Raises:
        ValueError: As `parse_json`, or it holds something else.
    """
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"it must hold names and values, not a {type(value).__name__}")
    return value
