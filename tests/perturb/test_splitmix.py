"""The hash that makes noise on devices: its statistics, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flops.perturb import splitmix
from flops.perturb.random import mix, sequence

CPU = torch.device("cpu")
WORDS = 1 << 19


def stream(key: int) -> Tensor:
    """Consecutive places of one key."""
    return splitmix.device_words(sequence(mix(key)), 0, WORDS, CPU)


def keys(count: int) -> Tensor:
    """The first words of neighbouring keys, place by place."""
    known = [sequence(mix(3, key)) for key in range(WORDS // count)]
    rows = [splitmix.advanced(sequence, 0) for sequence in known]
    return splitmix.row_words(torch.tensor(rows), count).T.reshape(-1)


def draws(size: int) -> Tensor:
    """One place of neighbouring draws, place by place."""
    known = sequence(mix(5))
    rows = [splitmix.advanced(known, draw * size) for draw in range(WORDS // size)]
    return splitmix.row_words(torch.tensor(rows), size).T.reshape(-1)


SOURCES = {
    "places": lambda: stream(1),
    "other places": lambda: stream(2),
    "keys": lambda: keys(8),
    "draws": lambda: draws(272),
}


@pytest.fixture(params=SOURCES, scope="module")
def words(request: pytest.FixtureRequest) -> Tensor:
    return SOURCES[request.param]()


def uniforms(words: Tensor) -> Tensor:
    """The 16-bit pieces of words, centred, of unit variance."""
    pieces = words.view(torch.int16).double() + 0.5
    return pieces * (12 / 2**32) ** 0.5


def test_bits_are_even_and_independent(words: Tensor) -> None:
    bits = 2.0 * ((words.unsqueeze(1) >> torch.arange(64)) & 1) - 1  # (WORDS, 64)
    error = len(words) ** -0.5
    assert float(bits.mean(0).abs().max()) < 5 * error
    products = bits.T @ bits / len(words) - torch.eye(64)
    assert float(products.abs().max()) < 5 * error
    follow = bits[:-1].T @ bits[1:] / len(words)  # with all bits of the next word
    assert float(follow.abs().max()) < 5.5 * error  # of 4,096


def test_pieces_are_uniform(words: Tensor) -> None:
    """Chi-square of every 16-bit piece's upper and lower half, over 256 cells."""
    pieces = words.view(torch.int16).view(-1, 4).to(torch.int32).bitwise_and_(0xFFFF)
    for piece in pieces.unbind(1):
        for cells in (piece >> 8, piece & 0xFF):
            counts = torch.bincount(cells, minlength=256).double()
            mean = len(words) / 256
            chi = float((counts - mean).square().sum() / mean)
            assert abs(chi - 255) < 5 * (2 * 255) ** 0.5


def test_moments_to_the_sixth(words: Tensor) -> None:
    u = uniforms(words)
    for order in range(1, 7):
        truth = 0.0 if order % 2 else 3 ** (order / 2) / (order + 1)
        spread = (3**order / (2 * order + 1) - truth**2) ** 0.5
        assert abs(float(u.pow(order).mean()) - truth) < 5 * spread / len(u) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 64, 272, 1088, 4096])
def test_neighbours_are_uncorrelated(words: Tensor, lag: int) -> None:
    u = uniforms(words)
    for x in (u, u.square() - 1, u.pow(3) - 1.8 * u):
        x = x / x.square().mean().sqrt()
        assert abs(float((x[:-lag] * x[lag:]).mean())) < 5 * (len(u) - lag) ** -0.5


def test_keys_never_run_into_each_other() -> None:
    """A key that is a place in another's sequence has a sequence of its own."""
    known = sequence(mix(7))
    here = splitmix.device_words(known, 0, 40_000, CPU)
    later = sequence((known[0] + 100 * known[1]) % 2**64)
    other = splitmix.device_words(later, 0, 39_900, CPU)
    assert other[0] == here[100]
    assert len(set(here.tolist()) & set(other.tolist())) == 1
    u, v = uniforms(here[101:]), uniforms(other[1:])
    assert abs(float((u * v).mean())) < 5 * len(u) ** -0.5


def test_gammas_are_odd_and_irregular() -> None:
    gammas = [sequence(key)[1] for key in range(20_000)]
    assert all(gamma % 2 for gamma in gammas)
    assert len(set(gammas)) == len(gammas)
    assert min((gamma ^ gamma >> 1).bit_count() for gamma in gammas) >= 24
