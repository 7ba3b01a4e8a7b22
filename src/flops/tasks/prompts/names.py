"""Names of the methods of `flops tune`, apart from what they need: the command line reads them."""

from __future__ import annotations

from typing import Literal, get_args

TuneMethod = Literal["manual", "bp", "lr", "ops-lr", "spsa", "ops-spsa", "shaped-lr", "cma-es"]
TUNE_METHODS: tuple[TuneMethod, ...] = get_args(TuneMethod)
