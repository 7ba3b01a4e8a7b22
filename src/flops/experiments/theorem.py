"""Theorems 1 and 2, checked on a model with traces in closed form.

The model is one linear layer, the loss l_j = |W x_j + b - y_j|^2 / 2, the estimator likelihood
ratio with the clean baseline. With residual r, d outputs and unit noise z, one draw is
w z with w = <r, z> + sigma |z|^2 / 2, so its trace is

    Tr_j = ((d + 1) |r_j|^2 + sigma^2 d (d + 2) (d + 4) / 4) (|x_j|^2 + 1).

Theorem 1: the lower bound LB = E sum_j [eta <g, g_j> - eta^2 L |g|^2 / 2] of the improvement of a
step orders allocations as -J does: LB = eta B |g|^2 - eta^2 L B (|g|^2 + J / B^2) / 2.
Theorem 2: J_equal - J_Neyman = (1/A_0) sum_{j<k} (sqrt Tr_j - sqrt Tr_k)^2 for real counts, and
the Gaussian family at its optimum is not worse than equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from flops.allocators import Bernoulli, Fixed, Gaussian, Signal, Traces
from flops.allocators.counts import feasible, integer_optimum, objective
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import check_least
from flops.estimators import LikelihoodRatio
from flops.report.table import print_table
from flops.training.device import find_device

POINTS, INPUTS, OUTPUTS, QUERIES, SIGMA = 8, 5, 4, 6, 0.05


@dataclass(frozen=True)
class Theorem1Row:
    """One allocation: J, the bound by the formula, and the measured bound with standard error."""

    allocation: str
    objective: float
    bound: float
    measured: float
    error: float


@dataclass(frozen=True)
class Theorem2:
    """Both sides of the identity, and J of the mean counts of a Gaussian after 400 updates."""

    equal: float
    neyman: float
    gap: float
    identity: float
    gaussian: float


class ClosedFormProblem:
    """The model, its data and its traces."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.device = find_device(device)  # of the estimates; what is known is on the CPU
        source = torch.Generator().manual_seed(seed)
        self.model = nn.Linear(INPUTS, OUTPUTS).double()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=source, dtype=p.dtype))
        self.x = torch.randn(POINTS, INPUTS, generator=source, dtype=torch.float64)
        # Residuals of very different size: otherwise equal counts are optimal.
        scale = torch.logspace(-1.5, 1, POINTS, dtype=torch.float64).unsqueeze(1)
        noise = torch.randn(POINTS, OUTPUTS, generator=source, dtype=torch.float64)
        self.y = self.model(self.x).detach() - scale * noise
        self.residual = self.model(self.x).detach() - self.y  # (B, d)
        self.inputs = torch.cat([self.x, torch.ones(POINTS, 1, dtype=torch.float64)], 1)

    @staticmethod
    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error of each point."""
        squares: Tensor = (outputs - targets).square().sum(1)
        return squares / 2

    def traces(self) -> Tensor:
        """Tr_j in closed form."""
        d = OUTPUTS
        linear = (d + 1) * self.residual.square().sum(1)
        curved = SIGMA**2 * d * (d + 2) * (d + 4) / 4
        traces: Tensor = (linear + curved) * self.inputs.square().sum(1)
        return traces

    def gradients(self) -> Tensor:
        """Gradients of the points, shape (B, d * (inputs + 1))."""
        return torch.einsum("bo,bi->boi", self.residual, self.inputs).flatten(1)

    def smoothness(self) -> float:
        """Largest smoothness constant L over the points."""
        return float(self.inputs.square().sum(1).max())

    def estimates(self, counts: Tensor, repeats: int, seed: int) -> Tensor:
        """Estimated gradients of the mean loss, (repeats, d * (inputs + 1)), by the engine."""
        self.model.to(self.device)
        x, y = self.x.to(self.device), self.y.to(self.device)
        group = Group(self.model, LikelihoodRatio(SIGMA), queries=QUERIES)
        fixed = Fixed(counts.tolist())
        fg = ForwardGradient(self.model, self.losses, group, allocator=fixed, seed=seed)
        found = []
        for _ in range(repeats):
            self.model.zero_grad()
            fg.estimate(x, y)
            weight, bias = self.model.weight.grad, self.model.bias.grad
            assert weight is not None
            assert bias is not None
            found.append(torch.cat([weight, bias.unsqueeze(1)], 1).flatten().cpu())
        return torch.stack(found)


def theorem1(
    repeats: int = 1000, seed: int = 0, progress: bool = True, device: str = "cpu"
) -> list[Theorem1Row]:
    """Measure the bound for several allocations of the same budget."""
    problem = ClosedFormProblem(seed, device)
    traces, gradients = problem.traces(), problem.gradients()
    mean, smooth = gradients.mean(0), problem.smoothness()
    eta, budget = 1 / smooth, QUERIES * POINTS
    best = torch.from_numpy(integer_optimum(traces.numpy(), budget))
    signal = Signal(problem.losses(problem.y + problem.residual, problem.y), budget, 1, 1, "all")
    choices = {
        "optimal": best,
        "Gaussian": _learned(signal, traces).allocate(signal),
        "Bernoulli": Bernoulli().allocate(signal),
        "equal": torch.full((POINTS,), QUERIES),
        "reversed": best.flip(0),
    }
    rows = []
    for name, counts in track(choices.items(), "theorem 1", transient=True, disable=not progress):
        j = float(objective(traces.numpy(), counts.double().numpy()))
        square = float(mean.square().sum())
        bound = eta * POINTS * square - eta**2 * smooth * POINTS * (square + j / POINTS**2) / 2
        found = problem.estimates(counts, repeats, seed)
        samples = (
            eta * POINTS * (found @ mean) - eta**2 * smooth * POINTS * (found.square().sum(1)) / 2
        )
        error = float(samples.std()) / repeats**0.5
        rows.append(Theorem1Row(name, j, bound, float(samples.mean()), error))
    return rows


def theorem2(seed: int = 0) -> Theorem2:
    """Both sides of the identity, with real-valued counts and no floor."""
    problem = ClosedFormProblem(seed)
    traces, budget = problem.traces().numpy(), float(QUERIES * POINTS)
    roots = np.sqrt(traces)
    equal = float(objective(traces, np.full(POINTS, budget / POINTS)))
    neyman = float(objective(traces, feasible(roots, budget, 0.0)))
    pairs = np.square(roots[:, None] - roots[None]).sum() / 2
    signal = Signal(
        problem.losses(problem.y + problem.residual, problem.y), int(budget), 1, 1, "all"
    )
    learned = _learned(signal, torch.from_numpy(traces))
    gaussian = float(objective(traces, learned.mean_counts(signal)))
    return Theorem2(equal, neyman, equal - neyman, float(pairs / budget), gaussian)


def _learned(signal: Signal, traces: Tensor) -> Gaussian:
    allocator = Gaussian()
    known = Traces(traces, torch.full_like(traces, 1e6))
    allocator.fit(signal, known, 400)
    return allocator


def tables(rows: list[Theorem1Row], identity: Theorem2) -> list[Table]:
    """Tables of both theorems."""
    first = Table(title="Theorem 1: lower J, higher lower bound of the improvement")
    for name in ("allocation", "J", "bound by formula", "bound measured"):
        first.add_column(name, justify="left" if name == "allocation" else "right")
    for row in sorted(rows, key=lambda r: r.objective):
        first.add_row(
            row.allocation,
            f"{row.objective:.2f}",
            f"{row.bound:.4f}",
            f"{row.measured:.4f} ± {row.error:.4f}",
        )
    second = Table(title="Theorem 2: gain of the optimal allocation")
    second.add_column("quantity")
    second.add_column("value", justify="right")
    values: dict[str, Any] = {
        "J of equal counts": identity.equal,
        "J of Neyman counts (real numbers, no floor)": identity.neyman,
        "difference": identity.gap,
        "sum of squared root differences / budget": identity.identity,
        "J of the mean counts of the learned Gaussian (floor 1)": identity.gaussian,
    }
    for name, value in values.items():
        second.add_row(name, f"{value:.10g}")
    return [first, second]


def main(repeats: int = 1000, seed: int = 0, device: str = "auto") -> None:
    """Check both theorems and print the tables.

    Args:
        repeats: Estimates per allocation.
        seed: Seed of the problem and of the noise.
        device: Where the estimates are made: cpu, cuda, or auto.
    """
    check_least({"repeats": 2}, SimpleNamespace(repeats=repeats))
    console = Console()
    rows = theorem1(repeats, seed, console.is_terminal, device)
    for table in tables(rows, theorem2(seed)):
        print_table(console, table)


if __name__ == "__main__":
    main()
