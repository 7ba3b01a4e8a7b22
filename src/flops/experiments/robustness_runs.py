"""The models of the study of robustness: finished runs of `flops finetune`, read and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from flops.errors import FlopsError
from flops.storage.plain import parse_object
from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.classification.task import load_data
from flops.tasks.data.images import ImageData, ImageFormat
from flops.tasks.models.vit import load_model
from flops.training.methods import MethodName
from flops.training.run_directory import is_run, read_settings

LAST = "preprocessor_config.json"  # the last file that a run writes of its model
DATA = ("data", "data_config", "image_column", "label_column", "split_column", "splits", "strict")
# Settings that may differ between runs of a method: they do not affect the trained model.
APART: tuple[str, ...] = (
    "seed",
    "output",
    "test",
    "evaluate_every",
    "evaluate_steps",
    "marks",
    "chunk",
    "device",
    "plots",
    "timeout",
)
APART += ("checkpoint_steps", "checkpoint_seconds")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, identified by a digest.

    Attributes:
        path: The run directory.
        config: Its settings.
        classes: Names of the classes of the model.
        digest: Hash of the weights, the preprocessing and the data's settings.
    """

    path: Path
    config: FinetuneConfig
    classes: tuple[str, ...]
    digest: str

    @property
    def method(self) -> MethodName:
        """Its method."""
        return self.config.method

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.config.seed


def read_run(path: Path) -> FinishedRun:
    """Read a run directory with its model.

    Raises:
        FlopsError: If it is not a run directory, or the run has not finished.
    """
    if not path.is_dir():
        raise FlopsError(f"no folder {path}: pass the folders of finished runs of `flops finetune`")
    if not is_run(path):
        inside = [p.name for p in sorted(path.iterdir()) if is_run(p)]
        found = "there is no config.json" if any(path.iterdir()) else "it is empty"
        hint = "pass folders that `flops finetune` wrote"
        if inside:
            hint = f"it holds runs, such as {inside[0]}: pass those, as {path}/*"
        raise FlopsError(f"{path} holds no run ({found}); {hint}")
    config, model = read_settings(path, FinetuneConfig), path / "model"
    weights = sorted(model.glob("*.safetensors"))
    if not ((model / LAST).is_file() and (model / "config.json").is_file() and weights):
        raise FlopsError(
            f"the run in {path} has not finished (its model/ is missing or incomplete); finish "
            f"it with: flops finetune --resume {path}"
        )
    try:
        names = parse_object((model / "config.json").read_bytes())["id2label"]
        classes = tuple(names[str(number)] for number in range(len(names)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlopsError(f"{model / 'config.json'} does not name the classes: {error!r}") from error
    mark = hashlib.sha256(json.dumps([getattr(config, name) for name in DATA]).encode())
    for file in (*weights, model / LAST):
        with file.open("rb") as content:
            mark.update(hashlib.file_digest(content, "sha256").digest())
    return FinishedRun(path, config, classes, mark.hexdigest()[:16])


def read_runs(
    paths: Sequence[Path], *, model: str | None = None, data: str | None = None
) -> list[FinishedRun]:
    """Read run directories, which must be of this model and data, if given.

    Raises:
        FlopsError: If one is not a finished run, or is of another model or data.
    """
    runs = [read_run(path) for path in paths]
    for run in runs:
        for name, given in (("model", model), ("data", data)):
            theirs = getattr(run.config, name)
            if given is not None and given != theirs:
                raise FlopsError(
                    f"{run.path} was trained with --{name} {theirs}, not {given}; leave "
                    f"--{name} out, or pass other runs"
                )
    return runs


def check_alike(runs: Sequence[FinishedRun]) -> None:
    """Raise for runs that cannot be in one table.

    Raises:
        FlopsError: If there are none; model, data or classes differ; a method has a seed twice;
            or runs of a method differ in more than their seeds.
    """
    if not runs:
        raise FlopsError("there is no run to measure: pass --runs FOLDER... or --methods")
    first = runs[0]
    for run in runs[1:]:
        for name in ("model", "head", "limit", *DATA):
            one, other = getattr(first.config, name), getattr(run.config, name)
            if one != other:
                raise FlopsError(
                    f"{run.path} has {name} {other!r} and {first.path} has {one!r}; runs of one "
                    "table need the same model and data: measure the others with a separate command"
                )
        if run.classes != first.classes:
            raise FlopsError(
                f"{run.path} has {len(run.classes)} classes ({', '.join(run.classes[:5])}, ...) and"
                f" {first.path} has {len(first.classes)} ({', '.join(first.classes[:5])}, ...); "
                "runs of one table need the same: leave out one of them"
            )
    seen: dict[tuple[str, int], FinishedRun] = {}
    leading: dict[str, FinishedRun] = {}
    for run in runs:
        twin = seen.setdefault((run.method, run.seed), run)
        if twin is not run:
            raise FlopsError(
                f"{run.path} and {twin.path} are both of {run.method} with seed {run.seed}; leave "
                "out one of them"
            )
        lead = leading.setdefault(run.method, run)
        for name in FinetuneConfig.model_fields:
            values = getattr(lead.config, name), getattr(run.config, name)
            if name not in APART and values[0] != values[1]:
                raise FlopsError(
                    f"{lead.path} and {run.path} are both of {run.method}, with {name} "
                    f"{values[0]!r} and {values[1]!r}; runs of a method may differ in their seeds "
                    "only: leave out the others"
                )


def open_run(run: FinishedRun, limit: int | None) -> tuple[nn.Module, ImageFormat, ImageData]:
    """The trained model, and the data with its test split.

    Args:
        run: The run.
        limit: Largest number of test points; None for all, even if trained on fewer.

    Raises:
        FlopsError: If model or data cannot be read, or the data have other classes now.
    """
    try:
        model, format = load_model(str(run.path / "model"), len(run.classes), head="kept")
        data = _data(_only_data(run.config).replace(limit=limit), format)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise FlopsError(f"the run in {run.path} cannot be measured: {error}") from error
    if data.classes != run.classes:
        raise FlopsError(
            f"{run.path} was trained on the classes {', '.join(run.classes)}, and "
            f"'{run.config.data}' has {', '.join(data.classes)} now; restore the data"
        )
    return model, format, data


def _only_data(config: FinetuneConfig) -> FinetuneConfig:
    return FinetuneConfig(**{name: getattr(config, name) for name in DATA})


@lru_cache(maxsize=1)  # the next cell uses the same, and decoding folders of images is slow
def _data(config: FinetuneConfig, format: ImageFormat) -> ImageData:
    return load_data(config, format)
