"""Collectives: the ranks of a `torch.distributed` process group share the rows of a step.

Every process has the whole model and the whole batch, and makes the same plan from the seed. Each
runs its share of the rows; what they saw is exchanged, and every process ends with the same
gradients. Rows are shared out in the order of the plan, so that a process has whole points, but
for the one at each end.

| estimator | what travels for a group |
|---|---|
| shared draws (MeZO, FZOO, LOZO), DeepZero | a loss for each row; noise is made from its key |
| JVP | a directional derivative for each row, and the sum of the losses |
| ES, SPSA | a directional derivative for each draw, and the gradients |
| likelihood ratio | a directional derivative for each draw, and the gradients or the deltas |
| backpropagation | gradients |

A sum is the same on all processes, bit by bit; it differs from that of one process by rounding.
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

ProcessGroup = Any  # torch's type is missing where torch was built without it
BUCKET = 1 << 22  # values of one message: gradients are never copied as a whole


class WorkerError(FlopsError, RuntimeError):
    """Another process of the group died, does not answer, or does something else."""


@dataclass
class Collectives(Ranks):
    """The ranks of a process group; what they say to each other is counted.

    Attributes:
        group: Their process group.
        rank: Number of this process.
        size: World size.
        sent: Size in bytes of the messages that this process took part in.
        messages: How many.
    """

    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sent: int = field(default=0, compare=False)
    messages: int = field(default=0, compare=False)

    @classmethod
    def of(cls, group: ProcessGroup | Ranks | Literal["auto"] | None) -> Ranks:
        """The ranks of a process group; "auto" takes the default one if it is initialised."""
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
        """Values of all processes side by side, where mine start at ``begin``; on the CPU."""
        whole = torch.zeros(total, dtype=mine.dtype)
        whole[begin : begin + len(mine)] = mine
        return self._message(whole, "SUM")  # of one value and zeros: nothing is rounded

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes."""
        found: list[float] = self._message(
            torch.tensor(values, dtype=torch.float64), "SUM"
        ).tolist()
        return found

    def any(self, flag: bool) -> bool:
        """Whether any process says yes."""
        return self.sum_scalars([float(flag)])[0] > 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum of the processes' tensors."""
        flat = tensor.contiguous().view(-1)
        parts = [self._message(part, "SUM") for part in flat.split(BUCKET)]
        return torch.cat(parts).view(tensor.shape)

    def all_max(self, tensor: Tensor) -> Tensor:
        """Largest of the processes' values, entry by entry."""
        return self._message(tensor, "MAX")

    def broadcast(self, tensor: Tensor) -> Tensor:
        """That of process 0, so that a last digit cannot make two different plans."""
        return self._message(tensor, "FIRST")

    def sum_gradients(self, found: Gradients, parameters: Iterable[nn.Parameter]) -> Gradients:
        """Sums of the processes' gradients; who has none for a parameter adds nothing.

        Args:
            found: Gradients of this process; left empty, so that no second copy stays.
            parameters: All that any process may have, in the same order everywhere.
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
        """Refuse to go on if the processes are not at the same point of the same run.

        Raises:
            WorkerError: On all processes, with what differs.
        """
        exact = list(prints.exact.values())
        mine = torch.tensor([*exact, prints.close, prints.scale], dtype=torch.float64)
        most = self._message(torch.cat([mine, -mine]), "MAX")
        high, low = most[: len(mine)], -most[len(mine) :]
        wrong = [name for name, h, w in zip(prints.exact, high, low, strict=False) if h != w]
        high, low = high[len(exact) :], low[len(exact) :]
        # Nobody's parameters need the same bits: they may come from different machines.
        if not torch.allclose(high, low, rtol=0, atol=1e-6 * float(high[-1]), equal_nan=True):
            wrong.append("parameters")
        if wrong:
            raise WorkerError(
                f"the {self.size} processes do not have the same {' and '.join(wrong)}: queries "
                "are shared out, so all of them must call estimate with the same model and the "
                "same data in the same order. If each has its own batch on purpose, give "
                "process_group=None and average the gradients yourself."
            )

    @property
    def _device(self) -> torch.device:
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _message(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        """A copy that holds the sum, the largest, or the values of process 0."""
        self.sent += tensor.numel() * tensor.element_size()
        self.messages += 1
        return self.exchange(tensor.clone(), how)

    def exchange(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        """Send a tensor that may be written to; simulations of large teams replace this."""
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
        """Turn the failure of a message into an error that says what to do."""
        try:
            yield
        except RuntimeError as error:
            raise WorkerError(
                f"process {self.rank} of {self.size} got no answer from the others: one of them "
                "failed, was killed or hangs (see its own output). Parameters and .grad are as "
                "before this step; start again from the last checkpoint, with any number of "
                f"processes. ({str(error).splitlines()[0][:200]})"
            ) from error


def shares(costs: Sequence[float], size: int, ranks: int) -> list[int]:
    """Bounds that share out rows, ``size`` of each cost in turn, at nearly the same cost.

    Returns:
        ``ranks + 1`` numbers from 0 to the number of rows; rank r has the rows between two of them.
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
    """Runs of parameters of one kind that fit into a message together."""
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
    """Numbers that differ when processes are not at the same point of the same run.

    Attributes:
        exact: By name, 48 bits of a digest: a float64 carries them, and nothing is rounded.
        close: Of the parameters; it may differ by rounding.
        scale: What that rounding is relative to.
    """

    exact: dict[str, float]
    close: float
    scale: float


def fingerprint(
    model: nn.Module, leaves: Iterable[Any], index: Tensor | None, step: int, seed: int
) -> Fingerprint:
    """All bytes of the batch in their order, and some values of each parameter with their places.

    Args:
        model: The model.
        leaves: All parts of inputs and targets.
        index: Positions of the points in the data set.
        step: Steps taken.
        seed: Key of the noise.
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
    # Weights by place between 1 and 2: a golden ratio's multiples never come twice.
    weights = (torch.arange(len(values)).double() * 0.6180339887498949) % 1 + 1
    return Fingerprint(exact, float(values @ weights), float(values.abs().sum()))


def digest(*parts: Any) -> float:
    """A whole number below 2^48 that depends on every byte of the parts and on their order."""
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        _feed(found, part)
    return float(int.from_bytes(found.digest(), "big"))


def _feed(found: Any, part: Any) -> None:
    """Add one part; what has neither bytes nor a stable text counts by its type alone."""
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
        text = repr(part)  # with an address in it, it differs in every process
        text = "" if " at 0x" in text else text
        found.update(f"{type(part).__qualname__} {len(text)} {text};".encode())


def _sample(tensor: Tensor, most: int = 256) -> Tensor:
    """Some values, spread over the tensor, cheap for a table of millions."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)].double()
