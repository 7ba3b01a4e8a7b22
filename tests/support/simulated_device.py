"""An accelerator made of Python: its tensors are on another device, and every copy to it is seen.

torch's CPU build has no guard for CUDA, so fake CUDA tensors cannot even be cut into slices there.
This device can do more: it computes, by handing each operation to a CPU tensor that it holds. As
on a real one, an operation that mixes its tensors with the CPU's is an error, unless the CPU's is
a number or an index; those are copied, and counted like any other copy.

Registering a device cannot be undone: use it in a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
COPYING = (aten._to_copy.default, aten.copy_.default)


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False


_setup_privateuseone_for_python_backend("simulated", _Backend())
DEVICE = torch.device("simulated:0")


class DeviceTensor(Tensor):
    """A tensor on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__:  # torch would swap all but what is held
            args[0].held = args[1].held
            return None
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device outside of `Traffic`")


class Traffic(TorchDispatchMode):
    """Runs what happens on the device, and lists what is copied there.

    Attributes:
        copies: Elements of each tensor that went from the CPU to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.has_kernel_for_dispatch_key(COMPOSITE):  # in inference mode, where autograd is not
            with self:
                return func.decompose(*args, **kwargs)
        leaves = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        here = [x for x in leaves if not isinstance(x, DeviceTensor)]
        there = len(here) < len(leaves)
        wanted = kwargs.get("device")
        if not there and wanted != DEVICE:
            return func(*args, **kwargs)
        if func in COPYING:
            if here and (wanted == DEVICE or (func is aten.copy_.default and args[1] is here[0])):
                self.copies.append(here[0].numel())
        elif there:
            for x in here:
                if func in INDEXING and x is not args[0]:
                    self.copies.append(x.numel())
                elif x.dim() > 0:
                    raise RuntimeError(f"{func}: tensors of the device and of the CPU")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
            there = wanted == DEVICE
        elif func is aten.copy_.default:
            there = isinstance(args[0], DeviceTensor)
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if not there:
            return args[0] if func is aten.copy_.default else found
        out = tree_map(_wrapped, found)
        return return_and_correct_aliasing(func, args, kwargs, out)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x


def _wrapped(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    with torch.inference_mode(x.is_inference()):  # a view of a plain tensor is plain
        return DeviceTensor(x)


def move(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on the device."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(DeviceTensor(p.data), p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = DeviceTensor(b)
    return model
