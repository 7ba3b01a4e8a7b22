"""The code of docs/blackbox.md runs, block by block."""

from __future__ import annotations

import re
from pathlib import Path

from flops.blackbox import Tuner

PAGE = Path(__file__).parents[2] / "docs" / "blackbox.md"


def test_the_code_runs_and_tunes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)  # for the journal
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    blocks = [block for block in blocks if not block.startswith("# ")]  # files, not scripts
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    steps = []
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
        tuner = namespace["tuner"]
        assert isinstance(tuner, Tuner)
        steps.append(tuner.steps)
    assert steps == [40, 40, 3, 20]
    assert (tmp_path / "runs" / "own.db").exists()
    first = capsys.readouterr().out.splitlines()[0]
    assert float(first.split()[0]) < 6  # 12.8 at the start
