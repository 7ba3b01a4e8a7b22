"""`flops finetune`: train an image classifier with forward passes, into a run folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from flops.errors import FlopsError
from flops.options import Config, ConfigError, from_dict, preset, read_file

PresetName = Literal["tiny", "vit-base", "vit-large"]


@dataclass(frozen=True)
class Finetune:
    """Fine-tune an image classifier with forward passes only.

    Without options: the bundled vision transformer on handwritten digits with shaped-lr, in a few
    minutes and without a download. Everything goes into a run folder: settings, metrics,
    checkpoints, plots, the trained model. A run that was stopped, in whatever way, goes on with
    the resume option and ends up where it would have.

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

    preset: PresetName | None = None
    """Settings that go together: those of the paper for ViT-base and ViT-large, or tiny. What the
    configuration file or another option says counts more."""
    config: Path | None = None
    """File with settings, .json or .toml; names are those of the options, with _ for -."""
    resume: Path | None = None
    """Continue the run in this folder; its settings stay what they are."""
    checkpoint: Literal["last", "previous"] = "last"
    """Where to continue; previous if the last one is damaged."""
    print_config: bool = False
    """Print all settings as JSON and stop."""
    settings: tyro.conf.OmitArgPrefixes[Config] = field(default_factory=Config)

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Finetune:
        """What holds unless the command line says otherwise: preset, then file, or the old run.

        Raises:
            ConfigError: If the file or the preset is not what it should be.
        """
        looked = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for name in ("--preset", "--config", "--resume"):
            looked.add_argument(name)
        try:
            given, _ = looked.parse_known_args(list(arguments))
        except argparse.ArgumentError:  # tyro says it better
            return cls()
        for name, value in vars(given).items():
            if value == "None":  # as the help says
                setattr(given, name, None)
        if given.resume is not None:
            from flops.runs import read_config

            return cls(settings=read_config(Path(given.resume)))
        values = read_file(Path(given.config)) if given.config is not None else {}
        chosen = given.preset or values.get("preset")
        values = {name: value for name, value in values.items() if name != "preset"}
        base = from_dict(preset(chosen)) if chosen is not None else Config()
        return cls(settings=from_dict(values, base))

    def run(self) -> None:
        """Train, and say where the results are."""
        if self.print_config:
            sys.stdout.write(json.dumps(self.settings.to_dict(), indent=2) + "\n")
            return
        from flops.display import closing, display_for
        from flops.runs import is_run, new_folder
        from flops.tasks.splits import BrokenImageError
        from flops.training import train

        if self.resume is None and self.checkpoint != "last":
            raise ConfigError("--checkpoint says where to continue: it needs --resume")
        settings = self._resumed() if self.resume is not None else self.settings
        if settings.output is None:  # process 0 alone writes, whatever the others call it
            settings = dataclasses.replace(settings, output=str(new_folder(settings)))
        first = os.environ.get("RANK", "0") == "0"  # the one that speaks, under torchrun
        display = display_for(Console(quiet=not first))
        try:
            with display.warnings():
                result = train(
                    settings,
                    resume=self.resume is not None,
                    checkpoint=self.checkpoint,
                    display=display,
                )
        except BrokenImageError as error:  # of data that are decoded batch by batch
            raise FlopsError(str(error)) from error
        except KeyboardInterrupt:
            if not first:
                sys.exit(130)
            if not is_run(Path(settings.output or "")):
                sys.exit("stopped before the run began")
            folder = shlex.quote(str(settings.output))
            sys.exit(f"stopped; continue with: flops finetune --resume {folder}")
        if first:
            display.say(closing(result))

    def _resumed(self) -> Config:
        from flops.runs import read_config

        assert self.resume is not None
        if self.config is not None or self.preset is not None:
            raise ConfigError("--resume takes the settings of the run: leave --config and --preset")
        kept = read_config(self.resume)
        changed = [
            f.name
            for f in dataclasses.fields(Config)
            if getattr(kept, f.name) != getattr(self.settings, f.name)
        ]
        if changed:
            raise ConfigError(
                f"a resumed run keeps its settings: leave out {', '.join(changed)}, or start a new "
                "run"
            )
        return dataclasses.replace(kept, output=str(self.resume))


def subcommand(arguments: Sequence[str]) -> Any:
    """The command's type for tyro, with the defaults that these arguments ask for."""
    wanted = len(arguments) > 0 and arguments[0] == "finetune"
    default = Finetune.defaults(arguments[1:]) if wanted else Finetune()
    return tyro.conf.subcommand("finetune", default=default)
