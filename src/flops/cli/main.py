"""The command line: one command a file, all of them listed in `SUMMARIES`."""

from __future__ import annotations

import difflib
import importlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Union

import tyro

from flops.errors import FlopsError
from flops.optional import install_command
from flops.training.launcher import launched
from flops.version import __version__

SUMMARIES = {
    "finetune": "train an image classifier, or a language model with --task text",
    "evaluate": "test the model of a run, also on other data",
    "report": "write an HTML page about runs, a comparison or a study",
    "compare": "compare methods at equal cost and at equal epochs",
    "diagnose": "measure gradient estimates by group, and find a sigma",
    "tune": "tune what only answers: prompts, a function, a program",
    "serve": "serve a frozen CLIP: logits for prompts, never weights",
    "align": "train an adapter between two frozen models",
    "study": "check the claims of the paper and of this library",
}
RESUMED = ("compare", "study")  # the same command continues them
LAUNCHED = ("finetune", "align")  # those that torchrun may start
CLOSED_PIPE = 128 + 13  # status of programs whose reader is gone, such as `flops ... | head -1`


def usage() -> str:
    """`flops --help`: one line a command."""
    lines = [f"  {name:<9} {said}" for name, said in SUMMARIES.items()]
    return "\n".join(
        [
            "usage: flops COMMAND [OPTIONS]",
            "",
            "Train neural networks with forward passes only.",
            "",
            *lines,
            "",
            "flops COMMAND --help explains a command, with examples; flops --version shows the",
            "version; flops --tyro-write-completion bash FILE writes completions (also zsh, tcsh).",
            "",
        ]
    )


def _parsed(arguments: list[str]) -> Any:
    """The command of a command line; only its own file is imported, which saves a second."""
    name = arguments[0]
    shared: dict[str, Any] = {"config": (tyro.conf.OmitSubcommandPrefixes,)}
    if name in SUMMARIES:
        kind, default = _command(name, arguments[1:])
        given = {} if default is None else {"default": default}
        return tyro.cli(kind, prog=f"flops {name}", args=arguments[1:], **given, **shared)
    described = "Train neural networks with forward passes only."  # with an option of tyro's own
    return tyro.cli(_all(), prog="flops", description=described, args=arguments, **shared)


def _command(name: str, arguments: list[str]) -> tuple[Any, Any]:
    """Type of a command, and its defaults where presets, files or runs change them."""
    found: tuple[Any, Any] = importlib.import_module(f"flops.cli.{name}").command(arguments)
    return found


def _all() -> Any:
    """All commands, for shell completion."""
    kinds = []
    for name in SUMMARIES:
        kind, default = _command(name, [])
        given = {} if default is None else {"default": default}
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, **given)])
    return Union[tuple(kinds)]  # noqa: UP007


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `flops` and of `python -m flops`."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        _main(given)
        sys.stdout.flush()
    except BrokenPipeError:
        _close_output()
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # raised by rich
            _close_output()
        raise


def _main(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return
    if given[0] in ("-V", "--version"):
        sys.stdout.write(f"flops {__version__}\n")
        return
    if not given[0].startswith("-") and given[0] not in SUMMARIES:
        near = difflib.get_close_matches(given[0], SUMMARIES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(SUMMARIES)}"
        sys.stderr.write(f"flops: no command '{given[0]}'; {hint}\n")
        sys.exit(2)
    try:
        command = _parsed(given)
        if launched() and given[0] not in LAUNCHED:
            raise FlopsError(
                "torchrun supports `flops finetune` and `flops align` only; start this without it"
            )
        with _terminable(given[0]):
            if given[0] in RESUMED:
                from rich.console import Console

                from flops.training.console import Lines  # imports torch

                with Lines(Console(stderr=True)).warnings():
                    command.run()
            else:
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
        if given[0] in RESUMED:
            again = shlex.join(["flops", *given])
            sys.exit(f"stopped; finished runs are saved. Continue with: {again}")
        sys.exit("flops: stopped")


@contextmanager
def _terminable(name: str) -> Iterator[None]:
    """SIGTERM ends commands that run others as Ctrl-C does; training has its own handlers."""
    if name not in (*RESUMED, "tune") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:  # by Python
            signal.signal(signal.SIGTERM, before)


def _close_output() -> None:
    """Exit silently: whoever reads the output has gone."""
    with suppress(OSError, ValueError):  # else the interpreter complains when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(CLOSED_PIPE)
