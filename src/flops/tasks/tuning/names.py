"""Names of methods and formats of `flops tune`, importable without their dependencies."""

from __future__ import annotations

from typing import Literal

TuneMethod = Literal[
    "manual", "start", "bp", "lr", "ops-lr", "spsa", "ops-spsa", "shaped-lr", "cma-es"
]
InputFormat = Literal["jsonl", "csv", "npy"]
SEARCHES: tuple[TuneMethod, ...] = ("lr", "ops-lr", "spsa", "ops-spsa", "shaped-lr", "cma-es")
PROMPT_METHODS: tuple[TuneMethod, ...] = ("manual", "bp", *SEARCHES)
FUNCTION_METHODS: tuple[TuneMethod, ...] = ("start", *SEARCHES)
FIXED = ("manual", "start")  # take no step
