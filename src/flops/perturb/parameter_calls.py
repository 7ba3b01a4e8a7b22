"""Parameter calls: module calls during which parameters are perturbed.

A parameter is perturbed while its *called module* runs: the innermost module around it that the
forward pass calls. Usually this is its own module, but nn.MultiheadAttention for its projections
(which never run), and the model itself for a bare parameter of the root. A tied parameter is
perturbed in each of its modules, with independent noise: the estimate is the sum over its uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flops.errors import CoverageError
from flops.passes.binding import Binding
from flops.passes.replay import (
    Action,
    Forward,
    Passes,
    Prefix,
    empty_prefix,
    everywhere,
    intercepted,
)
from flops.passes.selection import Selection
from flops.passes.structure import Call, Leaf, Structure, Use


@dataclass(frozen=True)
class CalledModule:
    """A module that is called, and the parameters perturbed while it runs, by their path in it.

    The padding row of an embedding has no gradient from lookups, but from other uses of the table.
    ``padding`` is, by path, the row that is only looked up: it gets no noise. ``lookups`` are
    embeddings whose padding row has noise because of other uses: lookups return it unperturbed.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    calls: tuple[int, ...]
    padding: Mapping[str, int]
    lookups: tuple[nn.Embedding, ...]

    def size(self, path: str) -> int:
        """Number of perturbed values of a parameter."""
        parameter = self.parameters[path]
        return parameter.numel() - (parameter[0].numel() if path in self.padding else 0)

    def clean_padding(self) -> AbstractContextManager[None]:
        """Padding lookups return unperturbed values inside this context."""
        lookups = {str(i): module for i, module in enumerate(self.lookups)}
        return intercepted(lookups, everywhere(lambda name: _clean_row(lookups[name]), lookups))


class ParameterCalls(Binding):
    """The parameter calls of a group, and the prefix that ends before the first of them.

    Attributes:
        structure: Structure of the forward pass.
        modules: Called modules with their parameters.
        prefix: Prefix of the queries.
        parameters: All parameters of the group, in an order independent of the forward pass.
    """

    def __init__(
        self,
        structure: Structure,
        modules: tuple[CalledModule, ...],
        prefix: Prefix,
        parameters: tuple[nn.Parameter, ...],
    ) -> None:
        self.structure, self.modules, self.prefix = structure, modules, prefix
        self.parameters, self.prefixes = parameters, (prefix,)

    @property
    def size(self) -> int:
        """Number of perturbed parameters."""
        return sum(called.size(path) for called in self.modules for path in called.parameters)

    def covers(self, use: Use) -> bool:
        """Whether a called module of the parameter is running."""
        return not self._calls.get(use.parameter, frozenset()).isdisjoint(use.calls)

    @cached_property
    def _calls(self) -> dict[int, frozenset[int]]:
        """Calls during which each parameter is perturbed."""
        found: dict[int, frozenset[int]] = {}
        for called in self.modules:
            for p in called.parameters.values():
                found[id(p)] = found.get(id(p), frozenset()).union(called.calls)
        return found

    @cached_property
    def root(self) -> int | None:
        """The root call, if perturbing all parameters during it is equivalent; else None.

        It is not if a use lies outside of these calls, or a lookup returns unperturbed padding.
        """
        uses = [use for use in self.structure.uses if use.parameter in self._calls]
        clean = any(called.padding or called.lookups for called in self.modules)
        if clean or not all(self.covers(use) for use in uses):
            return None
        return self.structure.of("")[0].number

    @cached_property
    def padding(self) -> dict[int, int]:
        """Rows that are never perturbed, by the number of their parameter."""
        rows: dict[nn.Parameter, set[int | None]] = {}
        for called in self.modules:
            for path, parameter in called.parameters.items():
                rows.setdefault(parameter, set()).add(called.padding.get(path))
        found = {}
        for number, parameter in enumerate(self.parameters):
            row = rows[parameter].pop() if len(rows[parameter]) == 1 else None
            if row is not None:
                found[number] = row
        return found


