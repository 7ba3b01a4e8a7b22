"""Options of all runs of a `flops tune` command, whatever they tune."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from flops.errors import FlopsError, check_least
from flops.tasks.tuning.names import TuneMethod


@dataclass(frozen=True)
class CampaignConfig:
    """Methods, seeds, step sizes and limits of the runs of a command."""

    methods: tuple[TuneMethod, ...] | None = None
    """Methods, in the order of the table. For prompts: manual, bp, lr, ops-lr, spsa, ops-spsa,
    shaped-lr, cma-es; None for all but the spsa ones, with bp only if the command starts the
    service. For an objective: start (no step) in place of manual and bp; None for start and lr."""
    seeds: int = 1
    """Number of seeds per method."""
    step_sizes: tuple[float, ...] | None = None
    """Learning rates to choose from on the first seed; for cma-es initial standard deviations.
    None for the preset of prompts; for an objective, each run searches for its own (cma-es: ten
    times sigma)."""
    sigma: float | None = None
    """Noise scale; None for 0.01. Prompt parameters are initialised as N(0, 0.3^2)."""
    queries: float | None = None
    """Mean queries per point and step; None for 20 (60 in the preset paper)."""
    batch: int = 64
    """Points per step."""
    epochs: int | None = None
    """Largest number of epochs; None for 20 (50 in the preset paper), and for an objective for 100,
    or as many as the budget allows. More or fewer may be given when a run goes on."""
    patience: int = 10
    """Stop after this many epochs without a better validation loss; 0 never stops early."""
    budget: int | None = None
    """Hard cap on the queries of a run, validation and test included; None for no limit but the
    epochs. It may be raised or lowered when a run goes on."""
    price: float | None = None
    """Price of 1,000 queries, in any currency; adds a column."""
    timeout: float | None = None
    """Seconds to wait for a response before a retry; None for 60, and for an objective or a
    command for no limit."""
    concurrency: int | None = None
    """Requests in flight at a time; None for 4, and for a function in this process for 1."""
    part: int = 128
    """Rows per request."""
    workers: int = 1
    """Runs at a time; without a url each worker has its own service."""
    output: Path = Path("runs/tune")
    """Folder of journals, parameters, results and the table."""

    def check(self, allowed: tuple[TuneMethod, ...]) -> None:
        """Validate, after the defaults are filled in.

        Raises:
            FlopsError: Names the option to change.
        """
        methods, sizes = self.methods or (), self.step_sizes
        if not methods or set(methods) - set(allowed):
            raise FlopsError(f"--methods must be some of {', '.join(allowed)}")
        for name, values in (("methods", methods), ("step-sizes", sizes or ())):
            if len(set(values)) < len(values):
                raise FlopsError(f"--{name} contains a value twice: {values}")
        least = {"seeds": 1, "batch": 1, "epochs": 1, "patience": 0, "part": 1}
        least |= {"concurrency": 1, "workers": 1, "queries": 1, "budget": 1, "price": 0}
        check_least(least, self)
        pairs = [name for name in methods if "spsa" in name]
        if pairs and self.queries is not None and self.queries < 2:
            raise FlopsError(f"--queries must be at least 2 for {pairs[0]}, not {self.queries}")
        for name, value in (("timeout", self.timeout), ("sigma", self.sigma)):
            if value is not None and not 0 < value < math.inf:
                raise FlopsError(f"--{name} must be a positive number, not {value}")
        if sizes is not None and not (sizes and all(0 < size < math.inf for size in sizes)):
            raise FlopsError("--step-sizes must be one or more positive numbers")
