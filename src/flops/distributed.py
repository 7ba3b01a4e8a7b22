"""Query-parallel steps: the processes of a `torch.distributed` group share the rows of a step.

Every process has the whole model and the whole batch, and makes the same plan from the seed. Each
runs its share of the rows; what they saw is exchanged, and every process ends with the same
gradients. Rows are shared out in the order of the plan, so that a process has whole points, but
for the one at each end.

| estimator | what travels for a group |
|---|---|
| ES, SPSA, MeZO, DeepZero | a slope for each draw, nothing else: noise is made from its key |
| likelihood ratio | a slope for each draw, and the gradients or the deltas |
| shaped noise | a slope for each draw, and the gradients of likelihood ratio |
| backpropagation | gradients |

A sum is the same on all processes, bit by bit; it differs from that of one process by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flops.errors import FlopsError

ProcessGroup = Any  # torch's type is missing where torch was built without it
BUCKET = 1 << 22  # values of one message: gradients are never copied as a whole


class WorkerError(FlopsError, RuntimeError):
    """Another process of the group died, does not answer, or does something else."""


@dataclass
class Team:
    """The processes that share the rows; alone, everything is one's own.

    Attributes:
        group: Their process group; None for one process.
        rank: Number of this process.
        size: How many there are.
        sent: Size in bytes of the messages that this process took part in.
        messages: How many.
    """

    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sent: int = field(default=0, compare=False)
    messages: int = field(default=0, compare=False)

    @classmethod
    def find(cls, group: ProcessGroup | Team | Literal["auto"] | None) -> Team:
        """The team of a process group; "auto" takes the default one if it is initialised."""
        if isinstance(group, Team):
            return group
        if group is None or not dist.is_available() or not dist.is_initialized():
            return cls()
        chosen = None if isinstance(group, str) else group
        rank, size = dist.get_rank(chosen), dist.get_world_size(chosen)
        if rank < 0:
            raise WorkerError("this process is not in the given process group")
        return cls(chosen if chosen is not None else dist.group.WORLD, rank, size)

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    def span(self, count: int, unit: int = 1, rank: int | None = None) -> tuple[int, int]:
        """First and last + 1 of the rows of a rank, this one's by default, in whole units."""
        rank, units = self.rank if rank is None else rank, count // unit
        return unit * (units * rank // self.size), unit * (units * (rank + 1) // self.size)

    def join(self, mine: Tensor, begin: int, total: int) -> Tensor:
        """Values of all processes side by side, where mine start at ``begin``; on the CPU."""
        if self.alone:
            return mine
        whole = torch.zeros(total, dtype=mine.dtype)
        whole[begin : begin + len(mine)] = mine
        return self._message(whole, "SUM")  # of one value and zeros: nothing is rounded

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes."""
        if self.alone:
            return list(values)
        found: list[float] = self._message(
            torch.tensor(values, dtype=torch.float64), "SUM"
        ).tolist()
        return found

    def any(self, flag: bool) -> bool:
        """Whether any process says yes."""
        return flag if self.alone else self.sum([float(flag)])[0] > 0

    def add(self, tensor: Tensor) -> Tensor:
        """Sum of the processes' tensors."""
        if self.alone:
            return tensor
        flat = tensor.contiguous().view(-1)
        parts = [self._message(part, "SUM") for part in flat.split(BUCKET)]
        return torch.cat(parts).view(tensor.shape)

    def largest(self, tensor: Tensor) -> Tensor:
        """Largest of the processes' values, entry by entry."""
        return tensor if self.alone else self._message(tensor, "MAX")

    def first(self, tensor: Tensor) -> Tensor:
        """That of process 0, so that a last digit cannot make two different plans."""
        if self.alone:
            return tensor
        return self._message(tensor, "FIRST")

    def add_gradients(
        self, found: dict[nn.Parameter, Tensor], parameters: Iterable[nn.Parameter]
    ) -> dict[nn.Parameter, Tensor]:
        """Sums of the processes' gradients; who has none for a parameter adds nothing.

        Args:
            found: Gradients of this process; left empty, so that no second copy stays.
            parameters: All that any process may have, in the same order everywhere.
        """
        if self.alone:
            return found
        order = list(dict.fromkeys(parameters))
        known = self.largest(torch.tensor([float(p in found) for p in order]))
        total: dict[nn.Parameter, Tensor] = {}
        for part in _packed([p for p, has in zip(order, known.tolist(), strict=True) if has]):
            wide = torch.promote_types(torch.float32, part[0].dtype)
            flat = [
                found.pop(p).to(wide).reshape(-1)
                if p in found
                else torch.zeros(p.numel(), dtype=wide, device=p.device)
                for p in part
            ]
            summed = self.add(torch.cat(flat)).split([p.numel() for p in part])
            total |= {p: g.view(p.shape) for p, g in zip(part, summed, strict=True)}
        return total

    def check_same(self, values: Sequence[float]) -> None:
        """Refuse to go on if the processes do not have the same values.

        Raises:
            WorkerError: On all processes.
        """
        if self.alone:
            return
        mine = torch.tensor(values, dtype=torch.float64)
        most = self._message(torch.cat([mine, -mine]), "MAX")
        high, low = most[: len(mine)], -most[len(mine) :]
        if not torch.allclose(high, low, rtol=1e-6, atol=1e-12, equal_nan=True):
            raise WorkerError(
                f"the {self.size} processes do not have the same batch, model, seed and step: "
                "queries are shared out, so all of them must call estimate with the same data. "
                "If each has its own batch on purpose, give process_group=None and average the "
                "gradients yourself."
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
        with self.trusting():
            if how == "FIRST":
                dist.broadcast(sent, group=self.group, group_src=0)
            else:
                operation = dist.ReduceOp.SUM if how == "SUM" else dist.ReduceOp.MAX
                dist.all_reduce(sent, operation, group=self.group)
        return sent.to(home)

    @contextmanager
    def trusting(self) -> Iterator[None]:
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


def fingerprint(model: nn.Module, leaves: Iterable[Any], step: int, seed: int) -> list[float]:
    """A few numbers that differ when processes are not at the same point of the same run."""
    found = [float(step), float(seed)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    found.append(sum(float(_sample(t).sum()) for t in tensors))
    found.append(sum(float(_sample(p).sum()) for p in model.parameters() if p.numel()))
    return found


def _sample(tensor: Tensor, most: int = 256) -> Tensor:
    """Some values, spread over the tensor, cheap for a table of millions."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)].double()
