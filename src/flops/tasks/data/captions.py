"""Captions from class names: several templates, with articles, in lower case."""

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
# Fashion-MNIST has two names for one class, and a plural without article.
_PLAIN = {"T-shirt/top": "t-shirt", "trousers": "trouser"}


def noun(name: str) -> str:
    """A class name with its article: "a t-shirt", "an ankle boot".

    Raises:
        ValueError: The name has no word.
    """
    word = re.sub(r"[\s_]+", " ", _PLAIN.get(name, name)).strip().lower()
    if not word:
        raise ValueError(f"the class {name!r} has no word for a caption")
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def few_shot_instruction(names: Sequence[str] = EXAMPLES) -> str:
    """A few-shot instruction: a name, then a caption of it, one line per template.

    The visual token then takes the place of a name. A language model without instruction tuning
    continues the pattern, so only the name has to be learned.
    """
    templates = (TEMPLATES[i % len(TEMPLATES)] for i in range(len(names)))
    pairs = zip(names, templates, strict=True)
    return "".join(f"{name} {template.format(noun(name))}\n" for name, template in pairs)


def class_captions(names: Sequence[str], template: int = 0) -> list[str]:
    """The captions of all classes in one template; its number wraps around."""
    return [TEMPLATES[template % len(TEMPLATES)].format(noun(name)) for name in names]
