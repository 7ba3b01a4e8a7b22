"""Fingerprints: numbers that differ if ranks are not at the same step of the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that differ if ranks are not at the same step of the same run.

    Attributes:
        exact: 48-bit digests by name, which are exact in float64.
        close: Checksum of the parameters, which may differ by rounding.
        scale: Scale of that rounding.
    """

    exact: dict[str, float]
    close: float
    scale: float

    def values(self) -> list[float]:
        """All of them."""
        return [*self.exact.values(), self.close, self.scale]


def differences(prints: Fingerprint, high: Tensor, low: Tensor) -> list[str]:
    """What differs between ranks, from the maxima and minima of their fingerprints."""
    count = len(prints.exact)
    wrong = [name for name, h, w in zip(prints.exact, high, low, strict=False) if h != w]
    high, low = high[count:], low[count:]
    # Parameters need not be bitwise equal: they may come from different machines.
    if not torch.allclose(high, low, rtol=0, atol=1e-6 * float(high[-1]), equal_nan=True):
        wrong.append("parameters")
    return wrong


def fingerprint(model: nn.Module, step: int, seed: int, **more: Any) -> Fingerprint:
    """Fingerprint of a step, and of some values of each parameter.

    Args:
        model: The model.
        step: Steps taken.
        seed: Seed of the noise.
        more: What else must be the same, by name; every byte of it counts.
    """
    kinds = [(n, p.dtype, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
    exact = {name: digest(value) for name, value in more.items()}
    exact |= {"seed": digest(seed), "step": digest(step), "model": digest(repr(kinds))}
    samples = [_sample(p).cpu() for p in model.parameters()]
    values = torch.cat([torch.empty(0, dtype=torch.float64), *samples])
    # Distinct weights between 1 and 2 by position: multiples of the golden ratio modulo 1.
    weights = (torch.arange(len(values)).double() * 0.6180339887498949) % 1 + 1
    return Fingerprint(exact, float(values @ weights), float(values.abs().sum()))


def digest(*parts: Any) -> float:
    """An integer below 2^48 that depends on every byte of the parts and on their order."""
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        _feed(found, part)
    return float(int.from_bytes(found.digest(), "big"))


def _feed(found: Any, part: Any) -> None:
    """Add one part; objects with neither bytes nor a stable repr count by type only."""
    if isinstance(part, Tensor):
        dense = part.detach() if part.layout == torch.strided else part.detach().to_dense()
        dense = dense.dequantize() if dense.is_quantized else dense.resolve_conj().resolve_neg()
        found.update(f"tensor {dense.dtype} {tuple(dense.shape)};".encode())
        found.update(dense.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(part, np.ndarray) and not part.dtype.hasobject:
        found.update(f"array {part.dtype} {part.shape};".encode())
        found.update(np.ascontiguousarray(part).tobytes())
    elif isinstance(part, Mapping):
        found.update(f"mapping {len(part)};".encode())
        for key, value in part.items():
            _feed(found, key)
            _feed(found, value)
    elif isinstance(part, list | tuple | np.ndarray):
        found.update(f"sequence {len(part)};".encode())
        for one in part:
            _feed(found, one)
    else:
        text = repr(part)  # a repr with an address differs between processes
        text = "" if " at 0x" in text else text
        found.update(f"{type(part).__qualname__} {len(text)} {text};".encode())


def _sample(tensor: Tensor, most: int = 256) -> Tensor:
    """Evenly spaced values of a tensor, cheap for a table of millions."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)].double()


def batch_digest(leaves: Iterable[Any], index: Tensor | None, whole: bool) -> float:
    """Digest of a batch, of all its bytes or of a sample of every tensor."""
    parts = list(leaves)
    if not whole:
        parts = [_sample(x) if isinstance(x, Tensor) and _plain(x) else x for x in parts]
    return digest(parts, index)


def _plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_complex()
