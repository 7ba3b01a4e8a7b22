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
from flops.allocators import Equal, Gaussian

ROOT = Path(flops.__file__).parent


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per point."""
    return F.cross_entropy(outputs, targets, reduction="none")


def files(fg: ForwardGradient, steps: int) -> list[str]:
    """Files with a function that the last of some steps calls."""
    source = torch.Generator().manual_seed(0)
    seen: set[str] = set()

    def watch(frame: Any, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_filename)

    for step in range(steps):
        x = torch.randn(8, 6, generator=source)
        y = torch.randint(0, 3, (8,), generator=source)
        if step == steps - 1:
            sys.setprofile(watch)
        fg.estimate(x, y)
    sys.setprofile(None)
    found = [Path(name) for name in seen]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.is_relative_to(ROOT))


def main() -> None:
    """Plain likelihood ratio, and shaped with the Gaussian allocator."""
    for name, estimator, allocator in (
        ("likelihood ratio", LikelihoodRatio(), Equal()),
        (
            "shaped, Gaussian allocator",
            LikelihoodRatio(targets="stage", shaping=Shaping()),
            Gaussian(),
        ),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        groups = [Group(model[i], estimator, 8, name=str(i)) for i in (0, 2, 3)]
        found = files(ForwardGradient(model, loss_fn, groups, allocator=allocator), 12)
        print(f"{name}: {len(found)} files\n  " + "\n  ".join(found))


if __name__ == "__main__":
    main()
