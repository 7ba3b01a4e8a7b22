"""Forward gradient: exact directional derivatives by forward-mode differentiation (JVP).

Baydin et al., "Gradients without backpropagation", 2022; Silver et al., "Learning by directional
gradient descent", 2022. With n directions v_i ~ N(0, I) on all parameters, shared by the batch,

    g = (1/n) sum_i (grad l . v_i) v_i,

an unbiased estimate of the gradient. The derivative is a Jacobian-vector product: parameters carry
their tangent v through the model (dual numbers), so there is no sigma, no rounding of differences
and no activation to store. That needs a white box: every operator must be torch's, with a forward
derivative, and parameters must be read as attributes of their modules.

A pass is charged as three: beside each product x W of the forward pass it makes dx W and x dW,
as many as backpropagation.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flops.errors import CoverageError
from flops.estimators.base import (
    Estimation,
    Estimator,
    Perturbation,
    Queries,
    RowResults,
    Rows,
    Runner,
)
from flops.estimators.shared_parameters import SharedDraws, mean_losses
from flops.passes.batch import check_finite
from flops.passes.flop_count import UseMeter
from flops.passes.replay import Action, Forward, Passes, empty_prefix
from flops.passes.selection import Selection
from flops.passes.structure import FEW
from flops.perturb.draws import gathered
from flops.perturb.parameter_calls import CalledModule, ParameterCalls, find_parameter_calls
from flops.perturb.random import SharedKind

WORK = 3.0  # forward passes of a pass with tangents
QUERIES = 1


@dataclass(frozen=True)
class JVP(Estimator):
    """g = mean over draws of (grad l . v) v; a query is one pass with tangents, charged as three.

    Memory is that of inference with activations twice, and noise of one module at a time. Attention
    runs by its plain formula, for fused kernels have no forward derivative.

    Args:
        noise: "gaussian" or "rademacher".
    """

    noise: SharedKind = "gaussian"

    shared = True
    has_sigma = False
    work = WORK
    reads_clean = False
    seeded = True

    def __post_init__(self) -> None:
        """Check the options."""
        if self.noise not in ("gaussian", "rademacher"):
            raise ValueError(f"'{self.noise}' is not one of ['gaussian', 'rademacher']")

    def bind(self, selection: Selection, passes: Passes, reuse: bool) -> ParameterCalls:
        """Find the calls during which the parameters have tangents."""
        return find_parameter_calls(selection, passes, reuse)

    def verify(self, binding: ParameterCalls, passes: Passes) -> None:
        """Every operator must have a forward derivative, and every read must see a tangent."""
        around: dict[int, Action] = {}
        for called in binding.modules:
            lifted = _lifted(called, torch.ones_like)
            around.update(dict.fromkeys(called.calls, _watched(called, lifted)))
        whole, rows = empty_prefix(passes.structure), passes.structure.rows[:FEW]
        passes.trial_cost += WORK * FEW
        with torch.no_grad():
            _differentiate(lambda: passes.run(whole, {}, rows, around=around))

    def begin(self, binding: ParameterCalls, queries: Queries, runner: Runner) -> Estimation:
        """One group's part of a step."""
        return _Tangents(self.noise, binding, queries)


