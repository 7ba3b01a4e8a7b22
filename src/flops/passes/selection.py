"""Selections: modules of a group and their trainable parameters, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize


@dataclass(frozen=True, eq=False)
class Selection:
    """Modules and trainable parameters of a model that are perturbed together.

    Attributes:
        name: For reports and messages.
        modules: By their names in the model; empty for bare parameters.
        parameters: Trainable parameters.
    """

    name: str
    modules: Mapping[str, nn.Module]
    parameters: tuple[nn.Parameter, ...]


def leaves(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The smallest modules whose outputs depend on all trainable parameters of a module.

    A module with its own parameters is not split, since its forward uses them; neither is
    nn.MultiheadAttention, whose projections never run as modules.
    """
    if not any(p.requires_grad for p in module.parameters()):
        return {}
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    lists = [c for c in module.children() if isinstance(c, nn.ParameterList | nn.ParameterDict)]
    # What lists of parameters hold (IA3 of PEFT) acts in the forward of the module around them.
    own |= any(p.requires_grad for part in lists for p in part.parameters())
    if own or isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module):
        return {name: module}
    found: dict[str, nn.Module] = {}
    for child_name, child in module.named_children():
        found.update(leaves(f"{name}.{child_name}" if name else child_name, child))
    return found
