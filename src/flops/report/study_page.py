"""The report page of a study, from the tables and figures in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from flops.report import html
from flops.report.run_record import ReportError


def study_page(folder: Path) -> str:
    """All tables (.md) of a folder, each with the figures (.png) of its name, then the others.

    Raises:
        ReportError: The folder has no tables, or they cannot be read.
    """
    written = sorted(folder.glob("*.md"))
    figures = sorted(folder.glob("*.png"))
    if not written:
        raise ReportError(f"{folder} holds no tables yet; finish the study first")
    parts = []
    try:
        for path in written:
            mine = [figure for figure in figures if figure.stem.startswith(path.stem)]
            figures = [figure for figure in figures if figure not in mine]
            parts += [*markdown(path.read_text(encoding="utf-8")), *map(_picture, mine)]
        parts += map(_picture, figures)
    except OSError as error:
        raise ReportError(f"cannot read {error.filename}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"a table in {folder} is damaged: {error}") from error
    names = ", ".join(path.stem for path in written)
    return html.page(f"Results in {folder.resolve().name}", f"Tables: {names}", *parts)


def markdown(text: str) -> Iterator[str]:
    """HTML of the headings, tables and paragraphs that `flops.report.table.Sheet` writes."""
    for block in text.split("\n\n"):
        lines = [line for line in block.strip().splitlines() if line.strip()]
        if not lines:
            continue
        if lines[0].startswith("#"):
            title = lines.pop(0).lstrip("#").strip()
            yield f"<h2>{escape(title)}</h2>"
        if lines and all(line.startswith("|") for line in lines):
            yield _table(lines)
        elif lines:
            yield f"<p>{escape(' '.join(lines))}</p>"


def _table(lines: Sequence[str]) -> str:
    header, *rows = (
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines
    )
    return html.table(header, [row for row in rows if set("".join(row)) - set("-: ")])


def _picture(path: Path) -> str:
    name = escape(path.stem)
    source = html.file_source(path)
    return f'<p class="picture"><img alt="{name}" src="{source}"></p>'
