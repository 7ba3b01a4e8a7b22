"""Small training runs that are broken off, and what must be alike in two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flops.tasks.classification.config import FinetuneConfig
from flops.training import checkpoint as checkpoints
from flops.training.loop import NullDisplay

SMALL = FinetuneConfig(
    limit=36,
    batch=16,
    queries=4,
    epochs=4,
    evaluate_every=2,
    checkpoint_steps=2,
    checkpoint_seconds=None,
    plots=False,  # they take longer than the run
)


def small(**changed: Any) -> FinetuneConfig:
    return SMALL.replace(**changed)


class Stop(Exception):
    pass


class Stopper(NullDisplay):
    """Breaks a run off after a step."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        if line["step"] == self.last:
            raise Stop


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found]


def final(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    weights, state = checkpoints.load(checkpoints.steps(folder / "checkpoints")[-1])
    state["progress"]["seconds"] = 0
    state["progress"]["evaluations"] = [
        {**e, "seconds": 0} for e in state["progress"]["evaluations"]
    ]
    del state["metrics"]  # a length that seconds are part of
    return weights, state


def flip(file: Path) -> None:
    """Change a bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours: Any, theirs: Any, path: str) -> None:
    assert type(ours) is type(theirs), path
    if isinstance(theirs, torch.Tensor):
        assert ours.stride() == theirs.stride(), path
        assert torch.equal(bits(ours), bits(theirs)), path
    elif isinstance(theirs, dict):
        assert [*ours] == [*theirs], path
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{path}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for i, value in enumerate(theirs):
            assert_same(ours[i], value, f"{path}/{i}")
    else:
        assert ours == theirs, path


def assert_alike(folder: Path, unbroken: Path) -> None:
    assert lines(folder) == lines(unbroken)
    ours, theirs = final(folder), final(unbroken)
    for name, weight in theirs[0].items():
        assert torch.equal(bits(ours[0][name]), bits(weight)), name
    assert_same(ours[1], theirs[1], "state")
    for name, found in load_file(unbroken / "counts.safetensors").items():
        assert torch.equal(load_file(folder / "counts.safetensors")[name], found), name
