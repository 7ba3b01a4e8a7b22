"""All runs of `flops tune`: step sizes on the first seed, then the other seeds with the best one.

Runs share only the data; each has its own journal, and each worker its own service unless a url is
given.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flops.blackbox.tuning import TuningProgress
from flops.errors import FlopsError
from flops.serve.client import ServiceClient, check_service
from flops.serve.local import LocalService
from flops.storage.files import atomic_write
from flops.tasks.data.few_shot import FewShots, few_shots
from flops.tasks.models.clip import PromptedClip
from flops.tasks.prompts.config import TuneConfig
from flops.tasks.prompts.methods import Recipe
from flops.tasks.prompts.names import TuneMethod
from flops.tasks.prompts.prompt import PromptSpace, upload
from flops.tasks.prompts.report import differences, plot, table
from flops.tasks.prompts.run import Backend, RunSettings, tune

ATTEMPTS = 40  # about three minutes: long enough for a service to restart


def run_campaign(config: TuneConfig, console: Console) -> None:
    """Run `flops tune`; print and write results, table and plot.

    Args:
        config: Validated, with the preset filled in.
        console: Shows progress and tables.
    """
    if config.url is not None:
        check_service(config.url, config.api_key())
    results = Campaign(config, console).run()
    assert config.methods is not None
    atomic_write(config.output / "results.json", json.dumps(results, indent=1) + "\n")
    sheets = [table(results, config.methods, config.price), differences(results)]
    written = [sheet.markdown() for sheet in sheets if sheet is not None]
    atomic_write(config.output / "table.md", "\n".join(written))
    for sheet in sheets:
        if sheet is not None:
            console.print(sheet.table())
    try:
        shown = plot(config.output, results)
        console.print(f"plot: {shown}", markup=False, soft_wrap=True)
    except ImportError as error:
        console.print(f"no plot was drawn: {error}", markup=False)
    console.print(f"results are in {config.output}", markup=False, soft_wrap=True)


@dataclass
class Campaign:
    """All runs of one `flops tune` command."""

    config: TuneConfig
    console: Console
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: int = field(default_factory=torch.get_num_threads, init=False)

    def run(self) -> list[dict[str, Any]]:
        """All runs; the reported ones have ``chosen`` set."""
        config, methods = self.config, self.config.methods or ()
        config.output.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, self._progress() as bars:
            workers = self._workers(stack)
            pool = stack.enter_context(ThreadPoolExecutor(config.workers, "tune"))

            def all_of(jobs: list[tuple[TuneMethod, float, int]]) -> list[dict[str, Any]]:
                try:
                    return list(pool.map(lambda job: self._one(job, workers, bars), jobs))
                except BaseException:
                    self._stopped.set()  # the other runs stop after their next response
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
                    if m != "manual"  # deterministic
                ]
            )
        for result in swept:
            result["chosen"] = result is best[result["method"]]
        return [*swept, *({**result, "chosen": True} for result in others)]

    def _sizes(self, method: TuneMethod) -> tuple[float, ...]:
        assert self.config.step_sizes is not None
        return self.config.step_sizes[:1] if method == "manual" else self.config.step_sizes

    def _one(
        self,
        job: tuple[TuneMethod, float, int],
        workers: queue.Queue[tuple[Backend, FewShots, dict[str, Any]]],
        bars: Progress,
    ) -> dict[str, Any]:
        method, size, seed = job
        # Set per thread. Candidates depend on the tuner's arithmetic, whose rounding must not
        # change when a run continues with other workers or on other cores.
        torch.set_num_threads(self._threads if method == "bp" else 1)
        name = method if method == "manual" else f"{method}-{size:g}-seed{seed}"
        worker = workers.get()
        backend, shots, identity = worker
        task = bars.add_task(name, total=None, status="")
        said: list[str] = []

        def notify(where: TuningProgress) -> None:
            said[:] = [
                f"epoch {where.epoch}: {where.asked:,} queries, validation "
                f"{where.validation_accuracy:.1f} % (loss {where.validation_loss:.3f})"
            ]
            bars.update(task, status=said[0])

        try:
            result = tune(
                self.config.output / name,
                self._recipe(method, size, seed),
                self._settings(backend, seed),
                shots,
                backend,
                identity=identity,
                notify=notify,
                answered=lambda rows: bars.advance(task, rows),
                stopped=self._stopped.is_set,
                say=self._say,
            )
        finally:
            workers.put(worker)
            bars.remove_task(task)
        self.console.print(
            f"{name}: validation {result['validation_accuracy']:.1f} % (loss "
            f"{result['validation_loss']:.3f}) after {result['queries']:,} queries, "
            f"{result['epochs']} epochs ({result['stopped']})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return result

    def _say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _recipe(self, method: TuneMethod, size: float, seed: int) -> Recipe:
        config = self.config
        assert config.sigma is not None
        assert config.queries is not None
        size = 0.0 if method == "manual" else size  # takes no step
        return Recipe(method, size, config.sigma, config.queries, config.batch, seed)

    def _settings(self, backend: Backend, seed: int) -> RunSettings:
        config, info = self.config, backend.client.info()
        assert config.dimensions is not None
        assert config.epochs is not None
        text = config.dimensions // 2
        space = PromptSpace(
            int(info["text_width"]),
            int(info["image_width"]),
            config.text_tokens,
            config.image_tokens,
            text,
            config.dimensions - text,
            config.single,
            seed=seed,
        )
        limits = info["limits"]
        most = min(int(limits["rows"]), int(limits["texts"]))
        return RunSettings(
            space,
            config.epochs,
            config.patience,
            config.budget,
            min(config.part, most),
            config.concurrency,
        )

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

    def _workers(self, stack: ExitStack) -> queue.Queue[tuple[Backend, FewShots, dict[str, Any]]]:
        """The backend of each worker, with the points uploaded."""
        config = self.config
        found: queue.Queue[tuple[Backend, FewShots, dict[str, Any]]] = queue.Queue()
        model = None
        for number in range(config.workers):
            url = config.url
            if url is None:
                url = stack.enter_context(self._service(number)).url
            key = config.api_key()
            with ServiceClient(url, key, config.timeout) as first:  # a wrong url fails early
                info = first.info()
            client = stack.enter_context(
                ServiceClient(url, key, config.timeout, config.concurrency, ATTEMPTS)
            )
            shots = few_shots(
                config.data,
                config.shots,
                int(info["channels"]),
                int(info["image_size"]),
                config.limit,
            )
            if tuple(info["classes"]) != shots.classes:
                raise FlopsError(
                    f"the service at {url} has the classes {info['classes'][:3]}..., the data "
                    f"{list(shots.classes[:3])}...: start it with --classes"
                )
            if "bp" in (config.methods or ()) and model is None:
                model = PromptedClip.load(config.model, shots.classes, config.template)
                if model.digest() != info["digest"]:
                    raise FlopsError(f"--model {config.model} is not the model behind {url}")
            backend = Backend(client, upload(client, shots.pixels, info["limits"]), model)
            mark = hashlib.sha256(shots.labels.numpy().tobytes()).hexdigest()[:16]
            identity = {"model": info["digest"], "points": backend.points.names, "labels": mark}
            found.put((backend, shots, identity))
        return found

    def _service(self, number: int) -> LocalService:
        config = self.config
        given = ["--model", config.model, "--template", config.template]
        given += ["--max-rows", str(max(1024, config.part)), "--max-tokens", "64"]
        given += ["--max-stored", "65536"]
        if config.data != "fashion-shots":
            names = few_shots(config.data, config.shots, limit=1).classes
            listed = config.output / "classes.txt"
            atomic_write(listed, "\n".join(names) + "\n")
            given += ["--classes", str(listed)]
        ledger = config.output / f"service-{number}" / "ledger.sqlite"
        self.console.print(f"starting a service with {config.model}", markup=False, highlight=False)
        return LocalService(Path(ledger), given)
