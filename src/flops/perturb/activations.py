"""Noise sites: the outputs that likelihood ratio perturbs, concatenated in one row.

A site is one tensor in the output of one call; a module that is called twice has two. The noise of
a row is one vector over all sites of the group. An output that all points share (position
embeddings) is expanded over the rows when noise is added; its delta is the sum over the points.
Noise may be limited to the last tokens of each sequence; the delta of the others is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flops.errors import CoverageError
from flops.passes.binding import Binding
from flops.passes.local_vjp import LocalTarget, local_share
from flops.passes.replay import Edit, Passes, Prefix, empty_prefix
from flops.passes.structure import FOLDED, Call, Leaf, Use
from flops.perturb.random import values as noise_values


@dataclass(frozen=True)
class Site:
    """One perturbed tensor: leaf ``leaf_index`` of a call's output, at ``offset`` in a row.

    The first ``skipped`` tokens have no noise, and are not in ``row_shape``.
    """

    call: int
    leaf_index: int
    leaf: Leaf
    offset: int
    size: int
    row_shape: tuple[int, ...]
    skipped: int = 0


class Sites(Binding):
    """The noise sites of a group in one structure, and the prefixes of its passes."""

    def __init__(
        self,
        group: str,
        modules: Mapping[str, nn.Module],
        local: tuple[LocalTarget, ...],
        passes: Passes,
        reuse: bool,
        last_tokens: int | None = None,
    ) -> None:
        self.group, self.local = group, local
        self.local_prefix: Prefix
        self.structure = passes.structure
        self.sites = _sites(local, modules, passes, last_tokens)
        self.size = self.noise_size = self.sites[-1].offset + self.sites[-1].size
        self.dtype = self.sites[0].leaf.dtype
        for site in self.sites:
            self.dtype = torch.promote_types(self.dtype, site.leaf.dtype)
        calls = self.structure.calls
        # Outputs without other references: noise is added in place.
        self._fresh = {
            site.call
            for site in self.sites
            if type(m := modules[calls[site.call].name]) in (nn.Linear, nn.LayerNorm, nn.Conv2d)
            and "forward" not in m.__dict__
        }
        if reuse:
            first_end = calls[local[0].last]
            keep = frozenset([first_end.number])
            self.query_prefix = passes.prefix(first_end.end, keep)
            self.local_prefix = passes.prefix(min(calls[t.first].start for t in local))
        else:
            self.query_prefix = self.local_prefix = empty_prefix(self.structure)
        self.prefixes = (self.query_prefix, self.local_prefix)
        # From the start: code between replayed calls runs again, and may read a parameter.
        self.local_span = (0, max(calls[t.last].end for t in local))
        self._shares: dict[int, float] = {}

    def local_share(self, rows: int) -> float:
        """Cost of the local VJPs of a point, in forward passes, with this many rows a pass."""
        if rows not in self._shares:
            self._shares[rows] = local_share(self.structure, self.local_prefix, self.local, rows)
        return self._shares[rows]

    def covers(self, use: Use) -> bool:
        """Whether the use lies inside a target that has the parameter."""
        calls = self.structure.calls
        return any(
            calls[t.first].start <= use.time < calls[t.last].end
            and use.parameter in {id(p) for p in t.parameters}
            for t in self.local
        )

    def edits(self, noise: Tensor, sigma: float) -> dict[int, Edit]:
        """Edits that add sigma * noise, shape (rows, size) or its 16-bit codes, to the outputs."""
        by_call: dict[int, list[Site]] = {}
        for site in self.sites:
            by_call.setdefault(site.call, []).append(site)
        return {
            number: _adder(sites, noise, sigma, number in self._fresh)
            for number, sites in by_call.items()
        }

    def split(self, delta: Tensor) -> dict[int, dict[int, Tensor]]:
        """Split rows of all sites into tensors by call and output position, batch first."""
        parts: dict[int, dict[int, Tensor]] = {}
        for site in self.sites:
            part = delta[:, site.offset : site.offset + site.size]
            shaped = part.reshape(-1, *site.row_shape)
            if site.skipped:
                shaped = F.pad(shaped, (0, 0, site.skipped, 0))
            parts.setdefault(site.call, {})[site.leaf_index] = shaped.to(site.leaf.device)
        return parts


def _adder(sites: list[Site], noise: Tensor, sigma: float, fresh: bool) -> Edit:
    def add(out: Any) -> Any:
        values, spec = tree_flatten(out)
        for site in sites:
            value = values[site.leaf_index]
            part = noise_values(noise, site.offset, site.offset + site.size)
            part = part.reshape(-1, *site.row_shape).movedim(0, site.leaf.axis or 0)
            if site.skipped:
                value = values[site.leaf_index] = value if fresh else value.clone()
                value[:, site.skipped :].add_(part.to(value), alpha=sigma)
            elif fresh and site.leaf.axis is not None:
                value.add_(part.to(value), alpha=sigma)
            else:
                values[site.leaf_index] = torch.add(value, part.to(value), alpha=sigma)
        return tree_unflatten(values, spec)

    return add


def _sites(
    local: tuple[LocalTarget, ...],
    modules: Mapping[str, nn.Module],
    passes: Passes,
    last_tokens: int | None,
) -> tuple[Site, ...]:
    sites: list[Site] = []
    offset = 0
    for target in local:
        call = passes.structure.calls[target.last]
        for index, leaf in _perturbed(call, modules[call.name]):
            shape, skipped = _row_shape(leaf), 0
            if last_tokens is not None:
                if leaf.axis != 0 or len(shape) != 2:
                    raise CoverageError(
                        f"last_tokens needs outputs of shape (B, tokens, channels), and that of "
                        f"target '{call.name}' is {leaf.shape} for 3 rows; leave it out for this "
                        "group"
                    )
                skipped = max(0, shape[0] - last_tokens)
                shape = (shape[0] - skipped, shape[1])
            size = prod(shape)
            sites.append(Site(call.number, index, leaf, offset, size, shape, skipped))
            offset += size
    return tuple(sites)


def _perturbed(call: Call, module: nn.Module) -> list[tuple[int, Leaf]]:
    floating = [(i, leaf) for i, leaf in call.tensors if leaf.dtype.is_floating_point]
    if isinstance(module, nn.MultiheadAttention):
        floating = floating[:1]  # the second output is the attention map, which no loss uses
    if any(leaf.axis == FOLDED for _, leaf in floating):
        raise CoverageError(
            f"the output of target '{call.name}' folds the batch into another axis (shape "
            f"{floating[0][1].shape} for 3 rows); give the module around it"
        )
    batched = [(i, leaf) for i, leaf in floating if leaf.axis is not None]
    if not floating:
        kinds = sorted({type(leaf).__name__ for leaf in call.leaves if not isinstance(leaf, Leaf)})
        raise CoverageError(
            f"target '{call.name}' returns no floating-point tensor that can be perturbed "
            f"({kinds or 'integers only'}); give the module around it"
        )
    return batched or floating


def _row_shape(leaf: Leaf) -> tuple[int, ...]:
    return leaf.shape[1:] if leaf.axis is None and leaf.shape[:1] == (1,) else leaf.row_shape
