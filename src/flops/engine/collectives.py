"""Collectives: the ranks of a `torch.distributed` process group share the rows of a step.

Every rank has the whole model and the whole batch, and makes the same plan from the seed. Each runs
its share of the rows; results are exchanged, and every rank ends with the same gradients. Rows are
distributed in the order of the plan, so that a rank has whole points, except at both ends.

| estimator | communicated for a group |
|---|---|
| shared draws (MeZO, FZOO, LOZO), DeepZero | a loss for each row: noise has a key |
| JVP | a directional derivative for each row, and the sum of the losses |
| ES, SPSA | a directional derivative for each draw, and the gradients |
| likelihood ratio | a directional derivative for each draw, and the gradients or the deltas |
| backpropagation | gradients |

A sum is bitwise equal on all ranks; it differs from that of a single process by rounding.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flops.engine.rows import Ranks
from flops.errors import FlopsError
from flops.passes.local_vjp import Gradients

ProcessGroup = Any  # torch's type is missing if torch was built without it
BUCKET = 1 << 22  # values per message: gradients are never copied as a whole


class WorkerError(FlopsError, RuntimeError):
    """Another rank died, does not respond, or is at another step."""


@dataclass
class Collectives(Ranks):
    """The ranks of a process group, with counters of their communication.

    Attributes:
        group: The process group.
        rank: Rank of this process.
        size: World size.
        sent: Total size in bytes of this rank's messages.
        messages: Number of this rank's messages.
    """

    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sent: int = field(default=0, compare=False)
    messages: int = field(default=0, compare=False)

    @classmethod
    def of(cls, group: ProcessGroup | Ranks | Literal["auto"] | None) -> Ranks:
        """The ranks of a process group; "auto" is the default group if initialised."""
        if isinstance(group, Ranks):
            return group
        if group is None or not dist.is_available() or not dist.is_initialized():
            return Ranks()
        chosen = None if isinstance(group, str) else group
        rank, size = dist.get_rank(chosen), dist.get_world_size(chosen)
        if rank < 0:
            raise WorkerError("this process is not in the given process group")
        if size == 1:
            return Ranks()
        return cls(chosen if chosen is not None else dist.group.WORLD, rank, size)

    def shard(self, count: int, unit: int = 1) -> tuple[int, int]:
        """First and last + 1 of this rank's rows, in whole units."""
        units, rank = count // unit, self.rank
        return unit * (units * rank // self.size), unit * (units * (rank + 1) // self.size)

    def bounds(self, costs: Sequence[float], size: int) -> list[int]:
        """Bounds of the ranks' shares of rows, ``size`` of each cost in turn."""
        return shares(costs, size, self.size)

    def all_gather(self, mine: Tensor, begin: int, total: int) -> Tensor:
        """Concatenated values of all ranks, on the CPU; this rank's start at ``begin``."""
        whole = torch.zeros(total, dtype=mine.dtype)
        whole[begin : begin + len(mine)] = mine
        return self._message(whole, "SUM")  # of one value and zeros: no rounding

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks."""
        found: list[float] = self._message(
            torch.tensor(values, dtype=torch.float64), "SUM"
        ).tolist()
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum_scalars([float(flag)])[0] > 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum of the ranks' tensors."""
        flat = tensor.contiguous().view(-1)
        parts = [self._message(part, "SUM") for part in flat.split(BUCKET)]
        return torch.cat(parts).view(tensor.shape)

    def all_max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        return self._message(tensor, "MAX")

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0, so that rounding cannot change the plan."""
        return self._message(tensor, "FIRST")

    def sum_gradients(self, found: Gradients, parameters: Iterable[nn.Parameter]) -> Gradients:
        """Sums of the ranks' gradients, some of which may be missing.

        Args:
            found: Gradients of this rank; emptied, so that no second copy remains.
            parameters: All parameters with a gradient on any rank, in the same order on all.
        """
        order = list(dict.fromkeys(parameters))
        known = self.all_max(torch.tensor([float(p in found) for p in order]))
        total: Gradients = {}
        for part in _packed([p for p, has in zip(order, known.tolist(), strict=True) if has]):
            wide = torch.promote_types(torch.float32, part[0].dtype)
            flat = [
                found.pop(p).to(wide).reshape(-1)
                if p in found
                else torch.zeros(p.numel(), dtype=wide, device=p.device)
                for p in part
            ]
            summed = self.all_sum(torch.cat(flat)).split([p.numel() for p in part])
            total |= {p: g.view(p.shape) for p, g in zip(part, summed, strict=True)}
        return total

    def check_same(self, prints: Fingerprint) -> None:
        """Raise if the ranks are not at the same step of the same run.

        Raises:
            WorkerError: On all ranks, with the differences.
        """
        exact = list(prints.exact.values())
        mine = torch.tensor([*exact, prints.close, prints.scale], dtype=torch.float64)
        most = self._message(torch.cat([mine, -mine]), "MAX")
        high, low = most[: len(mine)], -most[len(mine) :]
        wrong = [name for name, h, w in zip(prints.exact, high, low, strict=False) if h != w]
        high, low = high[len(exact) :], low[len(exact) :]
        # Parameters need not be bitwise equal: they may come from different machines.
        if not torch.allclose(high, low, rtol=0, atol=1e-6 * float(high[-1]), equal_nan=True):
            wrong.append("parameters")
        if wrong:
            raise WorkerError(
                f"the {self.size} processes do not have the same {' and '.join(wrong)}: queries "
                "are distributed, so all of them must call estimate with the same model and the "
                "same data in the same order. If each has its own batch on purpose, give "
                "process_group=None and average the gradients yourself."
            )

    @property
    def _device(self) -> torch.device:
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _message(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        """A copy with the sum, the maximum, or the values of rank 0."""
        self.sent += tensor.numel() * tensor.element_size()
        self.messages += 1
        return self.exchange(tensor.clone(), how)

    def exchange(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        """Reduce a tensor in place; simulations of many ranks override this."""
        home, sent = tensor.device, tensor.to(self._device)
        with self.guarded():
            if how == "FIRST":
                dist.broadcast(sent, group=self.group, group_src=0)
            else:
                operation = dist.ReduceOp.SUM if how == "SUM" else dist.ReduceOp.MAX
                dist.all_reduce(sent, operation, group=self.group)
        return sent.to(home)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn communication failures into a `WorkerError`."""
        try:
            yield
        except RuntimeError as error:
            raise WorkerError(
                f"process {self.rank} of {self.size} did not receive a message from the other "
                "ranks: one of them failed, was killed or hangs (see its output). Parameters and "
                ".grad are as before this step; restart from the last checkpoint, with any number "
                f"of processes. ({str(error).splitlines()[0][:200]})"
            ) from error


def shares(costs: Sequence[float], size: int, ranks: int) -> list[int]:
    """Bounds that distribute rows, ``size`` of each cost in turn, at nearly equal cost.

    Returns:
        ``ranks + 1`` numbers from 0 to the number of rows; rank r has rows bounds[r] to
        bounds[r + 1] - 1.
    """
    most = max(costs, default=1.0)
    ends = list(accumulate(max(c, 1e-3 * most) * size for c in costs))  # a row is never free
    bounds = [0]
    for rank in range(1, ranks):
        wanted = ends[-1] * rank / ranks
        at = bisect_left(ends, wanted)
        before = ends[at - 1] if at else 0.0
        row = at * size + round(size * (wanted - before) / (ends[at] - before))
        bounds.append(max(bounds[-1], row))
    return [*bounds, size * len(costs)]


def _packed(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one type and device that fit into a message."""
    part: list[nn.Parameter] = []
    for p in parameters:
        alike = not part or (part[0].dtype, part[0].device) == (p.dtype, p.device)
        if part and (not alike or sum(q.numel() for q in part) + p.numel() > BUCKET):
            yield part
            part = []
        part.append(p)
    if part:
        yield part


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that differ if ranks are not at the same step of the same run.

    Attributes:
        exact: 48-bit digests by name, which are exact in float64.
        close: Checksum of the parameters, which may differ by rounding.
        scale: Scale of that rounding.
    """

    exact: dict[str, float]
    close: float
    scale: float


def fingerprint(
    model: nn.Module, leaves: Iterable[Any], index: Tensor | None, step: int, seed: int
) -> Fingerprint:
    """Fingerprint of the batch (all bytes, in order) and of some values of each parameter.

    Args:
        model: The model.
        leaves: All leaves of inputs and targets.
        index: Positions of the points in the data set.
        step: Steps taken.
        seed: Seed of the noise.
    """
    kinds = [(n, p.dtype, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
    exact = {
        "batch": digest(list(leaves)),
        "index": digest(index),
        "seed": digest(seed),
        "step": digest(step),
        "model": digest(repr(kinds)),
    }
    samples = [_sample(p).cpu() for p in model.parameters()]
    values = torch.cat([torch.empty(0, dtype=torch.float64), *samples])
    # Distinct weights between 1 and 2 by position: multiples of the golden ratio modulo 1.
    weights = (torch.arange(len(values)).double() * 0.6180339887498949) % 1 + 1
    return Fingerprint(exact, float(values @ weights), float(values.abs().sum()))


def digest(*parts: Any) -> float:
    """An integer below 2^48 that depends on every byte of the parts and on their order."""
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        _feed(found, part)
    return float(int.from_bytes(found.digest(), "big"))


def _feed(found: Any, part: Any) -> None:
    """Add one part; objects with neither bytes nor a stable repr count by type only."""
    if isinstance(part, Tensor):
        dense = part.detach() if part.layout == torch.strided else part.detach().to_dense()
        dense = dense.dequantize() if dense.is_quantized else dense.resolve_conj().resolve_neg()
        found.update(f"tensor {dense.dtype} {tuple(dense.shape)};".encode())
        found.update(dense.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(part, np.ndarray) and not part.dtype.hasobject:
        found.update(f"array {part.dtype} {part.shape};".encode())
        found.update(np.ascontiguousarray(part).tobytes())
    elif isinstance(part, Mapping):
        found.update(f"mapping {len(part)};".encode())
        for key, value in part.items():
            _feed(found, key)
            _feed(found, value)
    elif isinstance(part, list | tuple | np.ndarray):
        found.update(f"sequence {len(part)};".encode())
        for one in part:
            _feed(found, one)
    else:
        text = repr(part)  # a repr with an address differs between processes
        text = "" if " at 0x" in text else text
        found.update(f"{type(part).__qualname__} {len(text)} {text};".encode())


def _sample(tensor: Tensor, most: int = 256) -> Tensor:
    """Evenly spaced values of a tensor, cheap for a table of millions."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)].double()
