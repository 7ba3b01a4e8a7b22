"""Configuration of `flops finetune`, and its presets."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from flops.estimators.likelihood_ratio import Targets
from flops.tasks.models.vit import Head
from flops.training.config import FromList, PositiveFloat, RunConfig
from flops.training.methods import Method

FinetunePreset = Literal["tiny", "vit-base", "vit-large"]
SPLITS = ("train", "validation", "test")
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "vit-base": {
        "batch": 128,
        "epochs": 10,
        "learning_rate": 1e-4,
        "stages": 3,
        "sigma": (1e-5, 1e-4, 1e-3),
    },
    "vit-large": {
        "batch": 128,
        "epochs": 10,
        "learning_rate": 1e-4,
        "stages": 4,
        "sigma": (5e-6, 1e-5, 1e-4, 1e-3),
    },
}
assert tuple(PRESETS) == get_args(FinetunePreset)


class FinetuneConfig(RunConfig):
    """All options of a run of `flops finetune`.

    Raises:
        ConfigError: If a name is unknown or a value is not allowed.
    """

    task: Literal["image", "text"] = "image"
    """What is trained: an image classifier, or a language model."""
    model: str = "bundled"
    """The bundled tiny ViT, a model id of the hub, a folder, or random:vit-base."""
    head: Head = "fresh"
    """A new classification head, or the model's own if it was trained on the same classes."""
    data: str = "digits"
    """The embedded digits, another named data set, a data set id of the hub, or a folder."""
    data_config: str | None = None
    """Configuration of a data set of the hub that has several."""
    image_column: str | None = None
    """Image column of a Hugging Face data set; None to detect it."""
    label_column: str | None = None
    """Label column of a Hugging Face data set; None to detect it."""
    split_column: str | None = None
    """Column of a Hugging Face data set that holds the split of each row."""
    splits: Annotated[tuple[str, ...], FromList] = ()
    """Which splits of a data set to use, such as train=train validation=none test=validation; none
    holds one out of train."""
    strict: bool = False
    """Stop at a missing or broken image, instead of skipping it with a warning."""
    targets: Targets | None = None
    """What likelihood ratio perturbs; None for the method's default."""
    stages: Annotated[int, Field(gt=0)] | None = None
    """Number of groups of layers; None for 3, or for shaped-lr two, of which the first ends after
    two thirds of the layers."""
    clip_attention: PositiveFloat | None = None
    """Clip the gradient norm of all attention parameters; None does not clip."""

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if self.task != "image":
            raise ValueError(f"these are settings of images, and task is '{self.task}'")
        self.named_splits()
        return self

    def named_splits(self) -> dict[str, str | None] | None:
        """The splits by our names; None if not given.

        Raises:
            ValueError: If an entry is not written as ours=theirs.
        """
        found: dict[str, str | None] = {}
        for given in self.splits:
            ours, equals, theirs = given.partition("=")
            if not equals or not theirs or ours not in SPLITS:
                raise ValueError(
                    f"splits are given as train=NAME, validation=NAME or test=NAME, not '{given}'"
                )
            found[ours] = None if theirs.lower() == "none" else theirs
        return found or None

    def recipe(self) -> Method:
        """The method with these options."""
        return Method(
            self.method, self.queries, self.sigma, self.targets, self.stages, self.clip_attention
        )
