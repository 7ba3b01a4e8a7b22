"""Keyed noise: the same for any cut, different for any other key, with the stated moments."""

from __future__ import annotations

import random as python_random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flops.engine.collectives import Collectives
from flops.engine.rows import own_chunks
from flops.estimators.base import PointPlan
from flops.perturb import noise as noises
from flops.perturb import random
from flops.perturb.noise import COMPACT, KINDS, NoiseStream, fill, negative, values
from flops.perturb.random import mix

KEY = (7, 3, 1)
INDEPENDENT = ["gaussian", "rademacher"]
SIZES = [1, 5, 16, 17, 64, 65, 130]
pytestmark = pytest.mark.usefixtures("path")


def stream(kind: str, size: int, *, key=KEY, ids=(0, 1, 2), draws=(6, 6, 6)) -> NoiseStream:
    return NoiseStream(kind, key, list(ids), list(draws), size)


def all_rows(noise: NoiseStream, draws=(6, 6, 6), cut: int | None = None) -> Tensor:
    """All rows in order, asked for in pieces of ``cut`` rows."""
    points = torch.repeat_interleave(torch.arange(len(draws)), torch.tensor(draws))
    numbers = torch.cat([torch.arange(n) for n in draws])
    cut = cut or len(points)
    pieces = zip(points.split(cut), numbers.split(cut), strict=True)
    return torch.cat([noise.rows(p, n) for p, n in pieces])


