"""The command line: `flops finetune`, `align`, `tune`, `serve`, `compare`, `diagnose`, `study`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from torch import Tensor

from flops.cli.align import Align
from flops.cli.align import subcommand as align_subcommand
from flops.cli.compare import Compare
from flops.cli.finetune import Finetune, subcommand
from flops.cli.serve import Serve
from flops.cli.study import Study
from flops.cli.tune import Tune
from flops.engine.forward_gradient import ForwardGradient
from flops.engine.groups import Group
from flops.errors import FlopsError
from flops.estimators import ES, SPSA, Estimator, Exact, LikelihoodRatio
from flops.optional import install_command
from flops.subspace.config import Shaping
from flops.training.launch import launched

if TYPE_CHECKING:
    from flops.tasks.classification.bundled import Split


@dataclass(frozen=True)
class Diagnose:
    """How good are the gradient estimates, group by group? On the bundled ViT and the digits.

    Prints, for every group and allocator, the cosine to the exact gradient (mean and spread over
    repeats), J against the optimal allocation, the signal-to-noise ratio and the cost; and a sweep
    over sigma with the recommended one. Use `flops.diagnose` for a model and data of your own.

    For example:

    $ flops diagnose
    $ flops diagnose --steps 150 --targets stage --queries 8
    $ flops diagnose --steps 150 --targets stage --shaping
    $ flops diagnose --estimator spsa --json > spsa.json
    """

    estimator: Literal["lr", "spsa", "es"] = "lr"
    """Estimator of the layers: likelihood ratio, SPSA or ES."""
    targets: Literal["leaf", "block", "stage"] = "block"
    """What likelihood ratio perturbs."""
    shaping: bool = False
    """Shape the noise of likelihood ratio by what the queries of 40 other batches showed."""
    sigma: float = 1e-3
    """Noise scale."""
    queries: int = 20
    """Mean queries per point and group."""
    batch: int = 64
    """Points in the batch."""
    steps: int = 0
    """Steps of backpropagation on the digits before measuring: 0 is a fresh head, 150 is near
    convergence."""
    repeats: int = 8
    """Estimates per group and allocator."""
    seed: int = 0
    """Key of the noise."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        """Measure and print."""
        from flops.diagnostics.diagnose import diagnose
        from flops.diagnostics.table import diagnosis_tables
        from flops.experiments.starts import finetuned
        from flops.tasks.classification.bundled import bundled_vit, digits

        if self.shaping and self.estimator != "lr":
            raise FlopsError(
                "--shaping shapes likelihood ratio; the layers are too large for others"
            )
        if self.batch < 2 or self.repeats < 1 or self.queries < 1 or self.steps < 0:
            raise FlopsError("batch >= 2, repeats >= 1, queries >= 1 and steps >= 0 are needed")
        train = digits().train
        model = finetuned(bundled_vit(), train, self.steps)
        rows = slice(0, min(self.batch, len(train)))
        console = Console(stderr=self.json)
        groups = self._groups(model)
        with console.status("measuring") if console.is_terminal else _silence():
            found = diagnose(
                model,
                _loss,
                train.images[rows],
                train.labels[rows],
                groups=groups,
                repeats=self.repeats,
                seed=self.seed,
                state=self._learned(model, groups, train) if self.shaping else None,
            )
        if self.json:
            sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
            return
        for table in diagnosis_tables(found):
            console.print(table)

    def _groups(self, model: Any) -> list[Group]:
        layers = list(model.vit.layers)
        names = ("first third", "middle third", "last third")
        groups = [
            Group(layers[2 * i : 2 * i + 2], self._estimator(), self.queries, name=names[i])
            for i in range(3)
        ]
        rest = [model.vit.embeddings, model.vit.layernorm, model.classifier]
        return [*groups, Group(rest, Exact(), name="rest")]

    def _learned(self, model: Any, groups: list[Group], train: Split) -> dict[str, Any]:
        """State of an engine that has seen other batches than the one that is diagnosed."""
        fg = ForwardGradient(model, _loss, groups, seed=self.seed)
        others = torch.arange(self.batch, len(train))
        if len(others) < 2:
            raise FlopsError(
                f"--shaping learns from the other points: none are left of {len(train)}"
            )
        source = torch.Generator().manual_seed(self.seed)
        for _ in range(40):
            rows = others[torch.randperm(len(others), generator=source)[: self.batch]]
            fg.estimate(train.images[rows], train.labels[rows], index=rows)
        model.zero_grad()
        return fg.state_dict()

    def _estimator(self) -> Estimator:
        if self.estimator == "spsa":
            return SPSA(self.sigma)
        if self.estimator == "es":
            return ES(self.sigma)
        return LikelihoodRatio(
            self.sigma, self.targets, shaping=Shaping() if self.shaping else None
        )


def _commands(arguments: list[str]) -> Any:
    """All commands; settings of files and presets are defaults that the arguments change."""
    return (
        Annotated[Finetune, subcommand(arguments)]
        | Annotated[Align, align_subcommand(arguments)]
        | Annotated[Compare, tyro.conf.subcommand("compare")]
        | Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
        | Annotated[Study, tyro.conf.subcommand("study")]
        | Annotated[Serve, tyro.conf.subcommand("serve")]
        | Annotated[Tune, tyro.conf.subcommand("tune")]
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `flops` and of `python -m flops`."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        command: Any = tyro.cli(
            _commands(given),
            prog="flops",
            description="Train neural networks with forward passes only.",
            args=given,
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
        if launched() and not isinstance(command, Finetune | Align):
            raise FlopsError(
                "torchrun is for `flops finetune` and `flops align`; start this without it"
            )
        command.run()
    except FlopsError as error:
        rank = f" (process {os.environ['RANK']})" if launched() else ""
        sys.exit(f"flops{rank}: {error}")
    except ImportError as error:  # of a package that imports others when it is used
        if (error.name or "").partition(".")[0] == "flops":
            raise
        said = " ".join(str(error).split())
        sys.exit(
            f"flops: a package is missing ({said}); install all with: {install_command('all')}"
        )
    except KeyboardInterrupt:
        sys.exit("flops: stopped")


class _silence:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets, reduction="none")
