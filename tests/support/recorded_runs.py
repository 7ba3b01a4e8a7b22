"""Run directories with known contents, written without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flops.report.counts import write_counts

CLASSES = ("cat", "dog & <wolf>", "a class whose name is long")


def write_run(
    folder: Path, method: str = "shaped-lr", steps: int = 60, texts: bool = False, **changed: Any
) -> Path:
    """A finished run of three classes: 60 steps, an evaluation every 20, all groups reported."""
    folder.mkdir(parents=True)
    config = {"method": method, "data": "photos/pets", "model": "bundled", "seed": 0, "epochs": 3}
    (folder / "config.json").write_text(json.dumps(config | changed))
    packages = {"torch": "2.13.0", "datasets": None}
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "packages": packages}))
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        cost, seconds = 120.0 * step + 24, 0.5 * step
        if step:
            lines.append(
                {
                    "kind": "step",
                    "step": step,
                    "epoch": step / 20,
                    "loss": 0.2 + 1.1 * math.exp(-step / 20) + 0.05 * math.sin(step),
                    "queries": 80 * step,
                    "forward_equivalents": cost,
                    "parts": {"probe": 24.0, "clean": 20.0 * step, "queries": 100.0 * step},
                    "group_queries": {"blocks-1": 50, "blocks-2": 30},
                    "snr": {"blocks-1": 0.0, "blocks-2": 0.01 * step},
                    "cosine": {"blocks-1": 0.3, "blocks-2": min(1.0, step / 60)},
                    "shaping": {
                        "blocks-1": {"k": 3.0, "explained_variance": 0.4, "reliability": None},
                        "blocks-2": {"k": 9.0, "explained_variance": 0.9, "reliability": 0.8},
                    },
                    "seconds": seconds,
                }
            )
        if step % 20 == 0:
            lines.append(
                {
                    "kind": "evaluation",
                    "step": step,
                    "epoch": step / 20,
                    "accuracy": 0.34 + step / 100,
                    "loss": 1.1 - step / 100,
                    "queries": 80 * step,
                    "forward_equivalents": cost,
                    "seconds": seconds,
                    "marks": [],
                    "test": 0.91 if step == steps else None,
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"peak_memory": 512 * 2**20}))
    counts = torch.arange(40) * 3 + 10
    counts[-1] = -1  # never visited
    write_counts(
        folder / "counts.safetensors",
        counts,
        torch.arange(40) % 3,
        CLASSES,
        (lambda rows: None) if texts else _pixels,
        (lambda rows: [f"sentence {i} <b>not bold</b>" for i in rows.tolist()])
        if texts
        else lambda rows: None,
    )
    return folder


def _pixels(rows: Tensor) -> Tensor:
    return rows.view(-1, 1, 1, 1).expand(-1, 3, 8, 8) / 40
