"""Record the gradients of every estimator, and compare two recordings.

A refactoring must not change gradients: run ``record`` on the commits before and after, then
``compare`` the two files. Only public names are used.

    python scripts/record_gradients.py record before.pt
    python scripts/record_gradients.py compare before.pt after.pt
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flops
from flops import (
    ES,
    FZOO,
    JVP,
    LOZO,
    SPSA,
    DeepZero,
    Exact,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    Shaping,
)
from flops.allocators import Bernoulli, Equal, Gaussian, Neyman

STEPS = 7
POINTS = 6
CLASSES = 3


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the block."""
        return x + self.down(self.up(self.norm(x)).tanh())


class Tiny(nn.Module):
    """An embedding, four residual blocks of which two share a matrix, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the mean over the tokens."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per point."""
    return F.cross_entropy(outputs, targets, reduction="none")


def estimators() -> Iterator[tuple[str, Any, float]]:
    """Name, estimator and mean queries."""
    for targets in ("leaf", "block", "stage"):
        yield f"lr-{targets}", LikelihoodRatio(targets=targets), 4
        yield f"lr-{targets}-shaped", LikelihoodRatio(targets=targets, shaping=Shaping()), 6
    yield "lr-antithetic", LikelihoodRatio(baseline="antithetic"), 4
    yield "lr-none", LikelihoodRatio(sigma=0.1, baseline="none"), 4
    yield "lr-rademacher", LikelihoodRatio(noise="rademacher"), 4
    yield "lr-orthogonal", LikelihoodRatio(noise="orthogonal"), 4
    yield (
        "lr-shaped-antithetic",
        LikelihoodRatio(targets="stage", baseline="antithetic", shaping=Shaping()),
        8,
    )
    yield (
        "lr-shaped-unbiased",
        LikelihoodRatio(targets="stage", shaping=Shaping(unbiased=True)),
        6,
    )
    for kind in (ES, SPSA):
        name = kind.__name__.lower()
        yield name, kind(), 4
        yield f"{name}-shared", kind(shared=True), 4
        yield f"{name}-shared-signs", kind(shared=True, noise="rademacher"), 4
        yield f"{name}-shaped", kind(shaping=Shaping()), 8
    yield "fzoo", FZOO(), 4
    yield "lozo", LOZO(interval=2), 4
    yield "jvp", JVP(), 2
    yield "deepzero", DeepZero(score_draws=4), 12
    yield "deepzero-random", DeepZero(pruning="random"), 12
    yield "exact", Exact(), 1


def groups(model: Tiny, estimator: Any, queries: float) -> list[Group]:
    """Two groups; parameters that the estimator does not support are left out."""
    if isinstance(estimator, LikelihoodRatio) and estimator.targets == "stage":
        parts = [[model.embed], list(model.blocks[:2]), list(model.blocks[2:]), [model.norm]]
        found = [Group(p, estimator, queries, name=f"g{i}") for i, p in enumerate(parts)]
        return [*found, Group(model.head, estimator, queries, name="head")]
    first = [model.embed, *model.blocks[:2]]
    rest = [*model.blocks[2:], model.norm, model.head]
    return [
        Group(first, estimator, queries, name="first"),
        Group(rest, estimator, queries, name="rest"),
    ]


ALLOCATORS = {
    "equal": Equal,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "gaussian-pilot": lambda: Gaussian(pilot=2),
    "neyman": Neyman,
    "neyman-groups": lambda: Neyman(across_groups=True),
}


def engine_cases() -> Iterator[tuple[str, Any, Any, float]]:
    """Name, groups by model, allocator and queries."""
    for name, estimator, queries in estimators():
        yield name, lambda m, e=estimator, q=queries: groups(m, e, q), Equal(), queries
    some = {
        "lr-block": LikelihoodRatio(),
        "lr-stage-shaped": LikelihoodRatio(targets="stage", shaping=Shaping()),
        "spsa": SPSA(),
    }
    for name, estimator in some.items():
        for label, make in ALLOCATORS.items():
            yield f"{name}+{label}", lambda m, e=estimator: groups(m, e, 8), make(), 8
    for sigma in (1e-3, 1e-2):
        yield f"mezo-{sigma:g}", lambda m, s=sigma: mezo(m, s), Equal(), 2
    yield "automatic", lambda m: None, Equal(), 20


def mezo(model: nn.Module, sigma: float) -> Any:
    """The groups of MeZO, by the name in this version."""
    if hasattr(flops, "mezo"):
        return flops.mezo(model, sigma)
    from flops.presets import mezo as groups_of

    return groups_of(model, sigma)


