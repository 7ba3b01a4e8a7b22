"""Captions for Fashion-MNIST and a tokenizer, for pretraining the bundled CLIP."""

from __future__ import annotations

import itertools

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_STD
from flops.tasks.data.fashion import CLASSES

START, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY = 768  # upper bound; 256 bytes, and merges until all words of captions are tokens

# Captions: a template, a name of the class, and often a shade, so that words are informative.
SYNONYMS = {
    "t-shirt": ["tee", "t-shirt top", "short sleeved top"],
    "trousers": ["pants", "slacks", "pair of trousers"],
    "pullover": ["sweater", "jumper", "knitted pullover"],
    "dress": ["gown", "frock", "long dress"],
    "coat": ["jacket", "overcoat", "winter coat"],
    "sandal": ["open shoe", "summer sandal", "flip-flop"],
    "shirt": ["blouse", "buttoned shirt", "dress shirt"],
    "sneaker": ["trainer", "sports shoe", "running shoe"],
    "bag": ["handbag", "purse", "shoulder bag"],
    "ankle boot": ["boot", "bootie", "high boot"],
}
NAMES = [
    [name, name, *SYNONYMS[name]] for name in CLASSES
]  # the name twice as often as each synonym
SHADES = ["dark", "grey", "light", ""]  # of the garment's mean pixel, in thirds; "" for none
TEMPLATES = [
    "a photo of a {}.",
    "a photo of the {}.",
    "a picture of a {}.",
    "an image of one {}.",
    "a product photo of a {}.",
    "a black and white photo of a {}.",
    "a small picture of the {}.",
    "a {}.",
    "the {}.",
    "{}",
]


def captions() -> list[list[str]]:
    """Return all captions of each class and shade, in this order; the last shade is none."""
    found = []
    for names, shade in itertools.product(NAMES, SHADES):
        things = [f"{shade} {name}".strip() for name in names]
        found.append([template.format(thing) for thing in things for template in TEMPLATES])
    return found


def new_tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the captions; every word becomes one token."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(itertools.chain(*captions()), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(mark, core.token_to_id(mark)) for mark in (START, END)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        model_max_length=positions,
    )


def caption_tokens(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the tokens of all captions, (classes, shades, captions of each, length)."""
    texts = list(itertools.chain(*captions()))
    tokens: Tensor = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    return tokens.view(len(CLASSES), len(SHADES), -1, tokens.shape[1])


def shades(images: Tensor) -> Tensor:
    """Return the shade of each garment, by its mean pixel."""
    pixels = images * IMAGE_STD + IMAGE_MEAN
    inside = (pixels > 0.05).float()
    mean = (pixels * inside).sum((1, 2, 3)) / inside.sum((1, 2, 3)).clamp(min=1)
    return torch.bucketize(mean, torch.tensor([0.45, 0.68]))  # (N,), 0 to 2


def draw_captions(
    tokens: Tensor, labels: Tensor, shade: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a caption for each image, half of the time with its shade.

    Returns:
        The captions' tokens, and which captions match which images, (image, caption): those of the
        same class with the image's shade or none.
    """
    silent, count = len(SHADES) - 1, len(labels)
    told = torch.rand(count, generator=generator) < 0.5
    said = torch.where(told, shade, silent)
    which = torch.randint(tokens.shape[2], (count,), generator=generator)
    fits = labels[:, None] == labels
    fits &= (said == silent) | (said == shade[:, None])
    return tokens[labels, said, which], fits
