"""Meters for the probe: where trainable parameters are used, and how much work a pass does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

# These return a tensor and take a parameter, but no value of it flows on.
_NOT_A_USE = ("_like", "new_", "detach", "requires_grad", "__set__", "_version")


class UseMeter(TorchFunctionMode):
    """Reports every computation that a trainable parameter enters.

    Asking a parameter for its type or shape is no use of it: only what returns a tensor counts.

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
    """Counts work: floating-point operations of products, one per output element elsewhere.

    Counted and not timed, so that reported costs are the same on every machine. What happens
    outside torch (numpy, a service) is not seen.

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