def run_engine(make: Any, allocator: Any, chunk: int | None) -> list[dict[str, Tensor]]:
    """Gradients, counts and signal-to-noise ratios of some steps of SGD."""
    torch.manual_seed(0)
    model = Tiny().double()  # in single precision, rounding would hide changes
    source = torch.Generator().manual_seed(1)
    fg = ForwardGradient(model, loss_fn, make(model), allocator=allocator, seed=3, chunk=chunk)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 11, (POINTS, 5), generator=source)
        labels = torch.randint(0, CLASSES, (POINTS,), generator=source)
        index = torch.randperm(40, generator=source)[:POINTS]
        model.zero_grad()
        report = fg.estimate(tokens, labels, index=index)
        one = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        one |= {f"counts/{n}": c.double() for n, c in report.counts.items()}
        one |= {f"snr/{n}": torch.tensor(s) for n, s in report.snr.items()}
        one["loss"] = torch.tensor(report.loss)
        one["cost"] = torch.tensor(
            [*report.forward_equivalents.parts().values(), float(report.queries)]
        )[[0, 1, 2, 4]]
        found.append(one)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 1e-2 * p.grad / (1e-3 + p.grad.norm())
    return found


def run_tuner(estimator: Any, newest: int | None, allocator: Any) -> list[dict[str, Tensor]]:
    """Parameters of a black box after each step."""
    from flops.blackbox import Outputs, Tuner

    source = torch.Generator().manual_seed(2)
    weights = torch.randn(10, CLASSES, 12, generator=source)
    labels = torch.arange(10) % CLASSES

    def losses(logits: Tensor, points: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels[points], reduction="none")

    def objective(parameters: Tensor, points: Tensor) -> Tensor:
        logits = torch.einsum("qkd,qd->qk", weights[points], parameters.tanh())
        return torch.cat([losses(logits, points).unsqueeze(1), logits], 1)

    tuner = Tuner(
        torch.zeros(12),
        points=10,
        objective=objective,
        batch=4,
        queries=6,
        learning_rate=0.05,
        estimator=estimator,
        allocator=allocator,
        parts={"a": (2, 3), "b": (6,)},
        outputs=None if newest is None else Outputs(lambda a: a[:, 1:], losses, newest),
        seed=5,
    )
    return [
        {"theta": tuner.parameters, "loss": torch.tensor(report.loss)}
        for report in tuner.run(STEPS)
    ]


def tuner_cases() -> Iterator[tuple[str, Any, int | None, Any]]:
    """Name, estimator, derivatives of the outputs that are stored if these are used, allocator."""
    shaped = Shaping()
    for name, estimator in {
        "lr": LikelihoodRatio(sigma=0.01),
        "lr-antithetic": LikelihoodRatio(sigma=0.01, baseline="antithetic"),
        "lr-orthogonal": LikelihoodRatio(sigma=0.01, noise="orthogonal"),
        "lr-shaped": LikelihoodRatio(sigma=0.01, shaping=shaped),
        "es": ES(sigma=0.01),
        "es-shared": ES(sigma=0.01, shared=True),
        "es-shaped": ES(sigma=0.01, shaping=shaped),
        "spsa": SPSA(sigma=0.01),
        "spsa-shared": SPSA(sigma=0.01, shared=True),
    }.items():
        yield f"tuner/{name}", estimator, None, Equal()
    for unbiased in (False, True):
        estimator = LikelihoodRatio(sigma=0.01, shaping=Shaping(unbiased=unbiased))
        yield f"tuner/outputs-{unbiased}", estimator, 96, Equal()
        yield f"tuner/outputs-mean-{unbiased}", estimator, 0, Equal()
    yield "tuner/lr+gaussian", LikelihoodRatio(sigma=0.01), None, Gaussian()


def record(pattern: str) -> dict[str, Any]:
    """All cases whose names match."""
    found: dict[str, Any] = {}
    for name, make, allocator, _ in engine_cases():
        for chunk in (None, 7):
            if fnmatch(full := f"{name}/chunk={chunk}", pattern):
                found[full] = run_engine(make, allocator, chunk)
    for name, estimator, newest, allocator in tuner_cases():
        if fnmatch(name, pattern):
            found[name] = run_tuner(estimator, newest, allocator)
    return found


def compare(before: dict[str, Any], after: dict[str, Any], most: float) -> bool:
    """Print the largest relative difference of each case; whether all are within ``most``."""
    good = True
    for name in sorted(after):
        if name not in before:
            print(f"{name}: not in the first recording")
            good = False
            continue
        worst, where = 0.0, ""
        for step, (a, b) in enumerate(zip(before[name], after[name], strict=True)):
            if a.keys() != b.keys():
                print(f"{name}: step {step} has other entries: {sorted(a.keys() ^ b.keys())}")
                good = False
            for key in a.keys() & b.keys():
                x, y = a[key].double(), b[key].double()
                same = x.isinf() & (x == y)
                x, y = x[~same], y[~same]
                scale = max(float(x.norm()), 1e-12)
                difference = float((x - y).norm()) / scale
                if not difference <= worst:
                    worst, where = difference, f"step {step}, {key}"
        if not worst <= most:
            good = False
        print(f"{'  ' if worst <= most else '! '}{name}: {worst:.1e} {where}")
    return good


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--most", type=float, default=1e-4, help="largest relative difference")
    parser.add_argument("--cases", default="*", help="pattern of the names of the cases")
    options = parser.parse_args()
    if options.action == "record":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(record(options.cases), options.files[0])
        return
    before, after = (torch.load(f, weights_only=True) for f in options.files)
    if not compare(before, after, options.most):
        sys.exit("the recordings differ")


if __name__ == "__main__":
    main()
