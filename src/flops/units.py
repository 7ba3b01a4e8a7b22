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
from flops.structure import Structure, Use


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
    group: ResolvedGroup, passes: Passes, reuse: bool, splits: tuple[type[nn.Module], ...] = ()
) -> Units:
    """Assign every parameter of a group to the units that use it.

    Args:
        group: The group.
        passes: Passes over the structure of the model.
        reuse: Whether to replay what ends before the first unit.
        splits: If given, a unit of any other type takes over the units inside it, because it is
            perturbed as a whole.
    """
    structure = passes.structure
    found: dict[str, dict[str, nn.Parameter]] = {}
    for owner, local, parameter in _owners(group, passes.modules):
        name = _nearest(owner, structure)
        if name is None:
            raise CoverageError(f"group '{group.name}': '{owner}' never runs in the forward pass")
        path = f"{owner}.{local}".lstrip(".")
        found.setdefault(name, {})[path[len(name) + 1 :] if name else path] = parameter
    if splits:
        _absorb(found, passes.modules, splits)
    units = tuple(
        Unit(name, passes.modules[name], parameters, tuple(c.number for c in structure.of(name)))
        for name, parameters in found.items()
    )
    start = min(structure.calls[unit.calls[0]].start for unit in units)
    prefix = passes.prefix(start) if reuse else nothing(structure)
    return Units(structure, units, prefix)


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


def _nearest(owner: str, structure: Structure) -> str | None:
    name = owner
    while not structure.of(name):
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _absorb(
    found: dict[str, dict[str, nn.Parameter]],
    modules: Mapping[str, nn.Module],
    typed: tuple[type[nn.Module], ...],
) -> None:
    for name in sorted(found, key=lambda n: n.count(".") + bool(n)):
        if name not in found or isinstance(modules[name], typed):
            continue
        prefix = f"{name}." if name else ""
        for inner in [n for n in found if n != name and n.startswith(prefix)]:
            path = inner[len(prefix) :]
            found[name].update({f"{path}.{k}": p for k, p in found.pop(inner).items()})
