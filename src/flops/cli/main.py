"""The command line: `flops finetune`, `align`, `tune`, `serve`, `compare`, `diagnose`, `study`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import tyro

from flops.cli import align, compare, finetune
from flops.cli.diagnose import Diagnose
from flops.cli.serve import Serve
from flops.cli.study import Study
from flops.cli.tune import Tune
from flops.errors import FlopsError
from flops.optional import install_command
from flops.training.launch import launched


def _commands(arguments: list[str]) -> Any:
    """All commands; settings of files and presets are defaults that arguments override."""
    kind, finetuning = finetune.command(arguments)
    compared, comparing = compare.command(arguments)
    return (
        Annotated[kind, finetuning]
        | Annotated[align.Align, align.subcommand(arguments)]
        | Annotated[compared, comparing]
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
        if launched() and not isinstance(command, finetune.Command | align.Align):
            raise FlopsError(
                "torchrun supports `flops finetune` and `flops align` only; start this without it"
            )
        command.run()
    except FlopsError as error:
        rank = f" (process {os.environ['RANK']})" if launched() else ""
        sys.exit(f"flops{rank}: {error}")
    except ImportError as error:  # raised by a package that imports others lazily
        if (error.name or "").partition(".")[0] == "flops":
            raise
        said = " ".join(str(error).split())
        sys.exit(
            f"flops: a package is missing ({said}); install all with: {install_command('all')}"
        )
    except KeyboardInterrupt:
        sys.exit("flops: stopped")
