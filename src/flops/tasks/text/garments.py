"""The embedded texts: short captions of garments and of other things, in the words of tiny-llama.

A text has two captions of two nouns of one class, such as "a photo of a hat. here you can see a
scarf." Zero-shot, the bundled model repeats one of the nouns; the class is what has to be learned.
The texts are made here, by a generator whose stream numpy guarantees, and are all different.
"""

from __future__ import annotations

import numpy as np

from flops.tasks.data.captions import TEMPLATES, noun

GARMENTS = """hat scarf glove sock belt jacket skirt sweater jersey vest suit tie slipper boot robe
apron blouse cardigan blazer jeans cap hood shirt dress sandal sneaker pullover trouser"""
OTHERS = "cat dog bird horse fish tree flower house car boat plane train cup table chair lamp book"
CLASSES = ("garment", "other")
TEMPLATE = "{text} this is a"
WORDS = ("coat", "ball")  # in none of the texts
SIZES = {"train": 320, "validation": 160, "test": 240}


def garments() -> dict[str, list[tuple[str, int]]]:
    """Texts and classes of each split, balanced; the same at every call."""
    nouns = (GARMENTS.split(), OTHERS.split())
    source = np.random.RandomState(0)
    seen: set[str] = set()
    found: dict[str, list[tuple[str, int]]] = {}
    for split, size in SIZES.items():
        rows: list[tuple[str, int]] = []
        while len(rows) < size:
            label = len(rows) % len(CLASSES)
            words = source.choice(len(nouns[label]), 2, replace=False)
            forms = source.randint(len(TEMPLATES), size=2)
            text = " ".join(
                TEMPLATES[form].format(noun(nouns[label][word]))
                for form, word in zip(forms, words, strict=True)
            )
            if text not in seen:
                seen.add(text)
                rows.append((text, label))
        found[split] = rows
    return found
