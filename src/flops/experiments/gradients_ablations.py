"""The ablations of the study of gradients: settings and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flops.experiments.cells import Result
from flops.experiments.gradients_tables import NOTE, stage_names
from flops.experiments.gradients_thirds import Thirds
from flops.report.intervals import Interval, interval, paired
from flops.report.table import Sheet

Measured = Sequence[tuple[Thirds, Result]]
SIGMAS = (1e-3, 1.0)  # a small one, and one at which curvature matters
FEW = 2  # batches after which the kernel may still matter


@dataclass(frozen=True)
class Ablation:
    """An ablation.

    Attributes:
        title: Title of its table and figure.
        question: Header of the first column: what the rows differ in.
        options: Maps the numbers of training batches of allocators and shaped noise to the settings
            of the rows, at every stage.
        label: Name of a row.
        reference: Name of the reference row.
        compare: Changes of the settings that turn a row into its reference.
        figure: Group and bar of a row in the figure; None for no figure.
    """

    title: str
    question: str
    options: Callable[[int, int], Sequence[Mapping[str, Any]]]
    label: Callable[[Thirds], str]
    reference: str
    compare: Mapping[str, Any]
    figure: Callable[[Thirds], tuple[str, str]] | None = None


def _noise(settings: Thirds) -> str:
    return "shaped" if settings.shaped else "isotropic"


def _kernel(settings: Thirds) -> str:
    return "full kernel" if settings.allocator == "gaussian" else "diagonal"


ABLATIONS: dict[str, Ablation] = {
    "kernel": Ablation(
        "The Gaussian allocator with its kernel, and with a diagonal covariance",
        "covariance, training batches",
        lambda warm, learn: [
            {"allocator": allocator, "warm": seen}
            for seen in sorted({min(FEW, warm), warm})
            for allocator in ("diagonal", "gaussian")
        ],
        lambda s: f"{_kernel(s)}, {s.warm}",
        "diagonal",
        {"allocator": "diagonal"},
    ),
    "targets": Ablation(
        "Targets and noise",
        "targets and noise",
        lambda warm, learn: [
            {"targets": targets, "shaped": shaped, "warm": learn}
            for targets in ("leaf", "block", "stage")  # the slowest first, to balance the workers
            for shaped in (False, True)
        ],
        lambda s: f"{s.targets}, {_noise(s)}",
        "leaf, isotropic",
        {"targets": "leaf", "shaped": False},
        lambda s: (s.targets, f"{_noise(s)} noise"),
    ),
    "baselines": Ablation(
        "Baselines",
        "baseline",
        lambda warm, learn: [
            {"baseline": baseline, "sigma": sigma}
            for sigma in SIGMAS
            for baseline in ("clean", "antithetic", "none")
        ],
        lambda s: f"{s.baseline}, sigma {s.sigma:g}",
        "clean",
        {"baseline": "clean"},
        lambda s: (f"sigma {s.sigma:g}", s.baseline),
    ),
}


def over_thirds(result: Result) -> list[float]:
    """Mean cosine over the thirds, per repeat."""
    return [sum(v) / len(v) for v in zip(*result["cosine"].values(), strict=True)]


def ablation_sheet(ablation: Ablation, found: Measured) -> Sheet:
    """Cosines by third, their mean, and its paired difference to the reference."""
    settings, result = found[0]
    names, known = stage_names(s.steps for s, _ in found), dict(found)
    rows = []
    for one, own in found:
        other = _changed(one, ablation.compare)
        difference = ""
        if other != one and other in known:
            difference = paired(over_thirds(own), over_thirds(known[other])).shown(sign=True)
        thirds = [interval(values).shown() for values in own["cosine"].values()]
        mean = interval(over_thirds(own)).shown()
        rows.append([names[one.steps], ablation.label(one), *thirds, mean, difference])
    return Sheet(
        ablation.title,
        ["stage", ablation.question, *result["cosine"], "mean", f"minus {ablation.reference}"],
        rows,
        NOTE.format(settings.repeats)
        + f"; likelihood ratio, {settings.queries} queries per point and third, cosine over all "
        "parameters of a third. Differences are paired by repeat, at the same stage"
        + (" and sigma." if ablation.question == "baseline" else "."),
    )


def ablation_bars(
    ablation: Ablation, found: Measured
) -> dict[str, dict[str, dict[str, Interval]]] | None:
    """Panels for `flops.report.grid.plot_bars`, by stage; None without a figure."""
    if ablation.figure is None:
        return None
    names = stage_names(s.steps for s, _ in found)
    panels: dict[str, dict[str, dict[str, Interval]]] = {}
    for settings, result in found:
        group, bar = ablation.figure(settings)
        place = panels.setdefault(names[settings.steps], {}).setdefault(group, {})
        place[bar] = interval(over_thirds(result))
    return panels


def ablation_records(found: Measured) -> list[Mapping[str, Any]]:
    """Every measured cosine, one per line, for the CSV file."""
    return [
        {
            "steps": s.steps,
            "targets": s.targets,
            "noise": _noise(s),
            "baseline": s.baseline,
            "allocator": s.allocator,
            "sigma": s.sigma,
            "warm": s.warm,
            "queries": s.queries,
            "third": third,
            "repeat": repeat,
            "cosine": value,
        }
        for s, result in found
        for third, values in result["cosine"].items()
        for repeat, value in enumerate(values)
    ]


def _changed(settings: Thirds, changes: Mapping[str, Any]) -> Thirds:
    return Thirds(**{**vars(settings), **changes})
