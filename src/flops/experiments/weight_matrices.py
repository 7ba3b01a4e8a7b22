"""The matrices and layers of a vision transformer, by the paper's names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from flops.errors import FlopsError
from flops.tasks.models.vit import parts

# Paths inside a layer, for different versions and model families of transformers.
PLACES: dict[str, tuple[str, ...]] = {
    "query": ("attention.q_proj", "attention.attention.query"),
    "key": ("attention.k_proj", "attention.attention.key"),
    "value": ("attention.v_proj", "attention.attention.value"),
    "output": ("attention.o_proj", "attention.output.dense"),
    "ff": ("mlp.fc1", "intermediate.dense", "mlp.weights_in"),
    "ff2": ("mlp.fc2", "output.dense", "mlp.weights_out"),
}
TITLES = {"key": "Key", "query": "Query", "value": "Value", "ff": "feed-forward"}


def layer_numbers(wanted: Sequence[str], count: int) -> list[int]:
    """Layers by number from 1 on, or as first, middle and last; each once, in order.

    The middle of 24 layers is 12, as in the paper.

    Raises:
        FlopsError: If there is no such layer.
    """
    named = {"first": 1, "middle": max(1, count // 2), "last": count}
    found = []
    for name in wanted:
        number = named.get(name, int(name) if name.isdecimal() else 0)
        if not 1 <= number <= count:
            raise FlopsError(
                f"there is no layer '{name}': the model has layers 1 to {count}; first, middle and "
                f"last are {named['first']}, {named['middle']} and {named['last']}"
            )
        found.append(number)
    return sorted(set(found))


def matrix_of(model: nn.Module, layer: int, name: str) -> nn.Linear:
    """The linear module of a name in a layer (from 1 on): a key of `PLACES`, or its own name.

    Raises:
        FlopsError: If the layer has no such matrix.
    """
    modules = dict(parts(model).layers[layer - 1].named_modules())
    for place in (*PLACES.get(name, ()), name):
        found = modules.get(place)
        if isinstance(found, nn.Linear):
            return found
    known = [n for n, places in PLACES.items() if any(place in modules for place in places)]
    own = [n for n, module in modules.items() if isinstance(module, nn.Linear)]
    raise FlopsError(
        f"there is no matrix '{name}' in layer {layer}: use one of {', '.join(known)}, or the "
        f"name of a linear module in it: {', '.join(own)}"
    )


def third_of(layer: int, count: int) -> range:
    """Numbers of the layers in the same third as a layer."""
    return next(third for third in thirds(count) if layer in third)


def thirds(count: int) -> list[range]:
    """Numbers of the layers of each non-empty third, from 1 on."""
    cuts = [count * i // 3 for i in range(4)]
    found = [range(a + 1, b + 1) for a, b in pairwise(cuts)]
    return [third for third in found if len(third)]
