"""A frozen CLIP with prompt vectors: a prefix of its texts, a suffix of its images.

    text:  [BOS, p_1 .. p_m, class text, EOS]      image:  [CLS, patches, p_1 .. p_m]
    logits_c = exp(logit_scale) <image features, text features of class c>

Prompt vectors are concatenated with token and patch embeddings, at the input of the encoder. The
text prefix gets the position embeddings of its positions, and the text after it is shifted; the
image suffix gets none, since the position embeddings of images end with the patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flops.tasks.data.fashion import CLASSES
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.models.clip_files import BUNDLED, load_clip
from flops.tasks.models.clip_files import ClipError as ClipError

if TYPE_CHECKING:
    from transformers import CLIPModel

TEMPLATE = "a photo of a {}."


class PromptedClip:
    """A frozen `transformers.CLIPModel` with its class texts tokenised once.

    All methods are differentiable in the prompts. Rows are independent up to rounding: the order of
    summation in a matrix product may depend on the number of rows, the position and the thread.
    `flops serve` pads batches to fixed sizes for which it has measured that no bit changes.

    Arguments may be on any device, and results are on theirs; `to` says where the model runs.

    Attributes:
        model: The CLIP, frozen, in evaluation mode.
        classes: Names of the C classes.
        format: Its image format.
        text_width: Width of a text prompt vector.
        image_width: Width of an image prompt vector.
        text_limit: Largest number of text prompt vectors, given the longest class text.
    """

    def __init__(
        self, model: CLIPModel, format: ImageFormat, classes: Sequence[str], tokens: list[list[int]]
    ) -> None:
        """Wrap a model.

        Args:
            model: Any `CLIPModel`; it is frozen and put into evaluation mode.
            format: Its image format.
            classes: Names of the classes.
            tokens: The token ids of each class text, [BOS, .., EOS] without padding.
        """
        _check_texts(classes, tokens)
        self.model = cast(Any, model)
        self.model.requires_grad_(False).eval()
        self.format, self.classes = format, tuple(classes)
        config: Any = model.config
        self.text_width = int(config.text_config.hidden_size)
        self.image_width = int(config.vision_config.hidden_size)
        self.text_limit = int(config.text_config.max_position_embeddings) - max(map(len, tokens))
        if self.text_limit < 0:
            raise ClipError(
                f"a class text has {max(map(len, tokens))} tokens, the model reads at most "
                f"{config.text_config.max_position_embeddings}: shorten the template or the names"
            )
        self._pack(tokens)

    @classmethod
    def load(
        cls,
        model: str | Path = BUNDLED,
        classes: Sequence[str] | None = None,
        template: str = TEMPLATE,
    ) -> PromptedClip:
        """Load a CLIP in float32 on the CPU, and tokenise the class texts.

        Args:
            model: "tiny-clip", which ships with the package; the path of a folder with a
                `CLIPModel` and its tokenizer, as `save_pretrained` writes them; or a Hugging Face
                id such as "openai/clip-vit-base-patch32".
            classes: Names of the classes; None for those of the bundled model.
            template: Class text with {} for the name. "{}" is the bare name.

        Raises:
            ImportError: transformers is not installed.
            OSError: There is no such model, or the hub cannot be reached.
            ClipError: It is not a CLIP, has no tokenizer, or the class texts do not fit it.
        """
        if "{}" not in template:
            raise ClipError(f"the template needs {{}} where the class name goes, got {template!r}")
        if classes is None and str(model) != BUNDLED:
            raise ClipError(f"the classes of {model} must be named: only {BUNDLED} has its own")
        names = tuple(CLASSES if classes is None else classes)
        found, tokenizer, format = load_clip(str(model))
        texts = [template.replace("{}", name) for name in names]
        return cls(found, format, names, _tokenise(texts, tokenizer, found.config.text_config))

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        found: torch.device = self.model.logit_scale.device
        return found

    def to(self, device: torch.device) -> PromptedClip:
        """Move the model to a device; returns itself."""
        self.model.to(device)
        for name in ("_tokens", "_places", "_owners", "_ends"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    @property
    def channels(self) -> int:
        """Channels of an image, 1 or 3."""
        return self.format.channels

    @property
    def image_size(self) -> int:
        """Side of an image."""
        return self.format.size

    def digest(self) -> str:
        """Hash of weights, preprocessing and class texts."""
        mark = hashlib.sha256(
            repr((self.classes, self.format, self._tokens.cpu().tolist())).encode()
        )
        for name, value in sorted(self.model.state_dict().items()):
            mark.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            mark.update(memoryview(value.cpu().contiguous().numpy()).cast("B"))
        return mark.hexdigest()

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return images as the model reads them, (N, channels, S, S) in float32.

        They are cropped to the centred square, resized bilinearly and normalised; grey images are
        expanded for a model of three channels.

        Args:
            pixels: (N, H, W) or (N, H, W, channels), uint8.
        """
        if pixels.dtype != torch.uint8 or pixels.dim() not in (3, 4):
            found = f"{pixels.dtype} of shape {list(pixels.shape)}"
            raise ClipError(f"need pixels of uint8, (N, H, W) or (N, H, W, channels), got {found}")
        images = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        height, width = images.shape[2:]
        side = min(height, width)
        if side < 1 or images.shape[1] not in (1, self.channels):
            allowed = " or ".join(map(str, sorted({1, self.channels})))
            found = f"{images.shape[1]} channels of {height}x{width}"
            raise ClipError(f"the model reads images of {allowed} channels, got {found}")
        top, left = (height - side) // 2, (width - side) // 2
        square = images[:, :, top : top + side, left : left + side]
        return self.format.prepare(square).expand(-1, self.channels, -1, -1)

    def text_features(self, prompts: Tensor) -> Tensor:
        """Return the features of all class texts after each prefix, (P, C, E), normalised.

        The encoder is causal, so the common beginning of all texts is encoded once: one sequence
        holds [BOS, prefix, common words, rest of class 1, rest of class 2, ..]. Each rest has the
        positions it would have alone, and attends to itself and the common part.

        Args:
            prompts: (P, m, text_width); m = 0 encodes the bare class texts.
        """
        self._check(prompts, self.text_width, "text")
        count = prompts.shape[1]
        if count > self.text_limit:
            raise ClipError(
                f"{count} text prompt vectors are too many: the longest class text leaves room for "
                f"{self.text_limit}"
            )
        encoder, given, prompts = self.model.text_model, prompts.device, prompts.to(self.device)
        words = encoder.embeddings.token_embedding.weight[self._tokens]  # (L, width)
        words = words.expand(len(prompts), -1, -1)
        states = torch.cat([words[:, :1], prompts, words[:, 1:]], dim=1)
        places = torch.cat([torch.arange(1 + count, device=self.device), self._places[1:] + count])
        states = states + encoder.embeddings.position_embedding.weight[places]
        states = encoder.encoder(states, attention_mask=self._mask(count)).last_hidden_state
        ends = encoder.final_layer_norm(states[:, self._ends + count])  # (P, C, width)
        return F.normalize(self.model.text_projection(ends), dim=-1).to(given)

    def image_features(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Return the features of images, each with its own suffix, (Q, E), normalised.

        Args:
            images: (Q, channels, S, S), from `prepare`.
            prompts: (Q, m, image_width); m = 0 adds nothing.
        """
        self._check(prompts, self.image_width, "image")
        size = (self.channels, self.image_size, self.image_size)
        if images.shape[1:] != size or len(images) != len(prompts):
            found = f"{list(images.shape)} for {len(prompts)} prompts"
            raise ClipError(f"need an image of {list(size)} for each prompt, got {found}")
        encoder, given = self.model.vision_model, prompts.device
        images, prompts = images.to(self.device), prompts.to(self.device)
        states = torch.cat([encoder.embeddings(images), prompts], dim=1)
        states = encoder.encoder(encoder.pre_layrnorm(states)).last_hidden_state
        first = encoder.post_layernorm(states[:, 0])  # (Q, width)
        # A product per row: in a product of all rows, some kernels round the last rows differently.
        weight = self.model.visual_projection.weight.t().expand(len(first), -1, -1)
        return F.normalize(torch.bmm(first.unsqueeze(1), weight).squeeze(1), dim=-1).to(given)

    def logits(self, image: Tensor, text: Tensor) -> Tensor:
        """Return exp(logit_scale) times the products of features, (Q, E), (Q, C, E) -> (Q, C).

        Row by row rather than by a matrix product, whose rounding could depend on other rows.
        """
        scale: Tensor = self.model.logit_scale.exp()
        products = (image.to(self.device).unsqueeze(1) * text.to(self.device)).sum(-1)
        return (scale * products).to(image.device)

    def _pack(self, texts: list[list[int]]) -> None:
        """Lay out the class texts in one sequence, with their common beginning only once."""
        shortest = min(map(len, texts)) - 1  # EOS stays with its class
        differs = (i for i in range(shortest) if len({text[i] for text in texts}) > 1)
        common = next(differs, shortest)
        tokens, places = list(texts[0][:common]), list(range(common))
        owners, ends = [-1] * common, []  # -1 is common to all
        for label, text in enumerate(texts):
            tokens += text[common:]
            places += range(common, len(text))
            owners += [label] * (len(text) - common)
            ends.append(len(tokens) - 1)
        self._tokens, self._places = torch.tensor(tokens), torch.tensor(places)
        self._owners, self._ends = torch.tensor(owners), torch.tensor(ends)

    def _mask(self, count: int) -> Tensor:
        """Return the additive attention mask: 0 where a token attends, else the smallest float."""
        owners = torch.cat([self._owners.new_full((count,), -1), self._owners])
        sees = (owners == -1) | (owners == owners[:, None])  # (query, key)
        mask = torch.zeros(sees.shape, device=self.device)
        mask = mask.masked_fill(~sees.tril(), torch.finfo(torch.float32).min)
        return mask[None, None]

    def _check(self, prompts: Tensor, width: int, kind: str) -> None:
        if prompts.dim() != 3 or prompts.shape[2] != width or prompts.dtype != torch.float32:
            found = f"{prompts.dtype} of shape {list(prompts.shape)}"
            raise ClipError(
                f"need {kind} prompts of float32, (rows, vectors, {width}), got {found}"
            )


def _check_texts(classes: Sequence[str], tokens: list[list[int]]) -> None:
    if len(classes) < 2 or len(tokens) != len(classes):
        raise ClipError(f"need at least 2 classes and a text of each, got {len(classes)}")
    texts = [tuple(text) for text in tokens]
    same = [name for name, text in zip(classes, texts, strict=True) if texts.count(text) > 1]
    if same:
        raise ClipError(f"classes with the same text cannot be told apart: {', '.join(same)}")


def _tokenise(texts: list[str], tokenizer: Any, config: Any) -> list[list[int]]:
    """Return [BOS, .., EOS] of each text, all of whose tokens the model knows."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if start is None or end is None:
        raise ClipError("the tokenizer has no start-of-text and end-of-text tokens, as CLIP's has")
    found = []
    # without its files, transformers makes an empty tokenizer
    known = set(range(config.vocab_size)) - {tokenizer.unk_token_id, start, end}
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not known.issuperset(ids):
            raise ClipError(
                f"the model's tokenizer does not know all words of {text!r}: use class names from "
                "its vocabulary, or put the tokenizer's files beside the model"
            )
        found.append([start, *ids, end])
    return found
