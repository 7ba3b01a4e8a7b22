"""Console output of a run: a live panel in a terminal, a line per evaluation elsewhere."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flops.report.curves import read_metrics
from flops.training.progress import Evaluation, Result
from flops.training.trainer import Trainer

SMOOTH = 20  # steps over which loss and signal-to-noise ratio are averaged


def display_for(console: Console) -> Lines | LiveDisplay:
    """The panel if the console is a terminal, else plain lines."""
    return LiveDisplay(console) if console.is_terminal else Lines(console)


class Lines:
    """One line per evaluation, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._recent = _Recent()

    def start(self, trainer: Trainer, folder: Path | None) -> None:
        """Print what is trained."""
        self.say(opening(trainer, folder))
        for note in trainer.data.notes:
            self.say(f"note: {note}")
        if folder is not None and trainer.progress.step:
            self._recent.restore(folder / "metrics.jsonl")

    def step(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Update the running means."""
        self._recent.add(line)

    def evaluation(self, trainer: Trainer, found: Evaluation) -> None:
        """Print a line."""
        self.say(self._recent.line(found))

    def close(self) -> None:
        """Nothing to close."""

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Print warnings as single lines, without the source location."""

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            self.say(f"warning: {message}")

        with warnings.catch_warnings():
            warnings.showwarning = show
            yield

    def say(self, text: str) -> None:
        """Print plain text: no markup, no wrapping, no highlighting."""
        text = text.encode("utf-8", "backslashreplace").decode(
            "utf-8"
        )  # names may hold invalid bytes
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(Lines):
    """A live panel: progress with time left, loss, accuracy, queries, cost, signal-to-noise."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began, self._first = 0.0, 0.0
        self._evaluation: Evaluation | None = None

    def start(self, trainer: Trainer, folder: Path | None) -> None:
        """Open the panel."""
        super().start(trainer, folder)
        found = trainer.progress.evaluations
        self._evaluation = found[-1] if found else None
        self._began, self._first = time.monotonic(), trainer.fraction()
        self._live.start()

    def step(self, trainer: Trainer, line: dict[str, Any]) -> None:
        """Update the panel."""
        super().step(trainer, line)
        self._live.update(self.render(trainer), refresh=True)

    def evaluation(self, trainer: Trainer, found: Evaluation) -> None:
        """Print a line above the panel."""
        super().evaluation(trainer, found)
        self._evaluation = found

    def close(self) -> None:
        """Close the panel."""
        self._live.stop()

    def render(self, trainer: Trainer) -> RenderableType:
        """Render the panel."""
        done, progress = trainer.fraction(), trainer.progress
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"epoch {trainer.epochs_done:.2f}, step {progress.step}"),
            ProgressBar(total=1.0, completed=done, width=40),
            Text(f"{done:.0%}, {self._left(done)} left"),
        )
        table = Table.grid(padding=(0, 2))
        shown = [("loss", f"{self._recent.loss:.4f}")]
        if self._evaluation is not None:
            shown.append(("validation accuracy", f"{self._evaluation.accuracy:.1%}"))
        shown += [("queries", f"{progress.queries:,}"), ("forwards", f"{progress.spent:,.0f}")]
        for name, value in shown:
            table.add_row(Text(name, style="dim"), Text(value))
        groups = ", ".join(f"{n} {_ratio(v)}" for n, v in self._recent.snr.items())
        table.add_row(Text("signal-to-noise", style="dim"), Text(groups))
        return Group(bar, table)

    def _left(self, done: float) -> str:
        gained = done - self._first
        if gained <= 0:
            return "?"
        seconds = (1 - done) / gained * (time.monotonic() - self._began)
        return duration(seconds)


class _Recent:
    """Means over the last steps."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        self._lines = [*self._lines[1 - SMOOTH :], line]

    def restore(self, metrics: Path) -> None:
        """Those of a run that goes on, so that it prints what an uninterrupted one does."""
        with suppress(OSError):
            for line in read_metrics(metrics)[0][-SMOOTH:]:
                snr = {n: math.inf if x is None else x for n, x in line.get("snr", {}).items()}
                loss = math.nan if line["loss"] is None else line["loss"]
                self.add({**line, "loss": loss, "snr": snr})

    @property
    def loss(self) -> float:
        return statistics.fmean(line["loss"] for line in self._lines) if self._lines else 0.0

    @property
    def snr(self) -> dict[str, float]:
        if not self._lines:
            return {}
        return {
            name: statistics.fmean(line["snr"].get(name, 0.0) for line in self._lines)
            for name in self._lines[-1]["snr"]
        }

    def line(self, found: Evaluation) -> str:
        loss = f"loss {self.loss:.4f}  " if self._lines else ""
        test = "" if found.test is None else f"  test {found.test:.1%}"
        snr = ", ".join(f"{name} {_ratio(value)}" for name, value in self.snr.items())
        return (
            f"epoch {found.epoch:5.2f}  step {found.step:5d}  {loss}"
            f"validation {found.accuracy:.1%}{test}  queries {found.queries:,}  "
            f"forwards {found.forward_equivalents:,.0f}  time {duration(found.seconds)}"
            + (f"  signal-to-noise {snr}" if snr else "")
        )


def opening(trainer: Trainer, folder: Path | None) -> str:
    """One line about task, method and folder."""
    where = f", in {folder}" if folder is not None else ""
    again = f", from step {trainer.progress.step}" if trainer.progress.step else ""
    return f"{trainer.task.title} with {trainer.config.method}{where}{again}"


def closing(result: Result) -> str:
    """Two lines about the result and its folder."""
    test = "" if result.test is None else f", test {result.test:.1%}"
    return (
        f"validation {result.accuracy:.1%}{test} after {result.steps} steps, "
        f"{result.queries:,} queries, {result.forward_equivalents:,.0f} forward equivalents, "
        f"{duration(result.seconds)}; peak memory {result.peak_memory / 2**30:.2f} GiB\n"
        f"results are in {result.folder}; flops report {result.folder} makes a page of them"
    )


def duration(seconds: float) -> str:
    """Format as 1:05 or 1:02:03."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _ratio(value: float) -> str:
    if value == float("inf"):
        return "exact"
    return ">1e6" if value > 1e6 else f"{value:.2g}"
