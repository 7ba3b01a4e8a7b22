"""Checkpoints: state that comes back exactly, and folders that are whole or absent."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flops.training import checkpoint as checkpoints
from flops.training.checkpoint import CheckpointError


def same(a, b) -> bool:
    """Alike in type, bits and, for tensors, layout."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return alike and torch.equal(*bits)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return (
            [*a] == [*b]
            and all(same(x, y) for x, y in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def through_files(state, folder: Path):
    return checkpoints.load(checkpoints.save(folder, 0, {}, state))[1]


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
)
STATES = {
    "plain": [None, True, False, 0, -3, 2**80, "", "ü\n", [], (), {}],
    "floats": [0.1, -0.0, 1e-310, float("inf"), -float("inf"), float("nan"), 1 / 3],
    "nested": {"a": [(1, [2.0, ()]), {"b": (None,)}], "": {"c/d": 1}},
    "keys": {0: "zero", "0": "text", True: "yes", 2.5: "half", None: "none"},
    "tensors": [torch.tensor(1.5), torch.zeros(0), torch.zeros(3, 0, 2), torch.tensor([[1, 2]])],
    "dtypes": [torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES],
    "nan": torch.tensor([float("nan"), -float("inf"), -0.0]),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.bits
def test_states_come_back_with_types_and_bits(name: str, tmp_path: Path) -> None:
    assert same(through_files(STATES[name], tmp_path), STATES[name])


def test_numpy_scalars_become_numbers(tmp_path: Path) -> None:
    state = [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), {np.uint16(7): 1}]
    expected = [0.1, float(np.float32(0.1)), 3, True, {7: 1}]
    assert same(through_files(state, tmp_path), expected)


def test_a_view_does_not_carry_what_it_is_a_view_of(tmp_path: Path) -> None:
    place = checkpoints.save(tmp_path, 0, {}, {"a": torch.zeros(1_000_000)[:3]})
    assert (place / "state.pt").stat().st_size < 10_000


def test_tensors_keep_their_layout(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = [base, base.permute(2, 0, 1), base[:, 1], base.mT, base[:1].expand(5, 3, 4)]
    found = through_files(views, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, views, strict=True))
    assert [t.stride() for t in found[:2]] == [t.stride() for t in views[:2]]
    assert found[3].stride() == base.mT.stride()


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(3), 1j, b"x"])
def test_other_values_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"cannot write a \w+ at '/a/0' of a state"):
        checkpoints.save(tmp_path, 0, {}, {"a": [value]})
    assert not any(tmp_path.iterdir())


def test_a_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    place = checkpoints.save(tmp_path, 0, {}, {})
    torch.save({"a": Path("x")}, place / "state.pt")
    sums = json.loads((place / "checksums.json").read_text(encoding="utf-8"))
    sums["state.pt"] = hashlib.sha256((place / "state.pt").read_bytes()).hexdigest()
    (place / "checksums.json").write_text(json.dumps(sums), encoding="utf-8")
    with pytest.raises(CheckpointError, match="step-00000000 is damaged"):
        checkpoints.load(place)


def write(folder: Path, step: int) -> None:
    tied = torch.full((2, 2), float(step))
    checkpoints.save(folder, step, {"a": tied, "b": tied}, {"step": step, "t": tied.T})


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (0, 3, 5, 100_000_000):
        write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-100000000"]
    weights, state = checkpoints.load(tmp_path / "step-00000005")
    assert state["step"] == 5
    assert torch.equal(weights["b"], torch.full((2, 2), 5.0))
    assert checkpoints.restore(tmp_path / "nothing") is None


class Killed(BaseException):
    """No handler of ours catches it."""


@pytest.mark.bits
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch) -> None:
    """Every call that changes the disk is the last one of a process, in turn."""
    moments, finished = 0, False
    while not finished:
        folder = tmp_path / str(moments)
        for step in (1, 2):
            write(folder, step)
        left = moments
        with monkeypatch.context() as patch:

            def dying(real):
                def call(*args, **kwargs):
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return real(*args, **kwargs)

                return call

            for owner, name in [
                *((os, n) for n in ("fsync", "rename", "mkdir", "rmdir", "unlink")),
                *((Path, n) for n in ("mkdir", "rename", "write_text")),
                (checkpoints, "save_file"),
            ]:
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                write(folder, 3)
                finished = True
            except Killed:
                moments += 1
        checkpoints.clean(folder)
        restored = checkpoints.restore(folder)
        assert restored is not None
        assert restored[1]["step"] in (2, 3)
        assert len(checkpoints.steps(folder)) >= 2
        write(folder, 3)  # and the next process goes on
        assert [p.name for p in checkpoints.steps(folder)] == ["step-00000002", "step-00000003"]
    assert moments > 12


@pytest.mark.parametrize("name", [*checkpoints.FILES, "checksums.json"])
@pytest.mark.parametrize("kind", ["flipped", "cut", "missing", "empty"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_taken(
    name: str, kind: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    file = tmp_path / "step-00000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    new = {"flipped": content, "cut": content[: len(content) // 2], "empty": b""}
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(new[kind])
    before = sorted(tmp_path.rglob("*"))
    said = r"step-00000002 is damaged.*taking step-00000001, which is intact"
    with pytest.warns(UserWarning, match=said):
        found = checkpoints.last_intact(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before  # only looked at
    with pytest.warns(UserWarning, match=said):
        restored = checkpoints.restore(tmp_path)
    assert found is not None
    assert restored is not None
    assert found[1]["step"] == restored[1]["step"] == 1
    again = checkpoints.restore(tmp_path)  # the damaged one is out of the way now
    assert again is not None
    assert again[1]["step"] == 1


def test_without_a_whole_one_the_message_says_so(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state.json is missing.*no other checkpoint"):
        checkpoints.restore(tmp_path)
    with pytest.raises(CheckpointError, match="no previous"):
        checkpoints.restore(tmp_path, "previous")
    write(tmp_path, 2)
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"00002 is damaged.*00001 is damaged"):
        checkpoints.restore(tmp_path)


def test_a_checkpoint_of_an_older_version_is_named(tmp_path: Path) -> None:
    """As version 0.1.0 wrote it."""
    place = tmp_path / "step-00000001"
    place.mkdir()
    save_file({"a": torch.zeros(2)}, place / "model.safetensors")
    save_file({"/0": torch.zeros(2)}, place / "state.safetensors")
    document = {"schema": 1, "step": 1, "version": "0.1.0", "state": {"dict": []}}
    (place / "state.json").write_text(json.dumps(document), encoding="utf-8")
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in place.iterdir()}
    (place / "checksums.json").write_text(json.dumps(sums), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"schema 1, this version reads 2.*\(0.1.0\)"):
        checkpoints.restore(tmp_path)
    assert place.is_dir()  # it may be whole: not put aside
