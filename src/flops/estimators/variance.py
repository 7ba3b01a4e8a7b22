"""Variance of an estimate from directional derivatives.

One draw of point j has the covariance trace

    Tr_j = mean_i w_ij^2 * F_j   (plus a small term),

with the directional derivatives w and a factor F_j: |D_theta phi(x_j)|_F^2 for likelihood ratio,
the number of perturbed parameters for ES and SPSA. The batch gradient's variance is then V =
(1/B^2) sum_j Tr_j / n_j for n_j draws.

F_j has a closed form for common leaves (for a Linear's weight d_out * sum_t |x_t|^2; the bias adds
d_out per token). For a block or stage it is one number for all points, from a random local VJP; it
varies little over the points and slowly over the steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.allocators.base import Traces
from flops.errors import PrecisionWarning
from flops.estimators.base import Estimate, Queries, Runner
from flops.passes.local_vjp import Gradients, LocalTarget, add_gradients, inner
from flops.perturb.activations import Sites
from flops.perturb.draws import Draws
from flops.perturb.random import NoiseStream

ENERGY_STEPS = 8
ROUNDING_UNITS = 50
CLOSED_FORMS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv1d, nn.Conv2d)


class Collected:
    """A sink that sums gradients."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient."""
        add_gradients(self.gradients, {parameter: gradient})

    def add_draws(self, draws: Draws) -> None:
        """Add a gradient given as keys and scalars."""
        for parameter, gradient, _ in draws.gradients():
            self.add(parameter, gradient)

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """No-op."""


class Energy(Collected):
    """A sink that only keeps the squared norm of complete gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def complete(self, parameters: Sequence[nn.Parameter], after: int | None = None) -> None:
        """Add their squared norms, and free them."""
        for parameter in parameters:
            if parameter in self.gradients:
                self.total += energy({parameter: self.gradients.pop(parameter)})


class LeafEnergies:
    """Collects F_j = sum over targets of |D_theta phi(x_j)|_F^2 during the local VJPs."""

    def __init__(self, sites: Sites, size: int, runner: Runner) -> None:
        modules, calls = runner.passes.modules, sites.structure.calls
        self._modules = {t.last: modules[calls[t.last].name] for t in sites.local}
        self.total = torch.zeros(size, dtype=torch.float64)
        self.closed = all(
            t.first == t.last
            and type(self._modules[t.last]) in CLOSED_FORMS
            and calls[t.last].inputs[0].axis == 0
            for t in sites.local
        )

    def see(self, points: Tensor, target: LocalTarget, given: Any) -> None:
        """Add the energies of one target for these points."""
        if self.closed:
            args, kwargs = given
            x = args[0] if args else next(iter(kwargs.values()))
            found = leaf_energy(self._modules[target.last], x)
            self.total[points] += found.double().cpu()


def leaf_energy(module: nn.Module, x: Tensor) -> Tensor:
    """|D_theta phi(x)|_F^2 of each row, for the trainable parameters of a leaf, shape (rows,)."""
    weight: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    # Squares overflow in half precision from 256 on.
    wide = torch.promote_types(torch.float32, x.dtype) if x.is_floating_point() else x.dtype
    x = x.detach().to(wide)
    rows, squares = len(x), x
    if isinstance(module, nn.Linear):
        outputs = x[0].numel() // module.in_features * module.out_features
        squares = squares.square().flatten(1).sum(1) * module.out_features
    elif isinstance(module, nn.LayerNorm):
        normal = F.layer_norm(squares, tuple(module.normalized_shape), eps=module.eps)
        outputs, squares = normal[0].numel(), normal.square().flatten(1).sum(1)
    elif isinstance(module, nn.Embedding):
        used = squares != (-1 if module.padding_idx is None else module.padding_idx)
        outputs, squares = 0, used.view(rows, -1).sum(1).float() * module.embedding_dim
    else:
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        ones = torch.ones(module.groups, *weight.shape[1:], dtype=x.dtype, device=x.device)
        if module.padding_mode != "zeros":
            padded: Any = module._reversed_padding_repeated_twice
            squares = F.pad(squares, padded, mode=module.padding_mode)
        padding: Any = module.padding if module.padding_mode == "zeros" else 0
        convolve: Any = F.conv1d if isinstance(module, nn.Conv1d) else F.conv2d
        patches = convolve(
            squares.square(), ones, None, module.stride, padding, module.dilation, module.groups
        )
        outputs = patches[0, 0].numel() * module.out_channels
        squares = patches.flatten(1).sum(1) * (module.out_channels // module.groups)
    total = squares if weight is not None and weight.requires_grad else torch.zeros(rows)
    return total + outputs if bias is not None and bias.requires_grad else total


def jacobian_energy(sites: Sites, queries: Queries, runner: Runner) -> float:
    """Mean over points of |D_theta phi|_F^2, by random local VJPs.

    For independent signs u_j, E |sum_j D_j^T u_j|^2 = sum_j |D_j|_F^2. One VJP is noisy, so each of
    a group's first steps makes one, and their mean is kept.
    """
    total, count = queries.memory.get("jacobian_energy", (0.0, 0))
    if count < ENERGY_STEPS:
        own = runner.share(queries.size)
        deltas = sites.split(_signs(sites, queries, *own))
        # Partial gradients are summed over the ranks before their norm is taken.
        replicas = runner.replicas
        alone = runner.world_size == 1 and not replicas.several
        found = Energy() if alone else Collected()
        runner.local_vjps(sites, deltas, found, own)
        if isinstance(found, Energy):
            now = found.total
        else:
            parameters = list(dict.fromkeys(p for t in sites.local for p in t.parameters))
            whole = runner.sum_gradients(found.gradients, parameters)
            now = energy(replicas.sum_gradients(whole, parameters))
        total, count = total + now / replicas.total, count + 1
        queries.memory["jacobian_energy"] = (total, count)
    return float(total / count)


def _signs(sites: Sites, queries: Queries, first: int, last: int) -> Tensor:
    """Independent signs for points first, ..., last - 1, and zeros for the others."""
    ones, device = [1] * queries.size, sites.sites[0].leaf.device
    key = (*queries.key, -1)
    stream = NoiseStream("rademacher", key, queries.ids, ones, sites.size, device)
    points = torch.arange(first, last)
    found = stream.rows(points, torch.zeros_like(points))
    if len(found) == queries.size:
        return found
    signs = found.new_zeros(queries.size, sites.size)
    signs[first:last] = found
    return signs


def mean_by_point(values: Tensor, points: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean of the values of each point (0 without any), and their number."""
    counts = torch.zeros(size, dtype=values.dtype).index_add_(0, points, torch.ones_like(values))
    sums = torch.zeros(size, dtype=values.dtype).index_add_(0, points, values)
    return sums / counts.clamp(min=1), counts


