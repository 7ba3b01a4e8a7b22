"""Settings of `flops finetune`: defaults, presets, and their checks.

Later ones win: the preset, the configuration file, the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flops.estimators.likelihood_ratio import Targets
from flops.tasks.classification.models import Head
from flops.training.config import TINY, ConfigError, RunConfig, check_names, merged, read_file
from flops.training.methods import PRESETS, Method

if TYPE_CHECKING:
    import torch

    from flops.training.task import Task

__all__ = ["Config", "ConfigError", "check_names", "from_dict", "preset", "read_file"]


@dataclass(frozen=True)
class Config(RunConfig):
    """Everything that decides what a run does; plain values, so that it can be written as JSON.

    Raises:
        ConfigError: If a value is not allowed.
    """

    model: str = "bundled"
    """The bundled tiny ViT, a model id of the hub, a folder, or random:vit-base."""
    head: Head = "fresh"
    """A fresh classification head, or the model's own kept, if it knows the classes of the data."""
    data: str = "digits"
    """The embedded digits, another named data set, a data set id of the hub, or a folder."""
    data_config: str | None = None
    """Configuration of a data set of the hub that has several."""
    image_column: str | None = None
    """Column of images, of a Hugging Face data set; None finds it."""
    label_column: str | None = None
    """Column of classes, of a Hugging Face data set; None finds it."""
    split_column: str | None = None
    """Column that says which split a row belongs to, of a Hugging Face data set."""
    splits: tuple[str, ...] = ()
    """Which of its splits to use, such as train=train validation=none test=validation; none holds
    them out of train."""
    strict: bool = False
    """Stop at a missing or broken image, instead of skipping it with a warning."""
    targets: Targets | None = None
    """What likelihood ratio perturbs; None is the method's own choice."""
    stages: int = TINY.stages
    """Groups into which the layers are cut."""
    clip_attention: float | None = None
    """Largest norm of the gradient of all attention parameters; None leaves it."""

    def __post_init__(self) -> None:
        """Check the values."""
        self._need(self.stages > 0, "stages", "greater than 0")
        most = self.clip_attention
        self._need(most is None or most > 0, "clip_attention", "greater than 0, or None")
        self.named_splits()
        super().__post_init__()

    def named_splits(self) -> dict[str, str | None] | None:
        """The splits by our names; None if none were given.

        Raises:
            ConfigError: If one is not written as ours=theirs.
        """
        found: dict[str, str | None] = {}
        for given in self.splits:
            ours, equals, theirs = given.partition("=")
            if not equals or not theirs or ours not in ("train", "validation", "test"):
                raise ConfigError(
                    f"splits are given as train=NAME, validation=NAME or test=NAME, not '{given}'"
                )
            found[ours] = None if theirs.lower() == "none" else theirs
        return found or None

    def recipe(self) -> Method:
        """The method with its settings."""
        return Method(
            self.method, self.queries, self.sigma, self.targets, self.stages, self.clip_attention
        )

    def open(self, device: torch.device) -> Task:
        """Load the classifier and its data."""
        from flops.tasks.classification.task import Classification

        return Classification(self, device)


def from_dict(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """A configuration from plain values, the others as in ``base`` (the defaults if None).

    Raises:
        ConfigError: If a name is unknown or a value is of the wrong type.
    """
    return merged(base or Config(), values)


def preset(name: str) -> dict[str, Any]:
    """The settings of a preset.

    Raises:
        ConfigError: If there is none of this name.
    """
    if name not in tuple(PRESETS):  # of a file it may be anything, a list too
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, not '{name}'")
    return dataclasses.asdict(PRESETS[name])
