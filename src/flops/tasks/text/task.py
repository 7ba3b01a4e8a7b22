"""The task of `flops finetune --task text`; see `flops.training.task.Task`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.engine.forward_gradient import ForwardGradient
from flops.errors import FlopsError
from flops.losses import CausalLM, LabelWords, TokenLoss
from flops.optional import MissingPackageError
from flops.passes.ranks import Ranks
from flops.tasks.text.config import TEXT, Objective, TextConfig
from flops.tasks.text.data import TextData, TextSplit, load_texts
from flops.tasks.text.model import TextModel
from flops.tasks.text.prompts import (
    IGNORED,
    Prompts,
    completion_labels,
    default_prompt,
    label_tokens,
    padded,
)
from flops.training.methods import engine
from flops.training.progress import Evaluation
from flops.training.task import Splits, open_task

ROWS = 32  # texts per pass of an evaluation


@dataclass(frozen=True)
class TokenSplit:
    """A split as rows of tokens.

    Attributes:
        labels: Class of each point, (N,).
        tokens: Tokens of each point.
        completions: How many tokens of each point are its completion; empty for classification.
    """

    labels: Tensor
    tokens: tuple[list[int], ...]
    completions: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of points."""
        return len(self.tokens)

    def first(self, count: int | None) -> TokenSplit:
        """The first points; all for None."""
        return TokenSplit(self.labels[:count], self.tokens[:count], self.completions[:count])


