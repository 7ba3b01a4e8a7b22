"""Steps that two processes with their own points must take as one with all; by
tests/engine/test_data_parallel.py.

As a program it writes what every process found: `data_parallel_cases.py FOLDER PROCESSES`.
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
from torch.distributed.device_mesh import init_device_mesh

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
    MeZO,
    Shaping,
)
from flops.allocators import Bernoulli, Equal, Gaussian, Neyman
from flops.allocators.base import Allocator, Signal
from flops.engine.collectives import Collectives
from tests.support.parallel_cases import STEPS, Words, batch, losses
from tests.support.ranks import start

CUT = 4  # points of rank 0; the other has the rest of them


class Uniform(Gaussian):
    """Learns as its base class does, from equal counts: so all learn from the same queries."""

    def allocate(self, signal: Signal) -> Tensor:
        return Equal().allocate(signal)


class Regressing(Neyman):
    """Likewise."""

    def allocate(self, signal: Signal) -> Tensor:
        return Equal().allocate(signal)


stage = LikelihoodRatio(targets="stage")
CASES: dict[str, tuple[Any, Callable[[], Allocator]]] = {
    "block": (LikelihoodRatio(), Equal),
    "leaf": (LikelihoodRatio(targets="leaf"), Uniform),
    "stage": (LikelihoodRatio(targets="stage", baseline="antithetic"), Regressing),
    "pilot": (LikelihoodRatio(), lambda: Regressing(pilot=2)),
    "running": (LikelihoodRatio(targets="leaf"), lambda: Regressing(running=True)),
    "shaped": (LikelihoodRatio(targets="stage", shaping=Shaping()), Uniform),
    "shaped losses": (LikelihoodRatio(targets="stage", shaping=Shaping(outputs=False)), Equal),
    "unbiased": (LikelihoodRatio(targets="block", shaping=Shaping(unbiased=True)), Equal),
    "automatic": (LikelihoodRatio("auto", "stage", shaping=Shaping(withhold=0.2)), Uniform),
    "spsa": (SPSA(), Uniform),
    "es": (ES(), Equal),
    "shaped spsa": (SPSA(shaping=Shaping()), Equal),
    "spsa shared": (SPSA(shared=True), Equal),
    "mezo": (MeZO(), Equal),
    "fzoo": (FZOO(), Equal),
    "lozo": (LOZO(interval=3), Equal),
    "jvp": (JVP(), Equal),
    "deepzero": (DeepZero(score_draws=4), Equal),
    "exact": (Exact(), Equal),
}
OWN_COUNTS: dict[str, tuple[Any, Callable[[], Allocator]]] = {
    "gaussian": (LikelihoodRatio(targets="leaf"), Gaussian),
    "bernoulli": (LikelihoodRatio(), lambda: Bernoulli(p=None)),
    "neyman": (LikelihoodRatio(targets="leaf"), lambda: Neyman(across_groups=True)),
    "neyman pilot": (LikelihoodRatio(), lambda: Neyman(pilot=2)),
}


def part(step: int, size: int, rank: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's points of a batch; all for None."""
    if rank is None:
        return batch(step, size)
    own = slice(0, CUT) if rank == 0 else slice(CUT, size)
    return tuple(x[own] for x in batch(step, size))  # type: ignore[return-value]


def train(
    name: str,
    rank: int | None = None,
    indexed: bool = True,
    ranks: Any = None,
    size: int = 6,
    longer: int = 0,
) -> dict[str, Any]:
    """Some steps; what they found, and the parameters at the end.

    Args:
        name: Of the case.
        rank: Whose points; None for all.
        indexed: Whether points have an index.
        ranks: Ranks that train together.
        size: Points of all.
        longer: Words more in every text.
    """
    torch.manual_seed(0)
    model = Words().double()
    estimator, allocator = {**CASES, **OWN_COUNTS}[name]
    modules = [model.table, model.early, model.late]
    queries: Any = "auto" if name == "automatic" else 6
    groups = [Group(m, estimator, queries, name=f"part {i}") for i, m in enumerate(modules)]
    fg = ForwardGradient(model, losses, groups, allocator=allocator(), process_group=ranks, chunk=8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    found: dict[str, Any] = {"reports": []}
    for step in range(STEPS):
        words, targets, index = part(step, size, rank)
        words = torch.cat([words, words[:, :longer]], 1)
        optimizer.zero_grad()
        report = fg.estimate(words, targets, index=index if indexed else None, exact=True)
        cost = report.forward_equivalents.parts()
        shown = (report.loss, report.queries, cost, dict(report.cosine), dict(report.snr))
        found["reports"].append((*shown, report.points))
        if step == 0:
            found["first"] = _gradients(model)
        optimizer.step()
    found["sent"] = ranks.sent / STEPS if isinstance(ranks, Collectives) else 0.0
    found["parameters"] = torch.cat([p.detach().flatten() for p in model.parameters()])
    found["gradients"] = _gradients(model)
    found["state"] = fg.state_dict()
    return found


def _gradients(model: nn.Module) -> Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([torch.zeros(0).double(), *(g.flatten() for g in grads)])


def refusals() -> dict[str, str]:
    """What is said on this process when batches or models are wrong."""
    rank, found = dist.get_rank(), {}

    def attempt(what: str, model: nn.Module, given: tuple[Tensor, ...], **options: Any) -> None:
        words, targets, index = given
        fg = ForwardGradient(model, losses, [Group(model, LikelihoodRatio(), 4)], **options)
        try:
            fg.estimate(words, targets, index=None if what == "index" and rank else index)
        except FlopsError as error:
            found[what] = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    model = Words().double()
    attempt("same", model, batch(0))
    attempt("other", model, part(0, 6, rank), parallel="query")
    attempt("index", model, part(0, 6, rank))
    attempt("seed", model, part(0, 6, rank), seed=rank)
    attempt("nothing", model, part(0, 6, rank))
    with torch.no_grad():
        model.table.weight.copy_(model.table.weight.roll(rank, 0))
    attempt("parameters", model, part(0, 6, rank))
    return found


MESH = ("block", "shaped", "spsa", "mezo", "exact")


def on_a_mesh(folder: Path) -> None:
    """Four processes: two with each part of the points, which share its queries."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "query"))
    found = {name: train(name, mesh.get_local_rank("data"), ranks=mesh) for name in MESH}
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")


def main(folder: Path) -> None:
    rank = dist.get_rank()
    if dist.get_world_size() == 4:
        on_a_mesh(folder)
        return
    found: dict[str, Any] = {
        name: train(name, rank, ranks=Collectives.of("auto")) for name in (*CASES, *OWN_COUNTS)
    }
    found["no index"] = train("leaf", rank, indexed=False, ranks=Collectives.of("auto"))
    for name in ("shaped", "automatic"):
        more = train(name, rank, ranks=Collectives.of("auto"), longer=rank)
        found[f"{name}, other lengths"] = more
    found["refusals"] = refusals()
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    start(partial(main, Path(sys.argv[1])), int(sys.argv[2]))
