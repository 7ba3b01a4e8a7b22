"""Settings of a run in its journal: those that another process has changed are named."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, as they are after a journey through JSON."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(dict(settings))).items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Sentences about settings that differ: "learning_rate was 0.05, is 0.1"."""
    before, after = flat(there), flat(here)
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name} has other values"
        if _is_digest(before.get(name)) and _is_digest(after.get(name))
        else f"{name} was {_shown(before, name)}, is {_shown(after, name)}"
        for name in names
        if before.get(name) != after.get(name) or (name in before) != (name in after)
    ]


def _is_digest(value: Any) -> bool:
    """Whether it stands for values, and tells a person nothing."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16}|[0-9a-f]{64}", value) is not None


def _shown(settings: Mapping[str, Any], name: str) -> str:
    shown = repr(settings[name]) if name in settings else "not set"
    return shown if len(shown) <= 120 else f"{shown[:100]}..."


def described(value: Any) -> Any:
    """An estimator or allocator as its class and options, for the settings of a journal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **options}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