class Text:
    """The task of `flops finetune --task text`.

    Args:
        config: Model, data and method.
        device: Where the model runs.

    Raises:
        FlopsError: If model or data are missing or do not fit together.
    """

    loss_fn: Any  # one loss per text

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        try:
            self.texts = load_texts(
                config.data,
                config.named_columns(),
                splits=config.named_splits(),
                config=config.data_config,
                limit=config.limit,
            )
            self.objective = _objective(config, self.texts)
            classes = self.texts.classes if self.objective == "head" else None
            self._text = TextModel(
                config.model,
                classes,
                lora=config.lora,
                alpha=config.lora_alpha,
                last=config.train_last,
                seed=config.seed,
            )
            template, words = _prompt(config, self.texts, self.objective)
            language = self._text.language
            self.template = template
            self._prompts = Prompts(language, template, config.max_tokens)
            self.data = self._tokens(self.texts)
            self.loss_fn = head_loss
            if self.objective == "completion":
                splits = (self.data.train, self.data.validation, self.data.test)
                longest = max(n for split in splits for n in split.completions)
                self.loss_fn = CausalLM(last=longest)  # all batches have as many logits
            elif self.objective == "words":
                tokens = label_tokens(language, template, self.texts.classes, words)
                self.loss_fn = LabelWords(tokens)
        except MissingPackageError:
            raise
        except (OSError, ValueError, ImportError) as error:
            raise FlopsError(str(error)) from error
        self._prompts.warn()
        self.model = self._text.model.to(device)
        self._width = 1 + max(map(len, self.data.train.tokens))

    def _tokens(self, data: TextData) -> Splits[TokenSplit]:
        train, validation, test = (
            self._split(split) for split in (data.train, data.validation, data.test)
        )
        validation = validation.first(self.config.validation_points)
        return Splits(train, validation, test, data.classes, data.name, data.notes)

    def _split(self, split: TextSplit) -> TokenSplit:
        if self.objective != "completion":
            return TokenSplit(split.labels, tuple(map(self._prompts.tokens, split.texts)))
        pairs = zip(split.texts, split.completions, strict=True)
        found = [self._prompts.pair(*pair) for pair in pairs]
        return TokenSplit(split.labels, tuple(t for t, _ in found), tuple(n for _, n in found))

    @property
    def title(self) -> str:
        """One line about model and data."""
        config, data = self.config, self.data
        trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        what = "" if config.lora is None else f" in LoRA adapters of rank {config.lora}"
        count = f"{len(data.train):,} texts"
        if self.objective != "completion":
            count += f", {len(data.classes)} classes"
        return (
            f"{config.model} ({trainable:,} parameters{what}) on {data.name} ({count}) by "
            f"{self.objective}"
        )

    @property
    def guesses_class(self) -> bool:
        """Whether the accuracy of guessing is one over the number of classes."""
        return self.objective != "completion"

    def engine(self) -> ForwardGradient:
        """The engine of the configured method."""
        config, method = self.config, self.config.recipe()
        if method.name == "shaped-lr" and method.perturbs == "stage" and not method.last_tokens:
            read = max(self.data.train.completions, default=1)
            method = replace(method, last_tokens=read + 1)
        return engine(
            self.model,
            self.loss_fn,
            method,
            seed=config.seed,
            chunk=config.chunk,
            feature="standardised",  # losses of a language model are where tanh saturates
        )

    def batch(self, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and targets of some training points.

        All batches have the width of the longest training text: positions then mean the same in
        every batch, which shaped noise learns from, and the model is traced once.
        """
        return self._batch(self.data.train, rows.tolist(), self._width)

    def _batch(
        self, split: TokenSplit, rows: list[int], width: int | None = None
    ) -> tuple[dict[str, Any], Tensor]:
        inputs = padded([split.tokens[i] for i in rows], self._text.pad, width)
        targets = split.labels[rows]
        if split.completions:
            lengths = [split.completions[i] for i in rows]
            targets = completion_labels(inputs["input_ids"], lengths)
        inputs = {n: value.to(self.device) for n, value in self._text.inputs(inputs).items()}
        return inputs, targets.to(self.device)

    def limit_gradients(self) -> None:
        """Nothing is clipped."""

    @torch.inference_mode()
    def measure(self, split: TokenSplit, ranks: Ranks) -> tuple[float, float]:
        """Accuracy (of completions: of their tokens) and mean loss of a text; ranks share the work.

        Texts of similar length are evaluated together, so that there is little padding.
        """
        if not len(split):
            raise FlopsError("cannot evaluate on an empty split")
        order = sorted(range(len(split)), key=lambda i: (len(split.tokens[i]), i))
        batches = [order[i : i + ROWS] for i in range(0, len(order), ROWS)]
        right, count, total = 0, 0, 0.0
        for rows in batches[ranks.rank :: ranks.size]:
            inputs, targets = self._batch(split, rows)
            positions = None
            if isinstance(self.loss_fn, TokenLoss) and "logits_to_keep" in self._text.takes:
                positions = self.loss_fn.positions(targets)
                inputs["logits_to_keep"] = positions
            if "use_cache" in self._text.takes:
                inputs["use_cache"] = False
            logits = self.model(**inputs).logits
            found, among = self._right(logits, targets, positions)
            right, count = right + found, count + among
            losses = (
                self.loss_fn(logits, targets, positions)
                if isinstance(self.loss_fn, TokenLoss)
                else self.loss_fn(logits, targets)
            )
            total += float(losses.double().sum())
        all_right, all_count, all_loss = ranks.sum_scalars([right, count, total])
        return all_right / all_count, all_loss / len(split)

    def _right(self, logits: Tensor, targets: Tensor, positions: Tensor | None) -> tuple[int, int]:
        """Number of right predictions, and of all."""
        if isinstance(self.loss_fn, LabelWords):
            logits = self.loss_fn.scores(logits)
        if self.objective != "completion":
            return int((logits.argmax(-1) == targets).sum()), len(targets)
        if positions is None:
            logits, wanted = logits[:, :-1], targets[:, 1:]
        else:  # counted from the end: each predicts the next token
            wanted = targets[:, positions.to(targets.device) + 1]
        read = wanted != IGNORED
        return int(((logits.argmax(-1) == wanted) & read).sum()), int(read.sum())

    def contents(self) -> Iterator[bytes]:
        """The classes, and labels and tokens of all splits."""
        yield "\n".join(self.data.classes).encode()
        for split in (self.data.train, self.data.validation, self.data.test):
            yield split.labels.numpy().tobytes()
            yield torch.tensor(split.completions, dtype=torch.long).numpy().tobytes()
            yield torch.tensor([t for row in split.tokens for t in [*row, -1]]).numpy().tobytes()

    def pixels(self, rows: Tensor) -> None:
        """Texts have no images."""

    def excerpts(self, rows: Tensor) -> list[str]:
        """Texts of some training points, and their completions if there are any."""
        split = self.texts.train
        found = [split.texts[i] for i in rows.tolist()]
        ends = (
            [split.completions[i] for i in rows.tolist()]
            if split.completions
            else [""] * len(found)
        )
        return [f"{text} {end}".strip() for text, end in zip(found, ends, strict=True)]

    def save(self, folder: Path, evaluations: list[Evaluation]) -> None:
        """Write model/, with its tokenizer: a PEFT adapter, or a model of `transformers`."""
        self._text.save(folder / "model")


open_task.register(TextConfig)(Text)


def head_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of each point by a classification head."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, targets, reduction="none")


def _objective(config: TextConfig, data: TextData) -> Objective:
    """The configured objective, which must fit the data."""
    pairs = bool(data.train.completions)
    found: Objective = config.objective or ("completion" if pairs else "words")
    if (found == "completion") != pairs:
        kinds = ("text and label", "prompt and completion")
        raise ValueError(
            f"objective {found} needs rows of {kinds[found == 'completion']}, and "
            f"'{config.data}' has {kinds[pairs]}"
        )
    if found != "words" and config.words:
        raise ValueError(f"words are for objective words, not {found}")
    return found


def _prompt(config: TextConfig, data: TextData, objective: Objective) -> tuple[str, dict[str, str]]:
    """Template and label words: as given, else of the data, else by the labels."""
    if objective != "words":
        return config.template or TEXT, {}
    template, words = default_prompt(data.classes)
    template = config.template or data.template or template
    return template, dict(config.label_words()) or dict(data.words or words)
