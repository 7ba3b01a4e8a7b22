"""Likelihood ratio with shaped noise: the sites of a group as the space that is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flops.engine.meetings import Work, at_once
from flops.engine.queries import Estimate, Queries
from flops.engine.rows import Rows
from flops.estimators.variance import jacobian_energy
from flops.perturb.activations import Sites
from flops.subspace.config import Shaping
from flops.subspace.measurements import Space
from flops.subspace.moments import Grid, grid
from flops.subspace.step import shaped_queries

if TYPE_CHECKING:
    from flops.estimators.likelihood_ratio import LikelihoodRatio


def estimate_shaped(
    options: LikelihoodRatio, shaping: Shaping, binding: Sites, queries: Queries
) -> Work[Estimate]:
    """Shaped queries, then the local products of what they found."""
    dtype = torch.promote_types(torch.float32, binding.dtype)
    device = binding.sites[0].leaf.device

    def ask(rows: Rows, z: Tensor) -> Work[Tensor]:
        z = z.to(device)
        signed = z if options.unit == 1 else torch.stack([z, -z], 1).flatten(0, 1)
        with torch.inference_mode():
            edits = binding.edits(signed, options.sigma)
            losses = queries.run(binding.query_prefix, rows.points, edits=edits).cpu()
            difference = options._difference(losses, queries.losses[rows.points].cpu())
        return at_once(difference.clone().to(dtype) / options.sigma)

    grids, mask = _grids(shaping, binding, queries)
    names = [binding.structure.calls[site.call].name for site in binding.sites]
    space = Space(grids, options.unit, options.noise, dtype, ask, options.sigma, names, mask)
    found = yield from shaped_queries(space, shaping, queries)
    deltas = binding.split(found.delta / queries.size)
    own = queries.team.span(queries.size)
    products = queries.products(binding.local_prefix, binding.local, deltas, own)
    yield
    gradients = queries.gathered(products, binding.local)
    isotropic = found.slopes[found.isotropic]  # along a known direction a slope may well be 0
    queries.warn_if_rounding((isotropic * options.sigma).to(queries.losses.dtype))
    return Estimate(
        gradients,
        found.slopes,
        found.points,
        jacobian_energy(binding, queries),
        shaped=found.shaped,
    )


def _grids(shaping: Shaping, binding: Sites, queries: Queries) -> tuple[list[Grid], Tensor | None]:
    """The sites as grids, and where noise matters.

    Positions are not aligned where a mask says which of them a point has, or where their number
    has changed from batch to batch.
    """
    found = queries.passes.batch.named(shaping.mask)
    lengths = queries.memory.get("positions", ())
    if len(lengths) != len(binding.sites):
        lengths = [None] * len(binding.sites)
    grids, masks = [], []
    for site, length in zip(binding.sites, lengths, strict=True):
        module = queries.passes.modules[binding.structure.calls[site.call].name]
        g = grid(site, isinstance(module, nn.Conv1d | nn.ConvTranspose1d))
        tokens = len(site.row_shape) == 2 and not g.channels_first
        masked = tokens and found is not None and found.shape == (queries.size, g.positions)
        if masked or length not in (None, g.positions):
            g = replace(g, aligned=False)
        grids.append(g)
        whole = found if masked and found is not None else torch.ones(queries.size, g.positions)
        masks.append((whole.cpu() != 0).unsqueeze(2).expand(-1, -1, g.channels).flatten(1))
    # 0 for a site whose positions are not aligned: it stays so.
    queries.memory["positions"] = [g.positions if g.aligned else 0 for g in grids]
    return grids, None if all(g.aligned for g in grids) else torch.cat(masks, 1)
