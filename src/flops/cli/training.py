"""What the commands that train share: where their settings come from, running and resuming."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flops.training.config import ConfigError, RunConfig, Settings, preset_settings, read_file
from flops.training.console import closing, display_for
from flops.training.loop import train
from flops.training.run_directory import is_run, new_folder, read_settings


def given_settings(
    arguments: Sequence[str], defaults: Settings, presets: Mapping[str, dict[str, Any]]
) -> Settings:
    """What holds unless the command line says otherwise: preset, then file, or the old run.

    Args:
        arguments: Of the command line.
        defaults: The defaults.
        presets: Settings by name.

    Raises:
        ConfigError: If the file or the preset is not what it should be.
    """
    looked = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--preset", "--config", "--resume"):
        looked.add_argument(name)
    try:
        given, _ = looked.parse_known_args(list(arguments))
    except argparse.ArgumentError:  # tyro says it better
        return defaults
    for name, value in vars(given).items():
        if value == "None":  # as the help says
            setattr(given, name, None)
    if given.resume is not None:
        return read_settings(Path(given.resume), type(defaults))
    values = read_file(Path(given.config)) if given.config is not None else {}
    chosen = given.preset or values.get("preset")
    values = {name: value for name, value in values.items() if name != "preset"}
    base = {} if chosen is None else preset_settings(presets, chosen)
    return defaults.replace(**{**base, **values})


def resumed(settings: Settings, folder: Path, apart: Sequence[Any]) -> Settings:
    """The settings of the run in a folder, which must be those that were given.

    Args:
        settings: What the command line says.
        folder: The run.
        apart: Configuration file and preset, which have no place here.

    Raises:
        ConfigError: If anything else was asked for than to go on.
    """
    if any(given is not None for given in apart):
        raise ConfigError("--resume takes the settings of the run: leave --config and --preset")
    kept = read_settings(folder, type(settings))
    changed = [name for name, value in kept if value != getattr(settings, name)]
    if changed:
        raise ConfigError(
            f"a resumed run keeps its settings: leave out {', '.join(changed)}, or start a new run"
        )
    return kept.replace(output=str(folder))


def print_settings(settings: RunConfig) -> None:
    """All settings as JSON, as a configuration file has them."""
    sys.stdout.write(json.dumps(settings.to_dict(), indent=2) + "\n")


def run_training(settings: RunConfig, command: str, resume: bool, checkpoint: str) -> None:
    """Train with a display, and say where the results are, or how to go on.

    Args:
        settings: What to do; without `output` a new folder in runs/ is made.
        command: What the user typed after `flops`.
        resume: Continue the run in `output`.
        checkpoint: Where to continue, "last" or "previous".
    """
    if not resume and checkpoint != "last":
        raise ConfigError("--checkpoint says where to continue: it needs --resume")
    if settings.output is None:  # process 0 alone writes, whatever the others call it
        settings = settings.replace(output=str(new_folder(settings)))
    first = os.environ.get("RANK", "0") == "0"  # the one that speaks, under torchrun
    display = display_for(Console(quiet=not first))
    try:
        with display.warnings():
            result = train(settings, resume=resume, checkpoint=checkpoint, display=display)
    except KeyboardInterrupt:
        if not first:
            sys.exit(130)
        if not is_run(Path(settings.output or "")):
            sys.exit("stopped before the run began")
        folder = shlex.quote(str(settings.output))
        sys.exit(f"stopped; continue with: flops {command} --resume {folder}")
    if first:
        display.say(closing(result))
