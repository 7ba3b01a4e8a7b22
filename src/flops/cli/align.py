"""`flops align`: an adapter between two frozen models, trained with forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from flops.cli.training import given_settings, print_settings, resumed, run_training
from flops.tasks.alignment.config import PRESETS, AlignConfig, AlignPreset


@dataclass(frozen=True)
class Align:
    """Align a frozen image encoder with a frozen language model, with forward passes only.

    A linear adapter maps image features to a visual token, which the language model reads before
    the caption. Without options: the bundled encoder and the bundled tiny Llama on the embedded
    images, in minutes and without a download. Run directory and resuming are those of `flops
    finetune`; report.md has generated captions of some images before and after training.

    For example:

    $ flops align
    $ flops align --method ops-lr --output runs/aligned
    $ flops align --resume runs/aligned
    $ flops align --shuffled  # control: captions of other images
    $ flops align --preset smollm2  # after make real-models; 18 seconds per step on two cores
    $ flops align --preset paper --data chat.json --pictures images
    """

    preset: AlignPreset | None = None
    """Preset of settings: tiny, SmolLM2-135M, or the paper's. The configuration file and other
    options override it."""
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
    settings: tyro.conf.OmitArgPrefixes[AlignConfig] = field(default_factory=AlignConfig)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Align:
        """Defaults from preset and file; raises as `given_settings`."""
        return cls(settings=given_settings(arguments, AlignConfig(), PRESETS))

    def run(self) -> None:
        """Train, and print the folder of the results."""
        if self.print_config:
            print_settings(self.settings)
            return
        settings = self.settings
        if self.resume is not None:
            settings = resumed(settings, self.resume, (self.config, self.preset))
        run_training(settings, "align", self.resume is not None, self.checkpoint)


def subcommand(arguments: Sequence[str]) -> Any:
    """The command's type for tyro, with defaults from the preset and file in the arguments."""
    wanted = len(arguments) > 0 and arguments[0] == "align"
    default = Align.defaults(arguments[1:]) if wanted else Align()
    return tyro.conf.subcommand("align", default=default)