def traces_of(estimate: Estimate, size: int) -> Traces:
    """Tr_j of every point from the directional derivatives of its draws."""
    assert estimate.points is not None
    squares, draws = mean_by_point(estimate.derivatives.double().square(), estimate.points, size)
    if estimate.shaped is not None:  # derivatives along known directions are biased
        squares = estimate.shaped.energy.double()
    return Traces(squares * torch.as_tensor(estimate.factors).double(), draws)


def variance(estimate: Estimate, size: int) -> float:
    """V, the trace of the batch gradient's covariance; under shaped noise, its squared error."""
    if len(estimate.derivatives) == 0:
        return 0.0
    if estimate.points is None:  # shared draws
        squares = estimate.derivatives.double().square()
        return float(squares.mean()) * float(estimate.factors) / len(squares)
    if estimate.shaped is not None:
        errors = estimate.shaped.error.double() / estimate.shaped.dimensions
        return float((errors * torch.as_tensor(estimate.factors)).sum()) / size**2
    traces = traces_of(estimate, size)
    n = traces.draws.clamp(min=1)
    per_point = traces.values / n
    if estimate.directions > 1:  # orthogonal draws: full blocks are exact, the rest is sampled
        d = float(estimate.directions)
        rest = traces.draws % d
        per_point = traces.values * rest / n.square() * (d - rest) / (d - 1)
    return float(per_point.sum()) / size**2


def energy(gradients: Gradients) -> float:
    """|g|^2 over all parameters."""
    return sum(inner(g, g) for g in gradients.values())


def warn_if_rounding(
    queries: Queries, differences: Tensor, loss: float | None = None, what: str = "loss"
) -> None:
    """Warn, once per group, when loss differences are near the rounding of the loss itself.

    Not where sigma was searched for: a larger one would be worse.
    """
    if "sigma" in queries.memory:
        return
    changed = differences[differences != 0]  # an error rate changes rarely, and is not rounded
    differences = changed if len(changed) else differences
    if loss is None:
        loss = float(queries.losses.abs().median())
    unit = torch.finfo(differences.dtype).eps * max(1.0, abs(loss))
    median = float(differences.abs().median())
    if median < ROUNDING_UNITS * unit and not queries.memory.get("warned_of_rounding"):
        queries.memory["warned_of_rounding"] = True
        nothing = " (or the loss does not depend on this group)" if median == 0 else ""
        warnings.warn(
            f"group '{queries.name}': the median {what} difference {median:.1e} is under "
            f"{ROUNDING_UNITS} rounding units ({unit:.1e} each): rounding affects the "
            f"directional derivatives of easy points; raise sigma{nothing}, or see "
            "`flops.diagnose`",
            PrecisionWarning,
            stacklevel=users_frame(),
        )


def users_frame() -> int:
    """``stacklevel`` of the user's code, for warnings."""
    level, frame = 1, sys._getframe(1)
    ours = ("flops.", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        level, frame = level + 1, frame.f_back
    return level
