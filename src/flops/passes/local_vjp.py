"""The local vector-Jacobian product (VJP): D_theta phi(x)^T delta, through the target only.

The pass runs once more from the replayed prefix with clean inputs. Gradients are enabled only
inside the target, and the pass stops after the last target, so no autograd graph spans two.

A stage with large activations is checkpointed: it stores the inputs of its modules and runs each
module again in the backward pass. Memory is that of one module's activations, for one more forward
pass of the stage. Every gradient is passed on as soon as it is known, so those of a whole target
never exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from flops.errors import CoverageError
from flops.passes.replay import Action, Forward, Leave, Passes, Prefix, Record
from flops.passes.structure import Call, Structure

Gradients = dict[nn.Parameter, Tensor]
Take = Callable[["LocalTarget", nn.Parameter, Tensor], None]
_VALUES = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
PIECE = 1 << 18  # values of an inner product at a time
KEPT = 1 << 26  # bytes of a stage's activations that are stored rather than recomputed


@dataclass(frozen=True)
class LocalTarget:
    """First and last call of a local VJP, and its parameters.

    For a leaf or block the first and last call are the same; a stage starts with its first module
    and ends with its last. ``between`` are the calls of its modules except the last, ``row_bytes``
    the memory of its activations per row.
    """

    name: str
    first: int
    last: int
    parameters: tuple[nn.Parameter, ...]
    between: tuple[int, ...] = ()
    row_bytes: int = 0

    def recomputed(self, rows: int) -> tuple[int, ...]:
        """Calls of a stage that are checkpointed, if its activations are large."""
        return self.between if self.row_bytes * rows > KEPT else ()


def add_gradients(into: Gradients, more: Mapping[nn.Parameter, Tensor]) -> None:
    """Sum gradients parameter by parameter; a tied parameter gets the sum over its uses."""
    for parameter, gradient in more.items():
        # Not in place: autograd may return the same tensor for two parameters.
        into[parameter] = into[parameter] + gradient if parameter in into else gradient


def accumulate(parameter: nn.Parameter, gradient: Tensor, own: bool = False) -> None:
    """Add a gradient to ``.grad``, which may keep the tensor if it is owned."""
    with torch.no_grad():
        if parameter.grad is not None:
            parameter.grad.add_(gradient.to(parameter))
        else:  # a copy, unless owned: autograd may return one tensor for two parameters
            parameter.grad = gradient.to(parameter, copy=not own)


def inner(a: Tensor, b: Tensor) -> float:
    """<a, b> in double precision."""
    return sum(float((x.double() * y.double()).sum()) for x, y in _pieces(a, b))


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of two tensors, so that no copy has their full size."""
    if a.is_contiguous() and b.is_contiguous():
        return zip(a.view(-1).split(PIECE), b.view(-1).split(PIECE), strict=True)
    if a.dim() == 0:
        return iter([(a, b)])
    rows = max(1, PIECE // max(1, a[0].numel())) if len(a) else 1
    return zip(a.split(rows), b.split(rows), strict=True)


def stage_target(
    group: str,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, list[Call]],
    structure: Structure,
) -> LocalTarget:
    """The modules of a group as one target with one noise site at its end.

    Args:
        group: Name of the group.
        modules: Its modules by name.
        calls: Their calls.
        structure: Structure of the forward pass.

    Raises:
        CoverageError: If a module runs more than once, or inside another one.
    """
    several = [name for name, found in calls.items() if len(found) > 1]
    if several:
        raise CoverageError(
            f"group '{group}': {several} run more than once in a forward pass, so they have "
            'no single place in a stage; use targets="block"'
        )
    order = sorted((found[0] for found in calls.values()), key=lambda call: call.start)
    for before, after in pairwise(order):
        if after.start < before.end:
            raise CoverageError(f"stage '{group}': '{after.name}' runs inside '{before.name}'")
    parameters = dict.fromkeys(p for m in modules.values() for p in trainable(m))
    between = tuple(call.number for call in order[:-1])
    first, last = order[0], order[-1]
    inside = [c for c in structure.calls if first.start <= c.start and c.end <= last.end]
    memory = sum(leaf.row_bytes for call in inside for _, leaf in call.tensors)
    return LocalTarget(group, first.number, last.number, tuple(parameters), between, memory)


