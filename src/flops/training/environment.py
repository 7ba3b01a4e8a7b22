"""Environment of a run: versions, cores, threads, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("flops-torch", "torch", "numpy", "safetensors", "transformers", "datasets")


def environment() -> dict[str, Any]:
    """Everything results may depend on; nothing that identifies the machine or its user."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "packages": packages,
        "cores": os.cpu_count(),
        **rounding(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
    }


def rounding() -> dict[str, Any]:
    """Everything that determines rounding: equal values give bit-identical results."""
    return {
        "torch": metadata.version("torch"),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _commit() -> str | None:
    """The commit of the source, if it is tracked by a git repository."""
    here = Path(__file__)
    tracked = ["git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name]
    head = ["git", "-C", str(here.parent), "rev-parse", "HEAD"]
    try:
        subprocess.run(tracked, capture_output=True, check=True, timeout=10)
        found = subprocess.run(head, capture_output=True, check=True, timeout=10, encoding="utf-8")
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
