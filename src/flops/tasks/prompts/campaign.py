"""All runs of `flops tune`: step sizes on the first seed, then the other seeds with the best one.

Runs share nothing but the data; each has a journal of its own, and a worker a service of its own
unless there is one elsewhere.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flops.blackbox.tuning import Progress as RunProgress
from flops.errors import FlopsError
from flops.serve.client import ServiceClient
from flops.serve.local import LocalService
from flops.tasks.data.few_shot import FewShots, few_shots
from flops.tasks.models.clip import PromptedClip
from flops.tasks.prompts.methods import Recipe
from flops.tasks.prompts.names import TuneMethod
from flops.tasks.prompts.prompt import PromptSpace, upload
from flops.tasks.prompts.run import Settings, Whom, tune

if TYPE_CHECKING:
    from flops.cli.tune import Tune

ATTEMPTS = 40  # some three minutes: a service that is being started again is waited for


@dataclass
class Campaign:
    """Runs what the options of `flops tune` ask for."""

    options: Tune
    console: Console
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _threads: int = field(default_factory=torch.get_num_threads, init=False)

    def run(self) -> list[dict[str, Any]]:
        """All runs; the reported ones have ``chosen`` set."""
        options, methods = self.options, self.options.methods or ()
        options.output.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, self._progress() as bars:
            workers = self._workers(stack)
            pool = stack.enter_context(ThreadPoolExecutor(options.workers, "tune"))

            def all_of(jobs: list[tuple[TuneMethod, float, int]]) -> list[dict[str, Any]]:
                try:
                    return list(pool.map(lambda job: self._one(job, workers, bars), jobs))
                except BaseException:
                    self._stopped.set()  # the other runs stop behind their next answer
                    raise

            swept = all_of([(m, s, 0) for m in methods for s in self._sizes(m)])
            best = {
                m: min((r for r in swept if r["method"] == m), key=lambda r: r["validation_loss"])
                for m in methods
            }
            others = all_of(
                [
                    (m, best[m]["step_size"], seed)
                    for seed in range(1, options.seeds)
                    for m in methods
                    if m != "manual"  # there is nothing random in it
                ]
            )
        for result in swept:
            result["chosen"] = result is best[result["method"]]
        return [*swept, *({**result, "chosen": True} for result in others)]

    def _sizes(self, method: TuneMethod) -> tuple[float, ...]:
        assert self.options.step_sizes is not None
        return self.options.step_sizes[:1] if method == "manual" else self.options.step_sizes

    def _one(
        self,
        job: tuple[TuneMethod, float, int],
        workers: queue.Queue[tuple[Whom, FewShots, dict[str, Any]]],
        bars: Progress,
    ) -> dict[str, Any]:
        method, size, seed = job
        # A setting of each thread. Questions follow from the tuner's own arithmetic, whose last
        # bits must not change when a run goes on with other workers or on other cores.
        torch.set_num_threads(self._threads if method == "bp" else 1)
        name = method if method == "manual" else f"{method}-{size:g}-seed{seed}"
        worker = workers.get()
        whom, shots, identity = worker
        task = bars.add_task(name, total=None, status="")
        said: list[str] = []

        def notify(where: RunProgress) -> None:
            said[:] = [
                f"epoch {where.epoch}: {where.asked:,} queries, validation "
                f"{where.validation_accuracy:.1f} % (loss {where.validation_loss:.3f})"
            ]
            bars.update(task, status=said[0])

        try:
            result = tune(
                self.options.output / name,
                self._recipe(method, size, seed),
                self._settings(whom, seed),
                shots,
                whom,
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
        options = self.options
        assert options.sigma is not None
        assert options.queries is not None
        size = 0.0 if method == "manual" else size  # it takes no step
        return Recipe(method, size, options.sigma, options.queries, options.batch, seed)

    def _settings(self, whom: Whom, seed: int) -> Settings:
        options, info = self.options, whom.client.info()
        assert options.dimensions is not None
        assert options.epochs is not None
        text = options.dimensions // 2
        space = PromptSpace(
            int(info["text_width"]),
            int(info["image_width"]),
            options.text_tokens,
            options.image_tokens,
            text,
            options.dimensions - text,
            options.single,
            seed=seed,
        )
        limits = info["limits"]
        most = min(int(limits["rows"]), int(limits["texts"]))
        return Settings(
            space,
            options.epochs,
            options.patience,
            options.budget,
            min(options.part, most),
            options.concurrency,
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

    def _workers(self, stack: ExitStack) -> queue.Queue[tuple[Whom, FewShots, dict[str, Any]]]:
        """Whom each worker asks, with the points uploaded."""
        options = self.options
        found: queue.Queue[tuple[Whom, FewShots, dict[str, Any]]] = queue.Queue()
        model = None
        for number in range(options.workers):
            url = options.url
            if url is None:
                url = stack.enter_context(self._service(number)).url
            key = options.api_key()
            with ServiceClient(url, key, options.timeout) as first:  # a wrong url is soon said
                info = first.info()
            client = stack.enter_context(
                ServiceClient(url, key, options.timeout, options.concurrency, ATTEMPTS)
            )
            shots = few_shots(
                options.data,
                options.shots,
                int(info["channels"]),
                int(info["image_size"]),
                options.limit,
            )
            if tuple(info["classes"]) != shots.classes:
                raise FlopsError(
                    f"the service at {url} knows the classes {info['classes'][:3]}..., the data "
                    f"{list(shots.classes[:3])}...: start it with --classes"
                )
            if "bp" in (options.methods or ()) and model is None:
                model = PromptedClip.load(options.model, shots.classes, options.template)
                if model.digest() != info["digest"]:
                    raise FlopsError(f"--model {options.model} is not the model behind {url}")
            whom = Whom(client, upload(client, shots.pixels, info["limits"]), model)
            mark = hashlib.sha256(shots.labels.numpy().tobytes()).hexdigest()[:16]
            identity = {"model": info["digest"], "points": whom.points.names, "labels": mark}
            found.put((whom, shots, identity))
        return found

    def _service(self, number: int) -> LocalService:
        options = self.options
        given = ["--model", options.model, "--template", options.template]
        given += ["--max-rows", str(max(1024, options.part)), "--max-tokens", "64"]
        given += ["--max-stored", "65536"]
        if options.data != "fashion-shots":
            names = few_shots(options.data, options.shots, limit=1).classes
            listed = options.output / "classes.txt"
            listed.write_text("\n".join(names) + "\n", "utf-8")
            given += ["--classes", str(listed)]
        ledger = options.output / f"service-{number}" / "ledger.sqlite"
        self.console.print(f"starting a service of {options.model}", markup=False, highlight=False)
        return LocalService(Path(ledger), given)
