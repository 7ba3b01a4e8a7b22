"""`flops report`: one HTML page about runs, a comparison or a study."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from flops.experiments.report_pages import write_page


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about runs, a comparison or a study.

    The page has settings, curves, accuracy against cost, where the queries went (images or texts
    with their counts), the quality of the gradient by group, and the environment; of several runs
    also a comparison. It needs no network and no script, and may be sent as one file. Runs that
    are not finished, or are of older versions, are shown as far as they are recorded.

    For example:

    $ flops report runs/digits-shaped-lr-seed0
    $ flops report runs/digits-*  # compares them, in report.html
    $ flops report runs/compare --output compare.html
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, or the output folder of one comparison, study or tuning."""
    output: Path | None = None
    """File to write; None for report.html in the folder, or in the current folder for several
    runs."""

    def run(self) -> None:
        """Write the page, and print its path."""
        sys.stdout.write(f"{write_page(self.folders, self.output)}\n")


def command(arguments: Sequence[str]) -> tuple[type[Report], None]:
    """The command's type for tyro."""
    return Report, None
