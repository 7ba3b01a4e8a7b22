"""The example of a black box of one's own: two processes, and one of them without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def url() -> Iterator[str]:
    # -I -S: nothing but the standard library can be imported.
    command = [sys.executable, "-I", "-S", str(EXAMPLES / "own_objective_server.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
def test_it_gets_better_also_when_it_is_killed_and_pays_once(url, tmp_path) -> None:
    command = [sys.executable, str(EXAMPLES / "own_objective.py"), url, str(tmp_path / "journal")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        said = [first.stdout.readline() for _ in range(2)]
        first.kill()
    assert said[1].startswith("step 10")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("".join(said))
    costs = [float(cost) for cost in re.findall(r"(?:costs|step \d+:) ([\d.]+)", done.stdout)]
    assert len(costs) == 5
    assert costs[-1] < 0.8 * costs[0]
    rows = int(re.findall(r"after ([\d,]+) rows", done.stdout)[-1].replace(",", ""))
    with urllib.request.urlopen(url) as response:
        assert json.load(response)["computed"] == rows


def test_nobody_there_is_said(tmp_path) -> None:
    code = (EXAMPLES / "own_objective.py").read_text().replace("range(8)", "range(2)")
    command = [sys.executable, "-c", code, "http://127.0.0.1:9", str(tmp_path / "journal")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ConnectionError: http://127.0.0.1:9 does not answer" in done.stderr
