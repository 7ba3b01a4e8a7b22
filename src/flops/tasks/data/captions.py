"""Captions made of class names: several templates, the right article, plain words."""

from __future__ import annotations

import re
from collections.abc import Sequence

INSTRUCTION = "describe the picture:"
TEMPLATES = (
    "a photo of {}.",
    "this is {}.",
    "the picture shows {}.",
    "an image of {}.",
    "here you can see {}.",
)
EXAMPLES = ("hat", "scarf", "glove", "sock", "belt")  # none of them a class of Fashion-MNIST
# Of Fashion-MNIST: two names for one class, and a plural that takes no article.
_PLAIN = {"T-shirt/top": "t-shirt", "trousers": "trouser"}


def noun(name: str) -> str:
    """A class name as a caption has it, with its article: "a t-shirt", "an ankle boot".

    Raises:
        ValueError: There is no word in it.
    """
    word = re.sub(r"[\s_]+", " ", _PLAIN.get(name, name)).strip().lower()
    if not word:
        raise ValueError(f"the class {name!r} has no name that a caption could use")
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def few_shot_instruction(names: Sequence[str] = EXAMPLES) -> str:
    """An instruction by examples: a name, then a caption of it, one line for each template.

    The visual token then stands where a name would. A language model that was never told to
    describe anything goes on in the same way, and only has to be told the name.
    """
    templates = (TEMPLATES[i % len(TEMPLATES)] for i in range(len(names)))
    pairs = zip(names, templates, strict=True)
    return "".join(f"{name} {template.format(noun(name))}\n" for name, template in pairs)


def class_captions(names: Sequence[str], template: int = 0) -> list[str]:
    """The captions of all classes in one template; its number counts round and round."""
    return [TEMPLATES[template % len(TEMPLATES)].format(noun(name)) for name in names]