class _Tangents(SharedDraws):
    """Tangents of all points' losses under each draw."""

    def __init__(self, noise: SharedKind, calls: ParameterCalls, queries: Queries) -> None:
        super().__init__(noise, calls, queries)
        self._total = 0.0  # of the losses that ran here

    def ask(self, rows: Rows) -> Perturbation:
        """Every parameter with its part of one draw as a tangent."""
        draw = int(rows.draws[0])
        around: dict[int, Action] = {}
        for called in self._calls.modules:
            lifted = _lifted(called, lambda p: gathered(p, self._pieces(p, draw)))
            around.update(dict.fromkeys(called.calls, lifted))
        return Perturbation(self._prefix, around=around, evaluate=_differentiate)

    def tell(self, rows: Rows, results: RowResults) -> Tensor:
        """Directional derivatives of the points."""
        assert results.outputs is not None
        self._total += float(results.losses.sum(dtype=torch.float64))
        return results.outputs.flatten().cpu()

    def collect(self, values: Tensor, points: Tensor, runner: Runner) -> None:
        """One derivative per draw: the mean over the batch."""
        check_finite(values, f"the directional derivatives of group '{self._queries.name}'", points)
        by_pass, replicas = values.view(-1, self._queries.size), runner.replicas
        self._derivatives, _ = mean_losses(by_pass, self._queries, replicas)
        total = runner.sum(torch.tensor([self._total], dtype=torch.float64))
        self._loss = float(replicas.sum([total])[0]) / (len(by_pass) * replicas.total)


@cache
def _load_derivatives() -> None:
    """Import torch's own forward derivatives, which it does with a deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def _differentiate(run: Callable[[], Tensor]) -> RowResults:
    """Losses of a pass, and their tangents."""
    _load_derivatives()
    try:
        with torch.inference_mode(False), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            losses, tangents = forward_ad.unpack_dual(run())
            if tangents is None:
                raise CoverageError(
                    "the loss does not depend differentiably on the parameters of a group with JVP "
                    "(the model detaches, or runs outside torch); use LikelihoodRatio, SPSA or FZOO"
                )
            return RowResults(losses.clone(), tangents.clone().unsqueeze(1))
    except NotImplementedError as error:
        found = re.search(r"forward AD with (\S+) that does not support it", str(error))
        if found is None and "jvp function" not in str(error):
            raise
        operator = f"the operator {found[1]}" if found else "a custom autograd.Function"
        raise CoverageError(
            f"{operator} has no forward derivative (torch {torch.__version__}), so JVP cannot "
            "differentiate this model; use LikelihoodRatio, SPSA or FZOO"
        ) from error


def _lifted(called: CalledModule, tangent: Callable[[nn.Parameter], Tensor]) -> Action:
    """Parameters of a module are dual numbers while it runs."""
    slots = list(_slots(called))

    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        duals: dict[nn.Parameter, Tensor] = {}
        for path, p in called.parameters.items():
            direction = tangent(p).to(p.dtype)
            if path in called.padding:
                direction[called.padding[path]] = 0
            duals[p] = forward_ad.make_dual(p.detach(), direction)
        with called.clean_padding():
            lists = _lists(called)
            try:
                for held, name, p in slots:
                    held[name] = duals[p]
                return forward(*args, **kwargs)
            finally:
                for held, name, before in [*slots, *lists]:
                    held[name] = before

    return action


def _slots(called: CalledModule) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Where a called module holds its parameters: the dict of each, and the name in it."""
    wanted = set(called.parameters.values())
    for module in called.module.modules():
        held: dict[str, Any] = module._parameters
        yield from ((held, name, p) for name, p in held.items() if p in wanted)


def _lists(called: CalledModule) -> list[tuple[dict[str, Any], str, Any]]:
    """Lists of parameters that recurrent layers make anew when they see other ones."""
    names = ("_flat_weights", "_flat_weight_refs")
    layers = [m.__dict__ for m in called.module.modules() if isinstance(m, nn.RNNBase)]
    return [(held, name, held[name]) for held in layers for name in names if name in held]


def _watched(called: CalledModule, lifted: Action) -> Action:
    """Refuses to read a parameter past its dual number, which would miss the tangent."""
    names = {id(p): path for path, p in called.parameters.items()}

    def refuse(parameter: int) -> None:
        raise CoverageError(
            f"module '{called.name or 'model'}' reads its parameter '{names[parameter]}' by a "
            "reference of its own, not as an attribute of a module, so JVP cannot give it a "
            "tangent; use SPSA or FZOO"
        )

    def action(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with UseMeter(names, refuse):
                return forward(*args, **kwargs)

        return lifted(watched, args, kwargs)

    return action
