"""Groups: which modules are perturbed together, by which estimator, with how many queries.

A module belongs to at most one group; each trainable parameter to at least one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import parametrize

from flops.errors import CoverageError, QueryError

if TYPE_CHECKING:
    from flops.estimators.base import Estimator

Target = nn.Module | str


@dataclass(frozen=True, eq=False)
class Group:
    """Targets that are perturbed together.

    Args:
        targets: A module, a module's name or name pattern (``*`` stands for one part of a name,
            ``**`` for any number of parts), or a list of these.
        estimator: How the gradient is estimated.
        queries: Mean number of queries per point; the group's budget is queries * B.
        name: Name in reports; by default that of the first target.
        parameters: Instead of targets: parameters that no module owns alone.
    """

    targets: Target | Sequence[Target] = ()
    estimator: Estimator | None = None
    queries: float = 20
    name: str | None = None
    parameters: Sequence[nn.Parameter] = ()


@dataclass(frozen=True, eq=False)
class ResolvedGroup:
    """A group whose targets are known by name; what estimators work with."""

    name: str
    modules: Mapping[str, nn.Module]
    parameters: tuple[nn.Parameter, ...]
    estimator: Estimator
    queries: float

    def budget(self, size: int) -> int:
        """Queries for a batch, in whole units of the estimator."""
        unit = self.estimator.unit
        return int(self.queries * size) // unit * unit


def resolve(
    groups: Sequence[Group], modules: Mapping[str, nn.Module], root: nn.Module
) -> list[ResolvedGroup]:
    """Find the targets in the model and check that groups and parameters fit.

    Raises:
        CoverageError: Unknown or overlapping targets, or trainable parameters in no group.
        QueryError: Fewer queries than the estimator needs.
    """
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
    if group.estimator is None:
        raise CoverageError("a Group needs an estimator, for example LikelihoodRatio(sigma=1e-3)")
    label = group.name or f"group {number}"
    found: dict[str, nn.Module] = {}
    given = [group.targets] if isinstance(group.targets, nn.Module | str) else group.targets
    if bool(given) == bool(group.parameters):
        raise CoverageError(f"{label}: give either targets or parameters")
    for target in given:
        for name, module in _find(target, modules, label):
            if name in found:
                raise CoverageError(f"{label}: target '{name}' is given twice")
            found[name] = module
    # A frozen target has nothing to learn, and its noise would only hurt the others.
    live = {n: m for n, m in found.items() if any(p.requires_grad for p in m.parameters())}
    if found and not live:
        raise CoverageError(f"{label}: no parameter of {list(found)[:3]} requires a gradient")
    known = {id(p): n for n, p in root.named_parameters(remove_duplicate=False)}
    parameters = dict.fromkeys(group.parameters)
    for parameter in parameters:
        if id(parameter) not in known:
            raise CoverageError(f"{label}: a given parameter is not part of the model")
    if not group.parameters:
        parameters = dict.fromkeys(p for m in live.values() for p in m.parameters())
    if group.queries < group.estimator.minimum_queries:
        raise QueryError(
            f"{label}: {type(group.estimator).__name__} needs at least "
            f"{group.estimator.minimum_queries} queries per point, not {group.queries}"
        )
    first = next(iter(live)) if live else known[id(group.parameters[0])]
    resolved = ResolvedGroup(
        group.name or first or "model",
        live,
        tuple(p for p in parameters if p.requires_grad),
        group.estimator,
        group.queries,
    )
    group.estimator.check(resolved)
    return resolved


def _find(
    target: Target, modules: Mapping[str, nn.Module], label: str
) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(target, nn.Module):
        for name, module in modules.items():
            if module is target:
                return [(name, module)]
        raise CoverageError(
            f"{label}: the target {type(target).__name__} is not a module of the model"
        )
    pattern = re.escape(target).replace(r"\*\*", ".*").replace(r"\*", "[^.]*")
    found = [(name, m) for name, m in modules.items() if re.fullmatch(pattern, name)]
    if not found:
        close = difflib.get_close_matches(target, modules, n=3, cutoff=0.4)
        hint = f"; did you mean {close}?" if close else ""
        raise CoverageError(f"{label}: no module is called '{target}'{hint}")
    return found


def _check_overlap(groups: Sequence[ResolvedGroup]) -> None:
    owner: dict[int, tuple[str, str]] = {}
    for group in groups:
        for name, module in group.modules.items():
            for child in module.modules():
                if id(child) in owner:
                    other, there = owner[id(child)]
                    raise CoverageError(
                        f"'{name}' in group '{group.name}' overlaps '{there}' in group '{other}': "
                        "a module belongs to at most one target"
                    )
                owner[id(child)] = (group.name, name)
    for group in groups:
        alone = group.parameters if not group.modules or group.estimator.whole_model else ()
        for other_group in groups:
            both = {id(p) for p in alone} & {id(p) for p in other_group.parameters}
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


def leaves(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The smallest modules whose outputs carry all trainable parameters of a module.

    A module with parameters of its own is not split, since they act inside its forward; this
    keeps nn.MultiheadAttention whole, whose projections never run as modules.
    """
    if not any(p.requires_grad for p in module.parameters()):
        return {}
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    if own or isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        found.update(leaves(f"{name}.{child_name}" if name else child_name, child))
    return found
