"""Likelihood ratio (LR): noise on a target's output, watched at the loss.

The paper's equation 1 for z ~ N(0, sigma^2 I) added to the output of phi:

    delta_j = (1/A_j) sum_i (l_ij - b_j) z_ij / sigma^2     (estimates dl_j / d phi's output)
    gradient = (1/B) sum_j D_theta phi(x_j)^T delta_j

delta is accumulated over the queries, so memory does not grow with their number; then one local
vector-Jacobian product of phi alone is taken at its clean input. What lies before and after phi
may be anything. With several targets in a group the later inputs are noisy; the clean ones used
here cost a bias of the order sigma^2, that of the smoothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from flops.engine.groups import ResolvedGroup, leaves
from flops.engine.meetings import Work, completed
from flops.engine.queries import Estimate, Queries
from flops.errors import CoverageError
from flops.estimators.shaped import estimate_shaped
from flops.estimators.variance import LeafEnergies, jacobian_energy
from flops.passes.local_vjp import LocalTarget
from flops.passes.replay import Passes
from flops.passes.structure import Call
from flops.perturb.activation_checks import check_sites
from flops.perturb.activations import Sites
from flops.perturb.random import KINDS, Kind, NoiseStream, negative, values
from flops.subspace.config import Shaping

Targets = Literal["leaf", "block", "stage"]
Baseline = Literal["clean", "antithetic", "none"]
CHEAP = 0.1  # of a forward pass per point
FEW = 8  # sites whose noise may be kept as bits
PIECE = 1 << 12  # noise values of a row that are looked up at once


@dataclass(frozen=True)
class LikelihoodRatio:
    """Likelihood-ratio estimator on module outputs.

    Args:
        sigma: Noise scale.
        targets: "block" takes each given module whole, "leaf" splits it into its leaves, "stage"
            takes the group's modules as one target with one noise site at its end.
        baseline: "clean" subtracts the noise-free loss (one query per draw), "antithetic" takes
            pairs +z, -z on the same point (two queries per draw, for large sigma), "none" is the
            equation to the letter; its variance is useless at small sigma.
        noise: "gaussian", "rademacher" or "orthogonal".
        shaping: `Shaping()` asks where earlier queries found the gradient; None is isotropic.

    The mean is the gradient of the loss smoothed by the noise; a query costs the part of a
    forward pass behind the first noise site.
    """

    sigma: float = 1e-3
    targets: Targets = "block"
    baseline: Baseline = "clean"
    noise: Kind = "gaussian"
    shaping: Shaping | None = None

    shared = False
    whole_model = False

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"sigma must be positive and finite, not {self.sigma}")
        for value, allowed in (
            (self.targets, get_args(Targets)),
            (self.baseline, get_args(Baseline)),
            (self.noise, KINDS),
        ):
            if value not in allowed:
                raise ValueError(f"'{value}' is not one of {list(allowed)}")
        if self.shaping is not None and self.baseline == "none":
            raise ValueError("shaping needs slopes: use baseline='clean' or 'antithetic'")
        if self.shaping is not None and self.shaping.unbiased and self.noise == "orthogonal":
            raise ValueError("unbiased shaping needs draws that are independent, not orthogonal")

    @property
    def unit(self) -> int:
        """Queries per draw."""
        return 2 if self.baseline == "antithetic" else 1

    @property
    def minimum_queries(self) -> int:
        """One draw per point."""
        return self.unit

    def check(self, group: ResolvedGroup) -> None:
        """LR perturbs outputs, so the group must name modules."""
        if not group.modules:
            raise CoverageError(
                f"group '{group.name}': LikelihoodRatio perturbs the outputs of modules; give "
                "modules as targets, or use SPSA or ES for bare parameters"
            )

    def bind(self, group: ResolvedGroup, passes: Passes, reuse: bool) -> Sites:
        """Find the noise sites and the local products of the group."""
        canonical = {id(module): name for name, module in passes.modules.items()}
        modules = dict(group.modules)
        if self.targets == "leaf":
            split = [leaves(name, module) for name, module in modules.items()]
            modules = {canonical[id(m)]: m for part in split for m in part.values()}
        calls = {name: passes.structure.of(name) for name in modules}
        for name, found in calls.items():
            if not found:
                raise CoverageError(
                    f"target '{name}' of group '{group.name}' never runs in the forward pass (or "
                    "only for some data); give the module around it"
                )
        if self.targets == "stage":
            local = [_stage(group, modules, calls)]
        else:
            local = [
                LocalTarget(name, call.number, call.number, _trainable(modules[name]))
                for name, found in calls.items()
                for call in found
            ]
        local.sort(key=lambda t: passes.structure.calls[t.last].end)
        sites = Sites(group.name, modules, tuple(local), passes, reuse)
        check_sites(sites, passes)
        return sites

    def estimate(self, binding: Sites, queries: Queries) -> Estimate:
        """Accumulate delta over the queries, then take the local products."""
        return completed(self.work(binding, queries))

    def work(self, binding: Sites, queries: Queries) -> Work[Estimate]:
        """The estimate, with a stop before every exchange with other processes."""
        if self.shaping is not None:
            return (yield from estimate_shaped(self, self.shaping, binding, queries))
        dtype = torch.promote_types(torch.float32, binding.dtype)
        device = binding.sites[0].leaf.device
        delta = torch.zeros(queries.size, binding.size, dtype=dtype, device=device)
        draws = (queries.counts // self.unit).tolist()
        stream = NoiseStream(self.noise, queries.key, queries.ids, draws, binding.size)
        slopes, once = [], slice(None, None, self.unit)  # a pair shares its draw
        chunks = list(queries.chunks(self.unit))
        # Bits of many small sites take longer to look up than their rows take to run.
        compact = len(binding.sites) <= FEW
        noise = stream.parts([(rows.points[once], rows.draws[once]) for rows in chunks], compact)
        for rows, z in zip(chunks, noise, strict=True):
            at = rows.points[once]
            z = z.to(device, dtype) if z.is_floating_point() else z  # (draws, size)
            signed = z if self.unit == 1 else torch.stack([z, negative(z)], 1).flatten(0, 1)
            with torch.inference_mode():
                edits = binding.edits(signed, self.sigma)
                losses = queries.run(binding.query_prefix, rows.points, edits=edits).cpu()
                difference = self._difference(losses, queries.losses[rows.points].cpu())
            w = difference.clone().to(dtype) / self.sigma
            accumulate(delta, at, rows.weights[once].to(dtype) * w, z)
            slopes.append(w)
        energies = LeafEnergies(binding, queries)
        repeat = not queries.team.alone and _repeat(binding, queries)
        if repeat:
            yield
            delta = queries.team.add(delta)
        gradients = queries.products(
            binding.local_prefix,
            binding.local,
            binding.split(delta.div_(queries.size)),
            None if repeat else queries.own(self.unit),
            energies.see,
        )
        del delta
        yield
        w, at = queries.everyone(slopes, self.unit, dtype)
        if self.baseline != "none":
            queries.warn_if_rounding((w * self.sigma).to(queries.losses.dtype))
        if not repeat:
            gradients = queries.gathered(gradients, binding.local)
        factors: Any = queries.team.largest(energies.total)
        if not energies.closed:
            factors = jacobian_energy(binding, queries)
        directions = binding.size if self.noise == "orthogonal" else 0
        return Estimate(gradients, w, at, factors, directions)

    def _difference(self, losses: Tensor, clean: Tensor) -> Tensor:
        if self.baseline == "antithetic":
            return (losses[0::2] - losses[1::2]) / 2
        return losses - clean if self.baseline == "clean" else losses


def accumulate(delta: Tensor, points: Tensor, weighted: Tensor, z: Tensor) -> None:
    """Add sum_i weight_i w_i z_i to the rows of delta; points ascend, so one product does it."""
    first, last = int(points[0]), int(points[-1])
    matrix = torch.zeros(last - first + 1, len(points), dtype=delta.dtype)
    matrix[points - first, torch.arange(len(points))] = weighted
    matrix, whole = matrix.to(delta.device), z.size(1)
    step = whole if z.is_floating_point() else PIECE
    for begin in range(0, whole, step):
        part = values(z, begin, min(begin + step, whole)).to(delta)
        delta[first : last + 1, begin : begin + step].addmm_(matrix, part)


def _repeat(binding: Sites, queries: Queries) -> bool:
    """Whether processes exchange deltas and repeat all local products, rather than gradients.

    Of the two the smaller one travels; but products that are dear to repeat never are.
    """
    parameters = dict.fromkeys(p for target in binding.local for p in target.parameters)
    smaller = queries.size * binding.size < sum(p.numel() for p in parameters)
    return smaller and queries.local_share(binding.local_prefix, binding.local) <= CHEAP


def _stage(
    group: ResolvedGroup, modules: Mapping[str, nn.Module], calls: Mapping[str, list[Call]]
) -> LocalTarget:
    several = [name for name, found in calls.items() if len(found) > 1]
    if several:
        raise CoverageError(
            f"group '{group.name}': {several} run more than once in a forward pass, so they have "
            'no single place in a stage; use targets="block"'
        )
    order = sorted((found[0] for found in calls.values()), key=lambda call: call.start)
    for before, after in pairwise(order):
        if after.start < before.end:
            raise CoverageError(f"stage '{group.name}': '{after.name}' runs inside '{before.name}'")
    parameters = dict.fromkeys(p for m in modules.values() for p in _trainable(m))
    return LocalTarget(group.name, order[0].number, order[-1].number, tuple(parameters))


def _trainable(module: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(p for p in module.parameters() if p.requires_grad)