@dataclass(frozen=True)
class Entry:
    """A parameter's noise in a row: a of length ``out``, then b of length ``rest``."""

    called: CalledModule
    path: str
    parameter: nn.Parameter
    offset: int
    out: int
    rest: int

    def cut(self, z: Tensor) -> Any:
        """The noise of this parameter: a and b, or a vector."""
        middle = self.offset + self.out
        z = z.to(self.parameter.device)
        a = z[:, self.offset : middle]
        if not self.rest:
            return a
        padding = self.called.padding.get(self.path)
        if padding is not None:
            a = a.index_fill(1, torch.tensor([padding], device=a.device), 0)
        return a, z[:, middle : middle + self.rest]

    def noise(self, z: Tensor, scale: Tensor | float = 1.0) -> Any:
        """Like `cut`, in the parameter's precision, with a or the vector scaled."""
        found, dtype = self.cut(z), self.parameter.dtype
        if isinstance(scale, Tensor):
            scale = scale.to(self.parameter.device)
        if isinstance(found, tuple):
            return (found[0] * scale).to(dtype), found[1].to(dtype)
        return (found * scale).to(dtype)


def find_parameter_calls(
    group: Selection, passes: Passes, reuse: bool, rowwise: tuple[type[nn.Module], ...] = ()
) -> ParameterCalls:
    """Assign every parameter of a group to the called modules that use it.

    Args:
        group: The group.
        passes: Passes over the batch.
        reuse: Whether to replay calls before the first perturbed one.
        rowwise: For per-point draws: module types with a row-wise perturbation. A module of any
            other type is perturbed as a whole, including the modules inside it, and every called
            module must take and return rows.
    """
    structure = passes.structure
    found: dict[str, dict[str, nn.Parameter]] = {}
    for owner, local, parameter in _owners(group, passes.modules, rowwise):
        everywhere = not group.modules  # bare parameters are perturbed in all their uses
        name = _module_of(owner, parameter, passes, rowwise, everywhere)
        if name is None:
            raise CoverageError(
                f"group '{group.name}': '{owner or 'model'}' "
                + ("cannot be perturbed row by row; use shared=True for it" if rowwise else "")
                + ("" if rowwise else "never runs in the forward pass")
            )
        path = f"{owner}.{local}".lstrip(".")
        found.setdefault(name, {})[path[len(name) + 1 :] if name else path] = parameter
    if rowwise:
        _absorb(found, passes.modules, rowwise)
    else:
        _drop_nested(found, structure)
    modules = tuple(_called(name, found[name], passes, bool(rowwise)) for name in found)
    start = min(_first_use(called, structure, bool(rowwise)) for called in modules)
    prefix = passes.prefix(start) if reuse else empty_prefix(structure)
    return ParameterCalls(structure, modules, prefix, group.parameters)


def _called(
    name: str, parameters: Mapping[str, nn.Parameter], passes: Passes, by_path: bool
) -> CalledModule:
    module, calls = passes.modules[name], [call.number for call in passes.structure.of(name)]
    padding = {}
    for path, parameter in parameters.items():
        owner = module.get_submodule(path.rpartition(".")[0])
        row = _idle_row(parameter, set(calls), passes, owner if by_path else None)
        if row is not None:
            padding[path] = row
    lookups = []
    for lookup in passes.modules.values():
        rows = [padding.get(k) for k, p in parameters.items() if _padding(lookup, p) is not None]
        if rows and isinstance(lookup, nn.Embedding) and lookup.padding_idx not in rows:
            lookups.append(lookup)
    return CalledModule(name, module, parameters, tuple(calls), padding, tuple(lookups))


def _idle_row(
    parameter: nn.Parameter, calls: set[int], passes: Passes, owner: nn.Module | None
) -> int | None:
    """The row that all uses during the calls look up as padding.

    With independent noise at each path, only uses by the path's owner count; a module without
    children reads only its own path.
    """
    structure = passes.structure
    holders = {n: m for n, m in passes.modules.items() if _holds(m, parameter)}
    uses = [set(u.calls) for u in structure.uses if u.parameter == id(parameter)]
    inside = [use for use in uses if use & calls]
    for lookup in [owner] if owner is not None else holders.values():
        row = _padding(lookup, parameter)
        idle = {
            call.number
            for name, module in holders.items()
            if _padding(module, parameter) == row
            or (owner is not None and not list(module.children()))
            for call in structure.of(name)
        }
        if row is not None and inside and all(use & idle for use in inside):
            return row
    return None


