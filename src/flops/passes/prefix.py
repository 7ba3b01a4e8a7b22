"""Prefixes: the calls of a forward pass that are replayed instead of run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flops.passes.intercept import Action
from flops.passes.structure import Call, Structure


@dataclass(frozen=True)
class Prefix:
    """Calls that are replayed, which of them must be recorded, and the calls that still run."""

    replayed: tuple[Call, ...]
    needed: frozenset[int]
    visible: Mapping[str, tuple[int, ...]]
    share: float

    def script(self, action: Callable[[int], Action | None]) -> dict[str, list[Action | None]]:
        """Actions of the visible calls, for the modules that have any."""
        script = {}
        for name, numbers in self.visible.items():
            actions = [action(number) for number in numbers]
            if any(a is not None for a in actions):
                script[name] = actions
        return script


def finished(structure: Structure, time: int) -> list[Call]:
    """The outermost calls that end at or before the time and can be replayed."""
    chosen: list[Call] = []
    inside: set[int] = set()
    for call in structure.calls:  # parents come before their children
        if call.parent in inside:
            inside.add(call.number)
        elif call.end <= time and call.replayable:
            chosen.append(call)
            inside.add(call.number)
    return chosen


def nothing(structure: Structure) -> Prefix:
    """The empty prefix: every call runs."""
    return Prefix((), frozenset(), visible_calls(structure, frozenset()), 0.0)


def visible_calls(structure: Structure, replayed: frozenset[int]) -> dict[str, tuple[int, ...]]:
    """Calls that are not inside a replayed one, by module."""
    visible: dict[str, list[int]] = {}
    hidden: set[int] = set()
    for call in structure.calls:
        if call.parent is not None and (call.parent in hidden or call.parent in replayed):
            hidden.add(call.number)
        else:
            visible.setdefault(call.name, []).append(call.number)
    return {name: tuple(numbers) for name, numbers in visible.items()}
