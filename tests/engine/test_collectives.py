"""Several processes: the same result as one, errors that all of them see, bytes that travel."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from flops.engine.fingerprint import digest
from tests.support.parallel_cases import CASES, STEPS, train
from tests.support.ranks import command

WORLD = 2
NAMES = (*CASES, "mezo")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two real processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    program, env = command("tests.support.parallel_cases", folder, WORLD)
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_do_what_one_does(name: str, found: list[dict[str, Any]]) -> None:
    alone, both = train(name), found[0][name]
    loose = 1e3 if name.endswith("automatic") else 1.0  # its sigma is as small as float64 allows

    def close(key: str, rtol: float, atol: float) -> None:
        torch.testing.assert_close(both[key], alone[key], rtol=loose * rtol, atol=loose * atol)

    close("gradients", 1e-6, 1e-9)
    close("parameters", 1e-9, 1e-11)
    for mine, theirs in zip(both["reports"], alone["reports"], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=loose * 1e-9)
        assert mine[1] == theirs[1]
        assert mine[2] == pytest.approx(theirs[2])
        assert mine[3] == theirs[3]
        mine, theirs = ({k: min(v, 1e9) for k, v in x[4].items()} for x in (mine, theirs))
        assert mine == pytest.approx(theirs, rel=loose * 1e-5, abs=1e-9)  # above 1e9 it is rounding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.bits
def test_all_processes_have_the_same_bits(name: str, found: list[dict[str, Any]]) -> None:
    first, second = (one[name] for one in found)
    assert torch.equal(first["parameters"], second["parameters"])
    assert torch.equal(first["gradients"], second["gradients"])
    assert first["reports"] == second["reports"]


@pytest.mark.parametrize("name", ["block", "shaped"])
def test_ranks_share_the_clean_pass_if_it_takes_longer_than_to_send_it(
    name: str, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert one[f"wide {name}"]["clean rows"] == 3  # of 6 points
        assert one[name]["clean rows"] == 6


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.bits
def test_batches_smaller_than_the_team(size: int, found: list[dict[str, Any]]) -> None:
    alone = train("leaf", size=size)
    torch.testing.assert_close(found[0][f"size {size}"]["parameters"], alone["parameters"])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("batch", "WorkerError: the 2 processes do not have the same batch:"),
        ("order", "WorkerError: the 2 processes do not have the same batch:"),
        ("order of targets", "WorkerError: the 2 processes do not have the same batch:"),
        ("index", "WorkerError: the 2 processes do not have the same index:"),
        ("kind", "WorkerError: the 2 processes do not have the same batch:"),
        ("model", "WorkerError: the 2 processes do not have the same parameters:"),
        ("nan", "NonFiniteLossError"),
    ],
)
def test_what_goes_wrong_on_one_is_an_error_on_all(
    what: str, said: str, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert one["refusals"][what].startswith(said)


def test_memory_layout_and_rounding_of_parameters_may_differ(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert not {"nothing", "rounding"} & set(one["refusals"])


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[2.0, 1.0], [3.0, 4.0]]),  # another order
        torch.tensor([[1.0, 2.0, 3.0, 4.0]]),  # another shape
        torch.tensor([[1, 2], [3, 4]]),  # another type
        [[1.0, 2.0], [3.0, 4.0]],
        torch.tensor([[1.0, 2.0], [3.0, torch.nan]]),
    ],
)
def test_every_byte_and_place_counts(other: Any) -> None:
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert digest([one]) != digest([other])
    assert digest([one, other]) != digest([other, one])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.bool, torch.complex64, torch.float64])
def test_where_and_how_a_tensor_lies_does_not_count(kind: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).to(kind)
    strided = tensor.T.contiguous().T
    assert strided.stride() != tensor.stride()
    assert digest(tensor) == digest(strided) == digest(tensor.requires_grad_(kind.is_complex))
    assert digest(tensor[:0]) != digest(tensor[:, :0])


def test_parts_that_are_no_tensors_count_by_their_value() -> None:
    assert digest(["a", "bc"]) != digest(["ab", "c"])
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest(np.array([1, 2])) != digest(np.array([2, 1]))
    assert digest(np.array(["a", None])) != digest(np.array([None, "a"]))
    assert digest(object()) == digest(object())  # of other processes, nothing else is known


@pytest.mark.parametrize(
    "name", ["mezo", "spsa shared", "es shared", "fzoo", "lozo", "jvp", "deepzero"]
)
def test_parameter_noise_sends_scalars_only(name: str, found: list[dict[str, Any]]) -> None:
    counts = found[0][name]["reports"][-1][3]
    rows = sum(sum(c) for c in counts.values())
    pruning = 4 * 3 * 2 * 4 * 6 * 8 / STEPS if name == "deepzero" else 0  # in the first step
    # Losses of the rows, counts and clean losses of the points, two dozen numbers for checks.
    assert found[0][name]["sent"] <= 8 * (rows + 4 * 6 + 4 * len(counts) + 24) + pruning


def test_likelihood_ratio_sends_a_gradient_and_scalars(found: list[dict[str, Any]]) -> None:
    for name in ("block", "leaf"):
        parameters, rows = len(found[0][name]["parameters"]), 3 * 36
        least, most = 8 * 0.2 * parameters, 8 * (parameters + 3 * rows)
        assert least < found[0][name]["sent"] < most + 8 * parameters  # energies: first 8 steps
