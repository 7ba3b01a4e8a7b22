"""Signals at random moments of a step, and what every one of them must leave behind.

Run as ``python -m tests.support.interrupting COUNT [SEED]`` for a table of outcomes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flops import (
    ES,
    FZOO,
    JVP,
    LOZO,
    SPSA,
    DeepZero,
    Exact,
    ForwardGradient,
    Group,
    LikelihoodRatio,
    Shaping,
)
from flops.allocators import Equal, Gaussian
from flops.allocators.base import Allocator
from flops.errors import PrecisionWarning
from flops.presets import mezo
from tests.support.random_state import global_random_state

AGAIN = 3  # signals into one step, before it is repeated undisturbed
STEPS = 3  # of one engine: the first looks at the model, the later ones know it
CASES: dict[str, tuple[Any, Callable[[], Allocator]]] = {
    "block": (LikelihoodRatio(), Gaussian),
    "leaf": (LikelihoodRatio(targets="leaf"), Gaussian),
    "stage": (LikelihoodRatio(targets="stage", baseline="antithetic"), Equal),
    "shaped": (LikelihoodRatio(shaping=Shaping()), Equal),
    "orthogonal": (LikelihoodRatio(noise="orthogonal"), Equal),
    "es": (ES(), Gaussian),
    "spsa": (SPSA(), Gaussian),
    "shaped spsa": (SPSA(shaping=Shaping()), Equal),
    "shared": (SPSA(shared=True), Equal),
    "mezo": (None, Equal),
    "fzoo": (FZOO(), Equal),
    "lozo": (LOZO(interval=2), Equal),
    "jvp": (JVP(), Equal),
    "deepzero": (DeepZero(score_draws=2), Equal),
    "exact": (Exact(), Equal),
}

# Sends a signal so many seconds after it is told to.
_SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(int(sys.argv[1]), signal.SIGINT)
"""


class Gate(nn.Module):
    """A module of a user's own: its rows are perturbed by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.scale * x + self.shift)
        return x


class Net(nn.Module):
    """A table, layers, a module of its own and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.early = nn.Sequential(nn.Linear(4, 5), Gate())
        self.late = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))
        self.register_buffer("calls", torch.arange(3))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).mean(1)
        x = self.early(x)
        out: Tensor = self.late(x)
        return out


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    total = torch.zeros(len(outputs), dtype=torch.float64)
    for column in range(outputs.size(1)):
        total = total + (outputs[:, column] - targets[:, column]).square()
    return total


def engine(case: str, model: nn.Module) -> ForwardGradient:
    estimator, allocator = CASES[case]
    if case == "mezo":
        groups = mezo(model)
    else:
        parts = [model.table, model.early, model.late]  # type: ignore[list-item]
        groups = [Group(m, estimator, 4, name=f"part {i}") for i, m in enumerate(parts)]
    return ForwardGradient(model, losses, groups, allocator=allocator(), chunk=8)


def batch(step: int) -> dict[str, Any]:
    source = torch.Generator().manual_seed(step)
    words = torch.randint(0, 7, (4, 3), generator=source)
    targets = torch.randn(4, 3, generator=source, dtype=torch.float64)
    return {"inputs": words, "targets": targets, "index": torch.arange(4) + 4 * step}


def _made() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
    for module in model.modules():
        module.register_forward_hook(_hook)
    return model


def _hook(*_: Any) -> None:
    """A hook of the user's."""


def _surroundings() -> list[Any]:
    """What belongs to the process and not to the step."""
    return [
        global_random_state(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_autocast_cache_enabled(),
        len(_get_current_function_mode_stack()),
        len(_get_current_dispatch_mode_stack()),
        torch._C._functorch.maybe_current_level(),
        signal.getsignal(signal.SIGINT),
    ]


def _outside(model: nn.Module) -> list[Any]:
    """Identities of all that a model has, but for gradients."""
    return [
        (
            name,
            id(module),
            sorted(key for key in module.__dict__ if key not in ("_parameters", "_buffers")),
            [(k, id(p), type(p), p.requires_grad, _where(p)) for k, p in _slots(module)],
            list(module._forward_hooks.values()),
        )
        for name, module in model.named_modules()
    ]


def _slots(module: nn.Module) -> list[tuple[str, Any]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _where(tensor: Tensor) -> Any:
    """Where a tensor's numbers lie; a functorch wrapper lies nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError as error:
        return str(error)


def _values(model: nn.Module) -> list[bytes]:
    try:
        return [t.detach().numpy().tobytes() for t in model.state_dict().values()]
    except (RuntimeError, AttributeError) as error:  # a functorch wrapper has no numbers
        return [str(error).encode()]


def _gradients(model: nn.Module) -> list[bytes | None]:
    grads = [p.grad for p in model.parameters()]
    return [None if g is None else g.detach().numpy().tobytes() for g in grads]


class Sender:
    """A process that sends signals to this one."""

    def __enter__(self) -> Sender:
        command = [sys.executable, "-S", "-c", _SENDER, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def send(self, delay: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay}\n")


@dataclass
class Campaign:
    """Signals over all cases; what they left behind is noted and the model made anew.

    Attributes:
        outcomes: How often a step was left, or ended before the signal was raised.
        faults: What was found wrong, with its case.
        moments: Of each signal, by tenths of the duration of the step it was sent into.
    """

    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)
    moments: Counter[int] = field(default_factory=Counter)
    latency: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._reference("block")  # what is loaded at first use takes longer than a step
        self._references = {name: self._reference(name) for name in CASES}
        self._arrivals: list[float] = []

    def _reference(self, case: str) -> list[tuple[float, list[bytes | None]]]:
        """Duration and gradients of undisturbed steps."""
        model, found = _made(), []
        fg = engine(case, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            for step in range(STEPS):
                model.zero_grad()
                started = time.perf_counter()
                fg.estimate(**batch(step))
                found.append((time.perf_counter() - started, _gradients(model)))
        return found

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self._arrivals.append(time.perf_counter())
        signal.default_int_handler(number, frame)

    def run(self, count: int) -> None:
        """Send so many signals."""
        before = signal.signal(signal.SIGINT, self._handler)
        names = list(CASES)
        try:
            with Sender() as sender, warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecisionWarning)
                sent = 0
                while sent < count:
                    case = names[self._random.randrange(len(names))]
                    model = _made()
                    fg, sound = engine(case, model), True
                    while fg.steps < STEPS and sent < count and sound:
                        step = fg.steps
                        for _ in range(min(AGAIN, count - sent)):
                            sent += 1
                            sound = sound and self._attempt(sender, case, model, fg)
                            if not sound or fg.steps > step:
                                break
                        if sound and fg.steps == step:
                            sound = self._repeat(case, model, fg)
        finally:
            signal.signal(signal.SIGINT, before)

    def _attempt(self, sender: Sender, case: str, model: nn.Module, fg: ForwardGradient) -> bool:
        step = fg.steps
        duration, _ = self._references[case][step]
        model.zero_grad()
        outside, values, around = _outside(model), _values(model), _surroundings()
        state = str(fg.state_dict())
        untouched = _gradients(model)
        self._arrivals.clear()
        wrong: list[str] = []
        started, left = time.perf_counter(), True
        try:
            sender.send(self._random.uniform(0, 1.05 * duration))
            time.sleep(self._random.choice([0.0, 5e-4]))  # a signal takes a while to get here
            started = time.perf_counter()
            fg.estimate(**batch(step))
            left = False
            while not self._arrivals:
                time.sleep(1e-5)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            wrong.append(f"raised {error!r}"[:60])
            while not self._arrivals:
                time.sleep(1e-5)
        ended = time.perf_counter()
        moment = 10 * (self._arrivals[0] - started) / duration
        self.moments[min(10, max(0, int(moment)))] += 1
        if left:
            self.latency.append(ended - self._arrivals[0])
        if len(self._arrivals) != 1:
            wrong.append("signals")
        if _surroundings() != around:
            wrong.append("surroundings")
        if _outside(model) != outside:
            wrong.append("modules")
        if _values(model) != values:
            wrong.append("values")
        now = _gradients(model)
        whole = self._references[case][step][1]
        if fg.steps == step + 1:
            wrong += ["gradients"] if now != whole else []
        elif now != untouched or fg.steps != step:
            wrong.append("gradients")
        elif str(fg.state_dict()) != state:
            wrong.append("state")
        self.outcomes["left" if left and fg.steps == step else "done"] += 1
        if wrong:
            self.faults.append((case, ", ".join(wrong)))
            _mend(around)
        return not wrong

    def _repeat(self, case: str, model: nn.Module, fg: ForwardGradient) -> bool:
        """The same step again, undisturbed: it finds what it would have found before."""
        model.zero_grad()
        _, whole = self._references[case][fg.steps]
        try:
            fg.estimate(**batch(fg.steps))
        except Exception as error:
            self.faults.append((case, f"next: {error!r}"[:60]))
            return False
        if _gradients(model) != whole:
            self.faults.append((case, "next"))
            return False
        return True


def _mend(around: list[Any]) -> None:
    """Put the process in order for the next signal."""
    torch.set_grad_enabled(True)
    torch.backends.mha.set_fastpath_enabled(around[5])
    torch.set_autocast_cache_enabled(around[6])


def main(count: int, seed: int) -> None:
    campaign, started = Campaign(seed), time.perf_counter()
    for done in range(0, count, 500):
        campaign.run(min(500, count - done))
        print(done, dict(campaign.outcomes), len(campaign.faults), flush=True)
    delays = sorted(campaign.latency)
    print(f"{count} signals in {time.perf_counter() - started:.0f} s: {dict(campaign.outcomes)}")
    print(f"by tenths of the step: {[campaign.moments[i] for i in range(11)]}")
    print(f"until it was raised: median {delays[len(delays) // 2]:.2e}, most {delays[-1]:.2e} s")
    print(f"{len(campaign.faults)} faults")
    for (case, fault), often in Counter(campaign.faults).most_common():
        print(f"  {often:4d} {case}: {fault}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
