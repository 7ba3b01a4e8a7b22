"""Counters of parameter uses and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

# These take a parameter and return a tensor that does not depend on its values.
_NOT_A_USE = ("_like", "new_", "detach", "requires_grad", "__set__", "_version")


class UseMeter(TorchFunctionMode):
    """Reports every operation on a trainable parameter.

    Reading its type or shape does not count as a use: only operations that return a tensor do.

    Args:
        trainable: Names of the parameters by ``id``.
        report: Called with the parameter's ``id``.
    """

    def __init__(self, trainable: Mapping[int, str], report: Callable[[int], None]) -> None:
        super().__init__()
        self._trainable, self._report = trainable, report

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        returns = any(isinstance(x, Tensor) for x in tree_flatten(out)[0])
        if returns and not any(part in name for part in _NOT_A_USE):
            for leaf in tree_flatten((args, kwargs or {}))[0]:
                if id(leaf) in self._trainable:
                    self._report(id(leaf))
        return out


class WorkMeter(TorchDispatchMode):
    """Counts FLOPs of matrix products, and one per output element of other operations.

    Work is counted, not timed, so reported costs are equal on all machines. Work outside of torch
    (numpy, a service) is not counted.

    Args:
        charge: Called with the work of each operation.
    """

    def __init__(self, charge: Callable[[float], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0
        self._charge = charge

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        work: float
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            work = sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif packet in flop_registry:
            work = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif func.is_view:
            work = 0.0
        else:
            work = sum(x.numel() for x in tree_flatten(out)[0] if isinstance(x, Tensor))
        self.total += work
        self._charge(work)
        return out
