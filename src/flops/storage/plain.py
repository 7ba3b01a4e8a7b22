"""Parsing of untrusted JSON: every problem is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Args:
        content: The text, or its bytes in UTF-8.

    Raises:
        ValueError: It is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except RecursionError:  # callers expect ValueError only
        raise ValueError("nested too deeply") from None


def parse_object(content: str | bytes) -> dict[str, Any]:
    """The value of a JSON text that must be an object.

    Raises:
        ValueError: As `parse_json`, or it is not an object.
    """
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not a {type(value).__name__}")
    return value
