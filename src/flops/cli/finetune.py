"""`flops finetune`: train an image classifier with forward passes, into a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from flops.cli.training import given_settings, print_settings, resumed, run_training
from flops.tasks.classification.config import PRESETS, FinetuneConfig, FinetunePreset


@dataclass(frozen=True)
class Finetune:
    """Fine-tune an image classifier with forward passes only.

    Without options: the bundled vision transformer on handwritten digits with shaped-lr, in a few
    minutes and without a download. Everything goes into a run directory: settings, metrics,
    checkpoints, plots, the trained model. A run that was stopped, in whatever way, goes on with
    the resume option.

    For example:

    $ flops finetune
    $ flops finetune --method ops-lr --epochs 4 --output runs/ops
    $ flops finetune --resume runs/ops
    $ flops finetune --data photos --model google/vit-base-patch16-224-in21k --preset vit-base
    $ flops finetune --epochs None --budget 200000  # stop by cost
    $ flops finetune --print-config > run.json  # all settings, to be edited
    $ flops finetune --config run.json --seed 1
    $ torchrun --nproc-per-node 2 -m flops finetune  # two processes share the queries
    """

    preset: FinetunePreset | None = None
    """Settings that go together: those of the paper for ViT-base and ViT-large, or tiny. What the
    configuration file or another option says counts more."""
    config: Path | None = None
    """File with settings, .json or .toml; names are those of the options, with _ for -."""
    resume: Path | None = None
    """Continue the run in this folder; its settings stay what they are. With the same machine,
    library versions and number of threads it ends with the same bits as an unbroken run, else it
    says what changed, and differs by rounding."""
    checkpoint: Literal["last", "previous"] = "last"
    """Where to continue: the last that is whole, or the one before."""
    print_config: bool = False
    """Print all settings as JSON and stop."""
    settings: tyro.conf.OmitArgPrefixes[FinetuneConfig] = field(default_factory=FinetuneConfig)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Finetune:
        """What holds unless the command line says otherwise; errors as `given_settings`."""
        return cls(settings=given_settings(arguments, FinetuneConfig(), PRESETS))

    def run(self) -> None:
        """Train, and say where the results are."""
        if self.print_config:
            print_settings(self.settings)
            return
        settings = self.settings
        if self.resume is not None:
            settings = resumed(settings, self.resume, (self.config, self.preset))
        run_training(settings, "finetune", self.resume is not None, self.checkpoint)


def subcommand(arguments: Sequence[str]) -> Any:
    """The command's type for tyro, with the defaults that these arguments ask for."""
    wanted = len(arguments) > 0 and arguments[0] == "finetune"
    default = Finetune.defaults(arguments[1:]) if wanted else Finetune()
    return tyro.conf.subcommand("finetune", default=default)