def trainable(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Parameters that require a gradient."""
    return tuple(p for p in module.parameters() if p.requires_grad)


def local_share(
    structure: Structure, prefix: Prefix, targets: Sequence[LocalTarget], rows: int
) -> float:
    """Cost of the local VJPs of one point, in forward passes.

    From the prefix to the last target, and twice through the targets for the backward pass.

    Args:
        structure: Of the forward pass.
        prefix: What is replayed.
        targets: The targets.
        rows: Rows of a pass, which determine what a stage recomputes.
    """
    calls = structure.calls
    forward = _work(structure, 0, max(calls[t.last].end for t in targets)) - prefix.share
    again = [calls[c] for t in targets for c in t.recomputed(rows)]
    spans = [(calls[t.first].start, calls[t.last].end) for t in targets]
    return forward + structure.share(again) + 2 * sum(_work(structure, a, b) for a, b in spans)


def _work(structure: Structure, first: int, last: int) -> float:
    """Share of a forward pass in the outermost calls between two times."""
    chosen: list[Call] = []
    inside: set[int] = set()
    for call in structure.calls:
        if call.parent in inside:
            inside.add(call.number)
        elif call.start >= first and call.end <= last:
            chosen.append(call)
            inside.add(call.number)
    return structure.share(chosen)


def local_vjps(
    passes: Passes,
    prefix: Prefix,
    record: Record,
    points: Tensor,
    targets: Sequence[LocalTarget],
    deltas: Mapping[int, Mapping[int, Tensor]],
    take: Take,
    places: Tensor | None = None,
    watch: Callable[[LocalTarget, Any], None] | None = None,
) -> None:
    """Sum over the points of D_theta phi^T delta, for each target as soon as it has run.

    Args:
        passes: Passes of the model over the batch.
        prefix: Calls that end before the first target starts.
        record: Outputs of the prefix.
        points: Points to run.
        targets: Targets in the order in which they end.
        deltas: By the number of a target's last call and the position of a tensor in its output:
            the gradient of the loss with respect to that tensor, for these points.
        take: Called with each target, parameter and gradient; it owns the gradient.
        places: Positions of the points in the record, if not the points themselves.
        watch: Called with each target and its (args, kwargs).
    """
    around: dict[int, Action] = {}
    final = targets[-1].last
    for target in targets:
        if target.first != target.last:
            again = target.recomputed(len(points))
            around.update(dict.fromkeys(again, _checkpointed))
            around[target.first] = _open(_checkpointed if target.first in again else _plainly)
        leave = target.last == final
        around[target.last] = _vjp(target, deltas[target.last], take, leave, watch)
    with torch.no_grad():
        try:
            passes.run(prefix, record, points, around=around, places=places)
        except Leave:
            return
    raise CoverageError(f"target '{targets[-1].name}' did not run in the local pass")


def _fitted(delta: Tensor, out: Tensor) -> Tensor:
    """Delta in the shape of the output; deltas of points that share an output are summed."""
    if delta.numel() != out.numel():
        delta = delta.sum(0)
    return delta.to(out.dtype).reshape(out.shape)


def _detached(tree: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def _open(run: Action) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_grad_enabled(True)  # until the end of the stage; the caller's no_grad restores it
        return run(forward, _detached(args), _detached(kwargs))

    return action


def _plainly(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _checkpointed(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Recompute a layer for its gradients, unless it may change an argument."""
    if not all(isinstance(leaf, _VALUES) for leaf in tree_leaves((args, kwargs))):
        return forward(*args, **kwargs)  # the cache of keys and values, for example

    def run() -> Any:
        return forward(*args, **kwargs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


def _vjp(
    target: LocalTarget,
    deltas: Mapping[int, Tensor],
    take: Take,
    leave: bool,
    watch: Callable[[LocalTarget, Any], None] | None,
) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target.first == target.last:
            args, kwargs = _detached(args), _detached(kwargs)
        if watch is not None:
            watch(target, (args, kwargs))
        with torch.enable_grad():
            leaves, spec = tree_flatten(forward(*args, **kwargs))
        pairs = [(leaves[i], d) for i, d in deltas.items() if leaves[i].requires_grad]
        if not pairs:
            raise CoverageError(
                f"the output of target '{target.name}' does not depend differentiably on its "
                "trainable parameters: likelihood ratio needs the target's Jacobian. Use SPSA "
                "or ES for it."
            )
        hooks = [p.register_hook(partial(_hand_over, take, target, p)) for p in target.parameters]
        try:
            torch.autograd.grad(
                [out for out, _ in pairs],
                target.parameters,
                [_fitted(delta, out) for out, delta in pairs],
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        detached = _detached(leaves)
        del leaves, pairs  # free the graph
        if leave:
            raise Leave
        return tree_unflatten(detached, spec)

    return action


def _hand_over(
    take: Take, target: LocalTarget, parameter: nn.Parameter, gradient: Tensor
) -> Tensor:
    """Pass a gradient on; autograd continues with zeros that take no memory."""
    take(target, parameter, gradient.detach())
    return gradient.new_zeros(()).expand(gradient.shape)


def graph_recorder(
    target: LocalTarget, at: Sequence[int], found: dict[int, set[int]]
) -> dict[int, Action]:
    """Actions that run a target with gradients enabled and record the parameters in its graph.

    Args:
        target: The target.
        at: Positions of the perturbed tensors in its output.
        found: Receives the ``id`` of these parameters, by the number of the target's last call.
    """

    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target.first == target.last:
            args, kwargs = _detached(args), _detached(kwargs)
        with torch.enable_grad():
            leaves, spec = tree_flatten(forward(*args, **kwargs))
        found[target.last] = _leaves_of([leaves[i].grad_fn for i in at])
        torch.set_grad_enabled(False)  # the end of a stage
        return tree_unflatten(_detached(leaves), spec)

    stage = target.first != target.last
    return {**({target.first: _open(_plainly)} if stage else {}), target.last: action}


def _leaves_of(nodes: Sequence[Any]) -> set[int]:
    """Tensors at the leaves of autograd graphs, by ``id``."""
    found, seen, todo = set(), set(), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo.extend(after for after, _ in node.next_functions)
    return found
