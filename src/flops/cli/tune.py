"""`flops tune`: the command."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from rich.console import Console

from flops.optional import require
from flops.tasks.prompts.config import TuneConfig


@dataclass(frozen=True)
class Tune(TuneConfig):
    """Tune prompts of a frozen vision-language model through its service, without its weights.

    Without options: starts the bundled tiny CLIP as a service on a free port of this machine, and
    tunes its prompts on hazy images of garments, 16 per class. With a url, it uses a running
    service.

    Every response is on disk before it is used. A run that was interrupted in any way continues
    with the same command: nothing is charged twice, and the final prompts are the same (on another
    machine: up to rounding). Step sizes are chosen on the validation images with the first seed;
    the test images are evaluated once, with the prompts of the best validation loss.

    For example:

    $ flops tune
    $ flops tune --methods manual lr cma-es --step-sizes 0.03 0.1 0.3 --seeds 5 --workers 2
    $ flops tune --budget 20000 --price 0.5    # a hard cap, and its price
    $ API_KEY=secret flops tune --url https://models.example.org --api-key-env API_KEY
    $ flops tune --preset paper --model openai/clip-vit-base-patch32 --data food101
    """

    def run(self) -> None:
        """Tune, print and write."""
        config = self.filled()
        needed = ["httpx", "pydantic", "tenacity"]
        if config.url is None:  # for the local service
            needed += ["transformers", "fastapi", "uvicorn", "cachetools", "prometheus_client"]
        for module in needed:
            require(module, "blackbox")
        if "cma-es" in (config.methods or ()):  # early, not after hours
            require("cma", "cma")
        from flops.tasks.prompts.campaign import run_campaign

        try:
            run_campaign(config, Console())
        except KeyboardInterrupt:
            again = "flops " + shlex.join(sys.argv[1:])
            sys.exit(f"stopped; no evaluation is lost. Continue with: {again}")
