"""Checks of a model: it runs eagerly, and its passes change no buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flops.errors import CoverageError, FlopsError


def unwrap(model: nn.Module) -> nn.Module:
    """The plain model inside DataParallel, DistributedDataParallel or ``torch.compile``.

    Raises:
        FlopsError: If part of the model was compiled in place: its calls cannot be intercepted.
        TypeError: If it is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise FlopsError(f"module '{name or 'model'}' is a ScriptModule; pass the eager model")
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise FlopsError(
                f"module '{name or 'model'}' is compiled; a compiled module bypasses "
                "interception, so it cannot be perturbed or replayed. Pass the model without "
                "compiling it."
            )
    return model


class Buffers:
    """All buffers of a model, which a forward pass must not change in any mode.

    Values are compared, not version counters: batch normalisation and writes to ``.data`` change a
    buffer without counting. The copies live while one kind of input is traced.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        copies: dict[int, Tensor] = {}
        self._saved: list[tuple[str, nn.Module, str, Tensor, Tensor]] = []
        for name, module in modules.items():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    copy = copies.setdefault(id(buffer), buffer.detach().clone())
                    self._saved.append((f"{name}.{key}".lstrip("."), module, key, buffer, copy))

    def restore(self) -> list[str]:
        """Restore changed buffers; returns their names."""
        changed = []
        for name, module, key, _, value in self._saved:
            now = module._buffers.get(key)
            if now is None or not _same(now, value):
                changed.append(name)
        for _, module, key, buffer, value in self._saved:  # after all of them were compared
            if not _same(buffer, value):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.detach().copy_(value)
            module._buffers[key] = buffer
        return changed

    def check(self) -> None:
        """Restore changed buffers, and raise.

        Raises:
            CoverageError: With their names.
        """
        changed = self.restore()
        if changed:
            raise CoverageError(
                f"the forward pass changes the buffers {changed[:5]} (running statistics, the "
                "power iteration of spectral_norm, a counter, a cache): every query would change "
                "them again. Put their modules into evaluation mode with .eval(), or make "
                "the forward pass not change buffers."
            )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN included."""
    if a is b or a.is_meta:
        return True
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    if a.layout != torch.strided or a.is_quantized or type(a) is not Tensor:
        return torch.equal(a, b)
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)
