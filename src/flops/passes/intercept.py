"""Scripted forward passes: what each call of a module does instead of its own forward.

Replay, noise, recording and local products are all *actions* on single calls. An action gets
the module's own forward and the arguments of the call. Only the ``forward`` attribute of the
instance is replaced, so hooks of the user stay in place and run as in any pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from flops.errors import FlopsError
from flops.passes.interrupts import check

Forward = Callable[..., Any]
Action = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
Script = Mapping[str, Sequence[Action | None]]
"""For a module's name the actions of its calls in order; None runs the module as it is."""

_MISSING = object()
_MARK = "_flops_scripted"


class Watch(Protocol):
    """Looks at one call of the clean pass."""

    @property
    def call(self) -> int: ...  # noqa: D102

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None: ...  # noqa: D102


class Leave(BaseException):
    """Raised by an action to leave a forward pass early; user code has no business catching it."""


@contextmanager
def scripted(modules: Mapping[str, nn.Module], script: Script) -> Iterator[None]:
    """Run the enclosed forward pass by the script; the modules are as before afterwards."""
    check()
    saved: list[tuple[nn.Module, Any]] = []
    try:
        for name, actions in script.items():
            module = modules[name]
            saved.append((module, module.__dict__.get("forward", _MISSING)))
            module.__dict__["forward"] = _scripted(name, module.forward, actions)
        yield
    finally:
        for module, forward in reversed(saved):
            if forward is _MISSING:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _scripted(name: str, original: Forward, actions: Sequence[Action | None]) -> Forward:
    remaining = iter(actions)

    def forward(*args: Any, **kwargs: Any) -> Any:
        check()
        try:
            action = next(remaining)
        except StopIteration:
            raise FlopsError(
                f"module '{name}' was called more often ({len(actions) + 1} times) than when its "
                "forward pass was first seen: the model's control flow depends on the data. Give "
                "a module around it as the target."
            ) from None
        if action is None:
            return original(*args, **kwargs)
        return action(original, args, kwargs)

    forward.__dict__[_MARK] = True
    return forward


def is_scripted(module: nn.Module) -> bool:
    """Whether a pass by a script is under way."""
    return hasattr(module.__dict__.get("forward"), _MARK)


def everywhere(wrap: Callable[[str], Action], modules: Mapping[str, nn.Module]) -> Script:
    """A script with one action per module, used for every call of it."""
    return {name: _Endless(wrap(name)) for name in modules}


class _Endless(Sequence[Action]):
    """The same action for each call, however many there are."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def __getitem__(self, index: Any) -> Any:
        return self._action

    def __len__(self) -> int:
        return 1
