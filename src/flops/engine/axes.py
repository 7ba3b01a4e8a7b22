"""Axes: which ranks share the queries of a batch, and which have other points.

On a mesh of data x query ranks, those along "query" have the same batch and share its queries
(`flops.engine.collectives`), and those along "data" have others (`flops.engine.data_parallel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flops.engine.collectives import Collectives, ProcessGroup
from flops.engine.rows import Ranks

Parallel = Literal["data", "query"]
AXES = ("data", "query")


@dataclass(frozen=True)
class Axes:
    """Ranks that share queries with this one, and ranks with other points."""

    query: Ranks
    data: Ranks

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
    if parallel not in AXES:
        raise ValueError(f"parallel must be 'data' or 'query', not {parallel!r}")
    if isinstance(group, Ranks) or not dist.is_available() or not isinstance(group, DeviceMesh):
        found = Collectives.of(group)
        return Axes(found, Ranks()) if parallel == "query" else Axes(Ranks(), found)
    names = group.mesh_dim_names or ()
    if not names or set(names) - set(AXES):
        raise ValueError(
            "the dimensions of a mesh must be named 'data' and 'query', not "
            f"{list(names)}: init_device_mesh('cpu', (4, 2), mesh_dim_names=('data', 'query'))"
        )
    of = {name: Collectives.of(group.get_group(name)) for name in names}
    return Axes(of.get("query", Ranks()), of.get("data", Ranks()))
