"""Batches know their rows, from any kind of data set, and all processes see the same ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from flops.integrations.rows import ROWS, NumberedCollator, NumberedRows, points_in
from tests.support.language import arguments, collate, language_model, same, texts, trainer, weights
from tests.support.launching import torchrun

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from tests.support.language import arguments, language_model, trainer

folder = Path(sys.argv[1])
options = dict(max_steps=3, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
options |= dict(optim="sgd", learning_rate=0.1)  # Adam's first steps are those of the signs
ours = trainer(language_model(), arguments(folder, **options), eval_dataset=None)
ours.train()
rank = dist.get_rank() if dist.is_initialized() else 0
state = {n: p.detach().clone() for n, p in ours.model.named_parameters()}
torch.save([state, ours.totals.state_dict(), ours.state.log_history], folder / f"rank-{rank}.pt")
"""


def test_rows_travel_with_their_items() -> None:
    data = NumberedRows([{"x": 10.0}, {"x": 11.0}, {"x": 12.0}])
    assert len(data) == 3
    assert data[1] == (1, {"x": 11.0})
    found = NumberedCollator(lambda items: {"x": torch.tensor([i["x"] for i in items])})(
        data.__getitems__([2, 0])
    )
    assert found[ROWS].tolist() == [2, 0]
    assert found["x"].tolist() == [12.0, 10.0]
    assert points_in(found) == 2
    assert points_in({"flag": True, "x": torch.zeros(4, 2)}) == 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(texts())


def indices(data: Any, folder: Path, **options: Any) -> list[list[int] | None]:
    """Index of each step, as the engine saw it."""
    args = arguments(folder, max_steps=4, **options)
    ours = trainer(language_model(), args, method="mezo", queries=None, train_dataset=data)
    seen: list[list[int] | None] = []
    inner = ours.training_step

    def step(model: Any, inputs: Any, items: Any = None) -> Any:
        fg = ours.engine.estimate

        def estimate(*args: Any, **given: Any) -> Any:
            seen.append(None if given["index"] is None else given["index"].tolist())
            return fg(*args, **given)

        ours.engine.estimate = estimate  # type: ignore[method-assign]
        try:
            return inner(model, inputs, items)
        finally:
            ours.engine.estimate = fg  # type: ignore[method-assign]

    ours.training_step = step
    ours.train()
    return seen


def test_kinds_of_data_sets(tmp_path: Path) -> None:
    plain = indices(texts(), tmp_path)
    assert sorted(row for rows in plain for row in rows or []) == list(range(12))
    columns = datasets.Dataset.from_list([{**text, "note": "unused"} for text in texts()])
    assert indices(columns, tmp_path) == plain
    assert indices(texts(), tmp_path, train_sampling_strategy="sequential") == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    lengths = indices(texts(), tmp_path, train_sampling_strategy="group_by_length")
    assert sorted(row for rows in lengths for row in rows or []) == list(range(12))
    assert indices(Stream(), tmp_path) == [None] * 4


def test_workers_load_the_same_batches(tmp_path: Path) -> None:
    found = []
    for workers in (0, 1):
        args = arguments(tmp_path, max_steps=2, dataloader_num_workers=workers)
        ours = trainer(language_model(), args, method="mezo", queries=None)
        ours.train()
        found.append(weights(ours.model))
    assert same(*found)


def test_a_sampler_that_repeats_points_gives_no_index(tmp_path: Path) -> None:
    ours = trainer(language_model(), arguments(tmp_path))
    batch = {**collate(texts()[:2]), ROWS: torch.tensor([3, 3])}
    assert ours._split(dict(batch))[2] is None
    batch[ROWS] = torch.tensor([3, 4])
    inputs, labels, rows = ours._split(dict(batch))
    assert rows is not None
    assert rows.tolist() == [3, 4]
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert labels is not None


def test_training_needs_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="requires a train_dataset"):
        trainer(language_model(), arguments(tmp_path), train_dataset=None).train()


@pytest.mark.slow
def test_processes_share_the_queries_of_the_same_batches(tmp_path: Path) -> None:
    """One process or two: the same steps up to rounding, and the same model on all ranks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found: dict[int, list[Any]] = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        command = (
            torchrun(str(script), str(folder), processes=2)
            if processes == 2
            else [sys.executable, str(script), str(folder)]
        )
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        found[processes] = [
            torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(processes)
        ]
        assert (folder / "checkpoint-2" / "flops.pt").is_file()
    alone, (first, second) = found[1][0], found[2]
    assert same(first[0], second[0])
    assert first[1]["queries"] == second[1]["queries"] == alone[1]["queries"]
    assert first[1]["points"] == alone[1]["points"] == 3 * 6
    losses = [[entry["loss"] for entry in log if "loss" in entry] for *_, log in (alone, first)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == 3
    for name, wanted in alone[0].items():
        torch.testing.assert_close(first[0][name], wanted, rtol=1e-2, atol=1e-3)
    json.dumps(first[2])
