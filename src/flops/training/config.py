"""Settings that every training run has, and how settings are read from plain values."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flops.errors import FlopsError
from flops.storage.plain import parse_json
from flops.training.methods import PRESETS, Method, MethodName

if TYPE_CHECKING:
    import torch

    from flops.training.task import Task

TINY = PRESETS["tiny"]


class ConfigError(FlopsError):  # no ValueError: tyro would catch it and name its inner parts
    """A setting does not exist, is of the wrong type, or does not fit the others."""


@dataclass(frozen=True)
class RunConfig:
    """What every training run is asked: method, length, batch, optimizer, checkpoints.

    Raises:
        ConfigError: If a value is not allowed.
    """

    method: MethodName = "shaped-lr"
    """How gradients are estimated; bp is backpropagation, for comparison."""
    queries: float = TINY.queries
    """Mean queries per point and group."""
    sigma: tuple[float, ...] | None = TINY.sigma
    """Noise scale: one, or one for each stage."""
    epochs: int | None = TINY.epochs
    """Epochs; None for no limit but the budget."""
    budget: float | None = None
    """Forward equivalents; None for no limit but the epochs."""
    until: Literal["first", "last"] = "first"
    """Whether training ends at the first or at the last of epochs and budget."""
    marks: tuple[float, ...] = ()
    """More forward equivalents at which the validation split is evaluated."""
    batch: int = TINY.batch
    """Points of a batch."""
    learning_rate: float = TINY.learning_rate
    """Of the optimizer."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Whether the learning rate stays, or falls to 0 as a cosine over the run."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer."""
    weight_decay: float = 0.0
    """Of the optimizer."""
    seed: int = 0
    """Of what is trained afresh, the order of the points, and the noise."""
    evaluate_every: int = 1
    """Epochs between two evaluations on the validation split."""
    test: bool = False
    """Look at the test split as well, when `epochs` and `budget` are reached and never else."""
    data: str = "digits"
    """The data set."""
    limit: int | None = None
    """Most points of each split, for a quick look; None for all."""
    chunk: int | None = None
    """Most rows in one pass of queries; None for a default. Less takes less memory."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one."""
    checkpoint_steps: int | None = None
    """Steps between two checkpoints; None for none by steps."""
    checkpoint_seconds: float | None = 60.0
    """Seconds between two checkpoints; None for none by time."""
    timeout: float = 600.0
    """Seconds to wait for another process, under torchrun, before the run is given up."""
    output: str | None = None
    """Run folder; None makes a new one in runs/."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("queries", "batch", "learning_rate", "evaluate_every", "timeout"):
            self._need(getattr(self, name) > 0, name, "greater than 0")
        for name in ("epochs", "budget", "checkpoint_steps", "limit"):
            value = getattr(self, name)
            self._need(value is None or value > 0, name, "greater than 0, or None")
        self._need(self.weight_decay >= 0, "weight_decay", "0 or more")
        self._need(0 <= self.seed < 2**63, "seed", "0 or more, and less than 2**63")
        self._need(self.chunk is None or self.chunk >= 2, "chunk", "at least 2, or None")
        self._need(all(m > 0 for m in self.marks), "marks", "greater than 0")
        wait = self.checkpoint_seconds
        self._need(wait is None or wait >= 0, "checkpoint_seconds", "0 or more, or None")
        self._need(all(s > 0 for s in self.sigma or ()), "sigma", "greater than 0")
        if self.epochs is None and self.budget is None:
            raise ConfigError("epochs or budget must be given, or training never ends")
        try:
            self.recipe()
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def recipe(self) -> Method:
        """The method with its settings."""
        raise NotImplementedError

    def open(self, device: torch.device) -> Task:
        """Load what is to be trained, and its data.

        Raises:
            FlopsError: If the two do not fit together, or are not there.
        """
        raise NotImplementedError

    def _need(self, met: bool, name: str, allowed: str) -> None:
        numbers = getattr(self, name)
        finite = all(
            math.isfinite(v)
            for v in (numbers if isinstance(numbers, tuple) else (numbers,))
            if v is not None
        )
        if not (met and finite):
            raise ConfigError(f"{name} must be {allowed}, not {numbers}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them back."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values


Settings = TypeVar("Settings", bound=RunConfig)


def merged(base: Settings, values: Mapping[str, Any]) -> Settings:
    """The same settings but for these plain values.

    Raises:
        ConfigError: If a name is unknown or a value is of the wrong type.
    """
    hints = get_type_hints(type(base))
    check_names(values, hints)
    given = {name: _as(name, value, hints[name]) for name, value in values.items()}
    return dataclasses.replace(base, **given)


def read_file(path: Path) -> dict[str, Any]:
    """The values in a configuration file, .json or .toml; what they are called is not checked.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"{path} is not {kind}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold names and values, not a {type(values).__name__}")
    return values


def check_names(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse unknown names, with the nearest known one.

    Raises:
        ConfigError: If there is one.
    """
    known = sorted(allowed)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"unknown setting '{name}'; {hint}")


def _as(name: str, value: Any, hint: Any) -> Any:
    """The value as its type, of what JSON and TOML can hold."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        origin = get_origin(option)
        if option is type(None) and value is None:
            return None
        if origin is Literal and value in get_args(option):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(_as(name, item, get_args(option)[0]) for item in value)
        if option is float and (type(value) is float or _is_small(value)):
            return float(value)
        if option in (int, bool, str) and type(value) is option:
            return value
    shown = " or ".join(_shown(option) for option in options)
    raise ConfigError(f"{name} must be {shown}, not {value!r}")


def _is_small(value: Any) -> bool:
    """Whether this is a whole number that a float can hold."""
    return type(value) is int and abs(value) < 2**1000


def _shown(option: Any) -> str:
    if get_origin(option) is Literal:
        return " or ".join(str(value) for value in get_args(option))
    if get_origin(option) is tuple:
        return f"a list of {_shown(get_args(option)[0])}s"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(option, "nothing (null)")
