"""All runs of `flops tune`: step sizes on the first seed, then the other seeds with the best one.

Runs share only the data; each has its own journal, and each worker its own connections.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flops.blackbox.tuning import TuningProgress
from flops.storage.files import atomic_write
from flops.tasks.tuning.config import CampaignConfig
from flops.tasks.tuning.methods import Recipe
from flops.tasks.tuning.names import FIXED, TuneMethod
from flops.tasks.tuning.problem import Problem
from flops.tasks.tuning.programs import PROGRAMS
from flops.tasks.tuning.report import below_start, differences, plot, run_name, table
from flops.tasks.tuning.run import Limits, tune

W = TypeVar("W")


def run_campaign(problem: Problem[W], config: CampaignConfig, console: Console) -> None:
    """Run `flops tune`; print and write results, table and plot.

    Args:
        problem: What is tuned.
        config: Validated, with the defaults filled in.
        console: Shows progress and tables.
    """
    results = Campaign(problem, config, console).run()
    assert config.methods is not None
    atomic_write(config.output / "results.json", json.dumps(results, indent=1) + "\n")
    sheets = [table(problem, results, config.methods, config.price), differences(problem, results)]
    said = below_start(problem, results)
    written = [sheet.markdown() for sheet in sheets if sheet is not None]
    atomic_write(config.output / "table.md", "\n".join([*written, *(f"{s}\n" for s in said)]))
    for sheet in sheets:
        if sheet is not None:
            sheet.print(console)
    for sentence in said:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    try:
        shown = plot(problem, config.output, results)
        console.print(f"plot: {shown}", markup=False, soft_wrap=True)
    except ImportError as error:
        console.print(f"no plot was drawn: {error}", markup=False)
    console.print(f"results are in {config.output}", markup=False, soft_wrap=True)


@dataclass
class Campaign(Generic[W]):
    """All runs of one `flops tune` command."""

    problem: Problem[W]
    config: CampaignConfig
    console: Console
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: int = field(default_factory=torch.get_num_threads, init=False)

    def run(self) -> list[dict[str, Any]]:
        """All runs; the reported ones have ``chosen`` set."""
        config, methods = self.config, self.config.methods or ()
        config.output.mkdir(parents=True, exist_ok=True)
        PROGRAMS.resume()
        with ExitStack() as stack, self._progress() as bars:
            workers: queue.Queue[W] = queue.Queue()
            for number in range(config.workers):
                workers.put(self.problem.open(stack, number))
            pool = stack.enter_context(ThreadPoolExecutor(config.workers, "tune"))

            def all_of(jobs: list[tuple[TuneMethod, float | None, int]]) -> list[dict[str, Any]]:
                try:
                    return list(pool.map(lambda job: self._one(job, workers, bars), jobs))
                except BaseException as error:
                    self._stopped.set()  # the other runs stop after their next response
                    if not isinstance(error, Exception):  # which may take hours
                        self._say("stopping; again to leave evaluations that cannot be ended")
                        PROGRAMS.stop()
                        for child in multiprocessing.active_children():  # of --executor processes
                            child.terminate()
                    raise

            swept = all_of([(m, s, 0) for m in methods for s in self._sizes(m)])
            best = {
                m: min((r for r in swept if r["method"] == m), key=lambda r: r["validation_loss"])
                for m in methods
            }
            others = all_of(
                [
                    (m, best[m]["step_size"], seed)
                    for seed in range(1, config.seeds)
                    for m in methods
                    if m not in FIXED  # deterministic
                ]
            )
        for result in swept:
            result["chosen"] = result is best[result["method"]]
        return [*swept, *({**result, "chosen": True} for result in others)]

    def _sizes(self, method: TuneMethod) -> tuple[float | None, ...]:
        if method in FIXED:
            return (0.0,)
        if method == "cma-es" and self.config.step_sizes is None:
            return (10 * (self.config.sigma or 0.01),)
        return self.config.step_sizes or (None,)

    def _one(
        self, job: tuple[TuneMethod, float | None, int], workers: queue.Queue[W], bars: Progress
    ) -> dict[str, Any]:
        method, size, seed = job
        # Set per thread. Candidates depend on the tuner's arithmetic, whose rounding must not
        # change when a run continues with other workers or on other cores.
        torch.set_num_threads(self._threads if method == "bp" else 1)
        name = run_name(method, size, seed)
        worker = workers.get()
        task = bars.add_task(name, total=self.config.budget, status="")

        def notify(where: TuningProgress) -> None:
            shown = self._shown(where.validation_accuracy, where.validation_loss)
            bars.update(task, status=f"epoch {where.epoch}: {where.asked:,} queries, {shown}")

        try:
            result = tune(
                self.config.output / name,
                self._recipe(method, size, seed),
                self._limits(),
                self.problem.job(self._recipe(method, size, seed), worker),
                notify=notify,
                answered=lambda rows: bars.advance(task, rows),
                stopped=self._stopped.is_set,
                say=self._say,
            )
        finally:
            workers.put(worker)
            bars.remove_task(task)
        shown = self._shown(result["validation_accuracy"], result["validation_loss"])
        failed = f", {result['failed']:,} rows failed" if result.get("failed") else ""
        taken = result.get("steps")  # not in results of older versions
        unknown = method in FIXED or taken is None
        steps = "" if unknown else f", {taken:,} step{'' if taken == 1 else 's'}"
        ended = f" ({result['stopped']})" if steps else ""
        self._say(f"{name}: {shown} after {result['queries']:,} queries{steps}{ended}{failed}")
        return result

    def _shown(self, accuracy: float, loss: float) -> str:
        if self.problem.metric == "accuracy":
            return f"validation {accuracy:.1f} % (loss {loss:.3f})"
        return f"validation loss {loss:.4g}"

    def _say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _recipe(self, method: TuneMethod, size: float | None, seed: int) -> Recipe:
        config = self.config
        assert config.sigma is not None
        assert config.queries is not None
        return Recipe(method, size, config.sigma, config.queries, config.batch, seed)

    def _limits(self) -> Limits:
        assert self.config.epochs is not None
        return Limits(self.config.epochs, self.config.patience, self.config.budget)

    @contextmanager
    def _progress(self) -> Iterator[Progress]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        terminal = self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=not terminal) as bars:
            yield bars
