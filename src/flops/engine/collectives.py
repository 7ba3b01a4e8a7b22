"""Collectives: the ranks of a `torch.distributed` process group take a step together.

Along the axis "query" they share the rows of a step (`Collectives`): every rank has the whole model
and the whole batch, makes the same plan from the seed, and runs its share of the rows; results are
exchanged. Rows are distributed in the order of the plan, so that a rank has whole points, except at
both ends.

| estimator | communicated for a group |
|---|---|
| shared draws (MeZO, FZOO, LOZO), DeepZero | a loss for each row: noise has a key |
| JVP | a directional derivative for each row, and the sum of the losses |
| ES, SPSA | a directional derivative for each draw, and the gradients |
| shaped noise | and second moments, since each rank fits its share of the points |
| likelihood ratio | a directional derivative for each draw, and the gradients or the deltas |
| backpropagation | gradients |

Along the axis "data" every rank has its own points, and all learn from the points of all
(`DataParallel`). Clean passes, queries, fits and local VJPs are each rank's own. A rank's gradient
is the mean over its points and counts by their number, so batches may have different sizes.

| | communicated in a step |
|---|---|
| shared draws (MeZO, FZOO, LOZO, JVP), DeepZero | the sum of the losses under each draw |
| likelihood ratio, ES, SPSA, backpropagation | gradients |
| shaped noise | and second moments of every site, sums of its regression, some rows of noise |
| allocators that learn | losses and traces of the points, their embeddings for a kernel |

A `DeviceMesh` of data x query ranks has both (`GroupAxes`). All ranks end with the same gradients:
a sum is bitwise equal on all ranks; it differs from that of a single process by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flops.engine.fingerprint import Fingerprint, batch_digest, differences
from flops.engine.rows import shares
from flops.engine.watch import Watch, WorkerError, watch_of
from flops.passes.batch import Batch
from flops.passes.local_vjp import Gradients
from flops.passes.ranks import AXES, Axes, Parallel, ProcessGroup, Ranks, Replicas

BUCKET = 1 << 22  # values per message: gradients are never copied as a whole


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
        return self._message(whole, "SUM", own=True)  # of one value and zeros: no rounding

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
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(tensor.shape)

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
        total: Gradients = {}
        for part in _packed(dict.fromkeys(parameters)):
            wide = torch.promote_types(torch.float32, part[0].dtype)
            here = torch.tensor([float(p in found) for p in part]).to(part[0].device, wide)
            flat = [
                found.pop(p).to(wide).reshape(-1)
                if p in found
                else torch.zeros(p.numel(), dtype=wide, device=p.device)
                for p in part
            ]
            sizes = [len(part), *(p.numel() for p in part)]
            known, *summed = self.all_sum(torch.cat([here, *flat])).split(sizes)
            for p, has, gradient in zip(part, known.tolist(), summed, strict=True):
                if has:
                    total[p] = gradient.view(p.shape)
        return total

    def check_same(self, prints: Fingerprint) -> None:
        """Raise if the ranks are not at the same step of the same run.

        Raises:
            WorkerError: On all ranks, with the differences.
        """
        mine = torch.tensor(prints.values(), dtype=torch.float64)
        most = self._message(torch.cat([mine, -mine]), "MAX")
        wrong = differences(prints, most[: len(mine)], -most[len(mine) :])
        if wrong:
            raise WorkerError(
                f"the {self.size} processes do not have the same {' and '.join(wrong)}: queries "
                "are distributed, so all of them must call estimate with the same model and the "
                "same data in the same order. If each has its own batch on purpose, give "
                "parallel='data'."
            )

    def meet(
        self, points: int, prints: Fingerprint, batch: Callable[[bool], float]
    ) -> tuple[int, ...]:
        """Points of each rank, after a check that they train one model on batches of their own.

        Args:
            points: Points of this rank's batch.
            prints: What must be the same on all ranks.
            batch: Digest of this rank's batch, from all of its values or from a sample; the former
                is computed only if the samples of all ranks are equal.

        Raises:
            WorkerError: If ranks are not at the same step of the same run, or have the same batch.
        """
        places = torch.zeros(self.size, dtype=torch.float64)
        places[self.rank] = points
        mine = torch.tensor([batch(False), *prints.values()], dtype=torch.float64)
        found = self.all_max(torch.cat([mine, -mine, places]))
        high, low, sizes = found.split([len(mine), len(mine), self.size])
        wrong = differences(prints, high[1:], -low[1:])
        if wrong:
            raise WorkerError(
                f"the {self.size} processes do not have the same {' and '.join(wrong)}: every "
                "one trains the same model on a batch of its own, so all must make the same model "
                "with the same seed, and call estimate equally often, with an index or without"
            )
        if high[0] == -low[0]:
            whole = batch(True)
            pair = self.all_max(torch.tensor([whole, -whole], dtype=torch.float64))
            if pair[0] == -pair[1]:
                raise WorkerError(
                    f"all {self.size} processes have the same batch, so they would repeat each "
                    "other's work: give each its own points, as DistributedSampler does, or let "
                    "them share the queries of one batch: ForwardGradient(..., parallel='query')"
                )
        return tuple(int(size) for size in sizes)

    @property
    def _device(self) -> torch.device:
        nccl = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _message(
        self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"], *, own: bool = False
    ) -> Tensor:
        """The sum, the maximum, or the values of rank 0: a copy, unless nobody else reads it."""
        self.sent += tensor.numel() * tensor.element_size()
        self.messages += 1
        return self.exchange(tensor if own else tensor.clone(), how)

    def exchange(self, tensor: Tensor, how: Literal["SUM", "MAX", "FIRST"]) -> Tensor:
        """Reduce a tensor in place; simulations of many ranks override this."""
        home, sent = tensor.device, tensor.to(self._device)
        with self.guarded():
            if how == "FIRST":
                work = dist.broadcast(sent, group=self.group, group_src=0, async_op=True)
            else:
                operation = dist.ReduceOp.SUM if how == "SUM" else dist.ReduceOp.MAX
                work = dist.all_reduce(sent, operation, group=self.group, async_op=True)
            self.watch.wait(work)
        return sent.to(home)

    def fitters(self, points: int) -> DataParallel:
        """These ranks as replicas, each with its share of the points of one batch."""
        bounds = [points * rank // self.size for rank in range(self.size + 1)]
        return DataParallel(self, [b - a for a, b in pairwise(bounds)])

    @property
    def watch(self) -> Watch:
        """Watches the other ranks."""
        return watch_of(self.group, self.rank, self.size)

    def fail(self, error: BaseException, always: bool = False) -> None:
        """Tell the other ranks, which may wait for this one, why it does not go on.

        Args:
            error: The reason.
            always: Also if that is the failure of another rank, which these may not know of.
        """
        if always or not isinstance(error, WorkerError):
            self.watch.fail(f"{type(error).__name__}: {error}")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn communication failures into a `WorkerError`."""
        try:
            yield
        except WorkerError:
            raise
        except RuntimeError as error:
            known = self.watch.reason() or self.watch.behind()
            who = known or "one of them failed, was killed or hangs (see its output)"
            raise WorkerError(
                f"process {self.rank} of {self.size} did not receive a message from the other "
                f"ranks: {who}. Parameters and .grad are as before this step; restart from the "
                "last checkpoint, with any number of processes. "
                f"({str(error).splitlines()[0][:200]})"
            ) from error


