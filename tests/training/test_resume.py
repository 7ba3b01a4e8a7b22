"""A run that was stopped goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from flops.cli.main import main
from flops.training import checkpoint as checkpoints
from flops.training.loop import NullDisplay, train
from tests.support.resuming import Stop, Stopper, assert_alike, lines, small


class Signal(NullDisplay):
    """Asks the process to stop during a step."""

    def __init__(self, number: signal.Signals, times: int = 1) -> None:
        self.number, self.times = number, times

    def step(self, trainer: Any, line: dict[str, Any]) -> None:
        for _ in range(self.times if line["step"] == 3 else 0):
            os.kill(os.getpid(), self.number)


@pytest.mark.bits
def test_an_unbroken_run_learns_and_repeats_itself(unbroken: Path, tmp_path: Path) -> None:
    train(small(output=str(tmp_path / "run")))
    assert_alike(tmp_path / "run", unbroken)
    steps = [line for line in lines(unbroken) if line["kind"] == "step"]
    assert len(steps) == 12
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (
        steps[-1]["shaping"]["blocks-2"]["explained_variance"] > 0
    )  # there is something to restore
    place = tmp_path / "run" / "checkpoints"
    weights, state = checkpoints.load(checkpoints.steps(place)[-1])
    state["optimizer"]["state"][3]["exp_avg"].view(torch.int32).flatten()[5] ^= 1
    checkpoints.save(place, 12, weights, state)
    with pytest.raises(AssertionError):  # and the comparison sees a single bit
        assert_alike(tmp_path / "run", unbroken)


@pytest.mark.parametrize(
    "method",
    [
        "bp",
        pytest.param("mezo", marks=pytest.mark.bits),
        "fzoo",
        "lozo",
        "jvp",
        pytest.param("ops-lr", marks=pytest.mark.bits),
        "ops-spsa",
    ],
)
def test_every_kind_of_state_is_restored(method: str, tmp_path: Path) -> None:
    whole, broken = (
        small(method=method, queries=4, epochs=2, limit=24, output=str(tmp_path / name))
        for name in ("whole", "broken")
    )
    train(whole)
    with pytest.raises(Stop):
        train(broken, display=Stopper(3))
    train(broken, resume=True)
    assert_alike(tmp_path / "broken", tmp_path / "whole")


def test_the_command_line_resumes(unbroken: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stop):
        train(small(output=str(out)), display=Stopper(11))  # some points are not seen again
    with pytest.raises(SystemExit, match=r"keeps its settings but .*: leave out queries, or start"):
        main(["finetune", "--resume", str(out), "--queries", "5"])
    moved = out.rename(tmp_path / "moved")
    main(["finetune", "--resume", str(moved)])
    assert "from step 10" in capsys.readouterr().out
    assert_alike(moved, unbroken)
    before = (moved / "metrics.jsonl").read_bytes()
    main(["finetune", f"--resume={moved}"])  # nothing is left to do
    assert (moved / "metrics.jsonl").read_bytes() == before
    with pytest.raises(SystemExit, match="holds no run"):
        main(["finetune", "--resume", str(tmp_path)])
    with pytest.raises(SystemExit, match="leave out --config and --preset"):
        main(["finetune", "--resume", str(moved), "--preset", "tiny"])


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)]
)
def test_asked_to_stop(number: signal.Signals, times: int, tmp_path: Path) -> None:
    """The running step is kept, unless one insists."""
    config, before = small(method="bp", output=str(tmp_path)), signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        train(config, display=Signal(number, times))
    found = [path.name for path in checkpoints.steps(tmp_path / "checkpoints")]
    assert found == ["step-00000002", "step-00000003"][: 3 - times]
    assert signal.getsignal(number) is before
    assert train(config, resume=True).steps == 12


@pytest.mark.bits
def test_the_previous_checkpoint_can_be_asked_for(unbroken: Path, stopped: Path) -> None:
    (skipped,) = sorted((stopped / "checkpoints").glob("step-*"))[-1:]
    train(small(output=str(stopped)), resume=True, checkpoint="previous")
    assert (stopped / "checkpoints" / f"skipped-{skipped.name}").is_dir()
    assert_alike(stopped, unbroken)
