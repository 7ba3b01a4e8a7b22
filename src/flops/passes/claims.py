"""One step at a time on a model: a second one that would share its modules is refused.

Waiting for each other would not be enough. A step needs the same weights from its first pass to its
last, so the optimizer of another thread may not move them either, and no lock in here can know of
that: whoever shares a model between threads must let them take turns with whole training steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import nn

from flops.errors import FlopsError
from flops.passes.intercept import is_scripted

_lock = threading.RLock()  # of a kind that a signal handler in the same thread can take again
_open: list[Claim] = []


class Claim:
    """The modules and trainable parameters of a model, while a session on it is open.

    Args:
        modules: All modules by name.

    Raises:
        FlopsError: On entering, if another thread has a session with any of them, or this thread is
            in the middle of a pass over them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._thread = threading.current_thread()
        self._parts = {id(module) for module in modules.values()}
        for module in modules.values():
            self._parts.update(
                id(p) for p in module._parameters.values() if p is not None and p.requires_grad
            )

    def __enter__(self) -> Claim:
        """Claim them."""
        with _lock:
            for other in _open:
                if not self._parts.isdisjoint(other._parts):
                    self._refuse(other)
            _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of them."""
        with _lock:
            if self in _open:
                _open.remove(self)

    def _refuse(self, other: Claim) -> None:
        if other._thread is not self._thread:
            raise FlopsError(
                f"thread '{other._thread.name}' is in the middle of a step on this model, or on "
                f"one that shares modules or parameters with it{self._shared(other)}. All passes "
                "of a step need the same weights: let the threads take turns (one lock around "
                "estimate and the optimizer's step), or give each its own copy.deepcopy(model)."
            )
        if any(is_scripted(module) for module in self._modules.values()):
            raise FlopsError(
                "estimate was called in the middle of a pass of another estimate of the same "
                f"model{self._shared(other)}: from a loss function, a hook, a forward or a signal "
                "handler. Call it outside, or on a copy.deepcopy of the model."
            )

    def _shared(self, other: Claim) -> str:
        names = [name or "model" for name, m in self._modules.items() if id(m) in other._parts]
        return f" ({names[:5]})" if names else ""
