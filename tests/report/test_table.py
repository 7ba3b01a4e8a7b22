"""Tables in narrow consoles: headers wrap between words, and no word is broken."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flops.report.table import Sheet

SHEET = Sheet(
    "Methods",
    ["method", "perturbs", "test accuracy, %", "queries", "forward equivalents", "seconds"],
    [
        ["shaped-lr+lora", "stage", "97.3 ± 1.2", "1.25M", "240k", "1,250"],
        ["mezo", "parameters", "54.7 ± 10.4", "60k", "60k", "64"],
    ],
    "Mean and standard deviation over five seeds.",
)


@pytest.mark.parametrize("width", [20, 50, 80, 200])
def test_no_word_is_broken(width: int) -> None:
    out = io.StringIO()
    SHEET.print(Console(file=out, width=width))
    words = out.getvalue().split()
    for cell in [*SHEET.header, *(cell for row in SHEET.rows for cell in row)]:
        for word in cell.split():
            assert word in words, f"{word} is broken at {width}"


def test_it_fits_a_terminal_of_80_columns() -> None:
    out = io.StringIO()
    SHEET.print(Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line for line in lines if "shaped-lr+lora" in line)
    assert "97.3 ± 1.2" in row  # a value is in one line
