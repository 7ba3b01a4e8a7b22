"""What must hold for likelihood ratio to be right about its targets, tried out with a few rows.

Each check guards against a gradient that would be wrong without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.errors import CoverageError
from flops.passes.intercept import Action, Forward, Leave
from flops.passes.local_vjp import LocalTarget, local_products
from flops.passes.replay import Passes, nothing
from flops.perturb.activations import Sites


def check_sites(sites: Sites, passes: Passes) -> None:
    """Run all checks.

    Raises:
        CoverageError: With what is wrong and what to do instead.
    """
    _check_shared_outputs(sites, passes)
    _check_foreign(sites)
    _check_differentiable(sites, passes)
    _check_bypass(sites, passes)


def _check_shared_outputs(sites: Sites, passes: Passes) -> None:
    """An output without a batch axis may get one, if the model then keeps the rows apart."""
    shared = {sites.structure.calls[s.call].name for s in sites.sites if s.leaf.axis is None}

    def perturb(scale: Tensor) -> dict[str, Any]:
        device = sites.sites[0].leaf.device
        noise = torch.linspace(-1, 1, len(scale) * sites.size, device=device)
        rows = noise.view(len(scale), -1) * scale.to(device).unsqueeze(1)
        return {"edits": sites.edits(rows, 0.1)}

    if shared and not passes.rows_apart(sites.query_prefix, perturb):
        raise CoverageError(
            f"the output of target {sorted(shared)} has no batch axis, and the model does not "
            "take one, so it cannot be perturbed point by point; give the module around it, or "
            "use SPSA(shared=True) for it"
        )


def _check_foreign(sites: Sites) -> None:
    """No other group may train inside a target: the graph of its product would span both."""
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


def _check_differentiable(sites: Sites, passes: Passes) -> None:
    """Where a parameter moves the target's output, a gradient must flow back to it."""
    structure = sites.structure
    deltas: dict[int, dict[int, Tensor]] = {}
    for site in sites.sites:
        ones = torch.ones_like(structure.outputs[site.call][site.leaf_index])
        deltas.setdefault(site.call, {})[site.leaf_index] = ones
    record = {number: structure.outputs[number] for number in sites.local_prefix.needed}
    places = torch.arange(len(structure.rows))
    passes.trials += 1
    found: set[nn.Parameter] = set()
    local_products(
        passes,
        sites.local_prefix,
        record,
        structure.rows,
        sites.local,
        deltas,
        lambda _, gradients: found.update(gradients),
        places,
    )
    for target in sites.local:
        for parameter in target.parameters:
            if parameter not in found and _moves_output(sites, passes, target, parameter):
                names = {id(p): n for n, p in passes.model.named_parameters()}
                raise CoverageError(
                    f"the output of target '{target.name}' depends on its parameter "
                    f"'{names[id(parameter)]}', but no gradient flows between them: something "
                    "inside the target is not differentiable. Give smaller targets on both sides "
                    "of it, or use SPSA or ES."
                )


def _moves_output(
    sites: Sites, passes: Passes, target: LocalTarget, parameter: nn.Parameter
) -> bool:
    seen: list[Any] = []

    def leave(out: Any) -> Any:
        seen.extend(tree_flatten(out)[0])
        raise Leave

    outputs, data = sites.structure.outputs, parameter.data
    record = {number: outputs[number] for number in sites.local_prefix.needed}
    places = torch.arange(len(sites.structure.rows))
    parameter.data = _other(data)
    try:
        passes.trial(sites.local_prefix, record, places, edits={target.last: leave})
    except Leave:
        pass
    finally:
        parameter.data = data
    at = [site.leaf_index for site in sites.sites if site.call == target.last]
    return any(not torch.equal(seen[i], outputs[target.last][i]) for i in at)


def _check_bypass(sites: Sites, passes: Passes) -> None:
    """The targets' parameters must act on the loss through the perturbed outputs alone.

    The targets run with other parameters but return their clean outputs: no loss may move.
    """
    structure = sites.structure
    saved: dict[nn.Parameter, Tensor] = {}
    around: dict[int, Action] = {}
    for target in sites.local:
        around[target.first] = _shift(target, saved)
        around[target.last] = _clean_output(target, saved, sites)
    places = torch.arange(len(structure.rows))
    try:
        losses = passes.trial(nothing(structure), {}, places, around=around)
    finally:
        for parameter, data in saved.items():
            parameter.data = data
    if losses is not None and not structure.agrees(losses, places):
        names = sorted({structure.calls[target.last].name for target in sites.local})
        raise CoverageError(
            f"group '{sites.group}': its parameters act on the loss not only through the output "
            f"of {names}: there is a skip connection past it, or something is left in an attribute "
            "for a later module. Give the module around both, or use SPSA; for a stage use "
            'targets="block", or end it behind the connection.'
        )


def _shift(target: LocalTarget, saved: dict[nn.Parameter, Tensor]) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for parameter in target.parameters:
            saved[parameter] = parameter.data
            parameter.data = _other(parameter.data)
        return forward(*args, **kwargs)

    return action


def _clean_output(target: LocalTarget, saved: dict[nn.Parameter, Tensor], sites: Sites) -> Action:
    perturbed = {site.leaf_index for site in sites.sites if site.call == target.last}
    clean = sites.structure.outputs[target.last]
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
            # Integers pass no derivative on, so they are as in the clean pass, too.
            if isinstance(leaf, Tensor) and (i in perturbed or not leaf.is_floating_point()):
                leaves[i] = clean[i].clone()
        return tree_unflatten(leaves, spec)

    return action


def _other(data: Tensor) -> Tensor:
    return data * 1.5 + 0.5
