"""Automatic groups: three groups of the repeated blocks, separate groups for the other modules.

Every stack of a model (two towers) gets its own groups. A small trainable part of a frozen model (a
prompt encoder, an adapter, a head) is one target. Parameters without a module that could be
perturbed (a bare scale in the root) are estimated by SPSA with shared draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torch import nn

from flops.engine.groups import Group
from flops.errors import CoverageError
from flops.estimators.base import Estimator
from flops.estimators.likelihood_ratio import LikelihoodRatio
from flops.estimators.spsa import SPSA
from flops.subspace.config import RELIABLE, Shaping

PARTS = 3
# Where stages end, as a share of the depth: the gradient is low-dimensional at late sites, and
# their queries are cheap. Local VJPs train the layers before them.
STAGE_ENDS = (2 / 3, 1.0)


@dataclass(frozen=True)
class _Stack:
    name: str
    blocks: tuple[str, ...]


def automatic_groups(
    modules: Mapping[str, nn.Module],
    estimator: Estimator,
    queries: float | Literal["auto"] = 20,
    parts: int | Sequence[float] = PARTS,
    *,
    join: bool = False,
) -> list[Group]:
    """Groups for any model: see the module's docstring.

    Args:
        modules: All modules by name, the root under the empty name.
        estimator: Estimator of every group of modules.
        queries: Mean queries per point and group, or "auto".
        parts: Groups per stack of blocks; or where each ends, as a share of the stack, up to 1.
        join: Whether the modules before the blocks belong to the first group of blocks. Not in a
            model with bare parameters of its own, which may act between them.
    """
    if not any(_trains(module) for module in modules.values()):
        raise CoverageError("the model has no trainable parameters: nothing requires a gradient")
    stacks = _small_part(modules) or _stacks(modules)
    inside = {name for stack in stacks for name in stack.blocks}
    rest, loose = _rest(modules, inside)
    join = join and not loose
    order = {name: place for place, name in enumerate(modules)}
    around: dict[tuple[str, str], list[str]] = {}
    for name in rest:
        stack = max(stacks, key=lambda s: (_shared_parts(s.name, name), -order[s.name]))
        side = "before" if order[name] < order[stack.name] else "after"
        around.setdefault((stack.name, side), []).append(name)
    groups: list[Group] = []
    for stack in stacks:
        label = f"{stack.name}." if len(stacks) > 1 else ""
        first = around.get((stack.name, "before"), [])
        cuts = _cut(stack.blocks, parts)
        pieces = [] if join else [("before", first)]
        pieces += [
            (f"blocks-{i + 1}", [*first, *part] if join and not i else part)
            for i, part in enumerate(cuts)
        ]
        # With prefix reuse, queries after the blocks are almost free: one group per module.
        pieces += [(name, [name]) for name in around.get((stack.name, "after"), [])]
        for piece, names in pieces:
            if names:
                name = piece if piece in modules else label + piece
                groups.append(Group(names, estimator, queries, name=name))
    if loose:
        count = 20 if queries == "auto" else queries  # its draws are shared
        groups.append(
            Group(parameters=loose, estimator=SPSA(shared=True), queries=count, name="loose")
        )
    return groups


def default_groups(modules: Mapping[str, nn.Module]) -> list[Group]:
    """Stages with shaped noise, automatic sigma and automatic queries.

    Modules before the blocks, such as embeddings, belong to the first stage where they can. As a
    group they may stand side by side (tokens and positions), so each has noise of its own.
    """
    stage = LikelihoodRatio("auto", "stage", shaping=Shaping(withhold=RELIABLE))
    return [
        replace(group, estimator=replace(stage, targets="block")) if before(group) else group
        for group in automatic_groups(modules, stage, "auto", STAGE_ENDS, join=True)
    ]


def block_groups(modules: Mapping[str, nn.Module]) -> list[Group]:
    """The default groups, with noise on the output of every module instead of at the end alone.

    For models that cannot be cut into stages, such as one with ``x = x + block(x)`` in its forward.
    """
    return [
        replace(group, estimator=replace(group.estimator, targets="block"))
        if isinstance(group.estimator, LikelihoodRatio)
        else group
        for group in default_groups(modules)
    ]


def before(group: Group) -> bool:
    """Whether an automatic group has the modules before the blocks."""
    return (group.name or "").rpartition(".")[2] == "before"


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _small_part(modules: Mapping[str, nn.Module]) -> list[_Stack]:
    """The module that holds all that trains, if it is less than half of the model and not deep.

    Its output is where a frozen model takes it in, so noise there is in the fewest dimensions. A
    part with a stack of blocks is deep: its local VJP would be backpropagation.
    """
    name, found = "", next(iter(modules.values()))
    whole, part = found, ("", found)
    while not any(p.requires_grad for p in found.parameters(recurse=False)):
        children = [(n, c) for n, c in found.named_children() if _trains(c)]
        if len(children) != 1:
            break
        name = f"{name}.{children[0][0]}" if name else children[0][0]
        found = children[0][1]
        if type(found).forward is not nn.Module.forward:  # a ModuleList never runs
            part = (name, found)
    below = {n: m for n, m in modules.items() if n.startswith(f"{part[0]}.") and _trains(m)}
    deep = any(
        isinstance(m, nn.ModuleList | nn.Sequential)
        and sum(_trains(c) and any(True for _ in c.children()) for c in m.children()) > 1
        for m in [part[1], *below.values()]
    )
    small = 2 * _size(part[1]) < _size(whole)
    return [_Stack(part[0], (part[0],))] if part[0] and small and not deep else []


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _stacks(modules: Mapping[str, nn.Module]) -> list[_Stack]:
    """Outermost containers of repeated trainable blocks, or else the model's children."""
    stacks: list[_Stack] = []
    for name, module in modules.items():
        if any(name.startswith(f"{stack.name}.") for stack in stacks):
            continue
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = {f"{name}.{n}" if name else n: c for n, c in module.named_children()}
        children = {n: c for n, c in children.items() if _trains(c)}
        kinds = Counter(type(child) for child in children.values())
        if kinds and kinds.most_common(1)[0][1] >= 2:
            kind = kinds.most_common(1)[0][0]
            blocks = tuple(n for n, c in children.items() if type(c) is kind)
            stacks.append(_Stack(name, blocks))
            if not name:
                return stacks
    if stacks:
        return stacks
    return [_children_stack(*next(iter(modules.items())))]


