"""Two processes with their own points: the estimate of one with all, and one learned state."""

from __future__ import annotations

import copy
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.data_parallel_cases import CASES, MESH, OWN_COUNTS, train
from tests.support.parallel_cases import STEPS
from tests.support.ranks import command

SHARED = ("mezo", "spsa shared", "fzoo", "lozo", "jvp", "deepzero")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two real processes found, with four and two of six points."""
    return launch(tmp_path_factory.mktemp("ranks"), 2)


def launch(folder: Path, processes: int) -> list[dict[str, Any]]:
    program, env = command("tests.support.data_parallel_cases", folder, processes)
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(processes)]


alone_with_all = lru_cache(train)  # one process with all points; do not change what it returns


def same(one: Any, other: Any, close: float | None, path: str = "") -> None:
    """Two states are equal: in every bit, or up to rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], close, f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, close, f"{path}/{i}")
    elif isinstance(one, Tensor | float):
        a, b = torch.as_tensor(one), torch.as_tensor(other)
        if close is None:
            assert torch.equal(a, b) or bool((a.isnan() & b.isnan()).all()), path
        else:
            scale = float(b.abs().max()) if b.numel() else 0.0
            torch.testing.assert_close(
                a,
                b,
                rtol=close,
                atol=max(1e-12, close * scale),
                equal_nan=True,
                msg=lambda m: f"{path}: {m}",
            )
    else:
        assert one == other, path


@pytest.mark.parametrize("name", CASES)
def test_two_batches_are_one(name: str, found: list[dict[str, Any]]) -> None:
    alone, both = alone_with_all(name), found[0][name]
    loose = 1e3 if name == "automatic" else 1.0  # its sigma is as small as float64 allows
    close = {"rtol": loose * 1e-6, "atol": loose * 1e-9}
    torch.testing.assert_close(both["first"], alone["first"], **close)
    torch.testing.assert_close(both["gradients"], alone["gradients"], **close)
    torch.testing.assert_close(both["parameters"], alone["parameters"], **close)
    for mine, theirs in zip(both["reports"], alone["reports"], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=loose * 1e-9)
        assert mine[1] == theirs[1]
        costs = [{k: v for k, v in x[2].items() if k != "probe"} for x in (mine, theirs)]
        assert costs[0] == pytest.approx(costs[1])  # but every process traces the model
        assert mine[3] == pytest.approx(theirs[3], rel=loose * 1e-6, nan_ok=True)
        assert mine[5] == theirs[5] == 6
        snr = [{k: min(v, 1e9) for k, v in x[4].items()} for x in (mine, theirs)]
        assert snr[0] == pytest.approx(snr[1], rel=loose * 1e-5, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_what_is_learned_is_that_of_all_points(name: str, found: list[dict[str, Any]]) -> None:
    """Subspaces, mean Jacobians, allocators."""
    alone, both = (copy.deepcopy(x["state"]) for x in (alone_with_all(name), found[0][name]))
    if name == "unbiased":  # all of the last layer's gradient is measured: residuals are rounding
        for one in (alone, both):
            one["memory"]["part 2"].pop("ridge")
    same(both, alone, 1e-3 if name == "automatic" else 1e-6)


@pytest.mark.slow
def test_a_mesh_of_data_and_query_ranks_is_one_process(tmp_path: Path) -> None:
    ranks = launch(tmp_path, 4)
    for name in MESH:
        alone = train(name)
        for one in ranks:
            torch.testing.assert_close(one[name]["parameters"], alone["parameters"])
            same(one[name]["parameters"], ranks[0][name]["parameters"], None)
            for mine, theirs in zip(one[name]["reports"], alone["reports"], strict=True):
                assert mine[0] == pytest.approx(theirs[0], rel=1e-9)
                assert mine[1] == theirs[1]
                assert mine[2]["queries"] == pytest.approx(theirs[2]["queries"])


LENGTHS = ("shaped, other lengths", "automatic, other lengths")


@pytest.mark.parametrize("name", [*CASES, *OWN_COUNTS, *LENGTHS, "no index"])
@pytest.mark.bits
def test_all_processes_have_the_same_bits(name: str, found: list[dict[str, Any]]) -> None:
    first, second = (one[name] for one in found)
    same(first["parameters"], second["parameters"], None)
    same(first["state"], second["state"], None)
    same(first["reports"], second["reports"], None)


def test_points_without_an_index_have_noise_of_their_own(found: list[dict[str, Any]]) -> None:
    alone = train("leaf", indexed=False)
    torch.testing.assert_close(found[0]["no index"]["parameters"], alone["parameters"])


@pytest.mark.parametrize("name", SHARED)
def test_shared_draws_send_a_few_numbers(name: str, found: list[dict[str, Any]]) -> None:
    """Six draws and a clean loss of three groups, sums for reports; exact=True sends 107 more."""
    parameters = len(found[0][name]["parameters"])
    pruning = 3 * 2 * 8 * 8 / STEPS if name == "deepzero" else 0
    assert found[0][name]["sent"] <= 8 * (parameters + 30 + 3 * (6 + 2 + 8 + 2) + 6) + pruning


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("same", "WorkerError: all 2 processes have the same batch"),
        ("other", "WorkerError: the 2 processes do not have the same batch and index:"),
        ("index", "WorkerError: the 2 processes do not have the same use of an index:"),
        ("seed", "WorkerError: the 2 processes do not have the same seed:"),
        ("parameters", "WorkerError: the 2 processes do not have the same parameters:"),
    ],
)
def test_what_does_not_fit_is_an_error_on_all(
    what: str, said: str, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert one["refusals"][what].startswith(said)
        assert "nothing" not in one["refusals"]
    assert "parallel='query'" in found[0]["refusals"]["same"]
    assert "parallel='data'" in found[0]["refusals"]["other"]