def _padding(module: nn.Module, parameter: nn.Parameter) -> int | None:
    """The row of a table without a gradient from lookups."""
    table = module._parameters.get("weight") if isinstance(module, nn.Embedding) else None
    return module.padding_idx if table is parameter else None  # type: ignore[return-value]


def _clean_row(module: nn.Embedding) -> Action:
    clean = module.weight.data
    row = torch.zeros(len(clean), 1, dtype=torch.bool, device=clean.device)
    row[module.padding_idx] = True

    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots: dict[str, Any] = module._parameters
        noisy: Tensor = slots["weight"]
        try:
            slots["weight"] = torch.where(row, clean, noisy)
            return forward(*args, **kwargs)
        finally:
            slots["weight"] = noisy

    return action


def _first_use(called: CalledModule, structure: Structure, whole: bool) -> int:
    """First time at which the noise matters: earlier calls can be replayed."""
    start = structure.calls[called.calls[0]].start
    wanted = {id(p) for p in called.parameters.values()}
    times = {use.parameter: use.time for use in reversed(structure.uses)}
    if whole or not wanted <= set(times):
        return start
    return max(start, min(times[p] for p in wanted))


def _owners(
    group: Selection, modules: Mapping[str, nn.Module], rowwise: tuple[type[nn.Module], ...]
) -> Iterator[tuple[str, str, nn.Parameter]]:
    wanted = {id(p) for p in group.parameters}
    inside = {id(child) for module in group.modules.values() for child in module.modules()}
    for name, module in modules.items():
        if group.modules and id(module) not in inside:
            continue
        known = type(module) in rowwise  # uses the first of a parameter's names
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=known):
            if id(parameter) in wanted:
                yield name, local, parameter


def _module_of(
    owner: str,
    parameter: nn.Parameter,
    passes: Passes,
    rowwise: tuple[type[nn.Module], ...],
    everywhere: bool,
) -> str | None:
    """The innermost called module around the owner, and around all uses if ``everywhere``."""
    structure = passes.structure
    uses, places = [], []
    if everywhere:
        uses = [set(u.calls) for u in structure.uses if u.parameter == id(parameter) and u.calls]
        places = [n for n, m in passes.modules.items() if _holds(m, parameter)]
    name = owner
    while True:
        calls = structure.of(name)
        at = {call.number for place in [name, *places] for call in structure.of(place)}
        fits = not rowwise or all(_by_rows(call, passes.modules[name], rowwise) for call in calls)
        if calls and fits and all(at & use for use in uses):
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def _holds(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in module.parameters(recurse=False))


def _by_rows(call: Call, module: nn.Module, rowwise: tuple[type[nn.Module], ...]) -> bool:
    """Whether a call takes and returns rows, or a table that can be expanded over them."""
    if not call.rowwise:
        return False
    if any(leaf.axis is not None for _, leaf in call.tensors):
        return True
    ends = [*call.inputs[:1], *call.leaves]
    return type(module) in rowwise and all(
        isinstance(x, Leaf) and x.shape[:1] == (1,) for x in ends
    )


def _drop_nested(found: dict[str, dict[str, nn.Parameter]], structure: Structure) -> None:
    """Drop tied parameters of inner modules that are perturbed in an outer module anyway."""
    for inner in list(found):
        enclosing = [{c.name for c in structure.ancestors(call)} for call in structure.of(inner)]
        outer = [n for n in found if n != inner and all(n in names for names in enclosing)]
        shifted = {p for n in outer for p in found[n].values()}
        once = {p: path for path, p in reversed(found[inner].items()) if p not in shifted}
        found[inner] = {path: p for path, p in found[inner].items() if once.get(p) == path}
        if not found[inner]:
            del found[inner]


def _absorb(
    found: dict[str, dict[str, nn.Parameter]],
    modules: Mapping[str, nn.Module],
    rowwise: tuple[type[nn.Module], ...],
) -> None:
    for name in sorted(found, key=lambda n: n.count(".") + bool(n)):
        if name not in found or type(modules[name]) in rowwise:
            continue
        prefix = f"{name}." if name else ""
        for inner in [n for n in found if n != name and n.startswith(prefix)]:
            path = inner[len(prefix) :]
            found[name].update({f"{path}.{k}": p for k, p in found.pop(inner).items()})
