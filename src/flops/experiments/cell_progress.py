"""What a person sees of a study's cells: the plan, a line or a bar for each, the time to go.

The time to go is an estimate from the runs that are finished, of the same method where there are
some. Before the first has finished, nothing is known, and nothing is claimed.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

Result = dict[str, Any]
Describe = Callable[[Result], str]


def about(seconds: float) -> str:
    """A duration as an estimate: seconds below two minutes, then minutes, then hours."""
    if seconds < 10:
        return "a few seconds"
    if seconds < 100:
        return f"{round(seconds, -1):.0f} seconds"
    if seconds < 100 * 60:
        return f"{round(seconds / 60):.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


class CellProgress:
    """Shows the cells of one part of a study as they finish.

    Args:
        console: Where it is shown: a bar on a terminal, else a line for each finished cell.
        title: Name of the part.
        settings: Settings of all cells.
        left: Settings of those to run.
        known: Seconds of saved cells by method; for the estimate.
        workers: Number of processes.
        describe: A result in a few words, for the line.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        settings: Sequence[Any],
        left: Sequence[Any],
        known: Mapping[str, Sequence[float]],
        workers: int,
        describe: Describe | None = None,
    ) -> None:
        self._console, self._title, self._describe = console, title, describe
        self._settings, self._left = settings, list(left)
        self._seconds = {method: list(values) for method, values in known.items()}
        self._workers = max(1, min(workers, len(left)))
        self._since = time.monotonic()  # of the last finished cell
        self._varied = varied(settings)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(
            *columns,
            TimeElapsedColumn(),
            _TimeToGo(self),
            console=console,
            disable=not (console.is_terminal and left),
        )

    def __enter__(self) -> Self:
        """Print the plan."""
        if self._left:
            self.say(self.plan())
        done = len(self._settings) - len(self._left)
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=len(self._settings), completed=done)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the bar."""
        self._bar.stop()

    def plan(self) -> str:
        """How many runs there are, and how long they take if anything is known about it."""
        count, saved = len(self._left), len(self._settings) - len(self._left)
        said = f"{self._title}: {count} {'runs' if count > 1 else 'run'}"
        said += f", {saved} saved before" if saved else ""
        said += f", {self._workers} at a time" if self._workers > 1 else ""
        seconds = self._estimate()
        if seconds is None:
            return f"{said}; how long they take is known when the first has finished"
        return f"{said}, about {about(seconds)}"

    def finished(self, settings: Any, seconds: float | None, result: Result | None) -> None:
        """Count a cell.

        Args:
            settings: Its settings.
            seconds: How long it took; None if it failed.
            result: Its result; None if it failed.
        """
        self._left.remove(settings)
        if seconds is not None:
            self._seconds.setdefault(method_of(settings), []).append(seconds)
        self._since = time.monotonic()
        self._bar.advance(self._task)
        if self._console.is_terminal:
            return
        done, total = len(self._settings) - len(self._left), len(self._settings)
        said = f"{self._title} {done}/{total}: {self._name(settings)}"
        if result is None:
            said += ": failed"
        elif self._describe is not None:
            said += f": {self._describe(result)}"
        said += "" if seconds is None else f" ({seconds:.0f} s)"
        self.say("; ".join(filter(None, [said, self.to_go()])))

    def to_go(self) -> str:
        """The time to go, as an estimate; empty if nothing is known."""
        seconds = self._estimate()
        if seconds is None or not self._left:
            return ""
        return f"about {about(max(0.0, seconds - (time.monotonic() - self._since)))} left"

    def _estimate(self) -> float | None:
        everything = [value for values in self._seconds.values() for value in values]
        if not everything:
            return None
        mean = statistics.fmean(everything)
        each = [
            statistics.fmean(self._seconds[method])
            if self._seconds.get(method := method_of(settings))
            else mean
            for settings in self._left
        ]
        return max(max(each, default=0.0), sum(each) / self._workers)

    def _name(self, settings: Any) -> str:
        values = {name: getattr(settings, name) for name in self._varied}
        shown = [f"{n.replace('_', ' ')} {_value(v)}" for n, v in values.items() if v is not None]
        return ", ".join(one.removeprefix("method ") for one in shown) or "run"

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _TimeToGo(ProgressColumn):
    """The time to go, beside the bar."""

    def __init__(self, progress: CellProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """The estimate at this moment."""
        return Text(self._progress.to_go())


def varied(settings: Sequence[Any]) -> list[str]:
    """Names of the settings in which cells differ, but those that follow from others."""
    names = [field.name for field in dataclasses.fields(settings[0])] if settings else []
    kinds = {type(one) for one in settings}
    if len(kinds) > 1:
        names = [n for n in names if all(hasattr(one, n) for one in settings)]
    return [n for n in names if len({repr(getattr(one, n)) for one in settings}) > 1]


def method_of(settings: Any) -> str:
    """The method of a cell: cells of one method take about the same time."""
    return str(getattr(settings, "method", ""))


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def warn_grouped(found: Sequence[Sequence[str]]) -> None:
    """Repeat the warnings of many runs as one for each kind, with the number of runs.

    Args:
        found: Warnings of each run. Those that differ in numbers only are of one kind.
    """
    kinds: dict[str, list[str]] = {}
    for messages in found:
        for kind, message in {re.sub(r"[\d.,]+", "#", m): m for m in messages}.items():
            kinds.setdefault(kind, []).append(message)
    for messages in kinds.values():
        count = f" (in {len(messages)} runs)" if len(messages) > 1 else ""
        warnings.warn(f"{messages[0]}{count}", stacklevel=3)
