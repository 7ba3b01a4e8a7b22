"""Intercepted forward passes: calls of modules run an action instead of their own forward.

Replay, noise, recording and local VJPs are all *actions* on single calls. An action receives the
module's own forward and the arguments of the call. Only the ``forward`` attribute of the instance
is replaced, so hooks of the user run as in any pass.

Only one step at a time may intercept a model: a second one that shares its modules is an error
(`Claim`). A lock here would not be enough: a step needs the same weights from its first to its last
pass, so optimizers of other threads must not change them either. Threads that share a model must
alternate with whole training steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from flops.errors import FlopsError
from flops.passes.interrupts import check

Forward = Callable[..., Any]
Action = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
Actions = Mapping[str, Sequence[Action | None]]
"""Actions of a module's calls in order, by its name; None runs the module unchanged."""

_MISSING = object()
_MARK = "_flops_intercepted"
_lock = threading.RLock()  # reentrant, for signal handlers in the same thread
_open: list[Claim] = []


class Watch(Protocol):
    """Observes one call of the clean pass."""

    @property
    def call(self) -> int: ...  # noqa: D102

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None: ...  # noqa: D102


class Leave(BaseException):
    """Raised by an action to stop a forward pass early; not meant to be caught by user code."""


@contextmanager
def intercepted(modules: Mapping[str, nn.Module], actions: Actions) -> Iterator[None]:
    """Run the actions in the enclosed forward pass; the modules are restored afterwards."""
    check()
    saved: list[tuple[nn.Module, Any]] = []
    try:
        for name, of_module in actions.items():
            module = modules[name]
            saved.append((module, module.__dict__.get("forward", _MISSING)))
            module.__dict__["forward"] = _intercepted(name, module.forward, of_module)
        yield
    finally:
        for module, forward in reversed(saved):
            if forward is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _intercepted(name: str, original: Forward, actions: Sequence[Action | None]) -> Forward:
    remaining = iter(actions)

    def forward(*args: Any, **kwargs: Any) -> Any:
        check()
        try:
            action = next(remaining)
        except StopIteration:
            raise FlopsError(
                f"module '{name}' was called more often ({len(actions) + 1} times) than when its "
                "forward pass was traced: the model's control flow depends on the data. Give an "
                "enclosing module as the target."
            ) from None
        if action is None:
            return original(*args, **kwargs)
        return action(original, args, kwargs)

    forward.__dict__[_MARK] = True
    return forward


def is_intercepted(module: nn.Module) -> bool:
    """Whether an intercepted pass is running."""
    return hasattr(module.__dict__.get("forward"), _MARK)


def everywhere(wrap: Callable[[str], Action], modules: Mapping[str, nn.Module]) -> Actions:
    """One action per module, used for all of its calls."""
    return {name: _Endless(wrap(name)) for name in modules}


class _Endless(Sequence[Action]):
    """The same action for any number of calls."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def __getitem__(self, index: Any) -> Any:
        return self._action

    def __len__(self) -> int:
        return 1


class Claim:
    """Exclusive use of a model's modules and trainable parameters while a session is open.

    Args:
        modules: All modules by name.

    Raises:
        FlopsError: On entering, if another thread has a session with any of them, or this thread is
            running a pass over them.
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
                    self._raise_conflict(other)
            _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Release them."""
        with _lock:
            if self in _open:
                _open.remove(self)

    def _raise_conflict(self, other: Claim) -> None:
        if other._thread is not self._thread:
            raise FlopsError(
                f"thread '{other._thread.name}' is running a step on this model, or on one that "
                f"shares modules or parameters with it{self._shared(other)}. All passes of a step "
                "need the same weights: serialise the threads (one lock around estimate and the "
                "optimizer's step), or give each its own copy.deepcopy(model)."
            )
        if any(is_intercepted(module) for module in self._modules.values()):
            raise FlopsError(
                "estimate was called during a pass of another estimate of the same "
                f"model{self._shared(other)}: from a loss function, a hook, a forward or a signal "
                "handler. Call it outside, or on a copy.deepcopy of the model."
            )

    def _shared(self, other: Claim) -> str:
        names = [name or "model" for name, m in self._modules.items() if id(m) in other._parts]
        return f" ({names[:5]})" if names else ""
