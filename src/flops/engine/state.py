"""Saved state of an engine: its versions, and checks before anything is loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 2
RENAMED = {"captured": "explained_variance", "captures": "explained_by_site"}  # since schema 1


def check_state(state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise if an engine with groups of these names cannot load a state.

    Raises:
        ValueError: If the state has another version or other groups, or is not complete.
    """
    if state.get("schema") not in (1, SCHEMA):
        raise ValueError(
            f"state has schema {state.get('schema')}, this version reads 1 (flops 0.1) and "
            f"{SCHEMA}; load it with the version that wrote it"
        )
    if list(state["groups"]) != list(names):
        raise ValueError(f"state is of groups {list(state['groups'])}, not {names}")
    missing = {"seed", "step", "allocators", "memory"} - state.keys()
    if missing:
        raise ValueError(f"state lacks {sorted(missing)}; was it made by state_dict()?")
    for part in ("allocators", "memory"):
        if set(state[part]) != set(names):
            raise ValueError(f"state has {part} of groups {sorted(state[part])}, not {names}")


def memory_in(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A copy of the groups' memory in a state, with the names of this version."""
    return {
        name: {RENAMED.get(key, key): copy.deepcopy(value) for key, value in kept.items()}
        for name, kept in state["memory"].items()
    }
