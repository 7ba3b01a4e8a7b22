"""Noise on parameters: the common part of ES, SPSA, MeZO and n-SPSA.

The paper's equation 2 for z ~ N(0, sigma^2 I) added to the parameters:

    g = (1/B) sum_j (1/A_j) sum_i (l_ij - b_j) z_ij / sigma^2

Draws are per point (here; shaped ones in `shaped_parameters`), or shared (`shared_parameters`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flops.errors import CoverageError
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
from flops.estimators.shaped_parameters import ShapedParameters, check_size
from flops.estimators.shared_parameters import SharedEstimation
from flops.estimators.variance import warn_if_rounding
from flops.passes.replay import Action, Forward, Passes
from flops.passes.selection import Selection
from flops.passes.structure import Call, Structure
from flops.perturb.draws import Noise
from flops.perturb.parameter_calls import CalledModule, Entry, ParameterCalls, find_parameter_calls
from flops.perturb.random import Kind, NoiseStream, SharedKind
from flops.perturb.rowwise import (
    RowNoise,
    batch_first,
    is_rank_one,
    rowwise_product_of,
    rowwise_products,
    used_tokens,
)
from flops.subspace.config import Shaping

Baseline = Literal["clean", "antithetic", "none"]


@dataclass(frozen=True)
class ParameterNoise(Estimator):
    """Common options of ES and SPSA.

    Args:
        sigma: Noise scale.
        shared: One draw for the whole batch (as in MeZO) instead of per-point draws. The points'
            errors are then correlated, so counts must be equal.
        noise: Noise of shared draws, "gaussian" or "rademacher". Per-point draws are signs, of
            rank one for matrices.
        shaping: `Shaping()` concentrates noise in the learned subspace, for groups of few
            parameters (prompts, adapters) with per-point draws; None is isotropic.
    """

    sigma: float = 1e-3
    shared: bool = False
    noise: SharedKind = "gaussian"
    shaping: Shaping | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.sigma > 0:
            raise ValueError(f"sigma must be positive, not {self.sigma}")
        if self.noise not in ("gaussian", "rademacher"):
            raise ValueError(f"'{self.noise}' is not one of ['gaussian', 'rademacher']")
        if self.shaping is not None and self.shared:
            raise ValueError("shaping needs per-point draws: use shared=False")

    @property
    @abstractmethod
    def used_baseline(self) -> Baseline:
        """The baseline of a draw."""

    @property
    def _isotropic(self) -> Kind:
        """Distribution of the isotropic draws among shaped ones."""
        return self.noise

    @property
    def unit(self) -> int:
        """Queries per draw."""
        return 2 if self.used_baseline == "antithetic" else 1

    @property
    def reads_clean(self) -> bool:
        """Shared antithetic pairs need no clean loss."""
        return not (self.shared and self.used_baseline == "antithetic")

    @property
    def seeded(self) -> bool:
        """Whether draws are shared."""
        return self.shared

    @property
    def shared_noise(self) -> Noise:
        """Noise of shared draws."""
        return self.noise

    @property
    def kind(self) -> Kind:
        """Distribution of per-point draws."""
        return self._isotropic if self.shaping is not None else "rademacher"

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> ParameterCalls:
        """Find the calls during which parameters are perturbed."""
        rowwise = () if self.shared else tuple(rowwise_products())
        calls = find_parameter_calls(selection, passes, reuse, rowwise)
        if self.shaping is not None:
            check_size(selection.name, calls)
        return calls

    def verify(self, binding: ParameterCalls, passes: Passes) -> None:
        """Tables that all points share must broadcast over the rows, independently."""
        if not self.shared:
            _check_rows(binding, passes)

    def begin(self, binding: ParameterCalls, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step."""
        if self.shaping is not None:
            return ShapedParameters(self, self.shaping, binding, queries, runner)
        if self.shared:
            return SharedEstimation(self, binding, queries)
        return _Pointwise(self, binding, queries)

    def derivatives(self, losses: Tensor, clean: Tensor) -> Tensor:
        """Directional derivative w = (l - b) / sigma of each draw; pairs are adjacent."""
        if self.used_baseline == "antithetic":
            return (losses[0::2] - losses[1::2]) / (2 * self.sigma)
        return (losses - (clean if self.used_baseline == "clean" else 0.0)) / self.sigma

    def scale(self, losses: Tensor) -> float:
        """Of a gradient by shared draws, given the mean loss of each query."""
        return 1.0

    def warn(self, queries: Queries, derivatives: Tensor, loss: float | None = None) -> None:
        """Warn if the loss differences of these derivatives are dominated by rounding."""
        if self.used_baseline != "none":
            warn_if_rounding(queries, (derivatives * self.sigma).to(queries.losses.dtype), loss)


def _layout(calls: ParameterCalls) -> tuple[list[Entry], int]:
    entries, offset = [], 0
    for called in calls.modules:
        for path, parameter in called.parameters.items():
            out, rest = parameter.numel(), 0
            if is_rank_one(called.module, parameter):
                out, rest = parameter.size(0), parameter[0].numel()
            entries.append(Entry(called, path, parameter, offset, out, rest))
            offset += out + rest
    return entries, offset


