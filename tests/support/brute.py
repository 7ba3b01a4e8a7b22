"""The estimators once more, slowly: row by row, by hooks, without replay or row-wise products.

The noise is the documented stream, made in plain Python. Only the places that pointwise parameter
noise has in a row are taken from the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from flops import ForwardGradient, Shared
from flops.estimators.parameter_noise import _layout
from tests.support.noise import noise as keyed_noise

Run = Callable[[int], Tensor]


def point_runner(model: nn.Module, loss_fn: Any, inputs: Any, targets: Any, size: int) -> Run:
    """The loss of one point alone in its batch."""

    def cut(leaf: Any, j: int) -> Any:
        if isinstance(leaf, Shared):
            return leaf.tensor
        whole = not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != size
        return leaf if whole else leaf[j : j + 1]

    def run(j: int) -> Tensor:
        x = tree_map(lambda leaf: cut(leaf, j), inputs)
        y = tree_map(lambda leaf: cut(leaf, j), targets)
        out = model(**x) if isinstance(x, dict) else model(x)
        return loss_fn(out, y)[0]

    return run


@contextmanager
def hooked(modules: Sequence[nn.Module], before: Any = None, after: Any = None) -> Iterator[None]:
    handles = []
    for module in modules:
        if before is not None:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(module: nn.Module, leaves: list[Any]) -> list[int]:
    found = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
    return found[:1] if isinstance(module, nn.MultiheadAttention) else found


def outputs_of(run: Run, j: int, modules: Sequence[nn.Module]) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        leaves = tree_flatten(out)[0]
        found.extend(leaves[i] for i in _floats(module, leaves))

    with hooked(modules, after=keep):
        run(j)
    return found


def brute_lr(
    run: Run, modules: Sequence[nn.Module], estimator: Any, size: int, queries: int, number: int = 0
) -> dict[nn.Parameter, Tensor]:
    """Likelihood ratio of one group whose targets are these modules (for a stage: one target)."""
    stage = estimator.targets == "stage"
    sites = list(modules)[-1:] if stage else list(modules)
    sigma = estimator.sigma or 1e-3
    with torch.no_grad():
        width = sum(out.numel() for out in outputs_of(run, 0, sites))
    draws = queries // estimator.unit
    total: dict[nn.Parameter, Tensor] = {}
    for j in range(size):
        with torch.no_grad():
            noise = keyed_noise(estimator.noise, (0, 0, number, j), draws, width)
            clean = run(j)
            delta = torch.zeros(width, dtype=torch.double)
            for z in noise:
                up = _noisy(run, j, sites, z * sigma)
                down = _noisy(run, j, sites, -z * sigma) if estimator.unit == 2 else clean
                delta += (up - down) / (estimator.unit * sigma) * z / draws
        product = _stage_product if stage else _target_products
        for parameter, gradient in product(run, j, modules, delta):
            total[parameter] = total.get(parameter, 0) + gradient / size
    return total


def _noisy(run: Run, j: int, modules: Sequence[nn.Module], z: Tensor) -> Tensor:
    offset = 0

    def add(module: nn.Module, args: Any, out: Any) -> Any:
        nonlocal offset
        leaves, spec = tree_flatten(out)
        for i in _floats(module, leaves):
            part = z[offset : offset + leaves[i].numel()]
            leaves[i] = leaves[i] + part.reshape(leaves[i].shape)
            offset += leaves[i].numel()
        return tree_unflatten(leaves, spec)

    with hooked(modules, after=add):
        return run(j)


def _trainable(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for m in modules for p in m.parameters() if p.requires_grad]


def _stage_product(run: Run, j: int, modules: Sequence[nn.Module], delta: Tensor) -> Any:
    parameters = _trainable(modules)
    (out,) = outputs_of(run, j, list(modules)[-1:])
    return _grads([(out, delta.reshape(out.shape))], parameters)


def _target_products(run: Run, j: int, modules: Sequence[nn.Module], delta: Tensor) -> Any:
    calls: list[Any] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        copy = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        calls.append((module, *copy))

    with torch.no_grad(), hooked(modules, before=keep):
        run(j)
    offset = 0
    for module, args, kwargs in calls:
        leaves = tree_flatten(module(*args, **kwargs))[0]
        pairs = []
        for i in _floats(module, leaves):
            part = delta[offset : offset + leaves[i].numel()]
            pairs.append((leaves[i], part.reshape(leaves[i].shape)))
            offset += leaves[i].numel()
        yield from _grads(pairs, _trainable([module]))


def _grads(pairs: Any, parameters: list[nn.Parameter]) -> list[Any]:
    outs, deltas = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, parameters, deltas, allow_unused=True)
    return [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]


def brute_shared(
    run: Run,
    targets: Sequence[nn.Module],
    units: Sequence[tuple[nn.Module, list[nn.Parameter]]],
    estimator: Any,
    size: int,
    queries: int,
    number: int = 0,
) -> dict[nn.Parameter, Tensor]:
    """ES or SPSA with draws shared by the batch; a unit is a module and what it perturbs.

    A draw is one row of noise, with the parameters of the targets one after the other.
    """
    parameters = list(dict.fromkeys(p for m in targets for p in m.parameters() if p.requires_grad))
    total: dict[nn.Parameter, Tensor] = {}
    draws, sigma = queries // estimator.unit, estimator.sigma
    with torch.no_grad():
        clean = torch.stack([run(j) for j in range(size)]).mean()
        for draw in range(draws):
            sizes = [p.numel() for p in parameters]
            row = keyed_noise(estimator.noise, (0, 0, number, draw), 1, sum(sizes))[0]
            parts = zip(parameters, row.split(sizes), strict=True)
            drawn = {p: part.reshape(p.shape) for p, part in parts}
            noise = [[_without_padding(drawn[p], m) for p in ps] for m, ps in units]

            def loss(sign: float) -> Tensor:
                places = [
                    (m, [(p, sign * sigma * z) for p, z in zip(ps, zs, strict=True)])
                    for (m, ps), zs in zip(units, noise, strict=True)
                ]
                return _shifted(run, places, size)

            down = loss(-1.0) if estimator.unit == 2 else clean
            w = (loss(1.0) - down) / (estimator.unit * sigma)
            for p in parameters:
                used = [
                    z
                    for (_, ps), zs in zip(units, noise, strict=True)
                    for q, z in zip(ps, zs, strict=True)
                    if q is p
                ]
                # What any of its places saw: a row that is padding everywhere saw nothing.
                seen = torch.stack([z != 0 for z in used]).any(0)
                total[p] = total.get(p, 0) + w * drawn[p] * seen / draws
    return total


def _without_padding(z: Tensor, owner: nn.Module) -> Tensor:
    if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
        z = z.clone()
        z[owner.padding_idx] = 0
    return z


def _shifted(run: Run, places: Any, size: int) -> Tensor:
    shifts = {id(module): pairs for module, pairs in places}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for p, z in shifts[id(module)]:
            saved.append((module, p, p.data))
            p.data = p.data + z

    def after(module: nn.Module, args: Any, out: Any) -> None:
        while saved and saved[-1][0] is module:
            _, p, data = saved.pop()
            p.data = data

    saved: list[Any] = []
    with hooked([module for module, _ in places], before, after):
        return torch.stack([run(j) for j in range(size)]).mean()


def brute_pointwise(
    fg: ForwardGradient, run: Run, size: int, queries: int, number: int = 0
) -> dict[nn.Parameter, Tensor]:
    """ES or SPSA with draws of each point, from the layout of a gradient that has run once."""
    estimator = fg.groups[number].estimator
    (layout,) = fg._layouts._known.values()
    entries, width = _layout(layout.bindings[number])
    draws, sigma = queries // estimator.unit, estimator.sigma
    total: dict[nn.Parameter, Tensor] = {}
    with torch.no_grad():
        for j in range(size):
            clean = run(j)
            for row in keyed_noise("rademacher", (0, 0, number, j), draws, width):
                places = []
                for e in entries:
                    z = row[e.offset : e.offset + e.out]
                    if e.rest:
                        z = z[:, None] * row[e.offset + e.out : e.offset + e.out + e.rest]
                    owner = e.called.module.get_submodule(e.path.rpartition(".")[0])
                    z = _without_padding(z.reshape(e.parameter.shape), owner)
                    places.append((e, owner, z))
                up = _swapped(run, j, places, sigma)
                down = _swapped(run, j, places, -sigma) if estimator.unit == 2 else clean
                w = (up - down) / (estimator.unit * sigma)
                for e, owner, z in places:
                    if type(owner) is nn.Embedding and owner is e.called.module:
                        z = z * _tokens(run, j, owner)
                    total[e.parameter] = total.get(e.parameter, 0) + w * z / (draws * size)
    return total


def _swapped(run: Run, j: int, places: Any, scale: float) -> Tensor:
    saved: list[Any] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for e, owner, z in places:
            if e.called.module is module:
                name = e.path.rpartition(".")[2]
                saved.append((module, owner, name, e.parameter))
                setattr(owner, name, nn.Parameter(e.parameter + scale * z))

    def after(module: nn.Module, args: Any, out: Any) -> None:
        while saved and saved[-1][0] is module:
            _, owner, name, parameter = saved.pop()
            setattr(owner, name, parameter)

    units = list({id(e.called.module): e.called.module for e, _, _ in places}.values())
    with hooked(units, before, after):
        return run(j)


def _tokens(run: Run, j: int, module: nn.Embedding) -> Tensor:
    used = torch.zeros(module.num_embeddings, 1, dtype=torch.double)

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        used[(args[0] if args else kwargs["input"]).flatten()] = 1

    with hooked([module], before):
        run(j)
    return used


def own_units(
    model: nn.Module, targets: Sequence[nn.Module]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Every module with its own trainable parameters; attention with those of its projection."""
    inside = {m for target in targets for m in target.modules()}
    units = []
    for module in model.modules():
        attention = isinstance(module, nn.MultiheadAttention)
        found = [p for p in module.parameters(recurse=attention) if p.requires_grad]
        if module in inside and found:
            units.append((module, found))
        if attention:
            inside -= set(module.modules())
    return units
