"""Configuration of `flops tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flops.errors import FlopsError
from flops.serve.credentials import checked_url, read_key
from flops.tasks.prompts.names import TUNE_METHODS, TuneMethod

DEFAULT: tuple[TuneMethod, ...] = ("manual", "lr", "ops-lr", "shaped-lr", "cma-es", "bp")


@dataclass(frozen=True)
class TuneConfig:
    """Methods, sizes, data and service of prompt tuning."""

    methods: tuple[TuneMethod, ...] | None = None
    """Methods, in the order of the table; None for manual, lr, ops-lr, shaped-lr, cma-es and,
    if the command starts the service, bp. All: manual, bp, lr, ops-lr, spsa, ops-spsa,
    shaped-lr, cma-es."""
    preset: Literal["tiny", "paper"] = "tiny"
    """Sizes: tiny for the bundled model, or those of the paper (10 image and 12 text prompt
    vectors of 500 dimensions each, 60 queries, learning rate 1e-4, 50 epochs). Options given
    explicitly override them."""
    seeds: int = 1
    """Number of seeds per method."""
    step_sizes: tuple[float, ...] | None = None
    """Learning rates to choose from on the first seed; for cma-es initial standard deviations."""
    sigma: float | None = None
    """Noise scale; parameters are initialised as N(0, 0.3^2)."""
    queries: float | None = None
    """Mean queries per point and step."""
    batch: int = 64
    """Points per step."""
    epochs: int | None = None
    """Largest number of epochs."""
    patience: int = 10
    """Stop after this many epochs without a better validation loss; 0 never stops early."""
    budget: int | None = None
    """Hard cap on the queries of a run, validation and test included; None for no limit but the
    epochs."""
    price: float | None = None
    """Price of 1,000 queries, in any currency; adds a column."""
    text_tokens: int = 12
    """Text prompt vectors, before the class text."""
    image_tokens: int = 10
    """Image prompt vectors, after the patches."""
    dimensions: int | None = None
    """d_T + d_I: half are parameters of a text prompt vector, half of an image prompt vector."""
    single: bool = False
    """One parameter vector per modality, `dimensions` in total, instead of one per prompt
    vector."""
    shots: int = 16
    """Training images per class."""
    data: str = "fashion-shots"
    """The bundled shots, or anything that `flops finetune --data` accepts."""
    model: str = "tiny-clip"
    """Model of the service that is started, and of bp: bundled, a hub id, or a folder."""
    template: str = "a photo of a {}."
    """Class text with {} for the name, for the service that is started."""
    url: str | None = None
    """Address of a running service; None starts one."""
    api_key_env: str | None = None
    """Environment variable with the service's API key."""
    api_key_file: Path | None = None
    """File with the service's API key."""
    timeout: float = 60.0
    """Seconds to wait for a response before a retry."""
    concurrency: int = 4
    """Requests in flight at a time."""
    part: int = 128
    """Rows per request."""
    workers: int = 1
    """Runs at a time; without a url each worker has its own service."""
    limit: int | None = None
    """Largest number of test images, for quick runs."""
    output: Path = Path("runs/tune")
    """Folder of journals, prompts, results and the table."""

    def filled(self) -> TuneConfig:
        """Fill in the preset and validate.

        Raises:
            FlopsError: Names the option to change.
        """
        values = {
            "tiny": {"queries": 20.0, "epochs": 20, "dimensions": 64, "sigma": 0.01},
            "paper": {"queries": 60.0, "epochs": 50, "dimensions": 1000, "sigma": 0.01},
        }[self.preset]
        sizes: Sequence[float] = (0.1,) if self.preset == "tiny" else (1e-4,)
        filled = {n: v for n, v in values.items() if getattr(self, n) is None}
        chosen = replace(self, **filled)  # type: ignore[arg-type]
        if chosen.url is not None:
            chosen = replace(chosen, url=checked_url(chosen.url))
        if chosen.step_sizes is None:
            chosen = replace(chosen, step_sizes=tuple(sizes))
        if chosen.methods is None:
            some = DEFAULT if chosen.url is None else DEFAULT[:-1]
            chosen = replace(chosen, methods=some)
        assert chosen.methods is not None
        if not chosen.methods or set(chosen.methods) - set(TUNE_METHODS):
            raise FlopsError(f"--methods must be some of {', '.join(TUNE_METHODS)}")
        for name in ("methods", "step_sizes"):
            values_given = getattr(chosen, name)
            if len(set(values_given)) < len(values_given):
                raise FlopsError(
                    f"--{name.replace('_', '-')} contains a value twice: {values_given}"
                )
        least = {"seeds": 1, "batch": 1, "epochs": 1, "patience": 0, "shots": 1, "part": 1}
        least |= {"concurrency": 1, "workers": 1, "dimensions": 2, "queries": 1}
        least |= {"limit": 1, "budget": 1, "price": 0}
        for name, bound in least.items():
            given = getattr(chosen, name)
            if given is not None and given < bound:
                option = "--" + name.replace("_", "-")
                raise FlopsError(f"{option} must be at least {bound}, not {given}")
        pairs = [name for name in chosen.methods if "spsa" in name]
        if pairs and chosen.queries is not None and chosen.queries < 2:
            raise FlopsError(f"--queries must be at least 2 for {pairs[0]}, not {chosen.queries}")
        if chosen.timeout <= 0:
            raise FlopsError(f"--timeout must be positive, not {chosen.timeout}")
        if not chosen.step_sizes or min(chosen.step_sizes) <= 0:
            raise FlopsError("--step-sizes must be one or more positive numbers")
        if chosen.text_tokens + chosen.image_tokens < 1:
            raise FlopsError("need at least one text or image prompt vector to tune")
        if chosen.sigma is not None and chosen.sigma <= 0:
            raise FlopsError(f"--sigma must be positive, not {chosen.sigma}")
        return chosen

    def api_key(self) -> str | None:
        """Read the API key from the environment or a file."""
        return read_key(self.api_key_env, self.api_key_file)
