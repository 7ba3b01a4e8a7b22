"""Steps that one process and two must take alike; run by tests/engine/test_collectives.py.

As a program it writes what every process found: `parallel_cases.py FOLDER PROCESSES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flops import (
    ES,
    FZOO,
    JVP,
    LOZO,
    SPSA,
    DeepZero,
    Exact,
    FlopsError,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    Shaping,
)
from flops.allocators import Bernoulli, Equal, Gaussian, Neyman
from flops.allocators.base import Allocator
from flops.engine.collectives import Collectives
from flops.presets import mezo
from tests.support.ranks import start

STEPS = 5
CASES: dict[str, tuple[Any, Callable[[], Allocator]]] = {
    "block": (LikelihoodRatio(), Equal),
    "leaf": (LikelihoodRatio(targets="leaf"), Gaussian),
    "stage": (LikelihoodRatio(targets="stage", baseline="antithetic"), Neyman),
    "orthogonal": (LikelihoodRatio(noise="orthogonal"), Bernoulli),
    "pilot": (LikelihoodRatio(), lambda: Neyman(pilot=2)),
    "across groups": (LikelihoodRatio(), lambda: Neyman(across_groups=True)),
    "shaped": (LikelihoodRatio(targets="stage", shaping=Shaping()), Gaussian),
    "automatic": (
        LikelihoodRatio("auto", "stage", shaping=Shaping(withhold=0.2)),
        lambda: Gaussian("standardised"),
    ),
    "spsa": (SPSA(), Gaussian),
    "es": (ES(), Gaussian),
    "shaped spsa": (SPSA(shaping=Shaping()), Gaussian),
    "spsa shared": (SPSA(shared=True), Equal),
    "many draws": (SPSA(shared=True), Equal),
    "es shared": (ES(shared=True), Equal),
    "fzoo": (FZOO(), Equal),
    "lozo": (LOZO(interval=3), Equal),
    "jvp": (JVP(), Equal),
    "deepzero": (DeepZero(score_draws=4), Equal),
    "exact": (Exact(), Equal),
}
# Of a wide model it pays to send what the clean pass found.
WIDE = {f"wide {name}": CASES[name] for name in ("block", "leaf", "shaped", "automatic")}
WIDE["wide pairs"] = (LikelihoodRatio(baseline="antithetic"), Gaussian)
CASES |= WIDE


class Words(nn.Module):
    """A table of words, and layers; few enough parameters for every estimator."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.early = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5))
        self.late = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))
        self.before_queries, self.queried = 0, False  # rows of a step

    def forward(self, words: Tensor) -> Tensor:
        self.queried |= torch.is_inference_mode_enabled()
        self.before_queries += 0 if self.queried else len(words)
        out: Tensor = self.late(self.early(self.table(words)).mean(1))
        return out


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def batch(step: int, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    index = torch.randperm(40, generator=source)[:size]
    words = torch.randint(0, 7, (size, 3), generator=source)
    return words, torch.randn(size, 3, generator=source, dtype=torch.float64), index


def train(name: str, size: int = 6, group: Any = "auto") -> dict[str, Any]:
    """Some steps; what they found, and the parameters at the end."""
    torch.manual_seed(0)
    model = Words(400 if name in WIDE else 6).double()
    estimator, allocator = CASES.get(name, (None, Equal))
    parts = [model.table, model.early, model.late]
    queries: Any = {"automatic": "auto", "many draws": 20}.get(name.removeprefix("wide "), 6)
    groups = [Group(m, estimator, queries, name=f"part {i}") for i, m in enumerate(parts)]
    if name == "mezo":
        groups = mezo(model)
    ranks = Collectives.of(group)
    fg = ForwardGradient(
        model, losses, groups, allocator=allocator(), process_group=ranks, parallel="query", chunk=8
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    found: dict[str, Any] = {"reports": []}
    for step in range(STEPS):
        words, targets, index = batch(step, size)
        optimizer.zero_grad()
        model.before_queries, model.queried = 0, False
        report = fg.estimate(words, targets, index=index)
        cost = report.forward_equivalents.parts()
        counts = {n: c.tolist() for n, c in report.counts.items()}
        found["reports"].append((report.loss, report.queries, cost, counts, dict(report.snr)))
        optimizer.step()
    found["sent"], found["clean rows"] = ranks.sent / STEPS, model.before_queries
    found["parameters"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    found["gradients"] = torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )
    return found


def refusals() -> dict[str, str]:
    """What is said on this process when something goes wrong on one of them alone."""
    rank, found = dist.get_rank(), {}

    def attempt(
        what: str,
        model: nn.Module,
        words: Tensor,
        targets: Tensor,
        loss: Any,
        index: Tensor | None = None,
    ) -> None:
        groups = [Group(model, LikelihoodRatio(), 4)]
        try:
            fg = ForwardGradient(model, loss, groups, parallel="query")
            fg.estimate(words, targets, index=index)
        except FlopsError as error:
            found[what] = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    model = Words().double()
    words, targets, _ = batch(0)
    attempt("batch", model, words, targets + rank, losses)
    order = torch.arange(len(words)).roll(rank)
    attempt("order", model, words[order], targets[order], losses)
    attempt("order of targets", model, words, targets[order], losses)
    attempt("index", model, words, targets, losses, order)
    attempt("kind", model, words, targets.to([torch.float64, torch.float32][rank]), losses)
    strided = words.T.contiguous().T if rank else words  # the same values, held otherwise
    attempt("nothing", model, strided, targets, losses, torch.arange(len(words)))
    calls = [0]

    def fails_on_one(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        late = rank == 1 and outputs.is_inference()  # in a query, not in the clean pass
        return losses(outputs, targets) * (torch.nan if late else 1.0)

    attempt("nan", model, words, targets, fails_on_one)
    with torch.no_grad():
        model.early[2].bias.mul_(1 + rank * 1e-9)  # rounding of another machine
    attempt("rounding", model, words, targets, losses)
    with torch.no_grad():
        model.table.weight.copy_(model.table.weight.roll(rank, 0))
    attempt("model", model, words, targets, losses)
    return found


def main(folder: Path) -> None:
    found: dict[str, Any] = {name: train(name) for name in (*CASES, "mezo")}
    for size in (1, 2, 3):
        found[f"size {size}"] = train("leaf", size=size)
    found["refusals"] = refusals()
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    start(partial(main, Path(sys.argv[1])), int(sys.argv[2]))
