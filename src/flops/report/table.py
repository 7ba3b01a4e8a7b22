"""A table for the terminal and for markdown files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 1000  # columns of a table


def print_table(console: Console, table: Table) -> None:
    """Print a table that is never broken inside words: if needed, wider than the console."""
    free = console.options.update(max_width=WIDEST)
    least = Measurement.get(console, free, table).minimum
    console.print(table, width=max(console.width, least), crop=False, no_wrap=False)


@dataclass(frozen=True)
class Sheet:
    """Title, header and rows of text; the first column is left-aligned, the others right.

    Attributes:
        title: Title of the table.
        header: Names of the columns.
        rows: Formatted cells.
        note: Text below the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """The table as markdown, with title and note."""
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join(part for part in (f"### {self.title}", table, self.note) if part) + "\n"

    def print(self, console: Console) -> None:
        """Print the table; long headers wrap between words, and nothing inside of one."""
        print_table(console, self.table())

    def table(self) -> Table:
        """The table for the terminal."""
        shown = Table(
            title=self.title,
            caption=self.note or None,
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            title_justify="left",
            caption_justify="left",
        )
        for number, name in enumerate(self.header):
            cells = [row[number] for row in self.rows]
            widest = max(map(cell_len, [*cells, *name.split()]), default=0)
            shown.add_column(name, justify="right" if number else "left", min_width=widest)
        for row in self.rows:
            shown.add_row(*row)
        return shown
