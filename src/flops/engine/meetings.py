"""Work of several processes that meet seldom: all groups run up to their next exchange, in turn.

An exchange waits for the slowest process. Ten of them in a step wait ten times for whoever happens
to be late; so what a group does is a generator that stops before its process needs the others, and
the processes meet when all groups have got there: once for the counts, once for the answers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Work = Generator[Any, Any, T]
"""Stops before every exchange; the result is what it returns.

A stop yields None. What a black box has to be asked is yielded too, and its answer comes back
(`flops.blackbox`); where a model is at hand there is nothing of that kind. So is a `Decision`.
"""


@dataclass(frozen=True)
class Decision:
    """What rounding could decide otherwise on another machine, such as counts of queries.

    Attributes:
        name: What it is about.
        value: Tensors, numbers, and containers of them.
    """

    name: str
    value: Any


def decided(name: str, value: T) -> Work[T]:
    """A stop at which whoever keeps decisions sends the one that was made before, if any."""
    sent: T | None = yield Decision(name, value)
    return value if sent is None else sent


def completed(work: Work[T]) -> T:
    """Run it to its end."""
    try:
        while True:
            next(work)
    except StopIteration as end:
        result: T = end.value
        return result


def at_once(result: T) -> Work[T]:
    """Work that is already done."""
    return result
    yield  # what makes it a generator


def together(works: Iterable[Work[T]]) -> list[T]:
    """Run all of them to their ends, each up to its next exchange in turn."""
    active = dict(enumerate(works))
    results: dict[int, T] = {}
    while active:
        for number, work in list(active.items()):
            try:
                next(work)
            except StopIteration as end:
                results[number] = end.value
                del active[number]
    return [results[number] for number in sorted(results)]
