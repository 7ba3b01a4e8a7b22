"""Objectives of the command line: functions by name, programs by command."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from flops.blackbox.objective import Candidates, ObjectiveError
from flops.errors import FlopsError
from flops.tasks.tuning.functions import read_start
from flops.tasks.tuning.objectives import (
    CommandObjective,
    FunctionObjective,
    load,
    read_losses,
    write_rows,
)

ROWS = Candidates(torch.tensor([[0.5, -1.25], [3.0, 0.1]]), torch.tensor([4, 7]))


def program(folder: Path, code: str) -> str:
    path = folder / "program.py"
    path.write_text(code)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(path))} {{input}}"


READS = {
    "jsonl": "import json\nrows = [json.loads(line) for line in open(sys.argv[1])]\n"
    "rows = [(r['point'], *r['parameters']) for r in rows]\n",
    "csv": "rows = [tuple(map(float, line.split(','))) for line in open(sys.argv[1])]\n",
    "npy": "import numpy\nrows = numpy.load(sys.argv[1]).tolist()\n",
}


@pytest.mark.parametrize("form", READS)
def test_a_program_reads_rows_and_prints_losses(form, tmp_path) -> None:
    code = f"import os, sys\n{READS[form]}"
    code += "for p, a, b in rows: print(p + a * b, b, len(os.environ['FLOPS_KEY']))\n"
    objective = CommandObjective(program(tmp_path, code), form=form)
    found = objective.evaluate(ROWS, "run-1-2").columns
    expected = torch.tensor([[4 - 0.625, -1.25, 7.0], [7.3, 0.1, 7.0]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("print(1)", ObjectiveError, "one line for each of the 2 rows, but printed 1"),
        ("print(1); print('good')", ObjectiveError, "numbers, the loss first, but printed 'good'"),
        ("print(1); print(1, 2)", ObjectiveError, "as many numbers in each line"),
        ("raise SystemExit('no licence')", ObjectiveError, "exited with status 1: no licence"),
        ("import time; time.sleep(60)", TimeoutError, "took more than 1.5 s"),
    ],
)
def test_a_program_that_does_something_else_is_explained(code, error, message, tmp_path) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=message):
        CommandObjective(program(tmp_path, code), 1.5).evaluate(ROWS, "key")
    assert time.monotonic() - began < 30


def test_commands_that_cannot_work_are_refused() -> None:
    with pytest.raises(FlopsError, match=r"must contain {input}"):
        CommandObjective("prog input")
    with pytest.raises(FlopsError, match="cannot be split into words"):
        CommandObjective("prog '{input}")
    with pytest.raises(ObjectiveError, match=r"cannot be started: .*no-such-program"):
        CommandObjective("no-such-program {input}").evaluate(ROWS, "key")


def test_losses_may_be_json_or_plain_and_not_finite() -> None:
    found = read_losses("[0.5, 1]\n\n nan,2\n1e-3 3\n", 3, "prog")
    assert found[1, 0].isnan()
    assert found[:, 1].tolist() == [1, 2, 3]


def test_rows_are_written_to_the_last_bit(tmp_path) -> None:
    rows = Candidates(torch.randn(3, 4) * 1e-3, torch.arange(3))
    write_rows(tmp_path / "rows.jsonl", rows, "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert torch.equal(torch.tensor([line["parameters"] for line in lines]), rows.parameters)


def test_functions_are_found_by_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_module_of_a_test.py").write_text(
        "import numpy as np\n"
        "def plain(parameters, points):\n"
        "    assert isinstance(parameters, np.ndarray)\n"
        "    return [float(p + q.sum()) for p, q in zip(points, parameters)]\n"
        "class Keyed:\n"
        "    def evaluate(self, candidates, key):\n"
        "        return [len(key)] * len(candidates)\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "own_module_of_a_test"
    found = FunctionObjective(f"{name}:plain").evaluate(ROWS, "key").columns
    torch.testing.assert_close(found, torch.tensor([3.25, 10.1]))
    keyed = FunctionObjective(f"{name}:Keyed").evaluate(ROWS, "four").columns
    assert keyed.tolist() == [4, 4]
    for wrong, message in (
        ("losses", "must be package.module:function, not losses"),
        ("no_such_module:losses", "no_such_module cannot be imported"),
        (f"{name}:losses", "has no attribute 'losses'"),
        (f"{name}:number", "is int, not a function"),
    ):
        with pytest.raises(FlopsError, match=message):
            load(wrong)


def test_a_start_is_numbers_or_a_file(tmp_path) -> None:
    values = [0.5, -2.0, 3.0]
    np.save(tmp_path / "a.npy", np.array(values))
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.csv").write_text("0.5,-2\n3\n")
    for given in ("0.5,-2,3", *(str(tmp_path / f"a.{e}") for e in ("npy", "json", "csv"))):
        assert read_start(given, None).tolist() == values
    assert read_start(None, 2).tolist() == [0, 0]
    for given, size, message in (
        (None, None, "--dimensions N for N zeros"),
        ("0.5,x", None, "neither numbers separated by commas"),
        (str(tmp_path / "b.npy"), None, "nor a readable"),
        ("nan", None, "one finite number or more"),
        ("1,2", 3, "--start has 2 numbers, but --dimensions is 3"),
    ):
        with pytest.raises(FlopsError, match=message):
            read_start(given, size)