class _Largest(TorchDispatchMode):
    """Bytes of the largest memory that is used beside a tensor's."""

    def __init__(self, beside: Tensor) -> None:
        super().__init__()
        self.bytes, self._beside = 0, beside.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        memory = found.untyped_storage()
        if memory.data_ptr() != self._beside:
            self.bytes = max(self.bytes, memory.nbytes())
        return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_draws_do_not_depend_on_the_cut(kind: str, size: int) -> None:
    draws = (6, 1, 9)
    whole = all_rows(stream(kind, size, draws=draws), draws)
    assert whole.shape == (16, size)
    for cut in (1, 2, 3, 5, 7, 15):
        assert torch.equal(all_rows(stream(kind, size, draws=draws), draws, cut), whole)


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_a_parameter_is_filled_from_any_offset(kind: str) -> None:
    size = 300_001  # several pieces, and no multiple of a word
    whole = fill(kind, KEY, torch.empty(size))
    assert 0.99 < float(whole.square().mean()) < 1.01
    for a, b in ((0, 1), (3, 70), (63, 64), (131_071, 131_080), (17, size), (size - 1, size)):
        assert torch.equal(fill(kind, KEY, torch.empty(b - a), a), whole[a:b])
    for dtype in (torch.float64, torch.bfloat16):
        found = fill(kind, KEY, torch.empty(7, 11, dtype=dtype), 5)
        assert torch.equal(found, whole[5:82].view(7, 11).to(dtype))
    assert torch.equal(fill(kind, KEY, torch.empty(11, 7).T, 5), whole[5:82].view(7, 11))
    assert fill(kind, KEY, torch.empty(0), 5).numel() == 0


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_no_temporary_is_as_large_as_the_noise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noises, "_DEVICE_WORDS", noises._WORDS)
    target = torch.zeros(3_000_000)
    with _Largest(beside=target) as seen:
        fill(kind, KEY, target)
    assert 0 < seen.bytes <= 1 << 20 < target.nbytes / 10


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_more_draws_keep_the_earlier_ones(kind: str) -> None:
    few, many = stream(kind, 5, draws=(2, 2, 2)), stream(kind, 5, draws=(9, 9, 9))
    assert torch.equal(few.take(1, 0, 2), many.take(1, 0, 9)[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_and_repeated_draws(kind: str) -> None:
    whole = stream(kind, 9).take(1, 0, 6)
    noise = stream(kind, 9)
    assert torch.equal(noise.take(1, 2, 1), whole[2:3])  # somebody else runs draws 0 and 1
    assert torch.equal(noise.take(1, 5, 1), whole[5:6])
    assert torch.equal(noise.take(1, 1, 4), whole[1:5])  # back again
    noise.take(2, 0, 3)
    assert torch.equal(noise.take(1, 5, 1), whole[5:6])  # another point in between


class _Counted:
    """Counts the words that a source of the CPU makes."""

    def __init__(self, source: np.random.PCG64DXSM, made: list[int]) -> None:
        self._source, self._made = source, made

    def random_raw(self, count: int) -> np.ndarray:
        self._made.append(count)
        return self._source.random_raw(count)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of words that are made, on either path."""
    found: list[int] = []

    def watch(module, name: str, count) -> None:
        original = getattr(module, name)

        def watched(*args):
            result = original(*args)
            return count(result)

        monkeypatch.setattr(module, name, watched)

    def tensor(words: Tensor) -> Tensor:
        found.append(words.numel())
        return words

    watch(random, "cpu_words", lambda source: _Counted(source, found))
    watch(random, "device_words", tensor)
    watch(random, "row_words", tensor)
    return found


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", INDEPENDENT)
def test_a_rank_makes_its_own_draws_only(kind: str, rank: int, made: list[int]) -> None:
    """However unequal the counts: words of its rows, and none of anybody else's."""
    counts, size = torch.tensor([40, 2, 0, 9, 133]), 70
    words = {"gaussian": 18, "rademacher": 2}[kind]
    noise = stream(kind, size, ids=range(5), draws=counts.tolist())
    rows = 0
    for part in own_chunks(PointPlan(counts, 1), 5, 7, Collectives(None, rank, 3)):
        found = noise.buffered(part.points, part.draws)
        assert found.shape == (len(part.points), size)
        rows += len(part.points)
    assert rows in (61, 62)
    assert sum(made) == rows * words


def test_a_late_block_of_orthogonal_draws_costs_no_earlier_one(made: list[int]) -> None:
    noise = stream("orthogonal", 8, draws=(20, 20, 20))
    noise.take(1, 17, 2)  # of the third block, which has 4 draws
    assert sum(made) == 4 * 2


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_a_piece_of_a_parameter_costs_no_other(kind: str, made: list[int]) -> None:
    block = {"gaussian": 4, "rademacher": 64}[kind]
    fill(kind, KEY, torch.empty(10 * block), 10**12 * block + 1)
    assert sum(made) == 11


@pytest.mark.parametrize("kind", KINDS)
def test_other_keys_give_other_noise(kind: str) -> None:
    size = 40
    keys = [KEY, (8, 3, 1), (7, 4, 1), (7, 3, 2), (3, 7, 1), (7, 1, 3), (-7, 3, 1)]
    found = [stream(kind, size, key=key).take(point, 0, 2) for key in keys for point in range(3)]
    rows = torch.cat(found)
    # Signs of 40 values agree by chance in 20 of them; never in (almost) all.
    match = (rows.sign() @ rows.sign().T - size * torch.eye(len(rows))).abs()
    assert float(match.max()) < size - 6


@pytest.mark.parametrize("kind", KINDS)
def test_noise_follows_the_identity_of_a_point_not_its_place(kind: str) -> None:
    forth, back = stream(kind, 9, ids=(10, 20, 30)), stream(kind, 9, ids=(30, 10, 20))
    for place, other in ((0, 1), (1, 2), (2, 0)):
        assert torch.equal(forth.take(place, 0, 6), back.take(other, 0, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_moments(kind: str) -> None:
    size, draws, points = 6, 4, 10_000
    noise = NoiseStream(kind, KEY, list(range(points)), [draws] * points, size)
    z = torch.stack([noise.take(point, 0, draws) for point in range(points)]).double()
    n = points * draws
    z = z.reshape(n, size)
    # 5 standard errors; |z| <= sqrt(6) for orthogonal noise, so Gaussian variances are largest.
    assert float(z.mean(0).abs().max()) < 5 / n**0.5
    second = z.T @ z / n
    error = (second - torch.eye(size)).abs()
    assert float(error.diagonal().max()) < 5 * (2 / n) ** 0.5
    assert float((error - error.diag().diag()).max()) < 5 / n**0.5
    cubes = z**3
    assert float(cubes.mean(0).abs().max()) < 5 * (15 / n) ** 0.5
    fourth = {"gaussian": 3.0, "rademacher": 1.0, "orthogonal": 3 * size / (size + 2)}[kind]
    assert float(((z**4).mean(0) - fourth).abs().max()) < 5 * (96 / n) ** 0.5


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_draws_of_a_point_are_uncorrelated(kind: str) -> None:
    z = stream(kind, 4096).take(0, 0, 6).double()
    correlation = z @ z.T / 4096 - torch.eye(6)
    correlation.fill_diagonal_(0)
    assert float(correlation.abs().max()) < 5 / 4096**0.5


@pytest.mark.parametrize("size", [1, 3, 16, 33])
def test_orthogonal_draws_are_exact_once_they_span_the_site(size: int) -> None:
    for blocks in (1, 2):
        draws = blocks * size
        z = stream("orthogonal", size, draws=[draws] * 3).take(1, 0, draws).double()
        torch.testing.assert_close(z.T @ z / draws, torch.eye(size).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draws", [1, 4, 7])
def test_fewer_orthogonal_draws_are_orthogonal(draws: int) -> None:
    z = stream("orthogonal", 7, draws=[draws] * 3).take(0, 0, draws).double()
    torch.testing.assert_close(z @ z.T, 7 * torch.eye(draws).double(), rtol=1e-5, atol=1e-5)


def test_orthogonal_directions_are_uniform() -> None:
    # The first coordinate of the first direction: without the sign of R it would be one-sided.
    size, points = 3, 4000
    noise = stream("orthogonal", size, ids=range(points), draws=[3] * points)
    firsts = torch.stack([noise.take(point, 0, 3) for point in range(points)])
    assert float(firsts[:, 0, 0].mean().abs()) < 5 / points**0.5
    share = float((firsts[:, 0] > 0).float().mean())
    assert abs(share - 0.5) < 5 * 0.5 / (3 * points) ** 0.5


@pytest.mark.parametrize("size", SIZES)
def test_rademacher_values_are_signs(size: int) -> None:
    z = stream("rademacher", size, draws=[50] * 3).take(0, 0, 50)
    assert z.shape == (50, size)
    assert set(z.flatten().tolist()) == {-1.0, 1.0}


def test_gaussian_values_are_normal() -> None:
    """Kolmogorov's distance (false alarm 1e-4), tails, and what 16 bits leave of higher moments."""
    z = fill("gaussian", (5,), torch.empty(409_600, dtype=torch.float64))
    count = len(z)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    distance = (torch.special.ndtr(z.sort().values) - places).abs().max()
    assert float(distance) < 2.23 / count**0.5
    for order, moment, spread in ((4, 3.0, 96**0.5), (6, 15.0, 10170**0.5)):
        assert float(z.pow(order).mean()) == pytest.approx(moment, abs=5 * spread / count**0.5)
    assert float((z.abs() > 3).double().mean()) == pytest.approx(
        0.0027, abs=5 * (0.0027 / count) ** 0.5
    )
    assert not torch.equal(z[: count // 2].sign(), -z[count // 2 :].sign())


@pytest.mark.parametrize("kind", KINDS)
def test_the_global_random_state_is_not_touched(kind: str) -> None:
    before = (torch.get_rng_state(), np.random.get_state(legacy=False), python_random.getstate())
    first = all_rows(stream(kind, 20))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state(legacy=False)) == str(before[1])
    assert python_random.getstate() == before[2]
    torch.manual_seed(99)
    assert torch.equal(all_rows(stream(kind, 20)), first)


@pytest.mark.parametrize("kind", KINDS)
def test_default_type_and_device_do_not_matter(kind: str) -> None:
    whole = stream(kind, 20).take(1, 0, 6)
    with torch.device("meta"):
        assert torch.equal(stream(kind, 20).take(1, 0, 6), whole)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = stream(kind, 20).take(1, 0, 6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, whole)


def test_mix_changes_half_of_the_bits() -> None:
    flips = []
    for value in range(64):
        here = mix(value, 5)
        flips += [(here ^ mix(value ^ (1 << bit), 5)).bit_count() for bit in range(64)]
    mean = sum(flips) / len(flips)
    assert abs(mean - 32) < 5 * 4 / len(flips) ** 0.5
    assert min(flips) > 8


def test_mix_tells_all_small_keys_apart() -> None:
    keys = {mix(a, b, c) >> 32 for a in range(-3, 3) for b in range(20) for c in range(20)}
    assert len(keys) == 6 * 20 * 20
    assert len({mix(), mix(0), mix(0, 0), mix(1, 0), mix(0, 1)}) == 5
    assert 0 <= mix(-1, 2**70) < 2**64


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_rows_however_they_are_cut(kind: str) -> None:
    points = torch.tensor([0] * 6 + [1] * 6 + [2] * 6)
    draws = torch.arange(6).repeat(3)
    parts = [(points[a:b], draws[a:b]) for a, b in ((0, 5), (5, 7), (7, 16), (16, 18))]
    truth = stream(kind, 37).rows(points, draws).clone()
    cut = stream(kind, 37)
    found = torch.cat([cut.buffered(*part).clone() for part in parts])
    assert torch.equal(found, truth)


@pytest.mark.bits
def test_bits_make_the_same_noise_and_its_opposite() -> None:
    found = stream("gaussian", 37).take(1, 1, 5)
    bits = stream("gaussian", 37).take(1, 1, 5, torch.empty(5, 40, dtype=torch.int16))[:, :37]
    assert torch.equal(values(bits, 0, 37), found)
    assert torch.equal(values(bits, 4, 9), found[:, 4:9])
    assert torch.equal(values(negative(bits), 0, 37), -found)
    assert torch.equal(values(found, 4, 9), found[:, 4:9])
    assert torch.equal(negative(found), -found)


def test_large_parts_come_as_bits() -> None:
    points, draws = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    most = COMPACT // 3
    for kind, size, compact in (
        ("gaussian", most + 1, True),
        ("gaussian", most, False),
        ("rademacher", most + 1, False),
    ):
        part = stream(kind, size).buffered(points, draws)
        assert (part.dtype == torch.int16) == compact
        assert torch.equal(values(part, 0, size), stream(kind, size).rows(points, draws))
