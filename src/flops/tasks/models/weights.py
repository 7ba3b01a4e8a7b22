"""Hashes of model folders, and a check of the classes of a kept head."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn


def weights_digest(model: str) -> str:
    """Hash of the contents of a model folder; empty if it is not a folder."""
    folder = Path(model).expanduser()
    if not model or not (folder / "config.json").is_file():
        return ""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    files = [file for file in files if file.is_file()]  # reading a pipe would block
    return _digest(tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files))


@lru_cache  # the key changes with the files
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    mark = hashlib.sha256()
    for name, _, _ in files:
        with open(name, "rb") as content:
            mark.update(hashlib.file_digest(content, "sha256").digest())
    return mark.hexdigest()[:12]


def warn_of_other_classes(model: nn.Module, classes: Sequence[str]) -> None:
    """Warn if a kept head has other classes than the data, or in another order."""
    config: Any = model.config
    names = [str(config.id2label.get(i, "")) for i in range(len(classes))]
    unnamed = all(re.fullmatch(r"LABEL_\d+", name) for name in names)
    if not unnamed and names != list(classes):
        warnings.warn(
            f"the kept head has the classes {', '.join(names[:5])}, ... and the data have "
            f"{', '.join(classes[:5])}, ...; keep it only if they correspond in this order",
            stacklevel=3,
        )