class DataParallel(Replicas):
    """The replicas of a process group.

    Args:
        ranks: Collectives of the replicas.
        sizes: Points of each.
    """

    def __init__(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        self._ranks, self.rank, self.sizes = ranks, ranks.rank, tuple(sizes)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the replicas, one message for each type of the tensors."""
        found = list(tensors)
        kinds = dict.fromkeys((t.dtype, t.device) for t in found)
        for kind in kinds:
            at = [i for i, t in enumerate(found) if (t.dtype, t.device) == kind]
            flat = torch.cat([found[i].reshape(-1) for i in at])
            parts = self._ranks.all_sum(flat).split([found[i].numel() for i in at])
            for i, part in zip(at, parts, strict=True):
                found[i] = part.view(found[i].shape)
        return found

    def gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all replicas."""
        width = rows[:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
        first, total = sum(sizes[: self.rank]), sum(sizes)
        found = self._ranks.all_gather(rows.reshape(-1), first * width, total * width)
        return found.to(rows.device).view(total, *rows.shape[1:])

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the replicas."""
        return self._ranks.all_max(tensor)

    def sum_gradients(self, found: Gradients, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Sums of the replicas' gradients."""
        return self._ranks.sum_gradients(found, parameters)


@dataclass(frozen=True)
class GroupAxes(Axes):
    """Those of a process group."""

    query: Ranks
    data: Ranks

    def meet(
        self, batch: Batch, index: Tensor | None, run: Callable[..., Fingerprint], join: bool
    ) -> tuple[Ranks, Replicas]:
        """Ranks that share the rows, and those with other points, after checks of both."""
        replicas = Replicas(batch.size)
        if isinstance(self.query, Collectives):
            self.query.check_same(run(batch=batch.leaves, index=index))
        if join and isinstance(self.data, Collectives):
            prints = run(**{"use of an index": index is None})
            whole = partial(batch_digest, batch.leaves, index)
            replicas = DataParallel(self.data, self.data.meet(batch.size, prints, whole))
        return self.query, replicas

    def fail(self, error: BaseException) -> None:
        """Tell all of them why this one does not go on."""
        both = self.query.size > 1 and self.data.size > 1
        for ranks in (self.query, self.data):
            ranks.fail(error, both)


def axes(group: ProcessGroup | Ranks | Literal["auto"] | None, parallel: Parallel) -> Axes:
    """Which ranks share queries with this one, and which have other points.

    Args:
        group: A process group, or a mesh with the dimensions "data" and "query", or one of them.
        parallel: What the ranks of a process group share; of no use for a mesh.

    Raises:
        ValueError: If the dimensions of a mesh have other names.
    """
    if isinstance(group, Ranks) or not dist.is_available() or not isinstance(group, DeviceMesh):
        found = Collectives.of(group)
        return GroupAxes(found, Ranks()) if parallel == "query" else GroupAxes(Ranks(), found)
    names = group.mesh_dim_names or ()
    if not names or set(names) - set(AXES):
        raise ValueError(
            "the dimensions of a mesh must be named 'data' and 'query', not "
            f"{list(names)}: init_device_mesh('cpu', (4, 2), mesh_dim_names=('data', 'query'))"
        )
    of = {name: Collectives.of(group.get_group(name)) for name in names}
    return GroupAxes(of.get("query", Ranks()), of.get("data", Ranks()))


def _packed(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one type and device that fit into a message."""
    part: list[nn.Parameter] = []
    for p in parameters:
        alike = not part or (part[0].dtype, part[0].device) == (p.dtype, p.device)
        # A message has a flag for each, too.
        if part and (not alike or sum(q.numel() + 1 for q in part) + p.numel() + 1 > BUCKET):
            yield part
            part = []
        part.append(p)
    if part:
        yield part
