"""State as files without pickle: a tree of values becomes tensors and JSON, and comes back exactly.

Trees are made of None, bools, ints, floats, strings, lists, tuples, dicts (with keys of these
types), tensors, numpy arrays and numpy scalars. Every value returns with its type and its bits,
tensors with their strides as well: the same numbers in another layout may be summed in another
order, and then a resumed run differs from an unbroken one in its last digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Plain = Any  # what json.dumps takes


def encode(tree: Any) -> tuple[Plain, dict[str, Tensor]]:
    """JSON and the tensors that it refers to by name, all on the CPU.

    The tensors are meant to be written at once: where they can, they share memory with the tree,
    but never with each other.

    Raises:
        TypeError: If the tree holds a value of another type.
    """
    tensors: dict[str, Tensor] = {}
    plain = _encode(tree, tensors, "")
    return plain, separate(tensors)


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same contiguous and on the CPU; copied only where two share memory or parts of it."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        found[name] = plain
    return found


def decode(plain: Plain, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `encode` was given.

    Raises:
        ValueError: If this is nothing that `encode` makes.
    """
    try:
        return _decode(plain, tensors)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not an encoded tree: {error!r}") from error


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Plain:
    if isinstance(value, np.generic):  # before floats: a numpy double is also a Python float
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": value.hex()}
    if type(value) is list:
        return [_encode(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_encode(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        items = enumerate(value.items())
        return {"dict": [[_key(k), _encode(v, tensors, f"{path}/{i}")] for i, (k, v) in items]}
    name = path or "/"
    if isinstance(value, Tensor):
        flat, order = _flat(value)
        # The file format has no complex doubles.
        tensors[name] = torch.view_as_real(flat.resolve_conj()) if value.is_complex() else flat
        kept = {"tensor": name, "shape": list(value.shape), "order": order}
        return {**kept, "complex": True} if value.is_complex() else kept
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        content = np.frombuffer(value.tobytes(), np.uint8).copy()
        tensors[name] = torch.from_numpy(content)
        return {"array": name, "shape": list(value.shape), "dtype": value.dtype.str}
    raise TypeError(f"cannot write a {type(value).__name__} at '{name}' of a state")


def _key(key: Any) -> Plain:
    if type(key) not in (bool, int, float, str) and key is not None:
        raise TypeError(f"cannot write a dict with a key of type {type(key).__name__}")
    return _encode(key, {}, "")


def _flat(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """The values as they lie in memory, and the order of the axes there, slowest first."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"cannot write a tensor of layout {tensor.layout}")
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    return tensor.detach().permute(order), order


def _decode(plain: Plain, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_decode(v, tensors) for v in plain]
    if not isinstance(plain, dict):
        return plain
    if "float" in plain:
        return float.fromhex(plain["float"])
    if "tuple" in plain:
        return tuple(_decode(v, tensors) for v in plain["tuple"])
    if "dict" in plain:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in plain["dict"]}
    if "scalar" in plain:
        kind, content = plain["scalar"]
        return np.frombuffer(bytes.fromhex(content), np.dtype(kind))[0]
    if "array" in plain:
        content = tensors[plain["array"]].numpy().tobytes()
        found = np.frombuffer(content, np.dtype(plain["dtype"]))
        return found.reshape(plain["shape"]).copy()
    if "tensor" in plain:
        order = plain["order"]
        # A clone: what was read may be a view of one large buffer, at an odd address.
        tensor = tensors[plain["tensor"]].clone()
        tensor = torch.view_as_complex(tensor) if plain.get("complex") else tensor
        tensor = tensor.permute([order.index(axis) for axis in range(len(order))])
        if list(tensor.shape) != plain["shape"]:
            raise ValueError(f"tensor '{plain['tensor']}' has the shape {list(tensor.shape)}")
        return tensor
    raise ValueError(f"not an encoded tree: {sorted(plain)}")
