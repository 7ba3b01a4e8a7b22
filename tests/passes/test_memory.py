"""Chunks by the free memory: large models in small ones, the same after a resumption."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.passes import memory as chunking
from tests.conftest import flat, gradients, squared


def model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def rows_of(net: nn.Module) -> list[int]:
    seen: list[int] = []
    net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def engine(net: nn.Module) -> ForwardGradient:
    return ForwardGradient(net, squared, [Group(net, LikelihoodRatio(), 100)])


@pytest.mark.parametrize(("room", "rows"), [(1 << 40, 256), (50_000, 16), (1, 2)])
@pytest.mark.bits
def test_less_room_makes_smaller_chunks_and_the_same_gradient(
    room: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, y = model(32).double(), torch.randn(6, 4).double(), torch.randn(6, 2).double()
    fg = engine(net)
    fg.estimate(x, y)
    whole = flat(gradients(net))
    monkeypatch.setattr(chunking, "_free_on_cpu", lambda: int(room / chunking.SHARE) + 8)
    net.zero_grad()
    fresh = engine(net)
    with fresh.session(x, y) as session:
        assert session.chunk == rows
    seen = rows_of(net)
    fresh.estimate(x, y)
    assert max(seen[1:]) <= max(rows, 3)  # the first pass is the clean one; none has a single row
    torch.testing.assert_close(flat(gradients(net)), whole, rtol=1e-9, atol=1e-11)


def test_a_wider_model_has_fewer_rows() -> None:
    rows = []
    for width in (8, 800, 80_000):
        net = model(width)
        with engine(net).session(torch.randn(6, 4), torch.randn(6, 2)) as session:
            rows.append(chunking.rows_for(10_000_000, session.layout.structure, 2))
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 256
    assert rows[-1] < 16


@pytest.mark.bits
def test_a_resumed_run_keeps_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = model(), torch.randn(6, 4), torch.randn(6, 2)
    first = engine(net)
    first.estimate(x, y)
    monkeypatch.setattr(chunking, "_free_on_cpu", lambda: 1)
    again = engine(net)
    again.load_state_dict(first.state_dict())
    with again.session(x, y) as session, first.session(x, y) as before:
        assert session.chunk == before.chunk == 256


def test_the_memory_of_this_machine_is_found() -> None:
    assert 1 << 20 < chunking.free_room(model()) < 1 << 50


def test_where_the_system_does_not_say_some_memory_is_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(chunking.Path, "read_text", absent)
    monkeypatch.delattr(chunking.os, "sysconf_names", raising=False)
    monkeypatch.delattr(chunking.os, "sysconf", raising=False)
    assert chunking.free_room(model()) == int(chunking.SHARE * chunking.UNKNOWN)
