"""Methods of a comparison: a method, and what of the model it trains.

| spelled | trains |
|---|---|
| shaped-lr | what the comparison says, such as the last layers |
| shaped-lr+lora | LoRA adapters in these layers |
| mezo+all | everything, with the embeddings |
| mezo+last4 | the last four layers |
| zero-shot | nothing: the unmodified model |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from flops.errors import FlopsError
from flops.training.methods import AUTOMATIC_SIGMA, METHODS, WITHOUT_SIGMA, MethodName

ZERO_SHOT = "zero-shot"
BP = "bp"


@dataclass(frozen=True)
class Variant:
    """A method as it is spelled in a comparison.

    Attributes:
        name: The method; None for the unmodified model.
        lora: Whether it trains adapters.
        everything: Whether it trains all layers and the embeddings.
        last: How many layers it trains, the last ones; None for those of the comparison.
    """

    name: MethodName | None
    lora: bool = False
    everything: bool = False
    last: int | None = None

    @property
    def has_sigma(self) -> bool:
        """Whether it has a noise scale to choose."""
        return self.name is not None and self.name not in WITHOUT_SIGMA | AUTOMATIC_SIGMA

    @property
    def forward(self) -> bool:
        """Whether it trains with forward passes alone."""
        return self.name not in (None, BP)


def variant(spelled: str) -> Variant:
    """The method of a name.

    Raises:
        FlopsError: If there is no such method.
    """
    if spelled == ZERO_SHOT:
        return Variant(None)
    name, *parts = spelled.split("+")
    found = re.fullmatch(r"(lora)?,?(all|last[1-9]\d*)?", ",".join(parts))
    if name not in METHODS or (parts and not found) or not all(parts):
        raise FlopsError(
            f"no method '{spelled}': methods are {ZERO_SHOT} and {', '.join(METHODS)}, each also "
            "with +lora, +all or +last8 for what it trains, such as shaped-lr+lora"
        )
    lora, which = found.groups() if found else (None, None)
    (method,) = (m for m in get_args(MethodName) if m == name)
    last = int(which[4:]) if which and which != "all" else None
    return Variant(method, lora is not None, which == "all", last)
