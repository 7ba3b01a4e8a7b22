"""Shared by the training commands: sources of settings, running and resuming."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from flops.training.config import ConfigError, RunConfig, Settings, preset_settings, read_file
from flops.training.console import closing, display_for
from flops.training.loop import train
from flops.training.run_directory import LENGTHS, check_run, is_run, new_folder, read_settings


@dataclass(frozen=True)
class RunOptions:
    """Options of the training commands besides their settings."""

    config: Path | None = None
    """File with settings, .json or .toml; names are those of the options, with _ for -."""
    resume: Path | None = None
    """Resume the run in this folder, with its settings. More --epochs, --steps or --budget extend
    it, also after its end. On the same machine, with the same library
    versions and number of threads, the result is bit-identical to an uninterrupted run; otherwise
    it differs by rounding, and a warning names what changed."""
    checkpoint: Literal["last", "previous"] = "last"
    """Checkpoint to resume from: the last intact one, or the one before it."""
    print_config: bool = False
    """Print all settings as JSON and stop."""

    def train(self, settings: RunConfig, preset: str | None, command: str) -> None:
        """Train, and print the folder of the results."""
        if self.print_config:
            print_settings(settings)
            return
        if self.resume is not None:
            settings = resumed(settings, self.resume, (self.config, preset))
        run_training(settings, command, self.resume is not None, self.checkpoint)


def given_settings(
    arguments: Sequence[str], defaults: Settings, presets: Mapping[str, dict[str, Any]]
) -> Settings:
    """Settings that the command line may override: preset, then file, or the run to resume.

    Args:
        arguments: Command line.
        defaults: The defaults.
        presets: Settings by name.

    Raises:
        ConfigError: If the file or the preset is invalid.
    """
    given = _looked_up(arguments)
    if given is None:
        return defaults
    if given.resume is not None:
        return read_settings(Path(given.resume), type(defaults))
    values = read_file(Path(given.config)) if given.config is not None else {}
    chosen = given.preset or values.get("preset")
    values = {name: value for name, value in values.items() if name != "preset"}
    base = {} if chosen is None else preset_settings(presets, chosen)
    return defaults.replace(**{**base, **values})


def chosen_task(arguments: Sequence[str], tasks: Sequence[str]) -> str:
    """The task of a command line: as given, else of the run to resume or the file, else the first.

    Args:
        arguments: Command line.
        tasks: All tasks.

    Raises:
        ConfigError: If there is no such task, or the file is invalid.
    """
    given = _looked_up(arguments)
    if given is None:  # tyro reports it
        return tasks[0]
    task: Any = given.task
    if task is None:
        file = Path(given.config) if given.config is not None else None
        if given.resume is not None:
            check_run(Path(given.resume))
            file = Path(given.resume) / "config.json"
        task = tasks[0] if file is None else read_file(file).get("task", tasks[0])
    if task not in tasks:
        raise ConfigError(f"task must be {' or '.join(tasks)}, not '{task}'")
    return str(task)


def chosen_preset(
    arguments: Sequence[str], presets: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Settings of the preset of a command line; empty without one.

    Raises:
        ConfigError: If there is no preset of this name.
    """
    given = _looked_up(arguments)
    if given is None or given.preset is None:
        return {}
    return preset_settings(presets, given.preset)


def _looked_up(arguments: Sequence[str]) -> argparse.Namespace | None:
    """Options that decide about the defaults of the others; None if they are not valid."""
    looked = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--task", "--preset", "--config", "--resume"):
        looked.add_argument(name)
    try:
        given, _ = looked.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return None
    for name, value in vars(given).items():
        if value == "None":  # the documented spelling of None
            setattr(given, name, None)
    return given


def resumed(settings: Settings, folder: Path, apart: Sequence[Any]) -> Settings:
    """The settings of the run in a folder; the command line may change its length only.

    Args:
        settings: Settings from the command line.
        folder: The run directory.
        apart: Configuration file and preset, which are not allowed here.

    Raises:
        ConfigError: If the command line changes another setting.
    """
    if any(given is not None for given in apart):
        raise ConfigError("--resume uses the settings of the run: leave out --config and --preset")
    kept = read_settings(folder, type(settings))
    changed = [name for name, value in kept if value != getattr(settings, name)]
    if other := [name for name in changed if name not in LENGTHS]:
        raise ConfigError(
            f"a resumed run keeps its settings but {', '.join(LENGTHS)}: leave out "
            f"{', '.join(other)}, or start a new run"
        )
    longer = {name: getattr(settings, name) for name in changed}
    return kept.replace(output=str(folder), **longer)


def print_settings(settings: RunConfig) -> None:
    """Print all settings as JSON, in the format of a configuration file."""
    sys.stdout.write(json.dumps(settings.to_dict(), indent=2) + "\n")


def run_training(settings: RunConfig, command: str, resume: bool, checkpoint: str) -> None:
    """Train with a display; print the folder of the results, or how to resume.

    Args:
        settings: Settings; without `output` a new folder in runs/ is created.
        command: Name of the command.
        resume: Resume the run in `output`.
        checkpoint: Checkpoint to resume from, "last" or "previous".
    """
    if not resume and checkpoint != "last":
        raise ConfigError("--checkpoint needs --resume")
    if settings.output is None:  # only rank 0 writes
        settings = settings.replace(output=str(new_folder(settings)))
    first = os.environ.get("RANK", "0") == "0"  # only rank 0 prints
    display = display_for(Console(quiet=not first))
    try:
        with display.warnings():
            result = train(settings, resume=resume, checkpoint=checkpoint, display=display)
    except KeyboardInterrupt:
        if not first:
            sys.exit(130)
        if not is_run(Path(settings.output or "")):
            sys.exit("stopped before the run started")
        folder = shlex.quote(str(settings.output))
        sys.exit(f"stopped; continue with: flops {command} --resume {folder}")
    if first:
        display.say(closing(result))
