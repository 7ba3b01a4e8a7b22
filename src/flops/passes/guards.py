"""Guards of a step: nothing interrupts it, nobody else uses the model, and nothing is left behind.

Signals. A signal handler runs between any two bytecode instructions, and that of Ctrl-C raises
there: while ``forward`` or ``.grad`` is being replaced, or during the clean-up after an earlier
signal. So while a step runs in the main thread, handlers are called immediately, but their
exceptions are deferred (`DeferSignals`). They are raised

- immediately in the user's code (the model's forward, the loss function), where a step handles any
  exception;
- else at the next `check`: before every pass, at every call of a module, before a commit;
- at the latest when the step has ended, with everything written.

After one was raised all others are deferred, so that clean-up is not interrupted. Handlers in C
(``SIG_DFL``) end the process as usual, and other threads receive no signals.

Threads. Only one step at a time may intercept a model: a second one that shares its modules is an
error (`Claim`). A lock here would not be enough: a step needs the same weights from its first to
its last pass, so optimizers of other threads must not change them either. Threads that share a
model must alternate with whole training steps.

State. Passes draw no random numbers and mix no points; the random state and global switches are
restored after every step.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from flops.errors import CoverageError, FlopsError, RandomnessError

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
# Code that may be changing state, including that of context managers. The rest of the standard
# library counts as part of its caller.
_OURS = frozenset({__name__.partition(".")[0], "torch", "contextlib"})
_WORK_FOR_CALLER = sys.stdlib_module_names | {"numpy", ""}

INTERCEPTED = "_flops_intercepted"  # marks the forward of a module during a pass
_lock = threading.RLock()  # reentrant, for signal handlers in the same thread
_open: list[Claim] = []
_attention = threading.RLock()
_attention_before: list[bool] = []  # one entry per running step


class DeferSignals:
    """Context in which exceptions of signal handlers are deferred; a nested one does nothing."""

    _active: DeferSignals | None = None  # in the main thread

    def __init__(self) -> None:
        self._atomic = 0
        self._error: BaseException | None = (
            None  # kept until the end, so that it cannot be swallowed
        )
        self._leaving = False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._handler = self._handle  # one object, to compare by identity

    def __enter__(self) -> DeferSignals:
        """Install the handlers."""
        if DeferSignals._active is not None or not _in_main_thread():
            return self
        DeferSignals._active = self
        try:
            for number in SIGNALS:
                before = signal.getsignal(number)
                if callable(before):  # a handler in Python
                    self._before[number] = before
                    signal.signal(number, self._handler)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the handlers, and raise a deferred exception."""
        if DeferSignals._active is not self:
            return
        self._release()
        held, self._error = self._error, None
        if held is not None and not _in_chain(held, error):
            raise held.with_traceback(None)

    def _release(self) -> None:
        try:
            self._give_back(list(self._before))
        finally:
            DeferSignals._active = None

    def _give_back(self, numbers: list[int]) -> None:
        """Restore the handlers, Ctrl-C's last: exceptions before that are deferred."""
        if not numbers:
            return
        number = numbers.pop()
        try:
            # A generator may be closed in another thread, and the user may have installed another
            # handler since: ours then only calls the one before it.
            if _in_main_thread() and signal.getsignal(number) is self._handler:
                signal.signal(number, self._before[number])
        finally:
            self._give_back(numbers)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            if DeferSignals._active is not self:
                raise
            self._error = error
            if self._leaving or self._atomic or not _is_users(frame):
                return
            self._leaving = True
            raise

    def check(self) -> None:
        """Raise the deferred exception, except inside `Atomic`."""
        if self._error is not None and not self._atomic:
            self._leaving = True
            raise self._error.with_traceback(None)


def check() -> None:
    """A safe point of the step: raises the deferred exception."""
    active = DeferSignals._active
    if active is not None and active._error is not None and _in_main_thread():
        active.check()


class Atomic:
    """Context that no signal interrupts, such as the commit of a step."""

    def __init__(self) -> None:
        self._deferring: DeferSignals | None = None

    def __enter__(self) -> None:
        """Raise a deferred exception; later ones are deferred until the context ends."""
        check()
        if _in_main_thread() and DeferSignals._active is not None:
            self._deferring = DeferSignals._active
            self._deferring._atomic += 1

    def __exit__(self, *_: object) -> None:
        """Allow signals to raise."""
        if self._deferring is not None:
            self._deferring._atomic -= 1


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _in_chain(error: BaseException, raised: BaseException | None) -> bool:
    """Whether the raised exception is that error, or was caused by it."""
    seen: set[int] = set()
    while raised is not None and id(raised) not in seen:
        if raised is error:
            return True
        seen.add(id(raised))
        raised = raised.__cause__ or raised.__context__
    return False


def _is_users(frame: FrameType | None) -> bool:
    """Whether the interrupted code belongs neither to this library nor to torch."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _OURS:
            return False
        if package not in _WORK_FOR_CALLER:
            return True
        frame = frame.f_back
    return True


def is_intercepted(module: nn.Module) -> bool:
    """Whether an intercepted pass is running."""
    return hasattr(module.__dict__.get("forward"), INTERCEPTED)


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
