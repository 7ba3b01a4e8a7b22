"""Likelihood ratio (LR): gradients from noise on module outputs.

The paper's equation 1 for z ~ N(0, sigma^2 I) added to the output of phi:

    delta_j = (1/A_j) sum_i (l_ij - b_j) z_ij / sigma^2     (estimates dl_j / d phi's output)
    gradient = (1/B) sum_j D_theta phi(x_j)^T delta_j

delta is accumulated over the queries, so memory does not grow with their number; then one local
vector-Jacobian product (VJP) of phi is taken at its clean input. Modules before and after phi need
not be differentiable. With several targets in a group the later inputs are noisy; using the clean
ones causes a bias of order sigma^2, like the smoothing itself.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from flops.errors import BatchError, CoverageError, PrecisionWarning
from flops.estimators.arrived import Arrived
from flops.estimators.automatic_sigma import Auto, SigmaSearch, chosen
from flops.estimators.base import (
    Estimate,
    Estimation,
    Estimator,
    Perturbation,
    PointPlan,
    Queries,
    RowResults,
    Rows,
    Runner,
    Sink,
)
from flops.estimators.shaped_activations import ShapedActivations
from flops.estimators.variance import LeafEnergies, jacobian_energy, users_frame, warn_if_rounding
from flops.passes.local_vjp import LocalTarget, stage_target, trainable
from flops.passes.replay import Passes
from flops.passes.selection import Selection, leaves
from flops.perturb.activation_checks import check_bypass, check_foreign, check_shared_outputs
from flops.perturb.activations import Sites
from flops.perturb.random import KINDS, Kind, NoiseStream, signed, values
from flops.subspace.config import Shaping

Targets = Literal["leaf", "block", "stage"]
Baseline = Literal["clean", "antithetic", "none"]
HALF = (torch.float16, torch.bfloat16)
HALF_UNITS, LEAST_UNITS = 12, 4  # default and least sigma in half precision, in ulp
CHEAP = 0.1  # of a forward pass per point
FEW = 8  # sites whose noise may be stored as 16-bit codes
PIECE = 1 << 12  # noise values of a row per lookup


@dataclass(frozen=True)
class LikelihoodRatio(Estimator):
    """Likelihood-ratio estimator on module outputs.

    Args:
        sigma: Noise scale; None for the default of the outputs' type (`default_sigma`), "auto" to
            search for it (`flops.estimators.automatic_sigma`).
        targets: "block" perturbs the output of each given module, "leaf" those of its leaves,
            "stage" only that of the group's last module.
        baseline: "clean" subtracts the noise-free loss (one query per draw), "antithetic" uses
            pairs +z, -z (two queries per draw, for large sigma), "none" is equation 1 unmodified;
            too noisy at small sigma.
        noise: "gaussian", "rademacher" or "orthogonal".
        shaping: `Shaping()` concentrates noise in the learned subspace; None is isotropic.
        last_tokens: Perturb only the last tokens of each sequence; None for all. For a language
            model whose loss reads the last tokens of rows padded on the left: after the later
            layers these hold nearly all of the gradient, in far fewer dimensions. What the others
            hold is left out of the estimate.

    The mean is the gradient of the loss smoothed by the noise; a query costs the part of a forward
    pass after the first noise site.
    """

    sigma: float | Auto | None = None
    targets: Targets = "block"
    baseline: Baseline = "clean"
    noise: Kind = "gaussian"
    shaping: Shaping | None = None
    last_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.last_tokens is not None and self.last_tokens < 1:
            raise ValueError(f"last_tokens must be at least 1, not {self.last_tokens}")
        if isinstance(self.sigma, str):
            if self.sigma != "auto":
                raise ValueError(f"sigma must be a number, None or 'auto', not '{self.sigma}'")
            if self.baseline == "none":
                raise ValueError(
                    'sigma="auto" needs directional derivatives: use baseline="clean" or '
                    '"antithetic"'
                )
        elif self.sigma is not None and not 0 < self.sigma < float("inf"):
            raise ValueError(f"sigma must be positive and finite, not {self.sigma}")
        for value, allowed in (
            (self.targets, get_args(Targets)),
            (self.baseline, get_args(Baseline)),
            (self.noise, KINDS),
        ):
            if value not in allowed:
                raise ValueError(f"'{value}' is not one of {list(allowed)}")
        if self.shaping is not None and self.baseline == "none":
            raise ValueError(
                'shaping needs directional derivatives: use baseline="clean" or "antithetic"'
            )
        if self.shaping is not None and self.shaping.unbiased and self.noise == "orthogonal":
            raise ValueError("unbiased shaping needs independent draws, not orthogonal ones")

    @property
    def unit(self) -> int:
        """Queries per draw."""
        return 2 if self.baseline == "antithetic" else 1

    @property
    def reads_outputs(self) -> bool:
        """Shaped noise learns from all outputs."""
        return self.shaping is not None and self.shaping.outputs

    def check(self, selection: Selection) -> None:
        """Raise for bare parameters: LR perturbs outputs of modules."""
        if not selection.modules:
            raise CoverageError(
                f"group '{selection.name}': LikelihoodRatio perturbs the outputs of modules; give "
                "modules as targets, or use SPSA or ES for bare parameters"
            )

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> Sites:
        """Find the noise sites and the local VJPs of the group."""
        canonical = {id(module): name for name, module in passes.modules.items()}
        modules = dict(selection.modules)
        if self.targets == "leaf":
            split = [leaves(name, module) for name, module in modules.items()]
            modules = {canonical[id(m)]: m for part in split for m in part.values()}
        calls = {name: passes.structure.of(name) for name in modules}
        for name, found in calls.items():
            if not found:
                raise CoverageError(
                    f"target '{name}' of group '{selection.name}' never runs in the forward pass "
                    "(or only for some data); give the module around it"
                )
        if self.targets == "stage":
            local = [stage_target(selection.name, modules, calls, passes.structure)]
        else:
            local = [
                LocalTarget(name, call.number, call.number, trainable(modules[name]))
                for name, found in calls.items()
                for call in found
            ]
        local.sort(key=lambda t: passes.structure.calls[t.last].end)
        sites = Sites(selection.name, modules, tuple(local), passes, reuse, self.last_tokens)
        check_foreign(sites)
        return sites

    def verify(self, binding: Sites, passes: Passes) -> None:
        """The targets' parameters must act only through the perturbed outputs, row by row."""
        check_shared_outputs(binding, passes)
        check_bypass(binding, passes)

    def begin(self, binding: Sites, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step."""
        mask = runner.passes.batch.named("attention_mask") if self.last_tokens is not None else None
        if mask is not None and not bool(mask[:, -1].all()):
            raise BatchError(
                f"group '{queries.name}': last_tokens perturbs the last positions, which are "
                "padding in some rows; pad on the left: tokenizer.padding_side = 'left'"
            )
        if self.sigma == "auto":
            found, search = chosen(queries.memory, queries.key[1])
            now = found or default_sigma(binding.dtype)
            begin = partial(self._begin, binding, queries, runner)
            if not search:
                return begin(now)
            options, first = replace(self, sigma=now), found is None
            return SigmaSearch(options, binding, queries, first, begin, runner.replicas)
        sigma = self.sigma or default_sigma(binding.dtype)
        _warn_if_lost(sigma, binding.dtype, queries)
        return self._begin(binding, queries, runner, sigma)

    def _begin(self, binding: Sites, queries: Queries, runner: Runner, sigma: float) -> Estimation:
        options = replace(self, sigma=sigma)
        if self.shaping is not None:
            return ShapedActivations(options, self.shaping, binding, queries, runner)
        return _Isotropic(options, binding, queries, runner)

    @property
    def scale(self) -> float:
        """Sigma, after it was chosen."""
        assert self.sigma is not None
        assert not isinstance(self.sigma, str)
        return self.sigma

    def derivatives(self, losses: Tensor, clean: Tensor, dtype: torch.dtype) -> Tensor:
        """Directional derivative w = (l - b) / sigma of each draw; pairs are adjacent."""
        if self.baseline == "antithetic":
            return ((losses[0::2] - losses[1::2]) / 2).to(dtype) / self.scale
        return (losses - clean if self.baseline == "clean" else losses).to(dtype) / self.scale


def default_sigma(dtype: torch.dtype) -> float:
    """Noise scale for outputs of about unit size.

    In single precision 1e-3 is far above rounding and far below curvature. In half precision noise
    below a few units in the last place (ulp) is rounded away: 12 ulp are best on the bundled ViT
    (`python -m benchmarks half`).
    """
    return HALF_UNITS * torch.finfo(dtype).eps if dtype in HALF else 1e-3


def _warn_if_lost(sigma: float, dtype: torch.dtype, queries: Queries) -> None:
    """Warn, once per group, if the noise is rounded away."""
    eps = torch.finfo(dtype).eps
    if dtype in HALF and sigma < LEAST_UNITS * eps and not queries.memory.get("warned_of_sigma"):
        queries.memory["warned_of_sigma"] = True
        warnings.warn(
            f"group '{queries.name}': sigma={sigma:g} is {sigma / eps:.1f} units in the last place "
            f"of {dtype} outputs of size 1 ({eps:.1e} each), so most of the noise is rounded away; "
            f"use sigma={default_sigma(dtype):.2g}, or the default None",
            PrecisionWarning,
            stacklevel=users_frame(),
        )


class _Isotropic(Estimation):
    """delta is the mean over the draws of w z; then one local VJP of each target."""

    def __init__(
        self, options: LikelihoodRatio, binding: Sites, queries: Queries, runner: Runner
    ) -> None:
        self._options, self._binding, self._queries = options, binding, queries
        self.dtype = torch.promote_types(torch.float32, binding.dtype)
        self._device = binding.sites[0].leaf.device
        self._delta = torch.zeros(queries.size, binding.size, dtype=self.dtype, device=self._device)
        draws = (queries.counts // options.unit).tolist()
        self._stream = NoiseStream(
            options.noise, queries.key, queries.ids, draws, binding.size, self._device
        )
        # Lookups of many small sites would take longer than their rows.
        self._compact = len(binding.sites) <= FEW
        self._plan: PointPlan | None = PointPlan(queries.counts, options.unit)
        self._counts = self._plan
        self._repeat = runner.world_size > 1 and _repeat(binding, queries, runner)
        self.partial = not self._repeat
        self._z = torch.empty(0)
        self._derivatives, self._points = torch.empty(0), torch.empty(0)
        self._factors: float | Tensor = 0.0
        self._size = queries.size

    def plan(self) -> PointPlan | None:
        """One round."""
        plan, self._plan = self._plan, None
        return plan

    def ask(self, rows: Rows) -> Perturbation:
        """Noise on the outputs of the targets."""
        once = slice(None, None, self._options.unit)  # a pair shares its draw
        z = self._stream.buffered(rows.points[once], rows.draws[once], self._compact)
        self._z = z.to(self.dtype) if z.is_floating_point() else z  # (draws, size)
        with torch.inference_mode():
            edits = self._binding.edits(signed(self._z, self._options.unit), self._options.scale)
        return Perturbation(self._binding.query_prefix, edits=edits)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Add w z to the points' deltas."""
        once = slice(None, None, self._options.unit)
        clean = self._queries.losses[rows.points].cpu()
        w = self._options.derivatives(results.losses.cpu(), clean, self.dtype)
        weighted = rows.weights[once].to(self.dtype) * torch.where(torch.isnan(w), 0.0, w)
        accumulate(self._delta, rows.points[once], weighted, self._z)
        return w

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Keep the derivatives for the variance."""
        failed = bool(torch.isnan(values).any())  # rows of a black box
        arrived = Arrived.among(values, points, self._size) if failed else None
        if arrived is not None:
            self._delta *= arrived.ratio.to(self._delta).unsqueeze(1)
            values, points, self._size = values[arrived.draws], points[arrived.draws], arrived.size
        self._derivatives, self._points = values, points
        self._z = torch.empty(0)
        self._stream.forget()
        if self._options.baseline != "none" and len(values):
            differences = (values * self._options.scale).to(self._queries.losses.dtype)
            warn_if_rounding(self._queries, differences)
        if self._repeat:
            self._delta = runner.sum(self._delta)

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """The local VJPs of all targets."""
        binding, energies = self._binding, LeafEnergies(self._binding, self._queries.size, runner)
        if not energies.closed:  # before a hook may change a parameter
            self._factors = jacobian_energy(binding, self._queries, runner)
        own = None if self._repeat else runner.own_points(self._counts)
        deltas = binding.split(self._delta.mul_(scale / self._size))
        self._delta = torch.empty(0)
        runner.local_vjps(binding, deltas, sink, own, energies.see)
        if energies.closed:
            self._factors = runner.max(energies.total)

    def finish(self) -> Estimate:
        """Directional derivatives, and the factors of their variance."""
        directions = self._binding.size if self._options.noise == "orthogonal" else 0
        return Estimate(self._derivatives, self._points, self._factors, directions)


def accumulate(delta: Tensor, points: Tensor, weighted: Tensor, z: Tensor) -> None:
    """Add sum_i weight_i w_i z_i to the rows of delta, by one product: points are sorted."""
    first, last = int(points[0]), int(points[-1])
    matrix, whole = delta.new_zeros(last - first + 1, len(points)), z.size(1)
    places = (points - first).to(delta.device).unsqueeze(0)
    matrix.scatter_(0, places, weighted.to(delta).unsqueeze(0))
    step = whole if z.is_floating_point() else PIECE
    for begin in range(0, whole, step):
        part = values(z, begin, min(begin + step, whole)).to(delta)
        delta[first : last + 1, begin : begin + step].addmm_(matrix, part)


def _repeat(binding: Sites, queries: Queries, runner: Runner) -> bool:
    """Whether ranks exchange deltas and repeat all local VJPs, rather than exchange gradients.

    The smaller of the two is communicated, but expensive VJPs are never repeated.
    """
    parameters = dict.fromkeys(p for target in binding.local for p in target.parameters)
    smaller = queries.size * binding.size < sum(p.numel() for p in parameters)
    return smaller and runner.local_share(binding) <= CHEAP