def _children_stack(name: str, module: nn.Module) -> _Stack:
    """The trainable children of the outermost module with several, or that module."""
    children = [(n, c) for n, c in module.named_children() if _trains(c)]
    # A local VJP of the root would be backpropagation, so the root's own parameters are loose.
    # Those of inner modules act in the module's forward.
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    if not children or (own and name) or isinstance(module, nn.MultiheadAttention):
        return _Stack(name, (name,))
    prefix = f"{name}." if name else ""
    if len(children) == 1:
        return _children_stack(prefix + children[0][0], children[0][1])
    return _Stack(name, tuple(prefix + n for n, _ in children))


def _rest(
    modules: Mapping[str, nn.Module], inside: set[str]
) -> tuple[list[str], list[nn.Parameter]]:
    """Maximal trainable modules outside the blocks, and parameters between them."""
    rest: list[str] = []
    loose: dict[nn.Parameter, None] = {}

    def visit(name: str, module: nn.Module) -> None:
        if name in inside or name not in modules or not _trains(module):
            return  # a module under a second name was visited under its first
        prefix = f"{name}." if name else ""
        if not any(block.startswith(prefix) for block in inside):
            rest.append(name)
            return
        loose.update(dict.fromkeys(p for p in module.parameters(recurse=False) if p.requires_grad))
        for child_name, child in module.named_children():
            visit(prefix + child_name, child)

    name, root = next(iter(modules.items()))
    visit(name, root)
    return rest, list(loose)


def _cut(blocks: tuple[str, ...], parts: int | Sequence[float]) -> list[list[str]]:
    if isinstance(parts, int):
        parts = min(parts, len(blocks))
        edges = [len(blocks) * i // parts for i in range(parts + 1)]
    else:
        parts, edges = list(parts)[-len(blocks) :], [0]
        for number, end in enumerate(parts, start=1):  # each has a block at least
            most = len(blocks) - len(parts) + number
            edges.append(min(most, max(edges[-1] + 1, round(end * len(blocks)))))
    return [list(blocks[a:b]) for a, b in pairwise(edges)]


def _shared_parts(left: str, right: str) -> int:
    count = 0
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count
