"""Damaged checkpoints, other data, two processes in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flops.errors import FlopsError
from flops.training import checkpoint as checkpoints
from flops.training.checkpoint import CheckpointError
from flops.training.config import ConfigError
from flops.training.loop import train
from flops.training.run_directory import RunDirectory, RunDirectoryError
from tests.support.pictures import make_folder
from tests.support.resuming import Stop, Stopper, flip, lines, small


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "state.json"])
def test_a_flipped_bit_is_noticed_and_the_previous_checkpoint_goes_on(
    name: str, unbroken: Path, stopped: Path
) -> None:
    flip(stopped / "checkpoints" / "step-00000006" / name)
    said = f"step-00000006 is damaged: {name} fails its checksum; taking step-00000004"
    with pytest.warns(UserWarning, match=said), pytest.raises(Stop):
        train(small(output=str(stopped)), resume=True, display=Stopper(6))
    found = lines(stopped)  # `test_the_previous_checkpoint_can_be_asked_for` goes to the end
    assert found[-1]["step"] == 6
    assert found == lines(unbroken)[: len(found)]


def test_two_damaged_checkpoints_are_too_many(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(7))
    kept = (tmp_path / "metrics.jsonl").read_bytes()
    for step in (4, 6):
        flip(tmp_path / "checkpoints" / f"step-0000000{step}" / "model.safetensors")
    with pytest.raises(CheckpointError, match="There is no other checkpoint: start a new run"):
        train(config, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    assert len(checkpoints.steps(tmp_path / "checkpoints")) == 2  # nothing was put aside


def test_one_process_at_a_time_and_the_same_data(tmp_path: Path) -> None:
    config = small(method="bp", output=str(tmp_path))
    with pytest.raises(Stop):
        train(config, display=Stopper(3))
    run, _ = RunDirectory.reopen(tmp_path)
    with pytest.raises(RunDirectoryError, match="another process"):
        train(config, resume=True)
    run.close()
    with pytest.raises(FlopsError, match="restore the data, or start a new run"):
        train(config.replace(limit=35), resume=True)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match="shorter than at the checkpoint"):
        train(config, resume=True)
    with pytest.raises(ConfigError, match="to resume, set `output`"):
        train(small(), resume=True)


def test_a_class_of_another_name_is_other_data(tmp_path: Path) -> None:
    make_folder(tmp_path / "data", {"cat": 20, "dog": 20})
    config = small(method="bp", data=str(tmp_path / "data"), output=str(tmp_path / "run"))
    with pytest.raises(Stop):
        train(config, display=Stopper(3))
    (tmp_path / "data" / "cat").rename(tmp_path / "data" / "cow")
    with pytest.raises(FlopsError, match="labels or classes"):
        train(config, resume=True)


def test_of_two_runs_that_start_in_one_folder_at_once_one_is_refused(tmp_path: Path) -> None:
    first = small(seed=1)
    held = RunDirectory.create(tmp_path / "run", first)
    (tmp_path / "run/config.json").rename(tmp_path / "aside")  # the other one looked before it came
    with pytest.raises(RunDirectoryError, match="another process"):
        RunDirectory.create(tmp_path / "run", small(seed=2))
    assert not (tmp_path / "run/config.json").exists()  # its settings are not put over the first's
    held.close()
