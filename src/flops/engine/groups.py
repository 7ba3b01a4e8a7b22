"""Groups: modules that are perturbed together, with an estimator and a number of queries.

A module belongs to at most one group, a trainable parameter to at least one.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from flops.allocators.base import Allocator
from flops.allocators.equal import Equal
from flops.allocators.fixed import Fixed
from flops.errors import CoverageError, FlopsError, QueryError
from flops.estimators.base import Estimator
from flops.passes.selection import Selection

Target = nn.Module | str
FIRST = 16  # queries per point in the first step of an automatic group


@dataclass(frozen=True, eq=False, repr=False)
class Group:
    """Targets that are perturbed together.

    Args:
        targets: A module, a module's name or name pattern (``*`` matches one part of a name, ``**``
            any number of parts), or a list of these.
        estimator: Estimator of the gradient.
        queries: Mean number of queries per point; the group's budget is queries * B. "auto" for the
            most expected progress per cost, step by step (`flops.allocators.progress`).
        name: Name in reports; by default that of the first target.
        parameters: Bare parameters, instead of targets.

    A container without its own forward (a ModuleList, or a slice of one) stands for the modules in
    it.
    """

    targets: Target | Iterable[Target] = ()
    estimator: Estimator | None = None
    queries: float | Literal["auto"] = 20
    name: str | None = None
    parameters: Iterable[nn.Parameter] = ()

    def __post_init__(self) -> None:
        """Convert to tuples, since generators can be read only once."""
        one = isinstance(self.targets, nn.Module | str)
        object.__setattr__(self, "targets", (self.targets,) if one else tuple(self.targets))  # type: ignore[arg-type]
        one = isinstance(self.parameters, Tensor)
        object.__setattr__(
            self, "parameters", (self.parameters,) if one else tuple(self.parameters)
        )

    def __repr__(self) -> str:
        targets: Any = self.targets
        shown = [t if isinstance(t, str) else type(t).__name__ for t in targets]
        what = f"{shown}" if shown else f"parameters=[{len(tuple(self.parameters))}]"
        name = "" if self.name is None else f", name={self.name!r}"
        queries = self.queries if isinstance(self.queries, str) else f"{self.queries:g}"
        return f"Group({what}, {self.estimator!r}, queries={queries}{name})"


@dataclass(frozen=True, eq=False)
class ResolvedGroup(Selection):
    """A group with its targets by name, its estimator and mean queries per point.

    Attributes:
        estimator: Estimator of the gradient.
        queries: Mean queries per point; of the first step, if they are automatic.
        automatic: Whether later steps choose them.
    """

    estimator: Estimator
    queries: float
    automatic: bool = False


def resolve(
    groups: Group | Sequence[Group], modules: Mapping[str, nn.Module], root: nn.Module
) -> list[ResolvedGroup]:
    """Find the targets in the model, and check the groups.

    Raises:
        CoverageError: Unknown or overlapping targets, or trainable parameters in no group.
        QueryError: Fewer queries than the estimator needs.
    """
    groups = [groups] if isinstance(groups, Group) else list(groups)
    if not groups:
        raise CoverageError("no groups were given; leave groups=None for automatic ones")
    resolved = [_resolve_one(group, number, modules, root) for number, group in enumerate(groups)]
    names = [group.name for group in resolved]
    for name in names:
        if names.count(name) > 1:
            raise CoverageError(f"two groups are called '{name}'; give them different names")
    _check_overlap(resolved)
    _check_covered(resolved, root)
    return resolved


def _resolve_one(
    group: Group, number: int, modules: Mapping[str, nn.Module], root: nn.Module
) -> ResolvedGroup:
    if not isinstance(group, Group):
        raise CoverageError(f"groups must be Group(...), not {type(group).__name__}")
    label = f"group '{group.name}'" if group.name else f"group {number}"
    estimator = group.estimator
    if not isinstance(estimator, Estimator):
        raise CoverageError(
            f"{label} needs an estimator, for example LikelihoodRatio(sigma=1e-3), not {estimator}"
        )
    found: dict[str, nn.Module] = {}
    targets, given = tuple(group.targets), tuple(group.parameters)  # type: ignore[arg-type]
    if bool(targets) == bool(given):
        raise CoverageError(f"{label}: give either targets or parameters")
    for target in targets:
        for name, module in _find(target, modules, label):
            if name in found:
                raise CoverageError(f"{label}: target '{name}' is given twice")
            found[name] = module
    # A frozen target has nothing to learn, and its noise would only add variance.
    live = {n: m for n, m in found.items() if any(p.requires_grad for p in m.parameters())}
    if found and not live:
        raise CoverageError(f"{label}: no parameter of {list(found)[:3]} requires a gradient")
    known = {id(p): n for n, p in root.named_parameters(remove_duplicate=False)}
    for parameter in given:
        if id(parameter) not in known:
            raise CoverageError(f"{label}: a given parameter is not part of the model")
    all_given = given or tuple(p for m in live.values() for p in m.parameters())
    parameters = tuple(p for p in dict.fromkeys(all_given) if p.requires_grad)
    if not parameters:
        raise CoverageError(
            f"{label}: none of its parameters requires a gradient ({known[id(given[0])]}, ...)"
        )
    queries: Any = group.queries
    automatic = isinstance(queries, str) and queries == "auto"
    if automatic:
        if estimator.shared:
            raise QueryError(
                f'{label}: queries="auto" needs draws of each point, and those of '
                f"{type(estimator).__name__} are shared by the batch; give a number"
            )
        queries = max(FIRST, estimator.minimum_queries) if estimator.makes_queries else 0
    if not isinstance(queries, int | float):
        raise QueryError(f"{label}: queries must be a number or 'auto', not {group.queries!r}")
    if not estimator.minimum_queries <= queries < math.inf:
        raise QueryError(
            f"{label}: {type(estimator).__name__} needs at least "
            f"{estimator.minimum_queries} queries per point, not {group.queries}"
        )
    first = next(iter(live)) if live else known[id(given[0])]
    name = group.name or first or "model"
    resolved = ResolvedGroup(name, live, parameters, estimator, queries, automatic)
    estimator.check(resolved)
    return resolved


def _find(
    target: Target, modules: Mapping[str, nn.Module], label: str
) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(target, nn.Module):
        names = {id(module): name for name, module in modules.items()}
        container = isinstance(target, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if id(target) in names:
            return _opened(names[id(target)], target, names)
        if container and all(id(child) in names for child in target.children()):
            return [(names[id(child)], child) for child in target.children()]  # a slice
        raise CoverageError(
            f"{label}: the target {type(target).__name__} is not a module of the model"
        )
    if not isinstance(target, str):
        raise CoverageError(
            f"{label}: a target is a module or a module's name, not {type(target).__name__}"
        )
    pattern = re.escape(target).replace(r"\*\*", ".+").replace(r"\*", "[^.]+")
    found = [(name, m) for name, m in modules.items() if re.fullmatch(pattern, name)]
    if not found:
        close = difflib.get_close_matches(target, modules, n=3, cutoff=0.4)
        hint = f"; did you mean {close}?" if close else ""
        raise CoverageError(f"{label}: no module is called '{target}'{hint}")
    names = {id(module): name for name, module in modules.items()}
    return [one for name, module in found for one in _opened(name, module, names)]


def _opened(name: str, module: nn.Module, names: Mapping[int, str]) -> list[tuple[str, nn.Module]]:
    """The module, or its children if it has no forward and so never runs."""
    own = next(module.parameters(recurse=False), None) is not None
    if type(module).forward is not nn.Module.forward or own or not len(list(module.children())):
        return [(name, module)]
    inside = [_opened(names[id(child)], child, names) for child in module.children()]
    return [one for part in inside for one in part]


def _check_overlap(groups: Sequence[ResolvedGroup]) -> None:
    owner: dict[int, tuple[str, str]] = {}
    for group in groups:
        for name, module in group.modules.items():
            for child in module.modules():
                # Blocks may share modules without trainable parameters: an activation, a table.
                if not any(p.requires_grad for p in child.parameters(recurse=False)):
                    continue
                if id(child) in owner:
                    other, there = owner[id(child)]
                    raise CoverageError(
                        f"'{name}' in group '{group.name}' overlaps '{there}' in group '{other}': "
                        "a module belongs to at most one target"
                    )
                owner[id(child)] = (group.name, name)
    for group in groups:
        exclusive = group.parameters if not group.modules or group.estimator.whole_model else ()
        for other_group in groups:
            both = {id(p) for p in exclusive} & {id(p) for p in other_group.parameters}
            if other_group is not group and both:
                raise CoverageError(
                    f"groups '{group.name}' and '{other_group.name}' share a parameter, and "
                    f"'{group.name}' already covers all its uses"
                )


def _check_covered(groups: Sequence[ResolvedGroup], root: nn.Module) -> None:
    covered = {id(p) for group in groups for p in group.parameters}
    missing = [n for n, p in root.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CoverageError(
            f"trainable parameters in no group: {missing[:5]}{more}. Add their modules to a "
            "group, give them as Group(parameters=[...], estimator=SPSA(...)), or freeze them "
            "with requires_grad_(False)."
        )


def check_seeded(groups: Sequence[ResolvedGroup]) -> None:
    """Raise if a group's gradient is not given by keys and scalars."""
    for group in groups:
        if not group.estimator.seeded:
            raise FlopsError(
                f"group '{group.name}': the gradient of {type(group.estimator).__name__} does "
                "not follow from seeds and scalars; those of MeZO, FZOO, LOZO, JVP, "
                "SPSA(shared=True) and ES(shared=True) do. For others use any torch "
                "optimizer, and flops.optim.step_as_gradients_appear(optimizer) to hold one "
                "gradient at a time."
            )


def check_allocators(groups: Sequence[ResolvedGroup], allocators: dict[str, Allocator]) -> None:
    """Give groups with shared draws equal counts; raise if there is no other group.

    With shared draws the points' errors are correlated, so J is not the variance.
    """
    noisy = [group for group in groups if group.estimator.makes_queries]
    for group in noisy:
        if group.estimator.shared and not isinstance(allocators[group.name], Equal | Fixed):
            if all(other.estimator.shared for other in noisy):
                raise QueryError(
                    f"group '{group.name}': all points share its draws, so their errors are "
                    "correlated and no allocation helps; use per-point draws (shared=False), or "
                    "no allocator"
                )
            allocators[group.name] = Equal()
