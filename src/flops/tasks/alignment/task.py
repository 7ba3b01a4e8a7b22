"""The task of `flops align`; see `flops.training.task.Task`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import FlopsError
from flops.integrations.llama_cpp_context import MOST_ROWS
from flops.passes.ranks import Ranks
from flops.perturb.random import generator
from flops.storage.disk import filling
from flops.tasks.alignment.adapter import AlignmentModel, identity_loss
from flops.tasks.alignment.config import AlignConfig
from flops.tasks.alignment.models import Encoder, load_encoder, load_gguf, load_language, reader
from flops.tasks.alignment.report import Sample, write_report
from flops.tasks.data.pairs import PairSplit, load_pairs
from flops.tasks.data.splits import BrokenImageError
from flops.training.methods import engine, estimator
from flops.training.progress import Evaluation
from flops.training.task import Splits, open_task

SHUFFLE = 0x5FFE  # stream of the shuffled images, distinct from other uses of the seed
PAD = 8  # free captions are padded to a multiple of this, so that few lengths occur
ROWS = 64  # images or captions per pass of an encoder or evaluation


@dataclass(frozen=True)
class Encoded:
    """A split, encoded: features and tokens of the captions."""

    pairs: PairSplit
    features: Tensor  # (pictures, width)
    tokens: tuple[Tensor, ...]  # of each point

    @property
    def labels(self) -> Tensor:
        """Classes of all points."""
        return self.pairs.labels

    def __len__(self) -> int:
        """Number of points."""
        return len(self.pairs)


class Alignment:
    """The task of `flops align`.

    Args:
        config: Models, data and method.
        device: Where they run.

    Raises:
        FlopsError: If models or data are missing or do not fit together.
    """

    def __init__(self, config: AlignConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        try:
            encoder = load_encoder(config.encoder)
            load = load_gguf if config.engine == "llama-cpp" else load_language
            self.language = load(config.language, config.ending)
            self.pairs = load_pairs(
                config.data,
                encoder.format,
                pictures=None if config.pictures is None else Path(config.pictures),
                limit=config.limit,
                strict=config.strict,
            )
            self.data = self._encoded(encoder)
            self.model = self._new_model()
        except (OSError, ValueError, ImportError) as error:
            raise FlopsError(str(error)) from error
        self.format = encoder.format

    def _new_model(self) -> AlignmentModel:
        """A new adapter and the language model."""
        config, features = self.config, self.data.train.features
        opening = self.language.prefix_tokens(config.instruction)
        language = reader(self.language, opening, min(config.chunk or ROWS, MOST_ROWS))
        model = AlignmentModel(language, features.size(1), config.visual_tokens)
        model.reset_adapter(features, config.seed)
        return model.to(self.device).eval()

    def _encoded(self, encoder: Encoder) -> Splits[Encoded]:
        """All features, computed once; with `shuffled`, training images are permuted."""
        pairs, encoder_model = self.pairs, encoder.model.to(self.device)
        train, validation, test = (
            self._split(split, encoder) for split in (pairs.train, pairs.validation, pairs.test)
        )
        encoder_model.cpu()
        if self.config.shuffled:
            source = generator(self.config.seed, 0, SHUFFLE)
            order = torch.randperm(len(train.features), generator=source)
            train = Encoded(train.pairs, train.features[order], train.tokens)
        return Splits(train, validation, test, pairs.classes, pairs.name, pairs.notes)

    def _split(self, split: PairSplit, encoder: Encoder) -> Encoded:
        features, broken = [], set()
        with torch.inference_mode():
            for rows in torch.arange(len(split.pictures)).split(ROWS):
                try:
                    pixels = split.pictures.batch(rows)[0]
                except BrokenImageError:
                    if self.config.strict:
                        raise
                    pixels, unreadable = _decode_each(split, rows)
                    broken |= unreadable
                features.append(encoder.features(pixels.to(self.device)).float().cpu())
        if broken:
            warnings.warn(f"skipped {len(broken)} images that cannot be read", stacklevel=2)
        kept = split.without(broken)
        tokens = {text: torch.tensor(self.language.caption(text)) for text in set(kept.captions)}
        found = torch.cat(features).clone()  # not an inference tensor: backpropagation saves it
        return Encoded(kept, found, tuple(tokens[text] for text in kept.captions))

    @property
    def title(self) -> str:
        """One line about model and data."""
        config, data = self.config, self.data
        trainable = sum(p.numel() for p in self.model.adapter.parameters())
        control = ", images shuffled" if config.shuffled else ""
        return (
            f"{config.encoder} encoder and {config.language} language model, adapter of "
            f"{trainable:,} parameters, on {data.name} ({len(data.train):,} pairs{control})"
        )

    @property
    def guesses_class(self) -> bool:
        """Whether the accuracy of guessing is one over the number of classes."""
        return False

    def engine(self) -> ForwardGradient:
        """The adapter as one group; likelihood ratio perturbs its output."""
        config, method = self.config, self.config.recipe()
        groups = [
            Group(
                self.model.adapter if method.name != "bp" else self.model,
                estimator(method, "auto" if config.rounded else method.sigmas[-1]),
                method.queries,
                name="adapter",
            )
        ]
        return engine(
            self.model,
            identity_loss,
            method,
            seed=config.seed,
            chunk=config.chunk,
            groups=groups,
            # Losses of a language model are where tanh saturates.
            feature="standardised",
            embedding="adapter",
        )

    def batch(self, rows: Tensor) -> tuple[dict[str, Tensor], None]:
        """Features and captions of some training points."""
        return self._inputs(self.data.train, rows), None

    def _inputs(self, split: Encoded, rows: Tensor) -> dict[str, Tensor]:
        features = split.features[split.pairs.rows[rows]]
        return self._with(features, [split.tokens[i] for i in rows.tolist()])

    def _with(self, features: Tensor, tokens: list[Tensor]) -> dict[str, Tensor]:
        longest = max(map(len, tokens))
        size = self._longest if longest <= self._longest else -(-longest // PAD) * PAD
        captions = torch.zeros(len(tokens), size, dtype=torch.long)
        mask = torch.zeros(len(tokens), size)
        for row, found in enumerate(tokens):
            captions[row, : len(found)] = found
            mask[row, : len(found)] = 1
        inputs = {"features": features, "captions": captions, "mask": mask}
        return {name: value.to(self.device) for name, value in inputs.items()}

    def limit_gradients(self) -> None:
        """Nothing is clipped."""

    @torch.inference_mode()
    def measure(self, split: Encoded, ranks: Ranks) -> tuple[float, float]:
        """Caption accuracy (own caption is the most likely of the choices) and mean loss.

        Captions of classes are compared by total likelihood, and free ones, whose lengths are
        unrelated to the image, by mean likelihood per token.
        """
        if not len(split):
            raise FlopsError("cannot evaluate on an empty split")
        right, total = 0.0, 0.0
        for rows in torch.arange(len(split)).split(ROWS)[ranks.rank :: ranks.size]:
            total += float(self.model(**self._inputs(split, rows)).double().sum())
            right += sum(self._is_right(split, rows))
        all_right, all_loss = ranks.sum_scalars([right, total])
        return all_right / len(split), all_loss / len(split)

    def _is_right(self, split: Encoded, rows: Tensor) -> list[bool]:
        points, tokens, answers, sizes = [], [], [], []
        for point in rows.tolist():
            choices, answer = split.pairs.choices(point)
            points += [point] * len(choices)
            tokens += [self._tokens(text) for text in choices]
            answers.append(answer)
            sizes.append(len(choices))
        features, losses = split.features[split.pairs.rows[points]], []
        for part in torch.arange(len(points)).split(2 * ROWS):
            inputs = self._with(features[part], [tokens[i] for i in part.tolist()])
            found = self.model(**inputs)
            losses.append((found * inputs["mask"].sum(1) if split.pairs.names else found).cpu())
        scores = torch.cat(losses).split(sizes)
        return [int(s.argmin()) == a for s, a in zip(scores, answers, strict=True)]

    def _tokens(self, text: str) -> Tensor:
        if text not in self._known:
            self._known[text] = torch.tensor(self.language.caption(text))
        return self._known[text]

    @cached_property
    def _longest(self) -> int:
        """Length that captions of classes, which are of similar length, are padded to."""
        return max(map(len, self.data.train.tokens)) if self.pairs.train.names else 0

    @cached_property
    def _known(self) -> dict[str, Tensor]:
        return {}

    def contents(self) -> Iterator[bytes]:
        """Tokens of the captions of all splits, and the image of each training point."""
        for split in (self.data.train, self.data.validation, self.data.test):
            yield torch.cat(split.tokens).numpy().tobytes()
            yield split.pairs.rows.numpy().tobytes()

    def pixels(self, rows: Tensor) -> Tensor:
        """Images of some training points, for display."""
        pairs = self.data.train.pairs
        return self.format.restore(pairs.pictures.batch(pairs.rows[rows])[0])

    def excerpts(self, rows: Tensor) -> None:
        """Images are shown instead."""

    def save(self, folder: Path, evaluations: list[Evaluation]) -> None:
        """Write the adapter and the report."""
        weights = {n: p.detach().cpu() for n, p in self.model.adapter.state_dict().items()}
        with filling(folder / "model", last="adapter.safetensors") as scratch:
            save_file(weights, scratch / "adapter.safetensors")
        write_report(folder, self.config, evaluations, self.samples())

    def samples(self) -> list[Sample]:
        """Captions of the first validation images, by the initial adapter and by this one."""
        split = self.data.validation
        rows = torch.arange(min(self.config.samples, len(split)))
        if not len(rows):
            return []
        features = split.features[split.pairs.rows[rows]].to(self.device)
        trained = {n: p.detach().clone() for n, p in self.model.adapter.state_dict().items()}
        after = self._captions(features)
        self.model.reset_adapter(self.data.train.features, self.config.seed)
        before = self._captions(features)
        self.model.adapter.load_state_dict(trained)
        captions = [split.pairs.captions[i] for i in rows.tolist()]
        return [Sample(*row) for row in zip(captions, before, after, strict=True)]

    def _captions(self, features: Tensor) -> list[str]:
        said = self.model.generate(features, self.language.end)
        return [self.language.text(tokens) for tokens in said.cpu()]


open_task.register(AlignConfig)(Alignment)


def _decode_each(split: PairSplit, rows: Tensor) -> tuple[Tensor, set[int]]:
    """Images of these rows, blank where unreadable, and the unreadable rows."""
    found: list[Any] = []
    for row in rows:
        try:
            found.append(split.pictures.batch(row[None])[0])
        except BrokenImageError:
            found.append(None)
    whole = next((x for x in found if x is not None), None)
    if whole is None:
        raise BrokenImageError("no image of a batch can be read: check the image folder")
    broken = {int(row) for row, image in zip(rows, found, strict=True) if image is None}
    return torch.cat([torch.zeros_like(whole) if x is None else x for x in found]), broken
