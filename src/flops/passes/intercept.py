"""Intercepted forward passes: calls of modules run an action instead of their own forward.

Replay, noise, recording and local VJPs are all *actions* on single calls. An action receives the
module's own forward and the arguments of the call. Only the ``forward`` attribute of the instance
is replaced, so hooks of the user run as in any pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from flops.errors import FlopsError
from flops.passes.guards import INTERCEPTED, check

Forward = Callable[..., Any]
Action = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
Actions = Mapping[str, Sequence[Action | None]]
"""Actions of a module's calls in order, by its name; None runs the module unchanged."""

_MISSING = object()


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

    forward.__dict__[INTERCEPTED] = True
    return forward


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
