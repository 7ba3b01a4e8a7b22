"""Per-row parameter noise at the cost of thin products: no row gets its own weight matrix.

Matrices (Linear, Conv, Embedding) get rank-one sign noise a b^T, whose entries are signs with
E[z z^T] = I: then x (W + sigma a b^T)^T = x W^T + sigma (x b) a^T. Vectors (biases, norms) get
independent signs. Modules of other types are run row by row in one vectorised call (``vmap``)
with their parameters expanded.

Each function adds the effect of the noise to the module's own output. Signs and sigma are
already multiplied into ``a`` and into the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.errors import FlopsError
from flops.script import Forward

RankOne = tuple[Tensor, Tensor]  # a (R, out), b (R, rest)
RowNoise = Mapping[str, RankOne | Tensor]
_TENSOR = object()
Thin = Callable[[Any, Forward, tuple[Any, ...], dict[str, Any], RowNoise], Any]


def _input(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Tensor:
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    if x.size(0) == 1 and rows > 1:  # shared by all rows (a table of positions): now it differs
        x = x.expand(rows, *x.shape[1:])
    if x.size(0) != rows:
        raise FlopsError(
            f"independent parameter noise needs the batch as first axis, but a module got an "
            f"input of shape {tuple(x.shape)} for {rows} rows; use shared=True for this group"
        )
    return x


def _rows(noise: RowNoise) -> int:
    first = next(iter(noise.values()))
    return len(first[0]) if isinstance(first, tuple) else len(first)


def _vector(v: Any, y: Tensor, trailing: int) -> Tensor:
    """Shape (R, n) to (R, 1, ..., n, 1, ..., 1) with the given number of axes behind n."""
    middle = y.dim() - 2 - trailing
    return v.reshape(len(v), *[1] * middle, -1, *[1] * trailing)  # type: ignore[no-any-return]


def linear(module: nn.Linear, forward: Forward, args: Any, kwargs: Any, noise: RowNoise) -> Tensor:
    """Y + (x b) a^T + bias noise."""
    x = _input(args, kwargs, _rows(noise))
    y: Tensor = forward(x)
    if "weight" in noise:
        a, b = noise["weight"]
        along = torch.bmm(x.reshape(len(x), -1, x.size(-1)), b.unsqueeze(2))  # (R, n, 1)
        flat = y.reshape(len(y), -1, y.size(-1))
        y = torch.baddbmm(flat, along, a.unsqueeze(1)).view(y.shape)
    return y + _vector(noise["bias"], y, 0) if "bias" in noise else y


def convolution(module: Any, forward: Forward, args: Any, kwargs: Any, noise: RowNoise) -> Tensor:
    """Y + a (x * b): one output channel per row and convolution group, then spread by a."""
    x = _input(args, kwargs, _rows(noise))
    y: Tensor = forward(x)
    space = y.dim() - 2
    if "weight" in noise:
        a, b = noise["weight"]
        padding = module.padding
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            padding = 0
        filters = b.reshape(len(x), 1, *module.weight.shape[1:])
        filters = filters.expand(-1, module.groups, *[-1] * (filters.dim() - 2)).flatten(0, 1)
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[space]
        along = convolve(
            x.reshape(1, -1, *x.shape[2:]),
            filters,
            None,
            module.stride,
            padding,
            module.dilation,
            len(x) * module.groups,
        ).view(len(x), module.groups, *y.shape[2:])
        along = along.repeat_interleave(module.out_channels // module.groups, 1)
        y = torch.addcmul(y, along, _vector(a, y, space))
    return y + _vector(noise["bias"], y, space) if "bias" in noise else y


def layer_norm(
    module: nn.LayerNorm, forward: Forward, args: Any, kwargs: Any, noise: RowNoise
) -> Tensor:
    """Y + weight noise * normalised x + bias noise."""
    x = _input(args, kwargs, _rows(noise))
    y: Tensor = forward(x)
    shape = tuple(module.normalized_shape)
    lead = [1] * (y.dim() - 1 - len(shape))
    if "weight" in noise:
        normal = F.layer_norm(x, shape, eps=module.eps)
        y = torch.addcmul(y, normal, _as(noise["weight"]).reshape(len(x), *lead, *shape))
    return y + _as(noise["bias"]).reshape(len(x), *lead, *shape) if "bias" in noise else y


def _as(noise: RankOne | Tensor) -> Tensor:
    assert isinstance(noise, Tensor)
    return noise


def embedding(
    module: nn.Embedding, forward: Forward, args: Any, kwargs: Any, noise: RowNoise
) -> Tensor:
    """Y + a[token] b: a has been set to zero for padding and unused tokens by `used_tokens`."""
    ids = _input(args, kwargs, _rows(noise))
    y: Tensor = forward(ids)
    a, b = noise["weight"]
    along = a.gather(1, ids.reshape(len(ids), -1)).view(ids.shape)
    return torch.addcmul(y, along.unsqueeze(-1), _vector(b, y, 0))


def generic(module: nn.Module, forward: Forward, args: Any, kwargs: Any, noise: RowNoise) -> Any:
    """The module on single rows, vectorised, each row with its own parameters."""
    rows = _rows(noise)
    values, spec = tree_flatten((args, kwargs))
    batched = [isinstance(v, Tensor) and v.dim() > 0 and v.size(0) == rows for v in values]
    moving = tuple(v for v, b in zip(values, batched, strict=True) if b)
    changed = {path: _dense(n, module.get_parameter(path)) for path, n in noise.items()}
    fixed = {path: module.get_parameter(path) for path in noise}
    out_spec: list[Any] = []

    def one(noise_row: dict[str, Tensor], *row: Tensor) -> tuple[Tensor, ...]:
        given = iter(row)
        filled = [
            next(given).unsqueeze(0) if b else v for v, b in zip(values, batched, strict=True)
        ]
        inner_args, inner_kwargs = tree_unflatten(filled, spec)
        parameters = {path: fixed[path] + noise_row[path] for path in fixed}
        out = torch.func.functional_call(module, parameters, inner_args, inner_kwargs)
        leaves, leaf_spec = tree_flatten(out)
        out_spec[:] = [leaf_spec, [_TENSOR if isinstance(x, Tensor) else x for x in leaves]]
        return tuple(x.squeeze(0) for x in leaves if isinstance(x, Tensor))

    scripted = module.__dict__.pop("forward")  # functional_call must reach the module's own code
    if getattr(forward, "__self__", None) is not module:
        module.__dict__["forward"] = forward
    try:
        tensors = iter(torch.func.vmap(one)(changed, *moving))
    except Exception as error:
        raise FlopsError(
            f"{type(module).__name__} cannot be run with parameters of its own for every row "
            f"({error}); use shared=True for its group"
        ) from error
    finally:
        module.__dict__["forward"] = scripted
    leaf_spec, constants = out_spec
    return tree_unflatten([next(tensors) if c is _TENSOR else c for c in constants], leaf_spec)


def _dense(noise: RankOne | Tensor, parameter: nn.Parameter) -> Tensor:
    rows = _rows({"": noise})
    full = noise[0].unsqueeze(2) * noise[1].unsqueeze(1) if isinstance(noise, tuple) else noise
    return full.reshape(rows, *parameter.shape)


THIN: Mapping[type[nn.Module], Thin] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def thin_of(module: nn.Module) -> Thin:
    """The thin product of a module's type; subclasses may compute otherwise, so types are exact."""
    return THIN.get(type(module), generic)


def is_rank_one(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter gets a b^T; the weight of a norm is a vector whatever its shape."""
    return parameter.dim() >= 2 and not isinstance(module, nn.LayerNorm)


def used_tokens(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Mask (R, V) of the rows of the table that a row of tokens reads; the rest has no gradient."""
    mask = torch.zeros(len(ids), module.num_embeddings, device=ids.device)
    mask.scatter_(1, ids.reshape(len(ids), -1), 1.0)
    if module.padding_idx is not None:
        mask[:, module.padding_idx] = 0.0
    return mask
