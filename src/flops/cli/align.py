"""`flops align`: an adapter between two frozen models, trained with forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from flops.cli.training import RunOptions, given_settings
from flops.tasks.alignment.config import PRESETS, AlignConfig, AlignPreset


@dataclass(frozen=True)
class Align(RunOptions):
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
    settings: tyro.conf.OmitArgPrefixes[AlignConfig] = field(default_factory=AlignConfig)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Align:
        """Defaults from preset and file; raises as `given_settings`."""
        return cls(settings=given_settings(arguments, AlignConfig(), PRESETS))

    def run(self) -> None:
        """Train, and print the folder of the results."""
        self.train(self.settings, self.preset, "align")


def command(arguments: Sequence[str]) -> tuple[type[Align], Align]:
    """The command's type for tyro, with defaults from the preset and file in the arguments."""
    return Align, Align.defaults(arguments)
