"""Per-row parameter noise by low-rank products, without per-row weight matrices.

Matrices (Linear, Conv, Embedding, GPT-2's Conv1D) get rank-one sign noise a b^T, whose entries are
signs with E[z z^T] = I: then x (W + sigma a b^T)^T = x W^T + sigma (x b) a^T. Vectors (biases,
norms) get independent signs. Modules of other types run row by row with expanded parameters, in one
vectorised call (``vmap``), or in a loop if they cannot be vectorised.

Each function adds the effect of the noise to the module's own output. Signs and sigma are already
multiplied into ``a`` and into the vectors. The batch axis comes from the recorded structure, not
from matching sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.passes.replay import Forward
from flops.passes.structure import Call, Leaf

RankOne = tuple[Tensor, Tensor]  # a (R, out), b (R, rest)
RowNoise = Mapping[str, RankOne | Tensor]
_TENSOR = object()
RowwiseProduct = Callable[[Any, Forward, tuple[Any, ...], dict[str, Any], RowNoise, Call], Any]


def _axis(leaf: Leaf, value: Tensor, rows: int) -> int | None:
    """The batch axis, also of a value that was expanded over the rows since."""
    spread = leaf.axis is None and leaf.shape[:1] == (1,) and value.shape[:1] == (rows,)
    return 0 if spread else leaf.axis


def batch_first(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, call: Call) -> Tensor:
    """The module's input with the batch axis first."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    axis = _axis(call.inputs[0], x, rows)
    if axis is None:  # shared by all rows (position embeddings): now it differs
        return x.expand(rows, *x.shape[1:])
    return x.movedim(axis, 0)


def _output(y: Tensor, call: Call) -> Tensor:
    return y.movedim(0, call.leaves[0].axis or 0)


def _rows(noise: RowNoise) -> int:
    first = next(iter(noise.values()))
    return len(first[0]) if isinstance(first, tuple) else len(first)


def _vector(v: Any, y: Tensor, trailing: int) -> Tensor:
    """Shape (R, n) to (R, 1, ..., n, 1, ..., 1) with the given number of axes after n."""
    middle = y.dim() - 2 - trailing
    return v.reshape(len(v), *[1] * middle, -1, *[1] * trailing)  # type: ignore[no-any-return]


def linear(
    module: nn.Linear, forward: Forward, args: Any, kwargs: Any, noise: RowNoise, call: Call
) -> Tensor:
    """Y + (x b) a^T + bias noise."""
    x = batch_first(args, kwargs, _rows(noise), call)
    y: Tensor = forward(x)
    if "weight" in noise:
        a, b = noise["weight"]
        return _output(_product(y, x, b, a, noise.get("bias")), call)
    return _output(y + _vector(noise["bias"], y, 0) if "bias" in noise else y, call)


def transposed_linear(
    module: nn.Module, forward: Forward, args: Any, kwargs: Any, noise: RowNoise, call: Call
) -> Tensor:
    """Y + (x a) b^T + bias noise, for a weight of shape (in, out)."""
    x = batch_first(args, kwargs, _rows(noise), call).contiguous()  # its forward calls view
    y: Tensor = forward(x)
    if "weight" in noise:
        a, b = noise["weight"]
        return _output(_product(y, x, a, b, noise.get("bias")), call)
    return _output(y + _vector(noise["bias"], y, 0) if "bias" in noise else y, call)


def _product(y: Tensor, x: Tensor, inner: Tensor, outer: Tensor, bias: Any = None) -> Tensor:
    """Y + (x inner) outer^T + bias in one product, in place."""
    along = torch.bmm(x.reshape(len(x), -1, x.size(-1)), inner.unsqueeze(2))  # (R, n, 1)
    across = outer.unsqueeze(1)  # (R, 1, out)
    if bias is not None:
        along = torch.cat([along, torch.ones_like(along)], 2)
        across = torch.stack([outer, bias], 1)
    flat = y.reshape(len(y), -1, y.size(-1))
    alike = flat.dtype == along.dtype == across.dtype  # not so under autocast
    add = flat.baddbmm_ if alike else partial(torch.baddbmm, flat)
    return add(along, across).view(y.shape)


