"""Configuration of `flops finetune --task text`, and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from flops.estimators.likelihood_ratio import Targets
from flops.training.config import FromList, PositiveFloat, PositiveInt, RunConfig
from flops.training.methods import Method

Objective = Literal["words", "head", "completion"]
TextPreset = Literal["tiny", "smollm2"]
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "smollm2": {
        "model": "smollm2",
        "data": "sentences",
        "batch": 8,
        "max_tokens": 32,
        "train_last": 30,  # all layers; the embeddings stay as they are
        "epochs": 1,
        "learning_rate": 2e-5,
        "queries": 16,
        "chunk": 8,
    },
}
assert tuple(PRESETS) == get_args(TextPreset)
SPLITS = ("train", "validation", "test")
COLUMNS = ("text", "label", "prompt", "completion", "split")
TEXT = "{text}"
SHAPED_ENDS = (0.8, 1.0)


class TextConfig(RunConfig):
    """All options of a run of `flops finetune --task text`.

    Raises:
        ConfigError: If a name is unknown or a value is not allowed.
    """

    task: Literal["image", "text"] = "text"
    """What is trained: an image classifier, or a language model."""
    model: str = "bundled"
    """The bundled tiny Llama, smollm2 (after make real-models), a GGUF file, a folder, or a model
    id of the hub."""
    data: str = "garments"
    """The embedded garments, sentences (after make real-models), a .jsonl file, a folder with a
    .jsonl file per split, parquet files, or a data set id of the hub."""
    data_config: str | None = None
    """Configuration of a data set of the hub that has several."""
    columns: Annotated[tuple[str, ...], FromList] = ()
    """Names of the fields, such as text=sentence label=class, or prompt=question
    completion=answer; others have their own name."""
    splits: Annotated[tuple[str, ...], FromList] = ()
    """Which splits of a data set to use, such as train=train validation=none test=validation; none
    holds one out of train."""
    objective: Objective | None = None
    """How texts are learned: words predicts a label word after a prompt, head trains a new
    classification head, completion predicts the tokens of the completion. None: completion if the
    data have completions, else words."""
    template: str | None = None
    """Prompt around the text, such as "{text} It was"; None for that of the data."""
    words: Annotated[tuple[str, ...], FromList] = ()
    """Label words, such as "negative= terrible" "positive= great", the space included; without
    any, those of the data, or the labels themselves."""
    max_tokens: PositiveInt = 128
    """Longest text in tokens, prompt included; the left of a longer one is cut."""
    lora: PositiveInt | None = None
    """Train LoRA adapters of this rank on all linear modules of the layers, and nothing else; None
    trains the model itself."""
    lora_alpha: PositiveFloat | None = None
    """Scale of the adapters is lora_alpha / lora; None is twice the rank."""
    train_last: PositiveInt | None = None
    """Train only the last layers, this many, and the norm after them; None trains all, with the
    embeddings. Queries of later layers are cheaper, since the pass before them is replayed."""
    targets: Targets | None = None
    """What likelihood ratio perturbs; None for the method's default."""
    stages: Annotated[int, Field(gt=0)] | None = None
    """Number of groups of layers; None for 3 of equal depth, or for shaped-lr two of which the
    first ends after 80 % of the layers, where the last tokens hold most of the gradient."""
    last_tokens: PositiveInt | None = None
    """Tokens at the end of each text that likelihood ratio perturbs; None for all, or for shaped-lr
    in stages those whose logits the loss reads, and one more."""
    validation_points: PositiveInt | None = None
    """Validate on so many texts, the first of the split; None for all."""
    batch: PositiveInt = 32
    """Batch size."""
    epochs: PositiveInt | None = 4
    """Epochs; None for no limit but the steps or the budget."""

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.task != "text":
            raise ValueError(f"these are settings of text, and task is '{self.task}'")
        if self.template is not None and self.template.count(TEXT) != 1:
            raise ValueError(f"template must hold {TEXT} once, not {self.template!r}")
        if self.lora_alpha is not None and self.lora is None:
            raise ValueError("lora_alpha needs lora, the rank of the adapters")
        named_pairs("splits", self.splits, SPLITS)
        named_pairs("columns", self.columns, COLUMNS)
        named_pairs("words", self.words)
        return self

    def named_splits(self) -> dict[str, str | None]:
        """Their splits by our names."""
        found = named_pairs("splits", self.splits, SPLITS)
        return {ours: None if t.lower() == "none" else t for ours, t in found.items()}

    def named_columns(self) -> dict[str, str]:
        """Their columns by our names."""
        return {name: name for name in COLUMNS} | named_pairs("columns", self.columns, COLUMNS)

    def label_words(self) -> Mapping[str, str]:
        """Label words by label, as given."""
        return named_pairs("words", self.words)

    def recipe(self) -> Method:
        """The method with these options."""
        shaped = self.method == "shaped-lr" and self.targets in (None, "stage")
        return Method(
            self.method,
            self.queries,
            self.sigma,
            self.targets,
            self.stages or (SHAPED_ENDS if shaped else None),
            last_tokens=self.last_tokens,
        )


def named_pairs(
    option: str, given: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> dict[str, str]:
    """Entries that are written as name=value.

    Raises:
        ValueError: If one is not, or its name is not allowed.
    """
    found: dict[str, str] = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or not value or not name or (allowed and name not in allowed):
            names = f", with a name of {', '.join(allowed)}" if allowed else ""
            raise ValueError(f"{option} are given as name=value{names}, not {entry!r}")
        if name in found:
            raise ValueError(f"{option} name {name!r} twice")
        found[name] = value
    return found
