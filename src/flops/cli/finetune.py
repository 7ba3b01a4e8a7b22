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
    minutes and without a download. The run directory holds settings, metrics, checkpoints, plots
    and the trained model. A run that was interrupted in any way continues with the resume option.

    For example:

    $ flops finetune
    $ flops finetune --method ops-lr --epochs 4 --output runs/ops
    $ flops finetune --resume runs/ops
    $ flops finetune --data photos --model google/vit-base-patch16-224-in21k --preset vit-base
    $ flops finetune --epochs None --budget 200000  # stop by cost
    $ flops finetune --print-config > run.json  # all settings, for editing
    $ flops finetune --config run.json --seed 1
    $ torchrun --nproc-per-node 2 -m flops finetune  # two processes share the queries
    """

    preset: FinetunePreset | None = None
    """Preset of settings: those of the paper for ViT-base and ViT-large, or tiny. The configuration
    file and other options override it."""
    config: Path | None = None
    """File with settings, .json or .toml; names are those of the options, with _ for -."""
    resume: Path | None = None
    """Resume the run in this folder, with its settings. On the same machine, with the same library
    versions and number of threads, the result is bit-identical to an uninterrupted run; otherwise
    it differs by rounding, and a warning names what changed."""
    checkpoint: Literal["last", "previous"] = "last"
    """Checkpoint to resume from: the last intact one, or the one before it."""
    print_config: bool = False
    """Print all settings as JSON and stop."""
    settings: tyro.conf.OmitArgPrefixes[FinetuneConfig] = field(default_factory=FinetuneConfig)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Finetune:
        """Defaults from preset and file; raises as `given_settings`."""
        return cls(settings=given_settings(arguments, FinetuneConfig(), PRESETS))

    def run(self) -> None:
        """Train, and print the folder of the results."""
        if self.print_config:
            print_settings(self.settings)
            return
        settings = self.settings
        if self.resume is not None:
            settings = resumed(settings, self.resume, (self.config, self.preset))
        run_training(settings, "finetune", self.resume is not None, self.checkpoint)


def subcommand(arguments: Sequence[str]) -> Any:
    """The command's type for tyro, with defaults from the preset and file in the arguments."""
    wanted = len(arguments) > 0 and arguments[0] == "finetune"
    default = Finetune.defaults(arguments[1:]) if wanted else Finetune()
    return tyro.conf.subcommand("finetune", default=default)
