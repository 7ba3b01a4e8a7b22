"""Data parallel: every rank has its own points, and all learn from the points of all.

| | communicated in a step |
|---|---|
| shared draws (MeZO, FZOO, LOZO, JVP), DeepZero | the sum of the losses under each draw |
| likelihood ratio, ES, SPSA, backpropagation | gradients |
| shaped noise | and second moments of every site, sums of its regression, some rows of noise |
| allocators that learn | losses and traces of the points, their embeddings for a kernel |

Clean passes, queries, fits and local VJPs are each rank's own. A rank's gradient is the mean over
its points and counts by their number, so ranks may have batches of different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flops.engine.rows import Ranks
from flops.passes.local_vjp import Gradients
from flops.passes.replicas import Replicas


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
