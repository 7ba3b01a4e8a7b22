"""The parts of a data set."""

from __future__ import annotations

from typing import Any

SPLITS = ("train", "validation", "test")


def parts(data: Any) -> list[Any]:
    return [getattr(data, split) for split in SPLITS]
