"""Units: the module calls around which parameters are perturbed.

A parameter is perturbed while a *unit* runs: the nearest module around it that the forward pass
calls. That is its own module as a rule, nn.MultiheadAttention for its projections (which never
run), and the model itself for a bare parameter in the root. A tied parameter has a unit for each
of its places, each with noise of its own: the estimate is then the sum over its uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from flops.errors import CoverageError
from flops.groups import ResolvedGroup
from flops.replay import Passes, Prefix, nothing
from flops.structure import Call, Leaf, Structure, Use


@dataclass(frozen=True)
class Unit:
    """A called module and the parameters that are perturbed while it runs, by their path in it."""

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    calls: tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """The units of a group, and the prefix that ends before the first of them starts."""

    structure: Structure
    units: tuple[Unit, ...]
    prefix: Prefix

    @property
    def needed(self) -> frozenset[int]:
        """Calls to record."""
        return self.prefix.needed

    @property
    def size(self) -> int:
        """Number of perturbed parameters."""
        return sum(p.numel() for unit in self.units for p in unit.parameters.values())

    def covers(self, use: Use) -> bool:
        """While a unit of that parameter runs."""
        return any(
            use.parameter in {id(p) for p in unit.parameters.values()}
            and bool(set(unit.calls) & set(use.calls))
            for unit in self.units
        )


def find_units(
    group: ResolvedGroup, passes: Passes, reuse: bool, thin: tuple[type[nn.Module], ...] = ()
) -> Units:
    """Assign every parameter of a group to the units that use it.

    Args:
        group: The group.
        passes: Passes over the structure of the model.
        reuse: Whether to replay what ends before the first unit.
        thin: Given for independent draws: the types whose rows can be perturbed by themselves.
            A unit of any other type is perturbed as a whole with the units inside it, and every
            unit must take and return rows.
    """
    structure = passes.structure
    found: dict[str, dict[str, nn.Parameter]] = {}
    for owner, local, parameter in _owners(group, passes.modules):
        everywhere = not group.modules  # parameters without modules are meant in all their uses
        name = _unit_of(owner, parameter, passes, thin, everywhere)
        if name is None:
            raise CoverageError(
                f"group '{group.name}': '{owner or 'model'}' "
                + ("cannot be perturbed row by row; use shared=True for it" if thin else "")
                + ("" if thin else "never runs in the forward pass")
            )
        path = f"{owner}.{local}".lstrip(".")
        found.setdefault(name, {})[path[len(name) + 1 :] if name else path] = parameter
    if thin:
        _absorb(found, passes.modules, thin)
    else:
        _drop_nested(found, structure)
    units = tuple(
        Unit(name, passes.modules[name], parameters, tuple(c.number for c in structure.of(name)))
        for name, parameters in found.items()
    )
    start = min(_first_use(unit, structure, bool(thin)) for unit in units)
    prefix = passes.prefix(start) if reuse else nothing(structure)
    return Units(structure, units, prefix)


def _first_use(unit: Unit, structure: Structure, whole: bool) -> int:
    """When the unit's noise first matters: what ends before that can be replayed."""
    start = structure.calls[unit.calls[0]].start
    wanted = {id(p) for p in unit.parameters.values()}
    times = {use.parameter: use.time for use in reversed(structure.uses)}
    if whole or not wanted <= set(times):
        return start
    return max(start, min(times[p] for p in wanted))


def _owners(
    group: ResolvedGroup, modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, str, nn.Parameter]]:
    wanted = {id(p) for p in group.parameters}
    inside = {id(child) for module in group.modules.values() for child in module.modules()}
    for name, module in modules.items():
        if group.modules and id(module) not in inside:
            continue
        for local, parameter in module.named_parameters(recurse=False):
            if id(parameter) in wanted:
                yield name, local, parameter


def _unit_of(
    owner: str,
    parameter: nn.Parameter,
    passes: Passes,
    thin: tuple[type[nn.Module], ...],
    everywhere: bool,
) -> str | None:
    """The nearest module around the owner that runs, and around all uses if so wanted."""
    structure = passes.structure
    uses, places = [], []
    if everywhere:
        uses = [set(u.calls) for u in structure.uses if u.parameter == id(parameter) and u.calls]
        places = [n for n, m in passes.modules.items() if _holds(m, parameter)]
    name = owner
    while True:
        calls = structure.of(name)
        at = {call.number for place in [name, *places] for call in structure.of(place)}
        fits = not thin or all(_by_rows(call, passes.modules[name], thin) for call in calls)
        if calls and fits and all(at & use for use in uses):
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def _holds(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in module.parameters(recurse=False))


def _by_rows(call: Call, module: nn.Module, thin: tuple[type[nn.Module], ...]) -> bool:
    """Whether a call takes and returns rows, or a table that can be spread over the rows."""
    if not call.rowwise:
        return False
    if any(leaf.axis is not None for _, leaf in call.tensors):
        return True
    ends = [*call.inputs[:1], *call.leaves]
    return type(module) in thin and all(isinstance(x, Leaf) and x.shape[:1] == (1,) for x in ends)


def _drop_nested(found: dict[str, dict[str, nn.Parameter]], structure: Structure) -> None:
    """A tied parameter that is shifted around an outer module is so in all modules inside."""
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
    thin: tuple[type[nn.Module], ...],
) -> None:
    for name in sorted(found, key=lambda n: n.count(".") + bool(n)):
        if name not in found or type(modules[name]) in thin:
            continue
        prefix = f"{name}." if name else ""
        for inner in [n for n in found if n != name and n.startswith(prefix)]:
            path = inner[len(prefix) :]
            found[name].update({f"{path}.{k}": p for k, p in found.pop(inner).items()})
