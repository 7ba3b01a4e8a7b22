"""From random bits to noise: 8 bits are 8 signs, 16 bits one of 65,536 normal quantiles.

A 64-bit word holds 64 signs or 4 normals, the lowest bits first. Tables are cached on every device.
Normals may be stored as their 16-bit codes (int16).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

CACHED = 1 << 17  # values per lookup on the CPU: more would not fit into the cache


def _signs() -> Tensor:
    values, places = torch.arange(256, device="cpu"), torch.arange(8, device="cpu")
    return (2 * ((values.unsqueeze(1) >> places) & 1) - 1).float()  # (256, 8)


def _normals() -> Tensor:
    places = torch.arange(1 << 16, dtype=torch.float64, device="cpu")
    quantiles = torch.special.ndtri((places + 0.5) / (1 << 16))
    scaled: Tensor = quantiles * float(quantiles.square().mean()) ** -0.5
    return scaled.float()  # (65536,)


@cache
def table(signs: bool, device: torch.device) -> Tensor:
    """Lookup table of 8-bit groups of signs, or of 16-bit codes of normals."""
    with torch.inference_mode(mode=False):
        return (_signs() if signs else _normals()).to(device)


def look_up(signs: bool, words: np.ndarray | Tensor, out: Tensor) -> None:
    """Write the values of random words, or the codes of normals if ``out`` is int16.

    Args:
        signs: Signs or normals.
        words: 64-bit words, as an array or as a tensor on the device of ``out``.
        out: Flat, contiguous, of the length of all values.
    """
    if out.dtype == torch.int16:
        bits = torch.from_numpy(words.view(np.int16)) if isinstance(words, np.ndarray) else words
        out.copy_(bits.view(-1).view(torch.int16))
        return
    if isinstance(words, np.ndarray):  # half of torch's time for few words
        index = torch.from_numpy(words.view(np.uint8 if signs else np.uint16).astype(np.int32))
    else:
        index = _index(words.view(-1).view(torch.uint8 if signs else torch.int16))
    found = out.view(-1, 8) if signs else out
    torch.index_select(table(signs, out.device), 0, index, out=found)


def values(noise: Tensor, begin: int, end: int) -> Tensor:
    """Columns of noise, looked up if it is stored as codes."""
    part = noise[:, begin:end]
    if noise.dtype != torch.int16:
        return part
    out = torch.empty(part.shape, dtype=torch.float32, device=noise.device)
    size = CACHED if noise.device.type == "cpu" else part.numel()
    rows = max(1, size // max(1, end - begin))
    for bits, place in zip(part.split(rows), out.split(rows), strict=True):
        index = _index(bits).view(-1)
        torch.index_select(table(False, noise.device), 0, index, out=place.view(-1))
    return out


def negative(noise: Tensor) -> Tensor:
    """The negative draws: the table is symmetric, so codes of -z are inverted codes of z."""
    return noise.bitwise_not() if noise.dtype == torch.int16 else -noise


def _index(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).bitwise_and_(0xFFFF)  # torch has few operations on uint16


def signed(z: Tensor, unit: int) -> Tensor:
    """Noise of the rows, given that of the draws; pairs are adjacent."""
    return z if unit == 1 else torch.stack([z, negative(z)], 1).flatten(0, 1)
