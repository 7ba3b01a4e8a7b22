"""Base configuration of training runs, validated by pydantic, read from JSON or TOML."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from flops.errors import FlopsError
from flops.storage.plain import parse_json
from flops.training.methods import Method, MethodName

PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0)]
# JSON and TOML have lists where a configuration has tuples; their elements stay strict.
FromList = Field(strict=False)
TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
}


def _positive_queries(queries: float | Literal["auto"]) -> float | Literal["auto"]:
    if queries != "auto" and not 0 < queries < math.inf:
        raise ValueError(f"queries must be greater than 0 or auto, not {queries}")
    return queries


class ConfigError(FlopsError):  # not a ValueError: tyro would catch and rephrase it
    """A setting is unknown, has the wrong type, or conflicts with others."""


class RunConfig(BaseModel):
    """Options of every training run: method, length, batch, optimizer, checkpoints.

    Raises:
        ConfigError: If a name is unknown or a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: MethodName = "shaped-lr"
    """Gradient estimator; bp is backpropagation, for comparison."""
    queries: Annotated[float | Literal["auto"], AfterValidator(_positive_queries)] = 20.0
    """Mean queries per point and group; auto chooses them step by step, by progress per cost."""
    sigma: Annotated[tuple[PositiveFloat, ...] | None, FromList] = None
    """Noise scale: one, or one per stage; None chooses it as training goes on for shaped-lr, and is
    1e-3 for the others."""
    epochs: PositiveInt | None = 8
    """Epochs; None for no limit but the budget."""
    budget: PositiveFloat | None = None
    """Budget in forward equivalents; None for no limit but the epochs."""
    steps: PositiveInt | None = None
    """Steps; None for no limit but the epochs or the budget."""
    until: Literal["first", "last"] = "first"
    """Stop when the first or the last of epochs, budget and steps is reached."""
    marks: Annotated[tuple[PositiveFloat, ...], FromList] = ()
    """Further budgets, in forward equivalents, at which to evaluate on the validation split."""
    batch: PositiveInt = 64
    """Batch size."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of the optimizer."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule: constant, or cosine decay to 0 over the run."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the optimizer."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of new weights, the order of points, and the noise."""
    evaluate_every: PositiveInt | None = 1
    """Epochs between two evaluations on the validation split; None for none by epochs but the
    last, and none before the first step."""
    evaluate_steps: PositiveInt | None = None
    """Steps between two evaluations on the validation split; None for none by steps."""
    test: bool = False
    """Also evaluate on the test split, once, when `epochs`, `budget` or `steps` is reached."""
    data: str = "digits"
    """The data set."""
    cosine_steps: PositiveInt | None = None
    """Steps between two comparisons with the backpropagated gradient: its cosine by group goes to
    the metrics, and nothing else changes. Not charged; None for none."""
    limit: PositiveInt | None = None
    """Largest number of points per split, for quick runs; None for all."""
    chunk: Annotated[int, Field(ge=2)] | None = None
    """Largest number of rows per pass of queries; None for a default. Fewer take less memory."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU if available."""
    checkpoint_steps: PositiveInt | None = None
    """Steps between two checkpoints; None for none by steps."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] | None = 60.0
    """Seconds between two checkpoints; None for none by time."""
    plots: bool = True
    """Draw the curves and the allocation when training ends."""
    parallel: Literal["data", "query"] = "data"
    """What processes share under torchrun: the points of every batch (data), or the queries of all
    its points (query), for small batches with many queries."""
    timeout: PositiveFloat = 600.0
    """Timeout for collectives under torchrun, in seconds."""
    output: str | None = None
    """Run directory; None creates a new one in runs/."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(self._explain(error)) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is None and self.budget is None and self.steps is None:
            raise ValueError("set epochs, budget or steps: training would never end")
        self.recipe()
        return self

    def recipe(self) -> Method:
        """The method with these options."""
        raise NotImplementedError

    def replace(self, **values: Any) -> Self:
        """A copy with these values, which are validated."""
        return type(self)(**{**dict(self), **values})

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; the constructor reads them back."""
        return self.model_dump(mode="json")

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        """The first problem in a sentence, with a suggestion for an unknown name."""
        found = error.errors()[0]
        kind, context = found["type"], found.get("ctx", {})
        if kind == "value_error":  # from our own validators
            return str(context["error"])
        name = str(found["loc"][0])
        if kind == "extra_forbidden":
            known = sorted(cls.model_fields)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            return f"unknown setting '{name}'; {hint}"
        each = [_allowed(one) for one in error.errors() if one["loc"][:1] == (name,)]
        allowed = " or ".join(dict.fromkeys(each))  # of each type of a union
        if type(None) in getattr(cls.model_fields[name].annotation, "__args__", ()):
            allowed += ", or None"
        given = found["input"]
        shown = f"{given!r}" if not isinstance(given, int) or abs(given) < 2**64 else "so large"
        return f"{name} must be {allowed}, not {shown}"


def _allowed(error: Any) -> str:
    """What a value must be."""
    if error["type"] == "literal_error":
        expected: str = error["ctx"]["expected"].replace("'", "")
        return expected
    said: str = error["msg"].removeprefix("Input should be ")
    return TYPES.get(error["type"], said.replace("greater than or equal to", "at least"))


Settings = TypeVar("Settings", bound=RunConfig)


def preset_settings(presets: Mapping[str, dict[str, Any]], name: Any) -> dict[str, Any]:
    """The settings of a preset.

    Raises:
        ConfigError: If there is no preset of this name.
    """
    if name not in tuple(presets):  # from a file, it may have any type
        raise ConfigError(f"preset must be one of {', '.join(presets)}, not '{name}'")
    return presets[name]


def read_file(path: Path) -> dict[str, Any]:
    """The values in a configuration file, .json or .toml; names are not checked.

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
        raise ConfigError(f"{path} must hold a table of settings, not a {type(values).__name__}")
    return values
