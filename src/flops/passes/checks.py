"""Checks before a step, and state restored after every step: random state, global switches."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flops.errors import CoverageError, FlopsError, NonFiniteLossError, RandomnessError


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


def check_modes(modules: Mapping[str, nn.Module]) -> None:
    """Raise if a layer's mode mixes the points of a batch or changes buffers.

    Raises:
        CoverageError: For BatchNorm (or tracking InstanceNorm) in training mode, and for
            BatchNorm without running statistics in any mode.
    """
    for name, module in modules.items():
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if batch_norm and module.running_mean is None:
            raise CoverageError(
                f"'{name}' ({type(module).__name__}) keeps no running statistics, so it mixes the "
                "points of a batch also in evaluation mode; use LayerNorm or GroupNorm"
            )
        tracking = isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
            module.track_running_stats
        )
        if (batch_norm or tracking) and module.training:
            raise CoverageError(
                f"'{name}' ({type(module).__name__}) is in training mode: it mixes the points of "
                f"a batch and updates its statistics in every query. Call "
                f"model.get_submodule('{name}').eval(), or use LayerNorm or GroupNorm."
            )


class RandomState:
    """The global random states of torch, numpy and Python, to compare with and to restore."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._numpy = np.random.get_state(legacy=False)
        self._python = random.getstate()

    def advanced(self) -> bool:
        """Whether a global generator has advanced since."""
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        return (
            not torch.equal(self._torch, torch.get_rng_state())
            or any(not torch.equal(a, b) for a, b in zip(self._cuda, cuda, strict=True))
            or not _equal(self._numpy, np.random.get_state(legacy=False))
            or self._python != random.getstate()
        )

    def restore(self) -> None:
        """Restore all of them."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def _equal(a: Any, b: Any) -> bool:
    """Compare nested dicts of numbers and arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


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


def check_deterministic(state: RandomState, modules: Mapping[str, nn.Module]) -> None:
    """Raise if the forward pass drew random numbers since the state was taken.

    Raises:
        RandomnessError: With the active dropout modules, if there are any.
    """
    if not state.advanced():
        return
    state.restore()
    active = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
    ]
    cause = f"dropout is on in {active[:5]}" if active else "the global random state advanced"
    raise RandomnessError(
        f"the forward pass is random ({cause}): losses of a query would contain other randomness. "
        "Call model.eval(), set the dropout probability to 0, or remove the random operation."
    )


def check_finite(losses: Tensor, where: str, points: Tensor | None = None) -> None:
    """Raise if a loss is NaN or infinite.

    Raises:
        NonFiniteLossError: With the place and the first rows.
    """
    bad = torch.nonzero(~torch.isfinite(losses)).flatten()
    if len(bad):
        rows = bad[:8].tolist()
        at = "" if points is None else f" (points {points[bad[:8]].tolist()})"
        raise NonFiniteLossError(
            f"{len(bad)} of {len(losses)} losses are not finite in {where}: rows {rows}{at}. "
            "Parameters and .grad are as before; lower the learning rate or sigma, inspect these "
            "points, or, if the model's control flow depends on the data, try reuse=False."
        )


_attention = threading.RLock()
_attention_before: list[bool] = []  # one entry per running step


@contextmanager
def slow_attention_path() -> Iterator[None]:
    """Disable attention's fused path, which skips submodules, in every pass.

    The switch is global to all threads: it is restored when the last of their steps has ended.
    """
    with _attention:
        now = torch.backends.mha.get_fastpath_enabled()
        _attention_before.append(_attention_before[0] if _attention_before else now)
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _attention:
            before = _attention_before.pop()
            if not _attention_before:
                torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Disable autocast's weight cache, which would return unperturbed casts."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