def convolution(
    module: Any, forward: Forward, args: Any, kwargs: Any, noise: RowNoise, call: Call
) -> Tensor:
    """Y + a (x * b): one output channel per row and convolution group, then scaled by a."""
    x = batch_first(args, kwargs, _rows(noise), call)
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
        ).reshape(len(x), module.groups, *y.shape[2:])
        along = along.repeat_interleave(module.out_channels // module.groups, 1)
        y = torch.addcmul(y, along, _vector(a, y, space))
    return y + _vector(noise["bias"], y, space) if "bias" in noise else y


def layer_norm(
    module: nn.LayerNorm, forward: Forward, args: Any, kwargs: Any, noise: RowNoise, call: Call
) -> Tensor:
    """Y + weight noise * normalised x + bias noise."""
    x = batch_first(args, kwargs, _rows(noise), call)
    shape = tuple(module.normalized_shape)
    row = (len(x), *[1] * (x.dim() - 1 - len(shape)), *shape)
    vectors = {name: _as(v).reshape(row) for name, v in noise.items()}
    if vectors.keys() == {"weight", "bias"} and _is_plain(forward, module):
        normal = F.layer_norm(x, shape, eps=module.eps)  # once, for both terms
        weight, bias = module.weight + vectors["weight"], module.bias + vectors["bias"]
        return _output(torch.addcmul(bias, normal, weight), call)
    y: Tensor = forward(x)
    if "weight" in noise:
        y = torch.addcmul(y, F.layer_norm(x, shape, eps=module.eps), vectors["weight"])
    return _output(y + vectors["bias"] if "bias" in noise else y, call)


def _is_plain(forward: Forward, module: nn.Module) -> bool:
    """Whether this is the forward of the module's type, not a replacement."""
    return getattr(forward, "__func__", None) is type(module).forward


def _as(noise: RankOne | Tensor) -> Tensor:
    assert isinstance(noise, Tensor)
    return noise


def embedding(
    module: nn.Embedding, forward: Forward, args: Any, kwargs: Any, noise: RowNoise, call: Call
) -> Tensor:
    """Y + a[token] b; a is zero for padding, which has no gradient."""
    ids = batch_first(args, kwargs, _rows(noise), call)
    y: Tensor = forward(ids)
    a, b = noise["weight"]
    along = a.gather(1, ids.reshape(len(ids), -1)).view(ids.shape)
    return _output(torch.addcmul(y, along.unsqueeze(-1), _vector(b, y, 0)), call)


def generic(
    module: nn.Module, forward: Forward, args: Any, kwargs: Any, noise: RowNoise, call: Call
) -> Any:
    """The module on single rows, each with its own parameters; vectorised if possible."""
    rows = _rows(noise)
    values, spec = tree_flatten((args, kwargs))
    axes = [
        _axis(leaf, v, rows) if leaf is not None else None
        for leaf, v in zip(call.inputs, values, strict=True)
    ]
    out_axes = tuple(leaf.axis or 0 for _, leaf in call.tensors)
    moving = [(v, axis) for v, axis in zip(values, axes, strict=True) if axis is not None]
    changed = {path: _dense(n, module.get_parameter(path)) for path, n in noise.items()}
    body = _Body(module, forward)
    out_spec: list[Any] = []

    def one(shift: dict[str, Tensor], *row: Tensor) -> tuple[Tensor, ...]:
        given = iter(row)
        filled = [
            v if axis is None else next(given).unsqueeze(axis)
            for v, axis in zip(values, axes, strict=True)
        ]
        parameters = {f"module.{p}": module.get_parameter(p) + shift[p] for p in shift}
        arguments = tree_unflatten(filled, spec)
        # Tied parameters have independent noise at each of their paths.
        out = torch.func.functional_call(body, parameters, arguments, tie_weights=False)
        leaves, leaf_spec = tree_flatten(out)
        out_spec[:] = [leaf_spec, [_TENSOR if isinstance(x, Tensor) else x for x in leaves]]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        return tuple(x.squeeze(axis) for x, axis in zip(tensors, out_axes, strict=True))

    try:
        run = torch.func.vmap(one, (0, *(axis for _, axis in moving)), out_axes)
        tensors = iter(run(changed, *(v for v, _ in moving)))
    except Exception:  # recurrent kernels, numpy, control flow that reads the data
        singles = [
            one({p: c[r] for p, c in changed.items()}, *(v.select(a, r) for v, a in moving))
            for r in range(rows)
        ]
        parts = zip(zip(*singles, strict=True), out_axes, strict=True)
        tensors = iter([torch.stack(part, axis) for part, axis in parts])
    leaf_spec, constants = out_spec
    return tree_unflatten([next(tensors) if c is _TENSOR else c for c in constants], leaf_spec)


class _Body(nn.Module):
    """A module's forward without its hooks, which already run around this call."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(*args, **kwargs)


def _dense(noise: RankOne | Tensor, parameter: nn.Parameter) -> Tensor:
    rows = _rows({"": noise})
    full = noise[0].unsqueeze(2) * noise[1].unsqueeze(1) if isinstance(noise, tuple) else noise
    return full.reshape(rows, *parameter.shape)


_ROWWISE: Mapping[type[nn.Module], RowwiseProduct] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def rowwise_products() -> dict[type[nn.Module], RowwiseProduct]:
    """Row-wise products by module type; those of transformers if it has been imported."""
    utilities = sys.modules.get("transformers.pytorch_utils")
    gpt2 = {} if utilities is None else {utilities.Conv1D: transposed_linear}
    return {**_ROWWISE, **gpt2}


def rowwise_product_of(module: nn.Module) -> RowwiseProduct:
    """The row-wise product of a module; subclasses, which may differ, run by `generic`."""
    return rowwise_products().get(type(module), generic)


def is_rank_one(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter gets a b^T; the weight of a norm is a vector of any shape."""
    return parameter.dim() >= 2 and not isinstance(module, nn.LayerNorm)


def used_tokens(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Mask (R, V) of the table rows that a row of tokens reads; others have no gradient."""
    mask = torch.zeros(len(ids), module.num_embeddings, device=ids.device)
    mask.scatter_(1, ids.reshape(len(ids), -1), 1.0)
    if module.padding_idx is not None:
        mask[:, module.padding_idx] = 0
    return mask
