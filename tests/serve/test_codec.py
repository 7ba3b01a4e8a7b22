"""BodyReader and limits, without a process."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from flops.serve.codec import WireError, decode, encode
from flops.serve.limits import BodyReader, TokenBucket, retry_after

TENSORS = {
    "rows": torch.tensor([3, 1, 2]),
    "text": torch.randn(2, 3, 5),
    "none": torch.zeros(2, 0, 5),
    "pixels": torch.arange(7, dtype=torch.uint8),
}
TYPES = {name: tensor.dtype for name, tensor in TENSORS.items()}


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in TENSORS.items()
    )


def test_the_library_reads_what_we_write_and_we_what_it_writes() -> None:
    assert same(load(encode(TENSORS, {"points": "a"})))
    tensors, metadata = decode(bytearray(save(TENSORS, {"points": "a"})), TYPES)
    assert same(tensors)
    assert metadata == {"points": "a"}


def test_equal_tensors_make_equal_bytes() -> None:
    backwards = dict(reversed(TENSORS.items()))
    strided = TENSORS | {"text": TENSORS["text"].transpose(0, 1).contiguous().transpose(0, 1)}
    metadata = {"a": "1", "b": "2"}
    first = encode(TENSORS, metadata)
    assert encode(backwards, dict(reversed(metadata.items()))) == first == encode(strided, metadata)


def test_tensors_are_views_of_the_body() -> None:
    body = bytearray(encode({"text": torch.zeros(4)}))
    tensor = decode(body, {"text": torch.float32})[0]["text"]
    body[-1] = 0x40
    assert tensor[-1] == 2


def test_unaligned_data_are_read_too() -> None:
    body = encode({"text": torch.randn(4)})
    size = int.from_bytes(body[:8], "little")
    header = body[8 : 8 + size].rstrip() + b" "
    header += b" " * ((1 - len(header)) % 4)  # data at 1 modulo 4
    odd = len(header).to_bytes(8, "little") + header + body[8 + size :]
    found = decode(bytearray(odd), {"text": torch.float32})[0]["text"]
    assert torch.equal(found, load(body)["text"])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},  # 4 bytes are left over
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1] * 9 + [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_headers_that_lie_are_refused(entry) -> None:
    header = json.dumps({"text": entry}).encode()
    body = bytearray(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(WireError):
        decode(body, {"text": torch.float32})


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(body) -> None:
    with pytest.raises(WireError):
        decode(bytearray(body), {"text": torch.float32})


def test_rate_lets_a_burst_pass_and_then_one_at_a_time() -> None:
    now = [0.0]
    rate = TokenBucket(4, lambda: now[0])
    for _ in range(4):
        rate.take()
    with pytest.raises(WireError) as caught:
        rate.take()
    assert caught.value.status == 429
    assert caught.value.retry_after == pytest.approx(0.25)
    now[0] += 0.25
    rate.take()
    with pytest.raises(WireError):
        rate.take()
    now[0] += 100  # idle time is worth a second's burst, no more
    for _ in range(4):
        rate.take()
    with pytest.raises(WireError):
        rate.take()
    unlimited = TokenBucket(0)
    for _ in range(1000):
        unlimited.take()
    assert [retry_after(s) for s in (0.01, 1, 1.2)] == ["1", "1", "2"]


def test_bodies_share_a_bound_and_give_back_what_they_held() -> None:
    async def pieces(count: int, wait: float = 0.0):
        for _ in range(count):
            await asyncio.sleep(wait)
            yield bytes(10)

    async def run() -> None:
        bodies = BodyReader(memory=50, patience=0.2)
        async with bodies.read(pieces(3), None, 30) as first:
            assert (len(first), bodies.held) == (30, 30)
            for source, announced, most, status in (
                (pieces(3), None, 30, 429),  # the first holds too much
                (pieces(4), None, 15, 413),
                (pieces(2), "31", 30, 413),
                (pieces(2), "9" * 5000, 30, 413),
                (pieces(2, 0.15), None, 30, 408),
            ):
                with pytest.raises(WireError) as caught:
                    await bodies.read(source, announced, most).__aenter__()
                assert caught.value.status == status
                assert bodies.held == 30
        assert bodies.held == 0

    asyncio.run(run())
