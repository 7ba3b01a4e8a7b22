"""Serialization of tensors in request and response bodies; input is untrusted.

A body is in the safetensors format: 8 bytes with the length of the header, the header in JSON
(`{name: {dtype, shape, data_offsets}, "__metadata__": {...}}`), the data. It is parsed here and not
by the library so that tensors are views of the body (no copy), unexpected names and types are
rejected before anything is read, and equal tensors give equal bytes, which idempotency needs.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flops.errors import FlopsError

BINARY, JSON = "application/octet-stream", "application/json"
DTYPES = {"U8": torch.uint8, "I64": torch.int64, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER = 65536  # largest size of a header, in bytes
METADATA = "__metadata__"


class WireError(FlopsError, ValueError):
    """A body or a request is invalid.

    Args:
        message: What was given, what is allowed, what to do.
        status: The HTTP status of the response.
        retry_after: Seconds after which a retry may succeed.
    """

    def __init__(self, message: str, status: int = 422, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def digest(body: bytes | bytearray | memoryview) -> str:
    """SHA-256 of a body, in hexadecimal: the name of uploaded points."""
    return hashlib.sha256(body).hexdigest()


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors body; equal tensors make equal bytes.

    Args:
        tensors: uint8, int64 and float32 tensors by name.
        metadata: Strings for the header.

    Raises:
        WireError: A tensor of another type.
    """
    header: dict[str, Any] = {METADATA: dict(sorted((metadata or {}).items()))} if metadata else {}
    parts: list[bytes] = []
    offset = 0
    # Wide types first, so that every tensor starts at a multiple of its element's size.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.dtype not in NAMES:
            raise WireError(f"{name} is {tensor.dtype}; {', '.join(map(str, NAMES))} can be sent")
        data = tensor.numpy().tobytes()
        span = [offset, offset + len(data)]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        parts.append(data)
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def decode(
    body: bytearray, expected: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, as views of the body, and the metadata.

    Args:
        body: The whole body; it must not be changed afterwards.
        expected: Exactly these names must be present, with these types.

    Raises:
        WireError: The body is not a safetensors file of exactly these tensors.
    """
    header, start = _header(body)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise WireError("the metadata of the header must map names to strings", 400)
    if header.keys() != expected.keys():
        raise WireError(
            f"the body has the tensors {_listed(header)}; needed are {_listed(expected)}"
        )
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int]] = []
    for name, dtype in expected.items():
        shape, begin, end = _entry(name, header[name], dtype, len(body) - start)
        spans.append((begin, end))
        count = math.prod(shape)
        if not count:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        if (start + begin) % dtype.itemsize:  # no view of unaligned data
            flat = torch.frombuffer(body[start + begin : start + end], dtype=dtype)
        else:
            flat = torch.frombuffer(body, dtype=dtype, count=count, offset=start + begin)
        tensors[name] = flat.view(shape)
    spans.sort()
    edges = [0, *(end for _, end in spans)]
    if [begin for begin, _ in spans] != edges[:-1] or edges[-1] != len(body) - start:
        raise WireError("the data of the tensors must be contiguous", 400)
    return tensors, metadata


def _header(body: bytearray) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or not 2 <= size <= min(HEADER, len(body) - 8):
        raise WireError("the body is not in the safetensors format, or is truncated", 400)
    try:
        header = json.loads(bytes(body[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise WireError("the header of the safetensors body is not JSON", 400) from error
    if not isinstance(header, dict):
        raise WireError("the header of the safetensors body is not an object", 400)
    return header, 8 + size


def _entry(name: str, entry: Any, dtype: torch.dtype, size: int) -> tuple[list[int], int, int]:
    """Shape, begin and end of a tensor in the data."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"{name} needs dtype, shape and data_offsets in the header", 400)
    if entry["dtype"] != NAMES[dtype]:
        raise WireError(f"{name} has the dtype {str(entry['dtype'])[:20]}, needed: {NAMES[dtype]}")
    shape, span = entry["shape"], entry["data_offsets"]
    for numbers in (shape, span):
        if not isinstance(numbers, list) or len(numbers) > 8:
            raise WireError(f"shape and data_offsets of {name} must be short lists", 400)
        if any(type(n) is not int or not 0 <= n <= 2**40 for n in numbers):
            raise WireError(f"shape and data_offsets of {name} must be non-negative integers", 400)
    if len(span) != 2 or not span[0] <= span[1] <= size:
        raise WireError(f"data_offsets of {name} are outside the data, which has {size} bytes", 400)
    if math.prod(shape) * dtype.itemsize != span[1] - span[0]:
        raise WireError(f"{name} has the shape {shape} and {span[1] - span[0]} bytes", 400)
    return shape, span[0], span[1]


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(name[:40] for name in list(names)[:8])) or "none"
