"""Names of the methods of `flops tune`, importable without their dependencies."""

from __future__ import annotations

from typing import Literal, get_args

TuneMethod = Literal["manual", "bp", "lr", "ops-lr", "spsa", "ops-spsa", "shaped-lr", "cma-es"]
TUNE_METHODS: tuple[TuneMethod, ...] = get_args(TuneMethod)
