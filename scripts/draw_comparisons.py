r"""Draw comparisons side by side: accuracy against cost, one panel for each saved `flops compare`.

    python scripts/draw_comparisons.py docs/figures/accuracy.png \
        "SmolLM2-135M on sentences=docs/data/compare-smollm2" "ViT on digits=runs/demo" \
        --methods zero-shot bp mezo fzoo lr shaped-lr

A panel is TITLE=FOLDER, or a folder alone, whose model and data are then the title. The folders
are outputs of `flops compare`; only their results.json is read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flops.errors import FlopsError
from flops.experiments.compare_curves import Panel, plot
from flops.experiments.compare_report import ComparisonResults


def panel(given: str, methods: Sequence[str] = ()) -> Panel:
    """The panel of an argument, with these methods; with all if there are none.

    Raises:
        FlopsError: The folder is not of a finished comparison, or has none of the methods.
    """
    title, _, folder = given.rpartition("=")
    found = ComparisonResults.read(Path(folder))
    kept = {m: runs for m, runs in found.results.items() if not methods or m in methods}
    if not kept:
        raise FlopsError(f"{folder} has none of {', '.join(methods)}: {', '.join(found.results)}")
    return Panel(title or found.title, kept, found.chance)


def main(arguments: list[str] | None = None) -> None:
    """Read, draw, and print the path of the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, help="the PNG to write")
    parser.add_argument("panels", nargs="+", metavar="[TITLE=]FOLDER", help="outputs of compare")
    parser.add_argument("--methods", nargs="+", default=(), help="those to draw; all if not given")
    given = parser.parse_args(arguments)
    try:
        plot(given.output, *(panel(one, given.methods) for one in given.panels))
    except (FlopsError, OSError) as error:
        sys.exit(f"draw_comparisons: {error}")
    print(given.output)


if __name__ == "__main__":
    main()
