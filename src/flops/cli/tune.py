"""`flops tune`: tune prompts of a model that only answers over HTTP; the paper's section 5.2."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from flops.errors import FlopsError
from flops.tasks.prompts.names import TUNE_METHODS, TuneMethod

DEFAULT: tuple[TuneMethod, ...] = ("manual", "lr", "ops-lr", "shaped-lr", "cma-es", "bp")


@dataclass(frozen=True)
class Tune:
    """Tune prompts of a frozen vision-language model through its service, without its weights.

    Without options: starts the bundled tiny CLIP as a service on a free port of this machine, and
    tunes its prompts to hazy photos of garments, 16 of each class. With a url, a service elsewhere.

    Every answer is on the disk before it is used. A run that was stopped, in whatever way, goes on
    with the same command: nothing that was paid for is paid for again, and it ends with the same
    prompts (on another machine: up to rounding). Step sizes are chosen on the validation images of
    the first seed; the test images are looked at once, with the prompts that validate best.

    For example:

    $ flops tune
    $ flops tune --methods manual lr cma-es --step-sizes 0.03 0.1 0.3 --seeds 5 --workers 2
    $ flops tune --budget 20000 --price 0.5    # a hard cap, and what it costs
    $ API_KEY=secret flops tune --url https://models.example.org --api-key-env API_KEY
    $ flops tune --preset paper --model openai/clip-vit-base-patch32 --data food101
    """

    methods: tuple[TuneMethod, ...] | None = None
    """Which ones, in the order of the table; None for manual, lr, ops-lr, shaped-lr, cma-es and,
    where the service is this machine's own, bp. All: manual, bp, lr, ops-lr, spsa, ops-spsa,
    shaped-lr, cma-es."""
    preset: Literal["tiny", "paper"] = "tiny"
    """Sizes that go together: tiny for the bundled model, or those of the paper (10 image and 12
    text prompt vectors of 500 dimensions each, 60 queries, learning rate 1e-4, 50 epochs). What
    another option says counts more."""
    seeds: int = 1
    """Runs of each method."""
    step_sizes: tuple[float, ...] | None = None
    """Learning rates to choose from on the first seed; for cma-es first standard deviations."""
    sigma: float | None = None
    """Noise scale, where the prompts' numbers start as N(0, 0.3^2)."""
    queries: float | None = None
    """Mean queries per point and step."""
    batch: int = 64
    """Points of a step."""
    epochs: int | None = None
    """At most."""
    patience: int = 10
    """Epochs without a better validation loss after which a run stops; 0 for never."""
    budget: int | None = None
    """Most queries of a run, validation and test included: a hard cap. None is what the epochs
    take."""
    price: float | None = None
    """Price of 1,000 queries, in whatever money; adds a column."""
    text_tokens: int = 12
    """Prompt vectors before the class text."""
    image_tokens: int = 10
    """Prompt vectors behind the patches."""
    dimensions: int | None = None
    """d_T + d_I: half of them are the numbers of a text prompt vector, half of an image one."""
    single: bool = False
    """One vector of numbers for each modality, `dimensions` in all, instead of one for each
    prompt vector."""
    shots: int = 16
    """Training images of a class."""
    data: str = "fashion-shots"
    """The embedded shots, or what `flops finetune --data` takes."""
    model: str = "tiny-clip"
    """Of the service that is started, and of bp: the bundled one, an id of the hub, or a folder."""
    template: str = "a photo of a {}."
    """Class text with {} for the name, of the service that is started."""
    url: str | None = None
    """A service elsewhere; None starts one."""
    api_key_env: str | None = None
    """Environment variable with the service's key."""
    api_key_file: Path | None = None
    """File with that key, instead."""
    timeout: float = 60.0
    """Seconds to wait for an answer before asking again."""
    concurrency: int = 4
    """Requests at a time."""
    part: int = 128
    """Rows of a request."""
    workers: int = 1
    """Runs at a time; without a url each has a service of its own."""
    limit: int | None = None
    """Most test images, for a quick look."""
    output: Path = Path("runs/tune")
    """Folder of journals, prompts, results and the table."""

    def run(self) -> None:
        """Tune, print and write."""
        from flops.optional import require

        chosen = self._checked()
        assert chosen.methods is not None
        own = ("transformers", "fastapi", "uvicorn") if self.url is None else ()  # of the service
        for module in ("httpx", "pydantic", *own):
            require(module, "blackbox")
        if "cma-es" in chosen.methods:  # not after hours
            require("cma", "cma")
        if chosen.url is not None:
            from flops.serve.client import first_contact

            first_contact(chosen.url, chosen.api_key())
        from flops.tasks.prompts.campaign import Campaign
        from flops.tasks.prompts.report import differences, plot, table

        console = Console()
        campaign = Campaign(chosen, console)
        try:
            results = campaign.run()
        except KeyboardInterrupt:
            again = "flops " + shlex.join(sys.argv[1:])
            sys.exit(f"stopped; nothing that was paid for is lost. Continue with: {again}")
        (self.output / "results.json").write_text(
            json.dumps(results, indent=1) + "\n", encoding="utf-8"
        )
        sheets = [table(results, chosen.methods, self.price), differences(results)]
        written = [sheet.markdown() for sheet in sheets if sheet is not None]
        (self.output / "table.md").write_text("\n".join(written), "utf-8")
        for sheet in sheets:
            if sheet is not None:
                console.print(sheet.table())
        try:
            shown = plot(self.output, results)
            console.print(f"the plot is {shown}", markup=False, soft_wrap=True)
        except ImportError as error:
            console.print(f"no plot was drawn: {error}", markup=False)
        console.print(f"results are in {self.output}", markup=False, soft_wrap=True)

    def _checked(self) -> Tune:
        """With the preset filled in."""
        values = {
            "tiny": {"queries": 20.0, "epochs": 20, "dimensions": 64, "sigma": 0.01},
            "paper": {"queries": 60.0, "epochs": 50, "dimensions": 1000, "sigma": 0.01},
        }[self.preset]
        sizes: Sequence[float] = (0.1,) if self.preset == "tiny" else (1e-4,)
        filled = {n: v for n, v in values.items() if getattr(self, n) is None}
        chosen = replace(self, **filled)  # type: ignore[arg-type]
        if chosen.url is not None:
            from flops.serve.credentials import checked_url

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
                raise FlopsError(f"--{name.replace('_', '-')} names one twice: {values_given}")
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
            raise FlopsError("--step-sizes must be positive, and there must be one")
        if chosen.text_tokens + chosen.image_tokens < 1:
            raise FlopsError("there must be a text or an image prompt vector to tune")
        if chosen.sigma is not None and chosen.sigma <= 0:
            raise FlopsError(f"--sigma must be positive, not {chosen.sigma}")
        return chosen

    def api_key(self) -> str | None:
        """From the environment or a file."""
        from flops.serve.credentials import read_key

        return read_key(self.api_key_env, self.api_key_file)
