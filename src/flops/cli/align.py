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

    A linear adapter turns what the encoder sees into a token that the language model reads before
    it says the caption. Without options: the bundled encoder and the bundled tiny Llama on the
    embedded images, in minutes and without a download. Run directory and resuming are those of
    `flops finetune`; report.md has what the model says of some images before and after.

    For example:

    $ flops align
    $ flops align --method ops-lr --output runs/aligned
    $ flops align --resume runs/aligned
    $ flops align --shuffled  # a control: nothing can be learned about the images
    $ flops align --preset smollm2  # after make real-models; 18 seconds a step on two cores
    $ flops align --preset paper --data chat.json --pictures images
    """

    preset: AlignPreset | None = None
    """Settings that go together: tiny, SmolLM2-135M, or the paper's. What the configuration file or
    another option says counts more."""
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
    settings: tyro.conf.OmitArgPrefixes[AlignConfig] = field(default_factory=AlignConfig)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Align:
        """What holds unless the command line says otherwise; errors as `given_settings`."""
        return cls(settings=given_settings(arguments, AlignConfig(), PRESETS))

    def run(self) -> None:
        """Train, and say where the results are."""
        if self.print_config:
            print_settings(self.settings)
            return
        settings = self.settings
        if self.resume is not None:
            settings = resumed(settings, self.resume, (self.config, self.preset))
        run_training(settings, "align", self.resume is not None, self.checkpoint)


def subcommand(arguments: Sequence[str]) -> Any:
    """The command's type for tyro, with the defaults that these arguments ask for."""
    wanted = len(arguments) > 0 and arguments[0] == "align"
    default = Align.defaults(arguments[1:]) if wanted else Align()
    return tyro.conf.subcommand("align", default=default)
