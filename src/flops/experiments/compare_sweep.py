"""The same small sweep for every method, on the validation split, with a separate seed.

Short runs of all settings, then full runs of the two best learning rates if they are close, since
the best rate for few steps may not be the best for many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flops.experiments.cells import Cell, run_cells
from flops.experiments.compare_methods import variant
from flops.experiments.compare_runs import (
    ComparisonRun,
    MethodComparison,
    describe,
    measure_sweep_run,
)

SWEEP_SEED = 1000  # never among the reported seeds
PARTS = {"sweep": "short runs of the sweep", "finals": "full runs of the sweep"}


@dataclass(frozen=True)
class Tried:
    """A setting and its validation accuracy at equal cost and at equal epochs (or steps).

    None if the run was too short or diverged.
    """

    learning_rate: float
    sigma: float
    cost: float | None
    epochs: float | None

    def score(self, by: Literal["cost", "epochs"]) -> tuple[float, float]:
        """Sort key; the other accuracy breaks ties."""
        cost, epochs = (-1.0 if x is None else x for x in (self.cost, self.epochs))
        return (cost, epochs) if by == "cost" else (epochs, cost)


@dataclass(frozen=True)
class Chosen:
    """The chosen settings of a method, and all results of the sweep.

    Attributes:
        learning_rate: The best at equal cost, with `sigma`.
        epochs_rate: The best at equal epochs (or steps), with `epochs_sigma`. A method with many
            more steps at equal cost needs another rate there.
        tried: Results of all short runs.
        finals: Results of the full runs.
    """

    learning_rate: float
    sigma: float
    epochs_rate: float
    epochs_sigma: float
    tried: tuple[Tried, ...] = ()
    finals: tuple[Tried, ...] = ()


def try_settings(
    study: MethodComparison,
    method: str,
    part: str,
    runs: Mapping[tuple[float, float], ComparisonRun],
) -> tuple[Tried, ...]:
    """Run, or load, some settings."""
    cells = [Cell(part, measure_sweep_run, run) for run in runs.values()]
    found = run_cells(cells, study.folder, study.workers, study.console, f"{part} {method}")
    scores = [
        [one.get(mark, {}).get("accuracy") for mark in ("at_budget", study.at_length)]
        for one in found
    ]
    return tuple(Tried(*pair, *score) for pair, score in zip(runs, scores, strict=True))


def settings_of(study: MethodComparison, method: str) -> list[tuple[float, float]]:
    """Learning rates and sigmas to try."""
    kind = variant(method)
    sigmas: Sequence[float] = study.sigmas if kind.has_sigma else study.sigmas[-1:]
    rates = study.learning_rates if kind.name is not None else study.learning_rates[:1]
    return list(itertools.product(rates, sigmas))


def short_runs(study: MethodComparison, method: str) -> dict[tuple[float, float], ComparisonRun]:
    """Short runs of all settings.

    Their budget is proportional to that of the reported runs: cheap methods take more epochs.
    """
    share = (study.budget or 1.0) * study.sweep_length / study.length
    return {
        pair: study.run(method, *pair, seed=SWEEP_SEED, length=study.sweep_length, budget=share)
        for pair in settings_of(study, method)
    }


def full_runs(
    study: MethodComparison, method: str, tried: Sequence[Tried]
) -> dict[tuple[float, float], ComparisonRun]:
    """Full runs of the best settings."""
    best = {by: _best_rates(tried, by, study.margin) for by in ("cost", "epochs")}
    final = {pair: study.run(method, *pair, seed=SWEEP_SEED) for pair in best["cost"]}
    for pair in best["epochs"]:
        if pair not in final:  # stops after the epochs
            final[pair] = study.run(method, *pair, seed=SWEEP_SEED, budget=None)
    return final


def sweep(
    study: MethodComparison,
    method: str,
    tries: Callable[..., tuple[Tried, ...]] = try_settings,
) -> Chosen:
    """Choose the best setting.

    Args:
        study: The comparison.
        method: The method.
        tries: Evaluates settings.
    """
    pairs = settings_of(study, method)
    if len(pairs) == 1:
        return Chosen(*pairs[0], *pairs[0])
    tried = tries(study, method, "sweep", short_runs(study, method))
    final = full_runs(study, method, tried)
    if len(final) == 1:
        return Chosen(*next(iter(final)), *next(iter(final)), tried)
    finals = tries(study, method, "finals", final)
    cost, epochs = (max(finals, key=lambda t: t.score(by)) for by in ("cost", "epochs"))
    return Chosen(cost.learning_rate, cost.sigma, epochs.learning_rate, epochs.sigma, tried, finals)


def run_sweeps(study: MethodComparison) -> None:
    """Run the sweeps of all methods, so that no worker waits for the last run of a method."""
    swept = [m for m in study.methods if len(settings_of(study, m)) > 1]
    short = {method: short_runs(study, method) for method in swept}
    _run(study, "sweep", short)
    final = {m: full_runs(study, m, try_settings(study, m, "sweep", short[m])) for m in swept}
    _run(study, "finals", {method: runs for method, runs in final.items() if len(runs) > 1})


def _run(
    study: MethodComparison,
    part: str,
    runs: Mapping[str, Mapping[tuple[float, float], ComparisonRun]],
) -> None:
    cells = [Cell(part, measure_sweep_run, run) for some in runs.values() for run in some.values()]
    run_cells(cells, study.folder, study.workers, study.console, PARTS[part], describe=describe)


def _best_rates(
    tried: Sequence[Tried], by: Literal["cost", "epochs"], margin: float
) -> list[tuple[float, float]]:
    """The best setting, and one with another learning rate if it is within a margin."""
    order = sorted(tried, key=lambda t: t.score(by), reverse=True)
    best = order[0]
    close = [
        t
        for t in order
        if t.learning_rate != best.learning_rate and t.score(by)[0] > best.score(by)[0] - margin
    ]
    return [(t.learning_rate, t.sigma) for t in [best, *close[:1]]]
