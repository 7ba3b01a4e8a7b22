"""Prompts behind a service as a problem of `flops tune`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from safetensors.torch import save
from torch import Tensor

from flops.blackbox.requests import KeyedObjective, RequestObjective
from flops.errors import FlopsError
from flops.serve.client import ServiceClient
from flops.serve.local import LocalService
from flops.storage.files import atomic_write
from flops.tasks.data.few_shot import FewShots, few_shots
from flops.tasks.models.clip import PromptedClip
from flops.tasks.prompts.backpropagation import Backpropagation
from flops.tasks.prompts.config import TuneConfig
from flops.tasks.prompts.prompt import (
    LocalObjective,
    PromptSpace,
    ServiceObjective,
    Uploaded,
    outputs_of,
    upload,
)
from flops.tasks.tuning.methods import Recipe
from flops.tasks.tuning.problem import Job
from flops.training.device import find_device

ATTEMPTS = 40  # about three minutes: long enough for a service to restart


@dataclass(frozen=True, eq=False)
class PromptWorker:
    """A service with the points uploaded; for backpropagation also the model itself."""

    client: ServiceClient
    points: Uploaded
    shots: FewShots
    info: Mapping[str, Any]
    model: PromptedClip | None = None


@dataclass
class PromptProblem:
    """Prompts of a frozen vision-language model, behind its service."""

    config: TuneConfig
    console: Console
    title: str = "Black-box prompt tuning"
    metric: Literal["accuracy", "loss"] = "accuracy"
    note: str = (
        "Test accuracy of the prompts with the best validation loss. Queries: rows charged, "
        "validation and test included; texts: class texts that the service encoded. Both exclude "
        "the runs that chose step sizes. bp runs a local model."
    )
    _model: PromptedClip | None = None

    def open(self, stack: ExitStack, number: int) -> PromptWorker:
        """Connect to the service, or start one, and upload the points."""
        config, url = self.config, self.config.url
        assert config.timeout is not None
        assert config.concurrency is not None
        if url is None:
            url = stack.enter_context(self._service(number)).url
        key = config.api_key()
        with ServiceClient(url, key, config.timeout) as first:  # a wrong url fails early
            info = first.info()
        client = stack.enter_context(
            ServiceClient(url, key, config.timeout, config.concurrency, ATTEMPTS)
        )
        sizes = int(info["channels"]), int(info["image_size"])
        shots = few_shots(config.data, config.shots, *sizes, config.limit)
        if tuple(info["classes"]) != shots.classes:
            raise FlopsError(
                f"the service at {url} has the classes {info['classes'][:3]}..., the data "
                f"{list(shots.classes[:3])}...: start it with --classes"
            )
        if "bp" in (config.methods or ()) and self._model is None:
            self._model = PromptedClip.load(config.model, shots.classes, config.template)
            self._model.to(find_device(config.device))
            if self._model.digest() != info["digest"]:
                raise FlopsError(f"--model {config.model} is not the model behind {url}")
        points = upload(client, shots.pixels, info["limits"])
        return PromptWorker(client, points, shots, info, self._model)

    def job(self, recipe: Recipe, worker: PromptWorker) -> Job:
        """The run of a recipe."""
        config, shots, labels = self.config, worker.shots, worker.shots.labels
        given = space = self._space(worker.info, recipe.seed)
        if recipe.name == "manual":  # no prompt vectors
            space = replace(space, text_tokens=0, image_tokens=0)
        limits = worker.info["limits"]
        part = min(config.part, int(limits["rows"]), int(limits["texts"]))
        shown = recipe.name == "shaped-lr"  # uses the logits, so its journal has them
        settings = {
            "space": asdict(given),
            "part": part,
            "model": worker.info["digest"],
            "points": worker.points.names,
            "labels": hashlib.sha256(labels.numpy().tobytes()).hexdigest()[:16],
        }
        if shown:
            settings["shown"] = shown
        start, own = space.start(), None
        objective: KeyedObjective | RequestObjective = ServiceObjective(
            worker.client, worker.points, labels, space, shown=shown
        )
        if recipe.name == "bp":
            assert worker.model is not None
            images = worker.model.prepare(shots.pixels)
            objective = local = LocalObjective(worker.model, images, labels, space)
            own = Backpropagation(start, len(shots.points.train), local, recipe)

        def write(folder: Path, best: Tensor) -> None:
            found = {"z": best, **{n: w.contiguous() for n, w in space.projections.items()}}
            atomic_write(folder / "prompts.safetensors", save(found))

        return Job(
            start,
            shots.points,
            objective,
            settings,
            write,
            space.parts,
            outputs_of(labels),
            own,
            part,
            config.concurrency or 1,
            counts=lambda: {n: worker.client.counts[n] for n in ("requests", "retries")},
            embeds=True,
        )

    def _space(self, info: Mapping[str, Any], seed: int) -> PromptSpace:
        config = self.config
        assert config.dimensions is not None
        text = config.dimensions // 2
        return PromptSpace(
            int(info["text_width"]),
            int(info["image_width"]),
            config.text_tokens,
            config.image_tokens,
            text,
            config.dimensions - text,
            config.single,
            seed=seed,
        )

    def _service(self, number: int) -> LocalService:
        config = self.config
        given = ["--model", config.model, "--template", config.template]
        given += ["--device", config.device]
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
