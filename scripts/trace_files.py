"""Count the files of flops that one step runs through.

python scripts/trace_files.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flops
from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Allocator, Equal, Gaussian

ROOT = Path(flops.__file__).parent


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per point."""
    return F.cross_entropy(outputs, targets, reduction="none")


def files(fg: ForwardGradient, steps: int = 12) -> list[str]:
    """Files with a function that the last of some steps calls."""
    source = torch.Generator().manual_seed(0)
    seen: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_filename)

    for step in range(steps):
        x = torch.randn(8, 6, generator=source)
        y = torch.randint(0, 3, (8,), generator=source)
        before = sys.getprofile()
        sys.setprofile(watch if step == steps - 1 else before)
        try:
            fg.estimate(x, y)
        finally:
            sys.setprofile(before)
    found = [Path(name) for name in seen]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.is_relative_to(ROOT))


def steps() -> dict[str, ForwardGradient]:
    """Plain likelihood ratio, and shaped with the Gaussian allocator."""
    shaped = LikelihoodRatio(targets="stage", shaping=Shaping())
    return {
        "likelihood ratio": engine(LikelihoodRatio(), Equal()),
        "shaped, Gaussian allocator": engine(shaped, Gaussian()),
    }


def engine(estimator: LikelihoodRatio, allocator: Allocator) -> ForwardGradient:
    """Three groups of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    groups = [Group(model[i], estimator, 8, name=str(i)) for i in (0, 2, 3)]
    return ForwardGradient(model, loss_fn, groups, allocator=allocator)


def main() -> None:
    """Print the files of each."""
    for name, fg in steps().items():
        found = files(fg)
        print(f"{name}: {len(found)} files\n  " + "\n  ".join(found))


if __name__ == "__main__":
    main()
