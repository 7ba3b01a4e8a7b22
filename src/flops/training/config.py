"""Configuration that every training run has, validated by pydantic, read from JSON or TOML."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flops.errors import FlopsError
from flops.storage.plain import parse_json
from flops.training.methods import Method, MethodName

PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0)]
# JSON and TOML have lists where a configuration has tuples; what is in them stays strict.
FromList = Field(strict=False)
TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
}


class ConfigError(FlopsError):  # no ValueError: tyro would catch it and name its inner parts
    """A setting does not exist, has the wrong type, or does not fit the others."""


class RunConfig(BaseModel):
    """What every training run has: method, length, batch, optimizer, checkpoints.

    Raises:
        ConfigError: If a name is unknown or a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: MethodName = "shaped-lr"
    """How gradients are estimated; bp is backpropagation, for comparison."""
    queries: PositiveFloat = 20.0
    """Mean queries per point and group."""
    sigma: Annotated[tuple[PositiveFloat, ...] | None, FromList] = (1e-3,)
    """Noise scale: one, or one for each stage."""
    epochs: PositiveInt | None = 8
    """Epochs; None for no limit but the budget."""
    budget: PositiveFloat | None = None
    """Forward equivalents; None for no limit but the epochs."""
    until: Literal["first", "last"] = "first"
    """Whether training ends at the first or at the last of epochs and budget."""
    marks: Annotated[tuple[PositiveFloat, ...], FromList] = ()
    """More forward equivalents at which the validation split is evaluated."""
    batch: PositiveInt = 64
    """Points of a batch."""
    learning_rate: PositiveFloat = 1e-3
    """Of the optimizer."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Whether the learning rate stays, or falls to 0 as a cosine over the run."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of the optimizer."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of fresh weights, the order of the points, and the noise."""
    evaluate_every: PositiveInt = 1
    """Epochs between two evaluations on the validation split."""
    test: bool = False
    """Evaluate on the test split too, once, when `epochs` or `budget` is reached."""
    data: str = "digits"
    """The data set."""
    limit: PositiveInt | None = None
    """Most points of each split, for a quick look; None for all."""
    chunk: Annotated[int, Field(ge=2)] | None = None
    """Most rows in one pass of queries; None for a default. Less takes less memory."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if there is one."""
    checkpoint_steps: PositiveInt | None = None
    """Steps between two checkpoints; None for none by steps."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] | None = 60.0
    """Seconds between two checkpoints; None for none by time."""
    timeout: PositiveFloat = 600.0
    """Seconds to wait for another process, under torchrun, before giving up."""
    output: str | None = None
    """Run directory; None makes a new one in runs/."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is None and self.budget is None:
            raise ValueError("epochs or budget must be given, or training never ends")
        self.recipe()
        return self

    def recipe(self) -> Method:
        """The method with its settings."""
        raise NotImplementedError

    def replace(self, **values: Any) -> Self:
        """The same configuration but for these values, which are validated."""
        return type(self)(**{**dict(self), **values})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; the constructor reads them back."""
        return self.model_dump(mode="json")

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        """The first problem in a sentence, with the nearest name for one that is unknown."""
        found = error.errors()[0]
        kind, context = found["type"], found.get("ctx", {})
        if kind == "value_error":  # one of our own checks
            return str(context["error"])
        name = str(found["loc"][0])
        if kind == "extra_forbidden":
            known = sorted(cls.model_fields)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            return f"unknown setting '{name}'; {hint}"
        said = found["msg"].removeprefix("Input should be ")
        allowed = TYPES.get(kind, said.replace("greater than or equal to", "at least"))
        if kind == "literal_error":
            allowed = context["expected"].replace("'", "")
        if type(None) in getattr(cls.model_fields[name].annotation, "__args__", ()):
            allowed += ", or None"
        given = found["input"]
        shown = f"{given!r}" if not isinstance(given, int) or abs(given) < 2**64 else "so large"
        return f"{name} must be {allowed}, not {shown}"


Settings = TypeVar("Settings", bound=RunConfig)


def preset_settings(presets: Mapping[str, dict[str, Any]], name: Any) -> dict[str, Any]:
    """The settings of a preset.

    Raises:
        ConfigError: If there is none of this name.
    """
    if name not in tuple(presets):  # of a file it may be anything, a list too
        raise ConfigError(f"preset must be one of {', '.join(presets)}, not '{name}'")
    return presets[name]


def read_file(path: Path) -> dict[str, Any]:
    """The values in a configuration file, .json or .toml; their names are not checked.

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
