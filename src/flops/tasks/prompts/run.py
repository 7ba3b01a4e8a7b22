"""One run of `flops tune`: a method, a step size, a seed; a folder with its journal and results."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from flops.allocators.base import Learner
from flops.blackbox.evaluator import Evaluator, KeyedObjective, RequestObjective, drive
from flops.blackbox.journal import Journal
from flops.blackbox.tuner import Tuner
from flops.blackbox.tuning import Tuning, TuningProgress
from flops.errors import FlopsError
from flops.serve.client import ServiceClient
from flops.storage.files import atomic_write
from flops.tasks.data.few_shot import FewShots
from flops.tasks.models.clip import PromptedClip
from flops.tasks.prompts.methods import Recipe, stepper
from flops.tasks.prompts.prompt import (
    LocalObjective,
    PromptSpace,
    ServiceObjective,
    Uploaded,
    outputs_of,
)


@dataclass(frozen=True)
class RunSettings:
    """Options shared by all runs of a command; see `flops tune --help`."""

    space: PromptSpace
    epochs: int
    patience: int
    budget: int | None
    part: int
    concurrency: int


@dataclass(frozen=True, eq=False)
class Backend:
    """Evaluates candidates: a service, or for backpropagation the model itself."""

    client: ServiceClient
    points: Uploaded
    model: PromptedClip | None = None


def tune(
    folder: Path,
    recipe: Recipe,
    settings: RunSettings,
    shots: FewShots,
    backend: Backend,
    *,
    identity: dict[str, Any],
    notify: Callable[[TuningProgress], None] | None = None,
    answered: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = warnings.warn,
) -> dict[str, Any]:
    """Start or resume a run, and write its results.

    Args:
        folder: Folder of this run.
        recipe: Method, step size, seed.
        settings: Options shared by all runs.
        shots: The data.
        backend: Evaluates the candidates.
        identity: Identifies model and data, so that a journal of others is refused.
        notify: Called after each epoch.
        answered: Called with the number of rows after each evaluation.
        stopped: Called after each round; True stops the run with an error.
        say: Called with a sentence about each problem that was handled.

    Returns:
        The result, as in result.json.
    """
    done = folder / "result.json"
    about = {**asdict(recipe), **asdict(settings), **identity}
    shown = recipe.name == "shaped-lr"  # uses the logits, so its journal has them
    if shown:
        about["shown"] = shown
    for free in (
        "budget",
        "concurrency",
    ):  # they do not affect candidates, so a run may change them
        del about[free]
    journal = Journal(folder / "journal.sqlite", about, say)
    try:
        kept = _finished(done, say)
        if kept is not None and kept["budget"] == settings.budget:
            return kept
        local, objective, space = None, None, settings.space
        if recipe.name == "manual":  # no prompt vectors
            space = replace(space, text_tokens=0, image_tokens=0)
        if recipe.name == "bp":
            assert backend.model is not None
            images = backend.model.prepare(shots.pixels)
            objective = local = LocalObjective(backend.model, images, shots.labels, space)
        evaluated: KeyedObjective | RequestObjective = objective or ServiceObjective(
            backend.client, backend.points, shots.labels, space, shown=shown
        )
        start, outputs = space.start(), outputs_of(shots.labels)
        steps = stepper(recipe, start, len(shots.points.train), space.parts, local, outputs)
        compares = isinstance(steps, Tuner) and isinstance(steps.allocator, Learner)

        def embed(logits: Any) -> None:
            assert isinstance(steps, Tuner)
            steps.embeddings = logits

        run = Tuning(
            steps,
            start,
            shots.points,
            0 if recipe.name == "manual" else settings.epochs,
            settings.patience,
            settings.budget,
            embed if compares else None,
            notify,
        )
        evaluator = Evaluator(
            evaluated,
            journal,
            settings.budget,
            settings.part,
            settings.concurrency,
            answered,
        )
        _drive(run, evaluator, journal, backend.client, stopped)
        found = {"z": run.best, **{n: w.contiguous() for n, w in space.projections.items()}}
        result = _result(recipe, run, journal) | {"budget": settings.budget}
        lines = "".join(json.dumps(asdict(entry)) + "\n" for entry in run.history)
        _write(folder / "prompts.safetensors", save(found))
        _write(folder / "metrics.jsonl", lines.encode())
        _write(
            done, (json.dumps(result, indent=1) + "\n").encode()
        )  # last: it marks the run as finished
        return result
    finally:
        journal.close()


def _drive(
    run: Tuning,
    evaluator: Evaluator,
    journal: Journal,
    client: ServiceClient,
    stopped: Callable[[], bool],
) -> None:
    """Drive the run; requests, retries and seconds are counted over all its processes."""
    before, began = client.counts, time.perf_counter()

    def count() -> None:
        nonlocal before, began
        now, clock = client.counts, time.perf_counter()
        for name in ("requests", "retries"):
            if now[name] > before[name]:
                journal.count(name, now[name] - before[name])
        journal.count("seconds", clock - began)
        before, began = now, clock
        if stopped() and not run.done:
            raise FlopsError("the run was stopped")

    drive(run, evaluator, count)


def _finished(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The result of a finished run, if it can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict) and found.keys() >= {"budget", "validation_loss", "queries"}:
            return found
        reason = "not a result"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    say(f"{path} cannot be read ({reason}); it is rebuilt from the journal")
    return None


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    try:
        atomic_write(path, data)
    except OSError as error:
        raise FlopsError(
            f"{path} cannot be written ({error}): free some space and start the same command "
            "again; all values are in the journal, and nothing is charged twice"
        ) from error


def _result(recipe: Recipe, run: Tuning, journal: Journal) -> dict[str, Any]:
    best = min(run.history, key=lambda entry: entry.validation_loss)
    counted, paid = journal.counters(), journal.paid()
    return {
        "method": recipe.name,
        "step_size": recipe.step_size,
        "seed": recipe.seed,
        "accuracy": run.test_accuracy,
        "loss": run.test_loss,
        "validation_accuracy": best.validation_accuracy,
        "validation_loss": best.validation_loss,
        "epochs": run.history[-1].epoch,
        "best_epoch": best.epoch,
        "stopped": run.stopped,
        "queries": paid["queries"],
        "texts": paid.get("texts", 0),
        "images": paid.get("images", 0),
        "requests": int(counted.get("requests", 0)),
        "retries": int(counted.get("retries", 0)),
        "replays": paid.get("replays", 0),
        "seconds": counted.get("seconds", 0.0),
    }
