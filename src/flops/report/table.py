"""A table for the terminal and for markdown files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table


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

    def table(self) -> Table:
        """The table for the terminal."""
        shown = Table(title=self.title, caption=self.note or None, box=SIMPLE_HEAD)
        for number, name in enumerate(self.header):
            shown.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown
