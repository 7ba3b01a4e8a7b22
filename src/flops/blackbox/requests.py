"""Requests: rows handed to an objective, in this process or another one.

`evaluate_rows` is a plain function of picklable arguments, so that any executor can run it:
threads, processes, or the workers of a cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from flops.blackbox.journal_file import JournalError
from flops.blackbox.journal_records import Request, Response
from flops.blackbox.objective import Candidates, Objective, columns_of

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class KeyedObjective(Protocol):
    """An objective that takes an idempotency key with each request and reports its cost."""

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        """Evaluate under a key; a repeat under the same key must be free."""
        ...


@runtime_checkable
class RequestObjective(Protocol):
    """An objective that sends bytes: requests are serialized once and may be sent again."""

    def prepare(self, candidates: Candidates, key: str) -> Sequence[Request]:
        """Serialize requests, each under a key that starts with this one."""
        ...

    def send(self, candidates: Candidates, requests: Sequence[Request]) -> Response:
        """Send serialized requests.

        The parameters of the candidates may differ by rounding from those in the requests.
        """
        ...


AnyObjective = Objective | KeyedObjective | RequestObjective


def prepare(objective: AnyObjective, candidates: Candidates, key: str) -> Sequence[Request]:
    """Serialize rows under a key."""
    if isinstance(objective, RequestObjective):
        return objective.prepare(candidates, key)
    return [Request(key, _serialize(candidates))]


def evaluate_rows(
    objective: AnyObjective,
    candidates: Candidates,
    requests: Sequence[Request],
    stored: bool,
    pause: float = 0.0,
) -> Response:
    """Values of rows, one loss per row, which may not be finite.

    Args:
        objective: Evaluates them.
        candidates: The rows.
        requests: The same rows, serialized.
        stored: Whether the requests are from an earlier process, so that their parameters count.
        pause: Seconds to wait before.
    """
    if pause:
        time.sleep(pause)
    if isinstance(objective, RequestObjective):
        response = objective.send(candidates, requests)
        return Response(columns_of(response.columns, len(candidates)), response.cost)
    if stored:
        candidates = _deserialize(requests[0].body, candidates.kind)
    if isinstance(objective, KeyedObjective):
        response = objective.evaluate(candidates, requests[0].key)
        return Response(columns_of(response.columns, len(candidates)), response.cost)
    values = objective(candidates.parameters, candidates.points)
    return Response(columns_of(values, len(candidates)))


class Inline(Executor):
    """Runs each call at once, in the calling thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the call; an interrupt is not caught."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Threads(Executor):
    """Runs each call in a thread of its own, with as many torch threads as the caller's.

    Threads do not keep the process alive: a call that never returns cannot block its end.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start the call."""
        future: Future[T] = Future()
        count = torch.get_num_threads()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            torch.set_num_threads(count)  # set per thread; rounding depends on it
            try:
                result: Any = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="evaluate", daemon=True).start()
        return future


def _serialize(candidates: Candidates) -> bytes:
    """Candidates in the safetensors format; a vector that all rows share is stored once."""
    values = candidates.parameters
    if len(values) > 1 and values.stride(0) == 0:
        values = values[:1]
    tensors = {
        "parameters": values.to(torch.float32).contiguous(),
        "points": candidates.points.contiguous(),
    }
    return save(tensors, {"kind": candidates.kind})


def _deserialize(body: bytes, kind: str) -> Candidates:
    try:
        tensors = load(body)
        values, points = tensors["parameters"], tensors["points"]
    except (SafetensorError, KeyError) as error:
        raise JournalError(f"a request in the journal cannot be read: {error}") from error
    return Candidates(values.expand(len(points), -1), points, kind)
