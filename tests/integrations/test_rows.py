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
import json
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from tests.support.language import arguments, language_model, trainer

folder, chosen, given = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
options = dict(max_steps=3, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
options |= dict(optim="sgd", learning_rate=0.1)  # Adam's first steps are those of the signs
args = arguments(folder, **options, **given)
ours = trainer(language_model(), args, eval_dataset=None, **chosen)
ours.train()
rank = dist.get_rank() if dist.is_initialized() else 0
state = {n: p.detach().clone() for n, p in ours.model.named_parameters()}
found = [state, ours.totals.state_dict(), ours.state.log_history, ours.state.total_flos]
torch.save(found, folder / f"rank-{rank}.pt")
"""


def run(folder: Path, processes: int, chosen: dict[str, Any], **given: Any) -> list[list[Any]]:
    """What every process of a short run found: parameters, totals, log, operations."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [str(script), str(folder), json.dumps(chosen), json.dumps(given)]
    launched = torchrun(*command) if processes == 2 else [sys.executable, *command]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(launched, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "checkpoint-2" / "flops.pt").is_file()
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(processes)]


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
    chosen = {"parallel": "query"}
    (alone,) = run(tmp_path / "1", 1, chosen)
    first, second = run(tmp_path / "2", 2, chosen)
    check(alone, first, second)
    assert first[1]["points"] == 3 * 6


@pytest.mark.slow
def test_processes_train_on_their_own_batches(tmp_path: Path) -> None:
    """Two processes with three points each are one with six: batches, gradients, logs, costs."""
    chosen = {"method": "mezo", "queries": None}
    (alone,) = run(tmp_path / "1", 1, chosen, per_device_train_batch_size=6)
    first, second = run(tmp_path / "2", 2, chosen)
    check(alone, first, second)
    assert first[1]["points"] == 3 * 12
    # As the stock Trainer, it counts padding of each process's own batches.
    assert first[3] == pytest.approx(alone[3], rel=0.3)


@pytest.mark.slow
def test_processes_with_texts_of_other_lengths_learn_one_subspace(tmp_path: Path) -> None:
    first, second = run(tmp_path / "2", 2, {})
    assert same(first[0], second[0])
    assert first[1] == second[1]


def check(alone: list[Any], first: list[Any], second: list[Any]) -> None:
    assert same(first[0], second[0])
    assert first[1]["queries"] == second[1]["queries"] == alone[1]["queries"]
    assert first[1]["points"] == alone[1]["points"]
    losses = [
        [entry["loss"] for entry in log if "loss" in entry] for _, _, log, _ in (alone, first)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == 3
    for name, wanted in alone[0].items():
        torch.testing.assert_close(first[0][name], wanted, rtol=1e-2, atol=1e-3)
    json.dumps(first[2])
