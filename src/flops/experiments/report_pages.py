"""`flops report`: which page belongs to which folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flops.experiments.compare_report import ComparisonResults
from flops.report.run_page import run_page
from flops.report.run_record import ReportError, read_record
from flops.report.study_page import study_page
from flops.storage.disk import writing
from flops.storage.files import atomic_write
from flops.storage.plain import parse_json


def write_page(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report page of runs, of a comparison or of a study.

    Args:
        folders: Run directories, or the output of one comparison, study or tuning.
        output: File to write; None for report.html in the folder, or in the current folder for
            several runs.

    Returns:
        The file.

    Raises:
        ReportError: A folder cannot be reported on.
        DiskError: The page cannot be written.
    """
    text = page_of(folders)
    path = output or ((folders[0] if len(folders) == 1 else Path()) / "report.html")
    with writing(path.parent, "choose another --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text, durable=False)
    return path


def page_of(folders: Sequence[Path]) -> str:
    """The page of some folders, as HTML.

    Raises:
        ReportError: A folder cannot be reported on.
    """
    if not folders:
        raise ReportError("give at least one run directory")
    twice = [f for i, f in enumerate(folders) if f.resolve() in [g.resolve() for g in folders[:i]]]
    if twice:
        raise ReportError(f"{twice[0]} is given twice")
    others = [folder for folder in folders if folder.is_dir() and not _is_run(folder)]
    if not others:
        return run_page([read_record(folder) for folder in folders])
    if len(folders) > 1:
        raise ReportError(
            f"{others[0]} holds no run (there is no config.json); give several runs, or one folder "
            "of a comparison or study"
        )
    folder = others[0]
    if _is_comparison(folder):
        return ComparisonResults.read(folder).page()
    if any(folder.glob("*.md")):
        return study_page(folder)
    if (folder / "cells").is_dir():
        raise ReportError(
            f"{folder} has no tables yet: the comparison or study was interrupted; the same "
            "command continues it"
        )
    read_record(folder)  # raises, and says what is missing
    raise AssertionError(folder)


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _is_comparison(folder: Path) -> bool:
    path = folder / "results.json"
    if not path.is_file() or not (folder / "cells").is_dir():
        return False
    try:
        kept = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return (folder / "cells" / "runs").is_dir()  # damaged: the reader says so
    return isinstance(kept, dict) and "chosen" in kept
