"""Checks of likelihood ratio's assumptions; each prevents a silently wrong gradient.

Most follow from the traced data flow; where it is hidden, a trial with a few rows decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.errors import CoverageError
from flops.passes.local_vjp import LocalTarget, graph_recorder
from flops.passes.replay import Action, Forward, Leave, Passes, Record, empty_prefix
from flops.passes.structure import FEW
from flops.perturb.activations import Sites


def check_shared_outputs(sites: Sites, passes: Passes) -> None:
    """Outputs without a batch axis must broadcast over the rows, independently of each other."""
    shared = {sites.structure.calls[s.call].name for s in sites.sites if s.leaf.axis is None}

    def perturb(scale: Tensor) -> dict[str, Any]:
        device = sites.sites[0].leaf.device
        noise = torch.linspace(-1, 1, len(scale) * sites.size, device=device)
        rows = noise.view(len(scale), -1) * scale.to(device).unsqueeze(1)
        return {"edits": sites.edits(rows, 0.1)}

    if shared and not passes.rows_are_independent(perturb):
        raise CoverageError(
            f"the output of target {sorted(shared)} has no batch axis, and the model does not "
            "broadcast over one, so it cannot be perturbed point by point; give the module "
            "around it, or use SPSA(shared=True) for it"
        )


def check_foreign(sites: Sites) -> None:
    """No other group may train inside a target: the graph of its VJP would contain both."""
    calls = sites.structure.calls
    for target in sites.local:
        own = {id(p) for p in target.parameters}
        for use in sites.structure.uses:
            inside = calls[target.first].start <= use.time < calls[target.last].end
            if inside and use.parameter not in own:
                raise CoverageError(
                    f"'{target.name}' in group '{sites.group}': '{calls[use.calls[-1]].name}' runs "
                    "between its modules and trains in another group; add it to this one"
                )


def check_differentiable(passes: Passes, bindings: Sequence[Any], wanted: Iterable[int]) -> Record:
    """If an output depends on a parameter of its target, a gradient must flow back to it.

    One pass of two rows checks the autograd graphs of all targets of all groups, without a backward
    pass.

    Args:
        passes: Passes over the batch.
        bindings: Bindings of all groups.
        wanted: Calls to record in the same pass.

    Returns:
        Outputs of the wanted calls.
    """
    sites = [binding for binding in bindings if isinstance(binding, Sites)]
    found: dict[int, set[int]] = {}
    around: dict[int, Action] = {}
    for group in sites:
        for target in group.local:
            at = [site.leaf_index for site in group.sites if site.call == target.last]
            around.update(graph_recorder(target, at, found))
    record = passes.recorded(wanted, around)
    for group in sites:
        for target in group.local:
            for parameter in target.parameters:
                missing = id(parameter) not in found.get(target.last, ())
                if missing and _moves_output(group, passes, target, parameter):
                    names = {id(p): n for n, p in passes.model.named_parameters()}
                    raise CoverageError(
                        f"the output of target '{target.name}' depends on its parameter "
                        f"'{names[id(parameter)]}', but no gradient flows between them: something "
                        "inside the target is not differentiable. Give smaller targets on both "
                        "sides of it, or use SPSA or ES."
                    )
    return record


def _moves_output(
    sites: Sites, passes: Passes, target: LocalTarget, parameter: nn.Parameter
) -> bool:
    at = [site.leaf_index for site in sites.sites if site.call == target.last]
    data = parameter.data
    clean = _output(passes, target.last)
    parameter.data = _other(data)
    try:
        moved = _output(passes, target.last)
    finally:
        parameter.data = data
    return any(not torch.equal(moved[i], clean[i]) for i in at)


def _output(passes: Passes, call: int) -> list[Any]:
    """Copies of a call's output; the pass stops there."""
    seen: list[Any] = []

    def leave(out: Any) -> Any:
        seen.extend(x.clone() if isinstance(x, Tensor) else x for x in tree_flatten(out)[0])
        raise Leave

    with suppress(Leave):
        passes.trial(empty_prefix(passes.structure), {}, torch.arange(FEW), edits={call: leave})
    return seen


def check_bypass(sites: Sites, passes: Passes) -> None:
    """The targets' parameters must affect the loss only through the perturbed outputs."""
    calls, hidden = sites.structure.calls, False
    for target in sites.local:
        span = (calls[target.first].start, calls[target.last].end)
        through = [(s.call, s.leaf_index) for s in sites.sites if s.call == target.last]
        own = [id(p) for p in target.parameters]
        escapes = sites.structure.flow.escapes(span, own, through)
        if escapes:
            raise _bypass(sites, [calls[target.last].name])
        hidden = hidden or escapes is None
    if hidden:
        _try_bypass(sites, passes)


def _try_bypass(sites: Sites, passes: Passes) -> None:
    """Targets run with other parameters but return their clean outputs: no loss may change."""
    structure = sites.structure
    saved: dict[nn.Parameter, Tensor] = {}
    around: dict[int, Action] = {}
    clean = passes.recorded({target.last for target in sites.local})
    for target in sites.local:
        around[target.first] = _shift(target, saved)
        around[target.last] = _clean_output(target, saved, sites, clean[target.last])
    places = torch.arange(FEW)
    try:
        losses = passes.trial(empty_prefix(structure), {}, places, around=around)
    finally:
        for parameter, data in saved.items():
            parameter.data = data
    if losses is not None and not structure.agrees(losses, places):
        raise _bypass(sites, sorted({structure.calls[t.last].name for t in sites.local}))


def _bypass(sites: Sites, names: list[str]) -> CoverageError:
    return CoverageError(
        f"group '{sites.group}': its parameters affect the loss not only through the output "
        f"of {names}: there is a skip connection past it, or an attribute that a later module "
        "reads. Give the module around both, or use SPSA; for a stage use "
        'targets="block", or end it after the connection.'
    )


def _shift(target: LocalTarget, saved: dict[nn.Parameter, Tensor]) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for parameter in target.parameters:
            saved[parameter] = parameter.data
            parameter.data = _other(parameter.data)
        return forward(*args, **kwargs)

    return action


def _clean_output(
    target: LocalTarget, saved: dict[nn.Parameter, Tensor], sites: Sites, clean: list[Any]
) -> Action:
    perturbed = {site.leaf_index for site in sites.sites if site.call == target.last}
    shift = _shift(target, saved)

    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target.first == target.last:
            out = shift(forward, args, kwargs)
        else:
            out = forward(*args, **kwargs)
        for parameter in target.parameters:
            parameter.data = saved.pop(parameter)
        leaves, spec = tree_flatten(out)
        for i, leaf in enumerate(leaves):
            # No derivative flows through integers, so these are clean, too.
            if isinstance(leaf, Tensor) and (i in perturbed or not leaf.is_floating_point()):
                leaves[i] = clean[i].clone()
        return tree_unflatten(leaves, spec)

    return action


def _other(data: Tensor) -> Tensor:
    return data * 1.5 + 0.5
