"""Checks before a step, and what every step puts back: random state and global switches."""

from __future__ import annotations

import random
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
        FlopsError: If part of the model was compiled in place; its calls cannot be scripted.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise FlopsError(
                f"module '{name or 'model'}' is compiled; a compiled module ignores what is "
                "added to it afterwards, so it cannot be perturbed or replayed. Pass the model "
                "without compiling it."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise FlopsError(f"module '{name or 'model'}' is a ScriptModule; pass the eager model")
    return model


def check_modes(modules: Mapping[str, nn.Module]) -> None:
    """Refuse layers whose training mode mixes the points of a batch or changes buffers.

    Raises:
        CoverageError: For BatchNorm (or tracking InstanceNorm) in training mode.
    """
    for name, module in modules.items():
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
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
        self._numpy = np.random.get_state(legacy=True)
        self._python = random.getstate()

    def moved(self) -> bool:
        """Whether anybody drew from a global generator since."""
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        ours: Any = self._numpy
        theirs: Any = np.random.get_state(legacy=True)
        return (
            not torch.equal(self._torch, torch.get_rng_state())
            or any(not torch.equal(a, b) for a, b in zip(self._cuda, cuda, strict=True))
            or ours[2] != theirs[2]
            or not np.array_equal(ours[1], theirs[1])
            or self._python != random.getstate()
        )

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def check_deterministic(state: RandomState, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a forward pass that drew random numbers since the state was taken.

    Raises:
        RandomnessError: With the dropout modules that are on, if there are any.
    """
    if not state.moved():
        return
    state.restore()
    active = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
    ]
    cause = f"dropout is on in {active[:5]}" if active else "the global random state moved"
    raise RandomnessError(
        f"the forward pass is random ({cause}): a query would then see more than its own noise. "
        "Call model.eval(), set the dropout probability to 0, or remove the random operation."
    )


def check_finite(losses: Tensor, where: str, points: Tensor | None = None) -> None:
    """Refuse NaN and infinite losses.

    Raises:
        NonFiniteLossError: With the place and the first rows.
    """
    bad = torch.nonzero(~torch.isfinite(losses)).flatten()
    if len(bad):
        rows = bad[:8].tolist()
        at = "" if points is None else f" (points {points[bad[:8]].tolist()})"
        raise NonFiniteLossError(
            f"{len(bad)} of {len(losses)} losses are not finite in {where}: rows {rows}{at}. "
            "Parameters and .grad are as before; lower the learning rate or sigma, or look at "
            "these points."
        )


@contextmanager
def slow_attention_path() -> Iterator[None]:
    """Keep attention off its fused path, which skips submodules, in every pass alike."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
