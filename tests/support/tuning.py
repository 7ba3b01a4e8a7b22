"""Real `flops tune` processes, small, for the tests of the command and of faults."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from safetensors.torch import load_file

SMALL = (
    "--queries 4 --limit 50 --part 32 --dimensions 16 --text-tokens 4 --image-tokens 4 --shots 8"
)
ROWS = 3 * 160 + 2 * (80 + 4 * 80) + 50  # of one run of lr with two epochs


def command(output: Path, *options: str, methods: str = "lr", epochs: int = 2) -> list[str]:
    given = f"--methods {methods} --step-sizes 0.1 --epochs {epochs} {SMALL} --output {output}"
    return [sys.executable, "-m", "flops", "tune", *given.split(), *options]


LEVELS: tuple[dict[str, str], ...] = (  # of vector instructions, as other processors have them
    {},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
)


def start(
    arguments: list[str], threads: int = 1, level: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), COLUMNS="120")
    if level is not None:
        for name in LEVELS[-1]:
            environment.pop(name, None)
        environment |= level
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        # What runs in the background of a script ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> str:
    """What it said; it must have gone well."""
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said


def run(output: Path, *options: str, **settings) -> str:
    return finish(start(command(output, *options, **settings)))


def prompts(output: Path) -> dict[str, bytes]:
    """Tuned prompts of all runs, byte by byte."""
    found = output.glob("*/prompts.safetensors")
    return {path.parent.name: path.read_bytes() for path in found}


def apart(output: Path, other: Path) -> dict[str, float]:
    """Largest difference of any number of a run's prompts, by run."""
    found = {}
    for path in sorted(output.glob("*/prompts.safetensors")):
        here, there = load_file(path), load_file(other / path.parent.name / path.name)
        assert here.keys() == there.keys()
        found[path.parent.name] = max(float((here[n] - there[n]).abs().max()) for n in here)
    return found


def paid(output: Path) -> int:
    """Rows in the journals of all runs."""
    total = 0
    for path in output.glob("*/journal.sqlite"):
        with closing(sqlite3.connect(path)) as base:
            row = base.execute("select value from totals where name = 'queries'").fetchone()
            total += row[0] if row else 0
    return total


def charged(ledger: Path) -> int:
    """Rows that a service computed, as it says itself; it may be running."""
    if not ledger.exists():
        return 0
    with closing(sqlite3.connect(ledger, timeout=10)) as base:
        try:
            return base.execute("select value from totals where name = 'queries'").fetchone()[0]
        except (sqlite3.OperationalError, TypeError):  # it is just being made
            return 0
