"""`flops tune`: the command. What imports torch is imported after the address is checked."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich.console import Console

from flops.errors import FlopsError
from flops.optional import require
from flops.tasks.prompts.config import TuneConfig
from flops.tasks.tuning.config import CampaignConfig
from flops.tasks.tuning.function_config import FunctionConfig, FunctionOptions


@dataclass(frozen=True)
class Tune(TuneConfig, FunctionOptions):
    """Tune what only answers: prompts behind a service, a Python function, or any program.

    Without options: starts the bundled tiny CLIP as a service on a free port of this machine, and
    tunes its prompts on hazy images of garments, 16 per class. With a url, it uses a running
    service. With --objective or --command it tunes the parameters of a function or program.

    Every response is on disk before it is used. A run that was interrupted in any way continues
    with the same command: nothing is charged twice, and the final parameters are the same (on
    another machine: up to rounding). Epochs, patience and budget may change: the run then goes on.
    Step sizes are chosen on the validation points with the first seed; the test points are
    evaluated once, with the parameters of the best validation loss.

    For example:

    $ flops tune
    $ flops tune --methods manual lr cma-es --step-sizes 0.03 0.1 0.3 --seeds 5 --workers 2
    $ flops tune --budget 20000 --price 0.5    # a hard cap, and its price
    $ API_KEY=secret flops tune --url https://models.example.org --api-key-env API_KEY
    $ flops tune --preset paper --model openai/clip-vit-base-patch32 --data food101
    $ flops tune --objective simulator:losses --dimensions 8 --points 20 --budget 20000
    $ flops tune --command 'python simulate.py {input}' --start 0.5,0.5,1 --executor processes
    """

    def run(self) -> None:
        """Tune, print and write."""
        console = Console()
        try:
            if self.objective is not None or self.command is not None:
                self._functions(console)
            else:
                self._prompts(console)
        except KeyboardInterrupt:
            again = "flops " + shlex.join(sys.argv[1:])
            sys.exit(f"stopped; no evaluation is lost. Continue with: {again}")

    def _functions(self, console: Console) -> None:
        own = {f.name for f in (*fields(CampaignConfig), *fields(FunctionOptions))}
        for field in fields(TuneConfig):
            used = field.name in own or field.name == "dimensions"
            if not used and getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                given = "--objective" if self.command is None else "--command"
                raise FlopsError(f"{option} is for prompts and has no meaning with {given}")
        config = FunctionConfig.of(self)
        if "cma-es" in (config.methods or ()):  # early, not after hours
            require("cma", "cma")
        from flops.tasks.tuning.campaign import run_campaign
        from flops.tasks.tuning.functions import FunctionProblem

        run_campaign(FunctionProblem(config), config, console)

    def _prompts(self, console: Console) -> None:
        for field in fields(FunctionOptions):
            if getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise FlopsError(f"{option} needs --objective or --command: prompts have their own")
        config = self.filled()
        for module in ("httpx", "pydantic", "tenacity"):
            require(module, "blackbox")
        if config.url is not None:  # before imports that take seconds
            from flops.serve.check import check_service

            check_service(config.url, config.api_key())
        from flops.training.device import find_device

        find_device(config.device)
        if config.url is None:  # for the local service
            for module in ("transformers", "fastapi", "uvicorn", "cachetools", "prometheus_client"):
                require(module, "blackbox")
        if "cma-es" in (config.methods or ()):  # early, not after hours
            require("cma", "cma")
        from flops.tasks.prompts.problem import PromptProblem
        from flops.tasks.tuning.campaign import run_campaign

        run_campaign(PromptProblem(config, console), config, console)


def command(arguments: Sequence[str]) -> tuple[type[Tune], None]:
    """The command's type for tyro."""
    return Tune, None
