"""Tables of a diagnosis for the terminal."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flops.diagnostics.diagnose import Diagnosis

WIDTH = 160  # widest text; tables take what they need


def text(found: Diagnosis) -> str:
    """All tables as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, no_color=True, force_terminal=False)
    for table in diagnosis_tables(found):
        console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def diagnosis_tables(found: Diagnosis) -> list[Table]:
    """A table by group and allocator, and one by group and sigma."""
    by_allocator = Table(
        title=f"estimates (mean loss {found.loss:.3f})",
        caption="J: variance of the estimate; forwards: cost in forward equivalents",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    by_allocator.add_column("group", no_wrap=True)
    by_allocator.add_column("allocator", no_wrap=True)
    for name in ("cosine", "±", "J/Jopt", "Jeq/J", "SNR", "forwards", "sec"):
        by_allocator.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in found.allocators:
        if last and row.group != last:
            by_allocator.add_row()
        by_allocator.add_row(
            row.group if row.group != last else "",
            row.allocator,
            f"{row.cosine:.3f}",
            f"{row.cosine_spread:.3f}",
            f"{row.over_optimal:.2f}",
            f"{row.equal_over:.2f}",
            f"{row.snr:.4g}",
            f"{row.forward_equivalents:.0f}",
            f"{row.seconds:.2f}",
        )
        last = row.group
    tables = [by_allocator]
    if found.shaping:
        tables.append(_shaping(found))
    if found.sigmas:
        by_sigma = Table(
            title="sigma sweep: directional derivatives should not change between neighbours",
            caption="small sigmas change them by rounding, large ones by curvature",
            box=SIMPLE_HEAD,
        )
        by_sigma.add_column("group")
        for name in ("sigma", "change", "rounding units", "cosine"):
            by_sigma.add_column(name, justify="right")
        by_sigma.add_column("")
        last = ""
        for line in found.sigmas:
            if last and line.group != last:
                by_sigma.add_row()
            by_sigma.add_row(
                line.group if line.group != last else "",
                f"{line.sigma:.0e}",
                f"{line.change:.1%}",
                f"{line.rounding_units:.0f}",
                f"{line.cosine:.3f}",
                "recommended" if line.recommended else "",
                style="bold" if line.recommended else None,
            )
            last = line.group
        tables.append(by_sigma)
    return tables


def _shaping(found: Diagnosis) -> Table:
    table = Table(
        title="shaped noise",
        caption="k: directions measured per point; explained: explained variance, held out",
        box=SIMPLE_HEAD,
    )
    table.add_column("group")
    table.add_column("site")
    for name in ("k", "explained", "explore", "cosine"):
        table.add_column(name, justify="right")
    for row in found.shaping:
        table.add_row(
            row.group,
            row.site,
            f"{row.k:.1f}",
            f"{row.explained_variance:.2f}",
            f"{row.explore:.2f}",
            f"{row.cosine:.3f}",
        )
    return table