class _Pointwise(Estimation):
    """The sum of w z is accumulated over chunks; rank-one noise is never materialised."""

    partial = True

    def __init__(self, options: ParameterNoise, calls: ParameterCalls, queries: Queries) -> None:
        self._options, self._calls, self._queries = options, calls, queries
        self._entries, size = _layout(calls)
        self.dtype = torch.promote_types(torch.float32, self._entries[0].parameter.dtype)
        self._device = self._entries[0].parameter.device
        self._gradients = {
            e.parameter: torch.zeros(e.parameter.shape, dtype=self.dtype, device=e.parameter.device)
            for e in self._entries
        }
        draws = (queries.counts // options.unit).tolist()
        self._stream = NoiseStream(
            "rademacher", queries.key, queries.ids, draws, size, self._device
        )
        self._plan: PointPlan | None = PointPlan(queries.counts, options.unit)
        self._sizes = torch.full((queries.size,), float(calls.size))
        self._z, self._seen = torch.empty(0), dict[str, Tensor]()
        self._derivatives, self._points = torch.empty(0), torch.empty(0)

    def plan(self) -> PointPlan | None:
        """One round."""
        plan, self._plan = self._plan, None
        return plan

    def ask(self, rows: Rows) -> Perturbation:
        """Signs on the parameters of every row, by row-wise products."""
        once, unit = slice(None, None, self._options.unit), self._options.unit
        z = self._stream.buffered(rows.points[once], rows.draws[once])
        self._z, self._seen = z.to(self._device, self.dtype), {}  # (draws, size)
        scale = (self._options.sigma * rows.signs).to(self._z).unsqueeze(1)  # (R, 1)
        noisy = self._z.repeat_interleave(unit, 0) if unit > 1 else self._z
        structure = self._calls.structure
        around = _perturb_rows(structure, self._entries, noisy, self._seen, scale)
        return Perturbation(self._calls.prefix, around=around)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Add w z to the gradients."""
        once = slice(None, None, self._options.unit)
        at, clean = rows.points[once], self._queries.losses[rows.points].cpu()
        w = self._options.derivatives(results.losses.cpu(), clean).to(self.dtype)
        weighted = rows.weights[once].to(self.dtype) * w / self._queries.size
        self._sizes[at] = float(self._calls.size)
        for entry in self._entries:
            used = self._seen.get(entry.called.name)
            if used is not None:  # the rest of the table is not part of the estimate
                used = used[once]
                read = entry.rest * used.sum(1, dtype=torch.float32).cpu()
                self._sizes[at] += read - entry.called.size(entry.path)
            total = self._gradients[entry.parameter]
            _add(total, entry, self._z, weighted.to(self._device), used)
        return w

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """Keep the derivatives for the variance."""
        self._derivatives, self._points, self._z = values, points, torch.empty(0)
        self._stream.forget()
        self._sizes = -runner.max(-self._sizes)  # tokens of a row are known where it ran
        self._options.warn(self._queries, values)

    def write(self, sink: Sink, runner: Runner, scale: float = 1.0) -> None:
        """Parameter by parameter."""
        while self._gradients:
            parameter = next(iter(self._gradients))
            gradient = self._gradients.pop(parameter)
            sink.add(parameter, gradient if scale == 1 else gradient.mul_(scale))
            sink.complete([parameter])

    def finish(self) -> Estimate:
        """Directional derivatives, and the number of perturbed values of each point."""
        return Estimate(self._derivatives, self._points, self._sizes)


def _perturb_rows(
    structure: Structure,
    entries: list[Entry],
    noise: Tensor,
    seen: dict[str, Tensor],
    scale: Tensor | float = 1.0,
) -> dict[int, Action]:
    around: dict[int, Action] = {}
    for called in {entry.called.name: entry.called for entry in entries}.values():
        parts = {e.path: e.noise(noise, scale) for e in entries if e.called is called}
        for number in called.calls:
            around[number] = _rowwise_action(called, structure.calls[number], parts, seen)
    return around


def _rowwise_action(
    called: CalledModule, call: Call, parts: RowNoise, seen: dict[str, Tensor]
) -> Action:
    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(called.module) is nn.Embedding:
            a, _ = parts["weight"]
            mask = used_tokens(called.module, batch_first(args, kwargs, len(a), call)).to(a)
            seen[called.name] = torch.maximum(seen.get(called.name, mask), mask)
        with called.clean_padding():
            return rowwise_product_of(called.module)(
                called.module, forward, args, kwargs, parts, call
            )

    return action


def _check_rows(calls: ParameterCalls, passes: Passes) -> None:
    """Tables that all points share must broadcast over the rows, independently."""
    recorded = [
        calls.structure.calls[number] for called in calls.modules for number in called.calls
    ]
    tables = {c.name for c in recorded if any(leaf.axis is None for _, leaf in c.tensors)}
    entries, size = _layout(calls)
    device = entries[0].parameter.device

    def perturb(scale: Tensor) -> dict[str, Any]:
        signs = NoiseStream("rademacher", (), [0], [len(scale)], size, device)
        noise = signs.take(0, 0, len(scale)) * scale.to(device).unsqueeze(1)
        return {"around": _perturb_rows(calls.structure, entries, noise / 10, {})}

    if tables and not passes.rows_are_independent(perturb):
        raise CoverageError(
            f"the output of {sorted(tables)} has no batch axis, and the model does "
            "not broadcast over one, so it cannot be perturbed point by point; use shared=True"
        )


def _add(total: Tensor, entry: Entry, z: Tensor, weighted: Tensor, used: Tensor | None) -> None:
    noise = entry.cut(z)
    if not entry.rest:
        total.view(-1).add_(weighted.to(noise) @ noise)
        return
    a, b = noise
    if used is not None:
        a = a * used
    total.view(entry.out, entry.rest).addmm_((a * weighted.to(a).unsqueeze(1)).T, b)
